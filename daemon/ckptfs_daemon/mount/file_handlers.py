"""Owns the handlers of an open file's bytes: read and write where they pass through us, fsync, and changes of length.

On the passthrough path read and write come here only for the few files that are served `direct`, or that the kernel could not take over.
RAM is read and written in the trio thread itself, which is faster than another thread; other tiers may block and get one.
If we die here: a write that was not answered is sent again, to the same offset.

Owns the handlers of open files' beginning: create and open. What happens in between the kernel does alone where it can.

If we die here: see opening.py and open_files.py; a request that was committed and not answered gets the answer that was kept.
"""

import errno
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import trio

from ckptfs import disk, limits
from ckptfs.catalog import contents, inodes, journal, mover_requests, namespace, peer_copies, summary
from ckptfs.catalog.namespace import NotImported
from ckptfs.errors import CkptfsError, ContentLost, NoSpace, TimedOut, posix_error
from ckptfs.model import CliqueLost, DataPath, Level, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse import session
from ckptfs_daemon.fuse.request import get_current_request, translate_errors
from ckptfs_daemon.mount.context import SCANS_PER_REQUEST_MAX, ChangeRunner
from ckptfs_daemon.mount.open_attempt import SET_ID_BITS, CreateAttempt, OpenAttempt, OpenRequest, OpenResult
from ckptfs_daemon.mount.open_file import OpenFile, open_pfs_file, run_in_thread, run_on_pfs
from ckptfs_daemon.mount.open_file_table import HANDLE_MASK
from ckptfs_daemon.mount.shim_handlers import RawHandlers

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip
from pyfuse3 import FileInfo  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import RequestContext


class OpenHandlers(ChangeRunner):
    """Handlers that open."""

    @translate_errors
    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: "RequestContext") -> tuple[FileInfo, EntryAttributes]:
        """Make a file and open it."""
        request = get_current_request()
        body = await self.get_replayed_reply(request)
        if body is not None:
            opened = OpenResult.unpack(body)
            return self._build_file_info(opened), self.get_attributes(self.get_inode(opened.inode))
        creating = CreateAttempt(self.context, request, parent, name, mode, (ctx.uid, ctx.gid))
        try:
            opened = await self.commit_shared(
                lambda: self._create_with_scan(creating), [(parent, name)], undo=lambda made: self.context.open_files.release(made.handle)
            )
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            # The kernel knew no such name: let it look again, and open what is there with all its checks.
            raise posix_error(errno.ESTALE) from None
        return self._build_file_info(opened), self.build_attributes(creating.inode, is_open_for_writing=True)

    async def _create_with_scan(self, creating: CreateAttempt) -> OpenResult:
        """Create, in a directory that was imported where that is possible (P1)."""
        for _ in range(SCANS_PER_REQUEST_MAX):
            try:
                return await creating.run()
            except NotImported as missing:
                creating.blind = not await self.request_scan(missing.directory)
        creating.blind = True
        return await creating.run()

    @translate_errors
    async def open(self, inode: int, flags: int, ctx: "RequestContext") -> FileInfo:
        """Open a file that is there."""
        request = get_current_request()
        body = await self.get_replayed_reply(request)
        if body is not None:
            return self._build_file_info(OpenResult.unpack(body))
        if self.prefetch is None or not self.prefetch.is_stale_open_target(ctx.pid, inode):
            await self.refresh_inode(inode, ctx.pid)
        truncate = bool(flags & os.O_TRUNC)
        writer = truncate or flags & os.O_ACCMODE != os.O_RDONLY
        open_request = OpenRequest(inode, writer, truncate, request, is_root=ctx.uid == 0, nonblocking=bool(flags & os.O_NONBLOCK))
        try:
            return self._build_file_info(await OpenAttempt(self.context, open_request).run())
        except (OSError, CkptfsError) as failure:
            if failure.errno == errno.ESTALE and self.prefetch is not None:
                self.prefetch.record_stale_open(ctx.pid)
            raise

    def _build_file_info(self, opened: OpenResult) -> FileInfo:
        """The reply. Nothing may be awaited after it."""
        if opened.backing_id and self.context.shared_namespace is None:
            # Where the kernel keeps no pages there is nothing to flush: saves a round trip at each close.
            session.set_open_flags(session.FOPEN_NOFLUSH)
        # What another node has written in place since then, the pages of a former open do not show.
        kept = self.context.data_path is DataPath.BUFFERED and self.context.shared_namespace is None
        return FileInfo(fh=opened.fh, direct_io=opened.direct, keep_cache=kept)


