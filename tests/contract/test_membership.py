"""Joining, living and claiming, on a real etcd and on the tests' memory store alike (P9, P11)."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from daemon_under_test import eventually
from etcd_server import serving
from memory_store import MemoryEtcd, MemoryStore

from ckptfs import limits
from ckptfs.catalog import database, identity
from ckptfs.catalog.database import Database
from ckptfs.clique import membership
from ckptfs.clique.cluster import ClusterLock, ClusterLocks
from ckptfs.clique.membership import NameTaken, Node, NodeLease, load_nodes, name_key, node_key, register
from ckptfs.coherence.keys import CONTENT, INODE, SharedKey, encode_key
from ckptfs.errors import InvalidArgument, StoreUnreachable
from ckptfs.store.etcd import EtcdStore
from ckptfs.store.kv import Get, Put, Store, prefix_end


@pytest.fixture(params=["memory", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    with serving(tmp_path) as etcd, closing(EtcdStore(etcd.addresses, "one")) as made:
        yield made


class Time:
    """A clock that only waiting moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def joined(store: Store, name: str, catalog: str, known: int = 0, clock: Time | None = None) -> int:
    clock = clock or Time()
    return register(store, name, catalog, known, rng=random.Random(name + catalog), clock=clock, sleep=clock.sleep)


def presence(store: Store, name: str, catalog: str, *, start: int = 1) -> NodeLease:
    """A node that has joined; it lives from its first beat on."""
    number = joined(store, name, catalog)
    return NodeLease(store, Node(number, name, "a:1", number, name, 0, f"{catalog}.{start}"), catalog)


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_a_catalog_keeps_its_number_and_no_two_have_one(store: Store) -> None:
    numbers = {name: joined(store, name, f"catalog of {name}") for name in "abcdefgh"}
    assert len(set(numbers.values())) == 8 and min(numbers.values()) > 0
    for name, number in numbers.items():
        assert joined(store, name, f"catalog of {name}") == number
    assert max(numbers.values()) <= 1 << 12


def test_a_store_that_lost_its_data_gives_no_number_twice(store: Store) -> None:
    """Nodes tell it their numbers, and those of all that they know; a catalog whose number another one has all the same is refused."""
    for changes in membership.build_reregistration("a", "catalog of a", 5, [5, 7, 9], []):
        store.commit([], changes)
    assert joined(store, "a", "catalog of a", known=5) == 5
    (taken,) = store.read([Get(membership.TAKEN_PREFIX, prefix_end(membership.TAKEN_PREFIX))]).results
    assert [item.key for item in taken] == [membership.taken_key(number) for number in (5, 7, 9)]
    assert membership.build_reregistration("a", "catalog of a", 5, [5, 7, 9], taken) == membership.build_reregistration(
        "a", "catalog of a", 5, [], taken
    )
    other = joined(store, "stranger", "catalog of a stranger")
    assert other not in (5, 7, 9)
    with pytest.raises(InvalidArgument, match=f"the number {other} of node b was given to node stranger"):
        joined(store, "b", "catalog of b", known=other)


def test_nodes_that_join_at_once_get_different_numbers(store: Store) -> None:
    with ThreadPoolExecutor(24) as threads:
        numbers = list(threads.map(lambda name: joined(store, f"n{name}", f"c{name}"), range(24)))
    assert len(set(numbers)) == 24


def test_daemons_with_one_name_that_start_at_once_are_one_node(store: Store) -> None:
    """P11: the name is the one's or the other's, and only that one can live."""
    with ThreadPoolExecutor(4) as threads:
        numbers = list(threads.map(lambda catalog: joined(store, "same", f"c{catalog}"), range(4)))
    assert len(set(numbers)) == 4
    lives = []
    for catalog, number in enumerate(numbers):
        one = NodeLease(store, Node(number, "same", "a:1", number, "same"), f"c{catalog}")
        try:
            lives.append(one.renew())
        except NameTaken as refused:
            assert "has joined the cluster as node same" in str(refused) and "give node=" in refused.remedy
            assert not one.lease_id
    assert lives == [True]


def test_a_node_that_lost_its_catalog_gets_another_number(store: Store) -> None:
    """The ids that its former life made stay unique."""
    first = joined(store, "n", "before")
    assert joined(store, "n", "after") not in (0, first)


