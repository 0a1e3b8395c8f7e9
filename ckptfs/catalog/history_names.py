"""The history as readers see it: inode numbers in `.ckptfs/history`, names and figures of sets.

Inode numbers are of four kinds. The upper bits are the number of a node, the rest counts:
- In the catalog, and outside `.ckptfs`: the id of the inode. In a cluster, that of a directory of the history has
  `identity.HISTORY_DIRECTORY_BIT`, which says in every list of names that a name is in the history.
- In `.ckptfs/history`, a directory: its id with `limits.SHOWN_BIT`.
- In `.ckptfs/history`, anything else: `limits.HISTORY_NAMES_NODE` and the cookie of its *name*.
- In `.ckptfs`, what is in no catalog, such as `latest`: `limits.VIRTUAL_NODE` and a hash of what it is (`VirtualInodes`).

A file has the number of its name because it is shown twice: where the application may write it, and in the history, where no program may.
If the application writes it, the names in the history lead to another inode from then on, with the old bytes (`history`). A name there
never leads to other bytes. Two names are two files.

The module has no state: the next process finds the same numbers, and a number whose name is gone leads to nothing.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ckptfs import limits
from ckptfs.catalog import history, inodes, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import INODE_COLUMNS_JOINED, build_inode
from ckptfs.model import ROOT, Inode

_FIRST_NAME = limits.HISTORY_NAMES_NODE << limits.ID_COUNTER_BITS
_FIRST_VIRTUAL = limits.VIRTUAL_NODE << limits.ID_COUNTER_BITS
_SELECT = f"SELECT entry.cookie, {INODE_COLUMNS_JOINED} FROM entry JOIN inode ON inode.id = entry.child WHERE inode.history > 0 AND "
_SELECT_SETS = (
    "SELECT e.name, e.child, instr(x.value, ?) > 0 FROM entry e JOIN xattr x ON x.inode = e.child AND x.name = ?"
    " WHERE e.parent = ? AND substr(e.name, 1, 1) <> x'2e'"
)
_IS_GROUP = b'"is_group":true'
"""A record of a group has this. No text in a record has it: its quotes are escaped there."""


class SetName(NamedTuple):
    """The short form of a set: its member's name, and its number in the series."""

    member: bytes
    number: int
    directory: int
    is_group: bool


def is_shown(number: int) -> bool:
    """Return True if this is the number of something in the history."""
    return limits.SHOWN_BIT <= number < _FIRST_VIRTUAL


def get_shown_number(inode: Inode, cookie: int) -> int:
    """Return the number under which an entry of the history is shown."""
    return inode.id | limits.SHOWN_BIT if inode.is_directory else _FIRST_NAME | cookie


def get_directory_number(number: int) -> int:
    """Return the directory that is shown under a number."""
    return number & ~limits.SHOWN_BIT


def find_shown(db: Database, number: int) -> Inode | None:
    """Return what is shown under a number. Returns None if its name is gone."""
    if number >= _FIRST_NAME:
        row = db.row(_SELECT + "entry.cookie = ?", number - _FIRST_NAME)
        return None if row is None else build_inode(row[1:])
    try:
        found = inodes.get(db, get_directory_number(number))
    except FileNotFoundError:
        return None
    return found if found.is_directory and found.history else None


def find_number(db: Database, directory: int, name: bytes) -> int | None:
    """Return the number that stat(2) shows for a name in a directory of the history."""
    row = db.row(_SELECT + "entry.parent = ? AND entry.name = ?", directory, namespace.check_name_length(name))
    return None if row is None else get_shown_number(build_inode(row[1:]), row[0])


def get_known_number(db: Database, number: int) -> int:
    """Return the inode number of the catalog for any number that stat(2) shows."""
    found = find_shown(db, number) if is_shown(number) else None
    return number if found is None else found.id


# --- sets -------------------------------------------------------------------------------------------------------------


def is_series(db: Database, directory: int) -> bool:
    """Return True if the sets of a series are in this directory. Only there are hidden names."""
    return db.value("SELECT 1 FROM xattr WHERE inode = ? AND name = ?", directory, history.SERIES_XATTR) is not None


def list_shown_names(db: Database, directory: int) -> dict[bytes, int]:
    """Return {name: inode} of a directory as readdir(3) shows them, without asking what they are."""
    hides_dots = is_series(db, directory)
    names = {bytes(name): child for name, child in db.rows("SELECT name, child FROM entry WHERE parent = ?", directory)}
    hidden = {name for name in names if hides_dots and name.startswith(b".")} | ({history.NAME} if directory == ROOT else set())
    return {name: child for name, child in names.items() if name not in hidden}


def list_set_names(db: Database, series: int) -> list[SetName]:
    """Return the sets of a series in short, which is much faster than `history.list_sets`."""
    found = []
    for name, directory, is_group in db.rows(_SELECT_SETS, _IS_GROUP, history.SET_XATTR, series):
        member, _, number = name.rpartition(b"@")
        found.append(SetName(member, int(number), directory, bool(is_group)))
    return found


def list_completed_since(db: Database, names: Iterable[SetName], at_ns: int) -> list[SetName]:
    """Return the sets that were completed after a time. Sets are numbered in this order."""
    found: list[SetName] = []
    for one in sorted(names, key=lambda one: one.number, reverse=True):
        known = history.get_set(db, one.directory)
        if known is not None and known.record.completed_ns <= at_ns:
            break
        found.append(one)
    return found


def find_set(db: Database, inode: int) -> int | None:
    """Return the set to which a file belongs; of several the one that was completed last."""
    found = {_find_set_above(db, row[0]) for row in db.rows("SELECT parent FROM entry WHERE child = ?", inode)} - {0}
    return max(found, key=lambda one: _get_completion(db, one), default=None)


def _find_set_above(db: Database, directory: int) -> int:
    """Return the set that holds a directory of the history; 0 for none, or an unfinished one."""
    while directory and (row := db.row("SELECT parent FROM inode WHERE id = ? AND history > 0", directory)) is not None:
        if is_series(db, row[0]):
            name = db.value("SELECT name FROM entry WHERE child = ?", directory)
            return 0 if name is None or bytes(name).startswith(b".") else directory
        directory = row[0]
    return 0


def _get_completion(db: Database, set_directory: int) -> tuple[int, int]:
    found = history.get_set(db, set_directory)
    return (0, 0) if found is None else (found.record.completed_ns, set_directory)


def find_set_path(db: Database, inode: Inode) -> bytes | None:
    """Return SERIES/SET of the set to which a file belongs, or that a directory is."""
    found = _find_set_above(db, inode.id) if inode.is_directory else find_set(db, inode.id) if inode.history else None
    return inodes.get_path(db, found).removeprefix(history.NAME + b"/") if found else None


def count_bytes(db: Database, series: int) -> int:
    """Return the bytes of all sets of a series."""
    sizes = (
        "SELECT coalesce(sum(json_extract(CAST(x.value AS TEXT), '$.size')), 0) FROM entry e JOIN xattr x ON x.inode = e.child"
        " AND x.name = ? WHERE e.parent = ? AND substr(e.name, 1, 1) <> x'2e'"
    )
    return int(db.value(sizes, history.SET_XATTR, series))
