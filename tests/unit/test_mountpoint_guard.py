"""The guard of a mountpoint on the filesystems that mountpoints lie on: it stops root, and goes without a trace. P5."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckptfs import mountpoint_guard
from ckptfs.mountpoint_guard import Guard, GuardKind

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounts filesystems")


@pytest.fixture(params=["own", "tmpfs", "ramfs", "overlay", "ext4", "xfs", "btrfs"])
def point(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """An empty directory on a filesystem of the given type; `own` is that of the tests."""
    place = tmp_path / "mnt"
    place.mkdir()
    kind = request.param
    if kind in ("ext4", "xfs", "btrfs"):
        image = tmp_path / "image"
        with open(image, "wb") as file:
            file.truncate(400 << 20)
        made = subprocess.run([f"mkfs.{kind}", "-q", str(image)], capture_output=True, check=False)
        command = ["mount", "-o", "loop", str(image), str(place)]
        if made.returncode:
            pytest.skip(f"mkfs.{kind} is missing")
    elif kind == "overlay":
        for name in ("lower", "upper", "work"):
            (tmp_path / name).mkdir()
        options = f"lowerdir={tmp_path}/lower,upperdir={tmp_path}/upper,workdir={tmp_path}/work"
        command = ["mount", "-t", "overlay", "-o", options, "none", str(place)]
    else:
        command = ["true"] if kind == "own" else ["mount", "-t", kind, "none", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"{kind} cannot be mounted here")
    directory = place / "point"
    directory.mkdir()
    yield directory
    subprocess.run(["chattr", "-i", str(directory)], capture_output=True, check=False)
    for target in (directory, place):
        subprocess.run(["umount", "-l", str(target)], capture_output=True, check=False)


def set_guard(guard: Guard) -> None:
    fd = mountpoint_guard.open_directory(guard)
    try:
        mountpoint_guard.set_on(guard, fd)
    finally:
        os.close(fd)
    mountpoint_guard.cover(guard)


def test_root_cannot_write_until_it_is_cleared(point: Path) -> None:
    guard = mountpoint_guard.choose(point)
    assert guard.kind in (GuardKind.IMMUTABLE, GuardKind.COVER)
    for _ in range(2):
        set_guard(guard)
    for act in (lambda: (point / "file").write_bytes(b"x"), (point / "directory").mkdir):
        with pytest.raises(OSError):
            act()
    assert mountpoint_guard.clear(guard)
    (point / "file").write_bytes(b"x")
    mountpoint_guard.clear(guard)
    (point / "file").unlink()
    point.rmdir()
    point.mkdir()


def test_a_directory_of_that_name_that_is_another_one_is_left_alone(tmp_path: Path) -> None:
    guard = replace(mountpoint_guard.choose(tmp_path), kind=GuardKind.MODE, inode=1, mode=0o700)
    tmp_path.chmod(0o555)
    assert not mountpoint_guard.clear(guard)
    assert os.stat(tmp_path).st_mode & 0o777 == 0o555
    assert not mountpoint_guard.clear(replace(guard, path=tmp_path / "gone"))


def test_an_ordinary_users_directory_loses_its_write_permission(tmp_path: Path) -> None:
    point = tmp_path / "point"
    point.mkdir(mode=0o750)
    guard = replace(mountpoint_guard.choose(point), kind=GuardKind.MODE)
    set_guard(guard)
    assert os.stat(point).st_mode & 0o7777 == 0o550
    assert mountpoint_guard.clear(guard) and os.stat(point).st_mode & 0o7777 == 0o750
