"""Owns the ids that this node gives to inodes and contents: unique in the cluster without asking anyone, by its number in the upper bits.

Alone, a node counts as SQLite does. Rows of other nodes have greater ids than its own: in a cluster it counts in table `meta`.
If we die here: a counter is bumped in the transaction that uses the id.
"""

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.errors import InvalidArgument

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
