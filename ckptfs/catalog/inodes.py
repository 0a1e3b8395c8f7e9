"""Attributes of inodes (columns of `inode`) and extended attributes (table `xattr`).

Set-id bits are cleared as on ext4: if a file that is not a directory changes its owner, and if a process without CAP_FSETID changes its
length. Functions that change rows join the caller's transaction.
"""

import errno
import json
import stat
import time
from collections.abc import Iterable
from typing import Any

from ckptfs import limits
from ckptfs.catalog import journal
from ckptfs.catalog.database import Database
from ckptfs.errors import posix_error
from ckptfs.model import ROOT, Inode

_COLUMN_NAMES = (
    "id", "mode", "uid", "gid", "rdev", "nlink", "size", "atime_ns", "mtime_ns", "ctime_ns", "target", "content", "generation", "parent",
    "imported", "history",
)  # fmt: skip
INODE_COLUMNS = ", ".join(_COLUMN_NAMES)
INODE_COLUMNS_JOINED = ", ".join(f"inode.{name}" for name in _COLUMN_NAMES)


def build_inode(row: tuple[Any, ...]) -> Inode:
    """Return the inode in a row of `INODE_COLUMNS`."""
    return Inode(*(*row[:14], row[14] == 1, row[15]))


_SELECT = f"SELECT {INODE_COLUMNS} FROM inode WHERE id=?"


def get(db: Database, inode: int) -> Inode:
    """Return the inode with this id. Raises ENOENT."""
    found = find(db, inode)
    if found is None:
        raise posix_error(errno.ENOENT)
    return found


def find(db: Database, inode: int) -> Inode | None:
    """Return the inode with this id. Returns None if there is none."""
    row = db.row(_SELECT, inode)
    return None if row is None else build_inode(row)


def get_parent(db: Database, directory: int) -> int:
    """Return the directory above one; 0 if it is not known."""
    return int(db.value("SELECT parent FROM inode WHERE id = ?", directory) or 0)


def list_names(db: Database, inode: int) -> list[tuple[int, bytes]]:
    """Return (directory, name) of all names of an inode, in the order in which it got them."""
    return [(parent, bytes(name)) for parent, name in db.rows("SELECT parent, name FROM entry WHERE child = ? ORDER BY cookie", inode)]


def find_child_id(db: Database, directory: int, name: bytes) -> int | None:
    """Return the id of the inode under a name. Returns None if the catalog has no such name."""
    found: int | None = db.value("SELECT child FROM entry WHERE parent = ? AND name = ?", directory, name)
    return found


def is_history(db: Database, inode: int) -> bool:
    """Return True for a directory of the history, and for a file that has a name there."""
    return bool(db.value("SELECT history FROM inode WHERE id = ?", inode))


def list_in_history(db: Database, inodes: Iterable[int]) -> list[int]:
    """Return those of the inodes that are directories of the history or files that have a name there."""
    query = "SELECT id FROM inode WHERE id IN (SELECT value FROM json_each(?)) AND history > 0"
    return db.column(query, json.dumps([*inodes]))


INTERNAL_XATTR_PREFIX = b"ckptfs."
"""Attributes of ckptfs itself, see `history`. No application reads, lists or changes them. The PFS gets `XATTRS_ON_PFS` only."""
XATTRS_ON_PFS = {b"ckptfs.%s" % name: b"user.ckptfs_set.%s" % name for name in (b"pin", b"note", b"rollback")}
"""What users said of checkpoint sets: under these names it survives the loss of the catalog on the PFS."""


def set_attributes(
    db: Database, inode: int, *, mode: int | None = None, uid: int | None = None, gid: int | None = None,
    atime_ns: int | None = None, mtime_ns: int | None = None, ctime_ns: int | None = None, kill_set_id: bool = False,
) -> Inode:  # fmt: skip
    """Set the attributes given (`mode` without type bits), and ctime; clear set-id bits if asked."""
    row = get(db, inode)
    new_mode = row.mode if mode is None else stat.S_IFMT(row.mode) | stat.S_IMODE(mode)
    if kill_set_id and mode is None:
        new_mode = strip_set_id(new_mode)
    values = (
        new_mode,
        row.uid if uid is None else uid,
        row.gid if gid is None else gid,
        row.atime_ns if atime_ns is None else atime_ns,
        row.mtime_ns if mtime_ns is None else mtime_ns,
        time.time_ns() if ctime_ns is None else ctime_ns,
    )
    db.run("UPDATE inode SET mode=?, uid=?, gid=?, atime_ns=?, mtime_ns=?, ctime_ns=? WHERE id=?", *values, inode)
    journal.append(db, "attributes", inode)
    return get(db, inode)


