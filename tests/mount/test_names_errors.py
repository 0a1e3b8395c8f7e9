"""Names through a real mount: the errnos of ext4, the longest names and paths, names that are no text (P2, F4)."""

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import refusal

pytestmark = pytest.mark.fuse

NOT_TEXT = b"\xff\xfe \xc3( caf\xe9\n\t"


def test_errnos_of_making_and_removing(here: Path) -> None:
    (here / "file").touch()
    (here / "full" / "sub").mkdir(parents=True)
    assert refusal(os.mkdir, here / "file") == "EEXIST"
    assert refusal(os.mkdir, here / "none" / "x") == "ENOENT"
    assert refusal(os.mkdir, here / "file" / "x") == "ENOTDIR"
    assert refusal(os.open, here / "file", os.O_CREAT | os.O_EXCL) == "EEXIST"
    assert refusal(os.open, here / "full", os.O_WRONLY) == "EISDIR"
    assert refusal(os.open, here / "file", os.O_DIRECTORY) == "ENOTDIR"
    assert refusal(os.open, here / "none", os.O_RDONLY) == "ENOENT"
    assert refusal(os.unlink, here / "full") == "EISDIR"
    assert refusal(os.unlink, here / "none") == "ENOENT"
    assert refusal(os.rmdir, here / "full") == "ENOTEMPTY"
    assert refusal(os.rmdir, here / "file") == "ENOTDIR"
    assert refusal(os.rmdir, f"{here}/full/.") == "EINVAL"
    assert refusal(os.symlink, "x", here / "file") == "EEXIST"
    assert refusal(os.link, here / "full", here / "x") == "EPERM"
    assert refusal(os.link, here / "file", here / "full") == "EEXIST"
    assert refusal(os.readlink, here / "file") == "EINVAL"


def test_a_name_has_255_bytes_at_most(here: Path) -> None:
    longest, longer = "n" * 255, "n" * 256
    (here / longest).write_text("x")
    assert os.listdir(here) == [longest]
    for act in (os.stat, os.mkdir, os.unlink, os.mkfifo, lambda path: os.symlink("x", path), Path.touch):
        assert refusal(act, here / longer) == "ENAMETOOLONG"
    assert refusal(os.rename, here / longest, here / longer) == "ENAMETOOLONG"


def test_a_path_has_4095_bytes_at_most(here: Path) -> None:
    deep = os.fsencode(here)
    while len(deep) + 1 + 200 < 4000:
        deep += b"/" + b"d" * 200
        os.mkdir(deep)
    longest = deep + b"/" + b"f" * (4095 - len(deep) - 1)
    assert len(longest) == 4095
    with open(longest, "wb") as file:
        file.write(b"deep")
    os.rename(longest, deep + b"/short")
    os.rename(deep + b"/short", longest)
    assert os.stat(longest).st_size == 4
    assert refusal(os.stat, longest + b"f") == "ENAMETOOLONG"


def test_names_are_bytes(here: Path) -> None:
    directory = os.fsencode(here) + b"/" + NOT_TEXT
    os.mkdir(directory)
    with open(directory + b"/" + NOT_TEXT, "wb") as file:
        file.write(b"1")
    os.symlink(NOT_TEXT, directory + b"/link")
    assert sorted(os.listdir(directory)) == sorted([NOT_TEXT, b"link"])
    assert os.readlink(directory + b"/link") == NOT_TEXT
    os.rename(directory + b"/" + NOT_TEXT, os.fsencode(here) + b"/\x80")
    assert set(os.listdir(os.fsencode(here))) == {NOT_TEXT, b"\x80"}


@pytest.mark.parametrize("length", [1, 59, 60, 1000, 4095])
def test_a_symlink_holds_4095_bytes(here: Path, length: int) -> None:
    target = "t" * length
    os.symlink(target, here / "link")
    assert os.readlink(here / "link") == target
    assert os.lstat(here / "link").st_size == length
    assert refusal(os.symlink, "t" * 4096, here / "long") == "ENAMETOOLONG"


