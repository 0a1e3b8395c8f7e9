"""How the mount's trio thread waits for the store, whose futures are done by threads of its own.

If we die here: what was asked is answered to nobody.
"""

import contextlib
from collections.abc import Awaitable, Callable, Container
from concurrent.futures import Future

import trio

from ckptfs.catalog.store import Get, Outcome


class PendingRead:
    """What somebody wants to read."""

    def __init__(self, gets: list[Get]) -> None:
        self.gets = gets
        self.done = trio.Event()
        self.outcome: Outcome | None = None


class InodesOpenForWriting(Container[int]):
    """The inodes that are open for writing here."""

    def __init__(self, is_open_for_writing: Callable[[int], bool]) -> None:
        self._is_open_for_writing = is_open_for_writing

    def __contains__(self, inode: object) -> bool:
        return isinstance(inode, int) and self._is_open_for_writing(inode)


class CommitRounds:
    """Batches of which one is under way at a time; whoever comes meanwhile waits for it. The first one begins after the first `end`."""

    def __init__(self) -> None:
        self._is_running = True
        self._changed = trio.Event()

    async def run_or_wait(self, act: Callable[[], Awaitable[object]]) -> None:
        """Do `act`; or wait for the one that is under way, or for `wake`, and do nothing."""
        if self._is_running:
            await self._changed.wait()
            return
        self._is_running = True
        try:
            await act()
        finally:
            self.end_round()

    async def wait_idle(self) -> None:
        """None is under way."""
        while self._is_running:
            await self._changed.wait()

    def end_round(self) -> None:
        """It is done; whoever waits may begin the next one."""
        self._is_running = False
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Whoever waits looks again."""
        self._changed.set()
        self._changed = trio.Event()


async def wait_outcome(future: "Future[Outcome]") -> Outcome:
    """What a future of the store brings, without holding up anybody."""
    if not future.done():
        token = trio.lowlevel.current_trio_token()
        done = trio.Event()

        def wake(_: object) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(done.set)

        future.add_done_callback(wake)
        await done.wait()
    else:
        await trio.lowlevel.checkpoint()
    return future.result()
