"""Handlers of files: create, open, read, write, flush, fsync, and changes of length.

On the passthrough path the kernel reads and writes by itself. It sends reads and writes only for files that are open as `direct`, and for
files that it refused to take over. RAM is read and written in the trio thread, which is faster than another thread. Other tiers may block,
so their calls run in threads.

Crash safety: see `open_attempt` and `open_file_table`. A write without a reply is done again, to the same offset.
"""

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, TypeVar

import trio

from ckptfs import disk, limits
from ckptfs.catalog import contents, inodes, journal, mover_requests, namespace, peer_copies, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.namespace import NotImported
from ckptfs.errors import CkptfsError, ContentLost, NoSpace, TimedOut, posix_error
from ckptfs.model import LOCAL_TIERS, CliqueLost, DataPath, Level, Tier
from ckptfs.tiers import health, local_copies
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse import killable, session
from ckptfs_daemon.fuse.request import Request, get_current_request
from ckptfs_daemon.mount.context import SCANS_PER_REQUEST_MAX, ChangeRunner, MountContext
from ckptfs_daemon.mount.open_files.open_file import STAT_BLOCK_BYTES, OpenFile, open_pfs_file
from ckptfs_daemon.mount.open_files.open_file_table import HANDLE_MASK
from ckptfs_daemon.mount.open_files.tier_calls import (
    close_logged,
    open_on_pfs,
    require_answer,
    run_in_thread,
    run_on_pfs,
    run_unless_cancelled,
)  # fmt: skip
from ckptfs_daemon.mount.opening.create_attempt import CreateAttempt
from ckptfs_daemon.mount.opening.open_attempt import SET_ID_BITS, OpenAttempt
from ckptfs_daemon.mount.opening.open_request import OpenRequest, OpenResult
from ckptfs_daemon.mount.opening.tier_choice import SpaceWait

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip
from pyfuse3 import FileInfo  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import RequestContext

log = logging.getLogger(__name__)
disk.declare_labels("write:fsync")
T = TypeVar("T")


