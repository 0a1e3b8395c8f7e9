"""`ckptfs who` on a real mount: which processes use a file or a directory. F5, P11."""

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ckptfs_client.node import files
from daemon_under_test import Area, eventually

pytestmark = pytest.mark.fuse
ONLY_DATA_PATH = "buffered"  # Each machine has it, and how bytes travel plays no part.


def ask(mount: Area, path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(mount.command("who", path, "--json").stdout)
    return found


def find_own(found: dict[str, Any]) -> dict[str, Any] | None:
    """This process in the answer."""
    return next((one for one in found["processes"] if one["pid"] == os.getpid()), None)


def test_who_has_a_file_open(mount: Area) -> None:
    """Readers, writers and mappings; a file of the same name elsewhere is not taken for it."""
    path, other = mount.path / "run" / "model.pt", mount.path / "other" / "model.pt"
    for one in (path, other):
        one.parent.mkdir()
        one.write_bytes(b"x" * 8192)
    with open(other, "rb"):
        assert find_own(ask(mount, path)) is None
    with open(path, "r+b") as file:
        found = ask(mount, path)
        assert found["open_handles"] == 1 and (own := find_own(found)) is not None
        assert own["how"] == ["write"] and own["files"] == [str(path)] and "python" in own["command"]
        mapped = mmap.mmap(file.fileno(), 8192)
    assert (own := find_own(ask(mount, path))) is not None and "mapped" in own["how"]
    assert str(os.getpid()) in mount.command("who", path).stdout
    mapped.close()
    result = mount.command("who", path)
    assert result.stdout == "" and f"no process that you may look at uses {path}" in result.stderr


def test_who_is_below_a_directory(mount: Area) -> None:
    """Files, deleted ones too, working directories, and other namespaces: what keeps umount from its work."""
    below = mount.path / "run" / "step_1"
    below.mkdir(parents=True)
    (mount.path / "run2").mkdir()
    with open(below / "gone", "wb") as file, open(mount.path / "run2" / "x", "wb"):
        file.write(b"1")
        (below / "gone").unlink()
        assert (own := find_own(ask(mount, mount.path / "run"))) is not None
        assert own["files"] == [f"{below}/gone (deleted)"] and own["how"] == ["write"]
    assert find_own(ask(mount, mount.path / "run")) is None
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], cwd=below, stdin=-1, stdout=-1) as child:
        assert child.stdout is not None and child.stdout.readline()
        (one,) = (one for one in ask(mount, mount.daemon.path)["processes"] if one["pid"] == child.pid)
        assert (one["how"], one["files"]) == (["cwd"], [str(below)])
        child.communicate(b"\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: a mount namespace needs root")
def test_who_is_in_a_container(mount: Area, tmp_path: Path) -> None:
    """A bind mount at another place, in a namespace of its own."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("NOT TESTED HERE: no mount namespace can be made in a chroot")
    inside = mount.path / "run"
    inside.mkdir()
    (inside / "model.pt").write_bytes(b"x")
    script = f"mount --bind {inside} {tmp_path} && exec 3< {tmp_path}/model.pt && echo ready && read line"
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", script], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        for path in (inside, inside / "model.pt"):
            (one,) = (one for one in ask(mount, path)["processes"] if one["pid"] == child.pid)
            assert (one["how"], one["files"]) == (["read"], [str(inside / "model.pt")])
        child.communicate(b"\n")


def test_a_handle_that_nobody_shows_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's count is the check of what /proc tells. Root is not told to become root."""
    found: files.WhoJson = {"path": "/ckpt/a", "processes": [], "hidden": 7, "open_handles": 2}
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    notes = files.list_notes(found)
    assert len(notes) == 3 and "counts 2 open handles" in notes[1] and "7 processes of others" in notes[2]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert files.list_notes(found) == notes[:2]


def test_closed_means_gone(mount: Area) -> None:
    path = mount.path / "file"
    path.write_bytes(b"x")
    eventually(lambda: ask(mount, path)["open_handles"] == 0, what="the kernel has released the handle")
