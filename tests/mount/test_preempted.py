"""G1: a notice that the node goes away, from a hook of a real daemon: what was saved is drained, and `status` says so."""

from collections.abc import Callable
from pathlib import Path

from daemon_under_test import DaemonUnderTest, eventually


def test_a_notice_drains_what_was_saved(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path) -> None:
    hook, notice = tmp_path / "hook", tmp_path / "notice"
    hook.write_text(f"#!/bin/sh\nuntil test -e {notice}; do sleep 0.1; done\n")
    hook.chmod(0o755)
    daemon = make_daemon(preemption=hook, preemption_deadline="60s")
    daemon.expect_warning("preemption: notice from")
    (daemon.path / "step_1.pt").write_bytes(b"x" * 5000)
    assert "preemption" not in daemon.command("status", daemon.path).stdout
    notice.touch()
    eventually(lambda: "all that was closed is drained" in daemon.command("status", daemon.path).stdout, what="the drain after the notice")
    assert (daemon.pfs / "step_1.pt").read_bytes() == b"x" * 5000
    assert f"preemption: notice from {hook}: the hook has ended; draining for up to 60 s" in daemon.log
    drained = daemon.command("drain", daemon.path, "--deadline", "60s", "--level", "pfs")
    assert drained.stdout.startswith(f"{daemon.path} is drained: every closed file has the level pfs (after ")
