"""Owns the handlers of extended attributes: what programs set, and what ckptfs says of a file under `user.ckptfs.`.

`user.*` and `trusted.*` are stored; the kernel has checked who may. There are no ACLs, no file capabilities and no security labels here,
as on a filesystem without support for them: a capability must fall at a write, and on the passthrough path we see no writes.
The virtual ones are not listed, so that programs that copy all attributes do not try to set them.
If we die here: see handler.py.
"""

import errno
from typing import TYPE_CHECKING

from ckptfs.catalog import answers, attributes, report
from ckptfs.catalog.database import Database
from ckptfs.errors import posix_error
from ckptfs_daemon import edge
from ckptfs_daemon.edge import translate_errors
from ckptfs_daemon.handler import ChangeRunner

from pyfuse3 import FUSEError  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyfuse3 import RequestContext

STORED_PREFIXES = (b"user.", b"trusted.")
VIRTUAL_PREFIX = b"user.ckptfs."
SECURITY = b"security."


class XattrHandlers(ChangeRunner):
    """Handlers for extended attributes."""

    @translate_errors
    async def getxattr(self, inode: int, name: bytes, ctx: "RequestContext") -> bytes:
        """The value of an attribute."""
        if name.startswith(SECURITY):
            # Asked for a capability at the first write to each file: answered without a detour.
            raise FUSEError(errno.ENODATA)
        request = edge.get_current_request()
        if await self.get_replayed_reply(request) is not None:
            # pyfuse3 asks for the value before it creates: this one was created by us for this very request.
            raise posix_error(errno.ENODATA)
        if name.startswith(VIRTUAL_PREFIX):
            if self.context.shared_namespace is not None:
                await self.refresh_inode(inode)
                await self.context.shared_namespace.refresh_copies(inode)
            return self._get_virtual_xattr(inode, name.removeprefix(VIRTUAL_PREFIX))
        await self.refresh_inode(inode)
        if name in STORED_PREFIXES:
            raise posix_error(errno.EINVAL)
        if name.startswith(STORED_PREFIXES):
            return attributes.get_xattr(self.context.db, inode, name)
        raise posix_error(errno.EOPNOTSUPP)

    def _get_virtual_xattr(self, inode: int, name: bytes) -> bytes:
        """What ckptfs says of a regular file."""
        db = self.context.db
        if not self.get_inode(inode).is_file:
            raise posix_error(errno.ENODATA)
        if name == b"level":
            return report.get_level(db, inode).value.encode()
        if name == b"digest" and (digest := report.get_digest(db, inode)) is not None:
            return digest.hex().encode()
        if name == b"copies":
            return " ".join(
                f"{tier}:{state}" for tier, state, _ in report.list_copy_places(db, inode, report.load_file_record(db, inode))
            ).encode()
        raise posix_error(errno.ENODATA)

    @translate_errors
    async def listxattr(self, inode: int, ctx: "RequestContext") -> "Sequence[bytes]":
        """The names of the attributes; trusted ones only for root."""
        await self.refresh_inode(inode)
        names = attributes.list_xattrs(self.context.db, inode)
        return names if ctx.uid == 0 else [name for name in names if not name.startswith(b"trusted.")]

    @translate_errors
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: "RequestContext") -> None:
        """Set an attribute. pyfuse3 has checked XATTR_CREATE and XATTR_REPLACE by asking for the value first."""
        self._require_settable(name)
        await self._change_xattr(inode, lambda db: attributes.set_xattr(db, inode, name, value))

    @translate_errors
    async def removexattr(self, inode: int, name: bytes, ctx: "RequestContext") -> None:
        """Remove an attribute."""
        self._require_settable(name)
        await self._change_xattr(inode, lambda db: attributes.remove_xattr(db, inode, name))

    async def _change_xattr(self, inode: int, what: "Callable[[Database], None]") -> None:
        request = edge.get_current_request()
        if await self.get_replayed_reply(request) is not None:
            return

        def act(db: Database, _: bool) -> None:
            self.get_inode(inode)
            answers.record_reply(db, request.number)
            what(db)

        await self.commit_shared(lambda: self.run_change(act), inodes=[inode])

    def _require_settable(self, name: bytes) -> None:
        if name.startswith(VIRTUAL_PREFIX):
            raise posix_error(errno.EPERM)
        if name in STORED_PREFIXES:
            # A prefix with nothing behind it is no name: as on local filesystems.
            raise posix_error(errno.EINVAL)
        if not name.startswith(STORED_PREFIXES):
            raise posix_error(errno.EOPNOTSUPP)
