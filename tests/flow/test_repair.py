"""P9: when nodes die, the survivors restore the number of copies, once. Copies of an earlier incarnation do not count."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from clique_world import LocalCluster, cluster_of, is_at_rest, level, make_cluster, replicate_of, until
from local_node import run_until_idle

from ckptfs import limits
from ckptfs.catalog import mover_requests, peer_copies, remote_contents
from ckptfs.errors import StoreUnreachable
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.fetch import Fetch
from ckptfs.model import Level, Tier


def settle(cluster: LocalCluster) -> None:
    """Everything that the living nodes want to do is done."""
    flows = {node.number: replicate_of(node) for node in cluster.nodes if node.alive}

    def step() -> None:
        for node in cluster.nodes:
            if node.alive:
                run_until_idle(node.repair)
                flows[node.number].step()
                AnnounceCopies(node.db, cluster_of(node)).step()

    def quiet() -> bool:
        return all(
            is_at_rest(flow) and not peer_copies.list_under_replicated(node.db, 0, 1) and not remote_contents.list_unannounced(node.db, 1)
            for node in cluster.nodes
            if node.alive and (flow := flows[node.number])
        )

    step()
    until(quiet, step)


def copies(cluster: LocalCluster, content: int) -> set[str]:
    """The living nodes that have a copy that counts."""
    return {node.member.name for node in cluster.nodes if node.alive and Tier.RAM in node.copies(content)}


def test_the_writer_replaces_a_dead_holder(tmp_path: Path) -> None:
    cluster, one, *_ = make_cluster(tmp_path, 3)
    content = one.written(b"a", b"hello")
    settle(cluster)
    assert copies(cluster, content) == {"n1", "n2"} and level(one, content) is Level.CLIQUE
    cluster.nodes[1].kill()
    assert level(one, content) is Level.LOCAL
    settle(cluster)
    assert copies(cluster, content) == {"n1", "n3"} and level(one, content) is Level.CLIQUE


@pytest.mark.parametrize("factor", [2, 3])
def test_the_holders_replace_a_writer_that_died(tmp_path: Path, factor: int) -> None:
    cluster, one, *_ = make_cluster(tmp_path, 5, factor=factor)
    written = [one.written(b"f%d" % number, os.urandom(1000)) for number in range(70)]
    settle(cluster)
    one.kill()
    settle(cluster)
    for content in written:
        assert len(copies(cluster, content)) == factor
    holder = cluster.nodes[1]
    assert level(holder, written[0]) is Level.CLIQUE


def test_it_goes_on_death_after_death(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path, 5)
    content = cluster.nodes[0].written(b"a", data := os.urandom(5000))
    settle(cluster)
    for _ in range(3):
        first = next(node for node in cluster.nodes if node.alive and Tier.RAM in node.copies(content))
        first.kill()
        settle(cluster)
        assert len(copies(cluster, content)) == 2
    assert all(node.data(content) == data for node in cluster.nodes if node.alive)


def test_a_node_that_lives_again_without_its_ram_is_not_believed(tmp_path: Path) -> None:
    cluster, one, two = make_cluster(tmp_path, 2)
    content = one.written(b"a", b"hello")
    settle(cluster)
    two.lose_ram()
    two.member = replace(two.member, incarnation="another.2")
    cluster.changed()
    assert level(one, content) is Level.LOCAL
    settle(cluster)
    assert copies(cluster, content) == {"n1", "n2"} and level(one, content) is Level.CLIQUE


def test_a_node_that_joins_gets_the_copies_that_nobody_could_hold(tmp_path: Path) -> None:
    """P9: of three copies wanted, two are not the level clique while the third node is down: the loss of two nodes would lose the file."""
    cluster, one, _, three = make_cluster(tmp_path, 3, factor=3)
    three.kill()
    content = one.written(b"a", b"hello")
    settle(cluster)
    assert copies(cluster, content) == {"n1", "n2"}
    assert level(one, content) is Level.LOCAL and peer_copies.count_short(one.db) == {1: 1}
    three.revive()
    settle(cluster)
    assert copies(cluster, content) == {"n1", "n2", "n3"}
    assert level(one, content) is Level.CLIQUE and peer_copies.count_short(one.db) == {}


def test_a_file_on_three_nodes_is_one_copy_short_when_one_of_them_dies(tmp_path: Path) -> None:
    cluster, one, two, three = make_cluster(tmp_path, 3, factor=3)
    contents = [one.written(name, b"hello") for name in (b"a", b"b")]
    settle(cluster)
    assert {level(one, content) for content in contents} == {Level.CLIQUE}
    three.kill()
    settle(cluster)
    assert level(one, contents[0]) is Level.LOCAL and peer_copies.count_short(one.db) == {1: 2}
    two.kill()
    assert peer_copies.count_short(one.db) == {2: 2}


def test_a_cluster_of_two_domains_does_not_wait_for_a_third_copy(tmp_path: Path) -> None:
    """Three copies are wanted of three nodes in two racks. A node that moves to another rack leaves none behind."""
    cluster, one, *_, three = make_cluster(tmp_path, 3, domains=["r1", "r1", "r2"], factor=3)
    content = one.written(b"a", b"hello")
    settle(cluster)
    assert level(one, content) is Level.CLIQUE and peer_copies.count_domains(one.db) == (2, 2)
    three.kill()
    assert peer_copies.count_domains(one.db) == (1, 2)
    three.member = replace(three.member, number=9, domain="r3")
    three.revive()
    assert peer_copies.count_domains(one.db) == (2, 2)


def test_without_the_store_the_repair_waits(tmp_path: Path) -> None:
    cluster, one, two, _ = make_cluster(tmp_path, 3)
    content = one.written(b"a", b"hello")
    settle(cluster)
    two.store.reachable = False
    one.kill()
    with pytest.raises(StoreUnreachable):
        two.repair.step()
    two.store.reachable = True
    settle(cluster)
    assert len(copies(cluster, content)) == 2


def test_nothing_is_copied_where_the_writer_lives(tmp_path: Path) -> None:
    cluster, one, two, _, four = make_cluster(tmp_path, 4)
    content = one.written(b"a", b"hello")
    settle(cluster)
    four.kill()
    settle(cluster)
    assert copies(cluster, content) == {"n1", "n2"}
    assert two.peers.sent == []


def test_a_writer_refetches_the_copies_that_it_lost(tmp_path: Path) -> None:
    """P9: one copy is left while the writer lives; nobody else would make another one."""
    cluster, one, *_ = make_cluster(tmp_path, 2)
    written = [one.written(b"f%d" % number, os.urandom(1000)) for number in range(3)]
    settle(cluster)
    one.lose_ram()
    remote_contents.mark_all_unannounced(one.db)
    one.member = replace(one.member, incarnation="another.2")
    cluster.changed()
    fetch = Fetch(one.db, one.tiers, one.config, one.told, cluster_of(one))

    def step() -> None:
        one.repair.step()
        assert len(mover_requests.list_open(one.db, mover_requests.FETCH)) <= limits.REFETCHES_MAX, "those who wait come first"
        fetch.step()

    until(lambda: all(one.copies(content) for content in written), step)
    assert all(level(one, content) is Level.CLIQUE for content in written)
    step()
    assert one.repair.next_due_s() != limits.REQUEST_POLL_S


def test_a_full_tier_stops_further_requests(tmp_path: Path) -> None:
    cluster, one, *_ = make_cluster(tmp_path, 2)
    for number in range(3):
        one.written(b"f%d" % number, os.urandom(1000))
    settle(cluster)
    one.lose_ram()
    remote_contents.mark_all_unannounced(one.db)
    one.member = replace(one.member, incarnation="another.2")
    cluster.changed()
    asked = set()
    for _ in range(5):
        for want in mover_requests.list_open(one.db, mover_requests.FETCH):
            asked.add(want.inode)
            mover_requests.mark_failed(one.db, want.id, errno.ENOSPC)
        one.repair.step()
    assert len(asked) == 1
