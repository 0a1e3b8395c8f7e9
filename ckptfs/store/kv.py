"""The store that the nodes of a cluster share, as they see it: ordered keys, transactions, leases, watches.

Two implementations pass one contract suite: `ckptfs.catalog.etcd` and the tests' memory store. Keys are given and answered
without the cluster's prefix. Every change gets a revision, a number that grows over the whole store; an item knows the one
that made it and the one that changed it last, and transactions compare these.
A commit whose answer was lost is sent once more, so it can conflict with itself: whoever reads `succeeded=False` looks
whether what it wanted is there already. One that was not answered in time may still be done, even after later ones: what is
put without a comparison must bear that. If we die here: a transaction is whole or absent, a lease runs out.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

from ckptfs import limits
from ckptfs.errors import Compacted as Compacted
from ckptfs.errors import LeaseGone as LeaseGone
from ckptfs.errors import StoreLost as StoreLost
from ckptfs.errors import StoreRefused as StoreRefused
from ckptfs.errors import StoreUnreachable as StoreUnreachable

# As the end of a range: no end.
ENDLESS = b"\0"
WAIT_S = limits.ETCD_WAIT_S


def prefix_end(key: bytes) -> bytes:
    """The end of the range of all keys that begin with `key`."""
    kept = key.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else ENDLESS


@dataclass(frozen=True, slots=True)
class Item:
    """A key that exists, at some revision."""

    key: bytes
    value: bytes
    mod_revision: int
    create_revision: int


@dataclass(frozen=True, slots=True)
class Get:
    """Read `key`, or the keys from `key` up to before `end`, in order; `limit` 0 is all. `revision`: as it was then (0: now)."""

    key: bytes
    end: bytes | None = None
    limit: int = 0
    keys_only: bool = False
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Put:
    """Give `key` this value; with a lease it goes when the lease does. One transaction changes a key once."""

    key: bytes
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`, or the keys from `key` up to before `end`; what is not there is no error."""

    key: bytes
    end: bytes | None = None


Operation = Get | Put | Delete


class CompareTarget(IntEnum):
    """What a Compare looks at. A key that does not exist has 0 for all but the value, and fails every comparison of values."""

    VERSION = 0
    CREATE = 1
    MOD = 2
    VALUE = 3


@dataclass(frozen=True, slots=True)
class Compare:
    """`key`'s (or each key's of the range up to before `end`) target stands in this relation to `value`.

    VERSION = 0 over a range holds where the range is empty.
    """

    key: bytes
    target: CompareTarget
    relation: Literal["=", "!=", "<", ">"]
    value: int | bytes
    end: bytes | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a transaction came to: the store's revision after it, and what each Get of the branch taken found, in order."""

    succeeded: bool
    revision: int
    results: tuple[tuple[Item, ...], ...]


@dataclass(frozen=True, slots=True)
class Event:
    """A key was put (`item`), or deleted (None)."""

    key: bytes
    revision: int
    item: Item | None


@dataclass(frozen=True, slots=True)
class WatchEvents:
    """Events in order, whole transactions; everything up to `revision` has been told."""

    revision: int
    events: tuple[Event, ...]


class Watch(Iterator[WatchEvents], Protocol):
    """Blocks until there are events. It ends with close(), from any thread; Compacted when what it should tell is gone."""

    def close(self) -> None:
        """End the iteration, also one that waits right now."""


class Store(Protocol):
    """Safe to use from several threads. Every call ends within `timeout_s`: with an answer, Unreachable, or StoreRefused."""

    def read(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Outcome:
        """All of one revision, which is the newest. More than fit one transaction are read in several, at that revision."""

    def commit(
        self,
        compares: Sequence[Compare],
        changes: Sequence[Operation],
        otherwise: Sequence[Get] = (),
        *,
        timeout_s: float = WAIT_S,
    ) -> Outcome:
        """Do `changes` if all of `compares` hold, else read `otherwise`. At most ETCD_TRANSACTION_MAX of each."""

    def read_soon(self, gets: Sequence[Get], *, timeout_s: float = WAIT_S) -> Future[Outcome]:
        """`read` without waiting. The future's callbacks run in a thread of the store's and must not block."""

    def commit_soon(
        self,
        compares: Sequence[Compare],
        changes: Sequence[Operation],
        otherwise: Sequence[Get] = (),
        *,
        timeout_s: float = WAIT_S,
    ) -> Future[Outcome]:
        """`commit` without waiting. The future's callbacks run in a thread of the store's and must not block."""

    def grant(self, ttl_s: int, *, timeout_s: float = WAIT_S) -> int:
        """A new lease, which runs out `ttl_s` after it was granted or kept alive last."""

    def keep_alive(self, lease: int, *, timeout_s: float = WAIT_S) -> float:
        """Begin the lease's time again. The seconds it has now; 0.0: it is gone, and its keys with it."""

    def revoke(self, lease: int, *, timeout_s: float = WAIT_S) -> None:
        """End the lease now, with its keys; one that is gone is no error."""

    def watch(self, key: bytes, end: bytes | None, from_revision: int) -> Watch:
        """Every change of `key` (or the range) from that revision on (0: from now), also across outages of the store."""

    def members(self) -> Sequence["Store"]:
        """This store at each of its addresses alone, without help of the others; whoever asked closes them."""

    def rotate_member(self) -> None:
        """Ask another member first from now on."""

    def close(self) -> None:
        """Give up connections; watches end, calls that wait fail with Unreachable."""


def iter_range(store: Store, key: bytes, end: bytes, *, keys_only: bool = False, timeout_s: float = WAIT_S) -> Iterator[tuple[int, Item]]:
    """Every item of a range that may be long, page by page, each with the revision that all of it is of. Compacted: begin again."""
    revision = 0
    while True:
        get = Get(key, end, limit=limits.ETCD_PAGE_ITEMS, keys_only=keys_only, revision=revision)
        outcome = store.read([get], timeout_s=timeout_s)
        revision = revision or outcome.revision
        for item in outcome.results[0]:
            yield revision, item
        if len(outcome.results[0]) < limits.ETCD_PAGE_ITEMS:
            return
        key = outcome.results[0][-1].key + b"\0"
