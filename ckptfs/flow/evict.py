"""Takes: tiers that are above their high watermark, and a RAM in which the next content would not fit.
Leaves: tiers below their low watermark, as far as P5 lets them: copies that are whole elsewhere went, others moved from RAM to NVMe.
If we die here: a copy's row goes before its file, which is a leftover then; an unfinished move leaves a FILLING row. No copy is lost.

Nothing tells of what the kernel writes into a backing file, so while writers are open the room is looked at: often while it shrinks,
every few seconds while nothing happens, never while nobody writes.
"""

import logging
import os
import time

from ckptfs import disk, lifecycle, limits
from ckptfs.catalog import holding, report, settling
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import Busy, DigestMismatch
from ckptfs.model import Content, Notifier, Tier
from ckptfs.tiers import duplicate, health, ram_limit, removal, space
from ckptfs.tiers.place import Place, Places
from ckptfs.tiers.space import Room

log = logging.getLogger(__name__)

disk.declare_labels("evict:forgotten")

BATCH_CONTENTS = 64
TROUBLE = "trouble:moving to nvme"
PAGE_BYTES = 4096
NVME_HIGH = 0.95
NVME_LOW = 0.90
RECENT_CONTENTS = 32
IDLE_S = 1.0
LOOK_FIRST_S = 0.25
LOOK_LAST_S = 5.0


