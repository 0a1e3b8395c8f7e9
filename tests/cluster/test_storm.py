"""P3, P5, P7, P8, P9, G7: applications on every node at once, and kills, wipes, cuts, etcd stops and slow links among them.

The suite runs one short storm, on three nodes with two copies and a PFS. Others by the environment:
CKPTFS_CAMPAIGN=nodes,factor,seeds   e.g. 5,3,4 (the seeds count on from CKPTFS_SEED, 1 unless told); with more jobs and longer pauses
CKPTFS_CAMPAIGN_EPISODES=n           how often faults come and are mended, 1 in the suite
CKPTFS_CAMPAIGN_PFS=0                without a PFS
The seed draws the faults; what applications and readers do in between is as the machine has it.
"""

import os
import random
from collections.abc import Callable

import pytest
from cluster_lab import ClusterUnderTest, limited
from cluster_storm import Storm

NODES, FACTOR, SEEDS = map(int, os.environ.get("CKPTFS_CAMPAIGN", "3,2,1").split(","))
FIRST = int(os.environ.get("CKPTFS_SEED", "1"))
EPISODES = int(os.environ.get("CKPTFS_CAMPAIGN_EPISODES", "1"))
WITH_PFS = os.environ.get("CKPTFS_CAMPAIGN_PFS", "1") != "0"
SHORT = {"longest_s": 3.0, "jobs": 1}
LIMIT_S = 200.0 + 100.0 * EPISODES


@pytest.mark.timeout(LIMIT_S + 60.0)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_nothing_is_lost_and_nothing_wrong_is_read(make_lab: Callable[..., ClusterUnderTest], seed: int) -> None:
    cluster = make_lab(nodes=NODES, factor=FACTOR, with_pfs=WITH_PFS)
    # Every fault makes the survivors say so; that nothing is lost is what is looked at here.
    cluster.expect_warning(r"\b(WARNING|ERROR)\b")
    storm = Storm(cluster, random.Random(seed), FACTOR - 1, **({} if "CKPTFS_CAMPAIGN" in os.environ else SHORT))
    try:
        with limited(cluster, LIMIT_S):
            storm.run(EPISODES)
            storm.finish()
    finally:
        storm.over.set()
        cluster.close()
    assert cluster.complaints() == []
