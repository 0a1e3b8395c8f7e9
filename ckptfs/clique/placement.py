"""Decides which nodes hold whose contents: pure, the same on every node that sees the same World.

N1: cliques by `factor` and `jump` over the order of ranks, as NVIDIA's CliqueReplicationStrategy names them, for any number of nodes. All
nodes stand in one ring, and a node's peers are the next ones in it: so each node holds the contents of as many others as hold its own, and
when a node leaves, only those who counted on it look for another. In the ring rank r is followed by rank r + jump, as long as there is
one. Where neighbours in that ring would fail together, the jump is doubled until they do not, which suits racks that are numbered one
after the other. Where no jump does, because labels do not follow ranks, each failure domain's nodes are spread evenly over the ring.
What is still in the way is stepped over. If we die here: nothing was changed.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from ckptfs import limits
from ckptfs.clique.membership import ClusterView, Node

FEW_RATIO = 16
"""A ring in which one of so many nodes has to step over somebody is good enough: keeping it keeps everybody's peers when a node leaves."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The order in which copies go from node to node. `jump` 0: domains are spread evenly."""

    nodes: tuple[Node, ...]
    positions: dict[int, int]
    jump: int
    domain_count: int

    def walk(self, number: int) -> Iterator[Node]:
        """All nodes, beginning with the node `number`; one that does not live stands somewhere."""
        start = self.positions.get(number, number % max(1, len(self.nodes)))
        for place in range(start, start + len(self.nodes)):
            yield self.nodes[place - len(self.nodes) if place >= len(self.nodes) else place]


def choose_peers(view: ClusterView, number: int, factor: int, jump: int) -> tuple[Node, ...]:
    """Who holds copies for the node `number`, best first: `factor - 1` nodes, or as many as there are.

    No two of them, nor one of them and the node itself, fail together, as long as there are domains enough.
    """
    key = ("peers", number, factor, jump)
    found: tuple[Node, ...] | None = view.placement_cache.get(key)
    if found is None:
        here = view.by_number.get(number)
        found = view.placement_cache[key] = _choose_next(
            get_ring(view, factor, jump), number, [here] if here is not None else [], factor - 1
        )
    return found


def choose_new_holders(view: ClusterView, holders: Collection[int], home: int, factor: int, jump: int) -> tuple[Node, ...]:
    """Who should get a copy of a content of the node `home` that the nodes `holders` have, best first; nobody when there are enough.

    Holders that do not live do not count. Copies that all fail together are too few, however many they are, while there is another domain.
    """
    start, kept, _ = _choose_counted(view, holders, home, factor, jump)
    return _choose_next(get_ring(view, factor, jump), start, kept, factor - len(kept))


def choose_superfluous(view: ClusterView, holders: Collection[int], home: int, factor: int, jump: int) -> tuple[Node, ...]:
    """Which holders may drop their copy of a content of `home`, because others that live are enough; nobody while copies are wanted."""
    _, kept, living = _choose_counted(view, holders, home, factor, jump)
    if choose_new_holders(view, holders, home, factor, jump):
        return ()
    return tuple(node for node in living if node not in kept)


def list_sources(view: ClusterView, number: int, factor: int, jump: int) -> tuple[Node, ...]:
    """For whom the node `number` holds copies. Looks at every node: for status, not for the path of a file."""
    return tuple(node for node in view.nodes if any(peer.number == number for peer in choose_peers(view, node.number, factor, jump)))


def _choose_counted(view: ClusterView, holders: Collection[int], home: int, factor: int, jump: int) -> tuple[int, list[Node], list[Node]]:
    """(where on the ring to look for more, the holders that count, all that live): the home and whoever follows it, in different domains.

    A home that does not live has no place in the ring: its first holder stands for it.
    """
    order = get_ring(view, factor, jump)
    numbers = {holder for holder in holders if holder in view}
    start = home if home in view or not numbers else min(numbers)
    living = [node for node in order.walk(start) if node.number in numbers] if numbers else []
    kept = _choose_apart(living, [], factor)
    lacking = min(factor, order.domain_count) - len(kept)
    more = max(0, factor - len(kept) - max(0, lacking))
    return start, kept + [node for node in living if node not in kept][:more], living


