"""The changes that the PFS does not have yet, in their order (P6): table `journal`.

Ops: `make` (a directory, symlink, fifo, socket or device under parent/name; a regular file too, which appears on the PFS with its first
content), `link` (another name), `unlink`, `rmdir`, `rename` (parent/name to new_parent/new_name, which is replaced if it exists),
`exchange`, `attributes` (mode, owner, times and xattrs of an inode, as they are when the row is applied), `content` (a content was
closed), `synced` (an open file was fsynced), `settle` (write-back's own: the names of an inode on the PFS differ from the journal's, since
the PFS refused a change; see `pfs_pending`).

Write-back takes rows from the head, and deletes them in the transaction that records what the PFS shows then. Rows of files that the PFS
refuses stay, and write-back skips them. When a catalog gets its first PFS, everything that exists is recorded once, as if it had just been
made. The uuid of the PFS tier is the meta key `pfs`. If files are only on another PFS, nothing is changed: they would look empty.

Crash safety: a change and its row are committed together. An adoption that was interrupted begins again.
"""

import json
import stat
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from ckptfs.catalog import identity
from ckptfs.catalog.content_rows import IS_HELD, UNPUBLISHED
from ckptfs.catalog.database import Database
from ckptfs.errors import ConfigError
from ckptfs.model import ROOT

