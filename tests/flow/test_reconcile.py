"""P5, P7, P9: a node that returns never serves old data as new. It drops useless copies and keeps all that count."""

import os
from pathlib import Path
from typing import Any

import pytest
from clique_world import LocalCluster, cluster_of, level, make_cluster, replicate, replicate_of, until
from local_node import inject_fault, run_until_idle
from salvage_world import tidy

from ckptfs import disk, limits
from ckptfs.catalog import contents, copies, peer_copies, remote_contents
from ckptfs.clique import locations
from ckptfs.coherence import keys
from ckptfs.coherence.keys import CONTENT, SharedKey
from ckptfs.errors import StoreUnreachable
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.evict import Evict
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.reconcile import Reconcile
from ckptfs.model import ContentState, CopyState, Level, Tier
from ckptfs.store.kv import Delete, Put

pytestmark = pytest.mark.usefixtures("no_delays")


def replicated(cluster: LocalCluster, name: bytes = b"a") -> int:
    one, two = cluster.nodes[:2]
    content = one.written(name, os.urandom(3000))
    replicate(one, content)
    AnnounceCopies(two.db, cluster_of(two)).step()
    for node in (one, two):
        node.db.run("INSERT OR REPLACE INTO cached_key VALUES ('i', ?, x'', 1, x'')", node.inode(content))
    return content


def make_replicated(root: Path, count: int) -> tuple[Any, ...]:
    cluster = LocalCluster(root, count)
    return cluster, replicated(cluster), *cluster.nodes


def delete(cluster: LocalCluster, *keys: str) -> None:
    cluster.store.commit([], [Delete(key.encode()) for key in keys])


def test_a_file_that_cannot_be_read_in_the_store_keeps_its_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P5: what the store says of it is damaged; it exists all the same."""
    cluster, content, *_ = make_replicated(tmp_path, 3)
    cluster.put(f"i/{cluster.nodes[0].inode(content):016x}", {"content": content + 1})
    delete(cluster, f"c/{content:016x}")
    tidy(*cluster.nodes)
    assert [node.copies(content) for node in cluster.nodes] == [{Tier.RAM: CopyState.GOOD}] * 2 + [{}]
    assert "not readable" in caplog.text
    caplog.clear()


def test_a_file_that_another_node_deleted_is_removed(tmp_path: Path) -> None:
    cluster, content, one, two = make_replicated(tmp_path, 2)
    delete(cluster, f"i/{one.inode(content):016x}")
    for node in cluster.nodes:
        node.db.run("DELETE FROM entry")
        tidy(node)
        assert node.files(Tier.RAM) == set() and node.state(content) is None
    assert locations.load(two.store, [content])[content].copies == ()


def test_a_deleted_file_that_this_node_is_about_to_name_again_keeps_its_bytes(tmp_path: Path) -> None:
    """P1: it linked the file without the store. The writer, which deleted it, tells before the mount has published the link."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    delete(cluster, f"i/{inode:016x}", f"c/{content:016x}")
    two.db.run("DELETE FROM entry WHERE child = ?", inode)
    two.db.run("INSERT INTO entry (parent, name, child) VALUES (1, x'6c', ?)", inode)
    two.db.run("INSERT INTO dirty_key (change, kind, number, name) VALUES (1, 'e', 1, x'6c')")
    one.db.run("DELETE FROM entry")
    tidy(one)
    two.host.reported_unneeded.add(content)
    tidy(two)
    assert one.files(Tier.RAM) == set() and two.copies(content) == {Tier.RAM: CopyState.GOOD}
    assert [copy.node for copy in locations.load(two.store, [content])[content].copies] == [two.number]
    two.db.run("DELETE FROM entry")
    two.host.reported_unneeded.add(content)
    tidy(two)
    assert two.files(Tier.RAM) == set()


