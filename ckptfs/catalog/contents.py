"""A content from its first byte to its seal, and previous contents (tables `content`, `copy`).

The mount begins, opens and closes contents; the mover seals them (copies.py has its other changes of copies). If a content that other nodes
have verified is about to be replaced, because its file is written or another file takes its name, it becomes a *previous* content: that of
the written file, or of the file that took the name. It is doomed when the file's present content is on other nodes or whole on the PFS (P5,
P9). Until then the shared key `c/` says that it is previous, and its holders keep it. Without a cluster there are no previous contents of
this kind. Functions that change rows join the caller's transaction.

Invariants:
- The present content of an inode is `inode.content`.
- A content is OPEN while a handle may write it.
- A sealed content that another node has is never changed. To write its file in place, a successor takes its file in the tier.
- `change` grows whenever bytes may change, so that a reader of the bytes notices. The generation grows when a closed content is opened for
  writing.

Crash safety: an OPEN content without a handle that writes is left over from a crash; `list_abandoned` finds it.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs import lifecycle, limits
from ckptfs.catalog import copies, handles, identity, journal, peer_copies, remote_contents
from ckptfs.catalog.content_rows import CONTENT_COLUMNS, HAS_GOOD_COPY, IS_LEAVING_PFS, IS_ON_PFS, build_content
from ckptfs.catalog.content_rows import get_content as get_content
from ckptfs.catalog.content_rows import is_unchanged as is_unchanged
from ckptfs.catalog.content_rows import require_unchanged as require_unchanged
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import INODE_COLUMNS_JOINED, build_inode
from ckptfs.catalog.pfs_state import get_published
from ckptfs.lifecycle import FileRecord
from ckptfs.model import Content, ContentState, Inode, Tier


@dataclass(frozen=True, slots=True)
class SealResult:
    """The result of a seal: the catalog records it if `change` is still the same."""

    content: int
    inode: int
    change: int
    tier: Tier
    size: int
    digest: bytes
    block_digests: bytes


def get_file_record(db: Database, content: int) -> FileRecord:
    """Return all facts that decide what may happen to a content, as one snapshot."""
    with db.read_transaction():
        known = get_content(db, content)
        return FileRecord(None) if known is None else build_file_record(db, known.inode, known)


def get_publishable(db: Database, content: int) -> Content | None:
    """Return a content for write-back; None for a previous one whose file its successor has."""
    is_publishable = f"k.id = ? AND (k.superseded_mtime_ns IS NULL OR {HAS_GOOD_COPY.format('k')})"
    row = db.row(f"SELECT {CONTENT_COLUMNS} FROM content k WHERE {is_publishable}", content)
    return None if row is None else build_content(row)


def build_file_record(db: Database, inode: int, content: Content | None) -> FileRecord:
    """Return what is known of a file and one of its contents. The caller has a read transaction."""
    published = get_published(db, inode)
    number = None if content is None else content.id
    handles = int(db.value("SELECT count(*) FROM handle WHERE inode = ? OR content = ?", inode, number))
    found = () if content is None else copies.list_copies(db, content.id)
    is_leaving_pfs = published is not None and db.value(f"SELECT {IS_LEAVING_PFS.format('k')} FROM content k WHERE k.id = ?", number) == 1
    return FileRecord(content, found, published, handles, peer_copies.load_clique_copies(db, content, inode), is_leaving_pfs)


def list_closed(db: Database, tiers: Iterable[Tier], after: int, at_most: int) -> list[tuple[Content, Tier]]:
    """Return contents that await their seal, with the one of `tiers` that has them, in order of ids."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS}, c.tier FROM content k CROSS JOIN copy c ON c.content = k.id AND c.state = 1"
        " WHERE k.state = 1 AND k.remote = 0 AND k.id > ? AND c.tier IN (SELECT value FROM json_each(?)) ORDER BY k.id LIMIT ?",
        after, json.dumps(list(tiers)), at_most,
    )  # fmt: skip
    return [(build_content(row), Tier(row[-1])) for row in rows]


