"""Which processes write files: read from /proc once for each, in a thread of its own (H10).

A thread that writes is noted when it opens a file, and the file when it is closed. The tracker of sets asks for files of checkpoints only.
Nothing here delays or fails a request: what cannot be read in time is not known. What is known ends with the mount process.

Invariants:
- The memory of another process is read in the thread only: its pages may lie on this mount, and the read then waits for this process.
"""

import json
import queue
import re
import socket
import threading
import time
from collections import OrderedDict
from pathlib import Path

PROCESSES_MAX = 4096
FILES_MAX = 65_536
COMMAND_CHARACTERS_MAX = 160
ENVIRONMENT_BYTES_MAX = 1 << 20
REREAD_S = 60.0
"""The same number may be another process later."""
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")


def describe_process(pid: int, host: str) -> str:
    """Return what /proc tells about a process, or the process of a thread, as JSON; "" if it is gone.

    May hang.
    """
    process = Path("/proc") / str(pid)
    try:
        group = re.search(r"^Tgid:\s*(\d+)$", (process / "status").read_text(errors="replace"), re.MULTILINE)
        command = (process / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        with open(process / "environ", "rb") as file:
            environment = _parse_environment(file.read(ENVIRONMENT_BYTES_MAX))
    except OSError:
        return ""
    fields = {"host": host, "pid": int(group[1]) if group else pid, "command": command[:COMMAND_CHARACTERS_MAX]}
    return json.dumps({**fields, "job": _find_first(environment, _JOBS), "rank": _find_first(environment, _RANKS)})


def _parse_environment(data: bytes) -> dict[str, str]:
    pairs = (one.decode(errors="replace").partition("=") for one in data.split(b"\0"))
    return {name: value for name, _, value in pairs}


def _find_first(environment: dict[str, str], names: tuple[str, ...]) -> str:
    return next((environment[name][:COMMAND_CHARACTERS_MAX] for name in names if environment.get(name)), "")


class ProducerNotes:
    """The writers of the files that were closed last. Its methods belong to one thread, and never wait."""

    def __init__(self, host: str = "") -> None:
        self._host = host or socket.gethostname()
        self._processes: OrderedDict[int, tuple[float, str]] = OrderedDict()
        self._files: OrderedDict[int, int] = OrderedDict()
        self._to_read: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def note_writer(self, pid: int) -> None:
        """Note that a thread has opened a file for writing."""
        known = self._processes.get(pid)
        if not pid or (known is not None and time.monotonic() - known[0] < REREAD_S):
            return
        self._processes[pid] = (time.monotonic(), known[1] if known is not None else "")
        if len(self._processes) > PROCESSES_MAX:
            self._processes.popitem(last=False)
        self._to_read.put(pid)
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="producers", daemon=True)
            self._thread.start()

    def note_closed(self, inode: int, pid: int) -> None:
        """Note that the last writer of a file has closed it."""
        self._files[inode] = pid
        self._files.move_to_end(inode)
        if len(self._files) > FILES_MAX:
            self._files.popitem(last=False)

    def take(self, inode: int) -> str | None:
        """Return the process that closed a file, as JSON, once.

        Returns None if no process has closed it since, "" if it is not known.
        """
        pid = self._files.pop(inode, None)
        return None if pid is None else self._processes.get(pid, (0.0, ""))[1]

    def _read(self) -> None:
        while True:
            pid = self._to_read.get()
            if text := describe_process(pid, self._host):
                self._processes[pid] = (time.monotonic(), text)
