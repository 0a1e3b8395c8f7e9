"""The shared store in memory: what etcd does, without etcd, for simulations and quick tests. The contract suite keeps it honest.

Time is whatever the clock says that it was given, so a lease can run out without anybody waiting. A store whose commits may be `late`
tells a failure and applies the commit after some more requests, as etcd may.
"""

import bisect
import contextlib
import copy
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ckptfs import limits
from ckptfs.errors import Compacted, LeaseGone, StoreFull, StoreRefused, StoreUnreachable, TooManyOperations, TransactionInvalid
from ckptfs.store.kv import ENDLESS, Compare, CompareTarget, Delete, Event, Get, Item, Operation, Outcome, Put, WatchEvents

WAIT_S = limits.ETCD_WAIT_S
LATE_REQUESTS_MAX = 30


@dataclass
class Lease:
    """Runs out at `end_s`."""

    ttl_s: float
    end_s: float
    keys: set[bytes] = field(default_factory=set)


@dataclass(frozen=True)
class Stored:
    """One version of a key."""

    item: Item
    version: int
    lease: int


class MemoryEtcd:
    """The server: one for all nodes of a test. `transactions` and `bytes_sent` count what the nodes asked of it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.changed = threading.Condition(threading.RLock())
        self.revision = 1
        self.compacted = 0
        self.transactions = 0
        self.bytes_sent = 0
        self.request_bytes_max = limits.ETCD_REQUEST_BYTES_MAX
        self.operations_max = limits.ETCD_TRANSACTION_MAX
        self.is_full = False
        # Sorted; with keys that were deleted, until they are compacted.
        self._keys: list[bytes] = []
        self._history: dict[bytes, list[tuple[int, Stored | None]]] = {}
        self._events: list[Event] = []
        self._leases: dict[int, Lease] = {}
        self._lease_last = 0
        self._late: list[tuple[int, Sequence[Compare], Sequence[Operation]]] = []

    def postpone(self, requests: int, compares: Sequence[Compare], changes: Sequence[Operation]) -> None:
        """Apply a commit whose failure was told after so many more requests of anybody."""
        with self.changed:
            self._late.append((self.transactions + requests, compares, changes))

    def apply_late(self, *, all_of_them: bool = False) -> None:
        """Apply the late commits whose time has come."""
        with self.changed:
            due = [one for one in self._late if all_of_them or one[0] <= self.transactions]
            self._late = [one for one in self._late if one not in due]
            for _, compares, changes in due:
                with contextlib.suppress(StoreRefused):
                    self.transact(compares, changes, ())

    def transact(self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get]) -> Outcome:
        with self.changed:
            self.expire()
            self.apply_late()
            self._check(compares, changes, otherwise)
            self.transactions += 1
            self.bytes_sent += sum(len(change.value) for change in changes if isinstance(change, Put))
            held = all(self._holds(compare) for compare in compares)
            branch: Sequence[Operation] = changes if held else otherwise
            self._check_branch(branch)
            return self._apply(held, branch)

    def _apply(self, held: bool, branch: Sequence[Operation]) -> Outcome:
        results, revision = [], self.revision + 1
        for operation in branch:
            match operation:
                case Get():
                    results.append(self._get(operation, operation.revision or revision))
                case Put():
                    self._put(operation, revision)
                case Delete():
                    for stored in self._range(operation.key, operation.end, revision):
                        self._delete(stored.item.key, revision)
        self.changed.notify_all()
        return Outcome(held, self.revision, tuple(results))

    def grant(self, ttl_s: int) -> int:
        with self.changed:
            if self.is_full:
                raise StoreFull("etcd")
            self._lease_last += 1
            self._leases[self._lease_last] = Lease(ttl_s, self.clock() + ttl_s)
            self.changed.notify_all()
            return self._lease_last

    def keep_alive(self, lease: int) -> float:
        with self.changed:
            self.expire()
            if lease not in self._leases:
                return 0.0
            kept = self._leases[lease]
            kept.end_s = self.clock() + kept.ttl_s
            return kept.ttl_s

    def revoke(self, lease: int) -> None:
        with self.changed:
            if gone := self._leases.pop(lease, None):
                revision = self.revision + 1
                for key in sorted(gone.keys):
                    self._delete(key, revision)
                self.changed.notify_all()

    def expire(self) -> None:
        """End the leases whose time is over."""
        with self.changed:
            for lease in [number for number, one in self._leases.items() if one.end_s <= self.clock()]:
                self.revoke(lease)

    def next_end_s(self) -> float | None:
        return min((max(0.0, lease.end_s - self.clock()) for lease in self._leases.values()), default=None)

    def compact(self, revision: int) -> None:
        with self.changed:
            self.compacted = revision
            self._events = self._events[bisect.bisect_left(self._events, revision, key=lambda event: event.revision) :]
            for key, versions in list(self._history.items()):
                kept = max(0, bisect.bisect_right(versions, revision, key=lambda version: version[0]) - 1)
                self._history[key] = versions[kept:]
                if len(self._history[key]) == 1 and self._history[key][0][1] is None:
                    del self._history[key]
                    self._keys.remove(key)
            self.changed.notify_all()

    def saved(self) -> object:
        """What a backup has: everything as it is now."""
        with self.changed:
            return copy.deepcopy((self.revision, self.compacted, self._keys, self._history, self._events))

    def restore(self, backup: object) -> None:
        """It is as it was then, whatever came after. No lease outlives that."""
        with self.changed:
            self.revision, self.compacted, self._keys, self._history, self._events = copy.deepcopy(backup)  # type: ignore[misc]
            self._leases.clear()
            self.changed.notify_all()

    def wipe(self) -> None:
        self.restore(MemoryEtcd().saved())

    def events_from(self, key: bytes, end: bytes | None, revision: int) -> list[Event]:
        """The events of a range since that revision."""
        if revision < self.compacted:
            raise Compacted(f"nothing is kept before revision {self.compacted}")
        start = bisect.bisect_left(self._events, revision, key=lambda event: event.revision)
        return [event for event in self._events[start:] if _within(event.key, key, end)]

    def _check(self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get]) -> None:
        if max(len(compares), len(changes), len(otherwise)) > self.operations_max:
            raise TooManyOperations("etcd")
        if sum(len(change.value) for change in changes if isinstance(change, Put)) > self.request_bytes_max:
            raise TransactionInvalid("request is too large")
        if self.is_full and any(isinstance(change, Put) for change in changes):
            raise StoreFull("etcd")
        puts = [change.key for change in changes if isinstance(change, Put)]
        deletes = [change for change in changes if isinstance(change, Delete)]
        if len(set(puts)) < len(puts) or any(_within(key, delete.key, delete.end) for key in puts for delete in deletes):
            raise TransactionInvalid("duplicate key given in txn request")

    def _check_branch(self, branch: Sequence[Operation]) -> None:
        for operation in branch:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                raise LeaseGone("requested lease not found")
            if isinstance(operation, Get) and 0 < operation.revision < self.compacted:
                raise Compacted("required revision has been compacted")
            if isinstance(operation, Get) and operation.revision > self.revision:
                raise StoreRefused("required revision is a future revision")

    def _holds(self, compare: Compare) -> bool:
        found = self._range(compare.key, compare.end, self.revision)
        if not found:
            return compare.target is not CompareTarget.VALUE and _related(0, compare.relation, compare.value)
        return all(_related(_target(stored, compare.target), compare.relation, compare.value) for stored in found)

    def _range(self, key: bytes, end: bytes | None, revision: int) -> list[Stored]:
        start = bisect.bisect_left(self._keys, key)
        stop = len(self._keys) if end == ENDLESS else bisect.bisect_left(self._keys, key + b"\0" if end is None else end)
        found = (self._at(name, revision) for name in self._keys[start:stop])
        return [stored for stored in found if stored is not None]

    def _at(self, key: bytes, revision: int) -> Stored | None:
        versions = self._history[key]
        place = bisect.bisect_right(versions, revision, key=lambda version: version[0])
        return versions[place - 1][1] if place else None

    def _get(self, get: Get, revision: int) -> tuple[Item, ...]:
        items = [stored.item for stored in self._range(get.key, get.end, revision)][: get.limit or None]
        if get.keys_only:
            items = [Item(item.key, b"", item.mod_revision, item.create_revision) for item in items]
        return tuple(items)

    def _put(self, put: Put, revision: int) -> None:
        if put.key not in self._history:
            bisect.insort(self._keys, put.key)
            self._history[put.key] = []
        was = self._at(put.key, revision)
        if was is not None and was.lease in self._leases:
            self._leases[was.lease].keys.discard(put.key)
        if put.lease:
            self._leases[put.lease].keys.add(put.key)
        item = Item(put.key, put.value, revision, was.item.create_revision if was else revision)
        self._record(put.key, revision, Stored(item, was.version + 1 if was else 1, put.lease))

    def _delete(self, key: bytes, revision: int) -> None:
        was = self._at(key, revision)
        if was is not None and was.lease in self._leases:
            self._leases[was.lease].keys.discard(key)
        self._record(key, revision, None)

    def _record(self, key: bytes, revision: int, stored: Stored | None) -> None:
        self.revision = revision
        self._history[key].append((revision, stored))
        self._events.append(Event(key, revision, stored.item if stored else None))


def _within(key: bytes, start: bytes, end: bytes | None) -> bool:
    return key == start if end is None else start <= key and (end == ENDLESS or key < end)


def _target(stored: Stored, target: CompareTarget) -> int | bytes:
    item = stored.item
    values = {
        CompareTarget.VERSION: stored.version,
        CompareTarget.CREATE: item.create_revision,
        CompareTarget.MOD: item.mod_revision,
        CompareTarget.VALUE: item.value,
    }
    return values[target]


def _related(found: int | bytes, relation: str, value: int | bytes) -> bool:
    if relation in ("=", "!="):
        return (found == value) is (relation == "=")
    return found < value if relation == "<" else found > value  # type: ignore[operator]


class MemoryStore:
    """One node's way to the server. While `reachable` is False every call fails at once. `late`: so many of the commits fail, and are
    applied at a random later moment.
    """

    def __init__(self, etcd: MemoryEtcd | None = None, late: float = 0.0, dice: random.Random | None = None) -> None:
        self.etcd = etcd or MemoryEtcd()
        self.late, self._late_dice = late, dice or random.Random(0)
        self._reachable = True
        self._closed = False

    @property
    def reachable(self) -> bool:
        return self._reachable and not self._closed

    @reachable.setter
    def reachable(self, reachable: bool) -> None:
        with self.etcd.changed:
            self._reachable = reachable
            self.etcd.changed.notify_all()

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        self._reach()
        with self.etcd.changed:
            revision, results = self.etcd.revision, ()
            for start in range(0, max(1, len(gets)), self.etcd.operations_max):
                outcome = self.etcd.transact((), gets[start : start + self.etcd.operations_max], ())
                revision, results = outcome.revision, results + outcome.results
            return Outcome(True, revision, results)

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Outcome:
        self._reach()
        if self.late and self._late_dice.random() < self.late:
            self.etcd.postpone(self._late_dice.randrange(LATE_REQUESTS_MAX), compares, changes)
            raise StoreUnreachable("no answer in time")
        return self.etcd.transact(compares, changes, otherwise)

    def read_soon(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Future[Outcome]:
        return _soon(lambda: self.read(gets, timeout_s=timeout_s))

    def commit_soon(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Future[Outcome]:
        return _soon(lambda: self.commit(compares, changes, otherwise, timeout_s=timeout_s))

    def grant(self, ttl_s: int, *, timeout_s: float = WAIT_S) -> int:
        self._reach()
        return self.etcd.grant(ttl_s)

    def keep_alive(self, lease: int, *, timeout_s: float = WAIT_S) -> float:
        self._reach()
        return self.etcd.keep_alive(lease)

    def revoke(self, lease: int, *, timeout_s: float = WAIT_S) -> None:
        self._reach()
        self.etcd.revoke(lease)

    def watch(self, key: bytes, end: bytes | None, from_revision: int) -> "MemoryWatch":
        return MemoryWatch(self, key, end, from_revision)

    def members(self) -> "list[MemoryStore]":
        made = MemoryStore(self.etcd)
        made.reachable = self.reachable
        return [made]

    def rotate_member(self) -> None:
        pass

    def close(self) -> None:
        with self.etcd.changed:
            self._closed = True
            self.etcd.changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def _reach(self) -> None:
        if not self.reachable:
            raise StoreUnreachable("the memory store is cut off")


class MemoryWatch:
    """One thread iterates; any thread may close."""

    def __init__(self, store: MemoryStore, key: bytes, end: bytes | None, from_revision: int) -> None:
        self._store, self._etcd = store, store.etcd
        self._key, self._end = key, end
        self._next_revision = from_revision or store.etcd.revision + 1
        self._closed = False

    def __iter__(self) -> "MemoryWatch":
        return self

    def __next__(self) -> WatchEvents:
        with self._etcd.changed:
            while not self._closed and not self._store.closed:
                if told := self.poll():
                    return told
                self._etcd.changed.wait(self._etcd.next_end_s())
        raise StopIteration

    def poll(self) -> WatchEvents | None:
        """What is there to tell, without waiting."""
        with self._etcd.changed:
            self._etcd.expire()
            events = self._etcd.events_from(self._key, self._end, self._next_revision) if self._store.reachable else []
            if not events:
                return None
            self._next_revision = events[-1].revision + 1
            return WatchEvents(events[-1].revision, tuple(events))

    def close(self) -> None:
        with self._etcd.changed:
            self._closed = True
            self._etcd.changed.notify_all()


def _soon(act: Callable[[], Outcome]) -> Future[Outcome]:
    future: Future[Outcome] = Future()
    future.set_running_or_notify_cancel()
    try:
        future.set_result(act())
    except Exception as failure:
        future.set_exception(failure)
    return future
