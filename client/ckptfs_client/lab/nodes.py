"""Owns the life of single nodes of a lab: their daemons, their deaths, and what is lost with them.

If we die here: a node runs or it does not, its mount is there or dead; starting or killing it again leads to the same.

Which processes belong to a part of a lab, and their end: everything that runs in its network namespace.

That is exact where a list of pids is not: nothing else on the machine runs there, and a pid that was given to somebody else does not match.
Signals go through pidfds, so that between looking and killing no pid can change hands.
If we die here: the rest is found again in the same way.

Owns the lab's etcd: one member, in the switch's namespace, its data in DIR/etcd.

`stop` is a kill -9: what etcd has answered is on its disk. If we die here: it runs or it does not; `start` may be called again.
"""

import contextlib
import http.client
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptfs import limits, runtime_dir
from ckptfs_client import mount_helper
from ckptfs_client.errors import CommandFailed, NotInTime
from ckptfs_client.lab import network
from ckptfs_client.lab.layout import ETCD, ETCD_ADDRESS, ETCD_PORT, LabNode, Plan
from ckptfs_client.mounts import list_mountpoints_below

END_WAIT_S = 20.0
END_POLL_S = 0.05


def list_processes(namespace: Path) -> list[int]:
    """The processes in a namespace that run (zombies do not)."""
    wanted = network.get_namespace_id(namespace)
    return [pid for pid in _list_pids() if wanted is not None and _get_namespace_id(pid) == wanted]


def list_processes_named(namespace: Path, name: str) -> list[int]:
    """The processes in a namespace whose name begins so."""
    return [pid for pid in list_processes(namespace) if _get_process_name(pid).startswith(name)]


def kill_processes(namespace: Path) -> int:
    """kill -9 of everything in a namespace; how many there were. Raises Failed when something does not end.

    All of them are stopped first: nobody notices another one's death and says or does something about it, as at a node's death.
    """
    ended: set[int] = set()
    until = time.monotonic() + END_WAIT_S
    while found := list_processes(namespace):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in list_processes(namespace) if number == signal.SIGSTOP else found:
                _send_signal(pid, namespace, number)
        ended.update(found)
        _wait_for_exit(found, until)
        if time.monotonic() > until:
            raise CommandFailed(f"process {found[0]} is killed but still hangs in a system call", remedy="try again in a moment")
    return len(ended)


def spawn(namespace: Path, command: Sequence[str], log: Path, *, pass_fds: Sequence[int] = ()) -> int:
    """Start a program in a namespace, in a session of its own, its words going to `log`; its pid. Raises OSError."""

    def act() -> int:
        with open(log, "ab") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd="/", start_new_session=True, pass_fds=pass_fds,
            )  # fmt: skip
        # It shall outlive us, so nobody waits for it; this keeps Python from complaining of that.
        process.returncode = 0
        return process.pid

    return network.run_in_namespace(namespace, act)


def _list_pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _get_namespace_id(pid: int) -> tuple[int, int] | None:
    """Of a process that runs. A zombie has none any more."""
    with contextlib.suppress(OSError):
        found = os.stat(f"/proc/{pid}/ns/net")
        return found.st_dev, found.st_ino
    return None


