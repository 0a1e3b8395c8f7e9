"""The runtime directory: the same for daemon and clients, and for no other user."""

import os
from pathlib import Path

import pytest

from ckptfs import runtime_dir

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED HERE: chown needs root")]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPTFS_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def test_root_meets_in_run() -> None:
    assert runtime_dir.socket_path("job", 0) == Path("/run/ckptfs/job.sock")
    assert runtime_dir.admin_socket_path("job", 0) == Path("/run/ckptfs/job.admin.sock")
    assert runtime_dir.registry_path("job", 0) == Path("/run/ckptfs/job.json")


def test_a_user_meets_in_the_session_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = 12345
    monkeypatch.setattr(os, "geteuid", lambda: me)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_dir.get_path() == Path(f"/tmp/ckptfs-{me}"), "somebody else's session directory is not believed"
    os.chown(tmp_path, me, -1)
    assert runtime_dir.get_path() == tmp_path / "ckptfs"
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "link"))
    assert runtime_dir.get_path() == Path(f"/tmp/ckptfs-{me}")


def test_root_finds_the_mount_of_a_user_without_that_users_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_dir.get_path(4_000_000) == Path("/tmp/ckptfs-4000000")


def test_a_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    assert runtime_dir.create() == tmp_path / "run"
    os.chown(tmp_path / "run", 12345, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        runtime_dir.create()
