"""Owns how an inode becomes the attributes that the kernel gets. Pure.

Timeouts are long: what the mover changes reaches the kernel as a notification. st_blksize tells programs how much to gather before they
call write(2) or read(2): a call on the passthrough path costs about 1 us more than on a tmpfs, so regular files ask for 128 KiB (which
Python's and the C++ library's buffers then take); the buffered path says 4096, because the kernel takes a larger one for its page logic.
"""

from ckptfs import limits
from ckptfs.model import Inode
from ckptfs_daemon import door  # noqa: F401

# Imported after the door, which must be loaded before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip

BLOCK_BYTES = 4096
SECTOR_BYTES = 512
GATHER_BYTES = 128 * limits.KIB


def attributes(inode: Inode, gather_bytes: int = BLOCK_BYTES) -> EntryAttributes:
    """What the kernel shall know of `inode`. `gather_bytes`: st_blksize of regular files."""
    entry = EntryAttributes()
    entry.st_ino = inode.id
    entry.generation = 0
    entry.entry_timeout = limits.ENTRY_TIMEOUT_S
    entry.attr_timeout = limits.ATTRIBUTE_TIMEOUT_S
    entry.st_mode = inode.mode
    entry.st_nlink = inode.nlink
    entry.st_uid = inode.uid
    entry.st_gid = inode.gid
    entry.st_rdev = inode.rdev
    entry.st_size = inode.size
    entry.st_blksize = gather_bytes if inode.is_file else BLOCK_BYTES
    entry.st_blocks = blocks_of(inode)
    entry.st_atime_ns = inode.atime_ns
    entry.st_mtime_ns = inode.mtime_ns
    entry.st_ctime_ns = inode.ctime_ns
    return entry


def blocks_of(inode: Inode) -> int:
    """st_blocks: what is allocated where that is known, else what the size needs."""
    if inode.blocks is not None:
        return inode.blocks
    return -(-inode.size // BLOCK_BYTES) * (BLOCK_BYTES // SECTOR_BYTES) if inode.is_file else 0


def nothing(timeout_s: float) -> EntryAttributes:
    """There is no such name, and for so long the kernel need not ask again."""
    entry = EntryAttributes()
    entry.st_ino = 0
    entry.entry_timeout = timeout_s
    entry.attr_timeout = timeout_s
    return entry
