"""Separation of a file from the nodes and the history that keep its bytes, before it is written.

Other nodes hold a content that never changes: the file on this node gets a content of its own, which takes the bytes (`begin_successor`).

The history keeps the bytes of its sets (T6): its names get an inode of their own (`history.separate`). If the writer truncates the file and
no other program has it open, that inode takes the content, and nothing is copied. Otherwise it gets a verified copy, because open handles
stay with the file that they have, which the writer will change.

Crash safety: the new content is a reserved one until the transaction that separates the file. The next mount process dooms what is left
over.
"""

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Iterator

import trio

from ckptfs import disk
from ckptfs.catalog import contents, history, inodes
from ckptfs.catalog.contents import FileContent
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state, keys
from ckptfs.errors import Busy, DigestMismatch, NoSpace
from ckptfs.flow.open_decision import WriteTarget, choose_write_target
from ckptfs.model import Content, ContentState, Tier
from ckptfs.tiers import health, local_copies
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon import ipc
from ckptfs_daemon.mount.cluster.shared_namespace import LocalNamespace
from ckptfs_daemon.mount.context import MountContext, reserve_content
from ckptfs_daemon.mount.open_files.open_file import OpenFile
from ckptfs_daemon.mount.open_files.tier_calls import require_answer, run_in_thread
from ckptfs_daemon.mount.opening.open_request import MustWait
from ckptfs_daemon.mount.opening.tier_choice import SpaceWait

log = logging.getLogger(__name__)
disk.declare_labels("history:copied", "history:separated")


async def begin_successor(context: MountContext, inode: int, content: int, storage: TierStorage) -> int | None:
    """Give the file of a content that other nodes have to a new content of the inode.

    The content that other nodes hold never changes. The file keeps both names until the rows are recorded. Other nodes read `content` until
    this node has recorded something of the new one. Returns None if the file changed meanwhile. Raises FileNotFoundError.
    """
    with reserve_content(context.db, storage.tier) as successor:
        await run_in_thread(storage.tier, lambda: local_copies.link_successor(storage, content, successor))
        with context.open_files.change() as db:
            is_begun = contents.record_successor(db, inode, content, successor)
            if is_begun:
                with key_state.change_unmarked(db):
                    contents.set_current(db, inode, successor)
    if not is_begun:
        return None
    file = context.open_files.by_inode.get(inode)
    if file is not None and file.content == content:
        file.content = successor
    await run_in_thread(storage.tier, lambda: _leave_name(context.db, storage, content))
    return successor


def _leave_name(db: Database, storage: TierStorage, content: int) -> None:
    """Remove the name of a content whose file is its successor's; if that fails, reclaim does it."""
    if storage.tier is not Tier.RAM:
        db.persist()  # A power cut must not keep the removal and undo the rows.
    with contextlib.suppress(OSError):
        local_copies.remove_unrecorded(db, storage, content)


def separate_for_writer(
    context: MountContext, held: FileContent, *, truncates: bool, request_fetch: Callable[[], Awaitable[None]], tries: Iterator[object]
) -> FileContent:
    """Separate a file from its history in the caller's transaction, and return what is known of it then.

    Raises MustWait if the bytes must be fetched or copied first, and Busy at the end of `tries`, of which each copy takes one. In a cluster
    the program waits until other nodes know of the separation: none of them then takes the file for a part of another set.
    """
    inode, shared_namespace = held.inode.id, context.shared_namespace
    if shared_namespace.is_shared and not shared_namespace.is_disconnected and (unread := keys.list_unread_history(context.db, inode)):
        raise MustWait(lambda: _read_history(shared_namespace, inode, unread))
    if not history.list_names(context.db, inode):
        return held  # An island cannot change names that only the store knows. Its return leaves them this content.
    is_alone = inode not in context.open_files.by_inode
    target = choose_write_target(held, truncate=False)
    if target is WriteTarget.NEW or (truncates and is_alone and not held.is_remote and target is not WriteTarget.FETCH):
        history.separate(context.db, inode)
        found = contents.get_file_content(context.db, inode)
        assert found is not None
        return found
    if target is WriteTarget.FETCH:
        raise MustWait(request_fetch)
    content = contents.get_content(context.db, held.content or 0)
    if target is WriteTarget.LOST or content is None or content.state is ContentState.OPEN:
        return held
    if next(tries, None) is None:
        raise Busy(f"{inodes.get_shown_path(context.db, inode)}: its bytes for the history change all the time, or sets of it are made")
    source, size = context.tiers[held.tiers[0]], held.inode.size
    raise MustWait(lambda: _copy_to_history(context, content, source, size))


