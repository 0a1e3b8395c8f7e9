"""Owns how a catalog comes to a PFS: everything that exists is told to the journal once, as if it had just been made.

Which PFS that is, its tier's uuid says (meta key 'pfs'). What lies only on another PFS would look empty: then nothing is changed.
Functions that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change, and the adoption begins anew.
"""

import stat
from collections import deque
from pathlib import Path

from ckptfs.catalog import journal
from ckptfs.catalog.database import Database
from ckptfs.errors import ConfigError
from ckptfs.model import ROOT

UNIDENTIFIED = "unidentified"
"""The uuid of a PFS on which we may not make a work area; once we may, it is the same one."""


def get_instance_id(db: Database) -> str:
    """What tells this catalog's temporary names from those of all others on the same PFS: 8 hex digits."""
    return str(db.value("SELECT value FROM meta WHERE key = 'instance'"))[:8]


def require_no_pfs(db: Database, state: Path) -> None:
    """Refuse to go on without the PFS that this catalog, in the directory `state`, belongs to. Raises ConfigError."""
    if db.value("SELECT 1 FROM meta WHERE key = 'pfs'") is not None:
        raise ConfigError(
            f"the files in {state} belong to a PFS, and none is configured",
            remedy="give pfs=DIRECTORY as before, or state=DIRECTORY with an empty one",
        )


def set_pfs(db: Database, uuid: str) -> bool:
    """Belong to the PFS `uuid` from now on; whether that is news. Raises ConfigError when files would be lost by it."""
    known = db.value("SELECT value FROM meta WHERE key = 'pfs'")
    if uuid in (known, UNIDENTIFIED) and known is not None:
        return False
    if known == UNIDENTIFIED:
        db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('pfs', ?)", uuid)
        return False
    with db.transaction():
        if known is not None and db.is_clustered:
            raise ConfigError(
                "the PFS that is configured is not that of the cluster",
                remedy="configure the same directory on all nodes, or another cluster",
            )
        if known is None and (db.is_clustered or not _has_unrecorded(db)):
            db.run("INSERT INTO meta (key, value) VALUES ('pfs', ?)", uuid)
            return False
        lost_files = db.value(
            "SELECT count(*) FROM published p JOIN inode i ON i.id = p.inode WHERE i.nlink > 0"
            " AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = i.content AND c.state = 1)"
        )
        if lost_files:
            raise ConfigError(
                f"{lost_files} files of this catalog lie only on another PFS than the one that is configured",
                remedy="configure the former PFS again and read these files once, or use another state directory",
            )
        for table in ("journal", "pfs_entry", "pfs_pending", "pfs_batch", "pfs_times", "published"):
            db.run(f"DELETE FROM {table}")
        insert_rows_for_tree(db, ROOT)
        db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('pfs', ?)", uuid)
    return True


def _has_unrecorded(db: Database) -> bool:
    """Whether anything exists that neither the journal nor the PFS knows: it was made while there was no PFS."""
    query = (
        "SELECT 1 FROM inode i WHERE i.id <> ? AND i.nlink > 0 AND NOT EXISTS (SELECT 1 FROM pfs_entry WHERE inode = i.id)"
        " AND NOT EXISTS (SELECT 1 FROM journal WHERE inode = i.id AND op = 'make') LIMIT 1"
    )
    return db.value(query, ROOT) is not None


def insert_rows_for_tree(db: Database, inode: int) -> int:
    """Tell the PFS anew of `inode` and all below it, as they now are, and forget that it showed them; how many rows that took.

    Files whose bytes are not on this node are left as they are: there is nothing to tell, and a visit finds out what became of them.
    """
    recorded: set[int] = set()
    count = 0
    for parent, name in db.rows("SELECT parent, name FROM entry WHERE child = ? ORDER BY cookie", inode):
        count += _insert_rows_for_name(db, parent, name, inode, recorded)
    todo = deque([inode])
    while todo:
        directory = todo.popleft()
        for name, child, mode in db.rows(
            "SELECT e.name, e.child, i.mode FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ? ORDER BY e.cookie", directory
        ):
            count += _insert_rows_for_name(db, directory, name, child, recorded)
            if stat.S_ISDIR(mode):
                todo.append(child)
    return count


def can_recreate(db: Database, inode: int) -> bool:
    """Whether this node has what it takes to make `inode` on a PFS again."""
    row = db.row("SELECT mode, content FROM inode WHERE id = ? AND nlink > 0", inode)
    if row is None:
        return False
    if not stat.S_ISREG(row[0]):
        return True
    if row[1] is None:
        return db.value("SELECT 1 FROM published WHERE inode = ?", inode) is None
    query = "SELECT 1 FROM content k JOIN copy c ON c.content = k.id AND c.state = 1 WHERE k.id = ? AND k.state IN (0, 1, 2) LIMIT 1"
    return db.value(query, row[1]) is not None


def _insert_rows_for_name(db: Database, parent: int, name: bytes, inode: int, recorded: set[int]) -> int:
    """The rows for one name: it is made, or linked when the inode has been told already."""
    if inode in recorded:
        journal.append(db, "link", inode, parent=parent, name=name)
        return 1
    if not can_recreate(db, inode):
        return 0
    recorded.add(inode)
    for table in ("pfs_entry", "pfs_pending", "published"):
        db.run(f"DELETE FROM {table} WHERE inode = ?", inode)
    journal.append(db, "make", inode, parent=parent, name=name)
    content = db.value("SELECT k.id FROM inode i JOIN content k ON k.id = i.content WHERE i.id = ? AND k.state IN (1, 2)", inode)
    if content is None:
        return 1
    journal.append(db, "content", inode, content=content)
    return 2
