"""One etcd for many whole nodes in one process and in virtual time: it counts what each of them asks, and how long the answer takes.

`VirtualTime.in_force` makes everything that a node does take virtual time only. Threads become tasks: what a lane does in a worker thread
is done at once, and the lane then sleeps for as long as the store and the pauses would have taken. So one seed gives one course.

The latency is that of a server which answers `ANSWERS_PER_MS` requests in a millisecond, one millisecond away. The cause of an operation
is the name of the task that asks.
"""

import contextlib
import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import trio
from memory_store import MemoryEtcd, MemoryStore, Stored

from ckptfs import limits
from ckptfs.coherence.store_loss import EPOCH_KEY
from ckptfs.errors import StoreUnreachable
from ckptfs.flow.replicate import peer_queues
from ckptfs.store.kv import Compare, Event, Get, Operation, Outcome, Put, WatchEvents

WAY_S = 0.001
"""To the store and back."""
ANSWERS_PER_MS = 20
"""An etcd of three members on good disks answers some 20,000 small requests in a second."""
OVERHEAD_BYTES = 40
"""Of a key in a message: its prefix, revisions, version and lengths."""
EPOCH_NS = 10**18
WAIT_S = limits.ETCD_WAIT_S
LEASE, EPOCH = "lease", "epoch"
BACKGROUND = (LEASE, EPOCH)
"""What each node asks all the time, at times of its own."""


