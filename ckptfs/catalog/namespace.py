"""Names and their inodes (tables `inode` and `entry`): create, link, unlink, rename and readdir.

Functions that change rows join the caller's transaction, and append the journal row of the change. They raise OSError with the errno of
ext4, or `NotImported` if the answer depends on a PFS directory that was not imported yet. With `allow_unimported` a new name does not wait
for the import: it is made from what the catalog knows (P1). A rename keeps the cookie of a name that is replaced or exchanged, and of one
that moves within its directory.

Invariants:
- The nlink of a directory is 2 plus its subdirectories. In a cluster no node counts what others made: it is 2 or more.
- An inode with nlink 0 has no entry and waits for `delete_forgotten`; its bytes stay until the store has deleted it, too.
- `parent` of a directory is where its entry is.
- `history` of a directory is 1 below `HISTORY_NAME`, and 0 elsewhere; that of anything else counts its names there. Applications see
  neither that name nor these links, whose changes leave ctime alone.
- A cookie belongs to an entry as long as its name exists: a reader of a directory sees a name that exists all the time exactly once.
"""

import contextlib
import errno
import json
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator

from ckptfs import limits
from ckptfs.catalog import contents, identity, inodes, journal, pfs_hold
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import INODE_COLUMNS_JOINED, build_inode
from ckptfs.catalog.inodes import get as get
from ckptfs.catalog.inodes import get_path as get_path
from ckptfs.errors import CkptfsError, posix_error
from ckptfs.model import HISTORY_NAME, ROOT, Entry, Inode

_SELECT_ENTRIES = (
    f"SELECT entry.cookie, entry.name, {INODE_COLUMNS_JOINED} FROM entry INDEXED BY entry_order JOIN inode ON inode.id = entry.child"
    " WHERE entry.parent=? AND entry.cookie>? ORDER BY entry.cookie"
)


class NotImported(CkptfsError):
    """The answer depends on `directory` of the PFS: request a scan, then retry."""

    def __init__(self, directory: int) -> None:
        super().__init__(f"directory {directory} was not imported from the PFS yet")
        self.directory = directory


def iterate_entries(db: Database, directory: int, after: int = 0) -> Iterator[tuple[Entry, Inode]]:
    """Yield entries after a cookie with their inodes, without the history. Do not await in between."""
    with contextlib.closing(db.connection.execute(_SELECT_ENTRIES, (directory, after))) as rows:
        for row in rows:
            cookie, name = row[:2]
            if directory == ROOT and name == HISTORY_NAME:
                continue
            inode = build_inode(row[2:])
            yield Entry(cookie, directory, name, inode.id), inode


