"""Owns `content.told`: what the cluster's store was told, and shall be, of the copies here. Of another node's content: that a copy is here,
whole or of an older generation. Of this node's own: that it was lost here, while other nodes have it and the PFS does not.

Whoever makes or loses a copy says so in the transaction of that, or calls what is here; the tell flow brings it to the store. Functions
that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change; what was not marked as told is told again.
"""

from collections.abc import Iterable
from dataclasses import replace

from ckptfs.catalog import holding
from ckptfs.catalog.database import Database
from ckptfs.catalog.holding import HAS_GOOD_COPY, HAS_STALE_COPY_UNCLOSED
from ckptfs.model import Content, ContentState

_IS_ABSENT = (
    f"(content.peer = 0 AND content.state = 2 AND NOT {HAS_GOOD_COPY} AND EXISTS (SELECT 1 FROM peer_copy o WHERE o.content = content.id"
    " AND o.generation = content.generation AND o.digest = content.digest)"
    " AND NOT EXISTS (SELECT 1 FROM published p WHERE p.inode = content.inode AND p.complete = 1 AND p.generation = content.generation"
    " AND p.digest = content.digest))"
)
"""SQL about a row of `content`: this node wrote it and has lost it, other nodes have it, and the PFS does not."""


def mark_copy_absent(db: Database, content: int) -> None:
    """No copy of a content counts here any more: of this node's own the others shall learn that, when they have it."""
    with db.transaction():
        db.run(f"UPDATE content SET told = 2 WHERE id = ? AND told <> 1 AND {_IS_ABSENT}", content)


def list_unannounced(db: Database, at_most: int) -> list[tuple[Content, bool]]:
    """Contents of which the cluster's store shall learn that a copy is here (True), or no longer is; an older one by what it is of. Of
    this node's own: that its copy is away (True), or no longer is.
    """
    rows = db.rows(
        "SELECT id, inode, generation, state, size, digest, NULL, change, peer, told = 2,"
        f" state = 2 AND {HAS_GOOD_COPY} FROM content WHERE told > 1 LIMIT ?",
        at_most,
    )  # fmt: skip
    unannounced = []
    for row in rows:
        content, is_present = holding.build_content(row[:9]), bool(row[9])
        if not content.is_remote:
            is_present = is_present and content.state is ContentState.SEALED and not row[10]
        elif is_present and not row[10]:
            found = holding.find_held_copy(db, content.id)
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
                    "UPDATE content SET told = 1 WHERE id = ?1 AND change = ?2 AND told = 2 AND"
                    f" ((state = 2 AND generation = ?3 AND digest = ?4 AND {HAS_GOOD_COPY} = peer)"
                    f" OR {HAS_STALE_COPY_UNCLOSED} AND c.generation = ?3 AND c.digest = ?4))",
                    content.id, content.change, content.generation, content.digest,
                )  # fmt: skip
            else:
                db.run(
                    "UPDATE content SET told = 0 WHERE id = ? AND change = ?"
                    f" AND (told = 3 OR (told = 2 AND CASE peer WHEN 0 THEN state <> 2 OR {HAS_GOOD_COPY}"
                    f" ELSE NOT (state = 2 AND {HAS_GOOD_COPY}) AND NOT {HAS_STALE_COPY_UNCLOSED}) END))",
                    content.id, content.change,
                )  # fmt: skip


def mark_dropped_unannounced(db: Database) -> int:
    """Copies of which the store was told and that are gone, with their tier say: it shall learn so. How many those are. So it shall of
    what this node wrote and has lost.
    """
    with db.transaction():
        db.run(f"UPDATE content SET told = CASE WHEN {_IS_ABSENT} THEN 2 ELSE 3 END WHERE peer = 0 AND (told > 0 OR {_IS_ABSENT})")
        return db.run(
            f"UPDATE content SET told = 3 WHERE told IN (1, 2) AND peer = 1 AND NOT {HAS_GOOD_COPY} AND NOT {HAS_STALE_COPY_UNCLOSED})"
        )
