"""The border between handlers and pyfuse3: the current request, errors as errnos, layouts of replies.

An exception other than FUSEError that leaves a pyfuse3 handler would end the whole mount; `translate_errors` turns it into an errno.

The kernel caches attributes and names for long: the mover's changes reach it as notifications. st_blksize tells programs how many bytes to
buffer per read(2) or write(2). A call on the passthrough path costs about 1 us more than on a tmpfs, so regular files report 128 KiB there,
which the buffers of Python and of the C++ library then use. The buffered path reports 4096, because the kernel uses a larger value for its
page logic.
"""

import errno
import logging
import struct
from dataclasses import dataclass

from ckptfs import limits
from ckptfs.errors import CkptfsError
from ckptfs.model import Inode
from ckptfs_daemon.fuse import session

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip

log = logging.getLogger(__name__)
REPEATED_BIT = 1 << 63

BLOCK_BYTES = 4096
SECTOR_BYTES = 512
PASSTHROUGH_BLKSIZE = 128 * limits.KIB
NANO = 1_000_000_000
_ATTRIBUTES = "6Q10I"

# At ESTALE the kernel walks a path once more. A call on a descriptor has no path: the error would reach the program.
_STALE_ERRNOS = {
    "readdir": errno.ENOENT,
    **dict.fromkeys(("read", "write", "flush", "fsync", "fsyncdir", "fallocate", "copy_file_range", "lseek"), errno.EIO),
}

# struct fuse_attr_out, fuse_entry_out and fuse_open_out of <linux/fuse.h>.
_ATTR_OUT = struct.Struct("=Q2I" + _ATTRIBUTES)
_ENTRY_OUT = struct.Struct("=4Q2I" + _ATTRIBUTES)
_OPEN_OUT = struct.Struct("=QIi")
_U64 = 2**64 - 1

NEGATIVE_ENTRY_OUT = _ENTRY_OUT.pack(0, 0, int(limits.CACHE_TIMEOUT_S), int(limits.CACHE_TIMEOUT_S), *[0] * 18)
"""The reply to a LOOKUP of a name that does not exist."""

UNCACHED_NEGATIVE_ENTRY_OUT = _ENTRY_OUT.pack(*[0] * 22)
"""The same if another node may create the name at any time."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its number in this FUSE connection, and whether it drops set-id bits.

    `is_repeated`: an earlier mount process had it in hand when it died, and may have made the change. `pid`: the thread that waits for it;
    0 if that is in a foreign pid namespace.
    """

    number: int
    is_repeated: bool
    kills_set_id: bool
    pid: int = 0


def get_current_request() -> Request:
    """Return the request being served. Call it before the handler's first await."""
    unique = session.request_unique.value
    kills_set_id = bool(session.request_kills_set_id.value)
    return Request(unique & ~REPEATED_BIT, bool(unique & REPEATED_BIT), kills_set_id, session.request_pid.value)


def get_errno(failure: BaseException, where: str) -> int:
    """Return the errno of `failure`. Unexpected errors are logged with traceback, and become EIO."""
    if isinstance(failure, CkptfsError) or (isinstance(failure, OSError) and failure.errno):
        code = failure.errno or errno.EIO
        return _STALE_ERRNOS.get(where, code) if code == errno.ESTALE else code
    log.error("unexpected error in %s", where, exc_info=failure)
    return errno.EIO


def build_attributes(inode: Inode, blksize: int = BLOCK_BYTES) -> EntryAttributes:
    """Build the attributes of `inode` for the kernel. `blksize` is st_blksize of regular files."""
    entry = EntryAttributes()
    entry.st_ino = inode.id
    entry.generation = 0
    entry.entry_timeout = limits.CACHE_TIMEOUT_S
    entry.attr_timeout = limits.CACHE_TIMEOUT_S
    entry.st_mode = inode.mode
    entry.st_nlink = inode.shown_nlink
    entry.st_uid = inode.uid
    entry.st_gid = inode.gid
    entry.st_rdev = inode.rdev
    entry.st_size = inode.size
    entry.st_blksize = blksize if inode.is_file else BLOCK_BYTES
    entry.st_blocks = count_blocks(inode)
    entry.st_atime_ns = inode.atime_ns
    entry.st_mtime_ns = inode.mtime_ns
    entry.st_ctime_ns = inode.ctime_ns
    return entry


def count_blocks(inode: Inode) -> int:
    """Return st_blocks: the allocated units if known, otherwise as many as the size needs."""
    if inode.allocated_blocks is not None:
        return inode.allocated_blocks
    return -(-inode.size // BLOCK_BYTES) * (BLOCK_BYTES // SECTOR_BYTES) if inode.is_file else 0


def build_negative_entry(timeout_s: float) -> EntryAttributes:
    """Build the reply that a name does not exist. The kernel caches it for `timeout_s`."""
    entry = EntryAttributes()
    entry.st_ino = 0
    entry.entry_timeout = timeout_s
    entry.attr_timeout = timeout_s
    return entry


def attr_out(inode: Inode, blksize: int, timeout_s: float) -> bytes:
    whole_s, rest_s = divmod(timeout_s, 1)
    return _ATTR_OUT.pack(int(whole_s), int(rest_s * NANO), 0, *_packed(inode, blksize))


def entry_out(inode: Inode, blksize: int, timeout_s: float, entry_timeout_s: float = limits.CACHE_TIMEOUT_S) -> bytes:
    """Build the reply to a LOOKUP, with which that to a CREATE begins. `timeout_s`: of the attributes."""
    whole_s, rest_s = divmod(timeout_s, 1)
    return _ENTRY_OUT.pack(inode.id, 0, int(entry_timeout_s), int(whole_s), 0, int(rest_s * NANO), *_packed(inode, blksize))


def open_out(fh: int, flags: int, backing: int) -> bytes:
    """Build the reply to an OPEN, which also ends the reply to a CREATE."""
    return _OPEN_OUT.pack(fh, flags, backing)


def _packed(inode: Inode, blksize: int) -> tuple[int, ...]:
    """Return the fields of struct fuse_attr. Times before 1970 have negative seconds."""
    atime_s, atime_ns = divmod(inode.atime_ns, NANO)
    mtime_s, mtime_ns = divmod(inode.mtime_ns, NANO)
    ctime_s, ctime_ns = divmod(inode.ctime_ns, NANO)
    return (
        inode.id, inode.size, count_blocks(inode), atime_s & _U64, mtime_s & _U64, ctime_s & _U64, atime_ns, mtime_ns, ctime_ns,
        inode.mode, inode.shown_nlink, inode.uid, inode.gid, inode.rdev, blksize if inode.is_file else BLOCK_BYTES, 0,
    )  # fmt: skip
