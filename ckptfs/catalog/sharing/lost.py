"""Owns the table `lost_key`: what the store said of a key before it lost its data, until it has been told again.

`was` = [turn of that store, revision there] orders what several nodes knew: it goes into the store with the value, and of two values that
nobody changed since, the one with the higher `was` is the newer one. A key that was changed here and not told when the store was lost, or
that is changed here before it was told again, has no `was`: it is newer than all.
If we die here: `begin` is one change of the catalog; what it marked is told by the next process.
"""

import time

from ckptfs import limits
from ckptfs.catalog import epoch
from ckptfs.catalog.database import Database
from ckptfs.catalog.holding import HAS_GOOD_COPY
from ckptfs.catalog.sharing import kinds, touching
from ckptfs.catalog.sharing.kinds import SharedKey

PriorRevision = list[int]
PRIOR_REVISION_JSON = b'"' + kinds.PRIOR_REVISION.encode() + b'"'

_SAME_KEY_SQL = "t.kind = {0}.kind AND t.number = {0}.number AND t.name = {0}.name"
# From the root downwards, so that a directory is told before what is in it; then what is not known to be below the root.
_WALK_STATEMENTS = [
    "CREATE TEMP TABLE IF NOT EXISTS walk (change INTEGER PRIMARY KEY, id INTEGER UNIQUE)",
    "DELETE FROM walk",
    "INSERT INTO walk (id) WITH RECURSIVE below (id, depth) AS (SELECT 1, 0 UNION SELECT e.child, depth + 1 FROM below b"
    " JOIN entry e ON e.parent = b.id WHERE depth < 4096) SELECT id FROM below GROUP BY id ORDER BY max(depth), id",
    "INSERT OR IGNORE INTO walk (id) SELECT child FROM entry",
]
# An inode is as new as the newest of its names: a directory that is renamed where it lies does not change itself.
_SET_INODE_REVISIONS = (
    "UPDATE lost_key SET revision = n.revision FROM (SELECT e.child, max(l.revision) AS revision FROM entry e JOIN lost_key l"
    " ON l.kind = 'e' AND l.number = e.parent AND l.name = e.name GROUP BY e.child) n"
    " WHERE kind = 'i' AND number = n.child AND lost_key.revision < n.revision"
)
_INSERT_DIRTY = "INSERT OR IGNORE INTO touched_key (change, kind, number, name) "
_MARK_ALL_DIRTY = [
    _INSERT_DIRTY + "SELECT w.change, 'i', w.id, x'' FROM walk w JOIN inode i ON i.id = w.id",
    _INSERT_DIRTY + "SELECT w.change, 'm', w.id, x'' FROM walk w JOIN inode i ON i.id = w.id WHERE i.mode & 61440 = 16384",
    _INSERT_DIRTY + "SELECT w.change, 'e', e.parent, e.name FROM walk w JOIN entry e ON e.child = w.id",
    _INSERT_DIRTY + "SELECT w.change, 'c', i.content, x'' FROM walk w JOIN inode i ON i.id = w.id WHERE i.content IS NOT NULL",
    _INSERT_DIRTY + "SELECT (SELECT max(change) FROM walk) + row_number() OVER (ORDER BY kind), kind, number, name FROM lost_key l"
    " WHERE kind IN ('c', 'f', 'x')"
    f" AND NOT EXISTS (SELECT 1 FROM touched_key t WHERE {_SAME_KEY_SQL.format('l')})",
    _INSERT_DIRTY
    + f"SELECT (SELECT max(change) FROM touched_key) + seq, 'j', {touching.ROW_NODE_SQL}, {touching.ROW_NAME_SQL.format('journal')}"
    " FROM journal",
]


def begin_rebuild(db: Database, value: bytes, first_revision: int) -> None:
    """Take nothing for told any more: the store of the epoch `value`, put in revision `first`, is to be told all that is known here."""
    with touching.change_unmarked(db):
        changed = f"SELECT 1 FROM touched_key t WHERE {_SAME_KEY_SQL.format('lost_key')} AND t.change <> lost_key.change"
        db.run(f"DELETE FROM lost_key WHERE EXISTS ({changed})")
        db.run(
            "INSERT OR REPLACE INTO lost_key (kind, number, name, turn, revision, change, value) SELECT kind, number, name, ?, revision, 0,"
            f" value FROM seen_key s WHERE kind <> 'w' AND NOT EXISTS (SELECT 1 FROM touched_key t WHERE {_SAME_KEY_SQL.format('s')})",
            epoch.get_turn(epoch.get_epoch(db)),
        )  # fmt: skip
        _set_prior_revisions(db)
        _delete_stale_names(db)
        db.run(_SET_INODE_REVISIONS)
        db.run("DELETE FROM seen_key")
        db.run("DELETE FROM touched_key")
        for statement in (*_WALK_STATEMENTS, *_MARK_ALL_DIRTY):
            db.run(statement)
        db.run("DELETE FROM walk")
        db.run(
            f"UPDATE lost_key SET change = coalesce((SELECT max(change) FROM touched_key t WHERE {_SAME_KEY_SQL.format('lost_key')}), 0)"
        )
        db.run(f"UPDATE content SET told = 2 WHERE peer = 1 AND state = 2 AND {HAS_GOOD_COPY}")
        epoch.record_epoch(db, value, first_revision, time.time_ns())


