"""Owns rename(2) in the catalog: plain, NOREPLACE and EXCHANGE.

A name that is replaced or exchanged keeps its cookie, and a name that changes within its directory takes its cookie along: who reads the
directory meanwhile finds every name that was there all the time exactly once.
If we die here: the transaction was committed or it was not.
"""

import errno
import time

from ckptfs.catalog import former, journal
from ckptfs.catalog.database import Database
from ckptfs.catalog.directories import NotImported, is_inside, require_empty
from ckptfs.catalog.namespace import check_name_length, decrement_nlink, find_child, get, lookup, require_allowed_name
from ckptfs.errors import posix_error
from ckptfs.model import Inode

NOREPLACE = 1
EXCHANGE = 2


def rename(
    db: Database, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0, *, allow_unimported: bool = False
) -> Inode | None:
    """Rename as renameat2(2) does; the inode that was replaced, as it is now, if there was one."""
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
    """There must be a living directory in which a name can be new."""
    directory = get(db, new_parent)
    if not directory.is_directory:
        raise posix_error(errno.ENOTDIR)
    if not directory.is_imported and (flags == EXCHANGE or not allow_unimported):
        raise NotImported(new_parent)
    if flags == EXCHANGE or directory.nlink == 0:
        raise posix_error(errno.ENOENT)


def _require_no_loop(db: Database, parent: int, new_parent: int, source: Inode, target: Inode | None, flags: int) -> None:
    """No directory may come to lie inside itself, or take the place of one that it lies in."""
    if parent == new_parent:
        return
    if source.is_directory and is_inside(db, new_parent, source.id):
        raise posix_error(errno.EINVAL)
    if target is not None and target.is_directory and is_inside(db, parent, target.id):
        raise posix_error(errno.EINVAL if flags == EXCHANGE else errno.ENOTEMPTY)


def _require_replaceable(db: Database, source: Inode, target: Inode) -> None:
    """A directory replaces an empty directory, anything else anything else."""
    if source.is_directory and not target.is_directory:
        raise posix_error(errno.ENOTDIR)
    if target.is_directory and not source.is_directory:
        raise posix_error(errno.EISDIR)
    if target.is_directory:
        require_empty(db, target.id, is_imported=target.is_imported)


def _move_entry(db: Database, parent: int, name: bytes, source: Inode, new_parent: int, new_name: bytes, target: Inode | None) -> None:
    now = time.time_ns()
    if target is not None:
        former.move_to_successor(db, target, source)
        db.run("DELETE FROM entry WHERE parent=? AND name=?", parent, name)
        db.run("UPDATE entry SET child=? WHERE parent=? AND name=?", source.id, new_parent, new_name)
        decrement_nlink(db, target, now)
    elif parent == new_parent:
        db.run("UPDATE entry SET name=? WHERE parent=? AND name=?", new_name, parent, name)
    else:
        db.run("DELETE FROM entry WHERE parent=? AND name=?", parent, name)
        db.run("INSERT INTO entry (parent, name, child) VALUES (?,?,?)", new_parent, new_name, source.id)
    moved = 1 if source.is_directory else 0
    replaced = 1 if target is not None and target.is_directory else 0
    _record_parent_changes(db, now, parent, -moved, new_parent, moved - replaced)
    _set_parent(db, now, source, new_parent)
    journal.append(db, "rename", source.id, parent=parent, name=name, new_parent=new_parent, new_name=new_name)


def _exchange_entries(db: Database, parent: int, name: bytes, source: Inode, new_parent: int, new_name: bytes, target: Inode) -> None:
    now = time.time_ns()
    db.run("UPDATE entry SET child=? WHERE parent=? AND name=?", target.id, parent, name)
    db.run("UPDATE entry SET child=? WHERE parent=? AND name=?", source.id, new_parent, new_name)
    more = int(target.is_directory) - int(source.is_directory)
    _record_parent_changes(db, now, parent, more, new_parent, -more)
    _set_parent(db, now, source, new_parent)
    _set_parent(db, now, target, parent)
    journal.append(db, "exchange", source.id, parent=parent, name=name, new_parent=new_parent, new_name=new_name)


def _record_parent_changes(db: Database, now: int, parent: int, links: int, new_parent: int, new_links: int) -> None:
    """Both directories changed, and have so many more subdirectories."""
    db.run("UPDATE inode SET mtime_ns=?, ctime_ns=?, nlink=nlink+? WHERE id=?", now, now, links, parent)
    if new_links or parent != new_parent:
        db.run("UPDATE inode SET mtime_ns=?, ctime_ns=?, nlink=nlink+? WHERE id=?", now, now, new_links, new_parent)


def _set_parent(db: Database, now: int, inode: Inode, directory: int) -> None:
    """What was renamed lies in `directory` now."""
    db.run("UPDATE inode SET ctime_ns=?, parent=? WHERE id=?", now, directory if inode.is_directory else 0, inode.id)
