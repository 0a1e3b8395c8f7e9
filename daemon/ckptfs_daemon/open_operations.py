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
from ckptfs_daemon.creating import Creating
from ckptfs_daemon.edge import answered
from ckptfs_daemon.handler import VISITS_MAX, Handler
from ckptfs_daemon.opening import Opening
from ckptfs_daemon.wishes import Opened, Wish

from pyfuse3 import EntryAttributes, FileInfo  # isort: skip

if TYPE_CHECKING:
    from pyfuse3 import RequestContext


class OpenOperations(Handler):
    """Handlers that open."""

    @answered
    async def create(self, parent: int, name: bytes, mode: int, flags: int, ctx: "RequestContext") -> tuple[FileInfo, EntryAttributes]:
        """Make a file and open it."""
        request = edge.request()
        body = await self.told(request)
        if body is not None:
            opened = Opened.unpack(body)
            return self._info(opened), self.reply(self.current(opened.inode))
        creating = Creating(self.context, request, parent, name, mode, (ctx.uid, ctx.gid))
        try:
            opened = await self.agreed(
                lambda: self._created(creating), [(parent, name)], undo=lambda made: self.context.open_files.end(made.handle)
            )
        except FileExistsError:
            if flags & os.O_EXCL:
                raise
            # The kernel knew no such name: let it look again, and open what is there with all its checks.
            raise posix_error(errno.ESTALE) from None
        return self._info(opened), self.reply_as_is(creating.inode, written=True)

    async def _created(self, creating: Creating) -> Opened:
        """Create, in a directory that was imported where that is possible (P1)."""
        for _ in range(VISITS_MAX):
            try:
                return await creating.run()
            except NotImported as missing:
                creating.blind = not await self.visited(missing.directory)
        creating.blind = True
        return await creating.run()

    @answered
    async def open(self, inode: int, flags: int, ctx: "RequestContext") -> FileInfo:
        """Open a file that is there."""
        request = edge.request()
        body = await self.told(request)
        if body is not None:
            return self._info(Opened.unpack(body))
        if self.walks is None or not self.walks.was_led(ctx.pid, inode):
            await self.fresh_inode(inode, ctx.pid)
        truncate = bool(flags & os.O_TRUNC)
        writer = truncate or flags & os.O_ACCMODE != os.O_RDONLY
        wish = Wish(inode, writer, truncate, request, root=ctx.uid == 0, hasty=bool(flags & os.O_NONBLOCK))
        try:
            return self._info(await Opening(self.context, wish).run())
        except (OSError, CkptfsError) as failure:
            if failure.errno == errno.ESTALE and self.walks is not None:
                self.walks.misled(ctx.pid)
            raise

    def _info(self, opened: Opened) -> FileInfo:
        """The reply. Nothing may be awaited after it."""
        if opened.backing and self.context.sharing is None:
            # Where the kernel keeps no pages there is nothing to flush: saves a round trip at each close.
            door.set_open_flags(door.FOPEN_NOFLUSH)
        # What another node has written in place since then, the pages of a former open do not show.
        kept = self.context.data_path is DataPath.BUFFERED and self.context.sharing is None
        return FileInfo(fh=opened.fh, direct_io=opened.direct, keep_cache=kept)
