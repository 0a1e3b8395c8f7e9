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
from ckptfs_client.failures import Failed, NotInTime
from ckptfs_client.lab import namespaces, network, processes
from ckptfs_client.lab.plan import Node
from ckptfs_client.mounts import below

# The names of a daemon's processes begin so.
DAEMON = "ckptfs"
UNMOUNT_WAIT_S = limits.DRAIN_DEADLINE_S + limits.STOP_WAIT_S
LOOK_S = 0.1


def prepare(node: Node) -> None:
    """Its directories, keys and wires."""
    for directory in (node.root, node.mountpoint, node.nvme):
        directory.mkdir(exist_ok=True)
    network.connect(node)


def launch(node: Node) -> int | None:
    """Start its daemon; the descriptor on which it will say that it is ready. None when it runs already."""
    if runs(node):
        return None
    _clear(node)
    prepare(node)
    ready, theirs = os.pipe()
    try:
        command = launching.command(node.mount_name, node.mountpoint, launching.joined(node.options()), theirs)
        processes.spawn(network.place(node.plan, node.name), command, node.log, pass_fds=[theirs])
    except OSError:
        os.close(ready)
        raise
    finally:
        os.close(theirs)
    return ready


def wait_until_ready(node: Node, ready: int | None) -> None:
    """Return when its mount answers. Raises Failed with the daemon's own sentence."""
    answer = "ok" if ready is None else launching.answer(ready)
    if answer != "ok":
        what = answer.removeprefix("error: ") or "the daemon ended without a word, or did not answer in time"
        raise Failed(f"{node.name} did not start: {what}", remedy=f"its last words were: {_last_words(node)}")


def unmount(node: Node) -> None:
    """umount(8), and wait until its daemon has ended. Raises Failed, NotInTime."""
    if not answers(node):
        return
    try:
        namespaces.unmount(node.mountpoint)
    except OSError as failure:
        raise Failed(f"{node.mountpoint} cannot be unmounted: {failure.strerror}", remedy="end what uses it first") from failure
    until = time.monotonic() + UNMOUNT_WAIT_S
    while processes.named(network.place(node.plan, node.name), DAEMON):
        if time.monotonic() > until:
            raise NotInTime(f"the daemon of {node.name} is still draining", remedy="`ckptfs lab kill` ends it at once")
        threading.Event().wait(LOOK_S)


def kill(node: Node) -> int:
    """End everything that runs on it, at once, and take away its dead mount; how many processes there were."""
    ended = processes.end(network.place(node.plan, node.name))
    _clear(node)
    return ended


def wipe(node: Node, *, nvme: bool) -> None:
    """Kill it; its RAM tier is lost, and with `nvme` its NVMe tier and its catalog too."""
    kill(node)
    detach_below(node.state)
    if nvme:
        for directory in (node.state, node.nvme):
            shutil.rmtree(directory, ignore_errors=True)


def runs(node: Node) -> bool:
    """Whether its daemon runs."""
    return bool(processes.named(network.place(node.plan, node.name), DAEMON)) and answers(node)


def answers(node: Node) -> bool:
    """Whether its mount is there."""
    return node.mountpoint in below(node.root)


def detach_below(directory: Path) -> None:
    """Unmount everything below a directory, lazily."""
    for _ in range(3):
        for point in below(directory):
            namespaces.abort(point)


def forget(node: Node) -> None:
    """Remove what its daemons left where clients look for them."""
    for path in (rendezvous.registry_path, rendezvous.socket_path, rendezvous.admin_socket_path):
        with contextlib.suppress(OSError):
            path(node.mount_name).unlink(missing_ok=True)


def _clear(node: Node) -> None:
    """Take away what a dead daemon left mounted on its mountpoint."""
    for point in below(node.root):
        if point == node.mountpoint:
            namespaces.abort(point)


def _last_words(node: Node) -> str:
    with contextlib.suppress(OSError):
        lines = node.log.read_text(errors="replace").splitlines()
        return lines[-1] if lines else "none"
    return "none"
