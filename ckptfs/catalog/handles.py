"""Owns the table `handle`: open files as the kernel knows them. They outlive the mount process, and belong to one FUSE connection.

Invariant: a handle row is committed before the kernel learns of the handle, and deleted before the kernel is told that it is gone.
Functions that change something join the caller's transaction.
If we die here: the rows tell the next mount process what is open.

Owns the table `answer`: the first answer to every change, kept for a request that the kernel sends again after a crash.

A ring addressed by the request's number: an answer stays until `limits.REPLIES_KEPT` later requests were answered. The kernel sends
again only what it has no reply to, and that is far fewer.
If we die here: `keep` is part of the change's own transaction, so there is an answer exactly when there was a change.
"""

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.model import Handle

_COLUMNS = "id, inode, content, writer, backing, generation"


def insert(db: Database, inode: int, content: int | None, *, is_writer: bool, backing_id: int, generation: int = 0) -> int:
    """Record that a file was opened; the handle's id."""
    return db.insert(
        "INSERT INTO handle (inode, content, writer, backing, generation) VALUES (?,?,?,?,?)",
        inode,
        content,
        is_writer,
        backing_id,
        generation,
    )


def delete(db: Database, handle: int) -> bool:
    """Forget a handle. False when it was not known: a release that is told twice."""
    return db.run("DELETE FROM handle WHERE id=?", handle) > 0


def list_all(db: Database) -> list[Handle]:
    """All open handles, in the order in which they were opened."""
    return [Handle(row[0], row[1], row[2], bool(row[3]), row[4], row[5]) for row in db.rows(f"SELECT {_COLUMNS} FROM handle ORDER BY id")]


def is_open(db: Database, inode: int) -> bool:
    """Whether somebody here has the file open."""
    return db.value("SELECT 1 FROM handle WHERE inode = ? LIMIT 1", inode) is not None


def has_writer(db: Database, inode: int) -> bool:
    """Whether somebody here has the file open for writing."""
    return db.value("SELECT 1 FROM handle WHERE inode = ? AND writer = 1 LIMIT 1", inode) is not None


def set_content(db: Database, inode: int, content: int) -> None:
    """All handles of `inode` now lead to `content`."""
    db.run("UPDATE handle SET content=? WHERE inode=?", content, inode)


def delete_all(db: Database) -> int:
    """A new FUSE connection begins: nothing is open, and ids, of which the kernel keeps 32 bits, start anew. How many were left."""
    db.run("DELETE FROM sqlite_sequence WHERE name = 'handle'")
    return db.run("DELETE FROM handle")


_SLOT_MASK = limits.REPLIES_KEPT - 1


def record_reply(db: Database, request: int, body: bytes = b"") -> None:
    """Remember the answer to request `number` (even, as the kernel's are). Call it inside the change's own transaction."""
    db.run("INSERT OR REPLACE INTO reply_cache (slot, request, body) VALUES (?,?,?)", request >> 1 & _SLOT_MASK, request, body)


def get_reply(db: Database, request: int) -> bytes | None:
    """The answer that request `number` already got; None when it was never answered."""
    body: bytes | None = db.value("SELECT body FROM reply_cache WHERE slot=? AND request=?", request >> 1 & _SLOT_MASK, request)
    return body


def delete_replies(db: Database) -> None:
    """A new FUSE connection begins: its requests are numbered from the start again."""
    db.run("DELETE FROM reply_cache")
