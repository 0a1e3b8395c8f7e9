"""What the mount process's handlers work with: wired once in mount.py, never changed afterwards.

What the mixins of handlers share: a change of the catalog that waits for the PFS only where it must, and the attributes of a reply.

Every handler follows the same order: note the request before the first await, commit the change together with its answer, then reply. A
request that the kernel sends again after a crash gets the answer that its change was committed with.
If we die here: before the commit nothing happened, after it the answer is in the catalog.
"""

import errno
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ckptfs import limits
from ckptfs.catalog import handles, mover_requests
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get
from ckptfs.catalog.namespace import NotImported
from ckptfs.config import Config
from ckptfs.errors import CkptfsError, TimedOut, posix_error
from ckptfs.model import DataPath, Inode
from ckptfs.tiers.storage import Tiers
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse.request import BLOCK_BYTES, PASSTHROUGH_BLKSIZE, Request, build_attributes, build_negative_entry
from ckptfs_daemon.ipc import WakeChannel
from ckptfs_daemon.mount.cluster_recovery import StandbyLease
from ckptfs_daemon.mount.mover_client import MoverClient
from ckptfs_daemon.mount.open_file_table import OpenFileTable
from ckptfs_daemon.mount.shared_namespace import SharedNamespace

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip

if TYPE_CHECKING:
    from ckptfs_daemon.mount.lookups import LookupPrefetch


@dataclass(frozen=True, slots=True)
class MountContext:
    """The catalog, the tiers, the way to the mover, and what is open."""

    config: Config
    data_path: DataPath
    db: Database
    tiers: Tiers
    wake_channel: WakeChannel
    mover_client: MoverClient
    open_files: OpenFileTable
    shared_namespace: SharedNamespace | None = None
    """None: this node is alone."""
    standby_lease: StandbyLease | None = None
    """None likewise."""


log = logging.getLogger(__name__)
T = TypeVar("T")

SCANS_PER_REQUEST_MAX = 3
"""How often one request asks for visits: a rename needs two directories, and a third that became the target meanwhile."""


class ChangeRunner:
    """The base of the mixins; `context` is what the mount process wired, `walks` too, with other nodes."""

    context: "MountContext"
    prefetch: "LookupPrefetch | None" = None
    _is_scan_slow = False

    def get_attributes(self, inode: Inode) -> EntryAttributes:
        """The attributes of `inode` as they are now, an open file's from its backing file."""
        files = self.context.open_files
        return self.build_attributes(files.get_attributes(inode), files.is_open_for_writing(inode.id))

    def build_attributes(self, inode: Inode, is_open_for_writing: bool = False) -> EntryAttributes:
        """The attributes of `inode`, which says itself all that there is to say; `written`: somebody has it open for writing."""
        passthrough = self.context.data_path is DataPath.PASSTHROUGH
        entry = build_attributes(inode, PASSTHROUGH_BLKSIZE if passthrough else BLOCK_BYTES)
        if self.context.shared_namespace is not None:
            # Another node may change it at any time, and does not tell us.
            entry.entry_timeout, entry.attr_timeout = 0, limits.SHARED_ATTRIBUTE_TIMEOUT_S
        if is_open_for_writing and passthrough:
            entry.attr_timeout = limits.WRITTEN_ATTRIBUTE_TIMEOUT_S
        return entry

    def build_negative_entry(self) -> EntryAttributes:
        """There is no such name."""
        return build_negative_entry(limits.NEGATIVE_TIMEOUT_S if self.context.shared_namespace is None else 0)

    async def get_replayed_reply(self, request: Request) -> bytes | None:
        """The answer that this request got before a crash; None when it is new, was not answered, or was taken back since."""
        if not request.is_resent:
            return None
        if self.context.shared_namespace is not None:
            await self.context.shared_namespace.wait_published()
        return handles.get_reply(self.context.db, request.number)

    # --- with the other nodes -----------------------------------------------------------------------------------------

    async def refresh_inode(self, inode: int, pid: int = 0) -> None:
        """What other nodes did to an inode is known here; `pid`: the thread that asks, where it may just have looked it up."""
        if self.prefetch is not None and pid:
            await self.prefetch.refresh_inode(pid, inode)
        elif self.context.shared_namespace is not None:
            await self.context.shared_namespace.refresh_inode(inode)

    async def commit_shared(
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
        shared_namespace = self.context.shared_namespace
        if shared_namespace is None:
            return await act()
        names, inodes = tuple(names), tuple(inodes)

        async def refresh() -> None:
            for inode in inodes:
                await shared_namespace.refresh_inode(inode)
            await shared_namespace.refresh_change(names)

        return await shared_namespace.commit_shared(act, refresh, names, undo)

    async def run_change(self, act: Callable[[Database, bool], T], *, creates: bool = False) -> T:
        """Run `act(db, blind)` as one change, with the releases that came before; visit what it finds unvisited, and try again.

        `creates`: when a visit fails or takes too long, go on with what the catalog knows (`blind`): creating never fails because of
        the PFS (P1). Otherwise the visit's error is raised.
        """
        blind = False
        for _ in range(SCANS_PER_REQUEST_MAX):
            try:
                with self.context.open_files.change() as db:
                    result = act(db, blind)
                break
            except NotImported as missing:
                blind = not await self.request_scan(missing.directory, must_succeed=blind or not creates)
        else:
            raise posix_error(errno.EAGAIN)
        if self.context.db.is_journalled:
            self.context.wake_channel.notify(ipc.WORK)
        return result

    async def request_scan(self, directory: int, *, must_succeed: bool = False) -> bool:
        """Have a directory of the PFS imported. False when that cannot be done now; with `must` the error is raised.

        Where the last visit took too long the next ones are given little time, until one succeeds: what waits here is an application.
        """
        try:
            timeout_s = limits.SCAN_WAIT_SLOW_S if self._is_scan_slow else limits.SCAN_WAIT_S
            await self.context.mover_client.request(mover_requests.SCAN, directory, timeout_s=timeout_s)
        except (OSError, CkptfsError) as failure:
            self._is_scan_slow = isinstance(failure, TimedOut)
            if must_succeed:
                raise
            log.debug("directory %d could not be visited: %s", directory, failure)
            return False
        self._is_scan_slow = False
        return True

    def get_inode(self, inode: int) -> Inode:
        """The row of an inode. Raises ENOENT."""
        return get(self.context.db, inode)