async def _read_history(shared_namespace: LocalNamespace, inode: int, names: list[tuple[int, bytes]]) -> None:
    """Read names of a file in the history that this node has not read yet."""
    await shared_namespace.refresh_inode(inode)
    await shared_namespace.refresh_change(names)


async def _copy_to_history(context: MountContext, content: Content, source: TierStorage, size: int) -> None:
    """Give the history a copy of a content. Raises NoSpace if no tier has room, nor is about to."""
    space_wait, refusing = SpaceWait(context), set[Tier]()
    while True:
        try:
            is_disk = source.tier is Tier.NVME and Tier.NVME not in refusing  # It may share the blocks.
            reserved_bytes = context.open_files.get_reserved_bytes()
            tier = Tier.NVME if is_disk else context.tiers.choose_tier(size, reserved_bytes, None, refusing)
            await _copy_in_tier(context, content, source, context.tiers[tier])
            return
        except NoSpace:
            refusing.clear()
            if not await space_wait.wait(size):
                raise
        except OSError as failure:
            if failure.errno not in health.FULL_ERRNOS and not health.is_tier_failure(failure):
                raise
            refusing.add(tier)


async def _copy_in_tier(context: MountContext, content: Content, source: TierStorage, target: TierStorage) -> None:
    is_separated = False
    with reserve_content(context.db, target.tier) as copied:
        try:
            await require_answer(target)
            await run_in_thread(max(source.tier, target.tier, key=list(Tier).index), lambda: _copy(source, target, content, copied))
            disk.reach("history:copied")
            readers = await _switch_readers(context, content.inode, target, copied)
            with context.open_files.change() as db:
                if contents.is_current(db, content.inode, content.id) and contents.is_unchanged(db, content):
                    is_separated = bool(history.list_names(db, content.inode) and history.separate(db, content.inode, copied))
            if is_separated:
                context.open_files.follow_history(content.inode)
                for file in readers:
                    file.content, file.storage = copied, target
            disk.reach("history:separated")
        except DigestMismatch:
            local_copies.quarantine(context.db, content, source.tier, "it does not have the digest of its seal")
    if is_separated and target.tier is not Tier.RAM:
        # A power cut must not undo the rows and keep what the writer does to the bytes.
        await trio.to_thread.run_sync(context.db.persist)
    if is_separated:
        await context.shared_namespace.wait_published()
    context.wake_channel.notify(ipc.WORK)


async def _switch_readers(context: MountContext, inode: int, target: TierStorage, copied: int) -> list[OpenFile]:
    """Let all readers of the history read the copy, before the other file changes.

    Returns them. Raises Busy if one cannot. The kernel cannot be made to read another file. It reads a file of the history itself only if
    no program could write that when it was opened, so a program would have to write it by a descriptor from before.
    """
    switched: list[OpenFile] = []
    while left := [file for file in context.open_files.list_history_readers(inode) if file not in switched and file.content is not None]:
        file = left[0]
        if file.backing_id:
            path = inodes.get_shown_path(context.db, inode)
            raise Busy(f"{path}: a program reads its set in the history; try again when it is done")
        fd, tier = await run_in_thread(target.tier, lambda: target.open(copied)), file.tier
        if file in context.open_files.list_history_readers(inode):
            file.fetch_waiter = None
            fd = file.swap_fd(fd)
            await file.wait_idle()
            switched.append(file)
        context.open_files.slow_calls.close(fd, tier)
    return switched


def _copy(source: TierStorage, target: TierStorage, content: Content, copied: int) -> None:
    expected = None if content.digest is None else (content.size, content.digest)
    with disk.closing(source.open(content.id)) as fd:
        os.close(local_copies.copy_open(fd, target, copied, expected))
