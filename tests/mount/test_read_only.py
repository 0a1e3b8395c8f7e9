"""P11: a read-only mount (`-o ro`) reads the PFS and changes nothing, on both data paths."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, NotStarted, ckptfs

from ckptfs import limits

LARGE = os.urandom(6 * limits.MIB)


def build_tree(pfs: Path) -> None:
    step = pfs / "run" / "step_10"
    step.mkdir(parents=True)
    (step / "model.pt").write_bytes(LARGE)
    (pfs / "config.json").write_bytes(b"{}")
    (pfs / "link").symlink_to("config.json")


def list_tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """{path: (mode, size, mtime)} of all below, ckptfs's own names included."""
    found = {path: path.lstat() for path in root.rglob("*")}
    return {str(path.relative_to(root)): (one.st_mode, one.st_size, one.st_mtime_ns) for path, one in found.items()}


@pytest.fixture(params=["buffered", "passthrough"])
def reader(request: pytest.FixtureRequest, make_daemon: Callable[..., DaemonUnderTest]) -> Iterator[DaemonUnderTest]:
    """A read-only mount of a PFS with a tree."""
    daemon = make_daemon(data_path=request.param, start=False, ro="", nvme=None, ram="64M")
    build_tree(daemon.pfs)
    yield daemon.start()


def changes(top: Path) -> dict[str, Callable[[], object]]:
    """Every way in which a program changes a tree."""
    file, new, directory = top / "config.json", top / "new", top / "run"
    return {
        "create": lambda: os.open(new, os.O_WRONLY | os.O_CREAT),
        "write": lambda: os.open(file, os.O_WRONLY),
        "truncate at open": lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
        "truncate": lambda: os.truncate(file, 1),
        "mkdir": new.mkdir,
        "mknod": lambda: os.mkfifo(new),
        "symlink": lambda: new.symlink_to("x"),
        "link": lambda: os.link(file, new),
        "unlink": file.unlink,
        "rmdir": (directory / "step_10").rmdir,
        "rename": lambda: file.rename(new),
        "chmod": lambda: file.chmod(0o600),
        "utime": lambda: os.utime(file, (1, 1)),
        "setxattr": lambda: os.setxattr(file, "user.a", b"1"),
        "pin": lambda: os.setxattr(directory, "user.ckptfs.pin", b"1"),
    }


def collect_errors(top: Path) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name, act in changes(top).items():
        found[name] = None
        try:
            act()
        except OSError as failure:
            found[name] = failure.errno
    return found


def test_it_reads_the_pfs_and_every_change_is_erofs(reader: DaemonUnderTest) -> None:
    """F4, P7, P8: a login node follows a run that another node writes back."""
    before = list_tree(reader.pfs)
    refused = dict.fromkeys(changes(reader.path), errno.EROFS)
    assert (reader.path / "run" / "step_10" / "model.pt").read_bytes() == LARGE
    assert (reader.path / "link").read_text() == "{}"
    assert os.statvfs(reader.path).f_flag & os.ST_RDONLY
    assert collect_errors(reader.path) == refused
    # A remount that does not ask ckptfs takes the kernel's flag away, and nothing else.
    subprocess.run(["mount", "-i", "-o", "remount,rw", str(reader.path)], check=True)
    assert not os.statvfs(reader.path).f_flag & os.ST_RDONLY
    assert collect_errors(reader.path) == refused
    reader.kill("mount")
    assert collect_errors(reader.path) == refused
    assert list_tree(reader.pfs) == before
    shutil.copytree(reader.pfs / "run" / "step_10", reader.pfs / "run" / "step_20")
    ckptfs("refresh", reader.path / "run")
    assert (reader.path / "run" / "step_20" / "model.pt").read_bytes() == LARGE
    before = list_tree(reader.pfs)
    ckptfs("drain", reader.path)
    assert reader.unmount() == 0
    assert list_tree(reader.pfs) == before


def test_it_leaves_out_what_has_no_room_here(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """P10: nothing is put into ckptfs's own directory on the PFS; a file larger than the tiers is read from the PFS."""
    daemon = make_daemon(start=False, ro="", nvme=None, ram="16M")
    size = 64 * limits.MIB
    (daemon.pfs / "big").write_bytes(LARGE * (size // len(LARGE)))
    daemon.start()
    assert (daemon.path / "big").read_bytes() == LARGE * (size // len(LARGE))
    assert sorted(os.listdir(daemon.pfs)) == ["big"]


def test_a_second_mount_of_a_name_is_refused_and_a_bind_mount_does_it(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path) -> None:
    """P11: one name has one catalog and one daemon; the kernel shows the same mount read-only at another place."""
    daemon = make_daemon()
    second = make_daemon(start=False, ro="", state=daemon.state, pfs=daemon.pfs, nvme=None)
    with pytest.raises(NotStarted, match="mount --bind -o ro"):
        second.start()
    subprocess.run(["mount", "--bind", "-o", "ro", str(daemon.path), str(tmp_path)], check=True)
    try:
        (daemon.path / "a").write_bytes(b"1")
        assert (tmp_path / "a").read_bytes() == b"1"
        with pytest.raises(OSError, match="Read-only"):
            (tmp_path / "b").touch()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
