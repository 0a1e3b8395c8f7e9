"""The shared store has lost its data, or was set back: nothing that any node knows is lost (P1, P5, N1)."""

import random
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from memory_store import MemoryEtcd, MemoryStore
from shared_catalogs import Node, Slow, Tree, async_tests, in_virtual_time, running, settled, stored_tree

from ckptfs import limits
from ckptfs.catalog import summary
from ckptfs.coherence import store_loss


def play(directory: Path, act: Callable[..., Awaitable[None]]) -> None:
    """Let nodes do `act`; afterwards all show what the store has, and that is a tree."""
    etcd = MemoryEtcd()

    async def main() -> None:
        made = [Node(directory / str(n), n, Slow(etcd, random.Random(n))) for n in (1, 2, 3)]

        async def all_of_it() -> None:
            await act(etcd, made)
            await whole(made)
            there = stored_tree(etcd)
            for node in made:
                assert await node.tree() == there

        await running(made, all_of_it)

    in_virtual_time(main)


async def whole(nodes: list[Node]) -> None:
    """Every node has noticed what became of the store, and has told all that it knows."""
    values = set()
    while len(values := {store_loss.get_epoch(node.db) for node in nodes}) > 1 or store_loss.get_turn(values.pop()) < 2:
        await trio.sleep(limits.STORE_POLL_S)
    await settled(nodes)


some_nodes = async_tests(play)


async def some_tree(a: Node, b: Node, c: Node) -> Tree:
    """Something of each kind, made by all, known to all in part."""
    await a.mkdir("d")
    await b.mkdir("d/e")
    await c.make("d/e/f")
    await a.make("d/g")
    await b.link("d/g", "h")
    await c.make("l", stat.S_IFLNK | 0o777)
    await b.set("d/e/f", mode=0o600)
    for number in range(40):
        await [a, b, c][number % 3].mkdir(f"d/{number}")
        await [b, c, a][number % 3].make(f"d/{number}/file")
    return await a.tree()


