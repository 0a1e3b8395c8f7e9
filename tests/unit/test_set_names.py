"""Words for series and sets, and what commands print of them: D1, D12, P11."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client import mounts
from ckptfs_client.errors import ClientError, CommandFailed, NoMount, UsageError
from ckptfs_client.mounts import HISTORY, Mount
from ckptfs_client.sets import set_listing
from ckptfs_client.sets.set_changes import annotate, choose_rollback
from ckptfs_client.sets.set_history import ListedSeries, split_number
from ckptfs_client.sets.set_listing import (
    build_series_row,
    describe_set,
    find_unfinished,
    format_series,
    format_set,
    format_sets,
    list_all_rows,
    list_set_rows,
)
from history_directory import LAST_NS, HistoryDirectory

from ckptfs.model import Level

STEP = "run1/step_*"


@pytest.fixture
def tree(tmp_path: Path) -> HistoryDirectory:
    """Two runs; in the first one, step_100 was saved twice, and step_300 is a file of another series."""
    tree = HistoryDirectory(tmp_path)
    tree.add(STEP, "step_100", {"a.pt": b"1", "b/c.pt": b"22"}, level="pfs", in_place=False)
    tree.add(STEP, "step_200", {"a.pt": b"333"}, level="pfs", pinned=True, note="good [one]")
    tree.add(STEP, "step_100", {"a.pt": b"4444"})
    tree.add("run1/step_*.pt", "step_300.pt", {"step_300.pt": b"x"}, group=True)
    tree.add("run2/state.cpt", "state_prev.cpt", {"state_prev.cpt": b"x"}, group=True)
    return tree


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("step_100@17", ("step_100", 17)), ("step_*@17", ("step_*", 17)), ("a@b", ("a@b", None)), ("@3", ("@3", None)),
        ("a@b@2", ("a@b", 2)), ("a@" + "9" * 30, ("a@" + "9" * 30, None)),
    ],
)  # fmt: skip
def test_a_number_behind_a_name(name: str, expected: tuple[str, int | None]) -> None:
    assert split_number(name) == expected


@pytest.mark.parametrize("is_public", [True, False], ids=["public", "private"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run1/step_100", "step_100@3"), ("run1/step_100@1", "step_100@1"), ("run1/step_*@2", "step_200@2"),
        (f"{HISTORY}/run1/step_*/step_100@1", "step_100@1"), (f"{HISTORY}/run1/step_*/step_100@1/b/c.pt", "step_100@1"),
        (f"{HISTORY}/run1/step_*@1", "step_100@1"), ("run2/state_prev.cpt", "state_prev.cpt@1"), ("run2/state.cpt@1", "state_prev.cpt@1"),
    ],
)  # fmt: skip
def test_each_form_names_a_set(tree: HistoryDirectory, text: str, expected: str, is_public: bool) -> None:
    """D12. Names that the daemon does not tell are read through the mount."""
    tree.is_public = is_public
    if text == "run2/state_prev.cpt":
        (tree.root / text).unlink()  # Of a file that exists, its attribute says to which set it belongs.
    found = tree.open().find_set(tree.root / text)
    assert found.history.name == expected and found.history.is_dir()
    assert found.shown == str(tree.root / os.path.dirname(found.series.path) / expected)


def test_paths_that_begin_here(tree: HistoryDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.root / "run1")
    assert (
        tree.open().find_set(Path("step_200")).history.name == tree.open().find_set(Path("../run1/step_*@2")).history.name == "step_200@2"
    )
    assert [one.path for one in tree.open().find_series(Path("."))] == [STEP, "run1/step_*.pt"]
    with pytest.raises(UsageError, match="run1 is a series or holds series"):
        tree.open().find_set(Path("."))


def test_a_member_that_was_deleted(tree: HistoryDirectory) -> None:
    for path in (tree.root / "run1" / "step_200").iterdir():
        path.unlink()
    (tree.root / "run1" / "step_200").rmdir()
    assert tree.open().find_set(tree.root / "run1" / "step_200").history.name == "step_200@2"


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("run1/step_*@9", CommandFailed, "there is no such set; the newest is .*/run1/step_200@2; ckptfs list '.*/run1/step_\\*'"),
        ("run1/step_200@3", CommandFailed, "there is no such set; the newest is"),
        ("run1/step_999", CommandFailed, "there is no such set; accepted: .*series with sets: '.*/run1/step_\\*' or"),
        ("run1/epoch_3@1", CommandFailed, "there is no such set; accepted:"),
        ("run1/config.json", CommandFailed, "belongs to no complete set; ckptfs latest .*/run1 says what is missing"),
        ("run1/step_*", UsageError, "is a series or holds series, and is not a set; accepted: a path such as"),
        ("run1", UsageError, "is a series or holds series, and is not a set"),
        (f"{HISTORY}/run1", CommandFailed, "belongs to no complete set"),
    ],
)  # fmt: skip
def test_what_names_no_set(tree: HistoryDirectory, text: str, error: type[ClientError], words: str) -> None:
    """P11."""
    (tree.root / "run1" / "config.json").write_text("{}")
    with pytest.raises(error, match=words) as failure:
        tree.open().find_set(tree.root / text)
    assert failure.value.exit_code == (2 if error is UsageError else 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (STEP, [STEP]), ("run1", [STEP, "run1/step_*.pt"]), ("run1/step_7", [STEP]), ("run1/step_100", [STEP]),
        ("run1/step_7.pt", ["run1/step_*.pt"]),
        (".", [STEP, "run1/step_*.pt", "run2/state.cpt"]), ("run3", []), (HISTORY, [STEP, "run1/step_*.pt", "run2/state.cpt"]),
        (f"{HISTORY}/run2", ["run2/state.cpt"]), (f"{HISTORY}/{STEP}/step_100@1", [STEP]),
    ],
)  # fmt: skip
def test_which_series_are_meant(tree: HistoryDirectory, text: str, expected: list[str]) -> None:
    assert [one.path for one in tree.open().find_series(tree.root / text)] == expected


def test_a_directory_that_was_renamed(tree: HistoryDirectory) -> None:
    """Its history has the name that it had."""
    origin = (tree.root / "run2").stat().st_ino
    (tree.root / "run2").rename(tree.root / "run9")
    reply = tree.list_series()
    for one in reply.series:
        one.origin = one.origin or origin
    tree.list_series = lambda **_: reply  # type: ignore[method-assign]
    assert tree.open().find_one_series(tree.root / "run9").path == "run2/state.cpt"
    assert tree.open().find_set(tree.root / "run9" / "state.cpt@1").history.name == "state_prev.cpt@1"


def test_a_second_series_of_the_same_path(tree: HistoryDirectory) -> None:
    tree.add("run1/step_*~2", "step_1", {"a": b"x"})
    assert [one.path for one in tree.open().find_series(tree.root / STEP)] == [STEP, f"{STEP}~2"]
    with pytest.raises(UsageError, match="may mean several series"):
        tree.open().find_one_series(tree.root / "run1")


def test_the_list_of_a_series(tree: HistoryDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1, D12."""
    monkeypatch.setattr("time.time_ns", lambda: LAST_NS + 90 * 10**9)
    history = tree.open()
    one = history.find_one_series(tree.root / STEP)
    rows = list_set_rows(history, one)
    assert [(row["set"], row["number"], row["step"], row["files"], row["size"]) for row in rows] == [
        ("step_200@2", 2, 200, 1, 3), ("step_100@3", 3, 100, 1, 4), ("step_100@1", 1, 100, 2, 3),
    ]  # fmt: skip
    assert [row["state"] for row in rows] == ["complete", "complete", "in history only"]
    assert rows[2]["path"] == str(tree.root / HISTORY / STEP / "step_100@1") and rows[1]["path"] == str(tree.root / "run1" / "step_100")
    assert [row["number"] for row in list_set_rows(history, one, Level.PFS)] == [2, 1]
    assert format_sets(rows).splitlines() == [
        "set         step  files  size  level    age  kept    state            note",
        "step_200@2   200      1   3 B  pfs    1 min  pinned  complete         good [one]",
        "step_100@3   100      1   4 B  local  1 min          complete",
        "step_100@1   100      2   3 B  pfs    1 min          in history only",
    ]
    assert json.loads(json.dumps(rows)) == rows


