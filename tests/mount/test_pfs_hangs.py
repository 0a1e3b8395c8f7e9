"""P1, P8: a PFS that answers no request at all costs only the files that lie on it."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from daemon_under_test import DaemonUnderTest, eventually
from programs import differences, run
from silent_pfs import SilentPfs

pytestmark = [pytest.mark.root, pytest.mark.fuse]
MIB = 1 << 20
HANG_S = 45.0
Make = Callable[..., DaemonUnderTest]


def soon(act: Callable[[], Any]) -> Any:
    """The result of `act`, which must not wait for the PFS."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert results, "it waits for the PFS"
    return results[0]


def work(root: Path, name: str) -> bool:
    """What a job does all the time, in files that are in RAM."""
    path = root / name
    with open(path, "wb") as file:
        file.write(b"x" * 100_000)
        file.flush()
        os.fsync(file.fileno())
    assert path.stat().st_size == 100_000
    path.rename(root / f"{name}-renamed")
    assert (root / f"{name}-renamed").read_bytes() == b"x" * 100_000
    os.truncate(root / f"{name}-renamed", 10)
    (root / f"{name}-gone").write_bytes(b"y")
    (root / f"{name}-gone").unlink()
    (root / f"{name}-dir").mkdir()
    assert f"{name}-dir" in os.listdir(root)
    assert all(os.lstat(root / found) for found in os.listdir(root))
    os.statvfs(root)
    return True


def fill_ram(daemon: DaemonUnderTest) -> dict[str, int]:
    """Descriptors of three files in the PFS tier: one outgrew RAM, one was made when RAM was full, one is read."""
    descriptors = {"outgrown": os.open(daemon.path / "outgrown", os.O_RDWR | os.O_CREAT)}
    for number in range(70):
        os.pwrite(descriptors["outgrown"], bytes([number]) * MIB, number * MIB)
    os.fsync(descriptors["outgrown"])
    (daemon.path / "read").write_bytes(b"r" * 70 * MIB)
    descriptors["read"] = os.open(daemon.path / "read", os.O_RDONLY)
    outgrown = "SELECT tier FROM copy WHERE content = (SELECT content FROM inode WHERE id = ?)"
    assert daemon.catalog(outgrown, os.fstat(descriptors["outgrown"]).st_ino) == [("pfs",)], "the test needs a file in the PFS tier"
    return descriptors


def test_a_part_of_the_pfs_that_hangs_holds_up_its_own_files_only(make_daemon: Make, data_path: str, silent: SilentPfs) -> None:
    """As an object server of Lustre does: there are more hanging files than lanes for fetches."""
    names = [f"file{number}" for number in range(8)]
    for name in names:
        (silent.source / name).write_bytes(name.encode() * 1000)
        silent.hang_reads(name)
    silent.hang_reads(names[-1], end=True)
    daemon = make_daemon(data_path, pfs=silent.path)
    daemon.expect_warning("fetch|cannot be")
    found: dict[str, bytes] = {}

    def read(name: str) -> None:
        found[name] = (daemon.path / name).read_bytes()

    threads = [threading.Thread(target=read, args=(name,), daemon=True) for name in names]
    for thread in threads[:-1]:
        thread.start()
    waiting = "SELECT count(*) FROM mover_request WHERE kind = 'fetch' AND state = 0"
    eventually(lambda: daemon.catalog(waiting) == [(len(names) - 1,)], what="the files are asked for")
    threads[-1].start()
    eventually(lambda: names[-1] in found, what="a file that the PFS gives")
    assert len(found) == 1
    for name in names[:-1]:
        silent.hang_reads(name, end=True)
    for thread in threads:
        thread.join(60)
    assert found == {name: name.encode() * 1000 for name in names}


