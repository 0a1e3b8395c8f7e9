"""The history of sets on the PFS: hard links below .ckptfs.history, and what becomes of them (T6, P5)."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from shared_sets import delete_whole_set
from write_back_world import Mount, Refusal, intercepted, rest

from ckptfs import lifecycle
from ckptfs.catalog import contents, copies, history, journal, summary
from ckptfs.flow.write_back import deferred
from ckptfs.model import Level, Tier

SET = ".ckptfs.history/a*/a@1/a"


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    mount = Mount(tmp_path)
    mount.put(b"a", b"old")
    mount.settle()
    return mount


def count(labels: list[str]) -> Callable[[str], None]:
    return lambda label: labels.append(label) if label in ("write_back:put", "write_back:create", "write_back:link") else None


def test_a_set_is_a_hard_link_on_the_pfs_that_outlives_the_name(mount: Mount) -> None:
    mount.keep(b"a")
    mount.settle_exactly()
    assert (mount.pfs / SET).stat().st_ino == (mount.pfs / "a").stat().st_ino
    mount.unlink(b"a")
    mount.settle_exactly()
    assert (mount.pfs / SET).read_bytes() == b"old" and not (mount.pfs / "a").exists()
    mount.forget(b"")
    mount.settle_exactly()
    assert os.listdir(mount.pfs / ".ckptfs.history" / "a*") == []


@pytest.mark.parametrize("is_written_back", [True, False])
@pytest.mark.parametrize("way", ["put", "append"])
def test_an_overwritten_file_of_a_set_is_not_copied_on_the_pfs(mount: Mount, way: str, is_written_back: bool) -> None:
    mount.keep(b"a")
    if is_written_back:
        mount.settle()
    before = (mount.pfs / "a").stat().st_ino
    getattr(mount, way)(b"a", b"new")
    labels: list[str] = []
    with intercepted(count(labels)):
        mount.settle_exactly()
    assert (mount.pfs / SET).read_bytes() == b"old" and (mount.pfs / "a").read_bytes() == (b"new" if way == "put" else b"oldnew")
    if is_written_back:
        assert (mount.pfs / SET).stat().st_ino == before, "the PFS keeps the file that it has"
        assert labels.count("write_back:create") == 1


def test_a_file_that_has_left_its_set_and_is_not_written_yet_stays_on_the_pfs(mount: Mount) -> None:
    """P5: an open for writing separates the file first. Until it opens the content, only the PFS may have that."""
    content = mount.shown(mount.number(b"a"))
    assert content is not None
    mount.keep(b"a")
    mount.settle()
    mount.separate(content)
    assert lifecycle.can_drop(contents.get_file_record(mount.db, content), Tier.RAM, pfs_verify=False)
    mount.settle_exactly()
    assert lifecycle.can_drop(contents.get_file_record(mount.db, content), Tier.RAM, pfs_verify=False)
    assert summary.get_level(mount.db, mount.number(b"a")) is Level.PFS
    mount.forget(b"")
    mount.settle_exactly()
    assert (mount.pfs / "a").read_bytes() == b"old"


@pytest.mark.parametrize("is_written_back", [True, False])
def test_times_of_a_file_that_is_being_overwritten_are_no_external_change_of_its_set(mount: Mount, is_written_back: bool) -> None:
    """The PFS shows one file under both names until the new bytes are there."""
    mount.keep(b"a")
    if is_written_back:
        mount.settle()
    content = mount.put(b"a", b"new", closed=False)
    mount.utime(b"a", 2 * 10**18)
    mount.settle()
    ((_, kept),) = history.list_files(mount.db, history.list_sets(mount.db, history.list_series(mount.db)[0].directory)[0].directory)
    found = (mount.pfs / SET).stat()
    known = mount.db.row("SELECT pfs_inode, size, mtime_ns FROM pfs_file WHERE inode = ?", kept.id)
    assert known == (found.st_ino, found.st_size, found.st_mtime_ns)
    mount.close(content, 3)
    mount.settle_exactly()
    assert (mount.pfs / SET).read_bytes() == b"old" and (mount.pfs / "a").read_bytes() == b"new"


def test_the_tree_on_the_pfs_is_the_mounts_after_a_set_was_overwritten_twice(mount: Mount) -> None:
    for number in range(3):
        mount.keep(b"a")
        mount.put(b"a", b"%d" % number)
        if number == 1:
            mount.settle_exactly()
    mount.unlink(b"a")
    mount.settle_exactly()
    kept = sorted((mount.pfs / ".ckptfs.history" / "a*").rglob("a"))
    assert [path.read_bytes() for path in kept] == [b"old", b"0", b"1"]


@pytest.mark.parametrize("is_kept_again", [True, False])
def test_a_set_that_is_overwritten_and_forgotten_before_write_back_looks(mount: Mount, is_kept_again: bool) -> None:
    mount.keep(b"a")
    mount.settle_exactly()
    mount.put(b"a", b"new")
    if is_kept_again:
        mount.keep(b"a")
    mount.forget(b"")
    mount.settle_exactly()
    assert sorted(os.listdir(mount.pfs / ".ckptfs.history" / "a*")) == (["a@2"] if is_kept_again else [])


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def unlinkable(mount: Mount, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Mount:
    """The PFS has no hard links."""
    Refusal(monkeypatch, "link", lambda _: True, request.param)
    return mount


def gone(mount: Mount, way: str) -> None:
    """The application's name of the file goes."""
    if way == "unlink":
        mount.unlink(b"a")
    else:
        mount.put(b"tmp", b"new")
        mount.rename(b"tmp", b"a")


