"""The shared store has lost its data, or was set back: nodes go on as islands, and adopt it when a person says so (P1, P5, N1)."""

import random
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing
from memory_store import MemoryEtcd, MemoryStore
from shared_catalogs import Node, Slow, Tree, async_tests, in_virtual_time, running, settled, stored, stored_tree

from ckptfs import limits
from ckptfs.catalog import summary
from ckptfs.catalog.database import Database
from ckptfs.clique import membership
from ckptfs.coherence import key_state, keys, store_loss
from ckptfs.coherence.keys import CONTENT, NAME, PFS_NAME, PFS_STATE, SharedKey
from ckptfs.errors import StoreUnreachable
from ckptfs.store.kv import Get, Put


def play(directory: Path, act: Callable[..., Awaitable[None]]) -> None:
    """Let nodes do `act`; afterwards all show what the store has, and that is a tree."""
    etcd = MemoryEtcd()
    made = [Node(directory / str(n), n, Slow(etcd, random.Random(n))) for n in (1, 2, 3)]
    for node in made:
        register(node)

    async def all_of_it() -> None:
        await act(etcd, made)
        await settled(made)
        there = stored_tree(etcd)
        for node in made:
            assert await node.tree() == there

    in_virtual_time(lambda: running(made, all_of_it))


def register(node: Node) -> None:
    """What joining puts into the store."""
    MemoryStore(node.store.etcd).commit([], [*membership.build_reregistration(f"n{node.number}", "catalog", node.number, (), ())[0]])


some_nodes = async_tests(play)


@pytest.fixture(autouse=True)
def threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do at once what a thread would do: virtual time does not wait for threads."""

    async def run_at_once(act: Callable[..., object], *arguments: object) -> object:
        await trio.lowlevel.checkpoint()
        return act(*arguments)

    monkeypatch.setattr("trio.to_thread.run_sync", run_at_once)


def is_reported(node: Node) -> bool:
    return "ckptfs cluster adopt" in str(summary.list_troubles(node.db, "store"))


async def noticed(nodes: list[Node]) -> None:
    while not all(node.sharing.is_disconnected and is_reported(node) for node in nodes):
        await trio.sleep(limits.STORE_POLL_S)


async def adopt(*nodes: Node, is_last: bool = False) -> None:
    """What a person does: one node after the other."""
    for node in nodes:
        await noticed([node])
        store_loss.order_adoption(node.db, is_last=is_last)
        await settled([node])
        assert not is_reported(node)


async def write(node: Node, path: str, size: int) -> None:
    """What a writer's close tells."""
    parent, name = await node.parent(path)
    inode = (await node.lookup(parent, name)).id
    text = "UPDATE inode SET size = ?, generation = generation + 1 WHERE id = ?"
    await node._agreed(lambda db: db.run(text, size, inode), (), [inode])


async def some_tree(a: Node, b: Node, c: Node) -> Tree:
    """Something of each kind, made by all, known to all in part."""
    await a.mkdir("d")
    await b.mkdir("d/e")
    await c.make("d/e/f")
    await a.make("d/g")
    await b.link("d/g", "h")
    await c.make("l", stat.S_IFLNK | 0o777)
    await b.set("d/e/f", mode=0o600)
    for number in range(10):
        await [a, b, c][number % 3].mkdir(f"d/{number}")
        await [b, c, a][number % 3].make(f"d/{number}/file")
    return await a.tree()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@some_nodes
