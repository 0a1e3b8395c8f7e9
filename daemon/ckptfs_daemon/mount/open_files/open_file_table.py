"""The open inodes of the mount, by inode and by handle; and the commit of their releases.

The kernel gets its RELEASE reply after the handle row is deleted. Deletes are batched: the next open or create commits them, or a task does
after `RELEASE_GATHER_S`. Until then the inode counts as open, so that others see what the application wrote.

No call on the PFS runs in the trio thread. The release of a writer there first reads size and times in a thread. If the PFS hangs, that
file stays open, and nothing else waits for it; its attributes are the last known ones after `limits.PFS_STATUS_WAIT_S`. On a tier that
fails, a file is closed with what is known of it. The seal finds the rest if the tier returns.

Crash safety: a release without a reply is taken up again. `start` rebuilds everything else from the handle table.
"""

import contextlib
import errno
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import trio

from ckptfs import disk, limits
from ckptfs.catalog import contents, copies, handles, inodes
from ckptfs.catalog.database import Database
from ckptfs.errors import CkptfsError, posix_error
from ckptfs.model import LOCAL_TIERS, ContentState, Handle, Inode, Tier
from ckptfs.tiers import prepared
from ckptfs.tiers.storage import Tiers, TierStorage
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse import session
from ckptfs_daemon.fuse.kernel import Passthrough
from ckptfs_daemon.ipc import WakeChannel
from ckptfs_daemon.mount.open_files.expected_sizes import ExpectedSizes
from ckptfs_daemon.mount.open_files.handle_ways import HandleWay, Reason, Way
from ckptfs_daemon.mount.open_files.open_file import NONBLOCKING_WRITE, STAT_BLOCK_BYTES, OpenFile, get_allocated_bytes, open_for_writing
from ckptfs_daemon.mount.open_files.producers import ProducerNotes
from ckptfs_daemon.mount.open_files.tier_calls import SlowCalls, close_logged, run_on_pfs
from ckptfs_daemon.mount.open_files.top_up import TopUpThread

log = logging.getLogger(__name__)

HANDLE_MASK = 0xFFFF_FFFF
SPARSE_BYTES_MIN = 64 * limits.KIB
NO_PASSTHROUGH_ERRNOS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ELOOP, errno.ENOTTY, errno.EPERM}


