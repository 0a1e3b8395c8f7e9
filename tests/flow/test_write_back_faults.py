"""P6, P8: write-back is killed before and after each of its disk operations, and each of them fails; the PFS is exact in the end (F2)."""

import contextlib
import errno
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from local_node import in_process, inject_fault, run_until_idle
from write_back_world import Killed, Mount, intercepted, killed_at, memory

from ckptfs import disk
from ckptfs.catalog import namespace
from ckptfs.errors import CkptfsError
from ckptfs.flow.write_back import WriteBack
from ckptfs.model import Tier

ERRORS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE]


def checkpoints(mount: Mount) -> None:
    """What applications do, so that write-back comes to each of its operations. The first half is on the PFS when the second begins."""
    mount.mkdir(b"run")
    mount.mkdir(b"run/logs")
    mount.put(b"run/state.cpt", b"old")
    mount.put(b"run/other", b"other")
    mount.put(b"run/gone", b"gone")
    mount.link(b"run/other", b"run/linked")
    mount.mkdir(b"swap")
    mount.settle()
    mount.put(b"run/step.cpt", b"new" * 5000)
    mount.rename(b"run/state.cpt", b"run/state_prev.cpt")
    mount.rename(b"run/step.cpt", b"run/state.cpt")
    for number in range(6):
        mount.put(b"run/logs/%d" % number, b"%d" % number)
    mount.symlink(b"run/latest", b"state.cpt")
    mount.mknod(b"run/fifo", stat.S_IFIFO | 0o600)
    mount.unlink(b"run/gone")
    mount.put(b"run/other", b"changed")
    mount.chmod(b"run/linked", 0o600)
    mount.chown(b"run/logs", 4711)
    mount.setxattr(b"run/linked", b"user.a", b"b")
    mount.rename(b"run/logs/5", b"swap", namespace.EXCHANGE)
    mount.rmdir(b"run/logs/5")
    mount.rename(b"run", b"walk")
    mount.put(b"walk/logs/late", b"late")
    mount.append(b"walk/other", b" again")


@pytest.fixture(scope="module")
def seen() -> Iterator[list[str]]:
    """The labels of all operations, in order."""
    root = memory()
    try:
        mount = Mount(root)
        checkpoints(mount)
        with killed_at(10_000, after=False) as labels:
            mount.settle()
        mount.exact()
        yield labels
        mount.db.close()
    finally:
        shutil.rmtree(root)


def moments(seen: list[str], at_most: int) -> list[int]:
    """The first so many operations of each label."""
    count: Counter[str] = Counter()
    found = []
    for number, label in enumerate(seen):
        count[label] += 1
        if count[label] <= at_most:
            found.append(number)
    return found


def test_the_scenario_comes_to_every_operation(seen: list[str]) -> None:
    never = {
        "write_back:double:read", "write_back:double:write", "write_back:double:truncate", "write_back:discard", "write_back:conflict",
        "write_back:check:read", "write_back:resume", "write_back:intent_announced", "write_back:intent_settled", "write_back:copy",
        "write_back:probe", "write_back:late",
    }  # fmt: skip
    wanted = {label for label in disk.LABELS if label.startswith("write_back:")} - never
    assert wanted | {"pfs:walk", "pfs:chown", "pfs:chmod", "pfs:xattr", "pfs:utime", "pfs:exchange"} <= set(seen)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_operation(area: Path, seen: list[str], after: bool) -> None:
    for number in moments(seen, 4):
        mount = Mount(area / str(number))
        checkpoints(mount)
        with pytest.raises(Killed), killed_at(number, after=after):
            mount.settle()
        mount.settle_exactly()
        mount.db.close()


def test_killed_again_and_again(tmp_path: Path, seen: list[str]) -> None:
    mount = Mount(tmp_path)
    checkpoints(mount)
    for number in range(1, 60):
        try:
            with killed_at(number % 7, after=bool(number % 2)):
                mount.settle()
        except Killed:
            continue
        break
    mount.settle_exactly()


