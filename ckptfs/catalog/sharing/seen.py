"""Owns the table `seen_key`: the revision and value that the store had last for each shared key that there are rows for.

Invariant: rows say what the seen value says, or their key is touched. A key without a row here is one that, as far as we know, does not
exist; who believes so wrongly finds out when the store compares.
If we die here: it changes in the transaction that changes the rows.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing.kinds import Key, Value, unpack


class Seen(NamedTuple):
    """What the store had: revision 0 and no value for a key that did not exist."""

    revision: int
    value: bytes | None

    @property
    def content(self) -> Value | None:
        """The value, unpacked."""
        return unpack(self.value)


NEVER = Seen(0, None)


def get(db: Database, key: Key) -> Seen:
    """What was seen last."""
    row = db.row("SELECT revision, value FROM seen_key WHERE kind = ? AND number = ? AND name = ?", *key)
    return NEVER if row is None else Seen(row[0], bytes(row[1]))


def put(db: Database, key: Key, seen: Seen) -> None:
    """The store has this now."""
    if seen.value is None:
        db.run("DELETE FROM seen_key WHERE kind = ? AND number = ? AND name = ?", *key)
    else:
        db.run("INSERT OR REPLACE INTO seen_key (kind, number, name, revision, value) VALUES (?,?,?,?,?)", *key, *seen)


def put_each(db: Database, seen: Iterable[tuple[Key, Seen]]) -> None:
    """The store has these now."""
    there, gone = [], []
    for key, one in seen:
        if one.value is None:
            gone.append(key)
        else:
            there.append((*key, *one))
    db.run_each("DELETE FROM seen_key WHERE kind = ? AND number = ? AND name = ?", gone)
    db.run_each("INSERT OR REPLACE INTO seen_key (kind, number, name, revision, value) VALUES (?,?,?,?,?)", there)


def names_between(db: Database, directory: int, after: bytes, up_to: bytes | None) -> list[bytes]:
    """The seen names of a directory after one and up to another (None: the last), in order."""
    rows = db.rows(
        "SELECT name FROM seen_key WHERE kind = 'e' AND number = ?1 AND name > ?2 AND (?3 IS NULL OR name <= ?3)", directory, after, up_to
    )
    return [bytes(row[0]) for row in rows]
