"""P3, P9, N1: a sealed content is copied to the peers that placement names. It counts when verified; no peer delays another."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from clique_world import MIB, LocalCluster, Node, cluster_of, is_at_rest, level, make_cluster, offer_of, replicate, replicate_of, until
from local_node import inject_fault

from ckptfs import disk, limits, step_durations
from ckptfs.catalog import contents, copies, exposure, peer_copies, summary
from ckptfs.catalog.exposure import UrgentOrder
from ckptfs.clique import locations
from ckptfs.clique.peer_api import PeerCorrupt, PeerFailed
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.replicate.peer_queues import PeerBackoff
from ckptfs.model import Content, ContentState, CopyState, Level, Tier
from ckptfs.store.kv import Delete

BLOCK = limits.BLOCK_BYTES


def test_a_sealed_content_is_copied_and_reaches_clique(tmp_path: Path) -> None:
    one, two, three = (cluster := LocalCluster(tmp_path, 3)).nodes
    content = one.written(b"a", data := os.urandom(BLOCK + 7))
    assert level(one, content) is Level.LOCAL
    before = step_durations.get_histograms()[step_durations.REPLICATE].size_bytes
    flow = replicate(one, content)
    until(lambda: step_durations.get_histograms()[step_durations.REPLICATE].size_bytes - before == len(data))
    assert two.data(content) == data and three.copies(content) == {}
    until(lambda: not peer_copies.list_under_replicated(one.db, 0, 10), flow.step)
    assert peer_copies.get_replication_lag(one.db)[0] == 0
    assert cluster.nodes[0].peers.sent == [("n2", content, len(data))]


def test_three_copies_in_three_failure_domains(tmp_path: Path) -> None:
    cluster, one, *_ = make_cluster(tmp_path, 5, domains=["r1", "r1", "r2", "r2", "r3"], factor=3)
    content = one.written(b"a", b"hello")
    replicate(one, content)
    holders = {node.member.domain for node in cluster.nodes if content in node.files(Tier.RAM)}
    assert holders == {"r1", "r2", "r3"}


def test_a_single_node_waits_for_a_peer(tmp_path: Path) -> None:
    _, one, two = make_cluster(tmp_path, 2)
    two.kill()
    content = one.written(b"a", b"hello")
    flow = replicate_of(one)
    assert flow.step() is False and level(one, content) is Level.LOCAL
    two.revive()
    until(lambda: level(one, content) is Level.CLIQUE, flow.step)


@pytest.mark.parametrize("trouble", ["dead", "full", "refuses"])
def test_the_next_peer_takes_what_the_first_refuses(tmp_path: Path, trouble: str) -> None:
    cluster, one, two, three = make_cluster(tmp_path, 3)
    if trouble == "dead":
        cluster.cut.add("n2")
    elif trouble == "full":
        two.squeeze(Tier.RAM, MIB)
        two.renew_host()
    else:

        def busy(act: str, name: str) -> None:
            if name == "n2":
                raise PeerFailed("no")

        one.peers.fault = busy
    data = os.urandom(BLOCK)
    content = one.written(b"a", data)
    replicate(one, content)
    assert three.data(content) == data and two.files(Tier.RAM) == set()


def test_a_peer_that_hangs_delays_no_other(tmp_path: Path) -> None:
    """Two copies are wanted; the one that goes to the node that answers arrives while the other one hangs."""
    _, one, two, three = make_cluster(tmp_path, 3, factor=3)
    released = threading.Event()

    def hang(act: str, name: str) -> None:
        if name == "n2":
            released.wait(60)

    one.peers.fault = hang
    flow = replicate_of(one)
    written = [one.written(b"f%d" % number, os.urandom(1000)) for number in range(20)]
    try:
        until(lambda: all(three.copies(content) for content in written), flow.step)
        assert not any(two.copies(content) for content in written)
    finally:
        released.set()
    until(lambda: all(two.copies(content) for content in written), flow.step)


@pytest.mark.parametrize("is_ended_by_a_user", [True, False])
def test_a_wait_that_ends_during_a_plan_changes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_ended_by_a_user: bool) -> None:
    """G1: what the plan has passed over until then may be the most urgent. It goes first with the next plan, and that comes at once."""
    monkeypatch.setattr(limits, "PEER_SENDS_MAX", 1)
    _, one, two = make_cluster(tmp_path, 2)
    written = [one.written(b"%d" % number, os.urandom(2 * MIB)) for number in range(3)]
    flow, backoff = replicate_of(one), PeerBackoff()
    backoff._nodes[two.number] = time.monotonic() + 60, 60
    monkeypatch.setattr(flow, "_backoff", backoff)
    plan = flow._plan

    def end_wait(content: Content, tier: Tier) -> None:
        plan(content, tier)
        if is_ended_by_a_user:
            flow.retry_now()
        else:
            backoff._nodes[two.number] = time.monotonic(), 60

    monkeypatch.setattr(flow, "_plan", end_wait)
    flow.step()
    assert is_ended_by_a_user or flow.next_due_s() is not None
    until(lambda: level(one, written[-1]) is Level.CLIQUE, flow.step)
    assert [content for _, content, _ in one.peers.sent] == written


def test_a_content_that_is_reopened_during_a_copy_does_not_count(tmp_path: Path) -> None:
    """P7: the peer gets no mixture, and the next generation goes its own way."""
    _, one, two = make_cluster(tmp_path, 2)
    content = one.written(b"a", os.urandom(3 * BLOCK))
    flow = replicate_of(one)
    seen: list[int] = []

    def reopen(act: str, name: str) -> None:
        if act == "block" and not seen:
            seen.append(1)
            one.reopen(content, Tier.RAM)

    one.peers.fault = reopen
    flow.step()
    until(lambda: is_at_rest(flow) and seen)
    assert two.copies(content) == {} and peer_copies.list_peer_copies(one.db, content) == []
    assert one.state(content) is ContentState.OPEN
    one.rewrite(content, lambda data: data.reverse())
    until(lambda: level(one, content) is Level.CLIQUE, flow.step)
    assert two.data(content) == one.data(content)


def test_a_copy_that_went_bad_here_is_found_when_it_is_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P4."""
    _, one, *_ = make_cluster(tmp_path, 2)
    content = one.written(b"a", os.urandom(BLOCK))
    one.spoil(content, Tier.RAM)
    flow = replicate_of(one)
    until(lambda: one.state(content) is ContentState.LOST, flow.step)
    assert one.copies(content) == {Tier.RAM: CopyState.QUARANTINED}
    until(lambda: "is quarantined" in caplog.text)


