"""Owns reading directories: what they hold, in the order of their cookies, and whether they hold anything.

A cookie belongs to an entry for as long as its name stays: a name that exists all the while that somebody reads the directory is
found exactly once, whatever comes and goes beside it.
Reads only: if we die here, nothing is lost.
"""

import contextlib
import errno
from collections.abc import Iterator

from ckptfs.catalog.database import Database
from ckptfs.catalog.rows import INODE_COLUMNS_JOINED, build_inode
from ckptfs.errors import CkptfsError, posix_error
from ckptfs.model import Entry, Inode

_SELECT_ENTRIES = (
    f"SELECT entry.cookie, entry.name, {INODE_COLUMNS_JOINED} FROM entry INDEXED BY entry_order JOIN inode ON inode.id = entry.child"
    " WHERE entry.parent=? AND entry.cookie>? ORDER BY entry.cookie"
)


class NotImported(CkptfsError):
    """The answer stands on the PFS: `directory` lies there and was not imported yet. Ask for a visit, then try again."""

    def __init__(self, directory: int) -> None:
        super().__init__(f"directory {directory} was not imported from the PFS yet")
        self.directory = directory


def iterate_entries(db: Database, directory: int, after: int = 0) -> Iterator[tuple[Entry, Inode]]:
    """The entries whose cookies are greater than `after`, with their inodes, in order. Stop early as you like; do not await in between."""
    with contextlib.closing(db.connection.execute(_SELECT_ENTRIES, (directory, after))) as rows:
        for row in rows:
            inode = build_inode(row[2:])
            yield Entry(row[0], directory, row[1], inode.id), inode


def require_empty(db: Database, directory: int, *, is_imported: bool) -> None:
    """Raise ENOTEMPTY when `directory` holds anything, Unvisited when that cannot be known yet."""
    if db.row("SELECT 1 FROM entry WHERE parent=? LIMIT 1", directory) is not None:
        raise posix_error(errno.ENOTEMPTY)
    if not is_imported:
        raise NotImported(directory)


def is_inside(db: Database, directory: int, ancestor: int) -> bool:
    """Whether `directory` is `ancestor` or lies somewhere below it."""
    found = db.row(
        "WITH RECURSIVE up(id) AS (SELECT ? UNION SELECT inode.parent FROM inode JOIN up ON inode.id = up.id WHERE inode.parent > 0)"
        " SELECT 1 FROM up WHERE id=? LIMIT 1",
        directory, ancestor,
    )  # fmt: skip
    return found is not None
