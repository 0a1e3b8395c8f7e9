"""P8 beyond the mount and the mover: the supervisor itself is killed, a stale mount is taken over, and a second daemon is refused."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, NotStarted, ckptfs, environment, eventually

from ckptfs import procfs

pytestmark = [pytest.mark.crash, pytest.mark.fuse, pytest.mark.root]


class ServiceManager:
    """What systemd is to the daemon: listens to its notes, keeps the descriptors it stores, and starts it again with them."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.notes: list[str] = []
        self.kept: dict[str, int] = {}
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()

    def _listen(self) -> None:
        while True:
            body, descriptors, _flags, _address = socket.recv_fds(self.socket, 4096, 1)
            if not body:
                return
            lines = dict(line.split("=", 1) for line in body.decode().splitlines())
            for descriptor in descriptors:
                self.kept[lines["FDNAME"]] = descriptor
            if "FDSTOREREMOVE" in lines:
                os.close(self.kept.pop(lines["FDNAME"]))
            self.notes.append(body.decode())

    def hear(self, wanted: str) -> None:
        """Wait for a note with the line `wanted`."""
        eventually(lambda: wanted in "\n".join(self.notes).splitlines(), what=f"the daemon tells systemd {wanted}")

    def start_again(self, daemon: DaemonUnderTest) -> "subprocess.Popen[bytes]":
        """The same command, with what was kept as descriptors 3, 4, ..."""
        options = ",".join(f"{key}={value}" for key, value in daemon.options.items() if value is not None)
        launcher = (
            "import os, sys; fds = [int(fd) for fd in sys.argv[1].split(',')]; high = [os.dup2(fd, 100 + n) for n, fd in enumerate(fds)];"
            "[os.dup2(fd, 3 + n) for n, fd in enumerate(high)]; os.environ['LISTEN_PID'] = str(os.getpid());"
            "os.execv(sys.executable, [sys.executable, '-m', 'ckptfs_daemon', *sys.argv[2:]])"
        )
        kept = environment(NOTIFY_SOCKET=str(self.path), LISTEN_FDS=str(len(self.kept)), LISTEN_FDNAMES=":".join(self.kept))
        with open(daemon.log_file, "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", launcher, ",".join(map(str, self.kept.values())), daemon.name, str(daemon.path), "-o", options],
                stdout=log, stderr=log, env=kept, pass_fds=list(self.kept.values()), start_new_session=True,
            )  # fmt: skip

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(b"", str(self.path))
        self._listening.join()
        self.socket.close()
        for fd in self.kept.values():
            os.close(fd)


APPLICATION = """
import os, sys
from pathlib import Path
mount, outside = Path(sys.argv[1]), Path(sys.argv[2])
with open(mount / "open", "w+b", buffering=0) as file, open(outside / "turns", "wb", buffering=0) as turns:
    file.write(b"before ")
    while not (outside / "enough").exists():
        (mount / f"turn{turns.tell()}").mkdir()
        (mount / f"turn{turns.tell()}").rmdir()
        turns.write(b".")
    file.write(b"after")
    file.seek(0)
    print(file.read().decode())
"""


