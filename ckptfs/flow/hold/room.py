"""Owns how much of this node's tiers may be filled for its peers, and in which tier the next of their contents goes.

Invariant: what is held for others never takes more than its share of a tier, and leaves RAM below its watermark: it can never push out
what this node writes. If we die here: nothing is remembered.
"""

from ckptfs.catalog import holding
from ckptfs.catalog.database import Database
from ckptfs.errors import NoSpace
from ckptfs.model import Tier
from ckptfs.tiers.place import Tiers

WATERMARKS = {Tier.RAM: 0.80, Tier.NVME: 0.90}


class PeerQuota:
    """The peers' share of RAM and NVMe."""

    def __init__(self, db: Database, tiers: Tiers, share: float) -> None:
        self._db = db
        self._tiers = tiers
        self._share = share

    def choose_tier(self, size: int) -> Tier:
        """Where `size` more bytes go: RAM while they fit, then NVMe. Raises NoRoom."""
        for tier in WATERMARKS:
            if tier in self._tiers and self.get_free_bytes_in(tier) >= size:
                return tier
        raise NoSpace(f"the share of this node's tiers that is set aside for peers has no room for {size} bytes")

    def get_largest_free_bytes(self) -> int:
        """The largest content that would be taken now."""
        return max(0, *(self.get_free_bytes_in(tier) for tier in WATERMARKS if tier in self._tiers), 0)

    def get_free_bytes_in(self, tier: Tier) -> int:
        """How many bytes more may be held in a tier."""
        capacity = self._tiers.get_capacity(tier)
        share = int(self._share * capacity.total) - holding.count_hosted_bytes(self._db, tier)
        return max(0, min(share, capacity.free, int(WATERMARKS[tier] * capacity.total) - capacity.used))
