"""P8, P11: a full disk of the state directory is told as ENOSPC, and is over when there is room again."""

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, NotStarted, eventually, shorten
from etcd_server import Etcd, node_options
from programs import run

pytestmark = [pytest.mark.root, pytest.mark.fuse]
MIB = 1 << 20


def test_a_full_state_disk(data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> None:
    daemon = make_daemon(data_path, start=False)
    start_on_small_disk(daemon)
    daemon.expect_warning("the disk of .* is full|cannot be written")
    (daemon.path / "before").write_bytes(b"before")
    fill(daemon)
    assert (daemon.path / "before").stat().st_size == 6 and "before" in os.listdir(daemon.path)
    (daemon.state / "filler").unlink()
    (daemon.path / "after").write_bytes(b"after")
    assert (daemon.path / "after").read_bytes() == b"after" and (daemon.path / "before").read_bytes() == b"before"
    assert "Traceback" not in daemon.log


def test_processes_that_die_while_the_state_disk_is_full(data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """P8: the next ones go on; what was open stays open, and what can be done without room is done."""
    daemon = make_daemon(data_path, start=False)
    start_on_small_disk(daemon)
    daemon.expect_warning("the disk of .* is full|cannot be written|ended with")
    (daemon.path / "before").write_bytes(b"before")
    with open(daemon.path / "open", "w+b", buffering=0) as file:
        file.write(b"open")
        fill(daemon)
        pids = {role: daemon.pid(role) for role in ("mount", "mover")}
        for role in ("mount", "mover", "mount"):
            known = daemon.children()
            os.kill(pids[role], signal.SIGKILL)
            (pids[role],) = eventually(lambda known=known: daemon.children() - known, what=f"a new {role} process")
            assert "before" in os.listdir(daemon.path) and (daemon.path / "before").stat().st_size == 6
            file.write(b"more")
            assert os.pread(file.fileno(), 4, 0) == b"open"
        (daemon.state / "filler").unlink()
        (daemon.path / "after").write_bytes(b"after")
        eventually(lambda: {daemon.pid(role) for role in pids} == daemon.children(), what="processes.json names them")
    assert (daemon.path / "open").read_bytes() == b"open" + 3 * b"more" and (daemon.path / "before").read_bytes() == b"before"
    assert "Traceback" not in daemon.log


def test_a_node_of_a_cluster_whose_state_disk_is_full(make_daemon: Callable[..., DaemonUnderTest], etcd: Etcd) -> None:
    """P8: it goes on with what it knows, also while etcd does not answer, and takes part again when there is room."""
    daemon = make_daemon(start=False, env=shorten(RETRY_LAST_S=1), **node_options(etcd.joined))
    start_on_small_disk(daemon)
    daemon.expect_warning("the disk of .* is full|cannot be written|does not answer")
    (daemon.path / "before").write_bytes(b"before")
    pids = {role: daemon.pid(role) for role in ("mount", "mover")}
    fill(daemon)
    etcd.stop()
    eventually(lambda: "does not answer" in daemon.log, what="it knows")
    assert "before" in os.listdir(daemon.path) and (daemon.path / "before").stat().st_size == 6
    etcd.start()
    (daemon.state / "filler").unlink()
    eventually(lambda: "has all changes" in daemon.log, what="it takes part again")
    (daemon.path / "after").write_bytes(b"after")
    assert {"before", "after"} <= set(os.listdir(daemon.path))
    assert {role: daemon.pid(role) for role in pids} == pids
    assert re.findall(r"trouble (\w+)", daemon.command("status", daemon.path).stdout) == ["clique"], "it has no peers"


def start_on_small_disk(daemon: DaemonUnderTest) -> None:
    """Start a daemon whose state directory has a disk of its own."""
    run("mount", "-t", "tmpfs", "-o", "size=24M", "none", daemon.state)
    daemon.start()


def fill(daemon: DaemonUnderTest) -> None:
    """Fill the disk of the state directory until the catalog takes no change."""
    with open(daemon.state / "filler", "wb", buffering=0) as filler, pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        while True:
            filler.write(bytes(4096))
    refused = 0
    for number in range(20_000):
        try:
            os.close(os.open(daemon.path / f"f{number}", os.O_WRONLY | os.O_CREAT))
        except OSError as failure:
            assert failure.errno == errno.ENOSPC
            refused += 1
            if refused == 3:
                break
    assert refused == 3, "the disk never ran full"


def test_nvme_leaves_room_for_a_catalog_on_its_disk(data_path: str, make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path) -> None:
    """P10: if a disk that both use is full, files can be deleted, and then there is room again."""
    daemon = make_daemon(data_path, start=False, ram="16M", pfs=None)
    run("mount", "-t", "tmpfs", "-o", "size=128M", "none", tmp_path)
    try:
        for place in (daemon.state, daemon.nvme):
            (tmp_path / place.name).mkdir()
            run("mount", "--bind", tmp_path / place.name, place)
        daemon.start()
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            for number in range(2000):
                (daemon.path / f"f{number}").write_bytes(bytes(400_000))
        left = os.statvfs(daemon.state)
        assert left.f_bavail * left.f_frsize > 8 * MIB, "a change of the catalog takes room"
        for name in os.listdir(daemon.path):
            (daemon.path / name).unlink()
        eventually(lambda: (daemon.path / "after").write_bytes(bytes(400_000)), what="there is room again")
        daemon.unmount()
    finally:
        for place in (daemon.state, daemon.nvme, tmp_path):
            run("umount", "-l", place)


def test_a_full_nvme_at_the_first_start_is_refused_with_a_sentence(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """P11: nothing can be created there."""
    daemon = make_daemon(start=False)
    run("mount", "-t", "tmpfs", "-o", "nr_inodes=1", "none", daemon.nvme)
    with pytest.raises(NotStarted, match=r"nvme: .*/nvme cannot be used: ENOSPC: No space left on device; free space"):
        daemon.start()
    run("umount", daemon.nvme)
    daemon.start()


def test_a_catalog_that_was_damaged_after_a_clean_end_is_named(fresh_mount: DaemonUnderTest) -> None:
    """P11: a small one is refused at the start. A large one is not searched after a clean end; who dies of it says so."""
    daemon = fresh_mount
    (daemon.path / "a").write_bytes(b"a")
    ((page, size),) = daemon.catalog("SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name = 'reply_cache'")
    daemon.unmount()
    catalog = daemon.state / "catalog.db"
    whole = catalog.read_bytes()
    catalog.write_bytes(whole[: (page - 1) * size] + bytes(size) + whole[page * size :])
    daemon.expect_warning("")
    with pytest.raises(NotStarted, match=r"catalog.db is damaged: .* no file was changed; move"):
        daemon.start()
    (daemon.state / "catalog.db.digest").unlink()
    with pytest.raises(NotStarted, match=r"the mount process does not stay alive: .*catalog.db is damaged: .* no file was changed; move"):
        daemon.start()
    catalog.write_bytes(whole)
    daemon.start()
    assert (daemon.path / "a").read_bytes() == b"a"


def test_a_state_directory_that_is_moved_away_is_named(data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """P11: the daemon goes on with what it has open, says what is wrong, and works again once the directory is back."""
    daemon = make_daemon(data_path)
    daemon.expect_warning("is gone|cannot be written|ENOENT")
    mover, moved = daemon.pid("mover"), daemon.state.with_name("moved")
    daemon.state.rename(moved)
    try:
        eventually(lambda: "is gone" in daemon.command("status", daemon.path, check=False).stderr, what="it says so")
    finally:
        moved.rename(daemon.state)
    (daemon.path / "after").write_bytes(b"after")
    eventually(lambda: daemon.command("status", daemon.path, check=False).returncode == 0, what="it works again")
    assert daemon.pid("mover") == mover and "Traceback" not in daemon.log


def test_contents_that_are_removed_do_not_stop_new_files(data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """P10: a tier whose directory somebody removed gets no new files, and is named."""
    daemon = make_daemon(data_path)
    daemon.expect_warning("removed while|cannot be sealed|ESTALE|lost|suspect|down")
    (daemon.path / "before").write_bytes(b"before")
    daemon.settle()
    for number, holders in enumerate([daemon.state / "ram", daemon.nvme]):
        for one in holders.iterdir():
            shutil.rmtree(one) if one.is_dir() else one.unlink()
        (daemon.path / f"after{number}").write_bytes(b"after")
        assert (daemon.path / f"after{number}").read_bytes() == b"after" and (daemon.path / "before").read_bytes() == b"before"
        named = lambda: f"trouble {('ram', 'nvme')[number]}" in daemon.command("status", daemon.path).stdout  # noqa: B023, E731
        eventually(named, what="status names it")
