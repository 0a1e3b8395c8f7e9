"""The evict step: room in RAM and on NVMe.

Takes: tiers above their high watermark, and a RAM tier in which the next content would not fit.
Leaves: tiers below their low watermark, as far as P5 allows. Prepared files go first: they hold nothing. Then go files that were deleted
while this node was disconnected: they are kept only because other nodes do not know that yet. Then copies that are whole elsewhere are
dropped, and others move from RAM to NVMe. A file on the PFS counts as whole after `check_pfs` has read it back, unless `pfs_verify=false`.
Contents that retention rules keep on the PFS only leave both tiers even if there is room.
If we die here: a copy's row is deleted before its file, which is then a leftover. An unfinished move leaves a FILLING row. No copy is lost.

The kernel writes to backing files without a notification. While writers are open, the free space is therefore polled: often while it
shrinks, every few seconds otherwise.
"""

import logging
import os
import time

from ckptfs import cgroups, disk, lifecycle, limits, procfs
from ckptfs.catalog import copies, remote_contents, retention_state, summary
from ckptfs.catalog.contents import count_writers, get_file_record, get_largest_recent_size, is_unchanged, mark_deleted_doomed
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get_shown_path
from ckptfs.config import Config
from ckptfs.errors import Busy, DigestMismatch
from ckptfs.model import Content, Notifier, Tier
from ckptfs.tiers import health, local_copies, space
from ckptfs.tiers.space import Capacity
from ckptfs.tiers.storage import Tiers, TierStorage

log = logging.getLogger(__name__)

disk.declare_labels("evict:forgotten")

BATCH_CONTENTS = 64
TROUBLE = "moving to nvme"
PAGE_BYTES = 4096
NVME_LOW = 0.90
IDLE_S = 1.0
POLL_FIRST_S = 0.25
POLL_LAST_S = 5.0
RETIRED_POLL_S = 60.0


