"""Handlers of attributes and extended attributes: getattr, setattr, readlink, and the four of xattrs.

`FileHandlers.resize` changes the length of a file; every other attribute is a row of the catalog. `user.*` and `trusted.*` are stored; the
kernel has checked the permission. ACLs, file capabilities and security labels are not supported, as on any filesystem without them: a write
must drop a capability, and on the passthrough path this process sees no writes. `user.ckptfs.*` shows what ckptfs knows about a file, and
takes what users say (`user_settings`). These names are not listed, so programs that copy all attributes do not try to set them.

Crash safety: see `context`. A change of length without a reply is made again.
"""

import errno
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ckptfs import disk, limits, procfs
from ckptfs.catalog import handles, history, history_names, inodes, summary, user_settings
from ckptfs.catalog.database import Database
from ckptfs.catalog.namespace import get_path
from ckptfs.errors import posix_error
from ckptfs.model import Inode, Level
from ckptfs.series.rules import encode_rules
from ckptfs.series.search import REJECTED_MAX
from ckptfs_daemon.fuse.request import Request, get_current_request
from ckptfs_daemon.mount.context import ChangeRunner, MountContext
from ckptfs_daemon.mount.handlers.file_handlers import FileHandlers
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader
from ckptfs_daemon.mount.sets.set_events import record_rollback

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import RequestContext, SetattrFields

STORED_PREFIXES = (b"user.", b"trusted.")
SECURITY_PREFIX = b"security."


