"""P4, P5: a file on the PFS is read back and compared before its last copy leaves this node."""

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from local_node import inject_fault, run_until_idle
from pfs_world import corrupt
from write_back_world import Mount, intercepted

from ckptfs import limits
from ckptfs.catalog import mover_requests
from ckptfs.catalog.copies import FetchState
from ckptfs.coherence import keys
from ckptfs.flow import check_pfs
from ckptfs.flow.check_pfs import CheckPfs
from ckptfs.flow.evict import Evict
from ckptfs.model import Tier
from ckptfs.tiers import pfs_tree, transfer

SIZE = 5 * limits.MIB


@pytest.fixture
def full(mount: Mount) -> Mount:
    """A node without NVMe, whose RAM holds two files that are written back, and is too small for them."""
    mount.configure(nvme=None)
    for name in (b"a", b"b"):
        mount.put(name, name * SIZE)
    mount.settle()
    mount.squeeze(Tier.RAM, 2 * SIZE)
    return mount


def build_check(mount: Mount) -> CheckPfs:
    return CheckPfs(mount.db, mount.tiers, mount.config, mount.told)


def evict(mount: Mount) -> set[int]:
    """Evict what may go; the contents that stay."""
    run_until_idle(Evict(mount.db, mount.tiers, mount.config, mount.told))
    return mount.files(Tier.RAM)


def get_content(mount: Mount, name: bytes) -> int:
    content = mount.shown(mount.number(name))
    assert content is not None
    return content


def test_the_last_copy_goes_after_the_file_was_read_back(full: Mount) -> None:
    contents = {get_content(full, b"a"), get_content(full, b"b")}
    assert evict(full) == contents
    run_until_idle(build_check(full))
    assert evict(full) < contents
    assert full.told.works


