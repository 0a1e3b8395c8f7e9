"""D10: a PFS with numbers that SQLite cannot hold: inode numbers of 64 bits, and times after 2262."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest
from programs import differences, run
from silent_pfs import SilentPfs

pytestmark = [pytest.mark.root, pytest.mark.fuse]


@pytest.fixture
def pfs(tmp_path: Path) -> Iterator[SilentPfs]:
    made = SilentPfs(tmp_path, highest_bit=1 << 63)
    yield made
    made.close()


def test_large_inode_numbers(pfs: SilentPfs, data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> None:
    (pfs.path / "imported").mkdir()
    (pfs.path / "imported" / "file").write_bytes(b"from before")
    assert os.stat(pfs.path / "imported").st_ino >= 1 << 63
    daemon = make_daemon(data_path, pfs=pfs.path)
    assert (daemon.path / "imported" / "file").read_bytes() == b"from before"
    (daemon.path / "d").mkdir()
    for name in ("a", "b", "removed"):
        (daemon.path / "d" / name).write_bytes(name.encode())
    (daemon.path / "link").symlink_to("d/a")
    daemon.settle()
    os.rename(daemon.path / "d" / "a", daemon.path / "d" / "c")
    os.rename(daemon.path / "d", daemon.path / "e")
    os.link(daemon.path / "e" / "b", daemon.path / "second")
    (daemon.path / "e" / "removed").unlink()
    (daemon.path / "imported" / "file").write_bytes(b"newer")
    os.chmod(daemon.path / "e" / "c", 0o600)
    daemon.settle()
    assert not differences(daemon.path, pfs.path)
    assert not [name for name in os.listdir(pfs.path / "e") if "conflict" in name]
    (pfs.path / "e" / "c").write_bytes(b"changed by another program")
    daemon.command("refresh", daemon.path / "e")
    assert (daemon.path / "e" / "c").read_bytes() == b"changed by another program"


def test_times_that_the_catalog_cannot_hold(data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """P1: SQLite's integers end in 2262. One file with a later time cost its whole directory."""
    last_ns = 2**63 - 1
    daemon = make_daemon(data_path, start=False)
    for name, day in (("late", "2400-01-01"), ("early", "1905-01-01"), ("now", "2026-01-01")):
        (daemon.pfs / name).write_bytes(name.encode())
        run("touch", "-d", day, daemon.pfs / name)
    daemon.start()
    assert {name: (daemon.path / name).read_bytes() for name in os.listdir(daemon.path)} == {
        name: name.encode() for name in ("late", "early", "now")
    }
    assert (daemon.path / "late").stat().st_mtime_ns == last_ns
    (daemon.path / "made").write_bytes(b"made")
    for name in ("made", "now"):
        run("touch", "-d", "2300-01-01", daemon.path / name)
        assert (daemon.path / name).stat().st_mtime_ns >= last_ns  # On the buffered path the kernel keeps what it was told.
    with open(daemon.path / "late", "ab") as file:
        file.write(b"r")
    os.rename(daemon.path / "late", daemon.path / "later")
    daemon.settle()
    assert {(daemon.pfs / name).stat().st_mtime_ns for name in ("made", "now")} == {last_ns}
    assert {name: (daemon.pfs / name).read_bytes() for name in os.listdir(daemon.path)} == {
        "later": b"later", "early": b"early", "now": b"now", "made": b"made"
    }  # fmt: skip
