"""Who lives, as far as this node knows: from what the store shows and tells, in doubt the last that was known.

Leases run out while the store cannot be reached by those who hold them. So a record that is missing means a death only as long as we are in
touch ourselves: what goes while we are not, or just after, counts for a while longer, in which its node can come back.
Pure but for its own state; one thread at a time. If we die here: the next one begins with the last World that was kept, in doubt.
"""

from collections.abc import Iterable

from ckptfs import limits
from ckptfs.clique.membership import ClusterView, Node, build_view

FOREVER = float("inf")


class MemberTable:
    """`now_s` is any clock that does not jump."""

    def __init__(self, own_node: Node, last_nodes: Iterable[Node] = ()) -> None:
        """`last` lived when a former process last looked."""
        self._own_node = own_node
        self._present = {node.number: node for node in last_nodes if node.number != own_node.number}
        self._absent: dict[int, tuple[Node, float]] = {}
        self._is_connected = False
        self._doubt_until_s = 0.0

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    def mark_disconnected(self) -> None:
        """The store does not answer."""
        self._is_connected = False

    def mark_connected(self, now_s: float) -> None:
        """The store answers. The others may need a moment to notice it as well."""
        if not self._is_connected:
            self._is_connected = True
            self._doubt_until_s = now_s + limits.NODE_RETURN_S
            self._absent = {number: (node, min(until_s, self._doubt_until_s)) for number, (node, until_s) in self._absent.items()}

    def mark_alive(self, node: Node) -> None:
        """Its record is there."""
        if node.number != self._own_node.number:
            self._present[node.number] = node
            self._absent.pop(node.number, None)

    def mark_gone(self, number: int, now_s: float) -> None:
        """Its record is not there any more."""
        node = self._present.pop(number, None)
        if node is not None and self._is_in_doubt(now_s):
            self._absent[number] = (node, self._doubt_until_s if self._is_connected else FOREVER)

    def replace_nodes(self, nodes: Iterable[Node], now_s: float) -> None:
        """These are all records that there are."""
        found = {node.number: node for node in nodes}
        for number in [number for number in self._present if number not in found]:
            self.mark_gone(number, now_s)
        for node in found.values():
            self.mark_alive(node)

    def delete_expired(self, now_s: float) -> None:
        """Those who did not come back in time are dead."""
        self._absent = {number: (node, until_s) for number, (node, until_s) in self._absent.items() if until_s > now_s}

    def next_due_s(self) -> float | None:
        """When `settle` has something to do."""
        due_s = min((until_s for _, until_s in self._absent.values()), default=FOREVER)
        return None if due_s == FOREVER else due_s

    def build_view(self) -> ClusterView:
        """Who lives, this node in any case."""
        return build_view([self._own_node, *self._present.values(), *(node for node, _ in self._absent.values())])

    def _is_in_doubt(self, now_s: float) -> bool:
        return not self._is_connected or now_s < self._doubt_until_s
