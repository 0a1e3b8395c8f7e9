"""P1, P4, P7: a PFS that is gone, refuses or hangs costs nothing but what lies on it alone; wrong bytes there are never served."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, eventually
from programs import refusal

MIB = 1024 * 1024
Make = Callable[..., DaemonUnderTest]


def with_old_files(make_daemon: Make, data_path: str = "auto", **options: object) -> DaemonUnderTest:
    """A daemon that is not started yet; its PFS holds two directories, old and other."""
    daemon = make_daemon(data_path, start=False, **options)
    for name in ("old", "other"):
        (daemon.pfs / name).mkdir()
        (daemon.pfs / name / "file").write_bytes(b"o" * MIB)
    return daemon


def with_faults(daemon: DaemonUnderTest, faults: str = "") -> Path:
    """The file whose faults the daemon injects, once it runs."""
    file = daemon.root / "fault"
    file.write_text(faults)
    daemon.env["CKPTFS_FAULT"] = f"@{file}"
    return file


def works(daemon: DaemonUnderTest, directory: Path, name: str) -> None:
    """Making, writing, renaming, reading and deleting, as if there were no PFS."""
    path = directory / name
    path.write_bytes(b"x" * 10_000)
    path.rename(directory / f"{name}-renamed")
    assert (directory / f"{name}-renamed").read_bytes() == b"x" * 10_000
    (directory / f"{name}-gone").write_bytes(b"y")
    (directory / f"{name}-gone").unlink()
    (directory / f"{name}-dir").mkdir()
    assert not (directory / f"{name}-dir" / "absent").exists()
    daemon.command("status", daemon.path, timeout=30)


def test_gone_and_back(make_daemon: Make, data_path: str) -> None:
    daemon = with_old_files(make_daemon, data_path)
    daemon.start()
    daemon.expect_warning("scan|visit|write back|pfs|tier-id|cannot be")
    (daemon.path / "work").mkdir()
    assert os.listdir(daemon.path / "old") == ["file"]
    daemon.settle()
    away = daemon.root / "away"
    daemon.pfs.rename(away)
    works(daemon, daemon.path / "work", "a")
    works(daemon, daemon.path / "old", "b")
    works(daemon, daemon.path, "c")
    assert refusal(os.listdir, daemon.path / "other") in {"EIO", "ETIMEDOUT"}
    assert refusal((daemon.path / "old" / "file").read_bytes) in {"EIO", "ETIMEDOUT"}
    daemon.pfs.mkdir()
    with pytest.raises(OSError):
        os.listdir(daemon.path / "other")
    assert os.listdir(daemon.path / "old") != [], "an empty mountpoint is not taken for the PFS"
    daemon.pfs.rmdir()
    away.rename(daemon.pfs)
    eventually(lambda: daemon.command("drain", daemon.path, check=False).returncode == 0, what="write-back goes on")
    assert os.listdir(daemon.path / "other") == ["file"] and (daemon.path / "old" / "file").read_bytes() == b"o" * MIB
    daemon.settle()
    assert (daemon.pfs / "work" / "a-renamed").read_bytes() == b"x" * 10_000
    assert (daemon.pfs / "old" / "b-renamed").exists() and (daemon.pfs / "c-renamed").exists()


def test_out_of_order_when_a_new_catalog_starts(make_daemon: Make) -> None:
    """Nothing is known of the root then: still everything can be made in it, and what is there joins it later."""
    daemon = with_old_files(make_daemon)
    fault = with_faults(daemon, "scan:root=EIO@*")
    daemon.expect_warning("scan|visit|write back|pfs|cannot be")
    daemon.start()
    (daemon.path / "old").mkdir()
    (daemon.path / "old" / "new").write_bytes(b"new")
    (daemon.path / "fresh").touch()
    fault.write_text("")
    eventually(lambda: daemon.command("drain", daemon.path, check=False).returncode == 0, what="write-back goes on")
    daemon.settle()
    assert sorted(os.listdir(daemon.path)) == ["fresh", "old", "other"]
    assert sorted(os.listdir(daemon.path / "old")) == ["file", "new"]
    assert (daemon.path / "old" / "file").read_bytes() == b"o" * MIB
    assert sorted(os.listdir(daemon.pfs / "old")) == ["file", "new"] and (daemon.pfs / "fresh").exists()


def test_a_changed_byte_on_the_pfs_is_never_served(make_daemon: Make) -> None:
    """P4."""
    daemon = make_daemon("auto")
    daemon.expect_warning("checkpoint:? cannot be|ram: the tier was replaced")
    data = os.urandom(5 * MIB)
    (daemon.path / "checkpoint").write_bytes(data)
    (daemon.path / "good").write_bytes(data)
    daemon.settle()
    daemon.unmount()
    daemon.wipe_ram()
    before = (daemon.pfs / "checkpoint").stat()
    with open(daemon.pfs / "checkpoint", "r+b") as file:
        file.seek(4 * MIB + 5)
        file.write(bytes([data[4 * MIB + 5] ^ 255]))
    os.utime(daemon.pfs / "checkpoint", ns=(before.st_atime_ns, before.st_mtime_ns))
    daemon.start()
    assert refusal((daemon.path / "checkpoint").read_bytes) == "EIO"
    assert (daemon.path / "good").read_bytes() == data
    # The mover answers first and writes its log afterwards.
    eventually(lambda: "checkpoint cannot be read" in daemon.log, what="the log names the file")


def test_evicted_files_come_back(make_daemon: Make, data_path: str) -> None:
    """P10: more than RAM holds is written, and read again, through a RAM tier that is far too small."""
    daemon = make_daemon(data_path, ram="64M", nvme=None)
    data = [os.urandom(8 * MIB) for _ in range(16)]
    for number, one in enumerate(data):
        (daemon.path / f"step{number}").write_bytes(one)
    daemon.settle()
    for number, one in enumerate(data):
        assert (daemon.path / f"step{number}").read_bytes() == one
    here = daemon.catalog(
        "SELECT count(*) FROM copy c JOIN content k ON k.id = c.content WHERE c.tier = 'ram' AND c.state = 1 AND k.size > 1000000"
    )
    assert here[0][0] < len(data), "some were evicted"
    (daemon.path / "step0").write_bytes(b"new")
    with open(daemon.path / "step1", "ab") as file:
        file.write(b"appended")
    daemon.settle()
    assert (daemon.pfs / "step0").read_bytes() == b"new" and (daemon.pfs / "step1").read_bytes() == data[1] + b"appended"


def test_the_mover_dies_while_a_file_is_fetched_and_a_directory_visited(make_daemon: Make) -> None:
    """P8: whoever waits for it notices nothing but a pause."""
    daemon = with_old_files(make_daemon)
    fault = with_faults(daemon, "fetch:read=kill,scan:import=kill@2")
    daemon.expect_warning("mover|killed|died|signal")
    daemon.start()
    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit((daemon.path / "old" / "file").read_bytes)
        listing = threads.submit(os.listdir, daemon.path / "other")
        eventually(lambda: daemon.processes()["mover"]["restarts"] >= 2, what="the mover died twice")
        fault.write_text("")
        assert reading.result(100) == b"o" * MIB and listing.result(100) == ["file"]
