"""P5, P6: strangers and ckptfs change the same tree on the PFS at the same time; nobody's last bytes go, and the two agree in the end."""

import inspect
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_under_test import Area, DaemonUnderTest, eventually

MIB = 1024 * 1024
PREAMBLE = "import random, sys\nfrom pathlib import Path\n"


def tree(root: Path) -> dict[str, bytes | str | None]:
    """Every path below `root` with what is there; the work area is left out."""
    found: dict[str, bytes | str | None] = {}
    for directory, names, files in os.walk(root):
        if ".ckptfs" in names:
            names.remove(".ckptfs")
        for name in names + files:
            path = Path(directory, name)
            if path.is_symlink():
                found[str(path.relative_to(root))] = os.readlink(path)
            else:
                found[str(path.relative_to(root))] = path.read_bytes() if path.is_file() else None
    return found


def agree(area: Area | DaemonUnderTest) -> None:
    """After write-back and a refresh of everything the mount and the PFS show the same."""
    area.settle()
    area.command("refresh", "--recursive", area.path)
    eventually(lambda: tree(area.path) == tree(area.pfs), 60, "the mount and the PFS show the same")


def test_a_directory_removed_on_the_pfs_keeps_its_open_file(mount: Area) -> None:
    mount.daemon.expect_warning("write.back")
    (mount.path / "dir").mkdir()
    (mount.path / "dir" / "a").write_bytes(b"a")
    mount.settle()
    with open(mount.path / "dir" / "b", "wb") as file:
        file.write(b"begun")
        file.flush()
        shutil.rmtree(mount.pfs / "dir")
        mount.command("refresh", "--recursive", mount.path)
        assert os.listdir(mount.path / "dir") == ["b"]
        file.write(b" and ended")
    agree(mount)
    assert (mount.pfs / "dir" / "b").read_bytes() == b"begun and ended"


def test_external_renames_and_replacements_appear(mount: Area) -> None:
    for name in ("one", "two", "three"):
        (mount.path / name).mkdir()
        (mount.path / name / "file").write_bytes(name.encode())
    agree(mount)
    (mount.pfs / "one").rename(mount.pfs / "uno")
    (mount.pfs / "two").rename(mount.pfs / "tmp")
    (mount.pfs / "three").rename(mount.pfs / "two")
    (mount.pfs / "tmp").rename(mount.pfs / "three")
    agree(mount)
    assert (mount.path / "two" / "file").read_bytes() == b"three" and (mount.path / "uno" / "file").read_bytes() == b"one"


def test_an_open_file_outlives_external_changes(mount: Area) -> None:
    (mount.path / "file").write_bytes(b"x" * MIB)
    mount.settle()
    with open(mount.path / "file", "rb") as file:
        assert file.read(10) == b"x" * 10
        (mount.pfs / "file").write_bytes(b"other")
        mount.command("refresh", mount.path)
        file.seek(MIB - 10)
        assert file.read() == b"x" * 10
    agree(mount)
    assert (mount.path / "file").read_bytes() == b"other"


def act_at_random(root: Path, own: str, prefix: str, steps: int, seed: int) -> None:
    """Make, replace, rename, delete and append in the directory `own` and in the common one."""
    dice = random.Random(seed)
    for step in range(steps):
        area = root / dice.choice((own, "common"))
        one, other = area / f"{prefix}{dice.randrange(12)}", area / f"{prefix}{dice.randrange(12)}"
        act = dice.randrange(6)
        if act < 3:
            one.write_bytes(b"%d" % step * dice.randrange(2000))
        elif act == 3 and one.exists():
            one.rename(other)
        elif act == 4:
            one.unlink(missing_ok=True)
        elif one.exists():
            with open(one, "ab") as file:
                file.write(b"appended")


@pytest.mark.parametrize("seed", [1, 2])
def test_at_random(make_daemon: Callable[..., DaemonUnderTest], seed: int) -> None:
    """A stranger and a user of the mount each do hundreds of things in directories of their own and in a common one."""
    daemon = make_daemon("auto", refresh_interval="1s")
    daemon.expect_warning("kept beside|conflict|changed on the PFS|stranger")
    for name in ("ours", "theirs", "common"):
        (daemon.path / name).mkdir()
    daemon.settle()
    program = f"{PREAMBLE}{inspect.getsource(act_at_random)}act_at_random(Path(sys.argv[1]), 'theirs', 's', 400, int(sys.argv[2]))"
    stranger = subprocess.Popen([sys.executable, "-c", program, str(daemon.pfs), str(seed + 1000)])
    act_at_random(daemon.path, "ours", "m", 250, seed)
    assert stranger.wait(100) == 0
    expected = {name: path.read_bytes() for name in os.listdir(daemon.path / "ours") if (path := daemon.path / "ours" / name)}
    agree(daemon)
    assert tree(daemon.pfs / "ours") == expected
