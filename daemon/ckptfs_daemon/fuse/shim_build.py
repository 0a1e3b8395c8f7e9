"""Builds `_shim.so` from shim.c beside it, with the C compiler and libfuse's headers that pyfuse3 needs anyway.

`python -m ckptfs_daemon.shim_build` builds it when it is missing or older than its source; the installer calls that, and
the mount does so itself. The result is renamed into place: dying here leaves the former one, or none.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from ckptfs.errors import CkptfsError

SOURCE = Path(__file__).with_name("shim.c")
BUILT = Path(__file__).with_name("_shim.so")
REMEDY = "install a C compiler, pkg-config and libfuse's headers (Debian: apt install gcc pkg-config libfuse3-dev) and start again"


class CannotBuild(CkptfsError):
    """The C file cannot be compiled here."""


def is_fresh() -> bool:
    """Whether what is built is at least as new as its source."""
    try:
        return BUILT.stat().st_mtime_ns >= SOURCE.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def ensure() -> Path:
    """The path of the built library, building it first if needed. Raises CannotBuild with a remedy."""
    if is_fresh():
        return BUILT
    if BUILT.exists() and not os.access(BUILT.parent, os.W_OK):
        return BUILT
    build(BUILT)
    return BUILT


def build(target: Path) -> None:
    """Compile shim.c to `target`, whole or not at all. Raises CannotBuild."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        flags = shlex.split(_output(["pkg-config", "--cflags", "--libs", "fuse3"]))
        compiler = shlex.split(os.environ.get("CC", "")) or [_compiler()]
        _output([*compiler, "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(temporary), str(SOURCE), *flags, "-ldl"])
        os.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _compiler() -> str:
    """The system's compiler: the one that Python was built with may not exist here."""
    for directory in os.get_exec_path():
        for name in ("cc", "gcc", "clang"):
            if os.access(Path(directory, name), os.X_OK):
                return name
    return (sysconfig.get_config_var("CC") or "cc").split()[0]


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise CannotBuild(f"the mount's C part cannot be built: {failure}", remedy=REMEDY) from failure
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines()
        raise CannotBuild(f"the mount's C part cannot be built: {command[0]}: {words[0] if words else 'failed'}", remedy=REMEDY)
    return done.stdout


def main() -> int:
    """Build if needed; exit code 1 and a sentence when that is impossible."""
    try:
        print(ensure())
    except CannotBuild as failure:
        print(f"{failure}; {failure.remedy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
