"""Open files outlive the mount process (P8): handles, locks, unlinked files, mappings, and what is released while nobody listens."""

import contextlib
import fcntl
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
from daemon_under_test import Area, eventually

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.crash]


@pytest.fixture
def daemon(data_path: str, share_daemon: Callable[..., Area]) -> Area:
    return share_daemon(data_path)


def test_open_files_go_on_after_the_mount_process_was_killed(daemon: Area) -> None:
    (daemon.path / "read").write_bytes(b"r" * 100_000)
    daemon.settle()
    reading = os.open(daemon.path / "read", os.O_RDONLY)
    both = os.open(daemon.path / "both", os.O_RDWR | os.O_CREAT)
    log = os.open(daemon.path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    unlinked = os.open(daemon.path / "gone", os.O_RDWR | os.O_CREAT)
    os.write(unlinked, b"unlinked")
    os.unlink(daemon.path / "gone")
    os.pwrite(both, b"x" * 8192, 0)
    with mmap.mmap(both, 8192) as mapping:
        for number in range(3):
            os.write(log, b"line %d\n" % number)
            daemon.kill("mount", wait=number == 1)
            os.pwrite(both, b"%d" % number, number)
            assert os.pread(both, 5, 0) == b"012"[: number + 1] + b"x" * (4 - number)
            assert os.fstat(both).st_size == 8192
            assert os.pread(reading, 10, 50_000) == b"r" * 10
            assert os.pread(unlinked, 20, 0) == b"unlinked"
            assert os.fstat(unlinked).st_nlink == 0
            mapping[100] = 48 + number
            mapping.flush()
            assert os.pread(both, 1, 100) == b"%d" % number
    os.ftruncate(both, 4096)
    for fd in (reading, both, log, unlinked):
        os.close(fd)
    assert (daemon.path / "log").read_bytes() == b"line 0\nline 1\nline 2\n"
    assert (daemon.path / "both").stat().st_size == 4096
    daemon.settle()
    assert (daemon.pfs / "log").read_bytes() == b"line 0\nline 1\nline 2\n"
    assert daemon.catalog("SELECT count(*) FROM handle") == [(0,)]


def test_a_file_that_is_closed_while_nobody_serves_is_sealed_all_the_same(daemon: Area) -> None:
    files = [os.open(daemon.path / f"file{number}", os.O_WRONLY | os.O_CREAT) for number in range(30)]
    for fd in files:
        os.write(fd, b"data")
    daemon.kill("mount", wait=False)
    for fd in files:
        os.close(fd)
    daemon.settle()
    assert daemon.catalog("SELECT count(*) FROM handle") == [(0,)]
    assert sorted(path.read_bytes() for path in daemon.pfs.glob("file*")) == [b"data"] * 30


def test_creates_under_fire_happen_exactly_once(daemon: Area) -> None:
    """O_EXCL: a create that was made and not answered must not fail with EEXIST when it is sent again."""
    done = threading.Event()

    def fire() -> None:
        for _ in range(8):
            if done.wait(0.4):
                return
            pid = daemon.pid("mount")
            with contextlib.suppress(ProcessLookupError):  # The last one may not be replaced yet.
                os.kill(pid, signal.SIGKILL)

    daemon.expect_warning("mount")
    shooter = threading.Thread(target=fire)
    shooter.start()
    number = 0
    try:
        while shooter.is_alive():
            fd = os.open(daemon.path / f"f{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(fd, b"%d" % number)
            os.close(fd)
            number += 1
    finally:
        done.set()
        shooter.join()
    assert {path.name: path.read_bytes() for path in daemon.path.iterdir()} == {f"f{n}": b"%d" % n for n in range(number)}
    daemon.settle()
    assert {path.name: path.read_bytes() for path in daemon.pfs.glob("f*")} == {f"f{n}": b"%d" % n for n in range(number)}


LOCKER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
kind = sys.argv[2]
try:
    if kind == "flock":
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5)
except BlockingIOError:
    print("locked")
else:
    print("free")
"""


@pytest.mark.parametrize("kind", ["flock", "fcntl"])
def test_locks_hold_between_processes_and_across_a_restart(daemon: Area, kind: str) -> None:
    path = daemon.path / "file"
    path.write_bytes(b"x" * 100)

    def others_see() -> str:
        command = [sys.executable, "-c", LOCKER, str(path), kind]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    with open(path, "r+b") as file:
        assert others_see() == "free"
        if kind == "flock":
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            fcntl.lockf(file, fcntl.LOCK_EX, 20, 0)
        assert others_see() == "locked"
        daemon.kill("mount")
        assert others_see() == "locked"
    eventually(lambda: others_see() == "free", 30)
