"""Owns what a fetch reads and changes in the catalog: a file that lies on the PFS only gets a verified copy in a tier of this node.

A new content's id is reserved by a FILLING copy without a content: nobody takes it for anything, the drop flow leaves its file alone,
and recovery removes both. It becomes a content in the transaction that makes it the file's own.
If we die here: the change happened as a whole or not at all.
"""

import time
from dataclasses import dataclass

from ckptfs.catalog import holding, identity, settling
from ckptfs.catalog.database import Database
from ckptfs.model import Content, Tier


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """What table `published` says of a file. `digest` is None when it was never read; `checked` whether it was found right in place."""

    generation: int
    is_complete: bool
    size: int
    mtime_ns: int
    pfs_inode: int
    digest: bytes | None
    is_verified: bool


@dataclass(frozen=True, slots=True)
class FetchState:
    """A file as a fetch begins: its content if it has one, whether that has a good copy here, and what the PFS shows."""

    inode: int
    content: Content | None
    has_local_copy: bool
    published: PublishedFile | None


@dataclass(frozen=True, slots=True)
class FetchedContent:
    """What was read from the PFS, digested on its way into `tier`."""

    content: int
    tier: Tier
    size: int
    digest: bytes
    block_digests: bytes


def load_fetch_state(db: Database, inode: int) -> FetchState | None:
    """The file as one snapshot; None when it has no name any more."""
    with db.read_transaction():
        alive = "(nlink > 0 OR EXISTS (SELECT 1 FROM handle WHERE handle.inode = inode.id))"
        row = db.row(f"SELECT content FROM inode WHERE id = ? AND {alive}", inode)
        if row is None:
            return None
        content = None if row[0] is None else settling.get_content(db, row[0])
        has_local_copy = row[0] is not None and db.value("SELECT 1 FROM copy WHERE content = ? AND state = 1", row[0]) is not None
        return FetchState(inode, content, has_local_copy, _get_published_file(db, inode))


def get_content_id(db: Database, inode: int) -> int | None:
    """The id of what the file holds, whether anything else is known of that or not."""
    found: int | None = db.value("SELECT content FROM inode WHERE id = ?", inode)
    return found


def _get_published_file(db: Database, inode: int) -> PublishedFile | None:
    shown = db.row("SELECT generation, complete, size, mtime_ns, pfs_inode, digest, checked_ns FROM published WHERE inode = ?", inode)
    if shown is None:
        return None
    generation, complete, size, mtime_ns, pfs_inode, digest, checked_ns = shown
    return PublishedFile(generation, bool(complete), size, mtime_ns, pfs_inode, digest, bool(checked_ns))


def insert_reserved_copy(db: Database, tier: Tier) -> int:
    """An id for a content that is about to arrive in `tier`."""
    with db.transaction():
        content = db.insert("INSERT INTO content (id, inode, generation, state) VALUES (?, 0, 0, 3)", identity.allocate_id(db, "content"))
        db.run("DELETE FROM content WHERE id = ?", content)
        db.run("INSERT INTO copy (content, tier, state, used_ns) VALUES (?, ?, 0, ?)", content, tier, time.time_ns())
        return content


def delete_filling_pfs_copies(db: Database) -> None:
    """A former mover died while something arrived in the PFS's work area, which recovery does not touch: that copy is none."""
    with db.transaction():
        db.run("DELETE FROM copy WHERE tier = ? AND state = 0", Tier.PFS)


def delete_filling_copy(db: Database, content: int, tier: Tier) -> None:
    """Nothing arrived: forget the FILLING copy. Its file is gone already."""
    with db.transaction():
        db.run("DELETE FROM copy WHERE content = ? AND tier = ? AND state = 0", content, tier)


def record_fetched(db: Database, expected: FetchState, fetched: FetchedContent) -> bool:
    """Make what arrived the content of the file, if nothing about the file has changed since `before`; whether it is."""
    with db.transaction():
        if load_fetch_state(db, expected.inode) != expected:
            return False
        assert expected.published is not None
        now = time.time_ns()
        if expected.content is None:
            db.run(
                "INSERT INTO content (id, inode, generation, state, size, digest, blocks, change, closed_ns) VALUES (?,?,?,2,?,?,?,1,?)",
                fetched.content, expected.inode, expected.published.generation, fetched.size, fetched.digest, fetched.block_digests, now,
            )  # fmt: skip
            db.run("UPDATE inode SET content = ?, size = ? WHERE id = ?", fetched.content, fetched.size, expected.inode)
        db.run("UPDATE copy SET state = 1, verified_ns = ? WHERE content = ? AND tier = ?", now, fetched.content, fetched.tier)
        if expected.content is not None and expected.content.is_remote:
            db.run("UPDATE content SET blocks = coalesce(blocks, ?), told = 2 WHERE id = ?", fetched.block_digests, fetched.content)
        holding.mark_copy_present(db, fetched.content)
        _set_pfs_digest(db, expected.inode, fetched.digest, fetched.block_digests)
        return True


def record_pfs_verified(db: Database, expected: FetchState, digest: bytes, block_digests: bytes) -> bool:
    """The file on the PFS was read in place and found to be what it should; False when the file has changed since `before`."""
    with db.transaction():
        if load_fetch_state(db, expected.inode) != expected:
            return False
        _set_pfs_digest(db, expected.inode, digest, block_digests)
        return True


def _set_pfs_digest(db: Database, inode: int, digest: bytes, block_digests: bytes) -> None:
    """What the PFS shows has this digest."""
    db.run("UPDATE published SET digest = ?, blocks = ?, checked_ns = ? WHERE inode = ?", digest, block_digests, time.time_ns(), inode)
