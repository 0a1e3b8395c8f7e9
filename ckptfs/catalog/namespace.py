"""Owns the tables `inode` and `entry`: names, and what they lead to. What a local filesystem does on create, link, unlink and rename.

Functions that change something belong into `db.change()`, which makes each of them happen as a whole, its line in the journal
included; they raise OSError with the errno that ext4 would give, or `Unvisited` when the answer depends on a directory of the PFS that
was not imported yet. With `blind` a new name does not wait for that: it is made from what the catalog knows (P1).
Invariants: a directory's nlink is 2 plus its subdirectories; an inode with nlink 0 has no entry and waits for `reap`; `parent` of a
directory is where its entry is.
If we die here: the transaction was committed or it was not.
"""

import errno
import sqlite3
import stat
import time
from collections.abc import Iterable

from ckptfs import limits
from ckptfs.catalog import former, identity, journal
from ckptfs.catalog.database import Database
from ckptfs.catalog.directories import NotImported, require_empty
from ckptfs.catalog.rows import INODE_COLUMNS, INODE_COLUMNS_JOINED, build_inode
from ckptfs.errors import posix_error
from ckptfs.model import ROOT, ContentState, Inode

__all__ = [
    "NotImported",
    "check_name_length",
    "create",
    "decrement_nlink",
    "delete_forgotten",
    "find_child",
    "get",
    "link",
    "list_orphans",
    "lookup",
    "require_allowed_name",
    "rmdir",
    "unlink",
]  # fmt: skip


RESERVED_NAME = b".ckptfs"
RESERVED_PREFIX = b".ckptfs."

_SELECT = f"SELECT {INODE_COLUMNS} FROM inode WHERE id=?"
_SELECT_CHILD = f"SELECT {INODE_COLUMNS_JOINED} FROM entry JOIN inode ON inode.id = entry.child WHERE entry.parent=? AND entry.name=?"
_SELECT_LOOKUP = (
    f"SELECT directory.mode, directory.complete, {INODE_COLUMNS_JOINED} FROM inode directory"
    " LEFT JOIN entry ON entry.parent = directory.id AND entry.name = ?2 LEFT JOIN inode ON inode.id = entry.child WHERE directory.id = ?1"
)
_INSERT_INODE = (
    "INSERT INTO inode (id, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns, birth_ns, target, parent)"
    " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)"
)


def get(db: Database, inode: int) -> Inode:
    """The inode with this id. Raises ENOENT."""
    row = db.row(_SELECT, inode)
    if row is None:
        raise posix_error(errno.ENOENT)
    return build_inode(row)


def find_child(db: Database, parent: int, name: bytes) -> Inode | None:
    """What the catalog knows under `name` in `parent`."""
    row = db.row(_SELECT_CHILD, parent, name)
    return None if row is None else build_inode(row)


def lookup(db: Database, parent: int, name: bytes) -> Inode:
    """What `name` in `parent` leads to. Raises ENOENT, ENOTDIR, ENAMETOOLONG, Unvisited."""
    row = db.row(_SELECT_LOOKUP, parent, check_name_length(name))
    if row is None:
        raise posix_error(errno.ENOENT)
    if row[2] is not None:
        return build_inode(row[2:])
    if not stat.S_ISDIR(row[0]):
        raise posix_error(errno.ENOTDIR)
    if not row[1]:
        raise NotImported(parent)
    raise posix_error(errno.ENOENT)


def require_allowed_name(parent: int, name: bytes) -> None:
    """A new name must not be one that ckptfs uses for itself on the PFS, where it would be taken for ours: EPERM."""
    if name.startswith(RESERVED_NAME) and (name.startswith(RESERVED_PREFIX) or (parent == ROOT and name == RESERVED_NAME)):
        raise posix_error(errno.EPERM)


def check_name_length(name: bytes) -> bytes:
    """`name`, unless it is too long: ENAMETOOLONG."""
    if len(name) > limits.NAME_BYTES_MAX:
        raise posix_error(errno.ENAMETOOLONG)
    return name


def create(
    db: Database,
    parent: int,
    name: bytes,
    mode: int,
    *,
    uid: int,
    gid: int,
    rdev: int = 0,
    target: bytes | None = None,
    allow_unimported: bool = False,
) -> Inode:
    """Make what `mode` says: file, directory, symlink (to `target`), fifo, socket, device. Setgid directories hand their group down."""
    now = time.time_ns()
    parent_mode, parent_gid, is_imported, parent_links = _get_directory(db, parent, name)
    if not (is_imported or allow_unimported) and find_child(db, parent, name) is None:
        raise NotImported(parent)
    if parent_links == 0:
        raise posix_error(errno.ENOENT)
    directory = stat.S_ISDIR(mode)
    if parent_mode & stat.S_ISGID:
        gid = parent_gid
        mode |= stat.S_ISGID if directory else 0
    links, size, home = (2, 0, parent) if directory else (1, len(target or b""), 0)
    made = db.insert(_INSERT_INODE, identity.allocate_id(db, "inode"), mode, uid, gid, rdev, links, size, now, now, now, now, target, home)
    _insert_entry(db, parent, name, made)
    _record_directory_change(db, parent, now, 1 if directory else 0)
    journal.append(db, "make", made, parent=parent, name=name)
    return Inode(made, mode, uid, gid, rdev, links, size, now, now, now, target, None, 0, home, True)


