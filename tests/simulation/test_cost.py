"""What a cluster asks of its store does not grow with the number of nodes, and no event makes all nodes ask at once.

Whole nodes in virtual time: see `simulated_cluster`. CKPTFS_SIMULATED_NODES=3,10,50,200 measures other numbers of nodes.
"""

import os
from collections.abc import Callable

import pytest
import simulated_cluster
import simulated_store
from simulated_cluster import EVENTS, Costs, fit_slope

from ckptfs import limits
from ckptfs.flow import scan

COUNTS = tuple(map(int, os.environ.get("CKPTFS_SIMULATED_NODES", "3,10,45").split(",")))
GROWTH = 0.12
"""By how much more a checkpoint may cost a node of the largest cluster than one of a small cluster."""
SLOW_GROWTH = 0.4
"""By how much more it may cost a node if the store has a twentieth of the answers: the names come one by one, in smaller batches."""
IDLE_RATE_MAX = 1.0
AT_ONCE_SHARE = 0.5
"""Which share of the nodes may act within one second of an event, if there are more than a few."""
AT_ONCE_FREE = 3
LATENCY_S_MAX = 0.05
READER_RATE_MAX = 4.0
PROBE_RATE_MAX = 0.5


@pytest.fixture(scope="module")
def costs() -> list[Costs]:
    measured = [simulated_cluster.measure(count) for count in COUNTS]
    print("\n" + simulated_cluster.table(measured))
    return measured


def test_all_that_was_written_has_its_copies(costs: list[Costs]) -> None:
    """P9: what is measured is a cluster that works, also after a death."""
    assert [cost.problems for cost in costs] == [[] for _ in costs]


@pytest.mark.parametrize("of", [lambda cost: cost.checkpoint[0], lambda cost: cost.checkpoint[1]], ids=["operations", "bytes"])
def test_a_checkpoint_costs_a_node_the_same_among_many(costs: list[Costs], of: Callable[[Costs], float]) -> None:
    points = [(float(cost.nodes), of(cost)) for cost in costs[1:]]
    at_none, slope = fit_slope(points)
    assert slope * COUNTS[-1] < GROWTH * at_none, f"{at_none:.1f} + {slope:.4f} for each node: {points}"
    assert of(costs[-1]) < (1 + GROWTH) * of(costs[1])


def test_a_slow_store_is_not_asked_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store with few answers for each node is what many nodes have: with a twentieth of them, 20 nodes wait as 400 do."""
    quick = simulated_cluster.measure(20, checkpoints=1)
    monkeypatch.setattr(simulated_store, "ANSWERS_PER_MS", simulated_store.ANSWERS_PER_MS // 20)
    slow = simulated_cluster.measure(20, checkpoints=1)
    assert quick.problems == slow.problems == []
    assert slow.checkpoint[0] < (1 + SLOW_GROWTH) * quick.checkpoint[0], (slow.checkpoint, quick.checkpoint)


def test_a_node_that_does_nothing_asks_less_than_once_in_a_second(costs: list[Costs]) -> None:
    assert all(cost.idle_rate < IDLE_RATE_MAX for cost in costs), [cost.idle_rate for cost in costs]


@pytest.mark.parametrize("event", EVENTS)
def test_no_event_makes_all_nodes_ask_within_a_second(costs: list[Costs], event: str) -> None:
    found = {cost.nodes: cost.phases[event].nodes_in_a_second for cost in costs}
    assert all(acting <= max(AT_ONCE_FREE, AT_ONCE_SHARE * nodes) for nodes, acting in found.items()), found


def test_the_store_answers_in_time(costs: list[Costs]) -> None:
    assert all(usage.latency_s_max < LATENCY_S_MAX for cost in costs for usage in cost.phases.values())


def test_readers_that_wait_for_another_one_ask_seldom() -> None:
    """One node reads a file from the PFS for all, in 20 s; so long the others look whether it is there."""
    found = simulated_cluster.measure_readers(6)
    assert found.problems == []
    assert found.phases["readers"].total / 5 / 20 < READER_RATE_MAX


def test_nodes_probe_an_etcd_that_is_away_seldom_and_not_in_step() -> None:
    """P1: and all work as before when it is back."""
    found = simulated_cluster.measure_outage(10)
    assert found.problems == []
    outage = found.phases["outage"]
    assert outage.operations["names"] < PROBE_RATE_MAX * outage.seconds * found.nodes
    assert found.phases["return"].nodes_in_a_second < found.nodes


def test_a_directory_of_the_pfs_that_may_fill_the_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name there has keys in the store, opened or not."""
    monkeypatch.setattr(limits, "SHARED_NAMES_MAX", 3)
    warned: list[str] = []
    monkeypatch.setattr(scan.log, "warning", lambda text, *arguments: warned.append(text % arguments))
    simulated_cluster.measure_readers(2, reading_s=1.0)
    assert warned == []
    monkeypatch.setattr(limits, "SHARED_NAMES_MAX", 1)
    simulated_cluster.measure_readers(2, reading_s=1.0)
    assert len(warned) == 2 and "the top directory: 1 names or more: each takes 4 keys in etcd" in warned[0]


def test_the_same_seed_gives_the_same_figures() -> None:
    first, again, other = (simulated_cluster.measure(5, seed=seed, checkpoints=1) for seed in (7, 7, 8))
    assert first == again != other
