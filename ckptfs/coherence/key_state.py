"""The state of shared keys on this node: dirty keys, cached values, and the disconnection.

- `dirty_key`: keys that changed and are not published, in order. TEMP triggers on each connection mark them in the transaction of the
  change; they are off while changes of other nodes are applied. A row is a key in one change. A key that changes again during its commit
  gets a later row and stays dirty.
- `cached_key`: revision and value that the store last had for each shared key with rows. The rows equal the cached value, or the key is
  dirty. A key without a row counts as missing; the compares of a commit detect a mistake.
- Disconnected: the node cannot reach the store and continues with its catalog. `reintegrate` resolves the result.

Crash safety: marks and cached values change in the transaction of the rows. The next process reads the state.
"""

import contextlib
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ckptfs.catalog.database import Database
from ckptfs.coherence.keys import CONTENT, INODE, JOURNAL_ROW, NAME, PFS_NAME, PFS_STATE, TIMES, SharedKey, Value, decode_value
from ckptfs.model import ROOT

NO_NAME_SQL = "x''"
ROW_NODE_SQL = "(SELECT value FROM meta WHERE key = 'number')"
ROW_NAME_SQL = "CAST((SELECT substr(value, 1, 8) FROM meta WHERE key = 'instance') || printf('-%016x', {}.seq) AS BLOB)"
_INODE_COLUMNS = "mode, uid, gid, rdev, nlink, size, target, content, generation, parent, imported, salvaged, closed_ns"
_CONTENT_COLUMNS = "inode, generation, state, size, digest, remote, superseded_mtime_ns"


def _build_trigger(name: str, event: str, when: str, *keys: tuple[str, ...]) -> str:
    """Return a TEMP trigger that marks `keys`: (kind, number) or (kind, number, name) as SQL."""
    into = "INSERT OR IGNORE INTO dirty_key (change, kind, number, name) VALUES (touching()"
    marks = "".join(f"{into}, '{kind}', {number}, {''.join(name) or NO_NAME_SQL});" for kind, number, *name in keys)
    return f"CREATE TEMP TRIGGER touch_{name} AFTER {event} WHEN touching() > 0{when} BEGIN {marks} END;"


def _build_changed_condition(columns: str) -> str:
    return " AND (" + " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in columns.split(", ")) + ")"


IS_OWN_CONTENT_SQL = "(NEW.remote = 0 OR NEW.superseded_mtime_ns > 0)"
IS_DIRECTORY_SQL = "{}.mode & 61440 = 16384"