def test_a_node_whose_name_another_one_had_meanwhile_keeps_its_number(store: Store) -> None:
    first = joined(store, "n", "ours")
    joined(store, "n", "theirs")
    assert joined(store, "n", "ours", known=first) == first


def test_a_name_whose_daemon_lives_is_refused(store: Store) -> None:
    """P11: with the address of who has it and what to do."""
    assert presence(store, "n", "one").renew()
    clock = Time()
    with pytest.raises(NameTaken, match="another daemon is in the cluster as node n, at a:1") as refused:
        joined(store, "n", "other", clock=clock)
    assert "node=ANOTHER-NAME" in refused.value.remedy
    assert clock.now_s >= 1000 + limits.NAME_WAIT_S
    assert joined(store, "n", "one") == joined(store, "n", "one")


def test_a_name_whose_daemon_died_is_free_when_its_lease_is_over(store: Store) -> None:
    dead = presence(store, "n", "one")
    dead.renew()
    clock = Time()
    asked = []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        asked.append(seconds)
        if len(asked) == 3:
            store.revoke(dead.lease_id)

    assert register(store, "n", "other", clock=clock, sleep=sleep) != dead.node.number


# --- living ----------------------------------------------------------------------------------------------------------


def test_a_record_is_visible_to_all_and_ends_with_its_lease(store: Store) -> None:
    one = presence(store, "n1", "c1")
    assert one.renew() and not one.renew() and one.lease_id
    nodes, revision = load_nodes(store)
    assert nodes == [one.node] and revision > 0
    store.revoke(one.lease_id)
    assert load_nodes(store)[0] == []
    assert one.renew() and load_nodes(store)[0] == [one.node]


def test_many_records_are_read_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ETCD_PAGE_ITEMS", 3)
    for count in range(8):
        nodes, _ = load_nodes(store)
        assert [node.name for node in sorted(nodes, key=lambda node: node.name)] == [f"n{number}" for number in range(count)]
        presence(store, f"n{count}", f"c{count}").renew()


def test_a_malformed_record_is_skipped(store: Store) -> None:
    one = presence(store, "n", "c")
    one.renew()
    for number, value in enumerate((b"", b"{}", b"[1]", b'[0,"n","a:1",0,"d",0,"i"]', b'["x","n","a:1",0,"d",0,"i"]', b"\xff"), start=1000):
        store.commit((), [Put(node_key(number), value)])
    assert load_nodes(store)[0] == [one.node]


def test_a_restarted_daemon_takes_over_from_itself_at_once(store: Store) -> None:
    former, now = presence(store, "n", "c", start=1), presence(store, "n", "c", start=2)
    assert former.renew() and now.renew()
    assert load_nodes(store)[0] == [now.node]
    store.revoke(former.lease_id)
    assert load_nodes(store)[0] == [now.node]


def test_a_daemon_with_a_copy_of_the_catalog_is_noticed(store: Store) -> None:
    first, second = presence(store, "n", "c", start=1), presence(store, "n", "c", start=2)
    first.renew()
    first.record_seen_node(first.node, store.read([Get(name_key("n"))]).revision)
    assert first.lease_id
    second.renew()
    item = store.read([Get(node_key(second.node.number))]).results[0][0]
    first.record_seen_node(second.node, item.mod_revision)
    with pytest.raises(NameTaken, match="copy of the catalog"):
        first.renew()
    assert not first.lease_id


def test_a_lease_is_believed_no_longer_than_it_holds() -> None:
    clock = Time()
    store = MemoryStore(MemoryEtcd(clock))
    joined(store, "n", "c")
    one = NodeLease(store, Node(joined(store, "n", "c"), "n", "a:1", 0, "n"), "c", clock)
    one.renew()
    clock.sleep(limits.NODE_LEASE_S - 1)
    assert one.lease_id
    store.reachable = False
    with pytest.raises(StoreUnreachable):
        one.renew()
    clock.sleep(1)
    assert not one.lease_id
    store.reachable = True
    assert one.renew() and one.lease_id


# --- claims ----------------------------------------------------------------------------------------------------------


