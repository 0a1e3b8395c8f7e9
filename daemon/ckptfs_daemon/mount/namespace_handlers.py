"""Owns the handlers of names: lookup, make, link, unlink, rename. Each is one change of the catalog and one reply.

What loses its last name stays in the catalog as an orphan until the kernel forgets it: orphans.py.
If we die here: see handler.py.

Owns what has no name left while the kernel may still know it: an open file, somebody's working directory, an O_PATH descriptor.

The kernel says FORGET when it does; then the row and the contents go, in batches, a moment later. Before that the kernel itself is asked
(an invalidation of an inode that it does not know fails with ENOENT), because a FORGET may be older than a lookup, and because one that a
dead mount process had read is not sent again: whatever is left over is looked at every `limits.ORPHANS_INTERVAL_S`.
If we die here: the rows with nlink 0 are found again by the next mount process.

Owns the handlers that read directories, and statfs. A directory's handle is its inode's id: nothing to keep, nothing to lose.

If we die here: the next mount process goes on reading at the cookie that the kernel hands it.
"""

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import trio

from ckptfs import limits
from ckptfs.catalog import contents, handles, mover_requests, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.namespace import NotImported
from ckptfs.errors import CkptfsError, posix_error
from ckptfs.flow import open
from ckptfs.model import Inode, Tier
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse.request import Request, build_negative_entry, get_current_request, translate_errors
from ckptfs_daemon.mount import lookups
from ckptfs_daemon.mount.attribute_handlers import AttributeHandlers, XattrHandlers
from ckptfs_daemon.mount.context import ChangeRunner

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip
import pyfuse3  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import ReaddirToken, RequestContext, StatvfsData

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
            self.context.wake_channel.notify(ipc.WORK)  # Of what other nodes wrote they are told.


DOT, DOTS = 1, 2
"""The offsets after '.' and '..'; an entry's is its cookie and these two."""

INODES_MAX = 2**48
"""What statfs says: ids are 63 bits wide, the catalog takes as many as fit the disk below."""


class DirectoryHandlers(ChangeRunner):
    """Handlers for open directories and for the filesystem as a whole."""

    @translate_errors
    async def opendir(self, inode: int, ctx: "RequestContext") -> int:
        """A handle for reading a directory: its inode's id."""
        return inode

    @translate_errors
    async def readdir(self, fh: int, start_id: int, token: "ReaddirToken") -> None:
        """Fill the reply with entries after the offset `start_id`."""
        if self.context.shared_namespace is not None and start_id == 0:
            await self.context.shared_namespace.refresh_inode(fh)
            await self.context.shared_namespace.refresh_directory(fh)
        directory = self.get_inode(fh)
        if not directory.is_directory:
            raise posix_error(errno.ENOTDIR)
        if not directory.is_imported:
            await self.request_scan(fh, must_succeed=True)
        if directory.nlink == 0 or not self._reply_dot_entries(directory, start_id, token):
            return
        for entry, inode in namespace.iterate_entries(self.context.db, fh, max(0, start_id - DOTS)):
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(entry.name), self.get_attributes(inode), entry.cookie + DOTS):
                return

    def _reply_dot_entries(self, directory: Inode, start_id: int, token: "ReaddirToken") -> bool:
        """'.' and '..', which a pyfuse3 filesystem may leave out and programs expect. False when the reply is full."""
        if start_id < DOT and not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(b"."), self.get_attributes(directory), DOT):
            return False
        if start_id < DOTS:
            parent = self.get_inode(directory.parent) if directory.parent else directory
            return pyfuse3.readdir_reply(token, pyfuse3.FileNameT(b".."), self.get_attributes(parent), DOTS)
        return True

    @translate_errors
    async def releasedir(self, fh: int) -> None:
        """Nothing was kept."""

    @translate_errors
    async def access(self, inode: int, mode: int, ctx: "RequestContext") -> bool:
        """The kernel judges by itself (default_permissions)."""
        return True

    @translate_errors
    async def statfs(self, ctx: "RequestContext") -> "StatvfsData":
        """How much can still be written here: what the PFS has, where there is one; else what RAM and NVMe have."""
        capacities = self.context.tiers.get_local_capacities().values()
        total, free = sum(room.total for room in capacities), sum(room.free for room in capacities)
        if Tier.PFS in self.context.tiers:
            pfs_total, pfs_free = await self._get_pfs_capacity()
            total, free = max(total, pfs_total), max(free, pfs_free)
        figures = pyfuse3.StatvfsData()
        figures.f_bsize = figures.f_frsize = limits.STATFS_UNIT_BYTES
        figures.f_blocks = total // limits.STATFS_UNIT_BYTES
        figures.f_bfree = figures.f_bavail = free // limits.STATFS_UNIT_BYTES
        figures.f_files = figures.f_ffree = figures.f_favail = INODES_MAX
        figures.f_namemax = limits.NAME_BYTES_MAX
        return figures

    _pfs_capacity: tuple[float, int, int] = (float("-inf"), 0, 0)
    _is_statvfs_running = False

    async def _get_pfs_capacity(self) -> tuple[int, int]:
        """(total, free) of the PFS as it last said; asked again in a thread, of which there is one at most, when that is old."""
        asked_s, total, free = self._pfs_capacity
        if time.monotonic() - asked_s > limits.CAPACITY_AGE_S and not self._is_statvfs_running:
            self._is_statvfs_running = True
            with trio.move_on_after(limits.STATFS_WAIT_S):
                await trio.to_thread.run_sync(self._statvfs_pfs, abandon_on_cancel=True)
            _, total, free = self._pfs_capacity
        return total, free

    def _statvfs_pfs(self) -> None:
        pfs = self.context.config.pfs
        assert pfs is not None
        try:
            figures = os.statvfs(pfs)
            self._pfs_capacity = (time.monotonic(), figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize)
        except OSError:
            self._pfs_capacity = (time.monotonic(), 0, 0)
        finally:
            self._is_statvfs_running = False


