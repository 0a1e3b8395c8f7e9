"""Owns a content's life from its first byte to its close: tables `content` and `copy` as the mount changes them. Sealing, copying and
dropping belong to the mover (catalog/settling.py).

Invariants: an inode's current content is `inode.content`; a content is OPEN while a handle may write it; `change` grows whenever bytes
may change, so that whoever read them meanwhile can tell; the generation grows whenever a writer opens what was closed. Every function
joins the caller's transaction.
If we die here: SQLite undoes the unfinished change. An OPEN content without a writer's handle was left by a crash: see `abandoned`.

Owns `content.former_ns`: what a file held before, kept until what it holds now survives this node's death, too (P5, P9).

A content that other nodes had verified becomes a former one when its file is written anew, or when another file takes its file's name: it
belongs to that file then. It goes when what the file holds now lies on other nodes, or whole on the PFS. Until then `c/` says that it is
one, and its holders keep it. Of a content that is changed in place its holders keep the generation that they had (catalog/holding.py), and
`content.before_generation` says of which the file's time is known. Without a cluster there is none of this. Functions that change
something join the caller's transaction.
If we die here: SQLite undoes the unfinished change.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs import lifecycle
from ckptfs.catalog import copies, identity, journal, peer_copies
from ckptfs.catalog.content_rows import CONTENT_COLUMNS, build_content
from ckptfs.catalog.content_rows import get_content as get_content
from ckptfs.catalog.content_rows import is_unchanged as is_unchanged
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import INODE_COLUMNS_JOINED, build_inode
from ckptfs.lifecycle import FileRecord, PublishedState
from ckptfs.model import Content, ContentState, Inode, Tier


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


def get_file_record(db: Database, content: int) -> FileRecord:
    """Return all that decides what may happen to a content, as one snapshot."""
    with db.read_transaction():
        known = get_content(db, content)
        return FileRecord(None) if known is None else build_file_record(db, known.inode, known)


def build_file_record(db: Database, inode: int, content: Content | None) -> FileRecord:
    """Return what is known of a file and one of its contents. The caller has a read transaction."""
    row = db.row("SELECT generation, complete, digest FROM pfs_file WHERE inode = ?", inode)
    published = None if row is None else PublishedState(row[0], bool(row[1]), row[2])
    number = None if content is None else content.id
    handles = int(db.value("SELECT count(*) FROM handle WHERE inode = ? OR content = ?", inode, number))
    found = () if content is None else copies.list_copies(db, content.id)
    return FileRecord(content, found, published, handles, peer_copies.load_clique_copies(db, content, inode))


def list_closed(db: Database, tiers: Iterable[Tier], after: int, at_most: int) -> list[tuple[Content, Tier]]:
    """Contents that await their seal, from the one after `after` on in the order of their ids, with the one of `tiers` that has it."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS}, c.tier FROM content k JOIN copy c ON c.content = k.id AND c.state = 1"
        " WHERE k.state = 1 AND k.remote = 0 AND k.id > ? AND c.tier IN (SELECT value FROM json_each(?)) ORDER BY k.id LIMIT ?",
        after, json.dumps(list(tiers)), at_most,
    )  # fmt: skip
    return [(build_content(row), Tier(row[-1])) for row in rows]


def mark_sealed(db: Database, results: Iterable[SealResult]) -> list[SealResult]:
    """Make these contents SEALED, those that nobody opened for writing meanwhile; which they were.

    What the same file held before goes: its successor is whole now (P5).
    """
    now = time.time_ns()
    done = []
    for result in results:
        if not db.run(
            "UPDATE content SET state = 2, size = ?, digest = ?, blocks = ?, under_replicated = ?"
            " WHERE id = ? AND state = 1 AND change = ?",
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
        "UPDATE content SET state = 3, change = change + 1 WHERE inode = ?1 AND id <> ?2 AND state IN (1, 2, 4)"
        " AND superseded_mtime_ns IS NULL AND generation < (SELECT generation FROM content WHERE id = ?2)"
        " AND id NOT IN (SELECT content FROM handle WHERE content IS NOT NULL)"
        " AND NOT EXISTS (SELECT 1 FROM inode WHERE inode.content = content.id)",
        inode, successor,
    )  # fmt: skip


