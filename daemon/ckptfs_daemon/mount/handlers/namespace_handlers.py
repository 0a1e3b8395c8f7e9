"""Handlers of names and directories, statfs, and the deletion of inodes without a name.

Each change of a name is one change of the catalog and one reply. The handle of a directory is the number of its inode.

An inode that loses its last name stays in the catalog as an orphan while the kernel knows it: an open file, a working directory, an O_PATH
descriptor. After FORGET its row and contents are deleted, in batches. The kernel is asked before each deletion (invalidating an unknown
inode fails with ENOENT), because a FORGET may be older than a lookup. A FORGET that a dead mount process had read is lost.
So all orphans are checked every `limits.ORPHANS_INTERVAL_S`.

Crash safety: see `context`. The next mount process finds orphans by nlink 0, and continues a readdir at the kernel's offset.
"""

import errno
import itertools
import logging
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import trio

from ckptfs import limits
from ckptfs.catalog import copies, handles, history_names, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.namespace import NotImported
from ckptfs.coherence import ownership
from ckptfs.errors import CkptfsError, posix_error
from ckptfs.model import Inode, Tier
from ckptfs.tiers.space import Capacity, read_capacity
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse.request import build_negative_entry, get_current_request
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.handlers import creating_calls
from ckptfs_daemon.mount.sets.set_tracker import SetTracker

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip
import pyfuse3  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import ReaddirToken, RequestContext, StatvfsData

log = logging.getLogger(__name__)

DOT, DOTS = 1, 2
"""Offsets after '.' and '..'. The offset of any other entry is its cookie plus `DOTS`."""

INODES_MAX = 2**48
"""The inode count that statfs reports: numbers have 63 bits, and only the disk of the catalog limits them."""

INODE_ID_BYTES = 8
"""Bytes of the recorded reply to a request that created a name: the number of the inode."""


class NamespaceHandlers:
    """Handlers of names: lookup, create without opening, link, unlink, rename."""

    def __init__(self, context: MountContext, changes: ChangeRunner, orphans: "OrphanTracker", tracker: SetTracker) -> None:
        self._context, self._changes, self._orphans, self._tracker = context, changes, orphans, tracker

    async def lookup(self, parent_inode: int, name: bytes, ctx: "RequestContext") -> EntryAttributes:
        """Return the inode of a name, or a negative entry, which the kernel caches too."""
        context, prefetch = self._context, self._context.prefetch
        if prefetch is not None:
            await prefetch.refresh_name(parent_inode, name, pid=ctx.pid)
        try:
            found = namespace.lookup(context.db, parent_inode, name)
            if prefetch is not None:
                prefetch.record_reached(ctx.pid, found.id)
            if context.open_files.is_on_pfs(found.id):
                await context.open_files.refresh_status(found.id)
                found = namespace.lookup(context.db, parent_inode, name)
            return context.build_reply(found)
        except FileNotFoundError:
            return context.build_negative_entry()
        except NotImported as missing:
            directory = missing.directory
        try:
            return context.build_reply(await self._changes.lookup_after_scan(directory, name))
        except FileNotFoundError:
            return context.build_negative_entry()
        except (OSError, CkptfsError):
            if not await _is_creating(ctx.pid, name):
                raise
            return build_negative_entry(0)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: "RequestContext") -> EntryAttributes:
        return await self._create_inode(parent_inode, name, stat.S_IFDIR | (stat.S_IMODE(mode) & ~ctx.umask), ctx)

    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: "RequestContext") -> EntryAttributes:
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        return await self._create_inode(parent_inode, name, kind | (stat.S_IMODE(mode) & ~ctx.umask), ctx, rdev=rdev)

    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: "RequestContext") -> EntryAttributes:
        return await self._create_inode(parent_inode, name, stat.S_IFLNK | 0o777, ctx, target=target)

    async def _create_inode(
        self, parent: int, name: bytes, mode: int, ctx: "RequestContext", *, rdev: int = 0, target: bytes | None = None
    ) -> EntryAttributes:
        request = get_current_request()
        replayed = await self._changes.get_replayed_reply(request)
        if replayed is not None:
            return self._context.build_reply(self._context.get_inode(int.from_bytes(replayed, "little")))

        def act(db: Database, allow_unimported: bool) -> Inode:
            inode = namespace.create(
                db, parent, name, mode, uid=ctx.uid, gid=ctx.gid, rdev=rdev, target=target, allow_unimported=allow_unimported
            )
            handles.record_reply(db, request.number, inode.id.to_bytes(INODE_ID_BYTES, "little"))
            return inode

        created = await self._context.shared_namespace.commit_shared(lambda: self._changes.run_change(act, creates=True), [(parent, name)])
        return self._context.build_reply(created)

    async def link(self, inode: int, new_parent_inode: int, new_name: bytes) -> EntryAttributes:
        linked = await self._change_names(
            lambda db, allow_unimported: namespace.link(db, inode, new_parent_inode, new_name, allow_unimported=allow_unimported),
            [(new_parent_inode, new_name)],
            inodes=[inode],
            creates=True,
        )
        return self._context.build_reply(linked or self._context.get_inode(inode))

    async def unlink(self, parent_inode: int, name: bytes) -> None:
        place = (parent_inode, name)
        self._orphans.track(await self._change_names(lambda db, _: namespace.unlink(db, *place), [place], removed=place))

    async def rmdir(self, parent_inode: int, name: bytes) -> None:
        self._orphans.track(await self._change_names(lambda db, _: namespace.rmdir(db, parent_inode, name), [(parent_inode, name)]))

    async def rename(self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes, flags: int) -> None:
        def rename(db: Database, allow_unimported: bool) -> Inode | None:
            return namespace.rename(db, parent_inode_old, name_old, parent_inode_new, name_new, flags, allow_unimported=allow_unimported)

        names = [(parent_inode_old, name_old), (parent_inode_new, name_new)]

        def is_own() -> bool:
            return ownership.can_rename(self._context.db, parent_inode_old, name_old, parent_inode_new, name_new, flags)

        self._orphans.track(await self._change_names(rename, names, creates=True, removed=names[1], is_own=is_own))

    async def _change_names(
        self,
        change: Callable[[Database, bool], Inode | None],
        names: list[tuple[int, bytes]],
        *,
        inodes: Sequence[int] = (),
        creates: bool = False,
        removed: tuple[int, bytes] | None = None,
        is_own: Callable[[], bool] = lambda: True,
    ) -> Inode | None:
        """Run `change` once for the current request.

        Returns its result, or None if the request was done before a crash. `removed`: the name that a file loses, if there is one.
        """
        request = get_current_request()
        if await self._changes.get_replayed_reply(request) is not None:
            return None
        replaced = namespace.find_child(self._context.db, *removed) if removed is not None else None
        if replaced is not None and replaced.is_file:
            await self._tracker.wait_for_set_before_change(replaced.id)

        def act(db: Database, allow_unimported: bool) -> Inode | None:
            handles.record_reply(db, request.number)
            return change(db, allow_unimported)

        shared_namespace = self._context.shared_namespace
        changed = await shared_namespace.commit_shared(lambda: self._changes.run_change(act, creates=creates), names, inodes, is_own=is_own)
        self._context.expect_times(itertools.chain([replaced], (namespace.find_child(self._context.db, *place) for place in names)))
        self._tracker.wake()
        return changed


