"""Owns how the file of a copy goes that was forgotten: at once, however large it is, and never one that somebody has announced since.

Whoever brings a content back announces that first, which cannot happen inside our transaction. On the PFS, which must not be asked inside
one, files are left to the sweep of what no row names.
If we die here: a file without a row, which the drop flow finds.
"""

import os

from ckptfs.catalog import settling
from ckptfs.catalog.database import Database
from ckptfs.model import Tier
from ckptfs.tiers.place import TierStorage


def remove_unrecorded(db: Database, storage: TierStorage, number: int) -> None:
    """Remove the file of a copy that is on record no more."""
    if storage.tier is Tier.PFS:
        return
    with db.transaction():
        fd = -1 if settling.has_copy(db, number, storage.tier) else storage.detach(number)
    if fd >= 0:
        os.close(fd)