def test_a_deletion_is_passed_on_to_nodes_that_fetched_the_file(tmp_path: Path) -> None:
    """Only the store knows of a copy that was made by reading."""
    cluster, one, two, three = make_cluster(tmp_path, 3)
    content = one.written(b"a", b"hello")
    flow = replicate(one, content)
    cluster_of(three).copy_records.announce([(one.row(content), True)])
    contents.set_state(one.db, content, ContentState.DOOMED)
    copies.delete_doomed(one.db, copies.list_doomed(one.db, (Tier.RAM,), 0, 10))
    cluster.store.commit([], [Delete(locations.build_content_key(content))])
    until(lambda: two.host.reported_unneeded == {content} == three.host.reported_unneeded, flow.step)
    assert peer_copies.list_unneeded(one.db, 10) == []
    assert locations.load(cluster.store, [content])[content].copies == ()


def test_a_living_peer_that_is_unreachable_is_notified_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still, or was cut off for a moment; others are told meanwhile. Who died is not waited for."""
    monkeypatch.setattr(limits, "RETRY_FIRST_S", 0.05)
    cluster, one, two, three, four = make_cluster(tmp_path, 4)
    cluster.cut.add("n2")
    four.kill()
    with one.db.transaction():
        for content in range(1000, 1200):
            for node in (2, 3, 4):
                peer_copies.insert_unneeded_copy(one.db, content, node)
    flow = replicate_of(one)
    until(lambda: three.host.reported_unneeded == set(range(1000, 1200)), flow.step)
    until(lambda: {copy.node for copy in peer_copies.list_unneeded(one.db, 1000)} == {2}, flow.step)
    cluster.cut.clear()
    until(lambda: two.host.reported_unneeded == set(range(1000, 1200)) and not peer_copies.list_unneeded(one.db, 1), flow.step)


@pytest.mark.parametrize("end", ["reached", "dead", "replicated elsewhere"])
def test_a_node_that_lives_and_cannot_be_reached_is_a_trouble_while_files_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """X11: etcd answers both nodes, so nothing else tells. A revoked node, which all others refuse, is such a one."""
    monkeypatch.setattr(limits, "NODE_LEASE_S", 0.3)
    cluster, one, two, three = make_cluster(tmp_path, 3)
    three.kill()
    cluster.cut.add("n2")
    content = one.written(b"a", b"hello")
    flow = replicate_of(one)
    until(lambda: summary.list_troubles(one.db, "copies"), flow.step)
    ((_, value, _),) = summary.list_troubles(one.db, "copies")
    assert value["what"] == "files wait for copies: n2 does not answer" and value["remedy"]
    if end == "reached":
        cluster.cut.clear()
    elif end == "dead":
        two.kill()
    else:
        three.revive()
    until(lambda: not summary.list_troubles(one.db), flow.step)
    assert (level(one, content) is Level.CLIQUE) is (end != "dead")


def behind(node: Node) -> tuple[int, int, int]:
    """(unsafe files, files that lack copies, copies that these need)."""
    db = node.db
    return peer_copies.count_unsafe(db), peer_copies.get_replication_lag(db)[0], peer_copies.count_wanted_copies(db)[0]


def test_a_lost_content_that_another_node_rewrote_is_not_waited_for(tmp_path: Path) -> None:
    """This node lost its RAM, another one has truncated the file since, and who had a copy died: `drain` comes to an end."""
    one, two, three = LocalCluster(tmp_path, 3).nodes
    content = one.written(b"a", b"hello")
    flow = replicate(one, content)
    until(lambda: not peer_copies.list_under_replicated(one.db, 0, 10), flow.step)
    one.lose_ram()
    two.kill()
    assert behind(one) == (1, 1, 2), "the file still needs it"
    newer = three.make(b"b", b"other")
    one.learn(one.inode(content), b"a", newer, 5)
    assert behind(one) == (0, 0, 0)
    assert peer_copies.get_replication_lag(one.db)[2] == 0


def test_an_evicted_content_on_the_pfs_is_not_behind_when_a_holder_dies(tmp_path: Path) -> None:
    """This node has no bytes to send, and the file needs none. If the PFS loses it, it does."""
    one, two, three = LocalCluster(tmp_path, 3).nodes
    content = one.written(b"a", b"hello")
    flow = replicate(one, content)
    until(lambda: not peer_copies.list_under_replicated(one.db, 0, 10), flow.step)
    one.publish(content)
    one.lose_ram()
    (two if two.copies(content) else three).kill()
    assert behind(one) == (0, 0, 0)
    one.db.run("DELETE FROM pfs_file")
    assert behind(one) == (1, 1, 2)


def test_small_files_travel_together_and_count_one_by_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """More than the queue holds, too; one that went bad here and one that is refused there are nothing to the others (P4)."""
    _, one, two = make_cluster(tmp_path, 2)
    found = [one.make(b"%d" % number, b"%d" % number) for number in range(limits.PEER_QUEUE_MAX + 40)]
    one.seal()
    one.spoil(found[3], Tier.RAM)
    blocking = two.host.begin_reception(replace(offer_of(one, found[5]), sender=one.member.name))
    flow = replicate_of(one)
    flow.step()
    until(lambda: one.state(found[3]) is ContentState.LOST and peer_copies.get_replication_lag(one.db)[0] == 1, flow.step)
    assert level(one, found[4]) is Level.CLIQUE and level(one, found[5]) is Level.LOCAL
    two.host.abort_reception(blocking.token)
    until(lambda: not peer_copies.get_replication_lag(one.db)[0], flow.step)
    assert all(two.data(content) == one.data(content) for content in found if content != found[3])
    assert sum(one.peers.together) > len(found) / 2 and max(one.peers.together) == limits.PEER_BATCH_MAX
    assert ": lost: " in caplog.text


def test_a_peer_that_takes_none_of_many_failed_once(tmp_path: Path) -> None:
    """It is asked again as soon as after any other failure."""
    _, one, *_ = make_cluster(tmp_path, 2)
    found = [one.make(b"%d" % number, b"%d" % number) for number in range(200)]
    one.seal()
    failed: list[str] = []

    def break_off(act: str, name: str) -> None:
        if act in ("many", "send") and len(failed) < limits.PEER_SENDS_MAX:
            failed.append(name)
            raise PeerFailed("no")

    one.peers.fault = break_off
    flow = replicate_of(one)
    flow.step()
    until(lambda: failed and is_at_rest(flow))
    assert flow.next_due_s() is None or flow.next_due_s() < 2 ** (limits.PEER_SENDS_MAX + 1) * limits.RETRY_FIRST_S  # type: ignore[operator]
    until(lambda: all(level(one, content) is Level.CLIQUE for content in found), flow.step)


@pytest.mark.parametrize("label", sorted(label for label in disk.LABELS if label.startswith("replicate:")))
def test_a_failure_here_costs_a_try(tmp_path: Path, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a copy that is suspected is read for its digest."""
    _, one, two = make_cluster(tmp_path, 2)
    content = one.written(b"a", os.urandom(BLOCK))
    lied = [1]

    def lie(act: str, name: str) -> None:
        if act == "block" and lied:
            lied.clear()
            raise PeerCorrupt("so it seems")

    one.peers.fault = lie
    inject_fault(monkeypatch, f"{label}=EIO")
    replicate(one, content)
    assert two.data(content) == one.data(content) and one.copies(content) == {Tier.RAM: CopyState.GOOD}


