"""The traffic of one node with the shared store, for clusters of any size, in virtual time.

Usage: simulated.py [NODES ...]. Needs neither root nor etcd. Every node restarts once a month and holds two copies of each file.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("tests/support", ".", "daemon", "client")]

import simulated_cluster  # noqa: E402 - the tests' simulation is found by the line above
from simulated_cluster import Costs, together  # noqa: E402

NODES = (3, 5, 1000, 10_000)
# The other nodes are members that join and leave, and write nothing.
WRITERS_MAX = 20
HOURS = 1.0


def run(nodes: tuple[int, ...] = NODES) -> list[Costs]:
    """Measure, print a table, and return the costs."""
    costs = [simulated_cluster.measure(count, writers=min(count, WRITERS_MAX), hours=HOURS) for count in nodes]
    print(simulated_cluster.table(costs), flush=True)
    return costs


def growth(costs: list[Costs]) -> float:
    """Return the cost of a checkpoint per node in the largest cluster, relative to the smallest: messages or bytes, the worse."""
    least, most = together(costs[0]), together(costs[-1])
    return max(most[0] / least[0], most[1] / least[1])


if __name__ == "__main__":
    run(tuple(map(int, sys.argv[1:])) or NODES)
