"""Requests of the mount process to the mover.

A request is a row in the catalog and a wake-up of the mover. The reply is in the catalog.

A wake-up is a hint in both directions. A waiter checks its row and wakes the mover every `limits.REQUEST_POLL_S`, so neither a lost wake-up
nor a new mover process costs more than that. Everything runs in the trio thread.

Crash safety: the kernel's request is taken up again; its handler asks again and shares the row that is still open.
"""

import errno
import os

import trio

from ckptfs import limits
from ckptfs.catalog import mover_requests
from ckptfs.catalog.database import Database
from ckptfs.errors import TimedOut
from ckptfs_daemon.fuse.killable import killable_wait
from ckptfs_daemon.ipc import URGENT_REQUEST, WakeChannel


class MoverClient:
    """The mount's side of mover requests."""

    def __init__(self, db: Database, wake_channel: WakeChannel) -> None:
        self._db = db
        self._wake_channel = wake_channel
        self._reply_event = trio.Event()

    def wake_waiters(self) -> None:
        """Make every waiter check its row: the mover has replied to some request."""
        self._reply_event.set()
        self._reply_event = trio.Event()

    async def wait_reply(self, seconds: float) -> None:
        """Wait until the mover replies to any request, at most `seconds`.

        Raises EINTR if the caller is killed.
        """
        reply_event = self._reply_event
        with killable_wait(), trio.move_on_after(seconds):
            await reply_event.wait()

    def wake_mover(self, kind: str) -> None:
        self._wake_channel.notify(URGENT_REQUEST + kind.encode())

    async def request(
        self, kind: str, inode: int, argument: str = "", *, timeout_s: float = limits.SCAN_WAIT_S, accepts_begun: bool = False
    ) -> str:
        """Insert a request and wait for it. Returns its result; `READABLE` too if `accepts_begun`.

        Raises OSError with the mover's errno, EINTR if the caller is killed, or TimedOut after `timeout_s` without progress.
        """
        request_id = mover_requests.insert_request(self._db, kind, inode, argument, wait_s=timeout_s)
        waited_s, progress_ns = 0.0, 0
        while True:
            self.wake_mover(kind)
            is_open, row = mover_requests.is_open(self._db, request_id), mover_requests.get(self._db, request_id)
            if row is not None and row.state == mover_requests.DONE:
                return row.result
            if accepts_begun and row is not None and row.state == mover_requests.OPEN and row.result == mover_requests.READABLE:
                return mover_requests.READABLE
            if row is not None and row.state == mover_requests.FAILED:
                raise OSError(row.error or errno.EIO, os.strerror(row.error or errno.EIO))
            if row is not None and row.progress_ns != progress_ns:
                waited_s, progress_ns = 0.0, row.progress_ns
            left_s = timeout_s - waited_s
            if left_s <= 0:
                what = f"the mover did not answer '{kind}' for inode {inode} within {timeout_s:g} s"
                raise TimedOut(what, remedy="see `ckptfs status`: the PFS may hang")
            if not is_open:
                request_id = mover_requests.insert_request(self._db, kind, inode, argument, wait_s=left_s)
                continue
            # Neither a jump of the clock nor a node that stands still counts as waiting.
            pause_s, begun_s = min(left_s, limits.REQUEST_POLL_S), trio.current_time()
            await self.wait_reply(pause_s)
            waited_s += min(pause_s, trio.current_time() - begun_s)
