"""Owns the table `touched_key`: which shared keys were changed here and not told to the store yet, and in which order.

TEMP triggers on each connection of a node in a cluster mark them, in the transaction of the change itself; nobody can forget to. They are
quiet while what others did is being applied. A row is one key in one change, by the change's number; a key that is changed again while it
is on its way has a later row, and stays touched.
If we die here: the marks are there exactly when the change is.
"""

import contextlib
import sqlite3
import weakref
from collections.abc import Callable, Iterable, Iterator

from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, NAME, PLACE, ROW, SHOWN, TIMES, Key
from ckptfs.model import ROOT

NO_NAME = "x''"
ROW_NODE = "(SELECT value FROM meta WHERE key = 'number')"
ROW_NAME = "CAST((SELECT substr(value, 1, 8) FROM meta WHERE key = 'instance') || printf('-%016x', {}.seq) AS BLOB)"

_WATCHED = "mode, uid, gid, rdev, nlink, size, target, content, generation, parent, complete, missed"
_CONTENT = "inode, generation, state, size, digest, peer, former_ns"


def _trigger(name: str, event: str, when: str, *keys: tuple[str, str, str]) -> str:
    """One TEMP trigger that marks `keys`: (kind, number, name) as SQL."""
    marks = "".join(
        f"INSERT OR IGNORE INTO touched_key (change, kind, number, name) VALUES (touching(), '{kind}', {number}, {what});"
        for kind, number, what in keys
    )
    return f"CREATE TEMP TRIGGER touch_{name} AFTER {event} WHEN touching() > 0{when} BEGIN {marks} END;"


def _changed(columns: str) -> str:
    return " AND (" + " OR ".join(f"OLD.{column} IS NOT NEW.{column}" for column in columns.split(", ")) + ")"


OWN = "(NEW.peer = 0 OR NEW.former_ns > 0)"
DIRECTORY = "{}.mode & 61440 = 16384"
_TRIGGERS = [
    _trigger("entry_made", "INSERT ON main.entry", "", (NAME, "NEW.parent", "NEW.name")),
    _trigger("entry_gone", "DELETE ON main.entry", "", (NAME, "OLD.parent", "OLD.name")),
    _trigger("entry_moved", "UPDATE ON main.entry", "", (NAME, "OLD.parent", "OLD.name"), (NAME, "NEW.parent", "NEW.name")),
    _trigger("inode_made", "INSERT ON main.inode", "", (INODE, "NEW.id", NO_NAME)),
    _trigger("directory_made", "INSERT ON main.inode", " AND " + DIRECTORY.format("NEW"), (TIMES, "NEW.id", NO_NAME)),
    _trigger("inode_gone", "DELETE ON main.inode", " AND OLD.nlink > 0", (INODE, "OLD.id", NO_NAME)),
    _trigger("inode_changed", f"UPDATE OF {_WATCHED} ON main.inode", _changed(_WATCHED), (INODE, "NEW.id", NO_NAME)),
    _trigger(
        "times_changed", "UPDATE OF mtime_ns, ctime_ns ON main.inode",
        " AND NOT " + DIRECTORY.format("NEW") + _changed("mtime_ns, ctime_ns"), (INODE, "NEW.id", NO_NAME),
    ),
    _trigger(
        "directory_changed", "UPDATE OF mtime_ns, ctime_ns ON main.inode",
        " AND " + DIRECTORY.format("NEW") + _changed("mtime_ns, ctime_ns"), (TIMES, "NEW.id", NO_NAME),
    ),
    _trigger("xattr_set", "INSERT ON main.xattr", "", (INODE, "NEW.inode", NO_NAME)),
    _trigger("xattr_gone", "DELETE ON main.xattr", "", (INODE, "OLD.inode", NO_NAME)),
    _trigger("content_made", "INSERT ON main.content", f" AND {OWN} AND NEW.inode > 0", (CONTENT, "NEW.id", NO_NAME)),
    _trigger("content_changed", f"UPDATE OF {_CONTENT} ON main.content", f" AND {OWN}" + _changed(_CONTENT), (CONTENT, "NEW.id", NO_NAME)),
    _trigger("content_gone", "DELETE ON main.content", " AND OLD.peer = 0 AND OLD.state <> 3", (CONTENT, "OLD.id", NO_NAME)),
    _trigger("row_made", "INSERT ON main.journal", "", (ROW, ROW_NODE, ROW_NAME.format("NEW"))),
    _trigger("row_gone", "DELETE ON main.journal", "", (ROW, ROW_NODE, ROW_NAME.format("OLD"))),
    _trigger("place_made", "INSERT ON main.pfs_entry", "", (PLACE, "NEW.parent", "NEW.name"), (SHOWN, "NEW.inode", NO_NAME)),
    _trigger("place_gone", "DELETE ON main.pfs_entry", "", (PLACE, "OLD.parent", "OLD.name"), (SHOWN, "OLD.inode", NO_NAME)),
    _trigger(
        "place_changed", "UPDATE ON main.pfs_entry", "", (PLACE, "OLD.parent", "OLD.name"), (PLACE, "NEW.parent", "NEW.name"),
        (SHOWN, "OLD.inode", NO_NAME), (SHOWN, "NEW.inode", NO_NAME),
    ),
    _trigger("published_made", "INSERT ON main.published", "", (SHOWN, "NEW.inode", NO_NAME)),
    _trigger("published_changed", "UPDATE ON main.published", "", (SHOWN, "NEW.inode", NO_NAME)),
    _trigger("published_gone", "DELETE ON main.published", "", (SHOWN, "OLD.inode", NO_NAME)),
]  # fmt: skip