def test_without_the_store_copies_are_still_made(tmp_path: Path) -> None:
    """P1, P9: that something need not be held any more cannot be told then; that costs no thread and no copy."""
    _, one, two = make_cluster(tmp_path, 2)
    gone = one.written(b"a", b"hello")
    flow = replicate(one, gone)
    contents.set_state(one.db, gone, ContentState.DOOMED)
    copies.delete_doomed(one.db, copies.list_doomed(one.db, (Tier.RAM,), 0, 10))
    one.store.reachable = False
    one.peers.fail("send", 3 * limits.PEER_SENDS_MAX)
    written = [one.make(b"f%d" % number, b"%d" % number) for number in range(20)]
    one.seal()

    def step() -> None:
        flow.retry_now()
        flow.step()

    until(lambda: all(two.copies(content) for content in written), step)
    assert peer_copies.list_unneeded(one.db, 10) != []
    one.store.reachable = True
    until(lambda: peer_copies.list_unneeded(one.db, 10) == [], flow.step)
    assert two.host.reported_unneeded == {gone}


def test_a_node_that_forgets_a_remote_content_releases_no_copy(tmp_path: Path) -> None:
    """P5: this node forgets it, and that is no word about the copies of what others read."""
    _, one, two, three = make_cluster(tmp_path, 3)
    content = one.written(b"a", b"hello")
    replicate(one, content)
    AnnounceCopies(two.db, cluster_of(two)).step()
    locations.refresh(three.db, three.store, [content], 3)
    contents.set_state(three.db, content, ContentState.DOOMED)
    copies.delete_doomed(three.db, copies.list_doomed(three.db, (Tier.RAM,), 0, 10))
    replicate_of(three).step()
    assert peer_copies.list_unneeded(three.db, 10) == []
    assert locations.load(one.store, [content])[content].holders == [1, 2]


