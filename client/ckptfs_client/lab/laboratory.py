"""`Laboratory`: start and stop of a lab, faults of its nodes and network; for the command and tests.

`LiveCluster` and `LiveNode` are handles on what runs in a lab, for campaigns and tests. All state is the lab's.

Invariants:
- Every change may be repeated.
- One command at a time changes a lab: each change holds a lock on its directory.

Crash safety: `stop` finds everything by looking; `start` refuses a directory that is not empty.
"""

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptfs import disk, mountpoint_guard, runtime_dir
from ckptfs.errors import CkptfsError
from ckptfs_client.errors import ClientError, CommandFailed, NotInTime, NotPermitted
from ckptfs_client.json_answers import LabJson, LabNodeJson
from ckptfs_client.lab import layout, network, nodes
from ckptfs_client.lab.layout import LabNode, Plan
from ckptfs_client.mounts import find, list_mountpoints_below
from ckptfs_client.render import describe_progress

if TYPE_CHECKING:
    from ckptfs.protocol import control_pb2 as pb

LOCK_WAIT_S = 120.0
LOCK_POLL_S = 0.1
WAIT_S = 120.0
# A drain lasts as long as it gets on, and a busy node has much to write back.
DRAIN_WAIT_S = 600.0
POLL_S = 0.02
LOG_LINES = 40
Say = Callable[[str], None]
Tree = dict[str, bytes | int | None]


