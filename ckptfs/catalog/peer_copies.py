"""The other nodes as this one knows them, their copies, and contents that need more copies.

The tables are `peer`, `peer_copy` (verified copies) and `under_replicated`.

A copy counts for a level while its node is alive and the copy is of exactly the generation and digest of the content. Without a cluster
these tables are empty. Functions that change rows join the caller's transaction.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptfs import lifecycle, limits
from ckptfs.catalog.content_rows import (
    CONTENT_COLUMNS,
    CONTENT_COLUMNS_WITHOUT_BLOCKS,
    HAS_GOOD_COPY,
    IS_ON_PFS,
    TOTAL,
    build_content,
    build_content_and_rest,
    count_sizes,
)
from ckptfs.catalog.database import Database
from ckptfs.lifecycle import CliqueCopies
from ckptfs.model import Content, Tier

HOLDERS = (
    "peer_copy o JOIN peer n ON n.number = o.node WHERE o.content = {0}.id AND o.generation = {0}.generation AND o.digest = {0}.digest"
    " AND n.alive = 1 AND n.is_self = 0"
)
"""SQL behind a FROM, to be formatted with the alias of a row of `content`: its verified copies on other live nodes."""
COUNT_OTHER_DOMAINS = f"(SELECT count(DISTINCT n.domain) FROM {HOLDERS} AND n.domain <> (SELECT domain FROM peer WHERE is_self = 1))"
"""SQL, to be formatted in the same way: in how many failure domains other than this node's it has verified copies."""
COUNT_DOMAINS = (
    "(EXISTS (SELECT 1 FROM copy g WHERE g.content = {0}.id AND g.state = 1 AND g.verified_ns > 0 AND g.tier <> 'pfs')"
    f" + {COUNT_OTHER_DOMAINS})"
)
"""SQL, to be formatted in the same way: the same with this node's domain, if a tier has a verified copy."""
IS_KNOWN_ELSEWHERE = (
    "EXISTS (SELECT 1 FROM peer_copy o WHERE o.content = {0}.id AND o.generation = {0}.generation AND o.digest = {0}.digest)"
)
"""SQL, to be formatted in the same way: whether another node, dead or alive, has verified a copy of it."""
_HAS_UNCOMMITTED_NAME = (
    "EXISTS (SELECT 1 FROM entry e JOIN dirty_key t ON t.kind = 'e' AND t.number = e.parent AND t.name = e.name WHERE e.child = {1})"
)
IS_UNCOMMITTED = "(EXISTS (SELECT 1 FROM dirty_key WHERE kind = 'c' AND number = {0}) OR " + _HAS_UNCOMMITTED_NAME + ")"
"""SQL, to be formatted with a content and an inode: True if the store lacks a name of the file, or its present content."""
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
    """A node in the table `peer`."""

    number: int
    name: str
    domain: str
    incarnation: str = ""
    is_alive: bool = True


# --- nodes -----------------------------------------------------------------------------------------------------------


def set_live_nodes(db: Database, own_number: int, factor: int, nodes: Iterable[KnownNode]) -> None:
    """Record the live nodes. Dead ones stay known, with the copies that they may come back with."""
    with db.transaction():
        db.run("UPDATE peer SET alive = 0, is_self = 0")
        for node in nodes:
            db.run(
                "INSERT OR REPLACE INTO peer (number, name, domain, alive, is_self, incarnation) VALUES (?, ?, ?, 1, ?, ?)",
                node.number, node.name, node.domain, node.number == own_number, node.incarnation,
            )  # fmt: skip
        db.set_meta("factor", factor)


def list_nodes(db: Database) -> dict[int, KnownNode]:
    """Return all nodes that were ever seen, as last recorded, this one included."""
    rows = db.rows("SELECT number, name, domain, incarnation, alive FROM peer")
    return {number: KnownNode(number, name, domain, incarnation, bool(alive)) for number, name, domain, incarnation, alive in rows}


def list_live_nodes(db: Database) -> dict[int, KnownNode]:
    """Return the nodes that were alive when last recorded."""
    return {number: node for number, node in list_nodes(db).items() if node.is_alive}


