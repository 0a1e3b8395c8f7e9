"""Owns contents that another node wrote last (`content.peer = 1`): what is heard of them, and what of them is held here.

The row of a peer's content is what was last heard of it; GOOD copies are always of exactly that generation and digest. When a newer one
is heard of they become OLDER: not read any more, but good for the blocks that did not change, and what is left of the file when the newer
one is lost with its writer: they stay until other nodes have that (P5, P9). Without a cluster all of this is empty.
Functions that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change; a file whose row went is a leftover, which the drop flow finds.

Owns `content.told`: what the cluster's store was told, and shall be, of the copies here. Of another node's content: that a copy is here,
whole or of an older generation. Of this node's own: that it was lost here, while other nodes have it and the PFS does not.

Whoever makes or loses a copy says so in the transaction of that, or calls what is here; the tell flow brings it to the store. Functions
that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change; what was not marked as told is told again.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ckptfs.catalog import peer_copies
from ckptfs.catalog.content_rows import CONTENT_COLUMNS_WITHOUT_BLOCKS, build_content, is_unchanged
from ckptfs.catalog.database import Database
from ckptfs.model import Content, ContentState, CopyState, Tier


@dataclass(frozen=True, slots=True)
class RemoteState:
    """What is said of a content that another node wrote. `digest` is None while it is closed and not sealed."""

    content: int
    inode: int
    generation: int
    size: int
    digest: bytes | None
    block_digests: bytes | None = None
    is_open: bool = False
    """Somebody writes it just now: what was closed before is still what everybody else reads."""

    @property
    def state(self) -> ContentState:
        return ContentState.CLOSED if self.digest is None else ContentState.SEALED


HAS_GOOD_COPY = "EXISTS (SELECT 1 FROM copy c WHERE c.content = content.id AND c.state = 1)"

HAS_STALE_COPY_UNCLOSED = "EXISTS (SELECT 1 FROM copy c WHERE c.content = content.id AND c.state = 3 AND c.digest IS NOT NULL"
"""SQL about a row of `content`: an older generation lies here of which it is known what it is. The parenthesis is left open."""

_SET_REMOTE = "announce_state = CASE WHEN remote = 0 AND announce_state > 0 THEN 2 ELSE announce_state END, remote = 1"
"""SQL: another node has written it; what the store was told of this node's own copy is looked at again."""


def list_hosted(db: Database, after: int, at_most: int) -> list[Content]:
    """Other nodes' contents of which a copy that counts lies here, in the order of their ids."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS} FROM content k WHERE k.remote = 1 AND k.id > ?"
        " AND k.state = 2 AND EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1) ORDER BY k.id LIMIT ?",
        after, at_most,
    )  # fmt: skip
    return [build_content(row) for row in rows]


@dataclass(frozen=True, slots=True)
class HeldCopy:
    """What lies here of a content: the newest generation of it, which need not be what was heard of it last."""

    content: Content
    tier: Tier
    generation: int
    digest: bytes

    @property
    def is_current(self) -> bool:
        """Whether it is what the content's row says."""
        return (self.generation, self.digest) == (self.content.generation, self.content.digest)


_SELECT_HELD_COPIES = (
    f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS}, c.tier,"
    " CASE c.state WHEN 1 THEN k.generation ELSE c.generation END, CASE c.state WHEN 1 THEN k.digest ELSE c.digest END"
    " FROM content k JOIN copy c ON c.content = k.id AND c.tier <> 'pfs'"
    " AND ((c.state = 1 AND k.state = 2) OR (c.state = 3 AND c.digest IS NOT NULL AND k.state IN (1, 2)))"
)


def list_held_copies(db: Database, after: int, at_most: int) -> list[HeldCopy]:
    """What lies here whole, of contents of any node, in the order of their ids: of each the newest."""
    rows = db.rows(f"{_SELECT_HELD_COPIES} WHERE k.id > ? ORDER BY k.id, 11 LIMIT ?", after, 2 * at_most)
    return list({row[0]: _build_held_copy(row) for row in rows}.values())[:at_most]


def find_held_copy(db: Database, content: int) -> HeldCopy | None:
    """What lies here whole of a content."""
    rows = db.rows(f"{_SELECT_HELD_COPIES} WHERE k.id = ? ORDER BY 11", content)
    return _build_held_copy(rows[-1]) if rows else None


def _build_held_copy(row: tuple[Any, ...]) -> HeldCopy:
    return HeldCopy(build_content(row), Tier(row[9]), row[10], row[11])


