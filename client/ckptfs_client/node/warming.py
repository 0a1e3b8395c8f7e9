"""Fetching files to this node ahead of their use (`ckptfs warm`).

The files are read through the mount by a few threads, so the kernel checks the permissions of the caller, and the daemon fetches as for any
reader. Files that do not fit are refused before the first is read. An interruption leaves what was fetched.
"""

import contextlib
import os
import stat
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from ckptfs import disk, limits
from ckptfs.model import Tier
from ckptfs.protocol import control_pb2 as pb
from ckptfs.quantities import format_count, format_size
from ckptfs_client import render
from ckptfs_client.client import Client
from ckptfs_client.errors import ClientError, CommandFailed, NotInTime
from ckptfs_client.json_answers import WarmJson
from ckptfs_client.mounts import Mount, build_path_error, find_inode

THREADS = 4
READ_BYTES = 8 * limits.MIB
POLL_S = 0.1
SETTLE_S = 30.0
"""So long after the last byte was read, a file may become a copy that counts."""
HERE, FETCHED, FAILED = "here", "fetched", "failed"
LOCAL_TIERS = (Tier.RAM.value, Tier.NVME.value)


@dataclass(frozen=True, slots=True)
class WarmFile:
    """A regular file of a mount."""

    path: str
    inode: int
    size: int


@dataclass(slots=True)
class Warming:
    """The files that are wanted on this node, by mount.

    `finish_s`: when to give up (monotonic); None: never.
    """

    finish_s: float | None
    json: bool
    wanted: dict[Mount, list[WarmFile]] = field(default_factory=lambda: defaultdict(list))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failures: list[str] = field(default_factory=list)
    fetched_bytes: int = 0

    def add(self, path: Path) -> None:
        """Want a file, or all files below a directory. Raises NoMount, CommandFailed."""
        real = os.path.realpath(path)
        mount, _ = find_inode(real)
        known = {one.inode for one in self.wanted[mount]}
        self.wanted[mount] += [one for one in _list_files(real, mount.device) if one.inode not in known]

    def run(self) -> None:
        """Fetch the files. Raises NotInTime with what is left, CommandFailed if some could not be fetched."""
        for mount, files in self.wanted.items():
            with Client(mount) as client:
                missing = self._report_present(client, files, HERE)
                _require_room(client, missing)
                self._fetch(client, missing)
        if self.failures:
            count = format_count(len(self.failures), "file")
            raise CommandFailed(f"{count} could not be fetched: {self.failures[0]}", remedy="`ckptfs ls` shows where the copies are")

    def _fetch(self, client: Client, files: list[WarmFile]) -> None:
        """Read the files, and wait until their copies count. Raises NotInTime."""
        reading, unread, unsettled = Reading(files), len(files), list[WarmFile]()
        total, settle_until_s = sum(one.size for one in files), 0.0
        with render.ProgressBar(f"fetching to {client.mount.mountpoint}") as bar:
            while unread or unsettled:
                bytes_left = max(0, total - reading.read_bytes)
                words = f"{format_count(unread + len(unsettled), 'file')} ({format_size(bytes_left)})"
                bar.update(bytes_left, words)
                if self.finish_s is not None and time.monotonic() > self.finish_s:
                    reading.is_ended.set()
                    raise NotInTime(f"not done in time; left: {words}")
                try:
                    file, failure = reading.results.get(timeout=POLL_S)
                except Empty:
                    is_late = not unread and time.monotonic() > settle_until_s
                    unsettled = self._report_present(client, unsettled, FETCHED, is_late=is_late)
                    continue
                unread, settle_until_s = unread - 1, time.monotonic() + SETTLE_S
                if failure:
                    self._report(file, FAILED, failure)
                else:
                    unsettled.append(file)

    def _report_present(self, client: Client, files: list[WarmFile], result: str, *, is_late: bool = False) -> list[WarmFile]:
        """Report the files that are on this node; return the others, or report them too if it is late."""
        others = []
        for file, record in zip(files, client.list_records(one.inode for one in files), strict=True):
            if is_here(file, record):
                self._report(file, result)
            elif is_late:
                self._report(file, FAILED, "it can be read, and no copy stays on this node: there is no room, or it is being written")
            else:
                others.append(file)
        return others

    def _report(self, file: WarmFile, result: str, failure: str = "") -> None:
        self.counts[result] += 1
        self.fetched_bytes += file.size if result == FETCHED else 0
        if failure:
            self.failures.append(f"{file.path}: {failure}")
        if self.json:
            answer: WarmJson = {"path": file.path, "size": file.size, "result": result, "reason": failure}
            render.print_json(answer, lines=True)


