"""Two daemons of one cluster on this machine: what one does to names, the other sees (N1). With a real etcd, which may stop in between."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, eventually
from etcd_server import Etcd, node_options, serving
from programs import refusal

pytestmark = [pytest.mark.root, pytest.mark.fuse]

Two = tuple[DaemonUnderTest, DaemonUnderTest]


def node(etcd: Etcd, name: str) -> DaemonUnderTest:
    return DaemonUnderTest(pfs=None, nvme=None, ram="256M", **node_options(etcd.joined, node=name))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with serving(tmp_path_factory.mktemp("etcd")) as started:
        yield started


@pytest.fixture(scope="module")
def two(server: Etcd) -> Iterator[Two]:
    daemons = node(server, "a"), node(server, "b")
    try:
        yield daemons[0].start(), daemons[1].start()
        assert [line for daemon in daemons for line in daemon.complaints()] == []
    finally:
        for daemon in daemons:
            daemon.close()


@pytest.fixture
def dirs(two: Two, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A directory of the test's own, as both see it."""
    name = request.node.name
    (two[0].path / name).mkdir()
    return two[0].path / name, two[1].path / name


def test_names_are_visible_at_once(dirs: tuple[Path, Path]) -> None:
    a, b = dirs
    (a / "d").mkdir()
    (a / "d" / "f").write_bytes(b"12345")
    os.symlink("d/f", a / "s")
    assert sorted(os.listdir(b)) == ["d", "s"] and os.listdir(b / "d") == ["f"]
    assert os.readlink(b / "s") == "d/f"
    os.rename(b / "d" / "f", b / "g")
    assert sorted(os.listdir(a)) == ["d", "g", "s"] and os.listdir(a / "d") == []
    assert not (a / "d" / "f").exists()
    os.unlink(a / "g")
    assert not (b / "g").exists()
    os.rmdir(b / "d")
    assert os.listdir(a) == ["s"]


def test_the_next_open_sees_a_closed_file(dirs: tuple[Path, Path]) -> None:
    """N1, close-to-open: size, times, mode and attributes."""
    a, b = dirs
    for size in (5, 70_000, 0, 13):
        (a / "f").write_bytes(b"x" * size)
        there, here = (a / "f").stat(), (b / "f").stat()
        assert (here.st_size, here.st_mtime_ns, here.st_ino) == (size, there.st_mtime_ns, there.st_ino)
    os.chmod(b / "f", 0o600)
    os.utime(b / "f", ns=(1, 2))
    os.setxattr(b / "f", "user.k", b"v\xff")
    found = (a / "f").stat()
    assert (found.st_mode & 0o777, found.st_atime_ns, found.st_mtime_ns) == (0o600, 1, 2)
    assert os.getxattr(a / "f", "user.k") == b"v\xff"


def test_one_of_two_makes_the_name(dirs: tuple[Path, Path]) -> None:
    """O_EXCL and mkdir from both sides at once: each name is made by exactly one."""
    a, b = dirs
    count = 60

    def make(base: Path) -> list[str]:
        made = []
        for number in range(count):
            try:
                if number % 2:
                    os.mkdir(base / str(number))
                else:
                    os.close(os.open(base / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                made.append(str(number))
            except FileExistsError:
                pass
        return made

    with ThreadPoolExecutor() as pool:
        mine, theirs = pool.map(make, (a, b))
    assert sorted([*mine, *theirs], key=int) == [str(number) for number in range(count)]
    assert sorted(os.listdir(a)) == sorted(os.listdir(b)) == sorted([*mine, *theirs])
    assert (a).stat().st_nlink == (b).stat().st_nlink == 2 + count // 2


def test_a_directory_that_is_used_stays_and_no_loop_comes_about(dirs: tuple[Path, Path]) -> None:
    a, b = dirs
    for name in ("p", "q"):
        (a / name).mkdir()
    (b / "p" / "f").touch()
    assert refusal(os.rmdir, a / "p") == "ENOTEMPTY"
    os.rename(a / "p", a / "q" / "p")
    assert refusal(os.rename, b / "q", b / "q" / "p" / "q") == "EINVAL"
    assert os.listdir(b / "q" / "p") == ["f"]


def test_a_thousand_names_of_the_other_node(dirs: tuple[Path, Path]) -> None:
    a, b = dirs
    names = [f"{number:04}" for number in range(1000)]
    for name in names:
        os.mknod(a / name)
    assert sorted(os.listdir(b)) == names
    os.unlink(a / names[7])
    assert sorted(os.listdir(b)) == names[:7] + names[8:]


def test_a_killed_mount_process_loses_nothing_that_was_answered(two: Two, dirs: tuple[Path, Path]) -> None:
    """P8: applications wait, and every mkdir that returned is seen by the other node."""
    a, b = dirs
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(lambda: [os.mkdir(a / str(number)) for number in range(400)])
        for _ in range(3):
            eventually(lambda: len(os.listdir(b)) % 7 == 3 or made.done())
            two[0].expect_warning("mount")
            two[0].kill("mount")
        made.result(60)
    assert len(os.listdir(b)) == 400


def test_without_the_store_work_goes_on_and_comes_home(server: Etcd, two: Two, dirs: tuple[Path, Path]) -> None:
    """P1: nothing fails or waits for long; afterwards both have everything, what conflicts under two names."""
    a, b = dirs
    (a / "before").write_bytes(b"1")
    os.stat(b / "before")
    for daemon in two:
        daemon.expect_warning("cluster|etcd|store")
    server.stop()
    (a / "x").write_bytes(b"from a")
    (b / "x").write_bytes(b"from b, later")
    for base in (a, b):
        (base / "d").mkdir()
    (a / "d" / "1").touch()
    (b / "d" / "2").touch()
    os.rename(b / "before", b / "after")
    assert sorted(os.listdir(b)) == ["after", "d", "x"]
    server.start()
    wanted = ["after", "d", "x"]
    eventually(lambda: sorted(name for name in os.listdir(a) if "conflict" not in name) == wanted == sorted(
        name for name in os.listdir(b) if "conflict" not in name), what="both nodes show the same tree")  # fmt: skip
    eventually(lambda: sorted(os.listdir(a)) == sorted(os.listdir(b)) and len(os.listdir(a)) == 4)
    assert sorted(os.listdir(a / "d")) == sorted(os.listdir(b / "d")) == ["1", "2"]
    assert (a / "x").stat().st_size == len(b"from b, later")
    beside = next(name for name in os.listdir(a) if name.startswith("x.ckptfs-conflict-"))
    assert (b / beside).stat().st_size == len(b"from a")