def delete_dead_node(db: Database, node: int) -> None:
    """Forget a dead node, unless it may return with copies that count."""
    db.change("DELETE FROM peer WHERE number = ?1 AND alive = 0 AND NOT EXISTS (SELECT 1 FROM peer_copy WHERE node = ?1)", node)


def load_clique_copies(db: Database, content: Content | None, inode: int = 0) -> CliqueCopies | None:
    """Return the copies on live nodes; none for an empty file. Returns None without a cluster."""
    own_domain = db.value("SELECT domain FROM peer WHERE is_self = 1")
    if own_domain is None:
        return None
    live = f"SELECT n.name, n.domain FROM content k, {HOLDERS.format('k')} AND k.id = ? ORDER BY 1, 2"
    found = () if content is None else tuple(db.rows(live, content.id))
    of = (0, inode) if content is None else (content.id, content.inode)
    is_committed = not db.value(f"SELECT {IS_UNCOMMITTED.format('?1', '?2')}", *of)
    return CliqueCopies(own_domain, count_domains(db).required, found, is_committed)


class Domains(NamedTuple):
    """How many failure domains have a live node, and in how many a file of the level clique has copies."""

    alive: int
    required: int

    @property
    def are_enough(self) -> bool:
        """Return True if new files can reach the level clique now."""
        return self.alive >= self.required


def count_domains(db: Database) -> Domains:
    """Count failure domains. That of a dead node counts, unless the node has moved to another one."""
    moved = "alive = 0 AND name IN (SELECT name FROM peer WHERE alive = 1)"
    counted = f"count(DISTINCT iif(alive, domain, NULL)), count(DISTINCT iif({moved}, NULL, domain))"
    alive, known = db.row(f"SELECT {counted} FROM peer") or (0, 0)
    return Domains(alive, lifecycle.count_required_domains(get_replication_factor(db), known))


def is_published(db: Database, content: Content) -> bool:
    """Return True if the store has the names of the file and this content, of any generation."""
    return not db.value(f"SELECT {_IS_UNPUBLISHED.format('?1', '?2')}", content.id, content.inode)


def has_published_names(db: Database, directory: int) -> bool:
    """Return True if the store has all names in a directory."""
    return db.value("SELECT 1 FROM dirty_key WHERE kind = 'e' AND number = ? LIMIT 1", directory) is None


def list_holders(db: Database, content: Content) -> list[int]:
    """Return the nodes, alive or not, that are known to have a verified copy of exactly this generation."""
    return db.column(
        "SELECT c.node FROM peer_copy c LEFT JOIN peer p ON p.number = c.node"
        " WHERE c.content = ? AND c.generation = ? AND c.digest = ? AND coalesce(p.is_self, 0) = 0 ORDER BY c.node",
        content.id, content.generation, content.digest,
    )  # fmt: skip


# --- copies on other nodes -------------------------------------------------------------------------------------------


def insert_peer_copy(db: Database, copy: PeerCopy) -> None:
    """Insert a verified copy that a node or the store has confirmed."""
    inserted = "INSERT OR REPLACE INTO peer_copy (content, node, generation, digest) VALUES (?, ?, ?, ?)"
    db.change(inserted, copy.content, copy.node, copy.generation, copy.digest)


def insert_unneeded_copy(db: Database, content: int, node: int) -> None:
    """Record that a node may delete its copy of a content that this node deleted. It does not count."""
    db.run("INSERT OR IGNORE INTO peer_copy (content, node, generation, digest) VALUES (?, ?, 0, x'')", content, node)


def delete_peer_copy(db: Database, content: int, node: int) -> None:
    db.change("DELETE FROM peer_copy WHERE content = ? AND node = ?", content, node)


def delete_unconfirmed_copies(db: Database, content: Content, nodes: Iterable[int]) -> None:
    """Delete rows of copies that the nodes do not confirm, and offer them the content again."""
    with db.transaction():
        for node in nodes:
            delete_peer_copy(db, content.id, node)
        mark_under_replicated(db, [content.id])


