"""P1, P6: with a filesystem mounted inside the PFS, moves into it hold up nothing; what cannot be moved is named, and moved later."""

import json
import os
import subprocess
from collections.abc import Callable

import pytest
from daemon_under_test import DaemonUnderTest, eventually

Make = Callable[..., DaemonUnderTest]


@pytest.fixture
def daemon(make_daemon: Make, data_path: str) -> DaemonUnderTest:
    daemon = make_daemon(data_path, start=False)
    inner = daemon.pfs / "sub"
    inner.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "none", inner], check=True)
    daemon.start()
    return daemon


def list_set_aside(daemon: DaemonUnderTest) -> list[dict[str, str]]:
    answer = daemon.command("status", "--json", daemon.path)
    found = json.loads(answer.stdout)
    mounts = found if isinstance(found, list) else found.get("mounts", [found])
    return [trouble for mount in mounts for trouble in mount["troubles"] if trouble["where"].startswith("files set aside")]


def test_moves_into_a_filesystem_that_is_mounted_inside(daemon: DaemonUnderTest) -> None:
    daemon.expect_warning("EXDEV")
    (daemon.path / "x").write_bytes(b"data" * 1000)
    (daemon.path / "d").mkdir()
    (daemon.path / "d" / "f").write_bytes(b"below")
    daemon.settle()
    os.listdir(daemon.path / "sub")
    (daemon.path / "x").rename(daemon.path / "sub" / "x")
    (daemon.path / "d").rename(daemon.path / "sub" / "d")
    (daemon.path / "later").write_bytes(b"later")
    eventually((daemon.pfs / "later").exists)
    assert (daemon.pfs / "sub" / "x").read_bytes() == b"data" * 1000 and not (daemon.pfs / "x").exists()
    assert (daemon.pfs / "d" / "f").read_bytes() == b"below"
    assert (daemon.path / "sub" / "d" / "f").read_bytes() == b"below"
    [trouble] = eventually(lambda: list_set_aside(daemon))
    assert trouble["path"] == "sub/d" and "EXDEV" in trouble["what"] and "rename from d" in trouble["what"] and trouble["remedy"]
    (daemon.path / "sub" / "d").rename(daemon.path / "e")
    daemon.settle()
    assert (daemon.pfs / "e" / "f").read_bytes() == b"below" and not (daemon.pfs / "d").exists()
    eventually(lambda: not list_set_aside(daemon))
