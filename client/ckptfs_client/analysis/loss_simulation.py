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
from ckptfs.quantities import format_count, format_duration, format_size
from ckptfs_client.errors import UsageError
from ckptfs_client.json_answers import SimulateJson
from ckptfs_client.render import format_columns

Z_95 = 1.959964
DAY_S = 86400.0
YEAR_DAYS = 365.25
THREATS_MAX = 0.2
"""So many failures that matter may come during a repair, on average: the simulation takes failures for rare."""


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
        # Whether each first failure loses the set, and the threats after it.
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
        if (is_domain, one) not in self._first:
            self._first[is_domain, one] = copies.has_lost(down, down), copies.list_threats(down)
        is_lost, threats = self._first[is_domain, one]
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


# --- what `ckptfs simulate` says --------------------------------------------------------------------------------------


def build_report(model: LossModel, size_bytes: int, keep: int, trials: int, seed: int) -> SimulateJson:
    """Simulate and build the answer. `size_bytes`: what a node writes of a checkpoint. Raises UsageError."""
    copies = CopyPlacement(model)
    if copies.threat_rate * model.repair_s > THREATS_MAX:
        accepted = f"accepted: up to {THREATS_MAX / copies.threat_rate:.3g}s"
        raise UsageError(f"--repair {model.repair_s:.3g}s is too long for nodes and domains that fail so often; {accepted}")
    found = LossSimulation(copies, seed).estimate(trials)
    failures = model.node_count * (model.node_rate + model.domain_rate) * DAY_S
    # On average a node holds as many copies as each file has. A checkpoint that is still written is not remade.
    recovery = copies.copies * size_bytes * keep
    return {
        "nodes": model.node_count, "copies": copies.copies, "jump": copies.jump, "domains": model.domains,
        "node_mtbf_s": model.node_mtbf_s, "domain_mtbf_s": model.domain_mtbf_s if math.isfinite(model.domain_mtbf_s) else None,
        "repair_s": model.repair_s, "write_back_s": model.window_s, "trials": trials, "seed": seed,
        "probability": found.probability, "low": found.low, "high": found.high,
        "closed_form": compute_closed_form(model, copies.copies, copies.group_count), "failures_per_day": failures,
        "recovery_bytes": recovery, "recovery_bytes_per_day": failures * recovery,
        "memory_bytes": copies.load_max * size_bytes * (keep + 1),
        "memory_bytes_after": copies.load_max_after * size_bytes * (keep + 1), "sentence": _build_sentence(model, found),
    }  # fmt: skip


def _build_sentence(model: LossModel, found: LossEstimate) -> str:
    window = format_duration(model.window_s)
    if found.probability is None:
        return f"No trial met a loss within {window}; raise --trials."
    words = f"One of {format_large(1 / found.probability)} sets is lost before the PFS has it"
    years = model.window_s / DAY_S / YEAR_DAYS / found.probability
    return f"{words}; with a new set every {window}, that is once in {format_large(years)} years."


def format_large(value: float) -> str:
    """Format a number with three digits: "0.0123", "1,230", "1.23e+09"."""
    return f"{value:.3g}" if value < 1000 or value >= 1e9 else f"{float(f'{value:.3g}'):,.0f}"


def format_report(answer: SimulateJson) -> str:
    """Format the answer: what it rests on, the table, the sentence."""
    spread = f"jump {answer['jump']}" if answer["jump"] else "domains spread evenly"
    domain_mtbf = answer["domain_mtbf_s"]
    fails = "" if domain_mtbf is None else f", each fails every {_format_mtbf(domain_mtbf)}"
    lines = [
        f"{format_count(answer['nodes'], 'node')}, each fails every {_format_mtbf(answer['node_mtbf_s'])};"
        f" {format_count(answer['domains'], 'failure domain')}{fails}",
        f"{format_count(answer['copies'], 'copy', 'copies')}, {spread}; remade in {format_duration(answer['repair_s'])},"
        f" on the PFS in {format_duration(answer['write_back_s'])}",
        "",
    ]  # fmt: skip
    low, high, closed = answer["low"], answer["high"], answer["closed_form"]
    cells = [
        ["probability that a set is lost", _format_probability(answer["probability"]),
         "" if low is None or high is None else f"{low:.3g} to {high:.3g} (95 %, {answer['trials']} trials)"],
        *([["by the closed form", _format_probability(closed), "independent failures"]] if closed is not None else []),
        ["nodes that fail in a day", f"{answer['failures_per_day']:.3g}", ""],
        ["copies to remake after each", format_size(answer["recovery_bytes"]), f"{format_size(answer['recovery_bytes_per_day'])} a day"],
        ["memory on a node, at most", format_size(answer["memory_bytes"]),
         f"{format_size(answer['memory_bytes_after'])} once a lost domain is remade" if answer["memory_bytes_after"] else ""],
    ]  # fmt: skip
    return "\n".join([*lines, format_columns(("", "value>", "more"), cells).partition("\n")[2], "", answer["sentence"]])


def _format_probability(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _format_mtbf(seconds: float) -> str:
    days = seconds / DAY_S
    return format_duration(seconds) if days < 3 else f"{days:.3g} days" if days < YEAR_DAYS else f"{days / YEAR_DAYS:.3g} years"