_COLUMNS = "seq, op, inode, parent, name, new_parent, new_name, content, mode, at_ns, origin"


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One change. `mode`: st_mode then, 0 for a deleted inode; `origin`: the other node that made it."""

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

    @property
    def names(self) -> list[tuple[int, bytes]]:
        """Return the names that the row is about: (directory, name in it)."""
        found = [] if self.name is None else [(self.parent, self.name)]
        return found if self.new_name is None else [*found, (self.new_parent, self.new_name)]


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
    origin: int = 0,
) -> None:
    """Record a change in its own transaction, unless the PFS must not get it. `origin`: its writer."""
    if not db.is_journalled:
        return
    db.run(
        "INSERT INTO journal (op, inode, parent, name, new_parent, new_name, content, at_ns, origin, mode)"
        " SELECT ?1,?2,?3,?4,?5,?6,?7,?8,?9, coalesce((SELECT mode FROM inode WHERE id = ?2), 0)"
        f" WHERE NOT {IS_HELD.format('?2')}",
        op, inode, parent, name, new_parent, new_name, content, time.time_ns(), origin,
    )  # fmt: skip


def get_last_seq(db: Database, inode: int) -> int:
    """Return the last row about `inode`; 0 if there is none."""
    return int(db.value("SELECT max(seq) FROM journal WHERE inode = ?", inode) or 0)


def has_pending(db: Database, inode: int, up_to: int) -> bool:
    """Return True if a row about `inode` is left, up to the row `up_to`."""
    return db.value("SELECT 1 FROM journal WHERE inode = ? AND seq <= ? LIMIT 1", inode, up_to) is not None


def find_last_in_directory(db: Database, directory: int) -> tuple[int, int]:
    """Return (row, its inode) of the last row about a name in `directory`; zeros if there is none."""
    found = db.row("SELECT seq, inode FROM journal WHERE parent = ?1 OR new_parent = ?1 ORDER BY seq DESC LIMIT 1", directory)
    return (0, 0) if found is None else (found[0], found[1])


def list_oldest(db: Database, at_most: int, after: int = 0) -> list[JournalRow]:
    """Return the oldest rows after the row `after`, in order. `at_most` -1: all."""
    return [JournalRow(*row) for row in db.rows(f"SELECT {_COLUMNS} FROM journal WHERE seq > ? ORDER BY seq LIMIT ?", after, at_most)]


def has_removal(db: Database) -> bool:
    """Return True if a row may remove or replace something."""
    return db.value("SELECT 1 FROM journal WHERE op IN ('unlink', 'rmdir', 'rename', 'exchange', 'settle') LIMIT 1") is not None


def list_by_seq(db: Database, seqs: Iterable[int]) -> list[JournalRow]:
    """Return these rows, as far as they are left, in order."""
    found = f"SELECT {_COLUMNS} FROM journal WHERE seq IN (SELECT value FROM json_each(?)) ORDER BY seq"
    return [JournalRow(*row) for row in db.rows(found, json.dumps([*seqs]))]


def list_other_seqs(db: Database, after: int, up_to: int, seqs: Iterable[int]) -> list[int]:
    """Return the rows after `after` up to `up_to` that are not among `seqs`."""
    others = "SELECT seq FROM journal WHERE seq > ? AND seq <= ? AND seq NOT IN (SELECT value FROM json_each(?))"
    return db.column(others, after, up_to, json.dumps([*seqs]))


def get(db: Database, seq: int) -> JournalRow | None:
    """Return one row. Returns None if it is gone."""
    return next(iter(list_by_seq(db, [seq])), None)


def insert_taken_over(db: Database, rows: Iterable[JournalRow]) -> list[JournalRow]:
    """Append rows of a dead node. Return them with their numbers on this node."""
    taken = []
    for row in rows:
        seq = db.insert(f"INSERT INTO journal ({_COLUMNS}) VALUES (NULL,?,?,?,?,?,?,?,?,?,?)", *astuple(row)[1:])
        taken.append(replace(row, seq=seq))
    return taken


def delete_rows(db: Database, rows: Iterable[JournalRow]) -> None:
    """Delete rows that other nodes have taken over or that are needed no more."""
    db.change("DELETE FROM journal WHERE seq IN (SELECT value FROM json_each(?))", json.dumps([row.seq for row in rows]))


def insert_missing(db: Database, at_most: int) -> int:
    """Append a row for up to `at_most` contents that the PFS will not get otherwise. Return how many."""
    with db.transaction():
        found = db.rows(
            f"SELECT c.inode, c.id FROM {UNPUBLISHED}"
            " AND NOT EXISTS (SELECT 1 FROM journal j WHERE j.inode = c.inode AND j.content = c.id) ORDER BY c.id LIMIT ?",
            at_most,
        )
        for inode, content in found:
            append(db, "content", inode, content=content)
    return len(found)


_IS_UNCOMMITTED = (
    "EXISTS (SELECT 1 FROM dirty_key t WHERE t.kind = 'j' AND t.number = (SELECT value FROM meta WHERE key = 'number')"
    " AND t.name = CAST(? || printf('-%016x', seq) AS BLOB))"
)
"""Whether the shared namespace lacks a row. Takes the instance id."""


def get_committed_end(db: Database) -> int:
    """Return the number of the last row that write-back can reach if nothing is committed any more."""
    first = db.value(f"SELECT min(seq) FROM journal WHERE {_IS_UNCOMMITTED}", get_instance_id(db))
    return int(db.value("SELECT coalesce(max(seq), 0) FROM journal") if first is None else first - 1)


def delete_reverted(db: Database, instance: str, names: Iterable[tuple[int, bytes]], inodes: Iterable[int]) -> None:
    """Delete unpublished rows of reverted changes: removals of `names`, and all of `inodes`."""
    for parent, name in names:
        db.run(
            f"DELETE FROM journal WHERE op IN ('unlink', 'rmdir') AND parent = ? AND name = ? AND {_IS_UNCOMMITTED}", parent, name, instance
        )
    for inode in inodes:
        db.run(f"DELETE FROM journal WHERE inode = ? AND {_IS_UNCOMMITTED}", inode, instance)


def is_unlinked_later(db: Database, row: JournalRow, name: tuple[int, bytes]) -> bool:
    """Return True if a later row removes that name from the same inode."""
    is_removed = "op IN ('unlink', 'rmdir', 'rename', 'exchange') AND parent = ? AND name = ?"
    return has_later_row(db, row.inode, row.seq, is_removed, *name)


def is_named_later(db: Database, row: JournalRow, name: tuple[int, bytes]) -> bool:
    """Return True if a later row gives that name to the same inode."""
    is_named = "((op IN ('make', 'link') AND parent = ? AND name = ?) OR (new_parent = ? AND new_name = ?))"
    return has_later_row(db, row.inode, row.seq, is_named, *name, *name)


def has_later_row(db: Database, inode: int, after: int, condition: str = "1", *values: Any) -> bool:
    """Return True if a row after `after` is about this inode and meets an SQL condition of `values`."""
    return db.value(f"SELECT 1 FROM journal WHERE inode = ? AND seq > ? AND {condition} LIMIT 1", inode, after, *values) is not None


def has_local_copy(db: Database, content: int) -> bool:
    """Return True if this node has a good copy of a content."""
    return db.value("SELECT 1 FROM copy WHERE content = ? AND state = 1 LIMIT 1", content) is not None


def is_repeated_later(db: Database, row: JournalRow) -> bool:
    """Return True if a later row about the same content, attributes or names includes this one."""
    same = "(op = ? OR (op = 'content' AND ?)) AND content IS ?"  # A close includes what was fsynced before.
    return has_later_row(db, row.inode, row.seq, same, row.op, row.op == "synced", row.content)


def get_seal_wait(db: Database, row: JournalRow) -> tuple[float, bool]:
    """Return (seconds that a row `content` has waited for its seal, whether it was requeued for that)."""
    closed_ns: int = db.value("SELECT closed_ns FROM content WHERE id = ?", row.content) or 0
    return (time.time_ns() - max(closed_ns, row.at_ns)) / 1e9, row.at_ns - closed_ns > 1_000_000_000


def delete_applied(db: Database, after: int, up_to: int, kept: Iterable[int] = ()) -> None:
    """Delete the rows after `after` up to `up_to`, except `kept`. Joins the caller's transaction."""
    done = "DELETE FROM journal WHERE seq > ? AND seq <= ? AND seq NOT IN (SELECT value FROM json_each(?))"
    db.run(done, after, up_to, json.dumps([*kept]))


