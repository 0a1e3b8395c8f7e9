"""P1, P2, P6, F4: what is on the PFS already appears in the mount and can be read, renamed, deleted, overwritten and appended to there."""

import os
import stat
import subprocess
from collections.abc import Callable

import pytest
from daemon_under_test import Area, DaemonUnderTest, eventually

MIB = 1024 * 1024


@pytest.fixture
def stranger(make_daemon: Callable[..., DaemonUnderTest], data_path: str) -> DaemonUnderTest:
    """A daemon whose PFS held something before the first mount."""
    daemon = make_daemon(data_path, start=False)
    (daemon.pfs / "old" / "deep").mkdir(parents=True)
    for number in range(3):
        (daemon.pfs / "old" / f"file{number}").write_bytes(os.urandom(MIB + number))
    (daemon.pfs / "old" / "deep" / "leaf").write_bytes(b"leaf")
    os.chmod(daemon.pfs / "old" / "file1", 0o600)
    os.chown(daemon.pfs / "old" / "file1", 1234, 2345)
    os.utime(daemon.pfs / "old" / "file1", ns=(10**18 + 1, 10**18 + 2))
    os.setxattr(daemon.pfs / "old" / "file1", "user.colour", b"green")
    (daemon.pfs / "old" / "link").symlink_to("file0")
    os.link(daemon.pfs / "old" / "file2", daemon.pfs / "old" / "same")
    os.chmod(daemon.pfs, 0o755)
    return daemon.start()


def test_everything_appears_as_it_is(stranger: DaemonUnderTest) -> None:
    old, there = stranger.path / "old", stranger.pfs / "old"
    assert sorted(os.listdir(stranger.path)) == ["old"]
    assert sorted(os.listdir(old)) == sorted(os.listdir(there))
    for name in ("file0", "file1", "file2", "same"):
        mine, theirs = os.lstat(old / name), os.lstat(there / name)
        assert (mine.st_mode, mine.st_uid, mine.st_gid, mine.st_size) == (theirs.st_mode, theirs.st_uid, theirs.st_gid, theirs.st_size)
        assert (mine.st_mtime_ns, mine.st_nlink) == (theirs.st_mtime_ns, theirs.st_nlink)
        assert (old / name).read_bytes() == (there / name).read_bytes()
    assert os.readlink(old / "link") == "file0" and (old / "link").read_bytes() == (there / "file0").read_bytes()
    assert os.getxattr(old / "file1", "user.colour") == b"green"
    assert os.stat(old / "file2").st_ino == os.stat(old / "same").st_ino
    assert (old / "deep" / "leaf").read_bytes() == b"leaf"


def test_directories_are_visited_lazily(stranger: DaemonUnderTest) -> None:
    assert os.listdir(stranger.path) == ["old"]
    unvisited = "SELECT imported FROM inode JOIN entry ON child = id WHERE name = ?"
    assert stranger.catalog(unvisited, b"old") == [(0,)]
    assert not os.path.exists(stranger.path / "old" / "nothing of this name")
    assert stranger.catalog(unvisited, b"old") == [(1,)] and stranger.catalog(unvisited, b"deep") == [(0,)]
    assert (stranger.path / "old" / "deep" / "leaf").stat().st_size == 4
    assert stranger.catalog(unvisited, b"deep") == [(1,)]


def test_they_can_be_renamed_deleted_overwritten_and_appended_to(stranger: DaemonUnderTest) -> None:
    old, there = stranger.path / "old", stranger.pfs / "old"
    contents = {name: (there / name).read_bytes() for name in ("file0", "file1", "file2")}
    (old / "file0").rename(old / "deep" / "moved")
    with open(old / "file1", "ab") as file:
        file.write(b"appended")
    with open(old / "same", "r+b") as file:
        file.seek(100)
        file.write(b"in the middle")
    (old / "link").unlink()
    (old / "deep" / "leaf").write_bytes(b"overwritten")
    stranger.settle()
    assert (there / "deep" / "moved").read_bytes() == contents["file0"] and not (there / "file0").exists()
    assert (there / "file1").read_bytes() == contents["file1"] + b"appended"
    found = os.stat(there / "file1")
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o600, 1234, 2345)
    changed = contents["file2"][:100] + b"in the middle" + contents["file2"][113:]
    assert (there / "same").read_bytes() == changed == (old / "file2").read_bytes()
    assert (there / "file2").read_bytes() == changed, "the other name of the same file"
    assert not os.path.lexists(there / "link") and (there / "deep" / "leaf").read_bytes() == b"overwritten"
    (old / "deep").rename(stranger.path / "new place")
    for name in ("file1", "file2", "same"):
        (old / name).unlink()
    old.rmdir()
    stranger.settle()
    assert sorted(name for name in os.listdir(stranger.pfs) if name != ".ckptfs") == ["new place"]
    assert sorted(os.listdir(stranger.pfs / "new place")) == ["leaf", "moved"]


