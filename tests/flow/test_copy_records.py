"""P9: what dead nodes said of contents that nobody needs any more does not stay in the cluster's store for ever."""

from pathlib import Path

import pytest
from clique_world import LocalCluster, cluster_of, make_cluster
from local_node import run_until_idle
from salvage_world import NEW, OLD, file_of, make_replicated, overwrite, publish, send

from ckptfs import limits
from ckptfs.clique import membership
from ckptfs.flow.copy_records import DropDeadRecords
from ckptfs.store.kv import Delete, Get, prefix_end


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DROP_RECORDS_FIRST_S", 0.0)


def said(cluster: LocalCluster) -> set[int]:
    """The contents of which the store says anything."""
    items = cluster.store.read([Get(start, prefix_end(start)) for start in (b"c/", b"p/")]).results
    return {int(item.key.split(b"/")[1], 16) for one in items for item in one}


def bury(cluster: LocalCluster, number: int) -> None:
    flow = DropDeadRecords(cluster.nodes[number].db, cluster_of(cluster.nodes[number]))
    run_until_idle(flow)


def remove(cluster: LocalCluster, inode: int) -> None:
    cluster.store.commit([], [Delete(b"i/%016x" % inode)])


def test_of_a_file_that_is_gone(tmp_path: Path) -> None:
    """When neither who wrote it nor who had a copy lives."""
    cluster, content, one, two, _ = make_replicated(tmp_path, 3)
    remove(cluster, one.inode(content))
    bury(cluster, 2)
    one.kill()
    bury(cluster, 2)
    assert said(cluster) == {content}, "its holder lives, and sees to it"
    two.kill()
    bury(cluster, 2)
    assert said(cluster) == set()


def test_of_what_a_dead_node_replaced_of_a_dead_nodes(tmp_path: Path) -> None:
    """The file holds what a third one wrote by now, and that is safe."""
    cluster, content, one, two, three, _ = make_replicated(tmp_path, 4)
    newer = overwrite(one, content, "truncated")
    inode = one.inode(newer)
    one.kill()
    two.kill()
    bury(cluster, 2)
    assert said(cluster) == {content, newer}, "who returns may have it"
    three.learn(inode, b"file", newer, len(NEW))
    third = three.write(inode, OLD)
    three.seal()
    publish(three)
    bury(cluster, 3)
    assert said(cluster) == {content, newer, third}, "nobody else has the third"
    send(three, third)
    row = three.row(third)
    assert row.digest is not None
    cluster.put(f"p/{third:016x}/00000004", {"generation": row.generation, "digest": row.digest.hex()})
    value = {**file_of(cluster, inode).value, "missed": f'{{"content": {newer}, "generation": 1, "node": 1, "shows": 0, "shown": 0}}'}
    plain = file_of(cluster, inode).value
    cluster.put(f"i/{inode:016x}", value)
    bury(cluster, 3)
    assert said(cluster) == {newer, third}, "one is missed"
    cluster.put(f"i/{inode:016x}", plain)
    bury(cluster, 3)
    assert said(cluster) == {third}


def test_nothing_of_a_node_that_lives_again(tmp_path: Path) -> None:
    """The store decides who lives, not what this node saw."""
    cluster, one, _ = make_cluster(tmp_path, 2)
    content = one.written(b"file", OLD)
    remove(cluster, one.inode(content))
    one.kill()
    cluster.put(membership.node_key(1).decode(), "a record")
    bury(cluster, 1)
    assert said(cluster) == {content}
