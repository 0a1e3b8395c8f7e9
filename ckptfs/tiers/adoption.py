"""Owns the moment in which a process takes the tiers that it finds for its own: whether they are those that the catalog remembers.

Whoever puts contents into tiers adopts them first, so that what a new RAM holds is never taken for what the former one held. Another RAM
than before is a reboot: what was there is gone. Another directory for NVMe may only be one whose device is not mounted: as long as it
is needed nothing is forgotten, and we go on without it. The PFS is not touched: it may hang.
If we die here: a tier was adopted in one transaction or not at all.
"""

import logging

from ckptfs.catalog import settling
from ckptfs.catalog.database import Database
from ckptfs.model import Tier
from ckptfs.tiers.place import Tiers, TierStorage

log = logging.getLogger(__name__)

GIVEN_UP = "given-up"
"""A file of this name in NVMe's directory says that what was on the former one will not come back."""


def adopt_tiers(db: Database, tiers: Tiers) -> None:
    """Remember the uuid of RAM and NVMe; where it is another one than before, forget all copies that were there, or leave NVMe out."""
    for tier in (Tier.RAM, Tier.NVME):
        if tier not in tiers:
            continue
        if tier is Tier.NVME and (only_copies := _count_only_copies(db, tiers[tier])):
            _exclude_nvme(db, tiers, only_copies)
            continue
        lost = settling.set_tier_uuid(db, tier, tiers[tier].uuid)
        if lost:
            log.warning("what was in %s is gone, this is another one than before; it held %d contents", tier, lost)


def _count_only_copies(db: Database, storage: TierStorage) -> int:
    """How many files would be lost by taking this directory for the tier's new one."""
    if settling.get_tier_uuid(db, storage.tier) in (None, storage.uuid) or (storage.root / GIVEN_UP).exists():
        return 0
    return settling.count_only_copies(db, storage.tier)


def _exclude_nvme(db: Database, tiers: Tiers, only_copies: int) -> None:
    root = tiers[Tier.NVME].root
    error = f"{root} is not the directory that this catalog knows, and {only_copies} files lie only there"
    remedy = f"mount the device that belongs at {root} and start again; if it will never come back, make the file {root / GIVEN_UP}"
    log.error("%s; going on without it (%s)", error, remedy)
    settling.set_report(db, f"trouble:{Tier.NVME}", {"what": error, "path": str(root), "remedy": remedy})
    tiers.exclude(Tier.NVME)
