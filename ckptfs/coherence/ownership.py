"""The changes that a node may make while it is disconnected: those of what is its own.

Its own is what this node made, what it wrote last, and what no other node knows yet. It makes names, writes, closes and syncs all that
it can open, and renames and replaces its own. What others wrote last it reads, and removes: the removal is published on its return if
no node changed it meanwhile. To rename or replace that, it waits for the store (`limits.DISCONNECTED_WAIT_S`), and answers EAGAIN. So its
return is a replay with conditions, and what others did meanwhile seldom contradicts it.

A directory that others know stays in its directory meanwhile: so no two nodes move directories into each other.
"""

from ckptfs.catalog import identity, namespace
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state
from ckptfs.coherence.keys import INODE, SharedKey
from ckptfs.model import Inode


def is_shared(db: Database, inode: int) -> bool:
    """Return True if other nodes know an inode."""
    return key_state.get_cached(db, SharedKey(INODE, inode)).revision != 0


def is_own(db: Database, inode: Inode) -> bool:
    """Return True if this node wrote an inode last, or made it and no node wrote it."""
    if inode.is_file and inode.content is not None:
        return not db.value("SELECT remote FROM content WHERE id = ?", inode.content)
    return identity.get_origin_node(inode.id) == identity.get_node_number(db)


def can_rename(db: Database, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> bool:
    """Return True if a disconnected node may do this rename. Missing names are left to the rename."""
    source, target = namespace.find_child(db, parent, name), namespace.find_child(db, new_parent, new_name)
    shared = [inode for inode in (source, target) if inode is not None and is_shared(db, inode.id)]
    if flags == namespace.EXCHANGE and shared:
        return False
    return all(is_own(db, inode) and not (inode.is_directory and (inode is target or parent != new_parent)) for inode in shared)
