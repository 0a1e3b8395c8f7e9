"""P3, P5, P7, P8, P9, G7: applications on every node at once, and kills, wipes, cuts, etcd stops and slow links among them.

The campaign is that of `ckptfs chaos`. The suite runs a short one, on three nodes with two copies and a PFS. etcd has three members.
Others by the environment:
CKPTFS_CAMPAIGN=nodes,factor,seeds   e.g. 5,3,4 (the seeds count on from CKPTFS_SEED, 6 unless told); with more jobs and longer pauses
CKPTFS_CAMPAIGN_EPISODES=n           how often faults come and are mended, 1 in the suite
CKPTFS_CAMPAIGN_PFS=0                without a PFS
CKPTFS_CAMPAIGN_FSYNC=clique         the mounts' fsync; with clique the jobs call it, and what it has acknowledged must outlive its node
CKPTFS_CAMPAIGN_FAULTS=a,b           of which kinds the faults are (schedule.FAULTS; one may be named twice)
CKPTFS_CAMPAIGN_JOBS=all             also files that another node writes anew each time
The seed draws the faults; what applications and readers do in between depends on the machine.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.chaos.campaign import Campaign
from ckptfs_client.chaos.schedule import Setup
from ckptfs_client.errors import ClientError
from cluster_lab import ClusterUnderTest, limited
from wandering_application import ALL_KINDS

NODES, FACTOR, SEEDS = map(int, os.environ.get("CKPTFS_CAMPAIGN", "3,2,1").split(","))
FIRST = int(os.environ.get("CKPTFS_SEED", "6"))
EPISODES = int(os.environ.get("CKPTFS_CAMPAIGN_EPISODES", "1"))
WITH_PFS = os.environ.get("CKPTFS_CAMPAIGN_PFS", "1") != "0"
FSYNC = os.environ.get("CKPTFS_CAMPAIGN_FSYNC", "local")
FAULTS: dict[str, Any] = {"faults": kinds.split(",")} if (kinds := os.environ.get("CKPTFS_CAMPAIGN_FAULTS")) else {}
OTHERS: dict[str, Any] = {"kinds": ALL_KINDS} if os.environ.get("CKPTFS_CAMPAIGN_JOBS") == "all" else {}
MEMBERS = 3
if "CKPTFS_CAMPAIGN" not in os.environ:
    FAULTS["pause_max_s"], OTHERS["applications"] = 3.0, 1
LIMIT_S = 200.0 + 100.0 * EPISODES


@pytest.mark.timeout(LIMIT_S + 60.0)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
def test_nothing_is_lost_and_nothing_wrong_is_read(make_lab: Callable[..., ClusterUnderTest], tmp_path: Path, seed: int) -> None:
    """After a failure, the logs of the nodes are in its temporary directory."""
    cluster = make_lab(nodes=NODES, factor=FACTOR, with_pfs=WITH_PFS, fsync=FSYNC, etcd_members=MEMBERS)
    # Every fault makes the survivors say so; that nothing is lost is what is looked at here.
    cluster.expect_warning(r"\b(WARNING|ERROR)\b")
    campaign = Campaign(cluster, seed, Setup(NODES, FACTOR - 1, MEMBERS, WITH_PFS, **FAULTS), synced=FSYNC == "clique", **OTHERS)
    try:
        with limited(cluster, LIMIT_S):
            campaign.run(lambda rounds: rounds == EPISODES)
            campaign.finish()
        assert cluster.complaints() == []
    except ClientError as failure:
        pytest.fail(f"{failure}\n{campaign.story}")
    finally:
        campaign.over.set()
        for node in cluster.nodes:
            (tmp_path / f"{node.name}.log").write_text(node.log)
        cluster.close()
