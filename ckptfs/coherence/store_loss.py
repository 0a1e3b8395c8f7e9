"""Loss of the store's data: detection by its epoch, and keys that must be published again.

- The key `epoch` has a random id and a turn, which counts the losses of this cluster's store. The node that joins an empty store writes
  it. A store with another epoch or none, or at an earlier revision than before, is not the one that this catalog knows.
- `EpochCheckedStore` reads the epoch with every question and compares it in every change, without additional round trips. A response that
  is older than a revision known at its request comes from a store that was set back. Both raise StoreLost.
- `resend_key` has the last known value of each key until it is published again. Its prior revision `was` = [turn, revision] orders the
  knowledge of several nodes: of two values that did not change since, the one with the higher `was` is newer. A key that was dirty at the
  loss, or changes before it is published again, has no `was`: it is newer than all.

Crash safety: each step is one transaction of the catalog; the next process continues. Seconds that were not recorded are recognised by the
node's own key.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.catalog.remote_contents import HAS_GOOD_COPY
from ckptfs.coherence import key_state
from ckptfs.coherence.keys import PRIOR_REVISION, SharedKey, decode_value, encode_value, get_prior_revision
from ckptfs.errors import StoreLost, StoreUnreachable
from ckptfs.store.kv import WAIT_S, Compare, CompareTarget, Get, Item, Operation, Outcome, Put, Store, Watch

EPOCH_KEY = b"epoch"


def get_epoch(db: Database) -> bytes | None:
    """The value of the store's epoch, as this catalog knows it; None: it never met one."""
    text = db.value("SELECT value FROM meta WHERE key = 'epoch'")
    return None if text is None else str(text).encode()


def get_turn(value: bytes | None) -> int:
    """How many stores this one came after."""
    return 0 if value is None else int(json.loads(value)["turn"])


def get_highest_revision(db: Database) -> int:
    """The highest revision of that store that is remembered."""
    own = db.value("SELECT max(revision) FROM cached_key WHERE kind = 'w'") or 0
    return max(int(db.value("SELECT value FROM meta WHERE key = 'epoch revision'") or 0), int(own))


def record_revision(db: Database, value: bytes | None, revision_reached: int) -> None:
    """Remember how far the store of the epoch `value` has come: nothing, where another one is known by now."""
    if value is not None and revision_reached > get_highest_revision(db):
        same = "WHERE EXISTS (SELECT 1 FROM meta WHERE key = 'epoch' AND value = ?)"
        db.run(f"INSERT OR REPLACE INTO meta (key, value) SELECT 'epoch revision', ? {same}", revision_reached, value.decode())


def require_rebuilt(db: Database) -> None:
    """The nodes have had time to tell a store that has lost its data what the PFS shows. Raises Unreachable."""
    if get_loss_age_s(db) < limits.STORE_PUBLISH_S or db.value("SELECT 1 FROM resend_key LIMIT 1") is not None:
        raise StoreUnreachable("the nodes are telling the store of the cluster what they know: it has lost its data")


def find_prior_revision_at(db: Database, found_revision: int) -> list[int] | None:
    """How new is what the store says since the revision `found`, which is from before it was set back; None: it is of this one."""
    first = int(db.value("SELECT value FROM meta WHERE key = 'epoch first'") or 0)
    return [get_turn(get_epoch(db)) - 1, found_revision] if 0 < found_revision < first else None


def record_epoch(db: Database, value: bytes, first_revision: int, now_ns: int = 0) -> None:
    """The store is this one from now on, and was at its revision `first`; `now_ns`: the former one was found lost then."""
    with db.transaction():
        db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('epoch first', ?)", first_revision)
        db.run("DELETE FROM meta WHERE key = 'epoch revision'")
        db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('epoch', ?)", value.decode())
        if now_ns:
            db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('store lost', ?)", now_ns)


def get_loss_age_s(db: Database) -> float:
    """How long ago the store was found lost."""
    lost_ns = db.value("SELECT value FROM meta WHERE key = 'store lost'")
    return float("inf") if lost_ns is None else max(0.0, (time.time_ns() - int(lost_ns)) / 1e9)


