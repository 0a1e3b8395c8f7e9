"""Owns which inodes are open, and the ends of handles on their way into the catalog.

A release is answered once its row is gone, but it waits a few milliseconds for company: the next open or create takes it along in its own
transaction. Until then the inode counts as open here, so that whoever asks meanwhile sees what the application wrote.
If we die here: the kernel sends an unanswered release again, and `start` builds everything else from the handle table.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import trio

from ckptfs import limits
from ckptfs.catalog import answers as told
from ckptfs.catalog import contents, handles, settling
from ckptfs.catalog.database import Database
from ckptfs.errors import CkptfsError, TimedOut, posix_error
from ckptfs.model import CopyState, Handle, Inode, Tier
from ckptfs.tiers.place import Place, Places
from ckptfs_daemon import bells
from ckptfs_daemon.bells import Bell
from ckptfs_daemon.open_file import WRITE_NOW, OpenFile, on_pfs, open_for_writing
from ckptfs_daemon.passthrough import Passthrough

log = logging.getLogger(__name__)

T = TypeVar("T")

HANDLE_MASK = 0xFFFF_FFFF
SPARSE_BYTES_MIN = 64 * limits.KIB
WITHOUT_PASSTHROUGH = {errno.EINVAL, errno.EOPNOTSUPP, errno.ELOOP, errno.ENOTTY, errno.EPERM}


class OpenFiles:
    """The open inodes of the mount, by inode and by handle."""

    def __init__(
        self, db: Database, places: Places, passthrough: Passthrough | None, bell: Bell, *, times_are_kernels: bool = False
    ) -> None:
        """`passthrough` is None on the buffered path. `times_are_kernels`: it keeps its writeback cache, and with it the files' mtime.

        It sets that by itself when it is another one, and writes what it kept at any time: a backing file's own mtime says nothing then.
        """
        self.times_are_kernels = times_are_kernels
        self.db = db
        self.places = places
        self.by_inode: dict[int, OpenFile] = {}
        self.by_handle: dict[int, OpenFile] = {}
        self._passthrough = passthrough
        self._bell = bell
        self._ending: dict[OpenFile, None] = {}
        self._answers: list[Callable[[], None]] = []
        self._some_ended = trio.Event()
        self._expected: dict[bytes, int] = {}
        self._promising: dict[OpenFile, None] = {}
        self._refused: set[Tier | None] = set()
        self._internal = 0
        self._pfs_until_s = float("inf")

    def of(self, fh: int) -> OpenFile:
        """The open file behind FUSE's `fh`. Raises EBADF."""
        file = self.by_handle.get(fh & HANDLE_MASK)
        if file is None:
            raise posix_error(errno.EBADF)
        return file

    # --- attributes ---------------------------------------------------------------------------------------------------

    def attributes(self, row: Inode) -> Inode:
        """`row` as it is now: an open file's size, times and blocks come from its backing file."""
        file = self.by_inode.get(row.id)
        if file is not None:
            return file.attributes(row)
        if row.content is None or row.size < SPARSE_BYTES_MIN or not row.is_file:
            return row
        for tier in (Tier.RAM, Tier.NVME):
            status = self.places[tier].stat(row.content) if tier in self.places else None
            if status is not None:
                return replace(row, allocated_blocks=status.st_blocks)
        return row

    def is_written(self, inode: int) -> bool:
        """Whether somebody has it open for writing."""
        file = self.by_inode.get(inode)
        return file is not None and any(file.handles.values())

    def written_ns(self, status: os.stat_result) -> int | None:
        """When the file with this backing file was written last; None: its inode knows."""
        return None if self.times_are_kernels else status.st_mtime_ns

    def set_times(self, inode: int, atime_ns: int | None, mtime_ns: int | None) -> None:
        """The inode's times were set (None: not this one); an open file's follow."""
        file = self.by_inode.get(inode)
        if file is not None:
            file.set_times(atime_ns, mtime_ns)

    def expected_bytes(self, kind: bytes) -> int:
        """How large a new file of this kind will probably be: as the last one; 0 when there was none."""
        return self._expected.get(kind, 0)

    def promised(self) -> dict[Tier, int]:
        """What writers are still expected to write, by tier."""
        sums: dict[Tier, int] = {}
        for file in self._promising:
            if file.tier is not None and file.tier is not Tier.PFS and (promised := file.promised):
                sums[file.tier] = sums.get(file.tier, 0) + promised
        return sums

    # --- opening ------------------------------------------------------------------------------------------------------

    def register(self, fd: int, tier: Tier | None) -> int:
        """A backing id for `fd`; 0 where its bytes must pass through us, which is logged once for a tier."""
        if self._passthrough is None:
            return 0
        try:
            return self._passthrough.register(fd)
        except OSError as failure:
            if failure.errno not in WITHOUT_PASSTHROUGH:
                raise
            if tier not in self._refused:
                self._refused.add(tier)
                reason = os.strerror(failure.errno or 0)
                log.info("files in %s are served without passthrough: the kernel says %s", tier or "the PFS", reason)
            return 0

    def unregister(self, backing: int) -> None:
        """Give a backing id back."""
        if backing and self._passthrough is not None:
            with contextlib.suppress(OSError):
                self._passthrough.release(backing)

    def internal_handle(self) -> int:
        """A handle of our own, which neither the kernel nor the catalog knows."""
        self._internal -= 1
        return self._internal

    def add(self, file: OpenFile, handle: int, writer: bool) -> None:
        """A handle was committed: from now on it is open."""
        self.by_inode[file.inode] = file
        self.by_handle[handle] = file
        file.handles[handle] = writer
        if file.expected:
            self._promising[file] = None
        if writer and self.db.is_clustered:
            self._bell.ring(bells.OPENED)

    # --- ending -------------------------------------------------------------------------------------------------------

    def end(self, handle: int, answer: Callable[[], None] = lambda: None) -> None:
        """A handle is closed. That is committed with the next change, or soon; then `answer` is called."""
        file = self.by_handle.pop(handle, None)
        if file is None:
            answer()  # It was committed before a crash, and is told again.
            return
        file.ended.append(handle)
        file.writer_ended |= file.handles.pop(handle)
        if file.closing:
            self._promising.pop(file, None)
            file.expected = 0
        self._ending[file] = None
        self._answers.append(answer)
        self._some_ended.set()

    def end_all(self) -> None:
        """The connection has ended: what is still open is closed, of which the kernel tells nothing any more."""
        for handle in list(self.by_handle):
            self.end(handle)
        self.flush()

    async def commit_ended(self) -> None:
        """The task: commit what ended and found no company."""
        while True:
            await self._some_ended.wait()
            await trio.sleep(limits.RELEASE_GATHER_S)
            try:
                self.flush()
            except Exception:
                log.exception("closed files cannot be recorded; trying again")
                await trio.sleep(limits.RETRY_LAST_S)

    def flush(self) -> None:
        """Commit what ended."""
        with self.change():
            pass

    @contextlib.contextmanager
    def change(self) -> Iterator[Database]:
        """A transaction that takes along what ended."""
        if not self._ending:
            with self.db.transaction() as db:
                yield db
            return
        ending = list(self._ending)
        with self.db.transaction() as db:
            doomed = [self._write_end(file) for file in ending]
            yield db
        for file, gone in zip(ending, doomed, strict=True):
            self._forget(file, gone)
        self._some_ended = trio.Event()
        answers, self._answers = self._answers, []
        for answer in answers:
            answer()

    def _write_end(self, file: OpenFile) -> list[int]:
        """The rows of one file's ended handles; the contents that are not needed any more."""
        for handle in file.ended:
            if handle > 0:
                handles.delete(self.db, handle)
        if not file.closing and file.handles:
            return []
        named = contents.has_name(self.db, file.inode)
        if not named:
            return [] if file.handles else contents.mark_all_doomed(self.db, file.inode)
        if file.content is not None and file.fd >= 0:
            self._write_figures(file, file.content)
        return []

    def _write_figures(self, file: OpenFile, content: int) -> None:
        status = os.fstat(file.fd)
        if file.closing:
            contents.mark_closed(self.db, file.inode, content, status.st_size, status.st_atime_ns, self.written_ns(status))
            self._remember(file.kind, min(status.st_size, status.st_blocks * 512))
            return
        if status.st_atime_ns != file.atime_ns and file.arriving is None:
            contents.record_access(self.db, file.inode, status.st_atime_ns)
        contents.record_use(self.db, (content,))

    def _remember(self, kind: bytes | None, size: int) -> None:
        if kind is not None:
            self._expected.pop(kind, None)
            self._expected[kind] = size
            if len(self._expected) > limits.EXPECTED_NAMES_MAX:
                del self._expected[next(iter(self._expected))]

    def _forget(self, file: OpenFile, doomed: list[int]) -> None:
        """The rows are committed: now the descriptors, the backing id, and what was unlinked."""
        closed = file.closing
        large = closed and file.fd >= 0 and os.fstat(file.fd).st_size >= limits.LARGE_BYTES_MIN
        file.ended.clear()
        file.writer_ended = False
        del self._ending[file]
        if not file.handles:
            del self.by_inode[file.inode]
            file.close()
            self.unregister(file.backing)
            self.discard(doomed)
        elif closed and file.writable and file.place is not None and file.content is not None:
            self._only_read(file, file.place, file.content)
        if closed or doomed:
            self._bell.ring(bells.LARGE if large else bells.WORK)

    def _only_read(self, file: OpenFile, place: Place, content: int) -> None:
        """The last writer has gone, readers are left: give up the right to write, for the mover's lease. Never raises.

        A descriptor on the PFS stays as it is until the readers have closed it: opening another may hang.
        """
        if place.tier is Tier.PFS:
            return
        try:
            file.replace(place.open(content))
            file.writable = False
        except OSError as failure:
            log.error("content %d in %s stays open for writing: %s", content, place.tier, failure)

    def discard(self, doomed: list[int]) -> None:
        """Give back at once what doomed contents take in RAM; the mover does the rest.

        Whoever reads one for its digest or its copy is made to let go of it: the room is free when its last descriptor is closed.
        """
        ram = self.places[Tier.RAM]
        for content in doomed:
            with contextlib.suppress(OSError):
                os.close(ram.open(content, WRITE_NOW))
            with contextlib.suppress(OSError):
                ram.remove(content)

    # --- starting -----------------------------------------------------------------------------------------------------

    async def start(self, resumed: bool) -> None:
        """Take over what is open on this connection (`resumed`), or begin a new one with nothing open.

        What a crash left OPEN without a writer is closed, as the last writer's release would have done.
        """
        self._pfs_until_s = trio.current_time() + limits.PFS_ACT_WAIT_S
        with self.db.transaction():
            if not resumed:
                handles.delete_all(self.db)
                told.delete_replies(self.db)
        for row in handles.list_all(self.db):
            await self._reopen(row)
        for content, inode, tier in contents.list_abandoned(self.db):
            if tier in self.places:
                await self._close_abandoned(content, inode, self.places[tier])

    async def _reopen(self, row: Handle) -> None:
        """One handle of the process before us. Where its file cannot be opened its handle is there all the same, and reads fail."""
        file = self.by_inode.get(row.inode)
        if file is None:
            file = OpenFile(row.inode, row.content, self._place_of(row.content), -1, backing=row.backing_id, generation=row.generation)
            await self._look_again(file)
        if row.is_writer and not file.backing and not file.writable and file.fd >= 0 and file.place is not None and row.content is not None:
            await self._write_again(file, file.place, row.content)
        self.add(file, row.id, row.is_writer)

    async def _write_again(self, file: OpenFile, place: Place, content: int) -> None:
        """Open for writing what a writer before us had open; where that fails its writes do, and everything else goes on."""
        try:
            if place.tier is Tier.PFS:
                fd = await self._in_time(lambda: place.open(content, os.O_RDWR))
            else:
                fd = await open_for_writing(place, content)
            file.replace(fd)
            file.writable = True
        except (OSError, CkptfsError) as failure:
            log.error("the open file with content %d in %s cannot be written any more: %s", content, place.tier, failure)

    async def _in_time(self, act: Callable[[], T]) -> T:
        """Run `act`, which asks the PFS; all of these together have `limits.PFS_ACT_WAIT_S`. Raises TimedOut."""
        with trio.move_on_at(self._pfs_until_s):
            return await on_pfs(act)
        raise TimedOut("the PFS does not answer")

    async def _look_again(self, file: OpenFile) -> None:
        place, content = file.place, file.content
        if place is None or content is None:
            return
        try:
            file.fd = place.open(content) if place.tier is not Tier.PFS else await self._in_time(lambda: place.open(content))
            file.atime_ns = os.fstat(file.fd).st_atime_ns
        except (OSError, CkptfsError) as failure:
            log.error("the open file with content %d cannot be found again in %s: %s", content, place.tier, failure)

    def _place_of(self, content: int | None) -> Place | None:
        if content is None:
            return None
        good = (copy.tier for copy in settling.list_copies(self.db, content) if copy.state is CopyState.GOOD)
        return next((self.places[tier] for tier in good if tier in self.places), None)

    async def _close_abandoned(self, content: int, inode: int, place: Place) -> None:
        status = None
        with contextlib.suppress(TimedOut):
            status = place.stat(content) if place.tier is not Tier.PFS else await self._in_time(lambda: place.stat(content))
        with self.db.transaction():
            if not contents.is_current(self.db, inode, content) or (status is not None and not contents.has_name(self.db, inode)):
                contents.mark_doomed(self.db, content)
            elif status is not None:
                contents.mark_closed(self.db, inode, content, status.st_size, status.st_atime_ns, self.written_ns(status))
