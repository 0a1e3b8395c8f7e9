"""`ckptfs restore`: a whole set or nothing, and never over something else. D12, P4, P11."""

import os
import stat
from pathlib import Path

import pytest
from ckptfs_client.errors import CommandFailed, UsageError
from ckptfs_client.json_answers import RestoreJson
from ckptfs_client.sets.set_files import Restore
from history_directory import HistoryDirectory

STEP = "run1/step_*"
FILES = {"a.pt": b"1" * 5_000_000, "b/c.pt": b"22"}


@pytest.fixture
def tree(tmp_path: Path) -> HistoryDirectory:
    (tmp_path / "mnt").mkdir()
    return HistoryDirectory(tmp_path / "mnt")


def restore(tree: HistoryDirectory, text: str, directory: Path | None = None, *, force: bool = False) -> RestoreJson:
    history = tree.open()
    found = history.find_set(tree.root / text)
    return Restore(history, found, directory or found.series.place).run(force=force)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def delete(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    directory.rmdir()


@pytest.mark.parametrize("whole", [True, False], ids=["gone", "one file gone"])
def test_to_its_own_place(tree: HistoryDirectory, whole: bool) -> None:
    made = tree.add(STEP, "step_1", FILES)
    os.utime(made / "a.pt", ns=(5, 7))
    (made / "link").symlink_to("a.pt")
    place = tree.root / "run1" / "step_1"
    if whole:
        delete(place)
    else:
        (place / "a.pt").unlink()
    answer = restore(tree, "run1/step_1@1")
    assert answer == {"set": f"{place}@1", "path": str(place), "files": 3, "bytes": 5_000_002}
    assert contents(place) == {**FILES, "link": FILES["a.pt"]} and os.readlink(place / "link") == "a.pt"
    status = (place / "a.pt").stat()
    assert status.st_mtime_ns == 7 and stat.S_IMODE(status.st_mode) == 0o640, "the mode of the application's file"
    assert os.listdir(place.parent) == ["step_1"] and status.st_nlink == 1


def test_what_is_in_its_place_is_left_alone(tree: HistoryDirectory) -> None:
    tree.add(STEP, "step_1", FILES)
    inode = (tree.root / "run1" / "step_1" / "a.pt").stat().st_ino
    assert restore(tree, "run1/step_1@1")["files"] == 0
    assert (tree.root / "run1" / "step_1" / "a.pt").stat().st_ino == inode


@pytest.mark.parametrize("other", ["a.pt", "new.pt"])
def test_something_else_is_not_replaced(tree: HistoryDirectory, other: str) -> None:
    """P5, P11."""
    tree.add(STEP, "step_1", FILES)
    place = tree.root / "run1" / "step_1"
    (place / "a.pt").unlink()
    (place / other).write_bytes(b"newer")
    before = contents(place)
    with pytest.raises(CommandFailed, match=f"{other} is not a file of .*/run1/step_1@1, and would be lost; --force replaces it, or name"):
        restore(tree, "run1/step_1@1")
    assert contents(place) == before
    restore(tree, "run1/step_1@1", force=True)
    assert contents(place) == FILES and os.listdir(place.parent) == ["step_1"]


def test_a_set_of_several_files(tree: HistoryDirectory, tmp_path: Path) -> None:
    """Each gets its name; the index comes last."""
    names = {"ckpt-2.index": b"i", "ckpt-2.data-00000-of-00001": b"d"}
    tree.add("ckpt-*", "ckpt-2", names, group=True)
    (tree.root / "ckpt-2.index").unlink()
    order: list[str] = []
    replace = os.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda source, target: order.append(Path(target).name) or replace(source, target))
        assert restore(tree, "ckpt-2@1")["path"] == str(tree.root / "ckpt-2")
    assert order == ["ckpt-2.data-00000-of-00001", "ckpt-2.index"]
    restore(tree, "ckpt-2@1", tmp_path / "out")
    assert contents(tmp_path / "out") == names
    with pytest.raises(CommandFailed, match="would be lost"):
        restore(tree, "ckpt-2@1", tmp_path / "out")


def test_to_another_directory(tree: HistoryDirectory, tmp_path: Path) -> None:
    """Under its own name, and the directories above are made."""
    tree.add(STEP, "step_1", FILES)
    assert restore(tree, "run1/step_1", tmp_path / "out" / "deep")["path"] == str(tmp_path / "out" / "deep" / "step_1")
    assert contents(tmp_path / "out" / "deep" / "step_1") == FILES
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a directory"):
        restore(tree, "run1/step_1", tmp_path / "file")


def test_bad_bytes_are_not_restored(tree: HistoryDirectory, tmp_path: Path) -> None:
    """P4: nothing is left of it."""
    made = tree.add(STEP, "step_1", FILES)
    delete(tree.root / "run1" / "step_1")
    (made / "b" / "c.pt").write_bytes(b"23")
    with pytest.raises(CommandFailed, match=r"b/c.pt differs from its digest; ckptfs verify"):
        restore(tree, "run1/step_1@1", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (made / "b" / "c.pt").unlink()
    with pytest.raises(CommandFailed, match=r"b/c.pt is missing, which the manifest names"):
        restore(tree, "run1/step_1@1")
    assert os.listdir(tree.root / "run1") == []


def test_a_place_that_cannot_be_written(tree: HistoryDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there comes back if the last rename fails."""
    tree.add(STEP, "step_1", FILES)
    place = tree.root / "run1" / "step_1"
    (place / "a.pt").unlink()
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(source).name == "new":
            raise PermissionError(1, "Operation not permitted", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CommandFailed, match="Operation not permitted"):
        restore(tree, "run1/step_1@1")
    assert contents(place) == {"b/c.pt": b"22"} and os.listdir(place.parent) == ["step_1"]
