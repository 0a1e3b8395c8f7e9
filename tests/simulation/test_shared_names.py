"""Three nodes do random things to the same few names, in virtual time, over a store that loses answers; some are islands at times (N1, P1),
and some commits are applied after they have failed.

Afterwards the store holds a tree (every name leads somewhere, links are right, no loops), all nodes show that tree, and no file is gone
that nobody deleted.
"""

import contextlib
import random
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from memory_store import MemoryEtcd
from shared_catalogs import Node, Slow, replayed, running, settled, start_on, stored, stored_tree
from shared_sets import keep, read_history, separate

from ckptfs.catalog import namespace
from ckptfs.catalog.inodes import get
from ckptfs.coherence.keys import SharedKey, Value
from ckptfs.errors import CkptfsError
from ckptfs.model import Inode

NODES = 3
CLOCKS_OFF_S = (0.0, 3600.0, -86_400.0)
WORKERS = 2
NAMES = {0.0: "abcd", 0.02: "abcdefgh", 0.04: "abcdefgh"}


class World:
    """What was made, and what may have been deleted: with islands or links every removal counts, another node may remove the other name."""

    def __init__(self, seed: int, islands: float, keeps: bool = False) -> None:
        self.keeps = keeps
        self.dice = random.Random(seed)
        self.islands = islands
        self.made: set[int] = set()
        self.removed: set[int] = set()
        self.linked: set[int] = set()

    def path(self) -> str:
        return "/".join(self.dice.choice(NAMES[self.islands]) for _ in range(self.dice.choice([1, 1, 2, 2, 3])))

    def gone(self, inode: Inode | None) -> None:
        if inode is not None and (inode.nlink == 0 or self.islands or inode.id in self.linked):
            self.removed.add(inode.id)

    async def step(self, node: Node) -> None:
        """One thing that an application does; that it fails is nothing strange."""
        acts: list[Callable[[], Awaitable[None]]] = [
            lambda: self._make(node), lambda: self._make(node), lambda: self._make(node), lambda: self._directory(node),
            lambda: self._directory(node), lambda: self._unlink(node), lambda: self._rmdir(node), lambda: self._rename(node),
            lambda: self._rename(node), lambda: self._link(node), lambda: self._change(node), lambda: self._list(node),
            lambda: self._rename(node, namespace.EXCHANGE),
        ]  # fmt: skip
        if self.keeps:
            acts += [lambda: self._keep(node), lambda: self._keep(node), lambda: self._separate(node)]
        with contextlib.suppress(OSError, CkptfsError):
            await self.dice.choice(acts)()

    async def _make(self, node: Node) -> None:
        self.made.add((await node.make(self.path())).id)

    async def _directory(self, node: Node) -> None:
        await node.mkdir(self.path())

    async def _unlink(self, node: Node) -> None:
        self.gone(await node.unlink(self.path()))

    async def _rmdir(self, node: Node) -> None:
        await node.rmdir(self.path())

    async def _rename(self, node: Node, flags: int = 0) -> None:
        self.gone(await node.rename(self.path(), self.path(), flags))

    async def _link(self, node: Node) -> None:
        self.linked.add((await node.link(self.path(), self.path())).id)

    async def _keep(self, node: Node) -> None:
        name = self.dice.choice("abcd")
        self.linked.add((await node.stat(name)).id)
        await keep(node, name, number=self.dice.randrange(1, 10))

    async def _separate(self, node: Node) -> None:
        await separate(node, self.path())

    async def _change(self, node: Node) -> None:
        if self.dice.random() < 0.5:
            await node.set(self.path(), mode=self.dice.choice([0o600, 0o644, 0o755]))
        else:
            await node.grow(self.path(), self.dice.randrange(1000), self.dice.randrange(10**9))

    async def _list(self, node: Node) -> None:
        await node.names()

    async def work(self, node: Node, steps: int) -> None:
        for _ in range(steps):
            await self.step(node)
            if self.islands:
                await trio.sleep(self.dice.uniform(0, 0.3))
                if self.dice.random() < self.islands:
                    node.cut(node.store.reachable)


