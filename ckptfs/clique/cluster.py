"""What a flow needs of the other nodes, in one value: who lives, how to reach them, what all of them share.

If we die here: nothing is kept here.

What exactly one node of the cluster does: it claims it, under the lease by which it lives, so a claim ends with its node.

A claim is a key that only one can create. Whoever acts on one for long asks `good` in between: it is False as soon as the lease may have
run out, by our own clock, also when the store cannot be asked. What only the claimer may change in the store compares the claim (`guard`).
If we die here: the lease runs out, and another node claims what was left undone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ckptfs.clique.membership import ClusterView, Node, NodeLease
from ckptfs.clique.peer_api import PeerApi
from ckptfs.errors import LeaseGone
from ckptfs.store.kv import Compare, CompareTarget, Delete, Get, Item, Put, Store

LOCKS_PREFIX = b"claim/"


@dataclass(frozen=True, slots=True)
class ClusterLock:
    """What is claimed; `revision` created it and tells it from every other claim of the same."""

    name: str
    lease: int
    revision: int

    def build_guard(self) -> Compare:
        """Holds as long as the claim does."""
        return Compare(_build_key(self.name), CompareTarget.CREATE, "=", self.revision)


class ClusterLocks:
    """This node's. Any thread may use it."""

    def __init__(self, store: Store, node_lease: NodeLease) -> None:
        self._store = store
        self._node_lease = node_lease

    def try_acquire(self, name: str) -> ClusterLock | None:
        """The claim, also when this node has it already; None while another node has it, or this one has no lease. Raises Unreachable."""
        lease = self._node_lease.lease_id
        if not lease:
            return None
        key, value = _build_key(name), _encode_value(self._node_lease.node.number, lease)
        try:
            taken = self._store.commit([Compare(key, CompareTarget.VERSION, "=", 0)], [Put(key, value, lease), Get(key)], [Get(key)])
        except LeaseGone:
            return None
        item = _get_first(taken.results[0])
        return ClusterLock(name, lease, item.create_revision) if item is not None and item.value == value else None

    def is_held(self, lock: ClusterLock) -> bool:
        """Whether it surely still holds."""
        return self._node_lease.lease_id == lock.lease

    def release(self, lock: ClusterLock) -> None:
        """Let another node have it. Raises Unreachable; then it ends with the lease."""
        self._store.commit([lock.build_guard()], [Delete(_build_key(lock.name))])

    def find_holder(self, name: str) -> int | None:
        """The number of the node that has it."""
        item = _get_first(self._store.read([Get(_build_key(name))]).results[0])
        return None if item is None else int(item.value.split(b" ")[0])


def _build_key(name: str) -> bytes:
    return LOCKS_PREFIX + name.encode()


def _encode_value(number: int, lease: int) -> bytes:
    return b"%d %d" % (number, lease)


def _get_first(items: tuple[Item, ...]) -> Item | None:
    return items[0] if items else None


class LockProvider(Protocol):
    """What exactly one node does. See `ckptfs.clique.claims`."""

    def try_acquire(self, name: str) -> ClusterLock | None:
        """The claim, also when this node has it; None while another one does."""

    def release(self, lock: ClusterLock) -> None:
        """Let another node have it."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """This node's number, how many copies it wants and where, and the others. `see` gives the newest World."""

    node_number: int
    factor: int
    jump: int
    peers: PeerApi
    store: Store
    view: Callable[[], ClusterView]
    claims: "LockProvider | None" = None
    lease: Callable[[], int] = lambda: 1
    """The lease by which this node lives, while it surely holds; 0 otherwise. Another one than before: it was dead in between."""

    def list_live(self, numbers: list[int]) -> list[Node]:
        """Those of these nodes that live, without this one, in the order given."""
        view = self.view()
        return [view.by_number[number] for number in numbers if number != self.node_number and number in view]
