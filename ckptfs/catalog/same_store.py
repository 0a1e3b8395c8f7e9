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
from ckptfs.catalog.store import WAIT_S, Compare, Get, Item, Operation, Outcome, Store, Target, Watch
from ckptfs.errors import StoreLost

Check = Callable[[Outcome], Outcome]


class SameStore:
    """A `Store`; leases and watches go as they are. `plain` is the store without any of this."""

    def __init__(self, store: Store, db: Database) -> None:
        self.plain = store
        self._db = db
        self._lock = threading.Lock()
        self._known: tuple[bytes | None, int] = (None, 0)

    @property
    def reached(self) -> tuple[bytes | None, int]:
        """(the epoch that was known when something was asked last, the highest revision that was answered since it was met)."""
        return self._known

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        more, check = self._reading()
        return check(self.plain.read([*more, *gets], timeout_s=timeout_s))

    def read_soon(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> "Future[Outcome]":
        more, check = self._reading()
        return _checked(self.plain.read_soon([*more, *gets], timeout_s=timeout_s), check)

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Outcome:
        same, more, check = self._changing()
        return check(self.plain.commit([*same, *compares], changes, [*more, *otherwise], timeout_s=timeout_s))

    def commit_soon(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> "Future[Outcome]":
        same, more, check = self._changing()
        return _checked(self.plain.commit_soon([*same, *compares], changes, [*more, *otherwise], timeout_s=timeout_s), check)

    def grant(self, ttl_s: int, *, timeout_s: float = WAIT_S) -> int:
        return self.plain.grant(ttl_s, timeout_s=timeout_s)

    def keep_alive(self, lease: int, *, timeout_s: float = WAIT_S) -> float:
        return self.plain.keep_alive(lease, timeout_s=timeout_s)

    def revoke(self, lease: int, *, timeout_s: float = WAIT_S) -> None:
        self.plain.revoke(lease, timeout_s=timeout_s)

    def watch(self, key: bytes, end: bytes | None, from_revision: int) -> Watch:
        return self.plain.watch(key, end, from_revision)

    def members(self) -> Sequence[Store]:
        return self.plain.members()

    def turn(self) -> None:
        self.plain.turn()

    def close(self) -> None:
        self.plain.close()

    # --- looking ------------------------------------------------------------------------------------------------------

    def _expected(self) -> tuple[bytes | None, int]:
        """The epoch that the catalog knows, and the revision at which the store surely is."""
        value = epoch.known(self._db)
        with self._lock:
            if value != self._known[0]:
                self._known = value, epoch.revision(self._db)
            return self._known

    def _reading(self) -> tuple[list[Get], Check]:
        value, least = self._expected()
        if value is None:
            return [], lambda outcome: outcome
        return [Get(epoch.EPOCH)], lambda outcome: self._checked(outcome, value, least, asked=True)

    def _changing(self) -> tuple[list[Compare], list[Get], Check]:
        value, least = self._expected()
        if value is None:
            return [], [], lambda outcome: outcome
        same = Compare(epoch.EPOCH, Target.VALUE, "=", value)
        return [same], [Get(epoch.EPOCH)], lambda outcome: self._checked(outcome, value, least, asked=not outcome.succeeded)

    def _checked(self, outcome: Outcome, value: bytes, least: int, *, asked: bool) -> Outcome:
        """The answer, without what was asked on top; `asked`: it begins with the epoch."""
        found: tuple[Item, ...] = outcome.results[0] if asked else ()
        trouble = ""
        if asked and not found:
            trouble = "the store of the cluster has lost its data"
        elif asked and found[0].value != value:
            trouble = "the store of the cluster is another one than before: it has lost data"
        elif outcome.revision < least:
            trouble = f"the store of the cluster was set back from revision {least} to {outcome.revision}"
        if trouble:
            self.plain.turn()  # Perhaps it is only this member that is not one of them any more.
            raise StoreLost(trouble)
        with self._lock:
            if self._known[0] == value:
                self._known = value, max(self._known[1], outcome.revision)
        return Outcome(outcome.succeeded, outcome.revision, outcome.results[1:] if asked else outcome.results)


def _checked(future: "Future[Outcome]", check: Check) -> "Future[Outcome]":
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
