"""Owns where a thing is on the PFS: the walk up the table `pfs_entry`, which holds what the PFS shows now. Reads only.

Between an act of write-back on the PFS and its commit the PFS is ahead of the catalog, so whoever walks these names down must look
at what it reached (`identity`, and table `published` for files).
If we die here: nothing was changed.
"""

from typing import Any

from ckptfs.catalog.database import Database
from ckptfs.model import ROOT

_SELECT_MOVES = (
    "SELECT 1 FROM journal WHERE op IN ('rename', 'exchange', 'rmdir')"
    " AND ((parent = ? AND name = ?) OR (new_parent = ? AND new_name = ?)) LIMIT 1"
)


def find_path(db: Database, inode: int) -> tuple[bytes, ...] | None:
    """The names from the PFS's root down to `inode` as the PFS shows them now; None where it shows no such thing."""
    names: list[bytes] = []
    with db.read_transaction():
        while inode != ROOT:
            row = db.row("SELECT parent, name FROM pfs_entry WHERE inode = ? LIMIT 1", inode)
            if row is None or len(names) > 4096:
                return None
            names.append(bytes(row[1]))
            inode = row[0]
    return tuple(reversed(names))


def get_parent(db: Database, inode: int) -> int:
    """The directory that holds `inode` on the PFS; the root where it shows no such thing."""
    return int(db.value("SELECT parent FROM pfs_entry WHERE inode = ? LIMIT 1", inode) or ROOT)


def find_pfs_inode(db: Database, inode: int) -> int | None:
    """st_ino of a directory on the PFS as it was last seen; None when it was not seen yet."""
    found: Any = db.value("SELECT seen_ino FROM pfs_entry WHERE inode = ? LIMIT 1", inode)
    return None if found is None else int(found)


def is_path_changing(db: Database, inode: int) -> bool:
    """Whether write-back may be moving one of the directories on the way to `inode` on the PFS just now."""
    while inode != ROOT:
        row = db.row("SELECT parent, name FROM pfs_entry WHERE inode = ? LIMIT 1", inode)
        if row is None:
            return True
        if db.value(_SELECT_MOVES, row[0], row[1], row[0], row[1]) is not None:
            return True
        inode = row[0]
    return False
