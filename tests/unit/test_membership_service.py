"""A node's membership in its mover: living nodes, outages of the store (which change nothing), and reports (P1, P9)."""

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from ckptfs_daemon.mover.membership_service import TROUBLE, Backoff, MembershipService
from memory_store import MemoryEtcd, MemoryStore

from ckptfs import limits
from ckptfs.catalog import database, identity
from ckptfs.catalog.database import Database
from ckptfs.clique.membership import Node, ViewChange, register
from ckptfs.errors import Compacted
from ckptfs.store.kv import Delete, Put

PATIENCE_S = 60.0


class Clock:
    """The store's own: leases run out when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Station:
    """One node: catalog, way to the store, member."""

    def __init__(self, place: Path, etcd: MemoryEtcd, name: str) -> None:
        path = place / f"{name}.db"
        database.create(path)
        self.name = name
        self.db = Database(path, journalled=False)
        self.store = MemoryStore(etcd)
        self.number = register(self.store, name, identity.get_catalog_id(self.db))
        self.reports: dict[str, Any] = {}
        self.changes: list[ViewChange] = []
        self.member = self.begin()

    def begin(self) -> MembershipService:
        """Another mover of this node."""
        node = Node(self.number, self.name, "a:1", self.number, self.name, 0, f"{self.name}.{identity.record_start(self.db)}")
        self.member = MembershipService(self.db, self.store, node, self._report)
        self.member.subscribe(self.changes.append)
        return self.member

    def _report(self, key: str, value: Any) -> None:
        self.reports[key] = value

    def names(self) -> list[str]:
        return sorted(node.name for node in self.member.view.nodes)


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> MemoryEtcd:
    """A store whose leases are kept often."""
    monkeypatch.setattr(limits, "NODE_LEASE_RENEW_S", 0.02)
    monkeypatch.setattr(limits, "VIEW_GATHER_S", 0.005)
    monkeypatch.setattr(limits, "NODE_RETURN_S", 0.0)
    return MemoryEtcd(Clock())


@pytest.fixture
def stations(tmp_path: Path, etcd: MemoryEtcd) -> Iterator[list[Station]]:
    made = [Station(tmp_path, etcd, name) for name in ("a", "b", "c")]
    yield made
    for one in made:
        one.store.close()
        # Not the catalog: a thread that was left behind may still use its connection, and closes it when it ends.


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.sleep(0.005)


def run(act: Callable[[trio.Nursery], Any]) -> None:
    """Run `act`, then end everything that it started."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await act(nursery)
            nursery.cancel_scope.cancel()

    trio.run(main)


def in_nursery(test: Callable[..., Any]) -> Callable[..., None]:
    """Turn `test(nursery, **fixtures)` into a test with these fixtures."""

    @functools.wraps(test)
    def play(**fixtures: Any) -> None:
        run(functools.partial(test, **fixtures))

    found = inspect.signature(test)
    play.__signature__ = found.replace(parameters=list(found.parameters.values())[1:])  # type: ignore[attr-defined]
    return play


def pass_time(etcd: MemoryEtcd, seconds: float) -> None:
    assert isinstance(etcd.clock, Clock)
    etcd.clock.now_s += seconds
    etcd.expire()


@in_nursery
async def test_nodes_see_one_another_come_and_go(nursery: trio.Nursery, stations: list[Station], etcd: MemoryEtcd) -> None:
    """P9: and the flows are told."""
    a, b, _ = stations
    for one in stations:
        nursery.start_soon(one.member.run)
    await until(lambda: all(one.names() == ["a", "b", "c"] and one.member.is_connected for one in stations))
    etcd.revoke(b.member.node_lease.lease_id)
    b.store.reachable = False
    await until(lambda: a.names() == ["a", "c"])
    assert [node.name for node in a.changes[-1].dead_nodes] == ["b"]
    b.store.reachable = True
    await until(lambda: a.names() == ["a", "b", "c"])
    assert [node.name for node in a.changes[-1].joined_nodes] == ["b"]


@in_nursery
async def test_what_is_no_record_ends_nobody(nursery: trio.Nursery, stations: list[Station], etcd: MemoryEtcd) -> None:
    """Whoever else writes to the store, or a newer node, may leave anything there and take it away."""
    a, b, c = stations
    nursery.start_soon(a.member.run)
    await until(lambda: a.member.is_connected)
    c.store.commit([], [Put(b"n/nobody", b"{")])
    c.store.commit([], [Delete(b"n/nobody")])
    nursery.start_soon(b.member.run)
    await until(lambda: a.names() == ["a", "b"])


