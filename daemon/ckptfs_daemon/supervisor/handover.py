"""The handover of a running mount to another supervisor: the trial of its program, and execve(2).

A supervisor becomes its successor by execve(2). That keeps the process and three descriptors, which `HANDOVER` in the environment names:
the FUSE connection, the table of requests, and the lock of the state directory. systemd hands over the first two after a restart. The
successor goes on as after a crash: it starts new children, and the kernel holds the requests of applications meanwhile.

Before anything is touched, the program of the successor says in a process of its own whether it would take over (`try_successor`,
`require_takeover`). A successor may be an older or a newer version, so what is read here of another process is read with care.

Crash safety: a supervisor that is killed in the middle leaves what any killed supervisor leaves.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ckptfs
import ckptfs_daemon
from ckptfs import __version__, disk, limits, runtime_dir
from ckptfs.catalog import database, identity
from ckptfs.clique import certificates
from ckptfs.config import Config
from ckptfs.errors import InvalidArgument
from ckptfs.tiers.pfs_identity import require_pfs_of_catalog
from ckptfs_daemon.fuse import connection, shim_build
from ckptfs_daemon.ipc import Successor
from ckptfs_daemon.supervisor.systemd import take_stored_descriptors

log = logging.getLogger(__name__)

PLACES = tuple(dict.fromkeys(str(Path(package.__path__[0]).parent) for package in (ckptfs, ckptfs_daemon)))
"""The directories of our packages."""

HANDOVER = "CKPTFS_HANDOVER"
TRIAL_WAIT_S = limits.UPGRADE_WAIT_S - 15.0
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})
disk.declare_labels("handover:execute", "handover:take")


@dataclass(frozen=True, slots=True)
class Handed:
    """What another supervisor handed over. `lock_fd` is -1 if systemd kept the others."""

    fuse_fd: int
    table_fd: int
    lock_fd: int


def get_own_successor() -> Successor:
    """Return this installation as it is on the disk now."""
    return Successor(sys.executable, PLACES)


class Trial:
    """The question whether a successor would take over, asked in a thread."""

    def __init__(
        self, successor: Successor, arguments: list[str], table_fd: int, ask_for_restart: Callable[[], bool] | None = None
    ) -> None:
        """`arguments`: of this daemon.

        `ask_for_restart` says whether systemd restarts the daemon; without that the successor is not tried.
        """
        self.successor = successor
        self.is_for_restart = ask_for_restart is not None
        self.is_wanted = True
        self.refusal = ""
        self._ask_for_restart = ask_for_restart
        self._thread = threading.Thread(target=self._run, args=(arguments, table_fd), name="trial", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self, arguments: list[str], table_fd: int) -> None:
        self.is_wanted = self._ask_for_restart is None or self._ask_for_restart()
        if self.is_wanted:
            self.refusal = try_successor(self.successor, arguments, table_fd)


def try_successor(successor: Successor, arguments: list[str], table_fd: int) -> str:
    """Return why the successor would not take over, or an empty string."""
    command = [*_build_command(successor, arguments), "--trial", str(table_fd)]
    try:
        done = subprocess.run(
            command, pass_fds=(table_fd,), env=build_environment(successor.places), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=TRIAL_WAIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"the other version does not say within {TRIAL_WAIT_S:g} s whether it can take over"
    except OSError as failure:
        return f"the other version cannot be started: {failure}"
    if done.returncode == 0:
        return ""
    words = (done.stderr or done.stdout).strip().splitlines()
    return f"the other version cannot take over: {words[-1] if words else f'its trial ended with {done.returncode}'}"


def build_environment(places: Iterable[str]) -> dict[str, str]:
    """Return the environment of a daemon that has our packages from the directories `places`."""
    known = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place and place not in PLACES]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*places, *known]))}


def require_takeover(config: Config, table_fd: int) -> None:
    """Refuse what a takeover of the parent's mount by this process would fail at.

    Changes nothing. Raises CkptfsError, OSError, ValueError or KeyError.
    """
    kept = connection.restore(-1, table_fd)
    if kept.mountpoint != config.mountpoint:
        raise InvalidArgument(f"the configuration now names the mountpoint {config.mountpoint}, and the mount is at {kept.mountpoint}")
    mounted = connection.find_mount_at(kept.mountpoint)
    if mounted is None or not kept.is_mounted():
        raise InvalidArgument(f"{kept.mountpoint} is detached: it ends when its last open file is closed")
    kinds = {True: "read-only", False: "writable"}
    is_read_only = "ro" in mounted.options.split(",")
    if is_read_only != config.is_read_only:
        raise InvalidArgument(f"the mount is {kinds[is_read_only]}, and the configuration now says {kinds[config.is_read_only]}")
    if runtime_dir.get_pid(config.state, "supervisor") not in (0, os.getppid()):
        raise InvalidArgument(f"the state directory {config.state} is not that of the running daemon")
    shim_build.ensure()
    with database.load_migrated_copy(config.state / "catalog.db") as db:
        require_pfs_of_catalog(db, config)
        identity.require_cluster(db, config.cluster, config.state)
    if config.cluster is not None and config.keys is not None:
        certificates.load_for(config.keys, config.node, config.cluster)


def execute(successor: Successor, arguments: list[str], handed: Handed, environment: dict[str, str]) -> None:
    """Become the successor. Returns only if that fails; then nothing has changed."""
    names = {"version": __version__, "pid": os.getpid(), "fuse": handed.fuse_fd, "table": handed.table_fd, "lock": handed.lock_fd}
    descriptors = (handed.fuse_fd, handed.table_fd, handed.lock_fd)
    for fd in descriptors:
        os.set_inheritable(fd, True)
    try:
        command = _build_command(successor, arguments)
        environment = {**build_environment(successor.places), **environment, HANDOVER: json.dumps(names)}
        disk.act("handover:execute", os.execve, command[0], command, environment)
    except OSError as failure:
        log.error("%s: cannot be executed: %s; this version goes on", successor.python, failure)
    for fd in descriptors:
        os.set_inheritable(fd, False)


def hold_stop_signals() -> None:
    """Hold back stop signals until `receive_stop_signals`, in this process or in its successor."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def receive_stop_signals() -> None:
    """Receive stop signals, and those that were held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def take() -> Handed | None:
    """Return what a predecessor in this process, or systemd, handed over."""
    try:
        named: Any = json.loads(os.environ.pop(HANDOVER, "{}"))
        if named.get("pid") == os.getpid():
            handed = disk.act("handover:take", Handed, int(named["fuse"]), int(named["table"]), int(named["lock"]))
            for fd in (handed.fuse_fd, handed.table_fd, handed.lock_fd):
                os.set_inheritable(fd, False)
            log.info("taking over from version %s", named.get("version"))
            return handed
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as failure:
        log.error("%s: cannot be read: %s; the mount is made again", HANDOVER, failure)
    stored = take_stored_descriptors()
    return None if stored is None else Handed(*stored, lock_fd=-1)


def _build_command(successor: Successor, arguments: list[str]) -> list[str]:
    # -P: the working directory must not provide Python modules to root.
    return [successor.python, "-P", "-m", "ckptfs_daemon", *arguments]
