"""The supervisor's child processes: start, messages, end; and when a role is restarted.

A child is a fork of the supervisor, which has imported the modules of all roles: it serves within milliseconds, and has the version of the
supervisor even if the installation was replaced meanwhile. It starts with one thread and without descriptors but those of its role.

The restart policy is pure: times in, decisions out. A child that was ready and was killed (SIGKILL by a person, a test or the OOM killer)
is restarted at once, however often that happens. A child that dies of itself, or before it was ready, waits longer each time. Kills before
it was ready delay the restart by less than a second and never end a role that was ready once: repeated kills must not end the mount (P8).

Crash safety: if the supervisor dies, its children see the end of their links and exit.
"""

import contextlib
import gc
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from ckptfs import disk, limits, procfs
from ckptfs_daemon import ipc
from ckptfs_daemon.ipc import ChildSetup, ServeRole

log = logging.getLogger(__name__)

LONG_LIFE_S = 10.0
"""A child that lived this long did not fail to start."""

FIRST_FAILURES_MAX = 5
"""Failures in a row before a role was ever ready. The cause is then permanent, and a user waits for the mount."""

REAP_POLL_S = 0.002
HELD_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


class Child:
    """One child process. `started_at` and `last_message_at` are times of the monotonic clock."""

    def __init__(self, setup: ChildSetup, link: socket.socket, serve: ServeRole) -> None:
        """Start the process, which exits with what `serve` returns. Raises OSError.

        `link`: the other end of that in `setup`.
        """
        self.role = setup.role
        self.is_ready = False
        self.started_at = self.last_message_at = time.monotonic()
        self.link = link
        self.link.setblocking(False)
        with setup.link:
            self.pid = fork(lambda: serve(setup), setup.list_descriptors())
        self.started_ticks = procfs.get_start_ticks(self.pid)

    def send(self, message: bytes) -> None:
        """Send a message of `ipc`, as much of it as the link takes."""
        with contextlib.suppress(OSError):
            self.link.send(message[: ipc.LINK_MESSAGE_BYTES_MAX])

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
            os.kill(self.pid, signal.SIGKILL)

    def reap(self, patience_s: float) -> int | None:
        """Return the exit code of a child that closed its link (or -signal); kill it after `patience_s`.

        Returns None if it hangs in the kernel; to be called again then. The link is closed all the same: nothing comes from it any more.
        """
        code = self._wait(patience_s)
        if code is None:
            self.kill()
            code = self._wait(patience_s)
        self.link.close()
        return code

    def _wait(self, patience_s: float) -> int | None:
        until = time.monotonic() + patience_s
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= until:
                return None
            time.sleep(REAP_POLL_S)

    def is_stuck(self) -> bool:
        """Return True if the process was killed, but threads that hang in the kernel keep its link open."""
        return procfs.is_dying(self.pid)


def fork(serve: Callable[[], int], descriptors: Iterable[int]) -> int:
    """Return the pid of a fork that exits with what `serve` returns, or with 1. Raises OSError.

    It keeps `descriptors`, stdout and stderr. It has default signals and a session of its own.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _run_fork(serve, {*descriptors})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    return pid


def _run_fork(serve: Callable[[], int], descriptors: set[int]) -> NoReturn:
    code = 1
    try:
        gc.freeze()  # The objects of the parent stay: the end of one might close a descriptor of this process.
        _leave_parent(descriptors)
        code = serve()
    except BaseException:
        log.exception("a process of the daemon ends")
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        # Threads that hang (on a PFS) must not keep the process.
        os._exit(code)


def _leave_parent(descriptors: set[int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in HELD_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.setsid()
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {1, 2, *descriptors}:
        with contextlib.suppress(OSError):
            os.close(fd)
    os.open(os.devnull, os.O_RDONLY)  # The first free descriptor: stdin.


def run_forked(act: Callable[[], None]) -> None:
    """Run `act` in a fork and wait for its end. Raises what `act` raised.

    Libraries that `act` uses may start threads, and this process must have none of them when it forks again.
    """
    read_fd, write_fd = os.pipe()

    def report() -> int:
        failure: Exception | None = None
        try:
            act()
        except Exception as raised:
            failure = raised
        os.write(write_fd, pickle.dumps(failure))
        return 0

    with open(read_fd, "rb") as pipe:
        with disk.closing(write_fd):
            pid = fork(report, [write_fd])
        outcome = pipe.read()
    os.waitpid(pid, 0)
    failure = pickle.loads(outcome) if outcome else ChildProcessError("a process of the daemon was killed at its start")
    if failure is not None:
        raise failure


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