def mark_sealed(db: Database, results: Iterable[SealResult]) -> list[SealResult]:
    """Seal contents that were not opened meanwhile; doom previous ones (P5). Return the sealed ones."""
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


_MAY_BE_KEPT = (
    "(EXISTS (SELECT 1 FROM meta WHERE key = 'island')"
    " AND EXISTS (SELECT 1 FROM cached_key s WHERE s.kind = 'c' AND s.number = content.id))"
)
"""SQL: True on an island for a content that the store has. Others may make a set of it; the return decides (see `kept_names`)."""


def mark_previous_doomed(db: Database, inode: int, successor: int) -> int:
    """Doom the previous contents of `inode`, unless open, or taken for lost by others. Return how many."""
    return db.run(
        "UPDATE content SET state = 3, change = change + 1 WHERE inode = ?1 AND id <> ?2 AND state IN (1, 2, 4)"
        " AND superseded_mtime_ns IS NULL AND generation < (SELECT generation FROM content WHERE id = ?2)"
        " AND id NOT IN (SELECT content FROM handle WHERE content IS NOT NULL)"
        " AND id IS NOT (SELECT i.content FROM inode i WHERE i.id = content.inode)"
        f" AND NOT {_MAY_BE_KEPT}"
        " AND NOT EXISTS (SELECT 1 FROM inode i, json_tree(i.salvaged) t"
        " WHERE i.id = content.inode AND t.key = 'content' AND t.atom = content.id)",
        inode, successor,
    )  # fmt: skip


def count_writers(db: Database) -> int:
    """Return how many handles are open for writing."""
    return int(db.value("SELECT count(*) FROM handle WHERE writer = 1"))


def get_largest_recent_size(db: Database) -> int:
    """Return the size of the largest of the newest contents, as a guess for the next one."""
    newest = "SELECT size FROM content WHERE remote = 0 ORDER BY id DESC LIMIT ?"
    return int(db.value(f"SELECT coalesce(max(size), 0) FROM ({newest})", limits.RECENT_CONTENTS))


def list_without_copy(db: Database) -> list[Content]:
    """Return own contents that should have bytes, and have no good copy in any tier and not on the PFS."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS} FROM content k WHERE k.state IN (0, 1, 2) AND k.remote = 0"
        f" AND NOT {HAS_GOOD_COPY.format('k')} AND NOT {IS_ON_PFS.format('k')}"
    )
    return [build_content(row) for row in rows]


def is_shown_on_pfs(db: Database, content: Content) -> bool:
    """Return True if the PFS shows a closed content, if only without a promise.

    Unsealed, it is known by its size; sealed, by its digest.
    """
    query = "SELECT 1 FROM pfs_file WHERE inode = ?1 AND generation = ?2 AND size = ?3 AND (?4 IS NULL OR digest = ?4)"
    return db.value(query, content.inode, content.generation, content.size, content.digest) is not None


def restore_previous(db: Database, lost: Content) -> str:
    """Let the file show the newest state that is left: a previous content on this node or the PFS's.

    Returns a description of that state, or "" without a change if none is left. The PFS may be newer than the previous content: it
    may show an fsynced state of the lost one.
    """
    with db.transaction():
        previous = db.row(
            "SELECT id, size, generation FROM content k WHERE inode = ? AND generation < ? AND state = 2"
            f" AND {HAS_GOOD_COPY.format('k')} ORDER BY generation DESC LIMIT 1",
            lost.inode, lost.generation,
        )  # fmt: skip
        shown = db.row("SELECT size, mtime_ns, generation FROM pfs_file WHERE inode = ?", lost.inode)
        if previous is not None and (shown is None or shown[2] <= previous[2]):
            db.run("UPDATE inode SET content = ?, size = ? WHERE id = ?", previous[0], previous[1], lost.inode)
            what = "its previous generation"
        elif shown is not None:
            db.run("UPDATE inode SET content = NULL, size = ?, mtime_ns = ? WHERE id = ?", shown[0], shown[1], lost.inode)
            # It may be an fsynced state of the open file. From now on that is the whole file.
            db.run("UPDATE pfs_file SET complete = 1 WHERE inode = ?", lost.inode)
            if previous is not None:
                set_state(db, previous[0], ContentState.DOOMED)
            what = "what is on the PFS"
        else:
            return ""
        set_state(db, lost.id, ContentState.DOOMED)
        return what


def mark_lost(db: Database, seen: Content) -> bool:
    """Make an own content LOST if no tier, no node and no PFS has it. Return True if it is LOST now."""
    with db.transaction():
        found = get_file_record(db, seen.id)
        if not is_unchanged(db, seen) or any(map(lifecycle.is_good, found.copies)) or lifecycle.is_on_pfs(found):
            return False
        if seen.is_remote or peer_copies.list_holders(db, seen):
            return False
        set_state(db, seen.id, ContentState.LOST)
        return True


_HAS_HOLDERS = f"EXISTS (SELECT 1 FROM {peer_copies.HOLDERS.format('content')})"


def mark_found(db: Database, content: int) -> None:
    """Seal an own LOST content again if a live node has exactly that generation."""
    db.change(f"UPDATE content SET state = 2, change = change + 1 WHERE id = ? AND state = 4 AND remote = 0 AND {_HAS_HOLDERS}", content)


def set_state(db: Database, content: int, state: ContentState) -> None:
    """Change the state of a content, in a transaction of its own or in the caller's."""
    db.change("UPDATE content SET state = ?, change = change + 1 WHERE id = ?", state, content)


