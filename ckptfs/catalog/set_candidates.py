"""The inodes that the tracker of checkpoint sets has to look at (table `set_candidate`).

A candidate is an inode that was sealed or got a name, so that a set may have become complete; or a file that the history names and that
lost a name, or whose set was pinned or unpinned, so that sets may have lost their protection. Its row is written in the transaction of
that change and stays until the tracker has done with it: it outlives mount and mover. Functions that change rows join the caller's
transaction.
"""

import time
from collections.abc import Iterable

from ckptfs.catalog.database import Database


def insert_candidates(db: Database, candidates: Iterable[int]) -> None:
    """Note that these inodes were sealed, or got or lost a name."""
    now = time.time_ns()
    db.run_each("INSERT OR REPLACE INTO set_candidate (inode, at_ns) VALUES (?, ?)", [(inode, now) for inode in candidates])


def list_candidates(db: Database, after: int, at_most: int) -> list[tuple[int, int]]:
    """Return (inode, at_ns) of candidates with greater numbers than `after`, in order."""
    rows = db.rows("SELECT inode, at_ns FROM set_candidate WHERE inode > ? ORDER BY inode LIMIT ?", after, at_most)
    return [(row[0], row[1]) for row in rows]


def delete_candidates(db: Database, done: Iterable[tuple[int, int]]) -> None:
    """Delete candidates that were not noted again meanwhile."""
    with db.transaction():
        db.run_each("DELETE FROM set_candidate WHERE inode = ? AND at_ns = ?", done)
