"""Copies of contents on this node as the mover changes them (tables `copy` and `tier`).

The mover reads or writes bytes first, and records the result in a transaction that compares the state and `change` of the content with
what it saw before; if a writer came in between, nothing is recorded. Functions that change rows join the caller's transaction.

- Fetch: the id of a new content is reserved by a FILLING copy without a content, so that no lane deletes its file as a leftover. It becomes
  a content in the transaction that gives it to the file.
- Stash: a STALE copy may be all that is left of a file. While a newer generation is fetched in its place, it has an id of its own, and
  `stashed_for` says of which content it is. It returns to its content if the fetch fails, and is deleted if it does not.

Crash safety: recovery deletes FILLING copies and returns stashed ones. Files without a row are leftovers, which the reclaim step deletes.
"""

import json
import time
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from ckptfs.catalog import identity, inodes, journal, peer_copies, pfs_state, remote_contents
from ckptfs.catalog.content_rows import CONTENT_COLUMNS, IS_LEAVING_PFS, build_content, count_sizes, get_content, is_unchanged
from ckptfs.catalog.database import Database
from ckptfs.model import Content, ContentState, Copy, CopyState, PublishedRow, Tier


def list_copies(db: Database, content: int) -> tuple[Copy, ...]:
    """Return all copies of a content on this node, RAM first."""
    order = list(Tier)
    rows = db.rows("SELECT content, tier, state, verified_ns FROM copy WHERE content = ?", content)
    found = [Copy(number, Tier(tier), CopyState(state), verified_ns) for number, tier, state, verified_ns in rows]
    return tuple(sorted(found, key=lambda copy: order.index(copy.tier)))


def list_good_tiers(db: Database, content: int, tiers: Container[Tier]) -> list[Tier]:
    """Return those of `tiers` that have a good copy of a content, RAM first."""
    return [copy.tier for copy in list_copies(db, content) if copy.state is CopyState.GOOD and copy.tier in tiers]


def insert_filling_copy(db: Database, seen: Content, tier: Tier) -> bool:
    """Insert a FILLING row before its file. False: the content changed, or another thread has it."""
    with db.transaction():
        if not is_unchanged(db, seen) or db.value("SELECT 1 FROM copy WHERE content = ? AND tier = ? AND state IN (0, 1)", seen.id, tier):
            return False
        db.run("INSERT OR REPLACE INTO copy (content, tier, state, used_ns) VALUES (?, ?, 0, ?)", seen.id, tier, time.time_ns())
        return True


def mark_copy_good(db: Database, seen: Content, tier: Tier) -> bool:
    """Make a FILLING copy GOOD and verified. Return False if the content changed since `seen`."""
    with db.transaction():
        if not is_unchanged(db, seen):
            return False
        good = "UPDATE copy SET state = 1, verified_ns = ? WHERE content = ? AND tier = ? AND state = 0"
        return db.run(good, time.time_ns(), seen.id, tier) > 0


def set_copy_state(db: Database, content: int, tier: Tier, state: CopyState) -> None:
    """Set the state of a copy whose digest was checked, unless another copy is FILLING in its place."""
    with db.transaction():
        verified_ns = time.time_ns() if state is CopyState.GOOD else 0
        checked = "UPDATE copy SET state = ?, verified_ns = ? WHERE content = ? AND tier = ? AND state <> 0"
        db.run(checked, state, verified_ns, content, tier)
        remote_contents.mark_copy_changed(db, content)


def mark_copy_bad(db: Database, content: int, tier: Tier) -> None:
    """Quarantine a copy that differs from its seal, and count it."""
    with db.transaction():
        set_copy_state(db, content, tier, CopyState.QUARANTINED)
        db.run("INSERT INTO meta (key, value) VALUES ('bad_copies', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1")


@dataclass(frozen=True, slots=True)
class CopyCheckFigures:
    """How far the copies of sealed files in RAM and on NVMe are verified."""

    oldest_ns: int  # When the one that waits longest was verified; 0 without a copy.
    bad_found: int  # Since the catalog was made.
    quarantined: int


