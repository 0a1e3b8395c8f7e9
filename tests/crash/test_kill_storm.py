"""P8, P7, P6: kill -9 of the mount and of the mover at random moments under a mixed load. CKPTFS_KILLS=100 is the long form."""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from daemon_under_test import DaemonUnderTest
from programs import PROGRAM_S, differences, tree

KILLS = int(os.environ.get("CKPTFS_KILLS", "10"))
# Some deaths come before the new process is ready, most later. The mover needs a while to find out where it was.
PAUSE_S = {"mount": 0.6, "mover": 1.5}
PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
ACTORS = ("checkpointer", "small_files", "appender", "overwriter", "trees")
pytestmark = [pytest.mark.crash, pytest.mark.timeout(300 + 15 * KILLS)]


def acting(daemon: DaemonUnderTest, seed: int) -> "dict[str, subprocess.Popen[str]]":
    """One process for each kind of actor, each in a directory of its own."""
    script = Path(__file__).with_name("actors.py")
    return {kind: subprocess.Popen([sys.executable, script, kind, daemon.path / kind, str(seed)], **PIPES) for kind in ACTORS}


def ended(actors: "dict[str, subprocess.Popen[str]]") -> list[str]:
    """Let them finish and look at everything once more; what those said that failed."""
    failures = []
    for kind, process in actors.items():
        output, _ = process.communicate(timeout=PROGRAM_S)
        if process.returncode != 0:
            failures.append(f"{kind}: {output[-2000:]}")
    return failures


@pytest.mark.parametrize("role", ["mount", "mover"])
def test_killed_again_and_again_under_load(fresh_mount: DaemonUnderTest, role: str) -> None:
    """No failed system call, no lost or wrong byte, and the PFS as the mount at the end, also when RAM is lost then."""
    seed = int(os.environ.get("CKPTFS_SEED", "1"))
    dice = random.Random(f"{seed} {role}")
    actors = acting(fresh_mount, seed)
    moment = threading.Event()
    for _ in range(KILLS):
        moment.wait(dice.random() * PAUSE_S[role])
        fresh_mount.kill(role)
        assert all(process.poll() is None for process in actors.values()), ended(actors)
    assert ended(actors) == []
    fresh_mount.settle()
    assert differences(fresh_mount.path, fresh_mount.pfs) == []
    before = tree(fresh_mount.path)
    fresh_mount.unmount()
    fresh_mount.wipe_ram()
    fresh_mount.expect_warning("ram|RAM")
    fresh_mount.start()
    assert tree(fresh_mount.path) == before