@pytest.mark.parametrize("code", ERRORS, ids=lambda code: errno.errorcode[code])
def test_every_operation_fails_once(area: Path, seen: list[str], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = list(dict.fromkeys(seen))
    for number, label in enumerate(labels if code == errno.EIO else labels[ERRORS.index(code) :: 5]):
        if label in {"write_back:begun", "write_back:written_down", "write_back:finish"}:
            continue  # These stand for moments, not for operations of the disk.
        mount = Mount(area / str(number))
        checkpoints(mount)
        flow = mount.write_back()
        inject_fault(monkeypatch, f"{label}={errno.errorcode[code]}")
        troubles = sum(told_trouble(flow) for _ in range(3))
        # What only concerns attributes is left out, and the trouble with one of many files makes a smaller batch.
        assert troubles <= 1
        assert disk._calls[label], label
        inject_fault(monkeypatch, "")
        flow.retry_now()  # What lies in a directory that was not synced.
        mount.settle_exactly(flow)
        mount.db.close()


def told_trouble(flow: WriteBack) -> int:
    try:
        run_until_idle(flow)
    except CkptfsError as failure:
        assert failure.errno in ERRORS
        return 1
    return 0


def names_in_a_circle(mount: Mount) -> None:
    mount.rename(b"a", b"b")
    mount.rename(b"b", b"c")
    mount.put(b"b", b"new")
    mount.rename(b"c", b"a")


def link_and_rename(mount: Mount) -> None:
    mount.link(b"a", b"b")
    mount.rename(b"b", b"c")


def made_removed_and_made(mount: Mount) -> None:
    mount.mkdir(b"b")
    mount.rename(b"a", b"b/a")
    mount.rename(b"b/a", b"a")
    mount.rmdir(b"b")
    mount.put(b"b", b"a file now")


def exchanged_twice(mount: Mount) -> None:
    mount.put(b"b", b"b")
    mount.rename(b"a", b"b", namespace.EXCHANGE)
    mount.rename(b"b", b"a", namespace.EXCHANGE)
    mount.put(b"a", b"again")


def twins_exchanged(mount: Mount) -> None:
    """Of the same size and time, as `cp -p` leaves them."""
    mount.put(b"b", b"two")
    for path in (b"a", b"b"):
        mount.utime(path, 1_700_000_000_000_000_000)
    mount.settle()
    mount.rename(b"a", b"b", namespace.EXCHANGE)


SEQUENCES = [twins_exchanged, names_in_a_circle, link_and_rename, made_removed_and_made, exchanged_twice]


@pytest.mark.parametrize("acts", SEQUENCES, ids=lambda acts: acts.__name__)
def test_a_batch_that_was_done_is_done_again_without_harm(
    area: Path, acts: Callable[[Mount], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The mover dies when everything is on the PFS and nothing of it in the catalog, again and again."""
    mount = Mount(area)
    mount.put(b"a", b"old")
    mount.settle()
    acts(mount)
    for _ in range(8):
        strike = Strike("write_back:finish", after=False)
        flow = mount.write_back()
        with intercepted(strike.before, strike.after), contextlib.suppress(Killed):
            flow.step()
        mount.write_back().step()
    mount.settle_exactly()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("label", ["write_back:discard", "write_back:conflict", "write_back:check:read", "write_back:double:write"])
def test_killed_on_the_byways(area: Path, monkeypatch: pytest.MonkeyPatch, label: str, after: bool) -> None:
    """What the scenario does not come to: taking back, strangers' files, open files, a PFS without links."""
    mount = Mount(area)
    mount.put(b"theirs", b"ours 1")
    mount.put(b"linked", b"1")
    content = mount.put(b"log", b"step 1\n", closed=False)
    mount.settle()
    mount.synced(content)
    (mount.pfs / "theirs").write_bytes(b"theirs")
    mount.put(b"theirs", b"ours 2")
    mount.link(b"linked", b"second")
    mount.put(b"gone bad", b"x")
    if label.startswith("write_back:double"):
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EOPNOTSUPP, "no links here")))
    if label == "write_back:discard":
        mount.spoil(content + 2, Tier.RAM)
    struck = Strike(label, after=after)
    with pytest.raises(Killed), intercepted(struck.before, struck.after):
        mount.settle()
    mount.settle()
    shown = mount.on_pfs()
    shown.pop(b"theirs.ckptfs-conflict-1", None)
    wanted = mount.tree() | {b"log": ("file", b"step 1\n", 0o644)}
    if label == "write_back:discard":
        del wanted[b"gone bad"]
    assert shown == wanted and mount.temporaries() == []
    assert sorted(mount.pfs.glob("*conflict*")) == [mount.pfs / "theirs.ckptfs-conflict-1"]
    assert (mount.pfs / "theirs.ckptfs-conflict-1").read_bytes() == b"theirs"


class Strike:
    """Kills at the first operation with this label."""

    def __init__(self, label: str, *, after: bool) -> None:
        self.label = label
        self.is_after = after
        self.dead = False

    def before(self, label: str) -> None:
        if self.dead or (label == self.label and not self.is_after):
            self.dead = True
            raise Killed

    def after(self, label: str) -> None:
        if self.dead or label == self.label:
            self.dead = True
            raise Killed


@pytest.mark.parametrize("action", ["kill", "kill-after", "EIO"])
def test_struck_behind_a_large_copy(tmp_path: Path, action: str) -> None:
    """While it waits for the disk, with the file half copied: nothing of it appears, and then all of it does."""
    mount = Mount(tmp_path)
    mount.put(b"large", os.urandom(24 << 20))
    before = mount.on_pfs()
    script = "from ckptfs.errors import CkptfsError\nimport contextlib\nfrom write_back_world import *\n"
    script += "with contextlib.suppress(CkptfsError): Mount(node.root).settle()"
    assert in_process(tmp_path, script, fault=f"behind:wait={action}") == (0 if action == "EIO" else -9)
    assert mount.on_pfs() == before == {}
    mount.settle_exactly()


@pytest.mark.parametrize("fault", ["write_back:written_down=kill", "write_back:put=kill-after@2", "write_back:write=kill-after"])
def test_a_real_kill(tmp_path: Path, fault: str) -> None:
    mount = Mount(tmp_path)
    for number in range(5):
        mount.put(b"%d" % number, b"%d" % number * 1000)
    assert in_process(tmp_path, "from write_back_world import *\nMount(node.root).settle()", fault=fault) == -9
    mount.settle_exactly()
