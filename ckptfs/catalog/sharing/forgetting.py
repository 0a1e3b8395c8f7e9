"""Keeps the cache bounded: what this node remembers of other nodes' files, and needs least, it forgets. The store knows it all.

What is open, held, marked, or to be told to the PFS here stays, and so do this node's own inodes; a directory goes after what was in it.
If we die here: one change of the catalog; whoever asks for what was forgotten reads it again.
"""

from ckptfs import limits
from ckptfs.catalog import identity
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import touching

_SELECT_UNNEEDED = (
    "SELECT i.id FROM inode i WHERE i.id > ?1 AND i.id >> 40 <> ?2 AND i.id > 1 AND i.nlink > 0"
    " AND NOT EXISTS (SELECT 1 FROM handle h WHERE h.inode = i.id) AND NOT EXISTS (SELECT 1 FROM entry e WHERE e.parent = i.id)"
    " AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = i.content) AND NOT EXISTS (SELECT 1 FROM journal j WHERE j.inode = i.id)"
    " AND NOT EXISTS (SELECT 1 FROM content k WHERE k.inode = i.id"
    " AND (k.peer = 0 OR EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id)))"
    " AND NOT EXISTS (SELECT 1 FROM published p WHERE p.inode = i.id) AND NOT EXISTS (SELECT 1 FROM pfs_entry p WHERE p.inode = i.id)"
    " AND NOT EXISTS (SELECT 1 FROM touched_key t WHERE t.kind IN ('i', 'm') AND t.number = i.id)"
    " AND NOT EXISTS (SELECT 1 FROM entry e JOIN touched_key t ON t.kind = 'e' AND t.number = e.parent AND t.name = e.name"
    " WHERE e.child = i.id) ORDER BY i.id LIMIT ?3"
)


def is_cache_full(db: Database, keys_max: int = limits.SEEN_KEYS_MAX) -> bool:
    """Whether more is remembered than should be."""
    return int(db.value("SELECT count(*) FROM seen_key")) > keys_max


def delete_unneeded(db: Database, after: int, at_most: int = limits.FORGET_KEYS) -> int:
    """Forget some inodes of other nodes after the one with the id `after`; the last one, 0 at the end."""
    with touching.change_unmarked(db):
        inodes = [row[0] for row in db.rows(_SELECT_UNNEEDED, after, identity.get_node_number(db), at_most)]
        for inode in inodes:
            db.run("DELETE FROM seen_key WHERE kind = 'e' AND (number, name) IN (SELECT parent, name FROM entry WHERE child = ?)", inode)
            db.run("DELETE FROM entry WHERE child = ?", inode)
            db.run("DELETE FROM seen_key WHERE kind = 'c' AND number IN (SELECT id FROM content WHERE inode = ?)", inode)
            db.run("DELETE FROM content WHERE inode = ?", inode)
            db.run("DELETE FROM xattr WHERE inode = ?", inode)
            db.run("DELETE FROM seen_key WHERE kind IN ('i', 'm') AND number = ?", inode)
            db.run("DELETE FROM inode WHERE id = ?", inode)
    return inodes[-1] if inodes else 0