def load_check_figures(db: Database) -> CopyCheckFigures:
    """Return how far the copies on this node are verified."""
    oldest = "SELECT c.verified_ns FROM copy c {} JOIN content k ON k.id = c.content WHERE c.tier = '{}' AND c.state = 1 AND k.state = 2"
    # NVMe holds many files. RAM holds few, and they are all looked at.
    each = (oldest.format("", Tier.RAM.value), oldest.format("INDEXED BY copy_verified", Tier.NVME.value))
    known = [found for query in each if (found := db.value(f"{query} ORDER BY c.verified_ns LIMIT 1")) is not None]
    bad_found = int(db.get_meta("bad_copies") or 0)
    return CopyCheckFigures(min(known, default=0), bad_found, int(db.value("SELECT count(*) FROM copy WHERE state = 2 AND state <> 1")))


def delete_copy(db: Database, content: int, tier: Tier) -> bool:
    """Delete the row of a copy; return whether there was one.

    Its file may go after the commit, unless `has_copy` finds a new row.
    """
    with db.transaction():
        is_deleted = bool(db.run("DELETE FROM copy WHERE content = ? AND tier = ?", content, tier))
        remote_contents.mark_copy_changed(db, content)
    return is_deleted


def list_bad_copies(db: Database, state: CopyState, tier: Tier) -> list[int]:
    """Return the contents with a copy in `tier` in `state`, which is not GOOD."""
    return db.column("SELECT content FROM copy WHERE state = ? AND tier = ? AND state <> 1", state, tier)


# A copy in RAM is no reason to drop one on NVMe, which survives a power cut: see lifecycle.can_drop.
IS_SAFE_ELSEWHERE = (
    "(EXISTS (SELECT 1 FROM copy o WHERE o.content = k.id AND o.state = 1 AND o.verified_ns > 0"
    " AND ((c.tier = 'ram' AND o.tier <> 'ram') OR (c.tier = 'nvme' AND o.tier = 'pfs')))"
    " OR EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = k.inode AND p.complete = 1 AND p.generation = k.generation"
    " AND p.digest = k.digest AND (p.checked_ns > 0 OR NOT {pfs_verify}) AND NOT " + IS_LEAVING_PFS.format("k") + "))"
)
IS_AT_REST = (
    "c.state = 1 AND k.state = 2 AND k.inode NOT IN (SELECT inode FROM handle)"
    " AND NOT EXISTS (SELECT 1 FROM copy f WHERE f.content = k.id AND f.state = 0)"
)
"""SQL: a good copy `c` of a sealed content `k` that no process has open and no lane is copying."""
# A sealed content whose file on the PFS was not read back.
_UNCHECKED = (
    " FROM copy c JOIN content k ON k.id = c.content JOIN pfs_file p ON p.inode = k.inode WHERE c.state = 1 AND k.state = 2"
    " AND p.complete = 1 AND p.generation = k.generation AND p.digest = k.digest AND p.checked_ns = 0"
)


def list_evictable(db: Database, tier: Tier, *, elsewhere: bool, at_most: int, pfs_verify: bool = True) -> list[Content]:
    """Return sealed contents with a copy in `tier` that no process has open and no lane is copying.

    `elsewhere`: only those that are whole elsewhere too; otherwise only the others. With `pfs_verify`, a file on the PFS counts after it
    was read back. Remote contents come first, then the least recently used ones. Both queries follow an index, and end with the last row
    that they return.
    """
    is_safe = ("" if elsewhere else "NOT ") + IS_SAFE_ELSEWHERE.format(pfs_verify=int(pfs_verify))
    is_wanted = f"{IS_AT_REST} AND {is_safe}"
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS} FROM content k CROSS JOIN copy c ON c.content = k.id AND c.tier = ?"
        f" WHERE k.remote = 1 AND {is_wanted} ORDER BY c.used_ns, c.content LIMIT ?",
        tier, at_most,
    )  # fmt: skip
    rows += db.rows(
        f"SELECT {CONTENT_COLUMNS} FROM copy c CROSS JOIN content k ON k.id = c.content"
        f" WHERE c.tier = ? AND k.remote = 0 AND {is_wanted} ORDER BY c.used_ns, c.content LIMIT ?",
        tier, at_most - len(rows),
    )  # fmt: skip
    return [build_content(row) for row in rows]


