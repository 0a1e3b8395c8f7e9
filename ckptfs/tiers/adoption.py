"""Owns the moment in which a process takes the tiers that it finds for its own: whether they are those that the catalog remembers.

Whoever puts contents into tiers adopts them first, so that what a new RAM holds is never taken for what the former one held. The PFS
is not touched: it may hang.
If we die here: a tier was adopted in one transaction or not at all.
"""

import logging

from ckptfs.catalog import settling
from ckptfs.catalog.database import Database
from ckptfs.model import Tier
from ckptfs.tiers.place import Places

log = logging.getLogger(__name__)


def adopt(db: Database, places: Places) -> None:
    """Remember the uuid of RAM and NVMe; where it is another one than before, forget all copies that were there."""
    for tier in (Tier.RAM, Tier.NVME):
        if tier in places:
            lost = settling.adopt(db, tier, places[tier].uuid)
            if lost:
                log.warning("what was in %s is gone, this is another one than before; it held %d contents", tier, lost)
