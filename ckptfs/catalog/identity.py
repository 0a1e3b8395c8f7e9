"""Owns the ids that this node gives to inodes and contents: unique in the cluster without asking anyone, by its number in the upper bits.

Alone, a node counts as SQLite does. Rows of other nodes have greater ids than its own: in a cluster it counts in table `meta`.
If we die here: a counter is bumped in the transaction that uses the id.
"""

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.errors import Refused

COUNTED = ("inode", "content")


def number(db: Database) -> int:
    """This node's number in its cluster; 0 when it was never given one."""
    return int(db.value("SELECT value FROM meta WHERE key = 'number'") or 0)


def take_number(db: Database, given: int) -> None:
    """From now on new ids carry this number, which is above 0 and never changes. Raises Refused."""
    known = number(db)
    if known == given:
        return
    if known or not 0 < given < 1 << limits.NODE_NUMBER_BITS:
        raise Refused(
            f"this node's number is {known}, and it cannot become {given}", remedy="give it another state directory, or its former name"
        )
    with db.change():
        db.run("INSERT INTO meta (key, value) VALUES ('number', ?)", given)
        for table in COUNTED:
            db.run("INSERT INTO meta (key, value) VALUES (?, ?)", f"last {table}", given << limits.ID_COUNTER_BITS)


def fresh(db: Database, table: str) -> int | None:
    """The id for a new row of `table`; None: SQLite's own. Joins the caller's transaction."""
    if not db.clustered:
        return None
    given: int | None = db.value("UPDATE meta SET value = value + 1 WHERE key = ? RETURNING value", f"last {table}")
    return given


def home(identity: int) -> int:
    """The number of the node that gave this id; 0: some node gave it before it had a number, or it is the root."""
    return identity >> limits.ID_COUNTER_BITS
