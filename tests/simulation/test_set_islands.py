"""Checkpoint sets and islands (T6, P7, P5): nodes do random things to a few files of series, and are cut off from the store at times.

Files are created, replaced, renamed into a series, removed, and opened for writing for a while, also across the return of their node; sets
are made by the trackers, and removed. Afterwards all nodes show the same tree and the same sets, each set has the bytes of its manifest,
every file can be read on every node, and no file is gone that nobody removed.

`CKPTFS_SEED=N` plays one more seed, `CKPTFS_SEED=N-M` several.
"""

import contextlib
import errno
import json
import os
import random
import stat
from collections.abc import Awaitable, Callable

import pytest
import trio
from shared_catalogs import list_seeds, reconnect, stored
from simulated_cluster import SETTLE_S, SimulatedCluster, SimulatedNode
from simulated_mount import ROOT_USER, list_history, simulate, simulated

from ckptfs.catalog import history, history_names, inodes
from ckptfs.clique.peer_api import PeerFailed
from ckptfs.coherence.keys import CONTENT, INODE, SharedKey
from ckptfs.config.schema import RetentionRule
from ckptfs.digest import RunningDigest
from ckptfs.errors import CkptfsError
from ckptfs.model import ROOT, Tier
from ckptfs.series.search import SearchResult

FILES = ["step_1.bin", "step_2.bin", "step_3.bin", "run_1/a.bin", "run_1/b.bin"]
ACTS = 14
PAUSE_S_MAX = 10.0
OPEN_S_MAX = 30.0
AWAY_S_MAX = 40.0
ACT_S_MAX = 400.0
"""An open waits for a fetch, for a lease and for the store; it ends within this time."""