log = logging.getLogger(__name__)
disk.declare_labels("write:move", "write:fsync")
transfer.declare_labels("write:copy")
T = TypeVar("T")


class FileHandlers(OpenHandlers, RawHandlers):
    """Everything about open files."""

    # --- bytes --------------------------------------------------------------------------------------------------------

    @translate_errors
    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Up to `size` bytes."""
        file = self.context.open_files.get_file(fh)
        if file.fetch_waiter is not None:
            await file.fetch_waiter.wait_range(file, off, size)
        await self.ensure_open(file)
        if file.fetch_waiter is None:
            return await self._run_on_tier(file, lambda: os.pread(file.fd, size, off))
        with file.in_use():
            return await self._run_on_tier(file, lambda: os.pread(file.fd, size, off))

    @translate_errors
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        """All of `buf`. Where a tier is full the content moves on to the next one (P10)."""
        request = get_current_request()
        file = self.context.open_files.get_file(fh)
        if request.kills_set_id:
            self._drop_set_id(file.inode)
        await self.with_room(file, lambda fd: _write_all(fd, buf, off))
        return len(buf)

    async def with_room(self, file: OpenFile, act: Callable[[int], T], *, long: bool = False) -> T:
        """Run `act(fd)` on a descriptor for writing, on the next tier when this one is full; in a thread when it may take `long`.

        Raises NoRoom when all are full.
        """
        full_until_s = trio.current_time() + limits.NO_SPACE_WAIT_S
        while True:
            fd, must_close = await file.get_writable_fd()
            try:
                with file.in_use():
                    return await (run_in_thread if long else self._run_on_tier)(file, lambda fd=fd: act(fd))  # type: ignore[misc]
            except OSError as failure:
                if failure.errno != errno.ENOSPC or file.backing_id:
                    raise
            finally:
                if must_close:
                    os.close(fd)
            if not await self._move_to_next_tier(file):
                if trio.current_time() > full_until_s:
                    raise NoSpace("every tier is full", remedy="remove files, or configure a larger tier")
                self.context.wake_channel.notify(ipc.WORK)
                await trio.sleep(limits.NO_SPACE_POLL_S)

    async def _run_on_tier(self, file: OpenFile, act: Callable[[], T]) -> T:
        """Run `act` where it cannot hold up everybody else."""
        return act() if file.tier is Tier.RAM else await run_in_thread(file, act)

    async def ensure_open(self, file: OpenFile) -> None:
        """After a restart the PFS's own file is opened again when somebody reads it."""
        await file.wait_moved()
        if file.fd < 0 and file.content is not None:
            raise ContentLost(f"inode {file.inode}: content {file.content} cannot be found again")
        if file.fd < 0:
            file.fd = await open_pfs_file(self.context, file.inode)

    def _drop_set_id(self, inode: int) -> None:
        """A stranger to CAP_FSETID writes."""
        db = self.context.db
        if inodes.get(db, inode).mode & SET_ID_BITS:
            with db.transaction():
                inodes.set_attributes(db, inode, kill_set_id=True)

    # --- a full tier --------------------------------------------------------------------------------------------------

    async def _move_to_next_tier(self, file: OpenFile) -> bool:
        """Move an open content to the next tier that has room for it. False when none has."""
        if file.move_done is not None:
            await file.wait_moved()
            return True
        assert file.storage is not None and file.content is not None
        file.move_done = trio.Event()
        try:
            # What a thread still writes must be there before the bytes are copied.
            await file.wait_idle()
            for tier in self.context.tiers.list_next(file.storage.tier):
                if await self._move_to(file, file.storage, file.content, self.context.tiers[tier]):
                    return True
        finally:
            file.move_done.set()
            file.move_done = None
        return False

    async def _move_to(self, file: OpenFile, source: TierStorage, content: int, target: TierStorage) -> bool:
        try:
            run = run_on_pfs if target.tier is Tier.PFS else trio.to_thread.run_sync
            fd = await run(lambda: _copy_to(file.fd, target, content))
        except OSError as failure:
            log.info("content %d cannot move from %s to %s: %s", content, source.tier, target.tier, failure)
            return False
        with self.context.db.transaction() as db:
            contents.record_move(db, content, source.tier, target.tier)
        file.replace_fd(fd)
        file.storage, file.is_writable = target, True
        source.remove(content)
        self.context.wake_channel.notify(ipc.WORK)
        return True

    # --- durability ---------------------------------------------------------------------------------------------------

    @translate_errors
    async def flush(self, fh: int) -> None:
        """A descriptor is closed: what the kernel kept it has written by now, and other nodes that open the file see it."""
        shared_namespace = self.context.shared_namespace
        file = None if shared_namespace is None else self.context.open_files.by_handle.get(fh & HANDLE_MASK)
        if shared_namespace is None or file is None or not file.handles.get(fh & HANDLE_MASK):
            return
        self._record_written(file)
        await shared_namespace.wait_published()

    def _record_written(self, file: OpenFile) -> None:
        """The size and times of an open file, as they are now, go into its inode."""
        if file.content is None or file.fd < 0:
            return
        status = os.fstat(file.fd)
        with self.context.open_files.change() as db:
            if contents.has_name(db, file.inode):
                contents.record_written(db, file.inode, status.st_size, status.st_atime_ns, status.st_mtime_ns)

    @translate_errors
    async def fsync(self, fh: int, datasync: bool) -> None:
        """Return when the file is as durable as the mount promises (P3)."""
        file = self.context.open_files.get_file(fh)
        await file.wait_moved()
        if file.tier is not None and file.tier is not Tier.RAM:
            await run_in_thread(file, lambda: self._fsync_local(file))
        self._record_fsync(file)
        if self.context.config.fsync is Level.PFS:
            await self._wait_journal_applied(file.inode, journal.get_last_seq(self.context.db, file.inode))
        elif self.context.config.fsync is Level.CLIQUE:
            await self._wait_clique_copies(file.inode)
            return
        if self.context.shared_namespace is not None and file.writer_count:
            # Nobody waits for it, and what is closed soon has no need of it: the row will be seen.
            mover_requests.insert_request(self.context.db, mover_requests.REPLICATE_LATER, file.inode, wait_s=limits.REQUEST_KEEP_S)

    async def _wait_clique_copies(self, inode: int) -> None:
        """Wait until enough nodes have what the file holds now. Without them: what the configuration says."""
        config, db = self.context.config, self.context.db
        if summary.get_level(db, inode) in (Level.CLIQUE, Level.PFS):
            return
        degrades = config.clique_lost is CliqueLost.LOCAL
        shared_namespace = self.context.shared_namespace
        has_no_peers = len(peer_copies.list_live_nodes(db)) < 2 or (shared_namespace is not None and shared_namespace.is_disconnected)
        try:
            if not (has_no_peers and degrades):
                # A want of its own: another one's answer may be of what the file held before.
                await self.context.mover_client.request(
                    mover_requests.REPLICATE_NOW, inode, f"{time.time_ns()}", timeout_s=config.clique_wait_s
                )
                return
        except TimedOut:
            pass
        path = os.fsdecode(namespace.get_path(db, inode))
        if not degrades:
            why = (
                "etcd was not told of it"
                if shared_namespace is not None and shared_namespace.is_disconnected
                else "too few other nodes took a copy"
            )
            log.error("fsync of %s: %s within %g s; see `ckptfs status --cluster`", path, why, config.clique_wait_s)
            raise posix_error(errno.EIO)
        log.warning("fsync of %s: too few other nodes take a copy; it survives this node's processes only", path)

    def _fsync_local(self, file: OpenFile) -> None:
        """Everything about a file on NVMe survives a power cut: its bytes, the name of its file, and the catalog's rows."""
        assert file.storage is not None
        disk.act("write:fsync", os.fdatasync, file.fd)
        if not file.is_name_persisted:
            file.storage.fsync_directory()
            file.is_name_persisted = True
        self.context.db.persist()

    def _record_fsync(self, file: OpenFile) -> None:
        """The PFS shall have what an open file holds now, but not at each fsync."""
        config, now_s = self.context.config, trio.current_time()
        due = config.fsync is Level.PFS or now_s - file.fsynced_s >= config.synced_interval_s
        if not (due and file.writer_count and file.content is not None and self.context.db.is_journalled):
            return
        file.fsynced_s = now_s
        status, files = os.fstat(file.fd), self.context.open_files
        with files.change() as db:
            if contents.has_name(db, file.inode):
                contents.record_fsync(db, file.inode, file.content, status.st_size, status.st_atime_ns, files.get_mtime_ns(status))
        self.context.wake_channel.notify(ipc.WORK)

    async def _wait_journal_applied(self, inode: int, row: int) -> None:
        """Wait until the PFS has been told of everything up to this row of the journal."""
        if row:
            await self.context.mover_client.request(
                mover_requests.WAIT_LEVEL, inode, mover_requests.build_journal_argument(row), timeout_s=limits.FSYNC_LEVEL_WAIT_S
            )

    @translate_errors
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        """Directories are rows of the catalog."""
        await trio.to_thread.run_sync(self.context.db.persist)
        if self.context.config.fsync is Level.PFS:
            row, inode = journal.find_last_in_directory(self.context.db, fh)
            await self._wait_journal_applied(inode, row)
        elif self.context.config.fsync is Level.CLIQUE:
            await self._wait_names_published(fh)

    async def _wait_names_published(self, directory: int) -> None:
        """Wait until the other nodes know the names in a directory. Without them: what the configuration says."""
        config, db, shared_namespace = self.context.config, self.context.db, self.context.shared_namespace
        degrades = config.clique_lost is CliqueLost.LOCAL
        if shared_namespace is None or (await shared_namespace.wait_published() and not shared_namespace.is_disconnected):
            return
        with trio.move_on_after(0.0 if degrades else config.clique_wait_s):
            while not peer_copies.has_published_names(db, directory):
                await trio.sleep(limits.ISLAND_PROBE_S)
        path = os.fsdecode(namespace.get_path(db, directory))
        if not degrades and not peer_copies.has_published_names(db, directory):
            log.error("fsync of %s: etcd was not told of what changed there within %g s", path, config.clique_wait_s)
            raise posix_error(errno.EIO)

    # --- length -------------------------------------------------------------------------------------------------------

    async def resize(self, inode: int, size: int, fh: int | None) -> None:
        """Make a file `size` bytes long, open or not."""
        files = self.context.open_files
        open_file = files.by_inode.get(inode)
        if open_file is None and inodes.get(self.context.db, inode).size == size:
            return  # Only its times change.
        begin_anew = size == 0 and (open_file is None or not open_file.handles)
        opened = await OpenAttempt(self.context, OpenRequest(inode, is_writer=True, truncates=begin_anew, fuse_request=None)).run()
        file = files.by_handle[opened.handle]
        try:
            if not begin_anew:
                await self.with_room(file, lambda fd: os.ftruncate(fd, size))
        finally:
            files.release(opened.handle)
            files.commit_releases()


def _write_all(fd: int, data: bytes, offset: int) -> None:
    """pwrite(2) until every byte is written."""
    count = os.pwrite(fd, data, offset)
    if count < len(data):
        view = memoryview(data)
        while count < len(data):
            count += os.pwrite(fd, view[count:], offset + count)


def _copy_to(source_fd: int, target: TierStorage, content: int) -> int:
    """A descriptor of a copy in `target`. Undone when it fails."""
    target.remove(content)
    fd = disk.act("write:move", target.create, content)
    try:
        status = os.fstat(source_fd)
        transfer.copy(source_fd, fd, label="write:copy")
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
    except BaseException:
        os.close(fd)
        target.remove(content)
        raise
    return fd
