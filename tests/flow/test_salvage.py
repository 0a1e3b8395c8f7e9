"""P5, P7, P9: if the newest content dies with its only node, the file shows its replicated previous content."""

import time
from pathlib import Path

import pytest
from clique_world import LocalCluster, Node, cluster_of, make_cluster
from local_node import inject_fault, run_until_idle
from salvage_world import (
    NEW,
    OLD,
    cache_file,
    come_back,
    decide,
    fall_back_of,
    file_of,
    knows,
    make_replicated,
    overwrite,
    publish,
    replicated,
    send,
    tidy,
)

from ckptfs.catalog import contents, namespace, summary
from ckptfs.clique import locations
from ckptfs.coherence import keys, salvage_records
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import CONTENT, INODE, SharedKey
from ckptfs.coherence.read import RecentDeletes, StoreValue, apply_values
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.reconcile import Reconcile
from ckptfs.model import ROOT, ContentState, Tier
from ckptfs.store.kv import Delete

pytestmark = pytest.mark.usefixtures("no_delays")


HOW = pytest.mark.parametrize("how", ["truncated", "renamed", "in place"])


@HOW
@pytest.mark.parametrize("sealed", [True, False])
def test_the_former_content_is_shown_when_the_newer_one_is_lost(tmp_path: Path, how: str, sealed: bool) -> None:
    """P9: whole, with its size and time, and told to people; and it gets as many copies as before."""
    cluster, content, one, two, three = make_replicated(tmp_path, 3)
    newer = overwrite(one, content, how)
    if not sealed:
        row = one.db.value("SELECT inode FROM content WHERE id = ?", newer)
        closed = {**(keys.get_value(one.db, SharedKey(CONTENT, newer)) or {}), "state": 1, "digest": None, "inode": row}
        cluster.put(f"c/{newer:016x}", closed)
    tidy(two)
    decide(two)
    inode = one.inode(newer)
    assert file_of(cluster, inode).content == newer, "its writer lives"
    one.kill()
    decide(three, two)
    file = file_of(cluster, inode)
    assert (file.content, file.value["size"], file.value["mtime_ns"]) == (content, len(OLD), 2)
    assert file.salvaged is not None and file.salvaged["content"] == newer
    shared = locations.load(cluster.store, [content])[content]
    assert shared.writer == 2 and shared.state is not None and shared.state.inode == inode
    assert two.data(content) == OLD and two.shown(inode) == content
    assert len(summary.list_troubles(two.db, "former:")) == 1
    tidy(two)
    send(two, content)
    assert three.data(content) == OLD
    decide(three)
    assert file_of(cluster, inode).item == file.item


@HOW
def test_the_former_content_goes_when_the_newer_one_is_safe(tmp_path: Path, how: str) -> None:
    cluster, content, one, two = make_replicated(tmp_path, 2)
    newer = overwrite(one, content, how)
    tidy(two)
    assert content in two.files(Tier.RAM) and (how == "in place" or content in one.files(Tier.RAM))
    send(one, newer)
    AnnounceCopies(two.db, cluster_of(two)).step()
    publish(one)
    tidy(one)
    send(one, newer)
    tidy(two)
    assert one.files(Tier.RAM) == two.files(Tier.RAM) == {newer}
    one.kill()
    decide(two)
    assert file_of(cluster, one.inode(newer)).content == newer


def test_what_no_other_node_had_is_not_kept(tmp_path: Path) -> None:
    _, one, _ = make_cluster(tmp_path, 2)
    content = one.make(b"file", OLD)
    one.seal()
    newer = overwrite(one, content, "truncated")
    assert one.files(Tier.RAM) == {newer}


@HOW
def test_the_writer_returns_with_the_newer_content(tmp_path: Path, how: str) -> None:
    """Nobody has written the file meanwhile: it holds what was closed last."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    newer = overwrite(one, content, how)
    inode = one.inode(newer)
    one.kill()
    decide(two)
    assert file_of(cluster, inode).content == content
    come_back(one, two, inode)
    assert newer in one.files(Tier.RAM)
    file = file_of(cluster, inode)
    assert (file.content, file.value["size"], file.salvaged) == (newer, len(one.data(newer)), None)
    assert not summary.list_troubles(two.db, "former:")
    tidy(two)
    assert content in two.files(Tier.RAM), "it is the former content again"


@pytest.mark.parametrize("end", ["read", "written", "removed"])
def test_the_trouble_of_a_former_content_ends_with_it(tmp_path: Path, end: str) -> None:
    """P3: also if the mount hears of it before the mover: the writer has returned, the file was written again, or it is gone."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    newer = overwrite(one, content, "truncated")
    inode = one.inode(newer)
    one.kill()
    decide(two, two)
    assert len(summary.list_troubles(two.db, "former:")) == 1
    one.revive()
    if end == "read":
        look_up(one, inode)
        publish(one)
        look_up(two, inode)
    elif end == "written":
        two.write(inode, b"third")
        two.seal()
        publish(two)
    else:
        cluster.store.commit([], [Delete(b"i/%016x" % inode)])
    decide(two)
    assert not summary.list_troubles(two.db, "former:")


