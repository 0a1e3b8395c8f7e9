"""A baseline: the least that a filesystem in Python with plain pyfuse3 does. Files are in dictionaries; nothing survives.

Usage: plain_pyfuse3.py MOUNTPOINT. Follows pyfuse3's own examples. Ends when it is unmounted.
"""

import errno
import os
import stat
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

import pyfuse3
import trio


class Memory(pyfuse3.Operations):
    """A tree of files and directories in memory."""

    enable_writeback_cache = False

    def __init__(self) -> None:
        super().__init__()
        self._next = pyfuse3.ROOT_INODE + 1
        self._names: dict[tuple[int, bytes], int] = {}
        self._data: dict[int, bytearray] = defaultdict(bytearray)
        self._attributes = {pyfuse3.ROOT_INODE: self._fresh(pyfuse3.ROOT_INODE, stat.S_IFDIR | 0o755)}

    @staticmethod
    def _fresh(inode: int, mode: int) -> pyfuse3.EntryAttributes:
        attributes = pyfuse3.EntryAttributes()
        attributes.st_ino, attributes.st_mode, attributes.st_nlink = inode, mode, 1
        attributes.st_uid, attributes.st_gid = os.getuid(), os.getgid()
        attributes.st_atime_ns = attributes.st_mtime_ns = attributes.st_ctime_ns = time.time_ns()
        attributes.st_blksize = 4096
        return attributes

    def _make(self, parent: int, name: bytes, mode: int) -> pyfuse3.EntryAttributes:
        inode, self._next = self._next, self._next + 1
        self._names[parent, name] = inode
        self._attributes[inode] = self._fresh(inode, mode)
        return self._attributes[inode]

    async def getattr(self, inode: int, ctx: pyfuse3.RequestContext | None = None) -> pyfuse3.EntryAttributes:
        attributes = self._attributes[inode]
        if stat.S_ISREG(attributes.st_mode):
            attributes.st_size = len(self._data[inode])
        return attributes

    async def setattr(self, inode: int, attr: object, fields: object, fh: int | None, ctx: object) -> pyfuse3.EntryAttributes:
        return await self.getattr(inode)

    async def lookup(self, parent: int, name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
        inode = self._names.get((parent, name))
        if inode is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(inode)

    async def mkdir(self, parent: int, name: bytes, mode: int, ctx: object) -> pyfuse3.EntryAttributes:
        return self._make(parent, name, stat.S_IFDIR | mode)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: object
    ) -> tuple[pyfuse3.FileInfo, pyfuse3.EntryAttributes]:
        attributes = self._make(parent, name, stat.S_IFREG | mode)
        return pyfuse3.FileInfo(fh=attributes.st_ino), attributes

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        return bytes(self._data[fh][offset : offset + size])

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        self._data[fh][offset : offset + len(data)] = data
        return len(data)

    async def flush(self, fh: int) -> None:
        return

    async def release(self, fh: int) -> None:
        return

    async def unlink(self, parent: int, name: bytes, ctx: object) -> None:
        inode = self._names.pop((parent, name))
        self._data.pop(inode, None)

    async def rmdir(self, parent: int, name: bytes, ctx: object) -> None:
        self._names.pop((parent, name))

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int, ctx: object) -> None:
        self._names[new_parent, new_name] = self._names.pop((parent, name))

    async def opendir(self, inode: int, ctx: object) -> int:
        return inode

    async def readdir(self, fh: int, start: int, token: pyfuse3.ReaddirToken) -> None:
        names: Sequence[tuple[bytes, int]] = [(name, inode) for (parent, name), inode in self._names.items() if parent == fh]
        for number, (name, inode) in enumerate(names[start:], start + 1):
            if not pyfuse3.readdir_reply(token, name, await self.getattr(inode), number):
                return


def main() -> None:
    """Mount and serve."""
    pyfuse3.init(Memory(), sys.argv[1], {*pyfuse3.default_options, "fsname=plain_pyfuse3"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