def count_writers(db: Database) -> int:
    """How many handles are open for writing."""
    return int(db.value("SELECT count(*) FROM handle WHERE writer = 1"))


def get_largest_recent_size(db: Database, at_most: int) -> int:
    """The size of the largest of the `of` contents that were begun last: what may well come next."""
    return int(db.value("SELECT coalesce(max(size), 0) FROM (SELECT size FROM content WHERE remote = 0 ORDER BY id DESC LIMIT ?)", at_most))


def list_without_copy(db: Database) -> list[Content]:
    """Contents of this node's own that should have bytes and have no good copy in any tier."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS} FROM content k WHERE k.state IN (0, 1, 2) AND k.remote = 0"
        " AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1)"
    )
    return [build_content(row) for row in rows]


def is_shown(db: Database, seen: Content) -> bool:
    """Whether a file shows this content now; if not, an earlier or later one of the same file does."""
    return db.value("SELECT 1 FROM inode WHERE id = ? AND content = ?", seen.inode, seen.id) is not None


def is_fsynced_on_pfs(db: Database, content: Content) -> bool:
    """Whether the PFS shows a content that was closed and not sealed yet, as it was fsynced before: of that generation and size."""
    query = "SELECT 1 FROM pfs_file WHERE inode = ? AND generation = ? AND size = ?"
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
        shown = db.row("SELECT size, mtime_ns, generation FROM pfs_file WHERE inode = ?", lost.inode)
        if older is not None and (shown is None or shown[2] <= older[2]):
            db.run("UPDATE inode SET content = ?, size = ? WHERE id = ?", older[0], older[1], lost.inode)
            what = "its former generation"
        elif shown is not None:
            db.run("UPDATE inode SET content = NULL, size = ?, mtime_ns = ? WHERE id = ?", shown[0], shown[1], lost.inode)
            # It may be what was fsynced of the file that was open: from now on that is the whole of it.
            db.run("UPDATE pfs_file SET complete = 1 WHERE inode = ?", lost.inode)
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
        if seen.is_remote or peer_copies.list_holders(db, seen):
            return False
        set_state(db, seen.id, ContentState.LOST)
        return True


def mark_found(db: Database, content: int) -> None:
    """A content of this node's own that is LOST is sealed again when a node that lives turns out to have exactly that."""
    with db.transaction():
        db.run(
            "UPDATE content SET state = 2, change = change + 1 WHERE id = ? AND state = 4 AND remote = 0"
            f" AND EXISTS (SELECT 1 FROM {peer_copies.HOLDERS.format('content')})",
            content,
        )  # fmt: skip


def set_state(db: Database, content: int, state: ContentState) -> None:
    """A content's fate was decided: LOST or DOOMED."""
    with db.transaction():
        db.run("UPDATE content SET state = ?, change = change + 1 WHERE id = ?", state, content)


_HAS_HOLDERS = f"EXISTS (SELECT 1 FROM {peer_copies.HOLDERS.format('content')})"

CAN_DELETE = "(superseded_mtime_ns IS NULL OR (remote = 0 AND superseded_mtime_ns > 0))"
"""SQL about a row of `content` whose file is gone: nobody has to ask the store whether another file held it before."""


def mark_superseded(db: Database, inode: int) -> None:
    """What this file holds is about to be the former content of it."""
    if db.is_clustered and peer_copies.get_replication_factor(db) > 1:
        db.run(
            "UPDATE content SET superseded_mtime_ns = (SELECT mtime_ns FROM inode WHERE id = ?1)"
            " WHERE id = (SELECT content FROM inode WHERE id = ?1) AND state = 2 AND superseded_mtime_ns IS NULL"
            f" AND (replicated_generation IS NOT NULL OR {_HAS_HOLDERS})",
            inode,
        )


