"""Owns the table `seen_key`: the revision and value that the store had last for each shared key that there are rows for.

Invariant: rows say what the seen value says, or their key is touched. A key without a row here is one that, as far as we know, does not
exist; who believes so wrongly finds out when the store compares.
If we die here: it changes in the transaction that changes the rows.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing.kinds import SharedKey, Value, decode_value


class CachedValue(NamedTuple):
    """What the store had: revision 0 and no value for a key that did not exist."""

    revision: int
    raw: bytes | None

    @property
    def fields(self) -> Value | None:
        """The value, unpacked."""
        return decode_value(self.raw)


ABSENT = CachedValue(0, None)


def get_cached(db: Database, key: SharedKey) -> CachedValue:
    """What was seen last."""
    row = db.row("SELECT revision, value FROM seen_key WHERE kind = ? AND number = ? AND name = ?", *key)
    return ABSENT if row is None else CachedValue(row[0], bytes(row[1]))


def set_cached(db: Database, key: SharedKey, cached: CachedValue) -> None:
    """The store has this now."""
    if cached.raw is None:
        db.run("DELETE FROM seen_key WHERE kind = ? AND number = ? AND name = ?", *key)
    else:
        db.run("INSERT OR REPLACE INTO seen_key (kind, number, name, revision, value) VALUES (?,?,?,?,?)", *key, *cached)


def set_cached_each(db: Database, cached: Iterable[tuple[SharedKey, CachedValue]]) -> None:
    """The store has these now."""
    rows, absent = [], []
    for key, one in cached:
        if one.raw is None:
            absent.append(key)
        else:
            rows.append((*key, *one))
    db.run_each("DELETE FROM seen_key WHERE kind = ? AND number = ? AND name = ?", absent)
    db.run_each("INSERT OR REPLACE INTO seen_key (kind, number, name, revision, value) VALUES (?,?,?,?,?)", rows)


def list_cached_names(db: Database, directory: int, after: bytes, up_to: bytes | None) -> list[bytes]:
    """The seen names of a directory after one and up to another (None: the last), in order."""
    rows = db.rows(
        "SELECT name FROM seen_key WHERE kind = 'e' AND number = ?1 AND name > ?2 AND (?3 IS NULL OR name <= ?3)", directory, after, up_to
    )
    return [bytes(row[0]) for row in rows]