def count_hosted(db: Database) -> tuple[int, int]:
    """(files, bytes) of other nodes' contents of which a verified copy lies here."""
    files, size = db.row(
        "SELECT count(*), coalesce(sum(size), 0) FROM content k WHERE k.remote = 1 AND k.state = 2"
        " AND EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1 AND c.tier <> 'pfs')"
    ) or (0, 0)
    return int(files), int(size)


def record_remote(db: Database, remote: RemoteState) -> bool:
    """Learn of a content that another node wrote. False, and nothing changed, when what is known here is newer or somebody writes it here.

    Copies of another generation than the one that is heard of become OLDER.
    """
    with db.transaction():
        known = db.row("SELECT generation, state, digest, remote, blocks FROM content WHERE id = ?", remote.content)
        if known is None:
            _insert_remote(db, remote)
            return True
        generation, state, digest, peer, blocks = known
        if state == ContentState.OPEN or generation > remote.generation or (state == ContentState.DOOMED):
            return False
        if remote.is_open and (digest is not None or peer):
            if digest is None or remote.generation <= generation + 1:
                return bool(peer)
            # It was closed in between, or another node has asked what it holds: its writer knows more than lies here.
            remote = RemoteState(remote.content, remote.inode, generation + 1, remote.size, None)
        is_same_generation = generation == remote.generation
        if is_same_generation and not peer and (state == ContentState.CLOSED or digest == remote.digest or remote.digest is None):
            return True
        if (
            is_same_generation
            and peer
            and (remote.digest is None or (digest == remote.digest and (blocks is not None or remote.block_digests is None)))
        ):
            return True
        if digest is None or digest != remote.digest:
            _set_copies_stale(db, remote.content)
            blocks = None
        db.run(
            "UPDATE content SET inode = ?, generation = ?, state = ?, size = ?, digest = ?, blocks = ?, under_replicated = 0,"
            f" {_SET_REMOTE}, change = change + 1 WHERE id = ?",
            remote.inode, remote.generation, remote.state, remote.size, remote.digest, remote.block_digests or blocks, remote.content,
        )  # fmt: skip
        return True


def restore_verified(db: Database, seen: Content, to: RemoteState, tier: Tier | None) -> bool:
    """The writer of what is closed and not sealed is gone, and nobody can have it: the file holds what was verified of it last. `tier`
    has that here, as an OLDER copy. False, and nothing changed, when the content has moved on.
    """
    with db.transaction():
        if not seen.is_remote or not is_unchanged(db, seen):
            return False
        db.run(
            "UPDATE content SET generation = ?, state = 2, size = ?, digest = ?, blocks = ?, change = change + 1 WHERE id = ?",
            to.generation, to.size, to.digest, to.block_digests, seen.id,
        )  # fmt: skip
        if tier is not None:
            db.run(
                "UPDATE copy SET state = 1, verified_ns = ?, generation = NULL, digest = NULL WHERE content = ? AND tier = ? AND state = 3",
                time.time_ns(), seen.id, tier,
            )  # fmt: skip
            mark_unannounced(db, seen.id)
        return True


def mark_held_copy_stale(db: Database, held_copy: HeldCopy) -> bool:
    """What is kept of a content does not count any more: another generation of it is said to be lost. False when it has moved on."""
    seen = held_copy.content
    with db.transaction():
        if not is_unchanged(db, seen) or is_own_unpublished(db, seen.id):
            return False
        _set_copies_stale(db, seen.id)
        db.run(f"UPDATE content SET {_SET_REMOTE}, under_replicated = 0 WHERE id = ?", seen.id)
        return True


def yield_to_remote(db: Database, content: int, generation: int) -> None:
    """Another node wrote this generation after what this one wrote of its content, and did not tell: what lies here is an older state."""
    with db.transaction():
        known = db.row("SELECT generation FROM content WHERE id = ? AND remote = 0 AND state IN (1, 2)", content)
        if known is not None and known[0] <= generation:
            _set_copies_stale(db, content)
            db.run(
                f"UPDATE content SET state = 1, digest = NULL, blocks = NULL, under_replicated = 0, {_SET_REMOTE},"
                " change = change + 1 WHERE id = ?",
                content,
            )