def is_recently_lost(db: Database) -> bool:
    """Whether the store was lost so lately that what it does not say need not be true: other nodes may not have told it yet."""
    return get_loss_age_s(db) < limits.STORE_LOST_SETTLE_S


def build_new_epoch(found: Sequence[Item], before: bytes | None) -> tuple[Compare, Put] | None:
    """How a new epoch begins in a store that has no other one than `before`; None: somebody was faster."""
    if found and found[0].value != before:
        return None
    value = json.dumps({"id": uuid.uuid4().hex, "turn": get_turn(before) + 1}, separators=(",", ":")).encode()
    return Compare(EPOCH_KEY, CompareTarget.MOD, "=", found[0].mod_revision if found else 0), Put(EPOCH_KEY, value)


PriorRevision = list[int]
PRIOR_REVISION_JSON = b'"' + PRIOR_REVISION.encode() + b'"'
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
    "UPDATE resend_key SET revision = n.revision FROM (SELECT e.child, max(l.revision) AS revision FROM entry e JOIN resend_key l"
    " ON l.kind = 'e' AND l.number = e.parent AND l.name = e.name GROUP BY e.child) n"
    " WHERE kind = 'i' AND number = n.child AND resend_key.revision < n.revision"
)
_INSERT_DIRTY = "INSERT OR IGNORE INTO dirty_key (change, kind, number, name) "

_MARK_ALL_DIRTY = [
    _INSERT_DIRTY + "SELECT w.change, 'i', w.id, x'' FROM walk w JOIN inode i ON i.id = w.id",
    _INSERT_DIRTY + "SELECT w.change, 'm', w.id, x'' FROM walk w JOIN inode i ON i.id = w.id WHERE i.mode & 61440 = 16384",
    _INSERT_DIRTY + "SELECT w.change, 'e', e.parent, e.name FROM walk w JOIN entry e ON e.child = w.id",
    _INSERT_DIRTY + "SELECT w.change, 'c', i.content, x'' FROM walk w JOIN inode i ON i.id = w.id WHERE i.content IS NOT NULL",
    _INSERT_DIRTY + "SELECT (SELECT max(change) FROM walk) + row_number() OVER (ORDER BY kind), kind, number, name FROM resend_key l"
    " WHERE kind IN ('c', 'f', 'x')"
    f" AND NOT EXISTS (SELECT 1 FROM dirty_key t WHERE {_SAME_KEY_SQL.format('l')})",
    _INSERT_DIRTY
    + f"SELECT (SELECT max(change) FROM dirty_key) + seq, 'j', {key_state.ROW_NODE_SQL}, {key_state.ROW_NAME_SQL.format('journal')}"
    " FROM journal",
]


def begin_rebuild(db: Database, value: bytes, first_revision: int) -> None:
    """Take nothing for told any more: the store of the epoch `value`, put in revision `first`, is to be told all that is known here."""
    with key_state.change_unmarked(db):
        changed = f"SELECT 1 FROM dirty_key t WHERE {_SAME_KEY_SQL.format('resend_key')} AND t.change <> resend_key.change"
        db.run(f"DELETE FROM resend_key WHERE EXISTS ({changed})")
        db.run(
            "INSERT OR REPLACE INTO resend_key (kind, number, name, turn, revision, change, value)"
            f" SELECT kind, number, name, ?, revision, 0, value FROM cached_key s WHERE kind <> 'w'"
            f" AND NOT EXISTS (SELECT 1 FROM dirty_key t WHERE {_SAME_KEY_SQL.format('s')})",
            get_turn(get_epoch(db)),
        )  # fmt: skip
        _set_prior_revisions(db)
        _delete_stale_names(db)
        db.run(_SET_INODE_REVISIONS)
        db.run("DELETE FROM cached_key")
        db.run("DELETE FROM dirty_key")
        for statement in (*_WALK_STATEMENTS, *_MARK_ALL_DIRTY):
            db.run(statement)
        db.run("DELETE FROM walk")
        db.run(
            f"UPDATE resend_key SET change = coalesce((SELECT max(change) FROM dirty_key t WHERE {_SAME_KEY_SQL.format('resend_key')}), 0)"
        )
        db.run(f"UPDATE content SET announce_state = 2 WHERE remote = 1 AND state = 2 AND {HAS_GOOD_COPY}")
        record_epoch(db, value, first_revision, time.time_ns())


