"""The supervisor with children that only pretend: restarts, giving up, the order of the end, and the handover to a successor (P8)."""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ckptfs_daemon.fuse import connection, request_table, shim_build
from ckptfs_daemon.fuse.connection import Connection
from ckptfs_daemon.ipc import Successor
from ckptfs_daemon.supervisor import children, handover, supervisor
from ckptfs_daemon.supervisor.handover import Handed
from ckptfs_daemon.supervisor.state_directory import ReadyPipe
from ckptfs_daemon.supervisor.supervisor import Supervisor
from ckptfs_daemon.supervisor.systemd import Systemd
from daemon_under_test import environment
from stand_in_child import serve as serve_stand_in

from ckptfs import __version__, limits, procfs
from ckptfs.catalog import database, identity
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.config.schema import MS_RDONLY
from ckptfs.errors import CatalogTooNew, ConfigError, InvalidArgument
from ckptfs.model import DataPath

DEADLINE_S = 90.0


class World:
    """A supervisor in the main thread, as its signals demand; what the test does runs beside it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.script = place / "script"
        self.script.write_text("")
        self.config = Config(name="unit", mountpoint=place / "mnt", state=place, drain_deadline_s=5.0)
        self.fuse_fd = os.open("/dev/null", os.O_RDWR)
        made = Connection(self.fuse_fd, b"init", DataPath.BUFFERED, "a test", self.config.mountpoint, "0:99999")
        self.served = replace(made, table_fd=request_table.create(made.serialize()))
        self.ready_read, self.ready_write = os.pipe()
        self.failure: BaseException | None = None
        self.ended: Supervisor

    def run(self, act: Callable[[], None] = lambda: None, *, resumed: bool = False) -> int:
        """The exit code; `act` runs in a thread."""
        made = self.ended = Supervisor(
            self.config, self.served, is_resumed=resumed, systemd=Systemd(), ready_pipe=ReadyPipe(self.ready_write), arguments=["unit"],
            serve_role=functools.partial(serve_stand_in, self.script),
        )  # fmt: skip

        def acting() -> None:
            try:
                act()
            except BaseException as failure:
                self.failure = failure
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=acting)
        thread.start()
        code = made.run()
        thread.join(DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        return code

    def lives(self, role: str) -> list[list[str]]:
        """What each process of a role wrote down: pid, the descriptors that it should not have, whether it resumes."""
        count = len(list(self.place.glob(f"{role}.life.*")))
        return [(self.place / f"{role}.life.{number}").read_text().split() for number in range(count)]

    def resumed(self, number: int) -> bool:
        return self.lives("mount")[number][2] == "True"

    def processes(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = json.loads((self.place / "processes.json").read_bytes())
        return found

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                if condition():
                    return
            except (OSError, ValueError, KeyError, IndexError):
                pass
            assert time.monotonic() < deadline, f"it did not come to this; lives: {self.lives('mount')} {self.lives('mover')}"
            threading.Event().wait(0.01)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("CKPTFS_RUNTIME_DIR", str(tmp_path / "run"))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)}
    # The connection never ends here, so a fork that ends slowly on a busy machine would be taken for one that was killed.
    monkeypatch.setattr(supervisor, "STUCK_REAP_WAIT_S", supervisor.REAP_WAIT_S)
    yield World(tmp_path)
    signal.set_wakeup_fd(-1)
    handover.receive_stop_signals()
    for number, handler in before.items():
        signal.signal(number, handler)


def _said(world: World) -> str:
    return os.read(world.ready_read, 4096).decode()


def test_a_kernel_that_unmounts_ends_everything(world: World) -> None:
    world.script.write_text("mount unmounted\n")
    assert world.run() == 0
    assert _said(world) == "ok\n"
    assert [life[1] for role in ("mount", "mover") for life in world.lives(role)] == ["0", "0"], "each has what its role needs alone"
    with pytest.raises(OSError):
        os.fstat(world.fuse_fd)


def test_a_service_manager_that_hangs_does_not_keep_the_supervisor(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """P8: neither from restarting a dead mount nor from its end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as silent, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        silent.bind(str(world.place / "notify"))
        other.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                other.sendto(b"of another unit", str(world.place / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(world.place / "notify"))
        world.script.write_text("mount die\nmount unmounted\n")
        assert world.run() == 0
    assert len(world.lives("mount")) == 2


def test_killed_children_are_replaced(world: World) -> None:
    def act() -> None:
        world.until(lambda: world.ended._slots["mount"].ever_ready)
        os.kill(int(world.lives("mount")[0][0]), signal.SIGKILL)
        world.until(lambda: world.processes()["mount"]["pid"] == int(world.lives("mount")[1][0]))
        assert world.processes()["mount"]["restarts"] == 1
        os.kill(int(world.lives("mover")[0][0]), signal.SIGKILL)
        world.until(lambda: len(world.lives("mover")) == 2)
        world.script.write_text("mount serve\nmount serve\nmount unmounted\n")
        os.kill(int(world.lives("mount")[1][0]), signal.SIGKILL)

    assert world.run(act) == 0
    assert [world.resumed(number) for number in range(3)] == [False, True, True]
    assert {life[1] for role in ("mount", "mover") for life in world.lives(role)} == {"0"}


def test_a_killed_child_that_hung_leaves_no_zombie(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when the PFS answers again, or a moment too late on a busy machine."""

    def wait(child: children.Child, patience_s: float) -> int | None:
        return wait_child(child, patience_s) if len(world.lives("mount")) > 1 else None

    def act() -> None:
        world.until(lambda: world.ended._slots["mount"].ever_ready)
        pid = int(world.lives("mount")[0][0])
        os.kill(pid, signal.SIGKILL)
        world.until(lambda: len(world.lives("mount")) == 2)
        world.until(lambda: not Path(f"/proc/{pid}").exists())
        world.script.write_text("mount unmounted\n" * 3)
        os.kill(int(world.lives("mount")[1][0]), signal.SIGKILL)

    wait_child = children.Child._wait
    monkeypatch.setattr(children.Child, "_wait", wait)
    assert world.run(act) == 0


def test_a_first_mount_that_dies_before_it_was_ready_does_not_make_the_next_one_resume(world: World) -> None:
    world.script.write_text("mount fail\nmount unmounted\n")
    assert world.run() == 0
    assert [world.resumed(number) for number in range(2)] == [False, False]


def test_a_mount_that_never_comes_up_is_given_up_with_a_sentence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    aborted: list[Connection] = []
    monkeypatch.setattr(connection, "abort", aborted.append)
    world.script.write_text("mount fail\n" * 50)
    assert world.run() == 1
    assert _said(world).startswith("error: the mount process does not stay alive")
    assert aborted == [world.served]


def test_a_mover_that_dies_again_and_again_does_not_end_the_mount(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESTART_LAST_S", 0.2)
    world.script.write_text("mover fail\n" * 7)

    def act() -> None:
        world.until(lambda: len(world.lives("mover")) > 7)
        os.kill(os.getpid(), signal.SIGTERM)
        world.until((world.place / "mount.life.0").exists)
        os.kill(int(world.lives("mount")[0][0]), signal.SIGTERM)

    world.script.write_text(world.script.read_text() + "mount serve\nmount unmounted\n")
    assert world.run(act) == 0


def test_a_pause_of_the_machine_kills_no_child(world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """P8: the children stood still, too."""
    monotonic, paused_s = time.monotonic, [0.0]

    class Poll:
        """Stands still for longer than a child may be silent, once both children serve."""

        def __init__(self) -> None:
            self.register = (poll := make_poll()).register
            self._poll = poll

        def poll(self, *timeout_ms: float) -> list[tuple[int, int]]:
            found = self._poll.poll(*timeout_ms)
            if not paused_s[0] and all(world.lives(role) for role in ("mount", "mover")):
                paused_s[0] = 2 * limits.WATCHDOG_S
            return found

    def act() -> None:
        world.until(lambda: paused_s[0] and world.lives("mount"))
        os.kill(world.processes()["mount"]["pid"], signal.SIGKILL)

    make_poll = select.poll
    monkeypatch.setattr(select, "poll", Poll)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + paused_s[0])
    world.script.write_text("mount serve\nmount unmounted\n")
    assert world.run(act) == 0
    assert "no heartbeat" not in caplog.text


@pytest.mark.parametrize("wait_s", [0.0, 60.0])
def test_only_a_killed_child_that_does_not_end_for_long_is_reported(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wait_s: float
) -> None:
    """A busy machine needs a moment to end a killed process."""
    tries: list[children.Child] = []

    def reap(child: children.Child, patience_s: float) -> int | None:
        if child.role == "mount" and child is (tries or [child])[0] and len(tries) < 2:
            tries.append(child)
            return None
        return reap_child(child, patience_s)

    reap_child = children.Child.reap
    monkeypatch.setattr(children.Child, "reap", reap)
    monkeypatch.setattr(limits, "WATCHDOG_S", 1.5)
    monkeypatch.setattr(supervisor, "TURN_MAX_S", 0.1)
    monkeypatch.setattr(supervisor, "REAP_WAIT_S", wait_s)
    world.script.write_text("mount serve\nmount unmounted\n")
    assert world.run() == 0
    assert len(tries) == 2 and caplog.text.count("hangs in a system call") == (0 if wait_s else 1)


def test_a_mover_killed_while_it_drains_is_asked_again(world: World) -> None:
    world.script.write_text("mount unmounted\nmover die\nmover serve\n")
    assert world.run() == 0
    assert len(world.lives("mover")) >= 2


@pytest.mark.parametrize(("script", "role"), [("mount unmounted\nmover linger\n", "mover"), ("mount ending\n", "mount")])
def test_a_process_that_ends_slowly_is_not_taken_for_dead(world: World, monkeypatch: pytest.MonkeyPatch, script: str, role: str) -> None:
    """Threads in system calls of a slow PFS keep a process that has drained, a busy machine one that was unmounted."""

    def reap(child: children.Child, patience_s: float) -> int | None:
        if (world.place / "leaving").exists() and patience_s >= supervisor.REAP_WAIT_S:
            (world.place / "leave").touch()
        return reap_child(child, patience_s)

    reap_child = children.Child.reap
    monkeypatch.setattr(children.Child, "reap", reap)
    monkeypatch.setattr(children.Child, "is_stuck", lambda child: (world.place / "leaving").exists())
    monkeypatch.setattr(Connection, "has_ended", lambda served: role == "mount")
    monkeypatch.setattr(supervisor, "STUCK_REAP_WAIT_S", 0.1)
    monkeypatch.setattr(supervisor, "TURN_MAX_S", 0.1)
    world.script.write_text(script)
    assert world.run() == 0
    assert len(world.lives(role)) == 1


Trials = list[tuple[Successor, list[str]]]


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    """The trials of successors, which all go well."""
    tried: Trials = []

    def succeed(successor: Successor, arguments: list[str], table_fd: int) -> str:
        tried.append((successor, arguments))
        return ""

    monkeypatch.setattr(handover, "try_successor", succeed)
    return tried


def test_a_successor_that_can_take_over_gets_the_mount(world: World, trials: Trials) -> None:
    """X2: the connection stays open, and no child lives on beside the successor."""
    world.script.write_text("mover upgrade\n")
    assert world.run() == 0
    assert world.ended.is_leaving and world.ended.successor == Successor("/python", ("/place",))
    assert trials == [(world.ended.successor, ["unit"])]
    os.fstat(world.fuse_fd)
    assert not any(procfs.is_running(int(life[0])) for role in ("mount", "mover") for life in world.lives(role))
    assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "a stop signal waits for the successor"


def test_a_successor_that_cannot_take_over_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """X2: the mover hears why, and everything goes on."""
    monkeypatch.setattr(handover, "try_successor", lambda *_: "it is broken")
    world.script.write_text("mover upgrade\nmount serve\nmount unmounted\n")

    def act() -> None:
        world.until((world.place / "refusal").exists)
        os.kill(int(world.lives("mount")[0][0]), signal.SIGKILL)

    assert world.run(act) == 0
    assert (world.place / "refusal").read_bytes() == b"upgrade it is broken"
    assert not world.ended.is_leaving and len(world.lives("mover")) == 1


@pytest.mark.parametrize(("answer", "refusal", "leaves"), [(True, "", True), (True, "it is broken", False), (False, "", False)])
def test_a_stop_signal_of_a_restart_leaves_the_mount(
    world: World, monkeypatch: pytest.MonkeyPatch, answer: bool, refusal: str, leaves: bool
) -> None:
    """X2: only if systemd says that it restarts the unit, and if the version that it would start can take over."""
    monkeypatch.setattr(Systemd, "unit", "ckptfs@unit.service")
    monkeypatch.setattr(Systemd, "is_restarting", lambda _: answer)
    monkeypatch.setattr(handover, "try_successor", lambda *_: refusal)
    monkeypatch.setattr(limits, "STOP_WAIT_S", 0.1)

    def act() -> None:
        world.until(lambda: all(world.ended._slots[role].ever_ready for role in ("mount", "mover")))
        os.kill(os.getpid(), signal.SIGTERM)
        if not leaves:
            world.until(lambda: world.ended.was_stopped)
            world.script.write_text("mount unmounted\n" * 3)
            os.kill(int(world.lives("mount")[0][0]), signal.SIGKILL)

    world.run(act)
    assert (world.ended.is_leaving, world.ended.was_stopped, world.ended.successor) == (leaves, not leaves, None)


def test_a_stop_signal_in_the_middle_of_an_upgrade_stops(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return ""

    monkeypatch.setattr(handover, "try_successor", stop)
    monkeypatch.setattr(limits, "STOP_WAIT_S", 0.1)
    world.script.write_text("mover upgrade\nmount serve\nmount unmounted\n")

    def act() -> None:
        world.until(lambda: world.ended.was_stopped)
        os.kill(int(world.lives("mount")[0][0]), signal.SIGKILL)

    assert world.run(act) == 0
    assert not world.ended.is_leaving


def test_what_systemd_kept_is_resumed(world: World) -> None:
    world.script.write_text("mount unmounted\n")
    assert world.run(resumed=True) == 0
    assert world.resumed(0)


def test_a_connection_can_be_written_down_and_read_back(world: World) -> None:
    assert connection.restore(world.fuse_fd, world.served.table_fd) == world.served
    with pytest.raises((ValueError, KeyError)):
        connection.restore(world.fuse_fd, request_table.create(b'{"no": 1}'))
    with pytest.raises(ValueError, match=r"has \d+ bytes"):
        connection.restore(world.fuse_fd, os.memfd_create("of-another-version"))


def test_what_children_need_is_loaded_without_threads() -> None:
    """A fork has one thread: what others do at its moment is not finished in it."""
    program = "import os, ckptfs_daemon.__main__ as main; main.load_roles(); print(len(os.listdir('/proc/self/task')))"
    result = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "1\n"


def test_what_fails_in_a_fork_fails_here() -> None:
    def fail() -> None:
        raise InvalidArgument("the name is taken", remedy="give another one")

    children.run_forked(lambda: None)
    with pytest.raises(InvalidArgument, match="the name is taken") as raised:
        children.run_forked(fail)
    assert raised.value.remedy == "give another one"
    with pytest.raises(ChildProcessError, match="was killed"):
        children.run_forked(lambda: os.kill(os.getpid(), signal.SIGKILL))


# --- the handover to a successor -------------------------------------------------------------------------------------


class Running:
    """A daemon that a test pretends to run: its configuration, its connection, its catalog."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = Config(name="unit", mountpoint=place / "mnt", state=place)
        self.served = Connection(-1, b"init", DataPath.BUFFERED, "a test", self.config.mountpoint, "0:9")
        self.table_fd = request_table.create(self.served.serialize())
        database.create(place / "catalog.db")
        (place / "processes.json").write_text(json.dumps({"supervisor": {"pid": os.getppid()}}))
        monkeypatch.setattr(shim_build, "ensure", lambda: None)
        entry = procfs.MountEntry(1, self.config.mountpoint, "0:9", procfs.CKPTFS_TYPE, "unit", "", "/")
        monkeypatch.setattr(procfs, "list_mount_entries", lambda: [entry])


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    made = Running(tmp_path, monkeypatch)
    yield made
    os.close(made.table_fd)


def test_the_same_version_can_take_over(running: Running) -> None:
    handover.require_takeover(running.config, running.table_fd)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mountpoint": Path("/other")}, "now names the mountpoint /other, and the mount is at .*/mnt"),
        # The mount has its flags from mount(2), and a daemon for the other kind would not start with its catalog.
        ({"mount_flags": MS_RDONLY}, "the mount is writable, and the configuration now says read-only"),
    ],
)
def test_a_mount_stays_where_and_what_it_is(running: Running, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        handover.require_takeover(replace(running.config, **changes), running.table_fd)


def test_another_state_directory_is_refused(running: Running) -> None:
    (running.config.state / "processes.json").write_text(json.dumps({"supervisor": {"pid": os.getpid()}}))
    with pytest.raises(InvalidArgument, match="is not that of the running daemon"):
        handover.require_takeover(running.config, running.table_fd)


def test_a_detached_mount_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be mounted anew, and its open files would fail."""
    monkeypatch.setattr(procfs, "list_mount_entries", list)
    with pytest.raises(InvalidArgument, match="is detached"):
        handover.require_takeover(running.config, running.table_fd)


def test_a_table_of_another_size_is_refused(running: Running) -> None:
    """The successor could not find the requests of its predecessor."""
    with os.fdopen(os.memfd_create("other"), "wb") as other, pytest.raises(ValueError, match="a table of requests has"):
        handover.require_takeover(running.config, other.fileno())


def test_a_catalog_that_is_too_new_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SCHEMA_VERSION", database.SCHEMA_VERSION - 1)
    with pytest.raises(
        CatalogTooNew, match=f"has version {database.SCHEMA_VERSION + 1}, this ckptfs knows up to {database.SCHEMA_VERSION}"
    ):
        handover.require_takeover(running.config, running.table_fd)


def test_another_cluster_is_refused(running: Running) -> None:
    with contextlib.closing(Database(running.config.state / "catalog.db", journalled=False)) as db:
        identity.set_cluster(db, "known")
    with pytest.raises(ConfigError, match="belong to the cluster known, and none is configured"):
        handover.require_takeover(running.config, running.table_fd)


def test_a_program_that_does_not_run_is_refused(running: Running, tmp_path: Path) -> None:
    """What it says last is the reason; the programs of today know no other arguments than these."""
    missing = handover.try_successor(Successor(str(tmp_path / "none"), ("/",)), ["unit"], running.table_fd)
    assert missing.startswith("the other version cannot be started: ")
    (tmp_path / "ckptfs_daemon.py").write_text("import sys; sys.exit('too old for ' + ' '.join(sys.argv[1:]))")
    refused = handover.try_successor(Successor(sys.executable, (str(tmp_path),)), ["unit"], running.table_fd)
    assert refused == f"the other version cannot take over: too old for unit --trial {running.table_fd}"


def test_a_program_that_does_not_answer_is_refused(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "TRIAL_WAIT_S", 0.2)
    (tmp_path / "ckptfs_daemon.py").write_text("import signal; signal.pause()")
    refused = handover.try_successor(Successor(sys.executable, (str(tmp_path),)), ["unit"], running.table_fd)
    assert refused == "the other version does not say within 0.2 s whether it can take over"


def test_an_execve_that_fails_leaves_everything_as_it_was(running: Running, tmp_path: Path) -> None:
    handed = Handed(running.table_fd, running.table_fd, running.table_fd)
    handover.execute(Successor(str(tmp_path / "none"), ("/",)), ["unit"], handed, {})
    assert not os.get_inheritable(running.table_fd)


def test_a_successor_takes_what_it_is_given(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, under the names of the environment, once."""
    given = {
        "version": "0.1",
        "pid": os.getpid(),
        "fuse": running.table_fd,
        "table": running.table_fd,
        "lock": running.table_fd,
        "later": 1,
    }
    monkeypatch.setenv(handover.HANDOVER, json.dumps(given))
    os.set_inheritable(running.table_fd, True)
    assert handover.take() == Handed(running.table_fd, running.table_fd, running.table_fd)
    assert not os.get_inheritable(running.table_fd)
    assert connection.restore(-1, running.table_fd) == replace(running.served, table_fd=running.table_fd)
    assert handover.take() is None


@pytest.mark.parametrize("given", ["", "[]", '{"pid": 1}', "PID only", '{"pid": PID, "fuse": 99999, "table": 1, "lock": "x"}'])
def test_what_is_not_for_this_process_is_not_taken(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handover.HANDOVER, given.replace("PID", str(os.getpid())))
    assert handover.take() is None


def test_the_own_installation_is_where_this_package_is() -> None:
    own = handover.get_own_successor()
    assert own.python == sys.executable and all(Path(place).is_dir() for place in own.places) and __version__