def list_verified_on_nvme(db: Database, after: tuple[int, int], at_most: int) -> list[tuple[int, int]]:
    """Return (when it was verified, content) of the good copies on NVMe that come after such a pair."""
    return db.rows(
        "SELECT verified_ns, content FROM copy INDEXED BY copy_verified"
        " WHERE tier = 'nvme' AND state = 1 AND (verified_ns, content) > (?, ?)"
        " ORDER BY verified_ns, content LIMIT ?",
        *after, at_most,
    )  # fmt: skip


def list_unverified(db: Database, tiers: Iterable[Tier], interval_s: float, at_most: int) -> list[int]:
    """Return sealed contents with copies that were not verified in the last `interval_s`, oldest first."""
    now = time.time_ns()
    rows = db.rows(
        "SELECT c.content FROM copy c JOIN content k ON k.id = c.content WHERE c.state = 1 AND k.state = 2"
        " AND c.tier IN (SELECT value FROM json_each(?)) AND c.verified_ns NOT BETWEEN ? AND ? ORDER BY c.verified_ns LIMIT ?",
        json.dumps([*tiers]), now - int(interval_s * 1e9), now, at_most,
    )  # fmt: skip
    return list(dict.fromkeys(row[0] for row in rows))


def has_unchecked(db: Database) -> bool:
    """Return True if the PFS shows a content of this node that was not read back."""
    return db.value(f"SELECT 1{_UNCHECKED} AND c.tier <> 'pfs' LIMIT 1") is not None


def list_unchecked(db: Database, tier: Tier, excluded: Iterable[int], at_most: int) -> list[int]:
    """Return the files whose copies in `tier` eviction would take next if the PFS copy were read back."""
    return db.column(
        f"SELECT k.inode{_UNCHECKED} AND c.tier = ? AND k.inode NOT IN (SELECT value FROM json_each(?))"
        " ORDER BY k.remote DESC, c.used_ns, k.id LIMIT ?",
        tier, json.dumps([*excluded]), at_most,
    )  # fmt: skip


_ONLY_COPIES = (
    "copy c JOIN content k ON k.id = c.content"
    f" WHERE c.tier = ? AND k.state <> 3 AND k.remote = 0 AND NOT {IS_SAFE_ELSEWHERE.format(pfs_verify=0)}"
)


def count_only_copies(db: Database, tier: Tier) -> int:
    """Return how many own contents that may still be needed are in `tier` and nowhere else."""
    return count_sizes(db, "k.size", _ONLY_COPIES, tier)[0]


def list_paths_only_in(db: Database, tier: Tier, at_most: int) -> list[str]:
    """Return paths of own files whose content is in `tier` and nowhere else."""
    rows = db.rows(
        f"SELECT k.inode FROM {_ONLY_COPIES} AND EXISTS (SELECT 1 FROM inode i WHERE i.id = k.inode AND i.content = k.id AND i.nlink > 0)"
        " LIMIT ?",
        tier, at_most,
    )  # fmt: skip
    return [inodes.get_shown_path(db, inode) for (inode,) in rows]


def is_only_on_pfs(db: Database, inode: int) -> bool:
    """Return True if a file has names and neither this node nor a live peer has a good copy of it."""
    return (
        db.value(
            "SELECT 1 FROM inode i LEFT JOIN content k ON k.id = i.content WHERE i.id = ? AND i.nlink > 0"
            " AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1 AND c.tier <> 'pfs')"
            f" AND NOT EXISTS (SELECT 1 FROM {peer_copies.HOLDERS.format('k')})",
            inode,
        )
        is not None
    )


