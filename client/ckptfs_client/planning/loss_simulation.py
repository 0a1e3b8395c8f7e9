"""How likely the loss of a checkpoint set is, simulated with the product's placement (G7). Pure.

A set has one shard for each node. Its copies are on the node and its peers when the window begins, and the window ends when the set is on
the PFS. Nodes fail at random, each on its own and with its failure domain. A shard is lost once all nodes that hold it are down. A node
that has failed counts as down until its copies are remade elsewhere, `repair_s` later.

Losses are so rare that plain trials would never meet one. A trial therefore begins with a failure and follows only the nodes that share a
shard with those that are down. Their failures are drawn more often than they are, and the trial counts by the ratio of the likelihoods:
importance sampling with forced failures, which leaves the expected value as it is. Failures that share no shard are independent, so losses
are a Poisson process, and the probability is 1 - e^-(expected number of trials with a loss in the window).
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ckptfs.clique.membership import ClusterView, Node, build_view
from ckptfs.clique.placement import choose_new_holders, choose_peers, get_ring

Z_95 = 1.959964
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class LossModel:
    """What fails how often, and how long a set depends on its copies. Times in seconds.

    `domain_count` 0: each node is a failure domain of its own. `domain_mtbf_s` is that of one domain as a whole; infinite: none fails.
    """

    node_count: int
    factor: int
    jump: int
    domain_count: int
    node_mtbf_s: float
    domain_mtbf_s: float
    repair_s: float
    window_s: float

    @property
    def node_rate(self) -> float:
        return 1 / self.node_mtbf_s

    @property
    def domain_rate(self) -> float:
        return 1 / self.domain_mtbf_s

    @property
    def domains(self) -> int:
        return self.domain_count or self.node_count


@dataclass(frozen=True, slots=True)
class LossEstimate:
    """The probability that the set is lost, and its 95 % confidence interval; None: no loss was met."""

    probability: float | None
    low: float | None
    high: float | None


class CopyPlacement:
    """Which node holds which shard, as the product places them.

    Nodes and shards are numbered from 0; ranks follow the domains.
    """

    def __init__(self, model: LossModel) -> None:
        self.model = model
        self.domain_of = [place * model.domains // model.node_count for place in range(model.node_count)]
        self.members: list[list[int]] = [[] for _ in range(model.domains)]
        for place, domain in enumerate(self.domain_of):
            self.members[domain].append(place)
        self.view = build_view(Node(place + 1, f"n{place:07}", "", place, str(domain)) for place, domain in enumerate(self.domain_of))
        peers = (choose_peers(self.view, place + 1, model.factor, model.jump) for place in range(model.node_count))
        self.holders = [(place, *(peer.number - 1 for peer in found)) for place, found in enumerate(peers)]
        self.shards_of: list[list[int]] = [[] for _ in range(model.node_count)]
        for shard, places in enumerate(self.holders):
            for place in places:
                self.shards_of[place].append(shard)

    @property
    def copies(self) -> int:
        """How many copies each shard has."""
        return len(self.holders[0])

    @property
    def group_count(self) -> int:
        """How many different groups of nodes hold shards; one if each node holds all."""
        return len(set(map(frozenset, self.holders)))

    @property
    def jump(self) -> int:
        """The jump that the placement uses; 0: it spreads the domains evenly."""
        return get_ring(self.view, self.model.factor, self.model.jump).jump

    @property
    def load_max(self) -> int:
        """The most copies that a node holds, its own included."""
        return max(map(len, self.shards_of))

    @property
    def threat_rate(self) -> float:
        """How often nodes and domains fail that share shards with a node, or a domain, that has failed."""
        first = self.members[0] if self.model.domain_rate else [0]
        return self.list_threats(dict.fromkeys(first, 0.0)).rate

    @cached_property
    def load_max_after(self) -> int:
        """The most copies that a node holds after the first domain has failed and what it held is remade."""
        dead = set(self.members[0])
        if len(dead) == len(self.view):
            return 0
        view = ClusterView(tuple(node for node in self.view.nodes if node.number - 1 not in dead))
        load = [0 if place in dead else len(shards) for place, shards in enumerate(self.shards_of)]
        for shard in {shard for place in dead for shard in self.shards_of[place]}:
            living = [place + 1 for place in self.holders[shard] if place not in dead]
            for node in choose_new_holders(view, living, shard + 1, self.model.factor, self.model.jump) if living else ():
                load[node.number - 1] += 1
        return max(load)

    def has_lost(self, fallen: Iterable[int], down: dict[int, float]) -> bool:
        """Return True if all nodes that hold a shard of one of `fallen` are down."""
        return any(all(place in down for place in self.holders[shard]) for one in fallen for shard in self.shards_of[one])

    def list_threats(self, down: dict[int, float]) -> "Threats":
        """Return what may fail next that matters: nodes that share a shard with one that is down."""
        nodes = {place for one in down for shard in self.shards_of[one] for place in self.holders[shard] if place not in down}
        domains = {self.domain_of[place] for place in nodes} if self.model.domain_rate else set()
        rate = len(nodes) * self.model.node_rate + len(domains) * self.model.domain_rate
        return Threats(tuple(nodes), tuple(domains), rate)


@dataclass(frozen=True, slots=True)
class Threats:
    """Nodes and domains, and how often one of them fails."""

    nodes: tuple[int, ...]
    domains: tuple[int, ...]
    rate: float


class LossSimulation:
    """Draws trials. The same seed gives the same estimate."""

    def __init__(self, copies: CopyPlacement, seed: int) -> None:
        self._copies = copies
        self._model = copies.model
        self._random = random.Random(seed)
        self._first: dict[tuple[bool, int], tuple[bool, Threats]] = {}

    def estimate(self, trials: int) -> LossEstimate:
        """Return the probability that the set is lost within the window."""
        model = self._model
        expected = (model.node_count * model.node_rate + model.domains * model.domain_rate) * model.window_s
        weights = [self._run_trial() for _ in range(trials)]
        mean = math.fsum(weights) / trials
        if mean == 0:
            return LossEstimate(None, None, None)
        spread = Z_95 * math.sqrt(math.fsum((one - mean) ** 2 for one in weights) / max(1, trials - 1) / trials)
        low, high = (-math.expm1(-expected * max(0.0, each)) for each in (mean - spread, mean + spread))
        return LossEstimate(-math.expm1(-expected * mean), low, high)

    def _run_trial(self) -> float:
        """Follow one failure to its end. Return its weight if the set is lost, otherwise 0."""
        model, copies, draw = self._model, self._copies, self._random
        is_domain, one, weight = self._draw_first()
        started_s = draw.random() * model.window_s
        now_s, end_s = 0.0, model.window_s - started_s
        down = dict.fromkeys(copies.members[one] if is_domain else (one,), model.repair_s)
        is_lost, threats = self._get_first(is_domain, one, down)
        # A failure that follows another one belongs to the trial of that one.
        weight *= math.exp(-threats.rate * min(model.repair_s, started_s))
        while not is_lost:
            stop_s = min(*down.values(), end_s)
            if not threats.nodes or stop_s <= now_s:
                return 0.0
            forced = max(threats.rate, 1 / (stop_s - now_s))
            next_s = now_s + draw.expovariate(forced)
            weight *= math.exp((forced - threats.rate) * (min(next_s, stop_s) - now_s))
            if next_s < stop_s:
                weight *= threats.rate / forced
                fallen = [place for place in self._draw_next(threats) if place not in down]
                down.update(dict.fromkeys(fallen, next_s + model.repair_s))
                is_lost = copies.has_lost(fallen, down)
            elif stop_s == end_s:
                return 0.0
            else:
                down = {place: repaired_s for place, repaired_s in down.items() if repaired_s > stop_s}
                if not down:
                    return 0.0
            now_s = min(next_s, stop_s)
            threats = threats if is_lost else copies.list_threats(down)
        return weight

    def _draw_first(self) -> tuple[bool, int, float]:
        """Return (whether a domain fails, which one or which node, weight)."""
        model, draw = self._model, self._random
        if not model.domain_rate:
            return False, draw.randrange(model.node_count), 1.0
        rates = model.node_count * model.node_rate, model.domains * model.domain_rate
        is_domain = draw.random() < 0.5
        return is_domain, draw.randrange(model.domains if is_domain else model.node_count), 2 * rates[is_domain] / sum(rates)

    def _get_first(self, is_domain: bool, one: int, down: dict[int, float]) -> tuple[bool, Threats]:
        """Return (whether the first failure loses the set, the threats after it)."""
        found = self._first.get((is_domain, one))
        if found is None:
            found = self._first[is_domain, one] = self._copies.has_lost(down, down), self._copies.list_threats(down)
        return found

    def _draw_next(self, threats: Threats) -> Iterable[int]:
        """Return the nodes that fail next, each node and domain as often as its share of the rate says."""
        draw = self._random
        if draw.random() * threats.rate < len(threats.nodes) * self._model.node_rate or not threats.domains:
            return (draw.choice(threats.nodes),)
        return self._copies.members[draw.choice(threats.domains)]


def compute_closed_form(model: LossModel, copies: int, group_count: int) -> float | None:
    """Return the probability for independent failures; None if domains fail as a whole.

    It holds to the first order in repair / MTBF.
    All nodes of a group fail within the window: p^copies. They do so within `repair_s` of each other: of n points at random in a window,
    the range is at most the share u of it with probability n u^(n-1) - (n-1) u^n. Groups are taken as independent.
    """
    if model.domain_rate:
        return None
    share = min(1.0, model.repair_s / model.window_s)
    together = copies * share ** (copies - 1) - (copies - 1) * share**copies
    lost: float = (-math.expm1(-model.window_s * model.node_rate)) ** copies * together
    return 1.0 if lost >= 1 else -math.expm1(group_count * math.log1p(-lost))
