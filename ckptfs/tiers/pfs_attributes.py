"""Owns how attributes reach the PFS: owner, mode, the user's xattrs and times, in this order (a change of owner takes set-id bits away).

What the filesystem or the site does not allow (owners without being root, xattrs where there are none) is logged once and left out; it
never holds back the bytes.
If we die here: the attributes are set again.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Mapping

from ckptfs import disk
from ckptfs.model import Inode

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
