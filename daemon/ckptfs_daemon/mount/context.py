"""The services that all handlers of the mount process share, and the changes of the catalog.

A handler reads its request's number before the first await, commits its change together with its reply, then replies. If a request
comes again after a crash, the handler returns the recorded reply.

Crash safety: before the commit nothing happened; after it the reply is in the catalog.
"""

import contextlib
import errno
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import trio

from ckptfs import limits
from ckptfs.catalog import contents, handles, inodes, mover_requests, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.namespace import NotImported
from ckptfs.cgroups import MemoryLimits
from ckptfs.config import Config
from ckptfs.errors import CkptfsError, TimedOut, posix_error
from ckptfs.model import ContentState, DataPath, Inode, Tier
from ckptfs.tiers.storage import Tiers
from ckptfs_daemon import ipc
from ckptfs_daemon.fuse.request import BLOCK_BYTES, PASSTHROUGH_BLKSIZE, Request, build_attributes, build_negative_entry
from ckptfs_daemon.ipc import WakeChannel
from ckptfs_daemon.mount.cluster.cluster_recovery import StandbyLease
from ckptfs_daemon.mount.cluster.lookups import LookupPrefetch
from ckptfs_daemon.mount.cluster.shared_namespace import LocalNamespace
from ckptfs_daemon.mount.open_files.mover_client import MoverClient
from ckptfs_daemon.mount.open_files.open_file_table import OpenFileTable

# After fuse.session, which loads the shim before pyfuse3.
from pyfuse3 import EntryAttributes  # isort: skip

log = logging.getLogger(__name__)
T = TypeVar("T")

TIMES_WAIT_S = 0.2
SCANS_PER_REQUEST_MAX = 3
"""How many scans one request may ask for: a rename needs two directories, and a third one if its target was replaced meanwhile."""


class UnsentTimes:
    """Files whose times the kernel has yet to send. Belongs to the trio thread.

    With a writeback cache the kernel keeps the times of files, and sends them before a call that changes a name or an extended attribute
    returns. If the program is killed before that, the kernel notes an error for the file, which the next close(2) returns to another
    program. It forgets the error with the file.
    """

    def __init__(self) -> None:
        self._files: dict[int, float] = {}

    def add(self, inode: int) -> None:
        self._files[inode] = trio.current_time()

    def remove(self, inode: int) -> None:
        """Note that the kernel has sent the times of a file."""
        self._files.pop(inode, None)

    async def run(self, list_names: Callable[[int], list[tuple[int, bytes]]], forget: Callable[[int, bytes], None]) -> None:
        """Have the kernel forget the names of files whose times do not come. A task.

        `list_names` returns directory and name of each. `forget` gets these, and is called in a thread.
        """
        while True:
            await trio.sleep(TIMES_WAIT_S)
            until_s = trio.current_time() - TIMES_WAIT_S
            for inode, at_s in list(self._files.items()):
                if at_s > until_s or self._files.pop(inode, None) is None:
                    continue
                for name in list_names(inode):
                    with contextlib.suppress(OSError):
                        await trio.to_thread.run_sync(forget, *name, abandon_on_cancel=True)


@dataclass(frozen=True, slots=True)
class MountContext:
    """The services of a mount process. The prefetch and the lease are None outside a cluster."""

    config: Config
    data_path: DataPath
    db: Database
    tiers: Tiers
    wake_channel: WakeChannel
    mover_client: MoverClient
    open_files: OpenFileTable
    memory_limits: MemoryLimits
    shared_namespace: LocalNamespace = field(default_factory=LocalNamespace)
    prefetch: LookupPrefetch | None = None
    standby_lease: StandbyLease | None = None
    unsent_times: UnsentTimes = field(default_factory=UnsentTimes)

    def get_inode(self, inode: int) -> Inode:
        return inodes.get(self.db, inode)

    def expect_times(self, inodes: Iterable[Inode | None]) -> None:
        """Note that the kernel sends the times of those inodes that are files.

        If it does not keep times, `inodes` is not read.
        """
        for inode in inodes if self.open_files.kernel_owns_times else ():
            if inode is not None and inode.is_file:
                self.unsent_times.add(inode.id)

    def build_reply(self, inode: Inode) -> EntryAttributes:
        """Return the current attributes of `inode`; size and times of an open file come from its backing file."""
        return self.build_attributes(self.open_files.read_attributes(inode), self.open_files.is_open_for_writing(inode.id))

    def build_attributes(self, inode: Inode, is_open_for_writing: bool) -> EntryAttributes:
        """Return the attributes of the row `inode`, with the timeouts that this mount allows the kernel."""
        is_passthrough = self.data_path is DataPath.PASSTHROUGH
        entry = build_attributes(inode, PASSTHROUGH_BLKSIZE if is_passthrough else BLOCK_BYTES)
        if self.shared_namespace.is_shared:
            # Another node may change it at any time without notice.
            entry.entry_timeout, entry.attr_timeout = 0, limits.SHARED_ATTRIBUTE_TIMEOUT_S
        if is_open_for_writing and is_passthrough:
            entry.attr_timeout = limits.WRITTEN_ATTRIBUTE_TIMEOUT_S
        return entry

    def build_negative_entry(self) -> EntryAttributes:
        return build_negative_entry(0 if self.shared_namespace.is_shared else limits.CACHE_TIMEOUT_S)


