"""Requests of the mount and of commands to the mover (table `mover_request`).

A request is open until it is answered, or until its callers have stopped waiting (`until_ns`). Callers with the same kind, inode and
argument share one open row. Kinds:

- `scan`: compare the directory `inode` with the PFS. Argument `again`: even if it was imported before; `tree`: all directories below too.
- `fetch`: fetch the content of the file `inode`. The result is `here`, or `direct`: read it on the PFS; never for the argument `write`.
  With the argument `repair`, `here` is replaced by the names of the sources.
- `replicate_now`: the present state of the file `inode` has to be on enough other nodes for the level `clique`.
- `replicate_later`: the same, soon, and no caller waits.
- `inspect`: what the file `inode`, whose bytes are only on other nodes, shows of itself: the result is `FileFormat.encode`.
- `salvage`: no live node has the content of the file `inode`; the file shall show the newest state that is left.

Crash safety: the next mover answers an open row. An answered row is deleted when it is old.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass

from ckptfs import limits
from ckptfs.catalog.database import Database

SCAN = "scan"
FETCH = "fetch"
REPLICATE_NOW = "replicate_now"
REPLICATE_LATER = "replicate_later"
SALVAGE = "salvage"
INSPECT = "inspect"

LANE_BY_KIND = {
    SCAN: "scan", FETCH: "fetch", REPLICATE_NOW: "fsync copies", REPLICATE_LATER: "copy open files", SALVAGE: "salvage", INSPECT: "inspect",
}  # fmt: skip
"""Kind -> the beginning of the names of the lanes that answer it."""
ALL_LANES = ""
"""Wakes the mover in place of a kind: every lane runs at once."""

OPEN, DONE, FAILED = 0, 1, 2

NEEDS_COPY = "write"
"""Argument of `fetch`: the caller needs a copy in a tier of this node. The PFS's own file is not enough."""
FOR_REPAIR = "repair"
"""Argument of `fetch`: the copies here are bad. The result names the source of the good one."""
COMPARE_AGAIN = "again"
TREE = "tree"
"""Arguments of `scan`."""
FETCHED = "here"
DIRECT = "direct"
"""Results of `fetch`."""
READABLE = "begun"
"""Result of a `fetch` that is still open, when its blocks can be read as they arrive (`ckptfs.tiers.fetch_map`)."""

_COLUMNS = "id, kind, inode, argument, state, error, result, progress_ns, at_ns"


@dataclass(frozen=True, slots=True)
class MoverRequest:
    """One row of the table. `error` is an errno; `result` is the reply of the lane."""

    id: int
    kind: str
    inode: int
    argument: str
    state: int
    error: int
    result: str
    progress_ns: int
    at_ns: int  # When the request was made, then when it was answered.


def insert_request(db: Database, kind: str, inode: int, argument: str = "", *, wait_s: float = limits.SCAN_WAIT_S) -> int:
    """Request something, and wait at most `wait_s` for it. Return the row, which callers may share."""
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
    """Return a request as it is now. Returns None if it was deleted."""
    found = db.row(f"SELECT {_COLUMNS} FROM mover_request WHERE id = ?", request)
    return None if found is None else MoverRequest(*found)


def is_open(db: Database, request: int) -> bool:
    """Return True if a caller still waits for the reply."""
    return db.value("SELECT 1 FROM mover_request WHERE id = ? AND state = 0 AND until_ns >= ?", request, time.time_ns()) is not None


def list_open(db: Database, kind: str, *, at_most: int = limits.CHANGE_ROWS_MAX) -> list[MoverRequest]:
    """Return the open requests of one kind for which a caller still waits, oldest first."""
    sql = f"SELECT {_COLUMNS} FROM mover_request WHERE state = 0 AND kind = ? AND until_ns >= ? ORDER BY id LIMIT ?"
    return [MoverRequest(*row) for row in db.rows(sql, kind, time.time_ns(), at_most)]


def mark_done(db: Database, request: int, result: str = "") -> None:
    """Answer a request. The caller calls `notify_replies` after the commit."""
    db.change("UPDATE mover_request SET state = 1, result = ?, at_ns = ? WHERE id = ? AND state = 0", result, time.time_ns(), request)


def mark_failed(db: Database, request: int, error: int) -> None:
    """Answer a request with an errno. The caller calls `notify_replies` after the commit."""
    failed = "UPDATE mover_request SET state = 2, result = '', error = ?, at_ns = ? WHERE id = ? AND state = 0"
    db.change(failed, error, time.time_ns(), request)


def record_progress(db: Database, request: int, *, wait_s: float = limits.FETCH_STALL_S) -> None:
    """Record that a lane works on a request: its callers wait up to `wait_s` from now."""
    now = time.time_ns()
    with db.transaction():
        values = (now, now + int(wait_s * 1e9), request)
        db.run("UPDATE mover_request SET progress_ns = ?, until_ns = max(until_ns, ?) WHERE id = ? AND state = 0", *values)


def record_lane_progress(db: Database, kind: str, *, in_hand: Collection[int] = (), wait_s: float = limits.FETCH_STALL_S) -> None:
    """Record that a lane makes progress: callers of this kind wait up to `wait_s` from now.

    So do those whose requests wait for a lane. `in_hand`: the inodes that other lanes of this kind have, which record their own progress.
    """
    now = time.time_ns()
    others = ",".join(str(int(inode)) for inode in in_hand)
    sql = f"UPDATE mover_request SET progress_ns = ?, until_ns = max(until_ns, ?) WHERE state = 0 AND kind = ? AND inode NOT IN ({others})"
    db.change(sql, now, now + int(wait_s * 1e9), kind)


def mark_readable(db: Database, request: int) -> None:
    """Record that blocks of a fetch can be read as they arrive. Call `notify_replies` afterwards."""
    db.change("UPDATE mover_request SET result = ? WHERE id = ? AND state = 0", READABLE, request)


def delete_stale(db: Database) -> int:
    """Delete open requests without a waiting caller, and replies that are old. Return how many."""
    now = time.time_ns()
    stale = "(state = 0 AND until_ns < ?) OR (state != 0 AND at_ns < ?)"
    values = (now, now - int(limits.REQUEST_KEEP_S * 1e9))
    if db.value(f"SELECT 1 FROM mover_request WHERE {stale} LIMIT 1", *values) is None:
        return 0
    return db.change(f"DELETE FROM mover_request WHERE {stale}", *values)
