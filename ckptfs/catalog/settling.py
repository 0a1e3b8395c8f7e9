"""Owns what the mover's own steps ask and change: contents to seal, copies to add, move and drop, tiers to adopt, contents that are lost.

Every change compares the content's `change` and state with what the caller saw before it read the bytes, so that a writer who came
in between wins. Functions that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change; files that no row names yet are leftovers, which the drop flow finds.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptfs import lifecycle
from ckptfs.catalog import holding, peers, telling
from ckptfs.catalog.database import Database
from ckptfs.lifecycle import FileRecord, PublishedState
from ckptfs.model import Content, ContentState, Copy, CopyState, Tier

CONTENT_COLUMNS = "k.id, k.inode, k.generation, k.state, k.size, k.digest, k.blocks, k.change, k.peer"


@dataclass(frozen=True, slots=True)
class SealResult:
    """A content whose bytes were read under a lease: what the catalog shall say of it, if `change` is still the same."""

    content: int
    inode: int
    change: int
    tier: Tier
    size: int
    digest: bytes
    block_digests: bytes


def build_content(row: tuple[int, int, int, int, int, bytes | None, bytes | None, int, int]) -> Content:
    return Content(row[0], row[1], row[2], ContentState(row[3]), *row[4:8], bool(row[8]))


# --- one content -----------------------------------------------------------------------------------------------------


def get_content(db: Database, content: int) -> Content | None:
    """The row of a content."""
    row = db.row(f"SELECT {CONTENT_COLUMNS} FROM content k WHERE k.id = ?", content)
    return None if row is None else build_content(row)


def list_copies(db: Database, content: int) -> tuple[Copy, ...]:
    """Every copy of a content on this node, RAM first."""
    order = list(Tier)
    rows = db.rows("SELECT content, tier, state, verified_ns, used_ns FROM copy WHERE content = ?", content)
    found = [Copy(row[0], Tier(row[1]), CopyState(row[2]), row[3], row[4]) for row in rows]
    return tuple(sorted(found, key=lambda copy: order.index(copy.tier)))


def get_file_record(db: Database, content: int) -> FileRecord:
    """All that decides what may happen to a content, as one snapshot."""
    with db.read_transaction():
        known = get_content(db, content)
        if known is None:
            return FileRecord(None)
        shown = db.row("SELECT generation, complete, digest FROM published WHERE inode = ?", known.inode)
        handles = db.value("SELECT count(*) FROM handle WHERE inode = ? OR content = ?", known.inode, content)
        published = None if shown is None else PublishedState(shown[0], bool(shown[1]), shown[2])
        return FileRecord(known, list_copies(db, content), published, handles, peers.load_clique_copies(db, known))


def is_unchanged(db: Database, seen: Content) -> bool:
    """Whether the content is still in the state and at the change that the caller saw."""
    return db.row("SELECT state, change FROM content WHERE id = ?", seen.id) == (seen.state, seen.change)


# --- seal ------------------------------------------------------------------------------------------------------------


def list_closed(db: Database, tiers: Iterable[Tier], after: int, at_most: int) -> list[tuple[Content, Tier]]:
    """Contents that await their seal, from the one after `after` on in the order of their ids, with the one of `tiers` that has it."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS}, c.tier FROM content k JOIN copy c ON c.content = k.id AND c.state = 1"
        " WHERE k.state = 1 AND k.peer = 0 AND k.id > ? AND c.tier IN (SELECT value FROM json_each(?)) ORDER BY k.id LIMIT ?",
        after, json.dumps(list(tiers)), at_most,
    )  # fmt: skip
    return [(build_content(row[:-1]), Tier(row[-1])) for row in rows]


def mark_sealed(db: Database, results: Iterable[SealResult]) -> list[SealResult]:
    """Make these contents SEALED, those that nobody opened for writing meanwhile; which they were.

    What the same file held before goes: its successor is whole now (P5).
    """
    now = time.time_ns()
    done = []
    for result in results:
        if not db.run(
            "UPDATE content SET state = 2, size = ?, digest = ?, blocks = ?, lacking = ? WHERE id = ? AND state = 1 AND change = ?",
            result.size, result.digest, result.block_digests, db.is_clustered, result.content, result.change,
        ):  # fmt: skip
            continue
        db.run("UPDATE copy SET verified_ns = ? WHERE content = ? AND tier = ?", now, result.content, result.tier)
        db.run(
            "UPDATE inode SET size = ? WHERE id = ? AND content = ? AND size <> ?", result.size, result.inode, result.content, result.size
        )
        mark_previous_doomed(db, result.inode, result.content)
        done.append(result)
    return done


