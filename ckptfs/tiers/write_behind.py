"""Owns how a large file is written at the disk's pace: writing begins with its first block, and memory holds no more than a window of it.

The kernel would gather gigabytes before it begins, and keep them afterwards: memory that the job's processes need, and that is slow to
get (on a virtual machine 10 us for a page that the host has to find first: 1 GiB took 2.5 s, and takes 0.5 s within a window, measured
here). The same few pages are used again and again instead. Errors of the disk are raised: fsync would not tell of them a second time.
Where a filesystem knows none of this, nothing happens.
If we die here: the kernel writes what it has.
"""

import ctypes
import errno
import os

from ckptfs import disk, limits

disk.declare_labels("behind:wait")

_WAIT, _WRITE, _WAIT_AFTER = 1, 2, 4
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ESPIPE, errno.EOPNOTSUPP}
_libc = ctypes.CDLL(None, use_errno=True)


class WriteBehind:
    """Follows one writer of one file, from `begin` on."""

    def __init__(self, fd: int, begin: int = 0) -> None:
        self._fd = fd
        self._submitted = begin
        self._released = begin

    def advance(self, offset: int) -> None:
        """Everything up to `offset` has its bytes. Waits until all but the last of it is on the disk. Raises OSError of the disk."""
        if offset - self._submitted < limits.BLOCK_BYTES:
            return
        _sync_range(self._fd, self._submitted, offset, _WRITE)
        self._submitted = offset
        end = offset - limits.UNWRITTEN_BYTES_MAX
        if end > self._released:
            disk.act("behind:wait", _sync_range, self._fd, self._released, end, _WAIT | _WRITE | _WAIT_AFTER)
            os.posix_fadvise(self._fd, self._released, end - self._released, os.POSIX_FADV_DONTNEED)
            self._released = end


def _sync_range(fd: int, start: int, end: int, flags: int) -> None:
    """sync_file_range(2), as far as there is one."""
    if _libc.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(end - start), ctypes.c_uint(flags)) != 0:
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))
