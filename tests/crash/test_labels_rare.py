"""P7, P8: death at those disk operations that only a load made for them reaches. What the application wrote is there, and on the PFS."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, deadline, eventually
from programs import differences

pytestmark = pytest.mark.crash
RAM = "32M"


def outgrow_ram(daemon: DaemonUnderTest) -> None:
    """A file that becomes larger than the RAM tier while it is written: its bytes move to NVMe under the writer."""
    piece = os.urandom(1 << 20)
    with open(daemon.path / "large", "wb", buffering=0) as file:
        for _ in range(48):
            assert file.write(piece) == len(piece)
        file.truncate(50 << 20)
    assert (daemon.path / "large").read_bytes() == piece * 48 + bytes(2 << 20)


def sync_on_nvme(daemon: DaemonUnderTest) -> None:
    """fsync of a file that lies on NVMe reaches the disk."""
    with open(daemon.path / "large", "wb", buffering=0) as file:
        for _ in range(48):
            file.write(bytes(1 << 20))
        os.fsync(file.fileno())
        os.fsync(file.fileno())


def change_owner(daemon: DaemonUnderTest) -> None:
    (daemon.path / "owned").write_bytes(b"mine")
    os.chown(daemon.path / "owned", 1234, 2345)


def vanish_on_pfs(daemon: DaemonUnderTest) -> None:
    """What a stranger made and took away again."""
    (daemon.pfs / "strange").mkdir()
    (daemon.pfs / "strange" / "file").write_bytes(b"x")
    daemon.command("refresh", daemon.path)
    assert (daemon.path / "strange" / "file").read_bytes() == b"x"
    (daemon.pfs / "strange" / "file").unlink()
    daemon.command("refresh", daemon.path / "strange")


LOADS: dict[str, Callable[[DaemonUnderTest], None]] = {
    "move:create": outgrow_ram,
    "move:copy:read": outgrow_ram,
    "move:copy:write": outgrow_ram,
    "move:copy:truncate": outgrow_ram,
    "behind:wait": outgrow_ram,
    "write:fsync": sync_on_nvme,
    "pfs:chown": change_owner,
    "scan:vanish": vanish_on_pfs,
}


@pytest.mark.parametrize("label", LOADS)
def test_it_goes_on_after(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path, label: str) -> None:
    faults = tmp_path / "faults"
    faults.write_text(f"{label}=kill@1")
    daemon = make_daemon("auto", ram=RAM, env={"CKPTFS_FAULT": f"@{faults}"})
    daemon.expect_warning(".")

    def calm() -> None:
        """A process that is started anew counts its calls anew: one death is enough."""
        eventually(lambda: over.is_set() or deaths(daemon), what=f"{label} is reached")
        faults.write_text("")

    over = threading.Event()
    watcher = threading.Thread(target=calm)
    watcher.start()
    try:
        with deadline(daemon, 120):
            LOADS[label](daemon)
            daemon.settle()
            assert deaths(daemon), "this load did not reach it"
            assert differences(daemon.path, daemon.pfs) == []
    finally:
        over.set()
        watcher.join()


def deaths(daemon: DaemonUnderTest) -> int:
    processes = daemon.processes()
    return sum(int(processes[role]["restarts"]) for role in ("mount", "mover"))
