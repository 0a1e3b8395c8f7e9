"""Owns the table `answer`: the first answer to every change, kept for a request that the kernel sends again after a crash.

A ring addressed by the request's number: an answer stays until `limits.ANSWERS_KEPT` later requests were answered. The kernel sends
again only what it has no reply to, and that is far fewer.
If we die here: `keep` is part of the change's own transaction, so there is an answer exactly when there was a change.
"""

from ckptfs import limits
from ckptfs.catalog.database import Database

_SLOT_MASK = limits.ANSWERS_KEPT - 1


def record_reply(db: Database, request: int, body: bytes = b"") -> None:
    """Remember the answer to request `number` (even, as the kernel's are). Call it inside the change's own transaction."""
    db.run("INSERT OR REPLACE INTO answer (slot, request, body) VALUES (?,?,?)", request >> 1 & _SLOT_MASK, request, body)


def get_reply(db: Database, request: int) -> bytes | None:
    """The answer that request `number` already got; None when it was never answered."""
    body: bytes | None = db.value("SELECT body FROM answer WHERE slot=? AND request=?", request >> 1 & _SLOT_MASK, request)
    return body


def delete_replies(db: Database) -> None:
    """A new FUSE connection begins: its requests are numbered from the start again."""
    db.run("DELETE FROM answer")
