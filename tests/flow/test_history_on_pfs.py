"""The history of sets on the PFS: hard links below .ckptfs.history, and what becomes of them (T6, P5)."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from write_back_world import Mount, intercepted

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