def record_replicated_generation(db: Database, content: int) -> None:
    """A content is about to be changed in place: what other nodes have of it is what is left of it until they have the next generation."""
    if db.is_clustered and peer_copies.get_replication_factor(db) > 1:
        db.run(
            "UPDATE content SET replicated_generation = generation,"
            " replicated_mtime_ns = (SELECT mtime_ns FROM inode WHERE inode.id = content.inode)"
            f" WHERE id = ? AND state = 2 AND (remote = 1 OR {_HAS_HOLDERS})",
            content,
        )


def mark_awaiting_store_check(db: Database, inode: int) -> None:
    """Another node took this file's last name away: what lies here of it may be what another file held before. The store knows."""
    db.run(
        "UPDATE content SET superseded_mtime_ns = 0 WHERE inode = ? AND superseded_mtime_ns IS NULL"
        f" AND (remote = 1 OR (state = 2 AND (replicated_generation IS NOT NULL OR {_HAS_HOLDERS})))",
        inode,
    )


def list_awaiting_store_check(db: Database, at_most: int) -> list[Content]:
    """Contents of this node's own that are kept only until the store was asked whether another file held them before."""
    numbers = db.rows("SELECT id FROM content WHERE remote = 0 AND superseded_mtime_ns = 0 AND state = 2 ORDER BY id LIMIT ?", at_most)
    return [found for (number,) in numbers if (found := get_content(db, number)) is not None]


def is_awaiting_store_check(db: Database, content: int) -> bool:
    """Whether a content is one of those."""
    return db.value("SELECT 1 FROM content WHERE id = ? AND remote = 0 AND superseded_mtime_ns = 0", content) is not None


def move_to_successor(db: Database, replaced: Inode, successor: Inode) -> None:
    """The last name of one file becomes another one's: what the first holds is the former content of the other. What another node wrote
    of it that one keeps, and whoever has a copy, as soon as this node has told them.
    """
    if not db.is_clustered or replaced.nlink != 1 or not (replaced.is_file and successor.is_file) or successor.content is None:
        return
    if db.value(f"SELECT 1 FROM content WHERE id = ? AND state = 2 AND {_HAS_HOLDERS}", successor.content) is not None:
        return  # It survives already.
    mark_superseded(db, replaced.id)
    if peer_copies.get_replication_factor(db) > 1:
        db.run(
            "UPDATE content SET superseded_mtime_ns = max(1, ?1) WHERE id = ?2 AND remote = 1 AND state = 2"
            " AND coalesce(superseded_mtime_ns, 0) = 0",
            replaced.mtime_ns, replaced.content,
        )  # fmt: skip
    db.run("UPDATE content SET inode = ? WHERE inode = ? AND superseded_mtime_ns > 0", successor.id, replaced.id)


def expire_previous(db: Database, current: Content) -> None:
    """Doom what the file of `now` held before, when it holds that and it survives."""
    if db.value("SELECT 1 FROM content WHERE inode = ? AND superseded_mtime_ns IS NOT NULL", current.inode) is None:
        return
    with db.transaction():
        record = get_file_record(db, current.id)
        if is_shown(db, current) and (lifecycle.is_on_clique(record) or lifecycle.is_on_pfs(record)):
            expired = db.rows(
                "UPDATE content SET state = 3, change = change + 1 WHERE inode = ? AND id <> ? AND superseded_mtime_ns IS NOT NULL"
                " AND state <> 3 RETURNING id, remote",
                current.inode, current.id,
            )  # fmt: skip
            for content, peer in expired:
                if peer:
                    peer_copies.insert_unneeded_copy(db, content, identity.get_origin_node(content))