def count_good_copies(db: Database, tier: Tier) -> int:
    """Return how many contents have a GOOD copy in `tier`."""
    return int(db.value("SELECT count(*) FROM copy WHERE tier = ? AND state = 1", tier))


def delete_tier(db: Database, tier: Tier) -> None:
    """Forget a tier that the daemon has removed, and its copies."""
    with db.transaction():
        db.run("DELETE FROM copy WHERE tier = ?", tier)
        db.run("DELETE FROM tier WHERE name = ?", tier)


_AWAITS_STORE = "({0}.remote = 1 AND {0}.announce_state > 1)"
"""SQL: what the store says of this node's copy of another node's content is to change. To be formatted with the alias of `content`."""


def list_doomed(db: Database, tiers: Iterable[Tier], after: int, at_most: int) -> list[tuple[int, Tier | None]]:
    """Return (content, tier) of doomed contents after the content `after`; no tier: only the row is left."""
    rows = db.rows(
        "SELECT k.id, c.tier FROM content k LEFT JOIN copy c ON c.content = k.id"
        " WHERE k.state = 3 AND k.id > ? AND (c.tier IN (SELECT value FROM json_each(?))"
        f" OR (c.tier IS NULL AND NOT {_AWAITS_STORE.format('k')}))"
        " AND k.id NOT IN (SELECT content FROM handle WHERE content IS NOT NULL) ORDER BY k.id LIMIT ?",
        after, json.dumps(list(tiers)), at_most,
    )  # fmt: skip
    return [(content, None if tier is None else Tier(tier)) for content, tier in rows]


def count_doomed_bytes(db: Database, tier: Tier) -> int:
    """Return the bytes in `tier` that doomed contents still hold in a cluster."""
    if not db.is_clustered:
        return 0
    is_doomed = "k.state = 3 AND k.id NOT IN (SELECT content FROM handle WHERE content IS NOT NULL)"
    return count_sizes(db, "k.size", f"content k JOIN copy c ON c.content = k.id AND c.tier = ? WHERE {is_doomed}", tier)[1]


def delete_doomed(db: Database, dropped: Iterable[tuple[int, Tier | None]]) -> None:
    """Delete the rows of doomed copies whose files are gone, and of contents that have no other copy."""
    with db.transaction():
        for number, tier in dropped:
            db.run("DELETE FROM copy WHERE content = ? AND tier = ?", number, tier)
            # Another node may have restored the file meanwhile, or a file of another node got new bytes on this one.
            db.run(
                "UPDATE content SET announce_state = 2 WHERE id = ? AND announce_state = 1"
                " AND (state <> 3 OR (remote = 1 AND EXISTS (SELECT 1 FROM inode i WHERE i.id = content.inode AND i.nlink > 0)))",
                number,
            )
            db.run(
                f"DELETE FROM content WHERE id = ? AND state = 3 AND NOT {_AWAITS_STORE.format('content')}"
                " AND NOT EXISTS (SELECT 1 FROM copy WHERE copy.content = content.id)",
                number,
            )


def has_copy(db: Database, content: int, tier: Tier) -> bool:
    """Return True if there is any row of this content in `tier`."""
    return db.value("SELECT 1 FROM copy WHERE content = ? AND tier = ?", content, tier) is not None


def get_tier_uuid(db: Database, tier: Tier) -> str | None:
    """Return the uuid that was in this tier's root when it was last adopted."""
    found: str | None = db.value("SELECT uuid FROM tier WHERE name = ?", tier)
    return found


def set_tier_uuid(db: Database, tier: Tier, uuid: str) -> int:
    """Record the uuid of a tier. If it had another one, forget its copies; return their number."""
    before = get_tier_uuid(db, tier)
    if before == uuid:
        return 0
    with db.transaction():
        if get_tier_uuid(db, tier) != before:
            return 0  # Another process has set it meanwhile.
        db.run("INSERT OR REPLACE INTO tier (name, uuid) VALUES (?, ?)", tier, uuid)
        return 0 if before is None else db.run("DELETE FROM copy WHERE tier = ?", tier)


