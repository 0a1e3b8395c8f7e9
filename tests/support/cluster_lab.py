"""A cluster of real daemons for tests: a lab (`ckptfs_client.lab`) in a directory of its own, looked at from outside.

Fixtures: `make_lab(nodes=3, factor=2, ...)` and `lab` (three nodes, two copies), one for a module, since a lab costs seconds. A test fails
when a node's log holds a WARNING, ERROR or Traceback line that it did not announce with `expect_warning`.
If we die here: the next run finds /tmp/ckptfs-lab-PID-* of processes that have ended, and ends those labs.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.client import Client, open_client
from ckptfs_client.errors import ClientError
from ckptfs_client.lab import network, nodes
from ckptfs_client.lab.laboratory import Laboratory
from ckptfs_client.lab.layout import ETCD, LabNode
from ckptfs_client.lab.nodes import list_processes, list_processes_named, spawn
from ckptfs_client.mounts import find
from daemon_under_test import COMPLAINT, ENVIRONMENT, ckptfs, deadline, environment, eventually

PREFIX = "ckptfs-lab-"
TEST_S = 300.0
WAIT_S = 120.0
LOG_LINES = 40
LABS = pytest.StashKey[list["ClusterUnderTest"]]()
_numbers = itertools.count(1)


class NodeUnderTest:
    """One node: its mount, its log, its life."""

    def __init__(self, cluster: "ClusterUnderTest", node: LabNode) -> None:
        self._cluster = cluster
        self._node = node
        self.name = node.name
        self.path = node.mountpoint
        self.state = node.state
        self.address = node.address

    def kill(self) -> None:
        self._cluster.laboratory.kill(self.name)

    def wipe(self, *, nvme: bool = False) -> None:
        """It dies, and loses its RAM; with `nvme` everything."""
        self._cluster.laboratory.wipe(self.name, nvme=nvme)

    def start(self) -> None:
        self._cluster.laboratory.start_node(self.name)

    def restart(self) -> None:
        self._cluster.laboratory.restart_node(self.name)

    def pid(self, role: str) -> int:
        """Of its supervisor, mount or mover process; 0 while there is none."""
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads((self.state / "processes.json").read_text())[role]["pid"])
        return 0

    def replace(self, role: str) -> None:
        """SIGKILL its mount or mover process; returns when another one has taken its place."""
        old = eventually(lambda: self.pid(role), what=f"a {role} process")
        os.kill(old, signal.SIGKILL)
        eventually(lambda: self.pid(role) not in (0, old), what=f"another {role} process")

    def end(self) -> None:
        """SIGTERM, as a service manager does; returns when its daemon has drained and ended."""
        os.kill(self.pid("supervisor"), signal.SIGTERM)
        there = network.get_namespace_path(self._node.plan, self.name)
        eventually(lambda: not list_processes_named(there, nodes.DAEMON), WAIT_S, f"the daemon of {self.name} ends")

    def stand_still(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGCONT)

    def cut(self) -> None:
        self._cluster.laboratory.cut(self.name)

    def reach_etcd(self, *, up: bool) -> None:
        """Cut it off from etcd only, or not any more. A node that never ran reaches it."""
        with contextlib.suppress(OSError, ClientError):
            network.set_etcd_route(self._node, up=up)

    def slow(self, bits_per_s: int) -> None:
        self._cluster.laboratory.slow(self.name, bits_per_s)

    def mend(self) -> None:
        self._cluster.laboratory.heal(self.name)

    def run(self, command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
        """A program on this node, in its network."""
        there = network.get_namespace_path(self._node.plan, self.name)

        def act() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                list(map(str, command)), capture_output=True, text=True, check=False, env=environment(), **{"timeout": WAIT_S, **options}
            )

        return network.run_in_namespace(there, act)

    def begin(self, command: Sequence[str], log: Path) -> None:
        spawn(network.get_namespace_path(self._node.plan, self.name), command, log)

    def end_programs(self, word: str) -> None:
        """kill -9 of the programs on it whose command line holds that word."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        return list_processes(network.get_namespace_path(self._node.plan, self.name))

    def command(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return ckptfs(*arguments, check=check, timeout=WAIT_S)

    def is_island(self) -> bool:
        """Whether it works by itself, and has something to tell the others."""
        with Client(find(self.path)) as client:
            return bool(client.get_cluster().island)

    def abort(self) -> None:
        network.abort_mount(self.path)

    @property
    def log(self) -> str:
        return self._node.log.read_text(errors="replace") if self._node.log.exists() else ""


class ClusterUnderTest:
    """A lab; `nodes` in order of rank, `pfs` the directory that they share. Options as of mount -o, for every node."""

    def __init__(self, nodes: int = 3, factor: int = 2, *, with_pfs: bool = True, etcd_members: int = 1, **options: str) -> None:
        self.root = Path(f"/tmp/{PREFIX}{os.getpid()}-{next(_numbers)}")
        self.words: list[str] = []
        self.laboratory = Laboratory(self.root, say=self.words.append)
        self._expected: list[re.Pattern[str]] = []
        self.pfs = self.root / "pfs"
        self.etcd_members = etcd_members
        plan = self.laboratory.start(nodes, factor, self.pfs if with_pfs else None, {"ram": "512M", **options}, etcd_members)
        self.nodes = [NodeUnderTest(self, node) for node in plan.all_nodes()]

    def __getitem__(self, index: int) -> NodeUnderTest:
        return self.nodes[index]

    def mend(self) -> None:
        for node in self.nodes:
            node.reach_etcd(up=True)
        self.resume_etcd()
        self.laboratory.heal()
        eventually(lambda: not any(node.is_island() for node in self.nodes), WAIT_S, f"no node is an island\n{self.tails()}")

    def stop_etcd(self) -> None:
        self.laboratory.stop_etcd()

    def pause_etcd(self) -> None:
        self._signal_etcd(signal.SIGSTOP)

    def resume_etcd(self) -> None:
        self._signal_etcd(signal.SIGCONT)

    def _signal_etcd(self, number: signal.Signals) -> None:
        for pid in list_processes_named(network.get_namespace_path(self.laboratory.load_plan(), network.BRIDGE), ETCD):
            os.kill(pid, number)

    def signal_member(self, member: int, number: signal.Signals) -> None:
        """Kill, stop or resume one member of etcd."""
        pid = nodes.find_etcd_members(self.laboratory.load_plan()).get(member)
        if pid is not None:
            os.kill(pid, number)

    @property
    def etcd_data(self) -> Path:
        return self.root / ETCD

    def start_etcd(self) -> None:
        self.laboratory.start_etcd()

    def close(self) -> None:
        self.laboratory.stop()

    def abort(self) -> None:
        for node in self.nodes:
            node.abort()

    # --- what it shows ------------------------------------------------------------------------------------------------

    def tree(self, root: Path) -> dict[str, bytes | int | None]:
        """{relative path: bytes, None for a directory, or the errno of reading it} of all below `root`, without ckptfs's own names."""
        found: dict[str, bytes | int | None] = {}
        for directory, directories, files in os.walk(root):
            directories[:] = sorted(name for name in directories if not name.startswith(".ckptfs"))
            where = Path(directory).relative_to(root)
            found |= {str(where / name): None for name in directories}
            found |= {str(where / name): _bytes(Path(directory, name)) for name in files if not name.startswith(".ckptfs.")}
        return found

    def settle(self, timeout: float = WAIT_S) -> None:
        """Wait until the PFS shows what all nodes show."""
        for node in self.nodes:
            node.command("drain", node.path, "--deadline", f"{timeout:.0f}s")

    # --- its logs -----------------------------------------------------------------------------------------------------

    def expect_warning(self, pattern: str) -> None:
        """Announce that log lines which match `pattern` (a regular expression) may appear on any node."""
        self._expected.append(re.compile(pattern))

    def complaints(self) -> list[str]:
        """WARNING, ERROR and Traceback lines of all logs that no test announced."""
        found = [f"{node.name}: {line}" for node in self.nodes for line in node.log.splitlines() if COMPLAINT.search(line)]
        return [line for line in found if not any(expected.search(line) for expected in self._expected)]

    def tails(self) -> str:
        return "\n".join(f"--- {node.name}\n" + "\n".join(node.log.splitlines()[-LOG_LINES:]) for node in self.nodes)


def _bytes(path: Path) -> bytes | int:
    """What is in a file; the errno where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as failure:
        return int(failure.errno or -1)


def wait_for(path: Path, level: str, timeout: float = WAIT_S) -> None:
    """Wait until a file, or a directory with all below, has a level."""
    client, inode = open_client(path)
    with client:
        for _ in client.wait(inode, level, timeout):
            pass


def level(path: Path) -> str:
    """The level of a file now."""
    return os.getxattr(path, "user.ckptfs.level").decode()


def living(path: Path) -> int:
    """How many nodes live, as the one with this mount sees it."""
    with Client(find(path)) as client:
        return sum(member.alive for member in client.get_cluster().members)


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