def test_a_file_that_others_renamed_over_and_this_node_is_about_to_name_again_keeps_its_bytes(tmp_path: Path) -> None:
    """P1, P5: as in the set of an island. In the store its content is the previous one of a file that is gone, too."""
    cluster, content, one, _two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    value = {**(keys.get_value(one.db, SharedKey(CONTENT, content)) or {}), "inode": inode + 1, "former_ns": 1}
    delete(cluster, f"i/{inode:016x}")
    cluster.store.commit([], [Put(keys.encode_key(SharedKey(CONTENT, content)), keys.encode_fields(value))])
    one.db.run("INSERT INTO entry (parent, name, child) VALUES (1, x'6c', ?)", inode)
    one.db.run("INSERT INTO dirty_key (change, kind, number, name) VALUES (1, 'e', 1, x'6c')")
    one.host.reported_unneeded.add(content)
    tidy(one)
    assert one.copies(content) == {Tier.RAM: CopyState.GOOD}
    one.db.run("DELETE FROM dirty_key")
    one.host.reported_unneeded.add(content)
    tidy(one)
    assert one.copies(content) == {}


def test_a_holder_removes_the_records_of_a_dead_node_s_deleted_file(tmp_path: Path) -> None:
    """Its holder takes its word out of the store."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    delete(cluster, f"i/{one.inode(content):016x}")
    one.kill()
    tidy(two)
    found = locations.load(two.store, [content])[content]
    assert found.state is None and found.copies == () and two.files(Tier.RAM) == set()


def test_a_writer_that_became_a_holder_of_its_content_removes_the_records(tmp_path: Path) -> None:
    """It had deleted the content while another node made it the previous one of another file."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    delete(cluster, f"i/{one.inode(content):016x}")
    one.db.run("UPDATE content SET remote = 1, announce_state = 2 WHERE id = ?", content)
    tidy(one, two)
    found = locations.load(two.store, [content])[content]
    assert found.items == () and one.files(Tier.RAM) == two.files(Tier.RAM) == set()


def test_an_unpublished_file_is_not_taken_for_deleted(tmp_path: Path) -> None:
    """P1: an island's files."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    delete(cluster, f"i/{one.inode(content):016x}", f"c/{content:016x}")
    one.db.run("DELETE FROM cached_key")
    tidy(one, two)
    assert one.copies(content) == two.copies(content) == {Tier.RAM: CopyState.GOOD}
    one.kill()
    tidy(two)
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD}, "its writer may come back"


def test_a_copy_of_a_deleted_file_goes_also_if_its_writer_is_dead(tmp_path: Path) -> None:
    """Who deletes a file deletes the announcements of its copies. Of a file that was never published they stay."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    one.kill()
    delete(cluster, f"i/{one.inode(content):016x}", f"c/{content:016x}", f"p/{content:016x}/00000002")
    two.db.run("DELETE FROM entry")
    remote_contents.mark_unannounced(two.db, content)
    tidy(two)
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD}, "it may have arrived just now"
    AnnounceCopies(two.db, cluster_of(two)).step()
    tidy(two)
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD}, "its writer may have been an island"
    delete(cluster, f"p/{content:016x}/00000002")
    tidy(two)
    assert two.files(Tier.RAM) == set() and two.state(content) is None


def test_a_copy_that_arrives_while_it_counts_as_missing_is_announced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: else its key would seem to have been deleted with its file."""
    _, content, _, two = make_replicated(tmp_path, 2)
    two.db.run("DELETE FROM copy")
    host = cluster_of(two)
    withdraw_all = host.copy_records.withdraw_all

    def arrive(lacking: list[int]) -> None:
        two.db.run("INSERT INTO copy (content, tier, state) VALUES (?, 'ram', 1)", content)
        remote_contents.mark_unannounced(two.db, content)
        AnnounceCopies(two.db, host).step()
        withdraw_all(lacking)

    monkeypatch.setattr(host.copy_records, "withdraw_all", arrive)
    two.host.reported_unneeded.add(content)
    Reconcile(two.db, two.tiers, two.told, host, two.host.reported_unneeded).step()
    AnnounceCopies(two.db, host).step()
    assert [copy.node for copy in locations.load(two.store, [content])[content].copies] == [two.number]


def test_who_hears_of_a_deletion_before_the_writer_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third node deleted the file and tells both at once: the copy here stayed until the next sweep."""
    monkeypatch.setattr(limits, "UNCONFIRMED_RECHECK_S", 0.01)
    cluster, content, one, two = make_replicated(tmp_path, 2)
    delete(cluster, f"i/{one.inode(content):016x}", f"c/{content:016x}")
    flow = Reconcile(two.db, two.tiers, two.told, cluster_of(two), two.host.reported_unneeded)
    run_until_idle(flow)  # The first sweep.
    two.host.reported_unneeded.add(content)
    flow.step()
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD} and (flow.next_due_s() or 0.0) < 1.0
    one.db.run("UPDATE content SET state = 3 WHERE id = ?", content)
    until(lambda: two.state(content) is ContentState.DOOMED, flow.step)


