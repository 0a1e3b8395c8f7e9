"""Owns the handlers of attributes: getattr, setattr, readlink.

The length of a file is changed by `resize` of the file operations; everything else is a row of the catalog.
If we die here: see handler.py. A change of length that was not answered is made again.
"""

import errno
import time
from typing import TYPE_CHECKING

from ckptfs.catalog import answers, attributes
from ckptfs.catalog.database import Database
from ckptfs.errors import posix_error
from ckptfs.model import Inode
from ckptfs_daemon import edge
from ckptfs_daemon.edge import Request, translate_errors
from ckptfs_daemon.handler import ChangeRunner

from pyfuse3 import EntryAttributes  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import RequestContext, SetattrFields


class AttributeHandlers(ChangeRunner):
    """Handlers for what stat(2) shows."""

    async def resize(self, inode: int, size: int, fh: int | None) -> None:
        """Change a file's length; the file operations do it."""
        raise NotImplementedError

    @translate_errors
    async def getattr(self, inode: int, ctx: "RequestContext") -> EntryAttributes:
        """The attributes of an inode."""
        await self.refresh_inode(inode, ctx.pid)
        return self.get_attributes(self.get_inode(inode))

    @translate_errors
    async def readlink(self, inode: int, ctx: "RequestContext") -> bytes:
        """What a symlink points to."""
        await self.refresh_inode(inode)
        target = self.get_inode(inode).target
        if target is None:
            raise posix_error(errno.EINVAL)
        return target

    @translate_errors
    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: "SetattrFields", fh: int | None, ctx: "RequestContext"
    ) -> EntryAttributes:
        """chmod, chown, truncate and utimens, also several at once."""
        request = edge.get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return self.get_attributes(self.get_inode(inode))
        if fields.update_size:
            await self.refresh_inode(inode)
            await self.resize(inode, attr.st_size, fh)
        return self.get_attributes(await self.commit_shared(lambda: self._set_attributes(request, inode, attr, fields), inodes=[inode]))

    async def _set_attributes(self, request: Request, inode: int, attr: EntryAttributes, fields: "SetattrFields") -> Inode:
        """The part of setattr that is the catalog's."""
        atime_ns = attr.st_atime_ns if fields.update_atime else None
        resized_ns = time.time_ns() if fields.update_size and not self.context.open_files.kernel_owns_times else None
        mtime_ns = attr.st_mtime_ns if fields.update_mtime else resized_ns
        owner = fields.update_uid or fields.update_gid
        other = fields.update_mode or fields.update_size or fields.update_atime or fields.update_mtime
        # chown(-1, -1) arrives as a setattr of nothing, or of ctime where the kernel keeps times, and drops set-id bits like any chown.
        kill = request.kills_set_id or owner or not other

        def act(db: Database, _: bool) -> Inode:
            answers.record_reply(db, request.number)
            return attributes.set_attributes(
                db,
                inode,
                mode=attr.st_mode if fields.update_mode else None,
                uid=attr.st_uid if fields.update_uid else None,
                gid=attr.st_gid if fields.update_gid else None,
                atime_ns=atime_ns,
                mtime_ns=mtime_ns,
                ctime_ns=attr.st_ctime_ns if fields.update_ctime else None,
                kill_set_id=kill,
            )

        if atime_ns is not None or mtime_ns is not None:
            self.context.open_files.set_times(inode, atime_ns, mtime_ns)
        return await self.run_change(act)
