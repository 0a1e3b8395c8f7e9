"""Open files whose bytes lie elsewhere, or go somewhere else while they are open (P3, P5, P8)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_under_test import Area, DaemonUnderTest, eventually

pytestmark = [pytest.mark.root, pytest.mark.fuse]

MIB = 1 << 20
Make = Callable[..., DaemonUnderTest]


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
    assert sorted(os.listdir(daemon.pfs)) == [".ckptfs", "renamed"]


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
    assert daemon.catalog("SELECT content FROM inode WHERE id = ?", os.fstat(reading).st_ino) == [(None,)]
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