def set_pfs_identity(db: Database, before: str | None, pfs_identity: str) -> bool:
    """Record a new identity of the same PFS. Return False if another thread was faster than `before`."""
    with db.transaction():
        if get_tier_uuid(db, Tier.PFS) != before:
            return False
        db.run("INSERT OR REPLACE INTO tier (name, uuid) VALUES (?, ?)", Tier.PFS, pfs_identity)
    return True


def list_copies_in_tier(db: Database, tier: Tier) -> dict[int, tuple[CopyState, ContentState, int]]:
    """Return content -> (state of its copy in `tier`, state and size of the content)."""
    rows = db.rows("SELECT c.content, c.state, k.state, k.size FROM copy c JOIN content k ON k.id = c.content WHERE c.tier = ?", tier)
    return {content: (CopyState(copy_state), ContentState(state), size) for content, copy_state, state, size in rows}


@dataclass(frozen=True, slots=True)
class FetchState:
    """A file at the start of a fetch. If a later state is equal, the result of the fetch still holds."""

    inode: int
    content: Content | None
    has_local_copy: bool
    published: PublishedRow | None
    content_id: int | None = field(compare=False)  # Set even if the catalog knows no more about the content.
    has_name: bool = field(compare=False)
    is_open: bool = field(compare=False)
    path: str = field(compare=False)  # For messages.
    copies: tuple[Copy, ...] = field(compare=False)
    holders: tuple[int, ...] = field(compare=False)
    """The nodes, alive or not, that have a verified copy of exactly this generation."""
    pfs_names: tuple[bytes, ...] | None = field(compare=False)
    pfs_parent: int = field(compare=False)
    pfs_identity: str | None = field(compare=False)


@dataclass(frozen=True, slots=True)
class FetchedContent:
    """Bytes that were read from the PFS into `tier`, with their digests."""

    content: int
    tier: Tier
    size: int
    digest: bytes
    block_digests: bytes


def load_fetch_state(db: Database, inode: int) -> FetchState | None:
    """Return the file as one snapshot. Returns None if it has neither a name, nor a handle, nor a content."""
    with db.read_transaction():
        has_handle = "EXISTS (SELECT 1 FROM handle WHERE handle.inode = inode.id)"
        row = db.row(f"SELECT content, nlink > 0, {has_handle} FROM inode WHERE id = ?", inode)
        content_id, has_name, is_open = row or (None, False, False)
        if content_id is None and not has_name and not is_open:
            return None
        content = None if content_id is None else get_content(db, content_id)
        local = () if content_id is None else list_copies(db, content_id)
        return FetchState(
            inode,
            content,
            any(copy.state is CopyState.GOOD for copy in local),
            pfs_state.get_published(db, inode),
            content_id=content_id,
            has_name=bool(has_name),
            is_open=bool(is_open),
            path=inodes.get_shown_path(db, inode),
            copies=local,
            holders=() if content is None else tuple(peer_copies.list_holders(db, content)),
            pfs_names=pfs_state.find_path(db, inode),
            pfs_parent=pfs_state.get_parent(db, inode),
            pfs_identity=get_tier_uuid(db, Tier.PFS),
        )


def get_content_id(db: Database, inode: int) -> int | None:
    """Return the id of the file's present content, even if nothing else is known of it."""
    found: int | None = db.value("SELECT content FROM inode WHERE id = ?", inode)
    return found


def insert_reserved_copy(db: Database, tier: Tier) -> int:
    """Reserve an id for a content that is about to be fetched into `tier`."""
    with db.transaction():
        content = _reserve_content_id(db)
        db.run("INSERT INTO copy (content, tier, state, used_ns) VALUES (?, ?, 0, ?)", content, tier, time.time_ns())
        return content


def _reserve_content_id(db: Database) -> int:
    content = db.insert("INSERT INTO content (id, inode, generation, state) VALUES (?, 0, 0, 3)", identity.allocate_id(db, "content"))
    db.run("DELETE FROM content WHERE id = ?", content)
    return content


