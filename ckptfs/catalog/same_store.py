"""A way to the shared store that makes sure that it still is the one that the catalog knows: any other one does not answer.

Every question reads the epoch as well, every change compares it; no round trip is added. An answer that was asked for when the store was
known to be at some revision and is older than that comes from a store that was set back. Both raise StoreLost.
If we die here: nothing is kept here; what the catalog remembers is in `ckptfs.catalog.epoch`.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from ckptfs.catalog import epoch
from ckptfs.catalog.database import Database
from ckptfs.catalog.store import WAIT_S, Compare, CompareTarget, Get, Item, Operation, Outcome, Store, Watch
from ckptfs.errors import StoreLost

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
        value = epoch.get_epoch(self._db)
        with self._lock:
            if value != self._epoch_and_revision[0]:
                self._epoch_and_revision = value, epoch.get_highest_revision(self._db)
            return self._epoch_and_revision

    def _prepare_read(self) -> tuple[list[Get], OutcomeCheck]:
        value, revision_min = self._load_expected()
        if value is None:
            return [], lambda outcome: outcome
        return [Get(epoch.EPOCH_KEY)], lambda outcome: self._check_outcome(outcome, value, revision_min, has_epoch=True)

    def _prepare_commit(self) -> tuple[list[Compare], list[Get], OutcomeCheck]:
        value, revision_min = self._load_expected()
        if value is None:
            return [], [], lambda outcome: outcome
        same = Compare(epoch.EPOCH_KEY, CompareTarget.VALUE, "=", value)
        return (
            [same],
            [Get(epoch.EPOCH_KEY)],
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
        return Outcome(outcome.succeeded, outcome.revision, outcome.results[1:] if has_epoch else outcome.results)


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
