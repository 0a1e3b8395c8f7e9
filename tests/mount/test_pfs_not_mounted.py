"""P3, P5, P7: while the PFS is not mounted, the mount loses nothing, and nothing is written below the mountpoint, marked or not."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from another_user import as_user
from daemon_under_test import DaemonUnderTest, eventually
from programs import run

USER = 4711
SQUASH = "-dac_override,-dac_read_search,-chown,-fowner"
SQUASHED = ("setpriv", f"--bounding-set={SQUASH}", f"--inh-caps={SQUASH}")
"""Root without its capabilities over files stands for a PFS that squashes root."""

pytestmark = [pytest.mark.fuse, pytest.mark.others]
Make = Callable[..., DaemonUnderTest]


class LoopPfs:
    """A filesystem in a file, which is mounted at `pfs=` and taken away again."""

    def __init__(self, daemon: DaemonUnderTest, fstype: str) -> None:
        self.daemon, self.image = daemon, daemon.root / "image"
        with open(self.image, "wb") as file:
            file.truncate(400 << 20)
        run(f"mkfs.{fstype}", "-q", self.image)
        self.mount()

    def mount(self) -> None:
        run("mount", "-o", "loop", self.image, self.daemon.pfs)

    def unmount(self) -> None:
        run("umount", "-l", self.daemon.pfs)

    def describe(self) -> str:
        """The troubles that `ckptfs status` shows."""
        status = json.loads(self.daemon.command("status", self.daemon.path, "--json").stdout)
        return f"{status['health']}: {status['troubles']}"


@pytest.fixture(params=["marked by nobody", "marked by its owner", "marked by its owner alone"])
def squashed(request: pytest.FixtureRequest, make_daemon: Make) -> Iterator[tuple[DaemonUnderTest, LoopPfs]]:
    """A daemon before its start, and a PFS on which root is nobody."""
    daemon = make_daemon("auto", start=False)
    daemon.wrapper = SQUASHED
    pfs = LoopPfs(daemon, "xfs" if request.param == "marked by nobody" else "ext4")
    (daemon.pfs / "job").mkdir()
    for path in (daemon.pfs / "job", daemon.pfs):
        os.chown(path, USER, USER)
    daemon.pfs.chmod({"marked by nobody": 0o555, "marked by its owner": 0o755, "marked by its owner alone": 0o700}[request.param])
    daemon.expect_warning("is not the directory that this catalog belongs to")
    if request.param == "marked by nobody":
        daemon.expect_warning(".ckptfs.history: EACCES")  # Nobody may make the history of sets in this PFS's root.
    yield daemon, pfs
    subprocess.run(["umount", "-l", daemon.pfs], check=False, capture_output=True)


def save(path: Path, text: str) -> None:
    assert as_user(lambda: path.write_text(text), USER) == "ok"


def get_level(daemon: DaemonUnderTest, path: Path) -> str:
    return os.getxattr(path, "user.ckptfs.level").decode()


def test_a_pfs_that_root_may_not_mark(squashed: tuple[DaemonUnderTest, LoopPfs]) -> None:
    daemon, pfs = squashed
    daemon.start()
    job = daemon.path / "job"
    save(job / "step_1", "1")
    daemon.command("wait", "--level", "pfs", job / "step_1")  # Not settle(): rows of a refused history stay in the journal.
    assert (daemon.pfs / "job" / "step_1").read_text() == "1"
    pfs.unmount()
    save(job / "step_2", "2")
    daemon.command("refresh", daemon.path, check=False)
    daemon.command("refresh", job, check=False)
    eventually(lambda: "is not the directory" in pfs.describe(), what="status says so")
    assert pfs.describe().startswith("degraded: ") and f"mount the filesystem that belongs at {daemon.pfs}" in pfs.describe()
    assert os.listdir(daemon.pfs) == [] and sorted(os.listdir(job)) == ["step_1", "step_2"]
    assert get_level(daemon, job / "step_2") == "local"
    pfs.mount()
    eventually(lambda: daemon.command("drain", daemon.path, check=False).returncode == 0, what="write-back goes on")
    assert (daemon.pfs / "job" / "step_2").read_text() == "2" and get_level(daemon, job / "step_2") == "pfs"

    daemon.unmount()
    pfs.unmount()
    daemon.start()
    save(job / "step_3", "3")
    daemon.command("refresh", job, check=False)
    assert os.listdir(daemon.pfs) == [] and sorted(os.listdir(job)) == ["step_1", "step_2", "step_3"]
    pfs.mount()
    eventually(lambda: daemon.command("drain", daemon.path, check=False).returncode == 0, what="write-back goes on")
    daemon.command("refresh", daemon.path)
    daemon.command("refresh", job)
    assert sorted(os.listdir(job)) == ["step_1", "step_2", "step_3"] == sorted(os.listdir(daemon.pfs / "job"))
    assert [(job / f"step_{number}").read_text() for number in (1, 2, 3)] == ["1", "2", "3"]
