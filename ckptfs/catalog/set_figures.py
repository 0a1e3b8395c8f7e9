"""Figures of checkpoint sets for `ckptfs list`.

One query reads thousands of sets, without their producers.
"""

from dataclasses import dataclass

from ckptfs.catalog.database import Database
from ckptfs.catalog.history import NOTE_XATTR, PIN_XATTR, SET_XATTR

_SETS = (
    "FROM (SELECT e.name, x.inode, CAST(x.value AS TEXT) AS fields FROM entry e JOIN xattr x ON x.inode = e.child AND x.name = ?"
    " WHERE e.parent = ? AND substr(e.name, 1, 1) <> x'2e')"
)
_SELECT = (
    "SELECT name, inode, json_extract(fields, '$.number'), json_extract(fields, '$.numbers'), json_extract(fields, '$.files'),"
    " json_extract(fields, '$.size'), json_extract(fields, '$.completed_ns'), json_extract(fields, '$.is_group') "
)


@dataclass(frozen=True, slots=True)
class SetFigures:
    """A set in the output of `ckptfs list`.

    `name` is that of its directory. `step` is the number, in digits, that decides the order of its series. `size` is in bytes.
    """

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


def list_set_figures(db: Database, series: int) -> list[SetFigures]:
    """Return the sets of a series, the newest first."""
    return _list_figures(db, series, "")


def load_series_figures(db: Database, series: int) -> tuple[int, int, SetFigures | None]:
    """Return (number of sets, bytes of all, the newest one)."""
    with db.read_transaction():
        count, size = db.row("SELECT count(*), coalesce(sum(json_extract(fields, '$.size')), 0) " + _SETS, SET_XATTR, series) or (0, 0)
        newest = _list_figures(db, series, " LIMIT 1")
    return int(count), int(size), newest[0] if newest else None


def _list_figures(db: Database, series: int, limit: str) -> list[SetFigures]:
    attributes = "SELECT e.child, x.value FROM entry e JOIN xattr x ON x.inode = e.child AND x.name = ? WHERE e.parent = ?"
    with db.read_transaction():
        rows = db.rows(f"{_SELECT}{_SETS} ORDER BY 3 DESC{limit}", SET_XATTR, series)
        pinned = {row[0] for row in db.rows(attributes, PIN_XATTR, series)}
        notes = {row[0]: bytes(row[1]).decode(errors="replace") for row in db.rows(attributes, NOTE_XATTR, series)}
    return [
        SetFigures(
            bytes(name), directory, number, numbers.strip("[]").split(",")[0], files, size, at_ns, bool(is_group), directory in pinned,
            notes.get(directory, ""),
        )
        for name, directory, number, numbers, files, size, at_ns, is_group in rows
    ]  # fmt: skip
