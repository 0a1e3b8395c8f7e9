"""The nodes of a lab and its etcd: starting, killing, and the loss of their data.

The processes of a node, or of etcd, are those that run in its network namespace. That is exact where a list of pids is not: nothing else
on the machine runs in it, and a reused pid does not match. Signals are sent through pidfds, so no pid is reused between look and kill.

etcd runs in the switch's namespace, with the data of its first member in DIR/etcd, of the second in DIR/etcd2. Stopping it is a kill -9.
Crash safety: a node or etcd runs or does not; starting or killing it again leads to the same state.
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
from collections.abc import Sequence
from pathlib import Path

from ckptfs import disk, libc, limits, mount_record, mountpoint_guard, runtime_dir
from ckptfs.bounded_waits import wait_ready
from ckptfs_client import mount_helper
from ckptfs_client.errors import CommandFailed, NotInTime
from ckptfs_client.lab import network
from ckptfs_client.lab.layout import ETCD, ETCD_ADDRESS, LabNode, Plan
from ckptfs_client.mounts import list_mountpoints_below

DAEMON = "ckptfs"
"""The prefix of the names of a daemon's processes."""
UNMOUNT_WAIT_S = limits.DRAIN_DEADLINE_S_MIN + limits.STOP_WAIT_S
UNMOUNT_POLL_S = 0.1
END_WAIT_S = 20.0
ETCD_READY_WAIT_S = 30.0
HEALTH_TIMEOUT_S = 2.0
ETCD_POLL_S = 0.05


def launch(node: LabNode) -> int | None:
    """Start the daemon; return the descriptor on which it reports readiness, or None if it runs already."""
    if is_running(node):
        return None
    _abort_dead_mount(node)
    for directory in (node.root, node.mountpoint, node.nvme):
        directory.mkdir(exist_ok=True)
    network.connect(node)
    ready_fd, daemon_fd = os.pipe()
    try:
        options = mount_helper.format_options(node.options())
        command = mount_helper.build_daemon_command(node.mount_name, node.mountpoint, options, daemon_fd)
        spawn(node.namespace, command, node.log, pass_fds=[daemon_fd])
    except OSError:
        os.close(ready_fd)
        raise
    finally:
        os.close(daemon_fd)
    return ready_fd


def wait_until_ready(node: LabNode, ready_fd: int | None) -> None:
    """Wait until the mount answers. Raises CommandFailed with the error of the daemon."""
    answer = "ok" if ready_fd is None else mount_helper.read_ready_line(ready_fd)
    if answer != "ok":
        what = answer.removeprefix("error: ") or "the daemon ended without a message, or did not answer in time"
        raise CommandFailed(f"{node.name} did not start: {what}", remedy=f"the last line of its log: {_read_last_log_line(node)}")


def unmount(node: LabNode) -> None:
    """Unmount a node, and wait until its daemon has ended. Raises CommandFailed, NotInTime."""
    if not is_mounted(node):
        return
    try:
        libc.unmount(node.mountpoint)
    except OSError as failure:
        raise CommandFailed(
            f"{node.mountpoint} cannot be unmounted: {failure.strerror}", remedy="end the programs that use it"
        ) from failure
    until = time.monotonic() + UNMOUNT_WAIT_S
    while list_processes_named(node.namespace, DAEMON):
        if time.monotonic() > until:
            raise NotInTime(f"the daemon of {node.name} is still draining", remedy="`ckptfs lab kill` ends it at once")
        threading.Event().wait(UNMOUNT_POLL_S)


def kill(node: LabNode) -> int:
    """Kill every process of a node and detach its dead mount; return the number of processes."""
    ended = kill_processes(node.namespace)
    _abort_dead_mount(node)
    return ended


def wipe(node: LabNode, *, nvme: bool) -> None:
    """Kill a node and delete its RAM tier; with `nvme` its NVMe tier and catalog too."""
    kill(node)
    detach_mounts_below(node.state)
    if nvme:
        open_mountpoint(node)
        for directory in (node.state, node.nvme):
            shutil.rmtree(directory, ignore_errors=True)


def is_running(node: LabNode) -> bool:
    """Return True if the daemon runs and its mount exists."""
    return bool(list_processes_named(node.namespace, DAEMON)) and is_mounted(node)


def is_mounted(node: LabNode) -> bool:
    return node.mountpoint in list_mountpoints_below(node.root)


def detach_mounts_below(directory: Path) -> None:
    for _ in range(3):
        for point in list_mountpoints_below(directory):
            network.abort_mount(point)


def delete_runtime_files(node: LabNode) -> None:
    """Delete the sockets and the registry entry of a node's daemon."""
    for path in (runtime_dir.registry_path, runtime_dir.socket_path, runtime_dir.admin_socket_path):
        with contextlib.suppress(OSError):
            path(node.mount_name).unlink(missing_ok=True)


def open_mountpoint(node: LabNode) -> None:
    """Take away the guard of a node's mountpoint, so that it can be deleted. Nothing may be mounted there."""
    record = mount_record.load(node.state)
    if record is not None and record.guard is not None:
        with contextlib.suppress(OSError):
            mountpoint_guard.clear(record.guard)


