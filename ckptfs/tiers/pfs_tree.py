"""The directory tree of the PFS: walking, listing, opening files.

Directories are opened one by one from a descriptor of the root; paths are never joined and symlinks never followed. A directory that root
may not search is opened as its owner. `PfsTree` caches descriptors of directories for a short time, until `clear_cache` or `close`.

Hidden names are `.ckptfs` in the root (the work area) and names that begin with `.ckptfs.` (temporary names of write-back), but not
that of the history in the root. Hidden entries that are external, or were left by a dead node, are reported to the caller of a listing.

Every call may hang as long as the PFS does.
"""

import contextlib
import errno
import os
import re
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptfs import disk, libc, limits
from ckptfs.catalog import copies
from ckptfs.catalog.copies import FetchState
from ckptfs.catalog.database import Database
from ckptfs.errors import posix_error
from ckptfs.lifecycle import is_same_file
from ckptfs.model import HISTORY_NAME, PfsEntryStat, PublishedRow
from ckptfs.tiers import pfs_identity
from ckptfs.tiers.pfs_identity import WORK_DIRECTORY
from ckptfs.tiers.pfs_ownership import find_stat, get_owner, retry_as_owner, run_as_owner

disk.declare_labels("scan:root", "scan:walk", "scan:list", "scan:stat", "scan:readlink", "scan:xattrs")
disk.declare_labels("pfs:walk", "pfs:exchange", "pfs:open")

DirectoryPath = tuple[bytes, ...]
"""The names from the root down to a directory."""
CACHED_MAX = 128
CACHED_S = 1.0
HIDDEN_PREFIX = b".ckptfs."
_TEMPORARY = re.compile(rb"\.ckptfs\.[0-9a-f]{8}\.[0-9a-f]+\Z")
_PARKED = re.compile(rb"\.ckptfs\.parked\.([0-9a-f]{1,16})\Z")
_IN_WORK_AREA = re.compile(rb"(tier-id(\.[0-9a-f]+)?|contents(-[0-9a-f]+)?|island-[^/]+)\Z")
OUR_XATTRS = "user.ckptfs."
_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
REPLACED_ERRNOS = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP}
"""Errors of an open if the PFS shows something else than the catalog knows."""
_NO_XATTRS = {errno.EOPNOTSUPP, errno.ENODATA, errno.EPERM, errno.EACCES, errno.ENOENT}


def open_directory(root_fd: int, names: tuple[bytes, ...]) -> int:
    """Open the directory `names` below `root_fd`, without following symlinks. Raises OSError."""
    fd = retry_as_owner(lambda: os.open(b".", _DIRECTORY, dir_fd=root_fd), lambda: [get_owner(root_fd)])
    for name in names:
        with disk.closing(fd):
            child_fd = _open_entry("scan:walk", fd, name, _DIRECTORY)
        fd = child_fd
    return fd


def _open_entry(label: str, directory_fd: int, name: bytes, flags: int) -> int:
    """Open an entry of a directory, as one of the two owners if root is refused."""
    return run_as_owner(directory_fd, name, lambda: disk.open_file(label, name, flags, dir_fd=directory_fd))


def list_entries(directory_fd: int, *, is_root: bool, on_external: Callable[[bytes], None] = lambda name: None) -> Iterator[PfsEntryStat]:
    """Yield the entries of a directory without details; call `on_external` for external hidden ones."""
    with disk.act("scan:list", os.scandir, directory_fd) as entries:
        for entry in entries:
            name = os.fsencode(entry.name)
            if is_root and name == WORK_DIRECTORY:
                for external in _list_external_in_work_area(directory_fd):
                    on_external(external)
                continue
            if name.startswith(HIDDEN_PREFIX) and not (is_root and name == HISTORY_NAME):
                if not _TEMPORARY.match(name) and (parse_parked_name(name) is None or _is_abandoned(directory_fd, name)):
                    on_external(name)
                continue
            with contextlib.suppress(FileNotFoundError):
                yield stat_entry(directory_fd, name)


def parse_parked_name(name: bytes) -> int | None:
    """Return the inode of an entry that is parked under this temporary name; None for other names."""
    found = _PARKED.match(name)
    return None if found is None else int(found[1], 16)


def _is_abandoned(directory_fd: int, name: bytes) -> bool:
    """Return True if a parked entry is so old that a dead node must have left it."""
    try:
        return time.time_ns() - stat_entry(directory_fd, name).ctime_ns > limits.PARKED_KEEP_S * 1e9
    except OSError:
        return False


def _list_external_in_work_area(root_fd: int) -> list[bytes]:
    """Return external entries in the place of the work area, if it can be read."""
    try:
        with disk.closing(os.open(WORK_DIRECTORY, _DIRECTORY, dir_fd=root_fd)) as fd:
            names = sorted(os.fsencode(name) for name in os.listdir(fd))
    except NotADirectoryError:
        return [WORK_DIRECTORY]
    except OSError:
        return []
    return [WORK_DIRECTORY + b"/" + name for name in names if not _IN_WORK_AREA.match(name)]


