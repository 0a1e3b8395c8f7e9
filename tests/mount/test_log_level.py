"""N8 on a real daemon: one word changes what all its processes log, those that come later too, but no new daemon."""

import re
from typing import Any

import pytest
from daemon_under_test import DaemonUnderTest, eventually

pytestmark = pytest.mark.fuse


def speakers(daemon: DaemonUnderTest, since: int = 0) -> set[str]:
    return set(re.findall(r"ckptfsd\[(\w+) \d+\] DEBUG", daemon.log[since:]))


@pytest.mark.crash
def test_all_processes_and_those_after_them(make_daemon: Any) -> None:
    daemon: DaemonUnderTest = make_daemon()
    assert daemon.command("log-level", daemon.path).stdout == "info\n"
    assert not speakers(daemon)
    assert daemon.command("log-level", daemon.path, "debug").stdout == "debug\n"
    eventually(lambda: {"supervisor", "mount", "mover"} <= speakers(daemon), what="all speak")
    for role in ("mover", "mount"):
        end = len(daemon.log)
        daemon.kill(role)
        eventually(lambda role=role, end=end: role in speakers(daemon, end), what=f"the next {role} speaks")
    assert daemon.command("log-level", daemon.path, "--json").stdout == '{"level": "debug"}\n'
    daemon.command("log-level", daemon.path, "warning")
    end = len(daemon.log)
    (daemon.path / "file").write_bytes(b"x")
    daemon.settle()
    assert not speakers(daemon, end)
    daemon.restart()
    assert daemon.command("log-level", daemon.path).stdout == "info\n", "a new daemon has its own"