def test_symlinks_are_followed_and_loops_refused(here: Path) -> None:
    (here / "dir").mkdir()
    (here / "dir" / "file").write_text("x")
    os.symlink("dir", here / "to")
    os.symlink("loop", here / "loop")
    assert (here / "to" / "file").read_text() == "x"
    assert refusal(os.stat, here / "loop") == "ELOOP"
    assert refusal(os.open, here / "to", os.O_NOFOLLOW) == "ELOOP"


def test_hard_links_are_one_file(here: Path) -> None:
    (here / "a").write_text("one")
    (here / "dir").mkdir()
    os.link(here / "a", here / "dir" / "b")
    assert os.stat(here / "a").st_nlink == 2
    assert os.path.samefile(here / "a", here / "dir" / "b")
    with open(here / "dir" / "b", "a") as file:
        file.write(" two")
    os.unlink(here / "a")
    assert ((here / "dir" / "b").read_text(), os.stat(here / "dir" / "b").st_nlink) == ("one two", 1)


@pytest.mark.alone
def test_link_counts_and_times_of_directories(here: Path) -> None:
    os.mkdir(here / "d")
    os.utime(here / "d", ns=(1, 1))
    os.mkdir(here / "d" / "sub")
    (here / "d" / "file").touch()
    found = os.stat(here / "d")
    assert found.st_nlink == 3
    assert found.st_mtime_ns > 1
    os.rename(here / "d" / "sub", here / "sub")
    assert (os.stat(here / "d").st_nlink, os.stat(here).st_nlink) == (2, 4)
    assert os.stat(here / "sub" / "..").st_ino == os.stat(here).st_ino


@pytest.fixture
def near(here: Path) -> Iterator[Path]:
    """The directory as the working directory: a socket's path may have 108 bytes."""
    before = os.getcwd()
    os.chdir(here)
    yield here
    os.chdir(before)


def test_fifos_sockets_and_devices(near: Path) -> None:
    os.mkfifo("fifo", 0o640)
    os.mknod("null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod("big", stat.S_IFBLK | 0o600, os.makedev(259, 65537))
    os.mknod("plain", stat.S_IFREG | 0o600)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("socket")
        server.listen()
        client.connect("socket")
    assert [stat.S_IFMT(os.stat(name).st_mode) for name in ("fifo", "socket", "null", "big", "plain")] == [
        stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFREG,
    ]  # fmt: skip
    assert (os.stat("null").st_rdev, os.stat("big").st_rdev) == (os.makedev(1, 3), os.makedev(259, 65537))
    with open("plain", "rb") as file:
        assert file.read() == b""
    reader = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)
    with open("fifo", "wb", buffering=0) as writer:
        writer.write(b"through")
        assert os.read(reader, 100) == b"through"
    os.close(reader)


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT ROOT: cannot make set-id files of root")
def test_set_id_programs_and_devices_are_shown_and_not_honoured(here: Path) -> None:
    """Another node may have made them: the mount is nosuid and nodev by default."""
    program, device = here / "id", here / "null"
    shutil.copy("/usr/bin/id", program)
    program.chmod(0o4755)
    os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert stat.S_IMODE(program.stat().st_mode) == 0o4755 and program.stat().st_uid == 0
    shown = subprocess.run(["setpriv", "--reuid", "65534", "--clear-groups", program, "-u"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "65534"
    assert refusal(os.open, device, os.O_RDONLY) == "EACCES"


def test_a_removed_working_directory_is_empty_and_takes_nothing(here: Path) -> None:
    os.mkdir(here / "gone")
    descriptor = os.open(here / "gone", os.O_RDONLY)
    try:
        os.rmdir(here / "gone")
        assert os.listdir(descriptor) == []
        assert os.fstat(descriptor).st_nlink == 0
        assert refusal(os.open, "x", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor) == "ENOENT"
        assert refusal(os.mkdir, "x", dir_fd=descriptor) == "ENOENT"
    finally:
        os.close(descriptor)


def test_statfs_shows_free_space(here: Path) -> None:
    found = os.statvfs(here)
    assert found.f_namemax == 255
    assert 0 < found.f_bavail <= found.f_blocks
    assert found.f_ffree > 0
