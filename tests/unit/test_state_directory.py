"""One daemon per state directory (issue: a second daemon on the same state directory is refused)."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ckptfs_daemon.supervisor import state_directory
from ckptfs_daemon.supervisor.main import _require_nothing_to_write_back

from ckptfs import mount_record, procfs
from ckptfs.catalog import namespace
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.config.schema import MS_RDONLY
from ckptfs.errors import InvalidArgument
from ckptfs.model import ROOT
from ckptfs.mount_record import MountRecord

SLEEPER = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


def test_a_second_one_is_refused_by_the_pid_of_the_first(tmp_path: Path) -> None:
    first = state_directory.acquire_lock(tmp_path)
    with pytest.raises(InvalidArgument, match=rf"\(pid {os.getpid()}\)"):
        state_directory.acquire_lock(tmp_path)
    mount_record.store(MountRecord("n", Path("/ckpt"), tmp_path, "", None, None, "i"))
    with pytest.raises(InvalidArgument, match=rf"\(pid {os.getpid()}, mounted at /ckpt\) uses the state directory"):
        state_directory.acquire_lock(tmp_path)
    os.close(first)
    os.close(state_directory.acquire_lock(tmp_path))


def _sleeper() -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(SLEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _note(state: Path, pid: int, ticks: int) -> None:
    (state / "processes.json").write_text(
        json.dumps({"supervisor": {"pid": 1}, "mover": {"pid": pid, "started_ticks": ticks}, "mount": {"pid": 0}})
    )


def test_what_a_dead_supervisor_left_is_ended(tmp_path: Path) -> None:
    process = _sleeper()
    _note(tmp_path, process.pid, procfs.get_start_ticks(process.pid))
    state_directory.kill_leftovers(tmp_path)
    assert process.wait(60) == -9


def test_a_pid_that_now_is_somebody_else_is_left_alone(tmp_path: Path) -> None:
    process = _sleeper()
    _note(tmp_path, process.pid, procfs.get_start_ticks(process.pid) - 1)
    state_directory.kill_leftovers(tmp_path)
    assert process.poll() is None
    process.kill()
    process.wait(60)


def test_a_look_at_the_lock_refuses_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ckptfs mounts` and mount(8) hold the lock for a moment, to see whether a daemon does."""
    looker = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(looker, fcntl.LOCK_EX)
    monkeypatch.setattr(state_directory.time, "sleep", lambda _: os.close(looker))
    os.close(state_directory.acquire_lock(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"mount": 7}'])
def test_a_note_that_cannot_be_read_ends_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "processes.json").write_text(text)
    state_directory.kill_leftovers(tmp_path)
    state_directory.kill_leftovers(tmp_path / "absent")


def test_a_process_that_is_gone_has_no_start() -> None:
    process = _sleeper()
    process.kill()
    process.wait(60)
    assert procfs.get_start_ticks(process.pid) == 0


def test_a_read_only_mount_refuses_a_catalog_with_changes(db: Database, tmp_path: Path) -> None:
    """P5, P11: a mount that writes nothing back would keep them from the PFS."""
    writing = Config("run1", tmp_path, tmp_path)
    reading = replace(writing, mount_flags=MS_RDONLY)
    _require_nothing_to_write_back(reading, db)
    with db.transaction():
        namespace.create(db, ROOT, b"a", 0o100644, uid=0, gid=0)
    _require_nothing_to_write_back(writing, db)
    with pytest.raises(InvalidArgument, match="run1 holds changes that are not on the PFS"):
        _require_nothing_to_write_back(reading, db)


def test_a_ram_tier_that_the_kernel_has_just_closed_is_unmounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes backing files after it has ended their connection; until then the tier is busy."""
    answers = [OSError(errno.EBUSY, "busy"), OSError(errno.EBUSY, "busy"), None]

    def unmount(point: Path) -> None:
        if failure := answers.pop(0):
            raise failure

    monkeypatch.setattr(state_directory.connection, "find_mount_at", lambda point: object())
    monkeypatch.setattr(state_directory.connection, "unmount_at", unmount)
    assert state_directory.release_ram_tier(Config("run1", tmp_path, tmp_path)) and not answers
