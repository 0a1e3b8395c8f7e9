"""D7, D14: what rules hold back is unknown to the PFS, and costs no lag; what is released appears there as it is."""

import os

import pytest
from write_back_world import Mount

from ckptfs.catalog import history, pfs_hold, retention_state, summary
from ckptfs.catalog.history import SetRecord
from ckptfs.config.schema import RetentionRule
from ckptfs.model import Level
from ckptfs.series.expiry import build_hold_check

RULE = RetentionRule("run/step_*", keep=3, pfs_every=10)


@pytest.fixture
def held(mount: Mount) -> Mount:
    mount.db.holds_back = build_hold_check([RULE])
    mount.mkdir(b"run")
    return mount


def save(mount: Mount, step: int) -> None:
    mount.mkdir(b"run/step_%d" % step)
    mount.mkdir(b"run/step_%d/rank0" % step)
    mount.put(b"run/step_%d/rank0/model.pt" % step, b"weights %d" % step)
    mount.symlink(b"run/step_%d/last" % step, b"rank0")


def release(mount: Mount, path: bytes) -> None:
    with mount.db.transaction():
        pfs_hold.release_tree(mount.db, mount.number(path))


def pfs_names(mount: Mount) -> set[bytes]:
    return set(mount.on_pfs())


def test_members_stay_off_the_pfs_and_all_else_goes_there(held: Mount) -> None:
    save(held, 1)
    held.put(b"run/config.json", b"{}")
    assert summary.load_write_back_figures(held.db).dirty_files == 1, "what is held is not behind"
    held.settle()
    assert pfs_names(held) == {b"run", b"run/config.json"}
    assert summary.get_level(held.db, held.number(b"run/step_1/rank0/model.pt")) is Level.LOCAL
    assert pfs_hold.count_held(held.db) == (1, 9)


def test_a_released_set_appears_as_it_is_now(held: Mount) -> None:
    save(held, 1)
    save(held, 2)
    held.settle()
    held.chmod(b"run/step_1/rank0/model.pt", 0o604)
    held.setxattr(b"run/step_1", b"user.step", b"1")
    held.rename(b"run/step_1/last", b"run/step_1/first")
    release(held, b"run/step_1")
    held.settle()
    assert {path: held.on_pfs()[path] for path in pfs_names(held)} == {
        path: entry for path, entry in held.tree().items() if not path.startswith(b"run/step_2")
    }
    assert os.getxattr(held.pfs / "run" / "step_1", "user.step") == b"1"
    release(held, b"run/step_2")
    held.settle_exactly()


def test_a_file_that_is_released_before_its_seal_appears_with_its_bytes(held: Mount) -> None:
    held.seal_at_once = False
    content = held.put(b"run/step_1", b"weights")
    release(held, b"run/step_1")
    held.seal(content)
    held.settle_exactly()
    held.put(b"run/step_2", b"weights")
    open_one = held.put(b"run/step_3", b"weights", closed=False)
    release(held, b"run/step_3")
    held.close(open_one, 7)
    held.seal(open_one)
    held.settle()
    assert pfs_names(held) == {b"run", b"run/step_1", b"run/step_3"}


def test_a_file_written_under_a_temporary_name_goes_where_its_name_says(held: Mount) -> None:
    held.put(b"run/config.json", b"old")
    held.settle()
    held.put(b"run/config.json.tmp", b"new")
    held.put(b"run/tmp-step_7", b"weights")
    held.settle()
    assert pfs_names(held) == {b"run", b"run/config.json"}
    held.rename(b"run/config.json.tmp", b"run/config.json")
    held.rename(b"run/tmp-step_7", b"run/step_7")
    held.settle()
    assert pfs_names(held) == {b"run", b"run/config.json"} and held.on_pfs()[b"run/config.json"][1] == b"new"


def test_what_replaces_a_set_on_the_pfs_waits_and_the_old_one_goes(held: Mount) -> None:
    held.put(b"run/step_1", b"old")
    release(held, b"run/step_1")
    held.settle()
    held.put(b"run/step_1.tmp", b"new")
    held.rename(b"run/step_1.tmp", b"run/step_1")
    held.settle()
    assert pfs_names(held) == {b"run"}
    release(held, b"run/step_1")
    held.settle_exactly()


def test_what_gets_a_name_elsewhere_is_held_back_no_more(held: Mount) -> None:
    save(held, 1)
    held.link(b"run/step_1/rank0/model.pt", b"best.pt")
    held.settle()
    assert pfs_names(held) == {b"run", b"best.pt", b"run/step_1", b"run/step_1/rank0", b"run/step_1/rank0/model.pt"}


def test_what_the_pfs_has_is_never_lost_in_a_place_that_is_held(held: Mount) -> None:
    """P5: it may be the only copy."""
    held.put(b"model.pt", b"weights")
    held.settle()
    save(held, 1)
    held.rename(b"model.pt", b"run/step_1/model.pt")
    held.settle()
    assert pfs_names(held) == {b"run", b"run/step_1", b"run/step_1/model.pt"}


def test_rules_that_change_release_what_they_held(held: Mount) -> None:
    save(held, 1)
    held.settle()
    held.db.holds_back = build_hold_check([RetentionRule("other/step_*", keep=1, pfs_every=3)])
    with held.db.transaction():
        pfs_hold.release_misplaced(held.db)
    held.settle_exactly()


def test_deleted_files_leave_nothing(held: Mount) -> None:
    held.put(b"run/step_1", b"weights")
    held.unlink(b"run/step_1")
    assert held.db.rows("SELECT * FROM xattr") == []
    held.settle_exactly()


def make_set(mount: Mount, path: bytes, number: int) -> int:
    """Link a file of the application into the history as a set of its own. Return the directory of the set."""
    directory, name = mount.at(path)
    with mount.db.transaction():
        series = history.insert_series(mount.db, directory, b"step_*")
        made = history.begin_set(mount.db, series.directory, SetRecord(number, name, (number,), 1, 7, 1, is_group=True))
        history.insert_link(mount.db, mount.number(path), made, name)
        history.finish_set(mount.db, made)
    return made


def test_a_set_in_the_history_is_held_with_its_files(held: Mount) -> None:
    """Also when the application writes to a file of it again, and when it deletes all."""
    for number in range(1, 5):
        held.put(b"run/step_%d" % number, b"weights")
    sets = {number: make_set(held, b"run/step_%d" % number, number) for number in range(1, 5)}
    with held.db.transaction():
        history.separate(held.db, held.number(b"run/step_1"))
    held.unlink(b"run/step_2")
    held.settle()
    shown = {path for path in pfs_names(held) if not path.startswith(b".ckptfs")}
    assert shown == {b"run"} and os.listdir(held.pfs / ".ckptfs.history" / "run") == []
    with held.db.transaction():
        for number in (1, 2, 3):
            retention_state.mark_set(held.db, sets[number], retention_state.CHOSEN_XATTR)
            pfs_hold.release_tree(held.db, sets[number])
    held.settle()
    kept = held.pfs / ".ckptfs.history" / "run" / "step_*"
    assert {path.name: (path / path.name.partition("@")[0]).read_bytes() for path in kept.iterdir()} == {
        f"step_{number}@{number}": b"weights" for number in (1, 2, 3)
    }
    assert os.listdir(held.pfs / "run") == ["step_3"], "what is written again waits for its own set"
    series = held.db.value("SELECT parent FROM entry WHERE child = ?", sets[1])
    assert retention_state.list_marked(held.db, series, retention_state.CHOSEN_XATTR) == {sets[1], sets[2], sets[3]}
