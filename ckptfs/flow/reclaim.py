"""The reclaim step: removal of files and requests that are not needed any more.

Takes: DOOMED contents, quarantined copies whose content has a good copy, and leftovers (files without a row); mover requests for which
no caller waits.
Leaves: free space, and a short table of requests.
If we die here: files are removed before their rows, so the rest is found again. `ReadGrace` begins again.

In a cluster, a doomed content stays for a while if its tier has room: another node may have looked up the file just before it was deleted
or replaced, and opens it now. Its space counts as free.

The mount creates a content's file before it commits the row. A young file without a row is therefore no leftover, nor is any file of an
open content, which the mount may be moving there.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterable

from ckptfs import disk, lifecycle, limits
from ckptfs.catalog import contents, copies, mover_requests, summary
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import TierUnavailable
from ckptfs.model import ContentState, CopyState, Notifier, Tier
from ckptfs.tiers import local_copies, space
from ckptfs.tiers.storage import Tiers, TierStorage

log = logging.getLogger(__name__)

disk.declare_labels("reclaim:forget", "reclaim:quarantined", "reclaim:leftover")

BATCH_CONTENTS = 128
LEFTOVER_AGE_S = 60.0
SWEEP_S = 3600.0


class ReadGrace:
    """How long doomed contents stay for readers on other nodes."""

    def __init__(self, db: Database, tiers: Tiers, config: Config) -> None:
        self._db = db
        self._tiers = tiers
        self._high = {Tier.RAM: config.ram_high, Tier.NVME: limits.NVME_HIGH_WATERMARK}
        self._since_s: dict[int, float] = {}

    @property
    def is_empty(self) -> bool:
        return not self._since_s

    def select_due(self, batch: Iterable[tuple[int, Tier | None]]) -> list[tuple[int, Tier | None]]:
        """Return doomed copies that need not stay: old, in excess, or in tiers without room."""
        if not self._db.is_clustered:
            return list(batch)
        now_s = time.monotonic()
        # A content that this did not remove is seen again before it is forgotten here.
        self._since_s = {number: since_s for number, since_s in self._since_s.items() if now_s - since_s < 2 * limits.READ_GRACE_S}
        roomy = {tier for tier in self._high if tier in self._tiers and self._has_room(tier)}
        return [one for one in batch if not (one[1] in roomy and self._is_young(one[0], now_s))]

    def _is_young(self, number: int, now_s: float) -> bool:
        if number not in self._since_s and len(self._since_s) >= limits.READ_GRACE_CONTENTS_MAX:
            return False
        return now_s - self._since_s.setdefault(number, now_s) < limits.READ_GRACE_S

    def _has_room(self, tier: Tier) -> bool:
        capacity = self._tiers[tier].get_capacity()
        next_bytes = max(contents.get_largest_recent_size(self._db), summary.get_space_demand(self._db))
        return space.fits(capacity, next_bytes, self._high[tier])


class Reclaim:
    """Reclaims the space of some tiers. One for each group of tiers that may hang independently."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, tier_group: Iterable[Tier] = Tier) -> None:
        self._db = db
        self._all_tiers = tiers
        self._config = config
        self._notify = notify
        self._tier_group = tuple(tier_group)
        self._read_grace = ReadGrace(db, tiers, config)
        self._after = 0
        self._failing: set[Tier] = set()
        # At the first sweep, files that the previous mount was creating are old enough.
        self._sweep_s = time.monotonic() + LEFTOVER_AGE_S + 5
        self._requests_s = 0.0

    @property
    def _present_tiers(self) -> dict[Tier, TierStorage]:
        return {tier: self._all_tiers[tier] for tier in self._tier_group if tier in self._all_tiers}

    def step(self) -> bool:
        """Remove one batch of doomed contents, and sweep if that is due. Return True if there may be more."""
        self._sweep_requests()
        batch = copies.list_doomed(self._db, self._tier_group, self._after, BATCH_CONTENTS)
        more, last = len(batch) == BATCH_CONTENTS, batch[-1][0] if batch else 0
        batch = self._read_grace.select_due(batch)
        present = self._present_tiers
        failures: dict[Tier, OSError] = {}
        for number, tier in batch:
            if tier in present and tier not in failures:
                try:
                    present[tier].remove(number)
                except OSError as failure:
                    failures[tier] = failure
        self._report(failures)
        batch = [(number, tier) for number, tier in batch if tier not in failures]
        if batch:
            disk.act("reclaim:forget", copies.delete_doomed, self._db, batch)
            if self._db.is_clustered:
                self._notify.wake_lanes()  # Another lane tells the other nodes that they may delete their copies.
        self._after = last if more else 0
        if not more and time.monotonic() >= self._sweep_s:
            self._sweep_s = time.monotonic() + SWEEP_S
            self._sweep()
        return more

    def next_due_s(self) -> float | None:
        """Return the seconds until the next sweep, or until a tier that failed is tried again."""
        due_s = max(0.0, min(self._sweep_s, self._requests_s) - time.monotonic())
        due_s = due_s if self._read_grace.is_empty else min(due_s, limits.READ_GRACE_POLL_S)
        return min(due_s, limits.RETRY_LAST_S) if self._failing else due_s

    def _report(self, failures: dict[Tier, OSError]) -> None:
        """Log once that a tier fails. Its files stay for a later step; those of other tiers go."""
        for tier, failure in failures.items():
            if tier not in self._failing:
                log.warning("%s: files that are not needed cannot be removed: %s; trying again", tier, failure)
        self._failing = set(failures)

    def _sweep_requests(self) -> None:
        """Delete stale mover requests. This lane exists in every configuration."""
        if time.monotonic() >= self._requests_s:
            self._requests_s = time.monotonic() + limits.REQUEST_KEEP_S
            mover_requests.delete_stale(self._db)

    def _sweep(self) -> None:
        for tier, storage in self._present_tiers.items():
            if storage.failure:
                continue
            try:
                self._remove_quarantined(tier, storage)
                count, size = self._remove_leftovers(tier, storage)
            except TierUnavailable as reason:
                log.debug("%s: not swept: %s", tier, reason)  # Its next sweep looks again.
                continue
            if count:
                log.info("%s: removed %d leftover files (%d bytes)", tier, count, size)

    def _remove_quarantined(self, tier: Tier, storage: TierStorage) -> None:
        for number in copies.list_bad_copies(self._db, CopyState.QUARANTINED, tier):
            with self._db.transaction():
                if not lifecycle.can_drop(contents.get_file_record(self._db, number), tier, pfs_verify=self._config.pfs_verify):
                    continue
                copies.delete_copy(self._db, number, tier)
            disk.act("reclaim:quarantined", local_copies.remove_unrecorded, self._db, storage, number)

    def _remove_leftovers(self, tier: Tier, storage: TierStorage) -> tuple[int, int]:
        """Remove old files without a row, listed before the rows. Return (number, bytes)."""
        files = set(storage.contents())
        unknown = sorted(files - copies.list_copies_in_tier(self._db, tier).keys())
        sizes = [size for number in unknown if (size := self._remove_leftover(tier, storage, number)) is not None]
        return len(sizes), sum(sizes)

    def _remove_leftover(self, tier: Tier, storage: TierStorage, number: int) -> int | None:
        """Remove one file unless it is young or has a row by now. Return its size if it was removed.

        In RAM and on NVMe, the mount creates a file within the transaction that inserts its row, and may reuse the name of a leftover.
        The transaction held during the removal excludes both. On the PFS, which may hang, rows come first and no transaction is needed.
        """
        found = storage.stat(number)
        if found is None or time.time() - max(found.st_mtime, found.st_ctime) < LEFTOVER_AGE_S:
            return None
        fd = -1
        with contextlib.nullcontext() if tier is Tier.PFS else self._db.transaction():
            content = contents.get_content(self._db, number)
            if copies.has_copy(self._db, number, tier) or (content is not None and content.state is ContentState.OPEN):
                return None
            fd = disk.act("reclaim:leftover", storage.detach, number)
        if fd >= 0:
            os.close(fd)  # Frees a large file, which takes long, after the transaction.
        return found.st_size