def stat_entry(directory_fd: int, name: bytes) -> PfsEntryStat:
    """Call lstat for a name, as the owner of the directory if root may not. Raises OSError."""
    call = partial(disk.act, "scan:stat", os.stat, name, dir_fd=directory_fd, follow_symlinks=False)
    return _build_stat(name, retry_as_owner(call, lambda: [get_owner(directory_fd)]))


def stat_descriptor(fd: int) -> PfsEntryStat:
    """Call fstat for an open file or directory, whose name is left out."""
    return _build_stat(b"", os.fstat(fd))


def _build_stat(name: bytes, found: os.stat_result) -> PfsEntryStat:
    found = disk.bound_status(found)
    return PfsEntryStat(
        name, found.st_mode, found.st_uid, found.st_gid, found.st_rdev, found.st_nlink, found.st_size, disk.get_lasting_ino(found),
        found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns,
    )  # fmt: skip


def is_absent(directory_fd: int, name: bytes) -> bool:
    """Return True if no such name exists."""
    try:
        stat_entry(directory_fd, name)
    except FileNotFoundError:
        return True
    return False


def load_details(directory_fd: int, entry: PfsEntryStat) -> PfsEntryStat:
    """Return `entry` with the target of a symlink and the user xattrs. Raises FileNotFoundError."""
    path = b"/proc/self/fd/%d/%s" % (directory_fd, entry.name)

    def xattrs() -> tuple[tuple[bytes, bytes], ...]:
        names = [name for name in disk.act("scan:xattrs", os.listxattr, path, follow_symlinks=False) if _is_user_xattr(name)]
        return tuple((os.fsencode(name), os.getxattr(path, name, follow_symlinks=False)) for name in names)

    if stat.S_ISLNK(entry.mode):
        link = partial(disk.act, "scan:readlink", os.readlink, entry.name, dir_fd=directory_fd)
        return replace(entry, target=retry_as_owner(link, lambda: [get_owner(directory_fd)]))
    if not (entry.is_file or entry.is_directory):
        return entry
    try:
        return replace(entry, xattrs=retry_as_owner(xattrs, lambda: [(entry.uid, entry.gid), get_owner(directory_fd)]))
    except OSError as failure:
        if failure.errno in _NO_XATTRS:
            return entry
        raise


def _is_user_xattr(name: str) -> bool:
    return name.startswith("user.") and not name.startswith(OUR_XATTRS)


class DirectoryMissing(FileNotFoundError):
    """A directory on the way is missing or not a directory: `names` leads to the first such."""

    def __init__(self, names: DirectoryPath) -> None:
        super().__init__(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(b"/".join(names)))
        self.names = names


class DirectoryReplaced(OSError):
    """There is another directory under a name than the one that is expected. `remedy` says what helps."""

    remedy = "put the directory back that another program has moved or removed"

    def __init__(self, names: DirectoryPath) -> None:
        super().__init__(errno.ESTALE, "the directory was replaced", os.fsdecode(b"/".join(names)))