class Evict:
    """Keeps RAM and NVMe below their watermarks."""

    def __init__(self, db: Database, places: Places, config: Config, notify: Notifier) -> None:
        self._db = db
        self._places = places
        self._config = config
        self._marks = {Tier.RAM: (config.ram_high, config.ram_low), Tier.NVME: (NVME_HIGH, NVME_LOW)}
        self._relieving: set[Tier] = set()
        self._stuck: set[Tier] = set()
        self._idle_until_s: dict[Tier, float] = {}
        self._put_off: set[Tier] = set()
        self._look_s = LOOK_FIRST_S
        self._free = -1
        self._demote_at_s = 0.0
        self._demote_wait_s = 0.0

    def step(self) -> bool:
        """Make some room where it is short. True: there is more to do at once."""
        self._raise_limit()
        more = [self._relieve(tier) for tier in self._marks if tier in self._places]
        return any(more)

    def next_due_s(self) -> float | None:
        """Until the room is looked at again: soon while it shrinks, now and then while somebody writes, else for what was put off."""
        if not settling.count_writers(self._db) and not self._stuck:
            self._look_s, self._free = LOOK_FIRST_S, -1
            return min((max(0.0, self._idle_until_s[tier] - time.monotonic()) for tier in self._put_off), default=None)
        free = self._places[Tier.RAM].room().free
        self._look_s = min(2 * self._look_s, LOOK_LAST_S) if free == self._free else LOOK_FIRST_S
        self._free = free
        return self._look_s

    def retry_now(self) -> None:
        """What could not leave a moment ago may do so now."""
        self._idle_until_s, self._put_off = {}, set()
        self._demote_at_s = 0.0

    # --- making room -------------------------------------------------------------------------------------------------

    def _relieve(self, tier: Tier) -> bool:
        """Drop or move one batch out of `tier`. True: there is more to do, and something could be done about it."""
        room = self._places[tier].room()
        must = self._must_leave(tier, room)
        better = max(must, self._had_better_leave(room)) if tier is Tier.RAM else must
        if not must:
            self._is_well(tier)
        self._put_off.discard(tier)
        if not better:
            return False
        if time.monotonic() < self._idle_until_s.get(tier, 0.0):
            self._put_off.add(tier)
            return False
        if (
            self._drop_older(self._places[tier])
            or self._drop_spare(self._places[tier], better)
            or (must and tier is Tier.RAM and self._demote_one())
        ):
            self._stuck.discard(tier)
            return True
        self._idle_until_s[tier] = time.monotonic() + IDLE_S
        if must and tier not in self._stuck:
            self._stuck.add(tier)
            log.info("%s is too full and nothing may leave it now; %d MiB too much", tier, must // limits.MIB)
        return False

    def _must_leave(self, tier: Tier, room: Room) -> int:
        """Bytes that are too much for the tier, or for the machine's memory."""
        high, low = self._marks[tier]
        excess = space.excess(room, low if tier in self._relieving else high, low)
        if tier is Tier.RAM:
            excess = max(excess, _memory_short(room))
        if excess:
            self._relieving.add(tier)
        return excess

    def _had_better_leave(self, room: Room) -> int:
        """Bytes in RAM without which the next content would fit: a checkpoint comes again at nearly the same size."""
        high, low = self._marks[Tier.RAM]
        return space.excess_for(room, settling.get_largest_recent_size(self._db, RECENT_CONTENTS), high, low)

    def _is_well(self, tier: Tier) -> None:
        self._relieving.discard(tier)
        self._stuck.discard(tier)
        if tier is Tier.RAM:
            self._untell()

    def _drop_older(self, place: Place) -> int:
        """Drop former generations of other nodes' contents; how many went."""
        older = holding.list_stale(self._db, place.tier, time.time_ns(), BATCH_CONTENTS)
        for number in older:
            settling.delete_copy(self._db, number, place.tier)
            removal.remove_forgotten(self._db, place, number)
        return len(older)

    def _drop_spare(self, place: Place, excess: int) -> int:
        """Drop copies of contents that are whole elsewhere, up to `excess` bytes; how many went."""
        gone = []
        for content in settling.list_evictable(self._db, place.tier, elsewhere=True, at_most=BATCH_CONTENTS):
            if excess <= 0:
                break
            gone.append(content)
            excess -= max(content.size, PAGE_BYTES)
        return self._drop(place, gone)

    def _drop(self, place: Place, contents: list[Content]) -> int:
        """Drop these copies, after a last look in the transaction that forgets them: somebody may have opened one."""
        with self._db.transaction():
            gone = [content for content in contents if lifecycle.can_drop(settling.get_file_record(self._db, content.id), place.tier)]
            for content in gone:
                settling.delete_copy(self._db, content.id, place.tier)
        disk.act("evict:forgotten", lambda: None)
        self._remove(place, gone)
        if gone:
            log.debug("dropped %d copies from %s", len(gone), place.tier)
        return len(gone)

    def _remove(self, place: Place, gone: list[Content]) -> None:
        """Remove what was forgotten. Whoever wants it back announces that first, which cannot happen inside our transaction: what was
        announced before has a file of its own. To free a large file takes long, so that is done outside.
        """
        detached: list[int] = []
        try:
            with self._db.transaction():
                for content in gone:
                    if not settling.has_copy(self._db, content.id, place.tier):
                        detached.append(place.detach(content.id))
        finally:
            for fd in detached:
                if fd >= 0:
                    os.close(fd)

    # --- moving from RAM to NVMe -------------------------------------------------------------------------------------

    def _demote_one(self) -> bool:
        """Move the content that was used least recently to NVMe. False: there is none, no room there, or NVMe has trouble."""
        nvme = self._places.get(Tier.NVME)
        if nvme is None or time.monotonic() < self._demote_at_s:
            return False
        room = nvme.room()
        candidates = settling.list_evictable(self._db, Tier.RAM, elsewhere=False, at_most=BATCH_CONTENTS)
        fitting = next((content for content in candidates if space.fits(room, content.size, NVME_HIGH)), None)
        return fitting is not None and self._demote(fitting)

    def _demote(self, content: Content) -> bool:
        try:
            duplicate.make(self._db, self._places, content, Tier.RAM, Tier.NVME)
        except Busy as reason:
            log.debug("%s is not moved to nvme now: %s", self._name(content), reason)
            return True
        except (OSError, DigestMismatch) as failure:
            if isinstance(failure, OSError) and not settling.is_unchanged(self._db, content):
                return True  # It was deleted while we reached for it.
            self._demote_wait_s = min(max(2 * self._demote_wait_s, limits.RETRY_FIRST_S), limits.RETRY_LAST_S)
            self._demote_at_s = time.monotonic() + self._demote_wait_s
            self._tell(content, failure)
            if settling.mark_lost(self._db, content):
                log.error("%s is lost: its only copy is not what was sealed; it gives EIO", self._name(content))
            return False
        self._untell()
        self._drop(self._places[Tier.RAM], [content])
        return True

    def _tell(self, content: Content, failure: OSError | DigestMismatch) -> None:
        why = health.describe(failure) if isinstance(failure, OSError) else str(failure)
        value = {"what": f"cannot be moved from ram to nvme: {why}", "path": self._name(content), "remedy": health.remedy(failure.errno)}
        settling.set_report(self._db, TROUBLE, value)
        log.warning("%s %s; again in %.1f s", value["path"], value["what"], self._demote_wait_s)

    def _untell(self) -> None:
        """What hindered a move is over, or there is nothing to move any more."""
        if self._demote_wait_s:
            settling.set_report(self._db, TROUBLE, None)
            self._demote_wait_s = 0.0

    def _name(self, content: Content) -> str:
        return os.fsdecode(report.get_path(self._db, content.inode))

    # --- the limit of the tmpfs --------------------------------------------------------------------------------------

    def _raise_limit(self) -> None:
        """Enlarge the RAM tier while somebody writes and it is nearly full, as far as the configuration and the memory allow."""
        root = self._places[Tier.RAM].root
        if os.geteuid() != 0 or not os.path.ismount(root) or not settling.count_writers(self._db):
            return
        total, used = ram_limit.size(root)
        memory, available = ram_limit.memory()
        larger = ram_limit.wanted(total, used, hard=self._config.ram_bytes, available=available, memory=memory)
        if larger > total:
            ram_limit.raise_to(root, larger)
            log.info("the RAM tier was enlarged from %d to %d MiB", total // limits.MIB, larger // limits.MIB)


def _memory_short(room: Room) -> int:
    """How many bytes RAM should give back because the machine runs out of memory, however little of its budget is used."""
    headroom = min(limits.RAM_HEADROOM_BYTES_MIN, room.total // 10)
    return min(max(0, headroom - room.free), room.used)