class AttributeHandlers:
    """Handlers of what stat(2), readlink(2) and getxattr(2) show."""

    def __init__(
        self, context: MountContext, changes: ChangeRunner, files: FileHandlers, reader: MountMemberReader, on_setting: Callable[[], None]
    ) -> None:
        """`on_setting` is called after a change of what users say."""
        self._context, self._changes, self._files, self._reader = context, changes, files, reader
        self._on_setting = on_setting

    async def getattr(self, inode: int, ctx: "RequestContext") -> EntryAttributes:
        await self._changes.refresh_inode(inode, pid=ctx.pid)
        await self._context.open_files.refresh_status(inode)
        return self._build_reply(inode)

    async def readlink(self, inode: int) -> bytes:
        await self._changes.refresh_inode(inode)
        target = self._context.get_inode(inode).target
        if target is None:
            raise posix_error(errno.EINVAL)
        return target

    async def setattr(self, inode: int, attr: EntryAttributes, fields: "SetattrFields") -> EntryAttributes:
        """Serve chmod, chown, truncate and utimens, also several at once."""
        request = get_current_request()
        if fields.update_ctime:
            self._context.unsent_times.remove(inode)
        if await self._changes.get_replayed_reply(request) is not None:
            return self._build_reply(inode)
        if fields.update_size:
            await self._changes.refresh_inode(inode)
            await self._files.resize(inode, attr.st_size)
        shared_namespace = self._context.shared_namespace
        changed = await shared_namespace.commit_shared(lambda: self._set_attributes(request, inode, attr, fields), inodes=[inode])
        return self._context.build_reply(changed)

    def _build_reply(self, inode: int) -> EntryAttributes:
        return self._context.build_reply(self._context.get_inode(inode))

    async def _set_attributes(self, request: Request, inode: int, attr: EntryAttributes, fields: "SetattrFields") -> Inode:
        open_files = self._context.open_files
        atime_ns = disk.bound_time(attr.st_atime_ns) if fields.update_atime else None
        resized_ns = time.time_ns() if fields.update_size and not open_files.kernel_owns_times else None
        mtime_ns = disk.bound_time(attr.st_mtime_ns) if fields.update_mtime else resized_ns
        sets_owner = fields.update_uid or fields.update_gid
        sets_other = fields.update_mode or fields.update_size or fields.update_atime or fields.update_mtime
        # chown(-1, -1) arrives as a setattr of nothing, or of ctime if the kernel keeps times. Like any chown it drops set-id bits.
        kill_set_id = request.kills_set_id or sets_owner or not sets_other

        def act(db: Database, _: bool) -> Inode:
            handles.record_reply(db, request.number)
            changed = inodes.set_attributes(
                db,
                inode,
                mode=attr.st_mode if fields.update_mode else None,
                uid=attr.st_uid if fields.update_uid else None,
                gid=attr.st_gid if fields.update_gid else None,
                atime_ns=atime_ns,
                mtime_ns=mtime_ns,
                ctime_ns=disk.bound_time(attr.st_ctime_ns) if fields.update_ctime else None,
                kill_set_id=kill_set_id,
            )
            if changed.is_directory and (sets_owner or fields.update_mode):
                history.copy_rights(db, inode)
            return changed

        file = open_files.by_inode.get(inode)
        if file is not None and (atime_ns is not None or (mtime_ns is not None and not open_files.kernel_owns_times)):
            await file.set_times(atime_ns, mtime_ns)
        return await self._changes.run_change(act)

    # --- extended attributes ------------------------------------------------------------------------------------------

    async def getxattr(self, inode: int, name: bytes, ctx: "RequestContext") -> bytes:
        if name.startswith(SECURITY_PREFIX):
            # The kernel asks for a capability at the first write to each file: do not query the catalog.
            raise posix_error(errno.ENODATA)
        request = get_current_request()
        if await self._changes.get_replayed_reply(request) is not None:
            # pyfuse3 reads the value before it creates one: this very request created it before the crash.
            raise posix_error(errno.ENODATA)
        await self._changes.refresh_inode(inode)
        if name.startswith(summary.VIRTUAL_XATTR_PREFIX):
            await self._context.shared_namespace.refresh_copies(inode)
            name = name.removeprefix(summary.VIRTUAL_XATTR_PREFIX)
            return await self._get_virtual_xattr(inode, name, ctx)
        if name in STORED_PREFIXES:
            raise posix_error(errno.EINVAL)
        if name.startswith(STORED_PREFIXES):
            return inodes.get_xattr(self._context.db, inode, name)
        raise posix_error(errno.EOPNOTSUPP)

    async def _get_virtual_xattr(self, inode: int, name: bytes, ctx: "RequestContext") -> bytes:
        db, row = self._context.db, self._context.get_inode(inode)
        virtual = summary.VIRTUAL_XATTRS.get(name) if row.is_file else None
        value: bytes | None
        if name.startswith(summary.LATEST_XATTR_PREFIX):
            value = await self._find_latest(row, name.removeprefix(summary.LATEST_XATTR_PREFIX), ctx)
        elif name == summary.FLAW_XATTR:
            flaw = await self._reader.find_flaw(inode, self._build_check(ctx))
            value = None if flaw is None else os.fsencode(flaw)
        elif name == summary.RULES_XATTR:
            value = encode_rules(self._context.config.series)
        elif name == summary.FORMAT_XATTR:
            value = await self._find_format(inode)
        elif name == summary.SET_XATTR:
            value = history_names.find_set_path(db, row)
        else:
            value = user_settings.get_setting(db, row, name) if virtual is None else virtual[0](db, inode)
        if value is None:
            raise posix_error(errno.ENODATA)
        return value

    async def _find_latest(self, directory: Inode, asked: bytes, ctx: "RequestContext") -> bytes | None:
        """Return the answer to `ckptfs latest`. If it is too long, it names fewer members."""
        level, first, name = (asked.split(b".", 2) + [b"", b""])[:3]
        if not directory.is_directory or level.decode("latin-1") not in list(Level) or not first.isdigit():
            return None
        search = functools.partial(self._reader.find_latest, directory.id, name, Level(level.decode()), may_read=self._build_check(ctx))
        at_most = REJECTED_MAX
        while len(text := (await search(first=int(first), at_most=at_most)).answer.encode()) > limits.XATTR_VALUE_BYTES_MAX:
            at_most //= 2
        return text

    async def _find_format(self, inode: int) -> bytes | None:
        found = (await self._reader.list_files(inode)).files.get(b"")
        if found is None or found[0].incomplete_reason:
            return None
        return (await self._reader.inspect(inode, get_path(self._context.db, inode).rpartition(b"/")[2], found[0])).encode()

    def _build_check(self, ctx: "RequestContext") -> Callable[[int], bool]:
        """Return a function that tells whether the caller may read a file or list a directory.

        It decides by the mode, as the kernel does. There are no ACLs.
        """
        groups = {ctx.gid, *procfs.list_groups(ctx.pid)}

        def may_read(number: int) -> bool:
            inode = self._context.get_inode(number)
            shift = 6 if inode.uid == ctx.uid else 3 if inode.gid in groups else 0
            wanted = 0o5 if inode.is_directory else 0o4
            return ctx.uid == 0 or inode.mode >> shift & wanted == wanted

        return may_read

    async def listxattr(self, inode: int, ctx: "RequestContext") -> Sequence[bytes]:
        """Return the names of the stored attributes; `trusted.*` only to root."""
        await self._changes.refresh_inode(inode)
        names = inodes.list_xattrs(self._context.db, inode)
        return names if ctx.uid == 0 else [name for name in names if not name.startswith(b"trusted.")]

    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: "RequestContext") -> None:
        """Set an attribute. pyfuse3 has checked XATTR_CREATE and XATTR_REPLACE by reading the value first."""
        await self._change_xattr(inode, name, value, ctx.uid)

    async def removexattr(self, inode: int, name: bytes, ctx: "RequestContext") -> None:
        await self._change_xattr(inode, name, None, ctx.uid)

    async def _change_xattr(self, inode: int, name: bytes, value: bytes | None, uid: int) -> None:
        """Set an attribute, or remove it without a value."""
        if name.startswith(summary.VIRTUAL_XATTR_PREFIX):
            await self._change_setting(inode, name.removeprefix(summary.VIRTUAL_XATTR_PREFIX), value, uid)
        elif name in STORED_PREFIXES:
            # A bare prefix is not a name, as on local filesystems.
            raise posix_error(errno.EINVAL)
        elif not name.startswith(STORED_PREFIXES):
            raise posix_error(errno.EOPNOTSUPP)
        elif value is None:
            await self._commit_change(inode, lambda db: inodes.remove_xattr(db, inode, name))
        else:
            await self._commit_change(inode, lambda db: inodes.set_xattr(db, inode, name, value))

    async def _change_setting(self, inode: int, name: bytes, value: bytes | None, uid: int) -> None:
        await self._commit_change(inode, lambda db: user_settings.set_setting(db, inodes.get(db, inode), name, value, uid))
        if name == b"rollback":
            record_rollback(self._context.db, inode)
        self._on_setting()

    async def _commit_change(self, inode: int, change: Callable[[Database], None]) -> None:
        request = get_current_request()
        if await self._changes.get_replayed_reply(request) is not None:
            return

        def act(db: Database, _: bool) -> Inode:
            row = self._context.get_inode(inode)
            handles.record_reply(db, request.number)
            change(db)
            return row

        changed = await self._context.shared_namespace.commit_shared(lambda: self._changes.run_change(act), inodes=[inode])
        self._context.expect_times([changed])
