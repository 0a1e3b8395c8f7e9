"""Owns the life of single nodes of a lab: their daemons, their deaths, and what is lost with them.

If we die here: a node runs or it does not, its mount is there or dead; starting or killing it again leads to the same.
"""

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

from ckptfs import limits, rendezvous
from ckptfs_client import launching
from ckptfs_client.failures import CommandFailed, NotInTime
from ckptfs_client.lab import namespaces, network, processes
from ckptfs_client.lab.plan import LabNode
from ckptfs_client.mounts import list_mountpoints_below

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
        command = launching.build_daemon_command(node.mount_name, node.mountpoint, launching.format_options(node.options()), daemon_fd)
        processes.spawn(network.get_namespace_path(node.plan, node.name), command, node.log, pass_fds=[daemon_fd])
    except OSError:
        os.close(ready_fd)
        raise
    finally:
        os.close(daemon_fd)
    return ready_fd


def wait_until_ready(node: LabNode, ready_fd: int | None) -> None:
    """Return when its mount answers. Raises Failed with the daemon's own sentence."""
    answer = "ok" if ready_fd is None else launching.read_ready_line(ready_fd)
    if answer != "ok":
        what = answer.removeprefix("error: ") or "the daemon ended without a word, or did not answer in time"
        raise CommandFailed(f"{node.name} did not start: {what}", remedy=f"its last words were: {_last_words(node)}")


def unmount(node: LabNode) -> None:
    """umount(8), and wait until its daemon has ended. Raises Failed, NotInTime."""
    if not is_mounted(node):
        return
    try:
        namespaces.unmount(node.mountpoint)
    except OSError as failure:
        raise CommandFailed(f"{node.mountpoint} cannot be unmounted: {failure.strerror}", remedy="end what uses it first") from failure
    until = time.monotonic() + UNMOUNT_WAIT_S
    while processes.list_processes_named(network.get_namespace_path(node.plan, node.name), DAEMON):
        if time.monotonic() > until:
            raise NotInTime(f"the daemon of {node.name} is still draining", remedy="`ckptfs lab kill` ends it at once")
        threading.Event().wait(UNMOUNT_POLL_S)


def kill(node: LabNode) -> int:
    """End everything that runs on it, at once, and take away its dead mount; how many processes there were."""
    ended = processes.kill_processes(network.get_namespace_path(node.plan, node.name))
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
    return bool(processes.list_processes_named(network.get_namespace_path(node.plan, node.name), DAEMON)) and is_mounted(node)


def is_mounted(node: LabNode) -> bool:
    """Whether its mount is there."""
    return node.mountpoint in list_mountpoints_below(node.root)


def detach_mounts_below(directory: Path) -> None:
    """Unmount everything below a directory, lazily."""
    for _ in range(3):
        for point in list_mountpoints_below(directory):
            namespaces.abort_mount(point)


def delete_runtime_files(node: LabNode) -> None:
    """Remove what its daemons left where clients look for them."""
    for path in (rendezvous.registry_path, rendezvous.socket_path, rendezvous.admin_socket_path):
        with contextlib.suppress(OSError):
            path(node.mount_name).unlink(missing_ok=True)


def _abort_dead_mount(node: LabNode) -> None:
    """Take away what a dead daemon left mounted on its mountpoint."""
    for point in list_mountpoints_below(node.root):
        if point == node.mountpoint:
            namespaces.abort_mount(point)


def _last_words(node: LabNode) -> str:
    with contextlib.suppress(OSError):
        lines = node.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "none"
    return "none"
