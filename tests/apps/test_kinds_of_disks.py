"""D10: any mounted filesystem can be the PFS, and the NVMe tier: ext4, xfs, btrfs and tmpfs. What they can do differs: sharing blocks,
leases, xattrs, times."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, eventually
from loop_disk import NOT_SHARING, SHARING, mounted
from programs import differences

from ckptfs.limits import BLOCK_BYTES

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


def test_what_did_not_change_is_stored_once_and_shown(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path) -> None:
    """H5: two sets of which a block differs, on NVMe and on the PFS. `status` and `df` show what that saves."""
    with mounted("xfs", tmp_path) as nvme, mounted("btrfs", tmp_path) as pfs:
        daemon = make_daemon("auto", ram="32M", nvme=nvme, pfs=pfs)
        frozen = os.urandom(9 * BLOCK_BYTES)
        for number in range(2):
            (daemon.path / f"step_{number}.pt").write_bytes(frozen + os.urandom(BLOCK_BYTES))
            daemon.settle()

        def is_shown(command: str) -> bool:
            tiers = json.loads(daemon.command(command, daemon.path, "--json").stdout)["tiers"]
            return all(tier["shared_bytes"] >= len(frozen) for tier in tiers if tier["name"] != "ram")

        for command in ("status", "df"):
            eventually(lambda command=command: is_shown(command), what=command)
        for name in ("step_0.pt", "step_1.pt"):
            assert (daemon.path / name).read_bytes() == (pfs / name).read_bytes()
        daemon.unmount()
