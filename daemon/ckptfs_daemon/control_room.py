"""The figures of `ckptfs df`: what the next checkpoint finds on this node.

The PFS is not touched: what is said of it was reported by others.

If we die here: nothing was changed.
"""

import contextlib
import json
from pathlib import Path

from ckptfs.catalog import holding, report
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import CkptfsError
from ckptfs.flow.hold.room import PeerQuota as Share
from ckptfs.model import Tier
from ckptfs.protocol import control_pb2 as pb
from ckptfs.tiers.place import Tiers


def build_capacity(config: Config, db: Database, tiers: Tiers) -> pb.Room:
    """All tiers that there are."""
    clustered = config.cluster is not None
    answer = pb.Room(clustered=clustered, replication_factor=config.replication_factor if clustered else 1, node=config.node or "")
    for tier in (Tier.RAM, Tier.NVME):
        if tier in tiers:
            with contextlib.suppress(OSError, CkptfsError):
                answer.tiers.append(_build_local_tier(config, db, tiers, tier))
    if config.pfs is not None:
        answer.tiers.append(_build_pfs_tier(db, config.pfs))
    return answer


def _build_local_tier(config: Config, db: Database, tiers: Tiers, tier: Tier) -> pb.TierRoom:
    capacity = tiers[tier].get_capacity()
    leaving = report.count_leaving_bytes(db, tier) if config.pfs is not None else 0
    below = int((config.ram_high if tier is Tier.RAM else 1.0) * capacity.total)
    answer = pb.TierRoom(
        name=tier.value, path=str(tiers[tier].root), total_bytes=capacity.total, used_bytes=capacity.used, free_bytes=capacity.free,
        held_bytes=holding.count_hosted_bytes(db, tier), usable_bytes=max(0, min(capacity.free + leaving, below - capacity.used + leaving)),
    )  # fmt: skip
    if config.cluster is not None:
        answer.share_bytes = int(config.peer_share * capacity.total)
        answer.usable_for_peers_bytes = min(answer.usable_bytes, Share(db, tiers, config.peer_share).get_free_bytes_in(tier))
    return answer


def _build_pfs_tier(db: Database, root: Path) -> pb.TierRoom:
    answer = pb.TierRoom(name=Tier.PFS.value, path=str(root))
    for key, text, _ in report.list_reports(db, "tier:"):
        if key == f"tier:{Tier.PFS.value}":
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                found = json.loads(text)
                answer.total_bytes, answer.free_bytes = int(found.get("total", 0)), int(found.get("free", 0))
    answer.used_bytes = max(0, answer.total_bytes - answer.free_bytes)
    return answer
