"""Owns the handlers of open files' beginning: create and open. What happens in between the kernel does alone where it can.

If we die here: see opening.py and open_files.py; a request that was committed and not answered gets the answer that was kept.
"""

import errno
import os
from typing import TYPE_CHECKING

from ckptfs.catalog.directories import NotImported
from ckptfs.errors import CkptfsError, posix_error
from ckptfs.model import DataPath
from ckptfs_daemon import door, edge
from ckptfs_daemon.creating import CreateAttempt
from ckptfs_daemon.edge import translate_errors
from ckptfs_daemon.handler import SCANS_PER_REQUEST_MAX, ChangeRunner
from ckptfs_daemon.opening import OpenAttempt
from ckptfs_daemon.wishes import OpenRequest, OpenResult

from pyfuse3 import EntryAttributes, FileInfo  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import RequestContext


class OpenHandlers(ChangeRunner):
    """Handlers that open."""

    @translate_errors
    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: "RequestContext") -> tuple[FileInfo, EntryAttributes]:
        """Make a file and open it."""
        request = edge.get_current_request()
        body = await self.get_replayed_reply(request)
        if body is not None:
            opened = OpenResult.unpack(body)
            return self._build_file_info(opened), self.get_attributes(self.get_inode(opened.inode))
        creating = CreateAttempt(self.context, request, parent, name, mode, (ctx.uid, ctx.gid))
        try:
            opened = await self.commit_shared(
                lambda: self._create_with_scan(creating), [(parent, name)], undo=lambda made: self.context.open_files.release(made.handle)
            )
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            # The kernel knew no such name: let it look again, and open what is there with all its checks.
            raise posix_error(errno.ESTALE) from None
        return self._build_file_info(opened), self.build_attributes(creating.inode, is_open_for_writing=True)

    async def _create_with_scan(self, creating: CreateAttempt) -> OpenResult:
        """Create, in a directory that was imported where that is possible (P1)."""
        for _ in range(SCANS_PER_REQUEST_MAX):
            try:
                return await creating.run()
            except NotImported as missing:
                creating.blind = not await self.request_scan(missing.directory)
        creating.blind = True
        return await creating.run()

    @translate_errors
    async def open(self, inode: int, flags: int, ctx: "RequestContext") -> FileInfo:
        """Open a file that is there."""
        request = edge.get_current_request()
        body = await self.get_replayed_reply(request)
        if body is not None:
            return self._build_file_info(OpenResult.unpack(body))
        if self.prefetch is None or not self.prefetch.is_stale_open_target(ctx.pid, inode):
            await self.refresh_inode(inode, ctx.pid)
        truncate = bool(flags & os.O_TRUNC)
        writer = truncate or flags & os.O_ACCMODE != os.O_RDONLY
        open_request = OpenRequest(inode, writer, truncate, request, is_root=ctx.uid == 0, nonblocking=bool(flags & os.O_NONBLOCK))
        try:
            return self._build_file_info(await OpenAttempt(self.context, open_request).run())
        except (OSError, CkptfsError) as failure:
            if failure.errno == errno.ESTALE and self.prefetch is not None:
                self.prefetch.record_stale_open(ctx.pid)
            raise

    def _build_file_info(self, opened: OpenResult) -> FileInfo:
        """The reply. Nothing may be awaited after it."""
        if opened.backing_id and self.context.shared_namespace is None:
            # Where the kernel keeps no pages there is nothing to flush: saves a round trip at each close.
            door.set_open_flags(door.FOPEN_NOFLUSH)
        # What another node has written in place since then, the pages of a former open do not show.
        kept = self.context.data_path is DataPath.BUFFERED and self.context.shared_namespace is None
        return FileInfo(fh=opened.fh, direct_io=opened.direct, keep_cache=kept)
