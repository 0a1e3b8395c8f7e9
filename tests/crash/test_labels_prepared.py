"""X1, P7, P8: death at the disk operations of prepared memory. What the application wrote is there, and memory is prepared again."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, deadline, eventually
from programs import differences

from ckptfs import procfs

pytestmark = pytest.mark.crash
MIB = 1 << 20
LABELS = ("create", "touch", "allocate", "publish", "take", "trim")


def deaths(daemon: DaemonUnderTest) -> int:
    processes = daemon.processes()
    return sum(int(processes[role]["restarts"]) for role in ("mount", "mover"))


def prepared(daemon: DaemonUnderTest) -> list[str]:
    return [path.name for path in (daemon.root / "state" / "ram" / "prepared").glob("*")]


def write(daemon: DaemonUnderTest, number: int, size: int) -> None:
    with open(daemon.path / f"step_{number}.pt", "wb", buffering=0) as file:
        for start in range(0, size, MIB):
            piece = bytes([number]) * min(MIB, size - start)
            assert file.write(piece) == len(piece)


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("action", ["kill", "kill-after"])
def test_it_goes_on_after(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path, label: str, action: str) -> None:
    if label == "touch" and not procfs.is_virtual_machine():
        pytest.skip("PAGES ARE NOT TOUCHED HERE: this is no virtual machine")
    faults = tmp_path / "faults"
    faults.write_text(f"prepare:{label}={action}@1")
    daemon = make_daemon("auto", ram="3G", env={"CKPTFS_FAULT": f"@{faults}"})
    daemon.expect_warning(".")
    over = threading.Event()

    def calm() -> None:
        eventually(lambda: over.is_set() or deaths(daemon), what=f"{label} is reached")
        faults.write_text("")

    watcher = threading.Thread(target=calm)
    watcher.start()
    # Each is smaller than the one before, so there is something to trim.
    sizes = [64 * MIB, 48 * MIB, 30 * MIB + 5, 12 * MIB]
    try:
        with deadline(daemon, 200):
            for number, size in enumerate(sizes):
                write(daemon, number, size)
                eventually(lambda: any(not name.startswith("new-") for name in prepared(daemon)), what="memory is prepared")
            daemon.settle()
            assert deaths(daemon), "this load did not reach it"
            for number, size in enumerate(sizes):
                assert (daemon.path / f"step_{number}.pt").read_bytes() == bytes([number]) * size
            assert differences(daemon.path, daemon.pfs) == []
            eventually(lambda: len(prepared(daemon)) == 1, what="only what is wanted is left")
    finally:
        over.set()
        watcher.join()
    contents = daemon.root / "state" / "ram" / "contents"
    for path in contents.iterdir():
        status = os.stat(path)
        assert status.st_blocks * 512 <= status.st_size + 2 * MIB