def link(db: Database, inode: int, parent: int, name: bytes, *, allow_unimported: bool = False) -> Inode:
    """Give a file another name. Raises EPERM for directories, EMLINK, EEXIST."""
    now = time.time_ns()
    row = get(db, inode)
    _, _, is_imported, parent_links = _get_directory(db, parent, name)
    if find_child(db, parent, name) is not None:
        raise posix_error(errno.EEXIST)
    if row.is_directory:
        raise posix_error(errno.EPERM)
    if not (is_imported or allow_unimported):
        raise NotImported(parent)
    if row.nlink == 0 or parent_links == 0:
        raise posix_error(errno.ENOENT)
    if row.nlink >= limits.LINKS_MAX:
        raise posix_error(errno.EMLINK)
    _insert_entry(db, parent, name, inode)
    db.run("UPDATE inode SET nlink=nlink+1, ctime_ns=? WHERE id=?", now, inode)
    _record_directory_change(db, parent, now)
    journal.append(db, "link", inode, parent=parent, name=name)
    return get(db, inode)


def unlink(db: Database, parent: int, name: bytes) -> Inode:
    """Take away a name of something that is no directory; its inode as it is now (nlink 0: it was the last name)."""
    now = time.time_ns()
    inode = lookup(db, parent, name)
    if inode.is_directory:
        raise posix_error(errno.EISDIR)
    _delete_entry(db, parent, name)
    decrement_nlink(db, inode, now)
    _record_directory_change(db, parent, now)
    journal.append(db, "unlink", inode.id, parent=parent, name=name)
    return get(db, inode.id)


def rmdir(db: Database, parent: int, name: bytes) -> Inode:
    """Take away an empty directory; its inode as it is now."""
    now = time.time_ns()
    inode = lookup(db, parent, name)
    if not inode.is_directory:
        raise posix_error(errno.ENOTDIR)
    require_empty(db, inode.id, is_imported=inode.is_imported)
    _delete_entry(db, parent, name)
    decrement_nlink(db, inode, now)
    _record_directory_change(db, parent, now, -1)
    journal.append(db, "rmdir", inode.id, parent=parent, name=name)
    return get(db, inode.id)


def decrement_nlink(db: Database, inode: Inode, now: int) -> None:
    """One name fewer leads to `inode`; a directory has no other."""
    db.run("UPDATE inode SET nlink=?, ctime_ns=? WHERE id=?", 0 if inode.is_directory else inode.nlink - 1, now, inode.id)


def list_orphans(db: Database) -> set[int]:
    """Every inode that no name leads to any more and that the kernel may still know."""
    return {row[0] for row in db.rows("SELECT id FROM inode WHERE nlink=0")}


def delete_forgotten(db: Database, inodes: Iterable[int]) -> dict[int, list[int]]:
    """The kernel forgot these unlinked inodes: delete them, doom their contents, whose ids are given. What is open or has a name stays."""
    opened = {row[0] for row in db.rows("SELECT DISTINCT inode FROM handle")}
    gone = [inode for inode in inodes if inode not in opened and not db.value("SELECT nlink FROM inode WHERE id=?", inode)]
    return {inode: _delete_inode(db, inode) for inode in gone}


def _delete_inode(db: Database, inode: int) -> list[int]:
    # What other nodes had may be what another file held before: then the store is asked before it goes.
    known = f"inode=? AND {former.CAN_DELETE}"
    doomed = [row[0] for row in db.rows(f"SELECT id FROM content WHERE {known}", inode)]
    if doomed:
        db.run(f"UPDATE content SET state=? WHERE {known}", ContentState.DOOMED, inode)
    db.run("DELETE FROM xattr WHERE inode=?", inode)
    db.run("DELETE FROM inode WHERE id=?", inode)
    return doomed


# --- the parts that rename shares -------------------------------------------------------------------------------------


def _get_directory(db: Database, parent: int, name: bytes) -> tuple[int, int, bool, int]:
    """(mode, gid, complete, nlink) of the directory that shall hold `name`. Raises ENOENT, ENOTDIR, ENAMETOOLONG, EPERM."""
    require_allowed_name(parent, check_name_length(name))
    row = db.row("SELECT mode, gid, complete, nlink FROM inode WHERE id=?", parent)
    if row is None:
        raise posix_error(errno.ENOENT)
    if not stat.S_ISDIR(row[0]):
        raise posix_error(errno.ENOTDIR)
    return row[0], row[1], bool(row[2]), row[3]


def _insert_entry(db: Database, parent: int, name: bytes, child: int) -> None:
    """Add an entry. Raises EEXIST."""
    try:
        db.run("INSERT INTO entry (parent, name, child) VALUES (?,?,?)", parent, name, child)
    except sqlite3.IntegrityError:
        raise posix_error(errno.EEXIST) from None


def _delete_entry(db: Database, parent: int, name: bytes) -> None:
    db.run("DELETE FROM entry WHERE parent=? AND name=?", parent, name)


def _record_directory_change(db: Database, directory: int, now: int, links: int = 0) -> None:
    """The entries of `directory` changed; it has `links` more subdirectories."""
    db.run("UPDATE inode SET mtime_ns=?, ctime_ns=?, nlink=nlink+? WHERE id=?", now, now, links, directory)
