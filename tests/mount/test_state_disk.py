"""P8, P11: a full disk of the state directory is told as ENOSPC, and is over when there is room again."""

import errno
import os
from collections.abc import Callable

import pytest
from daemon_under_test import DaemonUnderTest, NotStarted
from programs import run

pytestmark = [pytest.mark.root, pytest.mark.fuse]
MIB = 1 << 20


def test_a_full_state_disk(data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> None:
    daemon = make_daemon(data_path, start=False)
    run("mount", "-t", "tmpfs", "-o", "size=24M", "none", daemon.state)
    daemon.start()
    daemon.expect_warning("the disk of .* is full|cannot be written")
    (daemon.path / "before").write_bytes(b"before")
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
    assert (daemon.path / "before").stat().st_size == 6 and "before" in os.listdir(daemon.path)
    (daemon.state / "filler").unlink()
    (daemon.path / "after").write_bytes(b"after")
    assert (daemon.path / "after").read_bytes() == b"after" and (daemon.path / "before").read_bytes() == b"before"
    assert "Traceback" not in daemon.log


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