@in_nursery
async def test_an_outage_of_the_store_kills_nobody(
    nursery: trio.Nursery, stations: list[Station], etcd: MemoryEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: longer than every lease, then without room; people are told of both, and that it is over; no flow hears of a death."""
    monkeypatch.setattr(limits, "NODE_RETURN_S", 30.0)
    for one in stations:
        nursery.start_soon(one.member.run)
    await until(lambda: all(one.names() == ["a", "b", "c"] for one in stations))
    for one in stations:
        one.store.reachable = False
    await until(lambda: all(not one.member.is_connected and one.reports.get(TROUBLE) for one in stations))
    pass_time(etcd, 10 * limits.NODE_LEASE_S)

    etcd.is_full = True
    for one in stations:
        one.store.reachable = True
        await until(lambda one=one: "is full" in one.reports[TROUBLE]["what"])
    etcd.is_full = False
    for one in stations:
        await until(lambda one=one: one.member.is_connected and one.reports[TROUBLE] is None)
    await until(lambda: all(one.member.node_lease.lease_id for one in stations))
    assert all(one.names() == ["a", "b", "c"] for one in stations)
    assert [change.dead_nodes for one in stations for change in one.changes if change.dead_nodes] == []


@in_nursery
async def test_who_does_not_come_back_after_an_outage_is_dead(
    nursery: trio.Nursery, stations: list[Station], etcd: MemoryEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: a little later than otherwise."""
    monkeypatch.setattr(limits, "NODE_RETURN_S", 0.3)
    a, b, c = stations
    for one in stations:
        nursery.start_soon(one.member.run)
    await until(lambda: all(one.names() == ["a", "b", "c"] for one in stations))
    for one in stations:
        one.store.reachable = False
    await until(lambda: not any(one.member.is_connected for one in stations))
    pass_time(etcd, 10 * limits.NODE_LEASE_S)
    a.store.reachable = b.store.reachable = True
    await until(lambda: a.names() == b.names() == ["a", "b"])
    assert c.names() == ["a", "b", "c"]


@in_nursery
async def test_a_store_that_forgot_what_happened_is_read_again(nursery: trio.Nursery, stations: list[Station], etcd: MemoryEtcd) -> None:
    a, b, c = stations
    for one in (a, b):
        nursery.start_soon(one.member.run)
    await until(lambda: a.names() == b.names() == ["a", "b"])
    a.store.reachable = False
    nursery.start_soon(c.member.run)
    await until(lambda: b.names() == ["a", "b", "c"])
    etcd.compact(etcd.revision)
    a.store.reachable = True
    await until(lambda: a.names() == ["a", "b", "c"])


@in_nursery
async def test_a_store_that_refuses_each_watch_is_asked_less_and_less_often(
    nursery: trio.Nursery, stations: list[Station], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reads go on: they are no reason to ask at once."""
    delays_s: list[float] = []
    draw = Backoff.next_delay_s

    def next_delay_s(backoff: Backoff) -> float:
        draw(backoff)
        delays_s.append(backoff._s)
        return 0.001

    def refuse(*_: object) -> None:
        raise Compacted("all of it")

    monkeypatch.setattr(limits, "NODE_LEASE_RENEW_S", 10 * limits.RETRY_FIRST_S)
    monkeypatch.setattr(Backoff, "next_delay_s", next_delay_s)
    monkeypatch.setattr(stations[0].store, "watch", refuse)
    nursery.start_soon(stations[0].member._run_watch_loop)
    await until(lambda: len(delays_s) > 5)
    assert delays_s[:2] == [limits.RETRY_FIRST_S, 2 * limits.RETRY_FIRST_S] and delays_s[5] == limits.NODE_LEASE_RENEW_S


def test_a_mover_that_starts_while_the_store_is_away_knows_its_peers(stations: list[Station]) -> None:
    """P1: an island has its neighbours' addresses."""
    a, b, _ = stations

    async def before(nursery: trio.Nursery) -> None:
        for one in (a, b):
            nursery.start_soon(one.member.run)
        await until(lambda: a.names() == ["a", "b"] and len(identity.list_last_members(a.db)) == 2)

    run(before)
    a.store.reachable = False
    assert a.begin().view.nodes and a.names() == ["a", "b"] and not a.member.is_connected


@in_nursery
async def test_a_name_that_another_daemon_took_is_reported(nursery: trio.Nursery, stations: list[Station]) -> None:
    """P11: and this node does not live any more."""
    a, b, _ = stations
    register(a.store, "a", "another catalog")
    for one in (a, b):
        nursery.start_soon(one.member.run)
    await until(lambda: a.reports.get(TROUBLE) and b.names() == ["b"] and b.member.node_lease.lease_id)
    assert "another daemon has joined the cluster as node a" in a.reports[TROUBLE]["what"]
    assert not a.member.node_lease.lease_id