async def _is_creating(pid: int, name: bytes) -> bool:
    """Return True if a thread certainly creates `name`. Its memory may lie on a filesystem that hangs."""
    with trio.move_on_after(limits.CREATING_CALL_WAIT_S):
        return await trio.to_thread.run_sync(creating_calls.is_creating, pid, name, abandon_on_cancel=True)
    return False


class DirectoryHandlers:
    """Handlers of readdir and statfs."""

    def __init__(self, context: MountContext, changes: ChangeRunner) -> None:
        self._context, self._changes = context, changes
        self._pfs_capacity = Capacity(0, 0)
        self._pfs_checked_s = float("-inf")
        self._is_statvfs_running = False

    async def readdir(self, fh: int, start_id: int, token: "ReaddirToken") -> None:
        context = self._context
        await context.open_files.refresh_all_statuses()
        if start_id == 0:
            await context.shared_namespace.refresh_directory(fh)
        directory = context.get_inode(fh)
        if not directory.is_directory:
            raise posix_error(errno.ENOTDIR)
        if not directory.is_imported:
            await self._changes.request_scan(fh, must_succeed=True)
            await context.shared_namespace.refresh_directory(fh)
        if directory.nlink == 0 or not self._reply_dot_entries(directory, start_id, token):
            return
        for entry, inode in namespace.iterate_entries(context.db, fh, max(0, start_id - DOTS)):
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(entry.name), context.build_reply(inode), entry.cookie + DOTS):
                return

    def _reply_dot_entries(self, directory: Inode, start_id: int, token: "ReaddirToken") -> bool:
        """Add '.' and '..', which programs need. Returns False if the reply is full."""
        context = self._context
        if start_id < DOT and not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(b"."), context.build_reply(directory), DOT):
            return False
        if start_id < DOTS:
            parent = context.get_inode(directory.parent) if directory.parent else directory
            return pyfuse3.readdir_reply(token, pyfuse3.FileNameT(b".."), context.build_reply(parent), DOTS)
        return True

    async def statfs(self) -> "StatvfsData":
        """Return how much can be written: to the PFS, or to RAM and NVMe if that is more."""
        capacities = self._context.tiers.get_local_capacities()
        total, free = sum(one.total for one in capacities.values()), sum(one.free for one in capacities.values())
        # A write frees these.
        free += self._context.tiers.prepared.get_bytes()
        free += sum(copies.count_doomed_bytes(self._context.db, tier) for tier in capacities)
        if Tier.PFS in self._context.tiers:
            pfs = await self._get_pfs_capacity()
            total, free = max(total, pfs.total), max(free, pfs.free)
        figures = pyfuse3.StatvfsData()
        figures.f_bsize = figures.f_frsize = limits.STATFS_UNIT_BYTES
        figures.f_blocks = total // limits.STATFS_UNIT_BYTES
        figures.f_bfree = figures.f_bavail = free // limits.STATFS_UNIT_BYTES
        figures.f_files = figures.f_ffree = figures.f_favail = INODES_MAX
        figures.f_namemax = limits.NAME_BYTES_MAX
        return figures

    async def _get_pfs_capacity(self) -> Capacity:
        """Return the capacity of the PFS. An old one is refreshed in a thread, of which at most one runs."""
        if time.monotonic() - self._pfs_checked_s > limits.CAPACITY_AGE_S and not self._is_statvfs_running:
            self._is_statvfs_running = True
            with trio.move_on_after(limits.PFS_STATUS_WAIT_S):
                await trio.to_thread.run_sync(self._statvfs_pfs, abandon_on_cancel=True)
        return self._pfs_capacity

    def _statvfs_pfs(self) -> None:
        assert self._context.config.pfs is not None
        try:
            self._pfs_capacity = read_capacity(self._context.config.pfs)
        except OSError:
            self._pfs_capacity = Capacity(0, 0)
        finally:
            self._pfs_checked_s = time.monotonic()
            self._is_statvfs_running = False


