"""The real daemon as tests see it: started in a directory of its own, killed, restarted, looked at from outside.

A daemon never outlives its test: `close()` unmounts, and where that does not end within its deadline it aborts the FUSE
connection, kills the processes it started (by pid) and takes the mounts away.
If we die here: a directory /tmp/ckptfs-test-* and its mount are left; `umount -l` and `rm -r` end them.
"""

import contextlib
import ctypes
import itertools
import os
import re
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from ckptfs import mount_record, mountpoint_guard, procfs, runtime_dir

REPOSITORY = Path(__file__).resolve().parents[2]

ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(str(REPOSITORY / part) for part in (".", "daemon", "client")), "PYTHONDONTWRITEBYTECODE": ""}
"""Each of the many processes takes the compiled modules from the tree: to compile them costs more than to run."""
OLD_KERNEL = "resend,passthrough,init_ext,killpriv_v2,direct_io_allow_mmap,max_pages"
"""What Linux 4.20 lacks of FUSE, or a later one that is built without passthrough."""

READY_S = 60.0
BUSY_S = 10.0
END_S = 90.0
MNT_FORCE = 1
MNT_DETACH = 2
COMPLAINT = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|^Traceback", re.MULTILINE)
_numbers = itertools.count(1)


class NotStarted(Exception):
    """The daemon refused to start; the message is the sentence it gave, or its log."""


def list_readable(*sockets: socket.socket) -> list[socket.socket]:
    """Those of some sockets of which something, or the end, can be read now. Descriptors may exceed those of select(2)."""
    poll = select.poll()
    for one in sockets:
        poll.register(one.fileno(), select.POLLIN)
    ready = {fd for fd, _ in poll.poll(0)}
    return [one for one in sockets if one.fileno() in ready]


def eventually(condition: Callable[[], Any], timeout: float = 120.0, what: str = "", pause_s: float = 0.02) -> Any:
    """Ask `condition` again and again until it is true; its value. Fails the test after `timeout` seconds.

    The pause is as long as the condition takes: one that starts processes does not keep a processor busy.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while True:
        begun = time.monotonic()
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {timeout:.0f} s: {what or condition}")
        pause.wait(max(pause_s, time.monotonic() - begun))


def environment(**more: str) -> dict[str, str]:
    """The environment in which a process of ours finds this tree's packages."""
    return {**os.environ, **ENVIRONMENT, **more}


def shorten(**limits: float) -> dict[str, str]:
    """The environment of a daemon with other limits, so that a test need not wait as long as users would.

    Names are those of `ckptfs.limits`, or with their module: `**{"tiers.health.PROBE_NORMAL_S": 1}`.
    """
    places = [str(Path(__file__).with_name("shortened")), ENVIRONMENT["PYTHONPATH"]]
    return {"PYTHONPATH": os.pathsep.join(places), "CKPTFS_TEST_LIMITS": " ".join(f"{name}={value}" for name, value in limits.items())}


PREPARED_SOON = shorten(**{"flow.prepare.LOWEST_PRIORITY": 0})
"""For tests that wait for prepared memory: on a busy machine, a thread of the lowest priority does not run for minutes."""


