"""Owns the finding of a former generation of another node's content that still lies here, by its digest, read from where it lies (P4).

If we die here: nothing was changed.
"""

import os
from contextlib import suppress
from dataclasses import dataclass

from ckptfs.catalog import settling
from ckptfs.catalog.database import Database
from ckptfs.model import CopyState, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.place import Place, Places

transfer.labels("gather:older")


@dataclass(frozen=True, slots=True)
class Older:
    """A file with that digest; `fd` is whoever's who asked."""

    place: Place
    fd: int
    size: int
    blocks: bytes


def find(db: Database, places: Places, content: int, wanted: bytes) -> Older | None:
    """What lies here of a content in the state that has the digest `wanted`."""
    for copy in settling.copies(db, content):
        if copy.state is CopyState.OLDER and copy.tier in places and copy.tier is not Tier.PFS:
            with suppress(FileNotFoundError):
                fd = places[copy.tier].open(content)
                try:
                    size, whole, blocks = transfer.read(fd, label="gather:older")
                except BaseException:
                    os.close(fd)
                    raise
                if whole == wanted:
                    return Older(places[copy.tier], fd, size, blocks)
                os.close(fd)
    return None
