"""Owns the handlers of attributes: getattr, setattr, readlink.

The length of a file is changed by `resize` of the file operations; everything else is a row of the catalog.
If we die here: see handler.py. A change of length that was not answered is made again.

Owns the handlers of extended attributes: what programs set, and what ckptfs says of a file under `user.ckptfs.`.

`user.*` and `trusted.*` are stored; the kernel has checked who may. There are no ACLs, no file capabilities and no security labels here,
as on a filesystem without support for them: a capability must fall at a write, and on the passthrough path we see no writes.
The virtual ones are not listed, so that programs that copy all attributes do not try to set them.
If we die here: see handler.py.
"""

import errno
import time
from typing import TYPE_CHECKING

from ckptfs.catalog import handles, inodes, summary
from ckptfs.catalog.database import Database
from ckptfs.errors import posix_error
from ckptfs.model import Inode
from ckptfs_daemon.fuse.request import Request, get_current_request, translate_errors
from ckptfs_daemon.mount.context import ChangeRunner

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip
from pyfuse3 import FUSEError  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
        request = get_current_request()
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
            handles.record_reply(db, request.number)
            return inodes.set_attributes(
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


STORED_PREFIXES = (b"user.", b"trusted.")
SECURITY = b"security."


class XattrHandlers(ChangeRunner):
    """Handlers for extended attributes."""

    @translate_errors
    async def getxattr(self, inode: int, name: bytes, ctx: "RequestContext") -> bytes:
        """The value of an attribute."""
        if name.startswith(SECURITY):
            # Asked for a capability at the first write to each file: answered without a detour.
            raise FUSEError(errno.ENODATA)
        request = get_current_request()
        if await self.get_replayed_reply(request) is not None:
            # pyfuse3 asks for the value before it creates: this one was created by us for this very request.
            raise posix_error(errno.ENODATA)
        if name.startswith(summary.VIRTUAL_XATTR_PREFIX):
            if self.context.shared_namespace is not None:
                await self.refresh_inode(inode)
                await self.context.shared_namespace.refresh_copies(inode)
            return self._get_virtual_xattr(inode, name.removeprefix(summary.VIRTUAL_XATTR_PREFIX))
        await self.refresh_inode(inode)
        if name in STORED_PREFIXES:
            raise posix_error(errno.EINVAL)
        if name.startswith(STORED_PREFIXES):
            return inodes.get_xattr(self.context.db, inode, name)
        raise posix_error(errno.EOPNOTSUPP)

    def _get_virtual_xattr(self, inode: int, name: bytes) -> bytes:
        """What ckptfs says of a regular file."""
        if not self.get_inode(inode).is_file or name not in summary.VIRTUAL_XATTRS:
            raise posix_error(errno.ENODATA)
        value = summary.VIRTUAL_XATTRS[name][0](self.context.db, inode)
        if value is None:
            raise posix_error(errno.ENODATA)
        return value

    @translate_errors
    async def listxattr(self, inode: int, ctx: "RequestContext") -> "Sequence[bytes]":
        """The names of the attributes; trusted ones only for root."""
        await self.refresh_inode(inode)
        names = inodes.list_xattrs(self.context.db, inode)
        return names if ctx.uid == 0 else [name for name in names if not name.startswith(b"trusted.")]

    @translate_errors
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: "RequestContext") -> None:
        """Set an attribute. pyfuse3 has checked XATTR_CREATE and XATTR_REPLACE by asking for the value first."""
        self._require_settable(name)
        await self._change_xattr(inode, lambda db: inodes.set_xattr(db, inode, name, value))

    @translate_errors
    async def removexattr(self, inode: int, name: bytes, ctx: "RequestContext") -> None:
        """Remove an attribute."""
        self._require_settable(name)
        await self._change_xattr(inode, lambda db: inodes.remove_xattr(db, inode, name))

    async def _change_xattr(self, inode: int, what: "Callable[[Database], None]") -> None:
        request = get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return

        def act(db: Database, _: bool) -> None:
            self.get_inode(inode)
            handles.record_reply(db, request.number)
            what(db)

        await self.commit_shared(lambda: self.run_change(act), inodes=[inode])

    def _require_settable(self, name: bytes) -> None:
        if name.startswith(summary.VIRTUAL_XATTR_PREFIX):
            raise posix_error(errno.EPERM)
        if name in STORED_PREFIXES:
            # A prefix with nothing behind it is no name: as on local filesystems.
            raise posix_error(errno.EINVAL)
        if not name.startswith(STORED_PREFIXES):
            raise posix_error(errno.EOPNOTSUPP)
