"""A filesystem of a given kind in a file, for tests: some share blocks (xfs, btrfs), some do not (ext4, tmpfs)."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import need, run

from ckptfs.tiers import reflink

IMAGE_BYTES = 400 << 20
SHARING = ("xfs", "btrfs")
NOT_SHARING = ("ext4", "tmpfs")


def measure_saved(*paths: Path) -> int:
    """Ask the filesystem what these files save by sharing blocks."""
    with contextlib.ExitStack() as files:
        return reflink.measure_saved([files.enter_context(open(path, "rb")).fileno() for path in paths])


@contextlib.contextmanager
def tmpfs_at(place: Path, options: str = "mode=755") -> Iterator[None]:
    run("mount", "-t", "tmpfs", "-o", options, "none", place)
    try:
        yield
    finally:
        run("umount", "-l", place)


@contextlib.contextmanager
def read_only(place: Path) -> Iterator[None]:
    """The filesystem that is mounted there refuses every change while the block runs."""
    run("mount", "-o", "remount,ro", place)
    try:
        yield
    finally:
        run("mount", "-o", "remount,rw", place)


@contextlib.contextmanager
def mounted(kind: str, directory: Path, size: int = IMAGE_BYTES) -> Iterator[Path]:
    """Mount a new filesystem below `directory`; skip the test where that cannot be."""
    place, image = directory / f"disk-{kind}", directory / f"image-{kind}"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED HERE: mounting needs root")
    if kind == "tmpfs":
        run("mount", "-t", "tmpfs", "none", place)
    else:
        need(f"mkfs.{kind}")
        with open(image, "wb") as file:
            file.truncate(size)
        run(f"mkfs.{kind}", "-q", image)
        if shutil.which("losetup") is None or not Path("/dev/loop-control").exists():
            pytest.skip("NOT TESTED HERE: no loop devices")
        run("mount", "-o", "loop", image, place)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        image.unlink(missing_ok=True)
