"""G6, X9, X11 on a real mount: a job that saves, is killed, restarts and loads, in the event log and in `ckptfs goodput`."""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from another_user import run_as_user
from ckptfs_client import json_answers
from daemon_under_test import Area, DaemonUnderTest, environment, eventually

from ckptfs import event_log

pytestmark = [pytest.mark.fuse, pytest.mark.parametrize("data_path", ["passthrough"], indirect=True, scope="session")]
JOB = """
import sys, zipfile
for line in sys.stdin:
    order, step = line.split()
    path = f"{sys.argv[1]}/step_{step}.pt"
    if order == "load":
        zipfile.ZipFile(path).testzip()
    elif order == "save":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", step.encode() * 20000)
    else:
        half = zipfile.ZipFile(path, "w")
        half.writestr("archive/data.pkl", step.encode() * 20000)
        half.fp.flush()
    print(order, flush=True)
"""
"""A training job that saves, loads, or begins to save, as it is told."""


class Job:
    """The job, as process `process`."""

    def __init__(self, directory: Path, number: str) -> None:
        more = {"SLURM_JOB_ID": number, "RANK": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", JOB, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **more},
            text=True,
        )

    def do(self, order: str, step: int) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{order} {step}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == order + "\n"

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def running(directory: Path, number: str = "7") -> Iterator[Job]:
    job = Job(directory, number)
    try:
        yield job
    finally:
        job.end()


def list_events(mount: Area) -> list[dict[str, Any]]:
    """The log, but for events of series in other areas."""
    events = event_log.read_events(mount.daemon.state / event_log.DIRECTORY)
    found = [{"kind": event.kind, **event.fields} for event in events]
    assert {name for one in found for name in one} <= set(json_answers.EventJson.__annotations__)
    return [one for one in found if "series" not in one or one["series"].startswith(mount.path.name + "/")]


def wait_for(mount: Area, kind: str, **fields: object) -> dict[str, Any]:
    """Wait for an event with these fields."""

    def find() -> dict[str, Any] | None:
        events = list_events(mount)
        return next((one for one in events if one["kind"] == kind and all(one.get(name) == value for name, value in fields.items())), None)

    found: dict[str, Any] = eventually(find, what=f"the event {kind} {fields}")
    return found


def test_a_job_that_is_killed_and_goes_on(mount: Area) -> None:
    """Two sets, a third one half; another process of the job loads the second, and writes the third and a fourth."""
    with running(mount.path) as first:
        for step in (100, 200):
            first.do("save", step)
            wait_for(mount, "complete", step=step)
        first.do("begin", 300)
    begun = wait_for(mount, "begun", set="step_300.pt")
    assert begun["producers"][0]["pid"] == first.process.pid
    with running(mount.path) as second:
        second.do("load", 200)
        read = wait_for(mount, "load", step=200)
        for step in (300, 400):
            second.do("save", step)
            wait_for(mount, "complete", step=step)
    assert (read["set"], read["reader"]["pid"], read["reader"]["job"]) == ("step_200.pt@2", second.process.pid, "7")
    complete = wait_for(mount, "complete", step=300)
    assert complete["files"] == 1 and 0 <= complete["duration_s"] < 60 and complete["producers"][0]["rank"] == "0"
    starts = [one for one in list_events(mount) if one["kind"] == "start"]
    assert [(one["step"], one["producers"][0]["pid"]) for one in starts] == [(100, first.process.pid), (300, second.process.pid)]
    level = wait_for(mount, "level", step=100, level="pfs")
    assert level["after_s"] > 0
    answer = json.loads(mount.command("goodput", mount.path / "step_*.pt", "--json").stdout)
    assert (answer["restarts"], answer["failures"], answer["loads"], answer["saves"], answer["incomplete"]) == (1, 1, 1, 4, 1)
    assert (answer["steps"], answer["lost_steps"], answer["jobs"]) == (400, 100, 1)
    assert [run["resumed"] for run in answer["runs"]] == [0, 200]
    assert 0 < answer["effective"] < 1 and answer["effective_s"] + answer["saving_s"] <= answer["total_s"]
    lines = mount.command("events", mount.path).stdout.splitlines()
    assert any(re.search(rf"complete +{mount.path.name}/step_400.pt@4  1 file, .* by .*\(job 7, rank 0\)", line) for line in lines)
    text = mount.command("goodput", mount.path / "step_*.pt").stdout
    assert "400 steps done, 100 lost and repeated" in text and "x not completed" in text
    advice = json.loads(mount.command("advise", mount.path / "step_*.pt", "--cost", "1ms", "--json").stdout)
    assert advice["mtbf_failures"] == 1 and advice["mtbf_s"] == pytest.approx(answer["mtbf_s"])


