"""Owns what a node of a cluster knows of contents beyond its own tiers: who else holds them (`peer_copy`), which nodes there are (`peer`),
and contents that it holds for others or has heard of (`content.peer = 1`).

The row of a peer's content is what was last heard of it; GOOD copies are always of exactly that generation and digest. When a newer one
is heard of they become OLDER: never read again, but good for the blocks that did not change. Without a cluster all of this is empty.
Functions that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change; a file whose row went is a leftover, which the drop flow finds.
"""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckptfs import lifecycle
from ckptfs.catalog.database import Database
from ckptfs.lifecycle import Clique
from ckptfs.model import Content, ContentState, CopyState, Tier


@dataclass(frozen=True, slots=True)
class Heard:
    """What is said of a content that another node wrote. `digest` is None while it is closed and not sealed."""

    content: int
    inode: int
    generation: int
    size: int
    digest: bytes | None
    blocks: bytes | None = None

    @property
    def state(self) -> ContentState:
        return ContentState.CLOSED if self.digest is None else ContentState.SEALED


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """A verified copy on another node."""

    content: int
    node: int
    generation: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Known:
    """A node as the catalog knows it."""

    number: int
    name: str
    domain: str
    incarnation: str = ""


# --- nodes -----------------------------------------------------------------------------------------------------------


def set_world(db: Database, here: int, factor: int, nodes: Iterable[Known]) -> None:
    """These nodes are alive; the others that were are not any more. They stay known, with the copies that they may come back with."""
    with db.change():
        db.run("UPDATE peer SET alive = 0, here = 0")
        for node in nodes:
            db.run(
                "INSERT OR REPLACE INTO peer (number, name, domain, alive, here, incarnation) VALUES (?, ?, ?, 1, ?, ?)",
                node.number, node.name, node.domain, node.number == here, node.incarnation,
            )  # fmt: skip
        db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('factor', ?)", factor)


def forget_world(db: Database) -> None:
    """This node belongs to no cluster now."""
    with db.change():
        for table in ("peer", "peer_copy"):
            db.run(f"DELETE FROM {table}")


def living(db: Database) -> dict[int, Known]:
    """The nodes that lived when this was last told, this one too."""
    rows = db.rows("SELECT number, name, domain, incarnation FROM peer WHERE alive = 1")
    return {row[0]: Known(*row) for row in rows}


def ever_seen(db: Database, node: int) -> str | None:
    """The incarnation in which a node was last seen; None for one that never was."""
    found: str | None = db.value("SELECT incarnation FROM peer WHERE number = ?", node)
    return found


def names(db: Database) -> dict[int, str]:
    """Node numbers and names, of all that were ever seen."""
    return dict(db.rows("SELECT number, name FROM peer"))


def clique_of(db: Database, content: Content | None) -> Clique | None:
    """Where else a content lies; None on a node without a cluster."""
    own = db.row("SELECT domain, (SELECT value FROM meta WHERE key = 'factor') FROM peer WHERE here = 1")
    if own is None:
        return None
    alive = db.value("SELECT count(DISTINCT domain) FROM peer WHERE alive = 1")
    found = () if content is None else tuple(sorted((name, domain) for _, name, domain in _alive(db, content)))
    return Clique(own[0], lifecycle.demand(int(own[1] or 0), alive), found)


def _alive(db: Database, content: Content) -> list[tuple[int, str, str]]:
    return db.rows(
        "SELECT p.number, p.name, p.domain FROM peer_copy c JOIN peer p ON p.number = c.node"
        " WHERE c.content = ? AND c.generation = ? AND c.digest = ? AND p.alive = 1 AND p.here = 0",
        content.id, content.generation, content.digest,
    )  # fmt: skip


def elsewhere(db: Database, content: Content) -> list[int]:
    """The nodes, alive or not, that are known to have a verified copy of exactly this generation."""
    rows = db.rows(
        "SELECT c.node FROM peer_copy c LEFT JOIN peer p ON p.number = c.node"
        " WHERE c.content = ? AND c.generation = ? AND c.digest = ? AND coalesce(p.here, 0) = 0 ORDER BY c.node",
        content.id, content.generation, content.digest,
    )  # fmt: skip
    return [row[0] for row in rows]


# --- copies on other nodes -------------------------------------------------------------------------------------------


def peer_has(db: Database, copy: PeerCopy) -> None:
    """A node has a verified copy: it said so after it had received it, or in the store that all share."""
    with db.change():
        db.run("INSERT OR REPLACE INTO peer_copy (content, node, generation, digest) VALUES (?, ?, ?, ?)",
               copy.content, copy.node, copy.generation, copy.digest)  # fmt: skip


