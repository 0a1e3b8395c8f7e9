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
class OnPfs:
    """What table `published` says of a file. `digest` is None when it was never read; `checked` whether it was found right in place."""

    generation: int
    complete: bool
    size: int
    mtime_ns: int
    pfs_inode: int
    digest: bytes | None
    checked: bool


@dataclass(frozen=True, slots=True)
class Fetchable:
    """A file as a fetch begins: its content if it has one, whether that has a good copy here, and what the PFS shows."""

    inode: int
    content: Content | None
    here: bool
    on_pfs: OnPfs | None


@dataclass(frozen=True, slots=True)
class Arrived:
    """What was read from the PFS, digested on its way into `tier`."""

    content: int
    tier: Tier
    size: int
    digest: bytes
    blocks: bytes


def look(db: Database, inode: int) -> Fetchable | None:
    """The file as one snapshot; None when it has no name any more."""
    with db.snapshot():
        alive = "(nlink > 0 OR EXISTS (SELECT 1 FROM handle WHERE handle.inode = inode.id))"
        row = db.row(f"SELECT content FROM inode WHERE id = ? AND {alive}", inode)
        if row is None:
            return None
        content = None if row[0] is None else settling.content(db, row[0])
        here = row[0] is not None and db.value("SELECT 1 FROM copy WHERE content = ? AND state = 1", row[0]) is not None
        return Fetchable(inode, content, here, _on_pfs(db, inode))


def content_of(db: Database, inode: int) -> int | None:
    """The id of what the file holds, whether anything else is known of that or not."""
    found: int | None = db.value("SELECT content FROM inode WHERE id = ?", inode)
    return found


def _on_pfs(db: Database, inode: int) -> OnPfs | None:
    shown = db.row("SELECT generation, complete, size, mtime_ns, pfs_inode, digest, checked_ns FROM published WHERE inode = ?", inode)
    if shown is None:
        return None
    generation, complete, size, mtime_ns, pfs_inode, digest, checked_ns = shown
    return OnPfs(generation, bool(complete), size, mtime_ns, pfs_inode, digest, bool(checked_ns))


def reserve(db: Database, tier: Tier) -> int:
    """An id for a content that is about to arrive in `tier`."""
    with db.change():
        number = db.insert("INSERT INTO content (id, inode, generation, state) VALUES (?, 0, 0, 3)", identity.fresh(db, "content"))
        db.run("DELETE FROM content WHERE id = ?", number)
        db.run("INSERT INTO copy (content, tier, state, used_ns) VALUES (?, ?, 0, ?)", number, tier, time.time_ns())
        return number


def forget_unfinished(db: Database) -> None:
    """A former mover died while something arrived in the PFS's work area, which recovery does not touch: that copy is none."""
    with db.change():
        db.run("DELETE FROM copy WHERE tier = ? AND state = 0", Tier.PFS)


def give_up(db: Database, number: int, tier: Tier) -> None:
    """Nothing arrived: forget the FILLING copy. Its file is gone already."""
    with db.change():
        db.run("DELETE FROM copy WHERE content = ? AND tier = ? AND state = 0", number, tier)


def arrived(db: Database, before: Fetchable, what: Arrived) -> bool:
    """Make what arrived the content of the file, if nothing about the file has changed since `before`; whether it is."""
    with db.change():
        if look(db, before.inode) != before:
            return False
        assert before.on_pfs is not None
        now = time.time_ns()
        if before.content is None:
            db.run(
                "INSERT INTO content (id, inode, generation, state, size, digest, blocks, change, closed_ns) VALUES (?,?,?,2,?,?,?,1,?)",
                what.content, before.inode, before.on_pfs.generation, what.size, what.digest, what.blocks, now,
            )  # fmt: skip
            db.run("UPDATE inode SET content = ?, size = ? WHERE id = ?", what.content, what.size, before.inode)
        db.run("UPDATE copy SET state = 1, verified_ns = ? WHERE content = ? AND tier = ?", now, what.content, what.tier)
        if before.content is not None and before.content.peer:
            db.run("UPDATE content SET blocks = coalesce(blocks, ?), told = 2 WHERE id = ?", what.blocks, what.content)
        holding.not_away(db, what.content)
        _digest(db, before.inode, what.digest, what.blocks)
        return True


def checked(db: Database, before: Fetchable, digest: bytes, blocks: bytes) -> bool:
    """The file on the PFS was read in place and found to be what it should; False when the file has changed since `before`."""
    with db.change():
        if look(db, before.inode) != before:
            return False
        _digest(db, before.inode, digest, blocks)
        return True


def _digest(db: Database, inode: int, digest: bytes, blocks: bytes) -> None:
    """What the PFS shows has this digest."""
    db.run("UPDATE published SET digest = ?, blocks = ?, checked_ns = ? WHERE inode = ?", digest, blocks, time.time_ns(), inode)
