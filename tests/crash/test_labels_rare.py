"""X1, P7, P8: death at disk operations that need a load made for them, with CKPTFS_KILLS=100 also after them.

What was written is there, and on the PFS.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_under_test import PREPARED_SOON, DaemonUnderTest, eventually
from programs import differences

from ckptfs import procfs

pytestmark = pytest.mark.crash
MIB = 1 << 20
LONG = int(os.environ.get("CKPTFS_KILLS", "10")) >= 100
Make = Callable[..., DaemonUnderTest]


def deaths(daemon: DaemonUnderTest) -> int:
    processes = daemon.processes()
    return sum(int(processes[role]["restarts"]) for role in ("mount", "mover"))


@contextlib.contextmanager
def struck_once(make_daemon: Make, tmp_path: Path, fault: str, **options: str) -> Iterator[DaemonUnderTest]:
    """A daemon of which one process dies at a labelled operation; the next process counts anew, and is left alone."""
    faults = tmp_path / "faults"
    faults.write_text(f"{fault}@1")
    daemon = make_daemon("auto", env={"CKPTFS_FAULT": f"@{faults}", **PREPARED_SOON}, **options)
    daemon.expect_warning(".")
    over = threading.Event()

    def calm() -> None:
        eventually(lambda: over.is_set() or deaths(daemon), what=f"{fault} strikes")
        faults.write_text("")

    watcher = threading.Thread(target=calm)
    watcher.start()
    try:
        yield daemon
        assert deaths(daemon), "this load did not reach it"
    finally:
        over.set()
        watcher.join()


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
def test_it_goes_on_after(make_daemon: Make, tmp_path: Path, label: str) -> None:
    with struck_once(make_daemon, tmp_path, f"{label}=kill", ram="32M") as daemon:
        LOADS[label](daemon)
        daemon.settle()
    assert differences(daemon.path, daemon.pfs) == []


def prepared(daemon: DaemonUnderTest) -> list[str]:
    return [path.name for path in (daemon.root / "state" / "ram" / "prepared").glob("*")]


@pytest.mark.parametrize("label", ["create", "touch", "allocate", "publish", "take", "trim"])
@pytest.mark.parametrize("action", ["kill", "kill-after"][: 1 + LONG])
def test_memory_is_prepared_again_after(make_daemon: Make, tmp_path: Path, label: str, action: str) -> None:
    """X1."""
    if label == "touch" and not procfs.is_virtual_machine():
        pytest.skip("PAGES ARE NOT TOUCHED HERE: this is no virtual machine")
    # Each is smaller than the one before, so there is something to trim.
    sizes = [64 * MIB, 48 * MIB, 30 * MIB + 5, 12 * MIB]
    with struck_once(make_daemon, tmp_path, f"prepare:{label}={action}", ram="3G") as daemon:
        for number, size in enumerate(sizes):
            with open(daemon.path / f"step_{number}.pt", "wb", buffering=0) as file:
                for start in range(0, size, MIB):
                    piece = bytes([number]) * min(MIB, size - start)
                    assert file.write(piece) == len(piece)
            eventually(lambda: any(not name.startswith("new-") for name in prepared(daemon)), what="memory is prepared")
        daemon.settle()
        for number, size in enumerate(sizes):
            assert (daemon.path / f"step_{number}.pt").read_bytes() == bytes([number]) * size
        assert differences(daemon.path, daemon.pfs) == []
        eventually(lambda: len(prepared(daemon)) == 1, what="only what is wanted is left")
    for path in (daemon.root / "state" / "ram" / "contents").iterdir():
        status = os.stat(path)
        assert status.st_blocks * 512 <= status.st_size + 2 * MIB