@pytest.mark.parametrize(("rollback", "expected"), [(0, "step_100@3"), (2, "step_100@3"), (3, "step_100@1"), (1, "")])
def test_a_rollback_without_a_set_goes_to_the_one_before_the_latest(tree: HistoryDirectory, rollback: int, expected: str) -> None:
    """D2: step_100@3 was completed last, and is before step_200@2. Each rollback goes further back."""
    tree.rollback = rollback
    history = tree.open()
    one = history.find_one_series(tree.root / STEP)
    if expected:
        assert choose_rollback(history, one, None).history.name == expected
    else:
        with pytest.raises(CommandFailed, match="has no set before the latest one"):
            choose_rollback(history, one, None)


def test_the_list_of_all_series(tree: HistoryDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: LAST_NS + 90 * 10**9)
    tree.rollback = 3
    rows = [build_series_row(one) for one in tree.open().series]
    assert [(row["series"].removeprefix(f"{tree.root}/"), row["sets"], row["size"], row["rollback"]) for row in rows] == [
        (STEP, 3, 10, 3), ("run1/step_*.pt", 1, 1, 3), ("run2/state.cpt", 1, 1, 3),
    ]  # fmt: skip
    head, first, *_ = format_series(rows).splitlines()
    assert head.split() == ["sets", "size", "level", "age", "newest", "series", "state"]
    assert first.split() == ["3", "10", "B", "local", "1", "min", "step_100@3", f"{tree.root}/{STEP}", "rolled", "back"]