class Evict:
    """Keeps RAM and NVMe below their watermarks."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier) -> None:
        self._db = db
        self._tiers = tiers
        self._config = config
        self._notify = notify
        self._watermarks = {Tier.RAM: (config.ram_high, config.ram_low), Tier.NVME: (limits.NVME_HIGH_WATERMARK, NVME_LOW)}
        self._evicting: set[Tier] = set()
        self._stuck: set[Tier] = set()
        self._idle_until_s: dict[Tier, float] = {}
        self._deferred: set[Tier] = set()
        self._poll_s = POLL_FIRST_S
        self._last_free = -1
        self._demote_at_s = 0.0
        self._demote_wait_s = 0.0
        self._demand = 0  # Bytes that a writer waits for, because every tier is full for it.

    def step(self) -> bool:
        """Make some room in each full tier. Return True if there is more to do at once."""
        self._raise_limit()
        self._demand = summary.get_space_demand(self._db)
        tiers = [tier for tier in self._watermarks if tier in self._tiers]
        more = [self._drop_retired(self._tiers[tier]) for tier in tiers] + [self._make_room(tier) for tier in tiers]
        return any(more)

    def next_due_s(self) -> float | None:
        """Return the seconds until the next poll, soon while space shrinks, or a deferred tier."""
        if not count_writers(self._db) and not self._stuck:
            self._poll_s, self._last_free = POLL_FIRST_S, -1
            waits = [max(0.0, self._idle_until_s[tier] - time.monotonic()) for tier in self._deferred]
            return min(waits, default=RETIRED_POLL_S if retention_state.has_retired(self._db) else None)
        free = self._tiers[Tier.RAM].get_capacity().free
        self._poll_s = min(2 * self._poll_s, POLL_LAST_S) if free == self._last_free else POLL_FIRST_S
        self._last_free = free
        return self._poll_s

    def retry_now(self) -> None:
        """Forget the pauses of tiers that could not be relieved."""
        self._idle_until_s, self._deferred = {}, set()
        self._demote_at_s = 0.0

    # --- making room -------------------------------------------------------------------------------------------------

    def _make_room(self, tier: Tier) -> bool:
        """Drop or move one batch out of `tier`. Return True if that made room."""
        # What is doomed is not evicted for: the reclaim step removes it first.
        capacity = space.add_free(self._tiers[tier].get_capacity(), copies.count_doomed_bytes(self._db, tier))
        excess = self._get_excess_bytes(tier, capacity)
        if excess:
            self._evicting.add(tier)
        required = max(excess, self._demand - capacity.free if self._demand <= capacity.total else 0)
        if tier is Tier.RAM and required and self._tiers.prepared.give_back(required):
            return True
        desired = max(required, self._get_desired_bytes(capacity)) if tier is Tier.RAM else required
        if not required:
            self._evicting.discard(tier)
            self._stuck.discard(tier)
            if tier is Tier.RAM:
                self._clear_trouble()
        self._deferred.discard(tier)
        if not desired:
            return False
        if time.monotonic() < self._idle_until_s.get(tier, 0.0) and not self._demand:
            self._deferred.add(tier)
            return False
        if required and mark_deleted_doomed(self._db, tier, BATCH_CONTENTS):
            self._notify.wake_lanes()  # The reclaim step deletes them.
            return True
        if (
            self._drop_stale(self._tiers[tier])
            or self._drop_evictable(self._tiers[tier], desired)
            or (required and tier is Tier.RAM and self._demote_one())
        ):
            self._stuck.discard(tier)
            return True
        self._idle_until_s[tier] = time.monotonic() + IDLE_S
        if required and tier not in self._stuck:
            self._stuck.add(tier)
            log.info("%s: too full by %d MiB, and no copy may leave it now", tier, required // limits.MIB)
        return False

    def _get_excess_bytes(self, tier: Tier, capacity: Capacity) -> int:
        """Return the bytes by which a tier exceeds its watermark or the machine's memory."""
        high, low = self._watermarks[tier]
        excess = space.get_excess_bytes(capacity, low if tier in self._evicting else high, low)
        return max(excess, _get_memory_shortage(capacity)) if tier is Tier.RAM else excess

    def _get_desired_bytes(self, capacity: Capacity) -> int:
        """Return the bytes to free in RAM for the next content, which takes prepared memory."""
        high, low = self._watermarks[Tier.RAM]
        capacity = space.add_free(capacity, self._tiers.prepared.get_bytes())
        return space.get_excess_bytes_for(capacity, get_largest_recent_size(self._db), high, low)

    def _drop_stale(self, storage: TierStorage) -> int:
        """Drop stale copies of other nodes' contents. Return their number."""
        stale = remote_contents.list_stale(self._db, storage.tier, time.time_ns(), BATCH_CONTENTS)
        for number in stale:
            copies.delete_copy(self._db, number, storage.tier)
            local_copies.remove_unrecorded(self._db, storage, number)
        return len(stale)

    def _drop_retired(self, storage: TierStorage) -> bool:
        """Drop copies that retention rules do not want in this tier. Return True if there may be more."""
        found = retention_state.list_retired(self._db, storage.tier, at_most=BATCH_CONTENTS, pfs_verify=self._config.pfs_verify)
        count = self._drop(storage, found) if found else 0
        if count:
            retention_state.delete_retired(self._db)
        return count == BATCH_CONTENTS

    def _drop_evictable(self, storage: TierStorage, excess: int) -> int:
        """Drop copies of contents that are whole elsewhere, up to `excess` bytes. Return their number."""
        gone = []
        for content in self._list_evictable(storage.tier, elsewhere=True):
            if excess <= 0:
                break
            gone.append(content)
            excess -= max(content.size, PAGE_BYTES)
        return self._drop(storage, gone)

    def _list_evictable(self, tier: Tier, *, elsewhere: bool) -> list[Content]:
        verify = self._config.pfs_verify
        return copies.list_evictable(self._db, tier, elsewhere=elsewhere, at_most=BATCH_CONTENTS, pfs_verify=verify)

    def _drop(self, storage: TierStorage, contents: list[Content]) -> int:
        """Drop copies, after another check: a file may have been opened. Return their number."""
        with self._db.transaction():
            verify = self._config.pfs_verify
            gone = [one for one in contents if lifecycle.can_drop(get_file_record(self._db, one.id), storage.tier, pfs_verify=verify)]
            for content in gone:
                copies.delete_copy(self._db, content.id, storage.tier)
        if gone and storage.tier is Tier.NVME:
            self._db.persist()  # A power cut must not keep the removal and undo the row of the copy that replaces this one.
        disk.reach("evict:forgotten")
        local_copies.remove_unrecorded(self._db, storage, *(content.id for content in gone))
        if gone:
            log.debug("dropped %d copies from %s", len(gone), storage.tier)
        return len(gone)

    # --- moving from RAM to NVMe -------------------------------------------------------------------------------------

    def _demote_one(self) -> bool:
        """Move the least recently used content to NVMe. False: none, or NVMe is full or fails."""
        nvme = self._tiers.get(Tier.NVME)
        if nvme is None or time.monotonic() < self._demote_at_s:
            return False
        capacity = nvme.get_capacity()
        candidates = self._list_evictable(Tier.RAM, elsewhere=False)
        fitting = next((content for content in candidates if space.fits(capacity, content.size, limits.NVME_HIGH_WATERMARK)), None)
        return fitting is not None and self._demote(fitting)

    def _demote(self, content: Content) -> bool:
        try:
            local_copies.copy_to_tier(self._db, self._tiers, content, Tier.RAM, Tier.NVME)
        except Busy as reason:
            log.debug("%s: not moved to nvme: %s", get_shown_path(self._db, content.inode), reason)
            return True
        except (OSError, DigestMismatch) as failure:
            if isinstance(failure, OSError) and not is_unchanged(self._db, content):
                return True  # It was deleted meanwhile.
            self._demote_wait_s = min(max(2 * self._demote_wait_s, limits.RETRY_FIRST_S), limits.RETRY_LAST_S)
            self._demote_at_s = time.monotonic() + self._demote_wait_s
            self._report_trouble(content, failure)
            return False
        self._clear_trouble()
        self._drop(self._tiers[Tier.RAM], [content])
        return True

    def _report_trouble(self, content: Content, failure: OSError | DigestMismatch) -> None:
        reason = health.describe(failure) if isinstance(failure, OSError) else str(failure)
        path = get_shown_path(self._db, content.inode)
        value = {"what": f"cannot be moved from ram to nvme: {reason}", "path": path, "remedy": health.remedy(failure.errno)}
        summary.set_trouble(self._db, TROUBLE, value)
        log.warning("%s: %s; next try in %.1f s", value["path"], value["what"], self._demote_wait_s)

    def _clear_trouble(self) -> None:
        if self._demote_wait_s:
            summary.set_trouble(self._db, TROUBLE, None)
            self._demote_wait_s = 0.0

    # --- the limit of the tmpfs --------------------------------------------------------------------------------------

    def _raise_limit(self) -> None:
        """Enlarge a nearly full RAM tier, as configured and as memory allows, while files are written."""
        root = self._tiers[Tier.RAM].root
        if os.geteuid() != 0 or not os.path.ismount(root) or not count_writers(self._db):
            return
        capacity = space.read_capacity(root)
        total = capacity.total
        memory, available = procfs.get_memory()
        configured, limit = self._config.ram_bytes, cgroups.find_own_limit().limit_bytes or None
        larger = space.choose_ram_size(total, capacity.used, configured=configured, available=available, memory=memory, limit=limit)
        if larger > total:
            space.resize_ram(root, larger)
            log.info("ram: enlarged from %d to %d MiB", total // limits.MIB, larger // limits.MIB)


def _get_memory_shortage(capacity: Capacity) -> int:
    """Return the bytes that RAM must give back because the machine runs out of memory."""
    headroom = min(limits.RAM_HEADROOM_BYTES_MIN, capacity.total // 10)
    return min(max(0, headroom - capacity.free), capacity.used)