_UPDATE_SIZE_AND_TIMES = (
    "UPDATE inode SET size = ?1, ctime_ns = CASE WHEN mtime_ns = ?2 THEN ctime_ns ELSE max(ctime_ns, coalesce(?2, 0)) END,"
    " mtime_ns = coalesce(?2, mtime_ns), atime_ns = ?3 WHERE id = ?4"
)


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file and where its bytes are: `content` is None for a file that was never written here; `tiers` hold a good copy, RAM first.

    `published`: the PFS shows some content of this file under an ordinary name. `peer`: another node wrote it last. `generation`: the
    content's.
    """

    inode: Inode
    content: int | None
    state: ContentState | None
    tiers: tuple[Tier, ...]
    is_on_pfs: bool
    is_remote: bool = False
    generation: int | None = None

    @property
    def has_newer_generation(self) -> bool:
        """Whether another node has told of a newer generation and not yet of its content, as it does when the file is released there."""
        return self.generation is not None and self.generation < self.inode.generation and self.state is not ContentState.OPEN


def get_file_content(db: Database, inode: int) -> FileContent | None:
    """What is known of a file's bytes, as one snapshot; None when there is no such inode."""
    rows = db.rows(
        f"SELECT k.id, k.state, c.tier, p.inode, k.remote, k.generation, {INODE_COLUMNS_JOINED} FROM inode"
        " LEFT JOIN content k ON k.id = inode.content LEFT JOIN copy c ON c.content = k.id AND c.state = 1"
        " LEFT JOIN pfs_file p ON p.inode = inode.id WHERE inode.id = ?",
        inode,
    )
    if not rows:
        return None
    first = rows[0]
    present = {row[2] for row in rows}
    tiers = tuple(tier for tier in Tier if tier in present)
    state = None if first[1] is None else ContentState(first[1])
    row = build_inode(first[6:])
    # In a cluster a content may be known by its id only: the store has the rest.
    content = first[0] or (row.content if db.is_clustered else None)
    return FileContent(row, content, state, tiers, first[3] is not None, bool(first[4]), first[5])


def insert_content(db: Database, inode: int, tier: Tier, *, reserved_content: int | None = None, changed_ns: int | None = None) -> int:
    """A new, empty content for `inode` in `tier`, OPEN; its id. The former one stays until the mover has sealed the new one (P5).

    `changed_ns`: the file's bytes changed then. Not given, its times stay.
    """
    now = time.time_ns()
    mark_superseded(db, inode)
    if reserved_content is None:
        content = db.insert(
            "INSERT INTO content (id, inode, generation, state, change) SELECT ?, id, generation + 1, 0, 1 FROM inode WHERE id = ?",
            identity.allocate_id(db, "content"), inode,
        )  # fmt: skip
        db.run("INSERT INTO copy (content, tier, state, used_ns) VALUES (?, ?, 1, ?)", content, tier, now)
    else:
        content = reserved_content
        db.run("UPDATE content SET inode = ?1, generation = (SELECT generation + 1 FROM inode WHERE id = ?1) WHERE id = ?2", inode, content)
    db.run("UPDATE inode SET content = ?, generation = generation + 1, size = 0 WHERE id = ?", content, inode)
    if changed_ns is not None:
        db.run("UPDATE inode SET mtime_ns = ?1, ctime_ns = ?1 WHERE id = ?2", changed_ns, inode)
    return content


def insert_reserved_content(db: Database, tier: Tier) -> int:
    """An id for a content whose file must be made before its inode is known (on a tier that may hang). Unused ones are `abandoned`."""
    content = db.insert(
        "INSERT INTO content (id, inode, generation, state, change) VALUES (?, 0, 0, 0, 1)", identity.allocate_id(db, "content")
    )
    db.run("INSERT INTO copy (content, tier, state, used_ns) VALUES (?, ?, 1, ?)", content, tier, time.time_ns())
    return content


def mark_open(db: Database, inode: int, content: int, tier: Tier) -> None:
    """Open a closed or sealed content for writing in place: the next generation begins, and only the copy in `tier` counts from now on.

    Whoever wrote it before, from now on it is this node's own.
    """
    record_replicated_generation(db, content)
    # More than what any node has shown of the file: what is reopened may be a former state of it, because the last one was lost.
    db.run(
        "UPDATE content SET state = 0, change = change + 1, digest = NULL, blocks = NULL, remote = 0,"
        " announce_state = CASE announce_state WHEN 0 THEN 0 ELSE 3 END,"
        " generation = max(generation, coalesce((SELECT generation FROM inode WHERE id = ?1), 0)) + 1 WHERE id = ?2",
        inode, content,
    )  # fmt: skip
    db.run("UPDATE inode SET generation = (SELECT generation FROM content WHERE id = ?) WHERE id = ?", content, inode)
    db.run("DELETE FROM copy WHERE content = ? AND tier <> ?", content, tier)