def peer_lacks(db: Database, content: int, node: int) -> None:
    """A node has no copy of this content any more."""
    with db.change():
        db.run("DELETE FROM peer_copy WHERE content = ? AND node = ?", content, node)


def peers_have(db: Database, content: int, copies: Sequence[PeerCopy]) -> None:
    """Exactly these nodes have a copy of this content."""
    with db.change():
        db.run("DELETE FROM peer_copy WHERE content = ?", content)
        for copy in copies:
            peer_has(db, copy)


def peer_copies(db: Database, content: int) -> list[PeerCopy]:
    """Every copy that is known on other nodes, of whatever generation."""
    return [PeerCopy(*row) for row in db.rows("SELECT content, node, generation, digest FROM peer_copy WHERE content = ?", content)]


def unneeded(db: Database, at_most: int) -> list[PeerCopy]:
    """Copies on other nodes of contents that are gone here: those nodes may forget them."""
    rows = db.rows(
        "SELECT content, node, generation, digest FROM peer_copy WHERE NOT EXISTS (SELECT 1 FROM content k WHERE k.id = peer_copy.content)"
        " LIMIT ?",
        at_most,
    )
    return [PeerCopy(*row) for row in rows]


# --- what wants copies -----------------------------------------------------------------------------------------------


def lacking(db: Database, after: int, at_most: int) -> list[tuple[Content, Tier]]:
    """Sealed contents of this node's own that may want copies on other nodes, with a tier that has them, in the order of their ids."""
    rows = db.rows(
        "SELECT k.id, k.inode, k.generation, k.state, k.size, k.digest, k.blocks, k.change, k.peer, max(c.tier) FROM content k"
        " JOIN copy c ON c.content = k.id AND c.state = 1 AND c.tier <> 'pfs' WHERE k.lacking = 1 AND k.state = 2 AND k.id > ?"
        " GROUP BY k.id ORDER BY k.id LIMIT ?",
        after, at_most,
    )  # fmt: skip
    return [(_content(row), Tier(row[9])) for row in rows]


def lacks(db: Database, contents: Iterable[int]) -> int:
    """These may want copies on other nodes: look at them. How many that is news of."""
    with db.change():
        return db.run(
            "UPDATE content SET lacking = 1 WHERE lacking = 0 AND id IN (SELECT value FROM json_each(?))", json.dumps([*contents])
        )


def satisfied(db: Database, content: Content) -> None:
    """This generation has what copies it can get."""
    with db.change():
        db.run("UPDATE content SET lacking = 0 WHERE id = ? AND change = ?", content.id, content.change)


def lack_all(db: Database) -> int:
    """Every sealed content of this node's own may want copies: the world has changed in a way that concerns them all."""
    with db.change():
        return db.run("UPDATE content SET lacking = 1 WHERE state = 2 AND peer = 0 AND lacking = 0")


def doubt_node(db: Database, node: int) -> int:
    """What a node had may be gone: it is offered anew, which costs nothing where it is still there. How many contents that concerns."""
    with db.change():
        own = "SELECT p.content FROM peer_copy p JOIN content k ON k.id = p.content WHERE p.node = ?"
        count = db.run(f"UPDATE content SET lacking = 1 WHERE lacking = 0 AND state = 2 AND peer = 0 AND id IN ({own})", node)
        db.run("DELETE FROM peer_copy WHERE node = ? AND content IN (SELECT id FROM content WHERE peer = 0)", node)
        return count


def held_after(db: Database, after: int, at_most: int) -> list[Content]:
    """Other nodes' contents of which a copy that counts lies here, in the order of their ids."""
    rows = db.rows(
        "SELECT k.id, k.inode, k.generation, k.state, k.size, k.digest, NULL, k.change, k.peer FROM content k WHERE k.peer = 1 AND k.id > ?"
        " AND k.state = 2 AND EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1) ORDER BY k.id LIMIT ?",
        after, at_most,
    )  # fmt: skip
    return [_content(row) for row in rows]


def lost_with(db: Database, node: int) -> int:
    """A node died: this node's own contents of which it had a copy want another one. How many those are."""
    with db.change():
        had = "SELECT content FROM peer_copy WHERE node = ?"
        return db.run(f"UPDATE content SET lacking = 1 WHERE lacking = 0 AND state = 2 AND peer = 0 AND id IN ({had})", node)


def lag(db: Database) -> tuple[int, int, float]:
    """(files, bytes, age of the oldest in seconds) of what still wants copies on other nodes."""
    files, size, oldest = db.row(
        "SELECT count(*), coalesce(sum(size), 0), min(closed_ns) FROM content WHERE lacking = 1 AND state = 2 AND peer = 0"
    ) or (0, 0, None)
    return int(files), int(size), 0.0 if oldest is None else max(0.0, (time.time_ns() - oldest) / 1e9)


