"""P4, P5, X5: bit rot is found by reading, and the content comes back from the nearest good copy: tier, node or PFS."""

import os
from pathlib import Path

import pytest
from ckptfs_daemon.control.admin import FileVerifier
from ckptfs_daemon.control.control_context import ControlContext
from clique_world import bring, cluster_of, fetch_of, level, make_cluster, replicated
from local_node import Node, inject_fault, run_until_idle
from pfs_world import World, bytes_here

from ckptfs import limits, procfs
from ckptfs.catalog import copies, mover_requests, peer_copies
from ckptfs.clique import locations
from ckptfs.flow import verify as verify_step
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.verify import CheckResult, Scrub, verify
from ckptfs.model import ContentState, CopyState, Level, Tier
from ckptfs.tiers.storage import TierStorage

DAY_S = verify_step.INTERVAL_S
Repaired = list[tuple[str, str]]
"""(path, source) of each repair that the event log gets."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses."""
    monkeypatch.setattr(verify_step, "BYTES_PER_S", 1 << 60)
    monkeypatch.setattr(verify_step, "PATIENCE_S", 0.0)


def scrub_of(node: Node, repaired: Repaired | None = None) -> Scrub:
    told: Repaired = [] if repaired is None else repaired
    return Scrub(node.db, node.tiers, node.told, lambda path, one: told.append((path, one.source)))


def age(node: Node, seconds: float) -> None:
    """Let all copies have been verified so much earlier."""
    node.db.run("UPDATE copy SET verified_ns = verified_ns - ?", int(seconds * 1e9))


