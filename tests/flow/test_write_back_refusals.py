"""P1, P6: whatever the PFS refuses to do with one name, it alone is missing. It is reported, tried again, and delays no other."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_node import inject_fault
from write_back_world import Killed, Mount, Refusal, intercepted, killed_at, memory, mended_after, rest, unreadable

from ckptfs.catalog import journal, namespace, pfs_batch
from ckptfs.catalog.pfs_batch import KEYS_PER_ROW
from ckptfs.errors import TierUnavailable
from ckptfs.flow.write_back import WriteBack, deferred
from ckptfs.model import ContentState, Tier
from ckptfs.tiers import pfs_ownership, pfs_tree
from ckptfs.tiers.storage import Tiers

pytestmark = pytest.mark.usefixtures("no_retries")
REFUSALS = [
    errno.EACCES, errno.EPERM, errno.EDQUOT, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.EXDEV, errno.EBUSY, errno.EOPNOTSUPP,
    errno.EIO,
]  # fmt: skip
"""EIO: of one entry on an otherwise healthy PFS."""


def put_others(mount: Mount, name: bytes) -> None:
    """Files of other users, after the refusal."""
    mount.mkdir(name)
    mount.put(name + b"/file", name)
    mount.symlink(name + b"/link", b"file")
    mount.rename(name + b"/file", name + b"/renamed")


def others_shown(mount: Mount, name: bytes) -> bool:
    shown = mount.on_pfs()
    return shown.get(name + b"/renamed", ())[:2] == ("file", name) and name + b"/link" in shown


def make_directory(mount: Mount) -> None:
    mount.mkdir(b"good")
    mount.put(b"good/f", b"data")


def put_both(mount: Mount) -> None:
    mount.put(b"good", b"data")
    mount.put(b"bad", b"old")


# What the application does before, what it does then, and the call that the PFS refuses for the name `bad`.
ACTS: dict[str, tuple[Callable[[Mount], Any], Callable[[Mount], Any], str]] = {
    "mkdir": (lambda m: None, lambda m: m.mkdir(b"bad"), "rename"),
    "symlink": (lambda m: None, lambda m: m.symlink(b"bad", b"x"), "rename"),
    "fifo": (lambda m: None, lambda m: m.mknod(b"bad", stat.S_IFIFO | 0o600), "rename"),
    "empty file": (lambda m: None, lambda m: m.mknod(b"bad", stat.S_IFREG | 0o600), "rename"),
    "file": (lambda m: None, lambda m: m.put(b"bad", b"data"), "rename"),
    "new generation": (lambda m: m.put(b"bad", b"old"), lambda m: m.put(b"bad", b"new"), "rename"),
    "rename": (lambda m: m.put(b"good", b"data"), lambda m: m.rename(b"good", b"bad"), "rename"),
    "rename over": (put_both, lambda m: m.rename(b"good", b"bad"), "rename"),
    "rename directory": (make_directory, lambda m: m.rename(b"good", b"bad"), "rename"),
    "link": (lambda m: m.put(b"good", b"data"), lambda m: m.link(b"good", b"bad"), "rename"),
    "unlink": (lambda m: m.put(b"bad", b"data"), lambda m: m.unlink(b"bad"), "unlink"),
    "rmdir": (lambda m: m.mkdir(b"bad"), lambda m: m.rmdir(b"bad"), "rmdir"),
}
# Every refusal of every system call, and every act with a refusal of one name and with one that may be the whole PFS.
THOROUGH, ALWAYS = ("file", "rename directory", "link", "unlink", "rmdir"), (errno.EACCES, errno.EIO)
CASES = [(act, code) for act in ACTS for code in REFUSALS if act in THOROUGH or code in ALWAYS]


@pytest.mark.parametrize(("act", "code"), CASES, ids=[f"{act}-{errno.errorcode[code]}" for act, code in CASES])
def test_it_alone_is_missing(mount: Mount, act: str, code: int) -> None:
    before, then, call = ACTS[act]
    before(mount)
    mount.settle()
    was = mount.on_pfs()
    put_others(mount, b"sooner")
    then(mount)
    put_others(mount, b"later")
    with mended_after(mount) as (flow, patch):
        refusal = Refusal(patch, call, lambda name: name == b"bad", code)
        rest(flow)
        assert refusal.calls, "the case comes to the call"
        assert others_shown(mount, b"sooner") and others_shown(mount, b"later")
        shown = {path: value for path, value in mount.on_pfs().items() if not path.startswith((b"sooner", b"later"))}
        assert shown == was, "what was refused is as it was"
        assert mount.temporaries() == []
        [trouble] = mount.troubles()
        assert trouble["path"] == "bad" and errno.errorcode[code] in trouble["what"] and trouble["remedy"], trouble
        calls = refusal.calls
        put_others(mount, b"last")
        rest(flow)
        assert others_shown(mount, b"last") and refusal.calls == calls, "it is not tried again before its time"
        assert (flow.next_due_s() or 0) > 0
        flow.retry_now()
        rest(flow)
        assert refusal.calls > calls, "it is tried again"
    assert mount.troubles() == [] and flow.next_due_s() is None


def kill_when_staged(label: str) -> None:
    if label == "write_back:written_down":
        raise Killed


@pytest.mark.parametrize("is_killed", [False, True])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO], ids=["EACCES", "EIO"])
def test_a_temporary_file_that_may_not_be_removed_holds_up_nobody(mount: Mount, code: int, is_killed: bool) -> None:
    """P1: the owner takes the write permission from a directory in which a file is being made, or its server is sick."""
    mount.mkdir(b"closed")
    mount.settle()
    mount.put(b"closed/bad", b"data")
    put_others(mount, b"others")
    refused_name = f".ckptfs.{journal.get_instance_id(mount.db)}.{journal.list_oldest(mount.db, 2)[1].seq * KEYS_PER_ROW + 1:x}".encode()
    if is_killed:
        with contextlib.suppress(Killed), intercepted(kill_when_staged):
            mount.write_back().step()
    with mended_after(mount) as (flow, patch):
        Refusal(patch, "rename", lambda name: name == b"bad", code)
        refusal = Refusal(patch, "unlink", lambda name: name == refused_name, code)
        rest(flow)
        assert refusal.calls and others_shown(mount, b"others")
        [trouble] = mount.troubles()
        assert trouble["path"] == "closed/bad" and trouble["remedy"]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_was_refused_and_is_deleted_is_no_trouble_any_more(mount: Mount, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the last in the journal. Write-back has no work then, and must not come back to it all the time either."""
    flow = mount.write_back()
    _ = mount.put(b"bad", b"data") if kind == "file" else mount.mkdir(b"bad")
    Refusal(monkeypatch, "rename", lambda name: name == b"bad", errno.EACCES)
    rest(flow)
    assert mount.troubles() != []
    (mount.unlink if kind == "file" else mount.rmdir)(b"bad")
    rest(flow)
    flow.retry_now()
    mount.settle_exactly(flow)
    assert mount.troubles() == [] and flow.next_due_s() is None


