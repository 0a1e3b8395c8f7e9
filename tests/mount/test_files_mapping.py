"""Mappings of files, shared and private, alone and against read and write (F4, P2): numpy r+, HDF5 and torch do this."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from daemon_under_test import Area, eventually

pytestmark = [pytest.mark.root, pytest.mark.fuse]

PAGE = mmap.PAGESIZE


def _file(mount: Area, data: bytes) -> Path:
    path = mount.path / "file"
    path.write_bytes(data)
    return path


def _closed_mapping(path: Path) -> mmap.mmap:
    """A mapping whose descriptor is closed."""
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def test_a_shared_mapping_and_write_see_each_other(mount: Area) -> None:
    path = _file(mount, bytes(4 * PAGE))
    with open(path, "r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[10:15] = b"mmap!"
        mapping.flush()
        assert os.pread(file.fileno(), 5, 10) == b"mmap!"
        os.pwrite(file.fileno(), b"write", 2 * PAGE)
        assert mapping[2 * PAGE : 2 * PAGE + 5] == b"write"
    assert path.read_bytes()[10:15] == b"mmap!"


def test_two_processes_share_a_mapping(mount: Area) -> None:
    path = _file(mount, bytes(PAGE))
    program = (
        "import mmap, sys\nwith open(sys.argv[1], 'r+b') as f, mmap.mmap(f.fileno(), 0) as m:\n"
        " assert m[:4] == b'ping'\n m[4:8] = b'pong'\n m.flush()\n"
    )
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[:4] = b"ping"
        subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)
        assert mapping[:8] == b"pingpong"


def test_a_private_mapping_keeps_its_changes(mount: Area) -> None:
    path = _file(mount, b"a" * PAGE)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        mapping[:3] = b"bbb"
        assert mapping[:4] == b"bbba"
    assert path.read_bytes() == b"a" * PAGE


def test_a_mapping_outlives_its_descriptor_its_name_and_its_handle(mount: Area) -> None:
    path = _file(mount, b"a" * PAGE)
    mapping = _closed_mapping(path)
    mapping[:5] = b"after"
    mapping.flush()
    assert path.read_bytes()[:5] == b"after"
    new = mount.path / "new"
    new.write_bytes(b"new")
    os.rename(new, path)
    assert mapping[:5] == b"after"
    mapping[:5] = b"still"
    mapping.close()
    assert path.read_bytes() == b"new"


def test_what_a_mapping_writes_after_the_close_reaches_the_pfs(mount: Area) -> None:
    path = _file(mount, b"a" * PAGE)
    mapping = _closed_mapping(path)
    mapping[:4] = b"late"
    mapping.flush()
    mapping.close()
    mount.settle()
    assert (mount.pfs / "file").read_bytes() == b"late" + b"a" * (PAGE - 4)


def test_numpy_memmap_reads_and_writes(mount: Area) -> None:
    path = mount.path / "array.npy"
    array = np.lib.format.open_memmap(path, mode="w+", dtype="float64", shape=(300, 700))
    array[:] = np.arange(210_000).reshape(300, 700)
    array.flush()
    del array
    again = np.load(path, mmap_mode="r+")
    again[7] = -1
    again.flush()
    del again
    final = np.load(path)
    assert (final[7] == -1).all()
    assert (final[8] == np.arange(5600, 6300)).all()


def test_a_mapped_file_grows_and_shrinks(mount: Area) -> None:
    path = mount.path / "file"
    with open(path, "w+b", buffering=0) as file:
        file.truncate(2 * PAGE)
        with mmap.mmap(file.fileno(), 2 * PAGE) as mapping:
            mapping[:] = b"x" * (2 * PAGE)
            file.truncate(PAGE)
            file.truncate(2 * PAGE)
            assert mapping[PAGE - 1 : PAGE + 1] == b"x\0"
    assert path.read_bytes() == b"x" * PAGE + bytes(PAGE)


def test_what_a_mapping_writes_moves_the_files_time(mount: Area) -> None:
    path = _file(mount, bytes(PAGE))
    os.utime(path, ns=(10**18, 10**18))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        assert path.stat().st_mtime_ns == 10**18
        mapping[0] = 1
        mapping.flush()
        eventually(lambda: path.stat().st_mtime_ns > 10**18, 30)
    assert path.stat().st_mtime_ns > 10**18
