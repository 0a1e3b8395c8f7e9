"""Owns what the mover's own steps ask and change: contents to seal, copies to add, move and drop, tiers to adopt, contents that are lost.

Every change compares the content's `change` and state with what the caller saw before it read the bytes, so that a writer who came
in between wins. Functions that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change; files that no row names yet are leftovers, which the drop flow finds.

Owns what a fetch reads and changes in the catalog: a file that lies on the PFS only gets a verified copy in a tier of this node.

A new content's id is reserved by a FILLING copy without a content: nobody takes it for anything, the drop flow leaves its file alone,
and recovery removes both. It becomes a content in the transaction that makes it the file's own.
If we die here: the change happened as a whole or not at all.

Owns `copy.aside`: a former generation that may be all that is left of a content, put aside while the next one is fetched into its place.

Its row has an id of its own, under which its file lies meanwhile, and says of which content it is. It is put back when the fetch failed,
and goes when it did not. Functions that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change; recovery puts back what is aside.
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ckptfs.catalog import identity, inodes, peer_copies, pfs_state, remote_contents
from ckptfs.catalog.content_rows import CONTENT_COLUMNS, build_content, get_content, is_unchanged
from ckptfs.catalog.database import Database
from ckptfs.model import Content, ContentState, Copy, CopyState, Tier


def list_copies(db: Database, content: int) -> tuple[Copy, ...]:
    """Every copy of a content on this node, RAM first."""
    order = list(Tier)
    rows = db.rows("SELECT content, tier, state, verified_ns, used_ns FROM copy WHERE content = ?", content)
    found = [Copy(row[0], Tier(row[1]), CopyState(row[2]), row[3], row[4]) for row in rows]
    return tuple(sorted(found, key=lambda copy: order.index(copy.tier)))


def insert_filling_copy(db: Database, seen: Content, tier: Tier) -> bool:
    """Announce a copy that is about to be made, so that a crash leaves a row to tidy. False when the content has moved on, and when
    somebody is making this copy already: its file is theirs.
    """
    with db.transaction():
        if not is_unchanged(db, seen) or db.value("SELECT 1 FROM copy WHERE content = ? AND tier = ? AND state = 0", seen.id, tier):
            return False
        db.run("INSERT OR REPLACE INTO copy (content, tier, state, used_ns) VALUES (?, ?, 0, ?)", seen.id, tier, time.time_ns())
        return True


def mark_copy_good(db: Database, seen: Content, tier: Tier) -> bool:
    """A copy that was announced is whole and verified. False, and nothing changed, when the content has moved on."""
    with db.transaction():
        if not is_unchanged(db, seen):
            return False
        return bool(
            db.run("UPDATE copy SET state = 1, verified_ns = ? WHERE content = ? AND tier = ? AND state = 0", time.time_ns(), seen.id, tier)
        )


def set_copy_state(db: Database, content: int, tier: Tier, state: CopyState) -> None:
    """Set a copy's state after its digest was checked; a GOOD one is verified now. One that is being filled is another one by now."""
    with db.transaction():
        db.run(
            "UPDATE copy SET state = ?, verified_ns = ? WHERE content = ? AND tier = ? AND state <> 0",
            state,
            time.time_ns() if state == 1 else 0,
            content,
            tier,
        )
        _mark_unannounced_if_gone(db, content)
        if state is CopyState.GOOD:
            remote_contents.mark_copy_present(db, content)


def delete_copy(db: Database, content: int, tier: Tier) -> None:
    """The copy in `tier` is not to be counted any more; its file may be removed once this is committed, if nobody has announced
    another one meanwhile: see `known`.
    """
    with db.transaction():
        db.run("DELETE FROM copy WHERE content = ? AND tier = ?", content, tier)
        _mark_unannounced_if_gone(db, content)


def _mark_unannounced_if_gone(db: Database, content: int) -> None:
    """The other nodes shall learn when no copy counts here any more, nor is left of a former generation of a peer's content."""
    left = "SELECT 1 FROM copy WHERE copy.content = content.id AND (copy.state = 1 OR (copy.state = 3 AND copy.digest IS NOT NULL))"
    db.run(
        f"UPDATE content SET announce_state = 3 WHERE id = ? AND announce_state IN (1, 2) AND remote = 1 AND NOT EXISTS ({left})", content
    )
    remote_contents.mark_copy_absent(db, content)


def list_copies_in_state(db: Database, state: CopyState, tier: Tier | None = None) -> list[tuple[int, Tier]]:
    """(content, tier) of the copies in a state."""
    rows = db.rows("SELECT content, tier FROM copy WHERE state = ? AND (? IS NULL OR tier = ?)", state, tier, tier)
    return [(row[0], Tier(row[1])) for row in rows]


# A copy in RAM is no reason to drop one on NVMe, which survives a power cut: see lifecycle.may_drop.
_IS_SAFE_ELSEWHERE = (
    "(EXISTS (SELECT 1 FROM copy o WHERE o.content = k.id AND o.state = 1 AND o.verified_ns > 0"
    " AND ((c.tier = 'ram' AND o.tier <> 'ram') OR (c.tier = 'nvme' AND o.tier = 'pfs')))"
    " OR EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = k.inode AND p.complete = 1 AND p.generation = k.generation"
    " AND p.digest = k.digest))"
)


