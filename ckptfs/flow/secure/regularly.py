"""Takes: files that stay open: those that were fsynced (wants of the kind 'copy', for which nobody waits), and those that were changed.
Leaves: what they held then, verified on enough other nodes, as after an fsync that waits; so that a log which is open for days is lost
with its node only from its last copy on.
If we die here: which state was copied is forgotten, and the next mover copies it once more, of which only the offer travels.

A file that is closed soon after its fsync, as a checkpoint is, is left to its seal. Between two copies of a file passes at least ten times
as long as the last one took, so that a large file that is written all the time costs a tenth of what copying it costs.
"""

import logging
import time
from dataclasses import dataclass

from ckptfs import limits
from ckptfs.catalog import peers, settling, wants
from ckptfs.catalog.database import Database
from ckptfs.clique.surroundings import Cluster
from ckptfs.flow.secure.spreading import SnapshotReplicator
from ckptfs.model import Content, Tier
from ckptfs.tiers.place import Tiers

log = logging.getLogger(__name__)

PAUSE_RATIO = 10


@dataclass(slots=True)
class _TrackedFile:
    """An open file: its (size, mtime) when it was copied last, when a change of it is copied, and when an fsync may be."""

    copied_state: tuple[int, int] | None
    change_due_s: float
    fsync_due_s: float


class PeriodicReplication:
    """Looks through the open files, and copies those that are due, one after the other."""

    def __init__(self, db: Database, tiers: Tiers, cluster: Cluster) -> None:
        self._db = db
        self._tiers = tiers
        self._cluster = cluster
        self._replicator = SnapshotReplicator(db, tiers, cluster)
        self._tracked: dict[int, _TrackedFile] = {}

    def step(self) -> bool:
        """Never more to do at once."""
        if len(self._cluster.view()) < 2 or self._cluster.factor < 2:
            self._tracked = {}
            return False
        open_contents = peers.list_being_written(self._db, limits.OPEN_FILES_MAX)
        fsynced = {want.inode: want for want in wants.list_open(self._db, wants.REPLICATE_LATER)}
        now_s = time.monotonic()
        known, self._tracked = self._tracked, {}
        for content, tier in open_contents:
            self._tracked[content.id] = known.get(content.id) or self._start_tracking(content, tier, now_s)
        for content, tier in open_contents:
            self._replicate_if_due(self._tracked[content.id], content, tier, fsynced.pop(content.inode, None))
        for want in fsynced.values():
            wants.mark_done(self._db, want.id)  # It was closed: its seal does the rest.
        return False

    def next_due_s(self) -> float | None:
        """Soon while somebody writes; now and then else, because nobody tells of an open."""
        return limits.OPEN_LOOK_S if settling.count_writers(self._db) else limits.OPEN_IDLE_S

    def _start_tracking(self, content: Content, tier: Tier, now_s: float) -> _TrackedFile:
        """What was verified after it was changed last had its copies made when it was sealed."""
        state = self._get_file_state(content, tier)
        verified_ns = next((copy.verified_ns for copy in settling.list_copies(self._db, content.id) if copy.tier is tier), 0)
        is_unchanged = state is not None and state[1] < verified_ns
        return _TrackedFile(state if is_unchanged else None, now_s + limits.OPEN_COPIED_S, now_s + limits.OPEN_FSYNCED_S)

    def _replicate_if_due(self, tracked: _TrackedFile, content: Content, tier: Tier, fsynced: wants.MoverRequest | None) -> None:
        now_s, state = time.monotonic(), self._get_file_state(content, tier)
        if state is None or state == tracked.copied_state or not state[0]:
            if fsynced is not None:
                wants.mark_done(self._db, fsynced.id)
            return
        is_fsync_due = (
            fsynced is not None and now_s >= tracked.fsync_due_s and time.time_ns() - fsynced.at_ns >= int(limits.OPEN_FSYNCED_S * 1e9)
        )
        if not is_fsync_due and now_s < tracked.change_due_s:
            return
        if fsynced is not None:
            wants.mark_done(self._db, fsynced.id)  # First: what is fsynced from here on is wanted anew.
        if self._replicator.replicate(content.id):
            tracked.copied_state = state
        else:
            log.debug("too few nodes take content %d as it is now; again in a while", content.id)
            if fsynced is not None:
                wants.insert_request(self._db, wants.REPLICATE_LATER, content.inode, wait_s=limits.WANT_KEPT_S)
        end_s = time.monotonic()
        pause_s = PAUSE_RATIO * (end_s - now_s)
        tracked.change_due_s = end_s + max(limits.OPEN_COPIED_S, pause_s)
        tracked.fsync_due_s = end_s + max(limits.OPEN_FSYNCED_S, pause_s)

    def _get_file_state(self, content: Content, tier: Tier) -> tuple[int, int] | None:
        found = self._tiers[tier].stat(content.id) if tier in self._tiers else None
        return None if found is None else (found.st_size, found.st_mtime_ns)
