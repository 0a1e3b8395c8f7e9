"""What the shared store promises, on a real etcd and on the tests' memory store alike (P1)."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from daemon_under_test import eventually
from etcd_server import Etcd, serving
from memory_store import MemoryEtcd, MemoryStore

from ckptfs import limits
from ckptfs.errors import Compacted, LeaseGone, StoreRefused, StoreUnreachable
from ckptfs.store.etcd import EtcdStore
from ckptfs.store.kv import ENDLESS, Compare, CompareTarget, Delete, Get, Item, Outcome, Put, Store, WatchEvents, iter_pages, prefix_end

PATIENCE_S = 60.0


class World:
    """An etcd, real or in memory, and stores on it."""

    def __init__(self, etcd: Etcd | None) -> None:
        self._real, self._etcd = etcd, etcd or MemoryEtcd()
        self._made: list[EtcdStore | MemoryStore] = []

    def store(self) -> Store:
        etcd = self._etcd
        self._made.append(MemoryStore(etcd) if isinstance(etcd, MemoryEtcd) else EtcdStore(etcd.addresses, "one"))
        return self._made[-1]

    def cut(self, off: bool = True) -> None:
        if self._real:
            self._real.stop() if off else self._real.start()
        for store in self._made:
            if isinstance(store, MemoryStore):
                store.reachable = not off

    def join(self) -> None:
        self.cut(off=False)

    def compact(self, revision: int) -> None:
        self._etcd.compact(revision)

    def close(self) -> None:
        for store in self._made:
            store.close()


@pytest.fixture(params=["memory", "etcd"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with serving(tmp_path) if request.param == "etcd" else nullcontext() as etcd, closing(World(etcd)) as made:
        yield made


@pytest.fixture
def store(world: World) -> Store:
    return world.store()


def put(store: Store, *pairs: tuple[bytes, bytes], lease: int = 0) -> int:
    """Put without comparing; the revision."""
    outcome = store.commit((), [Put(key, value, lease) for key, value in pairs])
    assert outcome.succeeded and outcome.results == ()
    return outcome.revision


def get(store: Store, key: bytes, **more: Any) -> tuple[Item, ...]:
    return store.read([Get(key, **more)]).results[0]


def pairs(items: Sequence[Item]) -> list[tuple[bytes, bytes]]:
    return [(item.key, item.value) for item in items]


def waits_in_vain(call: Callable[[], object]) -> bool:
    try:
        call()
    except StoreUnreachable:
        return True
    return False


class Watching:
    def __init__(self, store: Store, key: bytes, end: bytes | None, from_revision: int) -> None:
        self._watch = store.watch(key, end, from_revision)
        self.told: list[WatchEvents] = []
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for told in self._watch:
                self.told.append(told)
        except StoreRefused as failure:
            self.failure = failure

    def events(self) -> list[tuple[bytes, bytes | None]]:
        return [(event.key, event.item.value if event.item else None) for told in self.told for event in told.events]

    def wait_for(self, *events: tuple[bytes, bytes | None]) -> None:
        eventually(lambda: len(self.events()) >= len(events), what=f"{events} are told")
        assert self.events() == list(events)

    def close(self) -> None:
        self._watch.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def test_what_was_put_is_read_with_its_revisions(store: Store) -> None:
    first = put(store, (b"a", b"1"))
    second = put(store, (b"a", b"2"), (b"\x00\xff/", b"\xff\x00"))
    assert second == first + 1
    outcome = store.read([Get(b"a"), Get(b"none"), Get(b"\x00\xff/")])
    assert outcome == Outcome(True, second, ((Item(b"a", b"2", second, first),), (), (Item(b"\x00\xff/", b"\xff\x00", second, second),)))


def test_ranges_are_in_order_end_before_their_end_and_may_be_limited(store: Store) -> None:
    put(store, *((key, b"x") for key in (b"d/b", b"d/a", b"d/\xff", b"d", b"e", b"c", b"d0")))
    whole = [b"d/a", b"d/b", b"d/\xff"]
    assert [item.key for item in get(store, b"d/", end=prefix_end(b"d/"))] == whole
    assert [item.key for item in get(store, b"d/", end=prefix_end(b"d/"), limit=2)] == whole[:2]
    assert [(item.key, item.value) for item in get(store, b"d/b", end=b"d/\xff", keys_only=True)] == [(b"d/b", b"")]
    assert [item.key for item in get(store, b"d0", end=ENDLESS)] == [b"d0", b"e"]
    assert len(get(store, b"", end=prefix_end(b""))) == 7


def test_the_end_of_a_prefix() -> None:
    assert (prefix_end(b"a"), prefix_end(b"a\xff\xff"), prefix_end(b"\xff"), prefix_end(b"")) == (b"b", b"b", ENDLESS, ENDLESS)


def test_clusters_on_one_etcd_do_not_see_each_other(etcd: Etcd) -> None:
    with closing(EtcdStore(etcd.addresses, "one")) as one, closing(EtcdStore(etcd.addresses, "on")) as other:
        put(one, (b"a", b"1"))
        assert get(other, b"", end=ENDLESS) == () and len(get(one, b"", end=ENDLESS)) == 1
        other.commit((), [Delete(b"", ENDLESS)])
        assert len(get(one, b"", end=ENDLESS)) == 1


def test_the_past_can_be_read_until_it_is_compacted(store: Store, world: World) -> None:
    first = put(store, (b"a", b"1"))
    second = put(store, (b"a", b"2"))
    store.commit((), [Delete(b"a")])
    assert pairs(get(store, b"a", revision=first)) == [(b"a", b"1")] and get(store, b"a") == ()
    world.compact(second)
    assert pairs(get(store, b"a", revision=second)) == [(b"a", b"2")]
    with pytest.raises(Compacted):
        get(store, b"a", revision=first)
    with pytest.raises(StoreRefused):
        get(store, b"a", revision=second + 1000)


def test_a_read_of_many_is_of_one_revision(store: Store) -> None:
    """More than fit one transaction, while somebody writes."""
    keys = [b"%04d" % number for number in range(3 * limits.ETCD_TRANSACTION_MAX + 5)]
    stop, written = threading.Event(), threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            put(store, (keys[0], b"%d" % number), (keys[-1], b"%d" % number))
            written.set()

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        written.wait(PATIENCE_S)
        outcomes = [store.read([Get(key) for key in keys]) for _ in range(10)]
        stop.set()
        writing.result()
    for outcome in outcomes:
        assert len(outcome.results) == len(keys) and outcome.results[1] == ()
        assert outcome.results[0][0].value == outcome.results[-1][0].value
        assert outcome.results[0][0].mod_revision <= outcome.revision


def test_a_long_range_comes_in_pages_of_one_revision(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ETCD_PAGE_ITEMS", 7)
    keys = [b"d/%03d" % number for number in range(21)]
    revision = put(store, *((key, b"x") for key in keys))
    found = []
    for seen, items in iter_pages(store, b"d/"):
        put(store, (b"d/999", b"later"))
        assert seen == revision
        found += [item.key for item in items]
    assert found == keys
    ((seen, items),) = iter_pages(store, b"none/")
    assert seen > revision and items == (), "a watch begins where the read ended, also of nothing"


def test_a_commit_does_its_changes_in_order_and_says_what_it_read(store: Store) -> None:
    put(store, (b"a/1", b"x"), (b"a/2", b"y"), (b"b", b"z"))
    outcome = store.commit((), [Get(b"a/1"), Delete(b"a/", prefix_end(b"a/")), Put(b"c", b"new"), Get(b"c"), Delete(b"none")])
    assert outcome.succeeded and [pairs(found) for found in outcome.results] == [[(b"a/1", b"x")], [(b"c", b"new")]]
    assert outcome.results[1][0].mod_revision == outcome.revision
    assert pairs(get(store, b"", end=ENDLESS)) == [(b"b", b"z"), (b"c", b"new")]


def test_nothing_changes_where_nothing_is_deleted(store: Store) -> None:
    revision = put(store, (b"a", b"1"))
    assert store.commit((), [Delete(b"none")]).revision == revision


def test_a_commit_whose_comparison_fails_changes_nothing_and_reads(store: Store) -> None:
    first = put(store, (b"a", b"1"))
    outcome = store.commit(
        [Compare(b"a", CompareTarget.MOD, "=", first + 1), Compare(b"a", CompareTarget.VALUE, "=", b"1")],
        [Put(b"b", b"x")],
        [Get(b"a"), Get(b"b")],
    )
    assert not outcome.succeeded and outcome.revision == first
    assert [pairs(found) for found in outcome.results] == [[(b"a", b"1")], []]
    assert get(store, b"b") == ()


def test_comparisons(store: Store) -> None:
    first = put(store, (b"a", b"b1"))
    second = put(store, (b"a", b"b2"))

    def holds(key: bytes, target: CompareTarget, relation: Any, value: int | bytes) -> bool:
        return store.commit([Compare(key, target, relation, value)], []).succeeded

    assert holds(b"a", CompareTarget.VERSION, "=", 2) and not holds(b"a", CompareTarget.VERSION, "=", 1)
    assert holds(b"a", CompareTarget.CREATE, "=", first) and holds(b"a", CompareTarget.CREATE, "<", second)
    assert all(holds(b"a", CompareTarget.MOD, relation, value) for relation, value in (("=", second), (">", first), ("!=", first)))
    assert holds(b"a", CompareTarget.VALUE, "=", b"b2") and holds(b"a", CompareTarget.VALUE, ">", b"b1")
    assert not holds(b"a", CompareTarget.VALUE, "<", b"b2")
    assert all(holds(b"none", target, "=", 0) for target in (CompareTarget.VERSION, CompareTarget.CREATE, CompareTarget.MOD))
    assert not any(holds(b"none", CompareTarget.VALUE, relation, b"x") for relation in ("=", "!=", "<", ">"))


def test_comparisons_of_ranges(store: Store) -> None:
    """What rmdir needs: that there is nothing below a key."""
    empty = Compare(b"d/", CompareTarget.VERSION, "=", 0, end=prefix_end(b"d/"))
    put(store, (b"d", b""), (b"d0", b""))
    assert store.commit([empty], [Put(b"seen", b"")]).succeeded
    newest = put(store, (b"d/a", b"same"), (b"d/b", b"same"))
    assert not store.commit([empty], []).succeeded
    assert store.commit([Compare(b"d/", CompareTarget.VALUE, "=", b"same", end=prefix_end(b"d/"))], []).succeeded
    put(store, (b"d/b", b"other"))
    assert not store.commit([Compare(b"d/", CompareTarget.VALUE, "=", b"same", end=prefix_end(b"d/"))], []).succeeded
    assert not store.commit([Compare(b"d/", CompareTarget.MOD, "<", newest + 1, end=prefix_end(b"d/"))], []).succeeded


def test_the_largest_commit_and_one_beyond(store: Store) -> None:
    most = limits.ETCD_TRANSACTION_MAX
    keys = [b"%03d" % number for number in range(most + 1)]
    absent = [Compare(key, CompareTarget.CREATE, "=", 0) for key in keys]
    large = limits.ETCD_REQUEST_BYTES_MAX // most - 200
    outcome = store.commit(absent[:most], [Put(key, bytes(large)) for key in keys[:most]], [Get(key) for key in keys[:most]])
    assert outcome.succeeded and len(get(store, b"", end=ENDLESS)) == most
    for refused in (
        lambda: store.commit(absent, [Put(b"a", b"")]),
        lambda: store.commit((), [Put(key, b"") for key in keys]),
        lambda: store.commit(absent[:1], [Put(b"a", b"")], [Get(key) for key in keys]),
    ):
        with pytest.raises(StoreRefused):
            refused()
    assert get(store, b"a") == ()


def test_a_commit_changes_a_key_once(store: Store) -> None:
    for changes in ([Put(b"a", b"1"), Put(b"a", b"2")], [Put(b"a", b"1"), Delete(b"", ENDLESS)], [Delete(b"a"), Put(b"a", b"1")]):
        with pytest.raises(StoreRefused):
            store.commit((), changes)
    assert store.commit((), [Delete(b"a"), Delete(b"a")]).succeeded
    assert get(store, b"a") == ()


def test_of_many_who_create_one_key_one_succeeds(store: Store, world: World) -> None:
    """Several threads, several nodes."""
    stores = [store, world.store()]

    def create(number: int) -> Outcome:
        mine = stores[number % 2]
        return mine.commit([Compare(b"a", CompareTarget.CREATE, "=", 0)], [Put(b"a", b"%d" % number)], [Get(b"a")], timeout_s=PATIENCE_S)

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(create, range(32)))
    (winner,) = [number for number, outcome in enumerate(outcomes) if outcome.succeeded]
    assert {outcome.results[0][0].value for outcome in outcomes if not outcome.succeeded} == {b"%d" % winner}


def test_calls_that_nobody_waits_for(store: Store) -> None:
    """Many at once, each answered once, in whatever thread."""
    lock, answered = threading.Lock(), []

    def note(future: Future[Outcome]) -> None:
        with lock:
            answered.append(future.result().succeeded)

    for number in range(100):
        store.commit_soon((), [Put(b"%d" % number, b"")], timeout_s=PATIENCE_S).add_done_callback(note)
    eventually(lambda: len(answered) == 100, what="all are answered")
    many = store.read_soon([Get(b"%d" % number) for number in range(300)], timeout_s=PATIENCE_S).result(PATIENCE_S)
    assert [len(found) for found in many.results] == [1] * 100 + [0] * 200
    with pytest.raises(StoreRefused):
        store.commit_soon((), [Put(b"a", b""), Put(b"a", b"")]).result(PATIENCE_S)


def test_a_lease_that_is_not_kept_alive_takes_its_keys_along(store: Store) -> None:
    lease = store.grant(2)
    revision = put(store, (b"n/1", b"x"), (b"n/2", b"y"), lease=lease)
    put(store, (b"n/2", b"without"))
    watching = Watching(store, b"n/", prefix_end(b"n/"), revision + 2)
    watching.wait_for((b"n/1", None))
    assert store.keep_alive(lease) == 0.0
    assert pairs(get(store, b"n/", end=prefix_end(b"n/"))) == [(b"n/2", b"without")]
    with pytest.raises(LeaseGone):
        put(store, (b"n/1", b"again"), lease=lease)
    assert get(store, b"n/1") == ()
    watching.close()


def test_a_lease_that_is_kept_alive_stays(store: Store) -> None:
    """As long as another one that is not."""
    kept, left = store.grant(2), store.grant(3)
    put(store, (b"kept", b""), lease=kept)
    put(store, (b"left", b""), lease=left)
    eventually(lambda: store.keep_alive(kept) > 0 and not get(store, b"left"), what="the other lease is gone")
    assert get(store, b"kept")


def test_revoking_a_lease_deletes_its_keys_at_once(store: Store) -> None:
    lease = store.grant(600)
    revision = put(store, (b"a", b""), (b"b", b""), lease=lease)
    assert store.keep_alive(lease) > 500
    store.revoke(lease)
    assert get(store, b"", end=ENDLESS) == ()
    store.revoke(lease)
    watching = Watching(store, b"", ENDLESS, revision + 1)
    watching.wait_for((b"a", None), (b"b", None))
    assert watching.told == [WatchEvents(revision + 1, watching.told[0].events)]
    watching.close()


def test_a_watch_reports_every_event_from_a_revision_on(store: Store, world: World) -> None:
    put(store, (b"d/a", b"before"))
    start = put(store, (b"d/a", b"1"), (b"d/b", b"2"), (b"e", b"other"))
    watching = Watching(store, b"d/", prefix_end(b"d/"), start)
    watching.wait_for((b"d/a", b"1"), (b"d/b", b"2"))
    put(world.store(), (b"d/c", b"3"))
    end = store.commit((), [Delete(b"d/", prefix_end(b"d/"))]).revision
    put(store, (b"f", b"other"))
    watching.wait_for((b"d/a", b"1"), (b"d/b", b"2"), (b"d/c", b"3"), (b"d/a", None), (b"d/b", None), (b"d/c", None))
    assert watching.told[-1].revision == end and {event.revision for event in watching.told[-1].events[-3:]} == {end}
    single = Watching(store, b"d/a", None, start)
    single.wait_for((b"d/a", b"1"), (b"d/a", None))
    single.close()
    watching.close()


def test_a_watch_reports_a_revision_larger_than_a_message_whole(store: Store) -> None:
    start = put(store, (b"first", b""))
    for number in range(4):
        put(store, *((b"%d/%03d" % (number, part), bytes(11_000)) for part in range(120)))
    watching = Watching(store, b"", ENDLESS, start)
    eventually(lambda: len(watching.events()) == 481, what="all is told")
    for told in watching.told:
        first = told.events[0]
        assert len([event for event in told.events if event.revision == first.revision]) in (1, 120)
    watching.close()


def test_a_watch_that_waits_can_be_closed_and_ends_with_its_store(world: World, store: Store) -> None:
    watching, other = Watching(store, b"a", None, 1), Watching(store, b"b", None, 1)
    put(store, (b"a", b""), (b"b", b""))
    watching.wait_for((b"a", b""))
    other.wait_for((b"b", b""))
    watching.close()
    store.close()
    other.thread.join(PATIENCE_S)
    assert not other.thread.is_alive() and other.failure is None


def test_a_watch_goes_on_after_an_outage_and_misses_nothing(store: Store, world: World) -> None:
    start = put(store, (b"a", b"1"))
    watching = Watching(store, b"a", None, start)
    watching.wait_for((b"a", b"1"))
    world.cut()
    assert waits_in_vain(lambda: store.read([Get(b"a")], timeout_s=0.5))
    world.join()
    eventually(lambda: not waits_in_vain(lambda: put(world.store(), (b"a", b"2"))), what="the store answers")
    watching.wait_for((b"a", b"1"), (b"a", b"2"))
    watching.close()


def test_a_watch_of_what_was_compacted_says_so(store: Store, world: World) -> None:
    first = put(store, (b"a", b"1"))
    revisions = [put(store, (b"a", b"%d" % number)) for number in range(5)]
    world.compact(revisions[3])
    watching = Watching(store, b"a", None, first)
    eventually(lambda: watching.failure is not None, what="the watch fails")
    assert isinstance(watching.failure, Compacted)
    later = Watching(store, b"a", None, revisions[4])
    later.wait_for((b"a", b"4"))
    later.close()


def test_a_store_that_is_gone_is_unreachable_and_comes_back(store: Store, world: World) -> None:
    """P1: every kind of call ends, and the next one works once the store is back."""
    lease = store.grant(600)
    put(store, (b"a", b"1"))
    world.cut()
    calls: list[Callable[[], object]] = [
        lambda: store.read([Get(b"a")], timeout_s=0.3),
        lambda: store.read([Get(b"%d" % number) for number in range(200)], timeout_s=0.3),
        lambda: store.commit((), [Put(b"a", b"2")], timeout_s=0.3),
        lambda: store.grant(5, timeout_s=0.3),
        lambda: store.keep_alive(lease, timeout_s=0.3),
        lambda: store.revoke(lease, timeout_s=0.3),
        lambda: store.read_soon([Get(b"a")], timeout_s=0.3).result(PATIENCE_S),
    ]
    assert all(waits_in_vain(call) for call in calls)
    world.join()
    assert pairs(store.read([Get(b"a")], timeout_s=PATIENCE_S).results[0]) == [(b"a", b"1")]
    assert store.keep_alive(lease, timeout_s=PATIENCE_S) > 0


def test_a_closed_store_is_unreachable(store: Store) -> None:
    put(store, (b"a", b"1"))
    store.close()
    with pytest.raises(StoreUnreachable):
        store.read([Get(b"a")])