def test_a_directory_whose_times_cannot_be_set_holds_up_nobody(mount: Mount) -> None:
    """P1: the PFS takes other files, so it is not sick as a whole."""
    mount.mkdir(b"bad")
    mount.put(b"bad/f", b"data")

    def broken(label: str) -> None:
        if label == "write_back:times":
            raise OSError(errno.EIO, "broken")

    with intercepted(broken):
        mount.settle_exactly()


def list_moments(seen: list[str]) -> list[int]:
    """Return the last operation of each label, which is nearest to the refusal."""
    return sorted({label: number for number, label in enumerate(seen)}.values())


@pytest.mark.parametrize("act", ["mkdir", "rename over", "rename directory", "link", "unlink", "new generation"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_operation_around_a_refusal(act: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    before, then, call = ACTS[act]
    moments = [10_000]
    while moments:
        root = memory()
        mount = Mount(root)
        before(mount)
        mount.settle()
        then(mount)
        put_others(mount, b"later")
        number = moments.pop()
        with monkeypatch.context() as patch:
            Refusal(patch, call, lambda name: name == b"bad", errno.EACCES)
            with contextlib.suppress(Killed), killed_at(number, after=after) as labels:
                rest(mount.write_back())
            rest(mount.write_back())
            assert others_shown(mount, b"later")
        mount.settle_exactly()
        mount.db.close()
        shutil.rmtree(root)
        if number == 10_000:
            moments = list_moments(labels)


@pytest.mark.parametrize("call", ["open", "stat"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_directory_that_cannot_be_read_after_a_kill_holds_up_nobody_else(code: int, call: str) -> None:
    """P1, P6: the mover died at any operation of a batch; what it had done there is no external change later."""
    moments = [10_000]
    while moments:
        root = memory()
        mount = Mount(root)
        mount.mkdir(b"bad")
        for name in (b"bad/run", b"bad/best"):
            mount.put(name, b"old")
        mount.settle()
        mount.put(b"bad/run", b"new")
        mount.put(b"bad/fresh", b"fresh")
        mount.rename(b"bad/best", b"bad/former")
        put_others(mount, b"later")
        number = moments.pop()
        with contextlib.suppress(Killed), killed_at(number, after=True) as labels:
            rest(mount.write_back())
        with unreadable(b"bad", call, code):
            rest(mount.write_back())
            assert others_shown(mount, b"later")
        mount.settle_exactly()
        mount.db.close()
        shutil.rmtree(root)
        if number == 10_000:
            moments = sorted({labels.index(label) for label in labels})


@contextlib.contextmanager
def refused(mount: Mount, code: int = errno.EACCES, call: str = "rename") -> Iterator[WriteBack]:
    """The PFS refuses the name `bad` while the block runs; everything is exact afterwards."""
    with mended_after(mount) as (flow, patch):
        Refusal(patch, call, lambda name: name == b"bad", code)
        yield flow


def test_a_refused_directory_waits_with_all_below_it(mount: Mount) -> None:
    with refused(mount, code=errno.ENAMETOOLONG) as flow:
        mount.mkdir(b"bad")
        mount.mkdir(b"bad/sub")
        mount.put(b"bad/sub/f", b"data")
        mount.symlink(b"bad/s", b"f")
        mount.link(b"bad/sub/f", b"bad/g")
        rest(flow)
        mount.chmod(b"bad/sub", 0o700)
        mount.unlink(b"bad/s")
        mount.put(b"bad/sub/f", b"again")
        rest(flow)
        assert mount.on_pfs() == {}
        assert len(mount.troubles()) == 1


@pytest.mark.parametrize("kind", ["directory", "file", "symlink"])
def test_a_better_name_is_the_remedy(mount: Mount, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no retry: the rename says that it is worth a try."""
    Refusal(monkeypatch, "rename", lambda name: name == b"bad", errno.ENAMETOOLONG)
    flow = mount.write_back()
    if kind == "directory":
        mount.mkdir(b"bad")
        mount.mkdir(b"bad/d")
        mount.put(b"bad/d/f", b"data")
    elif kind == "file":
        mount.put(b"bad", b"data")
    else:
        mount.symlink(b"bad", b"x")
    rest(flow)
    assert mount.on_pfs() == {}
    mount.rename(b"bad", b"good")
    mount.settle_exactly(flow)
    assert mount.troubles() == []


def test_a_better_name_after_a_refused_rename(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    Refusal(monkeypatch, "rename", lambda name: name == b"bad", errno.ENAMETOOLONG)
    mount.put(b"a", b"data")
    mount.mkdir(b"d")
    mount.put(b"d/f", b"in d")
    mount.settle()
    flow = mount.write_back()
    mount.rename(b"a", b"bad")
    rest(flow)
    mount.rename(b"bad", b"good")
    mount.settle_exactly(flow)
    mount.rename(b"d", b"bad")
    mount.put(b"bad/g", b"also in d")
    rest(flow)
    assert mount.on_pfs()[b"d/g"][1] == b"also in d", "its files go where the PFS shows it"
    mount.rename(b"bad", b"d")
    mount.settle_exactly(flow)


def test_out_of_a_refused_directory(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    Refusal(monkeypatch, "rename", lambda name: name == b"bad", errno.EACCES)
    flow = mount.write_back()
    mount.mkdir(b"bad")
    mount.put(b"bad/f", b"data")
    mount.mkdir(b"bad/sub")
    mount.put(b"bad/sub/g", b"more")
    mount.symlink(b"bad/s", b"x")
    rest(flow)
    for name in (b"f", b"sub", b"s"):
        mount.rename(b"bad/" + name, name)
    rest(flow)
    assert {b"f", b"sub", b"sub/g", b"s"} == set(mount.on_pfs())
    mount.rmdir(b"bad")
    flow.retry_now()
    mount.settle_exactly(flow)


def test_into_a_refused_directory(mount: Mount) -> None:
    """P5: what the PFS has stays there under its old name."""
    mount.put(b"f", b"data")
    mount.mkdir(b"d")
    mount.put(b"d/g", b"more")
    mount.settle()
    with refused(mount) as flow:
        mount.mkdir(b"bad")
        mount.rename(b"f", b"bad/f")
        mount.rename(b"d", b"bad/d")
        mount.put(b"f", b"another")
        mount.put(b"bad/d/h", b"late")
        rest(flow)
        shown = mount.on_pfs()
        assert shown[b"f"][1] == b"data" and shown[b"d/g"][1] == b"more" and shown[b"d/h"][1] == b"late"


def test_the_last_that_the_pfs_shows_of_a_file_is_not_replaced(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: the renamed file has no other copy than the one under its old name."""
    content = mount.put(b"a", b"only on the PFS")
    mount.settle()
    flow = mount.write_back()
    with monkeypatch.context() as patch:
        Refusal(patch, "rename", lambda name: name == b"bad", errno.EACCES)
        mount.rename(b"a", b"bad")
        rest(flow)
        for tier in list(mount.copies(content)):
            mount.db.run("DELETE FROM copy WHERE content = ?", content)
            mount.tiers[tier].remove(content)
        mount.put(b"a", b"new")
        mount.put(b"b", b"x")
        mount.rename(b"b", b"a")
        mount.unlink(b"a")
        mount.mkdir(b"a")
        mount.rmdir(b"a")
        mount.put(b"a", b"newest")
        rest(flow)
        assert mount.on_pfs()[b"a"][1] == b"only on the PFS"
        assert mount.state(content) is ContentState.SEALED
    flow.retry_now()
    mount.settle(flow)
    assert {name: value[1] for name, value in mount.on_pfs().items()} == {b"a": b"newest", b"bad": b"only on the PFS"}


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EACCES])
def test_a_refused_exchange(mount: Mount, code: int) -> None:
    mount.put(b"a", b"A")
    mount.mkdir(b"d")
    mount.put(b"d/b", b"B")
    mount.settle()
    with mended_after(mount) as (flow, patch):
        inject_fault(patch, f"write_back:swap={errno.errorcode[code]}@*")
        mount.rename(b"a", b"d/b", namespace.EXCHANGE)
        put_others(mount, b"later")
        rest(flow)
        assert others_shown(mount, b"later")
        assert (mount.on_pfs()[b"a"][1], mount.on_pfs()[b"d/b"][1]) == (b"A", b"B")
        [trouble] = mount.troubles()
        assert "exchange" in trouble["what"]
        mount.put(b"a", b"new B")
        rest(flow)
    assert (mount.on_pfs()[b"a"][1], mount.on_pfs()[b"d/b"][1]) == (b"new B", b"A")


def test_an_old_name_that_may_not_go_yet_goes_after_the_new_bytes_have_come(mount: Mount) -> None:
    """It still shows the former bytes, which are those of another file than the catalog knows the inode by."""
    mount.put(b"old", b"former")
    mount.settle()
    with mended_after(mount) as (flow, patch):
        Refusal(patch, "rename", lambda name: name == b"old", errno.EPERM)
        Refusal(patch, "unlink", lambda name: name == b"old", errno.EPERM)
        mount.put(b"old", b"new bytes")
        mount.rename(b"old", b"new")
        rest(flow)
        flow.retry_now()
        rest(flow)


def test_a_refused_name_shows_the_new_bytes_when_the_pfs_takes_it(mount: Mount) -> None:
    """P3: until then the file is not on the PFS, although its other name shows them."""
    mount.put(b"a", b"old")
    mount.link(b"a", b"bad")
    mount.settle()
    with refused(mount) as flow:
        mount.put(b"a", b"new")
        rest(flow)
        assert {mount.on_pfs()[name][1] for name in (b"a", b"bad")} == {b"new", b"old"}
        assert mount.db.value("SELECT count(*) FROM journal WHERE op = 'content'") == 1


def test_a_further_name_that_is_refused_does_not_hold_up_the_bytes(mount: Mount) -> None:
    with refused(mount) as flow:
        mount.put(b"good", b"one")
        mount.link(b"good", b"bad")
        rest(flow)
        mount.put(b"good", b"two")
        rest(flow)
        assert {name: value[1] for name, value in mount.on_pfs().items()} == {b"good": b"two"}


@pytest.mark.parametrize("code", REFUSALS)
def test_refused_attributes(mount: Mount, code: int) -> None:
    mount.put(b"f", b"data")
    mount.settle()
    with mended_after(mount) as (flow, patch):
        inject_fault(patch, f"write_back:attributes={errno.errorcode[code]}@*")
        mount.chmod(b"f", 0o600)
        mount.rename(b"f", b"g")
        put_others(mount, b"later")
        rest(flow)
        assert others_shown(mount, b"later") and b"g" in mount.on_pfs()
        assert [trouble["path"] for trouble in mount.troubles()] == ["f"]


def test_a_mode_that_may_not_be_set_is_logged_with_its_directory_and_delays_nothing(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pfs_ownership, "_logged", set())
    mount.mkdir(b"d")
    mount.put(b"d/f", b"data")
    mount.settle()
    inject_fault(monkeypatch, "pfs:chmod=EPERM@*")
    mount.chmod(b"d/f", 0o604)
    mount.settle()
    assert f"{mount.pfs}/d: modes of files there are not set: " in caplog.text and mount.troubles() == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_a_directory_that_lets_nothing_go(mount: Mount, code: int) -> None:
    """As `chattr +a`: a temporary file is made there, and can be neither renamed nor removed."""
    mount.mkdir(b"bad")
    mount.settle()
    with mended_after(mount) as (flow, patch):
        Refusal(patch, "rename", lambda name: name == b"f", code)
        Refusal(patch, "unlink", lambda name: (mount.pfs / "bad" / os.fsdecode(name)).exists(), code)
        mount.put(b"bad/f", b"data")
        put_others(mount, b"later")
        rest(flow)
        assert others_shown(mount, b"later") and b"bad/f" not in mount.on_pfs()
        assert [trouble["path"] for trouble in mount.troubles()] == ["bad/f"]
    assert mount.temporaries() == []


def test_many_refusals_at_once(mount: Mount) -> None:
    with mended_after(mount) as (flow, patch):
        Refusal(patch, "rename", lambda name: name.startswith(b"bad"), errno.EINVAL)
        for number in range(40):
            mount.put(b"good%d" % number, b"x")
            (mount.mkdir if number % 2 else lambda name: mount.put(name, b"y"))(b"bad%d" % number)
        rest(flow)
        assert set(mount.on_pfs()) == {b"good%d" % number for number in range(40)}
        reported = mount.troubles()
        assert len(reported) == deferred.REPORTED_MAX and "20 other" in " ".join(one["what"] for one in reported)


def test_an_error_of_the_whole_pfs_sets_nothing_aside(mount: Mount) -> None:
    """P6: order counts more while the PFS takes nothing at all."""
    for name in (b"a", b"b"):
        mount.put(name, name)
    flow = mount.write_back()

    def broken(label: str) -> None:
        if label in {"write_back:put", "write_back:probe"}:
            raise OSError(errno.EIO, "broken")

    with intercepted(broken):
        for _ in range(10):
            with pytest.raises(TierUnavailable):
                flow.step()
        assert mount.troubles() == []
    mount.settle_exactly(flow)


# --- sources ----------------------------------------------------------------------------------------------------------


def test_a_copy_that_cannot_be_read(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    """A bad sector below the only copy."""
    flow = mount.write_back()
    mount.put(b"a", b"first")
    mount.put(b"bad", b"unreadable")
    put_others(mount, b"later")

    reads = []

    def broken(label: str) -> None:
        if label == "write_back:read":
            reads.append(label)
            if len(reads) >= 2 and mount.db.value("SELECT 1 FROM journal WHERE inode = ?", mount.number(b"bad")) and is_bad[0]:
                raise OSError(errno.EIO, "bad sector")

    is_bad = [False]
    original = mount.tiers[Tier.RAM].open

    def open_copy(content: int, flags: int = os.O_RDONLY) -> int:
        is_bad[0] = content == mount.shown(mount.number(b"bad"))
        reads.append("open")
        return original(content, flags)

    mount.tiers[Tier.RAM].open = open_copy  # type: ignore[method-assign]
    with intercepted(broken), caplog.at_level(logging.WARNING):
        rest(flow)
        assert others_shown(mount, b"later") and b"a" in mount.on_pfs() and b"bad" not in mount.on_pfs()
        [trouble] = mount.troubles()
        assert trouble["path"] == "bad" and "EIO" in trouble["what"] and "ram" in trouble["what"] and trouble["remedy"]
    flow.retry_now()
    mount.settle_exactly(flow)


def test_an_nvme_that_is_left_out(mount: Mount) -> None:
    mount.put(b"on nvme", b"data", tier=Tier.NVME)
    put_others(mount, b"later")
    complete = mount.tiers
    mount.tiers = Tiers({tier: storage for tier, storage in mount.tiers.items() if tier is not Tier.NVME}, mount.config.ram_high)
    flow = mount.write_back()
    rest(flow)
    assert others_shown(mount, b"later")
    [trouble] = mount.troubles()
    assert trouble["path"] == "on nvme" and "nvme" in trouble["what"] and "nvme=" in trouble["remedy"]
    mount.tiers = complete
    mount.settle_exactly()


# --- a filesystem mounted inside the PFS ------------------------------------------------------------------------------

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@contextlib.contextmanager
def mounted(path: Path, *options: str) -> Iterator[None]:
    subprocess.run(["mount", *options, str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.fixture
def inner(mount: Mount) -> Iterator[None]:
    mount.mkdir(b"sub")
    mount.settle()
    with mounted(mount.pfs / "sub", "-t", "tmpfs", "-o", "mode=755", "none"):
        yield


@needs_root
@pytest.mark.parametrize("kind", ["file", "symlink", "fifo"])
def test_a_move_across_a_mount_is_a_copy(mount: Mount, inner: None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mv x sub/x`, as if the copy took long."""
    monkeypatch.setattr(pfs_tree, "CACHED_S", 0.0)
    {"file": lambda: mount.put(b"x", b"data"), "symlink": lambda: mount.symlink(b"x", b"to"),
     "fifo": lambda: mount.mknod(b"x", stat.S_IFIFO | 0o640)}[kind]()  # fmt: skip
    mount.put(b"sub/y", b"former")
    mount.settle()
    mount.rename(b"x", b"sub/y")
    put_others(mount, b"later")
    mount.settle_exactly()
    assert others_shown(mount, b"later")
    mount.rename(b"sub/y", b"back")
    mount.put(b"sub/z", b"later")
    mount.settle_exactly()
    assert mount.troubles() == []


@needs_root
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_operation_of_a_move_across_a_mount(after: bool) -> None:
    moments = [10_000]
    while moments:
        root = memory()
        mount = Mount(root)
        mount.mkdir(b"sub")
        mount.settle()
        with mounted(mount.pfs / "sub", "-t", "tmpfs", "-o", "mode=755", "none"):
            mount.put(b"x", b"data" * 1000)
            mount.settle()
            mount.rename(b"x", b"sub/y")
            mount.put(b"z", b"later")
            number = moments.pop()
            with contextlib.suppress(Killed), killed_at(number, after=after) as labels:
                mount.settle()
            mount.settle_exactly()
            mount.db.close()
            if number == 10_000:
                moments = list_moments(labels)
        shutil.rmtree(root)


@needs_root
def test_a_directory_does_not_cross_a_mount(mount: Mount, inner: None) -> None:
    mount.mkdir(b"d")
    mount.put(b"d/f", b"data")
    mount.settle()
    flow = mount.write_back()
    mount.rename(b"d", b"sub/d")
    put_others(mount, b"later")
    mount.put(b"sub/d/g", b"more")
    mount.put(b"sub/file", b"in sub")
    rest(flow)
    shown = mount.on_pfs()
    assert others_shown(mount, b"later") and shown[b"sub/file"][1] == b"in sub"
    assert shown[b"d/f"][1] == b"data" and shown[b"d/g"][1] == b"more"
    [trouble] = mount.troubles()
    assert trouble["path"] == "sub/d" and "EXDEV" in trouble["what"] and "rename from d" in trouble["what"]


@needs_root
def test_a_link_across_a_mount_is_a_copy(mount: Mount, inner: None) -> None:
    mount.put(b"x", b"data")
    mount.settle()
    mount.link(b"x", b"sub/x")
    mount.put(b"later", b"x")
    mount.settle()
    assert {b"x", b"sub/x", b"later"} <= set(mount.on_pfs())


@needs_root
def test_a_mountpoint_is_not_renamed_or_removed(mount: Mount, inner: None) -> None:
    """EBUSY"""
    found = os.stat(mount.pfs / "sub")
    mount.db.run("UPDATE pfs_entry SET seen_ino = ? WHERE name = ?", found.st_ino, b"sub")  # As the next scan does.
    flow = mount.write_back()
    mount.rename(b"sub", b"moved")
    put_others(mount, b"later")
    mount.put(b"moved/f", b"data")
    rest(flow)
    assert others_shown(mount, b"later") and mount.on_pfs()[b"sub/f"][1] == b"data"
    mount.unlink(b"moved/f")
    mount.rmdir(b"moved")
    put_others(mount, b"last")
    flow.retry_now()
    rest(flow)
    assert others_shown(mount, b"last") and b"sub/f" not in mount.on_pfs()
    assert len(mount.troubles()) == 1


@needs_root
def test_a_full_filesystem_inside_the_pfs_is_not_the_whole_pfs(mount: Mount) -> None:
    """ENOSPC for files and directories below it; the rest has room."""
    mount.mkdir(b"sub")
    mount.settle()
    with mounted(mount.pfs / "sub", "-t", "tmpfs", "-o", "mode=755,nr_inodes=3", "none"):
        flow = mount.write_back()
        mount.put(b"sub/fits", b"data")
        for number in range(3):
            mount.mkdir(b"sub/%d" % number)
            mount.put(b"sub/f%d" % number, b"x")
        put_others(mount, b"later")
        rest(flow)
        assert others_shown(mount, b"later") and mount.on_pfs()[b"sub/fits"][1] == b"data"
        assert {trouble["what"].partition(":")[0] for trouble in mount.troubles()} == {"ENOSPC"}
        subprocess.run(["mount", "-o", "remount,nr_inodes=100", mount.pfs / "sub"], check=True)
        flow.retry_now()
        mount.settle_exactly(flow)


def test_a_full_project_is_not_the_whole_pfs(mount: Mount) -> None:
    """XFS and ext4 answer ENOSPC beyond the quota of a project, and report it as the size of its directory."""
    mount.mkdir(b"bad")
    mount.settle()
    fstatvfs = os.fstatvfs

    def report(fd: int) -> os.statvfs_result:
        found = list(fstatvfs(fd))
        found[2] -= 1000 if os.readlink(f"/proc/self/fd/{fd}").endswith("/bad") else 0
        return os.statvfs_result(found)

    def refuse(label: str) -> None:
        if label == "write_back:fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mended_after(mount) as (flow, patch):
        patch.setattr(os, "fstatvfs", report)
        mount.put(b"bad/f", b"data")
        with intercepted(refuse):
            rest(flow)
        mount.put(b"theirs", b"data")
        put_others(mount, b"later")
        rest(flow)
        assert others_shown(mount, b"later") and b"theirs" in mount.on_pfs() and b"bad/f" not in mount.on_pfs()
        assert [(trouble["path"], trouble["what"].partition(":")[0]) for trouble in mount.troubles()] == [("bad/f", "ENOSPC")]


@contextlib.contextmanager
def refused_below(directory: str, code: int) -> Iterator[None]:
    """A PFS that lets no file be made in one directory."""
    with pytest.MonkeyPatch.context() as patch:
        original = os.open

        def refusing(name: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if flags & os.O_CREAT and dir_fd is not None and os.readlink(f"/proc/self/fd/{dir_fd}").endswith(directory):
                raise OSError(code, os.strerror(code))
            return original(name, flags, mode, dir_fd=dir_fd)

        patch.setattr(os, "open", refusing)
        yield


@pytest.mark.parametrize("case", ["", "while files are removed", "of a PFS without figures"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_directory_without_room_is_not_the_whole_pfs(mount: Mount, code: int, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: a quota of which the PFS reports no size, and a read-only subvolume."""
    if case == "of a PFS without figures":
        monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result([4096, 4096, *[0] * 6, 0, 255]))
    mount.mkdir(b"bad")
    mount.put(b"theirs", b"data")
    mount.settle()
    with mended_after(mount) as (flow, _), refused_below("/bad", code):
        mount.put(b"bad/f", b"data")
        for number in range(2 * deferred.TRIES_MAX):
            if case == "while files are removed":  # As long as something in the journal may make room, it goes first.
                mount.put(b"old%d" % number, b"data")
                mount.unlink(b"old%d" % number)
                mount.unlink(b"theirs")
                mount.put(b"theirs", b"data")
            with contextlib.suppress(TierUnavailable):
                rest(flow, failures_max=1)
        put_others(mount, b"later")
        rest(flow)
        assert others_shown(mount, b"later") and b"theirs" in mount.on_pfs() and b"bad/f" not in mount.on_pfs()
        assert [(trouble["path"], trouble["what"].partition(":")[0]) for trouble in mount.troubles()] == [("bad/f", errno.errorcode[code])]


@pytest.mark.parametrize("limit", ["reported", "not reported"])
def test_a_file_that_does_not_fit_the_whole_pfs_is_not_set_aside(mount: Mount, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: a small file would still fit, and would appear before it."""
    mount.put(b"large", bytes(8192))
    mount.put(b"small", b"x")
    flow, fstatvfs = mount.write_back(), os.fstatvfs

    def report(fd: int) -> os.statvfs_result:
        found = list(fstatvfs(fd))
        found[4] = 4096 // found[1]
        return os.statvfs_result(found)

    def refuse(label: str) -> None:
        if label == "write_back:fsync" or (label == "write_back:probe" and limit != "reported"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, intercepted(refuse):
        if limit == "reported":
            patch.setattr(os, "fstatvfs", report)
        for _ in range(2 * deferred.TRIES_MAX):
            with pytest.raises(TierUnavailable):
                rest(flow, failures_max=1)
        assert mount.on_pfs() == {} and mount.troubles() == []
    mount.settle_exactly(flow)


@needs_root
def test_a_read_only_filesystem_inside_the_pfs_is_not_the_whole_pfs(mount: Mount, inner: None) -> None:
    """It gets read-only while a file is copied to it."""
    flow = mount.write_back()

    def read_only(label: str) -> None:
        if label == "write_back:put":
            subprocess.run(["mount", "-o", "remount,ro", mount.pfs / "sub"], check=True)

    mount.put(b"sub/f", b"data")
    with intercepted(read_only):
        flow.step()
    put_others(mount, b"later")
    rest(flow)
    assert others_shown(mount, b"later") and b"sub/f" not in mount.on_pfs()
    assert [trouble["path"] for trouble in mount.troubles()] == ["sub/f"]
    subprocess.run(["mount", "-o", "remount,rw", mount.pfs / "sub"], check=True)
    flow.retry_now()
    mount.settle_exactly(flow)


@needs_root
def test_what_is_removed_makes_room_on_a_full_pfs(mount: Mount) -> None:
    """P10: the removal stands in the journal behind what does not fit. Without one, write-back says that the PFS is full."""
    with mounted(mount.pfs, "-t", "tmpfs", "-o", "mode=755,size=128k", "none"):
        mount.put(b"old", bytes(80 << 10))
        flow = mount.write_back()
        rest(flow)
        mount.put(b"new", os.urandom(70 << 10))
        mount.mkdir(b"run")
        mount.put(b"run/more", os.urandom(20 << 10))
        mount.link(b"new", b"also")
        mount.put(b"large", os.urandom(80 << 10))
        with pytest.raises(TierUnavailable, match=r"write-back of (new|large) to the PFS failed: No space left"):
            rest(flow, failures_max=3)
        mount.unlink(b"old")
        with pytest.raises(TierUnavailable, match="write-back of large to the PFS failed: No space left"):
            rest(flow, failures_max=3)
        shown = mount.on_pfs()
        assert {b"new", b"also", b"run/more"} <= {*shown} and not {b"old", b"large"} & {*shown}
        assert mount.troubles() == []
        mount.unlink(b"new")
        mount.unlink(b"also")
        mount.settle_exactly(flow)
        assert {b"large", b"run/more"} <= {*mount.on_pfs()} and mount.temporaries() == []


def by_position(value: Any) -> Any:
    """A value as 0.2.0 has stored it in JSON."""
    if dataclasses.is_dataclass(value):
        later = {"is_checked"} if isinstance(value, pfs_batch.PfsAction) else {"is_checked", "key"}
        value = [getattr(value, field.name) for field in dataclasses.fields(value) if field.name not in later]
    if isinstance(value, list | tuple):
        return [by_position(one) for one in value]
    return value.decode("latin-1") if isinstance(value, bytes) else value


@pytest.mark.parametrize("act", ACTS)
def test_a_batch_that_an_older_version_left_stuck(mount: Mount, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upgrade frees it: what 0.2.0 stored is enough to cut it."""
    before, then, call = ACTS[act]
    before(mount)
    mount.settle()
    put_others(mount, b"sooner")
    then(mount)
    put_others(mount, b"later")

    def die(label: str) -> None:
        if label == "write_back:written_down" and has_refused_act():
            raise Killed

    def has_refused_act() -> bool:
        found = pfs_batch.find_batch(mount.db)
        locations = [one for action in found[1].actions for one in (action.location, action.new_location)] if found else []
        return any(one is not None and one.name == b"bad" for one in locations)

    with intercepted(die), contextlib.suppress(Killed):
        rest(mount.write_back())
    found = pfs_batch.find_batch(mount.db)
    assert found is not None
    order = "last_seq actions expected_entries pending_entries published_rows requeued merged_directories after_seq kept_seqs"
    pending = [(*name, inode) for name, inode in found[1].pending_entries.items()]
    values = [pending if name == "pending_entries" else getattr(found[1], name) for name in order.split()]
    mount.db.run("UPDATE pfs_batch SET body = ?", json.dumps(by_position(values)))
    with monkeypatch.context() as patch:
        Refusal(patch, call, lambda name: name == b"bad", errno.EACCES)
        rest(mount.write_back())
        assert others_shown(mount, b"sooner") and others_shown(mount, b"later")
    mount.settle_exactly()
