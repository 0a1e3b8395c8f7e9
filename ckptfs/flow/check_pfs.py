"""The check step: files on the PFS read back, before an eviction rests on them.

Takes: sealed contents with a copy in RAM or on NVMe that the PFS shows as well, and that no process has read there since they were written.
Leaves: the time of the check, if the file has the sealed digest (P4). If not, a row of the journal: the file is written back again from the
copy on this node, which eviction has kept (P5).
If we die here: nothing was changed; the next mover reads again.

The pages that this node has of the file are dropped first, so that the bytes come from the server. Files are read one after the other:
while write-back has nothing to do, or at once when a tier has so much in it that eviction is near. Eviction never waits for the PFS.
"""

import errno
import itertools
import logging
import os
import threading
import time

from ckptfs import disk, limits
from ckptfs.bounded_waits import list_stalled
from ckptfs.catalog import copies, mover_requests, pfs_state
from ckptfs.catalog.contents import get_largest_recent_size
from ckptfs.catalog.copies import FetchState
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import Busy, CkptfsError
from ckptfs.model import LOCAL_TIERS, Notifier, Tier
from ckptfs.tiers import pfs_tree, space, transfer
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

disk.declare_labels("check_pfs:drop_pages", "check_pfs:read", "check_pfs:checked")

POLL_S = 2.0
CANDIDATES = 256
# A file that cannot be read is tried again after a pause, which grows.
RETRY_FIRST_S = 5.0
RETRY_LAST_S = 300.0
_STOPPED_ERRNOS = {errno.ESTALE, errno.ENOENT, errno.ENOTDIR}


class CheckPfs:
    """Reads back one file a step. Steps overlap while one of them hangs, which holds up its own file only."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier) -> None:
        self._db = db
        self._tiers = tiers
        self._config = config
        self._notify = notify
        self._pauses: dict[int, tuple[float, float]] = {}
        self._next: dict[Tier, list[int]] = {}
        self._has_candidates = False
        self._lock = threading.Lock()
        self._in_hand: dict[int, float] = {}  # Inode -> when its read last got on.

    def step(self) -> bool:
        """Check one file. Return True if another one may be due."""
        if self._config.pfs is None or not self._config.pfs_verify:
            return False
        is_idle = not pfs_state.has_work(self._db)
        tiers = [tier for tier in LOCAL_TIERS if tier in self._tiers and (is_idle or self._is_filling(tier))]
        for tier in tiers:
            if (inode := self._take_candidate(tier)) is not None:
                try:
                    self._check(inode)
                finally:
                    self._in_hand.pop(inode, None)
                self._has_candidates = True
                return True
        self._has_candidates = copies.has_unchecked(self._db)
        return False

    def list_stalled(self) -> list[int]:
        """Return the files whose reads hang: for each there must be a lane more from now on."""
        return list_stalled(self._in_hand)

    def next_due_s(self) -> float | None:
        """Return the seconds until the next look at the tiers; None if every file was checked."""
        return POLL_S if self._has_candidates else None

    def _is_filling(self, tier: Tier) -> bool:
        """Return True if eviction is near: above the low mark, or no room for the next content."""
        capacity = self._tiers[tier].get_capacity()
        low, high = self._config.ram_low, self._config.ram_high
        next_size = get_largest_recent_size(self._db)
        return bool(space.get_excess_bytes(capacity, low, low) or space.get_excess_bytes_for(capacity, next_size, high, low))

    def _take_candidate(self, tier: Tier) -> int | None:
        """Take the file to check next. A search looks at all copies in the tier, so one finds many files."""
        with self._lock:
            now = time.monotonic()
            if not self._next.get(tier):
                self._pauses = {inode: pause for inode, pause in self._pauses.items() if pause[0] > now - RETRY_LAST_S}
                waiting = [inode for inode, (until_s, _) in self._pauses.items() if until_s > now]
                self._next[tier] = copies.list_unchecked(self._db, tier, waiting + list(self._in_hand), CANDIDATES)
            while self._next[tier] and self._next[tier][0] in self._in_hand:
                del self._next[tier][0]
            if not self._next[tier]:
                return None
            inode = self._next[tier].pop(0)
            self._in_hand[inode] = now
            return inode

    def _check(self, inode: int) -> None:
        state = copies.load_fetch_state(self._db, inode)
        self._pause(inode)
        if state is None or state.published is None:
            return
        try:
            size, digest, blocks = self._read(state)
            is_same = (size, digest) == (state.published.size, state.published.digest)
            if is_same and disk.act("check_pfs:checked", copies.record_pfs_verified, self._db, state, digest, blocks):
                with self._lock:
                    self._pauses.pop(inode, None)
                self._notify.wake_lanes()
        except Busy as reason:
            log.debug("%s: not checked on the PFS: %s", state.path, reason)
        except (OSError, CkptfsError) as failure:
            self._handle_failure(state, failure)
        else:
            if not is_same and copies.record_pfs_damaged(self._db, state):
                log.error("%s: the file on the PFS differs from what was written back; it is written back again", state.path)
                self._notify.wake_lanes()

    def _read(self, state: FetchState) -> transfer.ContentDigests:
        """Return the digests of the file as the server has it. Raises Busy if it changed meanwhile."""
        assert self._config.pfs is not None
        blocks = itertools.count(1)

        def check() -> None:
            self._in_hand[state.inode] = time.monotonic()
            if next(blocks) % limits.CHECK_BLOCKS == 0 and copies.load_fetch_state(self._db, state.inode) != state:
                raise Busy("the file changed meanwhile")

        with disk.closing(pfs_tree.open_published(self._config.pfs, state)) as fd:
            disk.act("check_pfs:drop_pages", os.posix_fadvise, fd, 0, 0, os.POSIX_FADV_DONTNEED)
            found = transfer.read(fd, label="check_pfs", before_block=check)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert state.published is not None
            if not pfs_tree.matches_catalog(fd, state.published):
                raise Busy("the file on the PFS changed meanwhile")
            return found

    def _handle_failure(self, state: FetchState, failure: OSError | CkptfsError) -> None:
        """Request a scan for a file that is another one on the PFS; try again later after other errors."""
        log.debug("%s: cannot be read back from the PFS: %s", state.path, failure)
        if failure.errno in _STOPPED_ERRNOS:
            mover_requests.insert_request(self._db, mover_requests.SCAN, state.pfs_parent, mover_requests.COMPARE_AGAIN)
            self._notify.wake_lanes()

    def _pause(self, inode: int) -> None:
        with self._lock:
            _, before_s = self._pauses.get(inode, (0.0, 0.0))
            pause_s = min(max(2 * before_s, RETRY_FIRST_S), RETRY_LAST_S)
            self._pauses[inode] = time.monotonic() + pause_s, pause_s
