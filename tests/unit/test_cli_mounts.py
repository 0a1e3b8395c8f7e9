"""The command `ckptfs` with two mounts of which one is silent: it is named, the other is shown, and the exit code says so. F5, X11.

One name may also have several state directories, of which one is mounted: all are shown, and each can be deleted (P5, P11).
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ckptfs_client import cli, client, mounts
from ckptfs_client.errors import NoMount, UsageError
from ckptfs_client.mounts import Mount
from ckptfs_client.node import doctor, files, unmounted
from ckptfs_client.node.unmounted import UnmountedName
from control_served import Served, serving
from local_node import Node

from ckptfs import runtime_dir
from ckptfs.catalog import summary

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long commands wait for a daemon. The one that answers has the time that it needs on a busy machine; no other is waited for."""
    asked: list[float] = []

    class Patient(client.Client):
        def __init__(self, mount: Mount, *, answer_s: float = client.ANSWER_S) -> None:
            asked.append(answer_s)
            super().__init__(mount, answer_s=60.0 if mount.name == "test" else 0.3)

    monkeypatch.setattr(client, "Client", Patient)
    return asked


@pytest.fixture
def two(waits: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A mount that answers, and one whose socket takes connections and says nothing."""
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("mnt", "silent"):
        (tmp_path / name).mkdir()
    device = os.stat(tmp_path).st_dev
    with serving(Node(tmp_path)) as served, socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "run" / "sick.sock"))
        hanging.listen()
        found = [Mount("sick", tmp_path / "silent", os.geteuid(), device), Mount("test", tmp_path / "mnt", os.geteuid(), device)]
        monkeypatch.setattr(mounts, "list_mounts", lambda: found)
        yield served


def test_status_shows_the_others_and_names_the_silent_one(two: Served, run: Run, tmp_path: Path) -> None:
    code, out, err = run("status")
    assert code == 3
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["sick", "down"], ["test", "ok"]]
    assert f"the daemon of sick ({tmp_path}/silent) does not answer" in err
    code, out, _ = run("status", "--json")
    found = json.loads(out)
    assert code == 3 and [(one["name"], one["health"]) for one in found] == [("sick", "down"), ("test", "ok")]
    assert "does not answer" in found[0]["troubles"][0]["what"] and found[0]["troubles"][0]["remedy"]


def test_several_silent_mounts_cost_the_time_of_one(two: Served) -> None:
    """They are asked at once: each question waits for all others to have begun."""
    import threading

    everyone = threading.Barrier(5)
    chosen = [Mount(f"m{number}", Path("/"), 0, 0) for number in range(5)]
    found = client.ask_all(chosen, lambda _: everyone.wait(60))
    assert sorted(answer for _, answer in found if isinstance(answer, int)) == list(range(5))


def test_health_is_a_line_and_an_exit_code(two: Served, run: Run, tmp_path: Path) -> None:
    """X11: what a rendezvous or a health check of Slurm asks."""
    point = tmp_path / "mnt"
    assert run("health", point) == (0, f"ok: test on {point}\n", "")
    db = two.node.db
    summary.set_report(db, "tier:nvme", {"state": "down", "error": "EIO\nEIO", "remedy": "look"})
    summary.set_trouble(db, "peers", {"what": "other nodes cannot reach this one", "path": "", "remedy": ""})
    code, out, err = run("health", point)
    assert (code, out, err) == (1, f"degraded: test on {point}: nvme: {point.parent}/nvme: EIO\\nEIO (and 1 more reason)\n", "")
    code, out, _ = run("health", "--json", point)
    found = json.loads(out)
    assert code == 1 and found["health"] == "degraded" and found["reasons"][1:] == ["peers: other nodes cannot reach this one"]
    assert run("health", "/")[0] == 3


def test_a_node_that_will_be_taken_away_is_not_sound(two: Served, run: Run, tmp_path: Path) -> None:
    """X11, G1: no rendezvous shall choose it."""
    notice = {"source": "gce", "what": "TRUE", "at_s": time.time(), "deadline_s": 25.0, "drain": "running"}
    summary.set_report(two.node.db, summary.NOTICE_REPORT, notice)
    code, out, _ = run("health", tmp_path / "mnt")
    assert code == 1 and out == f"degraded: test on {tmp_path}/mnt: this node is about to be taken away: gce: TRUE\n"


def test_health_is_bounded(two: Served, waits: list[float], run: Run, tmp_path: Path) -> None:
    """X11: a daemon that says nothing is down, and the others are still asked. Without a DIR the worst mount decides."""
    code, out, _ = run("health", "--timeout", "250ms")
    lines = out.splitlines()
    assert code == 3 and waits == [0.25, 0.25]
    assert lines[0].startswith(f"down: sick on {tmp_path}/silent: the daemon of sick") and lines[1:] == [f"ok: test on {tmp_path}/mnt"]
    assert run("health", "--timeout", "0")[0] == run("health", "--timeout", "soon")[0] == 2


def test_df_shows_all_mounts(two: Served, run: Run, tmp_path: Path) -> None:
    code, out, err = run("df")
    assert code == 3 and f"test on {tmp_path}/mnt" in out and "does not answer" in err
    code, out, _ = run("df", "--json")
    assert code == 3 and len(json.loads(out)) == 1
    code, out, _ = run("df", tmp_path / "mnt", "--json")
    assert code == 0 and json.loads(out)["tiers"]


def test_doctor_names_the_mount_in_full(two: Served, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "longer-than-column"
    monkeypatch.setattr(mounts, "list_mounts", lambda: [Mount(name, tmp_path / "gone", os.geteuid(), 0)])
    found = next(one for one in doctor.examine() if one.check == name)
    assert found.verdict == doctor.BAD and "takes over the mountpoint, or umount -l" in found.remedy


def test_ls_on_a_dead_mount_gives_the_remedy(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(mounts, "list_mounts", lambda: [Mount("gone", tmp_path, os.geteuid(), os.stat(tmp_path).st_dev)])
    ended = subprocess.Popen(["true"])
    ended.wait()
    (tmp_path / "gone.json").write_text(json.dumps({"pid": ended.pid}))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(107, "Transport endpoint is not connected")

    monkeypatch.setattr(client.os, "lstat", refuse)
    for command in ("ls", "wait", "verify"):
        code, _, err = run(command, tmp_path / "file")
        assert code == 3 and "has ended; mount gone again with the same options" in err
    failure = files.build_path_error(tmp_path / "file", OSError(107, ""))
    assert isinstance(failure, NoMount)


# --- one name with several state directories -------------------------------------------------------------------------


@pytest.fixture
def states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two unmounted state directories of the name `run1`, which is mounted with a third one."""
    found = [tmp_path / "a", tmp_path / "b"]
    for state in found:
        state.mkdir()
        (state / "lock").touch()
        (state / unmounted.CATALOG).touch()
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path))
    runtime_dir.registry_path("run1").write_text(f'{{"pid": 1, "state": "{tmp_path}/c"}}')
    mounted = [Mount("run1", tmp_path / "mnt", 0, 1)]
    monkeypatch.setattr(unmounted, "list_mounts", lambda: mounted)
    monkeypatch.setattr(unmounted, "list_unmounted", lambda: [UnmountedName("run1", state, None) for state in found if state.exists()])
    return found


def test_a_mounted_name_is_shown_beside_its_other_state_directories(states: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert [one["mounted"] for one in unmounted.describe_all()] == [True, False, False]
    cli.list_names()
    shown = capsys.readouterr().out
    assert f"run1: mounted at {states[0].parent}/mnt\n" in shown and all(f"mounts --delete {state}\n" in shown for state in states)


def test_one_of_several_is_deleted_by_its_directory(states: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The registration of the mounted one stays."""
    unmounted.delete(str(states[0]), yes=True)
    assert not states[0].exists() and states[1].exists() and runtime_dir.registry_path("run1").exists()
    states[0].mkdir()
    monkeypatch.setattr(unmounted, "list_mounts", list)
    with pytest.raises(UsageError, match="several state directories") as refused:
        unmounted.delete("run1", yes=True)
    assert refused.value.remedy == "give one of them instead"
