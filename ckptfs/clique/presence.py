"""Owns this node's lease and the record under it, which is what being alive means to the others.

`beat` is called every few seconds: it keeps the lease, or takes a new one and puts the record anew when that is gone. The record is put
only while the node's name is still bound to this catalog, so of two daemons with one name at most one lives.
`until_s` is when the lease may have run out at the latest, by our own clock: what only a living node may do ends then (see `claims`).
If we die here: the lease runs out, and the others see us die.
"""

import contextlib
import time
from collections.abc import Callable

from ckptfs import limits
from ckptfs.catalog.store import Compare, CompareTarget, Put, Store
from ckptfs.clique.joining import NameTaken, NodeBinding, name_key
from ckptfs.clique.membership import Node, encode_node, node_key


def get_boot_clock_s() -> float:
    """A clock that goes on while the machine sleeps, as the store's does."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class NodeLease:
    """One node's. One thread calls `beat`; any thread may look."""

    def __init__(self, store: Store, node: Node, catalog: str, clock: Callable[[], float] = get_boot_clock_s) -> None:
        self.node = node
        self._store = store
        self._binding_value = NodeBinding(node.number, catalog).encode()
        self._clock = clock
        self._lease = (0, 0.0)
        self._revision = 0
        self._is_displaced = False

    @property
    def lease_id(self) -> int:
        """The lease, while it surely holds; 0 otherwise."""
        lease, until_s = self._lease
        return lease if self._clock() < until_s else 0

    @property
    def valid_until_s(self) -> float:
        """Until when it surely holds."""
        return self._lease[1]

    def renew(self) -> bool:
        """Live on; whether that needed a new lease. Raises NameTaken when another catalog has the name now, and what the store raises."""
        if self._is_displaced:
            raise NameTaken(
                f"another daemon runs with a copy of the catalog of node {self.node.name}",
                remedy="stop one of them for good, and give it an empty state directory; both make the same ids",
            )
        lease = self._lease[0]
        if lease and self._keep_alive(lease):
            return False
        self._lease = (0, 0.0)
        began_s = self._clock()
        lease = self._store.grant(limits.NODE_LEASE_S)
        try:
            self._put_record(lease)
        except BaseException:
            with contextlib.suppress(Exception):
                self._store.revoke(lease)
            raise
        self._lease = (lease, began_s + limits.NODE_LEASE_S)
        return True

    def record_seen_node(self, node: Node, revision: int) -> None:
        """A record was put in that revision. Another one under our number, after ours, is that of a second daemon with our catalog."""
        if node.number == self.node.number and node.incarnation != self.node.incarnation and 0 < self._revision < revision:
            self._is_displaced = True
            self._lease = (0, 0.0)

    def _keep_alive(self, lease: int) -> bool:
        # Counted from before we asked: the store begins the time later than that, never earlier.
        began_s = self._clock()
        left_s = self._store.keep_alive(lease)
        if left_s > 0:
            self._lease = (lease, began_s + min(left_s, limits.NODE_LEASE_S))
        return left_s > 0

    def _put_record(self, lease: int) -> None:
        name = name_key(self.node.name)
        record = Put(node_key(self.node.number), encode_node(self.node), lease)
        outcome = self._store.commit([Compare(name, CompareTarget.VALUE, "=", self._binding_value)], [record])
        if not outcome.succeeded:
            raise NameTaken(
                f"another daemon has joined the cluster as node {self.node.name}",
                remedy="give node=ANOTHER-NAME to one of them and start it again",
            )
        self._revision = outcome.revision
