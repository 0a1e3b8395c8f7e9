"""Owns whether this node is an island: it cannot reach the store, and goes on with what it knows. How that is settled is island.py's.

If we die here: the next process reads it.
"""

from ckptfs.catalog.database import Database


def get_disconnected_ns(db: Database) -> int:
    """Since when this node is an island, as it last knew; 0: it is none."""
    return int(db.value("SELECT value FROM meta WHERE key = 'island'") or 0)


def mark_disconnected(db: Database, now_ns: int) -> None:
    """What is not told from now on, applications believe to be done."""
    db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('island', ?)", now_ns)


def mark_reintegrated(db: Database, now_ns: int) -> None:
    """Everything is told."""
    db.run("DELETE FROM meta WHERE key = 'island'")
    db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('returned', ?)", now_ns)


def get_reintegrated_ns(db: Database) -> int:
    """When this node was an island for the last time; 0: never."""
    return int(db.value("SELECT value FROM meta WHERE key = 'returned'") or 0)
