"""The handlers that pyfuse3 calls by name.

Each one delegates to the handler class that owns the subject.

`HistoryTree` and `LatestTree` serve the inodes below `.ckptfs`.

Invariants:
- Only FUSEError leaves a handler: any other exception would end the mount.
"""

import errno
import functools
import inspect
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from ckptfs import limits
from ckptfs_daemon.fuse import killable
from ckptfs_daemon.fuse.request import get_errno
from ckptfs_daemon.mount.handlers.attribute_handlers import AttributeHandlers
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers
from ckptfs_daemon.mount.handlers.history_tree import HistoryTree
from ckptfs_daemon.mount.handlers.latest_tree import LatestTree, is_virtual
from ckptfs_daemon.mount.handlers.namespace_handlers import DirectoryHandlers, NamespaceHandlers, OrphanTracker

# After fuse.session, which loads the shim before pyfuse3.
import pyfuse3  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import EntryAttributes, FileInfo, ReaddirToken, RequestContext, SetattrFields, StatvfsData

P = ParamSpec("P")
T = TypeVar("T")


def translate_errors(handler: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Wrap a handler: note its request, and turn every error into the FUSEError with its errno."""

    @functools.wraps(handler)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        killable.set_request()
        try:
            return await handler(*args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except Exception as failure:
            raise pyfuse3.FUSEError(get_errno(failure, handler.__name__)) from failure

    return wrapped


def translate_all_errors(operations: type[T]) -> type[T]:
    """Wrap all handlers of a class."""
    for name, handler in list(vars(operations).items()):
        if inspect.iscoroutinefunction(handler):
            setattr(operations, name, translate_errors(handler))
    return operations


@translate_all_errors
class Operations(pyfuse3.Operations):
    """Every handler of the mount, except those that the shim calls itself (`shim_handlers`)."""

    def __init__(
        self,
        names: NamespaceHandlers,
        directories: DirectoryHandlers,
        attributes: AttributeHandlers,
        files: FileHandlers,
        orphans: OrphanTracker,
        latest: LatestTree,
        history: HistoryTree,
    ) -> None:
        super().__init__()
        self._names, self._directories, self._attributes, self._files = names, directories, attributes, files
        self._orphans, self._latest, self._history = orphans, latest, history

    def _choose(self, handlers: T, *inodes: int) -> T | LatestTree | HistoryTree:
        """Return `handlers`, or the tree below `.ckptfs` to which one of `inodes` belongs."""
        if max(inodes) < limits.SHOWN_BIT:
            return handlers
        return self._latest if any(map(is_virtual, inodes)) else self._history

    # --- names --------------------------------------------------------------------------------------------------------

    async def lookup(self, parent_inode: int, name: bytes, ctx: "RequestContext") -> "EntryAttributes":
        if self._latest.owns_name(parent_inode, name):
            return await self._latest.lookup(parent_inode, name, ctx)
        return await self._choose(self._names, parent_inode).lookup(parent_inode, name, ctx)

    async def forget(self, inode_list: Iterable[tuple[int, int]]) -> None:
        self._orphans.forget(inode_list)

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: "RequestContext") -> "EntryAttributes":
        return await self._choose(self._names, parent_inode).mkdir(parent_inode, name, mode, ctx)

    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: "RequestContext") -> "EntryAttributes":
        return await self._choose(self._names, parent_inode).mknod(parent_inode, name, mode, rdev, ctx)

    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: "RequestContext") -> "EntryAttributes":
        return await self._choose(self._names, parent_inode).symlink(parent_inode, name, target, ctx)

    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: "RequestContext") -> "EntryAttributes":
        return await self._choose(self._names, inode, new_parent_inode).link(inode, new_parent_inode, new_name)

    async def unlink(self, parent_inode: int, name: bytes, ctx: "RequestContext") -> None:
        await self._choose(self._names, parent_inode).unlink(parent_inode, name)

    async def rmdir(self, parent_inode: int, name: bytes, ctx: "RequestContext") -> None:
        await self._choose(self._names, parent_inode).rmdir(parent_inode, name)

    async def rename(
        self, parent_inode_old: int, name_old: bytes, parent_inode_new: int, name_new: bytes, flags: int, ctx: "RequestContext"
    ) -> None:
        handlers = self._choose(self._names, parent_inode_old, parent_inode_new)
        await handlers.rename(parent_inode_old, name_old, parent_inode_new, name_new, flags)

    # --- directories, and the filesystem as a whole -------------------------------------------------------------------

    async def opendir(self, inode: int, ctx: "RequestContext") -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: "ReaddirToken") -> None:
        await self._choose(self._directories, fh).readdir(fh, start_id, token)

    async def releasedir(self, fh: int) -> None:
        """Do nothing: the handle of a directory is the number of its inode."""

    async def access(self, inode: int, mode: int, ctx: "RequestContext") -> bool:
        return True  # The kernel decides (default_permissions).

    async def statfs(self, ctx: "RequestContext") -> "StatvfsData":
        return await self._directories.statfs()

    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        await self._files.fsyncdir(fh)

    # --- attributes ---------------------------------------------------------------------------------------------------

    async def getattr(self, inode: int, ctx: "RequestContext") -> "EntryAttributes":
        return await self._choose(self._attributes, inode).getattr(inode, ctx)

    async def setattr(
        self, inode: int, attr: "EntryAttributes", fields: "SetattrFields", fh: int | None, ctx: "RequestContext"
    ) -> "EntryAttributes":
        return await self._choose(self._attributes, inode).setattr(inode, attr, fields)

    async def readlink(self, inode: int, ctx: "RequestContext") -> bytes:
        return await self._choose(self._attributes, inode).readlink(inode)

    async def getxattr(self, inode: int, name: bytes, ctx: "RequestContext") -> bytes:
        return await self._choose(self._attributes, inode).getxattr(inode, name, ctx)

    async def listxattr(self, inode: int, ctx: "RequestContext") -> Sequence[bytes]:
        return await self._choose(self._attributes, inode).listxattr(inode, ctx)

    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: "RequestContext") -> None:
        await self._choose(self._attributes, inode).setxattr(inode, name, value, ctx)

    async def removexattr(self, inode: int, name: bytes, ctx: "RequestContext") -> None:
        await self._choose(self._attributes, inode).removexattr(inode, name, ctx)

    # --- files --------------------------------------------------------------------------------------------------------

    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: "RequestContext"
    ) -> "tuple[FileInfo, EntryAttributes]":
        return await self._choose(self._files, parent_inode).create(parent_inode, name, mode, flags, ctx)

    async def open(self, inode: int, flags: int, ctx: "RequestContext") -> "FileInfo":
        return await self._choose(self._files, inode).open(inode, flags, ctx)

    async def read(self, fh: int, off: int, size: int) -> bytes:
        return await self._files.read(fh, off, size)

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return await self._files.write(fh, off, buf)

    async def flush(self, fh: int) -> None:
        await self._files.flush(fh)

    async def fsync(self, fh: int, datasync: bool) -> None:
        await self._files.fsync(fh)


class ReadOnlyOperations(Operations):
    """The handlers of a read-only mount: every change fails with EROFS.

    The kernel refuses them first, unless a remount that bypassed ckptfs has cleared its flag.
    """

    async def _refuse(self, *_: object) -> NoReturn:
        raise pyfuse3.FUSEError(errno.EROFS)

    create = mkdir = mknod = symlink = link = unlink = rmdir = rename = setattr = setxattr = removexattr = write = _refuse  # type: ignore[assignment]

    async def open(self, inode: int, flags: int, ctx: "RequestContext") -> "FileInfo":
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise pyfuse3.FUSEError(errno.EROFS)
        return await super().open(inode, flags, ctx)
