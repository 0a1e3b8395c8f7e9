"""Copies of contents in the tiers of this node: copies, moves, removal, stale generations, stashes.

- A copy is announced by a FILLING row, written, synced and read back; only then is it good (P4).
- A copy that differs from the seal is quarantined, wherever that is found. The verify step remakes it from the nearest good copy.
- The file of a forgotten copy is removed in a transaction, so that a copy that was announced since keeps its file. The PFS must not be
  accessed in a transaction; its leftovers are found by a sweep.
- A STALE copy is a generation of a content that its writer had open and has closed since. It serves blocks for the next generation, and
  becomes a content of its own if it is the last one left.
- While the next generation is fetched, the file of a stale copy is stashed under another id: it may be the last copy (P5).

Crash safety: FILLING rows and stashes remain; recovery removes the rows with their files and restores the stashes. A file without a row
is removed by the reclaim step.
"""

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ckptfs import disk
from ckptfs.catalog import contents, copies, remote_contents
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get_shown_path
from ckptfs.catalog.remote_contents import HeldCopy
from ckptfs.digest import split_digests
from ckptfs.errors import Busy, DigestMismatch
from ckptfs.model import Content, ContentState, CopyState, Tier
from ckptfs.tiers import reflink, transfer
from ckptfs.tiers.storage import Tiers, TierStorage

log = logging.getLogger(__name__)
_NO_LINKS_ERRNOS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}

transfer.declare_labels("duplicate", "duplicate:check", "fetch:peer:previous", "move:copy", "move:check")
disk.declare_labels("move:create", "move:fsync", "move:directory", "move:recorded", "move:persist", "move:remove")
disk.declare_labels("duplicate:announced", "duplicate:fsync", "duplicate:directory", "duplicate:counted", "duplicate:persist")


def find_problem(storage: TierStorage, content: Content, *, label: str, before_block: Callable[[], None] = lambda: None) -> str:
    """Return how the copy of a sealed content differs from its seal, or "".

    The bytes are read from the device and do not stay in the page cache. Raises OSError if the tier fails: then nothing is known of the
    copy.
    """
    try:
        fd = storage.open(content.id, os.O_RDONLY)
    except FileNotFoundError:
        return "its file is gone"
    with disk.closing(fd):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size, digest, blocks = transfer.read(fd, label=label, before_block=before_block)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if size != content.size:
        return f"it has {size} bytes instead of {content.size}"
    return "" if digest == content.digest else f"its digest differs{_describe_first_difference(content.block_digests or b'', blocks)}"


def _describe_first_difference(expected: bytes, found: bytes) -> str:
    pairs = zip(split_digests(expected), split_digests(found), strict=False)
    return next((f" in block {number}" for number, (one, other) in enumerate(pairs) if one != other), "")


def quarantine(db: Database, seen: Content, tier: Tier, problem: str) -> bool:
    """Quarantine a bad copy (P4). Return False if the content or the copy has changed since it was read.

    The content is LOST if nothing else has it.
    """
    with db.transaction():
        known = [copy.state for copy in copies.list_copies(db, seen.id) if copy.tier is tier]
        if not contents.is_unchanged(db, seen) or not known or known[0] is CopyState.FILLING:
            return False
        if known[0] is CopyState.QUARANTINED:
            return True
        copies.mark_copy_bad(db, seen.id, tier)
        is_lost = seen.state is ContentState.SEALED and contents.mark_lost(db, seen)
    path = get_shown_path(db, seen.inode)
    log.error("%s: the copy in %s is quarantined: %s", path, tier, problem)
    if is_lost:
        log.error("%s: lost: no copy has the sealed digest; reads fail with EIO", path)
    return True


