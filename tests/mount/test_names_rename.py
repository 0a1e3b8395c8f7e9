"""rename(2) through a real mount: every kind onto every kind, with every flag, over open files (P2, F4)."""

import ctypes
import errno
import os
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.fuse

CLOCK_REALTIME_COARSE = 5  # Not in the module time.
NOREPLACE, EXCHANGE, WHITEOUT = 1, 2, 4
libc = ctypes.CDLL(None, use_errno=True)

KINDS = ("file", "symlink", "fifo", "empty", "full")
DIRECTORIES = ("empty", "full")


def rename(old: Path, new: Path, flags: int = 0) -> str:
    """'ok' or the name of the errno of renameat2(2)."""
    result = libc.renameat2(-100, os.fsencode(old), -100, os.fsencode(new), flags)
    return "ok" if result == 0 else errno.errorcode[ctypes.get_errno()]


def make(path: Path, kind: str) -> int:
    if kind == "file":
        path.write_text(str(path))
    elif kind == "symlink":
        path.symlink_to("nowhere")
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
        if kind == "full":
            (path / "inside").touch()
    return path.lstat().st_ino


def ticked(moment_ns: int) -> None:
    """Return when the clock that the kernel stamps files with, which ticks some hundred times a second, is past `moment_ns`."""
    while time.clock_gettime_ns(CLOCK_REALTIME_COARSE) <= moment_ns:
        pass


def expected(source: str, target: str) -> str:
    """What Linux answers when a `source` is renamed onto a `target`."""
    if source in DIRECTORIES and target not in DIRECTORIES:
        return "ENOTDIR"
    if source not in DIRECTORIES and target in DIRECTORIES:
        return "EISDIR"
    return "ENOTEMPTY" if target == "full" else "ok"


@pytest.mark.parametrize("across", [False, True], ids=["within", "across"])
def test_every_kind_onto_every_kind(here: Path, across: bool) -> None:
    for source in KINDS:
        for target in KINDS:
            base = here / f"{source}-{target}"
            (base / "other").mkdir(parents=True)
            old, new = base / "old", (base / "other" if across else base) / "new"
            moved, kept = make(old, source), make(new, target)
            assert rename(old, new) == expected(source, target), (source, target)
            if expected(source, target) == "ok":
                assert (os.path.lexists(old), new.lstat().st_ino) == (False, moved)
            else:
                assert (old.lstat().st_ino, new.lstat().st_ino) == (moved, kept)


def test_noreplace_and_exchange(here: Path) -> None:
    for source in KINDS:
        for target in KINDS:
            base = here / f"{source}-{target}"
            base.mkdir()
            old, new = base / "old", base / "new"
            one, two = make(old, source), make(new, target)
            assert rename(old, new, NOREPLACE) == "EEXIST"
            assert rename(old, new, EXCHANGE) == "ok"
            assert (old.lstat().st_ino, new.lstat().st_ino) == (two, one)
            assert rename(old, base / "free", NOREPLACE) == "ok"
            assert rename(new, base / "none", EXCHANGE) == "ENOENT"
            assert rename(new, base / "free", NOREPLACE | EXCHANGE) == "EINVAL"
            assert rename(new, base / "none", WHITEOUT) == "EINVAL"


def test_a_directory_cannot_come_to_lie_in_itself(here: Path) -> None:
    (here / "a" / "b" / "c").mkdir(parents=True)
    assert rename(here / "a", here / "a" / "b" / "c" / "a") == "EINVAL"
    assert rename(here / "a" / "b" / "c", here / "a") == "ENOTEMPTY"
    assert rename(here / "a", here / "a" / "b", EXCHANGE) == "EINVAL"
    assert rename(here / "a", here / "a") == "ok"
    assert rename(here / "a" / "b" / "..", here / "x") == "EBUSY"


def test_two_names_of_one_file_stay(here: Path) -> None:
    (here / "a").touch()
    os.link(here / "a", here / "b")
    assert rename(here / "a", here / "b") == "ok"
    assert sorted(os.listdir(here)) == ["a", "b"]


def test_a_tree_moves_with_all_that_is_in_it(here: Path) -> None:
    (here / "from" / "sub").mkdir(parents=True)
    (here / "to").mkdir()
    with open(here / "from" / "sub" / "file", "w") as file:
        assert rename(here / "from", here / "to" / "moved") == "ok"
        file.write("written after the move")
    assert (here / "to" / "moved" / "sub" / "file").read_text() == "written after the move"
    assert not os.path.lexists(here / "from")
    assert os.stat(here / "to" / "moved" / "..").st_ino == os.stat(here / "to").st_ino


def test_renames_change_times_of_both_directories_and_ctime_of_what_moved(here: Path) -> None:
    (here / "a").mkdir()
    (here / "b").mkdir()
    (here / "a" / "file").touch()
    for directory in ("a", "b"):
        os.utime(here / directory, ns=(1, 1))
    before = os.stat(here / "a" / "file")
    ticked(before.st_ctime_ns)
    assert rename(here / "a" / "file", here / "b" / "file") == "ok"
    after = os.stat(here / "b" / "file")
    assert os.stat(here / "a").st_mtime_ns > 1 and os.stat(here / "b").st_mtime_ns > 1
    assert after.st_mtime_ns == before.st_mtime_ns and after.st_ctime_ns > before.st_ctime_ns
