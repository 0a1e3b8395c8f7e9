"""A PFS or a daemon that hangs: `status`, `health`, `ls` and waits answer all the same, and say what is wrong. P1, F2."""

import json
import os
import signal
from collections.abc import Callable

from daemon_under_test import DaemonUnderTest, eventually, shorten
from silent_pfs import SilentPfs

ANSWER_S = 20.0
PROBED_SOON = {"tiers.health.PROBE_NORMAL_S": 1.0, "tiers.health.SUSPECT_S": 2.0}


def status(daemon: DaemonUnderTest) -> dict[str, object]:
    found: dict[str, object] = json.loads(daemon.command("status", daemon.path, "--json", timeout=ANSWER_S).stdout)
    return found


def test_everything_answers_while_the_pfs_hangs(make_daemon: Callable[..., DaemonUnderTest], silent: SilentPfs) -> None:
    daemon = make_daemon(pfs=silent.path, env=shorten(**PROBED_SOON))
    daemon.expect_warning(r"pfs|PFS|write_back|scan")
    (daemon.path / "before").write_bytes(b"1")
    daemon.command("wait", daemon.path / "before", "--timeout", "60s")
    silent.hang()
    (daemon.path / "during").write_bytes(b"2" * 100_000)
    assert (daemon.path / "during").read_bytes() == b"2" * 100_000
    assert daemon.command("wait", daemon.path / "during", "--timeout", "500ms", check=False, timeout=ANSWER_S).returncode == 4
    row = json.loads(daemon.command("ls", "--json", daemon.path / "during", timeout=ANSWER_S).stdout)[0]
    assert row["level"] == "local" and row["pfs_pending"]
    found = eventually(lambda: (now := status(daemon))["health"] == "degraded" and now, what="status says that the PFS is ill")
    assert {tier["name"]: tier["health"] for tier in found["tiers"]}["pfs"] in ("suspect", "down")
    assert "does not answer" in json.dumps(found["troubles"])
    assert found["write_back"]["dirty_files"] == 1
    drained = daemon.command("drain", daemon.path, "--deadline", "500ms", check=False, timeout=ANSWER_S)
    assert drained.returncode == 4 and "blocked: " in drained.stderr
    silent.resume()
    daemon.command("wait", daemon.path / "during", "--timeout", "100s")
    eventually(lambda: status(daemon)["health"] == "ok", what="status says that all is well again")
    assert (silent.source / "during").read_bytes() == b"2" * 100_000


def test_health_answers_while_the_daemon_stands_still(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """X11: a health check of Slurm must not hang in the mount for which it asks."""
    daemon = make_daemon()
    pids = [daemon.pid(role) for role in ("supervisor", "mount", "mover")]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        found = daemon.command("health", daemon.path / "run", "--timeout", "500ms", check=False, timeout=ANSWER_S)
        assert found.returncode == 3 and "does not answer" in found.stdout
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert daemon.command("health", daemon.path).stdout.startswith("ok: ")
