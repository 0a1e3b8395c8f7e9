"""The guard of a mountpoint: the directory below it refuses writes while ckptfs is away from it.

Without a guard, an application that saves a checkpoint while ckptfs is stopped would succeed on the disk below, and the next mount would
hide that file. The guard is set before the mount, so no moment is without it. It stays when the daemon is stopped or dies. It goes when an
administrator unmounts and nothing is left to write back, and with `ckptfs mounts --delete`.

`IMMUTABLE`: the attribute of chattr(1), which stops root too. `MODE`: mode 0555, for ordinary users; fusermount3 wants the directory
writable, so the mode is set after the mount. `COVER`: an empty read-only tmpfs over the directory, where root cannot set the attribute
(NFS, old kernels, containers); it is mounted when the daemon leaves. The state directory records what was set (`MountRecord`).

Crash safety: the record is written before the guard is set, and clearing one that is not set does nothing. A directory that is another one
than recorded (device and inode) is not touched. An attribute that was set before the mount stays: it is the administrator's.
"""

import fcntl
import os
import struct
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ckptfs import libc, procfs

FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, FS_IMMUTABLE_FL = 0x80086601, 0x40086602, 0x10
CAP_LINUX_IMMUTABLE = 9
COVER_SOURCE = "ckptfs-away"
MODE_BITS = 0o555
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class GuardKind(StrEnum):
    """The kinds of guards of a mountpoint. NONE: it refuses writes anyway."""

    NONE = "none"
    IMMUTABLE = "immutable"
    MODE = "mode"
    COVER = "cover"


@dataclass(frozen=True, slots=True)
class Guard:
    """The guard of the directory `device`:`inode` at `path`, whose own mode is `mode`."""

    path: Path
    device: int
    inode: int
    kind: GuardKind
    mode: int


def choose(path: Path) -> Guard:
    """Return the guard that suits a directory on which nothing is mounted. Raises OSError."""
    found = os.stat(path)
    return Guard(path, found.st_dev, found.st_ino, _choose_kind(path), found.st_mode & 0o7777)


def _choose_kind(path: Path) -> GuardKind:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = _get_flags(fd)
        if (flags is not None and flags & FS_IMMUTABLE_FL) or os.fstatvfs(fd).f_flag & os.ST_RDONLY:
            return GuardKind.NONE
        if flags is not None and procfs.has_capability(CAP_LINUX_IMMUTABLE) and _can_set_flags(fd, flags):
            return GuardKind.IMMUTABLE
    finally:
        os.close(fd)
    return GuardKind.COVER if procfs.has_capability(procfs.CAP_SYS_ADMIN) else GuardKind.MODE


def _get_flags(fd: int) -> int | None:
    """Return the attributes of a file, or None if its filesystem has none."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(fd, FS_IOC_GETFLAGS, struct.pack("i", 0)))[0])
    except OSError:
        return None


def _can_set_flags(fd: int, flags: int) -> bool:
    try:
        fcntl.ioctl(fd, FS_IOC_SETFLAGS, struct.pack("i", flags))
    except OSError:
        return False
    return True


def _set_immutable(fd: int, *, immutable: bool) -> None:
    flags = (_get_flags(fd) or 0) & ~FS_IMMUTABLE_FL
    fcntl.ioctl(fd, FS_IOC_SETFLAGS, struct.pack("i", flags | (FS_IMMUTABLE_FL if immutable else 0)))


def set_immutable(path: Path, *, immutable: bool) -> None:
    """Have a directory refuse new names, also root's, or not any more. Raises OSError."""
    fd = os.open(path, _DIRECTORY)
    try:
        _set_immutable(fd, immutable=immutable)
    finally:
        os.close(fd)


def open_directory(guard: Guard) -> int:
    """Return a descriptor of the guarded directory, before it is covered by a mount. Raises OSError."""
    return os.open(guard.path, _DIRECTORY)


def set_on(guard: Guard, fd: int) -> None:
    """Set the guard on the directory `fd`; `COVER` is set by `cover`. Raises OSError."""
    if guard.kind is GuardKind.IMMUTABLE:
        _set_immutable(fd, immutable=True)
    elif guard.kind is GuardKind.MODE:
        os.fchmod(fd, guard.mode & MODE_BITS)


def cover(guard: Guard) -> None:
    """Mount an empty read-only filesystem over a directory whose guard is `COVER`. Raises OSError."""
    if guard.kind is not GuardKind.COVER or _find_cover(guard.path):
        return
    flags = libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC
    libc.mount(COVER_SOURCE, guard.path, "tmpfs", flags, "mode=0555,size=4096")


def clear(guard: Guard) -> bool:
    """Take the guard away; return False if it is another directory. Raises OSError."""
    if guard.kind is GuardKind.COVER:
        return uncover(guard.path)
    try:
        fd = open_directory(guard)
    except FileNotFoundError:
        return False
    try:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) != (guard.device, guard.inode):
            return False
        if guard.kind is GuardKind.IMMUTABLE:
            _set_immutable(fd, immutable=False)
        elif guard.kind is GuardKind.MODE:
            os.fchmod(fd, guard.mode)
    finally:
        os.close(fd)
    return True


def uncover(path: Path) -> bool:
    """Unmount the covers at `path`. Returns True if there was one. Raises OSError."""
    found = False
    while _find_cover(path):
        libc.unmount(path, libc.UMOUNT_NOFOLLOW)
        found = True
    return found


def _find_cover(path: Path) -> bool:
    here = [entry for entry in procfs.list_mount_entries() if entry.mountpoint == path]
    return bool(here) and (here[-1].fstype, here[-1].source) == ("tmpfs", COVER_SOURCE)
