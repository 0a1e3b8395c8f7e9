"""G1, P5, P6: with too little time, new files of an urgent checkpoint go to the PFS ahead of older changes, and nothing else does."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from write_back_world import Mount

from ckptfs.catalog import exposure, history, journal
from ckptfs.catalog.exposure import UrgentOrder
from ckptfs.catalog.history import SetRecord
from ckptfs.catalog.pfs_batch import PfsAction
from ckptfs.catalog.pfs_state import Fingerprint, PfsLocation
from ckptfs.flow.write_back import WriteBack, plan
from ckptfs.flow.write_back.deferred import RefusedKind
from ckptfs.model import ROOT

STEPS = (100, 200, 300)


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    """Each batch has one file, so that a number of steps is an amount of time."""
    monkeypatch.setattr(plan.Planner, "puts_max", 1)
    return Mount(tmp_path)


def save(mount: Mount, step: int) -> None:
    mount.mkdir(b"run/step_%d" % step)
    for name in (b"a.pt", b"b.pt"):
        mount.put(b"run/step_%d/%s" % (step, name), b"%d" % step)


def hurry(mount: Mount, *groups: list[bytes], is_ahead: bool = True) -> None:
    numbers = tuple(tuple(mount.number(path) for path in group) for group in groups)
    exposure.set_order(mount.db, UrgentOrder(numbers, is_ahead, "token"), 3600.0)


def files_of(step: int) -> list[bytes]:
    return [b"run/step_%d/a.pt" % step, b"run/step_%d/b.pt" % step]


def shown_after(mount: Mount, files: int, flow: WriteBack | None = None) -> set[bytes]:
    """The files that the PFS shows when it has so many of them; in between it never showed fewer than before."""
    flow, before = flow or mount.write_back(), 0
    for _ in range(100):
        shown = {path for path, (kind, *_) in mount.on_pfs().items() if kind == "file"}
        assert len(shown) >= before
        if len(shown) >= files:
            return shown
        before = len(shown)
        flow.step()
    raise AssertionError(f"the PFS never shows {files} files")


@pytest.mark.parametrize("order", [(300, 200, 100), (200, 300, 100)])
def test_the_urgent_checkpoint_is_there_first(mount: Mount, order: tuple[int, ...]) -> None:
    mount.mkdir(b"run")
    for step in STEPS:
        save(mount, step)
    hurry(mount, *(files_of(step) for step in order))
    assert shown_after(mount, 2) == set(files_of(order[0]))
    assert shown_after(mount, 4) == set(files_of(order[0]) + files_of(order[1]))
    mount.settle_exactly()


def test_the_order_ends_with_its_drain(mount: Mount) -> None:
    mount.mkdir(b"run")
    for step in STEPS:
        save(mount, step)
    hurry(mount, files_of(300))
    exposure.delete_order(mount.db, "another")
    assert exposure.load_order(mount.db) is not None
    exposure.delete_order(mount.db, "token")
    assert shown_after(mount, 2) == set(files_of(100))
    hurry(mount, files_of(300), is_ahead=False)
    assert shown_after(mount, 4) == set(files_of(100) + files_of(200)), "there is time enough"
    mount.settle_exactly()


def test_a_checkpoint_that_is_renamed_into_place_goes_ahead_under_its_name(mount: Mount) -> None:
    mount.mkdir(b"run")
    save(mount, 100)
    mount.mkdir(b"run/tmp-300")
    for name in (b"a.pt", b"b.pt"):
        mount.put(b"run/tmp-300/%s.tmp" % name, b"300")
        mount.rename(b"run/tmp-300/%s.tmp" % name, b"run/tmp-300/" + name)
    mount.rename(b"run/tmp-300", b"run/step_300")
    hurry(mount, files_of(300))
    flow = mount.write_back()
    shown_after(mount, 1, flow)
    hurry(mount, files_of(300), files_of(100))  # The order changes while the group is under way.
    while journal.has_pending(mount.db, mount.number(b"run/step_300"), 10**9):
        assert flow.step()
    assert {path for path in mount.on_pfs() if path.endswith(b".pt")} == set(files_of(300))
    mount.settle_exactly()


def replaced(mount: Mount) -> None:
    mount.put(b"last.pt", b"new")


def moved_over(mount: Mount) -> None:
    mount.put(b"new.tmp", b"new")
    mount.rename(b"new.tmp", b"last.pt")


def made_where_another_was(mount: Mount) -> None:
    mount.unlink(b"last.pt")
    mount.put(b"last.pt", b"new")


def put_into_a_directory_that_has_yet_to_move(mount: Mount) -> None:
    mount.rename(b"old", b"moved")
    mount.put(b"moved/last.pt", b"new")


@pytest.mark.parametrize("change", [replaced, moved_over, made_where_another_was, put_into_a_directory_that_has_yet_to_move])
def test_nothing_is_replaced_or_moved_ahead_of_its_turn(mount: Mount, change: Callable[[Mount], None]) -> None:
    """P5: the PFS keeps the last checkpoint until all that was saved before its successor is there."""
    mount.put(b"last.pt", b"old")
    mount.mkdir(b"old")
    mount.settle()
    mount.put(b"other.pt", b"x")
    change(mount)
    hurry(mount, [b"moved/last.pt" if b"moved" in mount.tree() else b"last.pt"])
    flow, seen = mount.write_back(), []
    while flow.step():
        seen.append(mount.on_pfs())
    assert all(b"other.pt" in tree or tree[b"last.pt"][1] == b"old" for tree in seen)
    assert all(b"other.pt" in tree or b"moved/last.pt" not in tree for tree in seen)
    mount.exact()


def test_names_that_were_used_before_go_ahead_together(mount: Mount) -> None:
    """A job that saves under one temporary name: its members keep their order, and an older one is never taken for the newer."""
    mount.put(b"notes", b"x")
    for step in (1, 2):
        mount.put(b"saving", b"%d" % step)
        mount.rename(b"saving", b"step_%d" % step)
    hurry(mount, [b"step_2"])
    flow = mount.write_back()
    assert b"step_1" in shown_after(mount, 2, flow)
    assert shown_after(mount, 3, flow) == {b"step_1", b"step_2", b"notes"}
    mount.settle_exactly()


def test_a_directory_that_went_ahead_holds_up_no_later_group(mount: Mount) -> None:
    mount.mkdir(b"new")
    mount.rename(b"new", b"run")
    mount.put(b"notes", b"x")
    for step in STEPS:
        save(mount, step)
    hurry(mount, files_of(300), files_of(200))
    assert shown_after(mount, 4) == set(files_of(300) + files_of(200))
    mount.settle_exactly()


def test_sets_that_the_history_names_go_ahead_with_their_names_there(mount: Mount) -> None:
    mount.mkdir(b"run")
    for number, step in enumerate(STEPS, 1):
        save(mount, step)
        with mount.db.transaction():
            series = history.insert_series(mount.db, mount.number(b"run"), b"step_*")
            made = history.begin_set(mount.db, series.directory, SetRecord(number, b"step_%d" % step, (step,), 2, 6, 1))
            for path in files_of(step):
                history.insert_link(mount.db, mount.number(path), made, path.rpartition(b"/")[2])
            history.finish_set(mount.db, made)
    hurry(mount, files_of(300), files_of(200))
    flow = mount.write_back()
    for step, number, files in ((300, 3, 4), (200, 2, 8)):
        while b".ckptfs.history/run/step_*/step_%d@%d" % (step, number) not in mount.on_pfs():
            assert flow.step()
        assert len([path for path in mount.on_pfs() if path.endswith(b".pt")]) == files and files_of(step)[0] in mount.on_pfs()
    assert files_of(100)[0] not in mount.on_pfs()
    mount.settle_exactly(flow)


def test_a_refused_file_does_not_hold_up_the_others(mount: Mount) -> None:
    mount.mkdir(b"run")
    for step in STEPS:
        save(mount, step)
    hurry(mount, files_of(300), files_of(200))
    flow = mount.write_back()
    put = PfsAction("put", 1, mount.number(files_of(300)[0]), PfsLocation(ROOT, b"a.pt", ()), Fingerprint())
    flow._deferred.defer(put, RefusedKind.BYTES, OSError(errno.EDQUOT, "over the quota"))
    for _ in range(100):
        if not flow.step():
            break
    assert set(files_of(100) + files_of(200)) <= mount.on_pfs().keys() and files_of(300)[0] not in mount.on_pfs()
    flow.retry_now()
    mount.settle_exactly(flow)
