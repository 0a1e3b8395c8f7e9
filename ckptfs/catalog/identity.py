"""Owns the ids that this node gives to inodes and contents: unique in the cluster without asking anyone, by its number in the upper bits.

Alone, a node counts as SQLite does. Rows of other nodes have greater ids than its own: in a cluster it counts in table `meta`.
If we die here: a counter is bumped in the transaction that uses the id.

Owns what a catalog knows of the cluster that it belongs to (meta key 'cluster'), of its own starts, and of who lived last.

A catalog never changes its cluster: what the other nodes of another one hold under its ids would be taken for its own.
Functions that change something join the caller's transaction.
If we die here: SQLite undoes the unfinished change.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.errors import ConfigError, InvalidArgument
from ckptfs.model import ROOT

COUNTED_TABLES = ("inode", "content")


def get_node_number(db: Database) -> int:
    """This node's number in its cluster; 0 when it was never given one."""
    return int(db.value("SELECT value FROM meta WHERE key = 'number'") or 0)


def set_node_number(db: Database, new_number: int) -> None:
    """From now on new ids carry this number, which is above 0 and never changes. Raises Refused."""
    known = get_node_number(db)
    if known == new_number:
        return
    if known or not 0 < new_number < 1 << limits.NODE_NUMBER_BITS:
        raise InvalidArgument(
            f"this node's number is {known}, and it cannot become {new_number}",
            remedy="give it another state directory, or its former name",
        )
    with db.transaction():
        db.run("INSERT INTO meta (key, value) VALUES ('number', ?)", new_number)
        for table in COUNTED_TABLES:
            db.run("INSERT INTO meta (key, value) VALUES (?, ?)", f"last {table}", new_number << limits.ID_COUNTER_BITS)


def allocate_id(db: Database, table: str) -> int | None:
    """The id for a new row of `table`; None: SQLite's own. Joins the caller's transaction."""
    if not db.is_clustered:
        return None
    given: int | None = db.value("UPDATE meta SET value = value + 1 WHERE key = ? RETURNING value", f"last {table}")
    return given


def get_origin_node(identity: int) -> int:
    """The number of the node that gave this id; 0: some node gave it before it had a number, or it is the root."""
    return identity >> limits.ID_COUNTER_BITS


def get_catalog_id(db: Database) -> str:
    """The uuid of this catalog, which no other one has: 32 hex digits."""
    return str(db.value("SELECT value FROM meta WHERE key = 'instance'"))


def get_cluster(db: Database) -> str | None:
    """The cluster that this catalog belongs to."""
    found: str | None = db.value("SELECT value FROM meta WHERE key = 'cluster'")
    return found


def require_cluster(db: Database, wanted: str | None, state: Path) -> None:
    """Refuse a cluster, or none, that this catalog in the directory `state` cannot belong to. Raises ConfigError."""
    known = get_cluster(db)
    if known == wanted:
        return
    if known is not None:
        asked = "none is configured" if wanted is None else f"cluster={wanted} is configured"
        raise ConfigError(
            f"the files in {state} belong to the cluster {known}, and {asked}",
            remedy=f"give cluster={known} as before, or state=DIRECTORY with an empty one",
        )
    if db.value("SELECT 1 FROM inode WHERE id != ? LIMIT 1", ROOT) is not None:
        raise ConfigError(
            f"the files in {state} were written without a cluster, and cannot be brought into one",
            remedy="mount it without cluster=, let `ckptfs drain` bring all of it to the PFS, then give state=DIRECTORY with an empty one:"
            " what is on the PFS is there again",
        )


def set_cluster(db: Database, name: str) -> None:
    """This catalog belongs to the cluster `name` from now on."""
    db.run("INSERT OR IGNORE INTO meta (key, value) VALUES ('cluster', ?)", name)


def record_start(db: Database) -> int:
    """Another start of this node's mover: how many there were."""
    with db.transaction():
        db.run("INSERT INTO meta (key, value) VALUES ('starts', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1")
        return int(db.value("SELECT value FROM meta WHERE key = 'starts'"))


def record_last_members(db: Database, records: Iterable[bytes]) -> None:
    """Remember who lives, by their records: a mover that starts while the store is away begins with them."""
    with db.transaction():
        db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('world', ?)", json.dumps([record.decode() for record in records]))


def list_last_members(db: Database) -> list[bytes]:
    """What was remembered."""
    text = db.value("SELECT value FROM meta WHERE key = 'world'")
    return [] if text is None else [record.encode() for record in json.loads(text)]
