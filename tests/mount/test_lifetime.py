"""What a user finds after unmounting, remounting and waiting, with a PFS and without one."""

import os
from collections.abc import Callable

from daemon_under_test import Area, DaemonUnderTest


def test_without_a_pfs_all_but_the_level_pfs_works(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """G2, D11: nothing is configured but RAM; a remount finds what was written, and `wait --level pfs` says what is missing."""
    daemon = make_daemon("auto", pfs=None, nvme=None)
    (daemon.path / "run").mkdir()
    (daemon.path / "run" / "step").write_bytes(b"data" * 1000)
    daemon.settle()
    assert os.getxattr(daemon.path / "run" / "step", "user.ckptfs.level") == b"local"
    refused = daemon.command("wait", daemon.path / "run", "--level", "pfs", "--timeout", "5s", check=False)
    assert refused.returncode not in (0, 3) and "Traceback" not in refused.stderr and refused.stderr.strip()
    assert daemon.unmount() == 0
    daemon.start()
    assert (daemon.path / "run" / "step").read_bytes() == b"data" * 1000


def test_an_open_file_is_not_taken_for_a_checkpoint(mount: Area) -> None:
    """N7, N9: any bytes; the PFS shows them when they are whole, and not before."""
    whole, part = mount.path / "whole", mount.path / "part"
    with open(part, "wb", buffering=0) as file:
        file.write(bytes(range(256)))
        whole.write_bytes(bytes(range(255, -1, -1)))
        mount.command("wait", whole, "--level", "pfs")
        assert os.listdir(mount.pfs) == ["whole"]
        file.write(b"rest")
    mount.settle()
    assert (mount.pfs / "part").read_bytes() == bytes(range(256)) + b"rest"


def test_closing_does_not_wait_for_the_pfs(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """D9, T4: with a mover that cannot write anything back, several checkpoints in a row are written, closed and read."""
    daemon = make_daemon("auto", env={"CKPTFS_FAULT": "write_back:create=EIO@*"})
    daemon.expect_warning("EIO|write.back")
    for step in range(5):
        (daemon.path / f"step{step}").write_bytes(bytes([step]) * 100_000)
    assert all((daemon.path / f"step{step}").read_bytes() == bytes([step]) * 100_000 for step in range(5))
    assert [name for name in os.listdir(daemon.pfs) if not name.startswith(".")] == []
    assert daemon.unsettled().get("journal rows")
    daemon.crash()
