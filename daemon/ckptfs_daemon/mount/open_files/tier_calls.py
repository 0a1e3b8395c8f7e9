"""Calls on tiers that may take long or hang, in threads: those that a request awaits, and the others.

close(2) may write back or ask a server, and frees the pages of a file without a name (0.16 s for each GiB of a tmpfs). Reading the status
of a file on the PFS hangs as long as the PFS does. None of them may run in the trio thread, which serves everything else.

Invariants:
- Calls on the PFS have threads of their own, so that one that hangs holds up no other tier. Nor does it hold up calls on other parts of the
  PFS: its thread does not count.
- Without the task of `SlowCalls` (before and after the service, and in tests), one of its calls runs at once.

Crash safety: the kernel closes the descriptors of a process that ends. Code that depends on the result of a call has rows in the catalog.
"""

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
from ckptfs.model import LOCAL_TIERS, Tier
from ckptfs_daemon.fuse.killable import killable_wait

log = logging.getLogger(__name__)

T = TypeVar("T")
_Task = Callable[[], Awaitable[None]]


class PfsThreads:
    """Threads for calls on the PFS. Others run in place of those that hang. Belongs to the trio thread."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(limits.PFS_THREADS_MAX)
        self._began_s: dict[int, float] = {}
        """Thread -> when its call began."""

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
        self._limiter.total_tokens = limits.PFS_THREADS_MAX + len(list_stalled(self._began_s))


_PFS_THREADS = PfsThreads()


async def run_in_thread(tier: Tier | None, act: Callable[[], T]) -> T:
    """Run a slow `act` on `tier` in a thread; on the PFS (also for None) in a thread that may hang."""
    return await (trio.to_thread.run_sync(act) if tier in LOCAL_TIERS else run_on_pfs(act))


async def run_on_pfs(act: Callable[[], T], discard: Callable[[T], None] | None = None) -> T:
    """Run `act` in a thread that may hang as long as the PFS does, and of which there are not too many.

    `discard`: `act` changes nothing, so it is not awaited to its end if the caller is killed. `discard` then gets its result. Raises EINTR.
    """
    if discard is None:
        return await _PFS_THREADS.run(act)
    results: list[T] = []
    claim = [True]
    """Who empties it second, the thread or this task, knows that the result is not wanted. Both may try at the same moment."""

    def run() -> None:
        results.append(act())
        if not _take(claim):
            discard(results[0])

    try:
        with killable_wait():
            await _PFS_THREADS.run(run)
    except BaseException:
        if not _take(claim) and results:
            discard(results[0])
        raise
    return results[0]


def _take(claim: list[bool]) -> bool:
    """Empty `claim`. Return False if it is empty."""
    try:
        return claim.pop()
    except IndexError:
        return False


async def open_on_pfs(open_file: Callable[[], int]) -> int:
    """Return the descriptor that `open_file` opens on the PFS. Raises EINTR if the caller is killed."""
    return await run_on_pfs(open_file, lambda fd: close_logged(fd, Tier.PFS))


class SlowCalls:
    """The calls of one mount process that no request waits for. All methods belong to the trio thread."""

    def __init__(self) -> None:
        self._send: trio.MemorySendChannel[_Task] | None = None
        self._local_threads = trio.CapacityLimiter(limits.FREE_THREADS_MAX)
        self._pfs_threads = PfsThreads()

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
            for threads in (_PFS_THREADS, self._pfs_threads):
                threads.relieve()

    def start(self, act: Callable[[], T], tier: Tier | None, then: Callable[[T], None] | None = None, after: _Task | None = None) -> None:
        """Run `act` on `tier` (None: the PFS) in a thread after `after`; then `then` with its result."""

        async def run() -> None:
            if after is not None:
                await after()
            if tier in LOCAL_TIERS:
                result = await trio.to_thread.run_sync(act, abandon_on_cancel=True, limiter=self._local_threads)
            else:
                result = await self._pfs_threads.run(act)
            if then is not None:
                then(result)

        if self._send is not None:
            self._send.send_nowait(functools.partial(_run_logged, run))
        else:
            result = act()
            if then is not None:
                then(result)

    def close(self, fd: int, tier: Tier | None, then: Callable[[], None] | None = None, after: _Task | None = None) -> None:
        """Close a descriptor of a file in `tier`; -1 is none."""
        self.start(functools.partial(close_logged, fd, tier), tier, None if then is None else lambda _: then(), after)


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
