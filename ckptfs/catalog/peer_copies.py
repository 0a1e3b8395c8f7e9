"""Owns what a node of a cluster knows of the others: which nodes there are (`peer`), which verified copies they have (`peer_copy`), and
which contents of its own want more of them (`content.lacking`).

A copy counts for a level while its node lives and the copy is of exactly the generation and digest that the content has. Without a
cluster all of this is empty. Functions that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptfs import lifecycle
from ckptfs.catalog.content_rows import CONTENT_COLUMNS, CONTENT_COLUMNS_WITHOUT_BLOCKS, build_content
from ckptfs.catalog.database import Database
from ckptfs.lifecycle import CliqueCopies
from ckptfs.model import Content, Tier

COUNT_OTHER_DOMAINS = (
    "(SELECT count(DISTINCT n.domain) FROM peer_copy o JOIN peer n ON n.number = o.node"
    " WHERE o.content = c.id AND o.generation = c.generation AND o.digest = c.digest AND n.alive = 1"
    " AND n.domain <> (SELECT domain FROM peer WHERE is_self = 1))"
)
"""SQL: in how many failure domains other than this node's the content `c` has verified copies."""
HOLDERS = (
    "peer_copy o JOIN peer n ON n.number = o.node WHERE o.content = {0}.id AND o.generation = {0}.generation AND o.digest = {0}.digest"
    " AND n.alive = 1 AND n.is_self = 0"
)
"""SQL behind a FROM, to be formatted with the name of a row of `content`: its verified copies on other nodes that live."""
_HAS_UNCOMMITTED_NAME = (
    "EXISTS (SELECT 1 FROM entry e JOIN dirty_key t ON t.kind = 'e' AND t.number = e.parent AND t.name = e.name WHERE e.child = {1})"
)
IS_UNCOMMITTED = "(EXISTS (SELECT 1 FROM dirty_key WHERE kind = 'c' AND number = {0}) OR " + _HAS_UNCOMMITTED_NAME + ")"
"""SQL, to be formatted with a content and an inode: whether the store was not told yet of a name, or of what the file holds."""
_IS_UNPUBLISHED = (
    "(EXISTS (SELECT 1 FROM dirty_key t WHERE t.kind = 'c' AND t.number = {0}"
    " AND NOT EXISTS (SELECT 1 FROM cached_key s WHERE s.kind = 'c' AND s.number = t.number)) OR " + _HAS_UNCOMMITTED_NAME + ")"
)


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """A verified copy on another node."""

    content: int
    node: int
    generation: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node as the catalog knows it."""

    number: int
    name: str
    domain: str
    incarnation: str = ""


# --- nodes -----------------------------------------------------------------------------------------------------------


def set_live_nodes(db: Database, own_number: int, factor: int, nodes: Iterable[KnownNode]) -> None:
    """These nodes are alive; the others that were are not any more. They stay known, with the copies that they may come back with."""
    with db.transaction():
        db.run("UPDATE peer SET alive = 0, is_self = 0")
        for node in nodes:
            db.run(
                "INSERT OR REPLACE INTO peer (number, name, domain, alive, is_self, incarnation) VALUES (?, ?, ?, 1, ?, ?)",
                node.number, node.name, node.domain, node.number == own_number, node.incarnation,
            )  # fmt: skip
        db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('factor', ?)", factor)


def list_live_nodes(db: Database) -> dict[int, KnownNode]:
    """The nodes that lived when this was last told, this one too."""
    rows = db.rows("SELECT number, name, domain, incarnation FROM peer WHERE alive = 1")
    return {row[0]: KnownNode(*row) for row in rows}


def find_incarnation(db: Database, node: int) -> str | None:
    """The incarnation in which a node was last seen; None for one that never was."""
    found: str | None = db.value("SELECT incarnation FROM peer WHERE number = ?", node)
    return found


def list_node_names(db: Database) -> dict[int, str]:
    """Node numbers and names, of all that were ever seen."""
    return dict(db.rows("SELECT number, name FROM peer"))


def load_clique_copies(db: Database, content: Content | None, inode: int = 0) -> CliqueCopies | None:
    """Where else a content lies, or nothing of an empty file; None on a node without a cluster."""
    own = db.row("SELECT domain, (SELECT value FROM meta WHERE key = 'factor') FROM peer WHERE is_self = 1")
    if own is None:
        return None
    alive = db.value("SELECT count(DISTINCT domain) FROM peer WHERE alive = 1")
    found = () if content is None else tuple(sorted((name, domain) for _, name, domain in _list_live_holders(db, content)))
    of = (0, inode) if content is None else (content.id, content.inode)
    is_committed = not db.value(f"SELECT {IS_UNCOMMITTED.format('?1', '?2')}", *of)
    return CliqueCopies(own[0], lifecycle.count_required_domains(int(own[1] or 0), alive), found, is_committed)


def is_published(db: Database, content: Content) -> bool:
    """Whether the others know the file by its names and that this is its content; which generation, they learn from who has a copy."""
    return not db.value(f"SELECT {_IS_UNPUBLISHED.format('?1', '?2')}", content.id, content.inode)


def has_published_names(db: Database, directory: int) -> bool:
    """Whether the others know all names in a directory."""
    return db.value("SELECT 1 FROM dirty_key WHERE kind = 'e' AND number = ? LIMIT 1", directory) is None


def _list_live_holders(db: Database, content: Content) -> list[tuple[int, str, str]]:
    return db.rows(
        "SELECT p.number, p.name, p.domain FROM peer_copy c JOIN peer p ON p.number = c.node"
        " WHERE c.content = ? AND c.generation = ? AND c.digest = ? AND p.alive = 1 AND p.is_self = 0",
        content.id, content.generation, content.digest,
    )  # fmt: skip


def list_holders(db: Database, content: Content) -> list[int]:
    """The nodes, alive or not, that are known to have a verified copy of exactly this generation."""
    rows = db.rows(
        "SELECT c.node FROM peer_copy c LEFT JOIN peer p ON p.number = c.node"
        " WHERE c.content = ? AND c.generation = ? AND c.digest = ? AND coalesce(p.is_self, 0) = 0 ORDER BY c.node",
        content.id, content.generation, content.digest,
    )  # fmt: skip
    return [row[0] for row in rows]


# --- copies on other nodes -------------------------------------------------------------------------------------------


def insert_peer_copy(db: Database, copy: PeerCopy) -> None:
    """A node has a verified copy: it said so after it had received it, or in the store that all share."""
    with db.transaction():
        db.run("INSERT OR REPLACE INTO peer_copy (content, node, generation, digest) VALUES (?, ?, ?, ?)",
               copy.content, copy.node, copy.generation, copy.digest)  # fmt: skip


def insert_unneeded_copy(db: Database, content: int, node: int) -> None:
    """That node wrote or has what is deleted here, and nobody tells it of names: it hears that it may forget this. No copy that counts."""
    db.run("INSERT OR IGNORE INTO peer_copy (content, node, generation, digest) VALUES (?, ?, 0, x'')", content, node)


def delete_peer_copy(db: Database, content: int, node: int) -> None:
    """A node has no copy of this content any more."""
    with db.transaction():
        db.run("DELETE FROM peer_copy WHERE content = ? AND node = ?", content, node)


def delete_unconfirmed_copies(db: Database, content: Content, nodes: Iterable[int]) -> None:
    """These nodes do not say any more that they have a copy of this node's own content: they are asked to take it again."""
    with db.transaction():
        for node in nodes:
            delete_peer_copy(db, content.id, node)
        mark_under_replicated(db, [content.id])