def get_instance_id(db: Database) -> str:
    """Return 8 hex digits that mark the temporary names of this catalog on a PFS that others use too."""
    return identity.get_catalog_id(db)[:8]


def require_no_pfs(db: Database, state: Path, former: str = "") -> None:
    """Raise ConfigError if this catalog belongs to a PFS, which was at `former`."""
    if db.get_meta("pfs") is not None:
        raise ConfigError(
            f"the files in {state} belong to a PFS, and none is configured",
            remedy=f"give pfs={former or 'DIRECTORY'} as before, or state=DIRECTORY with an empty one",
        )


def require_recorded(db: Database, cluster: str, state: Path) -> None:
    """Refuse a first PFS for the catalog of a node that has files of its cluster. Raises ConfigError.

    A node on its own writes all of them back. In a cluster no node would write back what was made before.
    """
    if db.get_meta("pfs") is None and _has_unrecorded(db):
        raise ConfigError(
            f"the files of the cluster {cluster} in {state} were written without a PFS, and would never be written back",
            remedy="leave out pfs=, or give another cluster with an empty state=DIRECTORY and copy the files",
        )


def record_pfs(db: Database) -> bool:
    """Record that this catalog belongs to a PFS: the one that `pfs_identity` recognises.

    Return True if all that was made before is recorded for it. Raises ConfigError if files would be lost.
    """
    with db.transaction():
        if not db.run("INSERT OR IGNORE INTO meta (key, value) VALUES ('pfs', 'unidentified')"):
            return False
        if db.is_clustered or not _has_unrecorded(db):
            return False
        lost_files = db.value(
            "SELECT count(*) FROM pfs_file p JOIN inode i ON i.id = p.inode WHERE i.nlink > 0"
            " AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = i.content AND c.state = 1)"
        )
        if lost_files:
            raise ConfigError(
                f"{lost_files} files of this catalog lie only on the PFS, and others were written without one",
                remedy="read these files once through a read-only mount, or use another state directory",
            )
        for table in ("journal", "pfs_entry", "pfs_pending", "pfs_batch", "pfs_stale_times", "pfs_file"):
            db.run(f"DELETE FROM {table}")
        insert_rows_for_tree(db, ROOT)
    return True


def _has_unrecorded(db: Database) -> bool:
    """Return True if the journal and the PFS lack anything that was made while there was no PFS."""
    query = (
        "SELECT 1 FROM inode i WHERE i.id <> ? AND i.nlink > 0 AND NOT EXISTS (SELECT 1 FROM pfs_entry WHERE inode = i.id)"
        " AND NOT EXISTS (SELECT 1 FROM journal WHERE inode = i.id AND op = 'make')"
        f" AND NOT {IS_HELD.format('i.id')} LIMIT 1"
    )
    return db.value(query, ROOT) is not None


def insert_rows_for_tree(db: Database, inode: int) -> int:
    """Record `inode` and all below it again, as what the PFS lacks now. Return the number of rows."""
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
    """Return True if this node has all that is needed to make `inode` on a PFS again."""
    row = db.row("SELECT mode, content FROM inode WHERE id = ? AND nlink > 0", inode)
    if row is None:
        return False
    mode, content = row
    if not stat.S_ISREG(mode):
        return True
    if content is None:
        return db.value("SELECT 1 FROM pfs_file WHERE inode = ?", inode) is None
    query = "SELECT 1 FROM content k JOIN copy c ON c.content = k.id AND c.state = 1 WHERE k.id = ? AND k.state IN (0, 1, 2) LIMIT 1"
    return db.value(query, content) is not None


def _insert_rows_for_name(db: Database, parent: int, name: bytes, inode: int, recorded: set[int]) -> int:
    """Append the rows for one name: `make`, or `link` if the inode was recorded already. Return how many."""
    if inode in recorded:
        append(db, "link", inode, parent=parent, name=name)
        return 1
    if not can_recreate(db, inode):
        return 0
    recorded.add(inode)
    for table in ("pfs_entry", "pfs_pending", "pfs_file"):
        db.run(f"DELETE FROM {table} WHERE inode = ?", inode)
    append(db, "make", inode, parent=parent, name=name)
    row = db.row("SELECT k.id, k.remote FROM inode i JOIN content k ON k.id = i.content WHERE i.id = ? AND k.state IN (1, 2)", inode)
    if row is None:
        return 1
    append(db, "content", inode, content=row[0], origin=identity.get_origin_node(row[0]) if row[1] else 0)
    return 2
