"""P3, P9: the store counts no copy that a node has lost, and drops what dead nodes recorded of contents that nobody needs."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from clique_world import LocalCluster, Node, bring, cluster_of, level, make_cluster, replicate, replicated
from local_node import run_until_idle
from memory_store import MemoryStore
from salvage_world import NEW, OLD, file_of, make_replicated, overwrite, publish, send, tidy

from ckptfs import limits
from ckptfs.catalog import contents, copies, mover_requests, peer_copies, remote_contents
from ckptfs.clique import locations, membership
from ckptfs.errors import StoreUnreachable
from ckptfs.flow.copy_records import AnnounceCopies, DropDeadRecords
from ckptfs.flow.reconcile import Reconcile
from ckptfs.model import ContentState, CopyState, Level, Tier
from ckptfs.store.kv import Compare, Delete, Get, Operation, Outcome, prefix_end


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DROP_RECORDS_FIRST_S", "READ_GRACE_S", "SALVAGE_RIVALS_S", "SALVAGE_MARGIN_S"):
        monkeypatch.setattr(limits, name, 0.0)


def said(cluster: LocalCluster) -> set[int]:
    """The contents of which the store says anything."""
    items = cluster.store.read([Get(start, prefix_end(start)) for start in (b"c/", b"p/")]).results
    return {int(item.key.split(b"/")[1], 16) for one in items for item in one}


def drop_dead_records(cluster: LocalCluster, number: int) -> None:
    run_until_idle(DropDeadRecords(cluster.nodes[number].db, cluster_of(cluster.nodes[number])))


def remove(cluster: LocalCluster, inode: int) -> None:
    cluster.store.commit([], [Delete(b"i/%016x" % inode)])


def test_of_a_file_that_is_gone(tmp_path: Path) -> None:
    """When neither who wrote it nor who had a copy lives."""
    cluster, content, one, two, _ = make_replicated(tmp_path, 3)
    remove(cluster, one.inode(content))
    drop_dead_records(cluster, 2)
    one.kill()
    drop_dead_records(cluster, 2)
    assert said(cluster) == {content}, "its holder lives, and sees to it"
    two.kill()
    drop_dead_records(cluster, 2)
    assert said(cluster) == set()


def test_of_what_a_dead_node_replaced_of_a_dead_nodes(tmp_path: Path) -> None:
    """The file holds what a third one wrote by now, and that is safe."""
    cluster, content, one, two, three, _ = make_replicated(tmp_path, 4)
    newer = overwrite(one, content, "truncated")
    inode = one.inode(newer)
    one.kill()
    two.kill()
    drop_dead_records(cluster, 2)
    assert said(cluster) == {content, newer}, "who returns may have it"
    three.learn(inode, b"file", newer, len(NEW))
    third = three.write(inode, OLD)
    three.seal()
    publish(three)
    drop_dead_records(cluster, 2)
    assert said(cluster) == {content, newer, third}, "nobody else has the third"
    send(three, third)
    row = three.row(third)
    assert row.digest is not None
    cluster.put(f"p/{third:016x}/00000004", {"generation": row.generation, "digest": row.digest.hex()})
    missed = {"content": newer, "generation": 1, "mtime_ns": 0, "node": 1, "shows": None, "shown": 0}
    value = {**file_of(cluster, inode).value, "missed": json.dumps(missed)}
    plain = file_of(cluster, inode).value
    cluster.put(f"i/{inode:016x}", value)
    drop_dead_records(cluster, 2)
    assert said(cluster) == {newer, third}, "one is missed"
    cluster.put(f"i/{inode:016x}", plain)
    drop_dead_records(cluster, 2)
    assert said(cluster) == {third}


def test_a_node_announces_no_copy_of_what_it_replaced(tmp_path: Path) -> None:
    """Its writer died and will not remove the records; while a live node announces a copy, no other does."""
    cluster, content, one, two, three = make_replicated(tmp_path, 3)
    two.learn(one.inode(content), b"file", content, len(OLD))
    one.kill()
    newer = overwrite(two, content, "truncated")
    tell(two)
    tidy(two)
    assert contents.get_content(two.db, content) is None
    send(two, newer)
    tell(three)
    drop_dead_records(cluster, 2)
    assert said(cluster) == {newer}


def test_nothing_of_a_node_that_lives_again(tmp_path: Path) -> None:
    """The store decides who lives, not what this node saw."""
    cluster, one, _ = make_cluster(tmp_path, 2)
    content = one.written(b"file", OLD)
    remove(cluster, one.inode(content))
    one.kill()
    cluster.put(membership.node_key(1).decode(), "a record")
    drop_dead_records(cluster, 1)
    assert said(cluster) == {content}


def tell(node: Node, *, begin: bool = False) -> None:
    flow = AnnounceCopies(node.db, cluster_of(node))
    if begin:
        flow.prepare()
    flow.step()


class LateStore(MemoryStore):
    """A way to the store on which the next commits fail, and are applied when the test says so."""

    losing = 0

    def commit(
        self, compares: Sequence[Compare], changes: Sequence[Operation], otherwise: Sequence[Get] = (), *, timeout_s: float = 3.0
    ) -> Outcome:
        if not self.losing:
            return super().commit(compares, changes, otherwise, timeout_s=timeout_s)
        self.losing -= 1
        self.etcd.postpone(10**6, compares, changes)
        raise StoreUnreachable("no answer in time")


@pytest.mark.parametrize("was_present", [True, False])
def test_a_late_word_changes_nothing(tmp_path: Path, was_present: bool) -> None:
    """P3: an announcement that was sent again lands after what came later: no copy counts that is not there, and none is missing."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"file", b"data" * 1000)
    late = two.store = LateStore(cluster.etcd)
    flow = AnnounceCopies(two.db, cluster_of(two))
    copies.set_copy_state(two.db, content, Tier.RAM, CopyState.GOOD if was_present else CopyState.QUARANTINED)
    remote_contents.mark_unannounced(two.db, content)
    late.losing = 1
    with pytest.raises(StoreUnreachable):
        flow.step()
    copies.set_copy_state(two.db, content, Tier.RAM, CopyState.QUARANTINED if was_present else CopyState.GOOD)
    remote_contents.mark_unannounced(two.db, content)
    flow.step()
    assert hear(one, content) == ([1] if was_present else [1, 2])
    cluster.etcd.apply_late(all_of_them=True)
    assert hear(one, content) == ([1] if was_present else [1, 2])


