"""The growth of a tier: what the processes of a mount are about to write, and have written.

Nothing else keeps a budget below the size of the filesystem, and the measured use of a tier says nothing of what another process has begun
since. So each process announces what it is about to write.

The table is a file with a slot of two totals for each process: bytes that it has announced, and how many of these it has written. A
process owns its slot by a lock on the bytes of the slot.

Invariants:
- Bytes are announced before they are written. They count as written only when the filesystem shows them.

Crash safety: the kernel drops the lock of a process that ends. The next owner of the slot counts all that was announced as written.
"""

import contextlib
import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

from ckptfs import disk, limits

_SLOT = struct.Struct("<qq")
_SLOTS_MAX = 64
_LOCK = struct.Struct("hhqqi4x")
_FSGETXATTR, _FSSETXATTR = 0x801C581F, 0x401C5820
_FSXATTR = struct.Struct("=5I8x")  # flags, extent size hint, extents, project, hint for copies on write
_HAS_EXTENT_SIZE = 0x800


class GrowthTable:
    """The table of one tier, opened at first use. Any thread may call its methods; they raise OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._fd = -1
        self._slot = 0
        self._announced_bytes = self._written_bytes = 0

    def announce(self, size: int) -> None:
        """Add bytes that this process is about to write. A negative `size` takes them back."""
        self._add(size, 0)

    def count_written(self, size: int) -> None:
        """Count announced bytes as written."""
        self._add(0, size)

    def read_totals(self) -> tuple[int, int]:
        """Return the bytes that all processes have announced, and have written."""
        with self._lock:
            self._open()
            table = os.pread(self._fd, _SLOT.size * _SLOTS_MAX, 0)
        slots = list(_SLOT.iter_unpack(table))
        return sum(announced for announced, _ in slots), sum(written for _, written in slots)

    def _add(self, announced: int, written: int) -> None:
        with self._lock:
            self._open()
            self._announced_bytes += announced
            self._written_bytes += written
            os.pwrite(self._fd, _SLOT.pack(self._announced_bytes, self._written_bytes), self._slot * _SLOT.size)

    def _open(self) -> None:
        """Open the table and take a free slot, unless this process has one."""
        if self._fd >= 0:
            return
        with disk.closing_on_failure(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as fd:
            if os.fstat(fd).st_size < _SLOT.size * _SLOTS_MAX:
                os.ftruncate(fd, _SLOT.size * _SLOTS_MAX)
            self._slot = _take_slot(fd)
            announced, _ = _SLOT.unpack(os.pread(fd, _SLOT.size, self._slot * _SLOT.size))
            self._announced_bytes = self._written_bytes = announced
        self._fd = fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _take_slot(fd: int) -> int:
    """Lock the first free slot for this open file, and return its number. Raises EUSERS if none is free."""
    for slot in range(_SLOTS_MAX):
        with contextlib.suppress(BlockingIOError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, slot * _SLOT.size, _SLOT.size, 0))
            return slot
    raise OSError(errno.EUSERS, os.strerror(errno.EUSERS))


def bound_allocation_ahead(fd: int) -> None:
    """Keep XFS from giving a new file that grows up to as many blocks again as it has.

    A file with a hint of the size of its extents gets no more than it needs to fill the last one.
    """
    with contextlib.suppress(OSError):  # Other filesystems know no such hint, and do not allocate ahead.
        flags, _, *rest = _FSXATTR.unpack(fcntl.ioctl(fd, _FSGETXATTR, bytes(_FSXATTR.size)))
        fcntl.ioctl(fd, _FSSETXATTR, _FSXATTR.pack(flags | _HAS_EXTENT_SIZE, limits.EXTENT_BYTES, *rest))
