"""Sparse and large files, fallocate, copy_file_range (F4): what pyfuse3 has no handlers for comes through our own door."""

import ctypes
import errno
import os
from pathlib import Path

import pytest
from daemon_under_test import Area
from programs import refusal

pytestmark = [pytest.mark.root, pytest.mark.fuse]

PIB, GIB, MIB = 1 << 50, 1 << 30, 1 << 20
KEEP_SIZE, PUNCH_HOLE, COLLAPSE, ZERO_RANGE = 1, 2, 8, 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    if _libc.fallocate(fd, mode, offset, length):
        raise OSError(ctypes.get_errno(), "fallocate")


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def test_a_file_over_4_gib_is_sparse_and_knows_its_data(mount: Area) -> None:
    path = mount.path / "file"
    fd = _open(path)
    os.pwrite(fd, b"begin", 0)
    os.pwrite(fd, b"end", 6 * GIB)
    for _ in range(2):
        assert os.fstat(fd).st_size == 6 * GIB + 3
        assert os.fstat(fd).st_blocks * 512 < MIB
        assert os.pread(fd, 5, 3 * GIB) == bytes(5)
        hole = os.lseek(fd, 0, os.SEEK_HOLE)
        assert 5 <= hole <= MIB
        assert hole < os.lseek(fd, hole, os.SEEK_DATA) <= 6 * GIB
        assert os.lseek(fd, 6 * GIB, os.SEEK_HOLE) == 6 * GIB + 3
        with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
            os.lseek(fd, 6 * GIB + 3, os.SEEK_DATA)
        os.close(fd)
        fd = os.open(path, os.O_RDONLY)
    os.close(fd)
    assert path.stat().st_blocks * 512 < MIB
    mount.settle()
    on_pfs = (mount.pfs / "file").stat()
    assert on_pfs.st_size == 6 * GIB + 3
    assert on_pfs.st_blocks * 512 < 64 * MIB


def test_a_file_may_have_a_pebibyte_and_no_more(mount: Area) -> None:
    fd = _open(mount.path / "file")
    os.ftruncate(fd, PIB)
    assert refusal(os.ftruncate, fd, PIB + 1) == refusal(_fallocate, fd, 0, PIB, 1) == "EFBIG"
    _fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 1, 1 << 60)
    assert os.fstat(fd).st_size == PIB
    (mount.path / "file").unlink()
    os.close(fd)


def test_fallocate_extends_or_keeps_the_size(mount: Area) -> None:
    fd = _open(mount.path / "file")
    os.write(fd, b"x" * 1000)
    _fallocate(fd, KEEP_SIZE, 0, MIB)
    assert os.fstat(fd).st_size == 1000
    assert os.fstat(fd).st_blocks * 512 >= MIB
    _fallocate(fd, 0, 0, 2 * MIB)
    assert os.fstat(fd).st_size == 2 * MIB
    assert os.pread(fd, 2000, 0) == b"x" * 1000 + bytes(1000)
    os.posix_fallocate(fd, 0, 3 * MIB)
    assert os.fstat(fd).st_size == 3 * MIB
    os.close(fd)


def test_holes_are_punched_and_ranges_zeroed(mount: Area) -> None:
    fd = _open(mount.path / "file")
    os.write(fd, b"x" * MIB)
    _fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 4096, 65536)
    assert os.pread(fd, 65536 + 2, 4095) == b"x" + bytes(65536) + b"x"
    assert os.lseek(fd, 0, os.SEEK_HOLE) == 4096
    _fallocate(fd, ZERO_RANGE, 512 * 1024 + 10, 5000)
    assert os.pread(fd, 5002, 512 * 1024 + 9) == b"x" + bytes(5000) + b"x"
    assert os.fstat(fd).st_size == MIB
    os.close(fd)


def test_modes_that_are_not_there_say_so(mount: Area) -> None:
    fd = _open(mount.path / "file")
    os.write(fd, b"x" * 65536)
    assert refusal(_fallocate, fd, COLLAPSE, 0, 4096) == "ENOTSUP"
    os.close(fd)
    assert (mount.path / "file").read_bytes() == b"x" * 65536


def test_copy_file_range_within_and_between_files(mount: Area) -> None:
    data = os.urandom(3 * MIB)
    source, target = mount.path / "source", mount.path / "target"
    source.write_bytes(data)
    reading, writing = os.open(source, os.O_RDONLY), _open(target)
    done = 0
    while done < len(data):
        done += os.copy_file_range(reading, writing, len(data) - done)
    assert os.copy_file_range(reading, writing, 100) == 0, "the end of the source"
    assert os.pread(writing, 4 * MIB, 0) == data
    assert os.copy_file_range(writing, writing, 5000, 100, 2 * MIB) == 5000
    os.close(reading)
    os.close(writing)
    assert target.read_bytes() == data[: 2 * MIB] + data[100:5100] + data[2 * MIB + 5000 :]
