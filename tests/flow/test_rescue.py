"""G1: a drain with too little time: of what nodes and the PFS can take until the deadline, the right part is safe, and it says so."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptfs_daemon.rescue import Rescue
from clique_world import MIB, Node, is_at_rest, make_cluster, replicate_of, until
from local_node import run_until_idle
from write_back_world import Mount

from ckptfs import limits
from ckptfs.catalog import exposure, history, mover_requests, summary
from ckptfs.catalog.history import Rollback, SetRecord
from ckptfs.clique.peer_api import PeerFailed
from ckptfs.config.schema import RetentionRule
from ckptfs.flow.replicate import Replicate
from ckptfs.flow.replicate.open_files import FsyncReplication
from ckptfs.flow.write_back import plan
from ckptfs.model import ROOT, Level
from ckptfs.series.expiry import build_hold_check
from ckptfs.series.urgency import list_safety_lines

SIZE = 2 * MIB


class Clique:
    """A node whose peer takes `budget` more files until the deadline."""

    def __init__(self, node: Node) -> None:
        self.node, self.budget = node, 0
        self.flow: Replicate = replicate_of(node)
        self._lock = threading.Lock()
        node.peers.fault = self._take

    def _take(self, act: str, name: str) -> None:
        with self._lock:
            if act == "send":
                self.budget -= 1
                if self.budget < 0:
                    raise PeerFailed("no time is left")

    def save(self, step: int, parts: int = 2) -> list[int]:
        return [self.node.written(b"step_%d-rank%d.pt" % (step, part), b"x" * SIZE) for part in range(parts)]

    def replicate(self, budget: int) -> None:
        """Until the budget is used up."""
        self.budget = budget
        until(lambda: self.budget < 0, self.flow.step)
        until(lambda: is_at_rest(self.flow))

    def list_safe(self) -> set[bytes]:
        unsafe = {file.inode for file in exposure.list_exposed(self.node.db, Level.CLIQUE)}
        return {bytes(name) for name, child in self.node.db.rows("SELECT name, child FROM entry") if child not in unsafe}


@pytest.fixture
def clique(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clique]:
    monkeypatch.setattr(limits, "PEER_SENDS_MAX", 1)
    clique = Clique(make_cluster(tmp_path, 2)[1])
    yield clique
    clique.flow.close()


@pytest.mark.parametrize("is_rescued", [True, False])
def test_the_newest_checkpoint_is_safe_at_the_deadline(clique: Clique, is_rescued: bool) -> None:
    """Without the order the same bandwidth goes to the oldest one."""
    for step in (100, 200, 300):
        clique.save(step)
    rescue = Rescue(clique.node.db, Level.CLIQUE, 25.0)
    if is_rescued:
        rescue.refresh_if_due()
    clique.replicate(2)
    safe = 300 if is_rescued else 100
    assert clique.list_safe() == {b"step_%d-rank0.pt" % safe, b"step_%d-rank1.pt" % safe}
    if is_rescued:
        assert rescue.count_left() == (4, 4 * SIZE)
        line = "step_*-rank0.pt: step_300-rank0.pt is safe (clique): 2 files, 4.0 MiB"
    else:
        line = (
            "step_*-rank0.pt: step_300-rank0.pt is NOT safe (local): 2 of 2 files missing (4.0 MiB of 4.0 MiB);"
            " the newest safe one is step_100-rank0.pt (clique)"
        )
    assert list_safety_lines(rescue.build_safety()) == [line]


@pytest.mark.parametrize(("is_saved_since", "order"), [(False, [200, 400, 300]), (True, [150, 200, 400, 300])])
def test_what_a_rollback_passes_over_comes_last(clique: Clique, is_saved_since: bool, order: list[int]) -> None:
    """As for `latest`: first what was written since, then the target of the rollback."""
    db = clique.node.db
    for step in (100, 200, 300, 400):
        clique.save(step, parts=1)
    with db.transaction():
        series = history.insert_series(db, ROOT, b"step_*-rank0.pt").directory
        target = SetRecord(7, b"step_200-rank0.pt", (200,), files=1, size=SIZE, completed_ns=1)
        history.finish_set(db, history.begin_set(db, series, target))
        history.set_rollback(db, series, Rollback(7, time.time_ns()))
    if is_saved_since:
        clique.save(150, parts=1)
    rescue = Rescue(db, Level.CLIQUE, 25.0)
    for count in range(1, len(order) + 1):
        rescue._refreshed_s = 0.0
        rescue.refresh_if_due()
        clique.flow.retry_now()
        clique.replicate(1)
        assert {step for step in order if b"step_%d-rank0.pt" % step in clique.list_safe()} == {*order[:count]}
    assert f"step_{order[0]}-rank0.pt is safe" in list_safety_lines(rescue.build_safety())[0]


def test_the_checkpoint_with_the_fewest_bytes_missing_is_completed(clique: Clique) -> None:
    """The newest one is still written: the one before it comes first, then what is closed of the newest."""
    clique.save(100)
    clique.replicate(1)  # One of two files.
    clique.save(200)
    clique.node.written(b"step_300-rank0.pt", b"x" * SIZE)
    clique.node.hold(clique.node.make(b"step_300-rank1.pt", b"x", closed=False), writer=True)
    rescue = Rescue(clique.node.db, Level.CLIQUE, 25.0)
    rescue.refresh_if_due()
    clique.flow.retry_now()
    clique.replicate(3)
    assert {b"step_200-rank0.pt", b"step_200-rank1.pt", b"step_300-rank0.pt"} < clique.list_safe()
    (line,) = list_safety_lines(rescue.build_safety())[:1]
    assert line == (
        "step_*-rank0.pt: step_300-rank0.pt is NOT safe (local): 1 file still open; the newest safe one is step_200-rank0.pt (clique)"
    )


def test_open_files_are_secured_after_the_most_urgent_checkpoints(clique: Clique) -> None:
    clique.save(100)
    node = clique.node
    log = node.make(b"md.log", b"x" * SIZE, closed=False)
    node.hold(log, writer=True)
    rescue = Rescue(node.db, Level.CLIQUE, 25.0)
    rescue.refresh_if_due()
    assert mover_requests.list_open(node.db, mover_requests.REPLICATE_NOW) == [], "checkpoints first"
    clique.budget = 100
    until(lambda: rescue.count_left() == (0, 0), clique.flow.step)
    rescue._refreshed_s = 0.0
    rescue.refresh_if_due()
    assert [one.inode for one in mover_requests.list_open(node.db, mover_requests.REPLICATE_NOW)] == [node.inode(log)]
    assert rescue.is_securing()
    run_until_idle(FsyncReplication(node.db, node.tiers, node.told, clique.flow._cluster))
    assert not rescue.is_securing()
    safety = rescue.build_safety()
    assert (safety.open_files, safety.secured_files) == (1, 1)
    assert rescue.count_left() == (0, 0), "open files are not waited for"


def test_an_order_is_published_again_only_if_it_changes(clique: Clique) -> None:
    """Each new order makes replication fill its queues anew."""
    clique.save(100)
    rescue = Rescue(clique.node.db, Level.CLIQUE, 25.0)
    published = []
    for budget in (0, 1, 0):
        if budget:
            clique.replicate(budget)
        rescue._refreshed_s = 0.0
        rescue.refresh_if_due()
        published.append(summary.list_reports(clique.node.db, summary.URGENT_REPORT))
    assert published[0] == published[1] == published[2]
    clique.save(200)
    rescue._refreshed_s = 0.0
    rescue.refresh_if_due()
    order = exposure.load_order(clique.node.db)
    assert order is not None and [len(group) for group in order.groups] == [2, 1] and not order.is_ahead
    rescue.end()
    assert exposure.load_order(clique.node.db) is None


@pytest.mark.parametrize(("deadline_s", "first"), [(0.1, 300), (3600.0, 100)])
def test_only_a_drain_that_is_short_of_time_leaves_the_order_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_s: float, first: int
) -> None:
    """P6: a deadline that is long enough by the speed of the PFS changes nothing."""
    monkeypatch.setattr(plan.Planner, "puts_max", 1)
    monkeypatch.setattr(limits, "PFS_BYTES_PER_S_ASSUMED", 100)
    mount = Mount(tmp_path)
    for step in (100, 200, 300):
        mount.mkdir(b"step_%d" % step)
        for name in (b"a.pt", b"b.pt"):
            mount.put(b"step_%d/%s" % (step, name), b"x" * 1000)
    rescue, flow = Rescue(mount.db, Level.PFS, deadline_s), mount.write_back()
    rescue.refresh_if_due()
    while rescue.count_left()[0] > 4:
        assert flow.step()
    shown = {path for path in mount.on_pfs() if path.endswith(b".pt")}
    assert shown == {b"step_%d/a.pt" % first, b"step_%d/b.pt" % first}
    (line,) = list_safety_lines(rescue.build_safety())
    expected = "step_300 is safe (pfs): 2 files" if first == 300 else "step_300 is NOT safe (local): 2 of 2 files missing"
    assert line.startswith(f"step_*: {expected}")
    rescue.end()
    mount.settle_exactly(flow)


def test_a_checkpoint_without_its_name_on_the_pfs_is_not_safe_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are there, but a rename of its directory is still to come."""
    monkeypatch.setattr(plan.Planner, "puts_max", 1)
    mount = Mount(tmp_path)
    mount.mkdir(b"tmp-1")
    mount.put(b"tmp-1/a.pt", b"x")
    mount.put(b"between", b"x")
    mount.rename(b"tmp-1", b"step_1")
    flow, rescue = mount.write_back(), Rescue(mount.db, Level.PFS, 3600.0)
    rescue.refresh_if_due()
    while rescue.count_left()[0] > 1:
        assert flow.step()
    (line, _) = list_safety_lines(rescue.build_safety())
    assert line == "step_*: step_1 is NOT safe (pfs): not all under their names on the PFS yet; no older one is safe"
    mount.settle_exactly(flow)
    (line,) = list_safety_lines(rescue.build_safety())
    assert line == "step_*: step_1 is safe (pfs): 1 file, 1 B"


