"""Which processes write files and read sets (H10).

They are read from /proc once for each, in a thread of its own. A thread that writes is noted when it opens a file, and the file when it is
closed. The tracker of sets asks for files of checkpoints only. A thread that reads is noted when it opens a file that the history has.
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
from typing import NamedTuple

from ckptfs import procfs
from ckptfs.bounded_table import BoundedTable

PROCESSES_MAX = 4096
FILES_MAX = 65_536
COMMAND_CHARACTERS_MAX = 160
ENVIRONMENT_BYTES_MAX = 1 << 20
REREAD_S = 60.0
"""The same number may be another process later."""
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "JOB_ID")
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""The launcher that is nearest to the process first: what mpirun starts in a batch script of Slurm inherits SLURM_PROCID=0."""


class Process(NamedTuple):
    """A process that used a file.

    `pid`: the thread that opened it. `text`: what /proc tells as JSON, "" if it is not known. `started_ns`: its start, 0 if not known.
    """

    pid: int
    text: str = ""
    started_ns: int = 0


class WrittenFile(NamedTuple):
    """A file that its writer has closed. `opened_ns`: when the first writer opened it."""

    process: Process
    opened_ns: int
    closed_ns: int


def describe_process(pid: int, host: str) -> str:
    """Return what /proc tells about the process of a thread as JSON; "" if it is gone. May hang."""
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
    """The last writers and readers of files. Its methods belong to one thread, and never wait."""

    def __init__(self) -> None:
        self._host = socket.gethostname()
        self._processes: OrderedDict[int, tuple[float, Process]] = OrderedDict()
        """Both threads set entries, which for this type is safe."""
        self._opened = BoundedTable[int, int](FILES_MAX)
        self._files = BoundedTable[int, WrittenFile](FILES_MAX)
        self._reads = BoundedTable[tuple[int, int], None](FILES_MAX)
        self._new_reads: list[tuple[int, int]] = []
        self._to_read: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def note_writer(self, pid: int, inode: int) -> None:
        if inode not in self._opened:
            self._opened[inode] = time.time_ns()
        self._describe(pid)

    def note_closed(self, inode: int, pid: int) -> None:
        now_ns = time.time_ns()
        self._files[inode] = WrittenFile(Process(pid), self._opened.pop(inode, now_ns), now_ns)

    def note_reader(self, pid: int, inode: int) -> None:
        """Note that a thread has opened a file for reading. Each thread and file is noted once."""
        if (inode, pid) not in self._reads:
            self._reads[inode, pid] = None
            if len(self._new_reads) < FILES_MAX:
                self._new_reads.append((inode, pid))
            self._describe(pid)

    def has(self, inode: int) -> bool:
        """Return True if `take` would return who closed a file."""
        return inode in self._files

    def take(self, inode: int) -> WrittenFile | None:
        """Return who closed a file, once. Returns None if no process has closed it since."""
        found = self._files.pop(inode, None)
        return None if found is None else found._replace(process=self._get_process(found.process.pid))

    def take_reads(self) -> list[tuple[int, Process]]:
        """Return (inode, process) of the reads that were noted since the last call."""
        taken, self._new_reads = self._new_reads, []
        return [(inode, self._get_process(pid)) for inode, pid in taken]

    def _get_process(self, pid: int) -> Process:
        return self._processes.get(pid, (0.0, Process(pid)))[1]

    def _describe(self, pid: int) -> None:
        """Have a process read, unless that was done a moment ago."""
        known = self._processes.get(pid)
        if not pid or (known is not None and time.monotonic() - known[0] < REREAD_S):
            return
        self._processes[pid] = (time.monotonic(), known[1] if known is not None else Process(pid))
        self._processes.move_to_end(pid)
        if len(self._processes) > PROCESSES_MAX:
            self._processes.popitem(last=False)
        self._to_read.put(pid)
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="producers", daemon=True)
            self._thread.start()

    def _read(self) -> None:
        while True:
            pid = self._to_read.get()
            if text := describe_process(pid, self._host):
                self._processes[pid] = (time.monotonic(), Process(pid, text, procfs.get_started_ns(pid)))
