"""Owns the table `journal`: what the PFS must be told, in order (P6). Appended in the transaction of the change it records.

Ops: 'make' (a directory, symlink, fifo, socket or device under parent/name; a regular file too, which appears on the PFS with its
first content), 'link' (another name), 'unlink', 'rmdir', 'rename' (parent/name to new_parent/new_name, whatever was there is
replaced), 'exchange', 'attributes' (mode, owner, times, xattrs of an inode, as they are when it is applied), 'content' (a content was
closed), 'synced' (an open file was fsynced).
Write-back takes rows from the head, and deletes them in the transaction that records what the PFS shows then; it passes over those of
files that the PFS refuses.
If we die here: a change and its row are there together, or neither is.

Owns how a catalog comes to a PFS: everything that exists is told to the journal once, as if it had just been made.

Which PFS that is, its tier's uuid says (meta key 'pfs'). What lies only on another PFS would look empty: then nothing is changed.
Functions that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change, and the adoption begins anew.
"""

import json
import stat
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ckptfs.catalog.database import Database
from ckptfs.errors import ConfigError
from ckptfs.model import ROOT

_COLUMNS = "seq, op, inode, parent, name, new_parent, new_name, content, mode, at_ns, origin"


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One change. `mode` is the inode's st_mode when it happened, 0 if it was gone even then; `origin` the dead node whose row it was."""

    seq: int
    op: str
    inode: int
    parent: int = 0
    name: bytes | None = None
    new_parent: int = 0
    new_name: bytes | None = None
    content: int | None = None
    mode: int = 0
    at_ns: int = 0
    origin: int = 0


def append(
    db: Database,
    op: str,
    inode: int,
    *,
    parent: int = 0,
    name: bytes | None = None,
    new_parent: int = 0,
    new_name: bytes | None = None,
    content: int | None = None,
) -> None:
    """Record a change for the PFS. Call it inside the change's own transaction; without a PFS it does nothing."""
    if not db.is_journalled:
        return
    db.run(
        "INSERT INTO journal (op, inode, parent, name, new_parent, new_name, content, at_ns, mode)"
        " VALUES (?1,?2,?3,?4,?5,?6,?7,?8, coalesce((SELECT mode FROM inode WHERE id = ?2), 0))",
        op, inode, parent, name, new_parent, new_name, content, time.time_ns(),
    )  # fmt: skip


def get_last_seq(db: Database, inode: int) -> int:
    """The last row about `inode`; 0 when the PFS has been told everything."""
    return int(db.value("SELECT max(seq) FROM journal WHERE inode = ?", inode) or 0)


def has_pending(db: Database, inode: int, up_to: int | None = None) -> bool:
    """Whether something about `inode` is still to be told to the PFS, up to the row `up_to`; None: anything at all."""
    bound = 2**63 - 1 if up_to is None else up_to
    return db.value("SELECT 1 FROM journal WHERE inode = ? AND seq <= ? LIMIT 1", inode, bound) is not None


def find_last_in_directory(db: Database, directory: int) -> tuple[int, int]:
    """(row, inode that it is about) of the last row about a name in `directory`; zeros when the PFS has been told everything."""
    found = db.row("SELECT seq, inode FROM journal WHERE parent = ?1 OR new_parent = ?1 ORDER BY seq DESC LIMIT 1", directory)
    return (0, 0) if found is None else (found[0], found[1])


def list_oldest(db: Database, at_most: int, after: int = 0) -> list[JournalRow]:
    """The oldest rows after the row `after`, in order."""
    return [JournalRow(*row) for row in db.rows(f"SELECT {_COLUMNS} FROM journal WHERE seq > ? ORDER BY seq LIMIT ?", after, at_most)]


def get(db: Database, seq: int) -> JournalRow | None:
    """One row."""
    row = db.row(f"SELECT {_COLUMNS} FROM journal WHERE seq = ?", seq)
    return None if row is None else JournalRow(*row)


def insert_taken_over(db: Database, rows: Iterable[JournalRow]) -> list[JournalRow]:
    """Append rows of another node, which is dead; they as they are here. Joins the caller's transaction."""
    taken = []
    for row in rows:
        seq = db.insert(
            f"INSERT INTO journal ({_COLUMNS}) VALUES (NULL,?,?,?,?,?,?,?,?,?,?)",
            row.op, row.inode, row.parent, row.name, row.new_parent, row.new_name, row.content, row.mode, row.at_ns, row.origin,
        )  # fmt: skip
        taken.append(replace(row, seq=seq))
    return taken


def delete_rows(db: Database, rows: Iterable[JournalRow]) -> None:
    """Other nodes have these in hand now, or nobody needs them."""
    with db.transaction():
        for row in rows:
            db.run("DELETE FROM journal WHERE seq = ?", row.seq)


def insert_missing(db: Database, at_most: int) -> int:
    """A row for each sealed content of this node that its file holds, the PFS does not show, and no row is about; how many."""
    with db.transaction():
        found = db.rows(
            "SELECT c.inode, c.id FROM content c JOIN inode i ON i.id = c.inode AND i.content = c.id AND i.nlink > 0"
            " WHERE c.remote = 0 AND c.state = 2 AND EXISTS (SELECT 1 FROM copy WHERE content = c.id AND copy.state = 1)"
            " AND NOT EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = c.inode AND p.generation = c.generation AND p.complete = 1)"
            " AND NOT EXISTS (SELECT 1 FROM journal j WHERE j.inode = c.inode AND j.content = c.id) ORDER BY c.id LIMIT ?",
            at_most,
        )
        for inode, content in found:
            append(db, "content", inode, content=content)
    return len(found)