class World:
    """What happens in one seed, and which names programs removed."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster, self.dice = cluster, cluster.dice
        self.removed: set[str] = set()
        self.count = 0

    def data(self) -> bytes:
        self.count += 1
        return b"%08d" % self.count + self.dice.randbytes(self.dice.choice([100, 1000]))

    async def step(self, node: SimulatedNode) -> None:
        """One thing that an application does; that it fails is nothing strange, but it has to end."""
        acts: list[Callable[[SimulatedNode], Awaitable[None]]] = [
            self._create, self._create, self._replace, self._overwrite, self._overwrite, self._overwrite, self._overwrite,
            self._rename_while_open, self._unlink, self._read, self._remove_set, self._cut, self._cut, self._cut,
        ]  # fmt: skip
        with contextlib.suppress(OSError, CkptfsError), trio.fail_after(ACT_S_MAX):
            await self.dice.choice(acts)(node)

    async def _create(self, node: SimulatedNode, path: str = "") -> None:
        path = path or self.dice.choice(FILES)
        if "/" in path:
            await node.ensure_directory(path.partition("/")[0])
        await node.write(path, self.data())

    async def _replace(self, node: SimulatedNode) -> None:
        temporary = f"new_{node.number}_{self.count}"
        await self._create(node, temporary)
        await node.rename(temporary, self.dice.choice(FILES))

    async def _overwrite(self, node: SimulatedNode, path: str = "") -> None:
        flags = os.O_WRONLY | self.dice.choice([0, os.O_TRUNC])
        await node.mount.overwrite(path or self.dice.choice(FILES), self.data(), self.dice.uniform(0, OPEN_S_MAX), flags)

    async def _rename_while_open(self, node: SimulatedNode) -> None:
        """A program writes it under another name first."""
        temporary = f"part_{node.number}_{self.count}"
        await self._create(node, temporary)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._quietly, self._overwrite, node, temporary)
            await trio.sleep(self.dice.uniform(0, OPEN_S_MAX / 2))
            await self._quietly(node.rename, temporary, self.dice.choice(FILES))

    @staticmethod
    async def _quietly(act: Callable[..., Awaitable[object]], *arguments: object) -> None:
        with contextlib.suppress(OSError, CkptfsError):
            await act(*arguments)

    async def _unlink(self, node: SimulatedNode) -> None:
        path = self.dice.choice(FILES)
        self.removed.add(path)
        await node.unlink(path)

    async def _read(self, node: SimulatedNode) -> None:
        await node.mount.read(self.dice.choice(FILES))

    async def _remove_set(self, node: SimulatedNode) -> None:
        found = [one.directory for series in history.list_series(node.db) for one in history.list_sets(node.db, series.directory)]
        if found:
            await node.mount.tracker._maker.remove(self.dice.choice(found))

    async def _cut(self, node: SimulatedNode) -> None:
        """Peers may reach it all the same. It may be taken for dead."""
        if not node.store.reachable:
            return
        away_s = self.dice.uniform(1.0, AWAY_S_MAX)
        node.cut(True)
        self.cluster.cut |= self.dice.choice([set(), {node.name}])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._work, node, max(2, int(away_s / PAUSE_S_MAX)))
            await trio.sleep(away_s)
            self.cluster.cut -= {node.name}
            node.cut(False)

    async def _work(self, node: SimulatedNode, steps: int) -> None:
        for _ in range(steps):
            await trio.sleep(self.dice.uniform(0, PAUSE_S_MAX))
            await self.step(node)

    async def play(self) -> None:
        for path in FILES:
            await self._create(self.dice.choice(self.cluster.living), path)
        await trio.sleep(PAUSE_S_MAX)
        async with trio.open_nursery() as nursery:
            for node in self.cluster.living:
                nursery.start_soon(self._work, node, ACTS, name="names")
        await trio.sleep(4 * SETTLE_S)

    # --- what has to hold in the end -----------------------------------------------------------------------------------

    async def check(self) -> list[str]:
        """Return what is wrong."""
        nodes = self.cluster.living
        found = [f"{node.name} is disconnected" for node in nodes if node.sharing.is_disconnected]
        trees = [await node.tree() for node in nodes]
        sets = [await list_history(node) for node in nodes]
        found += [f"the trees differ: {trees}"] * any(tree != trees[0] for tree in trees)
        found += [f"the sets differ: {sets}"] * any(one != sets[0] for one in sets)
        found += [f"nobody removed {path}" for path in FILES if path not in self.removed and f"/{path}".encode() not in trees[0]]
        values = stored(self.cluster.etcd)
        contents = [value["content"] for key, value in values.items() if key.kind == INODE and value.get("content")]
        found += [f"the store does not know content {one:x}" for one in contents if SharedKey(CONTENT, one) not in values]
        for node in nodes:
            for path, (inode, mode, _, _) in trees[0].items():
                if stat.S_ISREG(mode) and isinstance(await self._load(node, inode), str):
                    found.append(f"{node.name}: {path.decode()}: {await self._load(node, inode)}")
            for path, names in sets[0].items():
                found += [f"{node.name}: {path}/{one}" for one in await self._check_set(node, names)]
        return found

    async def _check_set(self, node: SimulatedNode, names: dict[str, int]) -> list[str]:
        if "MANIFEST.json" not in names:
            return ["no manifest"]
        manifest = await self._load(node, names["MANIFEST.json"])
        if isinstance(manifest, str):
            return [f"manifest: {manifest}"]
        found = []
        for one in json.loads(manifest)["files"]:
            if one["path"] not in names:
                found.append(f"{one['path']} is missing")
                continue
            data = await self._load(node, names[one["path"]])
            digest = RunningDigest()
            digest.update(data if isinstance(data, bytes) else b"")
            if isinstance(data, str) or digest.finish()[0].hex() != one["digest"]:
                found.append(f"{one['path']}: {data if isinstance(data, str) else data[:8]} inode {names[one['path']]:x}")
        return found

    async def _load(self, node: SimulatedNode, inode: int) -> bytes | str:
        try:
            return await node.mount.read_inode(inode)
        except (OSError, CkptfsError) as failure:
            return f"{errno.errorcode[failure.errno or errno.EIO]} {failure}"


@simulated(seeds=list_seeds([0]))
async def test_sets_keep_their_bytes(cluster: SimulatedCluster) -> None:
    world = World(cluster)
    await world.play()
    assert await world.check() == []


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC])
@pytest.mark.parametrize("open_s", [0.0, SETTLE_S])
@simulated()
async def test_an_island_writes_a_file_whose_set_it_has_never_read(cluster: SimulatedCluster, flags: int, open_s: float) -> None:
    """T6, P7: it cannot give away names that only the store knows. The open ends, also if the file is closed after the return only."""
    maker, island, other = cluster.nodes[1], cluster.nodes[2], cluster.nodes[3]
    island.tracking.cancel()
    await maker.write("step_1.bin", b"former")
    await trio.sleep(SETTLE_S)
    assert await island.mount.read("step_1.bin") == b"former"
    inode = await island.stat("step_1.bin")
    assert inode.history == 1 and history.list_names(island.db, inode.id) == []
    island.cut(True)
    await trio.sleep(SETTLE_S / 4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(island.mount.overwrite, "step_1.bin", b"newest", open_s, flags)
        await trio.sleep(SETTLE_S / 4)
        assert await other.mount.read("step_1.bin") == b"former"
        assert len([*island.tiers[Tier.RAM].contents()]) <= 4, "the content is not copied again and again"
        island.cut(False)
    await trio.sleep(SETTLE_S)
    assert await World(cluster).check() == ["nobody removed " + path for path in FILES[1:]]
    assert [await node.mount.read("step_1.bin") for node in cluster.living] == [b"newest"] * 3
    assert "step_*.bin/step_1.bin@1" in await list_history(other)


@simulated()
async def test_an_island_that_has_read_a_set_and_not_its_file_keeps_the_bytes_of_the_set(cluster: SimulatedCluster) -> None:
    """P7: the inode does not count the name yet. The island leads it to the bytes of the set before the return, too."""
    maker, island = cluster.nodes[1], cluster.nodes[2]
    island.tracking.cancel()
    await maker.write("step_1.bin", b"former")
    assert await island.mount.read("step_1.bin") == b"former"
    await trio.sleep(SETTLE_S)
    await list_history(island)
    inode = island.db.value("SELECT child FROM entry WHERE parent = 1 AND name = ?", b"step_1.bin")
    assert inodes.get(island.db, inode).history == 0 and len(history.list_names(island.db, inode)) == 1
    island.cut(True)
    await trio.sleep(SETTLE_S / 4)
    await island.mount.overwrite("step_1.bin", b"newest", 0.0)
    ((_, names),) = (await list_history(island)).items()
    assert await island.mount.read_inode(names["step_1.bin"]) == b"former"
    island.cut(False)
    await trio.sleep(SETTLE_S)
    assert await World(cluster).check() == ["nobody removed " + path for path in FILES[1:]]
    assert [await node.mount.read("step_1.bin") for node in cluster.living] == [b"newest"] * 3


@simulated()
async def test_a_set_that_others_make_while_an_island_has_replaced_a_file_of_it_keeps_its_bytes(cluster: SimulatedCluster) -> None:
    """P5, P7: the store knows the content, and the island holds a copy."""
    maker, island = cluster.nodes[1], cluster.nodes[2]
    island.tracking.cancel()
    await maker.mkdir("step_1")
    await maker.write("step_1/part_1-of-2.bin", b"former")
    await trio.sleep(SETTLE_S / 4)
    assert await island.mount.read("step_1/part_1-of-2.bin") == b"former"
    island.cut(True)
    await trio.sleep(SETTLE_S / 4)
    await island.mount.overwrite("step_1/part_1-of-2.bin", b"newest", 0.0, os.O_WRONLY | os.O_TRUNC)
    await maker.write("step_1/part_2-of-2.bin", b"others")
    await trio.sleep(SETTLE_S / 4)
    island.cut(False)
    await trio.sleep(SETTLE_S)
    assert await World(cluster).check() == ["nobody removed " + path for path in FILES]
    assert "step_*/step_1@1" in await list_history(island)


@simulated(factor=1)
async def test_an_island_that_writes_a_file_again_gives_its_set_no_other_bytes(cluster: SimulatedCluster) -> None:
    """P7: no other node has the bytes, so the set cannot be read then. The island does not know the set, which another node made."""
    island, maker = cluster.nodes[1], cluster.nodes[2]
    island.tracking.cancel()
    await island.mkdir("step_1")
    for node, data in ((island, b"former"), (maker, b"others")):
        await node.write(f"step_1/part_{node.number}-of-2.bin", data)
        await trio.sleep(SETTLE_S / 4)
    assert "step_*/step_1@1" in await list_history(maker)
    island.cut(True)
    await trio.sleep(SETTLE_S / 4)
    await island.mount.overwrite("step_1/part_1-of-2.bin", b"newest", 0.0)
    await reconnect(island)
    assert [await node.mount.read("step_1/part_1-of-2.bin") for node in cluster.living] == [b"newest"] * 3
    ((_, names),) = (await list_history(maker)).items()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        await maker.mount.read_inode(names["part_1-of-2.bin"])


@simulated()
async def test_a_set_with_a_file_that_shows_a_former_state_is_not_the_latest(cluster: SimulatedCluster) -> None:
    """P7, T1: the writer of a part dies before another node has the bytes. The part is of an earlier save than the others."""

    async def find_latest(node: SimulatedNode) -> SearchResult:
        return (await node.mount.tracker._reader.find_latest(ROOT, b"")).answer.result

    def fail_to_send(act: str, name: str) -> None:
        if act in ("send", "many"):
            raise PeerFailed("no copy can be sent")

    writer, maker = cluster.nodes[1], cluster.nodes[2]
    await maker.mkdir("step_1")
    await writer.write("step_1/part_1-of-2.bin", b"former")
    writer.tracking.cancel()
    await trio.sleep(SETTLE_S / 4)
    assert cluster.count_copies_short() == 0
    writer.peers.fault = fail_to_send
    await writer.mount.overwrite("step_1/part_1-of-2.bin", b"newest", 0.0)
    await maker.write("step_1/part_2-of-2.bin", b"others")
    await trio.sleep(SETTLE_S / 4)
    assert list(await list_history(maker)) == ["step_*/step_1@1"]
    assert (await find_latest(maker)).newest is not None
    writer.kill()
    await trio.sleep(2 * SETTLE_S)
    assert await maker.mount.read("step_1/part_1-of-2.bin") == b"former"
    await maker.mount.overwrite("step_1/part_2-of-2.bin", b"others again", 0.0)
    await trio.sleep(SETTLE_S / 4)
    found = await find_latest(maker)
    assert found.newest is None and "former content" in found.rejected[0].verdict.incomplete_reason
    assert list(await list_history(maker)) == ["step_*/step_1@1"], "no set is made of parts of two saves"
    kept = history.list_sets(maker.db, history.list_series(maker.db)[0].directory)[0].directory
    number = history_names.find_number(maker.db, kept, b"part_1-of-2.bin")
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        await maker.mount.history.open(number, os.O_RDONLY, ROOT_USER)


@simulated(seeds=[3])
async def test_what_a_returned_island_wrote_is_read_at_once(cluster: SimulatedCluster) -> None:
    """P7: its lease has expired. Other nodes see the new content only when they see that the node lives."""
    reader, island = cluster.nodes[1], cluster.nodes[2]
    await reader.write("x", b"former")
    await trio.sleep(SETTLE_S / 4)
    assert await island.mount.read("x") == b"former"
    island.cut(True)
    await trio.sleep(60)
    await island.mount.overwrite("x", b"newest", 0.0, os.O_WRONLY | os.O_TRUNC)
    await trio.sleep(60)
    await reconnect(island)
    assert await reader.mount.read("x") == b"newest"


@pytest.mark.parametrize("is_replaced", [True, False])
@pytest.mark.parametrize("rules", [(), (RetentionRule("step_*", keep=10),)], ids=["no pfs", "pfs"])
def test_an_island_replaces_or_removes_what_others_took_for_lost(is_replaced: bool, rules: tuple[RetentionRule, ...]) -> None:
    """P1, P7: that others show the former checkpoint is no write of theirs, so the newest one keeps its name."""

    def fail(act: str, name: str) -> None:
        raise PeerFailed("cut off")

    async def act(cluster: SimulatedCluster, dice: random.Random) -> None:
        others, island = [cluster.nodes[1], cluster.nodes[3]], cluster.nodes[2]

        async def save(data: bytes) -> None:
            await island.write("last.tmp", data)
            await island.rename("last.tmp", "last")

        await save(b"one")
        await trio.sleep(SETTLE_S / 4)
        assert [await node.mount.read("last") for node in others] == [b"one"] * 2
        island.peers.fault = fail
        await save(b"two")
        island.cut(True)
        await trio.sleep(SETTLE_S)
        assert [await node.mount.read("last") for node in others] == [b"one"] * 2
        await (save(b"three") if is_replaced else island.unlink("last"))
        island.peers.fault = lambda act, name: None
        await reconnect(island)
        await trio.sleep(SETTLE_S)
        for node in cluster.living:
            assert [name for name in await node.names() if not name.startswith(b".")] == [b"last"] * is_replaced
            assert not is_replaced or await node.mount.read("last") == b"three"

    simulate(act, 1, *rules)