# --- choosing --------------------------------------------------------------------------------------------------------


def _choose_next(order: Ring, number: int, holders: Sequence[Node], count: int) -> tuple[Node, ...]:
    """The next `count` nodes after `number` that share no domain with `holders` or one another; then, of the rest, the next."""
    if count <= 0:
        return ()
    apart = _choose_apart(order.walk(number), holders, count, order.domain_count)
    if len(apart) < count:
        taken = {node.number for node in (*holders, *apart)}
        apart += islice((node for node in order.walk(number) if node.number not in taken), count - len(apart))
    return tuple(apart)


def _choose_apart(nodes: Iterable[Node], holders: Sequence[Node], count: int, domains: int = limits.NODE_NUMBER_MAX) -> list[Node]:
    """The first `count` of `nodes` of whose domains there is none yet; ends early once all `domains` there are have been used."""
    used = {node.domain for node in holders}
    found: list[Node] = []
    for node in nodes:
        if len(found) >= count or len(used) >= domains:
            break
        if node.domain not in used:
            used.add(node.domain)
            found.append(node)
    return found


# --- the ring --------------------------------------------------------------------------------------------------------


def get_ring(view: ClusterView, factor: int, jump: int) -> Ring:
    """The ring of this World; it is computed once."""
    key = ("ring", factor, jump)
    found: Ring | None = view.placement_cache.get(key)
    if found is None:
        nodes, used_jump = _arrange_nodes(view, factor, jump)
        places = {node.number: place for place, node in enumerate(nodes)}
        found = view.placement_cache[key] = Ring(tuple(nodes), places, used_jump, len({node.domain for node in nodes}))
    return found


def _arrange_nodes(view: ClusterView, factor: int, jump: int) -> tuple[list[Node], int]:
    """(the nodes in the ring's order, the jump that is used, 0 for none)."""
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
    """How far apart ranks are on the whole: 1 where all are taken."""
    return 1 + (view.nodes[-1].rank - view.nodes[0].rank) // len(view) if view.nodes else 1


def _count_conflicts(nodes: Sequence[Node], factor: int) -> int:
    """How many nodes would have to step over somebody."""
    count = len(nodes)
    reach = min(factor, count)
    domains = [node.domain for node in nodes] + [node.domain for node in nodes[: reach - 1]]
    return sum(len(set(domains[place : place + reach])) < reach for place in range(count))


def _list_by_domain(view: ClusterView, jump: int) -> list[list[Node]]:
    """The nodes of each domain, in the ring's order otherwise."""
    members: dict[str, list[Node]] = {}
    for node in _order_by_jump(view, jump):
        members.setdefault(node.domain, []).append(node)
    return list(members.values())


def _spread_evenly(view: ClusterView, jump: int) -> list[Node]:
    """Each domain's nodes at even distances around the ring, the domains side by side."""
    members = _list_by_domain(view, jump)
    placed = []
    for ordinal, nodes in enumerate(members):
        shift = (ordinal + 0.5) / len(members)
        placed += [((index + shift) / len(nodes), ordinal, node) for index, node in enumerate(nodes)]
    return [node for _, _, node in sorted(placed, key=lambda one: one[:2])]


def _deal_columns(view: ClusterView, factor: int, jump: int) -> list[Node]:
    """One domain after the other, the largest first, cut into `factor` columns that are read row by row.

    No two in `factor` neighbours fail together, if that is possible at all. But one node's leaving moves everybody.
    """
    line = [node for nodes in sorted(_list_by_domain(view, jump), key=len, reverse=True) for node in nodes]
    rows = len(line) // factor
    dealt = [line[column * rows + row] for row in range(rows) for column in range(factor)]
    for node in line[rows * factor :]:
        dealt.insert(next((place for place in range(len(dealt)) if not _is_domain_near(dealt, place, node.domain, factor - 1)), 0), node)
    return dealt


def _is_domain_near(nodes: Sequence[Node], place: int, domain: str, reach: int) -> bool:
    """Whether somebody of this domain is among the `reach` nodes before `place`, or from it on."""
    return any(nodes[near % len(nodes)].domain == domain for near in range(place - reach, place + reach))
