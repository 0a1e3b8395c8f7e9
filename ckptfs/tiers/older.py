"""Owns what may be done with a former generation of another node's content that still lies here: it is found by its digest, read from where
it lies (P4), and becomes a content of its own when it is all that is left.

If we die here: nothing was changed, or a FILLING copy without a content is left, which recovery removes with its file.
"""

import os
from contextlib import suppress
from dataclasses import dataclass

from ckptfs import disk
from ckptfs.catalog import fetching, holding, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.holding import HeldCopy
from ckptfs.errors import DigestMismatch
from ckptfs.model import Content, CopyState, Tier
from ckptfs.tiers import removal, transfer
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
    for copy in settling.list_copies(db, content):
        if copy.state is CopyState.STALE and copy.tier in places and copy.tier is not Tier.PFS:
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


def apart(db: Database, places: Places, kept: HeldCopy, inode: int) -> Content | None:
    """What is kept of a content as one of its own, of the file `inode`, of which nobody was told yet. None when it has moved on.

    Raises DigestMismatch, and then it is gone; OSError from the tier.
    """
    place = places[kept.tier]
    with db.transaction():
        if not holding.mark_held_copy_stale(db, kept):
            return None
        number, opened = fetching.insert_reserved_copy(db, place.tier), settling.get_file_record(db, kept.content.id).open_handles
    try:
        size, whole, blocks = _named(place, kept.content.id, number, shared=bool(opened))
        if whole != kept.digest:
            settling.delete_copy(db, kept.content.id, place.tier)
            removal.remove_forgotten(db, place, kept.content.id)
            raise DigestMismatch(f"generation {kept.generation} of content {kept.content.id} is not what it was in {place.tier}")
        if place.tier is not Tier.RAM:
            place.persist_names()
        return holding.insert_split_content(db, kept, number, inode, size, blocks)
    except BaseException:
        place.remove(number)
        fetching.delete_filling_copy(db, number, place.tier)
        raise


def _named(place: Place, content: int, number: int, *, shared: bool) -> transfer.Digested:
    """The file of `content` as that of `number`, too, and what it is. `shared`: by whoever has it open it may yet be changed: a copy."""
    if not shared:
        place.remove(number)
        place.also(content, number)
        with disk.closing(place.open(number)) as fd:
            return transfer.read(fd, label="gather:older")
    with disk.closing(place.open(content)) as source, disk.closing(place.create(number)) as target:
        found = transfer.copy(source, target, label="gather:older")
        if place.tier is not Tier.RAM:
            os.fsync(target)
        return found
