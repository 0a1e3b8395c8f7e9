"""Placement: which nodes hold copies of which node's contents.

Pure, and equal on every node with the same view.

N1: cliques by `factor` and `jump` over the order of ranks, as in NVIDIA's CliqueReplicationStrategy, for any number of nodes. All nodes
form one ring; the peers of a node are the next ones in it. So each node holds contents of as many nodes as hold its own, and when a node
leaves, only nodes that relied on it choose another peer.

In the ring rank r is followed by rank r + jump, if it exists. If adjacent nodes would share a failure domain, the jump is doubled until
they do not; this suits racks that are numbered consecutively. If no jump helps, because domains do not follow ranks, the nodes of each
domain are spread evenly over the ring. Remaining conflicts are skipped.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ckptfs import limits
from ckptfs.clique.membership import ClusterView, Node

FEW_RATIO = 16
"""One conflict in so many nodes is accepted: the ring, and with it the peers of all nodes, is kept when a node leaves."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The order in which copies go from node to node. `jump` 0 means that domains are spread evenly."""

    nodes: tuple[Node, ...]
    positions: dict[int, int]
    jump: int
    domain_count: int

    def walk(self, number: int) -> Iterator[Node]:
        """Yield all nodes from the node `number` on; a dead node has a position too."""
        start = self.positions.get(number, number % max(1, len(self.nodes)))
        for place in range(start, start + len(self.nodes)):
            yield self.nodes[place - len(self.nodes) if place >= len(self.nodes) else place]


def choose_peers(view: ClusterView, number: int, factor: int, jump: int) -> tuple[Node, ...]:
    """Return the `factor - 1` nodes that hold copies for `number`, if possible in different domains."""
    key = ("peers", number, factor, jump)
    found: tuple[Node, ...] | None = view.placement_cache.get(key)
    if found is None:
        own = view.by_number.get(number)
        found = view.placement_cache[key] = _choose_next(get_ring(view, factor, jump), number, [own] if own is not None else [], factor - 1)
    return found


def choose_new_holders(view: ClusterView, holders: Collection[int], home: int, factor: int, jump: int) -> tuple[Node, ...]:
    """Return the nodes that need a copy of a content of `home`, best first; dead holders do not count."""
    start, kept, _ = _choose_counted(view, holders, home, factor, jump)
    return _choose_next(get_ring(view, factor, jump), start, kept, factor - len(kept))


def choose_superfluous(view: ClusterView, holders: Collection[int], home: int, factor: int, jump: int) -> tuple[Node, ...]:
    """Return holders that may drop their copy of a content of `home`; none while copies are missing."""
    _, kept, living = _choose_counted(view, holders, home, factor, jump)
    if choose_new_holders(view, holders, home, factor, jump):
        return ()
    return tuple(node for node in living if node not in kept)


def _choose_counted(view: ClusterView, holders: Collection[int], home: int, factor: int, jump: int) -> tuple[int, list[Node], list[Node]]:
    """Return (start on the ring, holders that count, all live holders).

    The home and its followers in different domains count first. If the home is dead, its first holder takes its position.
    """
    ring = get_ring(view, factor, jump)
    numbers = {holder for holder in holders if holder in view}
    start = home if home in view or not numbers else min(numbers)
    living = [node for node in ring.walk(start) if node.number in numbers] if numbers else []
    kept = _choose_apart(living, [], factor)
    missing = min(factor, ring.domain_count) - len(kept)
    more = max(0, factor - len(kept) - max(0, missing))
    return start, kept + [node for node in living if node not in kept][:more], living


def _choose_next(ring: Ring, number: int, holders: Sequence[Node], count: int) -> tuple[Node, ...]:
    """Return `count` nodes after `number`, first those in new domains, then the next ones."""
    if count <= 0:
        return ()
    apart = _choose_apart(ring.walk(number), holders, count, ring.domain_count)
    if len(apart) < count:
        taken = {node.number for node in (*holders, *apart)}
        apart += islice((node for node in ring.walk(number) if node.number not in taken), count - len(apart))
    return tuple(apart)