class Laboratory:
    """The lab in a directory. `say` gets the progress messages. Raises ClientError."""

    def __init__(self, directory: Path = layout.DIRECTORY, say: Say = lambda _: None) -> None:
        if os.geteuid() != 0:
            raise NotPermitted("a lab needs root: it makes network namespaces and mounts", remedy="use sudo")
        self.directory = Path(os.path.realpath(directory))
        self._say = say

    # --- the lab ------------------------------------------------------------------------------------------------------

    def start(
        self, count: int, factor: int, pfs: Path | None = None, options: Mapping[str, str] | None = None, etcd_members: int = 1
    ) -> Plan:
        """Create a lab with all its nodes running, without `pfs` without a PFS. Undo all if that fails."""
        nodes.find_etcd()
        self._require_empty_directory()
        shared = None if pfs is None else Path(os.path.realpath(pfs))
        found = layout.build_plan(self.directory, count, factor, shared, dict(options or {}), etcd_members)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o711)
        with self._lock():
            layout.save(found)
            try:
                if found.pfs is not None:
                    found.pfs.mkdir(exist_ok=True)
                network.make_switch(found)
                self._say("starting etcd")
                nodes.start_etcd(found)
                self._make_keys(found)
                self._start_nodes(found.all_nodes())
            except BaseException:
                self._delete_everything()
                raise
        return found

    def stop(self) -> bool:
        """Stop and delete everything. Returns False if there was no lab."""
        if not self.directory.exists():
            return False
        if not self._is_lab():
            raise CommandFailed(f"{self.directory} is not a lab", remedy="name the directory of one with --dir DIR")
        with self._lock():
            self._say("ending every process, mount and namespace of the lab")
            self._delete_everything()
        return True

    def load_plan(self) -> Plan:
        """Return the plan of the lab. Raises CommandFailed if there is none."""
        return layout.load(self.directory)

    def get_status(self) -> LabJson:
        """Return the state of etcd, and of each node its daemon, mount and link."""
        found = self.load_plan()
        links = network.list_link_states(found)
        return {
            "directory": str(found.directory), "cluster": found.cluster, "factor": found.factor, "pfs": str(found.pfs or ""),
            "etcd": {"address": f"{layout.ETCD_ADDRESS}:{layout.ETCD_PORT}", "answers": nodes.is_etcd_healthy(found)},
            "nodes": [_build_node_status(node, links) for node in found.all_nodes()],
        }  # fmt: skip

    # --- nodes --------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Kill (-9) every process of a node."""
        node = self.load_plan().node(name)
        with self._lock():
            self._say(f"{name}: killed, {nodes.kill(node)} processes")

    def wipe(self, name: str, *, nvme: bool = False) -> None:
        """Kill a node and delete its RAM tier; with `nvme` also its NVMe tier and catalog."""
        node = self.load_plan().node(name)
        with self._lock():
            nodes.wipe(node, nvme=nvme)
            self._say(f"{name}: killed, its RAM{', NVMe and catalog are' if nvme else ' is'} lost")

    def start_node(self, *names: str) -> None:
        """Start nodes that do not run. The name after the last one adds a node."""
        with self._lock():
            found = self.load_plan()
            for name in names:
                if name not in found.nodes:
                    found = found.add_node(name)
                    layout.save(found)
                    self._make_keys(found)
            self._start_nodes([found.node(name) for name in names])

    def restart_node(self, name: str) -> None:
        """Unmount a node cleanly, as a service manager does, and mount it again."""
        node = self.load_plan().node(name)
        with self._lock():
            nodes.unmount(node)
            self._start_nodes([node])

    # --- the network --------------------------------------------------------------------------------------------------

    def cut(self, name: str) -> None:
        """Cut a node off from all others and from etcd."""
        network.set_link(self.load_plan().node(name), up=False)
        self._say(f"{name}: its link is down")

    def slow(self, name: str, bits_per_s: int) -> None:
        """Limit the bandwidth of a node in both directions."""
        network.set_rate(self.load_plan().node(name), bits_per_s)
        self._say(f"{name}: its link carries {bits_per_s / 1e6:g} Mbit/s")

    def heal(self, *names: str) -> None:
        """Bring nodes back: link up, no limit, daemon running. Without names: all nodes and etcd."""
        found = self.load_plan()
        chosen = [found.node(name) for name in names or found.nodes]
        if not names:
            self.start_etcd()
        links = network.list_link_states(found)
        for node in chosen:
            if node.name in links:
                network.set_link(node, up=True)
                network.set_rate(node, None)
        self.start_node(*(node.name for node in chosen))

    def start_etcd(self) -> None:
        """Start etcd if it does not run."""
        found = self.load_plan()
        with self._lock():
            nodes.start_etcd(found)
        self._say("etcd answers")

    def stop_etcd(self) -> None:
        """Kill etcd; its data stay."""
        found = self.load_plan()
        with self._lock():
            nodes.kill_processes(found.switch)
        self._say("etcd is killed")

    def refuse_pfs(self, *, refused: bool) -> bool:
        """Have every directory of the PFS refuse new names, also root's, or not any more.

        Returns False if the filesystem below cannot do that, or there is no PFS.
        """
        pfs = self.load_plan().pfs
        done = pfs is not None and pfs.exists()
        for directory, _, _ in os.walk(pfs or ""):
            try:
                mountpoint_guard.set_immutable(Path(directory), immutable=refused)
            except FileNotFoundError:
                continue
            except OSError:
                done = False
        return done

    def execute(self, name: str, command: Sequence[str]) -> None:
        """Replace this process by a program in the node's network, with CKPTFS_MOUNT set. Does not return."""
        node = self.load_plan().node(name)
        try:
            network.enter_namespace(node.namespace)
            os.execvpe(command[0], list(command), {**os.environ, "CKPTFS_MOUNT": str(node.mountpoint)})
        except OSError as failure:
            raise CommandFailed(f"{command[0]} cannot be run on {name}: {failure.strerror}") from failure

    # --- inside -------------------------------------------------------------------------------------------------------

    def _start_nodes(self, chosen: Sequence[LabNode]) -> None:
        """Start daemons, all at once, and wait for each."""
        begun = [(node, nodes.launch(node)) for node in chosen]
        failures = []
        for node, ready in begun:
            try:
                nodes.wait_until_ready(node, ready)
                self._say(f"{node.name}: {node.mountpoint}")
            except CommandFailed as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def _make_keys(self, found: Plan) -> None:
        """Issue a certificate to each node that has none, from the lab's own CA."""
        from ckptfs.clique import certificates

        home = self.directory / "keys"
        try:
            if not home.exists():
                certificates.init(home, found.cluster)
            for node in found.all_nodes():
                if not node.keys.exists():
                    certificates.issue(home, node.name, [node.address])
        except CkptfsError as failure:
            raise CommandFailed(str(failure), remedy=failure.remedy) from failure

    def _require_empty_directory(self) -> None:
        if self.directory.exists() and any(self.directory.iterdir()):
            if self._is_lab():
                raise CommandFailed(f"there is a lab in {self.directory} already", remedy="`ckptfs lab stop` deletes it")
            raise CommandFailed(f"{self.directory} is not empty, and not a lab", remedy="name another directory with --dir DIR")

    def _is_lab(self) -> bool:
        return (self.directory / layout.PLAN_NAME).exists()

    def _delete_everything(self) -> None:
        """Delete processes, mounts, namespaces and files; the plan last, so that this can be repeated."""
        net = self.directory / "net"
        for namespace in net.iterdir() if net.is_dir() else ():
            nodes.kill_processes(namespace)
        # System calls that hang in a dead mount fail. The namespaces are mounts below the directory, too.
        nodes.detach_mounts_below(self.directory)
        left = list_mountpoints_below(self.directory)
        if left:
            raise CommandFailed(f"{left[0]} cannot be unmounted", remedy="end the programs that use it, then run `ckptfs lab stop` again")
        with contextlib.suppress(ClientError):
            for node in self.load_plan().all_nodes():
                nodes.delete_runtime_files(node)
                nodes.open_mountpoint(node)
            self.refuse_pfs(refused=False)
        for path in self.directory.iterdir():
            if path.name != layout.PLAN_NAME:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (self.directory / layout.PLAN_NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.directory.rmdir()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with disk.closing(os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            until = time.monotonic() + LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise NotInTime("another command is changing this lab", remedy="try again when it has ended") from None
                    time.sleep(LOCK_POLL_S)
            yield


def _build_node_status(node: LabNode, links: Mapping[str, tuple[bool, bool]]) -> LabNodeJson:
    up, slowed = links.get(node.name, (False, False))
    found = nodes.list_processes(node.namespace)
    return {
        "name": node.name, "address": node.address, "mountpoint": str(node.mountpoint), "log": str(node.log),
        "runs": nodes.is_running(node), "mounted": nodes.is_mounted(node), "link": "up" if up else "down",
        "slowed": slowed, "processes": len(found),
    }  # fmt: skip


# --- handles on what runs ---------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], object], timeout_s: float, what: Callable[[], str]) -> None:
    """Wait until a condition holds. Raises NotInTime with `what` should have become true."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise NotInTime(f"still not so after {timeout_s:.0f} s: {what()}")
        threading.Event().wait(POLL_S)


class LiveNode:
    """One node: its mount, its log, its processes, its link. `kill` to `slow` are those of the lab."""

    def __init__(self, laboratory: Laboratory, node: LabNode) -> None:
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
        return runtime_dir.get_pid(self.state, role)

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
        self._wait_for_end(DRAIN_WAIT_S)

    def _wait_for_end(self, timeout_s: float = WAIT_S) -> None:
        wait_until(
            lambda: not nodes.list_processes_named(self.namespace, nodes.DAEMON), timeout_s, lambda: f"the daemon of {self.name} ends"
        )

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
        return nodes.list_processes(self.namespace)

    def is_island(self) -> bool:
        """Return True if it works without etcd, or still has to publish what it did then."""
        return bool(self._get_cluster().island)

    def count_alive(self) -> int:
        """Return the number of living nodes, as this one sees them."""
        return sum(member.alive for member in self._get_cluster().members)

    def _get_cluster(self) -> "pb.Cluster":
        from ckptfs_client.client import Client

        with Client(find(self.path)) as client:
            return client.get_cluster()

    @property
    def log(self) -> str:
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
        return LiveNode(self.laboratory, node)

    def __getitem__(self, index: int) -> LiveNode:
        return self.nodes[index]

    def mend(self) -> None:
        """Undo all faults, and wait until no node is an island."""
        self.laboratory.refuse_pfs(refused=False)
        for node in self.nodes:
            node.reach_etcd(up=True)
        self.signal_etcd(signal.SIGCONT)
        self.laboratory.heal()
        wait_until(lambda: not any(node.is_island() for node in self.nodes), WAIT_S, lambda: f"no node is an island\n{self.tails()}")

    def signal_etcd(self, number: signal.Signals, *members: int) -> None:
        """Kill, stop or resume these members of etcd, or all, as far as they run."""
        running = nodes.find_etcd_members(self.laboratory.load_plan())
        for pid in [running[member] for member in members or running if member in running]:
            os.kill(pid, number)

    def settle(self, timeout_s: float = WAIT_S) -> None:
        """Wait until the PFS shows what all nodes show."""
        from ckptfs_client.client import Client

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
