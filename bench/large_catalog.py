"""What a large catalog costs: start, create, stat, evict and idle CPU with many files against the same with an empty catalog.

Usage: large_catalog.py [--files N] [--rounds N] [--only WORD]. Needs root, and 1 KiB of memory per file. Every ratio is the median of
rounds in turns within one run; 1.0 means that the files cost nothing.
"""

import argparse
import contextlib
import os
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("tests/support", ".")]

from daemon_under_test import DaemonUnderTest  # noqa: E402

from ckptfs import digest  # noqa: E402

RATIO_MAX = 1.5
FILES_PER_DIRECTORY = 1000
OPERATIONS = 300
EVICTED_FILES = 400
EVICTED_BYTES = 256 << 10
IDLE_S = 5
ROOT_INODE = 1


def main() -> int:
    """Measure; return 0 if every ratio is at most `RATIO_MAX`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--local", type=int, default=200_000, help="how many of the files also lie on NVMe")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="run only measures with this word in their names")
    arguments = parser.parse_args()
    with _two_daemons(arguments.files, arguments.local) as pair:
        met = [_compare(name, measure, pair, arguments.rounds) for name, measure in MEASURES.items() if arguments.only in name]
    return 0 if all(met) else 1


@contextlib.contextmanager
def _two_daemons(files: int, local: int) -> Iterator[tuple[DaemonUnderTest, DaemonUnderTest]]:
    """Two daemons: one with an empty catalog, one with `files` files on the PFS, of which `local` lie on NVMe as well."""
    memory = Path(tempfile.mkdtemp(prefix="ckptfs-bench-", dir="/dev/shm"))
    daemons = []
    try:
        for name, count in (("empty", 0), ("large", files)):
            nvme, pfs = memory / name / "nvme", memory / name / "pfs"
            nvme.mkdir(parents=True)
            pfs.mkdir()
            daemon = DaemonUnderTest(ram="64M", nvme=nvme, pfs=pfs)
            daemons.append(daemon)
            daemon.start().unmount()  # Creates the catalog and the directories of the tiers.
            _populate(daemon, nvme, pfs, max(count, OPERATIONS), local if count else 0)
            daemon.start()
        yield daemons[0], daemons[1]
    finally:
        for daemon in daemons:
            daemon.close()
        shutil.rmtree(memory)


def _populate(daemon: DaemonUnderTest, nvme: Path, pfs: Path, files: int, local: int) -> None:
    """Insert the rows of `files` empty sealed files, all of them checked, and create the files that they stand for."""
    begun = time.monotonic()
    connection = sqlite3.connect(daemon.state / "catalog.db", isolation_level=None)
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("BEGIN")
    contents = next(nvme.glob("contents-*"))
    first = connection.execute("SELECT max(id) FROM inode").fetchone()[0] + 1
    empty = digest.hash_content(b"", 0)
    directory = 0
    for number in range(files):
        if number % FILES_PER_DIRECTORY == 0:
            directory = first
            first += 1
            name = f"large_{number // FILES_PER_DIRECTORY}"
            (pfs / name).mkdir()
            _insert_directory(connection, directory, name, pfs / name)
        inode, first, name = first, first + 1, f"file_{number % FILES_PER_DIRECTORY}"
        path = pfs / f"large_{number // FILES_PER_DIRECTORY}" / name
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        found = path.stat()
        times = (found.st_mtime_ns,) * 4
        connection.execute(
            "INSERT INTO inode (id, mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, birth_ns, content, generation)"
            " VALUES (?, 33188, 0, 0, 1, ?, ?, ?, ?, ?, 1)", (inode, *times, inode)
        )  # fmt: skip
        connection.execute(
            "INSERT INTO content (id, inode, generation, state, digest, blocks, change, closed_ns) VALUES (?, ?, 1, 2, ?, x'', 1, ?)",
            (inode, inode, empty, times[0]),
        )
        connection.execute("INSERT INTO entry (parent, name, child) VALUES (?, ?, ?)", (directory, name.encode(), inode))
        _insert_pfs_entry(connection, directory, name, inode, found)
        connection.execute(
            "INSERT INTO pfs_file (inode, generation, complete, size, mtime_ns, pfs_inode, digest, blocks, checked_ns)"
            " VALUES (?, 1, 1, 0, ?, ?, ?, x'', ?)",
            (inode, times[0], found.st_ino, empty, times[0]),
        )
        if number < local:
            os.close(os.open(contents / f"{inode:016x}", os.O_CREAT | os.O_WRONLY, 0o600))
            connection.execute(
                "INSERT INTO copy (content, tier, state, used_ns, verified_ns) VALUES (?, 'nvme', 1, ?, ?)",
                (inode, times[0] + number, times[0]),
            )
    connection.execute("COMMIT")
    connection.close()
    print(f"{files} files made in {time.monotonic() - begun:.0f} s", flush=True)


def _insert_directory(connection: sqlite3.Connection, inode: int, name: str, path: Path) -> None:
    found = path.stat()
    now = time.time_ns()
    connection.execute(
        "INSERT INTO inode (id, mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, birth_ns, parent, scanned_ns)"
        " VALUES (?, 16877, 0, 0, 2, ?, ?, ?, ?, ?, ?)", (inode, now, now, now, now, ROOT_INODE, now)
    )  # fmt: skip
    connection.execute("INSERT INTO entry (parent, name, child) VALUES (?, ?, ?)", (ROOT_INODE, name.encode(), inode))
    _insert_pfs_entry(connection, ROOT_INODE, name, inode, found)


def _insert_pfs_entry(connection: sqlite3.Connection, parent: int, name: str, inode: int, found: os.stat_result) -> None:
    connection.execute(
        "INSERT INTO pfs_entry (parent, name, inode, seen_ino, seen_mode, seen_uid, seen_gid) VALUES (?, ?, ?, ?, ?, 0, 0)",
        (parent, name.encode(), inode, found.st_ino, found.st_mode),
    )


def _compare(
    name: str, measure: Callable[[DaemonUnderTest, int], float], pair: tuple[DaemonUnderTest, DaemonUnderTest], rounds: int
) -> bool:
    """Measure both in turns, after one round to warm up; return True if the median ratio is at most `RATIO_MAX`."""
    found = []
    for number in range(rounds + 1):
        order = pair if number % 2 else pair[::-1]
        values = {id(daemon): measure(daemon, number) for daemon in order}
        found.append((values[id(pair[0])], values[id(pair[1])]))
    ratio = statistics.median(large / empty for empty, large in found[1:])
    empty, large = (statistics.median(column) for column in zip(*found[1:], strict=True))
    met = ratio <= RATIO_MAX
    print(f"{name:28} {ratio:6.2f}  target {RATIO_MAX}  {'' if met else 'MISSED':7} empty {empty:.4g}, large {large:.4g}", flush=True)
    return met


def _start(daemon: DaemonUnderTest, number: int) -> float:
    """Return the seconds from the start of the daemon until its mount answers, after a clean end."""
    daemon.unmount()
    begun = time.perf_counter()
    daemon.start()
    return time.perf_counter() - begun


def _create(daemon: DaemonUnderTest, number: int) -> float:
    """Return the seconds of creating, writing and closing one file."""
    daemon.settle()
    directory = daemon.path / f"create-{number}"
    directory.mkdir()
    begun = time.perf_counter()
    for count in range(OPERATIONS):
        (directory / f"file-{count}").write_bytes(b"x" * 4096)
    return (time.perf_counter() - begun) / OPERATIONS


def _stat(daemon: DaemonUnderTest, number: int) -> float:
    """Return the seconds of one stat of a file that the kernel does not know yet: the daemon was restarted before."""
    daemon.restart()
    dice = random.Random(number)
    directory = dice.choice(sorted(daemon.path.glob("large_*")))
    chosen = [directory / f"file_{file}" for file in dice.sample(range(OPERATIONS), OPERATIONS)]
    begun = time.perf_counter()
    for path in chosen:
        path.stat()
    return (time.perf_counter() - begun) / OPERATIONS


def _unlink(daemon: DaemonUnderTest, number: int) -> float:
    """Return the seconds of one unlink."""
    directory = daemon.path / f"create-{number}"
    directory.mkdir(exist_ok=True)
    for count in range(OPERATIONS):
        (directory / f"unlink-{count}").write_bytes(b"x")
    daemon.settle()
    begun = time.perf_counter()
    for count in range(OPERATIONS):
        (directory / f"unlink-{count}").unlink()
    return (time.perf_counter() - begun) / OPERATIONS


def _evict(daemon: DaemonUnderTest, number: int) -> float:
    """Return the CPU seconds of the daemon for writing and evicting one file of 256 KiB beyond the size of RAM."""
    daemon.settle()
    directory = daemon.path / f"evict-{number}"
    directory.mkdir()
    before = _cpu_s(daemon)
    for count in range(EVICTED_FILES):
        (directory / f"file-{count}").write_bytes(b"x" * EVICTED_BYTES)
    daemon.settle()
    return (_cpu_s(daemon) - before) / EVICTED_FILES


def _idle(daemon: DaemonUnderTest, number: int) -> float:
    """Return the share of a core that an idle daemon uses, and 1 % more, since the share of an idle one is next to nothing."""
    daemon.settle()
    threading.Event().wait(1)
    before = _cpu_s(daemon)
    threading.Event().wait(IDLE_S)
    return (_cpu_s(daemon) - before) / IDLE_S + 0.01


def _status(daemon: DaemonUnderTest, number: int) -> float:
    """Return the seconds of `ckptfs status`."""
    begun = time.perf_counter()
    daemon.command("status", daemon.path)
    return time.perf_counter() - begun


def _cpu_s(daemon: DaemonUnderTest) -> float:
    pids = [process["pid"] for process in daemon.processes().values() if isinstance(process, dict) and process.get("pid")]
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


MEASURES: dict[str, Callable[[DaemonUnderTest, int], float]] = {
    "start, s": _start, "create, s": _create, "stat, s": _stat, "unlink, s": _unlink, "evict, CPU s": _evict, "idle, CPU": _idle,
    "status, s": _status,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
