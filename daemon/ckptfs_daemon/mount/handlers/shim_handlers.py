"""Handlers that the shim calls directly, without pyfuse3.

Raw handlers: fallocate, copy_file_range and lseek, which pyfuse3 does not offer, and release, whose reply waits for a commit. The shim
calls plain functions and wants one reply each; the first three start a task.

Fast path: most lookups, getattrs and creates, answered at once from the catalog. pyfuse3 makes a task, a context and a reply object for
each request, which costs more than these replies themselves. A fast handler that cannot answer at once returns False, and the handler of
`operations` starts afresh: for a directory that is not imported, a tier that is full or may hang, a repeated request, an inode outside the
catalog, an error, and in a cluster for everything that needs the store.

Crash safety: see `context`. A raw request may be executed twice. A create is committed before its reply.
"""

import errno
import os
from collections.abc import Awaitable, Callable

import trio

from ckptfs import libc, limits
from ckptfs.catalog import namespace
from ckptfs.errors import posix_error
from ckptfs.model import DataPath
from ckptfs.tiers import prepared, space
from ckptfs_daemon.fuse import killable, request, session
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers, require_file_size
from ckptfs_daemon.mount.handlers.latest_tree import LatestTree
from ckptfs_daemon.mount.open_files.open_file import STAT_BLOCK_BYTES
from ckptfs_daemon.mount.open_files.open_file_table import HANDLE_MASK
from ckptfs_daemon.mount.open_files.tier_calls import run_in_thread
from ckptfs_daemon.mount.opening.create_attempt import CreateAttempt
from ckptfs_daemon.mount.opening.open_request import OpenResult

# After fuse.session, which loads the shim before pyfuse3.
import pyfuse3  # isort: skip

ZERO_RANGE = 0x10
MODES = {0, libc.KEEP_SIZE, libc.PUNCH_HOLE | libc.KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | libc.KEEP_SIZE}