class Marked(sqlite3.Connection):
    """A connection that knows the number of its current change, which is found when that touches its first key."""

    number = 0
    quiet = False

    def change(self) -> int:
        """The number for marks; -1: none shall be made."""
        if self.quiet:
            return -1
        if not self.number or not self.in_transaction:
            last = self.execute("SELECT max(change) FROM touched_key").fetchone()[0]
            self.number = (last or 0) + 1
        return self.number


class Touching:
    """What a Database of a node in a cluster does with its connections."""

    factory = Marked

    def __init__(self, on_touched: Callable[[], None] = lambda: None) -> None:
        """`on_touched` is called in whatever thread has just committed something that others must learn."""
        self.on_touched = on_touched

    def prepare(self, connection: sqlite3.Connection) -> None:
        known = weakref.ref(connection)

        def change() -> int:
            marked = known()
            assert isinstance(marked, Marked)
            return marked.change()

        connection.create_function("touching", 0, change)
        connection.executescript("".join(_TRIGGERS))

    def began(self, connection: sqlite3.Connection) -> None:
        assert isinstance(connection, Marked)
        connection.number = 0

    def committed(self, connection: sqlite3.Connection) -> None:
        assert isinstance(connection, Marked)
        if connection.number:
            connection.number = 0
            self.on_touched()


@contextlib.contextmanager
def applying(db: Database) -> Iterator[None]:
    """One change in which nothing is marked: what is written comes from the store."""
    with db.change():
        connection = db.connection
        assert isinstance(connection, Marked)
        before, connection.quiet = connection.quiet, True
        try:
            yield
        finally:
            connection.quiet = before


# --- the marks -------------------------------------------------------------------------------------------------------


def last(db: Database) -> int:
    """The number of the last change that waits to be told; 0: none does."""
    return int(db.value("SELECT max(change) FROM touched_key") or 0)


def waiting(db: Database, up_to: int) -> bool:
    """Whether anything changed up to that change waits to be told."""
    return db.value("SELECT 1 FROM touched_key WHERE change <= ? LIMIT 1", up_to) is not None


def is_touched(db: Database, key: Key) -> bool:
    """Whether this key has a change that was not told."""
    return db.value("SELECT 1 FROM touched_key WHERE kind = ? AND number = ? AND name = ? LIMIT 1", *key) is not None


def first(db: Database, at_most: int) -> list[tuple[int, Key]]:
    """(change, key) of what waits, in order."""
    rows = db.rows("SELECT change, kind, number, name FROM touched_key ORDER BY change LIMIT ?", at_most)
    return [(row[0], Key(row[1], row[2], bytes(row[3]))) for row in rows]


def count(db: Database) -> int:
    """How many changes of keys wait."""
    return int(db.value("SELECT count(*) FROM touched_key"))


def touch(db: Database, key: Key) -> None:
    """Mark a key whose rows did not change: it is to be told again."""
    db.run(
        "INSERT OR IGNORE INTO touched_key (change, kind, number, name) SELECT coalesce(max(change), 0) + 1, ?, ?, ? FROM touched_key", *key
    )


def told(db: Database, keys: Iterable[Key], up_to: int) -> None:
    """These keys are in the store as they were after that change."""
    db.run_each("DELETE FROM touched_key WHERE kind = ? AND number = ? AND name = ? AND change <= ?", [(*key, up_to) for key in keys])


def begin(db: Database) -> None:
    """The root, which every node has from its beginning, is to be told once; where another node was first it becomes that node's."""
    with db.change():
        for kind in (INODE, TIMES):
            if db.value("SELECT 1 FROM seen_key WHERE kind = ? AND number = ?", kind, ROOT) is None:
                touch(db, Key(kind, ROOT))


def compact(db: Database) -> None:
    """A key that was changed often while nothing could be told needs only its last mark."""
    db.run(
        "DELETE FROM touched_key WHERE EXISTS (SELECT 1 FROM touched_key l WHERE l.kind = touched_key.kind"
        " AND l.number = touched_key.number AND l.name = touched_key.name AND l.change > touched_key.change)"
    )


def names(db: Database) -> list[Key]:
    """Every name that waits to be told."""
    return [Key(NAME, row[0], bytes(row[1])) for row in db.rows("SELECT DISTINCT number, name FROM touched_key WHERE kind = 'e'")]