def insert_split_content(db: Database, held_copy: HeldCopy, content: int, inode: int, size: int, block_digests: bytes) -> Content:
    """What was made under the reserved id `number` is a content now, and was a generation of another one. The store is told next."""
    now = time.time_ns()
    with db.transaction():
        db.run(
            "INSERT INTO content (id, inode, generation, state, size, digest, blocks, change, closed_ns, remote, superseded_mtime_ns)"
            " VALUES (?, ?, ?, 2, ?, ?, ?, 1, ?, 1, 0)",
            content, inode, held_copy.generation, size, held_copy.digest, block_digests, now,
        )  # fmt: skip
        db.run("UPDATE copy SET state = 1, verified_ns = ?1, used_ns = ?1 WHERE content = ?2 AND tier = ?3", now, content, held_copy.tier)
    return Content(content, inode, held_copy.generation, ContentState.SEALED, size, held_copy.digest, block_digests, 1, True)


def is_own_unpublished(db: Database, content: int) -> bool:
    """Whether this node wrote a content and the others do not know yet: whoever has it from elsewhere is in conflict with us, and it is
    for the mount to settle that, with both of them still there.
    """
    touched = "SELECT 1 FROM dirty_key WHERE kind = 'c' AND number = content.id"
    return db.value(f"SELECT 1 FROM content WHERE id = ? AND remote = 0 AND EXISTS ({touched})", content) is not None


def _insert_remote(db: Database, remote: RemoteState) -> None:
    """A row with another node's id must not make this node count on from there. Of an open content any state that is heard of is newer."""
    last = db.value("SELECT seq FROM sqlite_sequence WHERE name = 'content'")
    db.run(
        "INSERT INTO content (id, inode, generation, state, size, digest, blocks, change, closed_ns, remote) VALUES (?,?,?,?,?,?,?,1,?,1)",
        remote.content, remote.inode, 0 if remote.is_open else remote.generation, remote.state, remote.size, remote.digest,
        remote.block_digests, time.time_ns(),
    )  # fmt: skip
    if last is None:
        db.run("DELETE FROM sqlite_sequence WHERE name = 'content'")
    else:
        db.run("UPDATE sqlite_sequence SET seq = ? WHERE name = 'content'", last)


def _set_copies_stale(db: Database, content: int) -> None:
    """What lies here of this content is of another generation from now on. Other nodes shall know which."""
    known = db.row("SELECT state, generation, digest FROM content WHERE id = ?", content)
    generation, digest = known[1:] if known is not None and known[0] == ContentState.SEALED else (None, None)
    db.run(
        "UPDATE copy SET generation = CASE state WHEN 1 THEN ?1 END, digest = CASE state WHEN 1 THEN ?2 END, state = ?3, verified_ns = 0,"
        " used_ns = ?4 WHERE content = ?5 AND state IN (1, 2)",
        generation, digest, CopyState.STALE, time.time_ns(), content,
    )  # fmt: skip
    db.run("UPDATE content SET announce_state = 2 WHERE id = ? AND announce_state = 0", content)


def mark_copies_stale(db: Database, content: int) -> None:
    """The file of this content is about to be another one: what was there does not count from here on."""
    with db.transaction():
        _set_copies_stale(db, content)


def record_hosted_copy(db: Database, remote: RemoteState, reserved_content: int, tier: Tier) -> bool:
    """What arrived under the reserved id `number` is a verified copy of `heard` now, under the content's own id; False when it is not
    wanted any more. The caller has given the file its name.
    """
    with db.transaction():
        if not record_remote(db, remote):
            return False
        now = time.time_ns()
        db.run("DELETE FROM copy WHERE content = ? AND tier = ?", reserved_content, tier)
        db.run(
            "UPDATE content SET blocks = coalesce(blocks, ?), announce_state = 2 WHERE id = ? AND remote = 1",
            remote.block_digests,
            remote.content,
        )
        mark_copy_present(db, remote.content)
        db.run(
            "INSERT OR REPLACE INTO copy (content, tier, state, verified_ns, used_ns) VALUES (?, ?, 1, ?, ?)",
            remote.content, tier, now, now,
        )  # fmt: skip
        return True


def record_fetched_copy(db: Database, seen: Content, tier: Tier, block_digests: bytes) -> bool:
    """A copy that was announced in `tier` came from other nodes and is right. False, and nothing changed, when the content has moved on."""
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
        mark_copy_present(db, seen.id)
        return True


def mark_unannounced(db: Database, content: int) -> None:
    """The store shall be told of the copy here once more."""
    with db.transaction():
        db.run("UPDATE content SET announce_state = 2 WHERE id = ? AND remote = 1", content)