@pytest.mark.parametrize("why", ["lost", "open"])
def test_what_an_island_cannot_lend_is_not_taken_for_deleted(tmp_path: Path, why: str) -> None:
    """P5: it wrote the file, told nobody, and has lost its RAM or writes again. The copy here may be the last one."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    delete(cluster, f"i/{one.inode(content):016x}", f"c/{content:016x}")
    one.db.run("DELETE FROM cached_key")
    if why == "lost":
        one.lose_ram()
    else:
        one.db.run("UPDATE content SET state = 0 WHERE id = ?", content)
    tidy(two)
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD}
    one.db.run("UPDATE content SET state = 3 WHERE id = ?", content)
    tidy(two)
    assert two.copies(content) == {}, "its writer has deleted it"


def test_a_file_that_another_node_rewrote_keeps_its_previous_content(tmp_path: Path) -> None:
    """The former content stays until its successor is sealed and has reached another node."""
    cluster, content, one, two, three = make_replicated(tmp_path, 3)
    inode = one.inode(content)
    newer = three.written(b"b", b"newer")
    cluster.put_file(inode, newer)
    sealed = {"node": 3, "inode": inode, "generation": 9, "state": 2, "size": 5, "digest": "00" * 16, "closed_ns": 1}
    cluster.put(f"c/{newer:016x}", {**sealed, "digest": None})
    tidy(two)
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD}
    cluster.put(f"c/{newer:016x}", sealed)
    tidy(two)
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD}, "no other node has its successor"
    cluster.put(f"p/{newer:016x}/00000002", {"generation": 9, "digest": "00" * 16})
    for node in (one, two):
        tidy(node)
        assert content not in node.files(Tier.RAM)


def test_the_old_owner_learns_that_it_is_none(tmp_path: Path) -> None:
    cluster, content, one, *_ = make_replicated(tmp_path, 3)
    row = one.row(content)
    assert row.digest is not None
    value = {"node": 2, "inode": row.inode, "generation": 7, "state": 2, "size": 3, "digest": "11" * 16, "closed_ns": 1}
    cluster.put(f"c/{content:016x}", value)
    copy = one.host.open_copy(content, None)
    os.close(copy.fd)
    tidy(one)
    seen = one.row(content)
    assert seen.is_remote and seen.generation == 7
    assert one.files(Tier.RAM) == {content}, "the newer one may die with its writer"
    cluster.put(f"p/{content:016x}/00000003", {"generation": 7, "digest": "11" * 16})
    tidy(one)
    assert one.files(Tier.RAM) == set(), "the former generation is of no use to anybody"


def test_an_open_copy_stays(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, 2)
    content = replicated(cluster)
    delete(cluster, f"i/{cluster.nodes[0].inode(content):016x}")
    for node in cluster.nodes:
        node.hold(content)
        tidy(node)
        assert node.copies(content) == {Tier.RAM: CopyState.GOOD}


def test_of_too_many_copies_the_right_ones_stay(tmp_path: Path) -> None:
    """A node died, its copies were made again elsewhere, and it comes back with what it had."""
    cluster, content, one, two, *_ = make_replicated(tmp_path, 4)
    two.kill()
    replicate(one, content)
    two.revive()
    for node in cluster.nodes:
        AnnounceCopies(node.db, cluster_of(node)).step()
    tidy(*cluster.nodes)
    having = [node.member.name for node in cluster.nodes if node.copies(content)]
    assert having == ["n1", "n2"]
    assert sorted(locations.load(one.store, [content])[content].holders) == [1, 2]
    for node in cluster.nodes:
        assert len(node.files(Tier.RAM)) == len(node.copies(content))


def test_a_copy_stays_while_one_of_those_that_count_is_not_there(tmp_path: Path) -> None:
    """P5, P9: the writer comes back without its RAM, and still has the last word in the store."""
    cluster, content, one, two, three = make_replicated(tmp_path, 3)
    one.kill()
    run_until_idle(two.repair)
    flow = replicate_of(two)
    until(lambda: three.copies(content), flow.step)
    AnnounceCopies(three.db, cluster_of(three)).step()
    one.lose_ram()
    one.revive()
    tidy(*cluster.nodes)
    assert two.copies(content) == three.copies(content) == {Tier.RAM: CopyState.GOOD}


def test_a_copy_of_which_its_holder_says_no_more_is_made_again(tmp_path: Path) -> None:
    """P4, P9: it went bad there. The writer finds out, and its file is not `clique` until there is another one."""
    _, content, one, two = make_replicated(tmp_path, 2)
    tidy(one)
    assert level(one, content) is Level.CLIQUE
    copies.set_copy_state(two.db, content, Tier.RAM, CopyState.QUARANTINED)
    AnnounceCopies(two.db, cluster_of(two)).step()
    tidy(one)
    assert level(one, content) is Level.LOCAL
    replicate(one, content)
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD}


def test_a_copy_missing_from_the_store_is_announced_again(tmp_path: Path) -> None:
    cluster, content, one, two = make_replicated(tmp_path, 2)
    delete(cluster, f"p/{content:016x}/00000002")
    tidy(one)
    replicate(one, content)
    AnnounceCopies(two.db, cluster_of(two)).step()
    assert locations.load(one.store, [content])[content].holders == [1, 2]


@pytest.mark.parametrize("first", [CopyState.GOOD, CopyState.QUARANTINED])
def test_a_copy_that_changes_during_an_announcement_is_announced_again(tmp_path: Path, first: CopyState) -> None:
    """P4: no word stays in the store that is not true, and none is missing."""
    _, content, _, two, *_ = make_replicated(tmp_path, 2)
    copies.set_copy_state(two.db, content, Tier.RAM, first)
    remote_contents.mark_unannounced(two.db, content)
    news = remote_contents.list_unannounced(two.db, 10)
    cluster_of(two).copy_records.announce(news)
    copies.set_copy_state(two.db, content, Tier.RAM, CopyState.QUARANTINED if first is CopyState.GOOD else CopyState.GOOD)
    if first is CopyState.QUARANTINED:
        remote_contents.mark_unannounced(two.db, content)
    remote_contents.mark_announced(two.db, news)
    AnnounceCopies(two.db, cluster_of(two)).step()
    told = [copy.node for copy in locations.load(two.store, [content])[content].copies]
    assert told == ([] if first is CopyState.GOOD else [2])


def test_two_surplus_copies_do_not_leave_at_once(tmp_path: Path) -> None:
    """Each rests on the other: the second finds that the store has changed since it was asked."""
    cluster, content, one, two, three, _ = make_replicated(tmp_path, 4)
    shared = locations.load(one.store, [content])[content]
    cluster.put(f"p/{content:016x}/00000003", {"generation": 1, "digest": "00"})
    mine = locations.build_copy_key(content, 2)
    assert cluster_of(two).copy_records.withdraw(content, [item for item in shared.items if item.key != mine]), (
        "what came later is no matter"
    )
    again = locations.load(one.store, [content])[content]
    cluster.put(f"c/{content:016x}", {"node": 1})
    assert not cluster_of(three).copy_records.withdraw(content, list(again.items))


def test_a_released_copy_is_checked_in_the_store(tmp_path: Path) -> None:
    cluster, content, one, two = make_replicated(tmp_path, 2)
    two.host.release_copies([content])
    tidy(two)
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD}, "a peer's word is not enough"
    delete(cluster, f"i/{one.inode(content):016x}")
    two.host.release_copies([content, 77, 78])
    tidy(two)
    assert two.files(Tier.RAM) == set() and two.host.reported_unneeded == set()


def test_the_writer_passes_a_deletion_on_to_its_holders(tmp_path: Path) -> None:
    """Rank 0 removes everybody's checkpoints: nobody waits for a sweep to get the room back."""
    cluster, one, two, three = make_cluster(tmp_path, 3)
    content, kept = replicated(cluster), replicated(cluster, b"b")
    flows = {node: Reconcile(node.db, node.tiers, node.told, cluster_of(node), node.host.reported_unneeded) for node in (one, two)}
    for flow in flows.values():
        run_until_idle(flow)  # The first sweep; the next one comes half an hour later.
    delete(cluster, f"i/{one.inode(content):016x}", f"c/{content:016x}", f"p/{content:016x}/00000002")
    contents.set_state(three.db, content, ContentState.DOOMED)
    peer_copies.insert_unneeded_copy(three.db, content, 1)
    replicate_of(three).step()
    assert one.host.reported_unneeded == {content}
    for node, flow in flows.items():
        one.host.release_copies([kept])
        run_until_idle(flow)
        one.db.run("DELETE FROM dirty_key")
        Reclaim(node.db, node.tiers, node.config, node.told, (Tier.RAM,)).step()
        replicate_of(node).step()
        assert node.copies(content) == {} and node.files(Tier.RAM) == {kept}


