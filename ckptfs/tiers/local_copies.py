"""Owns how one more copy of a sealed content is made in another tier of this node: announced, copied, synced, read back, then counted (P4).

The row is FILLING from before the file exists until its digest was found right where it lies, so nobody ever takes a part for the whole.
If we die here: a FILLING row, with or without a file; the recover flow removes both.

Owns how the file of a copy goes that was forgotten: at once, however large it is, and never one that somebody has announced since.

Whoever brings a content back announces that first, which cannot happen inside our transaction. On the PFS, which must not be asked inside
one, files are left to the sweep of what no row names.
If we die here: a file without a row, which the drop flow finds.

Owns what may be done with a former generation of another node's content that still lies here: it is found by its digest, read from where
it lies (P4), and becomes a content of its own when it is all that is left.

If we die here: nothing was changed, or a FILLING copy without a content is left, which recovery removes with its file.

Owns the file of a former generation that is put aside while the next one is fetched into its place: until that is here, and was found
right, it may be all that is left of the content (P5).

If we die here: the row and the file are under one id or under the other, and recovery brings them together again.
"""

import contextlib
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ckptfs import disk
from ckptfs.catalog import contents, copies, remote_contents
from ckptfs.catalog.database import Database
from ckptfs.catalog.remote_contents import HeldCopy
from ckptfs.errors import Busy, DigestMismatch
from ckptfs.model import Content, CopyState, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.storage import Tiers, TierStorage

transfer.declare_labels("duplicate")
transfer.declare_labels("duplicate:check")
disk.declare_labels("duplicate:announced", "duplicate:fsync", "duplicate:directory", "duplicate:counted", "duplicate:persist")


def copy_to_tier(db: Database, tiers: Tiers, content: Content, source: Tier, target: Tier) -> None:
    """Make a good copy of the SEALED `content` in `target` from the one in `source`.

    Raises Busy when the content was opened for writing meanwhile, DigestMismatch when the bytes of `source` are not what was sealed (its
    copy is quarantined then) and OSError from either tier. Whatever is raised, no trace of the new copy is left.
    """
    if not copies.insert_filling_copy(db, content, target):
        raise Busy("the content moved on")
    disk.act("duplicate:announced", lambda: None)
    try:
        _copy_bytes(db, tiers, content, source, target)
        if not copies.mark_copy_good(db, content, target):
            raise Busy("the content moved on")
    except BaseException:
        _remove_unfinished(db, tiers, content, target)
        raise
    disk.act("duplicate:counted", lambda: None)
    if target is not Tier.RAM:
        disk.act("duplicate:persist", db.persist)


