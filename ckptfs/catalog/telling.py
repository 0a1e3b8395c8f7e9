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
from ckptfs.catalog.holding import GOOD, OLDER
from ckptfs.model import Content, ContentState

_AWAY = (
    f"(content.peer = 0 AND content.state = 2 AND NOT {GOOD} AND EXISTS (SELECT 1 FROM peer_copy o WHERE o.content = content.id"
    " AND o.generation = content.generation AND o.digest = content.digest)"
    " AND NOT EXISTS (SELECT 1 FROM published p WHERE p.inode = content.inode AND p.complete = 1 AND p.generation = content.generation"
    " AND p.digest = content.digest))"
)
"""SQL about a row of `content`: this node wrote it and has lost it, other nodes have it, and the PFS does not."""


def away(db: Database, content: int) -> None:
    """No copy of a content counts here any more: of this node's own the others shall learn that, when they have it."""
    with db.change():
        db.run(f"UPDATE content SET told = 2 WHERE id = ? AND told <> 1 AND {_AWAY}", content)


def untold(db: Database, at_most: int) -> list[tuple[Content, bool]]:
    """Contents of which the cluster's store shall learn that a copy is here (True), or no longer is; an older one by what it is of. Of
    this node's own: that its copy is away (True), or no longer is.
    """
    rows = db.rows(
        "SELECT id, inode, generation, state, size, digest, NULL, change, peer, told = 2,"
        f" state = 2 AND {GOOD} FROM content WHERE told > 1 LIMIT ?",
        at_most,
    )  # fmt: skip
    news = []
    for row in rows:
        content, here = holding.content_of_row(row[:9]), bool(row[9])
        if not content.peer:
            here = here and content.state is ContentState.SEALED and not row[10]
        elif here and not row[10]:
            found = holding.kept(db, content.id)
            here = found is not None
            content = content if found is None else replace(content, generation=found.generation, digest=found.digest)
        news.append((content, here))
    return news


def told(db: Database, contents: Iterable[tuple[Content, bool]]) -> None:
    """The store has learned this of these contents; what moved on meanwhile, came or went stays to be told."""
    with db.change():
        for content, here in contents:
            if here:
                db.run(
                    "UPDATE content SET told = 1 WHERE id = ?1 AND change = ?2 AND told = 2 AND"
                    f" ((state = 2 AND generation = ?3 AND digest = ?4 AND {GOOD} = peer)"
                    f" OR {OLDER} AND c.generation = ?3 AND c.digest = ?4))",
                    content.id, content.change, content.generation, content.digest,
                )  # fmt: skip
            else:
                db.run(
                    "UPDATE content SET told = 0 WHERE id = ? AND change = ?"
                    f" AND (told = 3 OR (told = 2 AND CASE peer WHEN 0 THEN state <> 2 OR {GOOD}"
                    f" ELSE NOT (state = 2 AND {GOOD}) AND NOT {OLDER}) END))",
                    content.id, content.change,
                )  # fmt: skip


def take_back(db: Database) -> int:
    """Copies of which the store was told and that are gone, with their tier say: it shall learn so. How many those are. So it shall of
    what this node wrote and has lost.
    """
    with db.change():
        db.run(f"UPDATE content SET told = CASE WHEN {_AWAY} THEN 2 ELSE 3 END WHERE peer = 0 AND (told > 0 OR {_AWAY})")
        return db.run(f"UPDATE content SET told = 3 WHERE told IN (1, 2) AND peer = 1 AND NOT {GOOD} AND NOT {OLDER})")
