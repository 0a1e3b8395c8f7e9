"""Contents that another node wrote last (`remote`), and announcements of copies (`announce_state`).

The row of a remote content is the newest state that this node learned; its GOOD copies are exactly of that generation and digest. Only a
content that was open has several generations. When this node learns of a newer one, the copies become STALE: they are sources of blocks,
and all that is left of the file if the newer generation is lost with its writer. They stay until other nodes have that generation (P5, P9).

The store has to know of a remote content if this node has a copy; of an own one, if this node lost it while other nodes have it and the PFS
does not (`IS_ANNOUNCED`). `announce_state` is 1 if the store knows of the copy, 0 if it has no record, and higher if this node has to
announce again. Code that inserts or deletes a copy marks that in the same transaction. Functions that change rows join the caller's
transaction.

Crash safety: a state that is not marked as announced is announced again. Files without a row are deleted by the reclaim step.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ckptfs import limits
from ckptfs.catalog import peer_copies
from ckptfs.catalog.content_rows import (
    CONTENT_COLUMNS_WITHOUT_BLOCKS,
    HAS_GOOD_COPY,
    IS_ON_PFS,
    build_content,
    build_content_and_rest,
    count_sizes,
    is_unchanged,
)
from ckptfs.catalog.database import Database
from ckptfs.digest import BLOCK_DIGEST_BYTES
from ckptfs.model import Content, ContentState, CopyState, Tier


@dataclass(frozen=True, slots=True)
class RemoteState:
    """A state that another node wrote. `digest` is None if the content is closed and not sealed.

    `blocks` are the digests of its blocks, 16 bytes for each 4 MiB begun.
    """

    content: int
    inode: int
    generation: int
    size: int
    digest: bytes | None
    blocks: bytes | None = None
    is_open: bool = False  # A node writes it just now: all other nodes still read the state that was closed before.

    @property
    def state(self) -> ContentState:
        return ContentState.CLOSED if self.digest is None else ContentState.SEALED

    def get_block_digest(self, number: int) -> bytes:
        """Return the digest that block `number` must have."""
        assert self.blocks is not None
        return self.blocks[number * BLOCK_DIGEST_BYTES : (number + 1) * BLOCK_DIGEST_BYTES]


IS_ANNOUNCED = (
    f"(CASE remote WHEN 0 THEN state = 2 AND NOT {HAS_GOOD_COPY.format('content')} AND {peer_copies.IS_KNOWN_ELSEWHERE.format('content')}"
    f" AND NOT {IS_ON_PFS.format('content')} ELSE (state = 2 AND {HAS_GOOD_COPY.format('content')}) OR (state IN (1, 2)"
    " AND EXISTS (SELECT 1 FROM copy c WHERE c.content = content.id AND c.state = 3 AND c.digest IS NOT NULL)) END)"
)
"""SQL about a row of `content`: 1 if the store is to have this node's key of it, else 0.

Of another node's content: this node has a copy, whole or STALE, of a known generation. Of its own: it has lost the copy, other nodes have
it, and the PFS does not.
"""

_SET_REMOTE = "announce_state = CASE WHEN remote = 0 AND announce_state > 0 THEN 2 ELSE announce_state END, remote = 1"
"""SQL: another node has written the content. Whether the store knows this node's copy is decided again."""


def _list_contents(db: Database, where: str, *arguments: int | str) -> list[Content]:
    """Return contents `k`, in the order of their ids. The last argument is their highest number."""
    rows = db.rows(f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS} FROM content k WHERE {where} ORDER BY k.id LIMIT ?", *arguments)
    return [build_content(row) for row in rows]


_IS_HOSTED = f"k.remote = 1 AND k.state = 2 AND {HAS_GOOD_COPY.format('k')}"


def list_hosted(db: Database, after: int, at_most: int) -> list[Content]:
    """Return other nodes' contents of which this node has a good copy, in the order of their ids."""
    return _list_contents(db, f"{_IS_HOSTED} AND k.id > ?", after, at_most)


