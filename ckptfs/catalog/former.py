"""Owns `content.former_ns`: what a file held before, kept until what it holds now survives this node's death, too (P5, P9).

A content that other nodes had verified becomes a former one when its file is written anew, or when another file takes its file's name: it
belongs to that file then. It goes when what the file holds now lies on other nodes, or whole on the PFS. Until then `c/` says that it is
one, and its holders keep it. Of a content that is changed in place its holders keep the generation that they had (catalog/holding.py), and
`content.before_generation` says of which the file's time is known. Without a cluster there is none of this. Functions that change
something join the caller's transaction.
If we die here: SQLite undoes the unfinished change.
"""

from ckptfs import lifecycle
from ckptfs.catalog import identity, peers, settling
from ckptfs.catalog.database import Database
from ckptfs.model import Content, Inode

_HAS_HOLDERS = f"EXISTS (SELECT 1 FROM {peers.HOLDERS.format('content')})"
CAN_DELETE = "(former_ns IS NULL OR (peer = 0 AND former_ns > 0))"
"""SQL about a row of `content` whose file is gone: nobody has to ask the store whether another file held it before."""


def mark_superseded(db: Database, inode: int) -> None:
    """What this file holds is about to be the former content of it."""
    if db.is_clustered and peers.get_replication_factor(db) > 1:
        db.run(
            "UPDATE content SET former_ns = (SELECT mtime_ns FROM inode WHERE id = ?1)"
            " WHERE id = (SELECT content FROM inode WHERE id = ?1) AND state = 2 AND former_ns IS NULL"
            f" AND (before_generation IS NOT NULL OR {_HAS_HOLDERS})",
            inode,
        )


def record_replicated_generation(db: Database, content: int) -> None:
    """A content is about to be changed in place: what other nodes have of it is what is left of it until they have the next generation."""
    if db.is_clustered and peers.get_replication_factor(db) > 1:
        db.run(
            "UPDATE content SET before_generation = generation,"
            " before_ns = (SELECT mtime_ns FROM inode WHERE inode.id = content.inode)"
            f" WHERE id = ? AND state = 2 AND (peer = 1 OR {_HAS_HOLDERS})",
            content,
        )


def mark_awaiting_store_check(db: Database, inode: int) -> None:
    """Another node took this file's last name away: what lies here of it may be what another file held before. The store knows."""
    db.run(
        "UPDATE content SET former_ns = 0 WHERE inode = ? AND former_ns IS NULL"
        f" AND (peer = 1 OR (state = 2 AND (before_generation IS NOT NULL OR {_HAS_HOLDERS})))",
        inode,
    )


def list_awaiting_store_check(db: Database, at_most: int) -> list[Content]:
    """Contents of this node's own that are kept only until the store was asked whether another file held them before."""
    numbers = db.rows("SELECT id FROM content WHERE peer = 0 AND former_ns = 0 AND state = 2 ORDER BY id LIMIT ?", at_most)
    return [found for (number,) in numbers if (found := settling.get_content(db, number)) is not None]


def is_awaiting_store_check(db: Database, content: int) -> bool:
    """Whether a content is one of those."""
    return db.value("SELECT 1 FROM content WHERE id = ? AND peer = 0 AND former_ns = 0", content) is not None


def move_to_successor(db: Database, replaced: Inode, successor: Inode) -> None:
    """The last name of one file becomes another one's: what the first holds is the former content of the other. What another node wrote
    of it that one keeps, and whoever has a copy, as soon as this node has told them.
    """
    if not db.is_clustered or replaced.nlink != 1 or not (replaced.is_file and successor.is_file) or successor.content is None:
        return
    if db.value(f"SELECT 1 FROM content WHERE id = ? AND state = 2 AND {_HAS_HOLDERS}", successor.content) is not None:
        return  # It survives already.
    mark_superseded(db, replaced.id)
    if peers.get_replication_factor(db) > 1:
        db.run(
            "UPDATE content SET former_ns = max(1, ?1) WHERE id = ?2 AND peer = 1 AND state = 2 AND coalesce(former_ns, 0) = 0",
            replaced.mtime_ns, replaced.content,
        )  # fmt: skip
    db.run("UPDATE content SET inode = ? WHERE inode = ? AND former_ns > 0", successor.id, replaced.id)


def expire_previous(db: Database, current: Content) -> None:
    """Doom what the file of `now` held before, when it holds that and it survives."""
    if db.value("SELECT 1 FROM content WHERE inode = ? AND former_ns IS NOT NULL", current.inode) is None:
        return
    with db.transaction():
        record = settling.get_file_record(db, current.id)
        if settling.is_shown(db, current) and (lifecycle.is_on_clique(record) or lifecycle.is_on_pfs(record)):
            expired = db.rows(
                "UPDATE content SET state = 3, change = change + 1 WHERE inode = ? AND id <> ? AND former_ns IS NOT NULL AND state <> 3"
                " RETURNING id, peer",
                current.inode, current.id,
            )  # fmt: skip
            for content, peer in expired:
                if peer:
                    peers.insert_unneeded_copy(db, content, identity.get_origin_node(content))