_TRIGGERS = [
    _build_trigger("entry_made", "INSERT ON main.entry", "", (NAME, "NEW.parent", "NEW.name")),
    _build_trigger("entry_gone", "DELETE ON main.entry", "", (NAME, "OLD.parent", "OLD.name")),
    _build_trigger("entry_moved", "UPDATE ON main.entry", "", (NAME, "OLD.parent", "OLD.name"), (NAME, "NEW.parent", "NEW.name")),
    _build_trigger("inode_made", "INSERT ON main.inode", "", (INODE, "NEW.id")),
    _build_trigger("directory_made", "INSERT ON main.inode", " AND " + IS_DIRECTORY_SQL.format("NEW"), (TIMES, "NEW.id")),
    _build_trigger("inode_gone", "DELETE ON main.inode", " AND OLD.nlink > 0", (INODE, "OLD.id")),
    _build_trigger(
        "inode_changed", f"UPDATE OF {_INODE_COLUMNS} ON main.inode", _build_changed_condition(_INODE_COLUMNS),
        (INODE, "NEW.id"),
    ),
    _build_trigger(
        "times_changed", "UPDATE OF mtime_ns, ctime_ns ON main.inode",
        " AND NOT " + IS_DIRECTORY_SQL.format("NEW") + _build_changed_condition("mtime_ns, ctime_ns"), (INODE, "NEW.id"),
    ),
    _build_trigger(
        "directory_changed", "UPDATE OF mtime_ns, ctime_ns ON main.inode",
        " AND " + IS_DIRECTORY_SQL.format("NEW") + _build_changed_condition("mtime_ns, ctime_ns"), (TIMES, "NEW.id"),
    ),
    _build_trigger("xattr_set", "INSERT ON main.xattr", "", (INODE, "NEW.inode")),
    _build_trigger("xattr_gone", "DELETE ON main.xattr", "", (INODE, "OLD.inode")),
    _build_trigger("content_made", "INSERT ON main.content", f" AND {IS_OWN_CONTENT_SQL} AND NEW.inode > 0", (CONTENT, "NEW.id")),
    _build_trigger(
        "content_changed", f"UPDATE OF {_CONTENT_COLUMNS} ON main.content",
        f" AND {IS_OWN_CONTENT_SQL}" + _build_changed_condition(_CONTENT_COLUMNS), (CONTENT, "NEW.id"),
    ),
    _build_trigger("content_gone", "DELETE ON main.content", " AND OLD.remote = 0 AND OLD.state <> 3", (CONTENT, "OLD.id")),
    _build_trigger("row_made", "INSERT ON main.journal", "", (JOURNAL_ROW, ROW_NODE_SQL, ROW_NAME_SQL.format("NEW"))),
    _build_trigger("row_gone", "DELETE ON main.journal", "", (JOURNAL_ROW, ROW_NODE_SQL, ROW_NAME_SQL.format("OLD"))),
    _build_trigger("place_made", "INSERT ON main.pfs_entry", "", (PFS_NAME, "NEW.parent", "NEW.name"), (PFS_STATE, "NEW.inode")),
    _build_trigger("place_gone", "DELETE ON main.pfs_entry", "", (PFS_NAME, "OLD.parent", "OLD.name"), (PFS_STATE, "OLD.inode")),
    _build_trigger(
        "place_changed", "UPDATE ON main.pfs_entry", "", (PFS_NAME, "OLD.parent", "OLD.name"), (PFS_NAME, "NEW.parent", "NEW.name"),
        (PFS_STATE, "OLD.inode"), (PFS_STATE, "NEW.inode"),
    ),
    _build_trigger("pfs_file_made", "INSERT ON main.pfs_file", "", (PFS_STATE, "NEW.inode")),
    _build_trigger("pfs_file_changed", "UPDATE ON main.pfs_file", "", (PFS_STATE, "NEW.inode")),
    _build_trigger("pfs_file_gone", "DELETE ON main.pfs_file", "", (PFS_STATE, "OLD.inode")),
]  # fmt: skip


class DirtyTrackingConnection(sqlite3.Connection):
    """A connection that knows the number of its current change: that of the first key that it marks."""

    change_number = 0
    is_muted = False

    def assign_change_number(self) -> int:
        """Return the number for the marks of this change; -1 if none shall be made."""
        if self.is_muted:
            return -1
        if not self.change_number or not self.in_transaction:
            last = self.execute("SELECT max(change) FROM dirty_key").fetchone()[0]
            self.change_number = (last or 0) + 1
        return self.change_number


class DirtyKeyTracker:
    """The hooks of a clustered `Database`: triggers that mark keys, and a call after such commits."""

    connection_class = DirtyTrackingConnection

    def __init__(self, on_dirty: Callable[[], None] = lambda: None) -> None:
        """Call `on_dirty` after each commit that marked keys, in the thread of that commit."""
        self.on_dirty = on_dirty

    def on_open(self, connection: sqlite3.Connection) -> None:
        known = weakref.ref(connection)

        def change() -> int:
            marked = known()
            assert isinstance(marked, DirtyTrackingConnection)
            return marked.assign_change_number()

        connection.create_function("touching", 0, change)
        connection.executescript("".join(_TRIGGERS))

    def on_begin(self, connection: sqlite3.Connection) -> None:
        assert isinstance(connection, DirtyTrackingConnection)
        connection.change_number = 0

    def on_commit(self, connection: sqlite3.Connection) -> None:
        assert isinstance(connection, DirtyTrackingConnection)
        if connection.change_number:
            connection.change_number = 0
            self.on_dirty()


@contextlib.contextmanager
def change_unmarked(db: Database) -> Iterator[None]:
    """Run one change that marks no key, because it writes what the store has."""
    with db.transaction():
        connection = db.connection
        if not isinstance(connection, DirtyTrackingConnection):
            yield
            return
        before, connection.is_muted = connection.is_muted, True
        try:
            yield
        finally:
            connection.is_muted = before


def get_last_change(db: Database) -> int:
    """Return the number of the last unpublished change; 0 without one."""
    return int(db.value("SELECT max(change) FROM dirty_key") or 0)


def has_dirty(db: Database, up_to: int) -> bool:
    """Return True if a change up to this one is unpublished."""
    return db.value("SELECT 1 FROM dirty_key WHERE change <= ? LIMIT 1", up_to) is not None