def is_known_to_kernel(inode: int) -> bool:
    """Return True if the kernel has this inode in memory. Must not be called inside a handler."""
    try:
        pyfuse3.invalidate_inode(pyfuse3.InodeT(inode), attr_only=True)
    except FileNotFoundError:
        return False
    except OSError as failure:
        log.debug("inode %d: cannot ask the kernel whether it knows it: %s", inode, failure)
    return True


class OrphanTracker:
    """Inodes without a name, and the task that deletes those that the kernel has forgotten."""

    def __init__(self, context: MountContext) -> None:
        self._context = context
        self._orphans: set[int] = set()
        self._forgotten: set[int] = set()
        self._wake = trio.Event()

    def track(self, inode: Inode | None) -> None:
        """Remember an inode that lost a name if it was its last one."""
        if inode is not None and inode.nlink == 0:
            self._orphans.add(inode.id)

    def add_unlinked(self, inodes: Iterable[int]) -> None:
        """Add inodes that lost their last name on another node."""
        self._orphans.update(inodes)
        self._forgotten.update(inodes)
        self._wake.set()

    def forget(self, inode_list: Iterable[tuple[int, int]]) -> None:
        """Record that the kernel dropped these (inode, lookup count). Never raises."""
        numbers = {inode for inode, _ in inode_list}
        # A file of the history has another number, and if its name is gone, nothing tells which file it was.
        forgotten = set(self._orphans) if any(map(history_names.is_shown, numbers)) else self._orphans & numbers
        if forgotten:
            self._forgotten |= forgotten
            self._wake.set()

    async def run_deletion(self, is_known: Callable[[int], bool] = is_known_to_kernel) -> None:
        """Delete what the kernel forgot, soon after each FORGET, and check all orphans at intervals. A task."""
        while True:
            self._orphans |= namespace.list_orphans(self._context.db)
            await self._delete_unknown(set(self._orphans), is_known)
            with trio.move_on_after(limits.ORPHANS_INTERVAL_S):
                while True:
                    await self._wake.wait()
                    await trio.sleep(limits.ORPHANS_GATHER_S)
                    self._wake = trio.Event()
                    forgotten, self._forgotten = self._forgotten, set()
                    await self._delete_unknown(forgotten, is_known)

    async def _delete_unknown(self, candidates: set[int], is_known: Callable[[int], bool]) -> None:
        if not candidates:
            return
        unknown = await trio.to_thread.run_sync(lambda: sorted(inode for inode in candidates if not is_known(inode)))
        for start in range(0, len(unknown), limits.CHANGE_ROWS_MAX):
            self._delete_orphans(unknown[start : start + limits.CHANGE_ROWS_MAX])
            await trio.lowlevel.checkpoint()

    def _delete_orphans(self, inodes: list[int]) -> None:
        """Delete inodes that are not open in one change, and their files in RAM at once."""
        with self._context.db.transaction() as db:
            deleted = namespace.delete_forgotten(db, inodes)
        self._orphans.difference_update(deleted)
        self._forgotten.difference_update(deleted)
        doomed = [content for contents in deleted.values() for content in contents]
        self._context.open_files.delete_ram_files(doomed)
        if doomed or (deleted and self._context.shared_namespace.is_shared):
            self._context.wake_channel.notify(ipc.WORK)  # The mover announces the deletion of contents that other nodes wrote.
