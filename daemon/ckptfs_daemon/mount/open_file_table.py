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
from ckptfs.catalog import contents, copies, handles
from ckptfs.catalog.database import Database
from ckptfs.errors import CkptfsError, TimedOut, posix_error
from ckptfs.model import CopyState, Handle, Inode, Tier
from ckptfs.tiers.storage import Tiers, TierStorage
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse.kernel import Passthrough
from ckptfs_daemon.ipc import WakeChannel
from ckptfs_daemon.mount.open_file import NONBLOCKING_WRITE, OpenFile, open_for_writing, run_on_pfs

log = logging.getLogger(__name__)

T = TypeVar("T")

HANDLE_MASK = 0xFFFF_FFFF
SPARSE_BYTES_MIN = 64 * limits.KIB
NO_PASSTHROUGH_ERRNOS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ELOOP, errno.ENOTTY, errno.EPERM}


class OpenFileTable:
    """The open inodes of the mount, by inode and by handle."""

    def __init__(
        self, db: Database, tiers: Tiers, passthrough: Passthrough | None, wake_channel: WakeChannel, *, kernel_owns_times: bool = False
    ) -> None:
        """`passthrough` is None on the buffered path. `times_are_kernels`: it keeps its writeback cache, and with it the files' mtime.

        It sets that by itself when it is another one, and writes what it kept at any time: a backing file's own mtime says nothing then.
        """
        self.kernel_owns_times = kernel_owns_times
        self.db = db
        self.tiers = tiers
        self.by_inode: dict[int, OpenFile] = {}
        self.by_handle: dict[int, OpenFile] = {}
        self._passthrough = passthrough
        self._wake_channel = wake_channel
        self._releasing: dict[OpenFile, None] = {}
        self._release_callbacks: list[Callable[[], None]] = []
        self._has_releases = trio.Event()
        self._size_by_kind: dict[bytes, int] = {}
        self._reserving: dict[OpenFile, None] = {}
        self._refused_tiers: set[Tier | None] = set()
        self._last_internal_handle = 0
        self._pfs_until_s = float("inf")

    def get_file(self, fh: int) -> OpenFile:
        """The open file behind FUSE's `fh`. Raises EBADF."""
        file = self.by_handle.get(fh & HANDLE_MASK)
        if file is None:
            raise posix_error(errno.EBADF)
        return file

    # --- attributes ---------------------------------------------------------------------------------------------------

    def get_attributes(self, row: Inode) -> Inode:
        """`row` as it is now: an open file's size, times and blocks come from its backing file."""
        file = self.by_inode.get(row.id)
        if file is not None:
            return file.get_attributes(row)
        if row.content is None or row.size < SPARSE_BYTES_MIN or not row.is_file:
            return row
        for tier in (Tier.RAM, Tier.NVME):
            status = self.tiers[tier].stat(row.content) if tier in self.tiers else None
            if status is not None:
                return replace(row, allocated_blocks=status.st_blocks)
        return row

    def is_open_for_writing(self, inode: int) -> bool:
        """Whether somebody has it open for writing."""
        file = self.by_inode.get(inode)
        return file is not None and any(file.handles.values())

    def get_mtime_ns(self, status: os.stat_result) -> int | None:
        """When the file with this backing file was written last; None: its inode knows."""
        return None if self.kernel_owns_times else status.st_mtime_ns

    def set_times(self, inode: int, atime_ns: int | None, mtime_ns: int | None) -> None:
        """The inode's times were set (None: not this one); an open file's follow."""
        file = self.by_inode.get(inode)
        if file is not None:
            file.set_times(atime_ns, mtime_ns)

    def get_expected_bytes(self, kind: bytes) -> int:
        """How large a new file of this kind will probably be: as the last one; 0 when there was none."""
        return self._size_by_kind.get(kind, 0)

    def get_reserved_bytes(self) -> dict[Tier, int]:
        """What writers are still expected to write, by tier."""
        sums: dict[Tier, int] = {}
        for file in self._reserving:
            if file.tier is not None and file.tier is not Tier.PFS and (promised := file.reserved_bytes):
                sums[file.tier] = sums.get(file.tier, 0) + promised
        return sums

    # --- opening ------------------------------------------------------------------------------------------------------

    def register_backing(self, fd: int, tier: Tier | None) -> int:
        """A backing id for `fd`; 0 where its bytes must pass through us, which is logged once for a tier."""
        if self._passthrough is None:
            return 0
        try:
            return self._passthrough.register(fd)
        except OSError as failure:
            if failure.errno not in NO_PASSTHROUGH_ERRNOS:
                raise
            if tier not in self._refused_tiers:
                self._refused_tiers.add(tier)
                reason = os.strerror(failure.errno or 0)
                log.info("files in %s are served without passthrough: the kernel says %s", tier or "the PFS", reason)
            return 0

    def unregister_backing(self, backing: int) -> None:
        """Give a backing id back."""
        if backing and self._passthrough is not None:
            with contextlib.suppress(OSError):
                self._passthrough.release(backing)

    def allocate_internal_handle(self) -> int:
        """A handle of our own, which neither the kernel nor the catalog knows."""
        self._last_internal_handle -= 1
        return self._last_internal_handle

    def add_handle(self, file: OpenFile, handle: int, writer: bool) -> None:
        """A handle was committed: from now on it is open."""
        self.by_inode[file.inode] = file
        self.by_handle[handle] = file
        file.handles[handle] = writer
        if file.expected_bytes:
            self._reserving[file] = None
        if writer and self.db.is_clustered:
            self._wake_channel.notify(ipc.WRITER_OPENED)

    # --- ending -------------------------------------------------------------------------------------------------------

    def release(self, handle: int, on_committed: Callable[[], None] = lambda: None) -> None:
        """A handle is closed. That is committed with the next change, or soon; then `answer` is called."""
        file = self.by_handle.pop(handle, None)
        if file is None:
            on_committed()  # It was committed before a crash, and is told again.
            return
        file.ended_handles.append(handle)
        file.has_ended_writer |= file.handles.pop(handle)
        if file.is_closing:
            self._reserving.pop(file, None)
            file.expected_bytes = 0
        self._releasing[file] = None
        self._release_callbacks.append(on_committed)
        self._has_releases.set()

    def release_all(self) -> None:
        """The connection has ended: what is still open is closed, of which the kernel tells nothing any more."""
        for handle in list(self.by_handle):
            self.release(handle)
        self.commit_releases()

    async def run_release_commits(self) -> None:
        """The task: commit what ended and found no company."""
        while True:
            await self._has_releases.wait()
            await trio.sleep(limits.RELEASE_GATHER_S)
            try:
                self.commit_releases()
            except Exception:
                log.exception("closed files cannot be recorded; trying again")
                await trio.sleep(limits.RETRY_LAST_S)

    def commit_releases(self) -> None:
        """Commit what ended."""
        with self.change():
            pass

    @contextlib.contextmanager
    def change(self) -> Iterator[Database]:
        """A transaction that takes along what ended."""
        if not self._releasing:
            with self.db.transaction() as db:
                yield db
            return
        ending = list(self._releasing)
        with self.db.transaction() as db:
            doomed = [self._record_release(file) for file in ending]
            yield db
        for file, gone in zip(ending, doomed, strict=True):
            self._finish_release(file, gone)
        self._has_releases = trio.Event()
        answers, self._release_callbacks = self._release_callbacks, []
        for answer in answers:
            answer()

    def _record_release(self, file: OpenFile) -> list[int]:
        """The rows of one file's ended handles; the contents that are not needed any more."""
        for handle in file.ended_handles:
            if handle > 0:
                handles.delete(self.db, handle)
        if not file.is_closing and file.handles:
            return []
        named = contents.has_name(self.db, file.inode)
        if not named:
            return [] if file.handles else contents.mark_all_doomed(self.db, file.inode)
        if file.content is not None and file.fd >= 0:
            self._record_stats(file, file.content)
        return []

    def _record_stats(self, file: OpenFile, content: int) -> None:
        status = os.fstat(file.fd)
        if file.is_closing:
            contents.mark_closed(self.db, file.inode, content, status.st_size, status.st_atime_ns, self.get_mtime_ns(status))
            self._record_size_of_kind(file.kind, min(status.st_size, status.st_blocks * 512))
            return
        if status.st_atime_ns != file.atime_ns and file.fetch_waiter is None:
            contents.record_access(self.db, file.inode, status.st_atime_ns)
        contents.record_use(self.db, (content,))

    def _record_size_of_kind(self, kind: bytes | None, size: int) -> None:
        if kind is not None:
            self._size_by_kind.pop(kind, None)
            self._size_by_kind[kind] = size
            if len(self._size_by_kind) > limits.EXPECTED_NAMES_MAX:
                del self._size_by_kind[next(iter(self._size_by_kind))]

    def _finish_release(self, file: OpenFile, doomed: list[int]) -> None:
        """The rows are committed: now the descriptors, the backing id, and what was unlinked."""
        closed = file.is_closing
        large = closed and file.fd >= 0 and os.fstat(file.fd).st_size >= limits.LARGE_BYTES_MIN
        file.ended_handles.clear()
        file.has_ended_writer = False
        del self._releasing[file]
        if not file.handles:
            del self.by_inode[file.inode]
            file.close()
            self.unregister_backing(file.backing_id)
            self.delete_ram_files(doomed)
        elif closed and file.is_writable and file.storage is not None and file.content is not None:
            self._reopen_read_only(file, file.storage, file.content)
        if closed or doomed:
            self._wake_channel.notify(ipc.LARGE_FILE_CLOSED if large else ipc.WORK)

    def _reopen_read_only(self, file: OpenFile, storage: TierStorage, content: int) -> None:
        """The last writer has gone, readers are left: give up the right to write, for the mover's lease. Never raises.

        A descriptor on the PFS stays as it is until the readers have closed it: opening another may hang.
        """
        if storage.tier is Tier.PFS:
            return
        try:
            file.replace_fd(storage.open(content))
            file.is_writable = False
        except OSError as failure:
            log.error("content %d in %s stays open for writing: %s", content, storage.tier, failure)

    def delete_ram_files(self, doomed: list[int]) -> None:
        """Give back at once what doomed contents take in RAM; the mover does the rest.

        Whoever reads one for its digest or its copy is made to let go of it: the room is free when its last descriptor is closed.
        """
        ram = self.tiers[Tier.RAM]
        for content in doomed:
            with contextlib.suppress(OSError):
                os.close(ram.open(content, NONBLOCKING_WRITE))
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
                handles.delete_replies(self.db)
        for row in handles.list_all(self.db):
            await self._reopen_handle(row)
        for content, inode, tier in contents.list_abandoned(self.db):
            if tier in self.tiers:
                await self._close_abandoned(content, inode, self.tiers[tier])

    async def _reopen_handle(self, row: Handle) -> None:
        """One handle of the process before us. Where its file cannot be opened its handle is there all the same, and reads fail."""
        file = self.by_inode.get(row.inode)
        if file is None:
            file = OpenFile(
                row.inode, row.content, self._find_storage(row.content), -1, backing_id=row.backing_id, generation=row.generation
            )
            await self._reopen_file(file)
        if (
            row.is_writer
            and not file.backing_id
            and not file.is_writable
            and file.fd >= 0
            and file.storage is not None
            and row.content is not None
        ):
            await self._reopen_writable(file, file.storage, row.content)
        self.add_handle(file, row.id, row.is_writer)

    async def _reopen_writable(self, file: OpenFile, storage: TierStorage, content: int) -> None:
        """Open for writing what a writer before us had open; where that fails its writes do, and everything else goes on."""
        try:
            if storage.tier is Tier.PFS:
                fd = await self._run_on_pfs_until_deadline(lambda: storage.open(content, os.O_RDWR))
            else:
                fd = await open_for_writing(storage, content)
            file.replace_fd(fd)
            file.is_writable = True
        except (OSError, CkptfsError) as failure:
            log.error("the open file with content %d in %s cannot be written any more: %s", content, storage.tier, failure)

    async def _run_on_pfs_until_deadline(self, act: Callable[[], T]) -> T:
        """Run `act`, which asks the PFS; all of these together have `limits.PFS_ACT_WAIT_S`. Raises TimedOut."""
        with trio.move_on_at(self._pfs_until_s):
            return await run_on_pfs(act)
        raise TimedOut("the PFS does not answer")

    async def _reopen_file(self, file: OpenFile) -> None:
        storage, content = file.storage, file.content
        if storage is None or content is None:
            return
        try:
            file.fd = (
                storage.open(content)
                if storage.tier is not Tier.PFS
                else await self._run_on_pfs_until_deadline(lambda: storage.open(content))
            )
            file.atime_ns = os.fstat(file.fd).st_atime_ns
        except (OSError, CkptfsError) as failure:
            log.error("the open file with content %d cannot be found again in %s: %s", content, storage.tier, failure)

    def _find_storage(self, content: int | None) -> TierStorage | None:
        if content is None:
            return None
        good = (copy.tier for copy in copies.list_copies(self.db, content) if copy.state is CopyState.GOOD)
        return next((self.tiers[tier] for tier in good if tier in self.tiers), None)

    async def _close_abandoned(self, content: int, inode: int, storage: TierStorage) -> None:
        status = None
        with contextlib.suppress(TimedOut):
            status = (
                storage.stat(content)
                if storage.tier is not Tier.PFS
                else await self._run_on_pfs_until_deadline(lambda: storage.stat(content))
            )
        with self.db.transaction():
            if not contents.is_current(self.db, inode, content) or (status is not None and not contents.has_name(self.db, inode)):
                contents.mark_doomed(self.db, content)
            elif status is not None:
                contents.mark_closed(self.db, inode, content, status.st_size, status.st_atime_ns, self.get_mtime_ns(status))
