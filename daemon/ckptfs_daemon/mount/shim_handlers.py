"""Owns fallocate, copy_file_range and lseek, for which pyfuse3 has no handlers, and release, whose answer waits for a commit: they come
through the door and are answered through it.

The door calls plain functions and wants one reply; the first three start a task in the nursery that `start` was given.
If we die here: the kernel sends the request again, and each of these may be done twice.

Owns the answers that need no waiting: most lookups, getattrs and creates, with nothing between the request and the catalog.

pyfuse3 makes a task, a context and a reply object of each request, which costs more than these answers themselves. What cannot be answered
at once is left to pyfuse3's handlers, which begin anew and know everything: a directory that was not imported yet, a tier that may hang or
is full, a request that was sent again, what is in no catalog, an error; with other nodes, all that must be asked of the store or told it.
If we die here: see handler.py; a create is committed before it is answered.
"""

import ctypes
import errno
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from ckptfs import limits
from ckptfs.catalog import namespace
from ckptfs.model import ROOT, DataPath
from ckptfs_daemon.fuse import request, session
from ckptfs_daemon.fuse.request import (
    BLOCK_BYTES,
    NEGATIVE_ENTRY_OUT,
    PASSTHROUGH_BLKSIZE,
    UNCACHED_NEGATIVE_ENTRY_OUT,
    attr_out,
    entry_out,
    get_current_request,
    open_out,
)
from ckptfs_daemon.mount.context import ChangeRunner
from ckptfs_daemon.mount.latest_tree import is_virtual
from ckptfs_daemon.mount.open_attempt import CreateAttempt, OpenResult
from ckptfs_daemon.mount.open_file import OpenFile, run_in_thread
from ckptfs_daemon.mount.open_file_table import HANDLE_MASK

# After fuse.session, which loads the shim before pyfuse3.
import pyfuse3  # isort: skip

