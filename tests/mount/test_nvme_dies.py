"""P1, P8, P10: an NVMe that dies under a running mount costs only the files that exist nowhere else."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, deadline, eventually, shorten
from loop_disk import mounted
from programs import need, refusal, run

pytestmark = [pytest.mark.root, pytest.mark.fuse]
MIB = 1 << 20
Make = Callable[..., DaemonUnderTest]


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    """An XFS of its own on a loop device."""
    need("xfs_io")
    with mounted("xfs", tmp_path) as place:
        yield place


def fill(path: Path, size: int = 40 * MIB) -> bytes:
    """A file that ends on NVMe, because RAM is smaller."""
    data = os.urandom(MIB) * (size // MIB)
    with open(path, "wb", buffering=0) as file:
        for start in range(0, size, MIB):
            file.write(data[start : start + MIB])
    return data


def work(root: Path, name: str) -> None:
    """What goes on in RAM, and in the namespace."""
    (root / name).write_bytes(b"x" * 100_000)
    (root / name).rename(root / f"{name}-renamed")
    assert (root / f"{name}-renamed").read_bytes() == b"x" * 100_000
    (root / f"{name}-gone").write_bytes(b"y")
    (root / f"{name}-gone").unlink()
    (root / f"{name}-dir").mkdir()
    with open(root / f"{name}-renamed", "ab") as file:
        file.write(b"more")
        os.fsync(file.fileno())
    assert all(os.lstat(root / found) for found in os.listdir(root))
    os.statvfs(root)


def is_readable(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError:
        return False
    return True


def die(nvme: Path) -> None:
    run("xfs_io", "-x", "-c", "shutdown", nvme)


def test_with_a_pfs_nothing_is_lost(make_daemon: Make, data_path: str, nvme: Path) -> None:
    daemon = make_daemon(data_path, ram="32M", nvme=nvme)
    daemon.expect_warning("nvme|disk|killed|content|cannot be sealed|removed|write back")
    data = fill(daemon.path / "written-back")
    (daemon.path / "old").write_bytes(b"old")
    daemon.settle()
    nvme_only = "SELECT count(*) FROM copy WHERE tier = 'nvme' AND state = 1"
    assert daemon.catalog(nvme_only)[0][0] >= 1
    writing, reading = os.open(daemon.path / "open", os.O_RDWR | os.O_CREAT), os.open(daemon.path / "written-back", os.O_RDONLY)
    for number in range(40):
        os.pwrite(writing, bytes(MIB), number * MIB)
    os.fsync(writing)
    die(nvme)
    work(daemon.path, "a")
    os.close(writing)
    os.close(reading)
    work(daemon.path, "b")
    assert (daemon.path / "written-back").read_bytes() == data, "the PFS has it"
    os.rename(daemon.path / "written-back", daemon.path / "moved")
    with open(daemon.path / "moved", "ab") as file:
        file.write(b"!")
    assert (daemon.path / "moved").read_bytes() == data + b"!"
    assert refusal((daemon.path / "open").read_bytes) == "EIO", "this one was only there"
    fill(daemon.path / "more")
    os.unlink(daemon.path / "open")
    daemon.kill("mount")
    daemon.kill("mover")
    work(daemon.path, "c")
    restarts = {role: daemon.processes()[role]["restarts"] for role in ("mount", "mover")}
    assert restarts == {"mount": 1, "mover": 1}, "a dead disk is no reason to die"
    eventually(lambda: daemon.command("drain", daemon.path, check=False).returncode == 0, what="write-back goes on")
    assert (daemon.pfs / "moved").read_bytes() == data + b"!"


def test_without_a_pfs_its_files_alone_fail_and_are_back_with_it(make_daemon: Make, nvme: Path, tmp_path: Path) -> None:
    daemon = make_daemon("auto", ram="32M", nvme=nvme, pfs=None, env=shorten(**{"tiers.health.PROBE_NORMAL_S": 1.0}))
    daemon.expect_warning("nvme|disk|only|content|cannot be sealed|removed")
    data = fill(daemon.path / "only-there")
    daemon.settle()
    die(nvme)
    work(daemon.path, "a")
    assert refusal((daemon.path / "only-there").read_bytes) == "EIO"
    os.rename(daemon.path / "only-there", daemon.path / "moved")
    assert (daemon.path / "moved").stat().st_size == len(data)
    work(daemon.path, "b")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        fill(daemon.path / "too-large")
    os.unlink(daemon.path / "too-large")
    eventually(lambda: "only on nvme, which is down" in daemon.command("status", daemon.path).stdout, 90, "status tells what is lost")
    assert "moved: " in daemon.command("status", daemon.path).stdout
    work(daemon.path, "c")
    run("umount", nvme)
    # Another superblock: a mount namespace made meanwhile may still hold the dead one.
    run("cp", tmp_path / "image-xfs", tmp_path / "copy")
    run("mount", "-o", "loop,nouuid", tmp_path / "copy", nvme)
    eventually(lambda: is_readable(daemon.path / "moved"), 60, "it is used again without a restart")
    assert (daemon.path / "moved").read_bytes() == data
    more = fill(daemon.path / "more")
    assert (daemon.path / "more").read_bytes() == more
    daemon.restart()
    assert (daemon.path / "moved").read_bytes() == data and (daemon.path / "more").read_bytes() == more


def test_what_only_it_had_is_no_checkpoint(make_daemon: Make, nvme: Path) -> None:
    """D3, N2: `latest` passes over it, also as a set of the history, and names what RAM has."""
    daemon = make_daemon("auto", ram="32M", nvme=nvme, pfs=None)
    daemon.expect_warning("nvme|disk|only|content|cannot be sealed|removed|set")
    fill(daemon.path / "step_2.bin")
    daemon.settle()
    assert daemon.command("latest", daemon.path).stdout == f"{daemon.path}/step_2.bin\n"
    eventually(lambda: [*(daemon.path / ".ckptfs" / "history" / "step_*.bin").glob("step_2.bin@*")], what="its set")
    die(nvme)
    (daemon.path / "step_1.bin").write_bytes(b"x" * 100_000)
    daemon.settle()
    result = daemon.command("latest", daemon.path)
    assert result.stdout == f"{daemon.path}/step_1.bin\n" and "step_2.bin was passed over: it cannot be read" in result.stderr


@contextlib.contextmanager
def frozen(place: Path) -> Iterator[None]:
    """No change of the filesystem there returns while the block runs."""
    run("fsfreeze", "-f", place)
    try:
        yield
    finally:
        run("fsfreeze", "-u", place)


@pytest.mark.alone
def test_one_that_hangs_costs_only_the_files_on_it(make_daemon: Make, data_path: str, nvme: Path) -> None:
    """P1, P8: creates choose another tier, all else goes on, a kill costs no call, and `status` says what hangs."""
    daemon = make_daemon(data_path, ram="32M", nvme=nvme, env=shorten(**{"tiers.health.PROBE_NORMAL_S": 1.0}))
    daemon.expect_warning("nvme|new files go elsewhere|suspect|down: does not answer|killed")
    for name in ("sealed", "removed"):
        fill(daemon.path / name)
    daemon.settle()
    writing = os.open(daemon.path / "open", os.O_RDWR | os.O_CREAT)
    for number in range(40):
        os.pwrite(writing, bytes(MIB), number * MIB)
    with frozen(nvme), deadline(daemon, 150.0):
        fill(daemon.path / "large")
        os.utime(daemon.path / "sealed", (1, 1))
        work(daemon.path, "a")
        assert (daemon.path / "large").stat().st_size == 40 * MIB
        eventually(lambda: "nvme" in daemon.command("health", daemon.path, check=False).stdout, what="health tells that the device hangs")
        assert "does not answer" in daemon.command("status", daemon.path).stdout
        daemon.kill("mount")
        work(daemon.path, "b")
        os.close(writing)
        os.unlink(daemon.path / "removed")
        for number in range(12):
            fill(daemon.path / f"step_{number}", 8 * MIB)
        unsealed = "SELECT count(*) FROM content WHERE state = 1"
        eventually(lambda: daemon.catalog(unsealed) == [(1,)], what="all but the file on the device is sealed")
    eventually(lambda: daemon.command("health", daemon.path, check=False).returncode == 0, what="it is used again")
    daemon.command("drain", daemon.path)
    assert (daemon.pfs / "large").read_bytes() == (daemon.path / "large").read_bytes()