def list_hosted_with(db: Database, node: int, after: int, at_most: int) -> list[Content]:
    """Return those of `list_hosted` that a node has made, or of which it is known to have a copy."""
    made = node << limits.ID_COUNTER_BITS, ((node + 1) << limits.ID_COUNTER_BITS) - 1
    concerned = "SELECT id FROM content WHERE remote = 1 AND id BETWEEN ? AND ? UNION SELECT content FROM peer_copy WHERE node = ?"
    return _list_contents(db, f"k.id IN ({concerned}) AND {_IS_HOSTED} AND k.id > ?", *made, node, after, at_most)


def list_not_held(db: Database, contents: Iterable[int]) -> list[int]:
    """Return those of these contents that this node neither wrote nor holds, whole or stale."""
    return db.column(
        "SELECT value FROM json_each(?) WHERE NOT EXISTS (SELECT 1 FROM content WHERE id = value AND remote = 0)"
        " AND NOT EXISTS (SELECT 1 FROM copy WHERE content = value AND state IN (1, 3))",
        json.dumps([*contents]),
    )


def list_announced(db: Database, contents: Iterable[int]) -> set[int]:
    """Return those of these contents of which this node has announced a copy to the store."""
    known = "SELECT id FROM content WHERE id IN (SELECT value FROM json_each(?)) AND remote = 1 AND announce_state = 1"
    return set(db.column(known, json.dumps([*contents])))


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """The newest generation of a content that this node has. The row of the content may be newer."""

    content: Content
    tier: Tier
    generation: int
    digest: bytes


_SELECT_HELD_COPIES = (
    f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS}, c.tier,"
    " CASE c.state WHEN 1 THEN k.generation ELSE c.generation END, CASE c.state WHEN 1 THEN k.digest ELSE c.digest END"
    " FROM content k JOIN copy c ON c.content = k.id AND c.tier <> 'pfs'"
    " AND ((c.state = 1 AND k.state = 2) OR (c.state = 3 AND c.digest IS NOT NULL AND k.state IN (1, 2)))"
)


def list_held_copies(db: Database, after: int, at_most: int) -> list[HeldCopy]:
    """Return the newest whole generation on this node of contents of any node, in the order of their ids."""
    rows = db.rows(f"{_SELECT_HELD_COPIES} WHERE k.id > ? ORDER BY k.id, 11 LIMIT ?", after, 2 * at_most)
    return list({row[0]: _build_held_copy(row) for row in rows}.values())[:at_most]


def find_held_copy(db: Database, content: int) -> HeldCopy | None:
    """Return the newest whole generation of a content on this node. Returns None if there is none."""
    rows = db.rows(f"{_SELECT_HELD_COPIES} WHERE k.id = ? ORDER BY 11", content)
    return _build_held_copy(rows[-1]) if rows else None


def _build_held_copy(row: tuple[Any, ...]) -> HeldCopy:
    content, (tier, generation, digest) = build_content_and_rest(row)
    return HeldCopy(content, Tier(tier), generation, digest)


def count_hosted(db: Database) -> tuple[int, int]:
    """Return (files, bytes) of other nodes' contents of which this node has a verified copy."""
    has_copy = "EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1 AND c.tier <> 'pfs')"
    return count_sizes(db, "size", f"content k WHERE k.remote = 1 AND k.state = 2 AND {has_copy}")