@some_nodes
async def test_everything_is_there_again_when_the_store_was_emptied(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    before = await some_tree(*nodes)
    etcd.wipe()
    await whole(nodes)
    assert stored_tree(etcd) == before
    for node in nodes:
        assert await node.tree() == before
        assert "etcd has lost data" in str(summary.list_reports(node.db, "trouble:store"))


@some_nodes
async def test_what_applications_do_meanwhile_is_there_too(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    a, _b, c = nodes
    before = set(await some_tree(*nodes))
    etcd.wipe()
    await a.make("d/new")
    await a.rename("h", "i")
    await c.unlink("l")
    await whole(nodes)
    after = set(await a.tree())
    assert after >= (before - {b"/h", b"/l"}) | {b"/d/new", b"/i"}


@some_nodes
async def test_a_store_that_was_set_back_learns_what_it_has_forgotten(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    a, b, c = nodes
    await a.build("d/", "d/old")
    backup = etcd.saved()
    await b.rename("d", "moved")
    await b.make("moved/new")
    await c.make("x")
    await c.grow("x", 7, 7)
    await a.grow("moved/old", 5, 5)
    tree = await b.tree()
    etcd.restore(backup)
    await whole(nodes)
    assert await a.tree() == tree


@pytest.mark.parametrize("first", [0, 1])
@some_nodes
async def test_what_was_known_later_counts(etcd: MemoryEtcd, nodes: list[Node], first: int) -> None:
    """A directory that was renamed, a file that was replaced, one that was written anew: who knows only what was before does not win."""
    a, b, _ = nodes
    await a.build("step.tmp/", "step.tmp/file", "latest", "old", "moved")
    await b.tree()
    await a.rename("step.tmp", "step")
    await a.make("latest.tmp")
    await a.rename("latest.tmp", "latest")
    await a.rename("moved", "step/moved")
    await a.grow("old", 9, 9)
    before = await a.tree()
    await b.names()  # Its cache has the new names beside the old ones.
    nodes[first].cut(True)
    etcd.wipe()
    await trio.sleep(60)
    nodes[first].cut(False)
    await whole(nodes)
    assert await b.tree() == before


@some_nodes
async def test_twice(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    """The store is lost again before all was told."""
    before = await some_tree(*nodes)
    etcd.wipe()
    while not store_loss.get_turn(store_loss.get_epoch(nodes[0].db)) > 1:
        await trio.sleep(0.01)
    etcd.wipe()
    await trio.sleep(2 * limits.STORE_POLL_S)
    await whole(nodes)
    assert stored_tree(etcd) == before


class Several(Slow):
    """A store at several addresses, each of which leads to an etcd of its own; asked is the one of the last turn."""

    def __init__(self, etcds: list[MemoryEtcd], dice: random.Random) -> None:
        super().__init__(etcds[0], dice)
        self.etcds = etcds
        self.silent: list[MemoryEtcd] = []

    def members(self) -> list[MemoryStore]:
        made = [MemoryStore(etcd) for etcd in self.etcds]
        for one in made:
            one.reachable = one.etcd not in self.silent
        return made

    def rotate_member(self) -> None:
        answering = [etcd for etcd in self.etcds if etcd not in self.silent]
        self.etcd = answering[(answering.index(self.etcd) + 1) % len(answering)]


def several(directory: Path, act: Callable[[Several, Node], Awaitable[None]]) -> None:
    """One node and an etcd of three members, of which one was begun alone later, by mistake."""
    etcd, stray = MemoryEtcd(), MemoryEtcd()

    async def main() -> None:
        store = Several([etcd, etcd, stray], random.Random(1))
        node = Node(directory, 1, store)

        async def all_of_it() -> None:
            await node.build("d/", "d/f")
            store.etcd = stray
            await act(store, node)

        await running([node], all_of_it)

    in_virtual_time(main)


strayed = async_tests(several)


async def reported(node: Node) -> None:
    while not summary.list_reports(node.db, "trouble:etcd"):
        await trio.sleep(limits.STORE_POLL_S)


@strayed
async def test_a_member_that_was_begun_alone_is_not_believed_and_left(store: Several, node: Node) -> None:
    stray, known = store.etcds[2], store_loss.get_epoch(node.db)
    while store.etcd is stray:
        await trio.sleep(limits.STORE_POLL_S)
    await node.make("d/g")
    await settled([node])
    assert store_loss.get_epoch(node.db) == known and store.etcd is not stray and stray.revision == 1
    assert stored_tree(store.etcds[0]) == await node.tree()


@strayed
async def test_a_member_that_was_begun_alone_is_not_believed_while_the_others_are_silent(store: Several, node: Node) -> None:
    stray, known = store.etcds[2], store_loss.get_epoch(node.db)
    store.silent = store.etcds[:1]
    await reported(node)
    await trio.sleep(limits.STORE_POLL_S)
    assert node.sharing.is_disconnected and store_loss.get_epoch(node.db) == known and stray.revision == 1
    store.etcds = [stray] * 3
    await settled([node])
    assert store_loss.get_epoch(node.db) != known and stored_tree(stray) == await node.tree()


def test_how_far_a_lost_store_had_come_is_not_remembered_of_the_next_one(tmp_path: Path) -> None:
    """What goes on beside the loss still holds the old figures: believed of the new store, it would be lost at once again."""
    node = Node(tmp_path, 1, Slow(MemoryEtcd(), random.Random(1)))
    store_loss.record_epoch(node.db, b'{"id":"a","turn":1}', 1)
    store_loss.record_revision(node.db, b'{"id":"a","turn":1}', 1000)
    assert store_loss.get_highest_revision(node.db) == 1000
    store_loss.record_epoch(node.db, b'{"id":"b","turn":2}', 7)
    store_loss.record_revision(node.db, b'{"id":"a","turn":1}', 1000)
    assert store_loss.get_highest_revision(node.db) < 1000


def test_a_node_that_began_without_the_store_meets_it_when_it_is_there(tmp_path: Path) -> None:
    """Its loss is noticed later like anybody's."""
    etcd = MemoryEtcd()

    async def main() -> None:
        node = Node(tmp_path, 1, Slow(etcd, random.Random(1)))
        node.cut(True)

        async def all_of_it() -> None:
            await node.make("f")
            while not node.sharing.is_disconnected:
                await trio.sleep(limits.STORE_POLL_S)
            node.cut(False)
            await settled([node])
            assert store_loss.get_epoch(node.db) is not None

        await running([node], all_of_it)

    in_virtual_time(main)
