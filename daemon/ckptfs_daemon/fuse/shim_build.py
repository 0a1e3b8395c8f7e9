"""The build of `_shim.so` from shim.c, with the C compiler and libfuse headers that pyfuse3 needs too.

A wheel carries the library (setup.py). `python -m ckptfs_daemon.fuse.shim_build`, and the supervisor at its start, build it if it is
missing or made from another source: its build id is the digest of the source. Times do not count, because pip does not keep them.

Crash safety: the result is renamed into place, so a crash leaves the previous library, or none.
"""

import hashlib
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
    """The C shim cannot be compiled on this machine."""


def get_build_id() -> bytes:
    """Return the build id of a library that is made from the present source."""
    return hashlib.sha1(SOURCE.read_bytes(), usedforsecurity=False).digest()


def is_fresh() -> bool:
    """Return True if the library was made from the present source."""
    try:
        return get_build_id() in BUILT.read_bytes()
    except FileNotFoundError:
        return False


def ensure() -> Path:
    """Return the path of the library; build it first if needed. Raises CannotBuild."""
    if is_fresh():
        return BUILT
    if BUILT.exists() and not os.access(BUILT.parent, os.W_OK):
        return BUILT
    build(BUILT)
    return BUILT


def build(target: Path) -> None:
    """Compile shim.c to `target`. Raises CannotBuild; then `target` is unchanged."""
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        flags = shlex.split(_output(["pkg-config", "--cflags", "--libs", "fuse3"]))
        compiler = shlex.split(os.environ.get("CC", "")) or [_compiler()]
        flags += ["-ldl", f"-Wl,--build-id=0x{get_build_id().hex()}"]
        _output([*compiler, "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(temporary), str(SOURCE), *flags])
        os.rename(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _compiler() -> str:
    """Return the system's C compiler. The one that built Python may not exist on this machine."""
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
    """Build the library if needed. Returns 1 and prints a sentence if that is impossible."""
    try:
        print(ensure())
    except CannotBuild as failure:
        print(f"{failure}; {failure.remedy}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
