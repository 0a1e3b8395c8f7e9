"""What a flow needs of the other nodes, in one value: who lives, how to reach them, what all of them share.

If we die here: nothing is kept here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ckptfs.catalog.store import Store
from ckptfs.clique.claims import ClusterLock
from ckptfs.clique.membership import ClusterView, Node
from ckptfs.clique.peers import PeerApi


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