_CAN_DELETE = (
    "(superseded_mtime_ns IS NULL OR CASE remote WHEN 0 THEN superseded_mtime_ns > 0"
    " ELSE NOT EXISTS (SELECT 1 FROM cached_key WHERE kind = 'c' AND number = content.id)"
    " OR NOT EXISTS (SELECT 1 FROM copy WHERE copy.content = content.id) END)"
)
"""SQL about a row of `content` whose file is gone: True if the store need not be asked whether it is a previous content of another file.

Of another node's content without a copy on this node, the row is all there is.
"""


def mark_superseded(db: Database, inode: int) -> None:
    """Mark the content of this file as its previous one: a new one is about to replace it."""
    if db.is_clustered and peer_copies.get_replication_factor(db) > 1:
        db.run(
            "UPDATE content SET superseded_mtime_ns = (SELECT mtime_ns FROM inode WHERE id = ?1)"
            f" WHERE id = (SELECT content FROM inode WHERE id = ?1) AND state = 2 AND superseded_mtime_ns IS NULL AND {_HAS_HOLDERS}",
            inode,
        )


def mark_awaiting_store_check(db: Database, inode: int) -> None:
    """Keep contents of a deleted file until the store was asked: others may need them."""
    db.run(
        "UPDATE content SET superseded_mtime_ns = 0 WHERE inode = ? AND superseded_mtime_ns IS NULL"
        f" AND (remote = 1 OR (state = 2 AND {_HAS_HOLDERS}))",
        inode,
    )


def list_awaiting_store_check(db: Database) -> list[Content]:
    """Return own contents that are kept only until the store was asked about them."""
    query = "SELECT id FROM content WHERE remote = 0 AND superseded_mtime_ns = 0 AND state = 2 ORDER BY id LIMIT ?"
    numbers = db.rows(query, limits.UNCONFIRMED_MAX)
    return [found for (number,) in numbers if (found := get_content(db, number)) is not None]


def is_awaiting_store_check(db: Database, content: int) -> bool:
    """Return True if an own content is kept only until the store was asked about it."""
    return db.value("SELECT 1 FROM content WHERE id = ? AND remote = 0 AND superseded_mtime_ns = 0", content) is not None


