"""The drain: every closed file is brought to its highest level, until a deadline.

The most urgent files come first, and at its end the log says which checkpoints are safe (`rescue`).

It runs twice at the end of a mount: while the mount is attached and serves, and again after the unmount for what was closed meanwhile. If
the first one missed its deadline, the second one is short, because the obstacle is known.

The deadline is `drain_deadline` of the configuration. Without one it follows from what is left and from the measured speed of the PFS. It
is computed again as long as something moves, and a standstill ends the drain. `DrainClock` decides; it is pure.

Crash safety: the drain keeps nothing. The next mover begins it again.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import trio

from ckptfs import limits
from ckptfs.catalog import journal, peer_copies, summary
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.event_log import EventKind
from ckptfs.quantities import format_count, format_size
from ckptfs_daemon.event_writer import events
from ckptfs_daemon.rescue import Rescue, get_needed_s

log = logging.getLogger(__name__)

POLL_S = 0.05
TURN_S = 1.0


@dataclass(frozen=True, slots=True)
class Pending:
    """What a drain still has to do. `size_bytes` leaves out what the PFS has of the file under way."""

    files: int = 0
    size_bytes: int = 0
    changes: int = 0
    unsealed: int = 0
    unsafe: int = 0

    @property
    def is_nothing(self) -> bool:
        return not (self.files or self.changes or self.unsealed or self.unsafe)

    @property
    def all_files(self) -> int:
        return max(self.files, self.unsealed, self.unsafe)

    def describe(self) -> str:
        return f"{format_count(self.all_files, 'file')} ({format_size(self.size_bytes)}), {format_count(self.changes, 'other change')}"


class DrainEnd(NamedTuple):
    """What a drain waits for: changes up to a row of the journal, files closed up to a time.

    `closed_ns` counts from 1970.
    """

    row: int
    closed_ns: int


def get_end(db: Database) -> DrainEnd:
    """Return the end of all that was closed and changed until now."""
    return DrainEnd(summary.get_journal_end(db), time.time_ns())


def load_pending(db: Database, end: DrainEnd) -> Pending:
    """Return what is pending up to `end`.

    What applications close later does not count, so that they cannot keep a drain from ending.
    """
    files, size, changes = summary.count_journal_left(db, end.row)
    copied = sum(summary.get_copied_bytes(db).values())
    unsealed, unsafe = summary.count_unsealed(db, end.closed_ns), peer_copies.count_unsafe(db, end.closed_ns)
    return Pending(files, max(0, size - copied), changes, unsealed, unsafe)


def get_deadline_s(configured_s: float | None, pending: Pending, bytes_per_s: float) -> float:
    """Return how long a drain of `pending` may take. `bytes_per_s`: the speed of the PFS, 0 if unknown."""
    if configured_s is not None:
        return configured_s
    needed_s = get_needed_s(pending.size_bytes, pending.files + pending.changes, bytes_per_s)
    return min(limits.DRAIN_DEADLINE_S_MAX, limits.DRAIN_DEADLINE_S_MIN + limits.DRAIN_MARGIN * needed_s)


@dataclass(frozen=True, slots=True)
class DrainClock:
    """When a drain ends. Times are of the monotonic clock; `moved_s` is when something was done last."""

    configured_s: float | None
    began_s: float
    until_s: float
    moved_s: float
    pending: Pending

    def get_left_s(self, now_s: float) -> float:
        """Return the seconds until the drain ends if nothing moves."""
        until_s = self.until_s if self.configured_s is not None else min(self.until_s, self.moved_s + limits.DRAIN_STALL_S)
        return until_s - now_s


def start_clock(configured_s: float | None, pending: Pending, bytes_per_s: float, now_s: float) -> DrainClock:
    return DrainClock(configured_s, now_s, now_s + get_deadline_s(configured_s, pending, bytes_per_s), now_s, pending)


def advance_clock(clock: DrainClock, pending: Pending, bytes_per_s: float, now_s: float) -> DrainClock:
    """Return the clock after a look at what is pending."""
    if pending == clock.pending:
        return clock
    until_s = clock.until_s
    if clock.configured_s is None:
        until_s = max(until_s, now_s + get_deadline_s(None, pending, bytes_per_s))
        until_s = min(until_s, clock.began_s + limits.DRAIN_DEADLINE_S_MAX)
    return replace(clock, until_s=until_s, moved_s=now_s, pending=pending)


def record_result(db: Database, cause: str, *, is_done: bool, began_s: float) -> None:
    """Record how a drain ended. `began_s`: of the monotonic clock."""
    left = load_pending(db, get_end(db))
    seconds = round(time.monotonic() - began_s, 3)
    events.record(EventKind.DRAINED, cause=cause, done=is_done, files_left=left.files, bytes_left=left.size_bytes, duration_s=seconds)


class Drain:
    def __init__(self, db: Database, config: Config, retry_now: Callable[[], None]) -> None:
        """`retry_now` runs all lanes at once, and belongs to the trio thread."""
        self._db = db
        self._configured_s = config.drain_deadline_s
        self._level = config.highest_level
        self._retry_now = retry_now
        self._missed_s = -math.inf

    def record_missed(self) -> None:
        """Record that a drain missed the deadline of this mount just now. Any thread may call."""
        self._missed_s = time.monotonic()

    async def drain_attached(self, report: Callable[[float, str], None]) -> bool:
        """Drain while the mount serves. Returns True if all that was closed before a moment ago is drained.

        `report(seconds, text)` gets how long it may still take, and what is left.
        """
        began_s, is_done = time.monotonic(), False
        for _ in range(limits.DRAIN_ROUNDS_MAX):
            is_done = await self._drain(self._configured_s, report)
            if not is_done:
                self.record_missed()
                break
            if load_pending(self._db, get_end(self._db)).is_nothing:
                break
        record_result(self._db, "end", is_done=is_done, began_s=began_s)
        return is_done

    async def drain_rest(self, report: Callable[[float, str], None]) -> None:
        """Drain after the unmount, and say what is left.

        Only a mount process commits rows to the shared namespace, so those that it has not committed wait for the next mount.
        """
        configured_s, began_s = self._configured_s, time.monotonic()
        if time.monotonic() < self._missed_s + limits.DRAIN_RECENT_S:
            configured_s = min(limits.DRAIN_LAST_S, limits.DRAIN_LAST_S if configured_s is None else configured_s)
        end = get_end(self._db)
        committed = journal.get_committed_end(self._db)
        is_all, end = committed == end.row, end._replace(row=committed)
        is_done = await self._drain(configured_s, report, end) and is_all
        record_result(self._db, "unmounted", is_done=is_done, began_s=began_s)
        if not is_done:
            left = load_pending(self._db, get_end(self._db))
            unsafe = f", {left.unsafe} lack copies on other nodes" if left.unsafe else ""
            reason = "drained until the deadline" if is_all else "drain: etcd lacks some of the changes"
            message = "%s: the PFS lacks %d changes, %d files are not sealed%s; the next start continues"
            log.warning(message, reason, left.files + left.changes, left.unsealed, unsafe)

    async def drain_noticed(self, deadline_s: float) -> bool:
        """Drain because this node is about to be taken away. Returns False at the deadline."""
        began_s = time.monotonic()
        is_done = await self._drain(deadline_s, lambda seconds, text: None, is_last=True)
        record_result(self._db, "notice", is_done=is_done, began_s=began_s)
        return is_done

    async def _drain(
        self, configured_s: float | None, report: Callable[[float, str], None], end: DrainEnd | None = None, *, is_last: bool = False
    ) -> bool:
        """Drain up to `end`, by default what was closed before now, the most urgent first.

        Returns False at the deadline.
        """
        end = end or get_end(self._db)
        if self._level is None:
            return await self._drain_in_order(configured_s, report, end, None)
        rescue = Rescue(self._db, self._level, configured_s, is_last=is_last)
        try:
            if is_last:
                await trio.to_thread.run_sync(rescue.refresh_if_due)  # What it releases is pending from then on.
            return await self._drain_in_order(configured_s, report, end, rescue)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(rescue.end)

    async def _drain_in_order(
        self, configured_s: float | None, report: Callable[[float, str], None], end: DrainEnd, rescue: Rescue | None
    ) -> bool:
        pending = load_pending(self._db, end)
        clock = start_clock(configured_s, pending, summary.get_pfs_speed(self._db), time.monotonic())
        named = ""
        while not pending.is_nothing or (rescue is not None and rescue.is_last and rescue.is_securing()):
            left_s = clock.get_left_s(time.monotonic())
            if left_s <= 0:
                return False
            obstacle, remedy = summary.find_obstacle(self._db) if time.monotonic() > clock.moved_s + limits.DRAIN_SILENCE_S else ("", "")
            report(left_s, f"{pending.describe()} left" + (f"; blocked: {obstacle}" if obstacle else ""))
            if obstacle and obstacle != named:
                log.info("drain: blocked: %s; %s (%s left, for up to %.0f s)", obstacle, remedy or "waiting", pending.describe(), left_s)
                named = obstacle
            if rescue is not None:
                await trio.to_thread.run_sync(rescue.refresh_if_due)
            self._retry_now()
            await self._wait_for_change(end, pending, left_s)
            pending = load_pending(self._db, end)
            clock = advance_clock(clock, pending, summary.get_pfs_speed(self._db), time.monotonic())
        return True

    async def _wait_for_change(self, end: DrainEnd, pending: Pending, left_s: float) -> None:
        with trio.move_on_after(min(TURN_S, left_s)):
            while load_pending(self._db, end) == pending:
                await trio.sleep(POLL_S)
