"""The ids of this node, the cluster of the catalog, and its last known members (table `meta`).

Inodes and contents get ids that are unique in the cluster without asking any node: the upper bits are the number of the node. A node
without a cluster uses SQLite's own counters. In a cluster the catalog also holds rows with greater ids of other nodes, so it counts in
`meta`. A catalog never changes its cluster: nodes of another cluster may hold other contents under its ids. Functions that
change rows join the caller's transaction.

Crash safety: a counter grows in the transaction that uses the id. After a power cut, or on a disk from a backup, the catalog may be older
than what the cluster knows of this node. So each start of the daemon skips ids (`bump_last_ids`).
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.errors import ConfigError, InvalidArgument
from ckptfs.model import ROOT

COUNTED_TABLES = ("inode", "content")
IDS_SKIPPED = 1 << 16


def get_node_number(db: Database) -> int:
    """Return the number of this node in its cluster; 0 if it never got one."""
    return int(db.get_meta("number") or 0)


def set_node_number(db: Database, new_number: int) -> None:
    """Set the number of this node, which is above 0 and never changes. Raises InvalidArgument."""
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


HISTORY_DIRECTORY_BIT = 1 << (limits.ID_COUNTER_BITS - 1)
"""In the ids of directories of the history in a cluster: every node counts the names of a file in them, also unread ones."""


def allocate_id(db: Database, table: str, *, in_history: bool = False) -> int | None:
    """Return the id for a new row of `table`, of a directory `in_history`; None: SQLite chooses it."""
    if not db.is_clustered:
        return None
    given: int = db.value("UPDATE meta SET value = value + 1 WHERE key = ? RETURNING value", f"last {table}")
    return given | HISTORY_DIRECTORY_BIT if in_history else given


def bump_last_ids(db: Database, last_ids: Mapping[str, int]) -> None:
    """Skip the ids up to `last_ids`, by table, and those that a power cut may have undone."""
    for table in COUNTED_TABLES:
        db.run("UPDATE meta SET value = max(value, ?) + ? WHERE key = ?", last_ids.get(table, 0), IDS_SKIPPED, f"last {table}")


def get_last_id(db: Database, table: str) -> int:
    """Return the last id that this node gave in `table`."""
    return int(db.get_meta(f"last {table}"))


def is_history_directory(inode: int) -> bool:
    """Return True if this is the id of a directory of the history in a cluster."""
    return bool(inode & HISTORY_DIRECTORY_BIT)


def get_origin_node(identity: int) -> int:
    """Return the number of the node that gave an id. It is 0 for ids from before a node had a number."""
    return identity >> limits.ID_COUNTER_BITS


def get_catalog_id(db: Database) -> str:
    """Return the uuid of this catalog: 32 hex digits."""
    return str(db.get_meta("instance"))


def get_cluster(db: Database) -> str | None:
    """Return the name of the cluster that this catalog belongs to. Returns None if there is none."""
    found: str | None = db.get_meta("cluster")
    return found


def require_cluster(db: Database, wanted: str | None, state: Path) -> None:
    """Raise ConfigError if this catalog, in the directory `state`, cannot belong to the cluster."""
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
    """Record that this catalog belongs to the cluster `name`."""
    db.run("INSERT OR IGNORE INTO meta (key, value) VALUES ('cluster', ?)", name)


def record_start(db: Database) -> int:
    """Count one more start of this node's mover. Return how many there were."""
    with db.transaction():
        db.run("INSERT INTO meta (key, value) VALUES ('starts', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1")
        return int(db.get_meta("starts"))


def record_last_members(db: Database, records: Iterable[bytes]) -> None:
    """Record the members of the cluster for a mover that starts without the store."""
    with db.transaction():
        db.set_meta("world", json.dumps([record.decode() for record in records]))


def list_last_members(db: Database) -> list[bytes]:
    """Return the members that were recorded last."""
    text = db.get_meta("world")
    return [] if text is None else [record.encode() for record in json.loads(text)]
