"""The end of a mount: SIGTERM drains while the mount serves, and the directory underneath refuses writes afterwards. P3, P5, P8."""

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from daemon_under_test import DaemonUnderTest, eventually, shorten
from loop_disk import read_only

from ckptfs import mount_record, mountpoint_guard

MakeDaemon = Callable[..., DaemonUnderTest]


@pytest.fixture
def make_refusable(make_daemon: MakeDaemon) -> MakeDaemon:
    """A daemon whose PFS is a tmpfs of its own, which `read_only` lets refuse."""

    def make(*arguments: str, **options: Any) -> DaemonUnderTest:
        daemon = make_daemon(*arguments, start=False, **options)
        daemon.env = shorten(RETRY_LAST_S=0.5, DRAIN_SILENCE_S=0.5) | daemon.env
        subprocess.run(["mount", "-t", "tmpfs", "none", str(daemon.pfs)], check=True)
        daemon.start()
        (daemon.path / "first").write_bytes(b"x")
        daemon.settle()
        return daemon

    return make


def save(daemon: DaemonUnderTest, name: str, data: bytes) -> None:
    """Save a file, and wait until the daemon has heard of its close: the kernel tells of it a moment later."""
    (daemon.path / name).write_bytes(data)
    daemon.command("wait", daemon.path / name, "--level", "local")


def terminate(daemon: DaemonUnderTest) -> None:
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGTERM)


def wait_for_end(daemon: DaemonUnderTest) -> int:
    assert daemon.process is not None
    return daemon.process.wait(120)


def test_sigterm_drains_with_the_mount_attached(data_path: str, make_refusable: MakeDaemon) -> None:
    """P3: a checkpoint that is saved while the daemon drains is saved in ckptfs, and the directory below accepts none afterwards."""
    daemon = make_refusable(data_path)
    daemon.expect_warning("pfs|write.back|[Rr]ead-only")
    with read_only(daemon.pfs):
        save(daemon, "before", b"x" * 100_000)
        terminate(daemon)
        eventually(lambda: "draining before the unmount" in daemon.log, what="the drain begins")
        assert os.stat(daemon.path).st_dev == daemon.device, "the mount is attached"
        (daemon.path / "meanwhile").write_bytes(b"y" * 100_000)
        assert (daemon.path / "before").read_bytes() == b"x" * 100_000
        eventually(lambda: re.search(r"drain: blocked: .*Read-only", daemon.log), what="the obstacle is named")
        assert os.stat(daemon.path).st_dev == daemon.device
    assert wait_for_end(daemon) == 0
    assert not os.path.ismount(daemon.path) and not os.path.ismount(daemon.state / "ram"), "nothing lies only in RAM"
    assert (daemon.pfs / "before").read_bytes() == b"x" * 100_000 and (daemon.pfs / "meanwhile").read_bytes() == b"y" * 100_000
    with pytest.raises(OSError):
        (daemon.path / "too late").write_bytes(b"lost")
    daemon.start()
    assert sorted(os.listdir(daemon.path)) == ["before", "first", "meanwhile"]


def test_a_deleted_file_that_the_kernel_knew_to_the_end_is_not_left(make_daemon: MakeDaemon) -> None:
    """P3: at an unmount the kernel drops the messages that nobody has read; a file without a name goes nevertheless."""
    daemon = make_daemon(nvme=None, pfs=None)
    save(daemon, "deleted", b"x" * 5000)
    fd, mount = os.open(daemon.path / "deleted", os.O_PATH), daemon.pid("mount")
    os.unlink(daemon.path / "deleted")
    os.kill(mount, signal.SIGSTOP)
    os.close(fd)
    subprocess.run(["umount", "-i", "-l", str(daemon.path)], check=True)
    os.kill(mount, signal.SIGCONT)
    assert wait_for_end(daemon) == 0
    assert not os.path.ismount(daemon.state / "ram") and "only in RAM" not in daemon.log


def test_what_is_not_drained_is_named_with_its_place_and_remedy(make_refusable: MakeDaemon) -> None:
    """P3: the log says what is left, where it lies, what a reboot does, and the command that goes on."""
    daemon = make_refusable(drain_deadline="1s", nvme=None)
    daemon.expect_warning("pfs|write.back|[Rr]ead-only|drained until the deadline")
    with read_only(daemon.pfs):
        save(daemon, "only", b"x" * 5000)
        terminate(daemon)
        assert wait_for_end(daemon) == 0
        assert "drain: 1 other file (4.9 KiB) not at the level pfs" in daemon.log, "G1"
        said = next(line for line in daemon.log.splitlines() if "to go on:" in line)
    assert "1 file (4.9 KiB)" in said and f"not on the PFS {daemon.pfs}" in said, said
    assert f"only in RAM, at {daemon.state}/ram: a reboot loses it" in said
    assert "to go on: mount -t ckptfs -o " in said and f"{daemon.name} {daemon.path}" in said
    assert os.path.ismount(daemon.state / "ram")
    with pytest.raises(OSError):
        (daemon.path / "too late").write_bytes(b"lost")
    daemon.start()
    daemon.settle()
    assert (daemon.pfs / "only").read_bytes() == b"x" * 5000


