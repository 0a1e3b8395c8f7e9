"""The seal step: size and digest of contents that are closed.

Takes: contents whose last writer has closed them (CLOSED), in the tier where they were written.
Leaves: SEALED contents with their exact size and digest and a verified copy. On a disk, the file and its row are durable.
If we die here: nothing was changed. The content is still CLOSED and is read again from its start.

What a file has of prepared memory and did not write is removed first (`tiers.prepared`), so that it takes what it holds.

A memory mapping outlives its handle, so a content is read under a lease. The kernel refuses the lease while any process can still write
to the file. Such a content is tried again later; other contents do not wait for it. Many small files share one transaction.
"""

import errno
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs import disk, limits, step_durations
from ckptfs.catalog import contents, copies, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get_shown_path
from ckptfs.config import Config
from ckptfs.errors import Busy
from ckptfs.model import Content, ContentState, Notifier, Tier
from ckptfs.tiers import prepared, transfer
from ckptfs.tiers.storage import Tiers, TierStorage

log = logging.getLogger(__name__)

transfer.declare_labels("seal")
disk.declare_labels("seal:fdatasync", "seal:directory", "seal:persist", "seal:commit")

LEASE_REFUSED_S = 5.0
POLL_S = 0.5
BATCH_CONTENTS = 64
BATCH_BYTES = 256 * limits.MIB


@dataclass(slots=True)
class _Retry:
    """When to try again to seal a content."""

    until_s: float
    delay_s: float


