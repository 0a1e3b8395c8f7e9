"""Takes: wants of the kind 'secure': somebody has fsynced a file, and waits until as many nodes have it as make the level `clique`.
Leaves: what the file held then, verified there as a generation of its own, and its name told to all; a file that was closed meanwhile
reaches its level as ever.
If we die here: the want is still open; peers that have it already lack nothing.

What is sent of an open file is in secure/spreading.py; files that nobody waits for are copied by secure/regularly.py.
"""

import errno
import threading
import time

from ckptfs import limits
from ckptfs.catalog import peers, report, wants
from ckptfs.catalog.database import Database
from ckptfs.clique.surroundings import Cluster
from ckptfs.flow.secure.spreading import Spreading
from ckptfs.model import ContentState, Level, Notifier
from ckptfs.tiers.place import Places


class Secure:
    """Answers one want a step. Several threads may take steps at once, of different files."""

    def __init__(self, db: Database, places: Places, notify: Notifier, around: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._spreading = Spreading(db, places, around)
        self._lock = threading.Lock()
        self._in_hand: set[int] = set()
        self._again_s: dict[int, float] = {}

    def step(self) -> bool:
        """True: there may be more at once."""
        want = self._take()
        if want is None:
            return False
        try:
            self._answer(want)
        finally:
            with self._lock:
                self._in_hand.discard(want.inode)
        return True

    def next_due_s(self) -> float | None:
        """While somebody waits: until the first want is looked at again."""
        with self._lock:
            return max(0.0, min(self._again_s.values()) - time.monotonic()) if self._again_s else None

    def retry_now(self) -> None:
        """Nothing is put off."""
        with self._lock:
            self._again_s = {}

    def _take(self) -> wants.MoverRequest | None:
        wanted = wants.list_open(self._db, wants.REPLICATE_NOW)
        now_s = time.monotonic()
        with self._lock:
            self._again_s = {want.id: self._again_s[want.id] for want in wanted if want.id in self._again_s}
            for want in wanted:
                if want.inode not in self._in_hand and self._again_s.get(want.id, 0.0) <= now_s:
                    self._in_hand.add(want.inode)
                    return want
        return None

    def _answer(self, want: wants.MoverRequest) -> None:
        found = report.load_file_record(self._db, want.inode)
        if found.content is None or found.content.state is not ContentState.OPEN:
            self._settled(want)
        elif self._spreading.copied(found.content.id) and peers.is_published(self._db, found.content):
            self._done(want)
        else:
            self._later(want)

    def _settled(self, want: wants.MoverRequest) -> None:
        """It was closed meanwhile: the replicate flow does the rest."""
        listed = report.get_listed_file(self._db, want.inode)
        if listed is None or listed.level in (Level.CLIQUE, Level.PFS):
            self._done(want)
        elif listed.record.content is not None and listed.record.content.state is ContentState.LOST:
            wants.mark_failed(self._db, want.id, errno.EIO)
            self._notify.notify_replies()
        else:
            self._later(want)

    def _done(self, want: wants.MoverRequest) -> None:
        wants.mark_done(self._db, want.id)
        self._notify.notify_replies()

    def _later(self, want: wants.MoverRequest) -> None:
        with self._lock:
            self._again_s[want.id] = time.monotonic() + limits.RETRY_FIRST_S
