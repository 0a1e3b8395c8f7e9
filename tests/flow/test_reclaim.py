"""P5: reclaim removes what is not needed and nothing else. A tier that refuses only delays it."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ckptfs_daemon.control.status import build_capacity
from ckptfs_daemon.mover.main import _Flows
from local_node import Node, in_process, inject_fault, run_until_idle

from ckptfs import limits
from ckptfs.catalog import copies, mover_requests, summary
from ckptfs.catalog.contents import set_state
from ckptfs.catalog.database import Database
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.seal import Seal
from ckptfs.model import ContentState, CopyState, Tier
from ckptfs.tiers import space
from ckptfs.tiers.storage import TierStorage


def drop(node: Node, *, sweep: bool = False) -> Reclaim:
    step = Reclaim(node.db, node.tiers, node.config, node.told)
    if sweep:
        step._sweep_s = 0.0
    return step


def doom(node: Node, content: int) -> None:
    set_state(node.db, content, ContentState.DOOMED)


def age(node: Node, tier: Tier, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file appear an hour older: ctime cannot be set, so the clock moves."""
    now = time.time()
    monkeypatch.setattr("ckptfs.flow.reclaim.time.time", lambda: now + 3600)
    assert number in node.files(tier)


@pytest.mark.parametrize("tier", list(Tier))
def test_a_doomed_content_goes_with_its_rows(node: Node, tier: Tier) -> None:
    doomed, kept = node.make(b"doomed", b"1", tier=tier), node.make(b"kept", b"2", tier=tier)
    doom(node, doomed)
    assert drop(node).step() is False
    assert node.state(doomed) is None and node.copies(doomed) == {}
    assert node.files(tier) == {kept}


def test_a_file_that_the_mount_removed_already_is_no_trouble(node: Node) -> None:
    content = node.make(b"file", b"1")
    doom(node, content)
    node.tiers[Tier.RAM].remove(content)
    drop(node).step()
    assert node.state(content) is None


def in_cluster(node: Node) -> Reclaim:
    node.db = Database(node.db.path, journalled=True, clustered=True)
    return drop(node)


def test_a_reader_on_another_node_has_time_to_open_what_was_deleted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: between its lookup and its open. Its space counts as free meanwhile."""
    now_s = time.monotonic()
    monkeypatch.setattr("ckptfs.flow.reclaim.time.monotonic", lambda: now_s)
    content = node.make(b"file", b"12345")
    doom(node, content)
    flow = in_cluster(node)
    flow.step()
    assert node.files(Tier.RAM) == {content} and copies.count_doomed_bytes(node.db, Tier.RAM) == 5
    assert (flow.next_due_s() or 0.0) <= limits.READ_GRACE_POLL_S
    now_s += limits.READ_GRACE_S
    flow.step()
    assert node.files(Tier.RAM) == set() and node.state(content) is None and copies.count_doomed_bytes(node.db, Tier.RAM) == 0


def test_what_was_deleted_goes_at_once_where_the_next_content_has_no_room(node: Node) -> None:
    """P10."""
    contents = [node.make(b"%d" % number, bytes(1000)) for number in range(3)]
    doom(node, contents[0])
    node.squeeze(Tier.RAM, 6000)
    flow = in_cluster(node)
    flow.step()
    assert node.files(Tier.RAM) == set(contents)
    assert build_capacity(node.config, node.db, node.tiers).tiers[0].free_bytes == 4000, "df shows it as free"
    node.squeeze(Tier.RAM, 5000)
    flow = in_cluster(node)
    flow.step()
    assert node.files(Tier.RAM) == set(contents[1:])


def test_what_was_deleted_goes_at_once_for_a_writer_that_waits(node: Node) -> None:
    content = node.make(b"file", b"1")
    doom(node, content)
    flow = in_cluster(node)
    summary.set_space_demand(node.db, 1 << 40)
    flow.step()
    assert node.files(Tier.RAM) == set()


def test_so_many_deleted_contents_stay_and_no_more(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_GRACE_CONTENTS_MAX", 2)
    contents = [node.make(b"%d" % number, b"x") for number in range(5)]
    for content in contents:
        doom(node, content)
    in_cluster(node).step()
    assert node.files(Tier.RAM) == set(contents[:2])


def test_an_open_content_stays(node: Node) -> None:
    content = node.make(b"file", b"1")
    node.hold(content)
    doom(node, content)
    drop(node).step()
    assert node.files(Tier.RAM) == {content} and node.state(content) is not None


def test_contents_are_removed_in_batches(node: Node) -> None:
    with node.db.transaction():
        contents = [node.make(b"%d" % number, b"x") for number in range(300)]
        for content in contents:
            doom(node, content)
    step = drop(node)
    assert step.step() is True
    run_until_idle(step)
    assert node.files(Tier.RAM) == set() and node.db.value("SELECT count(*) FROM content") == 0


def test_the_pfs_has_a_lane_of_its_own(node: Node) -> None:
    content = node.make(b"file", b"1", tier=Tier.PFS)
    doom(node, content)
    local = Reclaim(node.db, node.tiers, node.config, node.told, (Tier.RAM, Tier.NVME))
    assert local.step() is False
    assert node.files(Tier.PFS) == {content} and node.state(content) is not None
    Reclaim(node.db, node.tiers, node.config, node.told, (Tier.PFS,)).step()
    assert node.files(Tier.PFS) == set() and node.state(content) is None


def test_leftovers_go_when_they_are_old_and_never_before(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    known = node.make(b"known", b"1")
    os.close(node.tiers[Tier.RAM].create(4711))
    drop(node, sweep=True).step()
    assert node.files(Tier.RAM) == {known, 4711}, "the mount may be about to commit its row"
    age(node, Tier.RAM, 4711, monkeypatch)
    drop(node, sweep=True).step()
    assert node.files(Tier.RAM) == {known}


def test_a_file_to_which_the_mount_moves_an_open_content_stays(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: it is written, and then read back for minutes; its row comes last."""
    content = node.make(b"large", b"1", closed=False)
    os.close(node.tiers[Tier.NVME].create(content))
    age(node, Tier.NVME, content, monkeypatch)
    drop(node, sweep=True).step()
    assert node.files(Tier.NVME) == {content}
    node.close_content(content, 1)
    drop(node, sweep=True).step()
    assert node.files(Tier.NVME) == set() and node.files(Tier.RAM) == {content}, "the move failed"


