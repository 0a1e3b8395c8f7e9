"""Who belongs to the cluster: `Node`, `World`, and the records `n/<number>` by which living nodes know one another.

A record is under its node's lease, which is what being alive means to the others. Nothing here changes anything.
If we die here: nothing was changed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from ckptfs import limits
from ckptfs.catalog.store import Get, Store, prefix_end


@dataclass(frozen=True, slots=True)
class Node:
    """One node, as it describes itself. `domain` fails together; `incarnation` is "<its catalog>.<which start>"."""

    number: int
    name: str
    address: str
    rank: int
    domain: str
    capacity_bytes: int = 0
    incarnation: str = ""

    @property
    def sort_key(self) -> tuple[int, str]:
        """Its place among all nodes."""
        return self.rank, self.name


@dataclass(frozen=True)
class ClusterView:
    """The nodes that live, in the order of their ranks, then names: a snapshot. `memo` is for placement, which is asked the same often."""

    nodes: tuple[Node, ...] = ()
    by_number: Mapping[int, Node] = field(init=False, compare=False, repr=False)
    placement_cache: dict[Any, Any] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(sorted(self.nodes, key=lambda node: node.sort_key)))
        object.__setattr__(self, "by_number", {node.number: node for node in self.nodes})

    def __contains__(self, number: object) -> bool:
        """Whether the node of this number lives."""
        return number in self.by_number

    def __len__(self) -> int:
        return len(self.nodes)


def build_view(nodes: Iterable[Node]) -> ClusterView:
    """The World of these nodes."""
    return ClusterView(tuple(nodes))


@dataclass(frozen=True, slots=True)
class ViewChange:
    """One World followed by another. `returned`: nodes that live in both, and were started anew meanwhile."""

    before: ClusterView
    after: ClusterView

    @property
    def dead_nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.before.nodes if node.number not in self.after)

    @property
    def joined_nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.after.nodes if node.number not in self.before)

    @property
    def restarted_nodes(self) -> tuple[Node, ...]:
        both = (node for node in self.after.nodes if node.number in self.before)
        return tuple(node for node in both if node.incarnation != self.before.by_number[node.number].incarnation)


# --- records ---------------------------------------------------------------------------------------------------------

NODES_PREFIX = b"n/"
NODES_END = prefix_end(NODES_PREFIX)


def node_key(number: int) -> bytes:
    """Where the record of a living node is."""
    return NODES_PREFIX + b"%08x" % number


def load_nodes(store: Store) -> tuple[list[Node], int]:
    """(everybody who has a record, the revision at which that was so). Raises Compacted: begin again."""
    nodes: list[Node] = []
    revision, key = 0, NODES_PREFIX
    while True:
        outcome = store.read([Get(key, NODES_END, limit=limits.ETCD_PAGE_ITEMS, revision=revision)])
        revision = revision or outcome.revision
        items = outcome.results[0]
        nodes += (node for item in items if (node := decode_node(item.value)) is not None)
        if len(items) < limits.ETCD_PAGE_ITEMS:
            return nodes, revision
        key = items[-1].key + b"\0"


def list_live(store: Store, numbers: Sequence[int]) -> set[int]:
    """Those of these nodes that hold their leases, as the store says now."""
    results = store.read([Get(node_key(number)) for number in numbers]).results if numbers else ()
    return {number for number, items in zip(numbers, results, strict=True) if items}


def encode_node(node: Node) -> bytes:
    """A record, as it is stored. Every node reads every record, so it is short: fields have no names."""
    return json.dumps(astuple(node), separators=(",", ":")).encode()


def decode_node(value: bytes) -> Node | None:
    """The node of a record; None for what is none, which a newer or broken node may have written."""
    try:
        number, name, address, rank, domain, capacity_bytes, incarnation, *_ = json.loads(value)
        node = Node(int(number), str(name), str(address), int(rank), str(domain), int(capacity_bytes), str(incarnation))
    except (ValueError, TypeError):
        return None
    return node if 0 < node.number <= limits.NODE_NUMBER_MAX else None
