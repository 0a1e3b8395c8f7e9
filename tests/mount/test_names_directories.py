"""Reading directories through a real mount: large ones, and ones that change meanwhile (P2, F4)."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.fuse

LARGE = {"passthrough": 100_000, "buffered": 20_000}  # Directories do not differ by data path: one of them proves the size.


def fill(state: Path, count: int) -> None:
    """Put `count` empty files into the root of a catalog that nobody has open: through the mount it would take minutes."""
    now = time.time_ns()
    with contextlib.closing(sqlite3.connect(state / "catalog.db")) as connection, connection:
        first = 1 + int(connection.execute("SELECT max(id) FROM inode").fetchone()[0])
        numbers = range(first, first + count)
        inode = "INSERT INTO inode (id, mode, uid, gid, nlink, atime_ns, mtime_ns, ctime_ns, birth_ns) VALUES (?,33188,0,0,1,?,?,?,?)"
        connection.executemany(inode, ((number, now, now, now, now) for number in numbers))
        entries = ((b"f%06d" % (number - first), number) for number in numbers)
        connection.executemany("INSERT INTO entry (parent, name, child) VALUES (1,?,?)", entries)
    (state / "catalog.db.digest").unlink()  # Otherwise the start would take the change for that of a disk.


def test_a_directory_of_100000_entries(data_path: str, make_daemon: Callable[..., Any]) -> None:
    count = LARGE[data_path]
    daemon = make_daemon(data_path, pfs=None)
    assert daemon.unmount() == 0
    fill(daemon.state, count)
    daemon.start()
    names = [f"f{number:06d}" for number in range(count)]
    assert os.listdir(daemon.path) == names
    assert os.stat(daemon.path / names[-1]).st_size == 0
    with os.scandir(daemon.path) as entries:
        seen = [next(entries).name]
        for number in range(1, 3000, 3):
            os.unlink(daemon.path / names[number])
        (daemon.path / "new").touch()
        os.rename(daemon.path / names[-1], daemon.path / names[0])
        seen += [entry.name for entry in entries]
    staying = {name for number, name in enumerate(names[:-1]) if number >= 3000 or number % 3 != 1}
    counts = dict.fromkeys(staying, 0)
    for name in seen:
        if name in counts:
            counts[name] += 1
    assert set(counts.values()) == {1}
    os.unlink(daemon.path / "new")
    assert len(os.listdir(daemon.path)) == len(staying)


def test_a_directory_can_be_emptied_while_it_is_read(here: Path) -> None:
    for number in range(500):
        (here / f"f{number}").touch()
    with os.scandir(here) as entries:
        for entry in entries:
            os.unlink(entry.path)
    assert os.listdir(here) == []


def test_reading_goes_on_where_telldir_was(here: Path) -> None:
    for number in range(300):
        (here / f"f{number}").touch()
    descriptor = os.open(here, os.O_RDONLY)
    try:
        assert len(os.listdir(descriptor)) == 300
        os.lseek(descriptor, 0, os.SEEK_SET)
        (here / "late").touch()
        assert "late" in os.listdir(descriptor)
    finally:
        os.close(descriptor)


def test_dot_and_dotdot_are_there_and_know_their_inodes(here: Path) -> None:
    (here / "sub").mkdir()
    found = _getdents(here / "sub")
    assert found == {b".": os.stat(here / "sub").st_ino, b"..": os.stat(here).st_ino}


def test_types_in_readdir_are_those_of_stat(here: Path) -> None:
    (here / "file").touch()
    (here / "dir").mkdir()
    (here / "link").symlink_to("file")
    os.mkfifo(here / "fifo")
    with os.scandir(here) as entries:
        kinds = {entry.name: (entry.is_file(follow_symlinks=False), entry.is_dir(follow_symlinks=False)) for entry in entries}
    assert kinds == {"file": (True, False), "dir": (False, True), "link": (False, False), "fifo": (False, False)}


def _getdents(path: Path) -> dict[bytes, int]:
    """Name -> inode number, as getdents64(2) gives them: Python hides the dots."""
    import ctypes
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(65536)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        found: dict[bytes, int] = {}
        while (count := libc.syscall(_GETDENTS64, descriptor, buffer, len(buffer))) > 0:
            offset = 0
            while offset < count:
                inode, _, length, _ = struct.unpack_from("=QqHB", buffer, offset)
                found[buffer.raw[offset + 19 : offset + length].split(b"\0")[0]] = inode
                offset += length
        assert count == 0
        return found
    finally:
        os.close(descriptor)


_GETDENTS64 = {"x86_64": 217, "aarch64": 61}[os.uname().machine]
