"""Owns the supervisor's child processes: starting them, giving them a role, hearing from them, and noticing when they end.

A child is a new interpreter that imports what it needs and waits for its assignment on its link. A spare has no role yet,
and so takes a dead mount's place in milliseconds.
If we die here: the children see their link's end and end themselves.

When a child that died is started again, and when that is given up. Pure: times come in, decisions go out.

A child that was ready and was killed (SIGKILL: a person, a test, the OOM killer) is started again at once, however often that
happens. One that dies of itself, or before it was ready, waits longer each time. Kills before it was ready make it wait for less than a
second, and never end what once was ready: whoever kills it again and again must not end the mount (P8).
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import ckptfs
import ckptfs_daemon
from ckptfs import limits
from ckptfs_daemon import ipc
from ckptfs_daemon.ipc import Assignment
from ckptfs_daemon.supervisor import state_directory

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
        self.started_ticks = state_directory.get_start_ticks(self.pid)

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
            ipc.send_assignment(self.link, assignment, wake_socket, fuse_fd)

    def stop(self) -> None:
        """Ask it to come to an end."""
        with contextlib.suppress(OSError):
            self.link.send(ipc.STOP)

    def send_log_level(self, level: str) -> None:
        """Let it log at least that. One without a role yet learns it with its role."""
        if self.is_assigned:
            with contextlib.suppress(OSError):
                self.link.send(ipc.LOG_LEVEL + level.encode())

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
            self.is_ready = self.is_ready or message == ipc.READY
            if message.startswith(ipc.LOG_LEVEL):
                self.requested_log_level = message.removeprefix(ipc.LOG_LEVEL).decode()

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


LONG_LIFE_S = 10.0
"""A child that has lived so long has not failed to start."""

FIRST_FAILURES_MAX = 5
"""How often the first one may fail: then something is wrong that does not pass, and somebody waits for the mount."""


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """The deaths of one role: how many in all, how many failures in a row, and when it died of itself lately."""

    restarts: int = 0
    failures: int = 0
    deaths: tuple[float, ...] = ()


def record_death(history: RestartHistory, *, now: float, lived_s: float, ready: bool, killed: bool) -> RestartHistory:
    """The history after one more death."""
    history = replace(history, restarts=history.restarts + 1)
    if ready and killed:
        return replace(history, failures=0)
    if killed:
        return replace(history, failures=max(history.failures, min(history.failures + 1, FIRST_FAILURES_MAX)))
    recent = tuple(at for at in history.deaths if now - at < limits.RESTARTS_WINDOW_S)
    failures = 0 if ready and lived_s >= LONG_LIFE_S else history.failures + 1
    return replace(history, failures=failures, deaths=(*recent, now))


def get_restart_delay_s(history: RestartHistory) -> float:
    """How long to wait before the next start."""
    if history.failures == 0:
        return 0.0
    return float(min(limits.RESTART_LAST_S, limits.RESTART_FIRST_S * 2 ** min(history.failures - 1, 16)))


def must_give_up(history: RestartHistory, *, ever_ready: bool) -> str:
    """Why it makes no sense to start it again; empty when it does."""
    if history.failures >= (limits.FAILURES_MAX if ever_ready else FIRST_FAILURES_MAX):
        return f"it failed {history.failures} times in a row"
    if len(history.deaths) > limits.RESTARTS_MAX:
        return f"it died {len(history.deaths)} times in {limits.RESTARTS_WINDOW_S:g} s"
    return ""