def record_remote(db: Database, remote: RemoteState, *, is_from_store: bool = False) -> bool:
    """Record what another node wrote; previous copies become STALE. False: this node has newer facts.

    To which file a content of this node belongs, only the store can tell: a peer may offer it for the file that it was the previous one of.
    """
    with db.transaction():
        known = db.row("SELECT generation, state, digest, remote, blocks FROM content WHERE id = ?", remote.content)
        if known is None:
            _insert_remote(db, remote)
            return True
        generation, state, digest, is_remote, blocks = known
        if state in {ContentState.OPEN, ContentState.DOOMED} or generation > remote.generation:
            return False
        # It may belong to another file by now: see `history.separate`.
        is_other_file = "id = ?2 AND inode <> ?1 AND (remote = 1 OR ?3)"
        db.run(f"UPDATE content SET inode = ?1 WHERE {is_other_file}", remote.inode, remote.content, is_from_store)
        if remote.is_open and (digest is not None or is_remote):
            if digest is None or remote.generation <= generation + 1:
                return bool(is_remote)
            # It was closed in between, or another node has asked for its state: its writer knows more than this node.
            remote = RemoteState(remote.content, remote.inode, generation + 1, remote.size, None)
        if generation == remote.generation:
            adds_blocks = is_remote and blocks is None and remote.blocks is not None
            is_known = state == ContentState.CLOSED and not is_remote
            if is_known or remote.digest is None or (digest == remote.digest and not adds_blocks):
                return True
        if digest is None or digest != remote.digest:
            mark_copies_stale(db, remote.content)
            blocks = None
        db.run(
            "UPDATE content SET inode = ?, generation = ?, state = ?, size = ?, digest = ?, blocks = ?, under_replicated = 0,"
            f" {_SET_REMOTE}, change = change + 1 WHERE id = ?",
            remote.inode, remote.generation, remote.state, remote.size, remote.digest, remote.blocks or blocks, remote.content,
        )  # fmt: skip
        return True


def mark_restored(db: Database, content: int, inode: int, *, is_own: bool, superseded_mtime_ns: int | None) -> None:
    """Take a content back that was deleted here, or that was replaced here and has another owner now.

    Another node restored its file, or keeps it until its successor is safe. Copies on this node count again. `inode`, `is_own` and
    `superseded_mtime_ns` are what the store says. If this node owns the content there, it goes on to do so here, and deletes its key
    one day.
    """
    restored = "state = CASE WHEN state < 3 THEN state WHEN digest IS NULL THEN 1 ELSE 2 END, change = change + 1"
    is_deleted = "id = ? AND inode = ? AND state = 3 AND remote = 0"
    if is_own and db.run(f"UPDATE content SET {restored}, superseded_mtime_ns = ? WHERE {is_deleted}", superseded_mtime_ns, content, inode):
        return
    is_others = "(state = 3 OR (? AND remote = 0 AND superseded_mtime_ns IS NOT NULL))"
    if db.run(
        f"UPDATE content SET {restored}, superseded_mtime_ns = NULL, under_replicated = 0, {_SET_REMOTE} WHERE id = ? AND {is_others}",
        content, superseded_mtime_ns is None and not is_own,
    ):  # fmt: skip
        mark_copy_changed(db, content)


def restore_verified(db: Database, seen: Content, to: RemoteState) -> bool:
    """Let a content that was not sealed hold its last verified generation. Return False if it changed."""
    with db.transaction():
        if not seen.is_remote or not is_unchanged(db, seen):
            return False
        db.run(
            "UPDATE content SET generation = ?, state = 2, size = ?, digest = ?, blocks = ?, change = change + 1 WHERE id = ?",
            to.generation, to.size, to.digest, to.blocks, seen.id,
        )  # fmt: skip
        return True


def mark_held_copy_stale(db: Database, held_copy: HeldCopy) -> bool:
    """Make copies STALE, as another generation is missed. Return False if the content has changed."""
    seen = held_copy.content
    with db.transaction():
        if not is_unchanged(db, seen) or is_own_unpublished(db, seen.id):
            return False
        mark_copies_stale(db, seen.id)
        db.run(f"UPDATE content SET {_SET_REMOTE}, under_replicated = 0 WHERE id = ?", seen.id)
        return True


def insert_split_content(db: Database, held_copy: HeldCopy, content: int, inode: int, size: int, block_digests: bytes) -> Content:
    """Insert a generation of another content under the reserved id `content`. It is not announced yet."""
    with db.transaction():
        _insert_remote(db, RemoteState(content, inode, held_copy.generation, size, held_copy.digest, block_digests))
        db.run("UPDATE content SET superseded_mtime_ns = 0 WHERE id = ?", content)
        verified = "UPDATE copy SET state = 1, verified_ns = ?1, used_ns = ?1 WHERE content = ?2 AND tier = ?3"
        db.run(verified, time.time_ns(), content, held_copy.tier)
    return Content(content, inode, held_copy.generation, ContentState.SEALED, size, held_copy.digest, block_digests, 1, True)


