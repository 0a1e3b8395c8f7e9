"""Takes: contents that nobody needs any more (DOOMED), quarantined copies that have a good one beside them, and files that no row names.
Leaves: their room.
If we die here: files go before their rows, so what was not finished is found again.

The mount makes a content's file first and commits its row then: an unknown file that is young is not a leftover.
"""

import contextlib
import logging
import time
from collections.abc import Iterable

from ckptfs import disk, lifecycle
from ckptfs.catalog import contents, copies
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.model import CopyState, Notifier, Tier
from ckptfs.tiers import local_copies
from ckptfs.tiers.storage import Tiers, TierStorage

log = logging.getLogger(__name__)

disk.declare_labels("drop:forget", "drop:quarantined", "drop:leftover")

BATCH_CONTENTS = 128
LEFTOVER_AGE_S = 60.0
SWEEP_S = 3600.0


class Reclaim:
    """Drops what lies in some of the tiers. One for each group of tiers that may hang on its own."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, tier_group: Iterable[Tier] = Tier) -> None:
        self._db = db
        self._all_tiers = tiers
        self._notify = notify
        self._tier_group = tuple(tier_group)
        self._after = 0
        # The first sweep comes when what the mount of before may have been making is old enough.
        self._sweep_s = time.monotonic() + LEFTOVER_AGE_S + 5

    @property
    def _present_tiers(self) -> dict[Tier, TierStorage]:
        """Those of our tiers that are there: one may have been left out since."""
        return {tier: self._all_tiers[tier] for tier in self._tier_group if tier in self._all_tiers}

    def step(self) -> bool:
        """Drop one batch of doomed contents, or sweep when that is due. True: there may be more at once."""
        batch = copies.list_doomed(self._db, self._tier_group, self._after, BATCH_CONTENTS)
        present = self._present_tiers
        for number, tier in batch:
            if tier in present:
                present[tier].remove(number)
        if batch:
            disk.act("drop:forget", copies.delete_doomed, self._db, batch)
            if self._db.is_clustered:
                self._notify.wake_lanes()  # Other nodes may have copies, and hear now that they may forget them.
        more = len(batch) == BATCH_CONTENTS
        self._after = batch[-1][0] if more else 0
        if not more and time.monotonic() >= self._sweep_s:
            self._sweep_s = time.monotonic() + SWEEP_S
            self._sweep()
        return more

    def next_due_s(self) -> float | None:
        """Until the next sweep."""
        return max(0.0, self._sweep_s - time.monotonic())

    def _sweep(self) -> None:
        for tier, storage in self._present_tiers.items():
            self._remove_quarantined(tier, storage)
            count, size = self._remove_leftovers(tier, storage)
            if count:
                log.info("removed %d files (%d bytes) from %s that belong to nothing", count, size, tier)

    def _remove_quarantined(self, tier: Tier, storage: TierStorage) -> None:
        for number, _ in copies.list_copies_in_state(self._db, CopyState.QUARANTINED, tier):
            with self._db.transaction():
                if not lifecycle.can_drop(contents.get_file_record(self._db, number), tier):
                    continue
                copies.delete_copy(self._db, number, tier)
            disk.act("drop:quarantined", local_copies.remove_unrecorded, self._db, storage, number)

    def _remove_leftovers(self, tier: Tier, storage: TierStorage) -> tuple[int, int]:
        """Remove old files without a row; how many, and their bytes. The files are listed before the rows, so that a row that is made
        now is seen.
        """
        files = set(storage.contents())
        unknown = sorted(files - copies.list_copies_in_tier(self._db, tier).keys())
        sizes = [size for number in unknown if (size := self._remove_leftover(tier, storage, number)) is not None]
        return len(sizes), sum(sizes)

    def _remove_leftover(self, tier: Tier, storage: TierStorage, number: int) -> int | None:
        """Remove one file unless it is young or known after all; its size when it went.

        In RAM and on NVMe the mount makes a file within the transaction that makes its row, and may take over a leftover's name.
        While we hold a transaction none of that can be going on. On the PFS, which may hang, rows come first, so it needs none.
        """
        found = storage.stat(number)
        if found is None or time.time() - max(found.st_mtime, found.st_ctime) < LEFTOVER_AGE_S:
            return None
        with contextlib.nullcontext() if tier is Tier.PFS else self._db.transaction():
            if copies.has_copy(self._db, number, tier):
                return None
            disk.act("drop:leftover", storage.remove, number)
        return found.st_size