def test_the_writer_returns_after_the_file_was_written_again(tmp_path: Path) -> None:
    cluster, content, one, two = make_replicated(tmp_path, 2)
    newer = overwrite(one, content, "truncated")
    inode = one.inode(newer)
    one.kill()
    decide(two)
    third = two.write(inode, b"third")
    two.seal()
    publish(two)
    assert file_of(cluster, inode).content == third
    one.revive()
    cache_file(one, inode)
    decide(two)
    tidy(one)
    assert file_of(cluster, inode).content == third
    beside = namespace.find_child(one.db, ROOT, b"file.ckptfs-conflict-n1-1")
    assert beside is not None and (beside.content, beside.size) == (newer, len(NEW))
    assert one.data(newer) == NEW and one.state(newer) is ContentState.SEALED


def look_up(node: Node, inode: int) -> None:
    """The node reads a file in the store, as its mount does."""
    item = file_of(node.cluster, inode).item
    value = StoreValue(item.mod_revision, CachedValue(item.mod_revision, item.value))
    apply_values(node.db, {SharedKey(INODE, inode): value}, RecentDeletes())


@HOW
def test_the_writer_sees_what_it_closed_also_before_others_know_of_its_return(tmp_path: Path, how: str) -> None:
    """P5, P7: a node that stood still goes on with its newest state, not with what others show instead."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    newer = overwrite(one, content, how)
    inode = one.inode(newer)
    one.kill()
    decide(two)
    one.revive()
    decide(two)
    assert one.host.reported_unneeded == {newer}, "it hears of it"
    look_up(one, inode)
    assert one.shown(inode) == newer and one.db.value("SELECT size FROM inode WHERE id = ?", inode) == len(one.data(newer))
    publish(one)
    file = file_of(cluster, inode)
    assert (file.content, file.value["size"], file.salvaged) == (newer, len(one.data(newer)), None)


def test_the_writer_writes_again_what_others_wrote_while_it_was_away(tmp_path: Path) -> None:
    """P5: what it had closed before stays beside the file."""
    _cluster, content, one, two = make_replicated(tmp_path, 2)
    newer = overwrite(one, content, "truncated")
    inode = one.inode(newer)
    one.kill()
    decide(two)
    two.write(inode, b"third")
    two.seal()
    publish(two)
    one.revive()
    look_up(one, inode)
    one.write(inode, b"fourth")
    one.seal()
    publish(one)
    cache_file(one, inode)
    tidy(one)
    beside = namespace.find_child(one.db, ROOT, b"file.ckptfs-conflict-n1-1")
    assert beside is not None and beside.content == newer and one.data(newer) == NEW


def test_what_an_open_file_overwrote_unseen_stays_beside_it(tmp_path: Path) -> None:
    """P5: a node returned with the file open for writing, and closed it."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    knows(two, inode, content)
    overwritten = salvage_records.build_overwritten(file_of(cluster, inode).value)
    third = two.write(inode, b"third")
    two.db.run("UPDATE inode SET salvaged = ? WHERE id = ?", overwritten, inode)
    two.seal()
    publish(two)
    cache_file(one, inode)
    tidy(one)
    assert file_of(cluster, inode).content == third
    beside = namespace.find_child(one.db, ROOT, b"file.ckptfs-conflict-n1-1")
    assert beside is not None and beside.content == content and one.data(content) == OLD