@pytest.mark.parametrize(("is_last", "shown"), [(True, {b"run/step_2/a.pt"}), (False, set())])
def test_a_node_that_goes_away_leaves_its_newest_checkpoint_on_the_pfs(tmp_path: Path, is_last: bool, shown: set[bytes]) -> None:
    """D7: rules hold back most of them. The newest is still written, so the one before it goes; and nothing else."""
    mount = Mount(tmp_path)
    mount.db.holds_back = build_hold_check([RetentionRule("run/step_*", keep=3, pfs_every=10)])
    mount.mkdir(b"run")
    for step in (1, 2, 3):
        mount.mkdir(b"run/step_%d" % step)
        mount.put(b"run/step_%d/a.pt" % step, b"x", closed=step < 3)
    rescue = Rescue(mount.db, Level.PFS, 3600.0, is_last=is_last)
    rescue.refresh_if_due()
    run_until_idle(mount.write_back())
    assert {path for path in mount.on_pfs() if path.endswith(b".pt")} == shown
    assert rescue.count_left() == (0, 0), "what rules hold back is not waited for"
    lines = list_safety_lines(rescue.build_safety())
    held = "run/step_*: step_3 is NOT safe (local): a rule holds it back from the PFS; the newest safe one is step_2 (pfs)"
    assert lines == ([held] if is_last else [])


@pytest.mark.parametrize(("is_deleted", "series"), [(False, "step_*.pt"), (True, ".ckptfs/history/step_*.pt/step_*.pt@1")])
def test_a_set_in_the_history_is_named_once(tmp_path: Path, is_deleted: bool, series: str) -> None:
    """X3: by the application's names as long as they exist. Its manifest is not waited for."""
    mount = Mount(tmp_path)
    mount.put(b"step_7.pt", b"x")
    with mount.db.transaction():
        made = history.insert_series(mount.db, ROOT, b"step_*.pt")
        held = history.begin_set(mount.db, made.directory, SetRecord(1, b"step_7.pt", (7,), 1, 1, 1, is_group=True))
        history.insert_link(mount.db, mount.number(b"step_7.pt"), held, b"step_7.pt")
        history.finish_set(mount.db, held)
    mount.put(b".ckptfs.history/step_*.pt/step_7.pt@1/MANIFEST.json", b"{}")
    if is_deleted:
        mount.unlink(b"step_7.pt")
    rescue = Rescue(mount.db, Level.PFS, 3600.0)
    rescue.refresh_if_due()
    assert rescue.count_left() == (1, 1)
    assert [one.series for one in rescue.build_safety().series] == [series]
