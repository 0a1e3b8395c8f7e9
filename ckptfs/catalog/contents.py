"""Owns a content's life from its first byte to its close: tables `content` and `copy` as the mount changes them. Sealing, copying and
dropping belong to the mover (catalog/settling.py).

Invariants: an inode's current content is `inode.content`; a content is OPEN while a handle may write it; `change` grows whenever bytes
may change, so that whoever read them meanwhile can tell; the generation grows whenever a writer opens what was closed. Every function
joins the caller's transaction.
If we die here: SQLite undoes the unfinished change. An OPEN content without a writer's handle was left by a crash: see `abandoned`.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ckptfs.catalog import former, identity, journal
from ckptfs.catalog.database import Database
from ckptfs.catalog.rows import INODE_COLUMNS_JOINED, build_inode
from ckptfs.model import ContentState, Inode, Tier

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
        f"SELECT k.id, k.state, c.tier, p.inode, k.peer, k.generation, {INODE_COLUMNS_JOINED} FROM inode"
        " LEFT JOIN content k ON k.id = inode.content LEFT JOIN copy c ON c.content = k.id AND c.state = 1"
        " LEFT JOIN published p ON p.inode = inode.id WHERE inode.id = ?",
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
    former.mark_superseded(db, inode)
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
    former.record_replicated_generation(db, content)
    # More than what any node has shown of the file: what is reopened may be a former state of it, because the last one was lost.
    db.run(
        "UPDATE content SET state = 0, change = change + 1, digest = NULL, blocks = NULL, peer = 0,"
        " told = CASE told WHEN 0 THEN 0 ELSE 3 END,"
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
    rows = db.rows(f"SELECT id FROM content WHERE inode = ? AND state <> 3 AND {former.CAN_DELETE}", inode)
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