class VirtualTime:
    """The time of all nodes: trio's, and what the task that runs now has yet to sleep."""

    def __init__(self) -> None:
        self._owed_s = self._last_s = 0.0
        self._ticks = itertools.count()

    def now_s(self) -> float:
        with contextlib.suppress(RuntimeError):  # A thread of a pool.
            self._last_s = trio.current_time() + self._owed_s
        return self._last_s

    def now_ns(self) -> int:
        """Each look at the time of day finds another one."""
        return EPOCH_NS + int(self.now_s() * 1e9) + next(self._ticks)

    def spend(self, seconds: float) -> None:
        """Synchronous code waits."""
        self._owed_s += seconds

    async def settle(self) -> None:
        """Sleep for what the synchronous code waited."""
        owed_s, self._owed_s = self._owed_s, 0.0
        if owed_s:
            await trio.sleep(owed_s)

    async def run_inline(self, act: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        """Do what a worker thread would do."""
        await trio.lowlevel.checkpoint()
        try:
            return act(*arguments)
        finally:
            await self.settle()

    def _build_wait(self) -> Callable[[threading.Event, float | None], bool]:
        """Return an `Event.wait`: nobody sets an event while synchronous code waits for it. A new thread waits for its start."""
        wait_really = threading.Event.wait

        def wait(event: threading.Event, timeout: float | None = None) -> bool:
            if timeout is None:
                return wait_really(event)
            if not event.is_set():
                self.spend(timeout)
            return event.is_set()

        return wait

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        with contextlib.ExitStack() as patches:
            for name, act in (
                ("time.monotonic", self.now_s), ("time.time", lambda: self.now_ns() / 1e9), ("time.time_ns", self.now_ns),
                ("time.clock_gettime", lambda _: self.now_s()), ("time.sleep", self.spend), ("trio.to_thread.run_sync", self.run_inline),
            ):  # fmt: skip
                patches.enter_context(mock.patch(name, act))
            patches.enter_context(mock.patch("ckptfs_daemon.mount.cluster.shared_namespace.next_events", SimulatedWatch.wait))
            patches.enter_context(mock.patch.object(peer_queues.threading, "Thread", functools.partial(TaskThread, self)))
            patches.enter_context(mock.patch.object(threading.Event, "wait", self._build_wait()))
            yield


class TaskThread:
    """A thread that is a task of trio's."""

    def __init__(self, time: VirtualTime, *, target: Callable[..., None], args: Sequence[Any] = (), name: str = "", daemon: bool = True):
        self._time, self._target, self._arguments, self._name = time, target, args, name

    def start(self) -> None:
        trio.lowlevel.spawn_system_task(self._time.run_inline, self._target, *self._arguments, name=self._name.split(" ")[0])


@dataclass
class Usage:
    """What the nodes asked in some time. `acts`: for each second, how often each node asked, the background aside."""

    operations: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    told: int = 0
    """Messages of watches."""
    latency_s: float = 0.0
    latency_s_max: float = 0.0
    acts: dict[int, Counter[int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.operations.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def latency_s_mean(self) -> float:
        return self.latency_s / max(1, self.total)

    @property
    def nodes_in_a_second(self) -> int:
        """The most nodes that asked anything within one second."""
        return max(map(len, self.acts.values()), default=0)


class SimulatedEtcd(MemoryEtcd):
    """The server. `usage` grows until it is taken. `is_down`: no member answers."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(time.now_s)
        self.time = time
        self.usage = Usage()
        self.is_down = False
        self.watches: list[SimulatedWatch] = []
        self._began_s = time.now_s()
        self._answers: Counter[int] = Counter()
        self._expired_s = 0.0

    def take_usage(self) -> Usage:
        """What was asked since this was called before."""
        taken, self.usage = self.usage, Usage()
        taken.seconds, self._began_s = self.clock() - self._began_s, self.clock()
        self._answers.clear()
        return taken

    def expire(self) -> None:
        """A lease ends up to a second late, as etcd's do."""
        if self.clock() >= self._expired_s + 1.0 or self.clock() < self._expired_s:
            self._expired_s = self.clock()
            super().expire()

    def charge(self, node: int, length: int, cause: str = "") -> float:
        """Count one request; how long its answer takes."""
        now_s = self.clock()
        cause = cause or _get_cause()
        self.usage.operations[cause] += 1
        self.usage.bytes[cause] += length
        if cause not in BACKGROUND:
            self.usage.acts.setdefault(int(now_s), Counter())[node] += 1
        slot = int(now_s * 1000)
        while self._answers[slot] >= ANSWERS_PER_MS:
            slot += 1
        self._answers[slot] += 1
        latency_s = WAY_S + max(0.0, slot / 1000 - now_s)
        self.usage.latency_s += latency_s
        self.usage.latency_s_max = max(self.usage.latency_s_max, latency_s)
        return latency_s

    def _record(self, key: bytes, revision: int, stored: Stored | None) -> None:
        super()._record(key, revision, stored)
        for watch in self.watches:
            if watch.start <= key < watch.end:
                watch.push(Event(key, revision, stored.item if stored else None))


def _get_cause() -> str:
    """lane repair 1 -> repair."""
    return trio.lowlevel.current_task().name.removeprefix("lane ").rstrip("0123456789 ")


class SimulatedStore(MemoryStore):
    """One node's way to the server."""

    etcd: SimulatedEtcd

    def __init__(self, etcd: SimulatedEtcd, number: int) -> None:
        super().__init__(etcd)
        self.number = number

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        return self._ask_now(self._read, gets, (), timeout_s)

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Outcome:
        return self._ask_now(lambda _: self.etcd.transact(compares, changes, otherwise), compares, changes, timeout_s)

    def read_soon(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Future[Outcome]:
        return self._ask_soon(self._read, gets, (), timeout_s)

    def commit_soon(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Future[Outcome]:
        return self._ask_soon(lambda _: self.etcd.transact(compares, changes, otherwise), compares, changes, timeout_s)

    def grant(self, ttl_s: int, *, timeout_s: float = WAIT_S) -> int:
        return int(self._lease_call(super().grant, ttl_s, timeout_s))

    def keep_alive(self, lease: int, *, timeout_s: float = WAIT_S) -> float:
        return float(self._lease_call(super().keep_alive, lease, timeout_s))

    def watch(self, key: bytes, end: bytes | None, from_revision: int) -> "SimulatedWatch":  # type: ignore[override]
        assert end is not None
        watch = SimulatedWatch(self, key, end)
        for event in self.etcd.events_from(key, end, from_revision):
            watch.push(event)
        self.etcd.watches.append(watch)
        return watch

    # --- messages ----------------------------------------------------------------------------------------------------

    def _read(self, gets: Sequence[Get]) -> Outcome:
        return MemoryStore.read(self, gets)

    def _lease_call(self, act: Callable[[int], float], argument: int, timeout_s: float) -> float:
        self.etcd.time.spend(self._reach_within(timeout_s) + self.etcd.charge(self.number, 2 * OVERHEAD_BYTES))
        return act(argument)

    def _ask_now(self, act: Callable[[Any], Outcome], asked: Sequence[Any], changes: Sequence[Operation], timeout_s: float) -> Outcome:
        self._reach_within(timeout_s)
        outcome = act(asked)
        self.etcd.time.spend(self.etcd.charge(self.number, _measure(asked, changes, outcome)))
        return outcome

    def _ask_soon(
        self, act: Callable[[Any], Outcome], asked: Sequence[Any], changes: Sequence[Operation], timeout_s: float
    ) -> Future[Outcome]:
        future: Future[Outcome] = Future()

        async def answer() -> None:
            try:
                if self.etcd.is_down or not self.reachable:
                    self.etcd.charge(self.number, OVERHEAD_BYTES)
                    await trio.sleep(timeout_s)
                    raise StoreUnreachable("no answer")
                await trio.sleep(WAY_S / 2)
                outcome = act(asked)
                is_poll = not changes and [one.key for one in asked] == [EPOCH_KEY]
                latency_s = self.etcd.charge(self.number, _measure(asked, changes, outcome), EPOCH * is_poll)
                await trio.sleep(latency_s - WAY_S / 2)
                future.set_result(outcome)
            except Exception as failure:
                future.set_exception(failure)

        trio.lowlevel.spawn_system_task(answer, name=_get_cause())
        return future

    def _reach_within(self, timeout_s: float) -> float:
        if self.etcd.is_down or not self.reachable:
            self.etcd.charge(self.number, OVERHEAD_BYTES)
            self.etcd.time.spend(timeout_s)
            raise StoreUnreachable("no answer")
        return 0.0


class SimulatedWatch:
    """Events of a range, as they come. `wait` belongs to one task."""

    def __init__(self, store: SimulatedStore, start: bytes, end: bytes) -> None:
        self.start, self.end, self._store = start, end, store
        self._events: deque[Event] = deque()
        self._has_more = trio.Event()

    def push(self, event: Event) -> None:
        self._events.append(event)
        self._has_more.set()

    async def wait(self) -> WatchEvents:
        await self._has_more.wait()
        await trio.sleep(WAY_S)
        while self._store.etcd.is_down or not self._store.reachable:
            await trio.sleep(limits.ETCD_PAUSE_S)
        self._has_more = trio.Event()
        events = tuple(self._events)
        self._events.clear()
        self._store.etcd.usage.told += len({event.revision for event in events})
        return WatchEvents(events[-1].revision, events)

    def close(self) -> None:
        self._store.etcd.watches.remove(self)


def _measure(asked: Sequence[Compare | Get], changes: Sequence[Operation], outcome: Outcome) -> int:
    """The length of a request and its answer, nearly: keys, values, and what goes with them."""
    sent = sum(OVERHEAD_BYTES + len(one.key) for one in asked) + sum(
        OVERHEAD_BYTES + len(change.key) + (len(change.value) if isinstance(change, Put) else 0) for change in changes
    )
    return sent + sum(OVERHEAD_BYTES + len(item.key) + len(item.value) for items in outcome.results for item in items)