def test_a_filesystem_inside_the_pfs_that_hangs_holds_up_no_other_directory(make_daemon: Make, data_path: str, silent: SilentPfs) -> None:
    """One lane looks into directories; that of the hanging one gets another in its place."""
    pfs = silent.source.parent / "outer"
    for name in ("inner", "other"):
        (pfs / name).mkdir(parents=True)
    (pfs / "other" / "file").write_bytes(b"x")
    (silent.source / "inside").touch()
    run("mount", "--bind", silent.path, pfs / "inner")

    def look() -> None:
        with suppress(OSError):
            os.listdir(daemon.path / "inner")

    try:
        daemon = make_daemon(data_path, pfs=pfs)
        daemon.expect_warning("scan|does not answer|write back|pfs")
        assert sorted(os.listdir(daemon.path)) == ["inner", "other"]
        silent.hang()
        threading.Thread(target=look, daemon=True).start()
        eventually(lambda: daemon.catalog("SELECT count(*) FROM mover_request WHERE kind = 'scan' AND state = 0") == [(1,)], what="a look")
        assert soon((daemon.path / "other" / "file").read_bytes) == b"x"
        silent.resume()
        assert os.listdir(daemon.path / "inner") == ["inside"]
    finally:
        silent.resume()
        run("umount", "-l", pfs / "inner")


@pytest.mark.parametrize(("how", "kill"), [("hang", False), ("swallow", True)])
def test_everything_else_goes_on(make_daemon: Make, data_path: str, silent: SilentPfs, how: str, kill: bool) -> None:
    daemon = make_daemon(data_path, ram="64M", nvme=None, pfs=silent.path)
    daemon.expect_warning("pfs|PFS|write back|scan|fetch|does not answer|cannot be|hangs|killed|ended with|silent|content")
    (daemon.path / "work").mkdir()
    descriptors = fill_ram(daemon)
    assert work(daemon.path, "before")
    getattr(silent, how)()
    # Before the write: a process that inherits the descriptor flushes it.
    assert soon(lambda: daemon.command("status", daemon.path, timeout=30))
    assert soon(lambda: work(daemon.path, "a"))
    assert soon(lambda: work(daemon.path / "work", "b"))
    writing = threading.Thread(target=os.pwrite, args=(descriptors["outgrown"], b"late", 70 * MIB), daemon=True)
    writing.start()
    assert soon(lambda: os.fstat(descriptors["outgrown"]).st_size >= 70 * MIB)
    os.close(descriptors["read"])
    assert soon(lambda: work(daemon.path, "c"))
    if kill:
        soon(lambda: daemon.kill("mount") or True)
        soon(lambda: daemon.kill("mover") or True)
        assert soon(lambda: work(daemon.path, "d"))
    silent.resume()
    writing.join(60)
    assert not writing.is_alive()
    os.close(descriptors["outgrown"])
    eventually(lambda: daemon.command("drain", daemon.path, check=False).returncode == 0, what="write-back goes on")
    daemon.settle()
    assert os.stat(daemon.path / "outgrown").st_size == 70 * MIB + 4
    assert differences(daemon.path, silent.path) == []


def test_names_of_files_on_a_silent_pfs_can_change(make_daemon: Make, data_path: str, silent: SilentPfs) -> None:
    """P1: the kernel keeps the directory locked during such a call, so all else in it would wait as well."""
    daemon = make_daemon(data_path, ram="64M", nvme=None, pfs=silent.path)
    daemon.expect_warning("pfs|PFS|write back|scan|fetch|does not answer|cannot be|silent|content")
    descriptors = fill_ram(daemon)
    silent.swallow()
    assert soon(lambda: (daemon.path / "outgrown").rename(daemon.path / "renamed"))
    assert soon(lambda: work(daemon.path, "a"))
    assert soon(lambda: (daemon.path / "renamed").unlink() or True)
    assert soon(lambda: work(daemon.path, "b"))
    silent.resume()
    for descriptor in descriptors.values():
        os.close(descriptor)
    daemon.settle()
    assert differences(daemon.path, silent.path) == []


def test_new_files_use_the_rest_of_ram_while_the_pfs_is_silent(make_daemon: Make, data_path: str, silent: SilentPfs) -> None:
    """P1: above its high watermark, RAM has room that no other tier can give now."""
    daemon = make_daemon(data_path, ram="64M", nvme=None, pfs=silent.path)
    daemon.expect_warning("pfs|PFS|write back|scan|fetch|does not answer|cannot be|silent|content")
    (daemon.path / "d").mkdir()
    daemon.settle()
    silent.swallow()
    for number in range(5):
        assert soon(lambda number=number: (daemon.path / f"d/{number}").write_bytes(bytes([number]) * 11 * MIB))
    silent.resume()
    daemon.settle()
    assert differences(daemon.path, silent.path) == []