T = TypeVar("T")
KEEP_SIZE = 0x01
PUNCH_HOLE = 0x02
ZERO_RANGE = 0x10
MODES = {0, KEEP_SIZE, PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class RawHandlers(ChangeRunner):
    """The operations that come through the door."""

    _nursery: trio.Nursery

    async def with_room(self, file: OpenFile, act: Callable[[int], T], *, long: bool = False) -> T:
        """See FileOperations."""
        raise NotImplementedError

    async def ensure_open(self, file: OpenFile) -> None:
        """See FileOperations."""
        raise NotImplementedError

    def start_tasks(self, nursery: trio.Nursery) -> None:
        """Where the tasks of these operations run; before the first request is read."""
        self._nursery = nursery
        nursery.start_soon(self.context.open_files.run_release_commits, name="releases")

    def _start_task(self, name: str, req: int, answer: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await answer()
            except Exception as failure:
                session.reply_err(req, request.get_errno(failure, name))

        self._nursery.start_soon(run, name=name)

    def register_raw_callbacks(self) -> None:
        """Take these operations on; before the session is opened."""
        begin = self._start_task

        def fallocate(req: int, inode: int, mode: int, offset: int, length: int, fh: int) -> None:
            begin("fallocate", req, lambda: self._fallocate(req, mode, offset, length, fh))

        def copy_file_range(
            req: int, inode_in: int, offset_in: int, fh_in: int, inode_out: int, offset_out: int, fh_out: int, length: int, flags: int
        ) -> None:
            begin("copy_file_range", req, lambda: self._copy_range(req, fh_in, offset_in, fh_out, offset_out, length))

        def lseek(req: int, inode: int, offset: int, whence: int, fh: int) -> None:
            begin("lseek", req, lambda: self._lseek(req, offset, whence, fh))

        session.set_raw_callbacks(fallocate=fallocate, copy_file_range=copy_file_range, lseek=lseek, release=self._release)

    def _release(self, req: int, inode: int, fh: int) -> None:
        """The last descriptor of a handle is closed. Answered when that is committed."""
        self.context.open_files.release(fh & HANDLE_MASK, lambda: session.reply_err(req, 0))

    async def _fallocate(self, req: int, mode: int, offset: int, length: int, fh: int) -> None:
        if mode not in MODES:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        file = self.context.open_files.get_file(fh)
        # A hundred GiB of RAM are allocated for a minute, in which all others want to be served.
        await self.with_room(file, lambda fd: _fallocate_or_punch(fd, mode, offset, length), long=True)
        session.reply_err(req, 0)

    async def _copy_range(self, req: int, fh_in: int, offset_in: int, fh_out: int, offset_out: int, length: int) -> None:
        source, target = self.context.open_files.get_file(fh_in), self.context.open_files.get_file(fh_out)
        if source.fetch_waiter is not None:
            await source.fetch_waiter.wait_complete(source)
        await self.ensure_open(source)
        length = min(length, limits.COPY_RANGE_BYTES_MAX)
        count = await self.with_room(target, lambda fd: os.copy_file_range(source.fd, fd, length, offset_in, offset_out))
        session.reply_write(req, count)

    async def _lseek(self, req: int, offset: int, whence: int, fh: int) -> None:
        file = self.context.open_files.get_file(fh)
        if file.fetch_waiter is not None:
            # What has not come yet looks like a hole.
            session.reply_lseek(req, _seek_without_holes(file.fetch_waiter.size, offset, whence))
            return
        await self.ensure_open(file)
        if self.context.data_path is DataPath.BUFFERED and file.writer_count:
            # The kernel asks without having written what it keeps: make it.
            await trio.to_thread.run_sync(pyfuse3.invalidate_inode, pyfuse3.InodeT(file.inode))
        session.reply_lseek(req, await run_in_thread(file, lambda: os.lseek(file.fd, offset, whence)))


def _seek_without_holes(size: int, offset: int, whence: int) -> int:
    """lseek(2) with SEEK_DATA or SEEK_HOLE."""
    if not 0 <= offset < size:
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
    return offset if whence == os.SEEK_DATA else size


def _fallocate_or_punch(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2). ZERO_RANGE is made from a hole and an allocation where the filesystem below does not have it."""
    try:
        _call(fd, mode, offset, length)
    except OSError as failure:
        if failure.errno != errno.EOPNOTSUPP or not mode & ZERO_RANGE:
            raise
        _call(fd, PUNCH_HOLE | KEEP_SIZE, offset, length)
        _call(fd, mode & KEEP_SIZE, offset, length)


def _call(fd: int, mode: int, offset: int, length: int) -> None:
    if _libc.fallocate(fd, mode, offset, length):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


class FastPathHandlers(ChangeRunner):
    """What the door asks first."""

    def register_fast_path(self) -> None:
        """Take these answers on; before the session is opened."""
        passthrough = self.context.data_path is DataPath.PASSTHROUGH
        self._blksize = PASSTHROUGH_BLKSIZE if passthrough else BLOCK_BYTES
        alone = self.context.shared_namespace is None
        self._attr_timeout_s = limits.ATTRIBUTE_TIMEOUT_S if alone else limits.SHARED_ATTRIBUTE_TIMEOUT_S
        self._written_attr_timeout_s = limits.WRITTEN_ATTRIBUTE_TIMEOUT_S if passthrough else self._attr_timeout_s
        self._entry_timeout_s = limits.ENTRY_TIMEOUT_S if alone else 0
        self._negative_entry_out = NEGATIVE_ENTRY_OUT if alone else UNCACHED_NEGATIVE_ENTRY_OUT
        session.set_fast_path_callbacks(lookup=self._fast_lookup, getattr=self._fast_getattr, create=self._fast_create)

    def _get_attr_timeout_s(self, inode: int) -> float:
        """How long the kernel may believe the attributes of an inode."""
        return self._written_attr_timeout_s if self.context.open_files.is_open_for_writing(inode) else self._attr_timeout_s

    def _fast_lookup(self, req: int, parent: int, name: bytes, pid: int) -> bool:
        if is_virtual(parent) or (parent == ROOT and name == namespace.RESERVED_NAME):
            return False
        if self.prefetch is not None and (self.prefetch.has_stale_open(pid) or not self.prefetch.consume_fresh_name(pid, parent, name)):
            return False
        try:
            inode = namespace.lookup(self.context.db, parent, name)
        except FileNotFoundError:
            session.reply(req, self._negative_entry_out)
            return True
        inode = self.context.open_files.get_attributes(inode)
        session.reply(req, entry_out(inode, self._blksize, self._get_attr_timeout_s(inode.id), self._entry_timeout_s))
        if self.prefetch is not None:
            self.prefetch.record_reached(pid, inode.id)
        return True

    def _fast_getattr(self, req: int, number: int, pid: int) -> bool:
        if self.prefetch is not None and not self.prefetch.consume_fresh_inode(pid, number):
            return False
        inode = self.context.open_files.get_attributes(self.get_inode(number))
        session.reply(req, attr_out(inode, self._blksize, self._get_attr_timeout_s(number)))
        return True

    def _fast_create(self, req: int, parent: int, name: bytes, mode: int, uid: int, gid: int) -> bool:
        request = get_current_request()
        if self.prefetch is not None or request.is_resent or is_virtual(parent):
            return False
        creating = CreateAttempt(self.context, request, parent, name, mode, (uid, gid))
        opened = creating.try_nonblocking()
        if opened is None:
            return False
        entry = entry_out(creating.inode, self._blksize, self._written_attr_timeout_s)
        session.reply(req, entry + self._pack_open_out(opened))
        return True

    def _pack_open_out(self, opened: OpenResult) -> bytes:
        flags = session.FOPEN_DIRECT_IO if opened.direct else 0
        if opened.backing_id:
            # Where the kernel keeps no pages there is nothing to flush: saves a round trip at each close.
            flags |= session.FOPEN_PASSTHROUGH | session.FOPEN_NOFLUSH
        elif self.context.data_path is DataPath.BUFFERED:
            flags |= session.FOPEN_KEEP_CACHE
        return open_out(opened.fh, flags, opened.backing_id)
