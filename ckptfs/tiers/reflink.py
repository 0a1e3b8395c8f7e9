"""Blocks that files of one filesystem share: clones, comparison by the kernel, shared bytes, an index.

XFS and btrfs share blocks, and so may an NFS server on top of them. tmpfs and ext4 do not: there each function reports that nothing was
shared, and the caller copies. A write into a shared block gets a block of its own from the filesystem, so a file never changes through
another one.

- `clone` makes the whole target share the blocks of the source.
- `clone_range` puts a range of the source into the target. The target has these bytes, right or wrong: the caller reads them back.
- `deduplicate` changes no byte: the kernel locks both files, compares the ranges and shares them only if they are equal.
- `measure_saved` adds up the bytes that files save by that.
- `BlockIndex` knows where blocks of recent files are, by digest. It is a hint: such a file may be gone or changed, so bytes are compared.

Crash safety: each call is one change of the filesystem's metadata, which its journal has or has not.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from ckptfs import digest, disk, limits
from ckptfs.bounded_table import BoundedTable

disk.declare_labels("share:clone", "share:range", "share:compare")
FICLONE = 0x40049409
FICLONERANGE = 0x4020940D
FIDEDUPERANGE = 0xC0189436
FIEMAP = 0xC020660B
CANNOT_SHARE = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS})
"""What a filesystem answers that never shares blocks."""
CANNOT_CLONE = CANNOT_SHARE | {errno.EXDEV, errno.EINVAL, errno.EPERM, errno.EBADF, errno.ETXTBSY}
"""What a call answers that shares nothing between these two files."""
_RANGE = struct.Struct("=qQQQ")  # source descriptor, source offset, length, target offset
_DEDUPE = struct.Struct("=QQHHIqQQiI")  # source offset, length, 1 target, reserved; its descriptor, offset, bytes, status, reserved
_DIFFERS = 1
_FIEMAP = struct.Struct("=QQIIII")  # start, length, flags, mapped extents, room for extents, reserved
_EXTENT = struct.Struct("=QQQ2QI3I")  # logical, physical, length, reserved, flags, reserved
_EXTENTS_MAX = 256
_LAST, _SHARED = 0x1, 0x2000
_NO_PLACE = 0x2 | 0x4 | 0x200  # unknown, not allocated yet, inside metadata


class Sharing(Enum):
    """The result of `deduplicate`."""

    SHARED = auto()
    DIFFERENT = auto()
    IMPOSSIBLE = auto()


@dataclass(frozen=True, slots=True)
class Extent:
    """A part of a file and its place on the device, in bytes."""

    start: int
    physical: int
    length: int


def clone(source_fd: int, target_fd: int) -> bool:
    """Let the target have the blocks of the source. Return False if the filesystem cannot."""
    try:
        disk.act("share:clone", fcntl.ioctl, target_fd, FICLONE, source_fd)
    except OSError as failure:
        if failure.errno in CANNOT_CLONE:
            return False
        raise
    return True


def clone_range(source_fd: int, source_offset: int, target_fd: int, target_offset: int, length: int) -> None:
    """Let a range of the target, or its end, have the blocks of the source. Raises OSError."""
    disk.act("share:range", fcntl.ioctl, target_fd, FICLONERANGE, _RANGE.pack(source_fd, source_offset, length, target_offset))


def try_clone_range(source_fd: int, source_offset: int, target_fd: int, target_offset: int, length: int) -> bool:
    """Clone a range as `clone_range` does. Return False if these two files cannot share these ranges."""
    try:
        clone_range(source_fd, source_offset, target_fd, target_offset, length)
    except OSError as failure:
        if failure.errno in CANNOT_CLONE:
            return False
        raise
    return True


def deduplicate(source_fd: int, source_offset: int, target_fd: int, target_offset: int, length: int) -> Sharing:
    """Let a range of the target have the blocks of the source if the bytes are equal.

    Raises OSError if one cannot be read. The pages of the source are dropped first, so the kernel compares what the device has. Both
    descriptors may be read-only.
    """
    os.posix_fadvise(source_fd, source_offset, length, os.POSIX_FADV_DONTNEED)
    argument = bytearray(_DEDUPE.pack(source_offset, length, 1, 0, 0, target_fd, target_offset, 0, 0, 0))
    try:
        disk.act("share:compare", fcntl.ioctl, source_fd, FIDEDUPERANGE, argument)
    except OSError as failure:
        if failure.errno in CANNOT_CLONE:
            return Sharing.IMPOSSIBLE
        raise
    status: int = _DEDUPE.unpack(argument)[8]
    if status == _DIFFERS:
        return Sharing.DIFFERENT
    if -status in CANNOT_CLONE:
        return Sharing.IMPOSSIBLE
    if status < 0:
        raise OSError(-status, os.strerror(-status))
    return Sharing.SHARED


def is_possible(fd: int) -> bool:
    """Return whether an empty file, which stays empty, could share blocks with others. Raises OSError."""
    try:
        os.pwrite(fd, bytes(limits.STATFS_UNIT_BYTES), 0)
        clone_range(fd, 0, fd, limits.STATFS_UNIT_BYTES, limits.STATFS_UNIT_BYTES)
    except OSError as failure:
        if failure.errno not in CANNOT_CLONE:
            raise
        return False
    finally:
        os.ftruncate(fd, 0)
    return True


def is_possible_in(directory_fd: int) -> bool:
    """Return whether files in a directory of ours can share blocks. Raises OSError."""
    try:
        fd = os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    except OSError as failure:
        if failure.errno in CANNOT_CLONE | {errno.EISDIR}:  # It has no files without a name.
            return False
        raise
    with disk.closing(fd):
        return is_possible(fd)


def list_extents(fd: int, start: int = 0, length: int = limits.OFFSET_MAX) -> list[Extent]:
    """Return where a range of a file is on the device. Raises OSError (`CANNOT_CLONE`)."""
    found = []
    for logical, physical, size, _ in _read_extents(fd, start, start + length):
        first, last = max(start, logical), min(start + length, logical + size)
        if first < last:
            found.append(Extent(first - start, physical + first - logical, last - first))
    return found


def count_shared(fd: int) -> int:
    """Return how many bytes of a file others share, so that writing needs room. Raises OSError."""
    return sum(size for _, _, size, is_shared in _read_extents(fd, 0, limits.OFFSET_MAX) if is_shared)


def _read_extents(fd: int, start: int, end: int) -> Iterator[tuple[int, int, int, bool]]:
    """Yield (logical, physical, length, whether it is shared) of the extents that overlap a range."""
    buffer = bytearray(_FIEMAP.size + _EXTENTS_MAX * _EXTENT.size)
    while start < end:
        _FIEMAP.pack_into(buffer, 0, start, end - start, 0, 0, _EXTENTS_MAX, 0)
        fcntl.ioctl(fd, FIEMAP, buffer)
        count = _FIEMAP.unpack_from(buffer)[3]
        flags = _LAST
        for number in range(count):
            logical, physical, size, _, _, flags, *_ = _EXTENT.unpack_from(buffer, _FIEMAP.size + number * _EXTENT.size)
            if not flags & _NO_PLACE:
                yield logical, physical, size, bool(flags & _SHARED)
            start = logical + size
        if flags & _LAST:
            return


def measure_saved(descriptors: Iterable[int]) -> int:
    """Return the bytes that these files of one filesystem save by sharing blocks.

    Raises OSError (`CANNOT_CLONE`) if it does not tell.
    """
    saved, reached = 0, 0
    for begin, end in sorted((one.physical, one.physical + one.length) for fd in descriptors for one in list_extents(fd)):
        saved += max(0, min(end, reached) - begin)
        reached = max(reached, end)
    return saved


class BlockIndex:
    """Blocks of contents of a tier, or of inodes on the PFS. The oldest go first. For one thread."""

    def __init__(self) -> None:
        self._places = BoundedTable[bytes, tuple[int, int]](limits.SHARED_BLOCKS_MAX)

    def add(self, file: int, block_digests: bytes) -> None:
        """Add the blocks of a file but for holes. Of equal blocks the last one is found."""
        for number, block_digest in enumerate(digest.split_digests(block_digests)):
            if block_digest != digest.ZERO_BLOCK:
                self._places[block_digest] = file, number

    @property
    def is_empty(self) -> bool:
        return not self._places

    def find(self, block_digests: bytes) -> dict[int, tuple[int, int]]:
        """Return {number of a block: (file, number there)} for the blocks of a new file."""
        wanted = enumerate(digest.split_digests(block_digests))
        return {number: place for number, one in wanted if (place := self._places.get(one)) is not None}
