"""P6, P8: the process that runs into a labelled disk operation dies before it. CKPTFS_KILLS=100: or after it, or is refused by the disk.

The real daemon under a short load, which reaches the labels in REACHED. All others are struck in tests/flow, where each step runs by
itself and can be led anywhere; tests/tidy sees to it that none is forgotten.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, deadline, eventually
from programs import differences

pytestmark = pytest.mark.crash


REACHED = (
    "pfs:chmod", "pfs:utime", "pfs:walk", "pfs:xattr", "reclaim:forget", "recover:adopt", "recover:missing", "seal:commit", "seal:read",
    "tier:create", "tier:open", "tier:remove", "write_back:attributes", "write_back:begun", "write_back:create", "write_back:directory",
    "write_back:finish", "write_back:link", "write_back:look", "write_back:make", "write_back:move", "write_back:put",
    "write_back:read", "write_back:source", "write_back:syncfs", "write_back:truncate", "write_back:write", "write_back:written_down",
)  # fmt: skip
LONG = int(os.environ.get("CKPTFS_KILLS", "10")) >= 100
ACTIONS = ("kill", "kill-after", "EIO") if LONG else ("kill",)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DaemonUnderTest, Path]]:
    """One daemon for all labels; what is written to its file `faults` happens at the next call with that label."""
    if os.geteuid() != 0:
        pytest.skip("NO MOUNT TESTS HERE: a mount of our own needs root")
    faults = tmp_path_factory.mktemp("faults") / "faults"
    faults.write_text("")
    daemon = DaemonUnderTest("auto", env={"CKPTFS_FAULT": f"@{faults}"}, ram="256M")
    daemon.start()
    try:
        yield daemon, faults
    finally:
        daemon.close()


def work(daemon: DaemonUnderTest, name: str) -> None:
    """Make the daemon do all it can: create, replace, rename, link, delete, import, on both sides."""
    root = daemon.path / name
    # The stranger is first: what comes into a directory that write-back made is found at the next refresh only.
    (daemon.pfs / name).mkdir()
    (daemon.pfs / name / "stranger").write_bytes(b"was there")
    root.mkdir(exist_ok=True)
    for number in range(6):
        (root / f"file{number}").write_bytes(os.urandom(20_000 * number))
    for number in range(16):
        (root / f"burst{number}").write_bytes(b"in one batch with others")
    os.rename(root / "file1", root / "renamed")
    os.link(root / "file2", root / "linked")
    os.symlink("file2", root / "symbolic")
    (root / "file3").unlink()
    (root / "file4").write_bytes(os.urandom(30_000))
    os.setxattr(root / "file5", "user.note", b"x")
    os.truncate(root / "file5", 50_001)
    with open(root / "file2", "r+b") as file:
        file.seek(100)
        file.write(b"changed in place")
        os.fsync(file.fileno())


class Fault:
    """Writes the fault into the daemon's file, and takes it out as soon as it struck: a process died, or the log says it was injected."""

    def __init__(self, daemon: DaemonUnderTest, faults: Path, label: str, action: str) -> None:
        self.daemon, self.faults, self.label, self.action = daemon, faults, label, action
        self.struck = False
        self._over, self._ours = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> "Fault":
        self._before, self._length = self._restarts(), len(self.daemon.log)
        self.faults.write_text(f"{self.label}={self.action}@*")
        self._watcher.start()
        return self

    def _restarts(self) -> int:
        """How many deaths there were, but for those that the test itself brings about."""
        ours = 1 if self.label.startswith("recover:") and self._ours.is_set() else 0
        processes = self.daemon.processes()
        return sum(int(processes[role]["restarts"]) for role in ("mount", "mover")) - ours

    def kill_mover(self, unneeded: Path) -> None:
        """A death of the test's own, so that what runs at a start is run. The mover has not seen that `unneeded` was removed."""
        self._ours.set()
        os.kill(self.daemon.processes()["mover"]["pid"], signal.SIGSTOP)
        unneeded.unlink()
        self.daemon.kill("mover", wait=False)

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            if self._restarts() > self._before or f"injected at {self.label}" in self.daemon.log[self._length :]:
                self.struck = True
                self.faults.write_text("")
                return

    def finished(self) -> bool:
        """Whether it struck, or there is nothing left to do in which it could."""
        return self.struck or not (self.daemon.unsettled() or self._has_doomed() or self._ours.is_set())

    def _has_doomed(self) -> bool:
        """Whether contents still wait for the step that removes them."""
        return bool(self.daemon.catalog("SELECT 1 FROM content WHERE state = 3 LIMIT 1"))

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()
        self.faults.write_text("")


@pytest.mark.parametrize("label", REACHED)
@pytest.mark.parametrize("action", ACTIONS)
def test_it_goes_on_after(faulty: tuple[DaemonUnderTest, Path], label: str, action: str) -> None:
    """The tree on the PFS is the mount's in the end, wherever it was struck."""
    if action == "EIO" and label.startswith("tier:"):
        pytest.skip("this one runs while an application waits, and the application is told")
    daemon, faults = faulty
    name = f"{label.replace(':', '-')}-{action}"
    with deadline(daemon, 200), Fault(daemon, faults, label, action) as fault:
        work(daemon, name)
        if label.startswith("recover:"):
            fault.kill_mover(daemon.path / name / "burst0")
        eventually(fault.finished, what=f"{label} is reached, or all is settled")
    daemon.settle()
    assert differences(daemon.path / name, daemon.pfs / name) == []
    assert fault.struck, "this load did not reach it"