class OpenFileTable:
    """The open inodes of the mount, by inode and by handle."""

    def __init__(
        self, db: Database, tiers: Tiers, passthrough: Passthrough | None, wake_channel: WakeChannel, *, kernel_owns_times: bool = False
    ) -> None:
        """`passthrough` is None on the buffered path.

        `kernel_owns_times`: the kernel's writeback cache keeps the mtime of files. The kernel then sets a new mtime by itself and writes
        its pages at any time, so the mtime of a backing file means nothing.
        """
        self.kernel_owns_times = kernel_owns_times
        self.db = db
        self.tiers = tiers
        self.by_inode: dict[int, OpenFile] = {}
        self.by_handle: dict[int, OpenFile] = {}
        self.top_up = TopUpThread()
        self.producers = ProducerNotes()
        self._passthrough = passthrough
        self._wake_channel = wake_channel
        self._releasing: dict[OpenFile, None] = {}
        self._release_callbacks: list[Callable[[], None]] = []
        self._has_releases = trio.Event()
        self.expected_sizes = ExpectedSizes(db, tiers.prepared)
        self._reserving: dict[OpenFile, None] = {}
        self._reserved: tuple[float, dict[Tier, int]] = (float("-inf"), {})
        self._refused_tiers: set[Tier | None] = set()
        self._last_internal_handle = 0
        self.slow_calls = SlowCalls()
        self._is_pfs_silent = False

    def get_file(self, fh: int) -> OpenFile:
        """Return the open file behind FUSE's `fh`. Raises EBADF."""
        file = self.by_handle.get(fh & HANDLE_MASK)
        if file is None:
            raise posix_error(errno.EBADF)
        return file

    # --- attributes ---------------------------------------------------------------------------------------------------

    def read_attributes(self, row: Inode) -> Inode:
        """Return `row` with the blocks of its file; if that is open, with its size and times too.

        In a cluster a directory has one link, as on btrfs: to count them would make all creators of directories contend.
        """
        if self.db.is_clustered and row.is_directory and row.nlink:
            return replace(row, nlink=1)
        file = self.by_inode.get(row.id)
        if file is not None:
            found = file.read_attributes(row)
            return replace(found, mtime_ns=row.mtime_ns, ctime_ns=row.ctime_ns) if self.kernel_owns_times else found
        if row.content is None or row.size < SPARSE_BYTES_MIN or not row.is_file:
            return row
        for tier in LOCAL_TIERS:
            status = None
            with contextlib.suppress(OSError):  # A tier that fails: the row knows the size.
                status = self.tiers[tier].stat(row.content) if tier in self.tiers else None
            if status is not None and not prepared.is_prepared(status):
                return replace(row, allocated_blocks=status.st_blocks)
            if status is not None:
                return self._get_attributes_before_trim(row, self.tiers[tier], row.content)
        return row

    def _get_attributes_before_trim(self, row: Inode, storage: TierStorage, content: int) -> Inode:
        """Return `row` with the blocks of a file that still has prepared pages: its seal removes them."""
        with contextlib.suppress(FileNotFoundError), disk.closing(storage.open(content)) as fd:
            return replace(row, allocated_blocks=get_allocated_bytes(fd, os.fstat(fd)) // STAT_BLOCK_BYTES)
        return row

    def is_on_pfs(self, inode: int) -> bool:
        """Return True if `inode` is open in the PFS tier, so that `refresh_status` may have to wait."""
        file = self.by_inode.get(inode)
        return file is not None and file.tier is Tier.PFS

    async def refresh_status(self, inode: int) -> None:
        """Read the status of a file that is open on the PFS. If the PFS is silent, the last known one stays."""
        file = self.by_inode.get(inode)
        if file is None or file.tier is not Tier.PFS or file.content is None or self._is_pfs_silent:
            return
        read = functools.partial(_read_status, self.tiers[Tier.PFS], file.content)
        with trio.move_on_after(limits.PFS_STATUS_WAIT_S):
            file.last_status = await run_on_pfs(read) or file.last_status
            return
        self._is_pfs_silent = True
        self.slow_calls.start(read, Tier.PFS, self._record_pfs_answer)

    async def refresh_all_statuses(self) -> None:
        on_pfs = [inode for inode, file in self.by_inode.items() if file.tier is Tier.PFS]
        if on_pfs:
            async with trio.open_nursery() as nursery:
                for inode in on_pfs:
                    nursery.start_soon(self.refresh_status, inode)

    def _record_pfs_answer(self, _: object) -> None:
        self._is_pfs_silent = False

    def list_history_readers(self, inode: int) -> list[OpenFile]:
        """Return the open files of an inode's names in the history."""
        return [file for file in self.by_inode.values() if file.shown and file.inode == inode]

    def find_history_reason(self, shown: int, row: Inode) -> Reason:
        """Return why the kernel must not read the backing file of a file of the history.

        Returns NONE if it may, and outside of the history. A program may write it by another name. It then gets this backing file, and
        readers of the history a copy.
        """
        return Reason.HISTORY if shown and (row.nlink > row.history or row.id in self.by_inode) else Reason.NONE

    def follow_history(self, inode: int) -> None:
        """Let open files of the history follow their names, which were given to another inode."""
        for file in self.list_history_readers(inode):
            file.inode = handles.get_inode(self.db, next(iter((*file.handles, *file.ended_handles))))

    def is_open_for_writing(self, inode: int) -> bool:
        file = self.by_inode.get(inode)
        return file is not None and any(file.handles.values())

    def list_ways(self) -> Iterator[tuple[HandleWay, Tier | None]]:
        """Yield way and tier of every open handle of an application."""
        for file in self.by_inode.values():
            for handle, way in file.ways.items():
                if handle > 0:
                    yield way, file.tier

    def stop_fast_writes(self, file: OpenFile) -> None:
        """Make all writes of a file come to the handlers, which know that its content moves."""
        for handle in file.handles:
            session.set_writer(handle & HANDLE_MASK, -1)

    def _keep_ahead(self, file: OpenFile) -> None:
        """Keep prepared pages ahead of a writer below a memory limit."""
        if file.storage is not None and file.content is not None:
            self.top_up.add(file.inode, file.storage.open(file.content, NONBLOCKING_WRITE), file.prepared_bytes)

    def get_mtime_ns(self, status: os.stat_result) -> int | None:
        """Return the mtime from the status of a backing file. None: the inode row has it."""
        return None if self.kernel_owns_times else status.st_mtime_ns

    def get_reserved_bytes(self) -> dict[Tier, int]:
        """Return the bytes that writers are still expected to write, by tier.

        What they have written is at most `limits.CAPACITY_AGE_S` old, as the capacities of the tiers. Files opened since then count.
        """
        measured_s, sums = self._reserved
        if (now_s := time.monotonic()) - measured_s > limits.CAPACITY_AGE_S:
            sums = {}
            for file in self._reserving:
                _add_reserved(sums, file, file.compute_reserved_bytes())
            self._reserved = (now_s, sums)
        return sums

    # --- opening ------------------------------------------------------------------------------------------------------

    def register_backing(self, fd: int, tier: Tier | None) -> int:
        """Return a backing id for `fd`, or 0 if its bytes must pass through this process."""
        if self._passthrough is None:
            return 0
        try:
            return self._passthrough.register(fd)
        except OSError as failure:
            if failure.errno not in NO_PASSTHROUGH_ERRNOS:
                raise
            if tier not in self._refused_tiers:
                self._refused_tiers.add(tier)
                log.info("%s: files are served without passthrough: %s", tier or "the PFS", os.strerror(failure.errno or 0))
            return 0

    def unregister_backing(self, backing: int) -> None:
        """Give a backing id back; 0 is none."""
        if backing and self._passthrough is not None:
            with contextlib.suppress(OSError):
                self._passthrough.release(backing)

    def allocate_internal_handle(self) -> int:
        """Return a handle for an internal open, which neither the kernel nor the catalog knows."""
        self._last_internal_handle -= 1
        return self._last_internal_handle

    def add_handle(self, file: OpenFile, handle: int, is_writer: bool, way: HandleWay, pid: int = 0) -> None:
        """Add a handle that was committed.

        `pid`: the thread that opened it; 0 if it is not known, or does not matter.
        """
        if is_writer and pid:
            file.writer_pid = pid
            self.producers.note_writer(pid, file.inode)
        elif pid:
            self.producers.note_reader(pid, file.inode)
        self.by_inode[file.number] = file
        self.by_handle[handle] = file
        file.handles[handle] = is_writer
        file.ways[handle] = way
        if is_writer and handle > 0 and file.is_writable and file.tier is Tier.RAM:
            session.set_writer(handle, file.fd)
        if way.way is Way.PREPARED and way.reason:
            self._keep_ahead(file)
        if file.expected_bytes and file not in self._reserving:
            self._reserving[file] = None
            _add_reserved(self._reserved[1], file, file.expected_bytes)
        if is_writer and self.db.is_clustered:
            self._wake_channel.notify(ipc.WRITER_OPENED)

    # --- ending -------------------------------------------------------------------------------------------------------

    def release(self, handle: int, on_committed: Callable[[], None] = lambda: None) -> None:
        """Close a handle. The next change or `run_release_commits` commits that and then calls `on_committed`."""
        file = self.by_handle.get(handle)
        if file is None:
            on_committed()  # Committed before a crash, then repeated.
            return
        content = file.content
        if file.tier is not Tier.PFS or content is None or not file.handles[handle] or not self.slow_calls.is_running:
            self._end_handle(file, handle, on_committed)
            return

        def end(status: os.stat_result | None) -> None:
            file.last_status = status or file.last_status
            self._end_handle(file, handle, on_committed)

        self.slow_calls.start(functools.partial(_read_status, self.tiers[Tier.PFS], content), Tier.PFS, end)

    def _end_handle(self, file: OpenFile, handle: int, on_committed: Callable[[], None]) -> None:
        if self.by_handle.pop(handle, None) is None:
            on_committed()  # The kernel sent the release twice.
            return
        session.set_writer(handle & HANDLE_MASK, -1)
        file.ended_handles.append(handle)
        file.has_ended_writer |= file.handles.pop(handle)
        file.ways.pop(handle)
        if file.is_closing:
            self.top_up.remove(file.inode)
            self._reserving.pop(file, None)
            file.expected_bytes = 0
        self._releasing[file] = None
        self._release_callbacks.append(on_committed)
        self._has_releases.set()

    async def release_all(self) -> None:
        """Close everything: the connection has ended, and the kernel sends no more releases.

        A file on a PFS that hangs stays OPEN in the catalog; the next start closes it.
        """
        for handle in list(self.by_handle):
            self.release(handle)
        with trio.move_on_after(limits.PFS_ACT_WAIT_S):
            while self.by_handle:
                await self._has_releases.wait()
                self.commit_releases()
        self.commit_releases()

    async def run_release_commits(self) -> None:
        """Commit releases that no change took along. A task."""
        while True:
            await self._has_releases.wait()
            await trio.sleep(limits.RELEASE_GATHER_S)
            try:
                self.commit_releases()
            except CkptfsError as failure:
                log.warning("releases of files: cannot be committed: %s (%s); trying again", failure, failure.remedy)
                await trio.sleep(limits.RELEASE_RETRY_S)
            except Exception:
                log.exception("releases of files: cannot be committed; trying again")
                await trio.sleep(limits.RETRY_LAST_S)

    def commit_releases(self) -> None:
        with self.change():
            pass

    @contextlib.contextmanager
    def change(self) -> Iterator[Database]:
        """Yield a transaction that commits the pending releases as well."""
        if not self._releasing:
            with self.db.transaction() as db:
                yield db
            return
        ending = list(self._releasing)
        with self.db.transaction() as db:
            doomed = [self._record_release(file) for file in ending]
            yield db
        for file, doomed_contents in zip(ending, doomed, strict=True):
            self._finish_release(file, doomed_contents)
        self._has_releases = trio.Event()
        callbacks, self._release_callbacks = self._release_callbacks, []
        for on_committed in callbacks:
            on_committed()

    def _record_release(self, file: OpenFile) -> list[int]:
        """Update the rows for one file's ended handles. Returns the contents that are doomed now."""
        for handle in file.ended_handles:
            if handle > 0:
                handles.delete(self.db, handle)
        if not file.is_closing and file.handles:
            return []
        if not contents.has_name(self.db, file.inode):
            if handles.is_open(self.db, file.inode):
                return []
            if contents.is_deleted(self.db, file.inode):
                return contents.mark_all_doomed(self.db, file.inode)
        if file.content is not None and (file.fd >= 0 or file.tier is Tier.PFS):
            self._record_stats(file, file.content)
        return []

    def _record_stats(self, file: OpenFile, content: int) -> None:
        status = file.read_status()
        if status is None:
            if file.is_closing:
                row = inodes.get(self.db, file.inode)
                log.warning("content %d: closed while %s does not say its size; the seal finds it", content, file.tier)
                contents.mark_closed(self.db, file.inode, content, row.size, row.atime_ns, row.mtime_ns)
            return
        if file.is_closing:
            self._trim_end(file, status)
            times, flushed_ns = (status.st_atime_ns, self.get_mtime_ns(status)), file.find_flushed_ns(status)
            contents.mark_closed(self.db, file.inode, content, status.st_size, *times, flushed_ns=flushed_ns)
            if file.created_as is not None:
                self.expected_sizes.record(*file.created_as, min(status.st_size, get_allocated_bytes(file.fd, status)))
            return
        if status.st_atime_ns != file.atime_ns and file.fetch_waiter is None:
            contents.record_access(self.db, file.inode, status.st_atime_ns)
        contents.record_use(self.db, content)

    def _trim_end(self, file: OpenFile, status: os.stat_result) -> None:
        """Remove a small rest of prepared memory before any other open. The seal removes what is left."""
        if file.storage is None or file.content is None or not prepared.is_prepared(status):
            return
        with contextlib.suppress(OSError), disk.closing(file.storage.open(file.content, NONBLOCKING_WRITE)) as fd:
            prepared.trim_end(fd)

    def _finish_release(self, file: OpenFile, doomed: list[int]) -> None:
        """Give back the descriptor, the backing id and doomed contents, after the commit."""
        is_closed = file.is_closing
        size = file.last_status.st_size if file.last_status is not None else 0
        then: Callable[[], None] | None = None
        if is_closed and file.writer_pid:
            self.producers.note_closed(file.inode, file.writer_pid)
        if is_closed or doomed:
            message = ipc.LARGE_FILE_CLOSED if is_closed and size >= limits.LARGE_BYTES_MIN else ipc.WORK
            then = functools.partial(self._wake_channel.notify, message)
        file.ended_handles.clear()
        file.has_ended_writer = False
        del self._releasing[file]
        if not file.handles:
            del self.by_inode[file.number]
            self._close(file, size, then)
            self.delete_ram_files(doomed)
            return
        if is_closed and file.is_writable and file.storage is not None and file.content is not None:
            self._reopen_read_only(file, file.storage, file.content)
        if then is not None:
            then()

    def _close(self, file: OpenFile, size: int, then: Callable[[], None] | None) -> None:
        """Give back descriptor and backing id, in a thread if that may take long; then call `then`."""
        fd, backing, tier = file.take_fd(), file.backing_id, file.tier

        def close() -> None:
            close_logged(fd, tier)
            self.unregister_backing(backing)

        if tier is Tier.RAM and size < limits.FREE_BYTES_MIN:
            close()
            if then is not None:
                then()
        else:
            self.slow_calls.start(close, tier, lambda _: then and then())

    def _reopen_read_only(self, file: OpenFile, storage: TierStorage, content: int) -> None:
        """Open again for the remaining readers, so that the mover gets its lease. Never raises.

        A descriptor on the PFS stays writable until the readers close it: opening another one may hang.
        """
        if storage.tier is Tier.PFS:
            return
        try:
            file.replace_fd(storage.open(content))
            file.is_writable = False
        except OSError as failure:
            log.error("content %d in %s: cannot be opened read-only: %s; the mover gets no lease", content, storage.tier, failure)

    def delete_ram_files(self, doomed: list[int]) -> None:
        """Delete the files of doomed contents in RAM at once.

        The mover deletes the others, and all in a cluster (`flow.reclaim`). The open for writing breaks the lease of a mover thread that
        reads such a file: its space is free after the last close.
        """
        ram = self.tiers[Tier.RAM]
        for content in () if self.db.is_clustered else doomed:
            with contextlib.suppress(OSError):
                os.close(ram.open(content, NONBLOCKING_WRITE))
            with contextlib.suppress(OSError):
                fd = ram.detach(content)
                if fd >= 0 and os.fstat(fd).st_blocks * STAT_BLOCK_BYTES >= limits.FREE_BYTES_MIN:
                    self.slow_calls.close(fd, Tier.RAM)
                elif fd >= 0:
                    os.close(fd)

    # --- starting -----------------------------------------------------------------------------------------------------

    async def start(self, is_resumed: bool) -> None:
        """Reopen what is open on this connection (`is_resumed`), or start with nothing open.

        A content that a crash left OPEN without a writer is closed as by its last release.
        """
        with self.db.transaction():
            if not is_resumed:
                handles.delete_all(self.db)
                handles.delete_replies(self.db)
        for row in handles.list_all(self.db):
            await self._reopen_handle(row)
        for content, inode, tier in contents.list_abandoned(self.db):
            if tier in self.tiers:
                self._close_abandoned(content, inode, self.tiers[tier])

    async def _reopen_handle(self, row: Handle) -> None:
        """Reopen a handle of the previous process. If its file cannot be opened, its reads fail."""
        file = self.by_inode.get(row.shown or row.inode)
        if file is None:
            storage = self._find_storage(row.content)
            file = OpenFile(row.inode, row.content, storage, -1, row.shown, backing_id=row.backing_id, generation=row.generation)
            if storage is not None and row.content is not None and storage.tier is not Tier.PFS:
                self._reopen_file(file, storage, row.content)
        if row.is_writer and not file.backing_id and not file.is_writable and file.fd >= 0 and file.storage and row.content:
            await self._reopen_writable(file, file.storage, row.content)
        self.add_handle(file, row.id, row.is_writer, self._find_way(file, row))

    @staticmethod
    def _find_way(file: OpenFile, row: Handle) -> HandleWay:
        """Return the way of a handle of the previous process. Memory limits are not known any more."""
        if not row.backing_id:
            return HandleWay(Way.BUFFERED, Reason.RESTARTED)
        if row.is_writer and file.fd >= 0 and file.tier is Tier.RAM and prepared.is_prepared(status := os.fstat(file.fd)):
            file.prepared_bytes = status.st_blocks * STAT_BLOCK_BYTES
            return HandleWay(Way.PREPARED, Reason.RESTARTED)
        return HandleWay(Way.PASSTHROUGH)

    def _find_storage(self, content: int | None) -> TierStorage | None:
        if content is None:
            return None
        return next((self.tiers[tier] for tier in copies.list_good_tiers(self.db, content, self.tiers)), None)

    def _reopen_file(self, file: OpenFile, storage: TierStorage, content: int) -> None:
        try:
            file.fd = storage.open(content)
            file.atime_ns = disk.fstat(file.fd).st_atime_ns
        except (OSError, CkptfsError) as failure:
            log.error("content %d in %s: the open file cannot be opened again: %s; its reads fail", content, storage.tier, failure)

    async def _reopen_writable(self, file: OpenFile, storage: TierStorage, content: int) -> None:
        try:
            file.replace_fd(await open_for_writing(storage, content))
            file.is_writable = True
        except (OSError, CkptfsError) as failure:
            log.error("content %d in %s: the open file cannot be opened for writing: %s; its writes fail", content, storage.tier, failure)

    def _close_abandoned(self, content: int, inode: int, storage: TierStorage) -> None:
        def record(status: os.stat_result | None) -> None:
            with self.db.transaction():
                if (content, inode, storage.tier) not in contents.list_abandoned(self.db):
                    return  # It was opened again meanwhile.
                if not contents.is_current(self.db, inode, content) or (status is not None and contents.is_deleted(self.db, inode)):
                    contents.set_state(self.db, content, ContentState.DOOMED)
                elif status is not None:
                    # No process closed it: another node may have written the file since the last write on this node.
                    contents.mark_closed(
                        self.db, inode, content, status.st_size, status.st_atime_ns, self.get_mtime_ns(status), closed_ns=status.st_mtime_ns
                    )
            self._wake_channel.notify(ipc.WORK)

        read = functools.partial(_read_status, storage, content)
        if storage.tier is Tier.PFS:
            self.slow_calls.start(read, Tier.PFS, record)
        else:
            record(read())


def _read_status(storage: TierStorage, content: int) -> os.stat_result | None:
    """Return the status of a content's file; None if it is not known."""
    try:
        return storage.stat(content)
    except (OSError, CkptfsError) as failure:
        log.info("content %d in %s: its size cannot be read: %s", content, storage.tier, failure)
        return None


def _add_reserved(sums: dict[Tier, int], file: OpenFile, size: int) -> None:
    if file.tier is not None and file.tier is not Tier.PFS and size:
        sums[file.tier] = sums.get(file.tier, 0) + size