def bump_change(db: Database, content: int) -> None:
    """One more writer opened an OPEN content."""
    db.run("UPDATE content SET change = change + 1 WHERE id = ?", content)


def mark_closed(db: Database, inode: int, content: int, size: int, atime_ns: int, mtime_ns: int | None) -> None:
    """The last writer has closed: size and times (None: as they are) go into the inode, the mover may seal, the PFS shall be told."""
    db.run(
        "UPDATE content SET state = 1, size = ?, change = change + 1, closed_ns = ? WHERE id = ? AND state = 0",
        size,
        time.time_ns(),
        content,
    )
    db.run(_UPDATE_SIZE_AND_TIMES, size, mtime_ns, atime_ns, inode)
    journal.append(db, "content", inode, content=content)


def record_written(db: Database, inode: int, size: int, atime_ns: int, mtime_ns: int) -> None:
    """A writer has closed its descriptor, and others may see what it wrote."""
    db.run(_UPDATE_SIZE_AND_TIMES, size, mtime_ns, atime_ns, inode)


def record_fsync(db: Database, inode: int, content: int, size: int, atime_ns: int, mtime_ns: int | None) -> None:
    """An open file was fsynced: the PFS shall be told what it holds so far, with times as for `close`."""
    db.run(_UPDATE_SIZE_AND_TIMES, size, mtime_ns, atime_ns, inode)
    journal.append(db, "synced", inode, content=content)


def record_access(db: Database, inode: int, atime_ns: int) -> None:
    """A file was read."""
    db.run("UPDATE inode SET atime_ns = ? WHERE id = ?", atime_ns, inode)


def record_use(db: Database, contents: Iterable[int]) -> None:
    """These contents were opened just now; eviction takes others first."""
    now = time.time_ns()
    for content in contents:
        db.run("UPDATE copy SET used_ns = ? WHERE content = ?", now, content)


def record_move(db: Database, content: int, source: Tier, target: Tier) -> None:
    """The bytes of an OPEN content are in `target` now, and no longer in `source`."""
    db.run("INSERT OR REPLACE INTO copy (content, tier, state, used_ns) VALUES (?, ?, 1, ?)", content, target, time.time_ns())
    db.run("DELETE FROM copy WHERE content = ? AND tier = ?", content, source)
    bump_change(db, content)


def mark_doomed(db: Database, content: int) -> None:
    """Nobody needs this content any more."""
    db.run("UPDATE content SET state = 3, change = change + 1 WHERE id = ?", content)


def has_name(db: Database, inode: int) -> bool:
    """Whether any name leads to `inode`."""
    return bool(db.value("SELECT nlink FROM inode WHERE id = ?", inode))


def is_current(db: Database, inode: int, content: int) -> bool:
    """Whether `content` is what `inode` holds now."""
    return db.row("SELECT 1 FROM inode WHERE id = ? AND content = ?", inode, content) is not None


def mark_all_doomed(db: Database, inode: int) -> list[int]:
    """No name and no handle leads to `inode` any more: its contents go. The ids of these contents. What may be what another file held
    before stays until the store was asked.
    """
    rows = db.rows(f"SELECT id FROM content WHERE inode = ? AND state <> 3 AND {CAN_DELETE}", inode)
    contents = [row[0] for row in rows]
    for content in contents:
        mark_doomed(db, content)
    return contents


def list_abandoned(db: Database) -> list[tuple[int, int, Tier]]:
    """(content, inode, tier) of what is OPEN although no handle writes it: left by a process that died, or by the former connection."""
    return [
        (row[0], row[1], Tier(row[2]))
        for row in db.rows(
            "SELECT k.id, k.inode, min(c.tier) FROM content k JOIN copy c ON c.content = k.id AND c.state = 1 WHERE k.state = 0"
            " AND k.id NOT IN (SELECT content FROM handle WHERE writer = 1 AND content IS NOT NULL) GROUP BY k.id"
        )
    ]