def delete_reverted(db: Database, instance: str, names: Iterable[tuple[int, bytes]], inodes: Iterable[int]) -> None:
    """Changes were taken back before other nodes were told of them: removals of these names, and all that was done to these inodes, which
    nobody else ever knew.
    """
    uncommitted = (
        " AND EXISTS (SELECT 1 FROM dirty_key t WHERE t.kind = 'j' AND t.number = (SELECT value FROM meta WHERE key = 'number')"
        " AND t.name = CAST(? || printf('-%016x', seq) AS BLOB))"
    )
    for parent, name in names:
        db.run(f"DELETE FROM journal WHERE op IN ('unlink', 'rmdir') AND parent = ? AND name = ?{uncommitted}", parent, name, instance)
    for inode in inodes:
        db.run(f"DELETE FROM journal WHERE inode = ?{uncommitted}", inode, instance)


def is_unlinked_later(db: Database, row: JournalRow, name: tuple[int, bytes]) -> bool:
    """Whether a later row of this journal takes that name away from the same inode."""
    later = (
        "SELECT 1 FROM journal WHERE inode = ? AND seq > ? AND op IN ('unlink', 'rmdir', 'rename', 'exchange')"
        " AND ((parent = ? AND name = ?) OR (op = 'exchange' AND new_parent = ? AND new_name = ?)) LIMIT 1"
    )
    return db.value(later, row.inode, row.seq, *name, *name) is not None


def is_named_later(db: Database, row: JournalRow, name: tuple[int, bytes]) -> bool:
    """Whether a later row of this journal gives the same inode that name."""
    later = (
        "SELECT 1 FROM journal WHERE inode = ? AND seq > ?"
        " AND ((op IN ('make', 'link') AND parent = ? AND name = ?) OR (new_parent = ? AND new_name = ?)) LIMIT 1"
    )
    return db.value(later, row.inode, row.seq, *name, *name) is not None


def has_later_row(db: Database, inode: int, after: int) -> bool:
    """Whether a row after that one is about this inode."""
    return db.value("SELECT 1 FROM journal WHERE inode = ? AND seq > ? LIMIT 1", inode, after) is not None


def has_local_copy(db: Database, content: int) -> bool:
    """Whether a good copy of a content lies on this node."""
    return db.value("SELECT 1 FROM copy WHERE content = ? AND state = 1 LIMIT 1", content) is not None


def is_repeated_later(db: Database, row: JournalRow) -> bool:
    """Whether a later row says the same or more: the same content closed or fsynced again, the same inode's attributes."""
    if row.op == "attributes":
        later = "SELECT 1 FROM journal WHERE inode = ? AND seq > ? AND op = 'attributes' LIMIT 1"
        return db.value(later, row.inode, row.seq) is not None
    ops = "('content')" if row.op == "content" else "('content', 'synced')"
    later = f"SELECT 1 FROM journal WHERE inode = ? AND seq > ? AND op IN {ops} AND content = ? LIMIT 1"
    return db.value(later, row.inode, row.seq, row.content) is not None


def get_seal_wait(db: Database, row: JournalRow) -> tuple[float, bool]:
    """How long a row 'content' has been waiting for its seal; and whether it has been put at the journal's end for that before."""
    closed_ns: int = db.value("SELECT closed_ns FROM content WHERE id = ?", row.content) or 0
    return (time.time_ns() - max(closed_ns, row.at_ns)) / 1e9, row.at_ns - closed_ns > 1_000_000_000


def delete_applied(db: Database, after: int, up_to: int, kept: Iterable[int] = ()) -> None:
    """The PFS was told everything after the row `after`, up to this one, but for the rows `kept`. Joins the caller's transaction."""
    done = "DELETE FROM journal WHERE seq > ? AND seq <= ? AND seq NOT IN (SELECT value FROM json_each(?))"
    db.run(done, after, up_to, json.dumps([*kept]))


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
            "SELECT count(*) FROM pfs_file p JOIN inode i ON i.id = p.inode WHERE i.nlink > 0"
            " AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = i.content AND c.state = 1)"
        )
        if lost_files:
            raise ConfigError(
                f"{lost_files} files of this catalog lie only on another PFS than the one that is configured",
                remedy="configure the former PFS again and read these files once, or use another state directory",
            )
        for table in ("journal", "pfs_entry", "pfs_pending", "pfs_batch", "pfs_stale_times", "pfs_file"):
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
        return db.value("SELECT 1 FROM pfs_file WHERE inode = ?", inode) is None
    query = "SELECT 1 FROM content k JOIN copy c ON c.content = k.id AND c.state = 1 WHERE k.id = ? AND k.state IN (0, 1, 2) LIMIT 1"
    return db.value(query, row[1]) is not None


def _insert_rows_for_name(db: Database, parent: int, name: bytes, inode: int, recorded: set[int]) -> int:
    """The rows for one name: it is made, or linked when the inode has been told already."""
    if inode in recorded:
        append(db, "link", inode, parent=parent, name=name)
        return 1
    if not can_recreate(db, inode):
        return 0
    recorded.add(inode)
    for table in ("pfs_entry", "pfs_pending", "pfs_file"):
        db.run(f"DELETE FROM {table} WHERE inode = ?", inode)
    append(db, "make", inode, parent=parent, name=name)
    content = db.value("SELECT k.id FROM inode i JOIN content k ON k.id = i.content WHERE i.id = ? AND k.state IN (1, 2)", inode)
    if content is None:
        return 1
    append(db, "content", inode, content=content)
    return 2