def replace_peer_copies(db: Database, content: int, copies: Sequence[PeerCopy]) -> None:
    with db.transaction():
        db.run("DELETE FROM peer_copy WHERE content = ?", content)
        for copy in copies:
            insert_peer_copy(db, copy)


def list_peer_copies(db: Database, content: int) -> list[PeerCopy]:
    """Return every known copy on other nodes, of any generation."""
    return [PeerCopy(*row) for row in db.rows("SELECT content, node, generation, digest FROM peer_copy WHERE content = ?", content)]


def list_being_written(db: Database, at_most: int) -> list[tuple[Content, Tier]]:
    """Return own contents that are open for writing, with the tier that has them."""
    rows = db.rows(
        f"SELECT DISTINCT {CONTENT_COLUMNS_WITHOUT_BLOCKS}, c.tier FROM handle h"
        " CROSS JOIN content k ON k.id = h.content AND k.state = 0 JOIN copy c ON c.content = k.id AND c.state = 1 AND c.tier <> 'pfs'"
        " WHERE h.writer = 1 LIMIT ?",
        at_most,
    )
    return [(content, Tier(tier)) for content, (tier,) in map(build_content_and_rest, rows)]


def record_open_snapshot(db: Database, content: int) -> Content | None:
    """Make the bytes of an open content a generation. Return it; None if it is not open any more."""
    with db.transaction():
        row = db.row(f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS} FROM content k WHERE id = ? AND state = 0", content)
        if row is None:
            return None
        found = build_content(row)
        db.run("UPDATE content SET generation = generation + 1 WHERE id = ?", content)
        db.run("UPDATE inode SET generation = ? WHERE id = ? AND content = ?", found.generation + 1, found.inode, content)
        return found


def has_domains(db: Database, nodes: Iterable[int], required: int) -> bool:
    """Return True if these nodes are in `required` failure domains or more."""
    found = "SELECT count(DISTINCT domain) FROM peer WHERE number IN (SELECT value FROM json_each(?))"
    return int(db.value(found, json.dumps([*nodes]))) >= required


def find_rebuildable(db: Database, after: int) -> Content | None:
    """Return the first own content after `after` that only live nodes have and its file shows, or None."""
    row = db.row(f"SELECT {CONTENT_COLUMNS_WITHOUT_BLOCKS} FROM {_REBUILDABLE} AND k.id > ? ORDER BY k.id LIMIT 1", after)
    return None if row is None else build_content(row)


_REBUILDABLE = (
    "content k JOIN inode i ON i.id = k.inode AND i.content = k.id AND i.nlink > 0"
    " WHERE k.remote = 0 AND k.announce_state > 0 AND k.state = 2"
    f" AND NOT {HAS_GOOD_COPY.format('k')}"
    f" AND EXISTS (SELECT 1 FROM {HOLDERS.format('k')})"
    f" AND NOT {IS_ON_PFS.format('k')}"
)


def count_rebuildable(db: Database) -> tuple[int, int]:
    """Return (files, bytes) of all contents that come back from other nodes."""
    return count_sizes(db, "k.size", _REBUILDABLE)


def count_repairable(db: Database) -> tuple[int, int]:
    """Return (files, bytes) of dead nodes' contents that this node has to copy to others."""
    return count_sizes(db, "size", "content WHERE under_replicated = 1 AND state = 2 AND remote = 1")


_UNDER_REPLICATED = (
    "content k WHERE k.under_replicated = 1 AND k.state = 2"
    " AND (EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1 AND c.tier <> 'pfs')"
    " OR (EXISTS (SELECT 1 FROM inode i WHERE i.id = k.inode AND i.content = k.id AND i.nlink > 0)"
    f" AND NOT {IS_ON_PFS.format('k')}))"
)
"""Contents that need copies, without those that are gone on this node: another node replaced the file, or the PFS shows it."""


