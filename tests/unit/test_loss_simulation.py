"""`ckptfs simulate`: against a closed form, against a plain simulation, and with the placement of the product. G7, N1, P9, P11."""

import itertools
import json
import math
import random
import time
from collections.abc import Callable

import pytest
from ckptfs_client import cli
from ckptfs_client.analysis.loss_simulation import CopyPlacement, LossModel, LossSimulation, compute_closed_form
from ckptfs_client.errors import UsageError

from ckptfs.clique.placement import choose_peers

YEAR_S, MINUTE, HOUR = 365.25 * 86400.0, 60.0, 3600.0
NEVER = math.inf
CORE_S = 60.0


def check_bounds(model: LossModel, wanted: float, *, trials: int = 20_000, slack: float = 0.02) -> None:
    """Compare an estimate with what it should be: within the width of its interval, which must be narrow, and `slack`."""
    found = LossSimulation(CopyPlacement(model), 7).estimate(trials)
    assert found.probability is not None and found.low is not None and found.high is not None
    assert found.high - found.low < 0.25 * found.probability
    assert abs(found.probability - wanted) < found.high - found.low + slack * wanted, (found, wanted)


@pytest.mark.parametrize("factor", [1, 2, 3, 4])
@pytest.mark.parametrize(("window_s", "repair_s"), [(HOUR, 5 * MINUTE), (5 * MINUTE, HOUR), (HOUR, HOUR)])
def test_independent_failures_agree_with_the_closed_form(factor: int, window_s: float, repair_s: float) -> None:
    """Probabilities from 0.2 down to 1e-19, none of which plain trials would meet; a repair may be longer than the window."""
    model = LossModel(1000, factor, 1, 0, YEAR_S, NEVER, repair_s, window_s)
    wanted = compute_closed_form(model, factor, model.node_count)
    assert wanted is not None
    check_bounds(model, wanted, trials=40_000 if factor == 4 else 20_000)


def test_the_closed_form_by_hand() -> None:
    """Two copies: rate 2 N l^2 T for a window that is long against the repair. One copy: any failure loses."""
    rate = 1 / YEAR_S
    pair = compute_closed_form(LossModel(100, 2, 1, 0, YEAR_S, NEVER, 1.0, 1e5), 2, 100)
    assert pair == pytest.approx(2 * 100 * rate**2 * 1.0 * 1e5, rel=0.01)
    alone = compute_closed_form(LossModel(100, 1, 1, 0, YEAR_S, NEVER, 1.0, HOUR), 1, 100)
    assert alone == pytest.approx(-math.expm1(-100 * HOUR / YEAR_S))
    assert compute_closed_form(LossModel(100, 2, 1, 10, YEAR_S, YEAR_S, 1.0, HOUR), 2, 100) is None


