"""The cluster as a flow sees it: live nodes, the transport, the shared store, locks.

A lock is a key under the lease of its node, so that exactly one node does a piece of work and another takes it over after its death.
During long work the holder checks `Cluster.lease`: it is 0 as soon as the lease may have expired by the local clock, even if the store
cannot be asked. Transactions of the holder compare the lock (`build_guard`).

Crash safety: the lease expires, and another node acquires the lock.
"""

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ckptfs import limits
from ckptfs.catalog import remote_contents
from ckptfs.catalog.database import Database
from ckptfs.clique import placement
from ckptfs.clique.locations import ContentLocations, CopyRecords
from ckptfs.clique.membership import ClusterView, Node, NodeLease
from ckptfs.clique.peer_api import PeerApi
from ckptfs.errors import LeaseGone
from ckptfs.model import Content
from ckptfs.store.kv import Compare, CompareTarget, Delete, Get, Put, Store

LOCKS_PREFIX = b"claim/"


@dataclass(frozen=True, slots=True)
class ClusterLock:
    """A lock that is held; `revision` of its creation distinguishes it from other acquisitions."""

    name: str
    revision: int

    def build_guard(self) -> Compare:
        """Return a condition that holds as long as the lock is held."""
        return Compare(_build_key(self.name), CompareTarget.CREATE, "=", self.revision)


class ClusterLocks:
    """The locks of this node. Safe for several threads."""

    def __init__(self, store: Store, node_lease: NodeLease) -> None:
        self._store = store
        self.node_lease = node_lease

    def try_acquire(self, name: str) -> ClusterLock | None:
        """Return the lock, even if this node has it; None if another one has it, or without a lease."""
        lease = self.node_lease.lease_id
        if not lease:
            return None
        key, value = _build_key(name), b"%d %d" % (self.node_lease.node.number, lease)
        try:
            outcome = self._store.commit([Compare(key, CompareTarget.VERSION, "=", 0)], [Put(key, value, lease), Get(key)], [Get(key)])
        except LeaseGone:
            return None
        return next((ClusterLock(name, item.create_revision) for item in outcome.results[0] if item.value == value), None)

    def release(self, lock: ClusterLock) -> None:
        """Release the lock. Raises StoreUnreachable; the lock then ends with the lease."""
        self._store.commit([lock.build_guard()], [Delete(_build_key(lock.name))])


def _build_key(name: str) -> bytes:
    return LOCKS_PREFIX + name.encode()


@dataclass(frozen=True, slots=True)
class Cluster:
    """This node's number, its settings of replication, and the other nodes. `view`: the newest view."""

    db: Database
    node_number: int
    factor: int
    jump: int
    peers: PeerApi
    store: Store
    view: Callable[[], ClusterView]
    locks: ClusterLocks
    copy_records: CopyRecords = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "copy_records", CopyRecords(self.store, self.db, self.node_number))

    def lease(self) -> int:
        """Return this node's lease while it certainly holds, else 0. A new lease means that it was dead."""
        return self.locks.node_lease.lease_id

    def has_peers(self) -> bool:
        """Return True if there are other nodes that copies go to."""
        return len(self.view()) > 1 and self.factor > 1

    def draw_delay_s(self, at_most_s: float = limits.SPREAD_S_MAX, *, small_cluster_s: float = 0.0) -> float:
        """Return a random delay for what many nodes begin at one event.

        The bound grows with the number of nodes, from `small_cluster_s` on.
        """
        spread_s = limits.SPREAD_NODE_S * max(0, len(self.view()) - limits.SPREAD_FREE_NODES)
        return random.uniform(0.0, max(small_cluster_s, min(at_most_s, spread_s)))

    def hosts_contents_of(self, nodes: Iterable[Node]) -> bool:
        """Return whether this node hosts contents that these nodes made, or of which they had copies."""
        return any(remote_contents.list_hosted_with(self.db, node.number, 0, 1) for node in nodes)

    def is_ours_to_copy(self, content: Content, shared: ContentLocations) -> bool:
        """Return True if the writer is dead and this node is the first living holder, with too few copies."""
        view, remote_state = self.view(), shared.state
        if remote_state is None or shared.writer is None or shared.writer in view:
            return False
        # For a file that was open when its writer died, the last fsynced state counts.
        written = (remote_state.generation, remote_state.digest) if remote_state.digest is not None else shared.get_newest(view)
        if written != (content.generation, content.digest):
            return False
        living = {number for number in shared.list_holders_of(*written) if number in view} | {self.node_number}
        if not placement.choose_new_holders(view, living, shared.writer, self.factor, self.jump):
            return False
        return min(living) == self.node_number

    def choose_new_holders(self, holders: Collection[int], avoided: frozenset[int] = frozenset()) -> tuple[Node, ...]:
        """Return the nodes that need a copy of a content of this node, best first, without avoided ones."""
        view = self.view().build_without(avoided)
        return placement.choose_new_holders(view, holders, self.node_number, self.factor, self.jump)

    def list_live(self, numbers: list[int]) -> list[Node]:
        """Return those of these nodes that are alive, without this one, in the given order."""
        view = self.view()
        return [view.by_number[number] for number in numbers if number != self.node_number and number in view]
