"""Owns how much of this node's tiers may be filled for its peers, and in which tier the next of their contents goes.

Invariant: what is held for others never takes more than its share of a tier, and leaves RAM below its watermark: it can never push out
what this node writes. If we die here: nothing is remembered.
"""

from ckptfs.catalog import holding
from ckptfs.catalog.database import Database
from ckptfs.errors import NoSpace
from ckptfs.model import Tier
from ckptfs.tiers.place import Places

HIGH = {Tier.RAM: 0.80, Tier.NVME: 0.90}


class Room:
    """The peers' share of RAM and NVMe."""

    def __init__(self, db: Database, places: Places, share: float) -> None:
        self._db = db
        self._places = places
        self._share = share

    def choose(self, size: int) -> Tier:
        """Where `size` more bytes go: RAM while they fit, then NVMe. Raises NoRoom."""
        for tier in HIGH:
            if tier in self._places and self.free_in(tier) >= size:
                return tier
        raise NoSpace(f"the share of this node's tiers that is set aside for peers has no room for {size} bytes")

    def free(self) -> int:
        """The largest content that would be taken now."""
        return max(0, *(self.free_in(tier) for tier in HIGH if tier in self._places), 0)

    def free_in(self, tier: Tier) -> int:
        """How many bytes more may be held in a tier."""
        room = self._places.room(tier)
        share = int(self._share * room.total) - holding.count_hosted_bytes(self._db, tier)
        return max(0, min(share, room.free, int(HIGH[tier] * room.total) - room.used))
