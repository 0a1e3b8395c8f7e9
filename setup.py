"""What pyproject.toml cannot say of the build: the C shim is compiled into the wheel, for the libfuse of the machine that builds it."""

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

sys.path[:0] = [str(Path(__file__).resolve().parent / part) for part in (".", "daemon")]
from ckptfs_daemon.fuse import shim_build  # noqa: E402


class BuildWithShim(build_py):
    """The packages, and the shim beside its source. An editable installation builds it when the daemon starts."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            try:
                shim_build.build(Path(self.build_lib, "ckptfs_daemon", "fuse", shim_build.BUILT.name))
            except shim_build.CannotBuild as failure:
                raise SystemExit(f"{failure}; {failure.remedy}") from failure


class BinaryDistribution(Distribution):
    """A distribution whose wheel fits one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithShim}, distclass=BinaryDistribution)
