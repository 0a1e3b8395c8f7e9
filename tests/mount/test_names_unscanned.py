"""Directories of a PFS that does not answer: who creates goes on, who reads is not told that there is nothing (P1, P7)."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import refusal

pytestmark = pytest.mark.fuse


@pytest.mark.parametrize("data_path", ["passthrough", "buffered"], scope="session")
def test_a_directory_that_cannot_be_imported(data_path: str, make_daemon: Callable[..., Any], tmp_path: Path) -> None:
    fault = tmp_path / "fault"
    daemon = make_daemon(data_path, start=False, env={"CKPTFS_FAULT": f"@{fault}"})
    daemon.expect_warning("scan|visit|import")
    (daemon.pfs / "there" / "sub").mkdir(parents=True)
    (daemon.pfs / "there" / "old").write_text("old")
    daemon.start()
    assert os.listdir(daemon.path) == ["there"]
    there = daemon.path / "there"
    fault.write_text("scan:list=EIO@*")

    assert refusal(os.stat, there / "old") == "EIO"
    assert refusal(os.open, there / "old", os.O_RDONLY) == "EIO"
    assert refusal(os.listdir, there) == "EIO"
    assert refusal(os.rmdir, there) == "EIO"
    assert refusal(os.unlink, there / "old") == "EIO"

    (there / "new").write_text("new")
    (there / "made").mkdir()
    (there / "made" / "inside").write_text("inside")
    (there / "link").symlink_to("new")
    os.rename(there / "new", there / "newer")
    os.link(there / "newer", there / "twice")
    assert (there / "newer").read_text() == "new"

    fault.unlink()
    assert sorted(os.listdir(there)) == ["link", "made", "newer", "old", "sub", "twice"]
    assert (there / "old").read_text() == "old"
    assert refusal(os.stat, there / "none") == "ENOENT"
    daemon.settle()
    assert (daemon.pfs / "there" / "made" / "inside").read_text() == "inside"
    assert (daemon.pfs / "there" / "newer").read_text() == "new"
    assert (daemon.pfs / "there" / "old").read_text() == "old"