class FileHandlers:
    """Handlers of files, and what the shim's handlers need of them."""

    def __init__(self, context: MountContext, changes: ChangeRunner) -> None:
        self._context, self._changes = context, changes
        self.guard_writer: Callable[[int], AbstractAsyncContextManager[None]] = lambda _: contextlib.nullcontext()
        """Entered around each open for writing. `SetTracker` finishes the sets of the file first, and claims it in a cluster."""

    # --- opening ------------------------------------------------------------------------------------------------------

    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: "RequestContext") -> tuple[FileInfo, EntryAttributes]:
        context, request = self._context, get_current_request()
        body = await self._changes.get_replayed_reply(request)
        if body is not None:
            opened = OpenResult.unpack(body)
            return self._build_file_info(opened), context.build_reply(context.get_inode(opened.inode))
        attempt = CreateAttempt(context, request, parent, name, mode, (ctx.uid, ctx.gid), ctx.pid)
        try:
            opened = await self._context.shared_namespace.commit_shared(
                lambda: self._create_with_scan(attempt), [(parent, name)], undo=lambda reverted: context.open_files.release(reverted.handle)
            )
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            return await self._open_instead(request, parent, name, flags, ctx)
        return self._build_file_info(opened), context.build_attributes(attempt.inode, is_open_for_writing=True)

    async def _open_instead(
        self, request: Request, parent: int, name: bytes, flags: int, ctx: "RequestContext"
    ) -> tuple[FileInfo, EntryAttributes]:
        """Open what another node has created since the lookup.

        Only the kernel can check all permissions. At ESTALE it looks the name up again and opens the file itself, but only once.
        """
        found = namespace.lookup(self._context.db, parent, name)
        wanted = {os.O_RDONLY: stat.S_IRUSR, os.O_WRONLY: stat.S_IWUSR}.get(flags & os.O_ACCMODE, stat.S_IRUSR | stat.S_IWUSR)
        if not found.is_file or not (ctx.uid == 0 or (ctx.uid == found.uid and found.mode & wanted == wanted)):
            raise posix_error(errno.ESTALE)
        opened = await self._open(request, found.id, flags, ctx)
        return opened, self._context.build_reply(self._context.get_inode(found.id))

    async def _create_with_scan(self, attempt: CreateAttempt) -> OpenResult:
        """Create, after a scan of the directory if one is needed and possible (P1)."""
        for _ in range(SCANS_PER_REQUEST_MAX):
            try:
                return await attempt.run()
            except NotImported as missing:
                attempt.allow_unimported = not await self._changes.request_scan(missing.directory)
        attempt.allow_unimported = True
        return await attempt.run()

    async def open(self, inode: int, flags: int, ctx: "RequestContext", shown: int = 0) -> FileInfo:
        """Open an existing file. `shown`: its number in the history."""
        request = get_current_request()
        body = await self._changes.get_replayed_reply(request)
        if body is not None:
            return self._build_file_info(OpenResult.unpack(body))
        await self._changes.refresh_inode(inode, pid=ctx.pid)
        return await self._open(request, inode, flags, ctx, shown)

    async def _open(self, request: Request, inode: int, flags: int, ctx: "RequestContext", shown: int = 0) -> FileInfo:
        truncates = bool(flags & os.O_TRUNC)
        is_writer = truncates or flags & os.O_ACCMODE != os.O_RDONLY
        is_root, nonblocking = ctx.uid == 0, bool(flags & os.O_NONBLOCK)
        open_request = OpenRequest(inode, is_writer, truncates, request, is_root=is_root, nonblocking=nonblocking, pid=ctx.pid, shown=shown)
        attempt = OpenAttempt(self._context, open_request)
        async with self.guard_writer(inode) if is_writer else contextlib.nullcontext():
            opened = await attempt.run()
        if attempt.separates:
            await self._context.shared_namespace.wait_published()
        return self._build_file_info(opened)

    def _build_file_info(self, opened: OpenResult) -> FileInfo:
        """Build the reply. The caller must return it without another await."""
        is_alone = not self._context.shared_namespace.is_shared
        if opened.backing_id and is_alone:
            # The kernel keeps no pages, so there is nothing to flush: saves a round trip at each close.
            session.set_open_flags(session.FOPEN_NOFLUSH)
        # In a cluster, pages of an earlier open do not show what another node wrote in place since.
        return FileInfo(fh=opened.fh, direct_io=opened.direct, keep_cache=self._context.data_path is DataPath.BUFFERED and is_alone)

    # --- bytes --------------------------------------------------------------------------------------------------------

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        file = self._context.open_files.get_file(fh)
        if file.fetch_waiter is not None:
            await file.fetch_waiter.wait_range(file, offset, size)
        await self.ensure_open(file)
        with file.in_use():
            if file.tier in LOCAL_TIERS:
                return await _run_on_tier(file.tier, lambda: os.pread(file.fd, size, offset))
            return await run_unless_cancelled(Tier.PFS, lambda: os.pread(file.fd, size, offset), lambda _: None)

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        """Write all of `data`. If a tier is full, move the content to the next one (P10)."""
        request = get_current_request()
        file = self._context.open_files.get_file(fh)
        require_file_size(offset + len(data))
        if request.kills_set_id:
            self._drop_set_id(file.inode)
        await self.with_room(file, lambda fd: _write_all(fd, data, offset), growth=len(data))
        return len(data)

    def _drop_set_id(self, inode: int) -> None:
        """Drop the set-id bits: the writer lacks CAP_FSETID."""
        db = self._context.db
        if inodes.get(db, inode).mode & SET_ID_BITS:
            with db.transaction():
                inodes.set_attributes(db, inode, kill_set_id=True)

    async def with_room(
        self, file: OpenFile, act: Callable[[int], T], *, long: bool = False, growth: int = 0, source: OpenFile | None = None
    ) -> T:
        """Run `act(fd)` on a writable descriptor, and again on another tier if this one is full.

        `long`: always in a thread. `growth`: the bytes by which the file may grow. `source`: a file that `act` reads; if it is on the PFS,
        `act` may hang. Raises NoSpace if all tiers stay full and no space is to be expected.
        """
        space_wait = SpaceWait(self._context)
        while True:
            fd, must_close = await file.open_writable_fd()
            try:
                budget = contextlib.nullcontext() if file.storage is None else file.storage.growing(growth)
                with budget, file.in_use(), (source or file).in_use():
                    return await self._act_on_tier(
                        file, act, fd, long=long, reads_pfs=source is not None and source.tier in (Tier.PFS, None)
                    )
            except OSError as failure:
                if failure.errno not in health.FULL_ERRNOS or file.backing_id:
                    raise
            finally:
                if must_close and file.tier is Tier.RAM:
                    close_logged(fd, file.tier)  # `file` has another descriptor, so no page is freed.
                elif must_close:
                    self._context.open_files.slow_calls.close(fd, file.tier)
            wanted_bytes = _get_stored_bytes(file) + growth + limits.MOVE_ROOM_BYTES_MIN
            if not await self._move_to_other_tier(file, wanted_bytes) and not await space_wait.wait(wanted_bytes):
                raise NoSpace("every tier is full", remedy="remove files, or configure a larger tier")

    async def _act_on_tier(self, file: OpenFile, act: Callable[[int], T], fd: int, *, long: bool, reads_pfs: bool) -> T:
        if file.tier is Tier.PFS:

            def act_and_look() -> T:
                result = act(fd)
                file.last_status = os.fstat(fd)
                return result

            return await run_on_pfs(act_and_look)
        if reads_pfs:
            return await run_on_pfs(lambda: act(fd))
        return await (run_in_thread if long else _run_on_tier)(file.tier, lambda: act(fd))

    async def ensure_open(self, file: OpenFile) -> None:
        """Make sure that `file` has a descriptor. After a restart, those on the PFS have none."""
        await file.wait_moved()
        if file.fd >= 0:
            return
        storage, content = file.storage, file.content
        if content is None:
            fd = await open_pfs_file(self._context.db, self._context.config.pfs, file.inode)
            if fd < 0:
                raise ContentLost(f"inode {file.inode}: its file on the PFS was replaced while the mount process restarted")
        elif storage is not None and storage.tier is Tier.PFS:
            is_writable = bool(file.writer_count) and not file.backing_id
            fd = await open_on_pfs(lambda: storage.open(content, os.O_RDWR if is_writable else os.O_RDONLY))
            file.is_writable |= is_writable
        else:
            raise ContentLost(f"inode {file.inode}: content {content} cannot be found again")
        if file.fd < 0:
            file.fd = fd
        else:  # Another read was faster.
            self._context.open_files.slow_calls.close(fd, Tier.PFS)

    # --- a full tier --------------------------------------------------------------------------------------------------

    async def _move_to_other_tier(self, file: OpenFile, wanted_bytes: int) -> bool:
        """Move an open content to another tier that has room for `wanted_bytes`. Returns False if none has."""
        if file.move_done is not None:
            await file.wait_moved()
            return True
        assert file.storage is not None and file.content is not None
        file.move_done = trio.Event()
        self._context.open_files.stop_fast_writes(file)
        try:
            # Threads that still write must finish before the bytes are copied.
            await file.wait_idle()
            for tier in self._context.tiers.list_move_targets(file.storage.tier, wanted_bytes):
                if await self._move_to(file, file.storage, file.content, self._context.tiers[tier]):
                    return True
        finally:
            file.move_done.set()
            file.move_done = None
        return False

    async def _move_to(self, file: OpenFile, source: TierStorage, content: int, target: TierStorage) -> bool:
        """Copy, verify, record, and only then remove the source (P5)."""
        db = self._context.db
        try:
            await require_answer(target)
            fd = await run_in_thread(target.tier, lambda: local_copies.copy_open(file.fd, target, content))
            with disk.closing_on_failure(fd):
                await trio.to_thread.run_sync(local_copies.record_open_move, db, content, source, target.tier)
        except (OSError, CkptfsError) as failure:
            level = logging.DEBUG if failure.errno in health.FULL_ERRNOS else logging.INFO
            log.log(level, "content %d: cannot move from %s to %s: %s", content, source.tier, target.tier, failure)
            return False
        previous_fd = file.swap_fd(fd)
        file.storage, file.is_writable, file.is_name_persisted = target, True, True
        await trio.to_thread.run_sync(_leave, previous_fd, db, source, content)
        self._context.wake_channel.notify(ipc.WORK)
        return True

    # --- durability ---------------------------------------------------------------------------------------------------

    async def flush(self, fh: int) -> None:
        """Publish size and times of a file at each close.

        The kernel has written its pages, and other nodes that open the file see them.
        """
        shared_namespace, handle = self._context.shared_namespace, fh & HANDLE_MASK
        if not shared_namespace.is_shared:
            return
        file = self._context.open_files.by_handle.get(handle)
        if file is None or not file.handles.get(handle):
            return
        await self._context.open_files.refresh_status(file.inode)
        status = file.read_status() if file.content is not None else None
        if status is not None:
            now_ns = time.time_ns()
            with self._context.open_files.change() as db:
                if contents.has_name(db, file.inode):
                    contents.record_written(db, file.inode, status.st_size, status.st_atime_ns, status.st_mtime_ns, now_ns)
                    file.flushed = status, now_ns
        await shared_namespace.wait_published()

    async def fsync(self, fh: int) -> None:
        """Return when the file is as durable as the mount promises (P3)."""
        context = self._context
        file = context.open_files.get_file(fh)
        await file.wait_moved()
        if file.tier is not None and file.tier is not Tier.RAM:
            await self.ensure_open(file)
            with file.in_use():
                await run_in_thread(file.tier, lambda: self._fsync_local(file))
        self._record_fsync(file)
        if context.config.fsync is Level.PFS:
            await self._wait_journal_applied(file.inode, journal.get_last_seq(context.db, file.inode))
        elif context.config.fsync is Level.CLIQUE:
            await self._wait_clique_copies(file.inode)
        if context.config.fsync is not Level.CLIQUE and context.shared_namespace.is_shared and file.writer_count:
            # Without a wake-up: no caller waits for it, and a file that is closed soon does not need it.
            mover_requests.insert_request(context.db, mover_requests.REPLICATE_LATER, file.inode, wait_s=limits.REQUEST_KEEP_S)

    def _fsync_local(self, file: OpenFile) -> None:
        """Make bytes, file name and catalog rows of a file outside RAM survive a power cut."""
        assert file.storage is not None
        disk.act("write:fsync", os.fdatasync, file.fd)
        file.last_status = os.fstat(file.fd)
        if not file.is_name_persisted:
            file.storage.fsync_directory()
            file.is_name_persisted = True
        self._context.db.persist()

    def _record_fsync(self, file: OpenFile) -> None:
        """Journal the current content of an open file for the PFS, at most once per interval unless fsync=pfs."""
        config, now_s = self._context.config, trio.current_time()
        is_due = config.fsync is Level.PFS or now_s - file.fsynced_s >= config.synced_interval_s
        if not (is_due and file.writer_count and file.content is not None and self._context.db.is_journalled):
            return
        status, files = file.read_status(), self._context.open_files
        if status is None:
            return
        file.fsynced_s = now_s
        with files.change() as db:
            if contents.has_name(db, file.inode):
                contents.record_fsync(db, file.inode, file.content, status.st_size, status.st_atime_ns, files.get_mtime_ns(status))
        self._context.wake_channel.notify(ipc.WORK)

    async def _wait_journal_applied(self, inode: int, seq: int) -> None:
        """Wait until the PFS has everything up to this row of the journal, also after a power cut (P3)."""
        db, mover_client = self._context.db, self._context.mover_client
        if not seq:
            return
        with trio.move_on_after(limits.FSYNC_LEVEL_WAIT_S) as wait:
            while summary.has_pending(db, inode, seq):
                mover_client.wake_mover(mover_requests.ALL_LANES)
                await mover_client.wait_reply(limits.REQUEST_POLL_S)
        if wait.cancelled_caught:
            remedy = "see `ckptfs status`: the PFS may hang"
            raise TimedOut(f"the PFS lacks what was fsynced of inode {inode} after {limits.FSYNC_LEVEL_WAIT_S:g} s", remedy=remedy)
        await trio.to_thread.run_sync(db.persist)

    async def _wait_clique_copies(self, inode: int) -> None:
        """Wait until enough nodes have the current bytes; else fail with EIO, unless `clique_lost` is LOCAL."""
        config, db, shared_namespace = self._context.config, self._context.db, self._context.shared_namespace
        if summary.get_level(db, inode) in (Level.CLIQUE, Level.PFS):
            return
        degrades = config.clique_lost is CliqueLost.LOCAL
        if not degrades or (peer_copies.count_domains(db).are_enough and not shared_namespace.is_disconnected):
            try:
                # The argument makes the request unique: the reply to an earlier one may be about previous bytes.
                argument, wait_s = f"{time.time_ns()}", config.clique_wait_s
                await self._context.mover_client.request(mover_requests.REPLICATE_NOW, inode, argument, timeout_s=wait_s)
                return
            except TimedOut:
                pass
        path = inodes.get_shown_path(db, inode)
        if not degrades:
            cause = "etcd does not answer" if shared_namespace.is_disconnected else "too few other nodes took a copy"
            log.error("%s: fsync fails: %s within %g s (see `ckptfs status --cluster`)", path, cause, config.clique_wait_s)
            raise posix_error(errno.EIO)
        log.warning("%s: fsync degrades: too few other nodes take a copy; the file may be lost with this node", path)
        mover_requests.insert_request(db, mover_requests.REPLICATE_LATER, inode, wait_s=limits.REQUEST_KEEP_S)

    async def fsyncdir(self, directory: int) -> None:
        """Return when the names in a directory are as durable as the mount promises."""
        await trio.to_thread.run_sync(self._context.db.persist)
        if self._context.config.fsync is Level.PFS:
            seq, inode = journal.find_last_in_directory(self._context.db, directory)
            await self._wait_journal_applied(inode, seq)
        elif self._context.config.fsync is Level.CLIQUE:
            await self._wait_names_published(directory)

    async def _wait_names_published(self, directory: int) -> None:
        """Wait until other nodes see the names; else fail with EIO, unless `clique_lost` is LOCAL."""
        config, db, shared_namespace = self._context.config, self._context.db, self._context.shared_namespace
        degrades = config.clique_lost is CliqueLost.LOCAL
        if await shared_namespace.wait_published() and not shared_namespace.is_disconnected:
            return
        with trio.move_on_after(0.0 if degrades else config.clique_wait_s):
            while not peer_copies.has_published_names(db, directory):
                await killable.sleep(limits.STORE_PROBE_S)
        if not degrades and not peer_copies.has_published_names(db, directory):
            path = inodes.get_shown_path(db, directory)
            log.error("%s: fsync fails: changed names did not reach etcd within %g s", path, config.clique_wait_s)
            raise posix_error(errno.EIO)

    # --- length -------------------------------------------------------------------------------------------------------

    async def resize(self, inode: int, size: int) -> None:
        """Make a file `size` bytes long, open or not."""
        require_file_size(size)
        files = self._context.open_files

        def act(fd: int) -> None:
            is_shorter = size <= os.fstat(fd).st_size
            os.ftruncate(fd, size)
            if is_shorter:
                files.top_up.restore(inode)

        open_file = files.by_inode.get(inode)
        if open_file is None and inodes.get(self._context.db, inode).size == size:
            return  # Only its times change.
        truncates = size == 0 and (open_file is None or not open_file.handles)
        opened = await OpenAttempt(self._context, OpenRequest(inode, is_writer=True, truncates=truncates, fuse_request=None)).run()
        file = files.by_handle[opened.handle]
        try:
            if not truncates:
                # Freeing 100 GiB of RAM takes 16 s, during which other requests must be served. So does making pages ahead of a writer.
                await self.with_room(file, act, long=bool(file.prepared_bytes) or _get_stored_bytes(file) - size >= limits.FREE_BYTES_MIN)
        finally:
            files.release(opened.handle)
            files.commit_releases()


def require_file_size(size: int) -> None:
    """Raise EFBIG if a file would be larger than what can be sealed."""
    if size > limits.FILE_BYTES_MAX:
        raise posix_error(errno.EFBIG)


async def _run_on_tier(tier: Tier | None, act: Callable[[], T]) -> T:
    return act() if tier is Tier.RAM else await run_in_thread(tier, act)


def _get_stored_bytes(file: OpenFile) -> int:
    status = file.read_status()
    return 0 if status is None else status.st_blocks * STAT_BLOCK_BYTES


def _leave(fd: int, db: Database, source: TierStorage, content: int) -> None:
    os.close(fd)
    local_copies.remove_moved(db, source, content)


def _write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    while (count := os.pwrite(fd, data, offset)) < len(data):
        data, offset = memoryview(data)[count:], offset + count
