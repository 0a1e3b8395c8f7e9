"""H3, G1: the scripts of deploy/slurm as shipped, under a real Slurm: its controller beside etcd, a slurmd on each node of a lab.

What docs/guides/slurm.md tells to type is typed here, by root or by another user, with other paths.
"""

import contextlib
import functools
import itertools
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from another_user import STRANGER
from ckptfs_client.lab import network
from ckptfs_client.lab.nodes import DAEMON, list_processes, list_processes_named, spawn
from cluster_lab import ClusterUnderTest, eventually, level, unusable
from daemon_under_test import ENVIRONMENT, REPOSITORY

pytestmark = pytest.mark.others
SHIPPED = REPOSITORY / "deploy" / "slurm"
PAGE = REPOSITORY / "docs" / "guides" / "slurm.md"
INSTALLED = "/opt/ckptfs/share/slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
CONTROLLER = "10.111.0.1"
TURN_S = 120.0
SLICE_S = 0.0001
LOG_LINES = 30
HELD = 'until [ -e go-$SLURM_ARRAY_TASK_ID ]; do sleep 0.1; done; exec python3 "$@"'
"""A task runs for a second, and the test must find it before."""
# A requeued job waits for cred_expire.
SLURM_CONF = """
ClusterName=lab
SlurmctldHost={host}({controller})
AuthInfo=socket={root}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=2
SchedulerType=sched/builtin
include {root}/installed/slurm.conf
"""


