"""One open inode: its content, tier, descriptor and handles; and reads of a file that is fetched.

While an inode is open, its backing file is the truth about times and size, and setattr writes to both. On the passthrough path the
descriptor is read-only, so the mover gets its lease as soon as the last writer closes. On the buffered path it is writable while there are
writers.

`FetchWaiter`: a read waits only for the blocks that it covers, and the mover fetches those first. The mover publishes its progress in a
`FetchMap` and sends a wake-up for each requested block. Such an inode stays on the buffered path while it is open: the kernel does not let
it change to passthrough.

Invariants:
- All handles of an inode share one content and, on the passthrough path, one backing id. A name in the history is an inode of its own.
- A read returns bytes only of the generation that was opened, and only of verified blocks, or it fails (P7). If the fetch ends early, the
  file is requested again, and the blocks that arrived stay readable.

Crash safety: the next process rebuilds open files from the handle table, and `resume_fetches` their waiters.
"""

import contextlib
import errno
import functools
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import trio

from ckptfs import digest, disk, limits
from ckptfs.catalog import contents, copies, inodes, mover_requests
from ckptfs.catalog.database import Database
from ckptfs.errors import CkptfsError, ContentLost, TimedOut, posix_error
from ckptfs.model import Content, ContentState, Inode, Tier
from ckptfs.tiers import pfs_tree, prepared
from ckptfs.tiers.fetch_map import FetchMap
from ckptfs.tiers.storage import Tiers, TierStorage
from ckptfs_daemon.fuse import killable
from ckptfs_daemon.mount.open_files.handle_ways import HandleWay, Reason
from ckptfs_daemon.mount.open_files.mover_client import MoverClient
from ckptfs_daemon.mount.open_files.tier_calls import close_logged, open_on_pfs, run_in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")
STAT_BLOCK_BYTES = 512

NONBLOCKING_WRITE = os.O_RDWR | os.O_NONBLOCK
"""Flags of a writable descriptor: open(2) asks the mover for its lease and fails at once instead of waiting for it."""


