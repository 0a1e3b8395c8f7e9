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
from ckptfs.flow.secure.spreading import SnapshotReplicator
from ckptfs.model import ContentState, Level, Notifier
from ckptfs.tiers.place import Tiers


class FsyncReplication:
    """Answers one want a step. Several threads may take steps at once, of different files."""

    def __init__(self, db: Database, tiers: Tiers, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._replicator = SnapshotReplicator(db, tiers, cluster)
        self._lock = threading.Lock()
        self._active_inodes: set[int] = set()
        self._retry_at_s: dict[int, float] = {}

    def step(self) -> bool:
        """True: there may be more at once."""
        request = self._take_request()
        if request is None:
            return False
        try:
            self._answer(request)
        finally:
            with self._lock:
                self._active_inodes.discard(request.inode)
        return True

    def next_due_s(self) -> float | None:
        """While somebody waits: until the first want is looked at again."""
        with self._lock:
            return max(0.0, min(self._retry_at_s.values()) - time.monotonic()) if self._retry_at_s else None

    def retry_now(self) -> None:
        """Nothing is put off."""
        with self._lock:
            self._retry_at_s = {}

    def _take_request(self) -> wants.MoverRequest | None:
        requests = wants.list_open(self._db, wants.REPLICATE_NOW)
        now_s = time.monotonic()
        with self._lock:
            self._retry_at_s = {want.id: self._retry_at_s[want.id] for want in requests if want.id in self._retry_at_s}
            for want in requests:
                if want.inode not in self._active_inodes and self._retry_at_s.get(want.id, 0.0) <= now_s:
                    self._active_inodes.add(want.inode)
                    return want
        return None

    def _answer(self, request: wants.MoverRequest) -> None:
        found = report.load_file_record(self._db, request.inode)
        if found.content is None or found.content.state is not ContentState.OPEN:
            self._answer_closed(request)
        elif self._replicator.replicate(found.content.id) and peers.is_published(self._db, found.content):
            self._mark_done(request)
        else:
            self._retry_later(request)

    def _answer_closed(self, request: wants.MoverRequest) -> None:
        """It was closed meanwhile: the replicate flow does the rest."""
        listed = report.get_listed_file(self._db, request.inode)
        if listed is None or listed.level in (Level.CLIQUE, Level.PFS):
            self._mark_done(request)
        elif listed.record.content is not None and listed.record.content.state is ContentState.LOST:
            wants.mark_failed(self._db, request.id, errno.EIO)
            self._notify.notify_replies()
        else:
            self._retry_later(request)

    def _mark_done(self, request: wants.MoverRequest) -> None:
        wants.mark_done(self._db, request.id)
        self._notify.notify_replies()

    def _retry_later(self, request: wants.MoverRequest) -> None:
        with self._lock:
            self._retry_at_s[request.id] = time.monotonic() + limits.RETRY_FIRST_S
