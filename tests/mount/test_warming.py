"""`ckptfs warm` on a real mount: files of the PFS come to this node before they are read. F5, P11, X6."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.node.warming import Reading, WarmFile, is_here
from daemon_under_test import DaemonUnderTest

from ckptfs.protocol import control_pb2 as pb

MIB = 1024 * 1024


@pytest.fixture
def cold(make_daemon: Any) -> DaemonUnderTest:
    """A mount whose PFS held files before the first mount."""
    daemon: DaemonUnderTest = make_daemon(start=False, ram="64M", nvme=None)
    (daemon.pfs / "run" / "deep").mkdir(parents=True)
    for name in ("run/a", "run/deep/b"):
        (daemon.pfs / name).write_bytes(os.urandom(3 * MIB))
    (daemon.pfs / "run" / "empty").touch()
    (daemon.pfs / "run" / "link").symlink_to("a")
    (daemon.pfs / "large").write_bytes(bytes(80 * MIB))
    return daemon.start()


@pytest.mark.fuse
def test_files_come_before_they_are_read(cold: DaemonUnderTest) -> None:
    """All below a directory, once; what is here already is not read again."""
    run = cold.path / "run"
    lines = [json.loads(line) for line in cold.command("warm", run, cold.path / "run" / "a", "--json").stdout.splitlines()]
    assert {line["path"]: line["result"] for line in lines} == {
        str(run / "a"): "fetched", str(run / "deep" / "b"): "fetched", str(run / "empty"): "here",
    } and len(lines) == 3  # fmt: skip
    for path in (run / "a", run / "deep" / "b"):
        (row,) = json.loads(cold.command("ls", "--json", path).stdout)
        assert {copy["tier"]: copy["state"] for copy in row["copies"]}["ram"] == "good"
    assert cold.command("warm", run).stdout.startswith("0 files (0 B) fetched, 3 here already")
    assert (run / "a").read_bytes() == (cold.pfs / "run" / "a").read_bytes()


@pytest.mark.fuse
def test_what_does_not_fit_is_refused(cold: DaemonUnderTest) -> None:
    """P11: before a byte moves, with the figures."""
    result = cold.command("warm", cold.path / "large", cold.path / "run", check=False)
    assert result.returncode == 1 and "86.0 MiB are not on this node, and there is room for" in result.stderr
    (row,) = json.loads(cold.command("ls", "--json", cold.path / "run" / "a").stdout)
    assert [copy["tier"] for copy in row["copies"]] == ["pfs"], "nothing was fetched"
    assert cold.command("warm", "/", check=False).returncode == 3
    assert cold.command("warm", cold.path / "none", check=False).returncode == 1
    late = cold.command("warm", cold.path / "run", "--timeout", "0s", check=False)
    assert late.returncode == 4 and "not done in time; left: 2 files" in late.stderr


def test_a_file_that_cannot_be_read_fails_alone(tmp_path: Path) -> None:
    """The others come."""
    (tmp_path / "a").write_bytes(b"x" * 10)
    reading = Reading([WarmFile(str(tmp_path / name), number, 10) for number, name in enumerate(("a", "none"))])
    found = dict(reading.results.get(timeout=60) for _ in range(2))
    assert {Path(file.path).name: failure for file, failure in found.items()} == {"a": "", "none": "No such file or directory"}
    assert reading.read_bytes == 10


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        (pb.Record(state="published", copies=[pb.CopyInfo(tier="pfs", state="published")]), False),
        (pb.Record(state="sealed", copies=[pb.CopyInfo(tier="ram", state="filling"), pb.CopyInfo(tier="node2", state="good")]), False),
        (pb.Record(state="sealed", copies=[pb.CopyInfo(tier="nvme", state="quarantined")]), False),
        (pb.Record(state="sealed", copies=[pb.CopyInfo(tier="nvme", state="good")]), True),
        (pb.Record(state="open"), True),
    ],
)
def test_only_a_good_copy_here_counts(record: pb.Record, answer: bool) -> None:
    assert is_here(WarmFile("/ckpt/a", 7, 1), record) is answer
    assert is_here(WarmFile("/ckpt/a", 7, 0), record), "an empty file has no bytes"