def list_page_lines() -> list[str]:
    """The lines of the page that one types."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@functools.cache
def find_python() -> str:
    """A Python of this version that the other user can execute, or "" where there is none."""
    for python in (sys.executable, f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"):
        with contextlib.suppress(OSError):
            subprocess.run([python, "-c", "pass"], user=STRANGER, group=STRANGER, extra_groups=(), check=True)
            return python
    return ""


class SlurmUnderTest:
    """A Slurm on the nodes of a lab. Its processes run in the lab's network namespaces, and end with the lab."""

    def __init__(self, cluster: ClusterUnderTest) -> None:
        self.cluster = cluster
        self.root = cluster.root / "slurm"
        self.settings = self.root / "etc" / "slurm.conf"
        self.home = self.root / "home"
        for directory in (self.settings.parent, self.home, self.root / "state", self.root / "bin", self.root / "installed"):
            directory.mkdir(parents=True)
        os.chown(self.home, STRANGER, STRANGER)
        self._install()
        self._start()

    def _install(self) -> None:
        """Lay out what `make install` would, with scripts around the prolog and the epilog that name the settings, and a configuration."""
        paths, python = ":".join([ENVIRONMENT["PYTHONPATH"], *(path for path in sys.path if path.endswith("-packages"))]), find_python()
        for name, module in (("ckptfs", "-m ckptfs_client"), ("python3", "")):
            self._write_script(self.root / "bin" / name, f'PYTHONPATH={paths} exec {python} {module} "$@"')
        for name in ("prolog", "epilog"):
            self._write_script(self.root / "installed" / name, f"CKPTFS_SLURM_CONF={self.settings} exec {SHIPPED / name}")
        fragment = (SHIPPED / "slurm.conf").read_text().replace(INSTALLED, str(self.root / "installed"))
        fragment = fragment.replace("\nSchedulerParameters=", "\nSchedulerParameters=sched_interval=1,")
        (self.root / "installed" / "slurm.conf").write_text(fragment)
        text = SLURM_CONF.format(root=self.root, host=socket.gethostname(), controller=CONTROLLER)
        nodes = [f"NodeName={node.name} NodeAddr={node.address}" for node in self.cluster.nodes]
        (self.root / "slurm.conf").write_text("\n".join([text, *nodes, "PartitionName=main Nodes=ALL Default=YES"]) + "\n")
        (self.root / "key").write_bytes(os.urandom(128))
        (self.root / "key").chmod(0o600)

    @staticmethod
    def _write_script(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def _start(self) -> None:
        plan = self.cluster.laboratory.load_plan()
        self._switch = plan.switch
        self._namespaces = {name: plan.networks / name for name in plan.nodes}
        files = {"key-file": "key", "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        options = [f"--{option}={self.root / name}" for option, name in files.items()]
        spawn(self._switch, ["munged", "--foreground", *options], self.root / "out")
        eventually((self.root / "munge.socket").exists, TURN_S, "munged listens")
        self.type(f"sudo cp {INSTALLED}/settings.conf /etc/ckptfs/slurm.conf")
        self.change_settings(
            CKPTFS_MOUNT=f"{self.cluster.root}/$SLURMD_NODENAME/mnt", CKPTFS_HEALTH_WAIT="3", PATH=f"{self.root}/bin:$PATH",
            CKPTFS_START=f"'test ! -e {self.root}/broken && ckptfs lab start-node $SLURMD_NODENAME --dir {self.cluster.root}'",
        )  # fmt: skip
        spawn(self._switch, ["slurmctld", "-D", "-f", str(self.root / "slurm.conf")], self.root / "out")
        for name in self._namespaces:
            self.start_node(name)
        self.wait_for_nodes()

    def change_settings(self, **settings: str) -> None:
        with open(self.settings, "a") as file:
            file.writelines(f"{name}={value}\n" for name, value in settings.items())

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node, unless it runs."""
        if not list_processes_named(self._namespaces[name], "slurmd"):
            spawn(self._namespaces[name], ["slurmd", "-D", "-N", name, "-f", str(self.root / "slurm.conf")], self.root / "out")

    def wait_for_nodes(self) -> None:
        def states() -> set[str]:
            return set(self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split())

        self._wait(lambda: states() <= {"idle", "allocated"}, "all nodes are in service")

    # --- commands -----------------------------------------------------------------------------------------------------

    def run(self, *command: str | Path, uid: int = 0, cwd: Path | None = None, check: bool = True) -> str:
        """Run a command beside the controller; its output."""
        words = list(map(str, command))
        known = {"PATH": f"{self.root}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "SLURM_CONF": str(self.root / "slurm.conf")}
        known["CKPTFS_SLURM_CONF"] = str(self.settings)

        def act() -> subprocess.CompletedProcess[str]:
            who: dict[str, Any] = {"user": uid, "group": uid, "extra_groups": (), "cwd": cwd or self.root, "env": known}
            return subprocess.run(words, **who, capture_output=True, text=True, timeout=TURN_S, check=False)

        done = network.run_in_namespace(self._switch, act)
        assert not check or done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}\n{self.tails()}"
        return done.stdout

    def type(self, line: str, more: str = "", job: int = 0, node: str = "") -> str:
        """Type a line of the page: as root if it begins with sudo, else as the user. `more` stands for the word sbatch, with options."""
        assert line in list_page_lines(), f"the page does not say {line!r}"
        words = line.removeprefix("sudo ")
        theirs_and_ours = {
            INSTALLED: str(SHIPPED), "/etc/ckptfs": str(self.settings.parent), "/ckpt/alice": f"{self.cluster[0].path}/nobody",
            "alice": "nobody", "JOB": str(job), "sbatch": more or "sbatch", "node7": node,
        }  # fmt: skip
        for theirs, ours in theirs_and_ours.items():
            words = words.replace(theirs, ours)
        here = self.home / "run1" if (self.home / "run1").exists() else self.home
        return self.run("sh", "-c", words, uid=0 if line.startswith("sudo ") else STRANGER, cwd=here)

    def submit(self, line: str, more: str = "") -> int:
        """Type a line that submits a job; its number."""
        return int(self.type(line, more=more).split()[-1])

    def submit_words(self, words: str, *options: str) -> int:
        """Submit a job of one line."""
        output = f"--output={self.home}/out-%j"
        return int(self.run("sbatch", "--parsable", output, *options, f"--wrap={words}", uid=STRANGER, cwd=self.home))

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs; a task of an array that has begun is one of its own."""
        found: list[dict[str, Any]] = json.loads(self.run("squeue", "-h", "--states=all", "--json"))["jobs"]
        return found

    def state(self, job: int) -> str:
        """The state of a job; COMPLETED only after its epilog."""
        return next((str(one["job_state"]) for one in self.jobs() if one["job_id"] == job), "")

    def wait_for(self, job: int, *states: str) -> None:
        self._wait(lambda: self.state(job) in states, f"job {job} is {' or '.join(states)}")

    def wait_for_task(self, array: int, task: int) -> str:
        """Wait until the program of a task runs; its node."""

        def find() -> str:
            here = [one["batch_host"] for one in self.jobs() if (one["array_job_id"], one["array_task_id"]) == (array, task)]
            return next((str(node) for node in here if node and self.programs(node)), "")

        return str(self._wait(find, f"task {task} of {array} runs"))

    def wait_until_ended(self, array: int) -> set[str]:
        """Wait until all tasks have ended well; their job ids."""

        def tasks() -> dict[str, str]:
            return {str(one["job_id"]): one["job_state"] for one in self.jobs() if one["array_job_id"] == array}

        self._wait(lambda: set(tasks().values()) <= {"COMPLETED", "FAILED"}, f"the tasks of {array} have ended")
        found = tasks()
        assert set(found.values()) == {"COMPLETED"}, self.tails()
        return set(found)

    def programs(self, node: str) -> list[int]:
        """The processes of work.py on a node."""
        found = []
        for pid in list_processes(self._namespaces[node]):
            with contextlib.suppress(OSError):
                if b"\0work.py\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def kill_daemon(self, node: str) -> None:
        """kill -9 of ckptfs on a node, but not of its slurmd. All are stopped first, so that none sees another one die."""
        while found := list_processes_named(self._namespaces[node], DAEMON):
            for number, pid in itertools.product((signal.SIGSTOP, signal.SIGKILL), found):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def begin_long_job(self) -> None:
        """Begin a job that Slurm signals half a minute later, at most, because its minute is nearly over."""
        more = "WORK='python3 work.py --steps 34 --pause 1' sbatch --nodelist=node1 --time=1 --signal=B:USR1@50"
        self.long_job = self.submit("sbatch batch.sh", more)

    def _wait(self, condition: Callable[[], Any], what: str) -> Any:
        try:
            return eventually(condition, TURN_S, what, pause_s=0.4)
        except AssertionError as failure:
            raise AssertionError(f"{failure}\n{self.run('squeue')}{self.run('sinfo', '-R')}{self.tails()}") from None

    def tails(self) -> str:
        logs = [*self.root.glob("*.log"), *self.home.rglob("*.out")]
        return "\n".join(f"--- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]) for log in logs)


@pytest.fixture(scope="module")
def shared_slurm(request: pytest.FixtureRequest) -> Iterator[SlurmUnderTest]:
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"NO SLURM HERE: {', '.join(lacking)} not installed (apt install munge slurm-client slurmctld slurmd)")
    if reason := unusable():
        pytest.skip(f"NO LAB HERE: {reason}")
    yield SlurmUnderTest(request.getfixturevalue("shared_lab"))


@pytest.fixture
def slurm(shared_slurm: SlurmUnderTest, lab: ClusterUnderTest) -> SlurmUnderTest:
    """Slurm with all nodes in service. What a killed node has not told others cannot be read for a while."""
    lab.expect_warning("no good copy can be reached|no live node has its content")
    for node in lab.nodes:
        shared_slurm.start_node(node.name)
    shared_slurm.wait_for_nodes()
    return shared_slurm


def begins(output: Path) -> list[tuple[int, str]]:
    """(step, node) of each start that a job has printed."""
    return [(int(step), node) for step, node in re.findall(r"^begins at step (\d+) on (\S+)$", output.read_text(), re.MULTILINE)]


def compute(directory: Path, *options: str) -> Path:
    """The same computation without an interruption."""
    subprocess.run([sys.executable, SHIPPED / "work.py", directory, *options], check=True, timeout=TURN_S)
    return directory


def freeze_in_save(slurm: SlurmUnderTest, node: str) -> str:
    """Stop the program on a node in the middle of a save; the name of the file.

    Until then it runs in slices shorter than a save: a search of all processes takes longer than one.
    """
    found: list[int] = []

    def is_saving() -> str:
        found[:] = found or slurm.programs(node)
        try:
            for pid in found:
                os.kill(pid, signal.SIGSTOP)
                for fd in Path(f"/proc/{pid}/fd").iterdir():
                    name = fd.readlink().name
                    if name.startswith("step_") and fd.lstat().st_mode & stat.S_IWUSR:
                        return name
                os.kill(pid, signal.SIGCONT)
        except OSError:
            found.clear()  # It has ended.
        return ""

    return str(eventually(is_saving, TURN_S, f"a program on {node} saves", SLICE_S))


# --- tests ------------------------------------------------------------------------------------------------------------


def test_a_chain_of_tasks_outlives_a_node(slurm: SlurmUnderTest, lab: ClusterUnderTest, tmp_path: Path) -> None:
    """H3, H10: each task finds what the one before it wrote elsewhere; one that is killed in a save is run again; sets name the job."""
    slurm.type("sudo scontrol reconfigure")
    slurm.type("sudo install -d -o alice /ckpt/alice")
    slurm.type("cp -r /opt/ckptfs/share/slurm run1 && cd run1")
    slurm.begin_long_job()
    run = slurm.home / "run1"
    (run / "held.sh").write_text(HELD)
    chain = slurm.submit("sbatch array.sh", "WORK='sh held.sh work.py --pause 0.05' sbatch --array=1-3%1 --exclude=node1")
    outputs = [run / f"slurm-{chain}_{task}.out" for task in range(1, 4)]
    assert str(chain) in slurm.type("squeue --me")
    first = slurm.wait_for_task(chain, 1)
    slurm.run("scontrol", "update", f"NodeName={first}", "State=DRAIN", "Reason=test")
    (run / "go-1").touch()
    second = slurm.wait_for_task(chain, 2)
    for task in (2, 3):
        (run / f"go-{task}").touch()
    cut = freeze_in_save(slurm, second)
    assert second != first and begins(outputs[1]) == [(10, second)]
    lab.laboratory.kill(second)
    slurm.run("scontrol", "update", f"NodeName={second}", "State=DOWN", "Reason=killed")  # Slurm itself needs SlurmdTimeout for that.
    slurm.run("scontrol", "update", f"NodeName={first}", "State=RESUME")
    tasks = slurm.wait_until_ended(chain)
    starts = sorted(begins(output)[-1][0] for output in outputs)
    begun = starts[1]
    assert starts == [0, begun, begun + 10] and 10 <= begun < int(cut[5:11]), (starts, cut)
    newest = Path(lab[0].command("latest", lab[0].path / "nobody" / "chain").stdout.strip())
    assert newest.name == f"step_{begun + 20:06d}.pkl"
    assert newest.read_bytes() == (compute(tmp_path, "--limit", str(begun + 20)) / newest.name).read_bytes()
    kept = lab.pfs / ".ckptfs.history" / "nobody" / "chain" / "step_*.pkl"
    (manifest,) = eventually(lambda: list(kept.glob(f"{newest.name}@*/MANIFEST.json")), TURN_S, "its manifest is on the PFS")
    (producer,) = json.loads(manifest.read_text())["producers"]
    assert producer["job"] in tasks and producer["rank"] == "0" and " work.py " in producer["command"]


def test_no_job_starts_where_the_mount_is_dead(slurm: SlurmUnderTest, lab: ClusterUnderTest) -> None:
    """H3, X11: the prolog mounts; if it cannot, the node is drained with the reason, and the job runs on another one."""
    (slurm.root / "broken").touch()
    slurm.kill_daemon("node2")
    job = slurm.submit_words("echo $SLURMD_NODENAME", "--exclude=node1")
    slurm.wait_for(job, "COMPLETED")
    assert (slurm.home / f"out-{job}").read_text() == "node3\n"
    assert re.search(r"^ckptfs: down: .* node2$", slurm.type("sinfo -R"), re.MULTILINE)
    assert "no job starts on node2" in (slurm.root / "node2.log").read_text()
    (slurm.root / "broken").unlink()
    slurm.type("sudo scontrol update NodeName=node7 State=RESUME", node="node2")
    job = slurm.submit_words("echo $SLURMD_NODENAME", "--nodelist=node2")
    slurm.wait_for(job, "COMPLETED")
    assert lab[1].command("health", lab[1].path).stdout.startswith("ok: ")


def test_a_node_is_free_when_what_was_written_is_safe(slurm: SlurmUnderTest, lab: ClusterUnderTest) -> None:
    """H3: the epilog waits for the level; if the daemon has died with bytes that only it had, it is started again and goes on with them."""
    file, go = lab[1].path / "nobody" / "last", slurm.home / "go"
    job = slurm.submit_words(f"echo begun; until [ -e {go} ]; do sleep 0.1; done; echo written > {file}", "--nodelist=node2")
    output = slurm.home / f"out-{job}"
    eventually(lambda: output.exists() and output.read_text(), TURN_S, "the job runs")
    os.kill(lab[1].pid("mover"), signal.SIGSTOP)
    go.touch()
    slurm.wait_for(job, "COMPLETING")
    assert level(file) == "local"
    slurm.kill_daemon("node2")
    slurm.wait_for(job, "COMPLETED")
    assert level(file) in ("clique", "pfs") and file.read_text() == "written\n"
    assert slurm.run("sinfo", "-h", "-n", "node2", "-o", "%T") == "idle\n"


def test_a_job_continues_after_its_time_limit(slurm: SlurmUnderTest, tmp_path: Path) -> None:
    """G1, H3: the signal before the limit; what was saved then is safe, and the requeued job goes on from there. Also by hand."""
    short = slurm.submit("sbatch batch.sh", "WORK='python3 work.py --steps 20 --pause 0.2' sbatch --exclude=node1 --job-name=short")
    outputs = {name: slurm.home / "run1" / f"slurm-{job}.out" for name, job in (("short", short), ("long", slurm.long_job))}
    eventually(lambda: outputs["short"].exists() and "saved" in outputs["short"].read_text(), TURN_S, "it has saved")
    slurm.type("scancel --signal=USR1 --batch JOB", job=short)
    eventually(lambda: "has the level" in outputs["long"].read_text(), TURN_S, "its time limit is near, and it has saved")
    slurm.run("scontrol", "update", f"JobId={slurm.long_job}", "TimeLimit=10", check=False)  # It may have ended by now.
    for name, job, steps in (("short", short, "20"), ("long", slurm.long_job, "34")):
        slurm.wait_for(job, "COMPLETED")
        runs = outputs[name].read_text().split("begins at step ")[1:]
        assert len(runs) > 1 and all("only the owner" in run and "has the level clique" in run for run in runs)
        for run, following in itertools.pairwise(runs):
            assert re.findall(r"^(?:saved step )?(\d+)", run, re.MULTILINE)[-1] == following.split()[0]
        there = slurm.cluster[2].path / "nobody" / name / "result"
        assert there.read_text() == (compute(tmp_path, "--steps", steps) / "result").read_text()


PROLOG = {
    "sound": ("prolog", "ok: m on /m", 0, {}, 0),
    "not sound": ("prolog", "degraded: m on /m: nvme: full", 1, {}, 1),
    "good enough": ("prolog", "degraded: m on /m: nvme: full", 1, {"CKPTFS_HEALTH": "degraded"}, 0),
    "no answer": ("prolog", "down: m on /m", 3, {"CKPTFS_HEALTH": "degraded"}, 1),
}
EPILOG = {
    "safe": ("epilog", "ok: m on /m", 0, {}, 0),
    "late": ("epilog", "ok: m on /m", 4, {}, 0),
    "wrong level": ("epilog", "ok: m on /m", 2, {}, 1),
    "dead": ("epilog", "down: m on /m", 3, {}, 1),
}


@pytest.mark.parametrize(("script", "health", "code", "settings", "expected"), [*PROLOG.values(), *EPILOG.values()], ids=[*PROLOG, *EPILOG])
def test_the_scripts_judge(tmp_path: Path, script: str, health: str, code: int, settings: dict[str, str], expected: int) -> None:
    """H3: what `ckptfs` answers decides on the exit code; a node that is refused gets the reason."""
    for name, line in (("ckptfs", f"echo '{health}'; exit {code}"), ("scontrol", f'echo "$@" > {tmp_path}/said')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    file, given = tmp_path / "slurm.conf", {"CKPTFS_HEALTH_WAIT": "0", "PATH": f"{tmp_path}:$PATH", **settings}
    file.write_text((SHIPPED / "settings.conf").read_text() + "".join(f"{name}={value}\n" for name, value in given.items()))
    names = {"SLURMD_NODENAME": "node7", "SLURM_JOB_ID": "5", "CKPTFS_SLURM_CONF": str(file)}
    done = subprocess.run([SHIPPED / script], env=names, capture_output=True, text=True, timeout=TURN_S, check=False)
    assert done.returncode == expected
    if expected and script == "prolog":
        assert f"ckptfs: {health}; no job starts on node7" in done.stderr
        assert (tmp_path / "said").read_text() == f"update NodeName=node7 State=DRAIN Reason=ckptfs: {health}\n"
    unset = subprocess.run([SHIPPED / script], env={**names, "CKPTFS_SLURM_CONF": "/none"}, capture_output=True, text=True, check=False)
    assert unset.returncode == 1 and "/none cannot be read" in unset.stderr


def test_every_line_of_the_page_is_typed() -> None:
    """In one of the tests above."""
    assert [line for line in list_page_lines() if f'"{line}"' not in Path(__file__).read_text() and "settings.conf" not in line] == []


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="SHELLCHECK IS NOT INSTALLED (apt install shellcheck)")
def test_the_scripts_pass_shellcheck() -> None:
    scripts = [path for path in sorted(SHIPPED.iterdir()) if path.read_bytes().startswith(b"#!/bin/sh")]
    done = subprocess.run(["shellcheck", "-x", *scripts], cwd=REPOSITORY, capture_output=True, text=True, timeout=TURN_S, check=False)
    assert len(scripts) == 4 and done.returncode == 0, done.stdout