def _abort_dead_mount(node: LabNode) -> None:
    for point in list_mountpoints_below(node.root):
        if point == node.mountpoint:
            network.abort_mount(point)


def _read_last_log_line(node: LabNode) -> str:
    with contextlib.suppress(OSError):
        lines = node.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "none"
    return "none"


# --- etcd -------------------------------------------------------------------------------------------------------------


def find_etcd() -> str:
    """Return the path of the etcd program. Raises CommandFailed."""
    found = shutil.which("etcd")
    if found is None:
        remedy = "apt install etcd-server, or put etcd 3.4 or later in PATH"
        raise CommandFailed("the lab needs etcd, which is not installed", remedy=remedy)
    return found


def start_etcd(plan: Plan) -> None:
    """Start each member of etcd that does not run, and wait until all are healthy. Raises CommandFailed.

    It does not sync its files: a lab ends with its machine, and its nodes share one disk, which would make etcd look ill.
    """
    namespace = plan.switch
    running = find_etcd_members(plan)
    peer_urls = [f"http://127.0.0.1:{port + 1}" for port in plan.etcd_ports]
    all_members = ",".join(map("=".join, zip(plan.etcd_names, peer_urls, strict=True)))
    for member, (name, port, peer_url) in enumerate(zip(plan.etcd_names, plan.etcd_ports, peer_urls, strict=True)):
        url = f"http://{ETCD_ADDRESS}:{port}"
        if member not in running:
            command = [
                find_etcd(), "--name", name, "--data-dir", str(plan.directory / name), "--listen-client-urls", url,
                "--advertise-client-urls", url, "--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url,
                "--initial-cluster", all_members, "--auto-compaction-retention", "1", "--unsafe-no-fsync",
            ]  # fmt: skip
            spawn(namespace, command, plan.directory / "etcd.log")
    until = time.monotonic() + ETCD_READY_WAIT_S
    while not all(_is_member_healthy(plan, port) for port in plan.etcd_ports):
        if time.monotonic() > until or not list_processes(namespace):
            raise CommandFailed("etcd does not answer", remedy=f"{plan.directory / 'etcd.log'} says why")
        threading.Event().wait(ETCD_POLL_S)


def find_etcd_members(plan: Plan) -> dict[int, int]:
    """Return {number of the member, from 0: its process} of those that run."""
    found = {}
    for pid in list_processes_named(plan.switch, ETCD):
        with contextlib.suppress(OSError, ValueError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found[plan.etcd_names.index(words[words.index("--name") + 1])] = pid
    return found


def is_etcd_healthy(plan: Plan) -> bool:
    """Return True if a member of etcd answers that most of them are healthy."""
    return bool(find_etcd_members(plan)) and any(_is_member_healthy(plan, port) for port in plan.etcd_ports)


def _is_member_healthy(plan: Plan, port: int) -> bool:
    def ask() -> bool:
        connection = http.client.HTTPConnection(ETCD_ADDRESS, port, timeout=HEALTH_TIMEOUT_S)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read(4096)
        return False

    return bool(network.run_in_namespace(plan.switch, ask))


# --- processes --------------------------------------------------------------------------------------------------------


def list_processes(namespace: Path) -> list[int]:
    """Return the running processes in a namespace, without zombies."""
    wanted = network.get_namespace_id(namespace)
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid in pids if wanted is not None and network.get_namespace_id(Path(f"/proc/{pid}/ns/net")) == wanted]


def list_processes_named(namespace: Path, name: str) -> list[int]:
    """Return the processes in a namespace whose name starts with `name`."""
    return [pid for pid in list_processes(namespace) if _get_process_name(pid).startswith(name)]


def kill_processes(namespace: Path) -> int:
    """Kill (-9) all processes in a namespace; return their number. Raises CommandFailed if one stays.

    All are stopped first, so that none reacts to the death of another, as if the power failed.
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


def spawn(namespace: Path, command: Sequence[str], log: Path, *, pass_fds: Sequence[int] = ()) -> None:
    """Start a program in a namespace and session of its own, with its output in `log`."""

    def act() -> None:
        with open(log, "ab") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd="/", start_new_session=True, pass_fds=pass_fds,
            )  # fmt: skip
        # The program outlives the command. Without this, Python warns that it was not waited for.
        process.returncode = 0

    network.run_in_namespace(namespace, act)


def _get_process_name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _send_signal(pid: int, namespace: Path, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError), disk.closing(os.pidfd_open(pid)) as pidfd:
        if network.get_namespace_id(Path(f"/proc/{pid}/ns/net")) == network.get_namespace_id(namespace):
            signal.pidfd_send_signal(pidfd, number)


def _wait_for_exit(pids: Sequence[int], until: float) -> None:
    """Wait until the processes have ended, or until the time has come."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            with disk.closing(os.pidfd_open(pid)) as pidfd:
                wait_ready(pidfd, select.POLLIN, until - time.monotonic())
            # A child of this process stays a zombie until it is waited for.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
