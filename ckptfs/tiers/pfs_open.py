"""Owns how a file on the PFS is found by its inode: walked down from the root by descriptors, and looked at before it is believed.

If we die here: nothing was changed.
"""

import errno
import os
from pathlib import Path

from ckptfs import disk
from ckptfs.catalog import fetching, pfs_paths, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.fetching import PublishedFile
from ckptfs.errors import posix_error
from ckptfs.lifecycle import is_same_file
from ckptfs.model import Tier
from ckptfs.tiers import acting, pfs_listing

disk.declare_labels("pfs:open")


def open_inode(db: Database, pfs: Path, inode: int, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the file on the PFS that `inode` shows. May hang: call it in a worker thread.

    Raises ESTALE when the PFS shows another file, or another state of it, than the catalog knows: ask for a visit of its directory.
    """
    known = fetching.load_fetch_state(db, inode)
    if known is None or known.published is None:
        raise posix_error(errno.ESTALE)
    fd = open_unchecked(db, pfs, inode, flags)
    try:
        if not matches_catalog(fd, known.published):
            raise posix_error(errno.ESTALE, "the file on the PFS was changed by somebody else")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_unchecked(db: Database, pfs: Path, inode: int, flags: int = os.O_RDONLY) -> int:
    """A descriptor of what the PFS shows now where `inode` was last known to be. Raises OSError and TierUnavailable."""
    names = pfs_paths.find_path(db, inode)
    if not names:
        raise posix_error(errno.ENOENT, "the PFS shows no such file")
    root_fd = pfs_listing.open_root(pfs, settling.get_tier_uuid(db, Tier.PFS))
    try:
        directory_fd = pfs_listing.open_directory(root_fd, names[:-1])
    finally:
        os.close(root_fd)
    try:
        return _open_file(directory_fd, names[-1], flags)
    finally:
        os.close(directory_fd)


def _open_file(directory_fd: int, name: bytes, flags: int) -> int:
    """As the file's owner where root is refused. O_NONBLOCK: a fifo of a stranger's must not hold us."""

    def owners() -> list[acting.Owner]:
        found, parent = pfs_listing.stat_entry(directory_fd, name), pfs_listing.stat_descriptor(directory_fd)
        return [(found.uid, found.gid), (parent.uid, parent.gid)]

    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    return acting.retry_as_owner(lambda: disk.open_file("pfs:open", name, flags, dir_fd=directory_fd), owners)


def matches_catalog(fd: int, known: PublishedFile) -> bool:
    """Whether an open file is in the state that the catalog knows."""
    found = os.fstat(fd)
    return is_same_file((known.size, known.mtime_ns, known.pfs_inode), (found.st_size, found.st_mtime_ns, found.st_ino))