async def test_nodes_are_islands_until_each_adopts(etcd: MemoryEtcd, nodes: list[Node], order: tuple[int, ...]) -> None:
    before = await some_tree(*nodes)
    etcd.wipe()
    await noticed(nodes)
    for number, node in enumerate(nodes):
        await node.make(f"d/meanwhile-{number}")
    await trio.sleep(60)
    assert etcd.revision == 1 and all(node.sharing.is_disconnected for node in nodes), "nobody tells anything before a person says so"
    first, *others = [nodes[number] for number in order]
    await adopt(first)
    await trio.sleep(60)
    assert stored_tree(etcd).items() >= (await first.tree()).items() and all(node.sharing.is_disconnected for node in others)
    await adopt(*others)
    assert set(stored_tree(etcd)) == {*before, *(b"/d/meanwhile-%d" % number for number in range(3))}


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("knows_both", [False, True])
@some_nodes
async def test_what_changed_later_counts(etcd: MemoryEtcd, nodes: list[Node], first: int, knows_both: bool) -> None:
    """A directory that was renamed, files that were moved, one that was written anew: a catalog that knows what was before does not win.

    `knows_both`: it has the new names beside the old ones.
    """
    a, b, _ = nodes
    await a.build("step.tmp/", "step.tmp/file", "old", "moved", "latest.tmp")
    await b.tree()
    await a.rename("step.tmp", "step")
    await a.rename("moved", "step/moved")
    await a.rename("latest.tmp", "latest")
    await write(a, "old", 9)
    before = await a.tree()
    if knows_both:
        await b.names()
    etcd.wipe()
    await adopt(nodes[first], nodes[1 - first], nodes[2])
    assert stored_tree(etcd) == before