def is_own_unpublished(db: Database, content: int) -> bool:
    """Return True if this node wrote a content that the store lacks: the mount resolves conflicts."""
    touched = "SELECT 1 FROM dirty_key WHERE kind = 'c' AND number = content.id"
    return db.value(f"SELECT 1 FROM content WHERE id = ? AND remote = 0 AND EXISTS ({touched})", content) is not None


def _insert_remote(db: Database, remote: RemoteState) -> None:
    """Insert a row with an id of another node; generation 0 if it is open, so any later state is newer."""
    db.run(
        "INSERT INTO content (id, inode, generation, state, size, digest, blocks, change, closed_ns, remote) VALUES (?,?,?,?,?,?,?,1,?,1)",
        remote.content, remote.inode, 0 if remote.is_open else remote.generation, remote.state, remote.size, remote.digest,
        remote.blocks, time.time_ns(),
    )  # fmt: skip


def mark_copies_stale(db: Database, content: int) -> None:
    """Make the copies on this node STALE. The store has to learn their generation. Joins the transaction."""
    known = db.row("SELECT state, generation, digest FROM content WHERE id = ?", content)
    generation, digest = known[1:] if known is not None and known[0] == ContentState.SEALED else (None, None)
    db.run(
        "UPDATE copy SET generation = CASE state WHEN 1 THEN ?1 END, digest = CASE state WHEN 1 THEN ?2 END, state = ?3, verified_ns = 0,"
        " used_ns = ?4 WHERE content = ?5 AND state IN (1, 2)",
        generation, digest, CopyState.STALE, time.time_ns(), content,
    )  # fmt: skip
    mark_copy_changed(db, content)


def record_hosted_copy(db: Database, remote: RemoteState, reserved_content: int, tier: Tier) -> bool:
    """Record a received copy, which has its name, under its content. Return False if it is not needed."""
    with db.transaction():
        if not record_remote(db, remote):
            return False
        now = time.time_ns()
        db.run("DELETE FROM copy WHERE content = ? AND tier = ?", reserved_content, tier)
        db.run(
            "UPDATE content SET blocks = coalesce(blocks, ?), announce_state = 2 WHERE id = ? AND remote = 1", remote.blocks, remote.content
        )
        db.run(
            "INSERT OR REPLACE INTO copy (content, tier, state, verified_ns, used_ns) VALUES (?, ?, 1, ?, ?)",
            remote.content, tier, now, now,
        )  # fmt: skip
        mark_copy_changed(db, remote.content)
        return True


def record_fetched_copy(db: Database, seen: Content, tier: Tier, block_digests: bytes) -> bool:
    """Make a fetched copy GOOD. Return False without a change if the content has changed."""
    with db.transaction():
        if not is_unchanged(db, seen):
            return False
        now = time.time_ns()
        if not db.run("UPDATE copy SET state = 1, verified_ns = ?1, used_ns = ?1 WHERE content = ?2 AND tier = ?3 AND state = 0",
                      now, seen.id, tier):  # fmt: skip
            return False
        db.run(
            "UPDATE content SET blocks = coalesce(blocks, ?), announce_state = CASE WHEN remote = 1 THEN 2 ELSE announce_state END"
            " WHERE id = ?",
            block_digests,
            seen.id,
        )
        mark_copy_changed(db, seen.id)
        return True


def was_in_store(db: Database, inode: int) -> bool:
    """Return True if the store had this inode when last asked, with no pending change: else deleted."""
    touched = "SELECT 1 FROM dirty_key WHERE kind = 'i' AND number = ? LIMIT 1"
    seen = "SELECT 1 FROM cached_key WHERE kind = 'i' AND number = ? LIMIT 1"
    return db.value(touched, inode) is None and db.value(seen, inode) is not None


def mark_own(db: Database, content: int, inode: int, generation: int, closed_ns: int) -> None:
    """Make a content of another node, of which this one has a good copy, its own: it answers for it now."""
    db.run(
        "UPDATE content SET remote = 0, inode = ?, superseded_mtime_ns = NULL, under_replicated = 1, closed_ns = ?,"
        " announce_state = CASE WHEN announce_state > 0 THEN 2 ELSE 0 END, change = change + 1"
        f" WHERE id = ? AND generation = ? AND remote = 1 AND state = 2 AND {HAS_GOOD_COPY.format('content')}",
        inode, closed_ns, content, generation,
    )  # fmt: skip


