"""Loss of the store's data: detection by its epoch, and the state of an adoption.

- The key `epoch` has a random id. The node that joins an empty store writes it. A store with another epoch or none, or at an earlier
  revision than before, is not the one that this catalog knows: it counts as not answering, until a person runs `ckptfs cluster adopt`.
- `EpochCheckedStore` reads the epoch with every question and compares it in every change, without additional round trips. A response that
  is older than a revision known at its request comes from a store that was set back. Both raise StoreLost. So does an older link of a
  chain of this node (`chain`). The first node that believes it gives that store another epoch: its revision grows.
- A store that was adopted has `after` in its epoch. Until every node has adopted it, or a person has said that no other node will, what it
  does not say need not be true: `is_adopting`. No node then acts on the PFS or drops copies by what the store says.

Crash safety: each step is one transaction of the catalog; the next process continues. Seconds that were not recorded are recognised by the
node's own key.
"""

import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import StrEnum

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.coherence import value_checks
from ckptfs.errors import StoreLost, StoreUnreachable, StoreUnreadable
from ckptfs.store.kv import WAIT_S, Compare, CompareTarget, Get, Item, Operation, Outcome, Put, Store

EPOCH_KEY = b"epoch"
LOSS_TROUBLE = "store"
"""The report of a loss, until a person has this node adopt the store."""


class AdoptionStep(StrEnum):
    """How far this node is with an adoption (`meta`, key `adoption`)."""

    ORDERED = "ordered"
    MERGING = "merging"
    PUBLISHING = "publishing"


def get_epoch(db: Database) -> bytes | None:
    """Return the store's epoch as this catalog knows it. Returns None if it never met a store."""
    text = db.get_meta("epoch")
    return None if text is None else str(text).encode()


def get_highest_revision(db: Database) -> int:
    """Return the highest revision of that store that was recorded."""
    own = db.value("SELECT max(revision) FROM cached_key WHERE kind = 'w'") or 0
    return max(int(db.get_meta("epoch revision") or 0), int(own))


def record_revision(db: Database, value: bytes | None, revision_reached: int) -> None:
    """Record the revision of the store with this epoch. Ignored if the catalog knows another epoch."""
    if value is not None and revision_reached > get_highest_revision(db):
        same = "WHERE EXISTS (SELECT 1 FROM meta WHERE key = 'epoch' AND value = ?)"
        db.run(f"INSERT OR REPLACE INTO meta (key, value) SELECT 'epoch revision', ? {same}", revision_reached, value.decode())


def record_epoch(db: Database, value: bytes) -> None:
    """Record that the store has this epoch from now on."""
    with db.transaction():
        db.set_meta("epoch revision", None)
        db.set_meta("epoch", value.decode())


def build_new_epoch(found: Sequence[Item], before: bytes | None) -> tuple[Compare, Put] | None:
    """Return how a new epoch begins; None if the store has another one than `before`."""
    if found and found[0].value != before:
        return None
    fields = {"id": uuid.uuid4().hex} if before is None else {"id": uuid.uuid4().hex, "after": json.loads(before)["id"]}
    value = json.dumps(fields, separators=(",", ":"), sort_keys=True).encode()
    return Compare(EPOCH_KEY, CompareTarget.MOD, "=", found[0].mod_revision if found else 0), Put(EPOCH_KEY, value)


def require_epoch(value: bytes) -> bytes:
    """Return the value of an epoch. Raises StoreUnreachable if it is none."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        if value_checks.is_plain_text(value_checks.parse_json(value)["id"]):
            return value
    raise StoreUnreadable("the key epoch of etcd is not readable", remedy="see who wrote it; delete it, and have the nodes adopt etcd")


def build_epoch_compare(value: bytes) -> Compare:
    """Return the condition that the store is still the one of this epoch."""
    return Compare(EPOCH_KEY, CompareTarget.VALUE, "=", value)


# --- adoption ---------------------------------------------------------------------------------------------------------


def get_adoption_step(db: Database) -> AdoptionStep | None:
    """Return how far this node's adoption is; None without one."""
    found = db.get_meta("adoption")
    return None if found is None else AdoptionStep(found)


def set_adoption_step(db: Database, step: AdoptionStep | None) -> None:
    """Record how far this node's adoption is; None ends it."""
    db.set_meta("adoption", None if step is None else step.value)


def order_adoption(db: Database, *, is_last: bool) -> None:
    """Record that a person wants this node to adopt the store; `is_last`: no other node will."""
    with db.transaction():
        db.run("INSERT OR IGNORE INTO meta (key, value) VALUES ('adoption', ?)", AdoptionStep.ORDERED.value)
        if is_last:
            db.set_meta("adoption is last", 1)


