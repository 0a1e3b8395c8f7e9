"""Running real programs in tests, and comparing trees of files."""

import errno
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM_S = 240.0
MELT = """
units lj
atom_style atomic
lattice fcc 0.8442
region box block 0 6 0 6 0 6
create_box 1 box
create_atoms 1 box
mass 1 1.0
velocity all create 3.0 87287
pair_style lj/cut 2.5
pair_coeff 1 1 1.0 1.0 2.5
fix 1 all nve
thermo 100
thermo_modify format float %20.15g
"""
"""A melt for LAMMPS, without its restart files and its run."""


def need(*programs: str) -> None:
    """Skip the test, aloud, where a program is not installed."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"NOT TESTED HERE, not installed: {', '.join(missing)} (./bootstrap.sh setup installs what the system has)")


def run(*command: str | Path, cwd: Path | None = None, timeout: float = PROGRAM_S, env: dict[str, str] | None = None, code: int = 0) -> str:
    """Run a program and demand its exit code; what it printed, errors included."""
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, timeout=timeout, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace", check=False,
    )  # fmt: skip
    assert result.returncode == code, f"{' '.join(map(str, command))}: exit {result.returncode}\n{result.stdout[-4000:]}"
    return result.stdout


def with_mounts_of_its_own() -> list[str]:
    """What a command begins with that shall mount things without anybody else seeing them.

    In a chroot, whose root is no mountpoint, unshare(1) cannot change what is passed on; there it is left as it is. The mounts of other
    tests are left: a copy of one here would keep its daemon after its umount. So are those of others, which `ckptfs status` would show.
    """
    alone = ["unshare", "-m"]
    possible = subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0
    left = "*:*/ckptfs-*" + ("|fuse.ckptfs:*" if possible else "")
    leave = f'while read -r _ place type _; do case $type:$place in {left}) umount -i -l "$place" 2>&-;; esac; done < /proc/self/mounts'
    return [*alone, *([] if possible else ["--propagation", "unchanged"]), "sh", "-c", f'{leave}; exec "$@"', "sh"]


def refusal(act: Callable[..., Any], *values: Any, **named: Any) -> str:
    with pytest.raises(OSError) as refused:
        act(*values, **named)
    return errno.errorcode[refused.value.errno or 0]


def tree(root: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below `root` that the PFS must show as the mount does: by path its type, mode, owner, mtime and bytes (or target)."""
    found: dict[str, tuple[Any, ...]] = {}
    for directory, directories, files in os.walk(root):
        if Path(directory) == root:
            directories[:] = [name for name in directories if name not in (".ckptfs", ".ckptfs.history")]
        for name in directories + files:
            path = os.path.join(directory, name)
            found[os.path.relpath(path, root)] = _described(path)
    return found


def _described(path: str) -> tuple[Any, ...]:
    status = os.lstat(path)
    kind = stat.S_IFMT(status.st_mode)
    common = (oct(status.st_mode), status.st_uid, status.st_gid)
    if kind == stat.S_IFLNK:
        return (*common, os.readlink(path))
    if kind == stat.S_IFREG:
        with open(path, "rb") as file:
            return (*common, status.st_size, status.st_mtime_ns, hashlib.file_digest(file, "sha256").hexdigest()[:16])
    return common


def differences(one: Path, other: Path) -> list[str]:
    """Where two trees differ, a line each; empty when they are the same."""
    left, right = tree(one), tree(other)
    paths = sorted(left.keys() | right.keys())
    return [f"{path}: {left.get(path)} | {right.get(path)}" for path in paths if left.get(path) != right.get(path)]