def count_wanted_copies(db: Database) -> tuple[int, int]:
    """Return (wanted, present) copies of all under-replicated contents, those on this node included."""
    holder_count = f"SELECT count(*) FROM {HOLDERS.format('k')}"
    files, remote = db.row(f"SELECT count(*), coalesce(sum(({holder_count})), 0) FROM {_UNDER_REPLICATED}") or (0, 0)
    return int(files) * min(get_replication_factor(db), max(1, len(list_live_nodes(db)))), int(files) + int(remote)


def count_short(db: Database) -> dict[int, int]:
    """Return {missing copies: files} of own sealed files below the levels clique and pfs."""
    domains = count_domains(db)
    if get_replication_factor(db) < 2:
        return {}
    # While enough domains live, a file that lacks copies is marked; otherwise those that have all copies they can get are not.
    marked = "c.under_replicated = 1 AND" if domains.are_enough else ""
    rows = db.rows(
        f"SELECT ? - {COUNT_DOMAINS.format('c')}, count(*) FROM content c JOIN inode i ON i.id = c.inode AND i.content = c.id"
        f" WHERE {marked} c.state = 2 AND c.remote = 0 AND i.nlink > 0 AND NOT {IS_ON_PFS.format('c')} GROUP BY 1",
        domains.required,
    )
    return {missing: files for missing, files in rows if missing > 0}


def find_remote_content(db: Database, inode: int) -> int | None:
    """Return the content of a file that another node wrote last. Returns None for an own one."""
    found: int | None = db.value("SELECT k.id FROM inode i JOIN content k ON k.id = i.content WHERE i.id = ? AND k.remote = 1", inode)
    return found


HAS_NO_HOLDER = (
    "k.remote = 1 AND k.state <> 3 AND i.content = k.id AND i.nlink > 0 AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id)"
    f" AND NOT EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = i.id) AND NOT EXISTS (SELECT 1 FROM {HOLDERS.format('k')})"
)
"""SQL about rows `content k` and `inode i`: a file that another node wrote, of which no copy on a live node or the PFS is known."""


def list_makers(db: Database) -> list[int]:
    """Return the numbers of the nodes that made the contents of other nodes which this one knows."""
    bits = limits.ID_COUNTER_BITS
    first = "(SELECT min(id) FROM content WHERE remote = 1 AND id >= {})"
    each = f"WITH RECURSIVE maker(id) AS (SELECT {first.format(0)} UNION ALL SELECT {first.format(f'((maker.id >> {bits}) + 1) << {bits}')}"
    return db.column(f"{each} FROM maker WHERE maker.id IS NOT NULL) SELECT id >> {bits} FROM maker WHERE id IS NOT NULL")


def list_without_holder(db: Database, maker: int, after: int, at_most: int) -> list[tuple[int, int]]:
    """Return (content, inode) of files with contents of a node and without a known copy, in their order."""
    first, last = maker << limits.ID_COUNTER_BITS, ((maker + 1) << limits.ID_COUNTER_BITS) - 1
    return db.rows(
        f"SELECT k.id, i.id FROM content k CROSS JOIN inode i ON i.id = k.inode WHERE {HAS_NO_HOLDER} AND k.id BETWEEN ? AND ?"
        " ORDER BY k.id LIMIT ?",
        max(first, after + 1), last, at_most,
    )  # fmt: skip


def list_unneeded(db: Database, at_most: int, excluded: Iterable[int] = ()) -> list[PeerCopy]:
    """Return copies on other nodes, but `excluded`, of contents that this node and the store lack."""
    rows = db.rows(
        "SELECT content, node, generation, digest FROM peer_copy"
        " WHERE NOT EXISTS (SELECT 1 FROM content k WHERE k.id = peer_copy.content AND k.state <> 3)"
        " AND node NOT IN (SELECT value FROM json_each(?))"
        " AND NOT EXISTS (SELECT 1 FROM dirty_key t WHERE t.kind = 'c' AND t.number = peer_copy.content) LIMIT ?",
        json.dumps([*excluded]),
        at_most,
    )
    return [PeerCopy(*row) for row in rows]


# --- under-replicated contents -----------------------------------------------------------------------------------------


