"""Owns the table `want`: what somebody who waits asks of the mover. The row is the request, a ring of the bell only a hint.

A want is open until it is answered, or until nobody waits for it any more (`until_ns`). Askers of the same (kind, inode, argument)
share one open row. Kinds: 'visit' (import the PFS directory `inode`; argument 'again' compares it again, 'tree' all below it too),
'fetch' (bring the content of the file `inode` here; the result is 'here', or 'direct': read it on the PFS itself, never given for the
argument 'write'), 'settle' (argument: a level, answered when the file `inode` has reached it; or 'journal:SEQ', answered when the PFS
has been told of all that was recorded about `inode` up to that row), 'secure' (what the file `inode` holds now shall be on enough other
nodes for the level `clique`), 'copy' (the same, soon, and nobody waits), 'left' (nobody who lives has what the file `inode` holds: what
is left of it shall be shown).
If we die here: an open row is answered by the next mover, an answered one is swept when it is old.
"""

import time
from dataclasses import dataclass

from ckptfs import limits
from ckptfs.catalog.database import Database

SCAN = "scan"
FETCH = "fetch"
WAIT_LEVEL = "wait_level"
REPLICATE_NOW = "replicate_now"
REPLICATE_LATER = "replicate_later"
SALVAGE = "salvage"

LANE_BY_KIND = {SCAN: "scan", FETCH: "fetch", REPLICATE_NOW: "fsync copies", REPLICATE_LATER: "copy open files", SALVAGE: "salvage"}
"""Kind -> the beginning of the names of the lanes that answer it alone. What else is wanted needs all of them."""

OPEN, DONE, FAILED = 0, 1, 2

FOR_WRITING = "write"
"""Argument of 'fetch': the file will be written, so the PFS's own file will not do."""
COMPARE_AGAIN = "again"
TREE = "tree"
"""Arguments of 'visit'."""
FETCHED = "here"
DIRECT = "direct"
"""Results of 'fetch'."""
READABLE = "begun"
"""What a 'fetch' that is still open has for a result when its blocks may be read as they come (`ckptfs.tiers.arrival`)."""

_COLUMNS = "id, kind, inode, argument, state, error, result, progress_ns, at_ns"


@dataclass(frozen=True, slots=True)
class MoverRequest:
    """One row: `error` is an errno when the want failed, `result` what the answerer has to say otherwise."""

    id: int
    kind: str
    inode: int
    argument: str
    state: int
    error: int
    result: str
    progress_ns: int
    at_ns: int
    """When it was asked, then when it was answered."""


def insert_request(db: Database, kind: str, inode: int, argument: str = "", *, wait_s: float = limits.SCAN_WAIT_S) -> int:
    """Want something for at most `wait_s`; the id of the row, which may be an older one that asks the same."""
    now = time.time_ns()
    until = now + int(wait_s * 1e9)
    with db.transaction():
        found = db.row("SELECT id FROM mover_request WHERE state = 0 AND kind = ? AND inode = ? AND argument = ?", kind, inode, argument)
        if found is None:
            return db.insert(
                "INSERT INTO mover_request (kind, inode, argument, at_ns, until_ns) VALUES (?,?,?,?,?)", kind, inode, argument, now, until
            )
        db.run("UPDATE mover_request SET until_ns = max(until_ns, ?) WHERE id = ?", until, found[0])
        return int(found[0])


def get(db: Database, request: int) -> MoverRequest | None:
    """A want as it now is; None when it was swept."""
    found = db.row(f"SELECT {_COLUMNS} FROM mover_request WHERE id = ?", request)
    return None if found is None else MoverRequest(*found)


def is_open(db: Database, request: int) -> bool:
    """Whether somebody still waits for an answer."""
    return db.value("SELECT 1 FROM mover_request WHERE id = ? AND state = 0 AND until_ns >= ?", request, time.time_ns()) is not None


def list_open(db: Database, kind: str, *, at_most: int = limits.CHANGE_ROWS_MAX) -> list[MoverRequest]:
    """The open wants of one kind for which somebody still waits, oldest first."""
    sql = f"SELECT {_COLUMNS} FROM mover_request WHERE state = 0 AND kind = ? AND until_ns >= ? ORDER BY id LIMIT ?"
    return [MoverRequest(*row) for row in db.rows(sql, kind, time.time_ns(), at_most)]


def mark_done(db: Database, request: int, result: str = "") -> None:
    """Answer a want. Call `notify.wants()` once it is committed."""
    with db.transaction():
        db.run("UPDATE mover_request SET state = 1, result = ?, at_ns = ? WHERE id = ? AND state = 0", result, time.time_ns(), request)


def mark_failed(db: Database, request: int, error: int) -> None:
    """Answer a want with an errno. Call `notify.wants()` once it is committed."""
    with db.transaction():
        db.run(
            "UPDATE mover_request SET state = 2, result = '', error = ?, at_ns = ? WHERE id = ? AND state = 0",
            error,
            time.time_ns(),
            request,
        )


def record_progress(db: Database, request: int, *, wait_s: float = limits.FETCH_STALL_S) -> None:
    """Say that a want is being answered: its askers wait up to `wait_s` from now on."""
    now = time.time_ns()
    with db.transaction():
        values = (now, now + int(wait_s * 1e9), request)
        db.run("UPDATE mover_request SET progress_ns = ?, until_ns = max(until_ns, ?) WHERE id = ? AND state = 0", *values)


def mark_readable(db: Database, request: int) -> None:
    """A fetch has come so far that its blocks may be read as they come. Call `notify.wants()` once it is committed."""
    with db.transaction():
        db.run("UPDATE mover_request SET result = ? WHERE id = ? AND state = 0", READABLE, request)


def build_journal_argument(row: int) -> str:
    """The argument of a 'settle' that waits until the PFS was told of everything about its inode up to this row of the journal."""
    return f"journal:{row}"


def delete_stale(db: Database) -> int:
    """Forget open wants for which nobody waits any more, and answers that are old enough to have been read. How many went."""
    now = time.time_ns()
    stale = "(state = 0 AND until_ns < ?) OR (state != 0 AND at_ns < ?)"
    values = (now, now - int(limits.REQUEST_KEEP_S * 1e9))
    if db.value(f"SELECT 1 FROM mover_request WHERE {stale} LIMIT 1", *values) is None:
        return 0
    with db.transaction():
        return db.run(f"DELETE FROM mover_request WHERE {stale}", *values)