def _copy_bytes(db: Database, tiers: Tiers, content: Content, source: Tier, target: Tier) -> None:
    def check() -> None:
        if not contents.is_unchanged(db, content):
            raise Busy("the content is opened for writing")

    tiers[target].remove(content.id)
    with disk.closing(tiers[source].open(content.id)) as source_fd, disk.closing(tiers[target].create(content.id)) as target_fd:
        size, digest, _ = transfer.copy(source_fd, target_fd, label="duplicate", before_block=check)
        _verify_source(db, content, source, (size, digest), check)
        if target is not Tier.RAM:
            disk.act("duplicate:fsync", os.fsync, target_fd)
            disk.act("duplicate:directory", tiers[target].fsync_directory)
            # What is read back next shall come from the disk.
            os.posix_fadvise(target_fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size, digest, _ = transfer.read(target_fd, label="duplicate:check", before_block=check)
        if (size, digest) != (content.size, content.digest):
            raise DigestMismatch(f"what was written to {target} for content {content.id} reads back as something else")


def _verify_source(db: Database, content: Content, source: Tier, found: tuple[int, bytes], check: Callable[[], None]) -> None:
    """The bytes that were read must be those that were sealed; if not, and nobody writes to them, the source is bad."""
    if found == (content.size, content.digest):
        return
    check()
    copies.set_copy_state(db, content.id, source, CopyState.QUARANTINED)
    raise DigestMismatch(f"the copy of content {content.id} in {source} does not have the digest that it was sealed with")


def _remove_unfinished(db: Database, tiers: Tiers, content: Content, target: Tier) -> None:
    """Take the unfinished copy back, as far as the tier lets us; what stays is a leftover for the drop flow."""
    with contextlib.suppress(OSError):
        tiers[target].remove(content.id)
    with db.transaction():
        if any(copy.tier is target and copy.state is CopyState.FILLING for copy in copies.list_copies(db, content.id)):
            copies.delete_copy(db, content.id, target)


def remove_unrecorded(db: Database, storage: TierStorage, number: int) -> None:
    """Remove the file of a copy that is on record no more."""
    if storage.tier is Tier.PFS:
        return
    with db.transaction():
        fd = -1 if copies.has_copy(db, number, storage.tier) else storage.detach(number)
    if fd >= 0:
        os.close(fd)


transfer.declare_labels("fetch:peer:older")


@dataclass(frozen=True, slots=True)
class StaleCopy:
    """A file with that digest; `fd` is whoever's who asked."""

    storage: TierStorage
    fd: int
    size: int
    blocks: bytes


def find_stale(db: Database, tiers: Tiers, content: int, wanted_digest: bytes) -> StaleCopy | None:
    """What lies here of a content in the state that has the digest `wanted`."""
    for copy in copies.list_copies(db, content):
        if copy.state is CopyState.STALE and copy.tier in tiers and copy.tier is not Tier.PFS:
            with suppress(FileNotFoundError):
                fd = tiers[copy.tier].open(content)
                try:
                    size, digest, blocks = transfer.read(fd, label="fetch:peer:older")
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
        if not remote_contents.mark_held_copy_stale(db, held_copy):
            return None
        reserved, open_handles = (
            copies.insert_reserved_copy(db, storage.tier),
            contents.get_file_record(db, held_copy.content.id).open_handles,
        )
    try:
        size, digest, blocks = _link_or_copy(storage, held_copy.content.id, reserved, is_open=bool(open_handles))
        if digest != held_copy.digest:
            copies.delete_copy(db, held_copy.content.id, storage.tier)
            remove_unrecorded(db, storage, held_copy.content.id)
            raise DigestMismatch(
                f"generation {held_copy.generation} of content {held_copy.content.id} is not what it was in {storage.tier}"
            )
        if storage.tier is not Tier.RAM:
            storage.fsync_directory()
        return remote_contents.insert_split_content(db, held_copy, reserved, inode, size, blocks)
    except BaseException:
        storage.remove(reserved)
        copies.delete_filling_copy(db, reserved, storage.tier)
        raise


def _link_or_copy(storage: TierStorage, content: int, reserved: int, *, is_open: bool) -> transfer.ContentDigests:
    """The file of `content` as that of `number`, too, and what it is. `shared`: by whoever has it open it may yet be changed: a copy."""
    if not is_open:
        storage.remove(reserved)
        storage.link(content, reserved)
        with disk.closing(storage.open(reserved)) as fd:
            return transfer.read(fd, label="fetch:peer:older")
    with disk.closing(storage.open(content)) as source, disk.closing(storage.create(reserved)) as target:
        found = transfer.copy(source, target, label="fetch:peer:older")
        if storage.tier is not Tier.RAM:
            os.fsync(target)
        return found


def stash(db: Database, storage: TierStorage, content: int) -> int | None:
    """Put what is kept of a content aside, in the caller's transaction; its id until then, None where there is nothing to keep."""
    stash_id = copies.stash_copy(db, content, storage.tier)
    if stash_id is not None:
        try:
            storage.rename(content, stash_id)
        except FileNotFoundError:
            copies.delete_stashed(db, stash_id, storage.tier)
            return None
    return stash_id


def restore_stashed(db: Database, storage: TierStorage, stash_id: int | None) -> None:
    """The fetch failed, or died: what was put aside is what lies here again, unless there is something newer by now."""
    if stash_id is None:
        return
    with db.transaction():
        content = copies.restore_stashed(db, stash_id, storage.tier)
        if content is None:
            storage.remove(stash_id)
        else:
            with contextlib.suppress(FileNotFoundError):  # It never got its other name.
                storage.rename(stash_id, content)


def drop_stashed(db: Database, storage: TierStorage, stash_id: int | None) -> None:
    """What came after it is here."""
    if stash_id is not None:
        with db.transaction():
            copies.delete_stashed(db, stash_id, storage.tier)
        storage.remove(stash_id)


def restore_all_stashed(db: Database, storage: TierStorage) -> None:
    """A former mover died while it fetched."""
    for stash_id in copies.list_stashed(db, storage.tier):
        restore_stashed(db, storage, stash_id)
