"""The chain of one process's transactions: the fate of each is known, even if its answer was lost.

A commit that failed may be applied later: after commits that were sent later, and after reads that did not see it. So every transaction
puts the key of its chain, and compares its revision: of two transactions for one link at most one is applied.

If the fate of a transaction is unknown, a fence is sent for the same link: a transaction that puts only the key. It is applied, then the
late one never will be, or the key shows which one came first. The mount has the chain `w/<node>`, the write-back of the mover
`w/<node>/write_back`, its announcements of copies `w/<node>/copies`.

Crash safety: the last known link is in the catalog. The next process sends a fence first. The value of the key names what its transaction
deleted, which would look like changes of other nodes.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ckptfs.catalog import identity
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import LAST_COMMIT, SharedKey, decode_key, encode_fields, encode_key
from ckptfs.coherence.value_checks import parse_value
from ckptfs.errors import StoreLost, StoreUnreachable
from ckptfs.store.kv import WAIT_S, Compare, CompareTarget, Get, Operation, Outcome, Put, Transactions

MOUNT_CHAIN = b""
WRITE_BACK_CHAIN = b"write_back"
COPIES_CHAIN = b"copies"


@dataclass(frozen=True, slots=True)
class ChainLink:
    """The next link. `own_revision`: that of the last transaction of the chain that was no fence."""

    key: SharedKey
    revision: int
    sequence: int
    own_revision: int

    def build_compare(self) -> Compare:
        """Return the condition under which this link is free."""
        return Compare(encode_key(self.key), CompareTarget.MOD, "=", self.revision)

    def build_get(self) -> Get:
        return Get(encode_key(self.key))

    def build_put(self, deleted: Iterable[SharedKey] = ()) -> Put:
        """Return the change by which a transaction takes this link. `deleted`: the keys that it deletes."""
        names = [encode_key(key).decode("latin-1") for key in deleted]
        return Put(encode_key(self.key), encode_fields({"sequence": self.sequence, "deleted": names}))

    def build_fence(self) -> Put:
        """Return the change by which a fence takes this link."""
        return Put(encode_key(self.key), encode_fields({"sequence": self.sequence, "deleted": [], "fence": self.own_revision}))

    def require_kept(self, found: CachedValue) -> None:
        """Raise StoreLost if the store has an older link than the last one that is known."""
        if found.revision < self.revision:
            raise StoreLost(f"the store of the cluster was set back: it has an older {encode_key(self.key).decode()}")

    def is_taken(self, found: CachedValue) -> bool:
        """Return True if the key shows that a transaction of this process has taken the link, and no fence."""
        fields = found.fields or {}
        return found.revision > self.revision and fields.get("sequence") == self.sequence and "fence" not in fields


def load_next_link(db: Database, chain: bytes = MOUNT_CHAIN) -> ChainLink:
    """Return the link after the last one that is known of a chain of this node."""
    key = SharedKey(LAST_COMMIT, identity.get_node_number(db), chain)
    known = key_state.get_cached(db, key)
    return ChainLink(key, known.revision, (known.fields or {}).get("sequence", 0) + 1, get_own_revision(known))


def get_own_revision(link_value: CachedValue) -> int:
    """Return the revision of the last transaction that was no fence, as the key of the chain tells."""
    return int((link_value.fields or {}).get("fence", link_value.revision))


def list_deleted(link_value: CachedValue) -> list[SharedKey]:
    """Return the keys that the transaction deleted which took the link."""
    return [decode_key(raw.encode("latin-1")) for raw in (link_value.fields or {}).get("deleted", ())]


def parse_link(link: ChainLink, outcome: Outcome, put: Put) -> CachedValue:
    """Return the chain's key after a transaction that put `put`, or read the key first. Raises StoreLost."""
    if outcome.succeeded:
        return CachedValue(outcome.revision, put.value)
    items = outcome.results[0]
    found = CachedValue(items[0].mod_revision, parse_value(link.key, items[0])) if items else key_state.ABSENT
    link.require_kept(found)
    return found


class ChainedStore:
    """The store for commits that form one chain. A read sees what became of all commits before it."""

    def __init__(self, store: Transactions, db: Database, chain: bytes) -> None:
        self._store, self._db, self._chain = store, db, chain
        self._lock = threading.Lock()
        self._is_in_doubt = True

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        with self._lock:
            self._settle(timeout_s)
        return self._store.read(gets, timeout_s=timeout_s)

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Outcome:
        """Commit as the next link. One that was applied without an answer has succeeded, with no results."""
        with self._lock:
            self._settle(timeout_s)
            link = load_next_link(self._db, self._chain)
            put = link.build_put()
            self._is_in_doubt = True
            outcome = self._store.commit(
                [link.build_compare(), *compares], [*changes, put], [link.build_get(), *otherwise], timeout_s=timeout_s
            )
            found = parse_link(link, outcome, put)
            is_applied = link.is_taken(found)
            if outcome.is_repeated and not is_applied:
                self._settle(timeout_s)
                raise StoreUnreachable("a repeated transaction was refused")
            self._record(link, found)
        if outcome.succeeded:
            return outcome
        return Outcome(True, found.revision, ()) if is_applied else replace(outcome, results=outcome.results[1:])

    def _settle(self, timeout_s: float) -> None:
        """Send a fence if the fate of the last commit is unknown."""
        if self._is_in_doubt:
            link = load_next_link(self._db, self._chain)
            fence = link.build_fence()
            outcome = self._store.commit([link.build_compare()], [fence], [link.build_get()], timeout_s=timeout_s)
            self._record(link, parse_link(link, outcome, fence))

    def _record(self, link: ChainLink, found: CachedValue) -> None:
        if found.revision != link.revision:
            with self._db.transaction():
                key_state.set_cached(self._db, link.key, found)
        self._is_in_doubt = False
