"""Figures of checkpoint sets for `ckptfs list`.

One query reads a thousand sets, without their producers.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs.catalog import history
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import NOTE_XATTR, PIN_XATTR, SET_XATTR

_SETS = (
    "FROM (SELECT e.name, x.inode, CAST(x.value AS TEXT) AS fields FROM entry e JOIN xattr x ON x.inode = e.child AND x.name = ?"
    " WHERE {} AND substr(e.name, 1, 1) <> x'2e')"
)
_CHOSEN = "e.child IN (SELECT value FROM json_each(?))"
_SELECT = (
    "SELECT name, inode, json_extract(fields, '$.number'), json_extract(fields, '$.numbers'), json_extract(fields, '$.files'),"
    " json_extract(fields, '$.size'), json_extract(fields, '$.completed_ns'), json_extract(fields, '$.is_group') "
)


@dataclass(frozen=True, slots=True)
class SetFigures:
    """A set in `ckptfs list`, by its directory. `step`: the digits that decide the order of the series."""

    name: bytes
    directory: int
    number: int
    step: str
    files: int
    size: int
    completed_ns: int
    is_group: bool
    is_pinned: bool
    note: str


def list_set_figures(db: Database, directories: Iterable[int]) -> list[SetFigures]:
    """Return the figures of sets by their directories, the newest first. What is gone is left out."""
    chosen = json.dumps([*directories])
    attributes = "SELECT x.inode, x.value FROM json_each(?2) j JOIN xattr x ON x.inode = j.value AND x.name = ?1"
    with db.read_transaction():
        rows = db.rows(f"{_SELECT}{_SETS.format(_CHOSEN)} ORDER BY 3 DESC", SET_XATTR, chosen)
        pinned = {row[0] for row in db.rows(attributes, PIN_XATTR, chosen)}
        notes = {row[0]: bytes(row[1]).decode(errors="replace") for row in db.rows(attributes, NOTE_XATTR, chosen)}
    return [
        SetFigures(
            bytes(name), directory, number, numbers.strip("[]").split(",")[0], files, size, at_ns, bool(is_group), directory in pinned,
            notes.get(directory, ""),
        )
        for name, directory, number, numbers, files, size, at_ns, is_group in rows
    ]  # fmt: skip


def load_series_figures(db: Database, series: int) -> tuple[int, int, SetFigures | None]:
    """Return (number of sets, bytes of all, the newest one)."""
    with db.read_transaction():
        directories = history.list_set_directories(db, series)
        size = db.value("SELECT coalesce(sum(json_extract(fields, '$.size')), 0) " + _SETS.format("e.parent = ?"), SET_XATTR, series)
        newest = list_set_figures(db, directories[:1])
    return len(directories), int(size), newest[0] if newest else None