@pytest.mark.parametrize("way", ["unlink", "rename"])
@pytest.mark.parametrize("is_at_once", [False, True])
def test_without_hard_links_a_file_moves_into_the_history_when_its_last_name_goes(unlinkable: Mount, way: str, is_at_once: bool) -> None:
    mount, before = unlinkable, (unlinkable.pfs / "a").stat().st_ino
    flow, labels = mount.write_back(), list[str]()
    mount.keep(b"a")
    with intercepted(labels.append):
        if not is_at_once:
            mount.settle(flow)
            assert not (mount.pfs / SET).exists() and (mount.pfs / "a").read_bytes() == b"old" and mount.troubles() == []
        gone(mount, way)
        mount.settle_exactly(flow)
    assert (mount.pfs / SET).read_bytes() == b"old" and (mount.pfs / SET).stat().st_ino == before
    assert "write_back:double:read" not in labels, "no bytes are copied"


def test_without_hard_links_a_file_of_two_sets_moves_on_when_the_first_set_goes(unlinkable: Mount) -> None:
    mount, flow = unlinkable, unlinkable.write_back()
    for _ in range(2):
        mount.keep(b"a")
    mount.unlink(b"a")
    mount.settle(flow)
    mount.forget(b"")
    mount.settle_exactly(flow)
    assert [path.read_bytes() for path in (mount.pfs / ".ckptfs.history").rglob("a")] == [b"old"]


@pytest.mark.parametrize("way", ["put", "append"])
def test_without_hard_links_an_overwritten_file_of_a_set_is_kept(unlinkable: Mount, way: str) -> None:
    mount, flow = unlinkable, unlinkable.write_back()
    mount.keep(b"a")
    mount.settle(flow)
    getattr(mount, way)(b"a", b"new")
    mount.settle_exactly(flow)
    assert (mount.pfs / SET).read_bytes() == b"old"


def test_a_set_that_goes_before_its_files_leaves_nothing_pending(unlinkable: Mount) -> None:
    mount, flow = unlinkable, unlinkable.write_back()
    mount.keep(b"a")
    mount.settle(flow)
    mount.forget(b"")
    mount.settle_exactly(flow)
    assert (mount.pfs / "a").read_bytes() == b"old"