@contextlib.contextmanager
def reserve_content(db: Database, tier: Tier) -> Iterator[int]:
    """Yield a reserved content, whose file the block makes. It is DOOMED if it belongs to no inode then."""
    with db.transaction():
        content = contents.insert_reserved_content(db, tier)
    try:
        yield content
    finally:
        if contents.is_reserved(db, content):
            contents.set_state(db, content, ContentState.DOOMED)


class ChangeRunner:
    """Changes of the catalog.

    A change waits for a scan of the PFS or for the shared store only if it must.
    """

    def __init__(self, context: MountContext) -> None:
        self._context = context
        self._is_scan_slow = False

    async def get_replayed_reply(self, request: Request) -> bytes | None:
        """Return the reply that this request got before a crash, unless its change was reverted since."""
        if not request.is_repeated:
            return None
        await self._context.shared_namespace.wait_published()
        return handles.get_reply(self._context.db, request.number)

    async def refresh_inode(self, inode: int, *, pid: int = 0) -> None:
        """Load what other nodes did to an inode. `pid`: the calling thread; 0 if unknown."""
        if self._context.prefetch is not None and pid:
            await self._context.prefetch.refresh_inode(inode, pid=pid)
        else:
            await self._context.shared_namespace.refresh_inode(inode)

    async def run_change(self, act: Callable[[Database, bool], T], *, creates: bool = False) -> T:
        """Run `act(db, allow_unimported)` as one change, together with the pending releases.

        Scan a directory that `act` needs, and try again. `creates`: if a scan fails or takes too long, go on with the rows of the catalog
        (`allow_unimported`): creating never fails because of the PFS (P1). Otherwise the scan's error is raised.
        """
        allow_unimported = False
        for _ in range(SCANS_PER_REQUEST_MAX):
            try:
                with self._context.open_files.change() as db:
                    result = act(db, allow_unimported)
                break
            except NotImported as missing:
                allow_unimported = not await self.request_scan(missing.directory, must_succeed=allow_unimported or not creates)
        else:
            raise posix_error(errno.EAGAIN)
        if self._context.db.is_journalled:
            self._context.wake_channel.notify(ipc.WORK)
        return result

    async def lookup_after_scan(self, parent: int, name: bytes) -> Inode:
        """Import a directory and return the inode of a name in it. Raises the error of the scan, OSError.

        What another node changes in the directory meanwhile may leave it not imported: it is scanned again.
        """
        for _ in range(SCANS_PER_REQUEST_MAX):
            await self.request_scan(parent, must_succeed=True)
            with contextlib.suppress(NotImported):
                return namespace.lookup(self._context.db, parent, name)
        raise posix_error(errno.EAGAIN)

    async def request_scan(self, directory: int, *, must_succeed: bool = False) -> bool:
        """Have the mover import a directory of the PFS.

        Returns False if it cannot be imported now; with `must_succeed` raises the error. An application waits for it: if the last scan took
        too long, the next ones get little time until one succeeds.
        """
        try:
            timeout_s = limits.SCAN_WAIT_SLOW_S if self._is_scan_slow else limits.SCAN_WAIT_S
            await self._context.mover_client.request(mover_requests.SCAN, directory, timeout_s=timeout_s)
        except (OSError, CkptfsError) as failure:
            self._is_scan_slow = isinstance(failure, TimedOut)
            if must_succeed:
                raise
            log.debug("directory %d: cannot be scanned: %s", directory, failure)
            return False
        self._is_scan_slow = False
        return True