def is_last_ordered(db: Database) -> bool:
    """Return True if a person has said that no other node will adopt the store."""
    return db.get_meta("adoption is last") is not None


def is_adopting(db: Database) -> bool:
    """Return True until all nodes have adopted the store: what it does not say need not be true."""
    epoch = get_epoch(db)
    return epoch is not None and b'"after"' in epoch and db.get_meta("adopted") != epoch.decode()


def require_adopted(db: Database) -> None:
    """Raise StoreUnreachable until all nodes have adopted the store."""
    if is_adopting(db):
        raise StoreUnreachable("nodes of the cluster have not adopted the store yet, which has lost its data")


def record_adopted(db: Database) -> None:
    """Record that all nodes have adopted the store."""
    with db.transaction():
        db.set_meta("adoption is last", None)
        db.run("INSERT OR REPLACE INTO meta (key, value) SELECT 'adopted', value FROM meta WHERE key = 'epoch'")


def list_node_numbers(db: Database) -> set[int]:
    """Return the numbers of all nodes that this catalog mentions."""
    shift = limits.ID_COUNTER_BITS
    return set(db.column(f"SELECT id >> {shift} FROM inode UNION SELECT id >> {shift} FROM content UNION SELECT number FROM peer")) - {0}


OutcomeCheck = Callable[[Outcome], Outcome]


class EpochCheckedStore:
    """A `Store`; leases and watches go as they are. `inner` is the store without any of this."""

    def __init__(self, store: Store, db: Database) -> None:
        self.inner = store
        self.grant, self.keep_alive, self.revoke, self.watch = store.grant, store.keep_alive, store.revoke, store.watch
        self.members, self.rotate_member, self.close = store.members, store.rotate_member, store.close
        self._db = db
        self._lock = threading.Lock()
        self._epoch_and_revision: tuple[bytes | None, int] = (None, 0)

    @property
    def epoch_and_revision(self) -> tuple[bytes | None, int]:
        """Return (epoch at the last request, highest revision answered since that epoch was met)."""
        return self._epoch_and_revision

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        _, epoch_gets, check = self._prepare(is_read=True)
        return check(self.inner.read([*epoch_gets, *gets], timeout_s=timeout_s))

    def read_soon(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> "Future[Outcome]":
        _, epoch_gets, check = self._prepare(is_read=True)
        return _check_when_done(self.inner.read_soon([*epoch_gets, *gets], timeout_s=timeout_s), check)

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Outcome:
        same, epoch_gets, check = self._prepare(is_read=False)
        return check(self.inner.commit([*same, *compares], changes, [*epoch_gets, *otherwise], timeout_s=timeout_s))

    def commit_soon(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> "Future[Outcome]":
        same, epoch_gets, check = self._prepare(is_read=False)
        return _check_when_done(self.inner.commit_soon([*same, *compares], changes, [*epoch_gets, *otherwise], timeout_s=timeout_s), check)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _load_expected(self) -> tuple[bytes | None, int]:
        """Return the epoch that the catalog knows, and the lowest revision that the store can have."""
        value = get_epoch(self._db)
        with self._lock:
            if value != self._epoch_and_revision[0]:
                self._epoch_and_revision = value, get_highest_revision(self._db)
            return self._epoch_and_revision

    def _prepare(self, *, is_read: bool) -> tuple[list[Compare], list[Get], OutcomeCheck]:
        """Return what to add to the conditions and the reads of a request, and the check of its answer."""
        value, revision_min = self._load_expected()
        if value is None:
            return [], [], lambda outcome: outcome

        def check(outcome: Outcome) -> Outcome:
            return self._check_outcome(outcome, value, revision_min, has_epoch=is_read or not outcome.succeeded)

        return [build_epoch_compare(value)], [Get(EPOCH_KEY)], check

    def _check_outcome(self, outcome: Outcome, value: bytes, revision_min: int, *, has_epoch: bool) -> Outcome:
        """Return the answer without what was added to the question. `has_epoch`: it begins with the epoch."""
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
    """Return a future with what `check` makes of the answer."""
    checked: Future[Outcome] = Future()
    checked.set_running_or_notify_cancel()

    def done(answered: "Future[Outcome]") -> None:
        try:
            checked.set_result(check(answered.result()))
        except Exception as failure:
            checked.set_exception(failure)

    future.add_done_callback(done)
    return checked