def strip_set_id(mode: int) -> int:
    """Return `mode` after a change without CAP_FSETID. S_ISGID without group x means locking."""
    if stat.S_ISDIR(mode):
        return mode
    return mode & ~stat.S_ISUID & ~(stat.S_ISGID if mode & stat.S_IXGRP else 0)


def get_xattr(db: Database, inode: int, name: bytes) -> bytes:
    """Return the value of an extended attribute. Raises ENODATA."""
    value = find_xattr(db, inode, name)
    if value is None:
        raise posix_error(errno.ENODATA)
    return value


def find_xattr(db: Database, inode: int, name: bytes) -> bytes | None:
    """Return the value of an extended attribute. Returns None if the inode does not have it."""
    value: bytes | None = db.value("SELECT value FROM xattr WHERE inode = ? AND name = ?", inode, name)
    return value


def list_xattrs(db: Database, inode: int) -> list[bytes]:
    """Return the names of all extended attributes that others may see, in order."""
    return [name for (name,) in db.rows("SELECT name FROM xattr WHERE inode=?", inode) if not name.startswith(INTERNAL_XATTR_PREFIX)]


def set_xattr(db: Database, inode: int, name: bytes, value: bytes) -> None:
    """Set an extended attribute. Raises ERANGE, E2BIG and ENOSPC."""
    if len(name) > limits.NAME_BYTES_MAX:
        raise posix_error(errno.ERANGE)
    if len(value) > limits.XATTR_VALUE_BYTES_MAX:
        raise posix_error(errno.E2BIG)
    names = list_xattrs(db, inode)
    if name not in names and sum(map(len, names)) + len(names) + len(name) + 1 > limits.XATTR_LIST_BYTES_MAX:
        raise posix_error(errno.ENOSPC)
    others = "SELECT coalesce(sum(length(name) + length(value)), 0) FROM xattr WHERE inode = ? AND name <> ?"
    if db.is_clustered and db.value(others, inode, name) + len(name) + len(value) > limits.XATTR_SHARED_BYTES_MAX:
        raise posix_error(errno.ENOSPC)
    db.run("INSERT OR REPLACE INTO xattr (inode, name, value) VALUES (?,?,?)", inode, name, value)
    _record_attribute_change(db, inode)


def set_internal_xattr(db: Database, inode: int, name: bytes, value: bytes | None) -> None:
    """Set or delete an attribute of ckptfs itself. No time changes."""
    if value is None:
        db.run("DELETE FROM xattr WHERE inode=? AND name=?", inode, name)
    else:
        db.run("INSERT OR REPLACE INTO xattr (inode, name, value) VALUES (?,?,?)", inode, name, value)
    if name in XATTRS_ON_PFS:
        journal.append(db, "attributes", inode)


def restore_xattrs(db: Database, inode: int) -> None:
    """Take back the `XATTRS_ON_PFS` of an imported inode."""
    for name, on_pfs in XATTRS_ON_PFS.items():
        db.run("UPDATE OR REPLACE xattr SET name = ? WHERE inode = ? AND name = ?", name, inode, on_pfs)


def remove_xattr(db: Database, inode: int, name: bytes) -> None:
    """Remove an extended attribute. Raises ENODATA."""
    if db.run("DELETE FROM xattr WHERE inode=? AND name=?", inode, name) == 0:
        raise posix_error(errno.ENODATA)
    _record_attribute_change(db, inode)


def _record_attribute_change(db: Database, inode: int) -> None:
    db.run("UPDATE inode SET ctime_ns=? WHERE id=?", time.time_ns(), inode)
    journal.append(db, "attributes", inode)


WITH_TREE = "WITH RECURSIVE tree(id) AS (SELECT value FROM json_each(?) UNION SELECT child FROM entry JOIN tree ON entry.parent = tree.id)"
"""The beginning of a query: `tree` has the inodes of a JSON array and all below them."""


def get_path(db: Database, inode: int) -> bytes:
    """Return the path below the mount of the oldest name of `inode`, for messages; b"?" without a name."""
    names: list[bytes] = []
    length = 0
    while inode != ROOT:
        row = db.row("SELECT parent, name FROM entry WHERE child = ? ORDER BY cookie LIMIT 1", inode)
        if row is None or length > limits.PATH_BYTES_MAX:
            return b"?"
        inode, name = row
        names.append(name)
        length += len(name) + 1
    return b"/".join(reversed(names))


def get_shown_path(db: Database, inode: int) -> str:
    """Return `get_path` as text, for messages. Bytes that are not UTF-8 look like \\xff."""
    return get_path(db, inode).decode(errors="backslashreplace")