def list_evictable(db: Database, tier: Tier, *, elsewhere: bool, at_most: int) -> list[Content]:
    """Sealed contents with a copy in `tier` that nobody has open: those that are whole `elsewhere` too, or those that are not. What is held
    for peers comes first, then what was not used for long. What somebody copies just now is left out.
    """
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS} FROM copy c JOIN content k ON k.id = c.content WHERE c.tier = ? AND c.state = 1 AND k.state = 2"
        " AND k.inode NOT IN (SELECT inode FROM handle)"
        " AND NOT EXISTS (SELECT 1 FROM copy f WHERE f.content = k.id AND f.state = 0)"
        f" AND {'' if elsewhere else 'NOT '}{_IS_SAFE_ELSEWHERE} ORDER BY k.remote DESC, c.used_ns, k.id LIMIT ?",
        tier, at_most,
    )  # fmt: skip
    return [build_content(row) for row in rows]


def count_only_copies(db: Database, tier: Tier) -> int:
    """How many contents of this node's own that somebody may still want lie in `tier` and nowhere else."""
    return int(
        db.value(
            "SELECT count(*) FROM copy c JOIN content k ON k.id = c.content"
            f" WHERE c.tier = ? AND k.state <> 3 AND k.remote = 0 AND NOT {_IS_SAFE_ELSEWHERE}",
            tier,
        )
    )


def delete_tier(db: Database, tier: Tier) -> None:
    """This tier was given up in order: its copies are gone, and nobody needs to be warned of it."""
    with db.transaction():
        db.run("DELETE FROM copy WHERE tier = ?", tier)
        db.run("DELETE FROM tier WHERE name = ?", tier)


def list_doomed(db: Database, tiers: Iterable[Tier], after: int, at_most: int) -> list[tuple[int, Tier | None]]:
    """(content, tier) of the copies in `tiers` of contents that nobody needs any more, from the content after `after` on.

    The tier is None for a content without any copy, of which only the row is left.
    """
    rows = db.rows(
        "SELECT k.id, c.tier FROM content k LEFT JOIN copy c ON c.content = k.id"
        " WHERE k.state = 3 AND k.id > ? AND (c.tier IS NULL OR c.tier IN (SELECT value FROM json_each(?)))"
        " AND k.id NOT IN (SELECT content FROM handle WHERE content IS NOT NULL) ORDER BY k.id LIMIT ?",
        after, json.dumps(list(tiers)), at_most,
    )  # fmt: skip
    return [(row[0], None if row[1] is None else Tier(row[1])) for row in rows]


def delete_doomed(db: Database, dropped: Iterable[tuple[int, Tier | None]]) -> None:
    """The files of these copies of doomed contents are gone: forget the copies, and the contents that have no other."""
    with db.transaction():
        for number, tier in dropped:
            db.run("DELETE FROM copy WHERE content = ? AND tier = ?", number, tier)
            db.run(
                "DELETE FROM content WHERE id = ? AND state = 3 AND NOT EXISTS (SELECT 1 FROM copy WHERE copy.content = content.id)", number
            )


def has_copy(db: Database, content: int, tier: Tier) -> bool:
    """Whether any copy of this content is on record in `tier`."""
    return db.value("SELECT 1 FROM copy WHERE content = ? AND tier = ?", content, tier) is not None


def get_tier_uuid(db: Database, tier: Tier) -> str | None:
    """The uuid that was in this tier's root when it was last adopted."""
    found: str | None = db.value("SELECT uuid FROM tier WHERE name = ?", tier)
    return found


def set_tier_uuid(db: Database, tier: Tier, uuid: str) -> int:
    """Take `uuid` as what this tier is. When it was another one, forget all copies that were there; how many those were."""
    before = get_tier_uuid(db, tier)
    if before == uuid:
        return 0
    with db.transaction():
        if get_tier_uuid(db, tier) != before:
            return 0  # Another process was faster.
        db.run("INSERT OR REPLACE INTO tier (name, uuid) VALUES (?, ?)", tier, uuid)
        return 0 if before is None else db.run("DELETE FROM copy WHERE tier = ?", tier)


def list_copies_in_tier(db: Database, tier: Tier) -> dict[int, tuple[CopyState, ContentState, int]]:
    """Content -> (state of its copy in `tier`, state and size of the content)."""
    rows = db.rows("SELECT c.content, c.state, k.state, k.size FROM copy c JOIN content k ON k.id = c.content WHERE c.tier = ?", tier)
    return {row[0]: (CopyState(row[1]), ContentState(row[2]), row[3]) for row in rows}


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
    """A file as a fetch begins. Two states are equal if nothing changed on which the result of a fetch depends."""

    inode: int
    content: Content | None
    has_local_copy: bool
    published: PublishedFile | None
    content_id: int | None = field(compare=False)
    """Set even if the catalog knows no more about the content."""
    has_name: bool = field(compare=False)
    is_open: bool = field(compare=False)
    path: str = field(compare=False)
    """For messages."""
    copies: tuple[Copy, ...] = field(compare=False)
    holders: tuple[int, ...] = field(compare=False)
    """The nodes, alive or not, that have a verified copy of exactly this generation."""
    pfs_names: tuple[bytes, ...] | None = field(compare=False)
    pfs_parent: int = field(compare=False)
    pfs_uuid: str | None = field(compare=False)


