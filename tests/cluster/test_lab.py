"""G7: `ckptfs lab` as a user runs it: every command, what it refuses, and that nothing is left, also of one that was killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.mounts import list_mountpoints_below
from cluster_lab import sweep, unusable
from daemon_under_test import environment, eventually

COMMAND = [sys.executable, "-m", "ckptfs_client", "lab"]
Run = Callable[..., Any]


def left_of(directory: Path) -> list[str]:
    """The command lines of processes that name the directory."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " "))
    return [line for line in found if str(directory) in line]


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    if reason := unusable():
        pytest.skip(f"NO LAB HERE: {reason}")
    sweep()
    place = Path(f"/tmp/ckptfs-lab-{os.getpid()}-cli")
    yield place
    subprocess.run([*COMMAND, "stop", "--dir", place], env=environment(), timeout=120, check=True)


@pytest.fixture
def run(directory: Path) -> Run:
    """`run("kill", "node1")`: the command's standard output; `code` is what it must exit with."""

    def act(*arguments: str, code: int = 0) -> str:
        result = subprocess.run(
            [*COMMAND, *arguments], env=environment(CKPTFS_LAB=str(directory)), capture_output=True, text=True, timeout=120, check=False
        )
        assert result.returncode == code, f"{arguments}: exit {result.returncode}\n{result.stdout}{result.stderr}"
        return result.stdout if code == 0 else result.stderr

    return act


def status(run: Run) -> dict[str, Any]:
    """{node: (runs, link, slowed)}, and etcd."""
    found = json.loads(run("status", "--json"))
    return {node["name"]: (node["runs"], node["link"], node["slowed"]) for node in found["nodes"]} | {"etcd": found["etcd"]["answers"]}


WELL = (True, "up", False)


def test_a_life(run: Run, directory: Path) -> None:
    """Start, every fault, heal, stop; each of them twice without harm."""
    assert "there is no lab" in run("status", code=1)
    interfaces = os.listdir("/sys/class/net")
    assert "lab needs" not in run("start", "--nodes", "2", "-o", "ram=64M")
    assert "already" in run("start", code=1)
    assert status(run) == {"node1": WELL, "node2": WELL, "etcd": True}

    there = run("exec", "node1", "--", "sh", "-c", "ls /sys/class/net; echo $CKPTFS_MOUNT; echo x > $CKPTFS_MOUNT/file")
    assert there.split()[-1] == f"{directory}/node1/mnt"
    assert (directory / "node1" / "mnt" / "file").read_text() == "x\n"
    assert run("exec", "node1", "--", "sh", "-c", "exit 7", code=7) == ""

    for _ in range(2):
        run("cut", "node1")
        run("slow", "node2", "--rate", "10mbit")
        run("stop", "etcd")
    assert status(run) == {"node1": (True, "down", False), "node2": (True, "up", True), "etcd": False}
    for _ in range(2):
        run("kill", "node1")
        run("wipe", "node2", "--nvme")
    assert status(run) == {"node1": (False, "down", False), "node2": (False, "up", True), "etcd": False}
    assert not [point for point in list_mountpoints_below(directory) if point.name == "mnt"]
    assert not (directory / "node2" / "state").exists()

    for _ in range(2):
        run("heal")
        assert status(run) == {"node1": WELL, "node2": WELL, "etcd": True}
    run("start-node", "node3")
    assert status(run) == {"node1": WELL, "node2": WELL, "node3": WELL, "etcd": True}
    assert "node5" in run("start-node", "node5", code=2)
    assert "not a rate" in run("slow", "node1", "--rate", "fast", code=2)
    assert os.listdir("/sys/class/net") == interfaces, "the machine's own are not touched"

    for _ in range(2):
        run("stop")
        assert not directory.exists()
        assert left_of(directory) == []
        assert list_mountpoints_below(directory) == []


def test_a_start_that_was_killed_is_taken_away(run: Run, directory: Path) -> None:
    """Wherever it was killed: `stop` finds what there is by looking."""
    process = subprocess.Popen(
        [*COMMAND, "start", "--nodes", "2", "-o", "ram=64M"], env=environment(CKPTFS_LAB=str(directory)), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    eventually((directory / "node2" / "log").exists, what="the daemons are being started")
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    run("stop")
    assert not directory.exists()
    assert left_of(directory) == []
    assert list_mountpoints_below(directory) == []


def test_an_option_that_no_daemon_knows_leaves_nothing(run: Run, directory: Path) -> None:
    """P11: the daemon's own sentence is what one is told."""
    assert "unknown option 'colour'" in run("start", "--nodes", "1", "--factor", "1", "-o", "colour=red", code=1)
    assert not directory.exists()