def replace_peer_copies(db: Database, content: int, copies: Sequence[PeerCopy]) -> None:
    """Exactly these nodes have a copy of this content."""
    with db.transaction():
        db.run("DELETE FROM peer_copy WHERE content = ?", content)
        for copy in copies:
            insert_peer_copy(db, copy)


def list_peer_copies(db: Database, content: int) -> list[PeerCopy]:
    """Every copy that is known on other nodes, of whatever generation."""
    return [PeerCopy(*row) for row in db.rows("SELECT content, node, generation, digest FROM peer_copy WHERE content = ?", content)]


def list_being_written(db: Database, at_most: int) -> list[tuple[Content, Tier]]:
    """Contents of this node's own that somebody has open for writing, with the tier of this node that has them."""
    rows = db.rows(
        f"SELECT DISTINCT {CONTENT_COLUMNS_WITHOUT_BLOCKS}, c.tier FROM handle h"
        " JOIN content k ON k.id = h.content AND k.state = 0 JOIN copy c ON c.content = k.id AND c.state = 1 AND c.tier <> 'pfs'"
        " WHERE h.writer = 1 LIMIT ?",
        at_most,
    )
    return [(build_content(row), Tier(row[9])) for row in rows]


def record_open_snapshot(db: Database, content: int) -> Content | None:
    """What an open content holds now becomes a generation of its own, under the number that it had; None when it is not open any more."""
    with db.transaction():
        row = db.row(f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS} FROM content k WHERE id = ? AND state = 0", content)
        if row is None:
            return None
        db.run("UPDATE content SET generation = generation + 1 WHERE id = ?", content)
        db.run("UPDATE inode SET generation = ? WHERE id = ? AND content = ?", row[2] + 1, row[1], content)
        return build_content(row)