def mark_copy_present(db: Database, content: int) -> None:
    """A copy of this node's own content is here."""
    with db.transaction():
        db.run("UPDATE content SET announce_state = 3 WHERE id = ? AND remote = 0 AND announce_state > 0", content)


def was_in_store(db: Database, inode: int) -> bool:
    """Whether the store had this inode when it was last asked, and nothing about it waits to be told: if it is gone there, it is gone."""
    touched = "SELECT 1 FROM dirty_key WHERE kind = 'i' AND number = ? LIMIT 1"
    seen = "SELECT 1 FROM cached_key WHERE kind = 'i' AND number = ? LIMIT 1"
    return db.value(touched, inode) is None and db.value(seen, inode) is not None


def mark_remote(db: Database, content: Content) -> bool:
    """Another node has what this one took for its own, word for word. False when it has moved on."""
    with db.transaction():
        return bool(
            db.run(
                "UPDATE content SET announce_state = 2, remote = 1, under_replicated = 0, change = change + 1"
                " WHERE id = ? AND change = ? AND state = 2",
                content.id, content.change,
            )
        )  # fmt: skip


def list_stale(db: Database, tier: Tier, before_ns: int, at_most: int) -> list[int]:
    """Contents of which a former generation lies in `tier` that nobody has open, and that became one before `before_ns`, as far as what
    came after it is on two other nodes, here or on the PFS: until then it may be all that is left (P5).
    """
    rows = db.rows(
        "SELECT c.content FROM copy c LEFT JOIN content k ON k.id = c.content WHERE c.tier = ? AND c.state = 3 AND c.used_ns < ?"
        " AND NOT EXISTS (SELECT 1 FROM handle h WHERE h.content = c.content) AND (k.state IS NULL OR k.state = 3 OR (k.state = 2"
        " AND (EXISTS (SELECT 1 FROM copy g WHERE g.content = k.id AND g.state = 1)"
        f" OR (SELECT count(*) FROM {peer_copies.HOLDERS.format('k')}) > 1"
        " OR EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = k.inode AND p.complete = 1 AND p.generation >= k.generation)))) LIMIT ?",
        tier, before_ns, at_most,
    )  # fmt: skip
    return [row[0] for row in rows]


def list_only_stale(db: Database, after: int, at_most: int) -> list[Content]:
    """Contents of which only a former generation lies here, in the order of their ids."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS} FROM content k WHERE k.id > ?"
        " AND k.state IN (1, 2) AND EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 3)"
        " AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1) ORDER BY k.id LIMIT ?",
        after, at_most,
    )  # fmt: skip
    return [build_content(row) for row in rows]


def get_last_used_ns(db: Database, content: int) -> int:
    """When any copy here of a content was used or made last, in ns since the epoch."""
    return int(db.value("SELECT coalesce(max(max(used_ns, verified_ns)), 0) FROM copy WHERE content = ?", content))


def list_own(db: Database, after: int, before_ns: int, at_most: int) -> list[Content]:
    """This node's own contents, sealed or lost, that were closed before `before_ns`, in the order of their ids."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS} FROM content k"
        " WHERE remote = 0 AND id > ? AND state IN (2, 4) AND closed_ns < ? ORDER BY id LIMIT ?",
        after, before_ns, at_most,
    )  # fmt: skip
    return [build_content(row) for row in rows]


def list_own_of_same_files(db: Database, contents: Iterable[int], at_most: int) -> list[Content]:
    """This node's own contents, sealed or lost, of the files to which these belong: what those hold, and what they held before."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS} FROM content k WHERE remote = 0 AND state IN (2, 4)"
        " AND inode IN (SELECT k.inode FROM content k WHERE k.id IN (SELECT value FROM json_each(?))) ORDER BY id LIMIT ?",
        json.dumps([*contents]), at_most,
    )  # fmt: skip
    return [build_content(row) for row in rows]


def delete_unneeded(db: Database, content: Content, *, gone: bool) -> bool:
    """Nobody needs a content any more (`gone`), or not here. False, and nothing changed, when it moved on or somebody has it open."""
    with db.transaction():
        if not is_unchanged(db, content):
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
    """Bytes in copies of other nodes' contents here."""
    return int(
        db.value(
            "SELECT coalesce(sum(k.size), 0) FROM content k JOIN copy c ON c.content = k.id WHERE k.remote = 1 AND c.state <> 2"
            " AND (?1 IS NULL OR c.tier = ?1)",
            tier,
        )
    )


