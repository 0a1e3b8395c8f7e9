"""The writer of the event log: any thread records, a thread of its own appends.

All processes of the daemon write one log. `record` puts an event into a queue and returns. The thread takes what is there, and appends it
under a lock of the directory, which the kernel gives back if the process dies. If the disk fails or the queue is full, events are lost,
and nothing else fails.

Crash safety: events of the last moment may be lost, and the last line may be torn. The next writer ends it.
"""

import fcntl
import logging
import os
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

from ckptfs import disk, event_log
from ckptfs.event_log import EventKind, LoggedEvent

log = logging.getLogger(__name__)
PENDING_MAX = 10_000
END_WAIT_S = 2.0


class EventWriter:
    """The event log of this process. Thread-safe. Before `open` and after `close` events are dropped."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._common: dict[str, str] = {}
        self._has_failed = False
        self._begin()

    def _begin(self) -> None:
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def open(self, state: Path, *, node: str, mount: str) -> None:
        """Write to the log in a state directory from now on. `node`: the name of the host by default.

        In a fork, what was recorded before is left to the parent, which has the thread that writes it.
        """
        self._begin()
        self._common = {"node": node or socket.gethostname(), "mount": mount}
        self._directory = state / event_log.DIRECTORY

    def record(self, kind: EventKind, *, time_ns: int | None = None, **fields: Any) -> None:
        """Record an event without waiting for the disk. `time_ns`: when it happened; now by default."""
        if self._directory is None or self._queue.qsize() >= PENDING_MAX:
            return
        self._queue.put(event_log.build_line(LoggedEvent(time_ns or time.time_ns(), kind, self._common | fields)))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, args=(self._directory,), name="events", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Write what was recorded. Waits for a bounded time, because the disk may hang."""
        self._directory = None
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(END_WAIT_S)
            self._thread = None

    def _run(self, directory: Path) -> None:
        is_open = True
        while is_open:
            lines = [self._queue.get()]
            while not self._queue.empty():
                lines.append(self._queue.get())
            is_open = None not in lines
            if whole := [line for line in lines if line is not None]:
                self._append(directory, whole)

    def _append(self, directory: Path, lines: list[bytes]) -> None:
        try:
            append_lines(directory, lines)
            self._has_failed = False
        except OSError as failure:
            if not self._has_failed:
                log.warning("events: cannot be written: %s; they are lost until this works", failure)
            self._has_failed = True


def append_lines(directory: Path, lines: list[bytes]) -> None:
    """Append lines to the log; begin another file and delete the oldest if the last one is full."""
    directory.mkdir(mode=0o700, exist_ok=True)
    with disk.closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as lock_fd:
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        numbers = event_log.list_files(directory) or [1]
        if event_log.build_path(directory, numbers[-1]).exists():
            size = event_log.build_path(directory, numbers[-1]).stat().st_size
            numbers += [numbers[-1] + 1] if size >= event_log.FILE_BYTES else []
        _append_to(event_log.build_path(directory, numbers[-1]), b"".join(lines))
        for number in numbers[: -event_log.FILES_MAX]:
            event_log.build_path(directory, number).unlink(missing_ok=True)


def _append_to(path: Path, data: bytes) -> None:
    with open(path, "a+b", buffering=0) as file:
        os.chmod(path, 0o600)
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            data = data if file.read(1) == b"\n" else b"\n" + data
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) or 0 :]


events = EventWriter()
"""The one of this process."""
