"""What pyfuse3's loop sees instead of trio: the same, but a worker that finds the next request at once takes it without yielding.

pyfuse3 takes a lock, waits for its descriptor and yields to trio's scheduler for each request; that costs more than most of our
handlers. pyfuse3 has a place for another `trio` module (its asyncio support uses it), and this goes there. Every `TURN_S` the worker
yields whatever comes, so that other tasks are never starved.
If we die here: nothing is kept.
"""

import select
import time
from collections import deque
from typing import Any

import trio

TURN_S = 0.004
LINGER_MS = 1
"""How long the thread stays with the descriptor before it goes back to trio's scheduler: an application that does one thing after the
other sends its next request within some 20 us, and all else that runs here can wait a millisecond."""
SPIN_S = 60e-6
"""How long it looks again and again before it sleeps, while requests come that close: where an idle processor is halted, as in most virtual
machines, waking from a sleep takes as long as a whole request (2,570 creates/s against 1,850)."""


class Lock:
    """A lock that its last holder may take again at once; whoever waits gets its chance when that one yields."""

    def __init__(self) -> None:
        self._held = False
        self._woken = False
        self._waiting: deque[trio.lowlevel.Task] = deque()

    async def __aenter__(self) -> None:
        while self._held:
            await self._park()
        self._held = True

    async def __aexit__(self, *_: object) -> None:
        self._held = False
        # One is enough: it runs when this task yields, and parks again if the lock is taken by then.
        if self._waiting and not self._woken:
            self._woken = True
            trio.lowlevel.reschedule(self._waiting.popleft())

    async def _park(self) -> None:
        task = trio.lowlevel.current_task()
        self._waiting.append(task)

        def abort(_: Any) -> trio.lowlevel.Abort:
            self._waiting.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._woken = False


class LowlevelAdapter:
    """`trio.lowlevel` with an eager `wait_readable`."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._registered_fds: set[int] = set()
        self._yield_at = 0.0
        self._is_busy = False
        """Whether the last request came within SPIN_S: a slower application must not cost a processor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(trio.lowlevel, name)

    async def wait_readable(self, fd: int) -> None:
        """Return when `fd` can be read, without yielding when that is now and this turn is not over."""
        if fd not in self._registered_fds:
            self._registered_fds.add(fd)
            self._poll.register(fd, select.POLLIN)
        now = time.monotonic()
        if now < self._yield_at:
            if self._linger(now):
                return
        else:
            self._yield_at = now + TURN_S
        await trio.lowlevel.wait_readable(fd)
        self._yield_at = time.monotonic() + TURN_S

    def _linger(self, now: float) -> bool:
        """Whether a request came while we waited for it here."""
        spun = now + SPIN_S
        while self._is_busy and now < spun:
            if self._poll.poll(0):
                return True
            now = time.monotonic()
        came = bool(self._poll.poll(LINGER_MS))
        # A wake-up takes about as long as we would have looked.
        self._is_busy = came and time.monotonic() < spun + SPIN_S
        return came


class TrioAdapter:
    """The module `trio`, as far as pyfuse3 uses it."""

    Lock = Lock

    def __init__(self) -> None:
        self.lowlevel = LowlevelAdapter()

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name)
