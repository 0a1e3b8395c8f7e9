"""Calls on tiers that may take long or hang, in threads: those that a request awaits, and the others.

close(2) may write back or ask a server, and frees the pages of a file without a name (0.16 s for each GiB of a tmpfs). Reading the status
of a file on the PFS hangs as long as the PFS does. None of them may run in the trio thread, which serves everything else.

Invariants:
- Calls on NVMe and on the PFS have threads of their own, so that one that hangs holds up no other tier. Nor does it hold up calls on other
  parts of its tier: its thread does not count.
- Without the task of `SlowCalls` (before and after the service, and in tests), one of its calls runs at once.

Crash safety: the kernel closes the descriptors of a process that ends. Code that depends on the result of a call has rows in the catalog.
"""

import errno
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from ckptfs import limits
from ckptfs.bounded_waits import list_stalled
from ckptfs.errors import posix_error
from ckptfs.model import Tier
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon.fuse.killable import killable_wait

log = logging.getLogger(__name__)

T = TypeVar("T")
_Task = Callable[[], Awaitable[None]]


class TierThreads:
    """Threads for calls on a tier; others run in place of those that hang. Belongs to the trio thread."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(limits.TIER_THREADS_MAX)
        self._began_s: dict[int, float] = {}  # Thread -> when its call began.

    async def run(self, act: Callable[[], T]) -> T:
        """Run `act` in one of the threads. If the task is cancelled, the call stays behind."""

        def run_timed() -> T:
            thread = threading.get_ident()
            self._began_s[thread] = time.monotonic()
            try:
                return act()
            finally:
                del self._began_s[thread]

        return await trio.to_thread.run_sync(run_timed, abandon_on_cancel=True, limiter=self._limiter)

    def relieve(self) -> None:
        """Let one call more run for each that hangs now."""
        self._limiter.total_tokens = limits.TIER_THREADS_MAX + len(list_stalled(self._began_s))


_THREADS = {Tier.NVME: TierThreads(), Tier.PFS: TierThreads()}


async def run_in_thread(tier: Tier | None, act: Callable[[], T]) -> T:
    """Run a slow `act` on `tier` (None: the PFS) in a thread, which may hang as long as the tier does."""
    return await (trio.to_thread.run_sync(act) if tier is Tier.RAM else _THREADS[tier or Tier.PFS].run(act))


async def run_on_pfs(act: Callable[[], T]) -> T:
    """Run `act` in a thread that may hang as long as the PFS does, and of which there are not too many."""
    return await run_in_thread(Tier.PFS, act)


async def run_unless_cancelled(tier: Tier, act: Callable[[], T], discard: Callable[[T], None]) -> T:
    """Run `act` on NVMe or the PFS, as `run_in_thread`; leave it if the caller is killed or cancelled.

    `discard` then gets its result. Raises EINTR.
    """
    results: list[T] = []
    claim = [True]
    """Who empties it second, the thread or this task, knows that the result is not wanted. Both may try at the same moment."""

    def run() -> None:
        results.append(act())
        if not _take(claim):
            discard(results[0])

    try:
        with killable_wait():
            await _THREADS[tier].run(run)
    except BaseException:
        if not _take(claim) and results:
            discard(results[0])
        raise
    return results[0]


async def run_if_answered(storage: TierStorage, act: Callable[[], T], discard: Callable[[T], None] = lambda _: None) -> T:
    """Run `act`, the first of several calls on NVMe or the PFS, as `run_unless_cancelled`.

    If the tier does not answer, new files go elsewhere, and this raises ETIMEDOUT.
    """
    with trio.move_on_after(limits.PFS_STALL_S):
        return await run_unless_cancelled(storage.tier, act, discard)
    storage.record_silence()
    raise posix_error(errno.ETIMEDOUT)


async def require_answer(storage: TierStorage) -> None:
    """Raise OSError if NVMe fails or does not answer, before a long copy to it. Ask no other tier."""
    if storage.tier is Tier.NVME:
        await run_if_answered(storage, storage.probe)


def _take(claim: list[bool]) -> bool:
    """Empty `claim`. Return False if it is empty."""
    try:
        return claim.pop()
    except IndexError:
        return False


async def open_on_pfs(open_file: Callable[[], int]) -> int:
    """Return the descriptor that `open_file` opens on the PFS. Raises EINTR if the caller is killed."""
    return await run_unless_cancelled(Tier.PFS, open_file, lambda fd: close_logged(fd, Tier.PFS))


class SlowCalls:
    """The calls of one mount process that no request waits for. All methods belong to the trio thread."""

    def __init__(self) -> None:
        self._send: trio.MemorySendChannel[_Task] | None = None
        self._ram_threads = trio.CapacityLimiter(limits.FREE_THREADS_MAX)
        self._threads = {Tier.NVME: TierThreads(), Tier.PFS: TierThreads()}

    @property
    def is_running(self) -> bool:
        return self._send is not None

    async def run(self) -> None:
        """Run the calls until cancelled. A call that hangs then stays behind in its thread. A task."""
        self._send, receive = trio.open_memory_channel[_Task](math.inf)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._relieve, name="slow calls that hang")
                async for task in receive:
                    nursery.start_soon(task, name="slow call")
        finally:
            self._send = None

    async def _relieve(self) -> None:
        while True:
            await trio.sleep(limits.PFS_STALL_S)
            for threads in (*_THREADS.values(), *self._threads.values()):
                threads.relieve()

    def start(self, act: Callable[[], T], tier: Tier | None, then: Callable[[T], None] | None = None, after: _Task | None = None) -> None:
        """Run `act` on `tier` (None: the PFS) in a thread after `after`; then `then` with its result."""

        async def run() -> None:
            if after is not None:
                await after()
            if tier is Tier.RAM:
                result = await trio.to_thread.run_sync(act, abandon_on_cancel=True, limiter=self._ram_threads)
            else:
                result = await self._threads[tier or Tier.PFS].run(act)
            if then is not None:
                then(result)

        if self._send is not None:
            self._send.send_nowait(functools.partial(_run_logged, run))
        else:
            result = act()
            if then is not None:
                then(result)

    def close(self, fd: int, tier: Tier | None, after: _Task | None = None) -> None:
        """Close a descriptor of a file in `tier`; -1 is none."""
        self.start(functools.partial(close_logged, fd, tier), tier, after=after)


async def _run_logged(run: _Task) -> None:
    try:
        await run()
    except Exception:
        log.exception("a call on a tier: failed unexpectedly")


def close_logged(fd: int, tier: Tier | None) -> None:
    """Close a descriptor; -1 is none. Its release is committed already, so an error can reach no caller."""
    if fd >= 0:
        try:
            os.close(fd)
        except OSError as failure:
            log.error("%s: a file cannot be closed: %s", tier or "the PFS", failure)