def list_under_replicated(db: Database, after: int, at_most: int) -> list[tuple[Content, Tier]]:
    """Return sealed contents that may need copies on other nodes, each with a tier that has it."""
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS}, max(c.tier) FROM content k"
        " JOIN copy c ON c.content = k.id AND c.state = 1 AND c.tier <> 'pfs' WHERE k.under_replicated = 1 AND k.state = 2 AND k.id > ?"
        " GROUP BY k.id ORDER BY k.id LIMIT ?",
        after, at_most,
    )  # fmt: skip
    return [(content, Tier(tier)) for content, (tier,) in map(build_content_and_rest, rows)]


def list_under_replicated_of(db: Database, inodes: Sequence[int]) -> list[tuple[Content, Tier]]:
    """Return what `list_under_replicated` returns for the contents of these inodes, in their order."""
    if not inodes:
        return []
    rows = db.rows(
        f"SELECT {CONTENT_COLUMNS}, max(c.tier) FROM json_each(?) u CROSS JOIN inode i ON i.id = u.value"
        " CROSS JOIN content k ON k.id = i.content AND k.under_replicated = 1 AND k.state = 2"
        " JOIN copy c ON c.content = k.id AND c.state = 1 AND c.tier <> 'pfs' GROUP BY u.key, k.id ORDER BY u.key LIMIT ?",
        json.dumps([*inodes]), limits.PEER_QUEUE_MAX,
    )  # fmt: skip
    return [(content, Tier(tier)) for content, (tier,) in map(build_content_and_rest, rows)]


def mark_under_replicated(db: Database, contents: Iterable[int]) -> int:
    """Mark contents that may need copies on other nodes. Return how many were not marked before."""
    marked = "UPDATE content SET under_replicated = 1 WHERE under_replicated = 0 AND id IN (SELECT value FROM json_each(?))"
    return db.change(marked, json.dumps([*contents]))


def mark_replicated(db: Database, content: Content) -> None:
    """Record that this generation has all copies that it can get."""
    db.change("UPDATE content SET under_replicated = 0 WHERE id = ? AND change = ?", content.id, content.change)


def mark_all_under_replicated(db: Database) -> int:
    """Mark all own sealed contents after a change of the cluster that concerns them all."""
    return db.change("UPDATE content SET under_replicated = 1 WHERE state = 2 AND remote = 0 AND under_replicated = 0")


def delete_copies_of_node(db: Database, node: int) -> int:
    """Forget the copies that a node may have lost; it is offered them. Return how many are own ones."""
    with db.transaction():
        count = mark_node_copies_lost(db, node)
        db.run("DELETE FROM peer_copy WHERE node = ? AND content IN (SELECT id FROM content WHERE remote = 0)", node)
        return count


def mark_node_copies_lost(db: Database, node: int) -> int:
    """Mark own contents of which a dead node had a copy. Return how many."""
    had = "under_replicated = 0 AND state = 2 AND remote = 0 AND id IN (SELECT content FROM peer_copy WHERE node = ?)"
    return db.change(f"UPDATE content SET under_replicated = 1 WHERE {had}", node)


def get_replication_lag(db: Database) -> tuple[int, int, int]:
    """Return (files, bytes, close of the oldest in ns or 0) of own contents that need more copies."""
    found = db.row(f"SELECT count(*), {TOTAL.format('k.size')}, coalesce(min(k.closed_ns), 0) FROM {_UNDER_REPLICATED} AND k.remote = 0")
    files, size, oldest_ns = found or (0, 0, 0)
    return int(files), int(size), int(oldest_ns)


def count_unsafe(db: Database, closed_ns: int = 2**63 - 1) -> int:
    """Return how many contents await copies on other live nodes and are not whole on the PFS.

    Only those that were closed up to `closed_ns` count.
    """
    if len(list_live_nodes(db)) < 2:
        return 0
    return int(db.value(f"SELECT count(*) FROM {_UNDER_REPLICATED} AND k.closed_ns <= ? AND NOT {IS_ON_PFS.format('k')}", closed_ns))


def get_replication_factor(db: Database) -> int:
    """Return how many copies are wanted, this node's included; 0 if it was never recorded."""
    return int(db.get_meta("factor") or 0)
