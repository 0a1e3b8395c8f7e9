"""System calls that Python lacks, through the C library. They raise OSError, as those of `os` do."""

import ctypes
import errno
import os
from pathlib import Path

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MNT_FORCE, MNT_DETACH, MNT_EXPIRE, UMOUNT_NOFOLLOW = 1, 2, 4, 8
KEEP_SIZE, PUNCH_HOLE = 1, 2
"""Modes of fallocate(2)."""
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object, path: Path | None = None) -> None:
    """Call a function that returns 0 if it succeeds. Raises ENOSYS if this C library lacks it.

    `path`: what the error is about.
    """
    function, code = getattr(_libc, name, None), errno.ENOSYS
    if function is not None:
        # A register has room for a long, and a function that takes an int looks at the lower half of it.
        if function(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments)) == 0:
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), None if path is None else str(path))


def mount(source: str, point: Path, fstype: str, flags: int, data: str = "") -> None:
    call("mount", os.fsencode(source), os.fsencode(point), fstype.encode(), flags, data.encode(), path=point)


def unmount(point: Path, flags: int = 0) -> None:
    call("umount2", os.fsencode(point), flags, path=point)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2). The one of `os` has no mode, and writes zeros if a filesystem cannot allocate."""
    call("fallocate", fd, mode, offset, length)
