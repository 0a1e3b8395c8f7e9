"""A memory cgroup of a test's own, of version 1 or 2, and programs that run in it. Needs root."""

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_under_test import environment, eventually

from ckptfs import cgroups

HOLD = """
import os, sys
fd = os.open(sys.argv[1], int(sys.argv[2]), 0o644)
print("open", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        os.write(fd, b"w" * (1 << 20))
    print("written", flush=True)
"""
_numbers = itertools.count(1)


class MemoryGroup:
    """One group. A program of it that needs more memory than the limit, and cannot get it by reclaim, is killed."""

    def __init__(self, directory: Path, version: int, limit_bytes: int | None) -> None:
        self.directory = directory
        self._version = version
        directory.mkdir()
        if limit_bytes is not None:
            (directory / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(str(limit_bytes))

    @property
    def used_bytes(self) -> int:
        return int((self.directory / ("memory.usage_in_bytes" if self._version == 1 else "memory.current")).read_text())

    def make_child(self, limit_bytes: int | None) -> "MemoryGroup":
        if self._version == 2:
            (self.directory / "cgroup.subtree_control").write_text("+memory")
        return MemoryGroup(self.directory / "child", self._version, limit_bytes)

    def start(self, code: str, *arguments: str | Path) -> "subprocess.Popen[str]":
        """Start a Python program that moves itself into this group before it does anything else."""
        joined = f"open({str(self.directory / 'cgroup.procs')!r}, 'w').write('0')\n{code}"
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", joined, *map(str, arguments)]
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment())

    def run(self, code: str, *arguments: str | Path, timeout: float = 120.0) -> str:
        """Run a Python program in this group to its end; fails the test if it was killed or failed. Returns what it printed."""
        process = self.start(code, *arguments)
        output, errors = process.communicate(timeout=timeout)
        assert process.returncode == 0, f"exit {process.returncode} (-9: out of memory)\n{output}{errors}"
        return output

    @contextlib.contextmanager
    def holding(self, path: Path, flags: int) -> Iterator[Callable[[int], None]]:
        """A program of this group has a file open during the block, and writes so many MiB when told. Fails the test if it was killed."""
        with self.start(HOLD, path, str(flags)) as process:
            assert process.stdin is not None and process.stdout is not None
            written = process.stdout

            def write_mib(count: int) -> None:
                print(count, file=process.stdin, flush=True)
                assert written.readline() == "written\n"

            try:
                assert written.readline() == "open\n"
                yield write_mib
                process.communicate(timeout=60)
            finally:
                process.kill()
        assert process.returncode == 0

    def remove(self) -> None:
        eventually(lambda: not (self.directory / "cgroup.procs").read_text(), what="the programs of the group have ended")
        child = self.directory / "child"
        for directory in (child, self.directory):
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(directory)


def _find_hierarchy() -> cgroups.Hierarchy | None:
    """The hierarchy that limits memory on this machine, if its groups can be made."""
    for hierarchy in cgroups.find_hierarchies():
        controllers = hierarchy.mountpoint / "cgroup.controllers"
        if os.geteuid() == 0 and (hierarchy.version == 1 or "memory" in controllers.read_text().split()):
            return hierarchy
    return None


@contextlib.contextmanager
def memory_group(limit_bytes: int | None) -> Iterator[MemoryGroup]:
    """A group below the root with this limit. Skips the test where there are no memory cgroups."""
    hierarchy = _find_hierarchy()
    if hierarchy is None:
        pytest.skip("NO MEMORY CGROUPS HERE: what a program below a memory limit may do is not tested")
    if hierarchy.version == 2:
        (hierarchy.mountpoint / "cgroup.subtree_control").write_text("+memory")
    group = MemoryGroup(hierarchy.mountpoint / f"ckptfs-test-{os.getpid()}-{next(_numbers)}", hierarchy.version, limit_bytes)
    try:
        yield group
    finally:
        group.remove()
