"""P8: a program that waits in a system call for the PFS can be killed at once, and a signal that it handles does not fail the call."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, eventually, shorten
from silent_pfs import SilentPfs

pytestmark = [pytest.mark.root, pytest.mark.fuse]
MIB = 1 << 20
DATA = os.urandom(MIB)
Make = Callable[..., DaemonUnderTest]
FSYNC = "74 " if os.uname().machine == "x86_64" else "82 "
"""The number of the system call, as /proc shows it."""
KILL_S = 60.0
PATIENT = shorten(FETCH_STALL_S=600, SCAN_WAIT_S=600, REQUEST_KEEP_S=1200)
"""The mount waits for a PFS that hangs much longer than a program may live that was killed."""

HANDLING_READER = """
import ctypes, os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.siginterrupt(signal.SIGUSR1, sys.argv[2] == "interrupts")
libc = ctypes.CDLL(None, use_errno=True)
fd = libc.open(os.fsencode(sys.argv[1]), os.O_RDONLY)
if fd < 0:
    sys.exit(f"open: {os.strerror(ctypes.get_errno())}")
buffer = ctypes.create_string_buffer(1 << 20)
count = libc.read(fd, buffer, len(buffer))
if count < 0:
    sys.exit(f"read: {os.strerror(ctypes.get_errno())}")
os.write(1, buffer.raw[:count])
"""
"""Opens and reads by the system calls themselves: Python's own functions call them again after EINTR."""

THREADED_READER = """
import sys, threading
threading.Thread(target=lambda: open(sys.argv[1], "rb").read()).start()
threading.Event().wait()
"""


def begin(*command: str | Path, daemon: DaemonUnderTest | None = None, kind: str = "") -> "subprocess.Popen[bytes]":
    """Start a program, and wait until it waits for the mount, whose mover then works on a request of this kind."""
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if daemon is not None:
        eventually(lambda: daemon.catalog("SELECT 1 FROM mover_request WHERE kind = ? AND state = 0", kind), what=f"a request to {kind}")
    threads = Path(f"/proc/{program.pid}/task")
    eventually(lambda: any("request_wait_answer" in path.read_text() for path in threads.glob("*/wchan")), what="the program waits")
    return program


def is_held_back(program: "subprocess.Popen[bytes]", number: int) -> bool:
    """Send a signal that the program handles. Whether the kernel holds it back, because the program waits for the mount."""
    program.send_signal(number)
    fields = dict(line.split(":\t", 1) for line in Path(f"/proc/{program.pid}/status").read_text().splitlines())
    return bool((int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)) >> (number - 1) & 1)