def is_lost(model: LossModel, holders: list[tuple[int, ...]], draw: random.Random) -> bool:
    """One plain trial: all failures of a window in their order. A node is down for the time of a repair."""
    events: list[tuple[float, list[int]]] = []
    domain_of = [place * model.domains // model.node_count for place in range(model.node_count)]
    units = [(1 / model.node_mtbf_s, [place]) for place in range(model.node_count)]
    for one in range(model.domains):
        units.append((1 / model.domain_mtbf_s, [place for place, domain in enumerate(domain_of) if domain == one]))
    for rate, places in units:
        at = draw.expovariate(rate) if rate else NEVER
        while at < model.window_s:
            events.append((at, places))
            at += draw.expovariate(rate)
    until = [-1.0] * model.node_count
    for at, places in sorted(events):
        for place in places:
            until[place] = at + model.repair_s
        if any(all(until[place] > at for place in one) for one in holders):
            return True
    return False


@pytest.mark.parametrize(
    ("model", "trials"),
    [
        (LossModel(40, 2, 1, 0, 100.0, NEVER, 1.0, 4.0), 8000),
        (LossModel(24, 2, 1, 6, 400.0, 150.0, 2.0, 10.0), 8000),
        (LossModel(24, 2, 3, 3, 300.0, 300.0, 2.0, 10.0), 8000),
        (LossModel(8, 2, 1, 1, 400.0, 200.0, 1.0, 10.0), 8000),
        (LossModel(24, 3, 1, 6, 60.0, 60.0, 1.0, 10.0), 8000),
    ],
    ids=["nodes", "racks", "few racks", "one rack", "three copies"],
)
def test_the_simulation_agrees_with_a_plain_one(model: LossModel, trials: int) -> None:
    """Failures so frequent that plain trials meet losses: nodes alone, whole racks, both, and a rack that holds every copy."""
    draw = random.Random(3)
    holders = CopyPlacement(model).holders
    wanted = sum(is_lost(model, holders, draw) for _ in range(trials)) / trials
    spread = 1.96 * math.sqrt(wanted * (1 - wanted) / trials)
    assert wanted > 5 * spread, "too rare to compare"
    check_bounds(model, wanted, slack=0.05 + spread / wanted)


def test_copies_lie_where_the_product_puts_them() -> None:
    """N1: holders are a node and its peers; each node has its load; domains are apart."""
    model = LossModel(60, 3, 2, 12, YEAR_S, NEVER, HOUR, HOUR)
    copies = CopyPlacement(model)
    for place, found in enumerate(copies.holders):
        assert found == (place, *(node.number - 1 for node in choose_peers(copies.view, place + 1, 3, 2)))
        assert len({copies.domain_of[one] for one in found}) == 3
    assert copies.copies == copies.load_max == 3 and {len(shards) for shards in copies.shards_of} == {3}
    # 5 of 60 nodes held 15 copies, and 55 take them.
    assert copies.load_max_after > 3


def test_domains_that_fail_as_a_whole_lose_nothing_alone() -> None:
    """P9: copies in other racks survive a rack. In one rack they do not."""
    apart = LossSimulation(CopyPlacement(LossModel(64, 2, 1, 8, 1000 * YEAR_S, YEAR_S, 5 * MINUTE, HOUR)), 1).estimate(2000)
    together = LossSimulation(CopyPlacement(LossModel(64, 2, 1, 1, 1000 * YEAR_S, YEAR_S, 5 * MINUTE, HOUR)), 1).estimate(2000)
    assert apart.probability is not None and together.probability is not None
    assert together.probability == pytest.approx(HOUR / YEAR_S, rel=0.05) and apart.probability < together.probability / 1000


# --- the command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(words: str) -> str:
        cli.build_command()(["simulate", *words.split()], standalone_mode=False)
        return capsys.readouterr().out

    return call


def test_ten_thousand_nodes_in_a_minute_on_one_core(run: Callable[..., str]) -> None:
    """G7: with racks, three copies and a jump; the same seed gives the same answer, another one another."""
    words = "--nodes 10000 --mtbf 4h --factor 3 --jump 2 --domains 625 --domain-mtbf 20y --size 1G --trials 4000 --json"
    began_s = time.process_time()
    first, again, other = (run(f"{words} --seed {seed}") for seed in (1, 1, 2))
    assert time.process_time() - began_s < CORE_S
    assert first == again and json.loads(first)["probability"] != json.loads(other)["probability"]
    found = json.loads(first)
    assert (found["nodes"], found["copies"], found["domains"], found["node_mtbf_s"]) == (10000, 3, 625, 40000 * HOUR)
    assert 0 < found["low"] < found["probability"] < found["high"] < 1e-6 and found["closed_form"] is None
    assert found["failures_per_day"] == pytest.approx(6 + 10000 / 20 / 365.25)
    assert found["recovery_bytes"] == 3 << 30 and found["recovery_bytes_per_day"] == found["failures_per_day"] * (3 << 30)
    assert 6 << 30 <= found["memory_bytes"] < found["memory_bytes_after"]


def test_the_table(run: Callable[..., str]) -> None:
    out = run("--nodes 100 --node-mtbf 5y --size 10G --trials 500")
    assert "100 nodes, each fails every 5 years; 100 failure domains\n2 copies, jump 1; remade in 5 min, on the PFS in 60 min\n" in out
    assert "by the closed form" in out and "(95 %, 500 trials)" in out and "40.0 GiB" in out
    assert "sets is lost before the PFS has it; with a new set every 60 min, that is once in" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--nodes 10", "say how often failures come"),
        ("--nodes 10 --node-mtbf 10m", "--repair 300s is too long for nodes and domains that fail so often; accepted: up to 60s"),
        ("--nodes 10 --node-mtbf 1y --domains 11", "--domains 11 is more than --nodes 10"),
        ("--nodes 10 --node-mtbf 1y --size much", "'much' is not a size"),
        ("--nodes 10 --node-mtbf 1y --write-back never", "--write-back 'never' is not a duration"),
    ],
)
def test_what_simulate_refuses(run: Callable[..., str], words: str, what: str) -> None:
    """P11."""
    with pytest.raises(UsageError) as failure:
        run(words)
    assert what in str(failure.value)


@pytest.mark.parametrize(("nodes", "factor"), list(itertools.product((1, 2, 3), (1, 2, 5))))
def test_small_clusters(run: Callable[..., str], nodes: int, factor: int) -> None:
    """No more copies than nodes. If each node holds all, one group is lost, and not one for each node."""
    found = json.loads(run(f"--nodes {nodes} --node-mtbf 1y --factor {factor} --trials 4000 --json"))
    assert found["copies"] == min(nodes, factor)
    assert found["probability"] == pytest.approx(found["closed_form"], rel=0.25)
