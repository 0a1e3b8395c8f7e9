"""The interface of the shared key-value store: ordered keys, transactions, leases, watches.

Two implementations pass one contract suite: `ckptfs.store.etcd` and the memory store of the tests. Keys exclude the prefix of the
cluster. Every change gets a revision, which grows over the whole store. An item has the revisions of its creation and last change, and
transactions compare them.

A commit whose response was lost is sent again and may conflict with itself. A commit that timed out may still be applied, even after
later ones and after reads that did not see it. `ckptfs.coherence.chain` makes the fate of a commit known; code that goes another way must
tolerate that.

Crash safety: a transaction is applied or not; leases expire.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from ckptfs import limits

# The end of a range without end.
ENDLESS = b"\0"
WAIT_S = limits.ETCD_WAIT_S


def prefix_end(key: bytes) -> bytes:
    """Return the end of the range of all keys that begin with `key`."""
    kept = key.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else ENDLESS


@dataclass(frozen=True, slots=True)
class Item:
    """An existing key, at some revision."""

    key: bytes
    value: bytes
    mod_revision: int
    create_revision: int


@dataclass(frozen=True, slots=True)
class Get:
    """Read `key`, or the keys from `key` to `end`. `limit` 0 means all, `revision` 0 means now."""

    key: bytes
    end: bytes | None = None
    limit: int = 0
    keys_only: bool = False
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Set `key`. With a lease, the key expires with it. A transaction changes a key at most once."""

    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`, or the keys from `key` to `end` (exclusive). Missing keys are no error."""

    key: bytes
    end: bytes | None = None


Operation = Get | Put | Delete


class CompareTarget(StrEnum):
    """The compared part of a key, as etcd names it. Of a missing key it is 0; comparing its value fails."""

    VERSION = "version"
    CREATE = "create_revision"
    MOD = "mod_revision"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition on each key from `key` to `end`. VERSION = 0 holds for an empty range."""

    key: bytes
    target: CompareTarget
    relation: Literal["=", "!=", "<", ">"]
    value: int | bytes
    end: bytes | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a transaction: the revision after it, and the items of each Get that was executed.

    `is_repeated`: it was sent more than once. If it did not succeed, an earlier copy of it may still be applied.
    """

    succeeded: bool
    revision: int
    results: tuple[tuple[Item, ...], ...]
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """A key was put (`item`) or deleted (None)."""

    key: bytes
    revision: int
    item: Item | None


@dataclass(frozen=True, slots=True)
class WatchEvents:
    """Events of whole transactions, in order; all events up to `revision` have been delivered."""

    revision: int
    events: tuple[Event, ...]


class Watch(Iterator[WatchEvents], Protocol):
    """A blocking iterator. It ends with close(); it raises Compacted if events are no longer available."""

    def close(self) -> None:
        """End the iteration, from any thread, even while it waits."""


class Transactions(Protocol):
    """The calls that read and change keys: each ends within `timeout_s`, if need be by an error."""

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        """Read at the newest revision, in several transactions at that revision if one is not enough."""

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Outcome:
        """Apply `changes` if `compares` hold, else read `otherwise`; at most ETCD_TRANSACTION_MAX of each.

        Raises TransactionInvalid if the store can never do that.
        """


class Store(Transactions, Protocol):
    """A store, safe for several threads."""

    def read_soon(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Future[Outcome]:
        """Start `read`. The callbacks of the future run in a thread of the store and must not block."""

    def commit_soon(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = WAIT_S
    ) -> Future[Outcome]:
        """Start `commit`. The callbacks of the future run in a thread of the store and must not block."""

    def grant(self, ttl_s: int, *, timeout_s: float = WAIT_S) -> int:
        """Create a lease that expires `ttl_s` after its last renewal."""

    def keep_alive(self, lease: int, *, timeout_s: float = WAIT_S) -> float:
        """Renew a lease. Return its remaining seconds; 0.0 if it has expired, with its keys."""

    def revoke(self, lease: int, *, timeout_s: float = WAIT_S) -> None:
        """End a lease and delete its keys; an expired one is no error."""

    def watch(self, key: bytes, end: bytes | None, from_revision: int) -> Watch:
        """Watch a key or range from a revision (0: from now), across outages of the store."""

    def members(self) -> Sequence["Store"]:
        """Return one store for each member, which answers without the others; the caller closes them."""

    def rotate_member(self) -> None:
        """Prefer another member from now on."""

    def close(self) -> None:
        """Close connections. Watches end; waiting calls raise StoreUnreachable."""


def split_changes(changes: Sequence[Operation]) -> list[list[Operation]]:
    """Return the changes in transactions, each with room for one more operation."""
    size = limits.ETCD_OPERATIONS_MAX - 1
    return [list(changes[start : start + size]) for start in range(0, len(changes), size)]


def iter_pages(store: Transactions, prefix: bytes, *, keys_only: bool = False) -> Iterator[tuple[int, tuple[Item, ...]]]:
    """Yield (revision of the whole read, next items), at least once. Raises Compacted: start again."""
    revision, key = 0, prefix
    while True:
        outcome = store.read([Get(key, prefix_end(prefix), limit=limits.ETCD_PAGE_ITEMS, keys_only=keys_only, revision=revision)])
        revision, items = revision or outcome.revision, outcome.results[0]
        yield revision, items
        if len(items) < limits.ETCD_PAGE_ITEMS:
            return
        key = items[-1].key + b"\0"


def read_all(store: Transactions, prefix: bytes, *, keys_only: bool = False) -> tuple[int, list[Item]]:
    """Return (revision of the read, all items below `prefix`). Raises Compacted: start again."""
    pages = list(iter_pages(store, prefix, keys_only=keys_only))
    return pages[0][0], [item for _, items in pages for item in items]
