"""Statements of the kernel in /proc: mounts, memory, processes and their capabilities. Reads only.

The list of mounts is read without touching them, so a mount that hangs cannot hang the reader.
"""

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

CKPTFS_TYPE = "fuse.ckptfs"
CAP_SYS_ADMIN = 21
MEMORY_FILESYSTEMS = frozenset(("tmpfs", "ramfs", "hugetlbfs"))
MOUNT_TABLE = Path("/proc/self/mountinfo")
FUSE_SETTINGS = Path("/proc/sys/fs/fuse")
MEMORY_PRESSURE = Path("/proc/pressure/memory")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of mountinfo (proc(5)).

    `device` is "MAJOR:MINOR"; `options` are those of the superblock; `root` is the directory of the filesystem that is mounted.
    """

    id: int
    mountpoint: Path
    device: str
    fstype: str
    source: str
    options: str
    root: str


def list_mount_entries(table: str | Path = MOUNT_TABLE) -> list[MountEntry]:
    """Return the mounts of this namespace in the order of mounting."""
    return [_parse_mount(line) for line in Path(table).read_bytes().splitlines()]


def _parse_mount(line: bytes) -> MountEntry:
    left, _, right = line.partition(b" - ")
    fields, (fstype, source, options) = left.split(b" "), map(_unescape, right.split(b" ")[:3])
    return MountEntry(int(fields[0]), Path(_unescape(fields[4])), fields[2].decode(), fstype, source, options, _unescape(fields[3]))


def get_filesystem_type(path: Path) -> str:
    """Return the type of the filesystem of an absolute path without symlinks. Touches none."""
    entries = [entry for entry in list_mount_entries() if path.is_relative_to(entry.mountpoint)]
    # Of two mounts on one mountpoint, the later one is visible.
    return max(reversed(entries), key=lambda entry: len(entry.mountpoint.parts)).fstype if entries else ""


def find_mount_of(fd: int) -> MountEntry | None:
    """Return the mount of an open file. Returns None if that mount has left this namespace."""
    number = re.search(rb"^mnt_id:\s*(\d+)$", Path(f"/proc/thread-self/fdinfo/{fd}").read_bytes(), re.MULTILINE)
    # A node may have thousands of mounts, so only one line is parsed.
    line = number and re.search(rb"^%s .*$" % number[1], MOUNT_TABLE.read_bytes(), re.MULTILINE)
    return _parse_mount(line[0]) if line else None


def _unescape(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field))


def get_memory() -> tuple[int, int]:
    """Return (total, available) bytes of this machine's memory."""
    fields: dict[bytes, int] = {}
    with open("/proc/meminfo", "rb") as file:
        while not {b"MemTotal", b"MemAvailable"} <= fields.keys():
            name, _, rest = file.readline().partition(b":")
            fields[name] = int(rest.split()[0]) * 1024
    return fields[b"MemTotal"], fields[b"MemAvailable"]


@dataclass(frozen=True, slots=True)
class FuseTimeouts:
    """After how many seconds the kernel ends a FUSE connection that has not answered a request; 0: never.

    `default_s` holds for servers that ask for nothing, `max_s` for all. Kernels before 6.15 have neither.
    """

    default_s: int
    max_s: int


def get_fuse_timeouts(directory: Path = FUSE_SETTINGS) -> FuseTimeouts:
    """Return the settings fs.fuse.default_request_timeout and fs.fuse.max_request_timeout."""

    def read(name: str) -> int:
        try:
            return int((directory / name).read_text())
        except (OSError, ValueError):
            return 0

    return FuseTimeouts(read("default_request_timeout"), read("max_request_timeout"))


def get_memory_pressure(table: str | Path = MEMORY_PRESSURE) -> float:
    """Return the percentage of the last 10 s in which a process waited for memory (PSI)."""
    try:
        found = re.search(rb"^some avg10=([0-9.]+)", Path(table).read_bytes(), re.MULTILINE)
    except OSError:
        return 0.0
    return float(found[1]) if found else 0.0


def is_virtual_machine() -> bool:
    """Return True if the processor flags (x86) or the kernel name a hypervisor."""
    try:
        flags = re.search(rb"^flags\s*:.*$", Path("/proc/cpuinfo").read_bytes(), re.MULTILINE)
    except OSError:
        return False
    return bool(flags and b"hypervisor" in flags[0].split()) or Path("/sys/hypervisor/type").exists()


def is_running(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    return _get_stat(pid)[0] not in ("", "Z")


def is_dying(pid: int) -> bool:
    """Return True if the process was killed, though threads of it may still hang in system calls.

    None of them runs its program again. Its descriptors stay open until the last thread ends. The main thread is a zombie by then, or has
    SIGKILL pending.
    """
    return is_killed(pid) or not is_running(pid)


def is_killed(thread: int) -> bool:
    """Return True if SIGKILL is pending for a thread.

    A program has sent it, or the kernel because of another signal that ends the process.
    """
    try:
        pending = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", Path(f"/proc/{thread}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in pending)


def get_start_ticks(pid: int) -> int:
    """Return the start of a process in clock ticks since boot, 0 if it is gone: with its pid an identity."""
    return int(_get_stat(pid)[19])


def get_started_ns(pid: int) -> int:
    """Return the time at which a process started, 0 if it is gone."""
    ticks = get_start_ticks(pid)
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns if ticks else 0


def list_groups(pid: int) -> list[int]:
    """Return the supplementary groups of a process; none if it is gone."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Groups:(.*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return [int(one) for one in found[1].split()] if found else []
    return []


def get_resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, 0 if it is gone."""
    return int(_get_stat(pid)[21]) * PAGE_BYTES


def _get_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; an empty state and zeros without a process."""
    try:
        # The name of the program, in parentheses, may hold blanks and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["", *["0"] * 49]


def has_capability(number: int) -> bool:
    """Return True if this process has the capability in its effective set."""
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return bool(effective and int(effective[1], 16) >> number & 1)
