"""What whole clusters ask of their store, in virtual time: a checkpoint, an idle second, a death, a restart, a join.

Usage: simulated.py [NODES ...]. Needs neither root nor etcd. 200 nodes take two minutes of one processor and a GB of memory.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("tests/support", ".", "daemon", "client")]

import simulated_cluster  # noqa: E402 - the tests' simulation is found by the line above
from simulated_cluster import Costs  # noqa: E402

NODES = (3, 10, 50, 200)
FAR = (1000, 10_000)


def run(nodes: tuple[int, ...] = NODES) -> list[Costs]:
    """Measure, print a table and what follows for larger clusters, and return the costs."""
    costs = [simulated_cluster.measure(count) for count in nodes]
    print(simulated_cluster.table(costs))
    for cost in costs:
        print(f"{cost.nodes}: {simulated_cluster.breakdown(cost.phases['checkpoint'], cost.nodes * cost.checkpoints)}")
    if len(costs) > 2:
        start, slope = fit(costs)
        far = ", ".join(f"{start + slope * count:.0f} with {count} nodes" for count in FAR)
        print(f"operations of a node for a checkpoint: {start:.1f} + {slope:.4f} for each node of the cluster: {far}", flush=True)
    return costs


def fit(costs: list[Costs]) -> tuple[float, float]:
    """Return (value, slope) of the operations of a node for a checkpoint. The smallest cluster is left out: few share what one does."""
    return simulated_cluster.fit_slope([(cost.nodes, cost.checkpoint[0]) for cost in costs[1:]])


def growth(costs: list[Costs]) -> float:
    """Return the extrapolated cost of a checkpoint per node in the largest cluster, relative to the second one that was measured."""
    start, slope = fit(costs)
    return (start + slope * FAR[-1]) / costs[1].checkpoint[0]


if __name__ == "__main__":
    run(tuple(map(int, sys.argv[1:])) or NODES)
