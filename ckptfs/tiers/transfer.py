"""Copies and digests of files: descriptor to descriptor, with holes preserved and every byte digested.

- If both ends can share blocks (`reflink`), nothing is copied and the digest is read from the target. Otherwise bytes pass through one
  small buffer that stays in the processor cache; copy_file_range would read them a second time for the digest.
- `WriteBehind` writes a large file at the pace of the disk and keeps only a window of it in memory. The kernel alone would gather
  gigabytes first and keep them: memory that the job needs and that is slow to get (on a virtual machine 10 us for each page that the
  host has to find: 1 GiB took 2.5 s, and takes 0.5 s within a window). Disk errors are raised at once: fsync would not report them again.
- `hold_read_lease` detects writers. The kernel refuses the lease while the file is open for writing, also through a mapping that outlived
  its handle. A later writer waits until the lease is dropped, which happens at the next block. SIGIO, which announces the writer, must be
  ignored (`ignore_lease_signal`): its default kills the process. Without leases the size and times of the file are compared.

Crash safety: the target holds the beginning of the source, under a name that does not count yet. A later copy writes only the rest. The
kernel drops a lease with its descriptor.
"""

import contextlib
import errno
import fcntl
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ckptfs import digest, disk, libc, limits
from ckptfs.errors import Busy
from ckptfs.tiers import reflink
from ckptfs.tiers.prepared import is_prepared, seek

disk.declare_labels("behind:wait", "resume:persist", "resume:read")
PIECE_BYTES = 512 * limits.KIB
CLONE_BYTES_MIN = limits.MIB
NO_LEASE_ERRNOS = {errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_WAIT, _WRITE, _WAIT_AFTER = 1, 2, 4
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ESPIPE, errno.EOPNOTSUPP}

ContentDigests = tuple[int, bytes, bytes]
"""(size in bytes, digest of the content, joined digests of its blocks)."""


class SourceReadFailed(OSError):
    """The source of a copy cannot be read; nothing is wrong with the target."""


def declare_labels(*labels: str) -> None:
    """Declare the disk labels of `copy(label=...)`."""
    disk.declare_labels(*(f"{label}:{act}" for label in labels for act in ("read", "write", "truncate")))


def copy(source_fd: int, target_fd: int, *, label: str, before_block: Callable[[], None] = lambda: None) -> ContentDigests:
    """Copy `source_fd` to the file `target_fd` and return the digests. `before_block` may raise to stop.

    The target is empty or left by an earlier copy; correct parts of it are kept. Raises SourceReadFailed, and OSError of the target. Does
    not fsync.
    """
    size = os.fstat(source_fd).st_size
    if size >= CLONE_BYTES_MIN and reflink.clone(source_fd, target_fd):
        try:
            return read(target_fd, label=label, before_block=before_block)
        except SourceReadFailed as failure:
            raise OSError(failure.errno, failure.strerror) from failure
    resumable = _count_resumable(source_fd, size, target_fd)
    running = digest.RunningDigest()
    write_behind = WriteBehind(target_fd)
    for offset, piece in _read_pieces(source_fd, size, label, running, before_block):
        end = offset + len(piece)
        if end > resumable or not _has_piece(target_fd, piece, offset):
            disk.write_all(f"{label}:write", target_fd, piece, offset)
        write_behind.advance(end)
    if running.size or resumable:
        disk.act(f"{label}:truncate", _set_size, target_fd, running.size)
    return _finish_digests(running)


def read(
    source_fd: int, *, label: str, before_block: Callable[[], None] = lambda: None, at_most: int = limits.OFFSET_MAX
) -> ContentDigests:
    """Digest `source_fd`, or its first `at_most` bytes, without its holes. Uses only `<label>:read`."""
    running = digest.RunningDigest()
    for _ in _read_pieces(source_fd, min(at_most, os.fstat(source_fd).st_size), label, running, before_block):
        pass
    return _finish_digests(running)


