"""The memory limit of a process, as its control groups set it. Reads only.

A page of a tmpfs is charged to the memory cgroup of the process that writes it first, and it cannot be reclaimed. A process below a limit
is therefore killed for files that it writes into a tmpfs. The mount process asks this module which processes may do that.

A process is below a limit if its group or any ancestor has one, in a hierarchy of version 1 or 2. A limit of at least the memory of the
machine limits nothing. `memory.high` counts as a limit: beyond it the kernel slows the process down, because tmpfs pages stay.

Invariants:
- What cannot be found out counts as limited: a process of a foreign pid namespace, groups outside of a cgroup namespace.
- A process is asked for its groups each time, because it may move. The limits of groups are cached for `limits.CGROUP_AGE_S`.
"""

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from ckptfs import limits, procfs

# A v1 group without a limit shows the largest multiple of the page size.
_V1_LIMITS = ("memory.limit_in_bytes",)
_V2_LIMITS = ("memory.max", "memory.high")
_FILES_MAX = 32


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The lowest memory limit of a process, set by `group`: None for no limit, 0 if it is unknown."""

    limit_bytes: int | None
    group: str = ""

    @property
    def is_known(self) -> bool:
        return self.limit_bytes != 0

    @property
    def is_limited(self) -> bool:
        """Return True if the process may be killed for memory that others do not need."""
        return self.limit_bytes is not None


UNLIMITED = MemoryLimit(None)
UNKNOWN = MemoryLimit(0)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A cgroup filesystem with memory groups; `root`: the group at its mountpoint, as in /proc/PID/cgroup."""

    version: int
    mountpoint: Path
    root: str

    def get_directory(self, group: str) -> Path | None:
        """Return the directory of a group. Returns None if it is outside of what is mounted."""
        if group.startswith("/.."):
            return None
        if self.root == "/":
            return self.mountpoint / group.lstrip("/")
        if group != self.root and not group.startswith(f"{self.root}/"):
            return None
        return self.mountpoint / group[len(self.root) :].lstrip("/")

    @property
    def is_whole(self) -> bool:
        """Return True if the group at the mountpoint has no ancestors: it lacks files that others have."""
        return self.version == 1 or not (self.mountpoint / "cgroup.type").exists()


def find_hierarchies(table: str | Path = procfs.MOUNT_TABLE) -> list[Hierarchy]:
    """Return the mounted hierarchies that may limit memory: only version 1 if that has the controller."""
    found = []
    for entry in procfs.list_mount_entries(table):
        if entry.fstype == "cgroup" and "memory" in entry.options.split(","):
            found.append(Hierarchy(1, entry.mountpoint, entry.root))
        elif entry.fstype == "cgroup2":
            found.append(Hierarchy(2, entry.mountpoint, entry.root))
    return sorted(found, key=lambda hierarchy: hierarchy.version)


def parse_groups(text: str) -> dict[int, str]:
    """Return {version: group} of /proc/PID/cgroup, for the hierarchies that may limit memory."""
    found = {}
    for line in text.splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            found[2] = group
        elif "memory" in controllers.split(","):
            found[1] = group
    return found


class MemoryLimits:
    """The memory limits of the processes of this machine. Belongs to one thread."""

    def __init__(self, proc: Path = Path("/proc"), table: str | Path = procfs.MOUNT_TABLE, memory_bytes: int | None = None) -> None:
        self._proc = str(proc)
        self._hierarchies = find_hierarchies(table)
        self._memory_bytes = procfs.get_memory()[0] if memory_bytes is None else memory_bytes
        self._known: dict[bytes, tuple[float, MemoryLimit]] = {}
        self._files: dict[int | str, int] = {}  # Descriptors of /proc/PID/cgroup of the last processes.

    def find(self, pid: int | str) -> MemoryLimit:
        """Return the lowest limit of a process or thread. `pid` 0 is a process of a foreign pid namespace."""
        if pid == 0:
            return UNKNOWN
        try:
            groups = self._load_groups(pid)
        except OSError:
            return UNKNOWN
        now_s = time.monotonic()
        until_s, limit = self._known.get(groups, (0.0, UNKNOWN))
        if now_s > until_s:
            limit = self._read_limit(parse_groups(os.fsdecode(groups)))
            if len(self._known) >= limits.CGROUPS_KNOWN_MAX:
                self._known.clear()
            self._known[groups] = (now_s + limits.CGROUP_AGE_S, limit)
        return limit

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _load_groups(self, pid: int | str) -> bytes:
        """Return /proc/PID/cgroup. Raises OSError."""
        if pid in self._files:
            with contextlib.suppress(OSError):  # The process has ended. Another one may have its number.
                return os.pread(self._files[pid], limits.CGROUP_BYTES_MAX, 0)
            os.close(self._files.pop(pid))
        fd = os.open(f"{self._proc}/{pid}/cgroup", os.O_RDONLY | os.O_CLOEXEC)
        if len(self._files) >= _FILES_MAX:
            os.close(self._files.pop(next(iter(self._files))))
        self._files[pid] = fd
        return os.pread(fd, limits.CGROUP_BYTES_MAX, 0)

    def _read_limit(self, groups: dict[int, str]) -> MemoryLimit:
        for version in (1, 2):
            if version not in groups:
                continue
            hierarchies = [hierarchy for hierarchy in self._hierarchies if hierarchy.version == version]
            found = [self._read_groups(hierarchy, groups[version]) for hierarchy in hierarchies]
            # A hierarchy may be mounted several times, as a whole and in parts.
            known = [limit for limit in found if limit.is_known]
            return min(known, key=_get_bound) if known else UNKNOWN
        return UNLIMITED

    def _read_groups(self, hierarchy: Hierarchy, group: str) -> MemoryLimit:
        """Return the lowest limit of a group and its ancestors."""
        directory = hierarchy.get_directory(group)
        if directory is None or not directory.is_dir():
            return UNKNOWN
        lowest = UNLIMITED
        names = _V1_LIMITS if hierarchy.version == 1 else _V2_LIMITS
        levels = [directory, *directory.parents]
        for level in levels[: levels.index(hierarchy.mountpoint) + 1]:
            for name in names:
                lowest = min(lowest, self._build_limit(_read_word(level / name), str(level)), key=_get_bound)
        if hierarchy.version == 1:
            # It covers ancestors that are not mounted in this namespace.
            lowest = min(lowest, self._build_limit(_read_hierarchical_limit(directory), str(directory)), key=_get_bound)
        return UNKNOWN if lowest == UNLIMITED and not hierarchy.is_whole else lowest

    def _build_limit(self, word: str, group: str) -> MemoryLimit:
        if not word.isdecimal() or int(word) >= self._memory_bytes:
            return UNLIMITED
        # A limit of nothing at all is still a known one.
        return MemoryLimit(max(1, int(word)), group)


def find_own_limit() -> MemoryLimit:
    """Return the lowest limit of this process, to which most of the RAM tier is charged."""
    with contextlib.closing(MemoryLimits()) as found:
        return found.find("self")


def _get_bound(limit: MemoryLimit) -> float:
    return float("inf") if limit.limit_bytes is None else limit.limit_bytes


def _read_word(path: Path) -> str:
    """Return the first word of a file; empty if there is none: the controller is not enabled there."""
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""


def _read_hierarchical_limit(directory: Path) -> str:
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(" ")[2] for line in lines if line.startswith("hierarchical_memory_limit ")), "")