def _set_prior_revisions(db: Database) -> None:
    """What was told anew to the store that is lost now, and not changed since, is no newer than it was before."""
    for *key, raw in db.rows("SELECT kind, number, name, value FROM cached_key WHERE kind <> 'w' AND instr(value, ?)", PRIOR_REVISION_JSON):
        known = get_prior_revision(bytes(raw))
        if known is not None:
            where = "kind = ? AND number = ? AND name = ? AND turn = ?"
            db.run(f"UPDATE resend_key SET turn = ?, revision = ? WHERE {where}", *known, *key, get_turn(get_epoch(db)))


def _delete_stale_names(db: Database) -> None:
    """Names that lead here to what has been renamed since: nobody has asked for them again, so they are still in the cache."""
    rows = db.rows(
        "SELECT e.cookie, e.parent, e.name, i.value FROM entry e"
        " JOIN resend_key n ON n.kind = 'e' AND n.number = e.parent AND n.name = e.name"
        " JOIN resend_key i ON i.kind = 'i' AND i.number = e.child AND (i.turn, i.revision) > (n.turn, n.revision)"
    )
    for cookie, parent, name, known in rows:
        value = decode_value(bytes(known)) or {}
        if "names" in value and [parent, bytes(name).decode("latin-1")] not in value["names"]:
            db.run("DELETE FROM entry WHERE cookie = ?", cookie)
    newest = "SELECT 1 FROM entry o LEFT JOIN resend_key l ON l.kind = 'e' AND l.number = o.parent AND l.name = o.name"
    db.run(
        "DELETE FROM entry WHERE cookie IN (SELECT e.cookie FROM entry e JOIN inode i ON i.id = e.child AND i.mode & 61440 = 16384"
        " JOIN resend_key n ON n.kind = 'e' AND n.number = e.parent AND n.name = e.name"
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
    return db.value("SELECT 1 FROM resend_key LIMIT 1") is not None


def find_prior_revision(db: Database, key: SharedKey) -> PriorRevision | None:
    """How new is what is known here of a key; None: newer than the lost store."""
    row = db.row("SELECT turn, revision, change FROM resend_key WHERE kind = ? AND number = ? AND name = ?", *key)
    if row is None:
        return None
    later = "SELECT 1 FROM dirty_key WHERE kind = ? AND number = ? AND name = ? AND change <> ?"
    return None if db.value(later, *key, row[2]) else [row[0], row[1]]


def get_lost_value(db: Database, key: SharedKey) -> bytes | None:
    """What the lost store said of a key."""
    found = db.value("SELECT value FROM resend_key WHERE kind = ? AND number = ? AND name = ?", *key)
    return None if found is None else encode_value(decode_value(bytes(found)))


def mark_resent(db: Database, keys: list[SharedKey]) -> None:
    """The store knows these again."""
    for key in keys:
        db.run("DELETE FROM resend_key WHERE kind = ? AND number = ? AND name = ?", *key)


def end_rebuild(db: Database) -> None:
    """All is told."""
    db.run("DELETE FROM resend_key")


def add_prior_revision(raw: bytes | None, prior_revision: PriorRevision | None) -> bytes | None:
    """A value as it is told anew."""
    content = decode_value(raw)
    return raw if content is None or prior_revision is None else encode_value({**content, PRIOR_REVISION: prior_revision})


OutcomeCheck = Callable[[Outcome], Outcome]


class EpochCheckedStore:
    """A `Store`; leases and watches go as they are. `plain` is the store without any of this."""

    def __init__(self, store: Store, db: Database) -> None:
        self.inner = store
        self._db = db
        self._lock = threading.Lock()
        self._epoch_and_revision: tuple[bytes | None, int] = (None, 0)

    @property
    def epoch_and_revision(self) -> tuple[bytes | None, int]:
        """(the epoch that was known when something was asked last, the highest revision that was answered since it was met)."""
        return self._epoch_and_revision

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        epoch_gets, check = self._prepare_read()
        return check(self.inner.read([*epoch_gets, *gets], timeout_s=timeout_s))

    def read_soon(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> "Future[Outcome]":
        epoch_gets, check = self._prepare_read()
        return _check_when_done(self.inner.read_soon([*epoch_gets, *gets], timeout_s=timeout_s), check)

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Outcome:
        same, epoch_gets, check = self._prepare_commit()
        return check(self.inner.commit([*same, *compares], changes, [*epoch_gets, *otherwise], timeout_s=timeout_s))

    def commit_soon(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> "Future[Outcome]":
        same, epoch_gets, check = self._prepare_commit()
        return _check_when_done(self.inner.commit_soon([*same, *compares], changes, [*epoch_gets, *otherwise], timeout_s=timeout_s), check)

    def grant(self, ttl_s: int, *, timeout_s: float = WAIT_S) -> int:
        return self.inner.grant(ttl_s, timeout_s=timeout_s)

    def keep_alive(self, lease: int, *, timeout_s: float = WAIT_S) -> float:
        return self.inner.keep_alive(lease, timeout_s=timeout_s)

    def revoke(self, lease: int, *, timeout_s: float = WAIT_S) -> None:
        self.inner.revoke(lease, timeout_s=timeout_s)

    def watch(self, key: bytes, end: bytes | None, from_revision: int) -> Watch:
        return self.inner.watch(key, end, from_revision)

    def members(self) -> Sequence[Store]:
        return self.inner.members()

    def rotate_member(self) -> None:
        self.inner.rotate_member()

    def close(self) -> None:
        self.inner.close()

    # --- looking ------------------------------------------------------------------------------------------------------

    def _load_expected(self) -> tuple[bytes | None, int]:
        """The epoch that the catalog knows, and the revision at which the store surely is."""
        value = get_epoch(self._db)
        with self._lock:
            if value != self._epoch_and_revision[0]:
                self._epoch_and_revision = value, get_highest_revision(self._db)
            return self._epoch_and_revision

    def _prepare_read(self) -> tuple[list[Get], OutcomeCheck]:
        value, revision_min = self._load_expected()
        if value is None:
            return [], lambda outcome: outcome
        return [Get(EPOCH_KEY)], lambda outcome: self._check_outcome(outcome, value, revision_min, has_epoch=True)

    def _prepare_commit(self) -> tuple[list[Compare], list[Get], OutcomeCheck]:
        value, revision_min = self._load_expected()
        if value is None:
            return [], [], lambda outcome: outcome
        same = Compare(EPOCH_KEY, CompareTarget.VALUE, "=", value)
        return (
            [same],
            [Get(EPOCH_KEY)],
            lambda outcome: self._check_outcome(outcome, value, revision_min, has_epoch=not outcome.succeeded),
        )

    def _check_outcome(self, outcome: Outcome, value: bytes, revision_min: int, *, has_epoch: bool) -> Outcome:
        """The answer, without what was asked on top; `asked`: it begins with the epoch."""
        found: tuple[Item, ...] = outcome.results[0] if has_epoch else ()
        trouble = ""
        if has_epoch and not found:
            trouble = "the store of the cluster has lost its data"
        elif has_epoch and found[0].value != value:
            trouble = "the store of the cluster is another one than before: it has lost data"
        elif outcome.revision < revision_min:
            trouble = f"the store of the cluster was set back from revision {revision_min} to {outcome.revision}"
        if trouble:
            self.inner.rotate_member()  # Perhaps it is only this member that is not one of them any more.
            raise StoreLost(trouble)
        with self._lock:
            if self._epoch_and_revision[0] == value:
                self._epoch_and_revision = value, max(self._epoch_and_revision[1], outcome.revision)
        return replace(outcome, results=outcome.results[1:]) if has_epoch else outcome


def _check_when_done(future: "Future[Outcome]", check: OutcomeCheck) -> "Future[Outcome]":
    """A future of what `check` makes of the answer."""
    checked: Future[Outcome] = Future()
    checked.set_running_or_notify_cancel()

    def done(answered: "Future[Outcome]") -> None:
        failure = answered.exception()
        if failure is not None:
            checked.set_exception(failure)
            return
        try:
            checked.set_result(check(answered.result()))
        except StoreLost as lost:
            checked.set_exception(lost)

    future.add_done_callback(done)
    return checked
