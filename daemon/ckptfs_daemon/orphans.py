"""Owns what has no name left while the kernel may still know it: an open file, somebody's working directory, an O_PATH descriptor.

The kernel says FORGET when it does; then the row and the contents go, in batches, a moment later. Before that the kernel itself is asked
(an invalidation of an inode that it does not know fails with ENOENT), because a FORGET may be older than a lookup, and because one that a
dead mount process had read is not sent again: whatever is left over is looked at every `limits.ORPHANS_INTERVAL_S`.
If we die here: the rows with nlink 0 are found again by the next mount process.
"""

import logging
from collections.abc import Callable, Iterable

import trio

from ckptfs import limits
from ckptfs.catalog import namespace
from ckptfs.model import Inode
from ckptfs_daemon import bells
from ckptfs_daemon.handler import ChangeRunner

import pyfuse3  # isort: skip

log = logging.getLogger(__name__)


def is_known_to_kernel(inode: int) -> bool:
    """Whether the kernel has this inode in memory. Not to be called inside a handler."""
    try:
        pyfuse3.invalidate_inode(pyfuse3.InodeT(inode), attr_only=True)
    except FileNotFoundError:
        return False
    except OSError as failure:
        log.debug("cannot ask the kernel about inode %d: %s", inode, failure)
    return True


class OrphanHandlers(ChangeRunner):
    """Handler of FORGET, and the task that deletes."""

    def __init__(self) -> None:
        self._orphans: set[int] = set()
        self._forgotten: set[int] = set()
        self._wake = trio.Event()

    def track_orphan(self, inode: Inode) -> None:
        """A name of `inode` was taken away; remember it when that was the last one."""
        if inode.nlink == 0:
            self._orphans.add(inode.id)

    def add_orphans(self, inodes: Iterable[int]) -> None:
        """These have no name any more: another node took it away."""
        self._orphans.update(inodes)
        self._forgotten.update(inodes)
        self._wake.set()

    async def forget(self, inode_list: Iterable[tuple[int, int]]) -> None:
        """The kernel dropped these inodes. Never raises."""
        forgotten = self._orphans.intersection(inode for inode, _ in inode_list)
        if forgotten:
            self._forgotten |= forgotten
            self._wake.set()

    async def run_orphan_deletion(self, is_known: Callable[[int], bool] = is_known_to_kernel) -> None:
        """The task: delete what the kernel forgot, soon after it did; and look at everything without a name from time to time."""
        while True:
            self._orphans |= namespace.list_orphans(self.context.db)
            await self._delete_unknown(set(self._orphans), is_known)
            with trio.move_on_after(limits.ORPHANS_INTERVAL_S):
                while True:
                    await self._wake.wait()
                    await trio.sleep(limits.ORPHANS_GATHER_S)
                    self._wake = trio.Event()
                    forgotten, self._forgotten = self._forgotten, set()
                    await self._delete_unknown(forgotten, is_known)

    async def _delete_unknown(self, candidates: set[int], is_known: Callable[[int], bool]) -> None:
        """Delete those of `candidates` that the kernel does not know."""
        if not candidates:
            return
        unknown = await trio.to_thread.run_sync(lambda: sorted(inode for inode in candidates if not is_known(inode)))
        for start in range(0, len(unknown), limits.CHANGE_ROWS_MAX):
            self._delete_orphans(unknown[start : start + limits.CHANGE_ROWS_MAX])
            await trio.lowlevel.checkpoint()

    def _delete_orphans(self, inodes: list[int]) -> None:
        """Delete these inodes in one change, and their bytes in RAM at once. What is still open stays an orphan."""
        with self.context.db.transaction() as db:
            reaped = namespace.delete_forgotten(db, inodes)
        self._orphans.difference_update(reaped)
        doomed = [content for contents in reaped.values() for content in contents]
        self.context.open_files.delete_ram_files(doomed)
        if doomed or (reaped and self.context.shared_namespace is not None):
            self.context.wake_channel.notify(bells.WORK)  # Of what other nodes wrote they are told.
