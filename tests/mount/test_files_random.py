"""3,000 random acts on one file against a model of it, on both data paths (P2), also while the mount process is killed (P8)."""

import pytest
from daemon_under_test import Area, DaemonUnderTest
from random_io import RandomIO

pytestmark = [pytest.mark.root, pytest.mark.fuse]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_thousand_random_acts(mount: Area, seed: int) -> None:
    acts = RandomIO(mount.path / "file", seed)
    for number in range(1000):
        acts.step()
        if number % 50 == 49:
            acts.check()
    acts.close()
    assert (mount.path / "file").read_bytes() == acts.model
    mount.settle()
    assert (mount.pfs / "file").read_bytes() == acts.model


@pytest.mark.crash
def test_random_acts_while_the_mount_process_dies(fresh_mount: DaemonUnderTest) -> None:
    acts = RandomIO(fresh_mount.path / "file", 4)
    killed = 0
    for _ in range(600):
        if len(acts.history) % 100 == 50:
            fresh_mount.kill("mount")
            killed += 1
        acts.step()
    acts.check()
    acts.close()
    assert killed == 6
    assert (fresh_mount.path / "file").read_bytes() == acts.model
