"""A full tier (P10, F1, T2): a file moves on while it is written, and only when all are full the application hears of it."""

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest

pytestmark = [pytest.mark.root, pytest.mark.fuse]

MIB = 1 << 20
Make = Callable[..., DaemonUnderTest]


def _block(number: int) -> bytes:
    return number.to_bytes(4, "little") * (MIB // 4)


def _fill(path: Path, blocks: int) -> None:
    with open(path, "wb", buffering=0) as file:
        for number in range(blocks):
            file.write(_block(number))


def _check(path: Path, blocks: int) -> None:
    assert path.stat().st_size == blocks * MIB
    with open(path, "rb", buffering=0) as file:
        for number in range(blocks):
            assert file.read(MIB) == _block(number), f"block {number} of {path.name}"


def test_a_file_larger_than_ram_ends_in_nvme(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, ram="64M", pfs=None)
    _fill(daemon.path / "large", 150)
    _check(daemon.path / "large", 150)
    assert daemon.catalog("SELECT tier FROM copy") == [("nvme",)]
    _fill(daemon.path / "small", 2)
    _check(daemon.path / "small", 2)


def test_many_files_more_than_ram_holds(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, ram="64M", pfs=None)
    for number in range(10):
        _fill(daemon.path / f"file{number}", 14)
    for number in range(10):
        _check(daemon.path / f"file{number}", 14)


def test_ram_that_is_full_and_a_pfs_that_is_not(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, ram="64M")
    for number in range(6):
        _fill(daemon.path / f"file{number}", 30)
    _fill(daemon.path / "large", 120)
    for number in range(6):
        _check(daemon.path / f"file{number}", 30)
    _check(daemon.path / "large", 120)
    daemon.settle()
    _check(daemon.pfs / "large", 120)
    _check(daemon.pfs / "file0", 30)


def test_enospc_when_everything_is_full_and_room_again_after_an_unlink(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, ram="32M", pfs=None, nvme=None)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        _fill(daemon.path / "large", 64)
    os.unlink(daemon.path / "large")
    _fill(daemon.path / "small", 8)
    _check(daemon.path / "small", 8)


def test_mappings_and_random_writes_survive_the_move(data_path: str, make_daemon: Make) -> None:
    daemon = make_daemon(data_path, ram="32M", pfs=None)
    fd = os.open(daemon.path / "file", os.O_RDWR | os.O_CREAT)
    reading = os.open(daemon.path / "file", os.O_RDONLY)
    for number in range(60):
        os.pwrite(fd, _block(number), (number * 37 % 60) * MIB)
    for number in range(60):
        assert os.pread(reading, MIB, (number * 37 % 60) * MIB) == _block(number)
    os.close(fd)
    os.close(reading)
    assert daemon.catalog("SELECT tier FROM copy") == [("nvme",)]


def test_a_file_that_several_threads_write_in_small_pieces_moves_on(data_path: str, make_daemon: Make) -> None:
    """P10: the shim serves such writes, and none of them goes to the tier that the file has left."""
    daemon = make_daemon(data_path, ram="64M", pfs=None)
    path, piece, share = daemon.path / "large", 64 * 1024, 40 * MIB

    def write(number: int) -> None:
        with open(path, "r+b", buffering=0) as file:
            for offset in range(0, share, piece):
                file.seek(number * share + offset)
                file.write(bytes([number + 1]) * piece)

    path.touch()
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(write, number) for number in range(4)]:
            done.result()
    data = path.read_bytes()
    assert [data[number * share : (number + 1) * share] == bytes([number + 1]) * share for number in range(4)] == [True] * 4
    assert daemon.catalog("SELECT tier FROM copy") == [("nvme",)]
