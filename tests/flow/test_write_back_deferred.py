"""P1, P6: if the PFS refuses one file or one owner, write-back reports it, retries it and delays no other."""

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from write_back_world import Mount, intercepted, mended_after, rest

from ckptfs.catalog import journal
from ckptfs.catalog.pfs_batch import PfsAction
from ckptfs.catalog.pfs_state import Fingerprint, PfsLocation
from ckptfs.errors import TierUnavailable
from ckptfs.flow.write_back import deferred, stage
from ckptfs.flow.write_back.deferred import DeferredFiles, RefusedKind
from ckptfs.model import ROOT
from ckptfs.tiers.pfs_tree import PfsTree

pytestmark = pytest.mark.usefixtures("no_retries")
# Those that sites see for one file or one owner.
REFUSALS = (errno.EDQUOT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EFBIG, errno.EINVAL, errno.EILSEQ, errno.EXDEV)


def refusing(monkeypatch: pytest.MonkeyPatch, refused: Callable[[bytes], bool], code: int = errno.EDQUOT) -> list[str]:
    """The PFS takes no file whose bytes `refused` knows; the labels at which it refused."""
    copy, calls = stage.transfer.copy, []

    def refuse(source: int, target: int, **named: object) -> object:
        if refused(os.pread(source, 100, 0)):
            calls.append("refused")
            raise OSError(code, os.strerror(code))
        return copy(source, target, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(stage.transfer, "copy", refuse)
    return calls


@pytest.mark.parametrize("code", REFUSALS)
def test_one_owner_s_refusal_holds_up_nobody_else(mount: Mount, code: int, caplog: pytest.LogCaptureFixture) -> None:
    mount.put(b"a", b"first")
    mount.put(b"b", b"theirs")
    mount.mkdir(b"d")
    mount.put(b"d/c", b"third")
    with mended_after(mount) as (flow, patch), caplog.at_level(logging.WARNING):
        calls = refusing(patch, lambda data: data == b"theirs", code)
        rest(flow)
        assert set(mount.on_pfs()) == {b"a", b"d", b"d/c"}
        tried = len(calls)
        mount.put(b"e", b"fifth")
        rest(flow)
        assert set(mount.on_pfs()) == {b"a", b"d", b"d/c", b"e"}
        assert len(calls) == tried, "it is not tried again before its time"
        [trouble] = mount.troubles()
        assert trouble["path"] == "b" and errno.errorcode[code] in trouble["what"] and trouble["remedy"]
        assert len(caplog.messages) == 1
        assert not journal.has_pending(mount.db, mount.number(b"a"), 10**9)
        assert journal.has_pending(mount.db, mount.number(b"b"), 10**9), "who waits for it still waits"
        due_s = flow.next_due_s()
        assert due_s is not None and due_s > 0
    assert mount.troubles() == [] and flow.next_due_s() is None


def test_generations_keep_their_order(mount: Mount) -> None:
    """A file that is set aside, written again and renamed; an older generation that somebody has open never covers the newer one."""
    mount.put(b"f", b"shown")
    mount.settle()
    with mended_after(mount) as (flow, patch):
        refusing(patch, lambda data: data == b"one")
        mount.hold(mount.put(b"f", b"one"))
        rest(flow)
        mount.put(b"f", b"two")
        mount.rename(b"f", b"g")
        mount.put(b"f", b"another")
        rest(flow)
        assert {name: value[1] for name, value in mount.on_pfs().items()} == {b"g": b"shown", b"f": b"another"}
    assert (mount.pfs / "g").read_bytes() == b"two"


def test_a_crash_between_a_batch_and_the_catalog_keeps_the_rows(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(label: str) -> None:
        if label == "write_back:finish":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        refusing(patch, lambda data: data == b"no")
        mount.put(b"a", b"no")
        mount.put(b"b", b"yes")
        with intercepted(dies), pytest.raises(KeyboardInterrupt):
            rest(mount.write_back())
        rest(mount.write_back())
        assert set(mount.on_pfs()) == {b"b"}
    mount.settle_exactly()


@pytest.mark.parametrize("takes_others", [True, False])
def test_more_refusals_than_a_bound_are_those_of_the_whole_pfs_if_it_takes_nothing_else(
    mount: Mount, takes_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "FILES_MAX", 3)

    def probe(label: str) -> None:
        if label == "write_back:probe" and not takes_others:
            raise OSError(errno.EDQUOT, "over the quota")

    with mended_after(mount) as (flow, patch), intercepted(probe):
        refusing(patch, lambda data: data == b"x")
        for number in range(5):
            mount.put(b"%d" % number, b"x")
        mount.put(b"theirs", b"y")
        with contextlib.nullcontext() if takes_others else pytest.raises(TierUnavailable, match="write-back of 3 to the PFS failed"):
            rest(flow)
        assert set(mount.on_pfs()) == ({b"theirs"} if takes_others else set())


def test_many_files_of_one_owner_are_not_planned_once_for_each(mount: Mount) -> None:
    plans = list[int]()
    with mended_after(mount) as (flow, patch):
        plan = flow._plan
        patch.setattr(flow, "_plan", lambda rows: plans.append(len(rows)) or plan(rows))
        refusing(patch, lambda data: data == b"x")
        for number in range(40):
            mount.put(b"%d" % number, b"x")
        mount.put(b"theirs", b"y")
        rest(flow)
        assert set(mount.on_pfs()) == {b"theirs"} and mount.temporaries() == []
        assert len(plans) < 6


def test_the_pauses_of_write_back_do_not_add_up_over_many_files(mount: Mount) -> None:
    """An error that may be that of the whole PFS ends a step, and each end in a row makes the next pause longer."""
    with mended_after(mount) as (flow, patch):
        refusing(patch, lambda data: data == b"x", errno.EIO)
        for number in range(8):
            mount.put(b"%d" % number, b"x")
        mount.put(b"theirs", b"y")
        rest(flow, failures_max=deferred.TRIES_MAX - 1)
        assert set(mount.on_pfs()) == {b"theirs"}
        flow.retry_now()
        rest(flow, failures_max=0)


def test_what_is_due_again_waits_for_the_rest_of_the_journal(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes to try many files, all others have their turn before these are tried again."""
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 0.0)
    tried = list[bytes]()
    with mended_after(mount) as (flow, patch):
        refusing(patch, lambda data: tried.append(data) or data.startswith(b"x"))
        for number in range(3):
            mount.put(b"%d" % number, b"x%d" % number)
            mount.mkdir(b"d%d" % number)
            mount.put(b"d%d/f" % number, b"y")
        while b"d2/f" not in mount.on_pfs():
            flow.step()
        assert tried.count(b"x0") == 1
        rest(flow)
        rest(flow)
        assert tried.count(b"x0") > 1


def test_what_is_tried_again_stays_in_the_report_until_it_is_done(tmp_path: Path) -> None:
    """On a slow PFS, to try many files again takes minutes, in which `status` would name a few of them."""
    troubles: dict[str, object] = {}

    def report(key: str, value: Mapping[str, Any] | None) -> None:
        troubles.pop(key, None)
        if value is not None:
            troubles[key] = value["path"]

    aside = DeferredFiles(report, PfsTree(tmp_path), b".ckptfs.probe")
    puts = [PfsAction("put", 1, inode, PfsLocation(ROOT, b"f%d" % inode, ()), Fingerprint()) for inode in range(5)]
    for put in puts:
        aside.defer(put, RefusedKind.BYTES, OSError(errno.EDQUOT, "over the quota"))
    aside.retry_now()
    aside.start_batch()
    assert aside.defer(puts[2], RefusedKind.BYTES, OSError(errno.EDQUOT, "over the quota"))
    assert set(troubles.values()) == {f"f{inode}" for inode in range(5)}
    aside.finish_journal()
    assert [*troubles.values()] == ["f2"]


def test_each_refusal_waits_longer_up_to_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(deferred.time, "monotonic", lambda: now[0])
    aside, waits = DeferredFiles(lambda key, value: None, PfsTree(tmp_path), b".ckptfs.probe"), []
    put = PfsAction("put", 1, 7, PfsLocation(ROOT, b"f", ()), Fingerprint())
    for _ in range(12):
        assert aside.defer(put, RefusedKind.BYTES, OSError(errno.EDQUOT, "over the quota")) and aside.is_refused(RefusedKind.BYTES, 7)
        due_s = aside.next_due_s()
        assert due_s is not None
        waits.append(due_s)
        now[0] += due_s
        aside.after_seq = 5
        aside.note_rest()
        aside.start_batch()
        assert not aside.is_refused(RefusedKind.BYTES, 7) and aside.after_seq == 0
    assert waits == sorted(waits) and waits[0] == deferred.RETRY_FIRST_S and waits[-1] == deferred.RETRY_LAST_S
    for failure in (OSError(errno.EIO, "broken"), OSError(errno.ENOSPC, "full")):
        assert not aside.defer(put, RefusedKind.BYTES, failure)
