"""Owns how one more copy of a sealed content is made in another tier of this node: announced, copied, synced, read back, then counted (P4).

The row is FILLING from before the file exists until its digest was found right where it lies, so nobody ever takes a part for the whole.
If we die here: a FILLING row, with or without a file; the recover flow removes both.
"""

import contextlib
import os
from collections.abc import Callable

from ckptfs import disk
from ckptfs.catalog import settling
from ckptfs.catalog.database import Database
from ckptfs.errors import Busy, DigestMismatch
from ckptfs.model import Content, CopyState, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.place import Tiers

transfer.declare_labels("duplicate")
transfer.declare_labels("duplicate:check")
disk.declare_labels("duplicate:announced", "duplicate:fsync", "duplicate:directory", "duplicate:counted", "duplicate:persist")


def copy_to_tier(db: Database, tiers: Tiers, content: Content, source: Tier, target: Tier) -> None:
    """Make a good copy of the SEALED `content` in `target` from the one in `source`.

    Raises Busy when the content was opened for writing meanwhile, DigestMismatch when the bytes of `source` are not what was sealed (its
    copy is quarantined then) and OSError from either tier. Whatever is raised, no trace of the new copy is left.
    """
    if not settling.insert_filling_copy(db, content, target):
        raise Busy("the content moved on")
    disk.act("duplicate:announced", lambda: None)
    try:
        _copy_bytes(db, tiers, content, source, target)
        if not settling.mark_copy_good(db, content, target):
            raise Busy("the content moved on")
    except BaseException:
        _remove_unfinished(db, tiers, content, target)
        raise
    disk.act("duplicate:counted", lambda: None)
    if target is not Tier.RAM:
        disk.act("duplicate:persist", db.persist)


def _copy_bytes(db: Database, tiers: Tiers, content: Content, source: Tier, target: Tier) -> None:
    def check() -> None:
        if not settling.is_unchanged(db, content):
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
    settling.set_copy_state(db, content.id, source, CopyState.QUARANTINED)
    raise DigestMismatch(f"the copy of content {content.id} in {source} does not have the digest that it was sealed with")


def _remove_unfinished(db: Database, tiers: Tiers, content: Content, target: Tier) -> None:
    """Take the unfinished copy back, as far as the tier lets us; what stays is a leftover for the drop flow."""
    with contextlib.suppress(OSError):
        tiers[target].remove(content.id)
    with db.transaction():
        if any(copy.tier is target and copy.state is CopyState.FILLING for copy in settling.list_copies(db, content.id)):
            settling.delete_copy(db, content.id, target)
