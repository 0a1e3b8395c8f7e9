"""The C shim: when it counts as built, the wheel that carries it, and what a machine without a compiler is told."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ckptfs_daemon.fuse import shim_build

REPOSITORY = Path(__file__).resolve().parents[2]
BUILD_WHEEL = "from setuptools import build_meta; build_meta.build_wheel('made')"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the source of the shim, and no library."""
    monkeypatch.setattr(shim_build, "SOURCE", Path(shutil.copy(shim_build.SOURCE, tmp_path / "shim.c")))
    monkeypatch.setattr(shim_build, "BUILT", tmp_path / "_shim.so")
    return tmp_path


def test_it_is_built_anew_only_for_another_source(place: Path) -> None:
    """Whatever the times say: pip gives the files of a wheel the times of their unpacking."""
    assert not shim_build.is_fresh()
    built = shim_build.ensure()
    os.utime(built, ns=(0, 0))
    assert shim_build.is_fresh()
    shim_build.SOURCE.write_text(shim_build.SOURCE.read_text() + "/* changed */\n")
    assert not shim_build.is_fresh()
    shim_build.ensure()
    assert shim_build.is_fresh() and sorted(path.name for path in place.iterdir()) == ["_shim.so", "shim.c"]


def test_a_missing_compiler_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.raises(shim_build.CannotBuild, match="/nowhere/cc") as caught:
        shim_build.ensure()
    assert "apt install gcc pkg-config libfuse3-dev" in caught.value.remedy


def build_wheel(tree: Path, **more: str) -> "subprocess.CompletedProcess[str]":
    """Build a wheel from a copy of what it is made from."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tree)
    for name in ("ckptfs", "daemon", "client", "docs"):
        shutil.copytree(REPOSITORY / name, tree / name, ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    command = [sys.executable, "-c", BUILD_WHEEL]
    return subprocess.run(command, cwd=tree, env={**os.environ, **more}, capture_output=True, text=True, timeout=120, check=False)


def test_a_wheel_carries_the_shim_man_pages_and_completion(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77", "NOT TESTED HERE, not installed: setuptools")
    built = build_wheel(tmp_path)
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "made").iterdir()
    assert "linux_" in wheel.name, "it fits one platform"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert shim_build.get_build_id() in archive.read("ckptfs_daemon/fuse/_shim.so")
    shared = {name.split("/data/share/", 1)[1] for name in names if "/data/share/" in name}
    pages = {f"man/man{page.suffix[1:]}/{page.name}" for page in (REPOSITORY / "docs/man").iterdir()}
    completion = {"bash-completion/completions/ckptfs", "zsh/site-functions/_ckptfs", "fish/vendor_completions.d/ckptfs.fish"}
    assert shared == pages | completion


def test_a_wheel_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77", "NOT TESTED HERE, not installed: setuptools")
    built = build_wheel(tmp_path, CC="/nowhere/cc")
    assert built.returncode != 0
    assert "/nowhere/cc" in built.stderr and "apt install gcc pkg-config libfuse3-dev" in built.stderr
