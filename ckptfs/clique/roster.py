"""Who lives, as far as this node knows: from what the store shows and tells, in doubt the last that was known.

Leases run out while the store cannot be reached by those who hold them. So a record that is missing means a death only as long as we are in
touch ourselves: what goes while we are not, or just after, counts for a while longer, in which its node can come back.
Pure but for its own state; one thread at a time. If we die here: the next one begins with the last World that was kept, in doubt.
"""

from collections.abc import Iterable

from ckptfs import limits
from ckptfs.clique.membership import Node, World, world

FOREVER = float("inf")


class Roster:
    """`now_s` is any clock that does not jump."""

    def __init__(self, here: Node, last: Iterable[Node] = ()) -> None:
        """`last` lived when a former process last looked."""
        self._here = here
        self._present = {node.number: node for node in last if node.number != here.number}
        self._absent: dict[int, tuple[Node, float]] = {}
        self._in_touch = False
        self._doubt_until_s = 0.0

    @property
    def in_touch(self) -> bool:
        return self._in_touch

    def out_of_touch(self) -> None:
        """The store does not answer."""
        self._in_touch = False

    def answered(self, now_s: float) -> None:
        """The store answers. The others may need a moment to notice it as well."""
        if not self._in_touch:
            self._in_touch = True
            self._doubt_until_s = now_s + limits.NODE_RETURN_S
            self._absent = {number: (node, min(until_s, self._doubt_until_s)) for number, (node, until_s) in self._absent.items()}

    def lives(self, node: Node) -> None:
        """Its record is there."""
        if node.number != self._here.number:
            self._present[node.number] = node
            self._absent.pop(node.number, None)

    def gone(self, number: int, now_s: float) -> None:
        """Its record is not there any more."""
        node = self._present.pop(number, None)
        if node is not None and self._in_doubt(now_s):
            self._absent[number] = (node, self._doubt_until_s if self._in_touch else FOREVER)

    def read(self, nodes: Iterable[Node], now_s: float) -> None:
        """These are all records that there are."""
        found = {node.number: node for node in nodes}
        for number in [number for number in self._present if number not in found]:
            self.gone(number, now_s)
        for node in found.values():
            self.lives(node)

    def settle(self, now_s: float) -> None:
        """Those who did not come back in time are dead."""
        self._absent = {number: (node, until_s) for number, (node, until_s) in self._absent.items() if until_s > now_s}

    def due_s(self) -> float | None:
        """When `settle` has something to do."""
        due_s = min((until_s for _, until_s in self._absent.values()), default=FOREVER)
        return None if due_s == FOREVER else due_s

    def world(self) -> World:
        """Who lives, this node in any case."""
        return world([self._here, *self._present.values(), *(node for node, _ in self._absent.values())])

    def _in_doubt(self, now_s: float) -> bool:
        return not self._in_touch or now_s < self._doubt_until_s
