"""Paths in a catalog, for tests that have no mount to walk through."""

from ckptfs.catalog.database import Database
from ckptfs.errors import posix_error
from ckptfs.model import ROOT


def resolve(db: Database, path: bytes) -> int:
    """The inode that `path`, relative to the mount, names; symlinks are not followed. Raises ENOENT."""
    found = ROOT
    for name in filter(None, path.split(b"/")):
        child = db.value("SELECT child FROM entry WHERE parent = ? AND name = ?", found, name)
        if child is None:
            raise posix_error(2)
        found = int(child)
    return found