def test_a_node_that_was_dead_to_the_others_looks_through_what_it_has(tmp_path: Path) -> None:
    """It was cut off while they deleted, and its mover lives on; what is young it looks at once more."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content, kept = replicated(cluster), replicated(cluster, b"b")
    flow = Reconcile(two.db, two.tiers, two.told, cluster_of(two), two.host.reported_unneeded)
    run_until_idle(flow)
    delete(cluster, f"i/{one.inode(content):016x}", f"c/{content:016x}")
    contents.set_state(one.db, content, ContentState.DOOMED)
    for one_lease, left in ((0, {content, kept}), (two.presence.lease_id, {content, kept}), (99, {kept})):
        two.presence.lease_id = one_lease
        two.db.run("UPDATE copy SET used_ns = 1, verified_ns = 1")
        run_until_idle(flow)
        Reclaim(two.db, two.tiers, two.config, two.told, (Tier.RAM,)).step()
        assert two.files(Tier.RAM) == left


def test_a_report_outlives_a_store_that_is_away(tmp_path: Path) -> None:
    """The node that told it has deleted its own copy by then, and tells it no more."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    flow = Reconcile(two.db, two.tiers, two.told, cluster_of(two), two.host.reported_unneeded)
    run_until_idle(flow)  # The first sweep.
    delete(cluster, f"i/{one.inode(content):016x}")
    two.host.release_copies([content])
    two.store.reachable = False
    with pytest.raises(StoreUnreachable):
        flow.step()
    assert two.state(content) is ContentState.SEALED, "without the store nothing goes"
    two.store.reachable = True
    run_until_idle(flow)
    assert two.state(content) is ContentState.DOOMED and two.host.reported_unneeded == set()


@pytest.mark.parametrize("label", sorted(label for label in disk.LABELS if label.startswith("reconcile:")))
def test_a_failure_is_made_good_by_the_next_sweep(tmp_path: Path, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, content, one, two = make_replicated(tmp_path, 2)
    delete(cluster, f"i/{one.inode(content):016x}")
    inject_fault(monkeypatch, f"{label}=EIO")
    if label == "reconcile:forgotten":
        with pytest.raises(OSError):
            tidy(two)
    tidy(two)
    assert two.state(content) in (None, ContentState.DOOMED)


def test_a_tier_that_is_too_full_gives_up_what_is_of_no_use(tmp_path: Path) -> None:
    """P10: copies that are whole elsewhere; the store learns that they went."""
    cluster, one, two, _ = make_cluster(tmp_path, 3)
    held = replicated(cluster, b"b")
    two.publish(held)
    two.squeeze(Tier.RAM, 3000)
    evict = Evict(two.db, two.tiers, two.config, two.told)
    evict.step()
    assert two.files(Tier.RAM) == set()
    AnnounceCopies(two.db, cluster_of(two)).step()
    assert locations.load(one.store, [held])[held].copies == ()