@dataclass(slots=True, eq=False)
class OpenFile:
    """State of one open inode. Belongs to the trio thread."""

    inode: int
    content: int | None  # None, as `storage`, if the PFS's own file is open.
    storage: TierStorage | None
    fd: int
    shown: int = 0  # The number under which the history shows it to the kernel; 0: `inode`.
    backing_id: int = 0
    is_writable: bool = False
    direct: bool = False  # Reads and writes pass through this process although there is a backing id.
    created_as: tuple[int, bytes] | None = None  # Directory and name of a new file.
    expected_bytes: int = 0
    prepared_bytes: int = 0  # Allocated before its first write.
    handles: dict[int, bool] = field(default_factory=dict)  # Handle -> whether it writes.
    ended_handles: list[int] = field(default_factory=list)
    has_ended_writer: bool = False
    atime_ns: int = 0
    fsynced_s: float = float("-inf")
    is_name_persisted: bool = False
    generation: int = 0  # That of the file when it was first opened.
    fetch_waiter: "FetchWaiter | None" = None  # Set during a fetch, when size and times of the backing file mean nothing.
    last_status: os.stat_result | None = None  # What the backing file showed last.
    flushed: tuple[os.stat_result, int] | None = None  # What it showed when a close was recorded last, and when that was.
    buffered_reason: Reason = Reason.NONE  # Why there is no backing id.
    ways: dict[int, HandleWay] = field(default_factory=dict)  # By handle.
    move_done: trio.Event | None = None
    active_count: int = 0
    writer_pid: int = 0  # The thread that opened it for writing last.
    idle: trio.Event | None = None

    @property
    def number(self) -> int:
        """Return the inode number that the kernel knows. No two open files have the same."""
        return self.shown or self.inode

    @property
    def tier(self) -> Tier | None:
        return None if self.storage is None else self.storage.tier

    @property
    def writer_count(self) -> int:
        return sum(self.handles.values())

    @property
    def is_closing(self) -> bool:
        """Return True if the release of the last writer waits for its commit."""
        return self.has_ended_writer and self.content is not None and not self.writer_count

    def compute_reserved_bytes(self) -> int:
        """Return the bytes that the writer is still expected to write."""
        status = self.read_status()
        return 0 if status is None else max(0, self.expected_bytes - status.st_blocks * STAT_BLOCK_BYTES)

    def read_status(self) -> os.stat_result | None:
        """Read the status of the backing file; on the PFS and on a failing tier return the last known one."""
        if self.fd >= 0 and self.storage is not None and self.storage.tier is not Tier.PFS:
            try:
                self.last_status = os.fstat(self.fd)
            except OSError as failure:
                self.storage.record_failure(failure)
        return self.last_status

    def find_flushed_ns(self, status: os.stat_result) -> int | None:
        """Return when a close was recorded with this size and mtime. Returns None if none was."""
        if self.flushed is None or (self.flushed[0].st_size, self.flushed[0].st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            return None
        return self.flushed[1]

    def read_attributes(self, row: Inode) -> Inode:
        """Return `row` with the size and times of the backing file."""
        if self.fetch_waiter is not None:
            return replace(row, size=self.fetch_waiter.content.size)
        status = None if self.storage is None else self.read_status()
        if status is None:
            return row
        mtime_ns = status.st_mtime_ns
        ctime_ns = row.ctime_ns if mtime_ns == row.mtime_ns else max(row.ctime_ns, mtime_ns)
        return replace(
            row,
            size=status.st_size,
            allocated_blocks=get_allocated_bytes(self.fd, status) // STAT_BLOCK_BYTES,
            atime_ns=status.st_atime_ns,
            mtime_ns=mtime_ns,
            ctime_ns=ctime_ns,
        )

    async def set_times(self, atime_ns: int | None, mtime_ns: int | None) -> None:
        """Set the times of the backing file; None leaves one unchanged."""
        storage, content = self.storage, self.content
        if storage is None or content is None or self.fetch_waiter is not None:
            return
        set_times = functools.partial(storage.set_times, content, atime_ns, mtime_ns)
        self.last_status = set_times() if storage.tier is Tier.RAM else await run_in_thread(storage.tier, set_times)

    async def wait_moved(self) -> None:
        while self.move_done is not None:
            with killable.killable_wait():
                await self.move_done.wait()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a call by the descriptor, which `wait_idle` waits for. The caller has awaited `wait_moved`."""
        self.active_count += 1
        try:
            yield
        finally:
            self.active_count -= 1
            if not self.active_count and self.idle is not None:
                self.idle.set()
                self.idle = None

    async def wait_idle(self) -> None:
        """Wait until no `in_use` block runs."""
        while self.active_count:
            self.idle = self.idle or trio.Event()
            await self.idle.wait()

    async def open_writable_fd(self) -> tuple[int, bool]:
        """Return (a writable descriptor, whether the caller must close it)."""
        while True:
            await self.wait_moved()
            if self.is_writable:
                return self.fd, False
            storage = self.storage
            if storage is None or self.content is None:
                raise posix_error(errno.EROFS)
            fd = await open_for_writing(storage, self.content)
            if storage.tier is Tier.PFS and self.fd < 0:
                self.fd, self.is_writable = fd, True  # After a restart: `OpenFileTable.start` leaves files on the PFS closed.
                return fd, False
            if self.move_done is None and self.storage is storage:
                return fd, True
            await run_in_thread(self.tier, functools.partial(os.close, fd))

    def swap_fd(self, fd: int) -> int:
        """Take another descriptor. Returns the previous one, to be closed in a thread after `wait_idle`."""
        previous_fd, self.fd = self.fd, fd
        return previous_fd

    def replace_fd(self, fd: int) -> None:
        """Replace the descriptor under the same number, because a thread may be reading by that number.

        Neither may be on the PFS.
        """
        if self.fd < 0:
            self.fd = fd
            return
        with disk.closing(fd):
            os.dup2(fd, self.fd, inheritable=False)

    def take_fd(self) -> int:
        """Return the descriptor for the caller to close; -1 without one."""
        fd, self.fd = self.fd, -1
        return fd


def get_allocated_bytes(fd: int, status: os.stat_result) -> int:
    """Return what stat(2) shows as allocated: not the prepared pages that the application has not written."""
    return prepared.get_data_bytes(fd, status) if prepared.is_prepared(status) else status.st_blocks * STAT_BLOCK_BYTES


async def open_for_writing(storage: TierStorage, content: int) -> int:
    """Return a writable descriptor once the mover has given up its lease. Raises TimedOut."""
    if storage.tier is Tier.PFS:
        return await open_on_pfs(lambda: storage.open(content, os.O_RDWR))
    deadline_s = trio.current_time() + limits.LEASE_WAIT_S
    while True:
        try:
            return storage.open(content, NONBLOCKING_WRITE)
        except BlockingIOError as failure:
            if trio.current_time() > deadline_s:
                raise TimedOut("the mover does not give up its lease") from failure
            await killable.sleep(limits.LEASE_POLL_S)


def has_other_times(fd: int, row: Inode) -> bool:
    """Return whether the times of a backing file differ from those of its inode."""
    status = os.fstat(fd)
    return (status.st_atime_ns, status.st_mtime_ns) != (row.atime_ns, row.mtime_ns)


def set_inode_times(fd: int, row: Inode) -> None:
    """Set the times of a backing file to those of its inode, before the file becomes the truth about them.

    A disk that became read-only keeps its times, and can still be read.
    """
    if has_other_times(fd, row):
        try:
            os.utime(fd, ns=(row.atime_ns, row.mtime_ns))
        except OSError as failure:
            if failure.errno != errno.EROFS:
                raise


async def open_pfs_file(db: Database, pfs: Path | None, inode: int) -> int:
    """Return a descriptor of the PFS's own file; -1 if the file was replaced. May hang."""
    assert pfs is not None
    try:
        return await open_on_pfs(lambda: pfs_tree.open_inode(db, pfs, inode))
    except OSError as failure:
        if failure.errno not in pfs_tree.REPLACED_ERRNOS:
            raise
        return -1


class FetchWaiter:
    """The wait of an open file for its blocks. Belongs to the trio thread."""

    def __init__(self, db: Database, tiers: Tiers, mover_client: MoverClient, content: Content) -> None:
        self.content = content
        self._db, self._tiers, self._mover_client = db, tiers, mover_client
        self._fetch_map: FetchMap | None = None
        self._request_id = 0
        self._is_failure_logged = False

    def open_partial(self) -> tuple[TierStorage, int] | None:
        """Return (storage, descriptor) of the copy of exactly this content that is being filled, or None."""
        found = self._find_partial()
        if found is None:
            return None
        self._fetch_map = found[0]
        return found[1:]

    def _find_partial(self) -> tuple[FetchMap, TierStorage, int] | None:
        fetch_map = FetchMap.find(self._tiers[Tier.RAM].root, self.content.id)
        if fetch_map is None or (fetch_map.digest, fetch_map.size) != (self.content.digest, self.content.size):
            return None
        if fetch_map.tier not in self._tiers:
            return None
        storage = self._tiers[fetch_map.tier]
        try:
            fd = storage.open(self.content.id)
        except FileNotFoundError:
            return None
        if not fetch_map.is_for(fd):
            os.close(fd)
            return None
        return fetch_map, storage, fd

    async def wait_range(self, file: OpenFile, offset: int, size: int) -> None:
        """Wait until these bytes can be read. Raises ContentLost if they cannot be fetched."""
        try:
            await self._wait_blocks(file, digest.get_block_range(offset, size, self.content.size))
        except InterruptedError:
            raise
        except (OSError, CkptfsError) as failure:
            path = inodes.get_shown_path(self._db, file.inode)
            if not self._is_failure_logged:
                log.error("%s: cannot be read to its end: the rest does not arrive: %s", path, failure)
                self._is_failure_logged = True
            raise ContentLost(f"{path}: the rest of the file does not arrive") from failure

    async def wait_complete(self, file: OpenFile) -> None:
        """Wait until the fetch is complete and `file` reads from a verified copy."""
        until_s = trio.current_time() + limits.FETCH_STALL_S
        await self.wait_range(file, 0, self.content.size)
        while file.fetch_waiter is self:
            await self._refresh_source(file)
            if trio.current_time() > until_s:
                raise TimedOut("all blocks have arrived, but the copy is not recorded")
            if file.fetch_waiter is self:
                await self._mover_client.wait_reply(limits.REQUEST_POLL_S)

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
                # Request first, then check: a block that arrives in between is either seen or announced by a wake-up.
                self._fetch_map.request_blocks(numbers)
                if self._fetch_map.has_blocks(numbers):
                    return
            if (current := self._get_progress()) != progress:
                progress, until_s = current, trio.current_time() + limits.FETCH_STALL_S
            if trio.current_time() > until_s:
                raise TimedOut(f"no block came for {limits.FETCH_STALL_S:g} s")
            if file.fetch_waiter is self:
                await self._mover_client.wait_reply(limits.REQUEST_POLL_S)

    def _has_blocks(self, numbers: range) -> bool:
        return self._fetch_map is not None and self._fetch_map.has_blocks(numbers)

    def _get_progress(self) -> tuple[int, int]:
        row = mover_requests.get(self._db, self._request_id) if self._request_id else None
        return 0 if self._fetch_map is None else self._fetch_map.present_count, row.progress_ns if row else 0

    async def _refresh_source(self, file: OpenFile) -> None:
        """Switch to a finished copy or to the current fetch, or request one. Raises ContentLost."""
        known = contents.get_content(self._db, self.content.id)
        if known is None or known.state is not ContentState.SEALED or known.digest != self.content.digest:
            raise ContentLost("the file was written again during the fetch")
        if tiers := copies.list_good_tiers(self._db, known.id, self._tiers):
            await self._switch_to_copy(file, self._tiers[tiers[0]])
        elif (found := self._find_partial()) is not None:
            fetch_map, storage, fd = found
            await self._switch_descriptor(file, storage, fd)
            self._fetch_map = fetch_map
        else:
            self._request_fetch(known.inode)

    async def _switch_to_copy(self, file: OpenFile, storage: TierStorage) -> None:
        try:
            fd = storage.open(self.content.id) if storage.tier is not Tier.PFS else await open_on_pfs(lambda: storage.open(self.content.id))
        except FileNotFoundError:
            return  # It was deleted again; the next refresh sees that.
        row = inodes.get(self._db, file.inode)
        if storage.tier is not Tier.PFS:
            await run_in_thread(storage.tier, lambda: set_inode_times(fd, row))
        await self._switch_descriptor(file, storage, fd)
        file.last_status = None
        file.atime_ns = row.atime_ns
        if file.fetch_waiter is self:
            file.fetch_waiter = None

    async def _switch_descriptor(self, file: OpenFile, storage: TierStorage, fd: int) -> None:
        """Read by `fd` from now on, after running reads by the old one.

        `fd` may not have the blocks of those reads yet.
        """
        await file.wait_idle()
        previous_fd = file.swap_fd(fd)
        file.storage = storage
        if previous_fd >= 0:
            os.close(previous_fd)  # It was in RAM or NVMe.

    def _request_fetch(self, inode: int) -> None:
        """Request a fetch into a tier of this node. Raises OSError if the mover has answered that it cannot."""
        row = mover_requests.get(self._db, self._request_id) if self._request_id else None
        if row is not None and row.state == mover_requests.FAILED:
            self._request_id = 0
            raise posix_error(row.error or errno.EIO)
        if row is None or row.state == mover_requests.DONE or not mover_requests.is_open(self._db, self._request_id):
            self._request_id = mover_requests.insert_request(
                self._db, mover_requests.FETCH, inode, mover_requests.NEEDS_COPY, wait_s=limits.FETCH_STALL_S
            )
        self._mover_client.wake_mover(mover_requests.FETCH)


def resume_fetches(files: Iterable[OpenFile], db: Database, tiers: Tiers, mover_client: MoverClient) -> None:
    """Give reopened files their waiters. A file that another node wrote again is closed."""
    for file in files:
        if file.content is None or file.backing_id or file.writer_count:
            continue
        content = contents.get_content(db, file.content)
        if content is None or not content.is_remote or content.generation == file.generation:
            if file.fd < 0 and file.tier is not Tier.PFS and content is not None and content.state is ContentState.SEALED:
                file.fetch_waiter = FetchWaiter(db, tiers, mover_client, content)
        elif content.generation > file.generation and (file.fd >= 0 or file.tier is Tier.PFS):
            log.error("content %d: open readers fail from now on: the file was written again on another node", file.content)
            close_logged(file.take_fd(), file.tier)
            file.storage = None