def is_dirty(db: Database, key: SharedKey) -> bool:
    """Return True if this key has an unpublished change."""
    return db.value("SELECT 1 FROM dirty_key WHERE kind = ? AND number = ? AND name = ? LIMIT 1", *key) is not None


def list_dirty(db: Database, at_most: int) -> list[tuple[int, SharedKey]]:
    """Return the unpublished (change, key), in order."""
    rows = db.rows("SELECT change, kind, number, name FROM dirty_key ORDER BY change LIMIT ?", at_most)
    return [(row[0], SharedKey(row[1], row[2], bytes(row[3]))) for row in rows]


def count_dirty(db: Database) -> int:
    """Return the number of unpublished changes of keys."""
    return int(db.value("SELECT count(*) FROM dirty_key"))


def mark_dirty(db: Database, key: SharedKey) -> None:
    """Mark a key dirty although its rows did not change: publish it again."""
    db.run("INSERT OR IGNORE INTO dirty_key (change, kind, number, name) SELECT coalesce(max(change), 0) + 1, ?, ?, ? FROM dirty_key", *key)


def mark_clean(db: Database, keys: Iterable[SharedKey], up_to: int) -> None:
    """Record that the store has these keys as they were after the change `up_to`."""
    db.run_each("DELETE FROM dirty_key WHERE kind = ? AND number = ? AND name = ? AND change <= ?", [(*key, up_to) for key in keys])


def mark_root_dirty(db: Database) -> None:
    """Mark the root dirty once; if another node was first, its root is adopted."""
    with db.transaction():
        for kind in (INODE, TIMES):
            if db.value("SELECT 1 FROM cached_key WHERE kind = ? AND number = ?", kind, ROOT) is None:
                mark_dirty(db, SharedKey(kind, ROOT))


def has_overtaken_marks(db: Database) -> bool:
    """Return True if a name or an inode changed again since `order_marks`."""
    again = "SELECT 1 FROM dirty_key WHERE kind IN ('e', 'i') GROUP BY kind, number, name HAVING count(*) > 1 LIMIT 1"
    return db.value(again) is not None


def order_marks(db: Database) -> None:
    """Keep the last mark of each key, and put removals behind all else, for a return.

    A transaction holds a part of the changes, and each key in it has its last value. So a name that was made and removed since is never
    published, and what it had replaced must not go before what came in the end.
    """
    db.run(
        "DELETE FROM dirty_key WHERE EXISTS (SELECT 1 FROM dirty_key l WHERE l.kind = dirty_key.kind"
        " AND l.number = dirty_key.number AND l.name = dirty_key.name AND l.change > dirty_key.change)"
    )
    # A removed directory keeps the name that the store has until it is empty there, too, also if another one had that name since. If one
    # has it now, the name changes hands then.
    db.run(
        "UPDATE dirty_key SET change = iif(EXISTS (SELECT 1 FROM entry e WHERE e.parent = dirty_key.number AND e.name = dirty_key.name),"
        " max(dirty_key.change, i.change), i.change) FROM cached_key k JOIN dirty_key i ON i.kind = 'i'"
        " AND i.number = json_extract(CAST(k.value AS TEXT), '$.child') JOIN inode n ON n.id = i.number AND n.nlink = 0"
        " WHERE dirty_key.kind = 'e' AND k.kind = 'e' AND k.number = dirty_key.number AND k.name = dirty_key.name"
        " AND json_extract(CAST(k.value AS TEXT), '$.type') = 16384"
    )
    # A removal takes names or inodes away, and gives no name to an inode, not even another one instead. What goes with a directory whose
    # name leads to something else by now keeps its place: that name changes hands when the directory is empty.
    db.run(
        "WITH RECURSIVE replaced (id) AS (SELECT json_extract(CAST(k.value AS TEXT), '$.child') AS was FROM dirty_key d"
        " JOIN cached_key k ON d.kind = 'e' AND k.kind = 'e' AND k.number = d.number AND k.name = d.name"
        " JOIN entry e ON e.parent = d.number AND e.name = d.name WHERE NOT EXISTS (SELECT 1 FROM entry o WHERE o.child = was)"
        " UNION SELECT json_extract(CAST(k.value AS TEXT), '$.child') FROM replaced r"
        " JOIN cached_key k ON k.kind = 'e' AND k.number = r.id)"
        " UPDATE dirty_key SET change = ? + place FROM (SELECT d.change AS former, row_number() OVER (ORDER BY d.change) AS place"
        " FROM dirty_key d"
        " LEFT JOIN cached_key k ON d.kind = 'e' AND k.kind = 'e' AND k.number = d.number AND k.name = d.name"
        " WHERE d.kind IN ('e', 'i') GROUP BY d.change"
        " HAVING max(d.kind = 'e' OR NOT EXISTS (SELECT 1 FROM inode i WHERE i.id = d.number AND i.nlink > 0))"
        " AND NOT max(d.number IN (SELECT id FROM replaced) OR d.kind = 'e' AND ("
        "EXISTS (SELECT 1 FROM entry e WHERE e.parent = d.number AND e.name = d.name)"
        " OR EXISTS (SELECT 1 FROM entry e WHERE e.child = json_extract(CAST(k.value AS TEXT), '$.child'))))) WHERE change = former",
        get_last_change(db),
    )