def test_systemd_is_asked_for_time_while_it_drains(make_refusable: MakeDaemon, tmp_path: Path) -> None:
    """`systemctl stop` must not kill a drain that moves: TimeoutStopSec is prolonged, and its status says what is left."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        daemon = make_refusable(env={"NOTIFY_SOCKET": str(tmp_path / "notify")})
        daemon.expect_warning("pfs|write.back|[Rr]ead-only")
        heard = []
        with read_only(daemon.pfs):
            save(daemon, "kept", b"x" * 5000)
            terminate(daemon)
            while not any(b"blocked: " in message for message in heard):
                heard.append(manager.recv(4096))
            assert os.stat(daemon.path).st_dev == daemon.device
        assert any(message.startswith(b"STOPPING=1\nSTATUS=writing back before the unmount") for message in heard)
        assert any(b"EXTEND_TIMEOUT_USEC=" in message for message in heard)
        assert wait_for_end(daemon) == 0


def kill_mover(daemon: DaemonUnderTest) -> None:
    daemon.kill("mover")
    (daemon.path / "kept").write_bytes(b"y" * 5000)


def unmount_at_once(daemon: DaemonUnderTest) -> None:
    """As systemd does at shutdown: it stops the service and unmounts the mountpoint."""
    subprocess.run(["umount", "-i", str(daemon.path)], check=True)
    eventually(lambda: "writing back the rest" in daemon.log, what="the rest is drained")


def terminate_again(daemon: DaemonUnderTest) -> None:
    """The drain is not waited for."""
    terminate(daemon)
    assert wait_for_end(daemon) == 0
    assert "the drain was cut short" in daemon.log


@pytest.mark.parametrize("happens", [kill_mover, unmount_at_once, terminate_again])
def test_what_happens_in_the_middle_of_the_drain(make_refusable: MakeDaemon, happens: Callable[[DaemonUnderTest], None]) -> None:
    """P8: what was closed comes to the PFS, after a cut with the next start."""
    daemon = make_refusable()
    daemon.expect_warning("pfs|write.back|[Rr]ead-only" + ("|cut short|drained until the deadline" if happens is terminate_again else ""))
    with read_only(daemon.pfs):
        save(daemon, "kept", b"x" * 5000)
        terminate(daemon)
        eventually(lambda: "draining before the unmount" in daemon.log, what="the drain begins")
        happens(daemon)
    if happens is terminate_again:
        daemon.start()
        daemon.settle()
    else:
        assert wait_for_end(daemon) == 0
    assert (daemon.pfs / "kept").read_bytes() == (b"y" if happens is kill_mover else b"x") * 5000


def test_an_unmount_on_purpose_gives_the_directory_back(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    (daemon.path / "file").write_bytes(b"x")
    assert daemon.unmount() == 0
    (daemon.path / "below").write_bytes(b"the administrator's")
    record = mount_record.load(daemon.state)
    assert record is not None and record.guard is None and record.leftovers is not None and record.leftovers.is_nothing
    (daemon.path / "below").unlink()


def test_a_directory_stays_closed_after_a_crash_until_the_next_clean_unmount(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon()
    (daemon.path / "file").write_bytes(b"x")
    daemon.crash()
    subprocess.run(["umount", "-l", str(daemon.path)], check=True)
    with pytest.raises(OSError):
        (daemon.path / "below").write_bytes(b"lost")
    daemon.start()
    assert daemon.unmount() == 0
    (daemon.path / "below").write_bytes(b"the administrator's")


def test_a_directory_that_was_immutable_before_stays_so(make_daemon: MakeDaemon) -> None:
    """Administrators do that, for the same reason."""
    daemon = make_daemon(start=False)
    if subprocess.run(["chattr", "+i", str(daemon.path)], check=False, capture_output=True).returncode:
        pytest.skip("this filesystem has no immutable attribute")
    try:
        daemon.start()
        (daemon.path / "file").write_bytes(b"x")
        assert daemon.unmount() == 0
        with pytest.raises(OSError):
            (daemon.path / "below").write_bytes(b"x")
    finally:
        subprocess.run(["chattr", "-i", str(daemon.path)], check=True)


def test_where_root_cannot_set_the_attribute_the_directory_is_covered(make_daemon: MakeDaemon) -> None:
    """A directory of a filesystem without attributes, such as proc's relative ramfs."""
    daemon = make_daemon(start=False)
    subprocess.run(["mount", "-t", "ramfs", "none", str(daemon.root / "mnt")], check=True)
    daemon.path = daemon.root / "mnt" / "point"
    daemon.path.mkdir()
    assert mountpoint_guard.choose(daemon.path).kind in (mountpoint_guard.GuardKind.COVER, mountpoint_guard.GuardKind.IMMUTABLE)
    daemon.start()
    (daemon.path / "file").write_bytes(b"x")
    terminate(daemon)
    assert wait_for_end(daemon) == 0
    with pytest.raises(OSError):
        (daemon.path / "too late").write_bytes(b"lost")
    daemon.start()
    assert (daemon.path / "file").read_bytes() == b"x"
    assert daemon.unmount() == 0
    (daemon.path / "below").write_bytes(b"x")
    assert (daemon.pfs / "file").read_bytes() == b"x"