def read_parallel(source_fd: int, *, label: str, before_block: Callable[[], None]) -> ContentDigests:
    """Digest a file as `read` does, a large one by several threads. All call `before_block`."""
    size = os.fstat(source_fd).st_size
    threads = min(limits.DIGEST_THREADS_MAX, os.cpu_count() or 1)
    is_small = size < limits.DIGEST_PARALLEL_BYTES_MIN or size > limits.BLOCK_DIGESTS_MAX * limits.BLOCK_BYTES
    if threads < 2 or is_small or next(list_data_ranges(source_fd, size), None) != (0, size):
        return read(source_fd, label=label, before_block=before_block)
    starts = range(0, size, limits.BLOCK_BYTES)
    found: dict[int, bytes] = {}
    todo = iter(starts)

    def work(_: int) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        try:
            for start in todo:
                before_block()
                found[start] = _digest_block(source_fd, start, min(size, start + limits.BLOCK_BYTES), label, buffer)
        finally:
            deque(todo, maxlen=0)  # After an error the other threads stop.

    with ThreadPoolExecutor(threads, "digest") as pool:
        for _ in pool.map(work, range(threads)):
            pass
    blocks = b"".join(found[start] for start in starts)
    if len(blocks) < len(starts) * digest.BLOCK_DIGEST_BYTES:  # The file was truncated.
        return read(source_fd, label=label, before_block=before_block)
    return size, digest.hash_content(blocks, size), blocks


def _digest_block(fd: int, start: int, end: int, label: str, buffer: memoryview) -> bytes:
    """Return the digest of one block; empty if the file ends before `end`."""
    running = digest.RunningDigest()
    while start < end:
        count = disk.act(f"{label}:read", os.preadv, fd, [buffer[: end - start]], start)
        if count == 0:
            return b""
        running.update(buffer[:count])
        start += count
    return running.finish()[1]


def _finish_digests(running: digest.RunningDigest) -> ContentDigests:
    whole, blocks = running.finish()
    return running.size, whole, blocks


def _count_resumable(source_fd: int, size: int, target_fd: int) -> int:
    """Return how many bytes of the target an earlier copy may have left.

    They are fsynced and dropped from the page cache: a page whose write failed may still be in memory and look correct.
    """
    resumable = os.fstat(target_fd).st_size
    if resumable and next(list_data_ranges(source_fd, size), None) != (0, size):
        os.ftruncate(target_fd, 0)  # A hole of the source does not overwrite old bytes.
        return 0
    if resumable:
        disk.act("resume:persist", os.fsync, target_fd)
        os.posix_fadvise(target_fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return resumable


def _set_size(fd: int, size: int) -> None:
    """Set the size of a file if it differs: truncating would write the last page, which may be shared."""
    if os.fstat(fd).st_size != size:
        os.ftruncate(fd, size)


def _has_piece(target_fd: int, piece: memoryview, offset: int) -> bool:
    return digest.hash_block(disk.act("resume:read", os.pread, target_fd, len(piece), offset)) == digest.hash_block(piece)


def _read_pieces(
    source_fd: int, size: int, label: str, running: digest.RunningDigest, before_block: Callable[[], None]
) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, bytes) of all data up to `size` or the end; `running` gets holes as zeros."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, max(size, 1))))
    for start, end in list_data_ranges(source_fd, size):
        _digest_zeros(running, start, before_block)
        while running.size < end:
            if running.size % limits.BLOCK_BYTES == 0:
                before_block()
            # Pieces do not cross blocks, so that `before_block` runs for each block.
            wanted = min(len(buffer), end - running.size, limits.BLOCK_BYTES - running.size % limits.BLOCK_BYTES)
            try:
                count = disk.act(f"{label}:read", os.preadv, source_fd, [buffer[:wanted]], running.size)
            except OSError as failure:
                raise SourceReadFailed(failure.errno, failure.strerror) from failure
            if count == 0:
                return  # The file was truncated: the caller compares the size.
            offset = running.size
            running.update(buffer[:count])
            yield offset, buffer[:count]
    _digest_zeros(running, size, before_block)


def _digest_zeros(running: digest.RunningDigest, end: int, before_block: Callable[[], None]) -> None:
    """Digest zeros up to `end`, in steps that call `before_block`: a hole may be terabytes long."""
    while running.size < end:
        before_block()
        running.update_zeros(min(end - running.size, 1024 * limits.BLOCK_BYTES))


