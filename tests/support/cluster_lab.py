"""A cluster of real daemons for tests: a lab (`ckptfs_client.lab`) in a directory of its own, looked at from outside.

Fixtures: `make_lab(nodes=3, factor=2, ...)` and `lab` (three nodes, two copies), one for a module, since a lab costs seconds. A test fails
when a node's log holds a WARNING, ERROR or Traceback line that it did not announce with `expect_warning`.
If we die here: the next run finds /tmp/ckptfs-lab-PID-* of processes that have ended, and ends those labs.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.client import open_client
from ckptfs_client.errors import ClientError
from ckptfs_client.lab import network
from ckptfs_client.lab.laboratory import WAIT_S, Laboratory, LiveCluster, LiveNode
from ckptfs_client.lab.laboratory import get_level as level
from ckptfs_client.lab.layout import ETCD, LabNode
from ckptfs_client.lab.nodes import spawn
from daemon_under_test import COMPLAINT, ENVIRONMENT, ckptfs, deadline, environment, eventually

PREFIX = "ckptfs-lab-"
TEST_S = 300.0
LABS = pytest.StashKey[list["ClusterUnderTest"]]()
RECORD_START = re.compile(r"\n(?=\d{4}-\d\d-\d\d |Traceback )")
_numbers = itertools.count(1)


def wait_for(path: Path, level: str, timeout_s: float = WAIT_S) -> None:
    """Wait until a file, or a directory with all below, has a level. Raises NotInTime."""
    client, inode = open_client(path)
    with client:
        for _ in client.wait(inode, level, timeout_s):
            pass


class NodeUnderTest(LiveNode):
    """A node on which tests run programs."""

    def __init__(self, laboratory: Laboratory, node: LabNode) -> None:
        super().__init__(laboratory, node)
        self._laboratory = laboratory

    def run(self, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
        """A program on this node, in its network."""

        def act() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                list(map(str, command)), capture_output=True, text=True, check=False, env=environment(), **{"timeout": WAIT_S, **options}
            )

        return network.run_in_namespace(self.namespace, act)

    def begin(self, command: Sequence[str], log: Path) -> None:
        spawn(self.namespace, command, log)

    def restart(self) -> None:
        """Unmount it cleanly, and mount it again."""
        self._laboratory.restart_node(self.name)

    def mend(self) -> None:
        """Undo all faults of it."""
        self._laboratory.heal(self.name)

    def abort(self) -> None:
        """Detach its mount; system calls that hang in it fail."""
        network.abort_mount(self.path)

    def end_programs(self, word: str) -> None:
        """kill -9 of the programs on it whose command line holds that word."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)

    def command(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return ckptfs(*arguments, check=check, timeout=WAIT_S)


class ClusterUnderTest(LiveCluster):
    """A lab of the test's own. Options as of mount -o, for every node."""

    nodes: list[NodeUnderTest]  # type: ignore[assignment]

    def __init__(self, nodes: int = 3, factor: int = 2, *, with_pfs: bool = True, etcd_members: int = 1, **options: str) -> None:
        root = Path(f"/tmp/{PREFIX}{os.getpid()}-{next(_numbers)}")
        self.words: list[str] = []
        laboratory = Laboratory(root, say=self.words.append)
        self._expected: list[re.Pattern[str]] = []
        laboratory.start(nodes, factor, root / "pfs" if with_pfs else None, {"ram": "512M", **options}, etcd_members)
        super().__init__(laboratory)

    def start_etcd(self) -> None:
        """Start the members of etcd that do not run."""
        self.laboratory.start_etcd()

    def stop_etcd(self) -> None:
        """Kill all members of etcd."""
        self.laboratory.stop_etcd()

    def pause_etcd(self) -> None:
        """Stop all members of etcd with SIGSTOP: they answer nothing."""
        self.signal_etcd(signal.SIGSTOP)

    def resume_etcd(self) -> None:
        """Let them go on."""
        self.signal_etcd(signal.SIGCONT)

    def close(self) -> None:
        """Stop the lab and delete it."""
        self.laboratory.stop()

    def abort(self) -> None:
        """Detach all mounts; system calls that hang in them fail."""
        for node in self.nodes:
            node.abort()

    def build_node(self, node: LabNode) -> NodeUnderTest:
        return NodeUnderTest(self.laboratory, node)

    def __getitem__(self, index: int) -> NodeUnderTest:
        return self.nodes[index]

    @property
    def etcd_data(self) -> Path:
        return self.root / ETCD

    def expect_warning(self, pattern: str) -> None:
        """Announce that log lines which match `pattern` (a regular expression) may appear on any node."""
        self._expected.append(re.compile(pattern))

    def complaints(self) -> list[str]:
        """WARNING and ERROR messages and whole tracebacks of all logs that no test announced."""
        found = [f"{node.name}: {record}" for node in self.nodes for record in RECORD_START.split(node.log) if COMPLAINT.search(record)]
        return [record for record in found if not any(expected.search(record) for expected in self._expected)]


def limited(cluster: ClusterUnderTest, seconds: float = TEST_S) -> contextlib.AbstractContextManager[None]:
    """End what hangs in the mounts when the block takes longer: the test fails instead of hanging."""
    return deadline(cluster, seconds)


def sweep() -> None:
    """End labs that test processes left which were killed."""
    for root in Path("/tmp").glob(f"{PREFIX}*-*"):
        pid = root.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(ClientError, OSError):
                Laboratory(root).stop()


def unusable() -> str:
    """Why there can be no lab here; empty where there can."""
    if os.geteuid() != 0:
        return "a lab needs root"
    if not Path("/dev/fuse").exists():
        return "/dev/fuse is missing"
    return "" if shutil.which("etcd") else "etcd is not installed"


@pytest.fixture(scope="module")
def make_lab() -> Iterator[Callable[..., ClusterUnderTest]]:
    """Makes labs: `make_lab(nodes=5, factor=3, fsync="clique")`; all end with the module."""
    if reason := unusable():
        pytest.skip(f"NO LAB HERE: {reason}")
    sweep()
    with contextlib.ExitStack() as made, pytest.MonkeyPatch.context() as patch:
        # The lab's daemons are those of this tree, whatever is installed.
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)

        def make(nodes: int = 3, factor: int = 2, **options: Any) -> ClusterUnderTest:
            cluster = ClusterUnderTest(nodes, factor, **options)
            made.callback(cluster.close)
            return cluster

        yield make


@pytest.fixture(scope="module")
def shared_lab(make_lab: Callable[..., ClusterUnderTest]) -> ClusterUnderTest:
    """Three nodes, two copies, for the tests of a module."""
    return make_lab()


@pytest.fixture
def lab(shared_lab: ClusterUnderTest, request: pytest.FixtureRequest) -> Iterator[ClusterUnderTest]:
    """The module's lab, all of it well at the test's beginning."""
    request.node.stash[LABS] = [shared_lab]
    shared_lab.mend()
    known = set(shared_lab.complaints())
    with limited(shared_lab):
        yield shared_lab
    complaints = [line for line in shared_lab.complaints() if line not in known]
    assert not complaints, complaints


@pytest.fixture
def places(lab: ClusterUnderTest, request: pytest.FixtureRequest) -> list[Path]:
    """A directory of the test's own, as each node shows it."""
    name = request.node.name
    (lab[0].path / name).mkdir()
    return [node.path / name for node in lab.nodes]


__all__ = ["ClusterUnderTest", "NodeUnderTest", "eventually", "lab", "level", "limited", "make_lab", "places", "shared_lab", "wait_for"]