def check_order(node: Node, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The contents that a scrub verifies, in their order."""
    order: list[int] = []

    def noted(db: object, tiers: object, number: int, *_: object) -> list[CheckResult]:
        order.append(number)
        return verify(node.db, node.tiers, number)

    monkeypatch.setattr(verify_step, "verify", noted)
    run_until_idle(scrub_of(node))
    return order


@pytest.mark.parametrize("tiers", [1, 2])
def test_verify_takes_the_content_from_a_node_if_all_copies_here_are_bad(tmp_path: Path, tiers: int) -> None:
    cluster, one, _ = make_cluster(tmp_path, 2, nvme=True)
    content = replicated(cluster, b"a", data := os.urandom(2 * limits.BLOCK_BYTES))
    if tiers == 2:
        one.copy_to_tier(content, Tier.NVME)
    for tier in one.copies(content):
        one.spoil(content, tier)
    stale: list[int] = []
    context = ControlContext(one.config, one.db, one.tiers, retry_now=lambda: run_until_idle(fetch_of(one)), invalidate_inode=stale.append)
    findings, _ = FileVerifier(context).verify_file(one.inode(content))
    assert [finding.what.partition("; ")[2] for finding in findings] == ["repaired from n2", "repaired from ram"][:tiers]
    assert set(one.copies(content).values()) == {CopyState.GOOD} and one.state(content) is ContentState.SEALED
    assert {one.data(content, tier) for tier in one.copies(content)} == {data}
    assert level(one, content) is Level.CLIQUE and set(stale) == {one.inode(content)}


def test_verify_takes_the_content_from_the_pfs_if_nothing_else_is_good(tmp_path: Path) -> None:
    world = World(tmp_path)
    (world.pfs / "file").write_bytes(data := os.urandom(5_000_000))
    world.visit("")
    world.bring("file")
    content = int(str(world.column("file", "content")))
    (path,) = world.tiers[Tier.RAM].root.glob(f"contents*/{content:016x}")
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    context = ControlContext(world.config, world.db, world.tiers, retry_now=lambda: run_until_idle(world.fetch))
    findings, _ = FileVerifier(context).verify_file(world.inode("file"))
    assert findings[0].what.endswith("in block 1; repaired from the PFS") and findings[1].verdict == "good"
    assert bytes_here(world, "file") == (Tier.RAM, data)


def test_a_content_is_lost_only_until_the_store_names_a_node_that_has_it(tmp_path: Path) -> None:
    """P5: the node has restarted, so its copies are forgotten until it is asked; just then the copy here is found bad."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"a", data := os.urandom(100))
    peer_copies.delete_copies_of_node(one.db, two.number)
    one.spoil(content, Tier.RAM)
    verify(one.db, one.tiers, content)
    assert one.state(content) is ContentState.LOST
    locations.refresh(one.db, one.store, [content], one.number)  # As the reconcile step does.
    assert one.state(content) is ContentState.SEALED
    bring(one, one.inode(content))
    assert one.data(content) == data and level(one, content) is Level.CLIQUE


# --- in the background ---------------------------------------------------------------------------------------------------


def test_each_copy_is_verified_once_in_a_pass_the_oldest_first(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (node.make_sealed(name, b"data") for name in (b"1", b"2", b"3"))
    node.copy_to_tier(third, Tier.NVME)
    age(node, DAY_S)
    node.db.run("UPDATE copy SET verified_ns = verified_ns - 1000000000 WHERE content = ?", second)
    node.make_sealed(b"4", b"fresh")
    assert check_order(node, monkeypatch) == [second, first, third]
    assert check_order(node, monkeypatch) == []
    age(node, DAY_S)
    assert len(check_order(node, monkeypatch)) == 4


def test_a_clock_that_was_ahead_hides_no_copy(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    content = node.make_sealed(b"file", b"data")
    age(node, -10 * DAY_S)
    assert check_order(node, monkeypatch) == [content]


@pytest.mark.parametrize("rot", [Tier.RAM, Tier.NVME])
def test_bit_rot_is_repaired_from_the_other_tier(node: Node, rot: Tier) -> None:
    content, repaired = node.make_sealed(b"file", data := os.urandom(5_000_000)), Repaired()
    node.copy_to_tier(content, Tier.NVME)
    node.spoil(content, rot)
    run_until_idle(scrub_of(node, repaired))
    assert repaired == [], "it was verified a moment ago"
    age(node, DAY_S)
    run_until_idle(scrub_of(node, repaired))
    assert repaired == [("file", "ram" if rot is Tier.NVME else "nvme")]
    assert node.copies(content) == {Tier.RAM: CopyState.GOOD, Tier.NVME: CopyState.GOOD} and node.data(content, rot) == data
    assert node.told.inodes == [node.inode(content)], "the kernel may have pages of the bad copy"
    found = copies.load_check_figures(node.db)
    assert (found.bad_found, found.quarantined) == (1, 0) and found.oldest_ns > 1e18


def test_the_pfs_which_may_hang_is_read_only_if_no_copy_in_a_local_tier_is_good(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: both kinds of copies are left if a file from another node found the local tiers full."""
    content, opened = node.make_sealed(b"file", b"data" * 1000), list[Tier]()
    node.copy_to_tier(content, Tier.PFS)
    age(node, DAY_S)
    open_copy = TierStorage.open
    monkeypatch.setattr(TierStorage, "open", lambda own, *values: (opened.append(own.tier), open_copy(own, *values))[1])
    run_until_idle(scrub_of(node))
    assert opened == [Tier.RAM]
    node.spoil(content, Tier.RAM)
    age(node, DAY_S)
    run_until_idle(scrub_of(node))
    assert Tier.PFS in opened and node.data(content) == b"data" * 1000


def test_bit_rot_of_the_only_copy_is_repaired_from_a_node(tmp_path: Path) -> None:
    cluster, one, _ = make_cluster(tmp_path, 2)
    content, repaired = replicated(cluster, b"a", data := os.urandom(100)), Repaired()
    one.spoil(content, Tier.RAM)
    age(one, DAY_S)
    scrub, fetch = scrub_of(one, repaired), fetch_of(one)
    run_until_idle(scrub)
    assert one.copies(content) == {Tier.RAM: CopyState.QUARANTINED} and one.state(content) is ContentState.SEALED
    assert scrub.next_due_s() == limits.REQUEST_POLL_S
    run_until_idle(fetch)
    run_until_idle(scrub)
    assert repaired == [("a", "n2")] and one.data(content) == data and level(one, content) is Level.CLIQUE


def test_bit_rot_of_a_hosted_copy_is_repaired_from_its_writer(tmp_path: Path) -> None:
    """P4, P9: it counts no more for the writer's file either, until it is good again."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content, repaired = replicated(cluster, b"a", data := os.urandom(100)), Repaired()
    two.spoil(content, Tier.RAM)
    age(two, DAY_S)
    scrub = scrub_of(two, repaired)
    run_until_idle(scrub)
    AnnounceCopies(two.db, cluster_of(two)).step()
    assert locations.load(one.store, [content])[content].holders == [1]
    run_until_idle(fetch_of(two))
    run_until_idle(scrub)
    assert repaired == [("a", "n1")] and two.data(content) == data


def test_a_hosted_copy_of_a_file_that_is_not_known_here_is_withdrawn(tmp_path: Path) -> None:
    """Its writer finds that out and sends it again: see `test_reconcile`."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"a", os.urandom(100))
    two.db.run("DELETE FROM inode WHERE id = ?", one.inode(content))
    two.spoil(content, Tier.RAM)
    age(two, DAY_S)
    run_until_idle(scrub_of(two))
    assert mover_requests.list_open(two.db, mover_requests.FETCH) == []
    AnnounceCopies(two.db, cluster_of(two)).step()
    assert locations.load(one.store, [content])[content].holders == [1]


def test_few_repairs_are_under_way_at_once(tmp_path: Path) -> None:
    """P1: a device that spoils everything must not put thousands of fetches before those of applications."""
    cluster, one, _ = make_cluster(tmp_path, 2)
    made = [replicated(cluster, b"%d" % number, os.urandom(100)) for number in range(limits.REFETCHES_MAX + 2)]
    for content in made:
        one.spoil(content, Tier.RAM)
    age(one, DAY_S)
    scrub, fetch = scrub_of(one, repaired := Repaired()), fetch_of(one)
    run_until_idle(scrub)
    assert len(mover_requests.list_open(one.db, mover_requests.FETCH)) == limits.REFETCHES_MAX
    assert scrub.next_due_s() == limits.REQUEST_POLL_S
    for _ in made:
        run_until_idle(fetch)
        run_until_idle(scrub)
    assert len(repaired) == len(made)
    assert {state for content in made for state in one.copies(content).values()} == {CopyState.GOOD}


def test_a_bad_copy_that_another_step_has_found_is_repaired_at_once(node: Node) -> None:
    """It is not due: it was verified a moment ago."""
    content, repaired = node.make_sealed(b"file", b"data"), Repaired()
    node.copy_to_tier(content, Tier.NVME)
    node.spoil(content, Tier.RAM)
    copies.mark_copy_bad(node.db, content, Tier.RAM)
    run_until_idle(scrub_of(node, repaired))
    assert repaired == [("file", "nvme")] and node.data(content) == b"data"


def test_what_cannot_be_repaired_is_lost_kept_and_tried_again_later(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    content, scrub = node.make_sealed(b"file", b"data"), scrub_of(node)
    node.spoil(content, Tier.RAM)
    age(node, DAY_S)
    run_until_idle(scrub)
    assert node.state(content) is ContentState.LOST and node.files(Tier.RAM) == {content}
    node.spoil(content, Tier.RAM)
    run_until_idle(scrub)
    assert node.state(content) is ContentState.LOST
    monkeypatch.setattr(verify_step, "RETRY_S", 0.0)
    scrub._not_before_s.clear()
    assert scrub.step() and node.state(content) is ContentState.SEALED


def test_a_tier_that_fails_proves_nothing_and_ends_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    content = node.make_sealed(b"file", b"data")
    age(node, DAY_S)
    inject_fault(monkeypatch, "verify:read=EIO@*")
    run_until_idle(scrub_of(node))
    assert node.copies(content) == {Tier.RAM: CopyState.GOOD} and copies.load_check_figures(node.db).bad_found == 0


@pytest.mark.parametrize("work", ["unsealed", "copies", "write back", "fetch", "memory"])
def test_other_work_goes_first_and_not_without_end(node: Node, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    content = node.make_sealed(b"file", b"data" * 1000)
    node.db.run("DELETE FROM journal")
    age(node, DAY_S)
    scrub, looks = scrub_of(node), 0
    assert not scrub._must_yield()
    if work == "unsealed":
        node.make(b"next", b"data")
        node.db.run("DELETE FROM journal")
    elif work == "copies":
        node.db.run("UPDATE content SET under_replicated = 1")
    elif work == "write back":
        node.make_sealed(b"next", b"data")
    elif work == "fetch":
        mover_requests.insert_request(node.db, mover_requests.FETCH, node.inode(content))
    else:
        monkeypatch.setattr(procfs, "get_memory_pressure", lambda: 50.0)
    monkeypatch.setattr(verify_step, "PATIENCE_S", 1000.0)
    monkeypatch.setattr(verify_step, "PAUSE_S", 0.0)
    must_yield = scrub._must_yield

    def ended() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            monkeypatch.setattr(verify_step, "PATIENCE_S", 0.0)
            return False
        assert must_yield()
        return True

    monkeypatch.setattr(scrub, "_must_yield", ended)
    run_until_idle(scrub)
    assert looks >= 3 and check_order(node, monkeypatch) == []


def test_the_bandwidth_is_bounded(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.make_sealed(b"file", os.urandom(3 * limits.BLOCK_BYTES))
    node.db.run("DELETE FROM journal")
    age(node, DAY_S)
    monkeypatch.setattr(verify_step, "BYTES_PER_S", 100.0 * limits.MIB)
    scrub, waits = scrub_of(node), []
    monkeypatch.setattr(scrub._pause, "wait", waits.append)
    run_until_idle(scrub)
    assert waits == [0.04] * 3
