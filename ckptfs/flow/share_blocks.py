"""The share step: equal blocks of contents on NVMe are stored once, and the saved bytes are counted.

Takes: sealed contents with a verified copy on NVMe, in the order of their verification; the newest blocks of others, by digest.
Leaves: the same files. Equal blocks lie in one place on the device, if its filesystem can share them (XFS, btrfs).
If we die here: nothing is lost, and the next mover begins again. It recognises what is shared already by its place, without reading it.

The kernel compares the bytes under its locks and shares only what is equal, so neither a wrong digest nor a writer does harm. What differs
despite equal digests is wrong in one of the two copies: that copy is quarantined (P4). The pages of the file that came first are dropped
before, so it is the device that is compared: the good blocks of a new content never give way to ones that have gone bad.

btrfs frees an extent only when no file has any part of it, and a file that was written at once is one extent. So there the blocks of a file
that are not shared move out: they are written to a file without a name, and shared with that one. The kernel compares again.

This is the least urgent work of the mover. It takes at most half of a thread's time, gives way to seals for a while, and leaves alone what
a process has open, because the kernel locks both files while it compares. With a lower priority than that of the mover, a program that
opens such a file meanwhile could wait for a thread that gets no processor.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfs import digest, disk, limits, procfs
from ckptfs.catalog import contents, copies, handles, pfs_state, summary
from ckptfs.catalog.database import Database
from ckptfs.model import Content, ContentState, Tier
from ckptfs.tiers import local_copies, reflink
from ckptfs.tiers.reflink import BlockIndex, Sharing
from ckptfs.tiers.storage import Tiers, TierStorage

log = logging.getLogger(__name__)

disk.declare_labels("share:read", "share:write")

BATCH_COPIES = 64
PIECE_BLOCKS = 16
"""Blocks between two looks at what is more urgent."""
YIELD_S = 10.0
"""How long seals go first. A content that cannot be sealed for days holds up nothing."""
OPEN_RETRY_S = 30.0
DEFERRED_MAX = 1024
MEASURE_S = 5.0
MEASURE_RATIO = 20
"""Measuring takes at most this part of the time."""


@dataclass(slots=True)
class _Work:
    """A content in hand. `left`: (block, file with it, block there). `own`: the others, if they move out."""

    content: Content
    left: list[tuple[int, int, int]]
    own: list[int]
    has_shared: bool = False
    has_skipped: bool = False


@dataclass(slots=True)
class _Measure:
    """The state of which a figure was taken, and the time of the next one. `is_stale`: it may differ now."""

    due_s: float = 0.0
    state: tuple[int, ...] = ()
    shared_bytes: int = 0
    is_stale: bool = False

    def request(self, now_s: float) -> bool:
        """Return True if the figure can be taken now; otherwise note that it may differ."""
        self.is_stale = now_s < self.due_s
        return not self.is_stale

    def renew(self, began_s: float, state: tuple[int, ...]) -> None:
        """Note that the figure is that of `state`."""
        now_s = time.monotonic()
        self.due_s, self.state = now_s + max(MEASURE_S, MEASURE_RATIO * (now_s - began_s)), state


@dataclass(slots=True)
class _Queue:
    """The contents to look at.

    `cursor` is (time of verification of a copy, its content): all contents after it follow. `deferred` has contents that were open, with
    the time to look again.
    """

    cursor: tuple[int, int] = (0, limits.OFFSET_MAX)
    listed: list[int] = field(default_factory=list)
    deferred: dict[int, float] = field(default_factory=dict)


class ShareBlocks:
    """Shares the blocks of contents on NVMe, and measures what is shared there and on the PFS."""

    def __init__(self, db: Database, tiers: Tiers) -> None:
        self._db = db
        self._tiers = tiers
        self._index = BlockIndex()
        self._queue = _Queue()
        self._work: _Work | None = None
        self._resume_s = 0.0
        self._yields_until_s: float | None = None
        self.is_pending = False  # Whether there may be more to share.
        self._shared_blocks = 0
        self._measured_nvme = _Measure()
        self._measured_pfs = _Measure()

    def step(self) -> bool:
        """Look at one piece of one content, or measure. Return False: the pause after it is part of the step."""
        began_s = time.monotonic()
        if began_s < self._resume_s:
            self.is_pending = True  # What woke the lane is looked at after the pause.
            return False
        self._measure_pfs(began_s)
        storage = self._tiers.get(Tier.NVME)
        if storage is None or self._yield_or_defer(storage, began_s):
            return False
        try:
            self.is_pending = self._share_piece(storage)
            if not self.is_pending:
                self._measure_nvme(storage, began_s)
            self._resume_s = 2 * time.monotonic() - began_s
        except OSError as failure:
            log.info("%s: blocks of a content are not shared: %s; going on with the next one", storage.root, failure)
            self._work, self.is_pending, self._resume_s = None, True, began_s + limits.TIER_RETRY_S
        return False

    def next_due_s(self) -> float | None:
        """Return the seconds until the next piece, retry or measurement."""
        now_s = time.monotonic()
        dues = [self._resume_s] if self.is_pending else list(self._queue.deferred.values())
        dues += [measured.due_s for measured in (self._measured_nvme, self._measured_pfs) if measured.is_stale]
        if self._measured_nvme.shared_bytes:  # Deleted files wake no lane.
            dues.append(max(self._measured_nvme.due_s, now_s + MEASURE_S))
        return max(0.0, max(min(dues), self._resume_s) - now_s) if dues else None

    def _yield_or_defer(self, storage: TierStorage, now_s: float) -> bool:
        """Return True, and set when to look again, if the tier fails or contents wait for their seal."""
        if storage.failure:
            self.is_pending, self._resume_s = True, now_s + limits.TIER_RETRY_S
            return True
        if not storage.can_share_blocks:
            self.is_pending = False
            return True
        if not summary.count_unsealed(self._db):
            self._yields_until_s = None
            return False
        if self._yields_until_s is None:
            self._yields_until_s = now_s + YIELD_S
        if now_s >= self._yields_until_s:
            return False
        self.is_pending, self._resume_s = True, now_s + limits.RETRY_FIRST_S
        return True

    # --- what to look at ---------------------------------------------------------------------------------------------

    def _share_piece(self, storage: TierStorage) -> bool:
        """Share some blocks of the content in hand, or take the next content. Return False if there is none."""
        if self._work is None:
            self._work = self._take_next(storage)
            return self._work is not None
        work = self._work
        open_contents = handles.list_contents(self._db)
        if work.content.id in open_contents:
            self._defer(work.content.id)
            self._work = None
            return True
        try:
            target = storage.open(work.content.id)
        except FileNotFoundError:
            self._work = None
            return True
        with disk.closing(target):
            if work.left:
                piece, work.left = work.left[:PIECE_BLOCKS], work.left[PIECE_BLOCKS:]
                for number, other, there in piece:
                    if other in open_contents:
                        work.has_skipped = True
                        continue
                    with contextlib.suppress(FileNotFoundError), disk.closing(storage.open(other)) as source:
                        work.has_shared |= self._share_block(storage, work.content, target, number, source, (other, there))
            elif work.has_shared:
                own, work.own = work.own[:PIECE_BLOCKS], work.own[PIECE_BLOCKS:]
                _move_out(storage, work.content, target, own)
        if not (work.left or (work.own and work.has_shared)):
            self._finish(work)
        return True

    def _take_next(self, storage: TierStorage) -> _Work | None:
        """Return the next content that has blocks of others; None if there is none."""
        while self._queue.listed or self._list_next():
            content = contents.get_content(self._db, self._queue.listed.pop(0))
            if content is None or content.state is not ContentState.SEALED or content.size < limits.SHARED_BYTES_MIN:
                continue
            blocks = content.block_digests or b""
            places = {number: place for number, place in self._index.find(blocks).items() if place[0] != content.id}
            if places:
                own = [
                    number for number, one in enumerate(digest.split_digests(blocks)) if number not in places and one != digest.ZERO_BLOCK
                ]
                # Less would be saved than is written.
                is_worth = len(own) <= len(places) and procfs.get_filesystem_type(storage.root) == "btrfs"
                return _Work(content, [(number, *place) for number, place in sorted(places.items())], own if is_worth else [])
            self._index.add(content.id, blocks)
        return None

    def _list_next(self) -> bool:
        """List contents that were not looked at yet, or were open. Return False if there are none."""
        queue, now_s = self._queue, time.monotonic()
        again = [number for number, due_s in queue.deferred.items() if due_s <= now_s]
        for number in again:
            del queue.deferred[number]
        found = copies.list_verified_on_nvme(self._db, queue.cursor, BATCH_COPIES)
        queue.cursor = found[-1] if found else queue.cursor
        queue.listed = again + [number for _, number in found]
        return bool(queue.listed)

    def _defer(self, content: int) -> None:
        if len(self._queue.deferred) < DEFERRED_MAX:
            self._queue.deferred[content] = time.monotonic() + OPEN_RETRY_S

    def _finish(self, work: _Work) -> None:
        """Let others share with this content, or look at it again if files that it needs were open."""
        self._work = None
        if work.has_skipped:
            self._defer(work.content.id)
        else:
            self._index.add(work.content.id, work.content.block_digests or b"")

    # --- one block ---------------------------------------------------------------------------------------------------

    def _share_block(self, storage: TierStorage, content: Content, target: int, number: int, source: int, place: tuple[int, int]) -> bool:
        """Share one block. Return True if that changed where it is."""
        start, there = number * limits.BLOCK_BYTES, place[1] * limits.BLOCK_BYTES
        length = min(limits.BLOCK_BYTES, content.size - start)
        if reflink.list_extents(source, there, length) == reflink.list_extents(target, start, length):
            return False
        found = reflink.deduplicate(source, there, target, start, length)
        if found is Sharing.SHARED:
            self._shared_blocks += 1
        elif found is Sharing.DIFFERENT:
            self._quarantine_if_bad(storage, place[0], place[1])
            self._quarantine_if_bad(storage, content.id, number)
        return found is Sharing.SHARED

    def _quarantine_if_bad(self, storage: TierStorage, number: int, block: int) -> None:
        """Quarantine a copy if a block of it, read from the device, has not its sealed digest."""
        content = contents.get_content(self._db, number)
        if content is None or content.state is not ContentState.SEALED:
            return
        with disk.closing(storage.open(number)) as fd:
            os.posix_fadvise(fd, block * limits.BLOCK_BYTES, limits.BLOCK_BYTES, os.POSIX_FADV_DONTNEED)
            data = disk.act("share:read", os.pread, fd, limits.BLOCK_BYTES, block * limits.BLOCK_BYTES)
        expected = digest.split_digests(content.block_digests or b"")[block : block + 1]
        if [digest.hash_block(data)] != expected:
            local_copies.quarantine(self._db, content, storage.tier, f"its digest differs in block {block}")

    # --- what is shared ----------------------------------------------------------------------------------------------

    def _measure_nvme(self, storage: TierStorage, now_s: float) -> None:
        """Ask the filesystem what sharing saves on NVMe if files came or went."""
        measured = self._measured_nvme
        if measured.request(now_s):
            state = (os.fstat(storage.directory).st_mtime_ns, self._shared_blocks)
            if state != measured.state:
                measured.shared_bytes = reflink.measure_saved(_open_all(storage))
                storage.record_shared_bytes(measured.shared_bytes)
            measured.renew(now_s, state)

    def _measure_pfs(self, now_s: float) -> None:
        """Count what sharing saves on the PFS if files that share blocks came or went. Does not touch the PFS."""
        if self._measured_pfs.request(now_s):
            state = pfs_state.count_sharing(self._db)
            if state != self._measured_pfs.state:
                summary.set_report(self._db, summary.SHARED_ON_PFS_REPORT, {"bytes": pfs_state.count_shared_bytes(self._db)})
            self._measured_pfs.renew(now_s, state)


def _move_out(storage: TierStorage, content: Content, target: int, numbers: list[int]) -> None:
    """Give blocks of a content that no other file has a place of their own."""
    flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
    with disk.closing(os.open(".", flags, 0o600, dir_fd=storage.directory)) as own:
        for position, number in enumerate(numbers):
            data = disk.act("share:read", os.pread, target, limits.BLOCK_BYTES, number * limits.BLOCK_BYTES)
            disk.write_all("share:write", own, data, position * limits.BLOCK_BYTES)
        os.fsync(own)
        for position, number in enumerate(numbers):
            start = number * limits.BLOCK_BYTES
            reflink.deduplicate(own, position * limits.BLOCK_BYTES, target, start, min(limits.BLOCK_BYTES, content.size - start))


def _open_all(storage: TierStorage) -> Iterator[int]:
    for number in storage.contents():
        with contextlib.suppress(FileNotFoundError), disk.closing(storage.open(number)) as fd:
            yield fd