def list_dirty_names(db: Database) -> list[SharedKey]:
    """Return all unpublished names."""
    return [SharedKey(NAME, row[0], bytes(row[1])) for row in db.rows("SELECT DISTINCT number, name FROM dirty_key WHERE kind = 'e'")]


class CachedValue(NamedTuple):
    """A value of the store as last seen; revision 0 and no value for a missing key."""

    revision: int
    raw: bytes | None

    @property
    def fields(self) -> Value | None:
        """Return the decoded value."""
        return decode_value(self.raw)


ABSENT = CachedValue(0, None)
_EVERY_CHANGE = 1 << 62


def get_cached(db: Database, key: SharedKey) -> CachedValue:
    """Return the value of a key as last seen."""
    row = db.row("SELECT revision, value FROM cached_key WHERE kind = ? AND number = ? AND name = ?", *key)
    return ABSENT if row is None else CachedValue(row[0], bytes(row[1]))


def set_cached(db: Database, key: SharedKey, cached: CachedValue) -> None:
    """Record that the store has this value."""
    set_cached_each(db, [(key, cached)])


def set_cached_each(db: Database, cached: Iterable[tuple[SharedKey, CachedValue]]) -> None:
    """Record that the store has these values."""
    known = list(cached)
    absent, present = [key for key, one in known if one.raw is None], [(*key, *one) for key, one in known if one.raw is not None]
    db.run_each("DELETE FROM cached_key WHERE kind = ? AND number = ? AND name = ?", absent)
    db.run_each("INSERT OR REPLACE INTO cached_key (kind, number, name, revision, value) VALUES (?,?,?,?,?)", present)


def load_name_revisions(db: Database, directory: int, after: bytes, up_to: bytes | None) -> dict[bytes, int]:
    """Return the revisions of the cached names of a directory after `after`, until `up_to` (None: all).

    The revision of a name whose inode is not cached is 0.
    """
    rows = db.rows(
        "SELECT k.name, CASE WHEN i.number IS NULL THEN 0 ELSE k.revision END FROM cached_key k"
        " LEFT JOIN entry e ON e.parent = k.number AND e.name = k.name LEFT JOIN cached_key i ON i.kind = 'i' AND i.number = e.child"
        " WHERE k.kind = 'e' AND k.number = ?1 AND k.name > ?2 AND (?3 IS NULL OR k.name <= ?3)",
        directory, after, up_to,
    )  # fmt: skip
    return {bytes(name): revision for name, revision in rows}


def get_disconnected_ns(db: Database) -> int:
    """Return when this node was disconnected, as it last recorded; 0 if it is connected."""
    return int(db.get_meta("island") or 0)


def mark_disconnected(db: Database, since_ns: int) -> None:
    """Mark the node disconnected: applications see success for changes that are not published.

    The last commit is in doubt: the store may have any change so far, but none from now on.
    """
    with db.transaction():
        db.set_meta("island", since_ns)
        db.run(
            "INSERT INTO meta (key, value) VALUES ('in_doubt', ?) ON CONFLICT (key) DO UPDATE SET value = min(value, excluded.value)",
            get_last_change(db),
        )


def mark_returning(db: Database) -> None:
    """Record that changes are published again: each may be in the store before that is known."""
    db.set_meta("in_doubt", _EVERY_CHANGE)


def mark_reintegrated(db: Database, now_ns: int) -> None:
    """Mark the node connected: all changes are published."""
    db.run("DELETE FROM meta WHERE key IN ('island', 'in_doubt')")
    db.set_meta("returned", now_ns)


def get_reintegrated_ns(db: Database) -> int:
    """Return when this node was reconnected for the last time; 0 for never."""
    return int(db.get_meta("returned") or 0)