def _write_unsealed(mount: Mount) -> None:
    mount.seal_at_once = False
    content = mount.put(b"a", b"newer", closed=False)
    mount.settle()
    mount.utime(b"a", 5_000_000_000)
    mount.settle()
    mount.close(content, 5)
    mount.seal(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda mount: (mount.utime(b"a", 1), mount.put(b"a", b"newer")),
        lambda mount: (mount.put(b"a", b"newer"), mount.utime(b"a", 1)),
        lambda mount: (mount.utime(b"a", 1), mount.put(b"a", b"newer"), mount.utime(b"a", 2), mount.chmod(b"a", 0o600)),
        _write_unsealed,
    ],
    ids=["before", "after", "both", "while it is written"],
)
@pytest.mark.parametrize("is_deleted_at_once", [False, True])
def test_times_of_an_overwritten_file_leave_its_set_alone(
    mount: Mount, change: Callable[[Mount], object], is_deleted_at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    mount.keep(b"a")
    mount.settle()
    before = (mount.pfs / SET).stat().st_mtime_ns
    change(mount)
    if not is_deleted_at_once:
        mount.settle_exactly()
        assert (mount.pfs / SET).read_bytes() == b"old" and (mount.pfs / "a").read_bytes() == b"newer"
        assert (mount.pfs / SET).stat().st_mtime_ns in (before, 1)
    mount.forget(b"")
    mount.settle_exactly()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_set_that_is_overwritten_and_forgotten_while_the_kernel_knows_its_file(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    """The inode of a deleted file of the history stays without names until the kernel forgets it."""
    mount.keep(b"a")
    mount.settle()
    mount.put(b"a", b"half")
    mount.put(b"a", b"newer")
    mount.keep(b"a")
    with mount.db.transaction():
        (series,) = history.list_series(mount.db)
        delete_whole_set(mount.db, history.list_sets(mount.db, series.directory)[-1].directory)
    mount.settle()
    assert os.listdir(mount.pfs / ".ckptfs.history" / "a*") == ["a@2"] and (mount.pfs / "a").read_bytes() == b"newer"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.fixture
def closed(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """Nobody may make the history's directory in the root of the PFS."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    monkeypatch.setattr(deferred, "RETRY_LAST_S", 1000.0)
    return Refusal(monkeypatch, "rename", lambda name: name == b".ckptfs.history", errno.EACCES)


def count_left(mount: Mount) -> tuple[int, int, int]:
    return summary.count_journal_left(mount.db, summary.get_journal_end(mount.db))


@pytest.mark.parametrize("way", ["put", "rename", "unlink", "append"])
def test_a_pfs_that_refuses_the_history_gets_all_else(mount: Mount, closed: Refusal, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner alone may write there. A drain waits for no set; the trouble says what to do."""
    flow = mount.write_back()
    mount.keep(b"a")
    rest(flow)
    if way == "rename":
        mount.put(b"b", b"new")
        mount.rename(b"b", b"a")
    elif way == "unlink":
        mount.unlink(b"a")
    else:
        getattr(mount, way)(b"a", b"new")
    mount.put(b"c", b"other")
    rest(flow)
    assert closed.calls
    shown = {name: value[1] for name, value in mount.on_pfs().items()}
    wanted = {"put": {b"a": b"new"}, "rename": {b"a": b"new"}, "unlink": {}, "append": {b"a": b"oldnew"}}[way]
    assert shown == {**wanted, b"c": b"other"}
    assert count_left(mount) == (0, 0, 0)
    [trouble] = mount.troubles()
    assert trouble["path"] == ".ckptfs.history" and trouble["remedy"]
    monkeypatch.undo()
    flow.retry_now()
    rest(flow)
    assert mount.troubles() == []
    mount.settle_exactly(flow)
    assert (mount.pfs / SET).read_bytes() == b"old"


@pytest.mark.parametrize("way", ["rename", "unlink"])
def test_the_last_copy_of_a_set_stays_on_a_pfs_that_refuses_the_history(
    mount: Mount, closed: Refusal, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: RAM and NVMe do not have it any more, so it changes places with the file that replaces it. All else is written back."""
    flow, content = mount.write_back(), mount.shown(mount.number(b"a"))
    assert content is not None
    mount.keep(b"a")
    rest(flow)
    copies.delete_copy(mount.db, content, Tier.RAM)
    mount.tiers[Tier.RAM].remove(content)
    gone(mount, way)
    mount.put(b"c", b"other")
    rest(flow)
    kept = {b"tmp": b"old", b"a": b"new"} if way == "rename" else {b"a": b"old"}
    assert closed.calls and {name: value[1] for name, value in mount.on_pfs().items()} == {**kept, b"c": b"other"}
    assert count_left(mount) == (0, 0, 0)
    monkeypatch.undo()
    flow.retry_now()
    rest(flow)
    assert (mount.pfs / SET).read_bytes() == b"old" and mount.troubles() == []
    assert {name: value[1] for name, value in mount.on_pfs().items() if not name.startswith(b".ckptfs.history") and value[0] == "file"} == {
        b"c": b"other", **({b"a": b"new"} if way == "rename" else {}),
    }  # fmt: skip


@pytest.mark.parametrize("way", ["rename", "unlink"])
def test_a_set_that_leaves_the_pfs_is_not_evicted(mount: Mount, closed: Refusal, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: the application deleted the file of the set. Until the history has it, its copy in RAM is the last one."""
    flow, content = mount.write_back(), mount.shown(mount.number(b"a"))
    assert content is not None

    def is_evictable() -> bool:
        rows = copies.list_evictable(mount.db, Tier.RAM, elsewhere=True, at_most=9, pfs_verify=False)
        can_drop = lifecycle.can_drop(contents.get_file_record(mount.db, content), Tier.RAM, pfs_verify=False)
        assert can_drop == (content in [row.id for row in rows])
        return can_drop

    mount.keep(b"a")
    rest(flow)
    assert is_evictable()
    gone(mount, way)
    assert not is_evictable(), "write-back may have planned the removal"
    rest(flow)
    assert not is_evictable()
    monkeypatch.undo()
    flow.retry_now()
    rest(flow)
    assert (mount.pfs / SET).read_bytes() == b"old" and is_evictable()


def test_a_file_of_a_set_is_on_a_pfs_that_refuses_the_history(mount: Mount, closed: Refusal) -> None:
    """T6: a wait for the level pfs is over when the file is there under its own name."""
    mount.keep(b"a")
    rest(mount.write_back())
    inode = mount.number(b"a")
    assert closed.calls and journal.has_pending(mount.db, inode, 10**9) and not summary.has_pending(mount.db, inode)
    mount.append(b"a", b"new")
    assert summary.has_pending(mount.db, mount.number(b"a")), "new bytes are waited for"


def test_a_full_pfs_keeps_a_file_of_a_set_until_there_is_room_for_its_directory(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: a removal makes room, but the last copy of a set is no room."""
    flow = mount.write_back()
    mount.put(b"other", b"other")
    mount.settle(flow)
    full = Refusal(monkeypatch, "rename", lambda name: name in {b".ckptfs.history", b"new"}, errno.ENOSPC)
    mount.put(b"new", b"new")
    mount.keep(b"a")
    mount.unlink(b"a")
    mount.unlink(b"other")
    rest(flow)
    assert full.calls and {name: value[1] for name, value in mount.on_pfs().items()} == {b"a": b"old"}
    monkeypatch.undo()
    flow.retry_now()
    mount.settle_exactly(flow)
    assert (mount.pfs / SET).read_bytes() == b"old" and (mount.pfs / "new").read_bytes() == b"new" and not (mount.pfs / "a").exists()
