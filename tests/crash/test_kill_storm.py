"""P8, P7, P6: kill -9 of the mount and of the mover at random moments under a mixed load. CKPTFS_KILLS=100 is the long form."""

import os
import random
import threading
from collections.abc import Callable

import pytest
from actors import acting, ended
from daemon_under_test import DaemonUnderTest
from programs import differences, tree

KILLS = int(os.environ.get("CKPTFS_KILLS", "10"))
# Some deaths come before the new process is ready, most later. The mover needs a while to find out where it was.
PAUSE_S = {"mount": 0.6, "mover": 1.5}
pytestmark = [pytest.mark.crash, pytest.mark.timeout(300 + 15 * KILLS)]


@pytest.mark.parametrize(("data_path", "role"), [("passthrough", "mount"), ("buffered", "mount"), ("passthrough", "mover")])
def test_killed_again_and_again_under_load(fresh_mount: DaemonUnderTest, role: str) -> None:
    """P8, P7, P6."""
    storm(fresh_mount, role)


def test_the_mount_killed_again_and_again_on_an_old_kernel(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """X10: no system call of an application fails on the oldest kernel that ckptfs supports.

    Most bytes are on NVMe, where requests wait for threads, so that each death finds several in hand.
    """
    daemon = make_daemon(start=False, ram="24M").on_old_kernel().start()
    assert daemon.processes()["data_path"] == "buffered"
    storm(daemon, "mount")
    assert "of an earlier process are taken up" in daemon.log


def storm(daemon: DaemonUnderTest, role: str) -> None:
    """No failed system call, no lost or wrong byte, and the PFS as the mount at the end, also when RAM is lost then."""
    seed = int(os.environ.get("CKPTFS_SEED", "1"))
    dice = random.Random(f"{seed} {role}")
    actors = acting(daemon.path, seed)
    moment = threading.Event()
    for _ in range(KILLS):
        moment.wait(dice.random() * PAUSE_S[role])
        daemon.kill(role)
        assert all(process.poll() is None for process in actors.values()), ended(actors)
    assert ended(actors) == []
    daemon.settle()
    assert differences(daemon.path, daemon.pfs) == []
    before = tree(daemon.path)
    daemon.unmount()
    daemon.wipe_ram()
    daemon.expect_warning("ram|RAM")
    daemon.start()
    assert tree(daemon.path) == before
