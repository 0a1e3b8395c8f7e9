"""Open files (table `handle`) and the replies that may have to be sent again (table `reply_cache`).

A handle row belongs to one FUSE connection and outlives the mount process. The reply cache is a ring addressed by the number of the
request: a reply stays until `limits.REPLIES_KEPT` later requests were answered. After a crash the kernel sends only those requests again
to which it has no reply; there are far fewer of them. Functions that change rows join the caller's transaction.

Invariants:
- A handle row is committed before the kernel learns of the handle, and deleted before the kernel gets the reply to its release.
- A reply is recorded in the transaction of its change: there is a reply exactly if there was a change.

Crash safety: the rows tell the next mount process which files are open and which requests were answered.
"""

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.model import Handle

_COLUMNS = "id, inode, content, writer, backing, generation, shown"


def insert(db: Database, inode: int, content: int | None, *, is_writer: bool, backing_id: int, generation: int = 0, shown: int = 0) -> int:
    """Record that a file was opened. Return the id of the handle."""
    return db.insert(
        "INSERT INTO handle (inode, content, writer, backing, generation, shown) VALUES (?,?,?,?,?,?)",
        inode, content, is_writer, backing_id, generation, shown,
    )  # fmt: skip


def delete(db: Database, handle: int) -> bool:
    """Delete a handle. Return False if it is unknown because the kernel sent the release twice."""
    return db.run("DELETE FROM handle WHERE id=?", handle) > 0


def list_all(db: Database) -> list[Handle]:
    """Return all open handles in the order in which they were opened."""
    rows = db.rows(f"SELECT {_COLUMNS} FROM handle ORDER BY id")
    return [Handle(number, inode, content, bool(writer), *rest) for number, inode, content, writer, *rest in rows]


def list_contents(db: Database) -> set[int]:
    """Return the contents that processes on this node have open."""
    return set(db.column("SELECT DISTINCT content FROM handle WHERE content IS NOT NULL"))


def count_by_inode(db: Database) -> dict[int, int]:
    """Return how many open handles each file has on this node."""
    return dict(db.rows("SELECT inode, count(*) FROM handle GROUP BY inode"))


def is_open(db: Database, inode: int) -> bool:
    """Return True if a process on this node has the file open."""
    return db.value("SELECT 1 FROM handle WHERE inode = ? LIMIT 1", inode) is not None


def has_writer(db: Database, inode: int) -> bool:
    """Return True if a process on this node has the file open for writing."""
    return db.value("SELECT 1 FROM handle WHERE inode = ? AND writer = 1 LIMIT 1", inode) is not None


def list_written(db: Database) -> list[int]:
    """Return the files that a process on this node has open for writing."""
    return db.column("SELECT DISTINCT inode FROM handle WHERE writer = 1")


def set_content(db: Database, inode: int, content: int) -> None:
    """Point all handles of `inode` to `content`, but for those of its names in the history."""
    db.run("UPDATE handle SET content=? WHERE inode=? AND shown=0", content, inode)


def move_shown(db: Database, inode: int, new_inode: int, content: int | None) -> None:
    """Point the handles of an inode's names in the history to the inode that has these names now."""
    db.run(
        "UPDATE handle SET inode = ?, content = CASE WHEN content IS NULL THEN NULL ELSE ? END WHERE inode = ? AND shown <> 0",
        new_inode, content, inode,
    )  # fmt: skip


def get_inode(db: Database, handle: int) -> int:
    """Return the inode that a handle has open. Raises KeyError if there is no such handle."""
    found = db.value("SELECT inode FROM handle WHERE id = ?", handle)
    if found is None:
        raise KeyError(handle)
    return int(found)


def delete_all(db: Database) -> int:
    """Delete all handles for a new FUSE connection; ids, of which the kernel keeps 32 bits, begin again."""
    db.run("DELETE FROM sqlite_sequence WHERE name = 'handle'")
    return db.run("DELETE FROM handle")


_SLOT_MASK = limits.REPLIES_KEPT - 1


def record_reply(db: Database, request: int, body: bytes = b"") -> None:
    """Record the reply to a request, whose number is even, in the transaction of its change."""
    db.run("INSERT OR REPLACE INTO reply_cache (slot, request, body) VALUES (?,?,?)", request >> 1 & _SLOT_MASK, request, body)


def get_reply(db: Database, request: int) -> bytes | None:
    """Return the reply that a request has got already. Returns None if it was never answered."""
    body: bytes | None = db.value("SELECT body FROM reply_cache WHERE slot=? AND request=?", request >> 1 & _SLOT_MASK, request)
    return body


def delete_replies(db: Database) -> None:
    """Delete all replies for a new FUSE connection: its request numbers start again."""
    db.run("DELETE FROM reply_cache")