def list_data_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of data between holes up to `size`; one range if the filesystem does not know."""
    status = os.fstat(fd)
    if status.st_blocks * 512 >= size and not is_prepared(status):
        if size:
            yield 0, size
        return
    offset = 0
    while offset < size and (start := seek(fd, offset, os.SEEK_DATA)) < size:
        offset = min(size, seek(fd, start, os.SEEK_HOLE))
        if start < offset:
            yield start, offset


class BlockBuffer:
    """The room for one block, used over and over: fresh memory for each would cost more than the reading."""

    def __init__(self, label: str) -> None:
        """`label`: as for `copy`."""
        self._label = label
        self._bytes = memoryview(bytearray(limits.BLOCK_BYTES))

    def read(self, fd: int, number: int) -> memoryview:
        """Return a block of a file, or less at its end. It is valid until the next read."""
        end = 0
        while end < limits.BLOCK_BYTES:
            count = disk.act(f"{self._label}:read", os.preadv, fd, [self._bytes[end:]], number * limits.BLOCK_BYTES + end)
            if count == 0:
                break
            end += count
        return self._bytes[:end]

    def copy(self, source: int, there: int, target: int, number: int, size: int, wanted: bytes) -> bool:
        """Put block `there` of a file in the place `number` of a target, if it has the digest `wanted`.

        `size`: that of the target. The files share the block if they can. Returns False if it has another digest; then what the target
        has there does not count.
        """
        start = number * limits.BLOCK_BYTES
        length = min(limits.BLOCK_BYTES, size - start)
        is_shared = reflink.try_clone_range(source, there * limits.BLOCK_BYTES, target, start, length)
        data = self.read(target, number) if is_shared else self.read(source, there)
        if digest.hash_block(data) != wanted:
            return False
        if not is_shared:
            disk.write_all(f"{self._label}:write", target, data, start)
        return True


class WriteBehind:
    """The write-out of one file that is written sequentially from `begin`."""

    def __init__(self, fd: int, begin: int = 0) -> None:
        self._fd = fd
        self._submitted = begin
        self._released = begin

    def advance(self, offset: int) -> None:
        """Start writing up to `offset`; wait until all but the last window is on disk. Raises OSError."""
        if offset - self._submitted < limits.BLOCK_BYTES:
            return
        _sync_range(self._fd, self._submitted, offset, _WRITE)
        self._submitted = offset
        end = offset - limits.UNWRITTEN_BYTES_MAX
        if end > self._released:
            disk.act("behind:wait", _sync_range, self._fd, self._released, end, _WAIT | _WRITE | _WAIT_AFTER)
            os.posix_fadvise(self._fd, self._released, end - self._released, os.POSIX_FADV_DONTNEED)
            self._released = end


def _sync_range(fd: int, start: int, end: int, flags: int) -> None:
    """Call sync_file_range(2), if it is supported."""
    try:
        libc.call("sync_file_range", fd, start, end - start, flags)
    except OSError as failure:
        if failure.errno not in _UNSUPPORTED:
            raise


def ignore_lease_signal() -> None:
    """Ignore SIGIO, which announces that a lease must be dropped. Call once, in the main thread."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


@contextlib.contextmanager
def hold_read_lease(fd: int, *, strict: bool = True) -> Iterator[Callable[[], None]]:
    """Hold a read lease on `fd`, open for reading only. Yield a check for each block and the end.

    Both raise Busy if the file is or becomes open for writing. If not `strict`, a refusal does not prove a writer: NFS refuses with
    EAGAIN if its server gave no delegation, even without writers. Then the check compares size and times.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as failure:
        if failure.errno == errno.EAGAIN and strict:
            raise Busy("the file is open for writing") from failure
        if failure.errno in {errno.EAGAIN, *NO_LEASE_ERRNOS}:
            yield _build_times_check(fd)
            return
        raise

    def check() -> None:
        if fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            raise Busy("the file was opened for writing")

    try:
        yield check
    finally:
        with contextlib.suppress(OSError):  # The kernel revokes a lease that is dropped too late.
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


@contextlib.contextmanager
def hold_write_lease(fd: int) -> Iterator[bool]:
    """Hold a write lease if possible. Yield True if no other process has the file open or mapped."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _build_times_check(fd: int) -> Callable[[], None]:
    """Return a weaker check: size and times of the file have not changed."""

    def state() -> tuple[int, int, int]:
        status = os.fstat(fd)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    initial = state()

    def check() -> None:
        if state() != initial:
            raise Busy("the file is being written")

    return check