class Seal:
    """Seals the contents of some tiers. One for each group of tiers that may hang independently."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, tier_group: Iterable[Tier] = Tier) -> None:
        self._db = db
        self._tiers = tiers
        self._notify = notify
        self._tier_group = tuple(tier_group)
        self._after = 0
        self._retries: dict[int, _Retry] = {}

    def step(self) -> bool:
        """Seal one batch. Return True if there may be more at once."""
        # Contents of a tier that is absent wait until it returns.
        present = [tier for tier in self._tier_group if tier in self._tiers]
        # If this step fails, the next one begins with the first content.
        after, self._after = self._after, 0
        batch = contents.list_closed(self._db, present, after, BATCH_CONTENTS)
        now = time.monotonic()
        seals: list[contents.SealResult] = []
        taken_bytes = 0
        for content, tier in batch:
            after = content.id
            wait = self._retries.get(content.id)
            if wait is not None and wait.until_s > now:
                continue
            sealed = self._try_seal(content, tier)
            if sealed is not None:
                seals.append(sealed)
                taken_bytes += sealed.size
            if taken_bytes >= BATCH_BYTES:
                break
        self._record_seals(seals)
        more = len(batch) == BATCH_CONTENTS or taken_bytes >= BATCH_BYTES
        if more:
            self._after = after
        else:
            self._drop_stale_retries()
        return more

    def next_due_s(self) -> float | None:
        """Return the seconds until the next try, or the next poll: a wake-up after a close may be lost."""
        if not self._retries:
            present = [tier for tier in self._tier_group if tier in self._tiers]
            return POLL_S if contents.count_writers(self._db) or contents.list_closed(self._db, present, 0, 1) else None
        return max(0.0, min(wait.until_s for wait in self._retries.values()) - time.monotonic())

    def _try_seal(self, content: Content, tier: Tier) -> contents.SealResult | None:
        began_s = time.monotonic()
        try:
            sealed = self._read(content, tier, self._tiers[tier])
        except Busy as reason:
            log.debug("%s: content %d cannot be sealed yet: %s", get_shown_path(self._db, content.inode), content.id, reason)
            self._defer(content.id)
            return None
        except OSError as failure:
            self._handle_read_error(content, tier, failure)
            return None
        self._retries.pop(content.id, None)
        step_durations.record(step_durations.SEAL, time.monotonic() - began_s, sealed.size)
        return sealed

    def _read(self, content: Content, tier: Tier, storage: TierStorage) -> contents.SealResult:
        if tier is Tier.RAM:
            self._trim(content, storage)
        with (
            disk.closing(storage.open(content.id)) as fd,
            transfer.hold_read_lease(fd, strict=self._requires_lease(content, tier)) as check,
        ):
            if os.fstat(fd).st_size > limits.FILE_BYTES_MAX:
                # The kernel has let a write far behind the end pass, and reading all these holes would keep other contents waiting.
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            size, digest, blocks = transfer.read_parallel(fd, label="seal", before_block=check)
            if tier is not Tier.RAM:
                disk.act("seal:fdatasync", os.fdatasync, fd)
            check()
        return contents.SealResult(content.id, content.inode, content.change, tier, size, digest, blocks)

    def _trim(self, content: Content, storage: TierStorage) -> None:
        """Remove prepared pages that no process wrote, in transactions that keep writers away."""
        with disk.closing(storage.open(content.id)) as fd:
            more = prepared.begin_trim(fd)
        while more:
            with self._db.transaction():
                contents.require_unchanged(self._db, content)
                with disk.closing(self._open_for_trim(content, storage)) as fd, transfer.hold_write_lease(fd) as is_alone:
                    more = prepared.trim(fd, holes=is_alone)

    def _open_for_trim(self, content: Content, storage: TierStorage) -> int:
        try:
            return storage.open(content.id, os.O_RDWR | os.O_NONBLOCK)
        except BlockingIOError as failure:
            raise Busy("another step reads the file under a lease") from failure

    def _requires_lease(self, content: Content, tier: Tier) -> bool:
        """Return False for a PFS that has refused the lease for a while: times are compared."""
        wait = self._retries.get(content.id)
        return tier is not Tier.PFS or wait is None or wait.delay_s < LEASE_REFUSED_S

    def _record_seals(self, seals: list[contents.SealResult]) -> None:
        if not seals:
            return
        on_disk = {one.tier for one in seals} - {Tier.RAM}
        for tier in on_disk:
            try:
                disk.act("seal:directory", self._tiers[tier].fsync_directory)
            except OSError as failure:
                seals = self._defer_tier(seals, tier, failure)
        if not seals:
            return
        with self._db.transaction():
            done = contents.mark_sealed(self._db, seals)
            namespace.insert_candidates(self._db, [one.inode for one in done])
            disk.reach("seal:commit")
        if on_disk:
            disk.act("seal:persist", self._db.persist)
        if done:
            log.debug("sealed %d contents, %d bytes", len(done), sum(one.size for one in done))
            large = any(one.size >= limits.LARGE_BYTES_MIN for one in done)
            self._notify.wake_lanes("replicate" if large else "")
            self._notify.notify_sealed()

    def _defer_tier(self, seals: list[contents.SealResult], tier: Tier, failure: OSError) -> list[contents.SealResult]:
        self._tiers[tier].record_failure(failure)
        for one in seals:
            if one.tier is tier:
                delay_s = self._defer(one.content)
                log.warning("content %d: cannot be sealed: %s fails: %s; next try in %.1f s", one.content, tier, failure, delay_s)
        return [one for one in seals if one.tier is not tier]

    def _handle_read_error(self, content: Content, tier: Tier, failure: OSError) -> None:
        """Record the loss of a missing file; defer every other content that the tier cannot read."""
        if failure.errno == errno.ENOENT and self._record_missing_file(content, tier):
            log.error("%s: lost: its file in %s disappeared before the seal", get_shown_path(self._db, content.inode), tier)
            return
        if self._get_state(content.id) is not ContentState.CLOSED:
            return  # It was deleted or opened again meanwhile.
        delay_s = self._defer(content.id)
        log.warning(
            "%s: cannot be sealed: %s fails: %s; next try in %.1f s", get_shown_path(self._db, content.inode), tier, failure, delay_s
        )

    def _record_missing_file(self, content: Content, tier: Tier) -> bool:
        """Delete the row of a copy without a file. Return True if the content is lost by that."""
        with self._db.transaction():
            if not contents.is_unchanged(self._db, content):
                return False
            copies.delete_copy(self._db, content.id, tier)
            return contents.mark_lost(self._db, content)

    def _defer(self, number: int) -> float:
        """Defer a content, longer each time. Return the delay in seconds."""
        previous = self._retries.get(number)
        delay_s = limits.RETRY_FIRST_S / 4 if previous is None else min(2 * previous.delay_s, limits.RETRY_LAST_S)
        self._retries[number] = _Retry(time.monotonic() + delay_s, delay_s)
        return delay_s

    def _drop_stale_retries(self) -> None:
        """Forget the retries of contents that were opened again or deleted."""
        self._retries = {number: wait for number, wait in self._retries.items() if self._get_state(number) is ContentState.CLOSED}

    def _get_state(self, number: int) -> ContentState | None:
        found = contents.get_content(self._db, number)
        return None if found is None else found.state
