"""Who belongs to the cluster: `Node` and `World`, a node's number for ever, and its record while it lives.

A number is given once to each catalog, by a transaction, under the node's name; it is in the upper bits of every id that the node makes.
So a node whose catalog was lost gets another number: it must not make the ids of its former life again. The record `n/<number>` is
under a lease, which is what being alive means to the others. Two catalogs under one name are refused while the first one lives.
If we die here: a number that was taken and not kept is given to nobody else; the next start finds it under the node's name.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ckptfs import limits


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
    def order(self) -> tuple[int, str]:
        """Its place among all nodes."""
        return self.rank, self.name


@dataclass(frozen=True)
class World:
    """The nodes that live, in the order of their ranks, then names: a snapshot. `memo` is for placement, which is asked the same often."""

    nodes: tuple[Node, ...] = ()
    by_number: Mapping[int, Node] = field(init=False, compare=False, repr=False)
    memo: dict[Any, Any] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(sorted(self.nodes, key=lambda node: node.order)))
        object.__setattr__(self, "by_number", {node.number: node for node in self.nodes})

    def __contains__(self, number: object) -> bool:
        """Whether the node of this number lives."""
        return number in self.by_number

    def __len__(self) -> int:
        return len(self.nodes)


def world(nodes: Iterable[Node]) -> World:
    """The World of these nodes."""
    return World(tuple(nodes))


# --- records ---------------------------------------------------------------------------------------------------------

NODES = b"n/"


def node_key(number: int) -> bytes:
    """Where the record of a living node is."""
    return NODES + b"%08x" % number


def to_value(node: Node) -> bytes:
    """A record, as it is stored."""
    return json.dumps(asdict(node), separators=(",", ":")).encode()


def from_value(value: bytes) -> Node | None:
    """The node of a record; None for what is none, which a newer or broken node may have written."""
    try:
        found = json.loads(value)
        node = Node(
            number=int(found["number"]), name=str(found["name"]), address=str(found["address"]), rank=int(found["rank"]),
            domain=str(found["domain"]), capacity_bytes=int(found["capacity_bytes"]), incarnation=str(found["incarnation"]),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError):
        return None
    return node if 0 < node.number <= limits.NODE_NUMBER_MAX else None
