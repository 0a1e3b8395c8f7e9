"""Programs that write a file of the history in a mount: it keeps the old bytes, and they notice nothing (T6, P2, P8)."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_under_test import Area, DaemonUnderTest, eventually

from ckptfs.catalog import history
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import SetRecord

pytestmark = [pytest.mark.root, pytest.mark.fuse]

OLD = os.urandom(5 << 20) + b"old"


@contextlib.contextmanager
def opened(daemon: DaemonUnderTest) -> Iterator[Database]:
    db = Database(daemon.state / "catalog.db", journalled=True)
    try:
        yield db
    finally:
        db.close()


def keep(daemon: DaemonUnderTest, file: Path) -> int:
    """Make a set of one file, as the tracker does; its directory."""
    inode, parent = os.stat(file).st_ino, os.stat(file.parent).st_ino  # The mount answers nobody who holds the catalog.
    with opened(daemon) as db, db.transaction():
        series = history.insert_series(db, parent, b"file*").directory
        directory = history.begin_set(db, series, SetRecord(1, b"file", (1,), 1, len(OLD), 5, is_group=True))
        history.insert_link(db, inode, directory, b"file")
        history.finish_set(db, directory)
        return directory


def read_set(daemon: DaemonUnderTest, directory: int) -> bytes:
    """What a tier holds for the file of a set."""
    with opened(daemon) as db:
        ((_, inode),) = history.list_files(db, directory)
        ((tier,),) = db.rows("SELECT tier FROM copy WHERE content = ? AND state = 1", inode.content)
    places = {"ram": daemon.state / "ram", "nvme": daemon.nvme}
    return next(places[tier].rglob(f"{inode.content:016x}")).read_bytes()


@pytest.fixture
def file(mount: Area) -> Path:
    path = mount.path / "file"
    path.write_bytes(OLD)
    inode = path.stat().st_ino
    query = "SELECT k.state FROM inode i JOIN content k ON k.id = i.content WHERE i.id = ?"
    eventually(lambda: mount.daemon.catalog(query, inode) == [(2,)], what="it is sealed")
    return path


def test_a_link_of_the_history_does_not_show(mount: Area, file: Path) -> None:
    before = file.stat()
    keep(mount.daemon, file)
    fd = os.open(file, os.O_RDONLY)
    assert [getattr(os.fstat(fd), name) for name in ("st_nlink", "st_ctime_ns", "st_ino")] == [1, before.st_ctime_ns, before.st_ino]
    file.unlink()
    assert os.fstat(fd).st_nlink == 0 and os.pread(fd, 3, 5 << 20) == b"old"
    os.close(fd)
    assert ".ckptfs.history" not in os.listdir(mount.daemon.path) and not (mount.daemon.path / ".ckptfs.history").exists()


@pytest.mark.parametrize("flags", [os.O_WRONLY | os.O_TRUNC, os.O_RDWR, "truncate"])
@pytest.mark.parametrize("is_read", [False, True])
def test_an_overwritten_file_goes_on_and_its_set_stays(mount: Area, file: Path, flags: int | str, is_read: bool) -> None:
    directory = keep(mount.daemon, file)
    before = file.stat()
    reader = os.open(file, os.O_RDONLY) if is_read else -1
    if isinstance(flags, str):
        os.truncate(file, 3)
        expected = OLD[:3]
    else:
        fd = os.open(file, flags)
        os.write(fd, b"new")
        os.close(fd)
        expected = b"new" if flags & os.O_TRUNC else b"new" + OLD[3:]
    assert file.read_bytes() == expected
    if is_read:
        assert os.pread(reader, 3, 0) == expected[:3], "an open program sees what is written to its file"
        os.close(reader)
    after = file.stat()
    assert (after.st_ino, after.st_nlink, stat.S_IMODE(after.st_mode)) == (before.st_ino, 1, stat.S_IMODE(before.st_mode))
    assert read_set(mount.daemon, directory) == OLD
    mount.settle()
    assert (mount.pfs / "file").read_bytes() == expected
    kept = mount.daemon.pfs / ".ckptfs.history" / mount.path.name / "file*" / "file@1" / "file"
    assert kept.read_bytes() == OLD


def test_a_mount_process_that_dies_while_it_copies_is_not_noticed(mount: Area, file: Path) -> None:
    directory = keep(mount.daemon, file)
    reader = os.open(file, os.O_RDONLY)
    for _ in range(3):
        mount.daemon.kill("mount")
        with open(file, "r+b", buffering=0) as writer:
            writer.write(b"new")
        assert os.pread(reader, 3, 0) == b"new"
    os.close(reader)
    eventually(lambda: read_set(mount.daemon, directory) == OLD)