def oldest_lacking(db: Database) -> int:
    """When the oldest content was closed that still wants copies on other nodes, in ns since the epoch; 0: none does."""
    return int(db.value("SELECT min(closed_ns) FROM content WHERE lacking = 1 AND state = 2 AND peer = 0") or 0)


def held(db: Database) -> tuple[int, int]:
    """(files, bytes) of other nodes' contents of which a verified copy lies here."""
    files, size = db.row(
        "SELECT count(*), coalesce(sum(size), 0) FROM content k WHERE k.peer = 1 AND k.state = 2"
        " AND EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1 AND c.tier <> 'pfs')"
    ) or (0, 0)
    return int(files), int(size)


def known(db: Database) -> list[tuple[int, str, str, bool]]:
    """(number, name, failure domain, whether it lived when that was last known) of every node that was ever seen."""
    return [(number, name, domain, bool(alive)) for number, name, domain, alive in db.rows("SELECT number, name, domain, alive FROM peer")]


# --- contents of others ----------------------------------------------------------------------------------------------


def hear(db: Database, heard: Heard) -> bool:
    """Learn of a content that another node wrote. False, and nothing changed, when what is known here is newer or somebody writes it here.

    Copies of another generation than the one that is heard of become OLDER.
    """
    with db.change():
        known = db.row("SELECT generation, state, digest, peer, blocks FROM content WHERE id = ?", heard.content)
        if known is None:
            _add(db, heard)
            return True
        generation, state, digest, peer, blocks = known
        if state == ContentState.OPEN or generation > heard.generation or (state == ContentState.DOOMED):
            return False
        same = generation == heard.generation
        if same and not peer and (state == ContentState.CLOSED or digest == heard.digest or heard.digest is None):
            return True
        if same and peer and heard.digest is None:
            return True
        if digest is None or digest != heard.digest:
            _outdate(db, heard.content)
            blocks = None
        db.run(
            "UPDATE content SET inode = ?, generation = ?, state = ?, size = ?, digest = ?, blocks = ?, peer = 1, lacking = 0,"
            " change = change + 1 WHERE id = ?",
            heard.inode, heard.generation, heard.state, heard.size, heard.digest, heard.blocks or blocks, heard.content,
        )  # fmt: skip
        return True


def _add(db: Database, heard: Heard) -> None:
    """A row with another node's id must not make this node count on from there."""
    last = db.value("SELECT seq FROM sqlite_sequence WHERE name = 'content'")
    db.run(
        "INSERT INTO content (id, inode, generation, state, size, digest, blocks, change, closed_ns, peer) VALUES (?,?,?,?,?,?,?,1,?,1)",
        heard.content, heard.inode, heard.generation, heard.state, heard.size, heard.digest, heard.blocks, time.time_ns(),
    )  # fmt: skip
    if last is None:
        db.run("DELETE FROM sqlite_sequence WHERE name = 'content'")
    else:
        db.run("UPDATE sqlite_sequence SET seq = ? WHERE name = 'content'", last)


def _outdate(db: Database, content: int) -> None:
    """What lies here of this content is of another generation from now on."""
    db.run("UPDATE copy SET state = ?, verified_ns = 0 WHERE content = ? AND state IN (1, 2)", CopyState.OLDER, content)


def begin_replacing(db: Database, content: int) -> None:
    """The file of this content is about to be another one: what was there does not count from here on."""
    with db.change():
        _outdate(db, content)


def arrived(db: Database, heard: Heard, number: int, tier: Tier) -> bool:
    """What arrived under the reserved id `number` is a verified copy of `heard` now, under the content's own id; False when it is not
    wanted any more. The caller has given the file its name.
    """
    with db.change():
        if not hear(db, heard):
            return False
        now = time.time_ns()
        db.run("DELETE FROM copy WHERE content = ? AND tier = ?", number, tier)
        db.run("UPDATE content SET blocks = coalesce(blocks, ?), told = 2 WHERE id = ? AND peer = 1", heard.blocks, heard.content)
        db.run(
            "INSERT OR REPLACE INTO copy (content, tier, state, verified_ns, used_ns) VALUES (?, ?, 1, ?, ?)",
            heard.content, tier, now, now,
        )  # fmt: skip
        return True


def came(db: Database, seen: Content, tier: Tier, blocks: bytes) -> bool:
    """A copy that was announced in `tier` came from other nodes and is right. False, and nothing changed, when the content has moved on."""
    with db.change():
        if db.row("SELECT state, change FROM content WHERE id = ?", seen.id) != (seen.state, seen.change):
            return False
        now = time.time_ns()
        if not db.run("UPDATE copy SET state = 1, verified_ns = ?1, used_ns = ?1 WHERE content = ?2 AND tier = ?3 AND state = 0",
                      now, seen.id, tier):  # fmt: skip
            return False
        db.run(
            "UPDATE content SET blocks = coalesce(blocks, ?), told = CASE WHEN peer = 1 THEN 2 ELSE told END WHERE id = ?", blocks, seen.id
        )
        return True


