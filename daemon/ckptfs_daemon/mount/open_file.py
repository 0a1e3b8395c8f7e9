"""Owns one open inode as the mount process knows it: which content, where, through which descriptor, and by whose handles.

Invariants: all handles of an inode share one content and, on the passthrough path, one backing id. On that path our descriptor is open for
reading only, so that the mover gets its lease as soon as the last writer has closed; where the bytes pass through us it is open for
writing while there are writers. While an inode is open its file's times and size are the truth, and setattr writes to both.
If we die here: the handle table tells the next process how to build this again.

Owns how an application reads a file while its blocks still arrive: each read waits for its own blocks, and has them brought first.

The mover publishes how far the content has come (`ckptfs.tiers.arrival`); the bell says when a block came that somebody waits for. Reads
come to us as long as an inode is open that was opened so, since the kernel would not let it change to passthrough meanwhile.
Invariant: only bytes of the very generation that was opened are read, of blocks that were found right, or the read fails (P7). What is
published may end with its mover at any time: then the file is asked for once more, and what came before stays readable meanwhile.
If we die here: the handles are rows, and `resume` makes this of them again.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import trio

from ckptfs import limits
from ckptfs.catalog import contents, copies, inodes, mover_requests, namespace
from ckptfs.errors import CkptfsError, ContentLost, TimedOut
from ckptfs.model import Content, ContentState, CopyState, Inode, Tier
from ckptfs.tiers import pfs_tree
from ckptfs.tiers.fetch_map import FetchMap
from ckptfs.tiers.storage import TierStorage
from ckptfs_daemon.ipc import URGENT_REQUEST

if TYPE_CHECKING:
    from ckptfs_daemon.mount.context import MountContext

log = logging.getLogger(__name__)

T = TypeVar("T")
_PFS_THREADS = trio.CapacityLimiter(limits.PFS_THREADS_MAX)

NONBLOCKING_WRITE = os.O_RDWR | os.O_NONBLOCK
"""How a descriptor for writing is opened here: without waiting for the mover to give up its lease, which is then asked of it."""


@dataclass(slots=True, eq=False)
class OpenFile:
    """Live state, changed in the mount's trio thread only. `content` and `place` are None for the PFS's own file, opened as it is there.

    `generation` is the file's when it was opened first. `arriving`: its blocks are still being fetched, and its file is not to be believed.
    """

    inode: int
    content: int | None
    storage: TierStorage | None
    fd: int
    backing_id: int = 0
    is_writable: bool = False
    direct: bool = False
    kind: bytes | None = None
    expected_bytes: int = 0
    handles: dict[int, bool] = field(default_factory=dict)
    ended_handles: list[int] = field(default_factory=list)
    has_ended_writer: bool = False
    atime_ns: int = 0
    fsynced_s: float = float("-inf")
    is_name_persisted: bool = False
    generation: int = 0
    fetch_waiter: "FetchWaiter | None" = None
    move_done: trio.Event | None = None
    active_count: int = 0
    idle: trio.Event = field(default_factory=trio.Event)

    @property
    def tier(self) -> Tier | None:
        return None if self.storage is None else self.storage.tier

    @property
    def writer_count(self) -> int:
        return sum(self.handles.values())

    @property
    def is_closing(self) -> bool:
        """Whether the last writer's release waits to be committed."""
        return self.has_ended_writer and self.content is not None and not self.writer_count

    @property
    def reserved_bytes(self) -> int:
        """Bytes that its writer is still expected to write."""
        return max(0, self.expected_bytes - os.fstat(self.fd).st_blocks * 512) if self.fd >= 0 else 0

    def get_attributes(self, row: Inode) -> Inode:
        """`row` with what its open file knows better."""
        if self.fetch_waiter is not None:
            return replace(row, size=self.fetch_waiter.size)
        if self.storage is None or self.fd < 0:
            return row
        status = os.fstat(self.fd)
        mtime_ns = status.st_mtime_ns
        ctime_ns = row.ctime_ns if mtime_ns == row.mtime_ns else max(row.ctime_ns, mtime_ns)
        return replace(
            row, size=status.st_size, allocated_blocks=status.st_blocks, atime_ns=status.st_atime_ns, mtime_ns=mtime_ns, ctime_ns=ctime_ns
        )

    def set_times(self, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the file's times; None leaves one as it is."""
        if self.storage is not None and self.fd >= 0 and self.fetch_waiter is None:
            status = os.fstat(self.fd)
            os.utime(
                self.fd, ns=(status.st_atime_ns if atime_ns is None else atime_ns, status.st_mtime_ns if mtime_ns is None else mtime_ns)
            )

    async def wait_moved(self) -> None:
        """Wait while the content is being moved to another tier."""
        while self.move_done is not None:
            await self.move_done.wait()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While something is being written, or read of what still arrives, which `rest` waits for."""
        self.active_count += 1
        try:
            yield
        finally:
            self.active_count -= 1
            if not self.active_count:
                self.idle.set()
                self.idle = trio.Event()

    async def wait_idle(self) -> None:
        """Wait until nothing is in use any more. Who begins to must have waited for `settled` before."""
        while self.active_count:
            await self.idle.wait()

    async def get_writable_fd(self) -> tuple[int, bool]:
        """(a descriptor for writing, whether the caller has to close it)."""
        while True:
            await self.wait_moved()
            if self.is_writable:
                return self.fd, False
            storage = self.storage
            if storage is None or self.content is None:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            fd = await open_for_writing(storage, self.content)
            if self.move_done is None and self.storage is storage:
                return fd, True
            os.close(fd)

    def replace_fd(self, fd: int) -> None:
        """Take another descriptor of the same bytes, under the same number: a thread may be reading by it just now."""
        if self.fd < 0:
            self.fd = fd
            return
        try:
            os.dup2(fd, self.fd, inheritable=False)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Give the descriptor back. Never raises: what was closed is committed already."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            try:
                os.close(fd)
            except OSError as failure:
                log.error("closing content %s in %s: %s", self.content, self.tier, failure)


async def open_for_writing(storage: TierStorage, content: int) -> int:
    """A descriptor for writing, once the mover has given up its lease."""
    if storage.tier is Tier.PFS:
        return await run_on_pfs(lambda: storage.open(content, os.O_RDWR))
    deadline_s = trio.current_time() + limits.LEASE_WAIT_S
    while True:
        try:
            return storage.open(content, NONBLOCKING_WRITE)
        except BlockingIOError as failure:
            if trio.current_time() > deadline_s:
                raise TimedOut("the mover does not give up its lease") from failure
            await trio.sleep(limits.LEASE_POLL_S)


def set_inode_times(fd: int, row: Inode) -> None:
    """Begin with the inode's times: from now on the file's are the truth."""
    status = os.fstat(fd)
    if (status.st_atime_ns, status.st_mtime_ns) != (row.atime_ns, row.mtime_ns):
        os.utime(fd, ns=(row.atime_ns, row.mtime_ns))


async def run_in_thread(file: OpenFile, act: Callable[[], T]) -> T:
    """Run `act`, which may take long, in a thread: where the PFS is concerned, in one of those that may hang."""
    if file.tier in (Tier.RAM, Tier.NVME):
        return await trio.to_thread.run_sync(act)
    return await run_on_pfs(act)


async def run_on_pfs(act: Callable[[], T]) -> T:
    """Run `act` in a thread that may hang as long as the PFS does. There are few of those, so that they never take all threads."""
    return await trio.to_thread.run_sync(act, abandon_on_cancel=True, limiter=_PFS_THREADS)


async def open_pfs_file(context: "MountContext", inode: int) -> int:
    """A descriptor of the PFS's own file, which may hang as long as the PFS does. Raises ESTALE when it is another one by now."""
    pfs = context.config.pfs
    assert pfs is not None
    return await run_on_pfs(lambda: pfs_tree.open_inode(context.db, pfs, inode))


class FetchWaiter:
    """What an open file that is still being fetched waits for. Belongs to the mount's trio thread."""

    def __init__(self, context: "MountContext", content: Content) -> None:
        self.content = content
        self._context = context
        self._fetch_map: FetchMap | None = None
        self._request_id = 0
        self._is_failure_logged = False

    @property
    def size(self) -> int:
        """Of the whole file, in bytes."""
        return self.content.size

    def open_partial(self) -> tuple[TierStorage, int] | None:
        """(place, descriptor) of what is being filled now; None when nothing is published of exactly this content."""
        found = self._find_partial()
        if found is None:
            return None
        self._fetch_map = found[0]
        return found[1:]

    def _find_partial(self) -> tuple[FetchMap, TierStorage, int] | None:
        tiers = self._context.tiers
        fetch_map = FetchMap.find(tiers[Tier.RAM].root, self.content.id)
        if (
            fetch_map is None
            or (fetch_map.digest, fetch_map.size) != (self.content.digest, self.content.size)
            or fetch_map.tier not in tiers
        ):
            return None
        storage = tiers[fetch_map.tier]
        try:
            fd = storage.open(self.content.id)
        except FileNotFoundError:
            return None
        if not fetch_map.is_for(fd):
            os.close(fd)
            return None
        return fetch_map, storage, fd

    async def wait_range(self, file: OpenFile, offset: int, size: int) -> None:
        """Wait until these bytes are behind the file's descriptor. Raises ContentLost when they cannot be had."""
        try:
            await self._wait_blocks(file, self._get_block_range(offset, size))
        except (OSError, CkptfsError) as failure:
            path = os.fsdecode(namespace.get_path(self._context.db, file.inode))
            if not self._is_failure_logged:
                log.error("%s cannot be read on: what is left of it does not arrive: %s", path, failure)
                self._is_failure_logged = True
            raise ContentLost(f"{path}: what is left of it does not arrive") from failure

    async def wait_complete(self, file: OpenFile) -> None:
        """Wait until all of it is here, and the file is as any other."""
        until_s = trio.current_time() + limits.FETCH_STALL_S
        await self.wait_range(file, 0, self.size)
        while file.fetch_waiter is self:
            await self._refresh_source(file)
            if trio.current_time() > until_s:
                raise TimedOut("a file that has arrived is not counted")
            if file.fetch_waiter is self:
                await self._context.mover_client.wait_reply(limits.REQUEST_POLL_S)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _get_block_range(self, offset: int, size: int) -> range:
        end = min(offset + size, self.size)
        return range(offset // limits.BLOCK_BYTES, -(-end // limits.BLOCK_BYTES)) if offset < end else range(0)

    async def _wait_blocks(self, file: OpenFile, numbers: range) -> None:
        progress, until_s = (-1, 0), 0.0
        while file.fetch_waiter is self:
            fetch_map = self._fetch_map
            if self._has_blocks(numbers) and fetch_map is not None and not fetch_map.is_closed:
                return
            if fetch_map is None or not fetch_map.is_published:
                try:
                    await self._refresh_source(file)
                except (OSError, CkptfsError):
                    if not self._has_blocks(numbers):
                        raise
            if self._fetch_map is not None:
                # Asked before looked at: what comes in between was either seen or is rung for.
                self._fetch_map.request_blocks(numbers)
                if self._fetch_map.has_blocks(numbers):
                    return
            if (now := self._get_progress()) != progress:
                progress, until_s = now, trio.current_time() + limits.FETCH_STALL_S
            if trio.current_time() > until_s:
                raise TimedOut(f"nothing of it came for {limits.FETCH_STALL_S:g} s")
            if file.fetch_waiter is self:
                await self._context.mover_client.wait_reply(limits.REQUEST_POLL_S)

    def _has_blocks(self, numbers: range) -> bool:
        return self._fetch_map is not None and self._fetch_map.has_blocks(numbers)

    def _get_progress(self) -> tuple[int, int]:
        row = mover_requests.get(self._context.db, self._request_id) if self._request_id else None
        return 0 if self._fetch_map is None else self._fetch_map.present_count, row.progress_ns if row else 0

    async def _refresh_source(self, file: OpenFile) -> None:
        """Nothing more comes into what we read: it is whole, or it begins anew, or somebody must be asked."""
        db = self._context.db
        known = contents.get_content(db, self.content.id)
        if known is None or known.state is not ContentState.SEALED or known.digest != self.content.digest:
            raise ContentLost("it was written again meanwhile")
        tiers = [
            copy.tier for copy in copies.list_copies(db, known.id) if copy.state is CopyState.GOOD and copy.tier in self._context.tiers
        ]
        if tiers:
            await self._switch_to_copy(file, self._context.tiers[tiers[0]])
        elif (found := self._find_partial()) is not None:
            fetch_map, storage, fd = found
            await self._switch_descriptor(file, storage, fd)
            self._fetch_map = fetch_map
        else:
            self._request_fetch()

    async def _switch_to_copy(self, file: OpenFile, storage: TierStorage) -> None:
        try:
            fd = storage.open(self.content.id) if storage.tier is not Tier.PFS else await run_on_pfs(lambda: storage.open(self.content.id))
        except FileNotFoundError:
            return  # It went again; the next look finds that.
        row = inodes.get(self._context.db, file.inode)
        if storage.tier is not Tier.PFS:
            set_inode_times(fd, row)
        await self._switch_descriptor(file, storage, fd)
        file.atime_ns = row.atime_ns
        if file.fetch_waiter is self:
            file.fetch_waiter = None

    async def _switch_descriptor(self, file: OpenFile, storage: TierStorage, fd: int) -> None:
        """Read by this descriptor from now on. A thread may be reading by the one before, of blocks that are not behind this one yet."""
        await file.wait_idle()
        file.replace_fd(fd)
        file.storage = storage

    def _request_fetch(self) -> None:
        """Have the mover bring it, here and not elsewhere. Raises OSError when it said that it cannot."""
        db = self._context.db
        row = mover_requests.get(db, self._request_id) if self._request_id else None
        if row is not None and row.state == mover_requests.FAILED:
            self._request_id = 0
            raise OSError(row.error or errno.EIO, os.strerror(row.error or errno.EIO))
        if row is None or row.state == mover_requests.DONE or not mover_requests.is_open(db, self._request_id):
            self._request_id = mover_requests.insert_request(
                db, mover_requests.FETCH, self.content.inode, mover_requests.FOR_WRITING, wait_s=limits.FETCH_STALL_S
            )
        self._context.wake_channel.notify(URGENT_REQUEST + mover_requests.FETCH.encode())


def resume_fetches(context: "MountContext") -> None:
    """After a restart: what was being fetched when it was opened is waited for again, and a file that became another one is not read."""
    for file in context.open_files.by_inode.values():
        if file.content is None or file.backing_id or file.writer_count:
            continue
        content = contents.get_content(context.db, file.content)
        if content is None or not content.is_remote or content.generation == file.generation:
            if file.fd < 0 and content is not None and content.state is ContentState.SEALED:
                file.fetch_waiter = FetchWaiter(context, content)
        elif content.generation > file.generation and file.fd >= 0:
            log.error("the open file with content %d was written again on another node, and cannot be read on", file.content)
            file.close()