def test_who_writes_the_file_meanwhile_wins(tmp_path: Path) -> None:
    """What was told between looking and deciding stays."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    newer = overwrite(one, content, "truncated")
    inode = one.inode(newer)
    one.kill()
    flow = fall_back_of(two)
    read = two.store.read

    def late(*arguments: object, **options: object) -> object:
        found = read(*arguments, **options)  # type: ignore[arg-type]
        cluster.put(f"i/{inode:016x}", {**file_of(cluster, inode).value, "ctime_ns": time.time_ns()})
        return found

    two.store.read = late  # type: ignore[method-assign,assignment]
    run_until_idle(flow)
    assert file_of(cluster, inode).content == newer
    two.store.read = read  # type: ignore[method-assign]
    run_until_idle(flow)
    flow.step()
    assert file_of(cluster, inode).content == content


def test_a_failure_after_the_store_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content is this node's, as the store says; the other rows here follow when somebody asks for the file."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    newer = overwrite(one, content, "truncated")
    one.kill()
    inject_fault(monkeypatch, "salvage:shown=EIO")
    with pytest.raises(OSError):
        decide(two)
    tidy(two)
    assert file_of(cluster, one.inode(newer)).content == content and two.data(content) == OLD
    assert two.row(content).state is ContentState.SEALED and not two.row(content).is_remote


@pytest.mark.parametrize("renamer", [1, 2])
def test_another_node_s_file_is_renamed_over(tmp_path: Path, renamer: int) -> None:
    """P9: who dies with the newer file leaves the name to the content that it had before; else that goes."""
    cluster = LocalCluster(tmp_path, 3)
    one, other = cluster.nodes[0], cluster.nodes[renamer]
    survivors = [node for node in cluster.nodes if node is not other]
    content = replicated(cluster)
    replaced = one.inode(content)
    newer = renamed_over(other, replaced, content)
    inode = other.inode(newer)
    tidy(*cluster.nodes)
    assert content in one.files(Tier.RAM)
    other.kill()
    decide(*reversed(survivors))
    file = file_of(cluster, inode)
    assert (file.content, file.value["size"], file.value["mtime_ns"]) == (content, len(OLD), 2)
    assert one.data(content) == OLD
    tidy(*survivors)
    assert one.data(content) == OLD


def test_what_another_node_renamed_over_goes_when_its_own_file_is_safe(tmp_path: Path) -> None:
    _, content, one, two = make_replicated(tmp_path, 2)
    newer = renamed_over(two, one.inode(content), content)
    send(two, newer)
    AnnounceCopies(one.db, cluster_of(one)).step()
    publish(two)
    tidy(two, one)
    assert one.files(Tier.RAM) == two.files(Tier.RAM) == {newer}


def test_what_another_node_deleted_goes_at_once(tmp_path: Path) -> None:
    cluster, content, one, _ = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    cluster.store.commit([], [Delete(b"i/%016x" % inode)])
    with one.db.transaction():
        one.db.run("UPDATE inode SET nlink = 0 WHERE id = ?", inode)
        contents.mark_awaiting_store_check(one.db, inode)
        assert namespace.delete_forgotten(one.db, [inode]) == {inode: []}
    flow = Reconcile(one.db, one.tiers, one.told, cluster_of(one), one.host.reported_unneeded)
    flow.step()
    Reclaim(one.db, one.tiers, one.config, one.told, (Tier.RAM,)).step()
    assert one.files(Tier.RAM) == set()


def renamed_over(node: Node, replaced: int, content: int) -> int:
    """This node renames a new file of its own over one that another node made; its content."""
    knows(node, replaced, content)
    newer = overwrite(node, content, "renamed")
    for other in node.cluster.nodes:
        if other is not node:
            with other.db.transaction():
                other.db.run("UPDATE inode SET nlink = 0 WHERE id = ?", replaced)
                contents.mark_awaiting_store_check(other.db, replaced)
                namespace.delete_forgotten(other.db, [replaced])
    return newer


@pytest.mark.parametrize("first", [1, 2], ids=["the first returns first", "the last returns first"])
def test_two_nodes_die_one_after_the_other_and_both_return(tmp_path: Path, first: int) -> None:
    """P5: each alone had what it had closed. The file has the newer one then, and the other one is beside it."""
    cluster, content, one, two, three = make_replicated(tmp_path, 3)
    lost = {1: overwrite(one, content, "truncated")}
    inode = one.inode(lost[1])
    one.kill()
    decide(two)
    send(two, content)
    AnnounceCopies(three.db, cluster_of(three)).step()
    lost[2] = overwrite(two, content, "truncated")
    two.kill()
    decide(three)
    file = file_of(cluster, inode)
    assert file.content == content and [record["content"] for record in file.missed] == [lost[2], lost[1]]
    for node in (one, two) if first == 1 else (two, one):
        node.revive()
        cache_file(node, inode)
        decide(three)
        tidy(node)
        if node is two:
            publish(two)
    assert file_of(cluster, inode).content == lost[2]
    beside = namespace.find_child(one.db, ROOT, b"file.ckptfs-conflict-n1-1")
    assert beside is not None and beside.content == lost[1]
    for node, number in ((one, lost[1]), (two, lost[2])):
        assert node.data(number) == NEW and node.state(number) is ContentState.SEALED