@some_nodes
async def test_a_file_that_is_only_remembered_gives_way_to_the_one_that_replaced_it(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    a, b, c = nodes
    await a.build("latest")
    await b.tree()
    await a.make("latest.tmp")
    await a.rename("latest.tmp", "latest")
    before = await a.tree()
    etcd.wipe()
    await adopt(a, b, c)
    assert stored_tree(etcd) == before


@some_nodes
async def test_two_files_under_one_name_stay_side_by_side(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    a, b, c = nodes
    await a.build("d/")
    await b.tree()
    etcd.wipe()
    await noticed(nodes)
    made = [(await node.make("d/same")).id for node in (a, b)]
    await adopt(a, b, c)
    children = {value["child"] for key, value in stored(etcd).items() if key.kind == NAME}
    assert {*made} < children and len(stored_tree(etcd)) == 3


@some_nodes
async def test_a_store_that_was_set_back_learns_what_it_has_forgotten(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    a, b, c = nodes
    await a.build("d/", "d/old")
    backup = etcd.saved()
    await b.rename("d", "moved")
    await b.make("moved/new")
    await c.make("x")
    await write(c, "x", 7)
    await write(a, "moved/old", 5)
    tree = await b.tree()
    etcd.restore(backup)
    await adopt(a, b, c)
    assert await a.tree() == tree


@pytest.mark.parametrize("is_noticed", [True, False])
@some_nodes
async def test_a_store_that_was_set_back_is_not_believed_when_it_has_come_as_far(
    etcd: MemoryEtcd, nodes: list[Node], is_noticed: bool
) -> None:
    """P5: leases and figures of the nodes go on in it. `is_noticed`: after the nodes have seen its revision, or before."""
    a, b, c = nodes
    await a.build("d/", "d/old")
    await settled(nodes)
    backup, revision = etcd.saved(), etcd.revision
    for node in nodes if is_noticed else nodes[1:2]:
        await node.make(f"d/new-{node.number}")
    await settled(nodes)
    tree = await b.tree()
    highest, lost = etcd.revision, etcd.revision - revision
    etcd.restore(backup)
    if is_noticed:
        with trio.fail_after(60):
            await noticed(nodes)
    for _ in range(lost + 10):
        MemoryStore(etcd).commit([], [Put(b"s/0001", b"figures")])
    assert etcd.revision > highest
    await b.make("d/newer")
    with trio.fail_after(60):
        await noticed(nodes)
    await trio.sleep(60)
    assert all(node.sharing.is_disconnected and is_reported(node) for node in nodes)
    await adopt(b, c, a)
    assert set(await a.tree()) == {*tree, b"/d/newer"}


@some_nodes
async def test_twice(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    """The store is lost again when one node has adopted it."""
    before = await some_tree(*nodes)
    etcd.wipe()
    await adopt(nodes[0])
    etcd.wipe()
    await noticed(nodes)
    await adopt(*nodes)
    assert stored_tree(etcd) == before


@some_nodes
async def test_an_adoption_goes_on_after_etcd_was_away(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    before = await some_tree(*nodes)
    etcd.wipe()
    await noticed(nodes)
    store_loss.order_adoption(nodes[0].db, is_last=False)
    while store_loss.get_adoption_step(nodes[0].db) is not store_loss.AdoptionStep.PUBLISHING:
        await trio.sleep(0.001)
    nodes[0].cut(True)
    await trio.sleep(60)
    nodes[0].cut(False)
    await settled(nodes[:1])
    await adopt(*nodes[1:])
    assert stored_tree(etcd) == before


@some_nodes
async def test_no_node_acts_by_the_store_until_all_have_adopted(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    await some_tree(*nodes)
    etcd.wipe()

    async def report(*connected: Node) -> None:
        for node in connected:
            await node.sharing.report_store()

    nodes[0].db.run("INSERT INTO peer (number, name, domain, incarnation, alive) VALUES (3, 'c', 'c', '', 0)")
    await adopt(*nodes[:2])
    await report(*nodes[:2])
    assert "c with number 3" in str(summary.list_troubles(nodes[0].db, "adoption")), "a node that was wiped has two numbers"
    for node in nodes[:2]:
        with pytest.raises(StoreUnreachable, match="have not adopted"):
            store_loss.require_adopted(node.db)
        assert "number 3" in str(summary.list_troubles(node.db, "adoption"))
    await adopt(nodes[2])
    await report(nodes[2], *nodes)
    for node in nodes:
        store_loss.require_adopted(node.db)
        assert not summary.list_troubles(node.db, "adoption")


@some_nodes
async def test_a_person_says_that_no_other_node_will_adopt(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    await some_tree(*nodes)
    etcd.wipe()
    await adopt(nodes[0])
    await nodes[0].sharing.report_store()
    assert store_loss.is_adopting(nodes[0].db)
    store_loss.order_adoption(nodes[0].db, is_last=True)
    await nodes[0].sharing.report_store()
    assert not store_loss.is_adopting(nodes[0].db) and store_loss.get_adoption_step(nodes[0].db) is None
    await adopt(*nodes[1:])  # They were not gone for good.


@some_nodes
async def test_files_of_a_node_that_is_gone_are_told_with_their_contents(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    a, b, c = nodes
    inode = (await b.make("f")).id
    content = 2 << limits.ID_COUNTER_BITS | 77

    def close(db: Database) -> None:
        db.run("INSERT INTO content (id, inode, generation, state, size, closed_ns) VALUES (?, ?, 1, 1, 5, 7)", content, inode)
        db.run("UPDATE inode SET content = ?, size = 5, generation = 1 WHERE id = ?", content, inode)

    await b._agreed(close, (), [inode])
    await a.tree()
    before = stored(etcd)[SharedKey(CONTENT, content)]
    etcd.wipe()
    b.cut(True)
    await adopt(a, c, is_last=True)
    assert stored(etcd)[SharedKey(CONTENT, content)] == before
    b.cut(False)
    await adopt(b)


@some_nodes
async def test_a_batch_that_is_under_way_on_the_pfs_stays_announced(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    """Otherwise what it has done already on the PFS would look like the work of another program."""
    a, b, c = nodes
    inode = (await a.make("f")).id
    intent = {"inode": 0, "next": inode, "by": a.number, "of": "catalog", "batch": 3}
    key = SharedKey(PFS_NAME, 1, b"f")
    key_state.set_cached(a.db, key, key_state.CachedValue(9, keys.encode_value(intent)))
    etcd.wipe()
    await adopt(b, a, c)
    assert stored(etcd)[key] == intent


@pytest.mark.parametrize("first", [0, 1])
@some_nodes
async def test_what_the_pfs_shows_counts_as_of_the_last_write_back(etcd: MemoryEtcd, nodes: list[Node], first: int) -> None:
    """Otherwise a directory that was renamed would be made again on the PFS under its old name, with everything in it."""
    a, b, c = nodes
    directory = (await a.mkdir("step.tmp")).id
    await b.tree()
    await a.rename("step.tmp", "step")
    await b.tree()
    for node, shown in ((a, b"step"), (b, b"step.tmp")):
        node.db.run("INSERT INTO pfs_entry (parent, name, inode) VALUES (1, ?, ?)", shown, directory)
        with key_state.change_unmarked(node.db):
            node.db.run("DELETE FROM dirty_key")
    etcd.wipe()
    await adopt(nodes[first], nodes[1 - first], c)
    shown = {key: value for key, value in stored(etcd).items() if key.kind in (PFS_NAME, PFS_STATE)}
    assert shown == {SharedKey(PFS_NAME, 1, b"step"): {"inode": directory}, SharedKey(PFS_STATE, directory): {"names": [[1, "step"]]}}


@some_nodes
async def test_node_numbers_are_not_given_again(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    await some_tree(*nodes)
    etcd.wipe()
    await adopt(nodes[0])
    taken = {item.key for item in MemoryStore(etcd).read([Get(membership.TAKEN_PREFIX, membership.TAKEN_PREFIX + b"\xff")]).results[0]}
    assert taken == {membership.taken_key(node.number) for node in nodes}
    await adopt(*nodes[1:])


@some_nodes
async def test_a_number_that_another_node_has_got_is_not_adopted(etcd: MemoryEtcd, nodes: list[Node]) -> None:
    await some_tree(*nodes)
    etcd.wipe()
    await noticed(nodes)
    MemoryStore(etcd).commit([], membership.build_reregistration("stranger", "other", nodes[0].number, (), ())[0])
    store_loss.order_adoption(nodes[0].db, is_last=False)
    while store_loss.get_adoption_step(nodes[0].db) is not None:
        await trio.sleep(limits.STORE_POLL_S)
    assert nodes[0].sharing.is_disconnected and "stranger" in str(summary.list_troubles(nodes[0].db, "store"))
    etcd.wipe()
    summary.set_trouble(nodes[0].db, "store", None)
    await adopt(*nodes)


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
    store = Several([etcd, etcd, stray], random.Random(1))
    node = Node(directory, 1, store)

    async def all_of_it() -> None:
        await node.build("d/", "d/f")
        store.etcd = stray
        await act(store, node)

    in_virtual_time(lambda: running([node], all_of_it))


strayed = async_tests(several)


async def reported(node: Node) -> None:
    while not summary.list_troubles(node.db, "etcd"):
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
    await adopt(node)
    assert store_loss.get_epoch(node.db) != known and stored_tree(stray) == await node.tree()


def test_how_far_a_lost_store_had_come_is_not_remembered_of_the_next_one(tmp_path: Path) -> None:
    """What goes on beside the loss still holds the old figures: believed of the new store, it would be lost at once again."""
    node = Node(tmp_path, 1, Slow(MemoryEtcd(), random.Random(1)))
    store_loss.record_epoch(node.db, b'{"id":"a"}')
    store_loss.record_revision(node.db, b'{"id":"a"}', 1000)
    assert store_loss.get_highest_revision(node.db) == 1000
    store_loss.record_epoch(node.db, b'{"id":"b"}')
    store_loss.record_revision(node.db, b'{"id":"a"}', 1000)
    assert store_loss.get_highest_revision(node.db) < 1000


def test_a_node_that_began_without_the_store_meets_it_when_it_is_there(tmp_path: Path) -> None:
    """Its loss is noticed later like anybody's."""
    etcd = MemoryEtcd()
    node = Node(tmp_path, 1, Slow(etcd, random.Random(1)))
    node.cut(True)

    async def all_of_it() -> None:
        await node.make("f")
        while not node.sharing.is_disconnected:
            await trio.sleep(limits.STORE_POLL_S)
        node.cut(False)
        await settled([node])
        assert store_loss.get_epoch(node.db) is not None

    in_virtual_time(lambda: running([node], all_of_it))