def iterate_names_below(db: Database, directory: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (directory, name, is it a directory) below a directory, the deepest first."""
    for entry, inode in iterate_entries(db, directory):
        if inode.is_directory:
            yield from iterate_names_below(db, inode.id)
        yield directory, entry.name, inode.is_directory


def require_empty(db: Database, directory: int, *, is_imported: bool) -> None:
    """Raise ENOTEMPTY if `directory` has entries, NotImported if that is not known yet."""
    if db.row("SELECT 1 FROM entry WHERE parent=? LIMIT 1", directory) is not None:
        raise posix_error(errno.ENOTEMPTY)
    if not is_imported:
        raise NotImported(directory)


def is_inside(db: Database, directory: int, ancestor: int) -> bool:
    """Return True if `directory` is `ancestor` or below it."""
    found = db.row(
        "WITH RECURSIVE up(id) AS (SELECT ? UNION SELECT inode.parent FROM inode JOIN up ON inode.id = up.id WHERE inode.parent > 0)"
        " SELECT 1 FROM up WHERE id=? LIMIT 1",
        directory, ancestor,
    )  # fmt: skip
    return found is not None


RESERVED_NAME = b".ckptfs"
RESERVED_PREFIX = b".ckptfs."
_SELECT_CHILD = f"SELECT {INODE_COLUMNS_JOINED} FROM entry JOIN inode ON inode.id = entry.child WHERE entry.parent=? AND entry.name=?"

_SELECT_LOOKUP = (
    f"SELECT directory.mode, directory.imported, {INODE_COLUMNS_JOINED} FROM inode directory"
    " LEFT JOIN entry ON entry.parent = directory.id AND entry.name = ?2 LEFT JOIN inode ON inode.id = entry.child WHERE directory.id = ?1"
)

_INSERT_INODE = (
    "INSERT INTO inode (id, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns, birth_ns, target, parent, history)"
    " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)"
)
_DELETE_ENTRY = "DELETE FROM entry WHERE parent=? AND name=?"


def find_child(db: Database, parent: int, name: bytes) -> Inode | None:
    """Return the inode under `name` in `parent`. Returns None if the catalog has no such name."""
    row = db.row(_SELECT_CHILD, parent, name)
    return None if row is None else build_inode(row)


def lookup(db: Database, parent: int, name: bytes) -> Inode:
    """Return the inode under `name` in `parent`. Raises ENOENT, ENOTDIR, ENAMETOOLONG or NotImported."""
    row = db.row(_SELECT_LOOKUP, parent, check_name_length(name))
    if row is None or (parent == ROOT and name == HISTORY_NAME):
        raise posix_error(errno.ENOENT)
    parent_mode, is_imported, child = row[:3]
    if child is not None:
        return build_inode(row[2:])
    if not stat.S_ISDIR(parent_mode):
        raise posix_error(errno.ENOTDIR)
    if not is_imported:
        raise NotImported(parent)
    raise posix_error(errno.ENOENT)


def require_allowed_name(parent: int, name: bytes) -> None:
    """Raise EPERM for a new name that ckptfs uses for itself on the PFS."""
    if is_reserved_name(parent, name):
        raise posix_error(errno.EPERM)


def is_reserved_name(parent: int, name: bytes) -> bool:
    """Return True for a name that ckptfs uses for itself on the PFS."""
    return name.startswith(RESERVED_NAME) and (name.startswith(RESERVED_PREFIX) or (parent == ROOT and name == RESERVED_NAME))


def check_name_length(name: bytes) -> bytes:
    """Return `name`. Raises ENAMETOOLONG."""
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
    """Create an inode of the type in `mode`. Entries of a setgid directory inherit its group."""
    now = time.time_ns()
    parent_mode, parent_gid, is_imported, parent_links, history = _get_directory(db, parent, name)
    if not (is_imported or allow_unimported) and find_child(db, parent, name) is None:
        raise NotImported(parent)
    if parent_links == 0:
        raise posix_error(errno.ENOENT)
    directory = stat.S_ISDIR(mode)
    if parent_mode & stat.S_ISGID:
        gid = parent_gid
        mode |= stat.S_ISGID if directory else 0
    links, size, home = (2, 0, parent) if directory else (1, len(target or b""), 0)
    number = identity.allocate_id(db, "inode", in_history=directory and history > 0)
    made = db.insert(_INSERT_INODE, number, mode, uid, gid, rdev, links, size, now, now, now, now, target, home, history)
    _insert_entry(db, parent, name, made)
    _record_directory_change(db, parent, now, 1 if directory else 0)
    pfs_hold.hold_new(db, made, parent, name)
    journal.append(db, "make", made, parent=parent, name=name)
    return Inode(made, mode, uid, gid, rdev, links, size, now, now, now, target, None, 0, home, True, history)


def create_history_root(db: Database, mode: int) -> int:
    """Create the directory of the history. Applications see nothing of it in the root."""
    now = time.time_ns()
    root = get(db, ROOT)
    number = identity.allocate_id(db, "inode", in_history=True)
    made = db.insert(_INSERT_INODE, number, mode, root.uid, root.gid, 0, 2, 0, now, now, now, now, None, ROOT, 1)
    _insert_entry(db, ROOT, HISTORY_NAME, made)
    journal.append(db, "make", made, parent=ROOT, name=HISTORY_NAME)
    return made


def link(db: Database, inode: int, parent: int, name: bytes, *, allow_unimported: bool = False) -> Inode:
    """Give a file another name. Raises EPERM for directories, EMLINK and EEXIST."""
    now = time.time_ns()
    row = inodes.get(db, inode)
    _, _, is_imported, parent_links, history = _get_directory(db, parent, name)
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
    db.run("UPDATE inode SET nlink=nlink+1, history=history+?, ctime_ns=? WHERE id=?", history, row.ctime_ns if history else now, inode)
    _record_directory_change(db, parent, now)
    pfs_hold.append_link_row(db, inode, parent, name)
    if not history:
        insert_candidates(db, [inode])
    return inodes.get(db, inode)


def unlink(db: Database, parent: int, name: bytes) -> Inode:
    """Remove the name of a non-directory. Return its inode; nlink 0: that was the last name."""
    now = time.time_ns()
    inode = lookup(db, parent, name)
    if inode.is_directory:
        raise posix_error(errno.EISDIR)
    db.run(_DELETE_ENTRY, parent, name)
    if get(db, parent).history:
        db.run("UPDATE inode SET nlink=nlink-1, history=history-1 WHERE id=?", inode.id)
    else:
        decrement_nlink(db, inode, now)
    _record_directory_change(db, parent, now)
    journal.append(db, "unlink", inode.id, parent=parent, name=name)
    return inodes.get(db, inode.id)


def rmdir(db: Database, parent: int, name: bytes) -> Inode:
    """Remove an empty directory. Return its inode after that."""
    now = time.time_ns()
    inode = lookup(db, parent, name)
    if not inode.is_directory:
        raise posix_error(errno.ENOTDIR)
    require_empty(db, inode.id, is_imported=inode.is_imported)
    db.run(_DELETE_ENTRY, parent, name)
    decrement_nlink(db, inode, now)
    _record_directory_change(db, parent, now, -1)
    journal.append(db, "rmdir", inode.id, parent=parent, name=name)
    return inodes.get(db, inode.id)


def decrement_nlink(db: Database, inode: Inode, now: int) -> None:
    """Record that one name fewer leads to `inode`. A directory has no other."""
    db.run("UPDATE inode SET nlink=?, ctime_ns=? WHERE id=?", 0 if inode.is_directory else inode.nlink - 1, now, inode.id)
    if inode.history and not inode.is_directory:
        insert_candidates(db, [inode.id])


def list_orphans(db: Database) -> set[int]:
    """Return all inodes without a name that the kernel may still know."""
    return set(db.column("SELECT id FROM inode WHERE nlink=0"))


def delete_forgotten(db: Database, inodes: Iterable[int]) -> dict[int, list[int]]:
    """Delete unlinked, closed inodes that the kernel forgot. Return the contents that are doomed."""
    opened = set(db.column("SELECT DISTINCT inode FROM handle"))
    gone = [inode for inode in inodes if inode not in opened and contents.is_deleted(db, inode)]
    doomed = {inode: contents.mark_all_doomed(db, inode) for inode in gone}
    for inode in gone:
        db.run("DELETE FROM xattr WHERE inode=?", inode)
        db.run("DELETE FROM inode WHERE id=?", inode)
        db.run("DELETE FROM pfs_pending WHERE inode=?1 AND NOT EXISTS (SELECT 1 FROM journal WHERE inode=?1)", inode)
    return doomed


def _get_directory(db: Database, parent: int, name: bytes) -> tuple[int, int, bool, int, int]:
    """Return (mode, gid, imported, nlink, history) of the directory for a new `name`. Raises OSError."""
    require_allowed_name(parent, check_name_length(name))
    row = db.row("SELECT mode, gid, imported, nlink, history FROM inode WHERE id=?", parent)
    if row is None:
        raise posix_error(errno.ENOENT)
    mode, gid, is_imported, nlink, history = row
    if not stat.S_ISDIR(mode):
        raise posix_error(errno.ENOTDIR)
    return mode, gid, bool(is_imported), nlink, history


def _insert_entry(db: Database, parent: int, name: bytes, child: int) -> None:
    """Insert an entry. Raises EEXIST."""
    try:
        db.run("INSERT INTO entry (parent, name, child) VALUES (?,?,?)", parent, name, child)
    except sqlite3.IntegrityError:
        raise posix_error(errno.EEXIST) from None


def _record_directory_change(db: Database, directory: int, now: int, links: int = 0) -> None:
    """Record that the entries of `directory` changed; it has `links` more subdirectories."""
    db.run("UPDATE inode SET mtime_ns=?, ctime_ns=?, nlink=max(nlink+?, 2) WHERE id=?", now, now, links, directory)


NOREPLACE = 1
EXCHANGE = 2


def rename(
    db: Database, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0, *, allow_unimported: bool = False
) -> Inode | None:
    """Rename as renameat2(2) does. Return the inode that was replaced, as it is after that, or None."""
    if flags not in (0, NOREPLACE, EXCHANGE):
        raise posix_error(errno.EINVAL)
    source = lookup(db, parent, name)
    require_allowed_name(new_parent, new_name)
    target = find_child(db, new_parent, check_name_length(new_name))
    if target is None:
        _require_target_directory(db, new_parent, flags, allow_unimported=allow_unimported)
    elif flags == NOREPLACE:
        raise posix_error(errno.EEXIST)
    if target is not None and source.id == target.id:
        return None
    _require_no_loop(db, parent, new_parent, source, target, flags)
    if flags == EXCHANGE:
        assert target is not None
        _exchange_entries(db, parent, name, source, new_parent, new_name, target)
        return None
    if target is not None:
        _require_replaceable(db, source, target)
    _move_entry(db, parent, name, source, new_parent, new_name, target)
    return None if target is None else get(db, target.id)


def _require_target_directory(db: Database, new_parent: int, flags: int, *, allow_unimported: bool) -> None:
    directory = get(db, new_parent)
    if not directory.is_directory:
        raise posix_error(errno.ENOTDIR)
    if not directory.is_imported and (flags == EXCHANGE or not allow_unimported):
        raise NotImported(new_parent)
    if flags == EXCHANGE or directory.nlink == 0:
        raise posix_error(errno.ENOENT)


def _require_no_loop(db: Database, parent: int, new_parent: int, source: Inode, target: Inode | None, flags: int) -> None:
    if parent == new_parent:
        return
    if source.is_directory and is_inside(db, new_parent, source.id):
        raise posix_error(errno.EINVAL)
    if target is not None and target.is_directory and is_inside(db, parent, target.id):
        raise posix_error(errno.EINVAL if flags == EXCHANGE else errno.ENOTEMPTY)


def _require_replaceable(db: Database, source: Inode, target: Inode) -> None:
    """Check that a directory replaces only an empty directory, and anything else only a non-directory."""
    if source.is_directory and not target.is_directory:
        raise posix_error(errno.ENOTDIR)
    if target.is_directory and not source.is_directory:
        raise posix_error(errno.EISDIR)
    if target.is_directory:
        require_empty(db, target.id, is_imported=target.is_imported)


def _move_entry(db: Database, parent: int, name: bytes, source: Inode, new_parent: int, new_name: bytes, target: Inode | None) -> None:
    now = time.time_ns()
    if target is not None:
        contents.move_to_successor(db, target, source)
        db.run(_DELETE_ENTRY, parent, name)
        db.run("UPDATE entry SET child=? WHERE parent=? AND name=?", source.id, new_parent, new_name)
        decrement_nlink(db, target, now)
    elif parent == new_parent:
        db.run("UPDATE entry SET name=? WHERE parent=? AND name=?", new_name, parent, name)
    else:
        db.run(_DELETE_ENTRY, parent, name)
        db.run("INSERT INTO entry (parent, name, child) VALUES (?,?,?)", new_parent, new_name, source.id)
    moved = 1 if source.is_directory else 0
    replaced = 1 if target is not None and target.is_directory else 0
    _record_parent_changes(db, now, parent, -moved, new_parent, moved - replaced)
    _set_parent(db, now, source, new_parent)
    pfs_hold.append_rename_row(db, source, parent, name, new_parent, new_name, target)
    if not (source.is_directory and source.history):
        insert_candidates(db, [source.id])


def _exchange_entries(db: Database, parent: int, name: bytes, source: Inode, new_parent: int, new_name: bytes, target: Inode) -> None:
    now = time.time_ns()
    pfs_hold.release_exchanged(db, source.id, new_parent, target.id, parent)
    db.run("UPDATE entry SET child=? WHERE parent=? AND name=?", target.id, parent, name)
    db.run("UPDATE entry SET child=? WHERE parent=? AND name=?", source.id, new_parent, new_name)
    more = int(target.is_directory) - int(source.is_directory)
    _record_parent_changes(db, now, parent, more, new_parent, -more)
    _set_parent(db, now, source, new_parent)
    _set_parent(db, now, target, parent)
    journal.append(db, "exchange", source.id, parent=parent, name=name, new_parent=new_parent, new_name=new_name)
    insert_candidates(db, [source.id, target.id])


def _record_parent_changes(db: Database, now: int, parent: int, links: int, new_parent: int, new_links: int) -> None:
    """Record that both directories changed, and how many more subdirectories they have."""
    _record_directory_change(db, parent, now, links)
    if new_links or parent != new_parent:
        _record_directory_change(db, new_parent, now, new_links)


def _set_parent(db: Database, now: int, inode: Inode, directory: int) -> None:
    """Record that a renamed inode is in `directory` now."""
    db.run("UPDATE inode SET ctime_ns=?, parent=? WHERE id=?", now, directory if inode.is_directory else 0, inode.id)


def list_inodes_below(db: Database, inode: int) -> set[int]:
    """Return `inode` and all inodes below it."""
    return set(db.column(f"{inodes.WITH_TREE} SELECT id FROM tree", json.dumps([inode])))


def list_directories(db: Database, numbers: Iterable[int]) -> list[int]:
    """Return those of these inodes that are directories."""
    directories = f"SELECT i.id FROM json_each(?) n CROSS JOIN inode i ON i.id = n.value WHERE i.mode & 61440 = {stat.S_IFDIR}"
    return db.column(directories, json.dumps([*numbers]))


def list_files_below(db: Database, inode: int) -> list[int]:
    """Return the regular files at and below `inode`, in the order of their ids."""
    files = f"SELECT i.id FROM tree JOIN inode i ON i.id = tree.id WHERE i.mode & 61440 = {stat.S_IFREG} ORDER BY i.id"
    return db.column(f"{inodes.WITH_TREE} {files}", json.dumps([inode]))


# --- candidates for checkpoint sets -----------------------------------------------------------------------------------
# An inode that was sealed or got a name may complete a set. A file of the history that lost a name, or whose set was pinned or unpinned,
# may leave sets without protection. What a dead node wrote may not have been tracked. The row of a candidate stays until the tracker has
# handled it.


def insert_candidates(db: Database, candidates: Iterable[int]) -> None:
    """Note that these inodes were sealed, or got or lost a name."""
    now = time.time_ns()
    db.run_each("INSERT OR REPLACE INTO set_candidate (inode, at_ns) VALUES (?, ?)", [(inode, now) for inode in candidates])


def list_candidates(db: Database, after: int) -> list[tuple[int, int]]:
    """Return (inode, at_ns) of the next candidates with greater numbers than `after`, in order."""
    query = "SELECT inode, at_ns FROM set_candidate WHERE inode > ? ORDER BY inode LIMIT ?"
    return db.rows(query, after, limits.SET_CANDIDATES_MAX)


def delete_candidates(db: Database, done: Iterable[tuple[int, int]]) -> None:
    """Delete candidates that were not noted again meanwhile."""
    with db.transaction():
        db.run_each("DELETE FROM set_candidate WHERE inode = ? AND at_ns = ?", done)
