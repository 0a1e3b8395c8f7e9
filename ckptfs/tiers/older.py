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
from ckptfs.tiers.place import Tiers, TierStorage

transfer.declare_labels("gather:older")


@dataclass(frozen=True, slots=True)
class StaleCopy:
    """A file with that digest; `fd` is whoever's who asked."""

    storage: TierStorage
    fd: int
    size: int
    blocks: bytes


def find_stale(db: Database, tiers: Tiers, content: int, wanted_digest: bytes) -> StaleCopy | None:
    """What lies here of a content in the state that has the digest `wanted`."""
    for copy in settling.list_copies(db, content):
        if copy.state is CopyState.STALE and copy.tier in tiers and copy.tier is not Tier.PFS:
            with suppress(FileNotFoundError):
                fd = tiers[copy.tier].open(content)
                try:
                    size, digest, blocks = transfer.read(fd, label="gather:older")
                except BaseException:
                    os.close(fd)
                    raise
                if digest == wanted_digest:
                    return StaleCopy(tiers[copy.tier], fd, size, blocks)
                os.close(fd)
    return None


def promote_stale(db: Database, tiers: Tiers, held_copy: HeldCopy, inode: int) -> Content | None:
    """What is kept of a content as one of its own, of the file `inode`, of which nobody was told yet. None when it has moved on.

    Raises DigestMismatch, and then it is gone; OSError from the tier.
    """
    storage = tiers[held_copy.tier]
    with db.transaction():
        if not holding.mark_held_copy_stale(db, held_copy):
            return None
        reserved, open_handles = (
            fetching.insert_reserved_copy(db, storage.tier),
            settling.get_file_record(db, held_copy.content.id).open_handles,
        )
    try:
        size, digest, blocks = _link_or_copy(storage, held_copy.content.id, reserved, is_open=bool(open_handles))
        if digest != held_copy.digest:
            settling.delete_copy(db, held_copy.content.id, storage.tier)
            removal.remove_unrecorded(db, storage, held_copy.content.id)
            raise DigestMismatch(
                f"generation {held_copy.generation} of content {held_copy.content.id} is not what it was in {storage.tier}"
            )
        if storage.tier is not Tier.RAM:
            storage.fsync_directory()
        return holding.insert_split_content(db, held_copy, reserved, inode, size, blocks)
    except BaseException:
        storage.remove(reserved)
        fetching.delete_filling_copy(db, reserved, storage.tier)
        raise


def _link_or_copy(storage: TierStorage, content: int, reserved: int, *, is_open: bool) -> transfer.ContentDigests:
    """The file of `content` as that of `number`, too, and what it is. `shared`: by whoever has it open it may yet be changed: a copy."""
    if not is_open:
        storage.remove(reserved)
        storage.link(content, reserved)
        with disk.closing(storage.open(reserved)) as fd:
            return transfer.read(fd, label="gather:older")
    with disk.closing(storage.open(content)) as source, disk.closing(storage.create(reserved)) as target:
        found = transfer.copy(source, target, label="gather:older")
        if storage.tier is not Tier.RAM:
            os.fsync(target)
        return found
