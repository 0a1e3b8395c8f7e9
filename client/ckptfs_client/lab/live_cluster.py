"""`LiveCluster` and `LiveNode`: the running nodes of a lab, and what campaigns and tests do to them.

Crash safety: all state is the lab's; `ckptfs lab stop` ends it.
"""

import contextlib
import errno
import functools
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ckptfs_client.client import Client
from ckptfs_client.errors import ClientError, NotInTime
from ckptfs_client.lab import network, nodes
from ckptfs_client.lab.laboratory import Laboratory
from ckptfs_client.lab.layout import ETCD, LabNode
from ckptfs_client.mounts import find
from ckptfs_client.render import describe_progress

WAIT_S = 120.0
POLL_S = 0.02
LOG_LINES = 40
Tree = dict[str, bytes | int | None]


def wait_until(condition: Callable[[], object], timeout_s: float, what: Callable[[], str]) -> None:
    """Wait until a condition holds. Raises NotInTime with `what` should have become true."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise NotInTime(f"not so within {timeout_s:.0f} s: {what()}")
        threading.Event().wait(POLL_S)


class LiveNode:
    """One node: its mount, its log, its processes, its link. `kill` to `slow` are those of the lab."""

    def __init__(self, laboratory: Laboratory, node: LabNode) -> None:
        self._laboratory = laboratory
        self._node = node
        self.name, self.path, self.state, self.address = node.name, node.mountpoint, node.state, node.address
        self.namespace = node.namespace
        self.kill = functools.partial(laboratory.kill, node.name)
        self.wipe = functools.partial(laboratory.wipe, node.name)
        self.start = functools.partial(laboratory.start_node, node.name)
        self.cut = functools.partial(laboratory.cut, node.name)
        self.slow = functools.partial(laboratory.slow, node.name)

    def pid(self, role: str) -> int:
        """Return the process of its supervisor, mount or mover; 0 if there is none."""
        with contextlib.suppress(OSError, ValueError):
            return int(json.loads((self.state / "processes.json").read_text())[role]["pid"])
        return 0

    def replace(self, role: str) -> None:
        """Kill (-9) its mount or mover process, and wait until another one has taken its place."""
        wait_until(lambda: self.pid(role), WAIT_S, lambda: f"{self.name} has a {role} process")
        old = self.pid(role)
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: self.pid(role) not in (0, old), WAIT_S, lambda: f"{self.name} has another {role} process")

    def kill_supervisor(self) -> None:
        """Kill (-9) its supervisor, and wait until the rest of the daemon has ended by itself."""
        os.kill(self.pid("supervisor"), signal.SIGKILL)
        self._wait_for_end()

    def end(self) -> None:
        """Send SIGTERM, as a service manager does, and wait until the daemon has drained and ended."""
        os.kill(self.pid("supervisor"), signal.SIGTERM)
        self._wait_for_end()

    def _wait_for_end(self) -> None:
        wait_until(lambda: not nodes.list_processes_named(self.namespace, nodes.DAEMON), WAIT_S, lambda: f"the daemon of {self.name} ends")

    def stand_still(self) -> None:
        """Stop all of its processes, as when its virtual machine is moved."""
        for pid in self.pids():
            os.kill(pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Undo `stand_still`."""
        for pid in self.pids():
            os.kill(pid, signal.SIGCONT)

    def reach_etcd(self, *, up: bool) -> None:
        """Cut it off from etcd only, or not any more. A node that never ran reaches it."""
        with contextlib.suppress(OSError, ClientError):
            network.set_etcd_route(self._node, up=up)

    def pids(self) -> list[int]:
        """Return its processes."""
        return nodes.list_processes(self.namespace)

    def is_island(self) -> bool:
        """Return True if it works without etcd, or still has to publish what it did then."""
        with Client(find(self.path)) as client:
            return bool(client.get_cluster().island)

    def count_alive(self) -> int:
        """Return the number of living nodes, as this one sees them."""
        with Client(find(self.path)) as client:
            return sum(member.alive for member in client.get_cluster().members)

    @property
    def log(self) -> str:
        """The log of its daemon."""
        return self._node.log.read_text(errors="replace") if self._node.log.exists() else ""


class LiveCluster:
    """All nodes of a lab, in order of rank.

    `pfs` is the directory that they share; it exists if the lab has a PFS.
    """

    def __init__(self, laboratory: Laboratory) -> None:
        self.laboratory = laboratory
        plan = laboratory.load_plan()
        self.root, self.pfs, self.etcd_members = plan.directory, plan.pfs or plan.directory / "pfs", plan.etcd_members
        self.nodes = [self.build_node(node) for node in plan.all_nodes()]

    def build_node(self, node: LabNode) -> LiveNode:
        """Return the handle of one node."""
        return LiveNode(self.laboratory, node)

    def __getitem__(self, index: int) -> LiveNode:
        return self.nodes[index]

    def mend(self) -> None:
        """Undo all faults, and wait until no node is an island."""
        self.laboratory.refuse_pfs(refused=False)
        for node in self.nodes:
            node.reach_etcd(up=True)
        self.resume_etcd()
        self.laboratory.heal()
        wait_until(lambda: not any(node.is_island() for node in self.nodes), WAIT_S, lambda: f"no node is an island\n{self.tails()}")

    def stop_etcd(self) -> None:
        """Kill all members of etcd."""
        self.laboratory.stop_etcd()

    def resume_etcd(self) -> None:
        """Let all members of etcd go on that stand still."""
        self.signal_etcd(signal.SIGCONT)

    def signal_etcd(self, number: signal.Signals) -> None:
        """Send a signal to all members of etcd."""
        for pid in nodes.list_processes_named(self.laboratory.load_plan().switch, ETCD):
            os.kill(pid, number)

    def signal_member(self, member: int, number: signal.Signals) -> None:
        """Kill, stop or resume one member of etcd."""
        pid = nodes.find_etcd_members(self.laboratory.load_plan()).get(member)
        if pid is not None:
            os.kill(pid, number)

    def settle(self, timeout_s: float = WAIT_S) -> None:
        """Wait until the PFS shows what all nodes show."""
        for node in self.nodes:
            left = ""
            with Client(find(node.path)) as client:
                try:
                    for progress in client.drain(timeout_s):
                        left = f"; left: {describe_progress(progress)}"
                except NotInTime as failure:
                    raise NotInTime(f"{node.name}: drain: {failure.args[0]}{left}", remedy=failure.remedy) from None

    def tree(self, root: Path) -> Tree:
        """Return {relative path: bytes, None for a directory, or the errno of reading it} of all below `root`.

        Names of ckptfs itself are left out.
        """
        found: Tree = {}
        for directory, directories, files in os.walk(root):
            directories[:] = sorted(name for name in directories if not name.startswith(".ckptfs"))
            where = Path(directory).relative_to(root)
            found |= {str(where / name): None for name in directories}
            found |= {str(where / name): _read(Path(directory, name)) for name in files if not name.startswith(".ckptfs.")}
        return found

    def tails(self) -> str:
        """Return the ends of the logs of all nodes."""
        return "\n".join(f"--- {node.name}\n" + "\n".join(node.log.splitlines()[-LOG_LINES:]) for node in self.nodes)


def _read(path: Path) -> bytes | int:
    """Return the bytes of a file, or the errno if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as failure:
        return int(failure.errno or errno.EIO)


def get_level(path: Path) -> str:
    """Return the level of a file now. Raises OSError."""
    return os.getxattr(path, "user.ckptfs.level").decode()
