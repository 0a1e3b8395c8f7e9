"""Owns the mount's waiting for the mover: a want is written to the catalog, the bell rung, and the answer read from the catalog.

The bell is a hint in both directions: a waiter looks again every `limits.WANT_LOOK_S` and rings again, so neither a lost hint nor a
new mover process costs more than that. Everything runs in the mount's trio thread.
If we die here: the kernel sends the request again, the handler asks again and shares the row that is still open.
"""

import errno
import os
import time
from typing import Protocol

import trio

from ckptfs import limits
from ckptfs.catalog import wants
from ckptfs.catalog.database import Database
from ckptfs.errors import TimedOut
from ckptfs_daemon.bells import URGENT


class Ringable(Protocol):
    """What is needed of a bell: `ring` never blocks."""

    def ring(self, message: bytes) -> None: ...


class Asking:
    """The mount side of wants."""

    def __init__(self, db: Database, bell: Ringable) -> None:
        self._db = db
        self._bell = bell
        self._answers = trio.Event()

    def answered(self) -> None:
        """The mover says that it answered something: every waiter looks at its own row."""
        self._answers.set()
        self._answers = trio.Event()

    async def pause(self, seconds: float) -> None:
        """Wait until the mover says anything, at most so long."""
        answers = self._answers
        with trio.move_on_after(seconds):
            await answers.wait()

    async def ask(self, kind: str, inode: int, argument: str = "", *, timeout_s: float = limits.VISIT_WAIT_S, begun: bool = False) -> str:
        """Ask and wait; the answer's result, `wants.BEGUN` too if `begun` is enough.

        Raises OSError with the mover's errno, or TimedOut after `timeout_s` without progress.
        """
        want = wants.insert_request(self._db, kind, inode, argument, wait_s=timeout_s)
        started_ns = time.time_ns()
        while True:
            self._bell.ring(URGENT + kind.encode())
            row = wants.get(self._db, want)
            if row is not None and row.state == wants.DONE:
                return row.result
            if begun and row is not None and row.state == wants.OPEN and row.result == wants.READABLE:
                return wants.READABLE
            if row is not None and row.state == wants.FAILED:
                raise OSError(row.error or errno.EIO, os.strerror(row.error or errno.EIO))
            left_s = timeout_s - (time.time_ns() - max(started_ns, row.progress_ns if row else 0)) / 1e9
            if left_s <= 0:
                what = f"the mover did not answer '{kind}' for inode {inode} within {timeout_s:g} s"
                raise TimedOut(what, remedy="see `ckptfs status`: the PFS may hang")
            if row is None:
                want = wants.insert_request(self._db, kind, inode, argument, wait_s=left_s)
                continue
            await self.pause(min(left_s, limits.WANT_LOOK_S))