def _get_process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _send_signal(pid: int, namespace: Path, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            if _get_namespace_id(pid) == network.get_namespace_id(namespace):
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def _wait_for_exit(pids: Sequence[int], until: float) -> None:
    """Until these have ended, or it is late."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(max(0.0, until - time.monotonic()) * 1000)
            finally:
                os.close(pidfd)
            # A child of ours stays a zombie until somebody asks for it.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


# The names of a daemon's processes begin so.
DAEMON = "ckptfs"
UNMOUNT_WAIT_S = limits.DRAIN_DEADLINE_S + limits.STOP_WAIT_S
UNMOUNT_POLL_S = 0.1


def prepare(node: LabNode) -> None:
    """Its directories, keys and wires."""
    for directory in (node.root, node.mountpoint, node.nvme):
        directory.mkdir(exist_ok=True)
    network.connect(node)


def launch(node: LabNode) -> int | None:
    """Start its daemon; the descriptor on which it will say that it is ready. None when it runs already."""
    if is_running(node):
        return None
    _abort_dead_mount(node)
    prepare(node)
    ready_fd, daemon_fd = os.pipe()
    try:
        command = mount_helper.build_daemon_command(
            node.mount_name, node.mountpoint, mount_helper.format_options(node.options()), daemon_fd
        )
        spawn(network.get_namespace_path(node.plan, node.name), command, node.log, pass_fds=[daemon_fd])
    except OSError:
        os.close(ready_fd)
        raise
    finally:
        os.close(daemon_fd)
    return ready_fd


def wait_until_ready(node: LabNode, ready_fd: int | None) -> None:
    """Return when its mount answers. Raises Failed with the daemon's own sentence."""
    answer = "ok" if ready_fd is None else mount_helper.read_ready_line(ready_fd)
    if answer != "ok":
        what = answer.removeprefix("error: ") or "the daemon ended without a word, or did not answer in time"
        raise CommandFailed(f"{node.name} did not start: {what}", remedy=f"its last words were: {_last_words(node)}")


def unmount(node: LabNode) -> None:
    """umount(8), and wait until its daemon has ended. Raises Failed, NotInTime."""
    if not is_mounted(node):
        return
    try:
        network.unmount(node.mountpoint)
    except OSError as failure:
        raise CommandFailed(f"{node.mountpoint} cannot be unmounted: {failure.strerror}", remedy="end what uses it first") from failure
    until = time.monotonic() + UNMOUNT_WAIT_S
    while list_processes_named(network.get_namespace_path(node.plan, node.name), DAEMON):
        if time.monotonic() > until:
            raise NotInTime(f"the daemon of {node.name} is still draining", remedy="`ckptfs lab kill` ends it at once")
        threading.Event().wait(UNMOUNT_POLL_S)


def kill(node: LabNode) -> int:
    """End everything that runs on it, at once, and take away its dead mount; how many processes there were."""
    ended = kill_processes(network.get_namespace_path(node.plan, node.name))
    _abort_dead_mount(node)
    return ended


def wipe(node: LabNode, *, nvme: bool) -> None:
    """Kill it; its RAM tier is lost, and with `nvme` its NVMe tier and its catalog too."""
    kill(node)
    detach_mounts_below(node.state)
    if nvme:
        for directory in (node.state, node.nvme):
            shutil.rmtree(directory, ignore_errors=True)


def is_running(node: LabNode) -> bool:
    """Whether its daemon runs."""
    return bool(list_processes_named(network.get_namespace_path(node.plan, node.name), DAEMON)) and is_mounted(node)


def is_mounted(node: LabNode) -> bool:
    """Whether its mount is there."""
    return node.mountpoint in list_mountpoints_below(node.root)


def detach_mounts_below(directory: Path) -> None:
    """Unmount everything below a directory, lazily."""
    for _ in range(3):
        for point in list_mountpoints_below(directory):
            network.abort_mount(point)


def delete_runtime_files(node: LabNode) -> None:
    """Remove what its daemons left where clients look for them."""
    for path in (runtime_dir.registry_path, runtime_dir.socket_path, runtime_dir.admin_socket_path):
        with contextlib.suppress(OSError):
            path(node.mount_name).unlink(missing_ok=True)


def _abort_dead_mount(node: LabNode) -> None:
    """Take away what a dead daemon left mounted on its mountpoint."""
    for point in list_mountpoints_below(node.root):
        if point == node.mountpoint:
            network.abort_mount(point)


def _last_words(node: LabNode) -> str:
    with contextlib.suppress(OSError):
        lines = node.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "none"
    return "none"


ETCD_READY_WAIT_S = 30.0
HEALTH_TIMEOUT_S = 2.0
ETCD_POLL_S = 0.05
CLIENT_URL = f"http://{ETCD_ADDRESS}:{ETCD_PORT}"
PEER_URL = "http://127.0.0.1:2380"


def find_etcd() -> str:
    """Where etcd is installed. Raises Failed."""
    found = shutil.which("etcd")
    if found is None:
        raise CommandFailed(
            "the lab needs etcd, which is not installed", remedy="apt install etcd-server, or another etcd from 3.4 on in PATH"
        )
    return found


def start_etcd(plan: Plan) -> None:
    """Have it running and answering. Raises Failed."""
    namespace = network.get_namespace_path(plan, network.BRIDGE)
    if not is_etcd_running(plan):
        command = [
            find_etcd(), "--name", "lab", "--data-dir", str(plan.directory / ETCD), "--listen-client-urls", CLIENT_URL,
            "--advertise-client-urls", CLIENT_URL, "--listen-peer-urls", PEER_URL, "--initial-advertise-peer-urls", PEER_URL,
            "--initial-cluster", f"lab={PEER_URL}", "--auto-compaction-retention", "1",
        ]  # fmt: skip
        spawn(namespace, command, plan.directory / "etcd.log")
    until = time.monotonic() + ETCD_READY_WAIT_S
    while not is_etcd_healthy(plan):
        if time.monotonic() > until or not is_etcd_running(plan):
            raise CommandFailed("etcd does not answer", remedy=f"{plan.directory / 'etcd.log'} says why")
        threading.Event().wait(ETCD_POLL_S)


def stop_etcd(plan: Plan) -> None:
    """Kill it; its data stay."""
    kill_processes(network.get_namespace_path(plan, network.BRIDGE))


def is_etcd_running(plan: Plan) -> bool:
    """Whether its process is there."""
    return bool(list_processes_named(network.get_namespace_path(plan, network.BRIDGE), ETCD))


def is_etcd_healthy(plan: Plan) -> bool:
    """Whether it says that it is well."""

    def ask() -> bool:
        connection = http.client.HTTPConnection(ETCD_ADDRESS, ETCD_PORT, timeout=HEALTH_TIMEOUT_S)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read(4096)
        return False

    from ckptfs_client.lab import network as namespaces

    return is_etcd_running(plan) and namespaces.run_in_namespace(network.get_namespace_path(plan, network.BRIDGE), ask)
