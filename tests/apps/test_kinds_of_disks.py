"""D10: any mounted filesystem can be the PFS, and the NVMe tier: ext4, xfs, btrfs and tmpfs. What they can do differs: sharing blocks,
leases, xattrs, times."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest
from loop_disk import NOT_SHARING, SHARING, mounted
from programs import differences

pytestmark = pytest.mark.apps


@pytest.fixture(params=[*SHARING, *NOT_SHARING])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(request.param, tmp_path) as place:
        yield place


def keeps_xattrs(directory: Path) -> bool:
    """tmpfs does since Linux 6.6."""
    try:
        os.setxattr(directory, "user.probe", b"")
    except OSError:
        return False
    os.removexattr(directory, "user.probe")
    return True


def test_it_holds_what_is_written_back_and_what_ram_cannot(make_daemon: Callable[..., DaemonUnderTest], disk: Path) -> None:
    """D10, T2: as PFS and as NVMe tier at once; files outgrow RAM, change in place, and are read again after RAM was lost."""
    for name in ("pfs", "nvme"):
        (disk / name).mkdir()
    daemon = make_daemon("auto", ram="32M", pfs=disk / "pfs", nvme=disk / "nvme")
    large, small = os.urandom(1 << 20) * 40, os.urandom(10_000)
    (daemon.path / "large").write_bytes(large)
    (daemon.path / "small").write_bytes(small)
    os.setxattr(daemon.path / "small", "user.note", b"kept")
    with open(daemon.path / "holes", "wb") as file:
        file.truncate(100 << 20)
        file.seek(50 << 20)
        file.write(b"island")
    daemon.settle()
    with open(daemon.path / "large", "r+b") as file:
        file.seek(5 << 20)
        file.write(b"changed")
    daemon.settle()
    assert differences(daemon.path, disk / "pfs") == []
    if keeps_xattrs(disk / "pfs"):
        assert os.getxattr(disk / "pfs" / "small", "user.note") == b"kept"
    assert os.stat(disk / "pfs" / "holes").st_blocks * 512 < 10 << 20
    daemon.unmount()
    daemon.wipe_ram()
    daemon.expect_warning("ram|RAM")
    daemon.start()
    assert (daemon.path / "small").read_bytes() == small
    assert (daemon.path / "large").read_bytes() == large[: 5 << 20] + b"changed" + large[(5 << 20) + 7 :]
    daemon.unmount()