class Program:
    """An application with an open file, busy in the mount. A process of its own: whoever has the file open waits at every fork."""

    def __init__(self, mount: Path, outside: Path) -> None:
        self.outside = outside
        (outside / "turns").touch()
        self.process = subprocess.Popen(
            [sys.executable, "-c", APPLICATION, mount, outside], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def goes_on(self) -> None:
        """It makes twenty more turns."""
        so_far = (self.outside / "turns").stat().st_size
        eventually(lambda: self.process.poll() is not None or (self.outside / "turns").stat().st_size > so_far + 20)
        assert self.process.poll() is None, self.process.communicate()[0]

    def end(self) -> str:
        """What it found in its file, or how it failed."""
        (self.outside / "enough").touch()
        return self.process.communicate(timeout=120)[0].strip()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    made = ServiceManager(tmp_path)
    yield made
    made.close()


def _kill_supervisor(daemon: DaemonUnderTest) -> None:
    """kill -9, and wait until the children have followed by themselves."""
    assert daemon.process is not None
    daemon.expect_warning("the supervisor has ended")
    children = [daemon.pid(role) for role in ("mount", "mover") if daemon.processes()[role]["pid"]]
    daemon.process.kill()
    daemon.process.wait(60)
    eventually(lambda: not any(procfs.is_running(pid) for pid in children), what="the children end when their supervisor is gone")


def test_a_supervisor_that_systemd_starts_again_takes_up_the_same_mount(
    data_path: str, make_daemon: Callable[..., DaemonUnderTest], manager: ServiceManager, tmp_path: Path
) -> None:
    """An open file, and a program in the middle of its work, go on as if nothing had been."""
    daemon = make_daemon(data_path, env={"NOTIFY_SOCKET": str(manager.path)})
    manager.hear("READY=1")
    assert set(manager.kept) == {"ckptfs-fuse", "ckptfs-saved"}
    device = os.stat(daemon.path).st_dev
    program = Program(daemon.path, tmp_path)
    program.goes_on()
    _kill_supervisor(daemon)
    daemon.process = manager.start_again(daemon)
    program.goes_on()
    assert program.end() == "before after"
    assert os.stat(daemon.path).st_dev == device, "the same mount, not another one on top"
    manager.notes.clear()
    assert daemon.unmount() == 0
    manager.hear("FDNAME=ckptfs-saved")
    assert "STOPPING=1" in "\n".join(manager.notes) and manager.kept == {}
    assert (daemon.pfs / "open").read_bytes() == b"before after"


@pytest.mark.parametrize("label", ["handover:execute", "handover:take"])
def test_a_supervisor_that_is_killed_in_a_handover_is_started_again(
    label: str, make_daemon: Callable[..., DaemonUnderTest], manager: ServiceManager, tmp_path: Path
) -> None:
    """X2, P8: after its children have ended, or as soon as it is another version."""
    daemon = make_daemon("auto", env={"NOTIFY_SOCKET": str(manager.path), "CKPTFS_FAULT": f"{label}=kill"})
    manager.hear("READY=1")
    program = Program(daemon.path, tmp_path)
    program.goes_on()
    command = [sys.executable, "-P", "-m", "ckptfs_client", "upgrade", daemon.name]
    upgrade = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert daemon.process is not None and daemon.process.wait(120) == -signal.SIGKILL
    daemon.process = manager.start_again(daemon)
    program.goes_on()
    assert program.end() == "before after"
    assert upgrade.communicate(timeout=120)[0].decode().startswith(f"{daemon.name}: version "), "the command waits for a daemon that serves"
    assert upgrade.returncode == 0 and daemon.unmount() == 0


def test_what_a_killed_supervisor_left_is_taken_over(fresh_mount: DaemonUnderTest) -> None:
    """Without systemd the mount dies with the supervisor; the next start finds a dead mountpoint and every closed file."""
    daemon = fresh_mount
    (daemon.path / "closed").write_bytes(b"kept" * 1000)
    _kill_supervisor(daemon)
    with pytest.raises(OSError) as refused:
        os.stat(daemon.path / "closed")
    assert refused.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    for command in ("latest", "list", "commit", "refresh", "log-level"):
        asked = ckptfs(command, daemon.path, check=False)
        assert asked.returncode == 3 and f"has ended; mount {daemon.name} again with the same options" in asked.stderr, (command, asked)
    daemon.start()
    assert (daemon.path / "closed").read_bytes() == b"kept" * 1000
    assert [entry.mountpoint for entry in procfs.list_mount_entries()].count(daemon.path) == 1


@pytest.mark.parametrize("data_path", ["auto"])
def test_an_unmount_of_what_a_killed_supervisor_left_says_how_to_go_on(fresh_mount: DaemonUnderTest) -> None:
    """P11: what was not written back yet is still there."""
    (fresh_mount.path / "closed").write_bytes(b"kept" * 1000)
    _kill_supervisor(fresh_mount)
    helper = "import sys; from ckptfs_client.mount_helper import umount_main; sys.exit(umount_main())"
    command = [sys.executable, "-P", "-c", helper, fresh_mount.path]
    unmounted = subprocess.run(command, env=environment(), check=False, capture_output=True, text=True, timeout=60)
    assert unmounted.returncode == 0 and "so nobody counted what it holds); to go on: mount -t ckptfs" in unmounted.stderr
    fresh_mount.start()
    assert (fresh_mount.path / "closed").read_bytes() == b"kept" * 1000


def test_a_dead_mount_is_taken_over_on_an_old_kernel(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """X10: without the system calls that came after Linux 4.20."""
    daemon = make_daemon(start=False).on_old_kernel().start()
    (daemon.path / "closed").write_bytes(b"kept" * 1000)
    _kill_supervisor(daemon)
    daemon.start()
    assert (daemon.path / "closed").read_bytes() == b"kept" * 1000


@pytest.mark.parametrize("data_path", ["auto"])
def test_a_mount_made_by_a_living_daemon_is_not_taken_over(
    fresh_mount: DaemonUnderTest, make_daemon: Callable[..., DaemonUnderTest]
) -> None:
    other = make_daemon("auto", start=False)
    other.path = fresh_mount.path
    other.state.rmdir()
    with pytest.raises(NotStarted, match="already has a ckptfs mounted"):
        other.start()
    assert os.stat(fresh_mount.path).st_dev == fresh_mount.device
    assert not other.state.exists(), "`ckptfs mounts` lists no name that never had a mount"


def test_sigterm_on_a_mount_in_use_lets_open_files_be_finished(fresh_mount: DaemonUnderTest) -> None:
    assert fresh_mount.process is not None
    fresh_mount.expect_warning("is in use")
    with open(fresh_mount.path / "open", "wb", buffering=0) as file:
        file.write(b"one ")
        fresh_mount.process.send_signal(signal.SIGTERM)
        eventually(lambda: not os.path.ismount(fresh_mount.path))
        file.write(b"two")
    assert fresh_mount.process.wait(120) == 0
    assert (fresh_mount.pfs / "open").read_bytes() == b"one two"


def test_the_processes_of_an_idle_node_are_small_and_idle(make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """Together under 200 MB."""
    daemon = make_daemon("auto")
    assert sum(_resident(daemon.pid(role)) for role in ("supervisor", "mount", "mover")) < 200_000


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
    return 0


def test_a_second_sigterm_does_not_wait_for_open_files(data_path: str, make_daemon: Callable[..., DaemonUnderTest]) -> None:
    """Whoever keeps a file open gets an error; the daemon ends, and what was fsynced before is safe.

    On the passthrough path that process can still write to the content, which is therefore not sealed before the next start.
    """
    daemon = make_daemon(data_path, drain_deadline="1s")
    daemon.expect_warning("is in use|are still open|drained until the deadline: the PFS lacks . changes, 1 files")
    file = os.open(daemon.path / "open", os.O_CREAT | os.O_RDWR)
    os.write(file, b"safe")
    os.fsync(file)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)
    eventually(lambda: not os.path.ismount(daemon.path))
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(120) == 0
    with pytest.raises(OSError) as refused:
        os.fsync(file)
    assert refused.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    with contextlib.suppress(OSError):
        os.close(file)
    daemon.start()
    daemon.settle()
    assert (daemon.pfs / "open").read_bytes() == (daemon.path / "open").read_bytes() == b"safe"