def test_a_row_that_is_committed_during_the_sweep_saves_its_file(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    content = node.make(b"new", b"1")
    age(node, Tier.RAM, content, monkeypatch)
    monkeypatch.setattr("ckptfs.catalog.copies.list_copies_in_tier", lambda *_: {})
    drop(node, sweep=True).step()
    assert node.files(Tier.RAM) == {content}


def test_a_leftover_whose_name_the_mount_takes_over_is_left_to_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier catalog left a file under an id that is given out only now: the sweep must not remove the new content."""
    os.close(node.tiers[Tier.RAM].create(1))
    age(node, Tier.RAM, 1, monkeypatch)
    looked = TierStorage.stat

    def stat(place: TierStorage, number: int) -> object:
        found = looked(place, number)
        if node.db.value("SELECT count(*) FROM content") == 0:
            place.remove(1)
            assert node.make(b"new", b"data") == 1
        return found

    monkeypatch.setattr(TierStorage, "stat", stat)
    drop(node, sweep=True).step()
    monkeypatch.undo()
    assert node.data(1) == b"data"


def test_files_of_others_in_a_tier_stay(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = node.tiers[Tier.NVME].root / "contents" / "README"
    stranger.write_text("hands off")
    os.close(node.tiers[Tier.NVME].create(4711))
    age(node, Tier.NVME, 4711, monkeypatch)
    drop(node, sweep=True).step()
    assert stranger.exists() and node.files(Tier.NVME) == set()


def test_a_quarantined_copy_goes_only_beside_a_good_one(node: Node) -> None:
    lonely, paired = node.make(b"lonely", b"1"), node.make(b"paired", b"2")
    Seal(node.db, node.tiers, node.config, node.told).step()
    node.copy_to_tier(paired, Tier.NVME)
    node.db.run("UPDATE copy SET state = 2, verified_ns = 0 WHERE tier = 'ram'")
    drop(node, sweep=True).step()
    assert node.copies(lonely) == {Tier.RAM: CopyState.QUARANTINED}
    assert node.copies(paired) == {Tier.NVME: CopyState.GOOD}
    assert node.files(Tier.RAM) == {lonely}


def test_a_quarantined_copy_that_is_fetched_again_keeps_its_file(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    content = node.make_sealed(b"f", b"old")
    node.publish(content)
    node.db.run("UPDATE copy SET state = 2, verified_ns = 0")
    forget = copies.delete_copy
    meant = drop(node, sweep=True)

    def brought_back(*values: object) -> None:
        forget(*values)  # type: ignore[arg-type]
        node.db.run("INSERT INTO copy (content, tier, state) VALUES (?, 'ram', 0)", content)

    monkeypatch.setattr(copies, "delete_copy", brought_back)
    meant.step()
    assert node.files(Tier.RAM) == {content}


def test_a_tier_that_was_left_out_is_not_touched(node: Node) -> None:
    """Its directory is another one than the catalog knows: we go on without it, and what the catalog says of it waits."""
    flow, seal = drop(node), Seal(node.db, node.tiers, node.config, node.told)
    there, waits = node.make(b"there", b"1", tier=Tier.NVME), node.make(b"waits", b"2", tier=Tier.NVME)
    doom(node, there)
    node.tiers.exclude(Tier.NVME)
    flow.step()
    seal.step()
    assert (node.root / "nvme" / "contents" / f"{there:016x}").exists()
    assert node.state(waits) is ContentState.CLOSED


@pytest.mark.crash
@pytest.mark.parametrize("label", ["tier:remove", "reclaim:forget"])
@pytest.mark.parametrize("action", ["kill", "kill-after", "EIO"])
def test_dying_anywhere_drops_the_same_in_the_end(tmp_path: Path, label: str, action: str) -> None:
    node = Node(tmp_path)
    doomed, kept = [node.make(b"d%d" % number, b"1") for number in range(3)], node.make(b"kept", b"2")
    for content in doomed:
        doom(node, content)
    script = """
from ckptfs.flow.reclaim import Reclaim
try:
    Reclaim(node.db, node.tiers, node.config, node.told).step()
except OSError:
    pass
"""
    in_process(tmp_path, script, fault=f"{label}={action}")
    assert node.data(kept) == b"2"
    drop(node).step()
    assert node.files(Tier.RAM) == {kept} and all(node.state(content) is None for content in doomed)


def test_a_leftover_that_cannot_be_removed_is_removed_later(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    os.close(node.tiers[Tier.RAM].create(4711))
    age(node, Tier.RAM, 4711, monkeypatch)
    inject_fault(monkeypatch, "reclaim:leftover=EIO@*")
    with pytest.raises(OSError, match="injected"):
        drop(node, sweep=True).step()
    assert node.files(Tier.RAM) == {4711}
    inject_fault(monkeypatch, "")
    drop(node, sweep=True).step()
    assert node.files(Tier.RAM) == set()


def test_a_quarantined_copy_that_cannot_be_removed_is_forgotten_all_the_same(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    content = node.make_sealed(b"file", b"data")
    node.copy_to_tier(content, Tier.NVME)
    node.db.run("UPDATE copy SET state = ? WHERE tier = ?", int(CopyState.QUARANTINED), str(Tier.RAM))
    inject_fault(monkeypatch, "reclaim:quarantined=EIO@*")
    with pytest.raises(OSError, match="injected"):
        drop(node, sweep=True).step()
    inject_fault(monkeypatch, "")
    assert node.copies(content) == {Tier.NVME: CopyState.GOOD}


def test_a_ram_tier_that_cannot_be_enlarged_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_fault(monkeypatch, "ram:remount=EPERM")
    with pytest.raises(PermissionError, match="injected"):
        space.resize_ram(tmp_path, 1 << 20)


@pytest.mark.parametrize("has_pfs", [False, True])
def test_requests_without_a_caller_go_in_every_configuration(node: Node, has_pfs: bool) -> None:
    node.config = replace(node.config, pfs=node.config.pfs if has_pfs else None)
    gone = mover_requests.insert_request(node.db, mover_requests.FETCH, 1, wait_s=-1.0)
    open_ = mover_requests.insert_request(node.db, mover_requests.FETCH, 2)
    flows = [flow for _, flow in _Flows(node.db, node.tiers, node.config, node.told, None).lanes]
    for flow in flows:
        if isinstance(flow, Reclaim):
            flow.step()
            assert (flow.next_due_s() or 0.0) <= limits.REQUEST_KEEP_S, "it looks again of itself"
    assert mover_requests.get(node.db, gone) is None and mover_requests.get(node.db, open_) is not None
