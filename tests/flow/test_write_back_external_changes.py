"""External changes on the PFS: our file gets the name, theirs becomes a conflict copy. What they removed is made again."""

import os
import shutil
from pathlib import Path

import pytest
from write_back_world import Mount, intercepted

from ckptfs.catalog import copies
from ckptfs.model import Tier


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    made = Mount(tmp_path)
    made.mkdir(b"run")
    made.put(b"run/a", b"ours 1")
    made.settle()
    return made


def test_an_external_write_into_our_file_becomes_a_conflict_copy(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    (mount.pfs / "run" / "a").write_bytes(b"theirs")
    mount.put(b"run/a", b"ours 2")
    mount.settle()
    assert (mount.pfs / "run" / "a").read_bytes() == b"ours 2"
    assert (mount.pfs / "run" / "a.ckptfs-conflict-1").read_bytes() == b"theirs"
    assert "kept there as a.ckptfs-conflict-1" in caplog.text


def test_another_file_under_our_name(mount: Mount) -> None:
    for number in (1, 2):
        (mount.pfs / "theirs").write_bytes(b"theirs %d" % number)
        os.rename(mount.pfs / "theirs", mount.pfs / "run" / "a")
        mount.put(b"run/a", b"ours again %d" % number)
        mount.settle()
        assert (mount.pfs / "run" / "a").read_bytes() == b"ours again %d" % number
        assert (mount.pfs / "run" / f"a.ckptfs-conflict-{number}").read_bytes() == b"theirs %d" % number


def test_a_name_that_was_taken_on_the_pfs_becomes_a_conflict_copy(mount: Mount) -> None:
    (mount.pfs / "run" / ("n" * 255)).write_bytes(b"theirs")
    (mount.pfs / "run" / "d").mkdir()
    (mount.pfs / "run" / "d" / "inside").write_bytes(b"theirs")
    mount.put(b"run/" + b"n" * 255, b"ours")
    mount.put(b"run/d", b"a file where they have a directory")
    mount.settle()
    assert (mount.pfs / "run" / ("n" * 255)).read_bytes() == b"ours"
    assert sorted(path.read_bytes() for path in (mount.pfs / "run").glob("n*")) == [b"ours", b"theirs"]
    assert (mount.pfs / "run" / "d").read_bytes() == b"a file where they have a directory"
    assert (mount.pfs / "run" / "d.ckptfs-conflict-1" / "inside").read_bytes() == b"theirs"


def test_a_directory_replaces_an_external_file(mount: Mount) -> None:
    """A directory cannot be renamed over a file: theirs loses the name, and nothing waits for ever."""
    mount.mkdir(b"moved")
    mount.settle()
    for name in ("made", "to"):
        (mount.pfs / name).write_bytes(b"theirs")
    mount.mkdir(b"made")
    mount.rename(b"moved", b"to")
    mount.put(b"to/file", b"ours")
    mount.settle()
    assert (mount.pfs / "made").is_dir() and (mount.pfs / "to" / "file").read_bytes() == b"ours"
    assert [(mount.pfs / f"{name}.ckptfs-conflict-1").read_bytes() for name in ("made", "to")] == [b"theirs"] * 2


def test_a_directory_that_both_made_is_one(mount: Mount) -> None:
    (mount.pfs / "shared").mkdir()
    (mount.pfs / "shared" / "theirs").write_bytes(b"theirs")
    mount.mkdir(b"shared")
    mount.put(b"shared/ours", b"ours")
    mount.settle()
    assert sorted(os.listdir(mount.pfs / "shared")) == ["ours", "theirs"]
    assert mount.db.value("SELECT imported FROM inode WHERE id = ?", mount.number(b"shared")) == 0, "theirs is imported at the next visit"
    assert mount.temporaries() == []


def test_a_renamed_file_that_was_removed_on_the_pfs_is_written_again(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    os.unlink(mount.pfs / "run" / "a")
    mount.rename(b"run/a", b"run/b")
    mount.settle_exactly()
    assert "run/b: gone from the PFS" in caplog.text


def test_a_directory_that_was_removed_on_the_pfs_is_made_again(mount: Mount) -> None:
    mount.mkdir(b"run/deep")
    mount.put(b"run/deep/x", b"x")
    mount.settle()
    shutil.rmtree(mount.pfs / "run")
    mount.put(b"run/deep/new", b"new")
    mount.settle_exactly()


def test_a_renamed_directory_that_was_removed_on_the_pfs_is_made_again(mount: Mount) -> None:
    shutil.rmtree(mount.pfs / "run")
    mount.rename(b"run", b"walk")
    mount.settle_exactly()


def test_a_symlink_in_place_of_a_directory_is_not_followed(mount: Mount, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    os.rename(mount.pfs / "run", mount.pfs / "moved")
    os.symlink(elsewhere, mount.pfs / "run")
    mount.put(b"run/new", b"new")
    mount.settle()
    assert list(elsewhere.iterdir()) == []
    assert (mount.pfs / "run" / "new").read_bytes() == b"new" and not (mount.pfs / "run").is_symlink()


def test_unlink_leaves_an_external_file(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    (mount.pfs / "theirs").write_bytes(b"theirs, another file")  # Made while ours exists, so that its number is another one.
    os.rename(mount.pfs / "theirs", mount.pfs / "run" / "a")
    mount.unlink(b"run/a")
    mount.settle()
    assert (mount.pfs / "run" / "a").read_bytes() == b"theirs, another file"
    assert "replaced externally on the PFS" in caplog.text


def test_rmdir_leaves_a_directory_that_holds_an_external_file(mount: Mount) -> None:
    (mount.pfs / "run" / "theirs").write_bytes(b"theirs")
    mount.unlink(b"run/a")
    mount.rmdir(b"run")
    mount.settle()
    assert os.listdir(mount.pfs / "run") == ["theirs"]


def test_a_file_whose_only_copy_was_removed_is_never_shown_as_empty(mount: Mount) -> None:
    content = mount.shown(mount.number(b"run/a"))
    assert content is not None
    with mount.db.transaction():
        copies.delete_copy(mount.db, content, Tier.RAM)
    os.unlink(mount.pfs / "run" / "a")
    mount.rename(b"run/a", b"run/b")
    mount.settle()
    assert mount.on_pfs() == {b"run": ("directory", 0o755)}
    assert mount.db.value("SELECT count(*) FROM pfs_file") == 1, "a visit finds out what became of it"


def test_a_temporary_file_that_was_purged_is_written_again(mount: Mount) -> None:

    def purge(label: str) -> None:
        if label == "write_back:written_down":
            for path in (mount.pfs / "run").glob(".ckptfs.*"):
                path.unlink()

    mount.put(b"run/new", b"new")
    flow = mount.write_back()
    with intercepted(purge):
        flow.step()
    mount.settle_exactly(flow)


def test_a_directory_that_both_removed_holds_nothing_up(mount: Mount) -> None:
    mount.mkdir(b"d")
    mount.put(b"d/first", b"1")
    mount.settle()
    shutil.rmtree(mount.pfs / "d")
    mount.mkdir(b"d/sub")
    mount.rmdir(b"d/sub")
    mount.unlink(b"d/first")
    mount.rmdir(b"d")
    mount.put(b"after", b"3")
    mount.settle_exactly()


def test_a_former_file_under_a_replaced_name_is_no_external_change(mount: Mount) -> None:
    """H1: the name shows the former file until its new bytes are there, also if that file goes on under another name."""
    mount.link(b"run/a", b"run/other")
    mount.settle()
    mount.put(b"run/new", b"new")
    mount.rename(b"run/new", b"run/a")
    content = mount.append(b"run/a", b" bytes", closed=False)
    mount.append(b"run/other", b" and more")
    mount.utime(b"run/other", 5)
    mount.settle()
    assert mount.on_pfs()[b"run/a"][1] == b"ours 1", "the new file is still open"
    mount.close(content, len(b"new bytes"))
    mount.settle_exactly()
