"""Fixtures of the tests of mounts: a PFS that can fall silent, and directories for mounts that the helper makes."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, eventually
from silent_pfs import SilentPfs

from ckptfs.procfs import is_running


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[SilentPfs]:
    made = SilentPfs(tmp_path)
    yield made
    made.close()


@pytest.fixture
def place(make_daemon: Callable[..., DaemonUnderTest]) -> Iterator[DaemonUnderTest]:
    """Directories for a mount that the test makes by other means. Whatever it left is ended afterwards."""
    place = make_daemon(start=False)
    yield place
    for pid in {int(one.get("pid") or 0) for one in place.processes().values() if isinstance(one, dict)} - {0}:
        place.abort()
        subprocess.run(["umount", "-l", str(place.path)], check=False, capture_output=True)
        eventually(lambda pid=pid: not is_running(pid), what=f"process {pid} has ended")
