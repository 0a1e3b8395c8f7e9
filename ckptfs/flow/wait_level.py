"""The answers to requests that wait for a level.

Takes: requests that wait until a file reaches a level, or until the PFS has all journal rows of an inode up to a number.
Leaves: an answer for each request whose condition holds.
If we die here: nothing was changed; the next mover checks the same requests.
An answer is given after the catalog is synced, so that it also holds after a power cut (P3).

This step only checks. The steps that raise levels wake all lanes when they made progress.
"""

import errno

from ckptfs import limits
from ckptfs.catalog import mover_requests, summary
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.model import Level, Notifier
from ckptfs.tiers.storage import Tiers


class WaitLevel:
    """Answers the requests that wait for a level."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier) -> None:
        self._db = db
        self._notify = notify
        self._waiting = False

    def step(self) -> bool:
        """Answer all requests whose condition holds. Return True if there may be more at once."""
        requests = mover_requests.list_open(self._db, mover_requests.WAIT_LEVEL)
        answered = [request for request in requests if self._answer(request)]
        self._waiting = len(answered) < len(requests)
        if answered:
            self._notify.notify_replies()
        return len(requests) == limits.CHANGE_ROWS_MAX and bool(answered)

    def next_due_s(self) -> float | None:
        """Return the polling interval while requests wait: polling bounds the delay after a lost wake-up."""
        return limits.REQUEST_POLL_S if self._waiting else None

    def _answer(self, request: mover_requests.MoverRequest) -> bool:
        kind, _, number = request.argument.partition(":")
        if kind == "journal":
            if summary.has_pending(self._db, request.inode, int(number)):
                return False
            self._db.persist()
            mover_requests.mark_done(self._db, request.id)
            return True
        listed = summary.get_listed_file(self._db, request.inode)
        if listed is None:
            mover_requests.mark_failed(self._db, request.id, errno.ENOENT)
            return True
        if not _has_reached(listed, Level(request.argument)):
            return False
        self._db.persist()
        mover_requests.mark_done(self._db, request.id)
        return True


def _has_reached(listed: summary.ListedFile, level: Level) -> bool:
    return listed.level.rank >= level.rank and not (level is Level.PFS and listed.has_pending_changes)
