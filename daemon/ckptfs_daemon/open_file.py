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
from ckptfs.tiers.place import Place

if TYPE_CHECKING:
    from ckptfs_daemon.arriving import Arriving
    from ckptfs_daemon.context import Context

T = TypeVar("T")

log = logging.getLogger(__name__)

_PFS_THREADS = trio.CapacityLimiter(limits.PFS_THREADS_MAX)

WRITE_NOW = os.O_RDWR | os.O_NONBLOCK
"""How a descriptor for writing is opened here: without waiting for the mover to give up its lease, which is then asked of it."""


@dataclass(slots=True, eq=False)
class OpenFile:
    """Live state, changed in the mount's trio thread only. `content` and `place` are None for the PFS's own file, opened as it is there.

    `generation` is the file's when it was opened first. `arriving`: its blocks are still being fetched, and its file is not to be believed.
    """

    inode: int
    content: int | None
    place: Place | None
    fd: int
    backing: int = 0
    writable: bool = False
    direct: bool = False
    kind: bytes | None = None
    expected: int = 0
    handles: dict[int, bool] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    writer_ended: bool = False
    atime_ns: int = 0
    synced_s: float = float("-inf")
    named: bool = False
    generation: int = 0
    arriving: "Arriving | None" = None
    moving: trio.Event | None = None
    acting: int = 0
    rested: trio.Event = field(default_factory=trio.Event)

    @property
    def tier(self) -> Tier | None:
        return None if self.place is None else self.place.tier

    @property
    def writers(self) -> int:
        return sum(self.handles.values())

    @property
    def closing(self) -> bool:
        """Whether the last writer's release waits to be committed."""
        return self.writer_ended and self.content is not None and not self.writers

    @property
    def promised(self) -> int:
        """Bytes that its writer is still expected to write."""
        return max(0, self.expected - os.fstat(self.fd).st_blocks * 512) if self.fd >= 0 else 0

    def attributes(self, row: Inode) -> Inode:
        """`row` with what its open file knows better."""
        if self.arriving is not None:
            return replace(row, size=self.arriving.size)
        if self.place is None or self.fd < 0:
            return row
        status = os.fstat(self.fd)
        mtime_ns = status.st_mtime_ns
        ctime_ns = row.ctime_ns if mtime_ns == row.mtime_ns else max(row.ctime_ns, mtime_ns)
        return replace(row, size=status.st_size, allocated_blocks=status.st_blocks, atime_ns=status.st_atime_ns, mtime_ns=mtime_ns, ctime_ns=ctime_ns)

    def set_times(self, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the file's times; None leaves one as it is."""
        if self.place is not None and self.fd >= 0 and self.arriving is None:
            status = os.fstat(self.fd)
            os.utime(
                self.fd, ns=(status.st_atime_ns if atime_ns is None else atime_ns, status.st_mtime_ns if mtime_ns is None else mtime_ns)
            )

    async def settled(self) -> None:
        """Wait while the content is being moved to another tier."""
        while self.moving is not None:
            await self.moving.wait()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While something is being written, or read of what still arrives, which `rest` waits for."""
        self.acting += 1
        try:
            yield
        finally:
            self.acting -= 1
            if not self.acting:
                self.rested.set()
                self.rested = trio.Event()

    async def rest(self) -> None:
        """Wait until nothing is in use any more. Who begins to must have waited for `settled` before."""
        while self.acting:
            await self.rested.wait()

    async def writable_fd(self) -> tuple[int, bool]:
        """(a descriptor for writing, whether the caller has to close it)."""
        while True:
            await self.settled()
            if self.writable:
                return self.fd, False
            place = self.place
            if place is None or self.content is None:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            fd = await open_for_writing(place, self.content)
            if self.moving is None and self.place is place:
                return fd, True
            os.close(fd)

    def replace(self, fd: int) -> None:
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


async def open_for_writing(place: Place, content: int) -> int:
    """A descriptor for writing, once the mover has given up its lease."""
    if place.tier is Tier.PFS:
        return await on_pfs(lambda: place.open(content, os.O_RDWR))
    deadline_s = trio.current_time() + limits.LEASE_WAIT_S
    while True:
        try:
            return place.open(content, WRITE_NOW)
        except BlockingIOError as failure:
            if trio.current_time() > deadline_s:
                raise TimedOut("the mover does not give up its lease") from failure
            await trio.sleep(limits.LEASE_POLL_S)


def same_times(fd: int, row: Inode) -> None:
    """Begin with the inode's times: from now on the file's are the truth."""
    status = os.fstat(fd)
    if (status.st_atime_ns, status.st_mtime_ns) != (row.atime_ns, row.mtime_ns):
        os.utime(fd, ns=(row.atime_ns, row.mtime_ns))


async def in_thread(file: OpenFile, act: Callable[[], T]) -> T:
    """Run `act`, which may take long, in a thread: where the PFS is concerned, in one of those that may hang."""
    if file.tier in (Tier.RAM, Tier.NVME):
        return await trio.to_thread.run_sync(act)
    return await on_pfs(act)


async def on_pfs(act: Callable[[], T]) -> T:
    """Run `act` in a thread that may hang as long as the PFS does. There are few of those, so that they never take all threads."""
    return await trio.to_thread.run_sync(act, abandon_on_cancel=True, limiter=_PFS_THREADS)


async def pfs_descriptor(context: "Context", inode: int) -> int:
    """A descriptor of the PFS's own file, which may hang as long as the PFS does. Raises ESTALE when it is another one by now."""
    pfs = context.config.pfs
    assert pfs is not None
    return await on_pfs(lambda: pfs_open.open_inode(context.db, pfs, inode))