def test_a_read_that_hangs_holds_up_no_other_file(full: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: a part of the PFS hangs. No other step reads the same file."""
    check, begun, go_on, read = build_check(full), threading.Event(), threading.Event(), list[str]()
    open_published = pfs_tree.open_published

    def hang(root: Path, state: FetchState) -> int:
        read.append(state.path)
        if len(read) == 1:
            begun.set()
            assert go_on.wait(60)
        return open_published(root, state)

    monkeypatch.setattr(pfs_tree, "open_published", hang)
    monkeypatch.setattr(limits, "PFS_STALL_S", 0.01)
    monkeypatch.setattr(check_pfs, "RETRY_LAST_S", 0.0)  # The pause of the file that hangs is over.
    assert check.list_stalled() == []
    with ThreadPoolExecutor(1) as lane:
        first = lane.submit(check.step)
        assert begun.wait(60)
        while not check.list_stalled():
            pass
        run_until_idle(check)
        assert sorted(read) == ["a", "b"] and full.db.value("SELECT count(*) FROM pfs_file WHERE checked_ns > 0") == 1
        go_on.set()
        assert first.result(60)
    assert full.db.value("SELECT count(*) FROM pfs_file WHERE checked_ns = 0") == 0 and check.list_stalled() == []


def test_bytes_that_the_pfs_has_lost_are_written_back_again(full: Mount, caplog: pytest.LogCaptureFixture) -> None:
    """Size and times of the file are as they were."""
    corrupt(full.pfs / "a")
    check = build_check(full)
    with caplog.at_level(logging.ERROR):
        run_until_idle(check)
    assert ["a" in message and "written back again" in message for message in caplog.messages] == [True]
    assert get_content(full, b"a") in evict(full)
    full.settle()
    assert (full.pfs / "a").read_bytes() == b"a" * SIZE
    run_until_idle(build_check(full))
    assert full.db.value("SELECT count(*) FROM pfs_file WHERE checked_ns = 0") == 0


def test_the_pages_of_this_node_are_not_what_is_compared(full: Mount) -> None:
    seen: list[str] = []
    with intercepted(seen.append):
        run_until_idle(build_check(full))
    assert seen.index("check_pfs:drop_pages") < seen.index("check_pfs:read")


def test_a_site_may_choose_otherwise(full: Mount) -> None:
    full.configure(pfs_verify=False)
    full.squeeze(Tier.RAM, 2 * SIZE)
    check = build_check(full)
    assert check.step() is False and check.next_due_s() is None
    assert len(evict(full)) < 2


def test_what_changed_on_the_pfs_is_left_to_a_scan(full: Mount) -> None:
    (full.pfs / "a").write_bytes(b"of a stranger")
    check = build_check(full)
    run_until_idle(check)
    assert get_content(full, b"a") in evict(full)
    assert mover_requests.list_open(full.db, mover_requests.SCAN)
    assert full.db.value("SELECT count(*) FROM journal") == 0


def test_a_file_that_changes_meanwhile_is_not_called_checked(full: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    read = transfer.read

    def read_and_change(fd: int, **named: object) -> transfer.ContentDigests:
        found = read(fd, **named)  # type: ignore[arg-type]
        os.utime(full.pfs / "a", ns=(1, 1))
        os.utime(full.pfs / "b", ns=(1, 1))
        return found

    monkeypatch.setattr(transfer, "read", read_and_change)
    run_until_idle(build_check(full))
    assert full.db.value("SELECT count(*) FROM pfs_file WHERE checked_ns > 0") == 0


def test_a_file_that_cannot_be_read_holds_up_no_other(full: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    check = build_check(full)
    inject_fault(monkeypatch, "pfs:open=EIO")
    run_until_idle(check)
    assert full.db.value("SELECT count(*) FROM pfs_file WHERE checked_ns > 0") == 1
    assert check.next_due_s() is not None


@pytest.mark.parametrize("label", ["check_pfs:drop_pages", "check_pfs:read", "check_pfs:checked"])
def test_each_operation_fails_once(full: Mount, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: nothing is called checked that was not, and the next mover checks it."""
    inject_fault(monkeypatch, f"{label}=EIO")
    run_until_idle(build_check(full))
    assert full.db.value("SELECT count(*) FROM pfs_file WHERE checked_ns > 0") == 1
    run_until_idle(build_check(full))
    assert full.db.value("SELECT count(*) FROM pfs_file WHERE checked_ns > 0") == 2


def test_the_copies_are_not_searched_again_for_each_file(mount: Mount) -> None:
    """A search looks at every copy: with one for each file, the work grows with the square of their number."""
    for number in range(30):
        mount.put(b"f%d" % number, b"x")
    mount.settle()
    statements: list[str] = []
    mount.db.connection.set_trace_callback(statements.append)
    run_until_idle(build_check(mount))
    mount.db.connection.set_trace_callback(None)
    assert mount.db.value("SELECT count(*) FROM pfs_file WHERE checked_ns > 0") == 30
    searches = [sql for sql in statements if "AND p.checked_ns = 0" in sql]
    assert 0 < len(searches) < 10


def test_it_waits_for_write_back_unless_a_tier_fills_up(mount: Mount) -> None:
    mount.put(b"a", b"x" * SIZE)
    mount.settle()
    mount.put(b"b", b"y" * SIZE)
    check = build_check(mount)
    assert check.step() is False and check.next_due_s() is not None
    mount.squeeze(Tier.RAM, 3 * SIZE)
    assert build_check(mount).step() is True
    assert mount.db.value("SELECT checked_ns > 0 FROM pfs_file WHERE inode = ?", mount.number(b"a"))


def test_a_new_generation_is_read_again(mount: Mount) -> None:
    mount.put(b"a", b"one")
    mount.settle()
    run_until_idle(build_check(mount))
    assert mount.db.value("SELECT checked_ns > 0 FROM pfs_file")
    mount.put(b"a", b"two")
    mount.settle()
    assert not mount.db.value("SELECT checked_ns > 0 FROM pfs_file")


def test_a_former_content_is_compared_with_what_the_pfs_shows(mount: Mount) -> None:
    """P7: the file has a newer content that is not written back yet; the former one is kept here until then."""
    mount.put(b"a", b"one")
    mount.settle()
    mount.put(b"a", b"newer")
    mount.squeeze(Tier.RAM, 10)
    before = mount.db.rows("SELECT seq FROM journal")
    run_until_idle(build_check(mount))
    assert mount.db.rows("SELECT seq FROM journal") == before
    assert mount.db.value("SELECT complete FROM pfs_file") == 1
    mount.settle_exactly()


def test_one_node_reads_for_all(mount: Mount, tmp_path: Path) -> None:
    """N2: the others learn from the store that a file was checked."""
    mount.put(b"a", b"data")
    mount.settle()
    run_until_idle(build_check(mount))
    inode = mount.number(b"a")
    value = keys.get_pfs_state_value(mount.db, inode, b"")
    assert value is not None and value["is_checked"]
    other = Mount(tmp_path / "other")
    keys.write_pfs_state(other.db, inode, b"", value)
    assert keys.get_pfs_state_value(other.db, inode, b"") == value
    del value["is_checked"]
    value["published"][4] += 1
    keys.write_pfs_state(other.db, inode, b"", value)
    assert keys.get_pfs_state_value(other.db, inode, b"") == value
