"""The answers to an fsync that waits for the level pfs.

Takes: requests that wait until the PFS has all journal rows of an inode up to a number.
Leaves: an answer for each request whose condition holds.
If we die here: nothing was changed; the next mover checks the same requests.
An answer is given after the catalog is synced, so that it also holds after a power cut (P3).

This step only checks. Write-back wakes all lanes when it made progress.
"""

from ckptfs import limits
from ckptfs.catalog import mover_requests, summary
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.model import Notifier
from ckptfs.tiers.storage import Tiers


class WaitLevel:
    """Answers the requests that wait for the PFS."""

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
        if summary.has_pending(self._db, request.inode, mover_requests.get_journal_row(request.argument)):
            return False
        self._db.persist()
        mover_requests.mark_done(self._db, request.id)
        return True