def holds_content(daemon: DaemonUnderTest) -> bool:
    """Whether the mount process has a content in the PFS tier open."""
    links = []
    for path in Path(f"/proc/{daemon.pid('mount')}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # It is closed meanwhile.
            links.append(path.readlink())
    return any(link.parent.name.startswith("contents-") and link.is_relative_to(daemon.options["pfs"]) for link in links)


@pytest.fixture
def hanging(make_daemon: Make, data_path: str, silent: SilentPfs) -> DaemonUnderTest:
    """A mount whose PFS has a file `there` and a directory `unread`, and hangs."""
    (silent.source / "there").write_bytes(DATA)
    (silent.source / "unread").mkdir()
    daemon = make_daemon(data_path, ram="64M", nvme=None, pfs=silent.path, env=PATIENT)
    daemon.expect_warning("pfs|PFS|write back|scan|fetch|does not answer|cannot be|hangs|silent")
    assert (daemon.path / "there").stat().st_size == MIB and (daemon.path / "unread").is_dir()
    silent.swallow()
    return daemon


@pytest.mark.parametrize(("data_path", "number"), [("passthrough", signal.SIGKILL), ("buffered", signal.SIGTERM)])
def test_a_fatal_signal_ends_an_open(hanging: DaemonUnderTest, silent: SilentPfs, number: signal.Signals) -> None:
    """The next reader gets the file when the PFS answers again."""
    reader = begin("cat", hanging.path / "there", daemon=hanging, kind="fetch")
    reader.send_signal(number)
    assert reader.wait(KILL_S) == -number
    other = begin("cat", hanging.path / "there", daemon=hanging, kind="fetch")
    silent.resume()
    assert other.communicate(timeout=60) == (DATA, b"")


def test_a_fatal_signal_ends_every_thread(hanging: DaemonUnderTest) -> None:
    reader = begin(sys.executable, "-c", THREADED_READER, hanging.path / "there", daemon=hanging, kind="fetch")
    reader.send_signal(signal.SIGTERM)
    assert reader.wait(KILL_S) == -signal.SIGTERM


def test_a_fatal_signal_ends_a_listing(hanging: DaemonUnderTest) -> None:
    reader = begin("ls", hanging.path / "unread", daemon=hanging, kind="scan")
    reader.kill()
    assert reader.wait(KILL_S) == -signal.SIGKILL


@pytest.mark.parametrize("how", ["interrupts", "restarts"])
def test_a_handled_signal_does_not_end_an_open(hanging: DaemonUnderTest, silent: SilentPfs, how: str) -> None:
    """The kernel tells the mount of the first signal only: a later one that kills must be seen all the same."""
    readers = [begin(sys.executable, "-c", HANDLING_READER, hanging.path / "there", how) for _ in range(3)]
    for reader in readers:
        eventually(lambda reader=reader: is_held_back(reader, signal.SIGUSR1), what="the kernel has told the mount of the signal")
    readers[0].kill()
    assert readers[0].wait(KILL_S) == -signal.SIGKILL
    hanging.kill("mount")
    readers[1].kill()
    assert readers[1].wait(KILL_S) == -signal.SIGKILL
    assert readers[2].poll() is None, "the signal ended the call"
    silent.resume()
    assert readers[2].communicate(timeout=60) == (DATA, b"")


def test_a_fatal_signal_ends_an_fsync(make_daemon: Make, data_path: str, silent: SilentPfs) -> None:
    """P3: with fsync=pfs it waits for the PFS."""
    daemon = make_daemon(data_path, pfs=silent.path, nvme=None, ram="64M", fsync="pfs")
    daemon.expect_warning("pfs|PFS|write back|scan|does not answer|cannot be|hangs|silent")
    os.listdir(daemon.path)
    silent.swallow()
    writer = begin("dd", "if=/dev/zero", f"of={daemon.path / 'file'}", "bs=1M", "count=1", "conv=fsync")
    eventually(lambda: Path(f"/proc/{writer.pid}/syscall").read_text().startswith(FSYNC), what="it waits in fsync")
    writer.kill()
    assert writer.wait(KILL_S) == -signal.SIGKILL
    silent.resume()
    daemon.settle()
    assert (silent.source / "file").read_bytes() == bytes(MIB)


def test_a_fatal_signal_ends_an_open_in_the_pfs_tier(make_daemon: Make, data_path: str, silent: SilentPfs) -> None:
    """A descriptor that comes later is closed again."""
    daemon = make_daemon(data_path, ram="64M", nvme=None, pfs=silent.path, env=PATIENT)
    daemon.expect_warning("pfs|PFS|write back|scan|does not answer|cannot be|hangs|silent|content")
    with open(daemon.path / "outgrown", "wb") as file:
        file.write(bytes(70 * MIB))
    # A reader beside the writer would share its descriptor, by which the kernel reads the PFS itself.
    eventually(lambda: not daemon.catalog("SELECT 1 FROM handle") and not holds_content(daemon), what="it is closed")
    silent.swallow()
    readers = [begin("cat", daemon.path / "outgrown") for _ in range(3)]
    for reader in readers:
        reader.kill()
        assert reader.wait(KILL_S) == -signal.SIGKILL
    silent.resume()
    assert (daemon.path / "outgrown").read_bytes() == bytes(70 * MIB)
    daemon.settle()
    eventually(lambda: not holds_content(daemon), what="the descriptors are closed")
