"""M1: the memory limit of a process is read from both versions of cgroups; what cannot be read counts as a limit."""

import os
import subprocess
from pathlib import Path

import pytest

from ckptfs import cgroups, limits
from ckptfs.cgroups import UNKNOWN, UNLIMITED, MemoryLimits

MEMORY = 64 * limits.GIB
NONE_V1 = str(2**63 - 4096)


class Machine:
    """A tree of cgroup files, a mount table and a /proc of our own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lines: list[str] = []

    def mount(self, version: int, root: str = "/") -> Path:
        path = self.root / f"v{version}"
        path.mkdir(exist_ok=True)
        fstype, options = ("cgroup", "rw,memory") if version == 1 else ("cgroup2", "rw")
        self.lines.append(f"35 31 0:32 {root} {path} rw,relatime - {fstype} {fstype} {options}\n")
        return path

    def group(self, path: Path, **files: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name.replace("__", ".")).write_text(f"{text}\n")

    def process(self, pid: int, groups: str) -> None:
        (self.root / "proc" / str(pid)).mkdir(parents=True, exist_ok=True)
        (self.root / "proc" / str(pid) / "cgroup").write_text(groups)

    def limits(self) -> MemoryLimits:
        (self.root / "mountinfo").write_text("".join(self.lines))
        return MemoryLimits(self.root / "proc", self.root / "mountinfo", MEMORY)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_lowest_limit_of_a_v1_group_and_its_ancestors_counts(machine: Machine) -> None:
    root = machine.mount(1)
    machine.group(root, memory__limit_in_bytes=NONE_V1)
    machine.group(root / "slurm", memory__limit_in_bytes=str(2**30))
    machine.group(root / "slurm/job_1", memory__limit_in_bytes=NONE_V1, memory__stat=f"cache 0\nhierarchical_memory_limit {2**30}")
    machine.group(root / "slurm/job_2", memory__limit_in_bytes=str(2**29))
    machine.process(1, "9:name=systemd:/\n4:cpu,memory:/\n0::/\n")
    machine.process(2, "4:memory:/slurm/job_1\n0::/\n")
    machine.process(3, "4:memory:/slurm/job_2\n0::/\n")
    found = machine.limits()
    assert found.find(1) == UNLIMITED
    assert (found.find(2).limit_bytes, found.find(2).group) == (2**30, str(root / "slurm"))
    assert (found.find(3).limit_bytes, found.find(3).group) == (2**29, str(root / "slurm/job_2"))


def test_the_lowest_limit_of_a_v2_group_and_its_ancestors_counts(machine: Machine) -> None:
    root = machine.mount(2)
    machine.group(root / "kubepods", cgroup__type="domain", memory__max=str(2**31), memory__high="max")
    machine.group(root / "kubepods/pod", cgroup__type="domain", memory__max="max", memory__high=str(2**30))
    machine.group(root / "user", cgroup__type="domain", memory__max="max", memory__high="max")
    machine.group(root / "user/app", cgroup__type="domain")  # The controller is not enabled for it.
    machine.process(1, "0::/kubepods/pod\n")
    machine.process(2, "0::/kubepods\n")
    machine.process(3, "0::/user/app\n")
    machine.process(4, "0::/\n")
    found = machine.limits()
    assert [found.find(pid).limit_bytes for pid in (1, 2, 3, 4)] == [2**30, 2**31, None, None]


def test_a_limit_of_the_whole_memory_is_none(machine: Machine) -> None:
    root = machine.mount(2)
    machine.group(root / "a", cgroup__type="domain", memory__max=str(MEMORY))
    machine.group(root / "b", cgroup__type="domain", memory__max=str(MEMORY - 4096))
    machine.group(root / "c", cgroup__type="domain", memory__max="0")
    for pid, name in enumerate("abc", 1):
        machine.process(pid, f"0::/{name}\n")
    found = machine.limits()
    assert not found.find(1).is_limited
    assert found.find(2).is_limited
    assert found.find(3).is_limited and found.find(3).is_known


def test_an_ancestor_that_is_not_mounted_counts_by_the_hierarchical_limit(machine: Machine) -> None:
    root = machine.mount(1, root="/docker/abc")
    machine.group(root, memory__limit_in_bytes=NONE_V1, memory__stat=f"hierarchical_memory_limit {2**28}")
    machine.process(1, "4:memory:/docker/abc\n")
    machine.process(2, "4:memory:/docker/abcd\n")
    assert machine.limits().find(1).limit_bytes == 2**28
    assert machine.limits().find(2) == UNKNOWN


@pytest.mark.parametrize(
    ("pid", "groups", "is_mounted"),
    [
        (0, "", True),  # of another PID namespace
        (77, "", True),  # gone
        (5, "0::/../other\n", True),  # outside of the cgroup namespace
        (5, "4:memory:/a\n0::/\n", False),
        (5, "0::/\n", True),  # the root of a namespace: its ancestors may have a limit
        (5, "0::/gone (deleted)\n", True),
    ],
)
def test_what_cannot_be_found_out_counts_as_limited(machine: Machine, pid: int, groups: str, is_mounted: bool) -> None:
    if is_mounted:
        machine.group(machine.mount(2), cgroup__type="domain", memory__max="max")
    if groups:
        machine.process(pid, groups)
    found = machine.limits().find(pid)
    assert found == UNKNOWN
    assert found.is_limited and not found.is_known


def test_a_kernel_without_cgroups_limits_nothing(machine: Machine) -> None:
    machine.process(5, "")
    assert machine.limits().find(5) == UNLIMITED


def test_a_process_that_moves_is_seen_at_once_and_a_changed_limit_soon(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine.mount(2)
    machine.group(root / "a", cgroup__type="domain", memory__max="max")
    machine.group(root / "b", cgroup__type="domain", memory__max="1048576")
    machine.process(5, "0::/a\n")
    found = machine.limits()
    assert found.find(5) == UNLIMITED
    machine.process(5, "0::/b\n")
    assert found.find(5).limit_bytes == 1048576
    monkeypatch.setattr(limits, "CGROUPS_KNOWN_MAX", 1)
    (root / "b" / "memory.max").write_text("max\n")
    machine.process(5, "0::/a\n")
    monkeypatch.setattr(cgroups.time, "monotonic", lambda: 1e12)
    assert found.find(5) == UNLIMITED
    machine.process(5, "0::/b\n")
    assert found.find(5) == UNLIMITED


def test_this_very_process_can_be_asked() -> None:
    found = MemoryLimits()
    assert found.find("self") == found.find(os.getpid())
    found.close()


def test_few_files_of_processes_stay_open_and_none_is_believed_after_its_process(machine: Machine) -> None:
    root = machine.mount(2)
    machine.group(root / "a", cgroup__type="domain", memory__max="max")
    found, before = machine.limits(), len(os.listdir("/proc/self/fd"))
    for pid in range(1, 200):
        machine.process(pid, "0::/a\n")
        assert found.find(pid) == UNLIMITED
    assert len(os.listdir("/proc/self/fd")) < before + 40
    found.close()
    assert len(os.listdir("/proc/self/fd")) == before
    found = MemoryLimits()
    with subprocess.Popen(["sleep", "60"]) as process:
        assert found.find(process.pid).is_known
        process.kill()
    assert found.find(process.pid) == UNKNOWN
    found.close()
