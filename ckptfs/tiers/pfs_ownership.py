"""Owns who the current thread is for the PFS: most sites squash root there, so what root may not do is done as the file's owner.

The kernel keeps fsuid, fsgid and groups for each thread; glibc's setgroups would change all of them, so it is called by number.
Setting fsuid to anybody but root also takes the thread's capabilities over files away, and gives them back on the return to root.
If we die here: so does the thread.

Owns how attributes reach the PFS: owner, mode, the user's xattrs and times, in this order (a change of owner takes set-id bits away).

What the filesystem or the site does not allow (owners without being root, xattrs where there are none) is logged once and left out; it
never holds back the bytes.
If we die here: the attributes are set again.
"""

import contextlib
import ctypes
import errno
import logging
import os
import platform
import pwd
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TypeVar

from ckptfs import disk
from ckptfs.model import Inode

Result = TypeVar("Result")

Owner = tuple[int, int]
"""(uid, gid)."""
_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}
_libc = ctypes.CDLL(None, use_errno=True)
_thread = threading.local()


class RootSquashed(PermissionError):
    """What root made belongs to somebody else: the filesystem does not take root for root."""


def can_impersonate() -> bool:
    """Whether this process may act as others."""
    return os.geteuid() == 0 and platform.machine() in _SETGROUPS


def is_root() -> bool:
    """Whether the thread is root for filesystems just now."""
    return os.geteuid() == 0 and not getattr(_thread, "acting", False)


@contextlib.contextmanager
def as_owner(uid: int, gid: int) -> Iterator[None]:
    """The thread is this user for filesystems inside the block."""
    own_groups = os.getgroups()
    _set_groups(list(_list_groups(uid, gid)))
    _libc.setfsgid(ctypes.c_uint32(gid))
    _libc.setfsuid(ctypes.c_uint32(uid))
    _thread.acting = True
    try:
        yield
    finally:
        _libc.setfsuid(ctypes.c_uint32(os.geteuid()))
        _libc.setfsgid(ctypes.c_uint32(os.getegid()))
        _set_groups(own_groups)
        _thread.acting = False


@contextlib.contextmanager
def as_process_user() -> Iterator[None]:
    """Inside a block of `as_owner`: the thread is itself again, for what is ours and nobody else's."""
    if not getattr(_thread, "acting", False):
        yield
        return
    uid = _libc.setfsuid(ctypes.c_uint32(os.geteuid()))
    try:
        yield
    finally:
        _libc.setfsuid(ctypes.c_uint32(uid))


def retry_as_owner(call: Callable[[], Result], owners: Callable[[], Iterable[Owner]]) -> Result:
    """`call()` as we are; where that is refused and we are root, as each of `owners()` in turn. Raises the first refusal."""
    try:
        return call()
    except PermissionError as refusal:
        if not can_impersonate() or getattr(_thread, "acting", False):
            raise
        for uid, gid in dict.fromkeys(owners()):
            if uid == 0:
                continue
            try:
                with as_owner(uid, gid):
                    return call()
            except PermissionError:
                continue
        raise refusal


def _set_groups(groups: list[int]) -> None:
    array = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(ctypes.c_long(_SETGROUPS[platform.machine()]), ctypes.c_size_t(len(groups)), array) != 0:
        code = ctypes.get_errno()
        raise PermissionError(code, f"setgroups: {os.strerror(code)}")


@lru_cache(maxsize=256)
def _list_groups(uid: int, gid: int) -> tuple[int, ...]:
    try:
        return tuple(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except (KeyError, OSError):
        return (gid,)


log = logging.getLogger(__name__)
disk.declare_labels("pfs:chown", "pfs:chmod", "pfs:utime", "pfs:xattr")
_NOT_ALLOWED = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODATA}
_NO_XATTR = _NOT_ALLOWED | {errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EDQUOT}
_OWN_PREFIX = b"user.ckptfs."
_logged: set[tuple[str, int | None]] = set()


def apply_attributes(
    directory: int, name: bytes, wanted: Inode, xattrs: Mapping[bytes, bytes], *, is_new: bool = False, with_times: bool = True
) -> None:
    """Make what is under `name` look like `wanted`. `fresh`: it was just made and has no xattrs."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        found = os.fstat(fd)
        is_symlink = stat.S_ISLNK(found.st_mode)
        path = b"/proc/self/fd/%d" % fd
        owner = (wanted.uid, wanted.gid)
        if (found.st_uid, found.st_gid) != owner:
            _tolerate("owners", _NOT_ALLOWED, lambda: disk.act("pfs:chown", _chown, path, owner, directory, name, is_symlink))
        if not is_symlink:
            # A change of owner and ACLs may have changed the mode as well, so it is always set.
            _tolerate("modes", _NOT_ALLOWED, lambda: disk.act("pfs:chmod", os.chmod, path, stat.S_IMODE(wanted.mode)))
        if xattrs or stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
            _tolerate("extended attributes", _NO_XATTR, lambda: _set_xattrs(path, xattrs, is_new=is_new))
        if with_times:
            when = (wanted.atime_ns, wanted.mtime_ns)
            _tolerate("times", _NOT_ALLOWED, lambda: disk.act("pfs:utime", _utime, path, when, directory, name, is_symlink))
    finally:
        os.close(fd)


def _chown(path: bytes, owner: tuple[int, int], directory: int, name: bytes, is_symlink: bool) -> None:
    if is_symlink:
        os.chown(name, *owner, dir_fd=directory, follow_symlinks=False)
    else:
        os.chown(path, *owner)


def _utime(path: bytes, when: tuple[int, int], directory: int, name: bytes, is_symlink: bool) -> None:
    if is_symlink:
        os.utime(name, ns=when, dir_fd=directory, follow_symlinks=False)
    else:
        os.utime(path, ns=when)


def _set_xattrs(path: bytes, wanted: Mapping[bytes, bytes], *, is_new: bool) -> None:
    if not is_new:
        for name in map(os.fsencode, os.listxattr(path)):
            if name.startswith(b"user.") and not name.startswith(_OWN_PREFIX) and name not in wanted:
                disk.act("pfs:xattr", os.removexattr, path, name)
    for name, value in wanted.items():
        _tolerate("extended attributes", _NO_XATTR, lambda n=name, v=value: disk.act("pfs:xattr", os.setxattr, path, n, v))  # type: ignore[misc]


def _tolerate(what: str, codes: set[int], call: Callable[[], None]) -> None:
    """Run `call`; a refusal with one of `codes` is said once for its kind."""
    try:
        call()
    except OSError as refusal:
        if refusal.errno not in codes:
            raise
        if (what, refusal.errno) not in _logged:
            _logged.add((what, refusal.errno))
            log.warning("the PFS does not take all %s (%s); files there keep what it gives them", what, refusal.strerror)