def list_recent_blocks(db: Database, size_min: int, at_most: int) -> list[tuple[int, Tier, bytes]]:
    """(content, tier, blocks' digests) of contents of at least `size_min` bytes that came last, whose blocks the next one may have."""
    rows = db.rows(
        "SELECT k.id, c.tier, k.blocks FROM copy c JOIN content k ON k.id = c.content WHERE c.state = 1 AND k.state = 2"
        " AND c.tier <> 'pfs' AND k.size >= ? AND length(k.blocks) BETWEEN 1 AND 1048576 ORDER BY c.used_ns DESC LIMIT ?",
        size_min, at_most,
    )  # fmt: skip
    return [(row[0], Tier(row[1]), row[2]) for row in rows]


_IS_ABSENT = (
    f"(content.remote = 0 AND content.state = 2 AND NOT {HAS_GOOD_COPY} AND EXISTS (SELECT 1 FROM peer_copy o WHERE o.content = content.id"
    " AND o.generation = content.generation AND o.digest = content.digest)"
    " AND NOT EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = content.inode AND p.complete = 1 AND p.generation = content.generation"
    " AND p.digest = content.digest))"
)
"""SQL about a row of `content`: this node wrote it and has lost it, other nodes have it, and the PFS does not."""


def mark_copy_absent(db: Database, content: int) -> None:
    """No copy of a content counts here any more: of this node's own the others shall learn that, when they have it."""
    with db.transaction():
        db.run(f"UPDATE content SET announce_state = 2 WHERE id = ? AND announce_state <> 1 AND {_IS_ABSENT}", content)


def list_unannounced(db: Database, at_most: int) -> list[tuple[Content, bool]]:
    """Contents of which the cluster's store shall learn that a copy is here (True), or no longer is; an older one by what it is of. Of
    this node's own: that its copy is away (True), or no longer is.
    """
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS.replace('k.', 'content.')}, announce_state = 2,"
        f" state = 2 AND {HAS_GOOD_COPY} FROM content WHERE announce_state > 1 LIMIT ?",
        at_most,
    )  # fmt: skip
    unannounced = []
    for row in rows:
        content, is_present = build_content(row), bool(row[9])
        if not content.is_remote:
            is_present = is_present and content.state is ContentState.SEALED and not row[10]
        elif is_present and not row[10]:
            found = find_held_copy(db, content.id)
            is_present = found is not None
            content = content if found is None else replace(content, generation=found.generation, digest=found.digest)
        unannounced.append((content, is_present))
    return unannounced


def mark_announced(db: Database, contents: Iterable[tuple[Content, bool]]) -> None:
    """The store has learned this of these contents; what moved on meanwhile, came or went stays to be told."""
    with db.transaction():
        for content, is_present in contents:
            if is_present:
                db.run(
                    "UPDATE content SET announce_state = 1 WHERE id = ?1 AND change = ?2 AND announce_state = 2 AND"
                    f" ((state = 2 AND generation = ?3 AND digest = ?4 AND {HAS_GOOD_COPY} = remote)"
                    f" OR {HAS_STALE_COPY_UNCLOSED} AND c.generation = ?3 AND c.digest = ?4))",
                    content.id, content.change, content.generation, content.digest,
                )  # fmt: skip
            else:
                db.run(
                    "UPDATE content SET announce_state = 0 WHERE id = ? AND change = ?"
                    f" AND (announce_state = 3 OR (announce_state = 2 AND CASE remote WHEN 0 THEN state <> 2 OR {HAS_GOOD_COPY}"
                    f" ELSE NOT (state = 2 AND {HAS_GOOD_COPY}) AND NOT {HAS_STALE_COPY_UNCLOSED}) END))",
                    content.id, content.change,
                )  # fmt: skip


def mark_dropped_unannounced(db: Database) -> int:
    """Copies of which the store was told and that are gone, with their tier say: it shall learn so. How many those are. So it shall of
    what this node wrote and has lost.
    """
    with db.transaction():
        db.run(
            f"UPDATE content SET announce_state = CASE WHEN {_IS_ABSENT} THEN 2 ELSE 3 END"
            f" WHERE remote = 0 AND (announce_state > 0 OR {_IS_ABSENT})"
        )
        return db.run(
            f"UPDATE content SET announce_state = 3 WHERE announce_state IN (1, 2) AND remote = 1"
            f" AND NOT {HAS_GOOD_COPY} AND NOT {HAS_STALE_COPY_UNCLOSED})"
        )
