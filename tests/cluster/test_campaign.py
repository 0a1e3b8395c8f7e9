"""P5, P7, P9, G7: kills, wipes, cuts, etcd stops and slow links under a mixed load; the same seed makes the same campaign.

CKPTFS_SEED and CKPTFS_CAMPAIGN_STEPS choose another one.
"""

import os
import random
from collections.abc import Callable

from cluster_campaign import Campaign
from cluster_lab import ClusterUnderTest, limited

SEED = os.environ.get("CKPTFS_SEED", "1")
STEPS = int(os.environ.get("CKPTFS_CAMPAIGN_STEPS", "30"))


def test_three_nodes_two_copies(make_lab: Callable[..., ClusterUnderTest]) -> None:
    cluster = make_lab(nodes=3, factor=2, with_pfs=False)
    # Every fault makes the survivors say so; that nothing is lost is what is looked at here.
    cluster.expect_warning(r"\bWARNING\b")
    campaign = Campaign(cluster, random.Random(SEED))
    with limited(cluster, 120.0 + 10.0 * STEPS):
        campaign.run(STEPS)
        campaign.finish()
    assert cluster.complaints() == []