class Reading:
    """Threads that read files to their ends. They do not keep the command from ending."""

    def __init__(self, files: Sequence[WarmFile]) -> None:
        self.results: SimpleQueue[tuple[WarmFile, str]] = SimpleQueue()
        """Each file that was read, and why that failed; empty if it did not."""
        self.is_ended = threading.Event()
        self._todo: SimpleQueue[WarmFile] = SimpleQueue()
        self._read = [0] * THREADS
        for one in files:
            self._todo.put(one)
        for number in range(min(THREADS, len(files))):
            threading.Thread(target=self._read_files, args=(number,), name="warm", daemon=True).start()

    @property
    def read_bytes(self) -> int:
        return sum(self._read)

    def _read_files(self, number: int) -> None:
        with contextlib.suppress(Empty):
            while not self.is_ended.is_set():
                file = self._todo.get_nowait()
                failure = ""
                try:
                    self._read_file(file.path, number)
                except OSError as error:
                    failure = os.strerror(error.errno or 0)
                self.results.put((file, failure))

    def _read_file(self, path: str, number: int) -> None:
        with disk.closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as fd:
            while not self.is_ended.is_set() and (count := len(os.read(fd, READ_BYTES))):
                self._read[number] += count
            # What is in RAM now is not wanted in the page cache, too.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def is_here(file: WarmFile, record: pb.Record) -> bool:
    """Return True if the bytes of a file are on this node."""
    is_local = any(copy.tier in LOCAL_TIERS and copy.state == "good" for copy in record.copies)
    return not file.size or is_local or record.state in ("open", "closed")


def _list_files(path: str, device: int) -> Iterator[WarmFile]:
    """Yield the regular files at and below a path, in their order.

    The history is not entered. Raises CommandFailed.
    """
    try:
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode):
            yield WarmFile(path, found.st_ino, found.st_size)
        elif stat.S_ISDIR(found.st_mode) and found.st_dev == device:
            with os.scandir(path) as entries:
                names = sorted(entry.path for entry in entries if entry.name != ".ckptfs")
            for name in names:
                yield from _list_files(name, device)
    except OSError as failure:
        raise build_path_error(path, failure) from failure


def _require_room(client: Client, files: Sequence[WarmFile]) -> None:
    """Refuse what does not fit into RAM and NVMe: it would push itself out. Raises CommandFailed."""
    wanted = sum(one.size for one in files)
    free = sum(tier.usable_bytes for tier in client.get_capacity().tiers if tier.name in LOCAL_TIERS) if wanted else 0
    if wanted > free:
        remedy = "name fewer files, or give more ram= or nvme="
        raise CommandFailed(f"{format_size(wanted)} are not on this node, and there is room for {format_size(free)}", remedy=remedy)


def warm(paths: Sequence[Path], timeout_s: float | None, *, json: bool) -> Warming:
    """Fetch files and all files below directories; return what was done. Raises ClientError."""
    warming = Warming(None if timeout_s is None else time.monotonic() + timeout_s, json)
    for path in paths:
        warming.add(path)
    try:
        warming.run()
    except ClientError as failure:
        raise type(failure)(f"warm: {failure.args[0]}", remedy=failure.remedy) from None
    return warming
