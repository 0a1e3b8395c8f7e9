"""Owns the supervisor's child processes: starting them, giving them a role, hearing from them, and noticing when they end.

A child is a new interpreter that imports what it needs and waits for its assignment on its link. A spare has no role yet,
and so takes a dead mount's place in milliseconds.
If we die here: the children see their link's end and end themselves.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ckptfs
import ckptfs_daemon
from ckptfs_daemon import inherited, lock
from ckptfs_daemon.inherited import Assignment

LINK_MESSAGE_BYTES_MAX = 64


class Child:
    """One process. `ready`: it serves; `assigned_at`, `heard_at`: on the monotonic clock."""

    def __init__(self, role: str, command: list[str] | None = None) -> None:
        """Start it. `command`: another program to start, for tests; the number of its link's descriptor is appended."""
        self.role = role
        self.is_ready = False
        self.was_killed = False
        self.requested_log_level = ""
        self.assigned_at = 0.0
        self.last_message_at = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.link = ours
            self.process = subprocess.Popen(
                [*(command or [sys.executable, "-P", "-m", "ckptfs_daemon", "--child", role]), "--link", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), env=_environment(), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.link.setblocking(False)
        self.started_ticks = lock.get_start_ticks(self.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_assigned(self) -> bool:
        return self.assigned_at > 0

    def assign(self, assignment: Assignment, wake_socket: socket.socket, fuse_fd: int) -> None:
        """Give it its role. When it has died meanwhile, that shows on the link."""
        self.role = assignment.role
        self.assigned_at = self.last_message_at = time.monotonic()
        with contextlib.suppress(OSError):
            inherited.send_assignment(self.link, assignment, wake_socket, fuse_fd)

    def stop(self) -> None:
        """Ask it to come to an end."""
        with contextlib.suppress(OSError):
            self.link.send(inherited.STOP)

    def send_log_level(self, level: str) -> None:
        """Let it log at least that. One without a role yet learns it with its role."""
        if self.is_assigned:
            with contextlib.suppress(OSError):
                self.link.send(inherited.LOG_LEVEL + level.encode())

    def read_messages(self) -> bool:
        """Read what it has said. False: it has ended, or is about to."""
        while True:
            try:
                message = self.link.recv(LINK_MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not message:
                return False
            self.last_message_at = time.monotonic()
            self.is_ready = self.is_ready or message == inherited.READY
            if message.startswith(inherited.LOG_LEVEL):
                self.requested_log_level = message.removeprefix(inherited.LOG_LEVEL).decode()

    def kill(self) -> None:
        """kill -9."""
        self.was_killed = True
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    def reap(self, patience_s: float) -> int | None:
        """Its exit code (negative: the signal), killing it when it has closed its link and does not end; None: it hangs in the kernel."""
        try:
            code = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            try:
                code = self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                return None
        self.link.close()
        return code


def _environment() -> dict[str, str]:
    """Ours, with the place of our packages, since the child does not search the working directory. Unless somebody asked for it gRPC does
    not write a line of its own to the log whenever a stranger fails to introduce himself.
    """
    places = [str(Path(package.__path__[0]).parent) for package in (ckptfs, ckptfs_daemon)]
    known = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    return {"GRPC_VERBOSITY": "NONE", **os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*places, *known]))}
