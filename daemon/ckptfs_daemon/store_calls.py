"""How the mount's trio thread waits for the store, whose futures are done by threads of its own.

If we die here: what was asked is answered to nobody.
"""

import contextlib
from collections.abc import Awaitable, Callable, Container
from concurrent.futures import Future

import trio

from ckptfs.catalog.store import Get, Outcome


class Question:
    """What somebody wants to read."""

    def __init__(self, gets: list[Get]) -> None:
        self.gets = gets
        self.done = trio.Event()
        self.answer: Outcome | None = None


class Written(Container[int]):
    """The inodes that are open for writing here."""

    def __init__(self, is_written: Callable[[int], bool]) -> None:
        self._is_written = is_written

    def __contains__(self, inode: object) -> bool:
        return isinstance(inode, int) and self._is_written(inode)


class Rounds:
    """Batches of which one is under way at a time; whoever comes meanwhile waits for it. The first one begins after the first `end`."""

    def __init__(self) -> None:
        self._under_way = True
        self._something = trio.Event()

    async def one(self, act: Callable[[], Awaitable[object]]) -> None:
        """Do `act`; or wait for the one that is under way, or for `wake`, and do nothing."""
        if self._under_way:
            await self._something.wait()
            return
        self._under_way = True
        try:
            await act()
        finally:
            self.end()

    async def rest(self) -> None:
        """None is under way."""
        while self._under_way:
            await self._something.wait()

    def end(self) -> None:
        """It is done; whoever waits may begin the next one."""
        self._under_way = False
        self.wake()

    def wake(self) -> None:
        """Whoever waits looks again."""
        self._something.set()
        self._something = trio.Event()


async def answer_of(future: "Future[Outcome]") -> Outcome:
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
