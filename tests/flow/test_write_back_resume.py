"""P6, P8: the copy of a large file that a death interrupted is resumed. Right blocks on the PFS are not written again."""

import os
from pathlib import Path

import pytest
from write_back_world import Killed, Mount, intercepted

from ckptfs import disk, limits
from ckptfs.errors import CkptfsError

SIZE = 12 << 20
WRITES = SIZE // (512 << 10)


class Counting:
    """Counts the operations of each label, and dies at the `number`-th one of `label`: nothing happens after that."""

    def __init__(self, label: str = "", number: int = 0) -> None:
        self.seen: list[str] = []
        self._fatal = (label, number)
        self._dead = False

    def __call__(self, label: str) -> None:
        self.seen.append(label)
        self._dead = self._dead or (label, self.seen.count(label)) == self._fatal
        if self._dead:
            raise Killed


def cut_off(mount: Mount, label: str = "write_back:write", number: int = WRITES * 3 // 4) -> None:
    with pytest.raises(Killed), intercepted(Counting(label, number)):
        mount.settle()
    assert len(mount.temporaries()) == 1


def settled(mount: Mount) -> list[str]:
    """What the next mover did."""
    counting = Counting()
    with intercepted(counting):
        mount.settle()
    mount.exact()
    return counting.seen


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    mount = Mount(tmp_path)
    mount.put(b"large", os.urandom(SIZE))
    return mount


def test_complete_blocks_are_not_written_again(mount: Mount) -> None:
    cut_off(mount)
    seen = settled(mount)
    assert seen.count("write_back:write") == WRITES - (WRITES * 3 // 4 - 1) and "write_back:create" not in seen


def test_a_copy_that_was_whole_is_only_read(mount: Mount) -> None:
    cut_off(mount, "write_back:fsync", 1)
    assert "write_back:write" not in settled(mount)


def test_a_copy_survives_many_deaths(mount: Mount) -> None:
    """Each life writes a little, and together they write everything once."""
    lives = 0
    while True:
        counting = Counting("write_back:write", 9)
        try:
            with intercepted(counting):
                mount.settle()
            break
        except Killed:
            lives += 1
            assert lives < WRITES
    mount.exact()
    assert lives == (WRITES - 1) // 8


def test_bytes_that_are_wrong_are_written_again(mount: Mount) -> None:
    cut_off(mount)
    with open(mount.temporaries()[0], "r+b") as file:
        file.seek(5 << 20)
        file.write(b"not what it was")
    assert settled(mount).count("write_back:write") == WRITES - (WRITES * 3 // 4 - 1) + 1


@pytest.mark.parametrize("change", ["rewritten", "shorter", "longer", "with holes", "emptied"])
def test_a_file_that_has_other_bytes_by_then(mount: Mount, change: str) -> None:
    cut_off(mount)
    data = {
        "rewritten": os.urandom(SIZE), "shorter": os.urandom(5 << 20), "longer": os.urandom(SIZE + 77),
        "with holes": os.urandom(1 << 20), "emptied": b"",
    }[change]  # fmt: skip
    content = mount.put(b"large", data, closed=False)
    if change == "with holes":
        os.truncate(mount.path(content), SIZE)
    mount.close(content, SIZE if change == "with holes" else len(data))
    settled(mount)


def test_a_file_that_was_deleted_leaves_nothing(mount: Mount) -> None:
    cut_off(mount)
    mount.unlink(b"large")
    assert "write_back:write" not in settled(mount)


@pytest.mark.parametrize(
    "disguise", ["another mode", "another link", "a directory", "small", pytest.param("another owner", marks=pytest.mark.root)]
)
def test_a_temporary_file_that_was_changed_is_copied_from_the_start(mount: Mount, disguise: str) -> None:
    """Somebody else had his hands on it, and may have it open for writing."""
    cut_off(mount)
    path = Path(mount.temporaries()[0])
    if disguise == "another mode":
        path.chmod(0o666)
    elif disguise == "another link":
        os.link(path, mount.pfs / ".ckptfs" / "elsewhere")
    elif disguise == "a directory":
        path.unlink()
        path.mkdir()
    elif disguise == "another owner":
        os.chown(path, 4711, 4711)
    else:
        os.truncate(path, limits.BLOCK_BYTES - 1)
    assert settled(mount).count("write_back:write") == WRITES


@pytest.mark.parametrize("label", ["write_back:resume", "resume:persist", "resume:read"])
@pytest.mark.parametrize("struck", ["killed", "EIO"])
def test_an_error_during_a_resume_starts_again(mount: Mount, label: str, struck: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that cannot give what it has got is not trusted: the next attempt begins anew."""
    cut_off(mount)
    if struck == "killed":
        cut_off(mount, label, 1)
    else:
        monkeypatch.setattr(disk, "_fault", f"{label}=EIO@*")
        flow = mount.write_back()
        with pytest.raises(CkptfsError):
            flow.step()
        monkeypatch.setattr(disk, "_fault", "")
        assert mount.temporaries() == []
    settled(mount)


def test_small_files_are_copied_from_the_start(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    for number in range(5):
        mount.put(b"%d" % number, b"%d" % number * 1000)
    with pytest.raises(Killed), intercepted(Counting("write_back:write", 4)):
        mount.settle()
    assert settled(mount).count("write_back:write") == 5
