"""What a node costs the shared store does not grow with the number of nodes, but for hearing of those that come and go."""

import pytest
import simulated_cluster
from simulated_cluster import Costs, together

FEW, MANY = 5, 1000
SAME = 0.02
# Who makes the directory that all write into, and who finds it, depends on how long messages travel.
NEAR = 0.15
HOURS = 1.0


@pytest.fixture(scope="module")
def costs() -> dict[int, Costs]:
    return {count: simulated_cluster.measure(count, hours=HOURS, hours_between=24, steps=8) for count in (FEW, MANY)}


def test_a_checkpoint_costs_a_node_the_same_among_many(costs: dict[int, Costs]) -> None:
    assert together(costs[MANY]) == pytest.approx(together(costs[FEW]), rel=NEAR)


def test_a_checkpoint_costs_a_node_the_same_when_many_write() -> None:
    """All at once, into one directory. It may cost less: what several ask at once goes together."""
    few, many = (together(simulated_cluster.measure(writers, writers=writers, hours=0.01, steps=3)) for writers in (8, 24))
    assert few[0] / 2 < many[0] <= few[0] * (1 + NEAR) and few[1] / 2 < many[1] <= few[1] * (1 + NEAR)


def test_a_file_costs_few_round_trips(costs: dict[int, Costs]) -> None:
    """Making a directory that all make, a file in it, closing and sealing it, telling of a copy that came: two messages each."""
    for cost in costs.values():
        assert cost.checkpoint["names"][0] <= 24 and 4 <= cost.checkpoint["copies"][0] <= 6


def test_living_costs_the_same_among_many(costs: dict[int, Costs]) -> None:
    few, many = (costs[count].beat_hour for count in (FEW, MANY))
    assert many == pytest.approx(few, rel=SAME) and few[0] > 0


def test_a_watch_costs_one_message_per_membership_change(costs: dict[int, Costs]) -> None:
    """One message for each change, and one record of each node at the start."""
    for cost in costs.values():
        assert cost.watch_hour[0] == pytest.approx(cost.changes_hour, abs=2 / HOURS)
        assert cost.watch_hour[1] <= 150 * max(1.0, cost.watch_hour[0])
        assert cost.join[1] <= 200 * cost.nodes + 4000
    assert costs[MANY].changes_hour > 20 > costs[FEW].changes_hour


def test_the_same_seed_gives_the_same_figures() -> None:
    first, again, other = (simulated_cluster.measure(50, seed=seed, steps=1, hours=0.1, hours_between=1) for seed in (7, 7, 8))
    assert first == again != other