def mark_previous_doomed(db: Database, inode: int, successor: int) -> int:
    """Doom what `inode` held before its sealed content `newer`, except what somebody still has open. How many went."""
    return db.run(
        "UPDATE content SET state = 3, change = change + 1 WHERE inode = ?1 AND id <> ?2 AND state IN (1, 2, 4) AND former_ns IS NULL"
        " AND generation < (SELECT generation FROM content WHERE id = ?2)"
        " AND id NOT IN (SELECT content FROM handle WHERE content IS NOT NULL)"
        " AND NOT EXISTS (SELECT 1 FROM inode WHERE inode.content = content.id)",
        inode, successor,
    )  # fmt: skip


# --- copies ----------------------------------------------------------------------------------------------------------


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
            holding.mark_copy_present(db, content)


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
    db.run(f"UPDATE content SET told = 3 WHERE id = ? AND told IN (1, 2) AND peer = 1 AND NOT EXISTS ({left})", content)
    telling.mark_copy_absent(db, content)


def list_copies_in_state(db: Database, state: CopyState, tier: Tier | None = None) -> list[tuple[int, Tier]]:
    """(content, tier) of the copies in a state."""
    rows = db.rows("SELECT content, tier FROM copy WHERE state = ? AND (? IS NULL OR tier = ?)", state, tier, tier)
    return [(row[0], Tier(row[1])) for row in rows]


# --- evict -----------------------------------------------------------------------------------------------------------


def count_writers(db: Database) -> int:
    """How many handles are open for writing."""
    return int(db.value("SELECT count(*) FROM handle WHERE writer = 1"))


# A copy in RAM is no reason to drop one on NVMe, which survives a power cut: see lifecycle.may_drop.
_IS_SAFE_ELSEWHERE = (
    "(EXISTS (SELECT 1 FROM copy o WHERE o.content = k.id AND o.state = 1 AND o.verified_ns > 0"
    " AND ((c.tier = 'ram' AND o.tier <> 'ram') OR (c.tier = 'nvme' AND o.tier = 'pfs')))"
    " OR EXISTS (SELECT 1 FROM published p WHERE p.inode = k.inode AND p.complete = 1 AND p.generation = k.generation"
    " AND p.digest = k.digest))"
)


def get_largest_recent_size(db: Database, at_most: int) -> int:
    """The size of the largest of the `of` contents that were begun last: what may well come next."""
    return int(db.value("SELECT coalesce(max(size), 0) FROM (SELECT size FROM content WHERE peer = 0 ORDER BY id DESC LIMIT ?)", at_most))


def list_evictable(db: Database, tier: Tier, *, elsewhere: bool, at_most: int) -> list[Content]:
    """Sealed contents with a copy in `tier` that nobody has open: those that are whole `elsewhere` too, or those that are not. What is held
    for peers comes first, then what was not used for long. What somebody copies just now is left out.
    """
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS} FROM copy c JOIN content k ON k.id = c.content WHERE c.tier = ? AND c.state = 1 AND k.state = 2"
        " AND k.inode NOT IN (SELECT inode FROM handle)"
        " AND NOT EXISTS (SELECT 1 FROM copy f WHERE f.content = k.id AND f.state = 0)"
        f" AND {'' if elsewhere else 'NOT '}{_IS_SAFE_ELSEWHERE} ORDER BY k.peer DESC, c.used_ns, k.id LIMIT ?",
        tier, at_most,
    )  # fmt: skip
    return [build_content(row) for row in rows]


def count_only_copies(db: Database, tier: Tier) -> int:
    """How many contents of this node's own that somebody may still want lie in `tier` and nowhere else."""
    return int(
        db.value(
            "SELECT count(*) FROM copy c JOIN content k ON k.id = c.content"
            f" WHERE c.tier = ? AND k.state <> 3 AND k.peer = 0 AND NOT {_IS_SAFE_ELSEWHERE}",
            tier,
        )
    )


def delete_tier(db: Database, tier: Tier) -> None:
    """This tier was given up in order: its copies are gone, and nobody needs to be warned of it."""
    with db.transaction():
        db.run("DELETE FROM copy WHERE tier = ?", tier)
        db.run("DELETE FROM tier WHERE name = ?", tier)