def untold(db: Database, at_most: int) -> list[tuple[Content, bool]]:
    """Contents of which the cluster's store shall learn that a copy is here (True), or no longer is."""
    rows = db.rows(
        "SELECT k.id, k.inode, k.generation, k.state, k.size, k.digest, NULL, k.change, k.peer, k.told = 2 AND k.state = 2"
        " AND EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id AND c.state = 1) FROM content k WHERE k.told > 1 LIMIT ?",
        at_most,
    )
    return [(_content(row[:9]), bool(row[9])) for row in rows]


def told(db: Database, contents: Iterable[tuple[Content, bool]]) -> None:
    """The store has learned this of these contents; what moved on meanwhile stays to be told."""
    with db.change():
        for content, here in contents:
            db.run("UPDATE content SET told = ? WHERE id = ? AND change = ? AND told > 1", here, content.id, content.change)


def take_back(db: Database) -> int:
    """Copies of which the store was told and that are gone, with their tier say: it shall learn so. How many those are."""
    with db.change():
        return db.run(
            "UPDATE content SET told = 3 WHERE told IN (1, 2)"
            " AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = content.id AND c.state = 1)"
        )


def own(db: Database, content: Content) -> bool:
    """Make a sealed content of another node this node's own: the node that wrote it is gone. False when it has moved on."""
    with db.change():
        return bool(db.run("UPDATE content SET peer = 0, lacking = 1, change = change + 1 WHERE id = ? AND change = ? AND state = 2",
                           content.id, content.change))  # fmt: skip


def disown(db: Database, content: Content) -> bool:
    """Another node has what this one took for its own, word for word. False when it has moved on."""
    with db.change():
        return bool(db.run("UPDATE content SET peer = 1, lacking = 0, change = change + 1 WHERE id = ? AND change = ? AND state = 2",
                           content.id, content.change))  # fmt: skip


def older(db: Database, tier: Tier, at_most: int) -> list[int]:
    """Contents of which only a former generation lies in `tier`, and that nobody has open."""
    rows = db.rows(
        "SELECT content FROM copy WHERE tier = ? AND state = 3"
        " AND copy.content NOT IN (SELECT content FROM handle WHERE content IS NOT NULL) LIMIT ?",
        tier, at_most,
    )  # fmt: skip
    return [row[0] for row in rows]


def sealed(db: Database, after: int, at_most: int, *, peer: bool) -> list[Content]:
    """Sealed contents that lie here, of other nodes or of this one, in the order of their ids."""
    rows = db.rows(
        "SELECT k.id, k.inode, k.generation, k.state, k.size, k.digest, NULL, k.change, k.peer FROM content k WHERE k.id > ? AND k.peer = ?"
        " AND k.state IN (1, 2, 4) AND (? OR k.state <> 1) AND (? = 0 OR EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id))"
        " ORDER BY k.id LIMIT ?",
        after, peer, peer, peer, at_most,
    )  # fmt: skip
    return [_content(row) for row in rows]


def held_bytes(db: Database, tier: Tier | None = None) -> int:
    """Bytes in copies of other nodes' contents here."""
    return int(
        db.value(
            "SELECT coalesce(sum(k.size), 0) FROM content k JOIN copy c ON c.content = k.id WHERE k.peer = 1 AND c.state <> 2"
            " AND (?1 IS NULL OR c.tier = ?1)",
            tier,
        )
    )


def recent_blocks(db: Database, at_most: int) -> list[tuple[int, Tier, bytes]]:
    """(content, tier, blocks' digests) of contents that came last, whose blocks may be those of the next one."""
    rows = db.rows(
        "SELECT k.id, c.tier, k.blocks FROM copy c JOIN content k ON k.id = c.content WHERE c.state = 1 AND k.state = 2"
        " AND c.tier <> 'pfs' AND length(k.blocks) BETWEEN 1 AND 1048576 ORDER BY c.used_ns DESC LIMIT ?",
        at_most,
    )
    return [(row[0], Tier(row[1]), row[2]) for row in rows]


def _content(row: tuple[int, int, int, int, int, bytes | None, bytes | None, int, int]) -> Content:
    return Content(row[0], row[1], row[2], ContentState(row[3]), *row[4:8], bool(row[8]))


def factor(db: Database) -> int:
    """How many copies are wanted, this node's own included, as it was last told; 0 when it never was."""
    return int(db.value("SELECT value FROM meta WHERE key = 'factor'") or 0)