@dataclass(frozen=True, slots=True)
class FetchedContent:
    """What was read from the PFS, digested on its way into `tier`."""

    content: int
    tier: Tier
    size: int
    digest: bytes
    block_digests: bytes


def load_fetch_state(db: Database, inode: int) -> FetchState | None:
    """Return the file as one snapshot. Returns None if it has neither a name nor a handle."""
    with db.read_transaction():
        is_open = "EXISTS (SELECT 1 FROM handle WHERE handle.inode = inode.id)"
        row = db.row(f"SELECT content, nlink > 0, {is_open} FROM inode WHERE id = ?", inode)
        if row is None or not (row[1] or row[2]):
            return None
        content = None if row[0] is None else get_content(db, row[0])
        local = () if row[0] is None else list_copies(db, row[0])
        return FetchState(
            inode,
            content,
            any(copy.state is CopyState.GOOD for copy in local),
            _get_published_file(db, inode),
            content_id=row[0],
            has_name=bool(row[1]),
            is_open=bool(row[2]),
            path=os.fsdecode(inodes.get_path(db, inode)),
            copies=local,
            holders=() if content is None else tuple(peer_copies.list_holders(db, content)),
            pfs_names=pfs_state.find_path(db, inode),
            pfs_parent=pfs_state.get_parent(db, inode),
            pfs_uuid=get_tier_uuid(db, Tier.PFS),
        )


def get_content_id(db: Database, inode: int) -> int | None:
    """The id of what the file holds, whether anything else is known of that or not."""
    found: int | None = db.value("SELECT content FROM inode WHERE id = ?", inode)
    return found


def _get_published_file(db: Database, inode: int) -> PublishedFile | None:
    shown = db.row("SELECT generation, complete, size, mtime_ns, pfs_inode, digest, checked_ns FROM pfs_file WHERE inode = ?", inode)
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
            db.run(
                "UPDATE content SET blocks = coalesce(blocks, ?), announce_state = 2 WHERE id = ?", fetched.block_digests, fetched.content
            )
        remote_contents.mark_copy_present(db, fetched.content)
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
    db.run("UPDATE pfs_file SET digest = ?, blocks = ?, checked_ns = ? WHERE inode = ?", digest, block_digests, time.time_ns(), inode)


def stash_copy(db: Database, content: int, tier: Tier) -> int | None:
    """Put what is kept of a content in `tier` aside: the id for its file. None: there is nothing of which it is known what it is."""
    with db.transaction():
        if db.value("SELECT 1 FROM copy WHERE content = ? AND tier = ? AND state = 3 AND digest IS NOT NULL", content, tier) is None:
            return None
        stash = db.insert("INSERT INTO content (id, inode, generation, state) VALUES (?, 0, 0, 3)", identity.allocate_id(db, "content"))
        db.run("DELETE FROM content WHERE id = ?", stash)
        db.run("UPDATE copy SET content = ?1, stashed_for = ?2 WHERE content = ?2 AND tier = ?3", stash, content, tier)
        return stash


def restore_stashed(db: Database, stash: int, tier: Tier) -> int | None:
    """It is what lies here of its content again, whose id is given; None, and it is forgotten, when there is another copy by now."""
    with db.transaction():
        content: int | None = db.value("SELECT stashed_for FROM copy WHERE content = ? AND tier = ?", stash, tier)
        is_replaced = db.value("SELECT 1 FROM copy WHERE content = ? AND tier = ?", content, tier) is not None
        if content is None or is_replaced or db.value("SELECT 1 FROM content WHERE id = ? AND state <> 3", content) is None:
            delete_stashed(db, stash, tier)
            return None
        db.run("UPDATE copy SET content = ?, stashed_for = NULL WHERE content = ? AND tier = ?", content, stash, tier)
        return content


def delete_stashed(db: Database, stash: int, tier: Tier) -> None:
    """Nobody needs it any more."""
    db.run("DELETE FROM copy WHERE content = ? AND tier = ? AND stashed_for IS NOT NULL", stash, tier)


def list_stashed(db: Database, tier: Tier) -> list[int]:
    """The ids of all that is aside in `tier`."""
    return [row[0] for row in db.rows("SELECT content FROM copy WHERE tier = ? AND stashed_for IS NOT NULL", tier)]


def list_stashed_contents(db: Database) -> set[int]:
    """The contents of which something is aside."""
    return {row[0] for row in db.rows("SELECT stashed_for FROM copy WHERE stashed_for IS NOT NULL")}