def test_what_landed_late_before_the_next_word_is_corrected_by_it(tmp_path: Path) -> None:
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"file", b"data" * 1000)
    late = two.store = LateStore(cluster.etcd)
    records = cluster_of(two).copy_records
    records.announce([(two.row(content), False)])
    late.losing = 1
    with pytest.raises(StoreUnreachable):
        records.announce([(two.row(content), True)])
    cluster.etcd.apply_late(all_of_them=True)
    assert hear(one, content) == [1, 2]
    records.announce([(two.row(content), False)])
    assert hear(one, content) == [1]


def test_who_is_asked_about_a_copy_that_it_lacks_takes_its_word_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P3, P9: the audit of the writer, and of who else has a copy after its death; then there are enough copies again."""
    monkeypatch.setattr(limits, "AUDIT_SWEEPS", 1)
    monkeypatch.setattr(limits, "RECONCILE_AGE_S", -1.0)
    _, one, two, three, four = make_cluster(tmp_path, 4, factor=3)
    content = one.written(b"file", b"data" * 1000)
    replicate(one, content)
    for node in (two, three):
        tell(node)
    assert hear(one, content) == [1, 2, 3]
    two.lose_ram()
    two.db.run("DELETE FROM content")
    one.kill()
    run_until_idle(reconcile_of(three))
    assert hear(three, content) == [1, 2, 3] and two.host.reported_unneeded == {content}
    run_until_idle(reconcile_of(two))
    assert hear(three, content) == [1, 3]
    run_until_idle(reconcile_of(three))
    assert [found.id for found, _ in peer_copies.list_under_replicated(three.db, 0, 9)] == [content], "nobody else repairs it"
    replicate(three, content)
    assert sum(node.copies(content) != {} for node in (two, three, four)) == 3


def reconcile_of(node: Node) -> Reconcile:
    return Reconcile(node.db, node.tiers, node.told, cluster_of(node), node.host.reported_unneeded)


def hear(node: Node, content: int) -> list[int]:
    """What a node finds in the store: who has it."""
    return locations.refresh(node.db, node.store, [content], node.number)[content].holders


@pytest.mark.parametrize("how", ["wiped", "bad"])
def test_the_level_is_that_of_the_copies_that_are_there(tmp_path: Path, how: str) -> None:
    """On all nodes; and again when the copy has come back."""
    cluster, one, two, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"file", b"data" * 1000)
    assert hear(three, content) == [1, 2] and level(three, content) is Level.CLIQUE
    if how == "wiped":
        one.lose_ram()
        tell(one, begin=True)
    else:
        copies.set_copy_state(one.db, content, Tier.RAM, CopyState.QUARANTINED)
        tell(one)
    assert hear(three, content) == [2] and hear(two, content) == [2]
    assert level(one, content) is level(two, content) is level(three, content) is Level.LOCAL
    tell(one, begin=True)
    assert hear(three, content) == [2], "a mover that begins anew changes nothing"
    bring(one, one.inode(content))
    tell(one)
    assert hear(three, content) == hear(two, content) == [1, 2]
    assert level(one, content) is level(two, content) is level(three, content) is Level.CLIQUE
    assert cluster.store.read([Get(locations.build_copy_key(content, 1))]).results[0] == ()
    assert remote_contents.list_unannounced(one.db, 10) == []


def test_what_its_writer_changed_in_place_is_away(tmp_path: Path) -> None:
    """Its file goes on in a new content: others find the previous one at the other holders only."""
    cluster, one, _, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"file", b"data" * 1000)
    newer = one.rewrite(content, lambda data: data.reverse())
    tell(one)
    assert hear(three, content) == [2] and hear(three, newer) == [1]


def test_a_content_without_other_copies_is_not_announced(tmp_path: Path) -> None:
    """It is lost, which `c/` says; and what the PFS has needs no word."""
    cluster, one, _ = make_cluster(tmp_path, 2)
    there = replicated(cluster, b"file", b"data" * 1000)
    alone = one.written(b"alone", b"data")
    one.publish(there)
    one.lose_ram()
    remote_contents.mark_all_unannounced(one.db)
    assert remote_contents.list_unannounced(one.db, 10) == [] and one.copies(alone) == {}


def test_a_holder_that_writes_takes_its_old_word_back(tmp_path: Path) -> None:
    """What it says under `p/` is of what it had before."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"file", b"data" * 1000)
    newer = two.rewrite(content, lambda data: data.reverse())
    tell(two)
    assert cluster.store.read([Get(locations.build_copy_key(content, 2))]).results[0] == () and hear(one, newer) == [2]


@pytest.mark.parametrize("lives", [True, False])
def test_what_is_taken_for_lost_comes_back_from_who_says_in_the_store_to_have_it(tmp_path: Path, lives: bool) -> None:
    """P9: this node died before it heard that its peer had verified it, and its RAM with it."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"file", b"data" * 1000)
    one.lose_ram()
    one.db.run("DELETE FROM peer_copy")
    contents.set_state(one.db, content, ContentState.LOST)
    if not lives:
        two.kill()
    answer = bring(one, one.inode(content))
    assert answer.state == (mover_requests.DONE if lives else mover_requests.FAILED)
    assert one.state(content) is (ContentState.SEALED if lives else ContentState.LOST)
    assert not lives or one.data(content) == b"data" * 1000
