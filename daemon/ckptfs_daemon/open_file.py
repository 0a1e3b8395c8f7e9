"""Owns one open inode as the mount process knows it: which content, where, through which descriptor, and by whose handles.

Invariants: all handles of an inode share one content and, on the passthrough path, one backing id. On that path our descriptor is open for
reading only, so that the mover gets its lease as soon as the last writer has closed; where the bytes pass through us it is open for
writing while there are writers. While an inode is open its file's times and size are the truth, and setattr writes to both.
If we die here: the handle table tells the next process how to build this again.
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
from ckptfs.errors import TimedOut
from ckptfs.model import Inode, Tier
from ckptfs.tiers import pfs_open
from ckptfs.tiers.place import TierStorage

if TYPE_CHECKING:
    from ckptfs_daemon.arriving import FetchWaiter
    from ckptfs_daemon.context import MountContext

T = TypeVar("T")

log = logging.getLogger(__name__)

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
    return await run_on_pfs(lambda: pfs_open.open_inode(context.db, pfs, inode))
