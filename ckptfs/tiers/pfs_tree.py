"""Owns how write-back reaches names on the PFS: directories by descriptors walked down from the root, never by joined paths.

Symlinks are never followed. Descriptors of directories are kept for a short while; whoever moves a directory calls `forget`. A directory
that root may not search is searched as its owner.
If we die here: the kernel closes the descriptors.
"""

import ctypes
import errno
import os
import time
from pathlib import Path

from ckptfs import disk
from ckptfs.errors import posix_error
from ckptfs.tiers import acting, pfs_listing

disk.declare_labels("pfs:walk", "pfs:exchange")

CACHED_MAX = 128
CACHED_S = 1.0
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)

DirectoryPath = tuple[bytes, ...]
"""The names from the root down to a directory."""


class DirectoryMissing(FileNotFoundError):
    """A directory on the way is not there, or is none: `names` leads to the first such."""

    def __init__(self, names: DirectoryPath) -> None:
        super().__init__(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(b"/".join(names)))
        self.names = names


class PfsTree:
    """The PFS below one directory. Belongs to one thread at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._root_fd = -1
        self._cached: dict[DirectoryPath, tuple[int, float]] = {}
        self._expected: dict[DirectoryPath, int] = {}

    def set_expected_inodes(self, inodes: dict[DirectoryPath, int]) -> None:
        """From now on these directories have these numbers (st_ino): others under their names are not taken for them."""
        self._expected = inodes

    def reopen_root(self, expected_uuid: str | None) -> None:
        """Open the root anew; call it before each batch. Raises TierUnavailable when it is not the directory that the catalog knows."""
        fd = pfs_listing.open_root(self.root, expected_uuid)
        if self._root_fd >= 0 and not os.path.sameopenfile(fd, self._root_fd):
            self.clear_cache()
        old, self._root_fd = self._root_fd, fd
        if old >= 0:
            os.close(old)

    def get_directory(self, names: DirectoryPath) -> int:
        """A descriptor of a directory, which stays ours: use it at once. Raises NotThere, and ESTALE for another one than is expected."""
        if not names:
            return self._root_fd
        fd = self._get_cached(names)
        expected = self._expected.get(names)
        if expected is not None and os.fstat(fd).st_ino != expected:
            self.clear_cache()
            raise OSError(errno.ESTALE, "it is another directory now", os.fsdecode(b"/".join(names)))
        return fd

    def _get_cached(self, names: DirectoryPath) -> int:
        now = time.monotonic()
        cached = self._cached.get(names)
        if cached is not None and now - cached[1] < CACHED_S:
            return cached[0]
        above = next((depth for depth in range(len(names) - 1, 0, -1) if self._is_cached(names[:depth], now)), 0)
        fd = self._cached[names[:above]][0] if above else self._root_fd
        for depth in range(above, len(names)):
            fd = self._open(fd, names[: depth + 1], close_parent=depth > above)
        self._cache(names, fd)
        return fd

    def _is_cached(self, names: DirectoryPath, now: float) -> bool:
        cached = self._cached.get(names)
        return cached is not None and now - cached[1] < CACHED_S

    def _open(self, parent_fd: int, names: DirectoryPath, *, close_parent: bool) -> int:
        """A descriptor of the last of `names` in `above`, which is closed if it is our `own`."""

        def owners() -> list[acting.Owner]:
            found = os.stat(names[-1], dir_fd=parent_fd, follow_symlinks=False)
            return [(found.st_uid, found.st_gid)]

        try:
            return acting.retry_as_owner(lambda: disk.open_file("pfs:walk", names[-1], _DIRECTORY, dir_fd=parent_fd), owners)
        except OSError as failure:
            if failure.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                raise DirectoryMissing(names) from failure
            raise
        finally:
            if close_parent:
                os.close(parent_fd)

    def _cache(self, names: DirectoryPath, fd: int) -> None:
        old = self._cached.pop(names, None)
        if old is not None:
            os.close(old[0])
        while len(self._cached) >= CACHED_MAX:
            os.close(self._cached.pop(next(iter(self._cached)))[0])
        self._cached[names] = (fd, time.monotonic())

    def clear_cache(self) -> None:
        """A directory was moved, or may have been: walk anew."""
        for fd, _ in self._cached.values():
            os.close(fd)
        self._cached.clear()

    def close(self) -> None:
        """Give all descriptors back."""
        self.clear_cache()
        if self._root_fd >= 0:
            os.close(self._root_fd)
            self._root_fd = -1


def find_stat(directory: int, name: bytes) -> os.stat_result | None:
    """lstat; None when there is no such name."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None


def exchange(directory: int, name: bytes, new_directory: int, new_name: bytes) -> None:
    """renameat2(RENAME_EXCHANGE). Raises EINVAL or ENOSYS where the filesystem cannot."""
    disk.act("pfs:exchange", _rename2, directory, name, new_directory, new_name, _RENAME_EXCHANGE)


def _rename2(directory: int, name: bytes, new_directory: int, new_name: bytes, flags: int) -> None:
    try:
        call = _libc.renameat2
    except AttributeError as failure:
        raise posix_error(errno.ENOSYS) from failure
    if call(directory, name, new_directory, new_name, ctypes.c_uint(flags)) != 0:
        raise posix_error(ctypes.get_errno())


def sync_filesystem(fd: int) -> None:
    """syncfs(2): everything that was written to this filesystem is there to stay."""
    if _libc.syncfs(fd) != 0:
        raise posix_error(ctypes.get_errno())
