"""What the mixins of handlers share: a change of the catalog that waits for the PFS only where it must, and the attributes of a reply.

Every handler follows the same order: note the request before the first await, commit the change together with its answer, then reply. A
request that the kernel sends again after a crash gets the answer that its change was committed with.
If we die here: before the commit nothing happened, after it the answer is in the catalog.
"""

import errno
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from ckptfs import limits
from ckptfs.catalog import answers, namespace, wants
from ckptfs.catalog.database import Database
from ckptfs.catalog.directories import NotImported
from ckptfs.errors import CkptfsError, TimedOut, posix_error
from ckptfs.model import DataPath, Inode
from ckptfs_daemon import bells, replies
from ckptfs_daemon.edge import Request

from pyfuse3 import EntryAttributes  # isort: skip

if TYPE_CHECKING:
    from ckptfs_daemon.context import Context
    from ckptfs_daemon.walking import Walks

log = logging.getLogger(__name__)

T = TypeVar("T")

VISITS_MAX = 3
"""How often one request asks for visits: a rename needs two directories, and a third that became the target meanwhile."""


class Handler:
    """The base of the mixins; `context` is what the mount process wired, `walks` too, with other nodes."""

    context: "Context"
    walks: "Walks | None" = None
    _visits_hang = False

    def reply(self, inode: Inode) -> EntryAttributes:
        """The attributes of `inode` as they are now, an open file's from its backing file."""
        files = self.context.open_files
        return self.reply_as_is(files.attributes(inode), files.is_written(inode.id))

    def reply_as_is(self, inode: Inode, written: bool = False) -> EntryAttributes:
        """The attributes of `inode`, which says itself all that there is to say; `written`: somebody has it open for writing."""
        passthrough = self.context.data_path is DataPath.PASSTHROUGH
        entry = replies.attributes(inode, replies.GATHER_BYTES if passthrough else replies.BLOCK_BYTES)
        if self.context.sharing is not None:
            # Another node may change it at any time, and does not tell us.
            entry.entry_timeout, entry.attr_timeout = 0, limits.SHARED_ATTRIBUTE_TIMEOUT_S
        if written and passthrough:
            entry.attr_timeout = limits.WRITTEN_ATTRIBUTE_TIMEOUT_S
        return entry

    def nothing(self) -> EntryAttributes:
        """There is no such name."""
        return replies.nothing(limits.NEGATIVE_TIMEOUT_S if self.context.sharing is None else 0)

    async def told(self, request: Request) -> bytes | None:
        """The answer that this request got before a crash; None when it is new, was not answered, or was taken back since."""
        if not request.again:
            return None
        if self.context.sharing is not None:
            await self.context.sharing.published()
        return answers.get_reply(self.context.db, request.number)

    # --- with the other nodes -----------------------------------------------------------------------------------------

    async def fresh_inode(self, inode: int, pid: int = 0) -> None:
        """What other nodes did to an inode is known here; `pid`: the thread that asks, where it may just have looked it up."""
        if self.walks is not None and pid:
            await self.walks.fresh_inode(pid, inode)
        elif self.context.sharing is not None:
            await self.context.sharing.fresh_inode(inode)

    async def agreed(
        self,
        act: Callable[[], Awaitable[T]],
        names: Iterable[tuple[int, bytes]] = (),
        inodes: Iterable[int] = (),
        undo: Callable[[T], None] = lambda _: None,
    ) -> T:
        """Do `act`, a change of these names or inodes, and return when the other nodes see it; alone at once.

        Where it fails on what was known here, or another node was faster, it is done again on what is true. `undo` is told what came of an
        act that was taken back.
        """
        sharing = self.context.sharing
        if sharing is None:
            return await act()
        names, inodes = tuple(names), tuple(inodes)

        async def fresh() -> None:
            for inode in inodes:
                await sharing.fresh_inode(inode)
            await sharing.fresh_change(names)

        return await sharing.agreed(act, fresh, names, undo)

    async def change(self, act: Callable[[Database, bool], T], *, creates: bool = False) -> T:
        """Run `act(db, blind)` as one change, with the releases that came before; visit what it finds unvisited, and try again.

        `creates`: when a visit fails or takes too long, go on with what the catalog knows (`blind`): creating never fails because of
        the PFS (P1). Otherwise the visit's error is raised.
        """
        blind = False
        for _ in range(VISITS_MAX):
            try:
                with self.context.open_files.change() as db:
                    result = act(db, blind)
                break
            except NotImported as missing:
                blind = not await self.visited(missing.directory, must=blind or not creates)
        else:
            raise posix_error(errno.EAGAIN)
        if self.context.db.is_journalled:
            self.context.bell.ring(bells.WORK)
        return result

    async def visited(self, directory: int, *, must: bool = False) -> bool:
        """Have a directory of the PFS imported. False when that cannot be done now; with `must` the error is raised.

        Where the last visit took too long the next ones are given little time, until one succeeds: what waits here is an application.
        """
        try:
            timeout_s = limits.VISIT_WAIT_SLOW_S if self._visits_hang else limits.VISIT_WAIT_S
            await self.context.asking.ask(wants.SCAN, directory, timeout_s=timeout_s)
        except (OSError, CkptfsError) as failure:
            self._visits_hang = isinstance(failure, TimedOut)
            if must:
                raise
            log.debug("directory %d could not be visited: %s", directory, failure)
            return False
        self._visits_hang = False
        return True

    def current(self, inode: int) -> Inode:
        """The row of an inode. Raises ENOENT."""
        return namespace.get(self.context.db, inode)
