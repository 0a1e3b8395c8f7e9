"""P3: a writer that notes what it has fsynced; everything dies; what it noted is there.

The note itself lies outside of the mount and is written after fsync has returned, so it never says too much.
"""

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, eventually
from programs import PROGRAM_S

pytestmark = pytest.mark.crash
NOTES = 12

WRITER = """
import hashlib, os, random, sys
directory, notes = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
dice = random.Random(5)
log = os.open(directory + "/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
written = b""
os.fsync(os.open(directory, os.O_RDONLY))
for step in range(100000):
    line = b"step %d\\n" % step
    written += line
    os.write(log, line)
    os.fsync(log)
    data = dice.randbytes(dice.randrange(1, 300_000))
    fd = os.open(directory + "/step.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, data)
    os.fsync(fd)
    os.close(fd)
    name = "step%d" % (step % 7)
    os.rename(directory + "/step.tmp", directory + "/" + name)
    directory_fd = os.open(directory, os.O_RDONLY)
    os.fsync(directory_fd)
    os.close(directory_fd)
    os.write(notes, b"%d %s %s %d\\n" % (step, name.encode(), hashlib.sha256(data).hexdigest().encode(), len(written)))
"""


def killed_after_notes(daemon: DaemonUnderTest, notes: Path) -> list[list[str]]:
    """Write until there are some notes, then kill every process of the daemon, and the writer; the notes."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, daemon.path, notes], stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: notes.exists() and len(notes.read_text().splitlines()) >= NOTES, what="some notes")
        daemon.crash()
    finally:
        writer.kill()
        writer.wait(PROGRAM_S)
    return [line.split() for line in notes.read_text().splitlines()]


def verified(root: Path, notes: list[list[str]]) -> None:
    """Each name has the bytes of its last note, or newer ones that the writer had no time to note; the log has at least what was synced."""
    last = {name: (int(step), digest) for step, name, digest, _ in notes}
    newest = int(notes[-1][0])
    log = (root / "log").read_bytes()
    assert len(log) >= int(notes[-1][3])
    assert log == b"".join(b"step %d\n" % step for step in range(log.count(b"\n")))
    for name, (step, digest) in last.items():
        found = hashlib.sha256((root / name).read_bytes()).hexdigest()
        overwritten = step + 7 == newest + 1
        assert found == digest or overwritten, f"{name} of step {step} is not what was synced"


def test_what_was_synced_survives_the_death_of_all_processes(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path) -> None:
    """fsync=local: RAM is still there, every process is not."""
    daemon = make_daemon("auto")
    notes = killed_after_notes(daemon, tmp_path / "notes")
    daemon.expect_warning("stale|took over|taken over|fall|supervisor")
    daemon.start()
    verified(daemon.path, notes)
    daemon.settle()
    verified(daemon.pfs, notes)


def test_what_was_synced_to_the_pfs_survives_the_loss_of_ram(make_daemon: Callable[..., DaemonUnderTest], tmp_path: Path) -> None:
    """fsync=pfs: what fsync returned for is on the PFS, and a new mount shows it when RAM and NVMe are lost."""
    daemon = make_daemon("auto", fsync="pfs", nvme=None, synced_interval="100ms")
    notes = killed_after_notes(daemon, tmp_path / "notes")
    daemon.expect_warning(".")
    subprocess.run(["umount", "-l", daemon.path], check=False, capture_output=True)
    daemon.wipe_ram()
    daemon.start()
    verified(daemon.path, notes)
