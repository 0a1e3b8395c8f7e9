"""Owns how directories of the PFS are read: walked down by descriptors, never by joined paths, and listed name by name.

Nothing is written here. Every call may hang as long as the PFS does.
Hidden: `.ckptfs` in the root (our work area) and everything that begins with `.ckptfs.` (names under which write-back prepares files).
What is hidden by that and is not ours, or was left by a node that died, is told to whoever lists.
If we die here: nothing was changed.
"""

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ckptfs import disk, limits
from ckptfs.errors import TierUnavailable
from ckptfs.model import PfsEntryStat
from ckptfs.tiers import acting

disk.declare_labels("visit:root", "visit:walk", "visit:list", "visit:stat", "visit:readlink", "visit:xattrs")

WORK_DIRECTORY = b".ckptfs"
HIDDEN_PREFIX = b".ckptfs."
_TEMPORARY = re.compile(rb"\.ckptfs\.[0-9a-f]{8}\.[0-9a-f]+\Z")
_PARKED = re.compile(rb"\.ckptfs\.parked\.([0-9a-f]{1,16})\Z")
_IN_WORK_AREA = re.compile(rb"(tier-id(\.[0-9a-f]+)?|contents(-[0-9a-f]+)?)\Z")
OUR_XATTRS = "user.ckptfs."
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_XATTRS = {errno.EOPNOTSUPP, errno.ENODATA, errno.EPERM, errno.EACCES, errno.ENOENT}


def open_root(pfs: Path, expected_uuid: str | None) -> int:
    """A descriptor of the PFS's root. Raises TierUnavailable when it is not the directory that the catalog knows by `expected_uuid`:
    the mountpoint of a filesystem that is not mounted looks like an empty one, and must not be taken for it.
    """
    fd = disk.open_file("visit:root", os.fsencode(pfs), os.O_RDONLY | os.O_DIRECTORY)
    try:
        if expected_uuid is not None and _read_tier_id(fd) != expected_uuid:
            raise TierUnavailable(
                f"{pfs} is not the directory that this catalog belongs to: {WORK_DIRECTORY.decode()}/tier-id is missing or another one",
                remedy=f"mount the filesystem that belongs at {pfs}",
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _read_tier_id(root_fd: int) -> str:
    try:
        fd = os.open(WORK_DIRECTORY + b"/tier-id", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    with os.fdopen(fd, "rb") as file:
        return file.read(64).decode("ascii", "replace").strip()


def open_directory(root_fd: int, names: tuple[bytes, ...]) -> int:
    """A new descriptor of the directory `names` below `root_fd`. Symlinks are not followed. Raises OSError."""
    fd = os.open(b".", _DIRECTORY, dir_fd=root_fd)
    for name in names:
        try:
            child_fd = _open_child(fd, name)
        finally:
            os.close(fd)
        fd = child_fd
    return fd


def _open_child(parent_fd: int, name: bytes) -> int:
    def owners() -> list[acting.Owner]:
        found = stat_entry(parent_fd, name)
        return [(found.uid, found.gid), _get_owner(parent_fd)]

    return acting.retry_as_owner(lambda: disk.open_file("visit:walk", name, _DIRECTORY, dir_fd=parent_fd), owners)


def _get_owner(fd: int) -> acting.Owner:
    found = os.fstat(fd)
    return found.st_uid, found.st_gid


def list_entries(directory_fd: int, *, is_root: bool, on_external: Callable[[bytes], None] = lambda name: None) -> Iterator[PfsEntryStat]:
    """What the directory shows, in no order, without symlinks' targets and xattrs. A name that vanishes meanwhile is left out. `foreign`
    is told of what is hidden and somebody else's.
    """
    with disk.act("visit:list", os.scandir, directory_fd) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            if is_root and name == WORK_DIRECTORY:
                for external in _list_external_in_work_area(directory_fd):
                    on_external(external)
                continue
            if name.startswith(HIDDEN_PREFIX):
                if not _TEMPORARY.match(name) and (parse_parked_name(name) is None or _is_abandoned(directory_fd, name)):
                    on_external(name)
                continue
            with contextlib.suppress(FileNotFoundError):
                yield stat_entry(directory_fd, name)


def parse_parked_name(name: bytes) -> int | None:
    """The inode of what waits under this name until its own one is free; None: it is no such name."""
    found = _PARKED.match(name)
    return None if found is None else int(found[1], 16)


def _is_abandoned(directory_fd: int, name: bytes) -> bool:
    """Whether what waits there was left by a node that died: it got this name long ago."""
    try:
        return time.time_ns() - stat_entry(directory_fd, name).ctime_ns > limits.PARKED_KEPT_S * 1e9
    except OSError:
        return False


def _list_external_in_work_area(root_fd: int) -> list[bytes]:
    """What is in the place of our work area and not ours, as far as that can be seen."""
    try:
        with disk.closing(os.open(WORK_DIRECTORY, _DIRECTORY, dir_fd=root_fd)) as fd:
            names = sorted(os.fsencode(name) for name in os.listdir(fd))
    except NotADirectoryError:
        return [WORK_DIRECTORY]
    except OSError:
        return []
    return [WORK_DIRECTORY + b"/" + name for name in names if not _IN_WORK_AREA.match(name)]


def stat_entry(directory_fd: int, name: bytes) -> PfsEntryStat:
    """lstat of one name; as the directory's owner where root may not search it. Raises OSError."""

    def call() -> os.stat_result:
        return disk.act("visit:stat", os.stat, name, dir_fd=directory_fd, follow_symlinks=False)

    return _build_stat(name, acting.retry_as_owner(call, lambda: [_get_owner(directory_fd)]))


def stat_descriptor(fd: int, name: bytes = b"") -> PfsEntryStat:
    """fstat of an open file or directory."""
    return _build_stat(name, os.fstat(fd))


def _build_stat(name: bytes, found: os.stat_result) -> PfsEntryStat:
    return PfsEntryStat(
        name, found.st_mode, found.st_uid, found.st_gid, found.st_rdev, found.st_nlink, found.st_size, found.st_ino,
        found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns,
    )  # fmt: skip


def is_absent(directory_fd: int, name: bytes) -> bool:
    """Whether there is certainly no such name now."""
    try:
        stat_entry(directory_fd, name)
    except FileNotFoundError:
        return True
    return False


def load_details(directory_fd: int, entry: PfsEntryStat) -> PfsEntryStat:
    """`seen` with its symlink's target and its xattrs of the namespace `user`. Raises FileNotFoundError when it is gone."""
    path = b"/proc/self/fd/%d/%s" % (directory_fd, entry.name)

    def link() -> bytes:
        return bytes(disk.act("visit:readlink", os.readlink, entry.name, dir_fd=directory_fd))

    def xattrs() -> tuple[tuple[bytes, bytes], ...]:
        names = [name for name in disk.act("visit:xattrs", os.listxattr, path, follow_symlinks=False) if _is_user_xattr(name)]
        return tuple((os.fsencode(name), os.getxattr(path, name, follow_symlinks=False)) for name in names)

    if stat.S_ISLNK(entry.mode):
        return replace(entry, target=acting.retry_as_owner(link, lambda: [_get_owner(directory_fd)]))
    if not (entry.is_file or entry.is_directory):
        return entry
    try:
        return replace(entry, xattrs=acting.retry_as_owner(xattrs, lambda: [(entry.uid, entry.gid), _get_owner(directory_fd)]))
    except OSError as failure:
        if failure.errno in _NO_XATTRS:
            return entry
        raise


def _is_user_xattr(name: str) -> bool:
    return name.startswith("user.") and not name.startswith(OUR_XATTRS)
