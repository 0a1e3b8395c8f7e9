"""P1, P7: of a name in a directory that the PFS does not show now, nobody is told that it does not exist, however he asks.

A job that is told so begins at zero. Creating goes on where it is certain that the name is to be created.
"""

import errno
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import silent_pfs
from daemon_under_test import DaemonUnderTest, shorten
from programs import need, run
from silent_pfs import SilentPfs

pytestmark = pytest.mark.fuse
Make = Callable[..., DaemonUnderTest]
OPENERS = Path(silent_pfs.__file__).with_name("openers.c")
READING = ("open", "stat", "access", "openat2", "uring-open", "uring-stat")
CREATING = ("create", "mkdir", "openat2-create")
CHILD_NAMESPACE = ("unshare", "--pid", "--fork")
UNKNOWN = {"EIO", "ETIMEDOUT"}


@pytest.fixture(scope="session")
def openers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that opens by every kind of system call."""
    need("gcc", "unshare", "setpriv")
    program = tmp_path_factory.mktemp("openers") / "openers"
    run("gcc", "-O1", "-o", program, OPENERS)
    return program


def call(openers: Path, way: str, path: Path, wrapper: tuple[str, ...] = ()) -> str:
    """What a program is told: "ok", or the name of the errno."""
    code = int(subprocess.run([*wrapper, openers, way, path], capture_output=True, text=True, timeout=150, check=True).stdout)
    return errno.errorcode[code] if code else "ok"


def call_all(openers: Path, directory: Path, wrappers: list[tuple[str, ...]]) -> tuple[dict[str, str], dict[str, str]]:
    """What readers of unknown names, and creators of new names, are told, all at the same time.

    Each has a name of his own: the kernel lets those who ask for one name wait for each other.
    """
    reads = {
        f"{way} {number}": (way, directory / f"step_{len(READING) * number + index}", wrapper)
        for index, way in enumerate(READING)
        for number, wrapper in enumerate(wrappers)
    }
    creates = {
        f"{way} {number}": (way, directory / f"{way}-{number}", wrapper) for way in CREATING for number, wrapper in enumerate(wrappers)
    }
    with ThreadPoolExecutor(len(reads) + len(creates)) as pool:
        told = {key: pool.submit(call, openers, *value) for key, value in (reads | creates).items()}
        answers = {key: one.result() for key, one in told.items()}
    return {key: answers[key] for key in reads}, {key: answers[key] for key in creates}


def test_on_a_pfs_that_hangs(make_daemon: Make, openers: Path, silent: SilentPfs) -> None:
    (silent.source / "run").mkdir()
    for number in range(2 * len(READING)):
        (silent.source / "run" / f"step_{number}").write_bytes(b"the newest checkpoint")
    daemon = make_daemon("auto", pfs=silent.path, drain_deadline="1s", env=shorten(SCAN_WAIT_S=5))
    daemon.expect_warning("scan|write back|written back|pfs|does not answer|drain")
    job = daemon.path / "run"
    assert os.listdir(daemon.path) == ["run"]
    silent.swallow()
    with ThreadPoolExecutor(1) as pool:
        by_ring = pool.submit(call, openers, "uring-create", job / "by-ring")
        reads, creates = call_all(openers, job, [(), CHILD_NAMESPACE])
    assert set(reads.values()) <= UNKNOWN, reads
    assert set(creates.values()) == {"ok"}, creates
    assert by_ring.result() in UNKNOWN, "nobody can see what a ring is asked for"
    assert call(openers, "uring-create", job / "create-0" / ".." / "create-0") in {"ENOTDIR", "ok"}
    silent.resume()
    assert {"step_1", "create-0", "openat2-create-1"} <= set(os.listdir(job))
    assert (job / "step_1").read_bytes() == b"the newest checkpoint"


@pytest.mark.parametrize(
    "wrapper",
    [("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"), ("unshare", "--pid", "--fork", "--kill-child")],
    ids=["a daemon that may not look", "a foreign pid namespace"],
)
def test_where_nothing_can_be_seen(make_daemon: Make, openers: Path, wrapper: tuple[str, ...]) -> None:
    """Then creating fails as well: an error is better than a name that is said not to exist."""
    daemon = make_daemon("auto", start=False)
    daemon.wrapper = wrapper
    fault = daemon.root / "fault"
    daemon.env["CKPTFS_FAULT"] = f"@{fault}"
    daemon.expect_warning("scan")
    (daemon.pfs / "run").mkdir()
    for number in range(len(READING)):
        (daemon.pfs / "run" / f"step_{number}").write_text("old")
    daemon.start()
    job = daemon.path / "run"
    assert os.listdir(daemon.path) == ["run"]
    (daemon.path / "made").mkdir()
    fault.write_text("scan:list=EIO@*")
    reads, creates = call_all(openers, job, [()])
    assert set(reads.values()) == {"EIO"}, reads
    assert set(creates.values()) == {"EIO"}, creates
    assert call(openers, "create", daemon.path / "made" / "file") == "ok", "a directory made here is complete"
    assert call(openers, "uring-create", daemon.path / "made" / "by-ring") == "ok"
    fault.unlink()
    assert call(openers, "open", job / "step_1") == "ok"
    assert call(openers, "uring-create", job / "by-ring") == "ok"
    assert call(openers, "stat", job / "none") == "ENOENT"
