"""Owns the handlers that read directories, and statfs. A directory's handle is its inode's id: nothing to keep, nothing to lose.

If we die here: the next mount process goes on reading at the cookie that the kernel hands it.
"""

import errno
import os
import time
from typing import TYPE_CHECKING

import trio

from ckptfs import limits
from ckptfs.catalog import directories
from ckptfs.errors import posix_error
from ckptfs.model import Inode, Tier
from ckptfs_daemon.edge import translate_errors
from ckptfs_daemon.handler import ChangeRunner

import pyfuse3  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import ReaddirToken, RequestContext, StatvfsData

DOT, DOTS = 1, 2
"""The offsets after '.' and '..'; an entry's is its cookie and these two."""

INODES_MAX = 2**48
"""What statfs says: ids are 63 bits wide, the catalog takes as many as fit the disk below."""


class DirectoryHandlers(ChangeRunner):
    """Handlers for open directories and for the filesystem as a whole."""

    @translate_errors
    async def opendir(self, inode: int, ctx: "RequestContext") -> int:
        """A handle for reading a directory: its inode's id."""
        return inode

    @translate_errors
    async def readdir(self, fh: int, start_id: int, token: "ReaddirToken") -> None:
        """Fill the reply with entries after the offset `start_id`."""
        if self.context.shared_namespace is not None and start_id == 0:
            await self.context.shared_namespace.refresh_inode(fh)
            await self.context.shared_namespace.refresh_directory(fh)
        directory = self.get_inode(fh)
        if not directory.is_directory:
            raise posix_error(errno.ENOTDIR)
        if not directory.is_imported:
            await self.request_scan(fh, must_succeed=True)
        if directory.nlink == 0 or not self._reply_dot_entries(directory, start_id, token):
            return
        for entry, inode in directories.iterate_entries(self.context.db, fh, max(0, start_id - DOTS)):
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(entry.name), self.get_attributes(inode), entry.cookie + DOTS):
                return

    def _reply_dot_entries(self, directory: Inode, start_id: int, token: "ReaddirToken") -> bool:
        """'.' and '..', which a pyfuse3 filesystem may leave out and programs expect. False when the reply is full."""
        if start_id < DOT and not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(b"."), self.get_attributes(directory), DOT):
            return False
        if start_id < DOTS:
            parent = self.get_inode(directory.parent) if directory.parent else directory
            return pyfuse3.readdir_reply(token, pyfuse3.FileNameT(b".."), self.get_attributes(parent), DOTS)
        return True

    @translate_errors
    async def releasedir(self, fh: int) -> None:
        """Nothing was kept."""

    @translate_errors
    async def access(self, inode: int, mode: int, ctx: "RequestContext") -> bool:
        """The kernel judges by itself (default_permissions)."""
        return True

    @translate_errors
    async def statfs(self, ctx: "RequestContext") -> "StatvfsData":
        """How much can still be written here: what the PFS has, where there is one; else what RAM and NVMe have."""
        capacities = self.context.tiers.get_local_capacities().values()
        total, free = sum(room.total for room in capacities), sum(room.free for room in capacities)
        if Tier.PFS in self.context.tiers:
            pfs_total, pfs_free = await self._get_pfs_capacity()
            total, free = max(total, pfs_total), max(free, pfs_free)
        figures = pyfuse3.StatvfsData()
        figures.f_bsize = figures.f_frsize = limits.STATFS_UNIT_BYTES
        figures.f_blocks = total // limits.STATFS_UNIT_BYTES
        figures.f_bfree = figures.f_bavail = free // limits.STATFS_UNIT_BYTES
        figures.f_files = figures.f_ffree = figures.f_favail = INODES_MAX
        figures.f_namemax = limits.NAME_BYTES_MAX
        return figures

    _pfs_capacity: tuple[float, int, int] = (float("-inf"), 0, 0)
    _is_statvfs_running = False

    async def _get_pfs_capacity(self) -> tuple[int, int]:
        """(total, free) of the PFS as it last said; asked again in a thread, of which there is one at most, when that is old."""
        asked_s, total, free = self._pfs_capacity
        if time.monotonic() - asked_s > limits.ROOM_AGE_S and not self._is_statvfs_running:
            self._is_statvfs_running = True
            with trio.move_on_after(limits.STATFS_WAIT_S):
                await trio.to_thread.run_sync(self._statvfs_pfs, abandon_on_cancel=True)
            _, total, free = self._pfs_capacity
        return total, free

    def _statvfs_pfs(self) -> None:
        pfs = self.context.config.pfs
        assert pfs is not None
        try:
            figures = os.statvfs(pfs)
            self._pfs_capacity = (time.monotonic(), figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize)
        except OSError:
            self._pfs_capacity = (time.monotonic(), 0, 0)
        finally:
            self._is_statvfs_running = False