def test_notes_of_others_are_not_shown(tree: HistoryDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """F6: names and notes of a private series are read through the mount, as far as the kernel lets the caller."""
    tree.is_public = False
    monkeypatch.setattr(os, "getxattr", lambda path, name, follow_symlinks: b"a note")
    history = tree.open()
    assert [row["note"] for row in list_set_rows(history, history.find_one_series(tree.root / STEP))] == ["a note", "", ""]
    monkeypatch.setattr(os, "access", lambda path, mode: "run1" not in str(path))
    assert [one.path for one in tree.open().series] == ["run2/state.cpt"]


def test_nothing_is_searched_where_nothing_can_be_newer(tree: HistoryDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 members take a while to look at."""
    history = tree.open()
    one = history.find_one_series(tree.root / STEP)
    newest = list_set_rows(history, one)[0]
    searched: list[object] = []
    monkeypatch.setattr("ckptfs_client.sets.newest.find_newest", lambda named, wanted: searched.append(named) or pytest.fail("searched"))
    newest["completed_ns"] = (tree.root / "run1").stat().st_mtime_ns
    assert find_unfinished(tree.root / "run1", one, newest) is None and not searched
    newest["completed_ns"] -= 1
    with pytest.raises(pytest.fail.Exception):
        find_unfinished(tree.root / "run1", one, newest)


def test_all_that_is_known_of_a_set(tree: HistoryDirectory) -> None:
    """H10."""
    history = tree.open()
    found = history.find_set(tree.root / "run1" / "step_100@1")
    shown = describe_set(history, found)
    assert [(one["path"], one["size"], one["level"], len(one["digest"])) for one in shown["members"]] == [
        ("a.pt", 1, "local", 32), ("b/c.pt", 2, "local", 32),
    ]  # fmt: skip
    assert shown["manifest"] == str(found.history / "MANIFEST.json") and shown["producers"][0]["job"] == "99"
    text = format_set(shown, found.shown)
    for words in ("in history only", "2 files, 3 B", "node1, pid 7, job 99, rank 0, python train.py", "MANIFEST.json", "b/c.pt"):
        assert words in text
    (found.history / "MANIFEST.json").write_text("{")
    with pytest.raises(CommandFailed, match="is no manifest"):
        describe_set(history, found)


@pytest.mark.parametrize(
    ("note", "fault"),
    [("x" * 4097, "4097 bytes"), ("a\x1b[31m", "characters that cannot be printed"), ("ü" * 2049, "4098 bytes")],
)
def test_a_note_that_is_not_accepted(tree: HistoryDirectory, note: str, fault: str) -> None:
    """P11."""
    found = tree.open().find_set(tree.root / "run1" / "step_100@1")
    with pytest.raises(UsageError, match=f"the note has {fault}; accepted: printable text of up to 4096 bytes"):
        annotate(found, note)


def test_of_very_many_sets_people_see_the_newest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = HistoryDirectory(tmp_path)
    for number in range(1, 6):
        tree.add(STEP, f"step_{number}", {"a": b"x"}, completed_ns=2**62)
    history = tree.open()
    one = history.find_one_series(tmp_path / STEP)
    assert [row["number"] for row in list_all_rows(history, tmp_path / STEP, one, 3)] == [5, 4, 3]
    assert capsys.readouterr().err == "ckptfs: only the newest 3 sets are listed; --all lists all\n"
    for at_most in (5, None):
        assert len(list_all_rows(history, tmp_path / STEP, one, at_most)) == 5 and not capsys.readouterr().err


def test_a_silent_mount_does_not_keep_the_list_of_others_waiting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """D12: all are asked at once, as for the status; who does not answer is named, and the exit code says so."""
    found = [Mount(name, Path(f"/{name}"), 0, 1) for name in ("one", "two", "three")]
    all_asked = threading.Barrier(len(found), timeout=30)

    class History:
        def __init__(self, mount: Mount, client: Any, *, figures: bool) -> None:
            self.mount = mount

        @property
        def series(self) -> list[ListedSeries]:
            all_asked.wait()
            if self.mount.name == "two":
                raise NoMount("the daemon of two does not answer")
            return [ListedSeries(self.mount, 1, 1, "run1/step_*", "step_*", 0, 1, 5, None)]

    monkeypatch.setattr(mounts, "list_mounts", lambda: found)
    monkeypatch.setattr(set_listing, "SetHistory", History)
    with pytest.raises(SystemExit) as end:
        set_listing.print_list(None, None, is_json=True)
    shown = capsys.readouterr()
    assert [one["series"] for one in json.loads(shown.out)] == ["/one/run1/step_*", "/three/run1/step_*"]
    assert (end.value.code, shown.err) == (3, "ckptfs: /two: the daemon of two does not answer\n")