def copy_to_tier(db: Database, tiers: Tiers, content: Content, source: Tier, target: Tier) -> None:
    """Copy the SEALED `content` from `source` to `target`.

    Raises Busy if the content is opened for writing, DigestMismatch if the bytes of `source` are not the sealed ones (that copy is then
    quarantined), and OSError of either tier. After an error no trace of the new copy remains.
    """
    if not copies.insert_filling_copy(db, content, target):
        raise Busy("the content has changed")
    disk.reach("duplicate:announced")
    try:
        _copy_bytes(db, tiers, content, source, target)
        if not copies.mark_copy_good(db, content, target):
            raise Busy("the content has changed")
    except BaseException:
        _remove_unfinished(db, tiers, content, target)
        raise
    disk.reach("duplicate:counted")
    if target is not Tier.RAM:
        disk.act("duplicate:persist", db.persist)


def _copy_bytes(db: Database, tiers: Tiers, content: Content, source: Tier, target: Tier) -> None:
    check = partial(contents.require_unchanged, db, content)
    tiers[target].remove(content.id)
    with disk.closing(tiers[source].open(content.id)) as source_fd, disk.closing(tiers[target].create(content.id)) as target_fd:
        tiers[target].reserve_copy(target_fd, source_fd)
        size, digest, _ = transfer.copy(source_fd, target_fd, label="duplicate", before_block=check)
        if (size, digest) != (content.size, content.digest):
            if not quarantine(db, content, source, "its digest is not the sealed one"):
                raise Busy("the content has changed")
            raise DigestMismatch(f"the copy of content {content.id} in {source} does not have the digest that it was sealed with")
        tiers[target].persist(target_fd, "duplicate")
        size, digest, _ = transfer.read(target_fd, label="duplicate:check", before_block=check)
        if (size, digest) != (content.size, content.digest):
            raise DigestMismatch(f"content {content.id} does not read back from {target} as written")


def _remove_unfinished(db: Database, tiers: Tiers, content: Content, target: Tier) -> None:
    """Remove an unfinished copy. If the tier fails, the reclaim step removes the file later."""
    with suppress(OSError):
        tiers[target].remove(content.id)
    with db.transaction():
        if any(copy.tier is target and copy.state is CopyState.FILLING for copy in copies.list_copies(db, content.id)):
            copies.delete_copy(db, content.id, target)


def copy_open(source_fd: int, target: TierStorage, content: int, expected: tuple[int, bytes] | None = None) -> int:
    """Copy an open content, which no process writes, to `target`.

    Return a writable descriptor of the verified copy. `expected`: (size, digest) of a sealed content, with which the copy shares its blocks
    if the tier can. On a disk, bytes and name are durable: the source may have been fsynced. Raises OSError or DigestMismatch, and removes
    the copy.
    """
    target.remove(content)
    fd = disk.act("move:create", target.create, content)
    try:
        status = os.fstat(source_fd)
        if expected is not None and reflink.clone(source_fd, fd):
            written = expected
        else:
            target.reserve_copy(fd, source_fd)
            written = transfer.copy(source_fd, fd, label="move:copy")[:2]
            if written != (expected or written):
                raise DigestMismatch(f"the source of content {content} does not have its digest")
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))
        target.persist(fd, "move")
        if transfer.read(fd, label="move:check")[:2] != written:
            raise DigestMismatch(f"content {content} does not read back from {target.tier} as written")
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            target.remove(content)
        raise
    return fd


def record_open_move(db: Database, content: int, source: TierStorage, target: Tier) -> None:
    """Record that an open content has moved."""
    with db.transaction():
        contents.record_move(db, content, source.tier, target)
    disk.reach("move:recorded")


def remove_moved(db: Database, source: TierStorage, content: int) -> None:
    """Remove the file that an open content has left, once that is durable (P5).

    If a disk fails, the reclaim step does it later.
    """
    try:
        if source.tier is not Tier.RAM:
            disk.act("move:persist", db.persist)
        fd = disk.act("move:remove", source.detach, content)
    except OSError as failure:
        log.info("content %d: its previous file in %s stays for the next sweep: %s", content, source.tier, failure)
        return
    if fd >= 0:
        os.close(fd)


def remove_unrecorded(db: Database, storage: TierStorage, *numbers: int) -> None:
    """Remove the files of copies that have no row; none can be inserted meanwhile.

    The descriptors are closed after the transaction, since freeing a large file takes long.
    """
    if storage.tier is Tier.PFS:
        return
    detached: list[int] = []
    try:
        with db.transaction():
            for number in numbers:
                if not copies.has_copy(db, number, storage.tier):
                    detached.append(storage.detach(number))
    finally:
        for fd in detached:
            if fd >= 0:
                os.close(fd)