INODE_ID_BYTES = 8
"""Bytes of the kept answer to a request that made a name: the inode's id."""


class NamespaceHandlers(AttributeHandlers, DirectoryHandlers, OrphanHandlers, XattrHandlers):
    """Everything about the namespace; files' bytes are elsewhere."""

    @translate_errors
    async def lookup(self, parent_inode: int, name: bytes, ctx: "RequestContext") -> EntryAttributes:
        """What a name leads to; a reply without an inode where there is none, which the kernel remembers too."""
        if self.prefetch is not None:
            await self.prefetch.refresh_name(ctx.pid, parent_inode, name)
            if self.prefetch.has_stale_open(ctx.pid):
                await self._fetch_before_reply(ctx.pid, parent_inode, name)
        try:
            found = namespace.lookup(self.context.db, parent_inode, name)
            if self.prefetch is not None:
                self.prefetch.record_reached(ctx.pid, found.id)
            return self.get_attributes(found)
        except FileNotFoundError:
            return self.build_negative_entry()
        except NotImported as missing:
            directory = missing.directory
        try:
            await self.request_scan(directory, must_succeed=True)
            return self.get_attributes(namespace.lookup(self.context.db, parent_inode, name))
        except FileNotFoundError:
            return self.build_negative_entry()
        except (OSError, CkptfsError):
            if not lookups.may_create(ctx.pid):
                raise
            return build_negative_entry(0)

    async def _fetch_before_reply(self, pid: int, parent: int, name: bytes) -> None:
        """The bytes of the file to which a name leads are here, or on their way, before the name is answered, whichever file that is by
        then: the open that follows has nothing to wait for, so that other nodes cannot replace the file meanwhile.
        """
        shared_namespace, prefetch, db = self.context.shared_namespace, self.prefetch, self.context.db
        assert shared_namespace is not None and prefetch is not None
        fetched_inode = 0
        for _ in range(limits.STALE_OPEN_LOOKUPS_MAX):
            try:
                found = namespace.lookup(db, parent, name)
                held = contents.get_file_content(db, found.id)
                if (
                    found.id == fetched_inode
                    or not found.is_file
                    or held is None
                    or open.choose_read_source(held) is not open.ReadSource.FETCH
                ):
                    prefetch.record_stale_open_target(pid, found.id)
                    return
                await self.context.mover_client.request(mover_requests.FETCH, found.id, timeout_s=limits.FETCH_STALL_S, accepts_begun=True)
                fetched_inode = found.id
            except (OSError, CkptfsError) as failure:
                if failure.errno != errno.ESTALE:
                    return  # Whoever answers the name, or opens the file, says why.
                await shared_namespace.refresh_name(parent, name)

    @translate_errors
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: "RequestContext") -> EntryAttributes:
        """Make a directory."""
        return await self._create_inode(get_current_request(), parent_inode, name, stat.S_IFDIR | (stat.S_IMODE(mode) & ~ctx.umask), ctx)

    @translate_errors
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: "RequestContext") -> EntryAttributes:
        """Make a file, fifo, socket or device."""
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        return await self._create_inode(get_current_request(), parent_inode, name, kind | (stat.S_IMODE(mode) & ~ctx.umask), ctx, rdev=rdev)

    @translate_errors
    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: "RequestContext") -> EntryAttributes:
        """Make a symlink."""
        return await self._create_inode(get_current_request(), parent_inode, name, stat.S_IFLNK | 0o777, ctx, target=target)

    async def _create_inode(
        self, request: Request, parent: int, name: bytes, mode: int, ctx: "RequestContext", *, rdev: int = 0, target: bytes | None = None
    ) -> EntryAttributes:
        replayed = await self.get_replayed_reply(request)
        if replayed is not None:
            return self.get_attributes(self.get_inode(int.from_bytes(replayed, "little")))

        def act(db: Database, blind: bool) -> Inode:
            inode = namespace.create(db, parent, name, mode, uid=ctx.uid, gid=ctx.gid, rdev=rdev, target=target, allow_unimported=blind)
            handles.record_reply(db, request.number, inode.id.to_bytes(INODE_ID_BYTES, "little"))
            return inode

        made = await self.commit_shared(lambda: self.run_change(act, creates=True), [(parent, name)])
        return self.get_attributes(made)

    @translate_errors
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: "RequestContext") -> EntryAttributes:
        """Give a file another name."""
        request = get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return self.get_attributes(self.get_inode(inode))

        def act(db: Database, blind: bool) -> Inode:
            handles.record_reply(db, request.number)
            return namespace.link(db, inode, new_parent_inode, new_name, allow_unimported=blind)

        linked = await self.commit_shared(lambda: self.run_change(act, creates=True), [(new_parent_inode, new_name)], [inode])
        return self.get_attributes(linked)

    @translate_errors
    async def unlink(self, parent_inode: int, name: bytes, ctx: "RequestContext") -> None:
        """Take away a name of something that is no directory."""
        request = get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return

        def act(db: Database, _: bool) -> Inode:
            handles.record_reply(db, request.number)
            return namespace.unlink(db, parent_inode, name)

        self.track_orphan(await self.commit_shared(lambda: self.run_change(act), [(parent_inode, name)]))

    @translate_errors
    async def rmdir(self, parent_inode: int, name: bytes, ctx: "RequestContext") -> None:
        """Take away an empty directory."""
        request = get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return

        def act(db: Database, _: bool) -> Inode:
            handles.record_reply(db, request.number)
            return namespace.rmdir(db, parent_inode, name)

        self.track_orphan(await self.commit_shared(lambda: self.run_change(act), [(parent_inode, name)]))

    @translate_errors
    async def rename(
        self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes, flags: int, ctx: "RequestContext"
    ) -> None:
        """Rename, replace or exchange."""
        request = get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return

        def act(db: Database, blind: bool) -> Inode | None:
            handles.record_reply(db, request.number)
            return namespace.rename(db, parent_inode_old, name_old, parent_inode_new, name_new, flags, allow_unimported=blind)

        names = [(parent_inode_old, name_old), (parent_inode_new, name_new)]
        replaced = await self.commit_shared(lambda: self.run_change(act, creates=True), names)
        if replaced is not None:
            self.track_orphan(replaced)