def test_an_unvisited_directory_can_be_renamed_and_visited_after_that(stranger: DaemonUnderTest) -> None:
    (stranger.path / "old").rename(stranger.path / "other")
    assert (stranger.path / "other" / "deep" / "leaf").read_bytes() == b"leaf"
    stranger.settle()
    assert (stranger.pfs / "other" / "deep" / "leaf").read_bytes() == b"leaf" and not (stranger.pfs / "old").exists()
    stranger.command("refresh", stranger.path)
    assert os.listdir(stranger.path) == ["other"]


def test_a_directory_that_is_not_empty_on_the_pfs_is_not_removed(stranger: DaemonUnderTest) -> None:
    with pytest.raises(OSError, match="not empty"):
        os.rmdir(stranger.path / "old" / "deep")


def test_refresh_finds_external_changes(mount: Area) -> None:
    (mount.path / "file").write_bytes(b"ours")
    (mount.path / "doomed").write_bytes(b"ours too")
    (mount.path / "dir").mkdir()
    mount.settle()
    assert not (mount.path / "new").exists(), "the kernel now knows that it is absent"
    (mount.pfs / "new").write_bytes(b"a stranger's")
    (mount.pfs / "file").write_bytes(b"changed by a stranger")
    (mount.pfs / "doomed").unlink()
    (mount.pfs / "dir" / "below").write_bytes(b"1")
    mount.command("refresh", mount.path)
    mount.command("refresh", mount.path / "dir")
    eventually((mount.path / "new").exists, what="a new name is seen")
    eventually(lambda: not (mount.path / "doomed").exists(), what="a vanished name is gone")
    eventually(lambda: (mount.path / "file").stat().st_size == 21, what="a changed size is seen")
    assert (mount.path / "file").read_bytes() == b"changed by a stranger" and (mount.path / "new").read_bytes() == b"a stranger's"
    assert sorted(os.listdir(mount.path)) == ["dir", "file", "new"] and os.listdir(mount.path / "dir") == ["below"]


def test_refresh_while_write_back_runs_takes_nothing_of_ours_away(mount: Area) -> None:
    """A listing that is overtaken by write-back is not believed."""
    for number in range(300):
        (mount.path / f"f{number}").write_bytes(b"%d" % number)
        if number % 3 == 0:
            (mount.path / f"f{number}").rename(mount.path / f"g{number}")
        if number % 50 == 0:
            mount.command("refresh", mount.path)
    for _ in range(3):
        mount.command("refresh", mount.path)
    mount.settle()
    mount.command("refresh", mount.path)
    names = {f"g{number}" if number % 3 == 0 else f"f{number}" for number in range(300)}
    assert set(os.listdir(mount.path)) == names == set(os.listdir(mount.pfs))
    assert all((mount.path / name).read_bytes() == name[1:].encode() for name in names)


def test_a_user_may_read_what_the_pfs_lets_him_read(mount: Area) -> None:
    (mount.pfs / "closed").mkdir(parents=True)
    (mount.pfs / "closed" / "secret").write_bytes(b"s")
    os.chmod(mount.pfs / "closed", 0o700)
    mount.command("refresh", mount.path)
    eventually((mount.path / "closed").exists)
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "ls", str(mount.path / "closed")]
    assert subprocess.run(as_nobody, capture_output=True, check=False, timeout=60).returncode != 0
    assert os.listdir(mount.path / "closed") == ["secret"]
