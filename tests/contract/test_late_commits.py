"""A commit that has failed may be applied later (see `chain`): whenever that is, a node knows which of its transactions passed."""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from memory_store import MemoryEtcd, MemoryStore
from shared_catalogs import Node, async_tests, in_virtual_time, running, settled, stored, stored_tree

from ckptfs.catalog import database, identity
from ckptfs.catalog.database import Database
from ckptfs.coherence import chain, key_state
from ckptfs.coherence.chain import ChainedStore
from ckptfs.errors import StoreUnreachable
from ckptfs.store.kv import Compare, CompareTarget, Get, Operation, Outcome, Put

MOMENTS = range(12)


class LateStore(MemoryStore):
    """The next commit fails and is applied after `requests` more requests. `repeats`: the store asks again, and gets an answer."""

    requests: int | None = None
    repeats = False

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = 3.0
    ) -> Outcome:
        if self.requests is None:
            return super().commit(compares, changes, otherwise)
        requests, self.requests = self.requests, None
        self.etcd.postpone(requests, compares, changes)
        if self.repeats:
            outcome = self.commit(compares, changes, otherwise)
            return Outcome(outcome.succeeded, outcome.revision, outcome.results, is_repeated=True)
        raise StoreUnreachable("no answer in time")


def play(root: Path, act: Callable[[Node, Node, LateStore], Awaitable[None]]) -> None:
    """Two nodes, of which the first has a `LateStore`; afterwards both show what the store has."""
    etcd = MemoryEtcd()
    store = LateStore(etcd)
    nodes = [Node(root / "1", 1, store), Node(root / "2", 2, MemoryStore(etcd))]

    async def act_and_compare() -> None:
        for node in nodes:
            await node.make(f"of {node.number}")
        await act(*nodes, store)
        await settled(nodes)
        etcd.apply_late(all_of_them=True)
        for node in nodes:
            assert await node.tree() == stored_tree(etcd)
            assert key_state.count_dirty(node.db) == 0

    in_virtual_time(lambda: running(nodes, act_and_compare))


two_nodes = async_tests(play, given=3)


@pytest.mark.parametrize("requests", MOMENTS)
@two_nodes
async def test_a_checkpoint_is_seen_under_its_name_although_its_creation_came_late(
    a: Node, b: Node, store: LateStore, requests: int
) -> None:
    """P1: the creation is applied after it has failed; the close and the rename that follow are not taken for it."""
    store.requests = requests
    await a.make("ckpt.tmp")
    await a.grow("ckpt.tmp", 77, 88)
    await a.rename("ckpt.tmp", "ckpt")
    await settled([a])
    assert b"ckpt.tmp" not in await b.names() and (await b.stat("ckpt")).size == 77


@pytest.mark.parametrize("requests", MOMENTS)
@two_nodes
async def test_a_removal_that_came_late_does_not_take_what_came_after_it(a: Node, b: Node, store: LateStore, requests: int) -> None:
    await a.make("x")
    store.requests = requests
    await a.unlink("x")
    made = await a.make("x")
    await settled([a])
    assert (await b.stat("x")).id == made.id


@pytest.mark.parametrize("requests", MOMENTS)
@two_nodes
async def test_a_refused_transaction_that_was_sent_twice_is_not_applied_later(a: Node, b: Node, store: LateStore, requests: int) -> None:
    """Its condition fails when it is sent the second time, and holds again when the first copy arrives."""
    theirs = await b.make("x")
    store.requests, store.repeats = requests, True
    with pytest.raises(FileExistsError):
        await a.make("x")
    await b.unlink("x")
    await b.sharing.wait_published()
    for _ in range(requests):
        await b.sharing.refresh_name(1, b"other")
    assert theirs.id not in {inode for inode, _, _, _ in stored_tree(store.etcd).values()}
    assert b"x" not in await b.names()


@pytest.mark.parametrize("requests", MOMENTS)
def test_a_commit_of_the_mover_that_came_late_is_known_before_the_next_read(tmp_path: Path, requests: int) -> None:
    """The announcement of a batch is in the store before the next one is planned, or never."""
    database.create(tmp_path / "catalog.db")
    db = Database(tmp_path / "catalog.db", journalled=True, clustered=True)
    identity.set_node_number(db, 1)
    etcd = MemoryEtcd()
    store = LateStore(etcd)
    chained = ChainedStore(store, db, chain.WRITE_BACK_CHAIN)
    chained.read([])
    store.requests = requests
    with pytest.raises(StoreUnreachable):
        chained.commit([Compare(b"x", CompareTarget.MOD, "=", 0)], [Put(b"x", b"late")])
    (found,) = chained.read([Get(b"x")]).results
    other = chained.commit([Compare(b"y", CompareTarget.MOD, "=", 0)], [Put(b"y", b"next")])
    etcd.apply_late(all_of_them=True)
    assert other.succeeded and MemoryStore(etcd).read([Get(b"x")]).results == (found,)


def test_each_process_of_a_node_continues_its_chain(tmp_path: Path) -> None:
    """P8: what a dead process sent last is applied before the first commit of the next process, or never."""
    database.create(tmp_path / "catalog.db")
    db = Database(tmp_path / "catalog.db", journalled=True, clustered=True)
    identity.set_node_number(db, 1)
    etcd = MemoryEtcd()
    for number in range(3):
        store = LateStore(etcd)
        chained = ChainedStore(store, db, chain.WRITE_BACK_CHAIN)
        chained.commit([], [Put(b"k", b"%d" % number)])
        store.requests = 2
        with pytest.raises(StoreUnreachable):
            chained.commit([], [Put(b"late", b"")])
    following = ChainedStore(MemoryStore(etcd), db, chain.WRITE_BACK_CHAIN)
    before = following.read([Get(b"late")]).results
    etcd.apply_late(all_of_them=True)
    assert following.read([Get(b"late")]).results == before
    assert all(value["sequence"] > 3 for key, value in stored(etcd).items() if key.name == chain.WRITE_BACK_CHAIN)
