"""Acts of an open on the files of a tier, most of them in threads: they may take long or hang.

Crash safety: see `open_attempt`.
"""

import contextlib
import errno
import os
from typing import NamedTuple

from ckptfs import disk
from ckptfs.catalog import contents
from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state
from ckptfs.model import ContentState, Tier
from ckptfs.tiers import local_copies, space
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon import ipc
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.open_files.open_file import run_in_thread

_NO_LINKS_ERRNOS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


class PfsFacts(NamedTuple):
    """The status of a file on the PFS, and the capacity of the PFS, when the file was opened."""

    status: os.stat_result
    capacity: space.Capacity


def read_pfs_facts(fd: int) -> PfsFacts:
    """May hang."""
    return PfsFacts(os.fstat(fd), space.read_capacity(fd))


def remove_quietly(storage: TierStorage, content: int) -> None:
    """Remove a file that is not needed. If its tier fails, the reclaim flow removes it later."""
    with contextlib.suppress(OSError):
        storage.remove(content)


async def begin_successor(context: MountContext, inode: int, content: int, storage: TierStorage) -> int | None:
    """Give the file of a content that other nodes have to a new content of the inode.

    The content that other nodes hold never changes.

    The file keeps both names until the rows are recorded. Other nodes read `content` until this node has recorded something of the new
    one. Returns None if the file changed meanwhile. Raises FileNotFoundError.
    """
    with context.db.transaction() as db:
        successor = contents.insert_reserved_content(db, storage.tier)
    is_begun = False
    try:
        await run_in_thread(storage.tier, lambda: link_successor(storage, content, successor))
        with context.open_files.change() as db:
            is_begun = contents.record_successor(db, inode, content, successor)
            if is_begun:
                with key_state.change_unmarked(db):
                    contents.set_current(db, inode, successor)
    finally:
        if not is_begun:
            with context.db.transaction() as db:
                contents.mark_doomed(db, successor)
    if not is_begun:
        return None
    file = context.open_files.by_inode.get(inode)
    if file is not None and file.content == content:
        file.content = successor
    await run_in_thread(storage.tier, lambda: _leave_name(context.db, storage, content))
    return successor


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


def _leave_name(db: Database, storage: TierStorage, content: int) -> None:
    """Remove the name of a content whose file is its successor's; if that fails, reclaim does it."""
    if storage.tier is not Tier.RAM:
        db.persist()  # A power cut must not keep the removal and undo the rows.
    with contextlib.suppress(OSError):
        local_copies.remove_unrecorded(db, storage, content)


def reclose_unsealed(context: MountContext, content: int) -> None:
    """Close a content that was unsealed for a writer that failed to open it. Its seal finds its size."""
    with context.open_files.change() as db:
        known = contents.get_content(db, content)
        if known is None or known.state is not ContentState.OPEN:
            return
        held = contents.get_file_content(db, known.inode)
        if held is None or held.content != content:
            contents.mark_doomed(db, content)
        elif context.open_files.is_open_for_writing(known.inode):
            return
        else:
            row = held.inode
            contents.mark_closed(db, row.id, content, row.size, row.atime_ns, row.mtime_ns)
    context.wake_channel.notify(ipc.WORK)


def truncate_content(storage: TierStorage, content: int) -> None:
    with disk.closing(storage.open(content, os.O_RDWR)) as fd:
        os.ftruncate(fd, 0)
