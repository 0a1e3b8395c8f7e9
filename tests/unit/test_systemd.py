"""sd_notify and the descriptor store, against a socket of our own."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptfs_daemon.fuse import request_table
from ckptfs_daemon.supervisor import systemd


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What systemd would listen on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_states_are_sent(manager: socket.socket) -> None:
    systemd.Systemd().notify("READY=1", "STATUS=serving")
    assert manager.recv(4096) == b"READY=1\nSTATUS=serving"
    assert "NOTIFY_SOCKET" not in os.environ, "children must not speak for us"


def test_an_abstract_socket_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"ckptfs-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0{name}")
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        systemd.Systemd().notify("READY=1")
        assert listening.recv(64) == b"READY=1"


@pytest.mark.parametrize("address", ["", "/nobody/listens/here"])
def test_no_manager_does_no_harm(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    systemd.Systemd().notify("READY=1")


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ("7 ckptfs@a\\x2db.service restart running", True), ("7 ckptfs@a\\x2db.service stop running", False), ("", False),
        ("7 ckptfs@other.service restart running", False),
    ],
)  # fmt: skip
def test_a_restart_is_told_from_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: str, expected: bool) -> None:
    """X2: by the job of the unit."""
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\n[ \"$1\" = list-jobs ] && cat << 'END'\n{jobs}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("MANAGERPID", raising=False)
    monkeypatch.setattr(systemd.Systemd, "unit", "ckptfs@a\\x2db.service")
    assert systemd.Systemd().is_restarting() is expected
    program.write_text("#!/bin/sh\nexit 1\n")
    assert not systemd.Systemd().is_restarting(), "no answer: a stop"


def _fill(manager: socket.socket) -> int:
    """Send notes until its socket has no room; their number."""
    sent = 0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel, contextlib.suppress(BlockingIOError):
        channel.connect(manager.getsockname())
        while True:
            channel.send(b"of another unit")
            sent += 1
    return sent


def test_a_manager_that_does_not_listen_is_not_waited_for(manager: socket.socket) -> None:
    """P8: systemd may hang. Once it listens again it hears the last note of each kind, in order."""
    waiting = _fill(manager)
    speaker = systemd.Systemd()
    speaker.store_descriptors(0, 0)
    for text in ("first", "last"):
        speaker.notify("EXTEND_TIMEOUT_USEC=1")
        speaker.notify("STOPPING=1", f"STATUS={text}")
    speaker.remove_descriptors()
    for _ in range(waiting):
        assert manager.recv(4096) == b"of another unit"
    speaker.flush()
    heard = [manager.recv(4096).decode().replace("\n", " ") for _ in range(4)]
    removed = [f"FDSTOREREMOVE=1 FDNAME={name}" for name in (systemd.FUSE_NAME, systemd.SAVED_NAME)]
    assert heard == ["EXTEND_TIMEOUT_USEC=1", "STOPPING=1 STATUS=last", *removed]


@pytest.mark.parametrize(
    ("period", "pid", "expected"), [("10000000", None, 5.0), ("10000000", "1", None), ("", None, None), ("x", None, None)]
)
def test_the_watchdog_is_fed_twice_a_period(monkeypatch: pytest.MonkeyPatch, period: str, pid: str | None, expected: float | None) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", period)
    monkeypatch.setenv("WATCHDOG_PID", pid or str(os.getpid()))
    assert systemd.Systemd().watchdog_interval_s == expected


def test_what_is_stored_comes_back(manager: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Store two descriptors, hand them to a fresh start as systemd does, and find the same file and the same bytes."""
    stand_in = os.open(tmp_path / "fuse", os.O_RDWR | os.O_CREAT)
    table = request_table.create(b'{"saved": 1}')
    systemd.Systemd().store_descriptors(stand_in, table)
    kept: dict[str, int] = {}
    for _ in range(2):
        body, descriptors, _flags, _address = socket.recv_fds(manager, 4096, 1)
        lines = dict(line.split("=", 1) for line in body.decode().splitlines())
        assert lines["FDSTORE"] == "1" and lines["FDPOLL"] == "0"
        kept[lines["FDNAME"]] = descriptors[0]
    assert set(kept) == {systemd.FUSE_NAME, systemd.SAVED_NAME}
    first = max(kept.values()) + 20
    names = [systemd.SAVED_NAME, "of-another-unit", systemd.FUSE_NAME]
    for fd, name in enumerate(names, first):
        os.dup2(kept.get(name, stand_in), fd)
    monkeypatch.setattr(systemd, "FIRST_FD", first)
    monkeypatch.setenv("LISTEN_FDS", "3")
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDNAMES", ":".join(names))
    handed = systemd.take_stored_descriptors()
    assert handed is not None
    fuse_fd, table_fd = handed
    assert request_table.read_saved(table_fd) == b'{"saved": 1}'
    assert os.fstat(fuse_fd).st_ino == os.fstat(stand_in).st_ino and not os.get_inheritable(fuse_fd)
    assert systemd.take_stored_descriptors() is None, "taken once"
    for fd in (stand_in, table, fuse_fd, table_fd, *kept.values()):
        os.close(fd)


def test_descriptors_for_another_process_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISTEN_FDS", "2")
    monkeypatch.setenv("LISTEN_PID", "1")
    monkeypatch.setenv("LISTEN_FDNAMES", f"{systemd.FUSE_NAME}:{systemd.SAVED_NAME}")
    assert systemd.take_stored_descriptors() is None
