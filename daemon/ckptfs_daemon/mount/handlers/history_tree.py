"""The read-only tree `.ckptfs/history` of the mount: the checkpoint sets that ckptfs keeps (X4).

It shows the directory `.ckptfs.history` of the catalog, under inode numbers of its own (`history_names`). Sets that are being made or
removed have hidden names. A file of the history shares content and copies with the file of the application, but not its open file, and not
its backing file while a program could write that (`OpenAttempt`). A file that shows a previous state cannot be opened here. The kernel
caches no names and no attributes of the tree. Every change fails with EROFS, but for the attributes of `user_settings`.

Crash safety: a number leads to the same entry in the next process. The row of a handle names the inode, so a set that was deleted stays
readable for programs that have it open.
"""

import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from ckptfs import limits
from ckptfs.catalog import history, history_names, inodes, namespace, summary
from ckptfs.coherence import salvage_records
from ckptfs.errors import posix_error
from ckptfs.model import ROOT, Inode
from ckptfs_daemon.fuse import request
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.handlers.attribute_handlers import AttributeHandlers
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers
from ckptfs_daemon.mount.handlers.namespace_handlers import DOT, DOTS

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes, FileInfo  # isort: skip
import pyfuse3  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import ReaddirToken, RequestContext

HISTORY = b"history"
"""Its name in `.ckptfs`."""


class ReadOnlyTree:
    """The handlers of all changes: they fail with EROFS."""

    async def refuse_change(self, *_: object) -> NoReturn:
        raise posix_error(errno.EROFS)

    create = mkdir = mknod = symlink = link = unlink = rmdir = rename = setattr = refuse_change


class HistoryTree(ReadOnlyTree):
    def __init__(self, context: MountContext, changes: ChangeRunner, files: FileHandlers, attributes: AttributeHandlers) -> None:
        self._context, self._changes, self._files, self._attributes = context, changes, files, attributes

    async def find_top(self) -> EntryAttributes | None:
        """Return the attributes of the directory `history`. Returns None if there is none yet."""
        await self._context.shared_namespace.refresh_name(ROOT, history.NAME)
        if not self._context.get_inode(ROOT).is_imported:
            await self._changes.request_scan(ROOT, must_succeed=True)
        number = history_names.find_number(self._context.db, ROOT, history.NAME)
        return None if number is None else self._build_reply(number)

    # --- names --------------------------------------------------------------------------------------------------------

    async def lookup(self, parent_inode: int, name: bytes, _: "RequestContext") -> EntryAttributes:
        directory = await self._load_directory(parent_inode)
        await self._context.shared_namespace.refresh_name(directory.id, name)
        number = history_names.find_number(self._context.db, directory.id, name)
        is_hidden = name.startswith(b".") and history_names.is_series(self._context.db, directory.id)
        if number is None or is_hidden:
            return request.build_negative_entry(0)
        return self._build_reply(number)

    async def readdir(self, fh: int, start_id: int, token: "ReaddirToken") -> None:
        directory = await self._load_directory(fh)
        if start_id == 0:
            await self._context.shared_namespace.refresh_directory(directory.id)
        for offset, name in ((DOT, b"."), (DOTS, b"..")):
            if start_id < offset and not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), self._build_reply(fh), offset):
                return
        hides = history_names.is_series(self._context.db, directory.id)
        for entry, inode in namespace.iterate_entries(self._context.db, directory.id, max(0, start_id - DOTS)):
            if hides and entry.name.startswith(b"."):
                continue
            reply = self._build_attributes(history_names.get_shown_number(inode, entry.cookie), inode)
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(entry.name), reply, entry.cookie + DOTS):
                return

    async def _load_directory(self, number: int) -> Inode:
        """Return a directory with its names. Raises ESTALE and ENOTDIR."""
        await self._refresh(number)
        found = self._get(number)
        if not found.is_directory:
            raise posix_error(errno.ENOTDIR)
        if not found.is_imported:
            await self._changes.request_scan(found.id, must_succeed=True)
        return found

    async def _refresh(self, number: int) -> None:
        found = history_names.find_shown(self._context.db, number)
        if found is not None:
            await self._changes.refresh_inode(found.id)

    # --- attributes ---------------------------------------------------------------------------------------------------

    async def getattr(self, inode: int, _: "RequestContext") -> EntryAttributes:
        await self._refresh(inode)
        return self._build_reply(inode)

    async def readlink(self, inode: int) -> bytes:
        target = self._get(inode).target
        if target is None:
            raise posix_error(errno.EINVAL)
        return target

    async def getxattr(self, inode: int, name: bytes, ctx: "RequestContext") -> bytes:
        return await self._attributes.getxattr(self._get(inode).id, name, ctx)

    async def listxattr(self, inode: int, ctx: "RequestContext") -> Sequence[bytes]:
        """Return the names of the attributes that the application gave it."""
        return await self._attributes.listxattr(self._get(inode).id, ctx)

    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: "RequestContext") -> None:
        """Set an attribute of a set or a series, as `user_settings` says."""
        await self._attributes.setxattr(self._require_settable(inode, name).id, name, value, ctx)

    async def removexattr(self, inode: int, name: bytes, ctx: "RequestContext") -> None:
        await self._attributes.removexattr(self._require_settable(inode, name).id, name, ctx)

    def _require_settable(self, number: int, name: bytes) -> Inode:
        found = self._get(number)
        if not found.is_directory or not name.startswith(summary.VIRTUAL_XATTR_PREFIX):
            raise posix_error(errno.EROFS)
        return found

    def _get(self, number: int) -> Inode:
        """Return what a number leads to: its name, or the open file if the name is gone. Raises ESTALE."""
        found = history_names.find_shown(self._context.db, number)
        if found is None and (file := self._context.open_files.by_inode.get(number)) is not None:
            found = inodes.get(self._context.db, file.inode)
        if found is None:
            raise posix_error(errno.ESTALE)
        return found

    def _build_reply(self, number: int) -> EntryAttributes:
        return self._build_attributes(number, self._get(number))

    def _build_attributes(self, number: int, inode: Inode) -> EntryAttributes:
        """Build them: no user may write a file; the owner may set attributes of a directory."""
        shown = self._context.open_files.read_attributes(inode)
        mode = shown.mode & ~(0o022 if shown.is_directory else 0o222 if shown.is_file else 0)
        nlink = shown.nlink if shown.is_directory else 1
        entry = self._context.build_attributes(replace(shown, id=number, mode=mode, nlink=nlink, history=0), is_open_for_writing=False)
        entry.entry_timeout, entry.attr_timeout = 0, limits.SHARED_ATTRIBUTE_TIMEOUT_S
        return entry

    # --- files --------------------------------------------------------------------------------------------------------

    async def open(self, inode: int, flags: int, ctx: "RequestContext") -> FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise posix_error(errno.EROFS)
        await self._refresh(inode)
        number = self._get(inode).id
        if salvage_records.is_previous_shown(self._context.db, number):
            raise posix_error(errno.EIO)  # The set had other bytes.
        opened = await self._files.open(number, flags, ctx, shown=inode)
        opened.keep_cache = False
        return opened