def _choose_apart(nodes: Iterable[Node], holders: Sequence[Node], count: int, domains: int = limits.NODE_NUMBER_MAX) -> list[Node]:
    """Return the first `count` nodes in different domains; end early once all `domains` are used."""
    used = {node.domain for node in holders}
    found: list[Node] = []
    for node in nodes:
        if len(found) >= count or len(used) >= domains:
            break
        if node.domain not in used:
            used.add(node.domain)
            found.append(node)
    return found


def get_ring(view: ClusterView, factor: int, jump: int) -> Ring:
    """Return the ring of this view; it is computed once."""
    key = ("ring", factor, jump)
    found: Ring | None = view.placement_cache.get(key)
    if found is None:
        nodes, used_jump = _arrange_nodes(view, factor, jump)
        places = {node.number: place for place, node in enumerate(nodes)}
        found = view.placement_cache[key] = Ring(tuple(nodes), places, used_jump, len({node.domain for node in nodes}))
    return found


def _arrange_nodes(view: ClusterView, factor: int, jump: int) -> tuple[list[Node], int]:
    """Return (nodes in ring order, the jump used, 0 for none)."""
    largest = max(Counter(node.domain for node in view.nodes).values(), default=0)
    if largest <= 1:
        return _order_by_jump(view, jump), jump
    few = len(view) // FEW_RATIO
    widest = 2 * max(jump, largest * _get_rank_spacing(view))
    wide = jump
    while wide <= widest:
        nodes = _order_by_jump(view, wide)
        if _count_conflicts(nodes, factor) <= few:
            return nodes, wide
        wide *= 2
    spread = _spread_evenly(view, jump)
    if _count_conflicts(spread, factor) <= few:
        return spread, 0
    return min((spread, _deal_columns(view, factor, jump)), key=lambda nodes: _count_conflicts(nodes, factor)), 0


def _order_by_jump(view: ClusterView, jump: int) -> list[Node]:
    return sorted(view.nodes, key=lambda node: (node.rank % jump, node.rank, node.name))


def _get_rank_spacing(view: ClusterView) -> int:
    """Return the average distance of ranks: 1 if there are no gaps."""
    return 1 + (view.nodes[-1].rank - view.nodes[0].rank) // len(view) if view.nodes else 1


def _count_conflicts(nodes: Sequence[Node], factor: int) -> int:
    """Return how many nodes have to skip another one."""
    count = len(nodes)
    reach = min(factor, count)
    domains = [node.domain for node in nodes] + [node.domain for node in nodes[: reach - 1]]
    return sum(len(set(domains[place : place + reach])) < reach for place in range(count))


def _list_by_domain(view: ClusterView, jump: int) -> list[list[Node]]:
    """Return the nodes of each domain, in the order of the jump."""
    members: dict[str, list[Node]] = {}
    for node in _order_by_jump(view, jump):
        members.setdefault(node.domain, []).append(node)
    return list(members.values())


def _spread_evenly(view: ClusterView, jump: int) -> list[Node]:
    """Spread the nodes of each domain evenly around the ring."""
    members = _list_by_domain(view, jump)
    placed = []
    for ordinal, nodes in enumerate(members):
        shift = (ordinal + 0.5) / len(members)
        placed += [((index + shift) / len(nodes), ordinal, node) for index, node in enumerate(nodes)]
    return [node for _, _, node in sorted(placed, key=lambda one: one[:2])]


def _deal_columns(view: ClusterView, factor: int, jump: int) -> list[Node]:
    """Deal the domains into `factor` columns and read row by row. A node that leaves moves all others."""
    line = [node for nodes in sorted(_list_by_domain(view, jump), key=len, reverse=True) for node in nodes]
    rows = len(line) // factor
    dealt = [line[column * rows + row] for row in range(rows) for column in range(factor)]
    for node in line[rows * factor :]:
        dealt.insert(next((place for place in range(len(dealt)) if not _is_domain_near(dealt, place, node.domain, factor - 1)), 0), node)
    return dealt


def _is_domain_near(nodes: Sequence[Node], place: int, domain: str, reach: int) -> bool:
    """Return True if a node of this domain is within `reach` of `place`."""
    return any(nodes[near % len(nodes)].domain == domain for near in range(place - reach, place + reach))