def simulate(
    directory: Path, seed: int, steps: int, islands: float, late: float = 0.0, skewed: bool = False, keeps: bool = False
) -> tuple[dict[SharedKey, Value], int]:
    """What the store has in the end, and its revision."""
    etcd, world = MemoryEtcd(), World(seed, islands, keeps)

    async def main() -> None:
        stores = [Slow(etcd, random.Random(seed + number), loss=0.02, late=late) for number in range(NODES)]
        nodes = [Node(directory / str(number), number + 1, store) for number, store in enumerate(stores)]
        for node, off_s in zip(nodes, CLOCKS_OFF_S, strict=True) if skewed else ():
            node.clock_off_s = off_s

        async def act() -> None:
            async with trio.open_nursery() as nursery:
                for node in nodes * WORKERS:
                    start_on(nursery, node, world.work, node, steps)
            for node in nodes:
                node.cut(False)
                node.store.late = 0.0
            await settled(nodes)
            etcd.apply_late(all_of_them=True)
            there = stored_tree(etcd)
            for node in nodes:
                assert await node.tree() == there
            kept = [await read_history(node) for node in nodes]
            assert kept[0] == kept[1] == kept[2] and bool(kept[0]) == keeps
            for node, number in ((node, entry[0]) for node in nodes for entry in there.values() if stat.S_ISREG(entry[1])):
                assert get(node.db, number).history == list(kept[0].values()).count(number)
            files = {number for number, mode, _, _ in there.values() if not stat.S_ISDIR(mode)}
            assert world.made - world.removed <= files, "a file that nobody deleted is gone"

        await running(nodes, act)

    replayed(seed, main)
    return stored(etcd), etcd.revision


@pytest.mark.parametrize("seed", range(4))
def test_together(tmp_path: Path, seed: int) -> None:
    simulate(tmp_path, seed, steps=150, islands=0.0)


@pytest.mark.parametrize("seed", range(100, 106))
def test_with_islands(tmp_path: Path, seed: int) -> None:
    simulate(tmp_path, seed, steps=60, islands=0.04)


@pytest.mark.parametrize("seed", range(200, 206))
def test_with_late_commits(tmp_path: Path, seed: int) -> None:
    """Half of the seeds have clocks that are an hour and a day off."""
    simulate(tmp_path, seed, steps=60, islands=0.02, late=0.03, skewed=seed % 2 == 1)


@pytest.mark.parametrize("seed", range(300, 306))
def test_with_sets(tmp_path: Path, seed: int) -> None:
    """T6: sets are made and separated meanwhile, by all nodes at once."""
    simulate(tmp_path, seed, steps=60, islands=0.0 if seed % 2 else 0.02, keeps=True)


def test_nodes_that_make_directories_in_one_do_not_contend(tmp_path: Path) -> None:
    """Each rank makes its own: what that costs a node does not grow with their number."""
    etcd = MemoryEtcd()

    async def main() -> list[int]:
        nodes = [Node(tmp_path / str(number), number, Slow(etcd, random.Random(number))) for number in range(1, 13)]

        async def act() -> list[int]:
            await nodes[0].mkdir("step")
            await settled(nodes)
            before = [node.sharing.counts["conflicts"] for node in nodes]
            async with trio.open_nursery() as nursery:
                for node in nodes:
                    nursery.start_soon(node.mkdir, f"step/rank_{node.number}")
            await settled(nodes)
            assert await nodes[0].tree() == await nodes[-1].tree() == stored_tree(etcd)
            return [node.sharing.counts["conflicts"] - count for node, count in zip(nodes, before, strict=True)]

        return await running(nodes, act)

    assert replayed(1, main) == [0] * 12


def test_a_seed_replays(tmp_path: Path) -> None:
    """What it found once it finds again."""
    first, again, other = (simulate(tmp_path / str(run), seed, 30, 0.04) for run, seed in enumerate((7, 7, 8)))
    assert first == again != other
