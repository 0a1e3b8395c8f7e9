"""Owns how a file's bytes travel from one descriptor to another: holes stay holes, and every byte passes the digest on its way.

Where both ends can share blocks (FICLONE) nothing is copied and the digest is read from the target. Everywhere else the bytes pass
through one small buffer that stays in the processor's cache: the digest needs them there anyway, so copy_file_range would touch them twice.
If we die here: the target holds a beginning of the source under a name that nobody believes yet; whoever copies into it again writes
only what is not on its disk by then.

Owns how a large file is written at the disk's pace: writing begins with its first block, and memory holds no more than a window of it.

The kernel would gather gigabytes before it begins, and keep them afterwards: memory that the job's processes need, and that is slow to
get (on a virtual machine 10 us for a page that the host has to find first: 1 GiB took 2.5 s, and takes 0.5 s within a window, measured
here). The same few pages are used again and again instead. Errors of the disk are raised: fsync would not tell of them a second time.
Where a filesystem knows none of this, nothing happens.
If we die here: the kernel writes what it has.

Owns the read lease: how the mover learns that nobody can be writing to a file of ours, and that nobody began to.

The kernel refuses the lease while anybody has the file open for writing, also through a mapping that outlived its handle. A later
opener for writing waits until we let go, which we do at the next block: `check` raises Busy then. SIGIO, which tells of that, must be
ignored by the process (`ignore_signal`); its default is death. On a filesystem without leases the file's times are compared instead.
If we die here: the kernel drops the lease with the descriptor.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ckptfs import digest, disk, limits
from ckptfs.errors import Busy

disk.declare_labels("behind:wait")
_WAIT, _WRITE, _WAIT_AFTER = 1, 2, 4
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ESPIPE, errno.EOPNOTSUPP}
_libc = ctypes.CDLL(None, use_errno=True)


class WriteBehind:
    """Follows one writer of one file, from `begin` on."""

    def __init__(self, fd: int, begin: int = 0) -> None:
        self._fd = fd
        self._submitted = begin
        self._released = begin

    def advance(self, offset: int) -> None:
        """Everything up to `offset` has its bytes. Waits until all but the last of it is on the disk. Raises OSError of the disk."""
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
    """sync_file_range(2), as far as there is one."""
    if _libc.sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(end - start), ctypes.c_uint(flags)) != 0:
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))


disk.declare_labels("resume:persist", "resume:read")
FICLONE = 0x40049409
PIECE_BYTES = 512 * limits.KIB
CLONE_BYTES_MIN = limits.MIB
CANNOT_CLONE = {errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.EBADF}

ContentDigests = tuple[int, bytes, bytes]
"""(size in bytes, digest over all, the blocks' digests joined)."""


def declare_labels(label: str) -> None:
    """Declare the disk labels that `copy(label=label)` uses."""
    disk.declare_labels(f"{label}:read", f"{label}:write", f"{label}:truncate")


def copy(source_fd: int, target_fd: int, *, label: str, before_block: Callable[[], None] = lambda: None) -> ContentDigests:
    """Copy all of `source_fd` into the file `target_fd`; what was copied, digested. `before_block` may raise to stop early.

    The target is empty, or what an earlier copy left: what is right of that stays. Raises what the disk raises. Does not fsync.
    """
    size = os.fstat(source_fd).st_size
    if size >= CLONE_BYTES_MIN and _clone(source_fd, target_fd):
        return read(target_fd, label=label, before_block=before_block)
    resumable = _count_resumable(source_fd, size, target_fd)
    running = digest.RunningDigest()
    write_behind = WriteBehind(target_fd)
    for offset, piece in _read_pieces(source_fd, size, label, running, before_block):
        end = offset + len(piece)
        if end > resumable or not _has_piece(target_fd, piece, offset):
            disk.write_all(f"{label}:write", target_fd, piece, offset)
        write_behind.advance(end)
    if running.size or resumable:
        disk.act(f"{label}:truncate", os.ftruncate, target_fd, running.size)
    return _finish_digests(running)


def read(source_fd: int, *, label: str, before_block: Callable[[], None] = lambda: None) -> ContentDigests:
    """Read all of `source_fd` for its digest, without touching its holes. Only `<label>:read` is used."""
    running = digest.RunningDigest()
    for _ in _read_pieces(source_fd, os.fstat(source_fd).st_size, label, running, before_block):
        pass
    return _finish_digests(running)


def read_parallel(source_fd: int, *, label: str, before_block: Callable[[], None]) -> ContentDigests:
    """As `read`, several threads at a large file without holes: one does not digest as fast as memory gives. All call `before_block`."""
    size = os.fstat(source_fd).st_size
    threads = min(limits.DIGEST_THREADS_MAX, os.cpu_count() or 1)
    is_small = size < limits.DIGEST_PARALLEL_BYTES_MIN or size > limits.BLOCK_DIGESTS_MAX * limits.BLOCK_BYTES
    if threads < 2 or is_small or next(_extents(source_fd, size), None) != (0, size):
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
            deque(todo, maxlen=0)  # Where one fails the others need not go on.

    with ThreadPoolExecutor(threads, "digest") as pool:
        for _ in pool.map(work, range(threads)):
            pass
    blocks = b"".join(found[start] for start in starts)
    if len(blocks) < len(starts) * digest.BLOCK_DIGEST_BYTES:  # The file became shorter.
        return read(source_fd, label=label, before_block=before_block)
    return size, digest.hash_content(blocks, size), blocks


def _digest_block(fd: int, start: int, end: int, label: str, buffer: memoryview) -> bytes:
    """The digest of one block; empty where the file ends before `end`."""
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
    """How much of the target an earlier copy left that is worth looking at; there is nothing else in it then.

    What is looked at comes from the disk: a page whose writing failed may still be in memory, and look right.
    """
    resumable = os.fstat(target_fd).st_size
    if resumable and os.fstat(source_fd).st_blocks * 512 < size:
        os.ftruncate(target_fd, 0)  # Where the source has holes, something else might be left.
        return 0
    if resumable:
        disk.act("resume:persist", os.fsync, target_fd)
        os.posix_fadvise(target_fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return resumable


def _has_piece(target_fd: int, piece: memoryview, offset: int) -> bool:
    """Whether these bytes are where they belong."""
    return digest.hash_block(disk.act("resume:read", os.pread, target_fd, len(piece), offset)) == digest.hash_block(piece)


def _clone(source_fd: int, target_fd: int) -> bool:
    try:
        fcntl.ioctl(target_fd, FICLONE, source_fd)
    except OSError as failure:
        if failure.errno in CANNOT_CLONE:
            return False
        raise
    return True


def _read_pieces(
    source_fd: int, size: int, label: str, running: digest.RunningDigest, before_block: Callable[[], None]
) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of all data up to `size` or an earlier end of the file; `running` has seen the holes between them as zeros."""
    buffer = memoryview(bytearray(min(PIECE_BYTES, max(size, 1))))
    for start, end in _extents(source_fd, size):
        _digest_zeros(running, start, before_block)
        while running.size < end:
            if running.size % limits.BLOCK_BYTES == 0:
                before_block()
            # Pieces never cross a block's end, so that `before_block` sees each of them.
            wanted = min(len(buffer), end - running.size, limits.BLOCK_BYTES - running.size % limits.BLOCK_BYTES)
            count = disk.act(f"{label}:read", os.preadv, source_fd, [buffer[:wanted]], running.size)
            if count == 0:
                return  # The file became shorter: whoever asked compares the size.
            offset = running.size
            running.update(buffer[:count])
            yield offset, buffer[:count]
    _digest_zeros(running, size, before_block)


def _digest_zeros(running: digest.RunningDigest, end: int, before_block: Callable[[], None]) -> None:
    """Let `running` see zeros up to `end`, in steps that still ask `before_block` now and then: a hole may be terabytes."""
    while running.size < end:
        before_block()
        running.update_zeros(min(end - running.size, 1024 * limits.BLOCK_BYTES))


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the data between holes, up to `size`; one whole extent where the filesystem does not know."""
    if os.fstat(fd).st_blocks * 512 >= size:
        if size:
            yield 0, size
        return
    offset = 0
    with contextlib.suppress(_NoMoreData):
        while offset < size:
            start = _seek(fd, offset, os.SEEK_DATA)
            offset = min(size, _seek(fd, start, os.SEEK_HOLE))
            if start < offset:
                yield start, offset


class _NoMoreData(Exception):
    """Nothing but a hole up to the end of the file."""


def _seek(fd: int, offset: int, whence: int) -> int:
    try:
        return os.lseek(fd, offset, whence)
    except OSError as failure:
        if failure.errno == errno.ENXIO:
            raise _NoMoreData from failure
        if failure.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return offset if whence == os.SEEK_DATA else limits.FILE_BYTES_MAX
        raise


NO_LEASE_ERRNOS = {errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}


def ignore_lease_signal() -> None:
    """Let the kernel's word that a lease is wanted back pass; call it once, in the main thread."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


@contextlib.contextmanager
def hold_read_lease(fd: int, *, insist: bool = True) -> Iterator[Callable[[], None]]:
    """Hold a read lease on `fd`, which must be open for reading only. Gives `check`, to be called before each block and at the end.

    Both raise Busy when somebody has the file open for writing or is about to. Not to `insist` takes a refusal for the filesystem's
    own: NFS refuses with EAGAIN whatever nobody has open, when its server gave no delegation.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as failure:
        if failure.errno == errno.EAGAIN and insist:
            raise Busy("somebody still has the file open for writing") from failure
        if failure.errno in {errno.EAGAIN, *NO_LEASE_ERRNOS}:
            yield _build_times_check(fd)
            return
        raise

    def check() -> None:
        if fcntl.fcntl(fd, fcntl.F_GETLEASE) != fcntl.F_RDLCK:
            raise Busy("somebody opens the file for writing")

    try:
        yield check
    finally:
        with contextlib.suppress(OSError):  # The kernel took it away from whoever gave it up too late.
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _build_times_check(fd: int) -> Callable[[], None]:
    """The weaker check: the file's size and times stay what they were."""

    def state() -> tuple[int, int, int]:
        status = os.fstat(fd)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    initial = state()

    def check() -> None:
        if state() != initial:
            raise Busy("somebody writes to the file")

    return check
