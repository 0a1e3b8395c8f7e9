"""Open files whose bytes lie elsewhere, or go somewhere else while they are open (P3, P5, P8)."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_under_test import DAEMONS, Area, DaemonUnderTest, eventually

pytestmark = [pytest.mark.root, pytest.mark.fuse]

MIB = 1 << 20
Make = Callable[..., DaemonUnderTest]


@pytest.fixture(autouse=True)
def _no_hang(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that hangs fails: whatever daemon it made loses its connection."""

    def abort() -> None:
        for daemon in request.node.stash.get(DAEMONS, []):
            daemon.abort()

    timer = threading.Timer(120, abort)
    timer.start()
    yield
    timer.cancel()


def _seen(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def test_fsync_at_level_pfs_returns_when_the_pfs_has_it(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, fsync="pfs")
    with open(daemon.path / "file", "wb", buffering=0) as file:
        for number in range(3):
            file.write(b"line %d\n" % number)
            os.fsync(file.fileno())
            assert (daemon.pfs / "file").read_bytes() == b"".join(b"line %d\n" % n for n in range(number + 1))
    os.rename(daemon.path / "file", daemon.path / "renamed")
    fd = os.open(daemon.path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    assert os.listdir(daemon.pfs) == [".ckptfs", "renamed"]


def test_an_open_file_that_was_fsynced_reaches_the_pfs(mount: Area) -> None:
    with open(mount.path / "log", "wb", buffering=0) as file:
        file.write(b"so far")
        os.fsync(file.fileno())
        eventually(lambda: _seen(mount.pfs / "log") == b"so far", 60)
        file.write(b" and further")
    mount.settle()
    assert (mount.pfs / "log").read_bytes() == b"so far and further"


def test_a_writer_comes_while_a_file_is_read_on_the_pfs_itself(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, ram="64M", nvme=None, start=False)
    data = os.urandom(100 * MIB)
    (daemon.pfs / "large").write_bytes(data)
    daemon.start()
    reading = os.open(daemon.path / "large", os.O_RDONLY)
    assert os.pread(reading, MIB, 50 * MIB) == data[50 * MIB : 51 * MIB]
    daemon.kill("mount")
    assert os.pread(reading, MIB, 20 * MIB) == data[20 * MIB : 21 * MIB]
    with open(daemon.path / "large", "r+b", buffering=0) as writer:
        writer.seek(70 * MIB)
        writer.write(b"changed")
        assert os.pread(writer.fileno(), 9, 70 * MIB - 1) == data[70 * MIB - 1 : 70 * MIB] + b"changed" + data[70 * MIB + 7 : 70 * MIB + 8]
    os.close(reading)
    changed = data[: 70 * MIB] + b"changed" + data[70 * MIB + 7 :]
    assert (daemon.path / "large").read_bytes() == changed
    daemon.settle()
    assert (daemon.pfs / "large").read_bytes() == changed


def test_what_was_lost_with_ram_fails_and_is_named(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, pfs=None, nvme=None)
    (daemon.path / "file").write_bytes(b"only in ram")
    daemon.settle()
    daemon.unmount()
    daemon.wipe_ram()
    daemon.expect_warning("ram|file")
    daemon.start()
    with pytest.raises(OSError, match="Input/output error"):
        (daemon.path / "file").read_bytes()
    assert "file: cannot be opened: no copy of its content is left" in daemon.log
    (daemon.path / "file").write_bytes(b"again")
    assert (daemon.path / "file").read_bytes() == b"again"


def test_evicted_files_come_back_when_they_are_opened(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, ram="64M", nvme=None)
    # Of as many kinds, so that none is expected to be large and sent elsewhere at once.
    files = {f"file-{letter}": os.urandom(9 * MIB) for letter in "abcdefghi"}
    for name, data in files.items():
        (daemon.path / name).write_bytes(data)
    daemon.settle()
    evicted = "SELECT count(*) FROM content k WHERE NOT EXISTS (SELECT 1 FROM copy WHERE content = k.id)"
    eventually(lambda: daemon.catalog(evicted) > [(0,)], 60)
    for name, data in files.items():
        assert (daemon.path / name).read_bytes() == data, name
    with open(daemon.path / "file-a", "ab") as file:
        file.write(b"more")
    assert (daemon.path / "file-a").read_bytes() == files["file-a"] + b"more"