def ckptfs(*arguments: str | Path, check: bool = True, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run `ckptfs ARGUMENTS`; fails the test where `check` and the exit code is not 0."""
    command = [sys.executable, "-m", "ckptfs_client", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment(), check=False)
    assert not check or result.returncode == 0, f"ckptfs {arguments}: exit {result.returncode}\n{result.stdout}{result.stderr}"
    return result


class DaemonUnderTest:
    """One `ckptfsd` with a mountpoint, a PFS, an NVMe and a state directory of its own. Options as of mount -o; None leaves one out."""

    wrapper: tuple[str, ...] = ()
    """The command that runs the daemon, such as setpriv(1) with its arguments."""

    def __init__(self, data_path: str = "auto", *, env: dict[str, str] | None = None, **options: str | Path | None) -> None:
        self.name = f"t{os.getpid()}-{next(_numbers)}"
        self.root = Path(tempfile.mkdtemp(prefix="ckptfs-test-", dir="/tmp"))
        self.root.chmod(0o711)  # Other users reach the mount.
        self.path, self.pfs, self.nvme, self.state = (self.root / part for part in ("mnt", "pfs", "nvme", "state"))
        for directory in (self.path, self.pfs, self.nvme, self.state):
            directory.mkdir()
        self.options: dict[str, str | Path | None] = {
            "state": self.state, "pfs": self.pfs, "nvme": self.nvme, "ram": "3G", "data_path": data_path, **options,
        }  # fmt: skip
        self.env = dict(env or {})
        self.log_file = self.root / "log"
        self.log_file.touch()
        self.process: subprocess.Popen[bytes] | None = None
        self.device = 0
        self._expected: list[re.Pattern[str]] = []

    def on_old_kernel(self) -> "DaemonUnderTest":
        """Let it start as on Linux 4.20, as far as it can see."""
        self.wrapper = (sys.executable, str(Path(__file__).with_name("old_system_calls.py")))
        self.env["CKPTFS_KERNEL_WITHOUT"] = OLD_KERNEL
        return self

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, *, timeout: float = READY_S) -> "DaemonUnderTest":
        """Start the daemon and wait until the mount answers. Raises NotStarted with the daemon's own sentence."""
        options = ",".join(f"{key}={value}" for key, value in self.options.items() if value is not None)
        ready, child_end = os.pipe()
        # Should this process die without its teardown, the daemon unmounts and ends.
        command = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        command += [*self.wrapper, sys.executable, "-m", "ckptfs_daemon", self.name, str(self.path), "-o", options]
        command += ["--ready-fd", str(child_end)]
        with open(self.log_file, "ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[child_end], env=environment(**self.env), cwd="/",
                start_new_session=True,
            )  # fmt: skip
        os.close(child_end)
        with os.fdopen(ready, "rb") as pipe:
            answer = _read_until_end(pipe.fileno(), timeout).decode(errors="replace").strip()
        if answer != "ok":
            self.process.kill()
            self.process.wait()
            raise NotStarted(answer or self.log)
        self.device = os.stat(self.path).st_dev
        return self

    def unmount(self, *, timeout: float = END_S) -> int:
        """umount(8), then wait for the daemon to end; its exit code.

        Any program on this machine that asks for the figures of all mounts, as df does, makes it busy for a moment.
        """
        assert self.process is not None

        def is_unmounted() -> bool:
            ended = subprocess.run(["umount", str(self.path)], check=False, timeout=timeout, capture_output=True, text=True)
            assert ended.returncode == 0 or "busy" in ended.stderr, ended.stderr
            return ended.returncode == 0

        eventually(is_unmounted, BUSY_S, "a mount without open files is not busy")
        return self.process.wait(timeout)

    def restart(self, **options: str | Path | None) -> "DaemonUnderTest":
        self.unmount()
        self.options.update(options)
        return self.start()

    def crash(self) -> None:
        """SIGKILL every process of the daemon, as a node's death would, and take away the dead mount."""
        assert self.process is not None
        self.expect_warning("the supervisor has ended")
        processes = self.processes()
        self.process.kill()
        self.process.wait(END_S)
        for pid in _pids(processes):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(procfs.is_running(pid) for pid in _pids(processes)), what="every process of the daemon has ended")

    def close(self) -> None:
        """End everything, by force where it must be, and delete the directory."""
        if self.process is not None and self.process.poll() is None:
            with contextlib.suppress(subprocess.SubprocessError):
                self.unmount(timeout=30)
        if self.process is not None and self.process.poll() is None:
            self.abort()
            self.crash()
        for mount in _mounts_below(self.root):
            subprocess.run(["umount", "-l", mount], check=False, capture_output=True)
        record = mount_record.load(self.state)
        if record is not None and record.guard is not None:
            with contextlib.suppress(OSError):
                mountpoint_guard.clear(record.guard)
        for left in runtime_dir.get_path().glob(f"{self.name}.*"):  # A killed daemon deletes none of its own.
            left.unlink(missing_ok=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def abort(self) -> None:
        """Abort the FUSE connection: every system call that hangs in this mount returns with an error."""
        # MNT_FORCE aborts the connection first, and nothing here asks the hanging mount for anything.
        ctypes.CDLL(None).umount2(os.fsencode(self.path), MNT_FORCE | MNT_DETACH)

    def wipe_ram(self) -> None:
        """Lose what lies in RAM, as a reboot would. The daemon must not be running."""
        assert self.process is None or self.process.poll() is not None, "unmount first"
        ram = self.state / "ram"
        for _ in range(5):
            if not os.path.ismount(ram):
                break
            subprocess.run(["umount", "-l", str(ram)], check=True)
        for left in ram.iterdir() if ram.is_dir() else ():
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    # --- processes ----------------------------------------------------------------------------------------------------

    def processes(self) -> dict[str, Any]:
        """What the supervisor says about the processes (STATE/processes.json)."""
        return runtime_dir.load_processes(self.state)

    def pid(self, role: str) -> int:
        """The process that has this role, as soon as there is one (0 stands for none, and kill(2) takes that for ourselves)."""
        return int(eventually(lambda: self.processes().get(role, {}).get("pid"), what=f"a {role} process"))

    def children(self) -> set[int]:
        """The processes of the supervisor."""
        supervisor = self.pid("supervisor")
        return {int(pid) for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()}

    def kill(self, role: str, *, wait: bool = True) -> None:
        """SIGKILL the process of that role; returns when another one has taken its place (and, for the mount, answers)."""
        self.expect_warning(rf"\b(mount|mover)\b.*({role}|killed|died|ended|signal)")
        old = self.pid(role)
        os.kill(old, signal.SIGKILL)
        if wait:
            eventually(lambda: self.processes().get(role, {}).get("pid") not in (old, None, 0), what=f"a new {role} process")
            if role == "mount":
                os.statvfs(self.path)

    # --- what it holds ------------------------------------------------------------------------------------------------

    def catalog(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a query on the catalog, from a connection of our own."""
        with contextlib.closing(sqlite3.connect(f"file:{self.state}/catalog.db?mode=rw", uri=True, timeout=60)) as connection:
            return connection.execute(query, values).fetchall()

    def unsettled(self) -> dict[str, int]:
        """What is still to be sealed or written back, by kind; empty when there is nothing."""
        counts = {
            "open for writing": "SELECT count(*) FROM handle WHERE writer",
            "open contents": "SELECT count(*) FROM content WHERE state = 0",
            "contents not sealed": "SELECT count(*) FROM content WHERE state = 1",
            "journal rows": "SELECT count(*) FROM journal",
        }
        found = {what: int(self.catalog(query)[0][0]) for what, query in counts.items()}
        return {what: count for what, count in found.items() if count}

    def settle(self, timeout: float = 240.0) -> None:
        """Wait until everything that was closed is sealed and, with a PFS, written back."""
        left: dict[str, int] = {}

        def settled() -> bool:
            nonlocal left
            left = self.unsettled()
            return not left

        try:
            eventually(settled, timeout)
        except AssertionError:
            raise AssertionError(f"not settled within {timeout:.0f} s: {left}\n{self.tail()}") from None

    def command(self, *arguments: str | Path, check: bool = True, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        return ckptfs(*arguments, check=check, timeout=timeout)

    # --- its log ------------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def tail(self) -> str:
        return "\n".join(self.log.splitlines()[-40:])

    def expect_warning(self, pattern: str) -> None:
        """Announce that log lines which match `pattern` (a regular expression) may appear."""
        self._expected.append(re.compile(pattern))

    def complaints(self) -> list[str]:
        """WARNING, ERROR and Traceback lines of the log that no test announced."""
        found = [line for line in self.log.splitlines() if COMPLAINT.search(line)]
        return [line for line in found if not any(expected.search(line) for expected in self._expected)]


DAEMONS = pytest.StashKey[list[DaemonUnderTest]]()
"""The daemons of a test."""


class Area:
    """A directory of its own in a mount that many tests share: `path` in the mount, `pfs` the same on the PFS."""

    def __init__(self, daemon: DaemonUnderTest, name: str) -> None:
        self.daemon = daemon
        self.path = daemon.path / name
        self.pfs = daemon.pfs / name
        self.path.mkdir()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.daemon, name)


class Mounted(Protocol):
    """One mount or several."""

    def abort(self) -> None:
        """End what hangs in them."""


@contextlib.contextmanager
def deadline(mounted: Mounted, seconds: float) -> Iterator[None]:
    """Abort the FUSE connections when the block takes longer: a test that hangs fails instead."""
    timer = threading.Timer(seconds, mounted.abort)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read_until_end(fd: int, timeout: float) -> bytes:
    """What arrives on a pipe until its first line is whole or its other end closes, or `timeout` seconds have passed."""
    os.set_blocking(fd, False)
    data = b""
    end = time.monotonic() + timeout
    pause = threading.Event()
    while time.monotonic() < end and not data.endswith(b"\n"):
        try:
            piece = os.read(fd, 65536)
        except BlockingIOError:
            pause.wait(0.01)
            continue
        if not piece:
            break
        data += piece
    return data


def _pids(processes: dict[str, Any]) -> list[int]:
    children = (processes.get(role, {}) for role in ("mount", "mover"))
    return [int(child["pid"]) for child in children if child.get("pid")]


def _mounts_below(root: Path) -> list[str]:
    """The mountpoints below a directory, deepest first."""
    points = [str(entry.mountpoint) for entry in procfs.list_mount_entries()]
    return sorted((point for point in points if point.startswith(f"{root}/")), key=len, reverse=True)