# --- drop ------------------------------------------------------------------------------------------------------------


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


# --- recover ---------------------------------------------------------------------------------------------------------


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


def list_without_copy(db: Database) -> list[Content]:
    """Contents of this node's own that should have bytes and have no good copy in any tier."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS} FROM content k WHERE k.state IN (0, 1, 2) AND k.peer = 0"
        " AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1)"
    )
    return [build_content(row) for row in rows]


def is_shown(db: Database, seen: Content) -> bool:
    """Whether a file shows this content now; if not, an earlier or later one of the same file does."""
    return db.value("SELECT 1 FROM inode WHERE id = ? AND content = ?", seen.inode, seen.id) is not None


def is_fsynced_on_pfs(db: Database, content: Content) -> bool:
    """Whether the PFS shows a content that was closed and not sealed yet, as it was fsynced before: of that generation and size."""
    query = "SELECT 1 FROM published WHERE inode = ? AND generation = ? AND size = ?"
    return content.state is ContentState.CLOSED and db.value(query, content.inode, content.generation, content.size) is not None


def restore_previous(db: Database, lost: Content) -> str:
    """Let the file show what is left of it, in place of `lost`: its former generation here, or what the PFS shows. Which, in words.

    The newer of both: the PFS may already show what was fsynced of the lost one. Empty, and nothing changed, when nothing is left.
    """
    with db.transaction():
        older = db.row(
            "SELECT id, size, generation FROM content k WHERE inode = ? AND generation < ? AND state = 2"
            " AND EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1) ORDER BY generation DESC LIMIT 1",
            lost.inode, lost.generation,
        )  # fmt: skip
        shown = db.row("SELECT size, mtime_ns, generation FROM published WHERE inode = ?", lost.inode)
        if older is not None and (shown is None or shown[2] <= older[2]):
            db.run("UPDATE inode SET content = ?, size = ? WHERE id = ?", older[0], older[1], lost.inode)
            what = "its former generation"
        elif shown is not None:
            db.run("UPDATE inode SET content = NULL, size = ?, mtime_ns = ? WHERE id = ?", shown[0], shown[1], lost.inode)
            # It may be what was fsynced of the file that was open: from now on that is the whole of it.
            db.run("UPDATE published SET complete = 1 WHERE inode = ?", lost.inode)
            if older is not None:
                set_state(db, older[0], ContentState.DOOMED)
            what = "what is on the PFS"
        else:
            return ""
        set_state(db, lost.id, ContentState.DOOMED)
        return what


def mark_lost(db: Database, seen: Content) -> bool:
    """Make a content of this node's own LOST when no good copy of it is left in any tier or on a peer and the PFS does not show it; whether
    it is.
    """
    with db.transaction():
        found = get_file_record(db, seen.id)
        if not is_unchanged(db, seen) or any(map(lifecycle.is_good, found.copies)) or lifecycle.is_on_pfs(found):
            return False
        if seen.is_remote or peers.list_holders(db, seen):
            return False
        set_state(db, seen.id, ContentState.LOST)
        return True


def mark_found(db: Database, content: int) -> None:
    """A content of this node's own that is LOST is sealed again when a node that lives turns out to have exactly that."""
    with db.transaction():
        db.run(
            "UPDATE content SET state = 2, change = change + 1 WHERE id = ? AND state = 4 AND peer = 0"
            f" AND EXISTS (SELECT 1 FROM {peers.HOLDERS.format('content')})",
            content,
        )  # fmt: skip


def set_state(db: Database, content: int, state: ContentState) -> None:
    """A content's fate was decided: LOST or DOOMED."""
    with db.transaction():
        db.run("UPDATE content SET state = ?, change = change + 1 WHERE id = ?", state, content)


# --- what is told to people ------------------------------------------------------------------------------------------


def set_report(db: Database, key: str, value: Mapping[str, Any] | None) -> None:
    """Set what `ckptfs status` shows under `key`, with the time at which it was first set; None takes it away."""
    with db.transaction():
        if value is None:
            db.run("DELETE FROM report WHERE key = ?", key)
        else:
            db.run(
                "INSERT INTO report (key, value, at_ns) VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                key, json.dumps(value), time.time_ns(),
            )  # fmt: skip


def delete_reports(db: Database) -> None:
    """A mover begins: what an earlier one reported may not hold any more."""
    with db.transaction():
        db.run("DELETE FROM report WHERE key LIKE 'trouble:%' OR key LIKE 'tier:%'")
