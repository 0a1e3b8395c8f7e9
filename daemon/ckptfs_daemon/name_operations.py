"""Owns the handlers of names: lookup, make, link, unlink, rename. Each is one change of the catalog and one reply.

What loses its last name stays in the catalog as an orphan until the kernel forgets it: orphans.py.
If we die here: see handler.py.
"""

import errno
import stat
from typing import TYPE_CHECKING

from ckptfs import limits
from ckptfs.catalog import answers, contents, namespace, renaming, wants
from ckptfs.catalog.database import Database
from ckptfs.catalog.directories import NotImported
from ckptfs.errors import CkptfsError
from ckptfs.flow import read
from ckptfs.model import Inode
from ckptfs_daemon import edge, intent, replies
from ckptfs_daemon.attribute_operations import AttributeHandlers
from ckptfs_daemon.directory_operations import DirectoryHandlers
from ckptfs_daemon.edge import Request, translate_errors
from ckptfs_daemon.orphans import OrphanHandlers
from ckptfs_daemon.xattr_operations import XattrHandlers

from pyfuse3 import EntryAttributes  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import RequestContext

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
            if not intent.may_create(ctx.pid):
                raise
            return replies.build_negative_entry(0)

    async def _fetch_before_reply(self, pid: int, parent: int, name: bytes) -> None:
        """The bytes of the file to which a name leads are here, or on their way, before the name is answered, whichever file that is by
        then: the open that follows has nothing to wait for, so that other nodes cannot replace the file meanwhile.
        """
        shared_namespace, prefetch, db = self.context.shared_namespace, self.prefetch, self.context.db
        assert shared_namespace is not None and prefetch is not None
        fetched_inode = 0
        for _ in range(limits.MISLED_LOOKS_MAX):
            try:
                found = namespace.lookup(db, parent, name)
                held = contents.get_file_content(db, found.id)
                if (
                    found.id == fetched_inode
                    or not found.is_file
                    or held is None
                    or read.choose_read_source(held) is not read.ReadSource.FETCH
                ):
                    prefetch.record_stale_open_target(pid, found.id)
                    return
                await self.context.mover_client.request(wants.FETCH, found.id, timeout_s=limits.FETCH_STALL_S, accepts_begun=True)
                fetched_inode = found.id
            except (OSError, CkptfsError) as failure:
                if failure.errno != errno.ESTALE:
                    return  # Whoever answers the name, or opens the file, says why.
                await shared_namespace.refresh_name(parent, name)

    @translate_errors
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: "RequestContext") -> EntryAttributes:
        """Make a directory."""
        return await self._create_inode(
            edge.get_current_request(), parent_inode, name, stat.S_IFDIR | (stat.S_IMODE(mode) & ~ctx.umask), ctx
        )

    @translate_errors
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: "RequestContext") -> EntryAttributes:
        """Make a file, fifo, socket or device."""
        kind = stat.S_IFMT(mode) or stat.S_IFREG
        return await self._create_inode(
            edge.get_current_request(), parent_inode, name, kind | (stat.S_IMODE(mode) & ~ctx.umask), ctx, rdev=rdev
        )

    @translate_errors
    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: "RequestContext") -> EntryAttributes:
        """Make a symlink."""
        return await self._create_inode(edge.get_current_request(), parent_inode, name, stat.S_IFLNK | 0o777, ctx, target=target)

    async def _create_inode(
        self, request: Request, parent: int, name: bytes, mode: int, ctx: "RequestContext", *, rdev: int = 0, target: bytes | None = None
    ) -> EntryAttributes:
        replayed = await self.get_replayed_reply(request)
        if replayed is not None:
            return self.get_attributes(self.get_inode(int.from_bytes(replayed, "little")))

        def act(db: Database, blind: bool) -> Inode:
            inode = namespace.create(db, parent, name, mode, uid=ctx.uid, gid=ctx.gid, rdev=rdev, target=target, allow_unimported=blind)
            answers.record_reply(db, request.number, inode.id.to_bytes(INODE_ID_BYTES, "little"))
            return inode

        made = await self.commit_shared(lambda: self.run_change(act, creates=True), [(parent, name)])
        return self.get_attributes(made)

    @translate_errors
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: "RequestContext") -> EntryAttributes:
        """Give a file another name."""
        request = edge.get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return self.get_attributes(self.get_inode(inode))

        def act(db: Database, blind: bool) -> Inode:
            answers.record_reply(db, request.number)
            return namespace.link(db, inode, new_parent_inode, new_name, allow_unimported=blind)

        linked = await self.commit_shared(lambda: self.run_change(act, creates=True), [(new_parent_inode, new_name)], [inode])
        return self.get_attributes(linked)

    @translate_errors
    async def unlink(self, parent_inode: int, name: bytes, ctx: "RequestContext") -> None:
        """Take away a name of something that is no directory."""
        request = edge.get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return

        def act(db: Database, _: bool) -> Inode:
            answers.record_reply(db, request.number)
            return namespace.unlink(db, parent_inode, name)

        self.track_orphan(await self.commit_shared(lambda: self.run_change(act), [(parent_inode, name)]))

    @translate_errors
    async def rmdir(self, parent_inode: int, name: bytes, ctx: "RequestContext") -> None:
        """Take away an empty directory."""
        request = edge.get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return

        def act(db: Database, _: bool) -> Inode:
            answers.record_reply(db, request.number)
            return namespace.rmdir(db, parent_inode, name)

        self.track_orphan(await self.commit_shared(lambda: self.run_change(act), [(parent_inode, name)]))

    @translate_errors
    async def rename(
        self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes, flags: int, ctx: "RequestContext"
    ) -> None:
        """Rename, replace or exchange."""
        request = edge.get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return

        def act(db: Database, blind: bool) -> Inode | None:
            answers.record_reply(db, request.number)
            return renaming.rename(db, parent_inode_old, name_old, parent_inode_new, name_new, flags, allow_unimported=blind)

        names = [(parent_inode_old, name_old), (parent_inode_new, name_new)]
        replaced = await self.commit_shared(lambda: self.run_change(act, creates=True), names)
        if replaced is not None:
            self.track_orphan(replaced)