def promote_stale(db: Database, tiers: Tiers, held_copy: HeldCopy, inode: int) -> Content | None:
    """Make a held copy a content of its own, of the file `inode`. Return None if the copy has changed.

    The new content is unpublished. Raises DigestMismatch, and then the copy is deleted; OSError of the tier.
    """
    storage = tiers[held_copy.tier]
    with db.transaction():
        if not remote_contents.mark_held_copy_stale(db, held_copy):
            return None
        reserved = copies.insert_reserved_copy(db, storage.tier)
        open_handles = contents.get_file_record(db, held_copy.content.id).open_handles
    try:
        size, digest, blocks = _link_or_copy(storage, held_copy.content.id, reserved, is_open=bool(open_handles))
        if digest != held_copy.digest:
            copies.delete_copy(db, held_copy.content.id, storage.tier)
            remove_unrecorded(db, storage, held_copy.content.id)
            raise DigestMismatch(f"the copy of content {held_copy.content.id} in {storage.tier} is not generation {held_copy.generation}")
        if storage.tier is not Tier.RAM:
            storage.fsync_directory()
        return remote_contents.insert_split_content(db, held_copy, reserved, inode, size, blocks)
    except BaseException:
        storage.remove(reserved)
        copies.delete_filling_copy(db, reserved, storage.tier)
        raise


def _link_or_copy(storage: TierStorage, content: int, reserved: int, *, is_open: bool) -> transfer.ContentDigests:
    """Give `reserved` the file of `content`: a hard link, or a copy if a writer may change it."""
    if not is_open:
        storage.remove(reserved)
        storage.link(content, reserved)
        with disk.closing(storage.open(reserved)) as fd:
            return transfer.read(fd, label="fetch:peer:previous")
    with disk.closing(storage.open(content)) as source, disk.closing(storage.create(reserved)) as target:
        found = transfer.copy(source, target, label="fetch:peer:previous")
        if storage.tier is not Tier.RAM:
            os.fsync(target)
        return found


def link_successor(storage: TierStorage, content: int, successor: int) -> None:
    """Give the file of `content` the name of `successor` as well. Raises FileNotFoundError.

    On a PFS without hard links it loses its old name: if we die then, the content is still on other nodes.
    """
    storage.remove(successor)
    try:
        is_linked = storage.link(content, successor)
    except OSError as failure:
        if storage.tier is not Tier.PFS or failure.errno not in _NO_LINKS_ERRNOS:
            raise
        storage.rename(content, successor)
        is_linked = True
    if not is_linked:
        raise FileNotFoundError(content)
    if storage.tier is not Tier.RAM:
        storage.fsync_directory()


def stash(db: Database, storage: TierStorage, content: int) -> int | None:
    """Stash the file of a held copy in the caller's transaction. Return its temporary id or None."""
    stash_id = copies.stash_copy(db, content, storage.tier)
    if stash_id is not None:
        try:
            storage.rename(content, stash_id)
        except FileNotFoundError:
            copies.delete_stashed(db, stash_id, storage.tier)
            return None
    return stash_id


def restore_stashed(db: Database, storage: TierStorage, stash_id: int | None) -> None:
    """Restore a stashed file after a failed fetch, unless there is a newer copy."""
    if stash_id is None:
        return
    with db.transaction():
        content = copies.restore_stashed(db, stash_id, storage.tier)
        if content is None:
            storage.remove(stash_id)
        else:
            with suppress(FileNotFoundError):  # It was not renamed yet.
                storage.rename(stash_id, content)


def drop_stashed(db: Database, storage: TierStorage, stash_id: int | None) -> None:
    """Remove a stashed file after its successor is complete."""
    if stash_id is not None:
        with db.transaction():
            copies.delete_stashed(db, stash_id, storage.tier)
        storage.remove(stash_id)