class ShimHandlers:
    """The raw handlers and the fast path."""

    _nursery: trio.Nursery

    def __init__(self, context: MountContext, files: FileHandlers, latest: LatestTree) -> None:
        self._context, self._files, self._latest = context, files, latest
        is_passthrough, is_alone = context.data_path is DataPath.PASSTHROUGH, not context.shared_namespace.is_shared
        self._blksize = request.PASSTHROUGH_BLKSIZE if is_passthrough else request.BLOCK_BYTES
        self._attr_timeout_s = limits.CACHE_TIMEOUT_S if is_alone else limits.SHARED_ATTRIBUTE_TIMEOUT_S
        self._written_attr_timeout_s = limits.WRITTEN_ATTRIBUTE_TIMEOUT_S if is_passthrough else self._attr_timeout_s
        self._entry_timeout_s = limits.CACHE_TIMEOUT_S if is_alone else 0
        self._negative_entry_out = request.NEGATIVE_ENTRY_OUT if is_alone else request.UNCACHED_NEGATIVE_ENTRY_OUT

    def register(self) -> None:
        """Register all handlers with the shim, before the session is opened."""

        def fallocate(req: int, inode: int, mode: int, offset: int, length: int, fh: int) -> None:
            self._start_task("fallocate", req, lambda: self._fallocate(req, mode, offset, length, fh))

        def copy_file_range(
            req: int, inode_in: int, offset_in: int, fh_in: int, inode_out: int, offset_out: int, fh_out: int, length: int, flags: int
        ) -> None:
            self._start_task("copy_file_range", req, lambda: self._copy_range(req, fh_in, offset_in, fh_out, offset_out, length))

        def lseek(req: int, inode: int, offset: int, whence: int, fh: int) -> None:
            self._start_task("lseek", req, lambda: self._lseek(req, offset, whence, fh))

        def release(req: int, inode: int, fh: int) -> None:
            self._context.open_files.release(fh & HANDLE_MASK, lambda: session.reply_err(req, 0))

        session.set_callbacks(
            fallocate=fallocate, copy_file_range=copy_file_range, lseek=lseek, release=release,
            lookup=self._fast_lookup, getattr=self._fast_getattr, create=self._fast_create,
        )  # fmt: skip

    def start_tasks(self, nursery: trio.Nursery) -> None:
        """Run the tasks of raw handlers in `nursery`, before the first request is read."""
        self._nursery = nursery
        nursery.start_soon(self._context.open_files.run_release_commits, name="releases")

    # --- raw handlers -------------------------------------------------------------------------------------------------

    def _start_task(self, name: str, req: int, serve: Callable[[], Awaitable[None]]) -> None:
        killable.set_request()

        async def run() -> None:
            try:
                await serve()
            except Exception as failure:
                session.reply_err(req, request.get_errno(failure, name))

        self._nursery.start_soon(run, name=name)

    async def _fallocate(self, req: int, mode: int, offset: int, length: int, fh: int) -> None:
        if mode not in MODES:
            raise posix_error(errno.EOPNOTSUPP)
        file = self._context.open_files.get_file(fh)
        growth = 0 if mode & libc.PUNCH_HOLE else length
        if growth:
            require_file_size(offset + length)
        # Allocating 100 GiB of RAM takes a minute, during which other requests must be served.
        await self._files.with_room(file, lambda fd: _fallocate_or_punch(fd, mode, offset, length), long=True, growth=growth)
        session.reply_err(req, 0)

    async def _copy_range(self, req: int, fh_in: int, offset_in: int, fh_out: int, offset_out: int, length: int) -> None:
        source, target = self._context.open_files.get_file(fh_in), self._context.open_files.get_file(fh_out)
        if source.fetch_waiter is not None:
            await source.fetch_waiter.wait_complete(source)
        await self._files.ensure_open(source)
        length = min(length, limits.COPY_RANGE_BYTES_MAX)
        require_file_size(offset_out + length)

        def copy(fd: int) -> int:
            return os.copy_file_range(source.fd, fd, length, offset_in, offset_out)

        status = source.read_status()  # Programs ask for more than there is.
        growth = length if status is None else min(length, max(0, status.st_size - offset_in))
        count = await self._files.with_room(target, copy, long=True, growth=growth, source=source)
        session.reply_write(req, count)

    async def _lseek(self, req: int, offset: int, whence: int, fh: int) -> None:
        file = self._context.open_files.get_file(fh)
        if file.fetch_waiter is not None:
            # A block that has not arrived looks like a hole: answer as for a file without holes.
            if not 0 <= offset < file.fetch_waiter.content.size:
                raise posix_error(errno.ENXIO)
            session.reply_lseek(req, offset if whence == os.SEEK_DATA else file.fetch_waiter.content.size)
            return
        await self._files.ensure_open(file)
        if self._context.data_path is DataPath.BUFFERED and file.writer_count:
            # The kernel asks before it writes its dirty pages: make it write them.
            await trio.to_thread.run_sync(pyfuse3.invalidate_inode, pyfuse3.InodeT(file.inode))
        with file.in_use():
            found = await run_in_thread(file.tier, lambda: os.lseek(file.fd, offset, whence))
        session.reply_lseek(req, found)

    # --- fast path ----------------------------------------------------------------------------------------------------

    def _fast_lookup(self, req: int, parent: int, name: bytes, pid: int) -> bool:
        prefetch = self._context.prefetch
        if parent >= limits.SHOWN_BIT or self._latest.owns_name(parent, name):
            return False
        if prefetch is not None and not prefetch.consume_fresh(pid, (parent, name)):
            return False
        try:
            inode = namespace.lookup(self._context.db, parent, name)
        except FileNotFoundError:
            session.reply(req, self._negative_entry_out)
            return True
        if self._context.open_files.is_on_pfs(inode.id):
            return False  # Its attributes may have to be waited for.
        inode = self._context.open_files.read_attributes(inode)
        session.reply(req, request.entry_out(inode, self._blksize, self._get_attr_timeout_s(inode.id), self._entry_timeout_s))
        if prefetch is not None:
            prefetch.record_reached(pid, inode.id)
        return True

    def _fast_getattr(self, req: int, number: int, pid: int) -> bool:
        if self._context.prefetch is not None and not self._context.prefetch.consume_fresh(pid, number):
            return False
        if self._context.open_files.is_on_pfs(number):
            return False
        inode = self._context.open_files.read_attributes(self._context.get_inode(number))
        session.reply(req, request.attr_out(inode, self._blksize, self._get_attr_timeout_s(number)))
        return True

    def _get_attr_timeout_s(self, inode: int) -> float:
        return self._written_attr_timeout_s if self._context.open_files.is_open_for_writing(inode) else self._attr_timeout_s

    def _fast_create(self, req: int, parent: int, name: bytes, mode: int, uid: int, gid: int, pid: int) -> bool:
        current = request.get_current_request()
        is_slow = self._context.prefetch is not None or current.is_repeated
        if is_slow or parent >= limits.SHOWN_BIT or self._context.config.is_read_only:
            return False
        attempt = CreateAttempt(self._context, current, parent, name, mode, (uid, gid), pid)
        opened = attempt.try_nonblocking()
        if opened is None:
            return False
        session.reply(req, request.entry_out(attempt.inode, self._blksize, self._written_attr_timeout_s) + self._pack_open_out(opened))
        return True

    def _pack_open_out(self, opened: OpenResult) -> bytes:
        flags = session.FOPEN_DIRECT_IO if opened.direct else 0
        if opened.backing_id:
            # The kernel keeps no pages, so there is nothing to flush: saves a round trip at each close.
            flags |= session.FOPEN_PASSTHROUGH | session.FOPEN_NOFLUSH
        elif self._context.data_path is DataPath.BUFFERED:
            flags |= session.FOPEN_KEEP_CACHE
        return request.open_out(opened.fh, flags, opened.backing_id)


def _fallocate_or_punch(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2). Where ZERO_RANGE is missing, punch a hole and allocate it.

    Raises ENOSPC before the filesystem fills itself: some allocate all that they have, keep it, and then refuse.
    """
    if not mode & libc.PUNCH_HOLE:
        prepared.mark_allocated_by_application(fd)
        if length > space.read_capacity(fd).free + os.fstat(fd).st_blocks * STAT_BLOCK_BYTES:
            raise posix_error(errno.ENOSPC)
    try:
        libc.fallocate(fd, mode, offset, length)
    except OSError as failure:
        if failure.errno != errno.EOPNOTSUPP or not mode & ZERO_RANGE:
            raise
        libc.fallocate(fd, libc.PUNCH_HOLE | libc.KEEP_SIZE, offset, length)
        libc.fallocate(fd, mode & libc.KEEP_SIZE, offset, length)