def has_enough_domains(db: Database, nodes: Sequence[int]) -> bool:
    """Whether copies on these nodes, which may name this one, make the level `clique`."""
    found = load_clique_copies(db, None)
    domains = {row[0] for row in db.rows("SELECT domain FROM peer WHERE number IN (SELECT value FROM json_each(?))", json.dumps([*nodes]))}
    return found is not None and len(domains) >= found.required_domains


def find_rebuildable(db: Database, after: int) -> Content | None:
    """The first of this node's own contents after `after` that its files show, that lies in no tier here and not on the PFS, and that a
    living node has.
    """
    row = db.row(f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS} FROM {_REBUILDABLE} AND k.id > ? ORDER BY k.id LIMIT 1", after)
    return None if row is None else build_content(row)


_REBUILDABLE = (
    "content k JOIN inode i ON i.id = k.inode AND i.content = k.id AND i.nlink > 0"
    " WHERE k.remote = 0 AND k.state = 2 AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1)"
    f" AND EXISTS (SELECT 1 FROM {HOLDERS.format('k')})"
    " AND NOT EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = k.inode AND p.complete = 1 AND p.generation = k.generation"
    " AND p.digest = k.digest)"
)


def count_rebuildable(db: Database) -> tuple[int, int]:
    """(files, bytes) of all of them: what comes back from other nodes."""
    files, size = db.row(f"SELECT count(*), coalesce(sum(k.size), 0) FROM {_REBUILDABLE}") or (0, 0)
    return int(files), int(size)


def count_repairable(db: Database) -> tuple[int, int]:
    """(files, bytes) of what nodes wrote that have died, and this one is to copy to others."""
    files, size = db.row(
        "SELECT count(*), coalesce(sum(size), 0) FROM content WHERE under_replicated = 1 AND state = 2 AND remote = 1"
    ) or (0, 0)
    return int(files), int(size)


_UNDER_REPLICATED = (
    "content k WHERE k.under_replicated = 1 AND k.state = 2 AND (EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1)"
    " OR EXISTS (SELECT 1 FROM inode i WHERE i.id = k.inode AND i.content = k.id AND i.nlink > 0))"
)
"""What wants copies, and of what people are told that it does: not what is gone here since another node has written its file anew."""


def count_wanted_copies(db: Database) -> tuple[int, int]:
    """(wanted, there) of the copies of all that wants more of them, those here included."""
    holder_count = f"SELECT count(*) FROM {HOLDERS.format('k')}"
    files, remote = db.row(f"SELECT count(*), coalesce(sum(({holder_count})), 0) FROM {_UNDER_REPLICATED}") or (0, 0)
    return int(files) * min(get_replication_factor(db), max(1, len(list_live_nodes(db)))), int(files) + int(remote)


def find_remote_content(db: Database, inode: int) -> int | None:
    """The content of a file that another node wrote last; None for this node's own."""
    found: int | None = db.value("SELECT k.id FROM inode i JOIN content k ON k.id = i.content WHERE i.id = ? AND k.remote = 1", inode)
    return found


def list_unneeded(db: Database, at_most: int, excluded: Iterable[int] = ()) -> list[PeerCopy]:
    """Copies on other nodes, but not `without`, of contents that are gone here, as the store was told: those nodes may forget them."""
    rows = db.rows(
        "SELECT content, node, generation, digest FROM peer_copy WHERE NOT EXISTS (SELECT 1 FROM content k WHERE k.id = peer_copy.content)"
        " AND node NOT IN (SELECT value FROM json_each(?))"
        " AND NOT EXISTS (SELECT 1 FROM dirty_key t WHERE t.kind = 'c' AND t.number = peer_copy.content) LIMIT ?",
        json.dumps([*excluded]),
        at_most,
    )
    return [PeerCopy(*row) for row in rows]


# --- what wants copies -----------------------------------------------------------------------------------------------


