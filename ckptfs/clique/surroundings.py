"""What a flow needs of the other nodes, in one value: who lives, how to reach them, what all of them share.

If we die here: nothing is kept here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ckptfs.catalog.store import Store
from ckptfs.clique.claims import Claim
from ckptfs.clique.membership import Node, World
from ckptfs.clique.peers import Peers


class Claiming(Protocol):
    """What exactly one node does. See `ckptfs.clique.claims`."""

    def take(self, what: str) -> Claim | None:
        """The claim, also when this node has it; None while another one does."""

    def release(self, claim: Claim) -> None:
        """Let another node have it."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """This node's number, how many copies it wants and where, and the others. `see` gives the newest World."""

    number: int
    factor: int
    jump: int
    peers: Peers
    store: Store
    see: Callable[[], World]
    claims: "Claiming | None" = None
    lease: Callable[[], int] = lambda: 1
    """The lease by which this node lives, while it surely holds; 0 otherwise. Another one than before: it was dead in between."""

    def others(self, numbers: list[int]) -> list[Node]:
        """Those of these nodes that live, without this one, in the order given."""
        world = self.see()
        return [world.by_number[number] for number in numbers if number != self.number and number in world]