def mark_remote(db: Database, content: Content) -> None:
    """Make an own content a remote one, unless it has changed: another node has exactly the same."""
    same = "id = ? AND change = ? AND state = 2"
    set_remote = f"UPDATE content SET announce_state = 2, remote = 1, under_replicated = 0, change = change + 1 WHERE {same}"
    db.change(set_remote, content.id, content.change)


def list_stale(db: Database, tier: Tier, before_ns: int, at_most: int) -> list[int]:
    """Return contents whose STALE copy in `tier` is old and whose successor is safe elsewhere (P5)."""
    return db.column(
        "SELECT c.content FROM copy c LEFT JOIN content k ON k.id = c.content WHERE c.tier = ? AND c.state = 3 AND c.state <> 1"
        " AND c.used_ns < ?"
        " AND NOT EXISTS (SELECT 1 FROM handle h WHERE h.content = c.content) AND (k.state IS NULL OR k.state = 3 OR (k.state = 2"
        f" AND ({HAS_GOOD_COPY.format('k')}"
        f" OR (SELECT count(*) FROM {peer_copies.HOLDERS.format('k')}) > 1"
        " OR EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = k.inode AND p.complete = 1 AND p.generation >= k.generation)))) LIMIT ?",
        tier, before_ns, at_most,
    )  # fmt: skip


def list_only_stale(db: Database, after: int, at_most: int) -> list[Content]:
    """Return contents of which this node has only a STALE copy, in the order of their ids."""
    is_stale = "k.id IN (SELECT content FROM copy WHERE state = 3 AND state <> 1 AND content > ?) AND k.state IN (1, 2)"
    return _list_contents(db, f"{is_stale} AND NOT {HAS_GOOD_COPY.format('k')}", after, at_most)


def get_last_used_ns(db: Database, content: int) -> int:
    """Return when any copy of a content on this node was used or verified last, in ns since the epoch."""
    return int(db.value("SELECT coalesce(max(max(used_ns, verified_ns)), 0) FROM copy WHERE content = ?", content))


def list_own(db: Database, after: int, before_ns: int, at_most: int) -> list[Content]:
    """Return own contents, sealed or lost, that were closed before `before_ns`, in the order of their ids."""
    return _list_contents(db, "remote = 0 AND id > ? AND state IN (2, 4) AND closed_ns < ?", after, before_ns, at_most)


def list_own_of_same_files(db: Database, contents: Iterable[int], at_most: int) -> list[Content]:
    """Return own contents, sealed or lost, of the files to which `contents` belong."""
    same = "inode IN (SELECT s.inode FROM content s WHERE s.id IN (SELECT value FROM json_each(?)))"
    return _list_contents(db, f"remote = 0 AND state IN (2, 4) AND {same}", json.dumps([*contents]), at_most)


def is_uncommitted(db: Database, content: Content) -> bool:
    """Return True if the mount has still to publish this content, or a name of its file.

    For the store it may be the previous content of another file by now.
    """
    files = {content.inode, db.value("SELECT inode FROM content WHERE id = ?", content.id)}
    return any(db.value(f"SELECT {peer_copies.IS_UNCOMMITTED.format('?1', '?2')}", content.id, inode) for inode in files)


def delete_unneeded(db: Database, content: Content, *, gone: bool) -> bool:
    """Doom a content that is `gone`, or delete the copies of it on this node.

    Returns False if it is open, changed or uncommitted.
    """
    with db.transaction():
        if not is_unchanged(db, content) or is_uncommitted(db, content):
            return False
        if db.value("SELECT 1 FROM handle WHERE content = ? LIMIT 1", content.id) is not None:
            return False
        if gone:
            db.run("UPDATE content SET state = 3, change = change + 1, announce_state = 0 WHERE id = ?", content.id)
        else:
            db.run("DELETE FROM copy WHERE content = ?", content.id)
            db.run("UPDATE content SET change = change + 1, announce_state = 0 WHERE id = ?", content.id)
        return True