def test_a_content_in_a_missing_tier_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, one, two = make_cluster(tmp_path, 2)
    content = one.written(b"a", b"hello")
    one.db.run("UPDATE copy SET tier = 'nvme' WHERE content = ?", content)
    flow = replicate_of(one)
    flow.step()
    until(lambda: is_at_rest(flow))
    assert caplog.records == [] and two.copies(content) == {}
    one.db.run("UPDATE copy SET tier = 'ram' WHERE content = ?", content)
    until(lambda: level(one, content) is Level.CLIQUE, flow.step)


def test_what_nobody_foresaw_is_not_tried_for_ever_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, one, *_ = make_cluster(tmp_path, 2)
    tried = []

    def fault(act: str, name: str) -> None:
        tried.append(act)
        assert len(tried) > 1, "nobody foresaw this"

    one.peers.fault = fault
    content = one.written(b"a", b"hello")
    flow = replicate_of(one)
    flow.step()
    until(lambda: flow.next_due_s() is not None)
    until(lambda: is_at_rest(flow))
    assert len(tried) == 1 and "failed unexpectedly" in caplog.text
    flow.retry_now()
    until(lambda: level(one, content) is Level.CLIQUE, flow.step)


@pytest.mark.parametrize("newest", [300, 100])
def test_the_most_urgent_contents_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newest: int) -> None:
    """G1: an order of urgency comes while others are queued already. What is being sent goes on."""
    monkeypatch.setattr(limits, "PEER_SENDS_MAX", 1)
    _, one, _ = make_cluster(tmp_path, 2)
    contents_of = {step: [one.written(b"%d-%d" % (step, part), b"x" * 2 * MIB) for part in range(3)] for step in (100, 200, 300)}
    began, go_on = threading.Event(), threading.Event()

    def hold_up(act: str, name: str) -> None:
        began.set()
        assert go_on.wait(60)

    one.peers.fault = hold_up
    flow = replicate_of(one)
    flow.step()
    assert began.wait(60)
    order = UrgentOrder((tuple(one.inode(content) for content in contents_of[newest]),), token="t")
    exposure.set_order(one.db, order, 60.0)
    flow.step()
    go_on.set()
    until(lambda: len(one.peers.sent) == 9, flow.step)
    first, *others = [content for _, content, _ in one.peers.sent]
    left = [content for content in contents_of[newest] if content != first]
    assert first == contents_of[100][0] and others[: len(left)] == left
