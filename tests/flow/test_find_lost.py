"""P9, F2: what was lost with nodes that never return is counted on every node that knows the file; nodes that are down may return."""

from dataclasses import replace
from pathlib import Path

import pytest
from clique_world import Node, cluster_of, make_cluster, replicate
from local_node import run_until_idle

from ckptfs.catalog import summary
from ckptfs.clique import membership
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import NodeBinding, name_key, taken_key
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.find_lost import FindLost
from ckptfs.store.kv import Put


def bind(node: Node, number: int) -> None:
    """The name of a node belongs to this number."""
    name = node.member.name
    node.cluster.store.commit([], [Put(taken_key(number), name.encode()), Put(name_key(name), NodeBinding(number, f"{number}").encode())])


def wipe(observer: Node, *nodes: Node) -> None:
    """These nodes have joined again with new catalogs."""
    members = [replace(node.member, number=node.number + 10) for node in nodes]
    for node, member in zip(nodes, members, strict=True):
        bind(node, member.number)
    observer.cluster.view = membership.build_view([observer.member, *members])
    observer.repair.step()


def find(node: Node) -> int:
    """Search, and count as `ckptfs status` does."""
    flow = FindLost(node.db, cluster_of(node))
    while flow.step():
        pass
    return summary.load_counts(node.db).lost


@pytest.mark.parametrize("has_holder", [False, True])
def test_a_file_is_lost_once_none_of_its_holders_can_return(tmp_path: Path, has_holder: bool) -> None:
    _, one, two, three = make_cluster(tmp_path, 3)
    for node in (one, two, three):
        bind(node, node.number)
    content = one.written(b"file", b"hello")
    if has_holder:
        replicate(one, content).close()
        run_until_idle(AnnounceCopies(two.db, cluster_of(two)))
    assert find(three) == 0
    one.kill()
    assert find(three) == 0, "it is down"
    wipe(three, one)
    assert find(three) == (0 if has_holder else 1)
    if has_holder:
        two.kill()
        assert find(three) == 0, "it is down"
        wipe(three, one, two)
        assert find(three) == 1
    assert summary.find_lost_path(three.db) == "file"
    three.db.change("UPDATE inode SET nlink = 0 WHERE id = ?", three.inode(content))
    assert summary.load_counts(three.db).lost == 0, "it was removed"


def test_a_file_on_the_pfs_is_not_lost(tmp_path: Path) -> None:
    _, one, two = make_cluster(tmp_path, 2)
    for node in (one, two):
        bind(node, node.number)
    content = one.written(b"file", b"hello")
    one.kill()
    wipe(two, one)
    assert find(two) == 1
    two.publish(content)
    assert summary.load_counts(two.db).lost == 0 and find(two) == 0


def test_without_a_lease_it_tries_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane whose next step is due at once, and does nothing, takes a processor."""
    _, one, _ = make_cluster(tmp_path, 2)
    monkeypatch.setattr(Cluster, "lease", lambda _: 0)
    flow = FindLost(one.db, cluster_of(one))
    flow.step()
    flow._next_s = 0.0
    assert not flow.step()
    due_s = flow.next_due_s()
    assert due_s is not None and due_s > 1.0