def claims_of(store: Store, count: int) -> list[tuple[NodeLease, ClusterLocks]]:
    made = [presence(store, f"n{number}", f"c{number}") for number in range(count)]
    for one in made:
        one.renew()
    return [(one, ClusterLocks(store, one)) for one in made]


def test_one_of_many_gets_the_lock(store: Store) -> None:
    """P9: who takes over what a dead node left."""
    nodes = claims_of(store, 12)
    for race in range(5):
        with ThreadPoolExecutor(12) as threads:
            taken = list(threads.map(lambda node, what=f"journal/{race}": node[1].try_acquire(what), nodes))
        winners = [number for number, claim in enumerate(taken) if claim is not None]
        assert len(winners) == 1
        (held,) = store.read([Get(b"claim/journal/%d" % race)]).results[0]
        assert held.value.startswith(b"%d " % nodes[winners[0]][0].node.number)


def test_only_the_holder_gets_a_lock_again(store: Store) -> None:
    (_, ours), (_, theirs) = claims_of(store, 2)
    claim = ours.try_acquire("x")
    assert claim is not None and ours.try_acquire("x") == claim
    assert theirs.try_acquire("x") is None and theirs.try_acquire("y") is not None
    ours.release(claim)
    assert not store.read([Get(b"claim/x")]).results[0]
    again = theirs.try_acquire("x")
    assert again is not None
    ours.release(claim)
    assert theirs.try_acquire("x") == again


def test_a_lock_ends_with_its_node(store: Store) -> None:
    (dead, ours), (_, theirs) = claims_of(store, 2)
    claim = ours.try_acquire("x")
    assert claim is not None
    store.revoke(dead.lease_id)
    assert eventually(lambda: theirs.try_acquire("x"), what="the claim is free") is not None
    dead.renew()
    assert ours.try_acquire("x") is None


def test_a_lock_guards_what_only_its_holder_may_change(store: Store) -> None:
    (dead, ours), (_, theirs) = claims_of(store, 2)
    claim = ours.try_acquire("x")
    assert isinstance(claim, ClusterLock) and store.commit([claim.build_guard()], [Put(b"done", b"1")]).succeeded
    store.revoke(dead.lease_id)
    assert theirs.try_acquire("x") is not None
    assert not store.commit([claim.build_guard()], [Put(b"done", b"2")]).succeeded


def test_a_node_without_a_lease_gets_no_lock(store: Store) -> None:
    (one, ours), (_, theirs) = claims_of(store, 2)
    lease = one.lease_id
    store.revoke(lease)
    assert ours.try_acquire("x") is None
    assert theirs.try_acquire("x") is not None
    assert ClusterLocks(store, presence(store, "new", "new")).try_acquire("y") is None


@pytest.mark.parametrize("in_history", [False, True])
@pytest.mark.parametrize("given", [0, 1, 5, 70_000])
def test_a_node_with_an_old_catalog_gives_no_id_again(store: Store, tmp_path: Path, given: int, in_history: bool) -> None:
    """P1, P5: after a power cut, or on a disk from a backup. What others made, and the next node's ids, do not count."""
    database.create(tmp_path / "catalog.db")
    with closing(Database(tmp_path / "catalog.db", journalled=False, clustered=True)) as db:
        identity.set_node_number(db, 7)
        first = {table: identity.allocate_id(db, table, in_history=in_history and table == "inode") for table in identity.COUNTED_TABLES}
        known = {table: identity.get_last_id(db, table) for table in identity.COUNTED_TABLES}
        for kind, table in ((INODE, "inode"), (CONTENT, "content")):
            numbers = [first[table], first[table] + given, 6 << 40, 8 << 40]
            store.commit((), [Put(encode_key(SharedKey(kind, number)), b"{}") for number in dict.fromkeys(numbers)])
        found = membership.find_last_ids(store, db)
        assert found == {table: last + given for table, last in known.items()}
        with db.transaction():
            identity.bump_last_ids(db, found)
        for table in identity.COUNTED_TABLES:
            again = identity.allocate_id(db, table, in_history=in_history and table == "inode")
            assert again > first[table] + given and identity.get_origin_node(again) == 7
        assert membership.find_last_ids(store, db) == {table: identity.get_last_id(db, table) for table in identity.COUNTED_TABLES}
