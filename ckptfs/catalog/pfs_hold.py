"""Changes that are held back from the PFS (D7): the internal attribute `HELD_XATTR` of an inode.

If a retention rule sends only some sets of a series to the PFS, all that is made in the place of such a set is held. Changes of held
inodes append no journal rows: the PFS does not get them, and they do not count as pending. `release` appends the rows that make
it on the PFS as it is then. A set is released when it is chosen, a file when it gets a name in another place.

All nodes of a cluster know the attribute, like any other. So each of them can release what another one made and left behind.

Functions that change rows join the caller's transaction.

Invariants:
- The PFS shows nothing that is held.
- Everything in a held directory is held. In a cluster, a held file may be in a directory that is not held, until its writer releases it.
"""

import json
import stat

from ckptfs.catalog import identity, journal
from ckptfs.catalog.content_rows import HELD_XATTR, IS_HELD, IS_HELD_MARK, count_sizes
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import WITH_TREE, get_path, list_names, set_internal_xattr
from ckptfs.model import Inode


def is_held(db: Database, inode: int) -> bool:
    """Return True if the PFS is not to show an inode now."""
    return bool(db.value(f"SELECT {IS_HELD.format('?')}", inode))


def is_left_out(db: Database, inode: int) -> bool:
    """Return True if an inode at or below a held one belongs to a complete set that was not chosen."""
    held = f"SELECT 1 FROM tree JOIN inode i ON i.id = tree.id AND i.history > 0 AND {IS_HELD.format('i.id')} LIMIT 1"
    return db.value(f"{WITH_TREE} {held}", json.dumps([inode])) is not None


def list_held_below(db: Database, top: int) -> list[tuple[int, int]]:
    """Return (inode, the node that wrote its content) of what is held at or below an inode.

    The node is 0 for what has no content.
    """
    query = f"SELECT i.id, i.content FROM tree JOIN inode i ON i.id = tree.id AND {IS_HELD.format('i.id')}"
    return [(inode, identity.get_origin_node(content or 0)) for inode, content in db.rows(f"{WITH_TREE} {query}", json.dumps([top]))]


def count_held(db: Database) -> tuple[int, int]:
    """Return (number, bytes) of the files of applications that this node wrote and that are held."""
    files = "xattr h JOIN inode i ON i.id = h.inode AND i.nlink > 0 LEFT JOIN content k ON k.id = i.content"
    is_held = f"{IS_HELD_MARK} AND i.mode & {0o170000} = {stat.S_IFREG} AND (i.content IS NULL OR k.remote = 0)"
    return count_sizes(db, "i.size", f"{files} WHERE {is_held}")


def hold_new(db: Database, inode: int, parent: int, name: bytes) -> None:
    """Hold an inode that was just made under a name, if its place asks for that."""
    if db.holds_back is not None and _is_place_held(db, parent, name):
        set_internal_xattr(db, inode, HELD_XATTR, b"1")


def _is_place_held(db: Database, parent: int, name: bytes) -> bool:
    return is_held(db, parent) or (db.holds_back is not None and db.holds_back(get_path(db, parent), name))


def append_link_row(db: Database, inode: int, parent: int, name: bytes) -> None:
    """Record a further name for the PFS. An inode with a name in a place that is not held is released."""
    if db.holds_back is not None and is_held(db, inode):
        if not _is_place_held(db, parent, name):
            release(db, inode)
        return
    release(db, parent)
    journal.append(db, "link", inode, parent=parent, name=name)


def append_rename_row(
    db: Database, source: Inode, parent: int, name: bytes, new_parent: int, new_name: bytes, target: Inode | None
) -> None:
    """Record for the PFS that `source` was renamed and has replaced `target`."""
    if db.holds_back is not None and is_held(db, source.id):
        if not _is_place_held(db, new_parent, new_name):
            release_tree(db, source.id)
        elif target is not None:
            journal.append(db, "rmdir" if target.is_directory else "unlink", target.id, parent=new_parent, name=new_name)
        return
    release(db, new_parent)
    journal.append(db, "rename", source.id, parent=parent, name=name, new_parent=new_parent, new_name=new_name)


def release_exchanged(db: Database, *inodes: int) -> None:
    """Release two inodes that are about to exchange their names, and the two directories."""
    for inode in inodes if db.holds_back is not None else ():
        (release_tree if inode in inodes[::2] else release)(db, inode)


def release_tree(db: Database, inode: int) -> None:
    release(db, inode)
    for (child,) in db.rows("SELECT child FROM entry WHERE parent = ? ORDER BY cookie", inode):
        release_tree(db, child)


def release(db: Database, inode: int) -> None:
    """Have the PFS show an inode as it is now, with the directories that lead to it."""
    if not is_held(db, inode):
        return
    names = list_names(db, inode)
    for parent, _ in names:
        release(db, parent)
    set_internal_xattr(db, inode, HELD_XATTR, None)
    for parent, name in names:
        journal.append(db, "make" if (parent, name) == names[0] else "link", inode, parent=parent, name=name)
    content, remote = db.row(
        "SELECT i.content, coalesce(k.remote, 1) FROM inode i LEFT JOIN content k ON k.id = i.content"
        " WHERE i.id = ? AND (k.remote = 1 OR k.state IS NULL OR k.state IN (1, 2))", inode,
    ) or (None, 0)  # fmt: skip
    if content is not None:
        journal.append(db, "content", inode, content=content, origin=identity.get_origin_node(content) if remote else 0)


def release_moved(db: Database, inode: int) -> bool:
    """Have the PFS show a file that another node moved out of a held place before this node sealed it.

    Nothing else does: this node closed what was held, and the other one had no bytes of it. Return True if it is such a file.
    """
    content = db.value("SELECT k.id FROM inode i JOIN content k ON k.id = i.content AND k.remote = 0 AND k.state = 2 WHERE i.id = ?", inode)
    names = db.rows("SELECT e.parent, e.name FROM entry e JOIN inode d ON d.id = e.parent AND d.history = 0 WHERE e.child = ?", inode)
    if content is None or all(_is_place_held(db, parent, bytes(name)) for parent, name in names):
        return False
    if is_held(db, inode):
        release(db, inode)
        return True
    is_recorded = "SELECT EXISTS (SELECT 1 FROM journal WHERE inode = ?1) OR EXISTS (SELECT 1 FROM pfs_file WHERE inode = ?1)"
    if db.value(is_recorded, inode):
        return False
    journal.append(db, "content", inode, content=content)
    return True


def release_misplaced(db: Database) -> None:
    """Release what the rules, which may have changed, do not hold back any more."""
    tops = db.rows(
        f"SELECT h.inode, e.parent, e.name FROM xattr h JOIN entry e ON e.child = h.inode WHERE {IS_HELD_MARK}"
        f" AND NOT {IS_HELD.format('e.parent')}"
    )
    for inode, parent, name in tops:
        if not _is_place_held(db, parent, bytes(name)):
            release_tree(db, inode)
