"""Memory ahead of programs that write into prepared pages and must not reach a fresh one (M1).

The kernel writes into a backing file without asking. If a program below a memory limit outgrows what was prepared, the fresh pages are
charged to it, and it may be killed. So a thread looks at the sizes of such files all the time, and allocates pages ahead of their end.
Writes and fallocate(2) take the same lock of the backing file: the program waits while pages are added. One write(2) takes the lock once.
As many pages as it can write are therefore ahead of a file from its open on, and one call adds all that the last write took.

A file that grows by a jump (a seek, a truncation) leaves a gap behind its new end. The pages ahead come first, then the gap is filled.

Invariants:
- A nearly full tier keeps `limits.TOP_UP_RESERVE_BYTES` free. A program can reach no more fresh pages than these.
- The descriptor of a file is closed soon after `remove`, or the seal would not get its lease.

Crash safety: unwritten pages are trimmed at the seal. While no mount process runs, a program has what was allocated ahead of it.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptfs import limits
from ckptfs.errors import NoSpace
from ckptfs.tiers import prepared, space

log = logging.getLogger(__name__)
_PRIORITY = -20


@dataclass(slots=True, eq=False)
class GrowingFile:
    """One file. Pages below `ahead_end` are prepared, but for `gaps`, which are (start, end)."""

    fd: int
    ahead_end: int
    gaps: list[tuple[int, int]] = field(default_factory=list)
    size: int = -1
    changed_s: float = 0.0


def choose_range(file: GrowingFile, size: int) -> tuple[int, int] | None:
    """Return (offset, length) of the pages to allocate next for a file of `size` bytes.

    Returns None if it has enough. Pure.
    """
    end, step = max(file.ahead_end, size), limits.TOP_UP_STEP_BYTES
    if (missing := size + limits.TOP_UP_AHEAD_BYTES - end) > 0:
        return end, -(-missing // step) * step
    if file.gaps:
        start, stop = file.gaps[0]
        return start, min(limits.TOP_UP_STEP_BYTES, stop - start)
    return None


def record_range(file: GrowingFile, offset: int, length: int) -> None:
    """Record that these pages, which `choose_range` returned, are prepared."""
    if offset >= file.ahead_end:
        if offset > file.ahead_end:
            file.gaps.append((file.ahead_end, offset))
        file.ahead_end = offset + length
        return
    start, stop = file.gaps.pop(0)
    if start + length < stop:
        file.gaps.insert(0, (start + length, stop))


class TopUpThread:
    """The thread, which runs while there are files. The trio thread calls its methods, but for `restore`."""

    def __init__(self, allocate: Callable[[int, int, int], None] = prepared.top_up) -> None:
        self._allocate = allocate
        self._files: dict[int, GrowingFile] = {}
        self._gone: list[GrowingFile] = []
        self._lock = threading.Lock()
        self._step_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_full_logged = False

    @property
    def is_growing(self) -> bool:
        """Return True while a program writes such a file: what is ahead of it is free again soon."""
        with self._lock:
            return any(time.monotonic() - file.changed_s < limits.TOP_UP_IDLE_S for file in self._files.values())

    def add(self, inode: int, fd: int, prepared_bytes: int) -> None:
        """Keep pages ahead of an open file from now on. Takes `fd`, which is writable."""
        with self._lock:
            if inode in self._files:
                os.close(fd)
                return
            self._files[inode] = GrowingFile(fd, prepared_bytes, changed_s=time.monotonic())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="top up", daemon=True)
                self._thread.start()

    def remove(self, inode: int) -> None:
        """Forget a file that no process writes any more.

        Returns at once; the thread closes the descriptor after its step.
        """
        with self._lock:
            if (file := self._files.pop(inode, None)) is not None:
                self._gone.append(file)

    def restore(self, inode: int) -> None:
        """Allocate again what a truncation of an open file took: the kernel frees all pages beyond the end.

        Called in a thread, after the truncation and before the program gets its answer.
        """
        with self._lock:
            file = self._files.get(inode)
        if file is not None:
            with self._step_lock:
                size = os.fstat(file.fd).st_size
                file.ahead_end, file.gaps = size, [(start, min(stop, size)) for start, stop in file.gaps if start < size]
                self._step(file)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # Only root may.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PRIORITY)
        while True:
            with self._lock:
                files, gone = list(self._files.values()), self._gone
                self._gone = []
                for file in gone:
                    os.close(file.fd)
                if not files:
                    self._thread = None
                    return
            with self._step_lock:
                steps = [self._step(file) for file in files]
            if not any(steps):
                is_idle = time.monotonic() - max(file.changed_s for file in files) > limits.TOP_UP_IDLE_S
                time.sleep(limits.TOP_UP_IDLE_POLL_S if is_idle else limits.TOP_UP_POLL_S)

    def _step(self, file: GrowingFile) -> bool:
        """Allocate once for a file. Returns False if it has enough, or no more can be had."""
        size = os.fstat(file.fd).st_size
        if size != file.size:
            file.size, file.changed_s = size, time.monotonic()
        wanted = choose_range(file, size)
        if wanted is None:
            return False
        offset, length = wanted[0], min(wanted[1], space.read_capacity(file.fd).free - limits.TOP_UP_RESERVE_BYTES)
        try:
            if length <= 0:
                raise NoSpace("the tier is full")
            self._allocate(file.fd, offset, length)
        except (NoSpace, OSError) as failure:
            self._log_full(str(failure))
            return False
        record_range(file, offset, length)
        return True

    def _log_full(self, cause: str) -> None:
        if not self._is_full_logged:
            self._is_full_logged = True
            log.info("ram: no memory ahead of a program with a memory limit: %s; it pays for the little that is left", cause)
