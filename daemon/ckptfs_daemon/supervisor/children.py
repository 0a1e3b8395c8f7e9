"""The supervisor's child processes: start, assignment, messages, end; and when a role is restarted.

A child is a new interpreter that imports its modules and waits on its link for its assignment. A spare has no role yet, so it replaces a
dead mount process in milliseconds.

The restart policy is pure: times in, decisions out. A child that was ready and was killed (SIGKILL by a person, a test or the OOM killer)
is restarted at once, however often that happens. A child that dies of itself, or before it was ready, waits longer each time. Kills before
it was ready delay the restart by less than a second and never end a role that was ready once: repeated kills must not end the mount (P8).

Crash safety: if the supervisor dies, its children see the end of their links and exit.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import ckptfs
import ckptfs_daemon
from ckptfs import limits, procfs
from ckptfs_daemon import ipc
from ckptfs_daemon.ipc import Assignment

PLACES = tuple(dict.fromkeys(str(Path(package.__path__[0]).parent) for package in (ckptfs, ckptfs_daemon)))
"""The directories of our packages."""
LONG_LIFE_S = 10.0
"""A child that lived this long did not fail to start."""

FIRST_FAILURES_MAX = 5
"""Failures in a row before a role was ever ready. The cause is then permanent, and a user waits for the mount."""


class Child:
    """One child process. `assigned_at` and `last_message_at` are times of the monotonic clock."""

    def __init__(self, role: str, command: list[str] | None = None) -> None:
        """Start the process. `command` replaces the program in tests; `--link FD` is appended to it."""
        self.role = role
        self.is_ready = False
        self.assigned_at = 0.0
        self.last_message_at = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.link = ours
            self.process = subprocess.Popen(
                [*(command or [sys.executable, "-P", "-m", "ckptfs_daemon", "--child", role]), "--link", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),), env=build_environment(), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.link.setblocking(False)
        self.started_ticks = procfs.get_start_ticks(self.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_assigned(self) -> bool:
        return self.assigned_at > 0

    def assign(self, assignment: Assignment, wake_socket: socket.socket, fuse_fds: tuple[int, ...]) -> None:
        """Send the child its role. If it has died, its link shows that."""
        self.role = assignment.role
        self.assigned_at = self.last_message_at = time.monotonic()
        with contextlib.suppress(OSError):
            ipc.send_assignment(self.link, assignment, wake_socket, fuse_fds)

    def stop(self) -> None:
        self._send(ipc.STOP)

    def drain(self) -> None:
        """Ask the mover to drain and go on working."""
        self._send(ipc.DRAIN)

    def send_log_level(self, level: str) -> None:
        """Set the child's log level. A child without a role gets the level with its role."""
        if self.is_assigned:
            self._send(ipc.LOG_LEVEL + level.encode())

    def refuse_upgrade(self, reason: str) -> None:
        """Tell the mover that the supervisor does not hand over."""
        self._send((ipc.UPGRADE + reason.encode())[: ipc.LINK_MESSAGE_BYTES_MAX])

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(OSError):
            self.link.send(message)

    def read_messages(self) -> tuple[list[bytes], bool]:
        """Return the messages on the link, and whether the child lives: it has not ended, nor is about to."""
        found: list[bytes] = []
        while True:
            try:
                message = self.link.recv(ipc.LINK_MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return found, True
            except OSError:
                return found, False
            if not message:
                return found, False
            self.last_message_at = time.monotonic()
            self.is_ready = self.is_ready or message == ipc.READY
            found.append(message)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    def reap(self, patience_s: float) -> int | None:
        """Return the exit code of a child that closed its link (or -signal); kill it after `patience_s`.

        Returns None if it hangs in the kernel. The link is closed then, too: nothing comes from it any more.
        """
        try:
            code = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
            try:
                code = self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self.link.close()
                return None
        self.link.close()
        return code

    def is_stuck(self) -> bool:
        """Return True if the process was killed, but threads that hang in the kernel keep its link open."""
        return procfs.is_dying(self.pid)


def build_environment(places: Iterable[str] = PLACES) -> dict[str, str]:
    """Return the environment of a process of ours with the directories of our packages, or others instead.

    It does not search its directory. gRPC writes no lines of its own, such as one for each failed TLS handshake, unless the user asked for
    them.
    """
    known = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and place not in PLACES]
    return {"GRPC_VERBOSITY": "NONE", **os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*places, *known]))}


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """The deaths of one role: their number, the failures in a row, and when it died of itself recently."""

    restarts: int = 0
    failures: int = 0
    deaths: tuple[float, ...] = ()


def record_death(history: RestartHistory, *, now: float, lived_s: float, ready: bool, killed: bool) -> RestartHistory:
    history = replace(history, restarts=history.restarts + 1)
    if ready and killed:
        return replace(history, failures=0)
    if killed:
        return replace(history, failures=max(history.failures, min(history.failures + 1, FIRST_FAILURES_MAX)))
    recent = tuple(at for at in history.deaths if now - at < limits.RESTARTS_WINDOW_S)
    failures = 0 if ready and lived_s >= LONG_LIFE_S else history.failures + 1
    return replace(history, failures=failures, deaths=(*recent, now))


def get_restart_delay_s(history: RestartHistory) -> float:
    if history.failures == 0:
        return 0.0
    return float(min(limits.RESTART_LAST_S, limits.RESTART_FIRST_S * 2 ** min(history.failures - 1, 16)))


def must_give_up(history: RestartHistory, *, ever_ready: bool) -> str:
    """Return why a restart makes no sense, or an empty string."""
    if history.failures >= (limits.FAILURES_MAX if ever_ready else FIRST_FAILURES_MAX):
        return f"it failed {history.failures} times in a row"
    if len(history.deaths) > limits.RESTARTS_MAX:
        return f"it died {len(history.deaths)} times in {limits.RESTARTS_WINDOW_S:g} s"
    return ""