def test_what_users_and_rules_do(mount: Area) -> None:
    """Rollback, equal sets, restore, and a set that its owner removes; `ckptfs` itself loads nothing."""
    series = mount.path / "step_*.bin"
    for number in (1, 2):
        (mount.path / f"step_{number}.bin").write_bytes(b"a" * 5000)
        wait_for(mount, "complete", step=number)
    assert wait_for(mount, "unchanged", step=2)["former"] == "step_1.bin@1"
    assert "step_2.bin@2: has the same bytes as step_1.bin@1: training may not progress" in mount.daemon.log
    mount.command("rollback", series, "step_1.bin")
    assert wait_for(mount, "rolled-back")["set"] == "step_1.bin@1"
    (mount.path / "step_2.bin").unlink()
    mount.command("restore", f"{series}@2")
    assert wait_for(mount, "restored")["set"] == "step_2.bin@2"
    mount.command("rm", f"{series}@1", "--now")
    assert wait_for(mount, "expired", number=1)["reason"] == "removed by a user"
    assert "load" not in [one["kind"] for one in list_events(mount)]


def test_processes_that_die_are_in_the_log(data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """Of the daemon. The log goes on."""
    mount = Area(make_daemon(data_path), "run1")
    for role in ("mount", "mover"):
        mount.daemon.kill(role)
        assert wait_for(mount, "restarted", process=role)["exit_code"] == -signal.SIGKILL
    with zipfile.ZipFile(mount.path / "step_1.pt", "w") as file:
        file.writestr("archive/data.pkl", b"x")
    assert wait_for(mount, "complete", step=1)["producers"][0]["pid"] == os.getpid()
    mount.command("drain", mount.path)
    assert wait_for(mount, "drained", cause="command")["done"] is True


def test_other_users_see_what_they_may_list(mount: Area) -> None:
    """A directory of mode 0700: its owner sees all, by the daemon; others see no event of it."""
    for name, mode in (("open", 0o755), ("private", 0o700)):
        directory = mount.path / name
        directory.mkdir()
        os.chown(directory, 1234, 1234)
        directory.chmod(mode)
        with zipfile.ZipFile(directory / "step_1.pt", "w") as file:
            file.writestr("archive/data.pkl", b"x")
        wait_for(mount, "complete", series=f"{mount.path.name}/{name}/step_*.pt")

    def look(uid: int, *expected: str) -> None:
        done = run_as_user("events", mount.path, "--json", uid=uid)
        assert done.returncode == 0, done.stdout
        found = [str(json.loads(line).get("series", "")) for line in done.stdout.splitlines()]
        assert {Path(one).parent.name for one in found if one.startswith(mount.path.name + "/")} == set(expected)

    look(1234, "open", "private")
    look(4321, "open")


def test_follow(mount: Area) -> None:
    """Events come as they happen. Ctrl-C ends it quietly, and so does a reader that closes the pipe, at once."""
    command = [sys.executable, "-m", "ckptfs_client", "events", str(mount.path), "--follow", "--json", "--since", "1h"]
    for ends_by_pipe in (False, True):
        made = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
        assert made.stdout is not None and made.stderr is not None
        step = 100 + ends_by_pipe
        with zipfile.ZipFile(mount.path / f"step_{step}.pt", "w") as file:
            file.writestr("archive/data.pkl", os.urandom(100))
        # Other tests of this mount have saved such steps, too.
        shown: dict[str, Any] = {}
        while (shown.get("series"), shown.get("step")) != (f"{mount.path.name}/step_*.pt", step):
            shown = json.loads(made.stdout.readline())
        if ends_by_pipe:
            made.stdout.close()
        else:
            made.send_signal(signal.SIGINT)
        assert made.wait(timeout=60) == (141 if ends_by_pipe else 130) and made.stderr.read() == ""