def list_under_replicated(db: Database, after: int, at_most: int) -> list[tuple[Content, Tier]]:
    """Sealed contents of this node's own that may want copies on other nodes, with a tier that has them, in the order of their ids."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS}, max(c.tier) FROM content k"
        " JOIN copy c ON c.content = k.id AND c.state = 1 AND c.tier <> 'pfs' WHERE k.under_replicated = 1 AND k.state = 2 AND k.id > ?"
        " GROUP BY k.id ORDER BY k.id LIMIT ?",
        after, at_most,
    )  # fmt: skip
    return [(build_content(row), Tier(row[9])) for row in rows]


def mark_under_replicated(db: Database, contents: Iterable[int]) -> int:
    """These may want copies on other nodes: look at them. How many that is news of."""
    with db.transaction():
        return db.run(
            "UPDATE content SET under_replicated = 1 WHERE under_replicated = 0 AND id IN (SELECT value FROM json_each(?))",
            json.dumps([*contents]),
        )


def mark_replicated(db: Database, content: Content) -> None:
    """This generation has what copies it can get."""
    with db.transaction():
        db.run("UPDATE content SET under_replicated = 0 WHERE id = ? AND change = ?", content.id, content.change)


def mark_all_under_replicated(db: Database) -> int:
    """Every sealed content of this node's own may want copies: the world has changed in a way that concerns them all."""
    with db.transaction():
        return db.run("UPDATE content SET under_replicated = 1 WHERE state = 2 AND remote = 0 AND under_replicated = 0")


def delete_copies_of_node(db: Database, node: int) -> int:
    """What a node had may be gone: it is offered anew, which costs nothing where it is still there. How many contents that concerns."""
    with db.transaction():
        own = "SELECT p.content FROM peer_copy p JOIN content k ON k.id = p.content WHERE p.node = ?"
        count = db.run(
            f"UPDATE content SET under_replicated = 1 WHERE under_replicated = 0 AND state = 2 AND remote = 0 AND id IN ({own})", node
        )
        db.run("DELETE FROM peer_copy WHERE node = ? AND content IN (SELECT id FROM content WHERE remote = 0)", node)
        return count


def mark_node_copies_lost(db: Database, node: int) -> int:
    """A node died: this node's own contents of which it had a copy want another one. How many those are."""
    with db.transaction():
        had = "SELECT content FROM peer_copy WHERE node = ?"
        return db.run(
            f"UPDATE content SET under_replicated = 1 WHERE under_replicated = 0 AND state = 2 AND remote = 0 AND id IN ({had})", node
        )


def get_replication_lag(db: Database) -> tuple[int, int, float]:
    """(files, bytes, age of the oldest in seconds) of what still wants copies on other nodes."""
    found = db.row(f"SELECT count(*), coalesce(sum(k.size), 0), min(k.closed_ns) FROM {_UNDER_REPLICATED} AND k.remote = 0")
    files, size, oldest = found or (0, 0, None)
    return int(files), int(size), 0.0 if oldest is None else max(0.0, (time.time_ns() - oldest) / 1e9)


def count_unsafe(db: Database) -> int:
    """How many contents await their copies on other nodes, while there are others, and are not whole on the PFS either."""
    if len(list_live_nodes(db)) < 2:
        return 0
    return int(
        db.value(
            f"SELECT count(*) FROM {_UNDER_REPLICATED} AND NOT EXISTS (SELECT 1 FROM pfs_file p"
            " WHERE p.inode = k.inode AND p.complete = 1 AND p.generation = k.generation AND p.digest = k.digest)"
        )
    )


def get_oldest_under_replicated_ns(db: Database) -> int:
    """When the oldest content was closed that still wants copies on other nodes, in ns since the epoch; 0: none does."""
    return int(db.value(f"SELECT min(k.closed_ns) FROM {_UNDER_REPLICATED} AND k.remote = 0") or 0)


def list_known_nodes(db: Database) -> list[tuple[int, str, str, bool]]:
    """(number, name, failure domain, whether it lived when that was last known) of every node that was ever seen."""
    return [(number, name, domain, bool(alive)) for number, name, domain, alive in db.rows("SELECT number, name, domain, alive FROM peer")]


def get_replication_factor(db: Database) -> int:
    """How many copies are wanted, this node's own included, as it was last told; 0 when it never was."""
    return int(db.value("SELECT value FROM meta WHERE key = 'factor'") or 0)
