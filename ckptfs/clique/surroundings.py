"""What a flow needs of the other nodes, in one value: who lives, how to reach them, what all of them share.

If we die here: nothing is kept here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ckptfs.catalog.store import Store
from ckptfs.clique.membership import Node, World
from ckptfs.clique.peers import Peers


@dataclass(frozen=True, slots=True)
class Surroundings:
    """This node's number, how many copies it wants and where, and the others. `see` gives the newest World."""

    number: int
    factor: int
    jump: int
    peers: Peers
    store: Store
    see: Callable[[], World]

    def others(self, numbers: list[int]) -> list[Node]:
        """Those of these nodes that live, without this one, in the order given."""
        world = self.see()
        return [world.by_number[number] for number in numbers if number != self.number and number in world]
