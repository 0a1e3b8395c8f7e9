"""Ownership on the PFS: acting as the owner of a file, and applying owner, mode, xattrs and times.

Most sites squash root on the PFS, so a call that is refused to root is repeated as the owner. fsuid, fsgid and groups belong to a thread;
glibc's setgroups would change all threads, so the system call is made by number. While fsuid is not root, the kernel removes the
thread's capabilities over files.

Attributes are applied in the order owner, mode, xattrs, times: a change of owner clears set-id bits. An attribute that the filesystem
or the site does not allow (owners without root, xattrs where there are none) is logged once and skipped; it never delays the data.

Crash safety: attributes are applied again.
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
from functools import lru_cache, partial
from typing import TypeVar

from ckptfs import disk
from ckptfs.model import Inode

log = logging.getLogger(__name__)
disk.declare_labels("pfs:chown", "pfs:chmod", "pfs:utime", "pfs:xattr")

Result = TypeVar("Result")
Owner = tuple[int, int]
"""(uid, gid)."""
_NOT_ALLOWED = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODATA}
_NO_XATTR = _NOT_ALLOWED | {errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EDQUOT}
_OWN_PREFIX = b"user.ckptfs."
_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}
_NOBODY = 0xFFFF_FFFF
_libc = ctypes.CDLL(None, use_errno=True)
_thread = threading.local()
_logged: set[tuple[str, int | None]] = set()


class RootSquashed(PermissionError):
    """A file that root created belongs to another user: the filesystem squashes root."""


def can_impersonate() -> bool:
    """Return True if this process may act as other users."""
    return os.geteuid() == 0 and platform.machine() in _SETGROUPS


def is_root() -> bool:
    """Return True if the thread currently acts as root on filesystems."""
    return os.geteuid() == 0 and not getattr(_thread, "acting", False)


@contextlib.contextmanager
def as_owner(uid: int, gid: int) -> Iterator[None]:
    """Act as this user on filesystems inside the block, in this thread. Raises PermissionError."""
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, _thread, "acting", False)
        _thread.acting = True
        own_groups = os.getgroups()
        _set_groups(list(_list_groups(uid, gid)))
        undo.callback(_set_groups, own_groups)
        _set_id(_libc.setfsgid, "gid", gid)
        undo.callback(_set_id, _libc.setfsgid, "gid", os.getegid())
        _set_id(_libc.setfsuid, "uid", uid)
        undo.callback(_set_id, _libc.setfsuid, "uid", os.geteuid())
        yield


@contextlib.contextmanager
def as_process_user() -> Iterator[None]:
    """Act as the process itself again, inside a block of `as_owner`."""
    if not getattr(_thread, "acting", False):
        yield
        return
    uid = _set_id(_libc.setfsuid, "uid", os.geteuid())
    try:
        yield
    finally:
        _set_id(_libc.setfsuid, "uid", uid)


def retry_as_owner(call: Callable[[], Result], owners: Callable[[], Iterable[Owner]]) -> Result:
    """Return `call()`; if root is refused, as each of `owners()`. Raises the first refusal."""
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


def get_owner(fd: int) -> Owner:
    """Return (uid, gid) of an open file or directory."""
    found = os.fstat(fd)
    return found.st_uid, found.st_gid


def find_stat(directory: int, name: bytes) -> os.stat_result | None:
    """Call lstat for a name, as the owner of the directory if root may not; None if nothing is there."""

    def call() -> os.stat_result | None:
        with contextlib.suppress(FileNotFoundError):
            return disk.bound_status(os.stat(name, dir_fd=directory, follow_symlinks=False))
        return None

    return retry_as_owner(call, lambda: [get_owner(directory)])


def run_as_owner(directory: int, name: bytes, call: Callable[[], Result]) -> Result:
    """Return `call()` for a name; if root is refused, as the owner of the file or of the directory."""

    def owners() -> list[Owner]:
        found = find_stat(directory, name)
        return [*([] if found is None else [(found.st_uid, found.st_gid)]), get_owner(directory)]

    return retry_as_owner(call, owners)


def _set_id(call: Callable[[ctypes.c_uint32], int], kind: str, number: int) -> int:
    """Call setfsuid(2) or setfsgid(2), and return the former id.

    Raises PermissionError if the kernel refused. Both calls return the former id even when they fail. With an id that no user has, they
    change nothing and return the present one.
    """
    before = call(ctypes.c_uint32(number)) & _NOBODY
    if call(ctypes.c_uint32(_NOBODY)) & _NOBODY != number & _NOBODY:
        raise PermissionError(errno.EPERM, f"cannot act with the {kind} {number} on filesystems")
    return before


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


def apply_attributes(
    directory: int, name: bytes, wanted: Inode, xattrs: Mapping[bytes, bytes], *, is_new: bool = False, with_times: bool = True
) -> None:
    """Apply the attributes of `wanted` to `name`. `is_new`: the file was just created and has no xattrs."""
    with disk.closing(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)) as fd:
        found = os.fstat(fd)
        is_symlink, owner = stat.S_ISLNK(found.st_mode), (found.st_uid, found.st_gid)
        if is_symlink and not disk.get_lasting_ino(found):
            return  # Some filesystems in user space would change what the link leads to.
        path = b"/proc/self/fd/%d" % fd
        # What the path of a symlink's descriptor leads to is its target.
        at, how = (name, {"dir_fd": directory, "follow_symlinks": False}) if is_symlink else (path, {})
        if (found.st_uid, found.st_gid) != (wanted.uid, wanted.gid):
            _tolerate("owners", _NOT_ALLOWED, directory, owner, lambda: disk.act("pfs:chown", os.chown, at, wanted.uid, wanted.gid, **how))
        if not is_symlink:
            # A change of owner and ACLs may change the mode as well, so it is always set.
            _tolerate("modes", _NOT_ALLOWED, directory, owner, lambda: disk.act("pfs:chmod", os.chmod, path, stat.S_IMODE(wanted.mode)))
        if xattrs or stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode):
            _tolerate(
                "extended attributes", _NO_XATTR, directory, owner, lambda: _set_xattrs(directory, path, owner, xattrs, is_new=is_new)
            )
        if with_times:
            when = (wanted.atime_ns, wanted.mtime_ns)
            _tolerate("times", _NOT_ALLOWED, directory, owner, lambda: disk.act("pfs:utime", os.utime, at, ns=when, **how))


def _set_xattrs(directory: int, path: bytes, owner: Owner, wanted: Mapping[bytes, bytes], *, is_new: bool) -> None:
    if not is_new:
        for name in map(os.fsencode, os.listxattr(path)):
            if name.startswith(b"user.") and not name.startswith(_OWN_PREFIX) and name not in wanted:
                disk.act("pfs:xattr", os.removexattr, path, name)
    for name, value in wanted.items():
        _tolerate("extended attributes", _NO_XATTR, directory, owner, partial(disk.act, "pfs:xattr", os.setxattr, path, name, value))


def _tolerate(what: str, codes: set[int], directory: int, owner: Owner, call: Callable[[], None]) -> None:
    """Run `call` on a file in a directory, as its owner if root is refused.

    Errors in `codes` are logged, each once for `what`; others are raised.
    """
    try:
        retry_as_owner(call, lambda: [owner])
    except OSError as refusal:
        if refusal.errno not in codes:
            raise
        if (what, refusal.errno) not in _logged:
            _logged.add((what, refusal.errno))
            where, how = os.readlink(f"/proc/self/fd/{directory}"), "change them on the PFS as one who may"
            log.warning("%s: %s of files there are not set: %s; they keep what the PFS gave them (%s)", where, what, refusal.strerror, how)