def move_to_successor(db: Database, replaced: Inode, successor: Inode) -> None:
    """Make the content of a file that is replaced the previous one of the file that takes its name."""
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
    """Doom the previous contents of a file if `current` is its content and is safe."""
    if db.value("SELECT 1 FROM content WHERE inode = ? AND superseded_mtime_ns IS NOT NULL", current.inode) is None:
        return
    with db.transaction():
        record = get_file_record(db, current.id)
        if is_current(db, current.inode, current.id) and (lifecycle.is_on_clique(record) or lifecycle.is_on_pfs(record)):
            expired = db.rows(
                "UPDATE content SET state = 3, change = change + 1 WHERE inode = ?1 AND id <> ?2 AND superseded_mtime_ns IS NOT NULL"
                f" AND state <> 3 AND NOT {_MAY_BE_KEPT} RETURNING id, remote",
                current.inode, current.id,
            )  # fmt: skip
            for content, peer in expired:
                if peer:
                    peer_copies.insert_unneeded_copy(db, content, identity.get_origin_node(content))


# The generation of a successor becomes that of the file on this node: from now on other nodes learn of it.
_UPDATE_SIZE_AND_TIMES = (
    "UPDATE inode SET generation = max(generation, coalesce((SELECT k.generation FROM content k WHERE k.id = inode.content), 0)),"
    " size = ?1, ctime_ns = CASE WHEN mtime_ns = ?2 THEN ctime_ns ELSE max(ctime_ns, coalesce(?2, 0)) END,"
    " mtime_ns = coalesce(?2, mtime_ns), atime_ns = ?3, closed_ns = ?5 WHERE id = ?4"
)


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file and the tiers that have its bytes."""

    inode: Inode
    content: int | None  # None if the file was never written on this node.
    state: ContentState | None
    tiers: tuple[Tier, ...]  # Those with a good copy, RAM first.
    is_on_pfs: bool  # The PFS shows some content of the file.
    is_remote: bool = False  # Another node wrote it last.
    generation: int | None = None  # That of the content.
    is_on_other_nodes: bool = False  # It is sealed, and other nodes have it.

    @property
    def has_newer_generation(self) -> bool:
        """Return True if another node has announced a newer generation, and not yet its content."""
        return self.generation is not None and self.generation < self.inode.generation and self.state is not ContentState.OPEN


def get_file_content(db: Database, inode: int) -> FileContent | None:
    """Return what is known of the bytes of a file, as one snapshot."""
    rows = db.rows(
        "SELECT k.id, k.state, c.tier, p.inode, k.remote, k.generation,"
        f" k.state = 2 AND (k.remote = 1 OR {peer_copies.IS_KNOWN_ELSEWHERE.format('k')}), {INODE_COLUMNS_JOINED} FROM inode"
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
    row = build_inode(first[7:])
    # In a cluster a content may be known by its id only: the store has the rest.
    content = first[0] or (row.content if db.is_clustered else None)
    return FileContent(row, content, state, tiers, first[3] is not None, bool(first[4]), first[5], bool(first[6]))


def insert_content(db: Database, inode: int, tier: Tier, *, reserved_content: int | None = None, changed_ns: int | None = None) -> int:
    """Insert an OPEN content for `inode`; return its id. `changed_ns`: its new times; None: keep them."""
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
    """Return an id for a content whose file must exist before its inode is known."""
    content = db.insert(
        "INSERT INTO content (id, inode, generation, state, change) VALUES (?, 0, 0, 0, 1)", identity.allocate_id(db, "content")
    )
    db.run("INSERT INTO copy (content, tier, state, used_ns) VALUES (?, ?, 1, ?)", content, tier, time.time_ns())
    return content


def is_reserved(db: Database, content: int) -> bool:
    """Return True if a content still belongs to no file."""
    return db.value("SELECT 1 FROM content WHERE id = ? AND inode = 0", content) is not None


def record_successor(db: Database, inode: int, content: int, successor: int) -> bool:
    """Let the reserved `successor` take the file of the sealed `content`, which other nodes have."""
    tier = db.value(
        "SELECT c.tier FROM content k JOIN inode i ON i.id = ?1 AND i.content = k.id JOIN copy c ON c.content = k.id AND c.state = 1"
        " AND c.tier = (SELECT r.tier FROM copy r WHERE r.content = ?3) WHERE k.id = ?2 AND k.state = 2",
        inode, content, successor,
    )  # fmt: skip
    if tier is None:
        return False
    mark_superseded(db, inode)
    db.run("UPDATE OR REPLACE copy SET content = ? WHERE content = ? AND tier = ?", successor, content, tier)
    bump_change(db, content)  # A reader of its bytes in this tier has to stop.
    remote_contents.mark_copy_changed(db, content)
    generation = "(SELECT max(k.generation, i.generation) + 1 FROM content k, inode i WHERE k.id = ?3 AND i.id = ?2)"
    db.run(f"UPDATE content SET inode = ?2, generation = {generation} WHERE id = ?1", successor, inode, content)
    handles.set_content(db, inode, successor)
    return True


def record_duplicate(db: Database, content: int, inode: int, target: int) -> None:
    """Make the reserved `content`, a copy of the closed content of `inode`, that of the file `target`."""
    columns = "generation, state, size, digest, blocks, closed_ns"
    values = columns.replace("state", "CASE WHEN blocks IS NULL THEN 1 ELSE state END")
    db.run(
        f"UPDATE content SET inode = ?1, ({columns}) = (SELECT {values} FROM content WHERE id ="
        " (SELECT content FROM inode WHERE id = ?2)),"
        " change = change + 1, under_replicated = ?3 WHERE id = ?4",
        target, inode, db.is_clustered, content,
    )  # fmt: skip
    db.run("UPDATE copy SET verified_ns = ? WHERE content = ?", time.time_ns(), content)


def set_current(db: Database, inode: int, content: int) -> None:
    """Make a successor the content of the file; the store learns of it with its first size."""
    db.run("UPDATE inode SET content = ? WHERE id = ?", content, inode)


def mark_open(db: Database, inode: int, content: int, tier: Tier) -> None:
    """Open a content that no other node has in place: its next generation begins, in `tier` only."""
    # Above every generation that a node has shown: after a loss, the content that is reopened may be an earlier state of the file.
    db.run(
        "UPDATE content SET state = 0, change = change + 1, digest = NULL, blocks = NULL, remote = 0,"
        " announce_state = CASE announce_state WHEN 0 THEN 0 ELSE 2 END,"
        " generation = max(generation, coalesce((SELECT generation FROM inode WHERE id = ?1), 0)) + 1 WHERE id = ?2",
        inode, content,
    )  # fmt: skip
    db.run("UPDATE inode SET generation = (SELECT generation FROM content WHERE id = ?) WHERE id = ?", content, inode)
    db.run("DELETE FROM copy WHERE content = ? AND tier <> ?", content, tier)


def bump_change(db: Database, content: int) -> None:
    """Record one more writer of an OPEN content."""
    db.run("UPDATE content SET change = change + 1 WHERE id = ?", content)


def mark_closed(
    db: Database, inode: int, content: int, size: int, atime_ns: int, mtime_ns: int | None,
    *, closed_ns: int | None = None, flushed_ns: int | None = None,
) -> None:  # fmt: skip
    """Close a content: record its size, the times given and `closed_ns` (None: now); append a journal row.

    `flushed_ns`: when `record_written` has recorded the same. The inode keeps that, and is not published again.
    """
    now_ns = closed_ns or time.time_ns()
    db.run("UPDATE content SET state = 1, size = ?, change = change + 1, closed_ns = ? WHERE id = ? AND state = 0", size, now_ns, content)
    db.run(_UPDATE_SIZE_AND_TIMES, size, mtime_ns, atime_ns, inode, flushed_ns or now_ns)
    journal.append(db, "content", inode, content=content)


def record_written(db: Database, inode: int, size: int, atime_ns: int, mtime_ns: int, closed_ns: int | None = None) -> None:
    """Record size and times of an open file: at a close (None: now), or when it is copied."""
    db.run(_UPDATE_SIZE_AND_TIMES, size, mtime_ns, atime_ns, inode, closed_ns or time.time_ns())


def record_fsync(db: Database, inode: int, content: int, size: int, atime_ns: int, mtime_ns: int | None) -> None:
    """Record size and the times given of an open file at its fsync, and append a journal row."""
    db.run(_UPDATE_SIZE_AND_TIMES, size, mtime_ns, atime_ns, inode, time.time_ns())
    journal.append(db, "synced", inode, content=content)


def record_access(db: Database, inode: int, atime_ns: int) -> None:
    db.run("UPDATE inode SET atime_ns = ? WHERE id = ?", atime_ns, inode)


def record_use(db: Database, content: int) -> None:
    """Record that a content was used now, so that eviction drops others first."""
    db.run("UPDATE copy SET used_ns = ? WHERE content = ?", time.time_ns(), content)


def record_move(db: Database, content: int, source: Tier, target: Tier) -> None:
    """Record that the bytes of an OPEN content have moved from `source` to `target`."""
    db.run("INSERT OR REPLACE INTO copy (content, tier, state, used_ns) VALUES (?, ?, 1, ?)", content, target, time.time_ns())
    db.run("DELETE FROM copy WHERE content = ? AND tier = ?", content, source)
    bump_change(db, content)


def has_name(db: Database, inode: int) -> bool:
    return bool(db.value("SELECT nlink FROM inode WHERE id = ?", inode))


def is_deleted(db: Database, inode: int) -> bool:
    """Return True if `inode` has no name, and the store does not have it, also not by a commit in doubt.

    Until then another node may give it a name.
    """
    may_have = (
        "SELECT EXISTS (SELECT 1 FROM cached_key WHERE kind = 'i' AND number = ?1) OR EXISTS (SELECT 1 FROM dirty_key"
        " WHERE kind = 'i' AND number = ?1 AND change <= (SELECT value FROM meta WHERE key = 'in_doubt'))"
    )
    return not has_name(db, inode) and not db.value(may_have, inode)


def is_current(db: Database, inode: int, content: int) -> bool:
    return db.row("SELECT 1 FROM inode WHERE id = ? AND content = ?", inode, content) is not None


def mark_all_doomed(db: Database, inode: int) -> list[int]:
    """Doom the contents of a deleted file that no other file may need. Return their ids."""
    # One that other nodes have may be a previous content of another file: the store is asked before it is deleted.
    doom = f"UPDATE content SET state = 3, change = change + 1 WHERE inode = ? AND state <> 3 AND {_CAN_DELETE} RETURNING id"
    return db.column(doom, inode)


def mark_deleted_doomed(db: Database, tier: Tier, at_most: int) -> int:
    """Doom contents in `tier` of files that no name leads to and no process has open. Return their number.

    A disconnected node keeps them otherwise: see `is_deleted`.
    """
    with db.transaction():
        deleted = db.rows(
            "SELECT DISTINCT i.id FROM inode i CROSS JOIN content k ON k.inode = i.id AND k.state IN (1, 2) AND k.remote = 0"
            " CROSS JOIN copy c ON c.content = k.id AND c.tier = ? AND c.state = 1"
            " WHERE i.nlink = 0 AND NOT EXISTS (SELECT 1 FROM handle h WHERE h.inode = i.id) LIMIT ?",
            tier, at_most,
        )  # fmt: skip
        return sum(len(mark_all_doomed(db, inode)) for (inode,) in deleted)


def list_abandoned(db: Database) -> list[tuple[int, int, Tier]]:
    """Return (content, inode, tier) of OPEN contents without a handle that writes them."""
    return [
        (content, inode, Tier(tier))
        for content, inode, tier in db.rows(
            "SELECT k.id, k.inode, min(c.tier) FROM content k JOIN copy c ON c.content = k.id AND c.state = 1 WHERE k.state = 0"
            " AND k.id NOT IN (SELECT content FROM handle WHERE writer = 1 AND content IS NOT NULL) GROUP BY k.id"
        )
    ]
