"""What the kernel is told at once is what the catalog says then: names that were not there, directories after creates (P2, P8, F4)."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import refusal

pytestmark = pytest.mark.fuse

APPEAR: dict[str, Callable[[Path, Path], None]] = {
    "create": lambda there, name: name.write_bytes(b"x"),
    "mkdir": lambda there, name: name.mkdir(),
    "symlink": lambda there, name: name.symlink_to("x"),
    "link": os.link,
    "rename": lambda there, name: there.rename(name),
    "mknod": lambda there, name: os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(7, 300)),
}


@pytest.mark.parametrize("how", APPEAR)
def test_a_name_that_was_not_there_appears(mount: Any, how: str) -> None:
    (mount.path / "directory").mkdir()
    (mount.path / "there").write_bytes(b"there")
    name = mount.path / "directory" / "name"
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            os.lstat(name)
    APPEAR[how](mount.path / "there", name)
    inode = os.lstat(name).st_ino
    assert [entry.inode() for entry in os.scandir(name.parent)] == [inode]
    if how == "mknod":
        assert os.lstat(name).st_rdev == os.makedev(7, 300)
    (os.rmdir if how == "mkdir" else os.unlink)(name)
    assert not os.path.lexists(name)
    name.write_bytes(b"again")
    assert os.stat(name).st_ino != inode and name.read_bytes() == b"again"


def test_a_name_that_was_not_there_comes_with_the_directory_that_has_it(mount: Any) -> None:
    for part in ("with", "without"):
        (mount.path / part).mkdir()
    (mount.path / "with" / "name").write_bytes(b"x")
    assert not (mount.path / "without" / "name").exists()
    (mount.path / "with").rename(mount.path / "moved")
    (mount.path / "without").rmdir()
    (mount.path / "moved").rename(mount.path / "without")
    assert (mount.path / "without" / "name").read_bytes() == b"x"


@pytest.mark.alone
def test_a_directory_right_after_each_change_of_its_names(mount: Any) -> None:
    directory = mount.path / "directory"
    directory.mkdir()
    before = os.stat(directory)
    changes: list[tuple[Callable[[], Any], int]] = [
        (lambda: os.close(os.open(directory / "file", os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)), 2),
        ((directory / "sub").mkdir, 3),
        (lambda: os.close(os.open(directory / "other", os.O_CREAT | os.O_WRONLY, 0o600)), 3),
        ((directory / "sub").rmdir, 2),
        (lambda: (directory / "file").rename(directory / "other"), 2),
    ]
    for change, links in changes:
        change()
        after = os.stat(directory)
        assert after.st_nlink == links
        assert after.st_mtime_ns == after.st_ctime_ns > before.st_mtime_ns
        before = after
    os.close(os.open(directory / "last", os.O_CREAT | os.O_WRONLY, 0o600))
    os.chmod(directory, 0o711)
    os.utime(directory, ns=(5, 7))
    found = os.stat(directory)
    assert (stat.S_IMODE(found.st_mode), found.st_atime_ns, found.st_mtime_ns) == (0o711, 5, 7)


def test_what_a_new_file_is_said_to_be(mount: Any) -> None:
    """The answer to a create is that of the stat after it, also once the kernel has forgotten it."""
    mount.path.chmod(0o2777)
    os.chown(mount.path, -1, 4321)
    fd = os.open(mount.path / "file", os.O_CREAT | os.O_RDWR, 0o640)
    created = os.fstat(fd)
    assert (stat.S_IMODE(created.st_mode), created.st_gid, created.st_nlink, created.st_size) == (0o640 & ~_umask(), 4321, 1, 0)
    assert os.write(fd, b"x" * 10_000) == 10_000
    assert os.fstat(fd).st_size == os.stat(mount.path / "file").st_size == 10_000
    os.close(fd)
    found = os.stat(mount.path / "file")
    assert (found.st_ino, found.st_mode, found.st_size) == (created.st_ino, created.st_mode, 10_000)
    assert refusal(os.open, mount.path / "file", os.O_CREAT | os.O_EXCL | os.O_WRONLY) == "EEXIST"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.alone
def test_after_a_kill_and_after_external_changes(fresh_mount: Any) -> None:
    directory, below = fresh_mount.path / "directory", fresh_mount.pfs / "directory"
    directory.mkdir()
    (directory / "ours").write_bytes(b"ours")
    assert not (directory / "missing").exists()
    fresh_mount.kill("mount")
    assert not (directory / "missing").exists()
    (directory / "missing").write_bytes(b"made")
    assert os.stat(directory).st_nlink == 2 and (directory / "missing").read_bytes() == b"made"
    fresh_mount.settle()
    assert not (directory / "theirs").exists() and not (directory / "their directory").exists()
    (below / "theirs").write_bytes(b"theirs")
    (below / "their directory").mkdir()
    fresh_mount.command("refresh", directory)
    assert (directory / "theirs").read_bytes() == b"theirs"
    assert os.stat(directory).st_nlink == 3 and (directory / "their directory").is_dir()
