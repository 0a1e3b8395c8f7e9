"""Takes: wants of the kind 'settle': somebody waits until a file has reached a level, or until the PFS was told of what was recorded.
Leaves: those answered that are so by now.
If we die here: nothing was changed; the next mover looks at the same wants.

Only looks: whoever brings files to their levels says `notify.work()` when it has got on.
"""

import errno

from ckptfs import limits
from ckptfs.catalog import journal, report, wants
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.model import Level, Notifier
from ckptfs.tiers.place import Places


class Settle:
    """Answers who waits for a level."""

    def __init__(self, db: Database, places: Places, config: Config, notify: Notifier) -> None:
        self._db = db
        self._notify = notify
        self._waiting = False

    def step(self) -> bool:
        """Answer all that can be answered now."""
        wanted = wants.list_open(self._db, wants.WAIT_LEVEL)
        answered = [want for want in wanted if self._answer(want)]
        self._waiting = len(answered) < len(wanted)
        if answered:
            self._notify.notify_replies()
        return len(wanted) == limits.CHANGE_ROWS_MAX and bool(answered)

    def next_due_s(self) -> float | None:
        """While somebody waits a look now and then costs little; a hint that got lost costs no more than that."""
        return limits.WANT_LOOK_S if self._waiting else None

    def _answer(self, want: wants.MoverRequest) -> bool:
        kind, _, number = want.argument.partition(":")
        if kind == "journal":
            if journal.has_pending(self._db, want.inode, int(number)):
                return False
            wants.mark_done(self._db, want.id)
            return True
        listed = report.get_listed_file(self._db, want.inode)
        if listed is None:
            wants.mark_failed(self._db, want.id, errno.ENOENT)
            return True
        if not _reached(listed, Level(want.argument)):
            return False
        wants.mark_done(self._db, want.id)
        return True


def _reached(listed: report.ListedFile, level: Level) -> bool:
    order = list(Level)
    return order.index(listed.level) >= order.index(level) and not (level is Level.PFS and listed.has_pending_changes)