def _set_prior_revisions(db: Database) -> None:
    """What was told anew to the store that is lost now, and not changed since, is no newer than it was before."""
    for *key, raw in db.rows("SELECT kind, number, name, value FROM seen_key WHERE kind <> 'w' AND instr(value, ?)", PRIOR_REVISION_JSON):
        known = kinds.get_prior_revision(bytes(raw))
        if known is not None:
            where = "kind = ? AND number = ? AND name = ? AND turn = ?"
            db.run(f"UPDATE lost_key SET turn = ?, revision = ? WHERE {where}", *known, *key, epoch.get_turn(epoch.get_epoch(db)))


def _delete_stale_names(db: Database) -> None:
    """Names that lead here to what has been renamed since: nobody has asked for them again, so they are still in the cache."""
    rows = db.rows(
        "SELECT e.cookie, e.parent, e.name, i.value FROM entry e"
        " JOIN lost_key n ON n.kind = 'e' AND n.number = e.parent AND n.name = e.name"
        " JOIN lost_key i ON i.kind = 'i' AND i.number = e.child AND (i.turn, i.revision) > (n.turn, n.revision)"
    )
    for cookie, parent, name, known in rows:
        value = kinds.decode_value(bytes(known)) or {}
        if "names" in value and [parent, bytes(name).decode("latin-1")] not in value["names"]:
            db.run("DELETE FROM entry WHERE cookie = ?", cookie)
    newest = "SELECT 1 FROM entry o LEFT JOIN lost_key l ON l.kind = 'e' AND l.number = o.parent AND l.name = o.name"
    db.run(
        "DELETE FROM entry WHERE cookie IN (SELECT e.cookie FROM entry e JOIN inode i ON i.id = e.child AND i.mode & 61440 = 16384"
        " JOIN lost_key n ON n.kind = 'e' AND n.number = e.parent AND n.name = e.name"
        f" WHERE EXISTS ({newest} WHERE o.child = e.child AND o.cookie <> e.cookie"
        " AND (l.kind IS NULL OR (l.turn, l.revision) > (n.turn, n.revision))))"
    )


def list_node_numbers(db: Database) -> set[int]:
    """The numbers of all nodes of which anything is known here."""
    shift = limits.ID_COUNTER_BITS
    rows = db.rows(f"SELECT id >> {shift} FROM inode UNION SELECT id >> {shift} FROM content UNION SELECT number FROM peer")
    return {row[0] for row in rows} - {0}


def is_rebuilding(db: Database) -> bool:
    """Whether anything is left that was known to the lost store."""
    return db.value("SELECT 1 FROM lost_key LIMIT 1") is not None


def find_prior_revision(db: Database, key: SharedKey) -> PriorRevision | None:
    """How new is what is known here of a key; None: newer than the lost store."""
    row = db.row("SELECT turn, revision, change FROM lost_key WHERE kind = ? AND number = ? AND name = ?", *key)
    if row is None:
        return None
    later = "SELECT 1 FROM touched_key WHERE kind = ? AND number = ? AND name = ? AND change <> ?"
    return None if db.value(later, *key, row[2]) else [row[0], row[1]]


def get_lost_value(db: Database, key: SharedKey) -> bytes | None:
    """What the lost store said of a key."""
    found = db.value("SELECT value FROM lost_key WHERE kind = ? AND number = ? AND name = ?", *key)
    return None if found is None else kinds.encode_value(kinds.decode_value(bytes(found)))


def mark_resent(db: Database, keys: list[SharedKey]) -> None:
    """The store knows these again."""
    for key in keys:
        db.run("DELETE FROM lost_key WHERE kind = ? AND number = ? AND name = ?", *key)


def end_rebuild(db: Database) -> None:
    """All is told."""
    db.run("DELETE FROM lost_key")


def add_prior_revision(raw: bytes | None, prior_revision: PriorRevision | None) -> bytes | None:
    """A value as it is told anew."""
    content = kinds.decode_value(raw)
    return raw if content is None or prior_revision is None else kinds.encode_value({**content, kinds.PRIOR_REVISION: prior_revision})