def count_hosted_bytes(db: Database, tier: Tier | None = None) -> int:
    """Return the bytes of other nodes' contents on this node."""
    is_hosted = "k.remote = 1 AND k.state <> 3 AND c.state <> 2 AND (?1 IS NULL OR c.tier = ?1)"
    return count_sizes(db, "k.size", f"content k JOIN copy c ON c.content = k.id WHERE {is_hosted}", tier)[1]


def list_blocks_of_file(db: Database, inode: int, at_most: int) -> list[tuple[int, Tier, bytes | None]]:
    """Return (content, tier, block digests, None for STALE) of this node's copies of a file, newest first."""
    order = "ORDER BY k.generation DESC, k.id DESC LIMIT ?"
    return _list_blocks(db, f"k.inode = ? AND k.state IN (1, 2) AND c.state IN (1, 3) {order}", inode, at_most)


def list_recent_blocks(db: Database, size_min: int, at_most: int) -> list[tuple[int, Tier, bytes]]:
    """Return (content, tier, block digests) of the newest contents of at least `size_min` bytes."""
    order = "ORDER BY c.used_ns DESC LIMIT ?"
    return _list_blocks(
        db, f"c.state = 1 AND k.state = 2 AND k.size >= ? AND length(k.blocks) BETWEEN 1 AND 1048576 {order}", size_min, at_most
    )


def _list_blocks(db: Database, where: str, *arguments: int) -> list[tuple[int, Tier, Any]]:
    columns = "k.id, c.tier, CASE c.state WHEN 1 THEN k.blocks END"
    rows = db.rows(f"SELECT {columns} FROM content k JOIN copy c ON c.content = k.id AND c.tier <> 'pfs' WHERE {where}", *arguments)
    return [(row[0], Tier(row[1]), row[2]) for row in rows]


def mark_unannounced(db: Database, content: int) -> None:
    """Mark that this node has to announce its copy of a remote content again."""
    db.change("UPDATE content SET announce_state = 2 WHERE id = ? AND remote = 1", content)


def mark_copy_changed(db: Database, content: int) -> None:
    """Mark that this node has to announce its copy, or its loss, unless the store knows."""
    db.change(f"UPDATE content SET announce_state = 2 WHERE id = ? AND announce_state <> {IS_ANNOUNCED}", content)


def mark_all_unannounced(db: Database) -> None:
    """Mark all contents to be announced again, because copies may be gone with their tier."""
    db.change(f"UPDATE content SET announce_state = 2 WHERE announce_state <> {IS_ANNOUNCED}")


_SELECT_UNANNOUNCED = (
    f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS.replace('k.', 'content.')}, {IS_ANNOUNCED}, {HAS_GOOD_COPY.format('content')} FROM content"
    " WHERE announce_state > 1"
)


def list_unannounced(db: Database, at_most: int) -> list[tuple[Content, bool]]:
    """Return the contents to announce, and whether the store is to have their key (True) or not.

    For a content of another node, this is the generation of this node's copy.
    """
    return [_build_announcement(db, row) for row in db.rows(f"{_SELECT_UNANNOUNCED} LIMIT ?", at_most)]


def _build_announcement(db: Database, row: tuple[Any, ...]) -> tuple[Content, bool]:
    content, (is_announced, has_good_copy) = build_content_and_rest(row)
    held = find_held_copy(db, content.id) if content.is_remote and is_announced and not has_good_copy else None
    return content if held is None else replace(content, generation=held.generation, digest=held.digest), bool(is_announced)


def mark_announced(db: Database, announced: Iterable[tuple[Content, bool]]) -> None:
    """Record that contents were announced, unless they have changed again since."""
    with db.transaction():
        for content, is_announced in announced:
            row = db.row(f"{_SELECT_UNANNOUNCED} AND id = ?", content.id)
            if row is not None and _build_announcement(db, row) == (content, is_announced):
                db.run("UPDATE content SET announce_state = ? WHERE id = ?", is_announced, content.id)