def delete_filling_pfs_copies(db: Database) -> None:
    """Delete FILLING copies of a previous mover in the PFS's work area."""
    db.change("DELETE FROM copy WHERE tier = ? AND state = 0", Tier.PFS)


def delete_filling_copy(db: Database, content: int, tier: Tier) -> None:
    """Delete a FILLING copy after a failure. Its file is gone already."""
    db.change("DELETE FROM copy WHERE content = ? AND tier = ? AND state = 0", content, tier)


def record_fetched(db: Database, expected: FetchState, fetched: FetchedContent) -> bool:
    """Make the fetched bytes the content of the file. Return False if it changed since `expected`."""
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
        remote_contents.mark_copy_changed(db, fetched.content)
        _set_pfs_digest(db, expected.inode, fetched.digest, fetched.block_digests)
        return True


def record_pfs_verified(db: Database, expected: FetchState, digest: bytes, block_digests: bytes) -> bool:
    """Record that the file on the PFS was verified. Return False if it changed since `expected`."""
    with db.transaction():
        if load_fetch_state(db, expected.inode) != expected:
            return False
        _set_pfs_digest(db, expected.inode, digest, block_digests)
        return True


def record_pfs_damaged(db: Database, expected: FetchState) -> bool:
    """Have the file written to the PFS again. False: it has changed or is older than the content."""
    content, published = expected.content, expected.published
    if content is None or published is None or (content.generation, content.digest) != (published.generation, published.digest):
        return False
    with db.transaction():
        if load_fetch_state(db, expected.inode) != expected:
            return False
        db.run("UPDATE pfs_file SET complete = 0, digest = NULL, blocks = NULL, checked_ns = 0 WHERE inode = ?", expected.inode)
        journal.append(db, "content", expected.inode, content=content.id)
        return True


def _set_pfs_digest(db: Database, inode: int, digest: bytes, block_digests: bytes) -> None:
    db.run("UPDATE pfs_file SET digest = ?, blocks = ?, checked_ns = ? WHERE inode = ?", digest, block_digests, time.time_ns(), inode)


def stash_copy(db: Database, content: int, tier: Tier) -> int | None:
    """Stash the STALE copy of a content; return the id for its file. None: no known generation is left."""
    with db.transaction():
        if db.value("SELECT 1 FROM copy WHERE content = ? AND tier = ? AND state = 3 AND digest IS NOT NULL", content, tier) is None:
            return None
        stash = _reserve_content_id(db)
        db.run("UPDATE copy SET content = ?1, stashed_for = ?2 WHERE content = ?2 AND tier = ?3", stash, content, tier)
        return stash


def restore_stashed(db: Database, stash: int, tier: Tier) -> int | None:
    """Give a stashed copy back to its content, and return that; None: it was unneeded and is deleted."""
    with db.transaction():
        content: int | None = db.value("SELECT stashed_for FROM copy WHERE content = ? AND tier = ?", stash, tier)
        is_replaced = db.value("SELECT 1 FROM copy WHERE content = ? AND tier = ?", content, tier) is not None
        if content is None or is_replaced or db.value("SELECT 1 FROM content WHERE id = ? AND state <> 3", content) is None:
            delete_stashed(db, stash, tier)
            return None
        db.run("UPDATE copy SET content = ?, stashed_for = NULL WHERE content = ? AND tier = ?", content, stash, tier)
        return content


def delete_stashed(db: Database, stash: int, tier: Tier) -> None:
    db.run("DELETE FROM copy WHERE content = ? AND tier = ? AND stashed_for IS NOT NULL", stash, tier)


def list_stashed(db: Database, tier: Tier) -> list[int]:
    """Return the ids of all stashed copies in `tier`."""
    return db.column("SELECT content FROM copy WHERE tier = ? AND stashed_for IS NOT NULL", tier)


def list_stashed_contents(db: Database) -> set[int]:
    return set(db.column("SELECT stashed_for FROM copy WHERE stashed_for IS NOT NULL"))