class PfsTree:
    """The PFS below one directory. Belongs to one thread at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root_fd = -1
        self._cached: dict[DirectoryPath, tuple[int, float]] = {}
        self._forgotten: deque[int] = deque()
        self._expected: dict[DirectoryPath, int] = {}

    def set_expected_inodes(self, inodes: dict[DirectoryPath, int]) -> None:
        """Set the inode numbers (st_ino) that these directories must have."""
        self._expected = inodes

    def expect_any(self, names: DirectoryPath) -> None:
        """Let this directory have any inode number: the batch in hand replaces it."""
        self._expected.pop(names, None)

    def reopen_root(self, db: Database) -> None:
        """Reopen the root, before each batch. Raises as `open_adopted_root` does."""
        fd = pfs_identity.open_adopted_root(db, self.root)
        if self._root_fd >= 0 and not _is_same(self._root_fd, fd):
            self.clear_cache()
        self._close_forgotten()
        old, self._root_fd = self._root_fd, fd
        if old >= 0:
            os.close(old)

    def get_directory(self, names: DirectoryPath) -> int:
        """Return a descriptor for one action. Raises DirectoryMissing, DirectoryReplaced."""
        if not names:
            return self._root_fd
        fd = self._get_cached(names)
        expected = self._expected.get(names)
        if expected is not None and disk.get_lasting_ino(disk.fstat(fd)) not in (0, expected):
            self.clear_cache()
            raise DirectoryReplaced(names)
        return fd

    def _get_cached(self, names: DirectoryPath) -> int:
        oldest_s = time.monotonic() - CACHED_S
        fresh = (depth for depth in range(len(names), 0, -1) if names[:depth] in self._cached and self._cached[names[:depth]][1] > oldest_s)
        cached_depth = next(fresh, 0)
        fd = self._cached[names[:cached_depth]][0] if cached_depth else self._root_fd
        for depth in range(cached_depth, len(names)):
            fd = self._open(fd, names[: depth + 1], close_parent=depth > cached_depth)
        if cached_depth < len(names):
            self._cache(names, fd)
        return fd

    def _open(self, parent_fd: int, names: DirectoryPath, *, close_parent: bool) -> int:
        """Open the last of `names` in `parent_fd`."""
        try:
            return _open_entry("pfs:walk", parent_fd, names[-1], _DIRECTORY)
        except OSError as failure:
            if failure.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                raise DirectoryMissing(names) from failure
            raise
        finally:
            if close_parent:
                os.close(parent_fd)

    def _cache(self, names: DirectoryPath, fd: int) -> None:
        if names in self._cached:
            self._forget(names)
        while len(self._cached) >= CACHED_MAX:
            self._forget(next(iter(self._cached)))
        self._cached[names] = (fd, time.monotonic())

    def _forget(self, names: DirectoryPath) -> None:
        """Take a descriptor out of the cache; the action under way may use it for a while."""
        self._forgotten.append(self._cached.pop(names)[0])
        self._close_forgotten(CACHED_MAX)

    def _close_forgotten(self, kept: int = 0) -> None:
        while len(self._forgotten) > kept:
            os.close(self._forgotten.popleft())

    def clear_cache(self) -> None:
        """Forget cached descriptors, after a directory was or may have been moved."""
        for names in list(self._cached):
            self._forget(names)

    def close(self) -> None:
        """Close all descriptors, until `reopen_root`."""
        self.clear_cache()
        self._close_forgotten()
        if self._root_fd >= 0:
            os.close(self._root_fd)
        self._root_fd = -1


def _is_same(old_fd: int, fd: int) -> bool:
    """Return whether two descriptors lead to one directory.

    The filesystem of the old one may be dead, and mounted again.
    """
    try:
        return os.path.sameopenfile(old_fd, fd)
    except OSError:
        return False


def exchange(directory: int, name: bytes, new_directory: int, new_name: bytes) -> None:
    """Call renameat2(RENAME_EXCHANGE). Raises EINVAL or ENOSYS if the filesystem cannot do it."""
    disk.act("pfs:exchange", libc.call, "renameat2", directory, name, new_directory, new_name, _RENAME_EXCHANGE)


def rename_to_free_name(directory: int, name: bytes, new_directory: int, new_name: bytes) -> None:
    """Rename an entry to a name that nothing has. Raises EEXIST.

    A filesystem without RENAME_NOREPLACE may replace what gets the name at the same moment.
    """
    try:
        libc.call("renameat2", directory, name, new_directory, new_name, _RENAME_NOREPLACE)
    except OSError as failure:
        if failure.errno not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:
            raise
        if find_stat(new_directory, new_name) is not None:
            raise posix_error(errno.EEXIST) from failure
        os.rename(name, new_name, src_dir_fd=directory, dst_dir_fd=new_directory)


def open_inode(db: Database, pfs: Path, inode: int) -> int:
    """Open the file on the PFS that `inode` shows. May hang: call it in a worker thread.

    Raises ESTALE if the PFS shows another file or another state than the catalog; a scan of its directory resolves that.
    """
    known = copies.load_fetch_state(db, inode)
    if known is None:
        raise posix_error(errno.ESTALE)
    return open_published(pfs, known)


def open_published(pfs: Path, known: FetchState) -> int:
    """Open the file of a loaded state on the PFS, without the catalog. Raises OSError, TierUnavailable."""
    if known.published is None:
        raise posix_error(errno.ESTALE)
    if not known.pfs_names:
        raise posix_error(errno.ENOENT, "the file is not on the PFS")
    with disk.closing(pfs_identity.open_checked(pfs, lambda fd: pfs_identity.require_same(fd, pfs, known.pfs_identity))) as root_fd:
        directory_fd = open_directory(root_fd, known.pfs_names[:-1])
    with disk.closing(directory_fd):
        # O_NONBLOCK: the open of a fifo must not hang.
        fd = _open_entry("pfs:open", directory_fd, known.pfs_names[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with disk.closing_on_failure(fd):
        if not matches_catalog(fd, known.published):
            raise posix_error(errno.ESTALE, "the file on the PFS was changed externally")
    return fd


def matches_catalog(fd: int, known: PublishedRow) -> bool:
    """Return True if an open file is in the state that the catalog records."""
    found = disk.fstat(fd)
    return is_same_file((known.size, known.mtime_ns, known.pfs_inode), (found.st_size, found.st_mtime_ns, disk.get_lasting_ino(found)))
