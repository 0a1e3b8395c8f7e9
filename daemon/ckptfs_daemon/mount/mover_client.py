"""Owns the mount's waiting for the mover: a want is written to the catalog, the bell rung, and the answer read from the catalog.

The bell is a hint in both directions: a waiter looks again every `limits.REQUEST_POLL_S` and rings again, so neither a lost hint nor a
new mover process costs more than that. Everything runs in the mount's trio thread.
If we die here: the kernel sends the request again, the handler asks again and shares the row that is still open.
"""

import errno
import os
import time
from typing import Protocol

import trio

from ckptfs import limits
from ckptfs.catalog import mover_requests
from ckptfs.catalog.database import Database
from ckptfs.errors import TimedOut
from ckptfs_daemon.ipc import URGENT_REQUEST


class WakeSender(Protocol):
    """What is needed of a bell: `ring` never blocks."""

    def notify(self, message: bytes) -> None: ...


class MoverClient:
    """The mount side of wants."""

    def __init__(self, db: Database, wake_channel: WakeSender) -> None:
        self._db = db
        self._wake_channel = wake_channel
        self._reply_event = trio.Event()

    def wake_waiters(self) -> None:
        """The mover says that it answered something: every waiter looks at its own row."""
        self._reply_event.set()
        self._reply_event = trio.Event()

    async def wait_reply(self, seconds: float) -> None:
        """Wait until the mover says anything, at most so long."""
        answers = self._reply_event
        with trio.move_on_after(seconds):
            await answers.wait()

    async def request(
        self, kind: str, inode: int, argument: str = "", *, timeout_s: float = limits.SCAN_WAIT_S, accepts_begun: bool = False
    ) -> str:
        """Ask and wait; the answer's result, `wants.BEGUN` too if `begun` is enough.

        Raises OSError with the mover's errno, or TimedOut after `timeout_s` without progress.
        """
        request_id = mover_requests.insert_request(self._db, kind, inode, argument, wait_s=timeout_s)
        started_ns = time.time_ns()
        while True:
            self._wake_channel.notify(URGENT_REQUEST + kind.encode())
            row = mover_requests.get(self._db, request_id)
            if row is not None and row.state == mover_requests.DONE:
                return row.result
            if accepts_begun and row is not None and row.state == mover_requests.OPEN and row.result == mover_requests.READABLE:
                return mover_requests.READABLE
            if row is not None and row.state == mover_requests.FAILED:
                raise OSError(row.error or errno.EIO, os.strerror(row.error or errno.EIO))
            left_s = timeout_s - (time.time_ns() - max(started_ns, row.progress_ns if row else 0)) / 1e9
            if left_s <= 0:
                what = f"the mover did not answer '{kind}' for inode {inode} within {timeout_s:g} s"
                raise TimedOut(what, remedy="see `ckptfs status`: the PFS may hang")
            if row is None:
                request_id = mover_requests.insert_request(self._db, kind, inode, argument, wait_s=left_s)
                continue
            await self.wait_reply(min(left_s, limits.REQUEST_POLL_S))
