"""P5, P7, P9: the file shows the state on the PFS if no living node has a newer one, and never an older state over it."""

import contextlib
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from clique_world import LocalCluster, Node, cluster_of, make_cluster, send_copy
from local_node import inject_fault, run_until_idle
from salvage_world import (
    NEW,
    OLD,
    appended,
    cache_file,
    change,
    come_back,
    decide,
    fall_back_of,
    file_of,
    hear,
    held,
    make_replicated,
    opens,
    overwrite,
    publish,
    replicated,
    salvage_file,
    send,
    shown,
    tidy,
)

from ckptfs import limits
from ckptfs.catalog import contents, mover_requests, namespace
from ckptfs.catalog.database import Database
from ckptfs.clique import locations
from ckptfs.coherence import keys
from ckptfs.coherence.key_state import DirtyKeyTracker
from ckptfs.coherence.keys import INODE, PFS_STATE, SharedKey
from ckptfs.coherence.pfs_coordination import StoreSnapshot
from ckptfs.errors import StoreUnreachable
from ckptfs.flow import salvage
from ckptfs.flow.copy_records import AnnounceCopies
from ckptfs.model import ROOT

pytestmark = pytest.mark.usefixtures("no_rivals")


def alone(cluster: LocalCluster) -> int:
    """A file of the first node that no other one has a copy of; its content."""
    one = cluster.nodes[0]
    content = one.make(b"file", OLD)
    one.seal()
    publish(one)
    return content


def write_back(node: Node, content: int, *, complete: bool = True, size: int | None = None, mtime_ns: int = 2) -> None:
    """The PFS shows what this node has of a content, as the store says."""
    row = node.row(content)
    size, digest = row.size if size is None else size, None if row.digest is None else row.digest.hex()
    published = [row.generation, int(complete), size, mtime_ns, 77, digest]
    node.cluster.put(f"f/{row.inode:016x}", {"names": [[ROOT, "file"]], "published": published})


def make_on_pfs(root: Path, count: int, **options: Any) -> tuple[Any, ...]:
    """Return a cluster, the content of a file that its first node has written back, the file, and each of its nodes."""
    cluster = LocalCluster(root, count, **options)
    content, one = alone(cluster), cluster.nodes[0]
    write_back(one, content)
    return cluster, content, one.inode(content), *cluster.nodes


def ask(node: Node, inode: int) -> int:
    """Have the file salvaged on a node that knows it; how that ended."""
    content = file_of(node.cluster, inode).content
    if content is not None:
        node.learn(inode, b"file", content, 1)
    return salvage_file(node, inode)


HOW = pytest.mark.parametrize("how", ["in place", "truncated"])


def write_anew(one: Node, content: int, how: str, stop: str = "sealed") -> int:
    """The next generation, which only this node has; its content."""
    if how == "truncated":
        return overwrite(one, content, how)
    change(one, content, appended, stop=stop)
    return content


@HOW
@pytest.mark.parametrize("stop", ["open", "closed", "sealed"])
def test_what_the_pfs_has_is_shown_when_nobody_has_any_of_it(tmp_path: Path, how: str, stop: str) -> None:
    """P9: with its size and time; one node of those that are asked decides it."""
    cluster, content, inode, one, two, three = make_on_pfs(tmp_path, 3)
    lost = write_anew(one, content, how, stop)
    assert ask(two, inode) == mover_requests.FAILED, "its writer lives"
    one.kill()
    assert ask(two, inode) == mover_requests.DONE
    assert shown(cluster, inode) == (0, 1, len(OLD), 2)
    missed = file_of(cluster, inode).salvaged or {}
    assert (missed["content"], missed["generation"], missed["node"], missed["shows"]) == (lost, 2, 1, None)
    decided = file_of(cluster, inode).item
    assert ask(three, inode) == mover_requests.DONE and file_of(cluster, inode).item == decided, "once"
    for node in (two, three):
        assert (keys.get_value(node.db, SharedKey(INODE, inode)) or {})["content"] is None
        assert (keys.get_value(node.db, SharedKey(PFS_STATE, inode)) or {})["published"][:2] == [1, 1]


def test_what_was_fsynced_of_an_open_file_is_the_whole_of_it(tmp_path: Path) -> None:
    cluster, one, two = make_cluster(tmp_path, 2)
    content = alone(cluster)
    inode = one.inode(content)
    change(one, content, appended, stop="open")
    write_back(one, content, complete=False, size=7, mtime_ns=5)
    one.kill()
    assert ask(two, inode) == mover_requests.DONE
    assert shown(cluster, inode) == (0, 2, 7, 5) and (keys.get_value(two.db, SharedKey(PFS_STATE, inode)) or {})["published"][1] == 1


@pytest.mark.parametrize("who", ["nobody", "the PFS is being changed", "a living node has it"])
def test_what_is_not_certain_is_not_decided(tmp_path: Path, who: str) -> None:
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster) if who == "a living node has it" else alone(cluster)
    inode = one.inode(content)
    if who == "the PFS is being changed":
        write_back(one, content)
        on_pfs = locations.load_pfs_state(cluster.store, inode)
        assert on_pfs is not None
        cluster.put(f"f/{inode:016x}", {**on_pfs.value, "by": 1})
    change(one, content, appended)
    before = file_of(cluster, inode).item
    one.kill()
    decided = ask(two, inode)
    if who == "a living node has it":
        assert held(two, inode) == OLD
    else:
        assert decided == (mover_requests.FAILED if who == "nobody" else mover_requests.OPEN) and file_of(cluster, inode).item == before


def test_a_node_that_may_have_a_newer_one_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, one, two = make_cluster(tmp_path, 2)
    content = alone(cluster)
    write_back(one, content)
    change(one, content, appended)
    one.kill()
    monkeypatch.setattr(limits, "SALVAGE_RIVALS_S", 1000.0)
    assert ask(two, one.inode(content)) == mover_requests.OPEN
    assert fall_back_of(two).next_due_s() is not None, "it is looked at again"


def test_never_an_older_generation_than_the_pfs_has(tmp_path: Path) -> None:
    """P5, P7: the holder of generation 1 does not show it over generation 2, nor has it written back over that."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    newer = change(one, content, appended)
    write_back(one, newer, mtime_ns=3)
    change(one, newer, lambda data: data.reverse(), mtime_ns=4)
    two.db.is_journalled = True
    one.kill()
    decide(two)
    assert shown(cluster, inode) == (0, 2, len(OLD + NEW), 3)
    assert two.db.rows("SELECT op FROM journal") == [] and two.data(content) == OLD


def test_what_is_left_on_the_pfs_of_an_open_file_counts_for_no_whole_one(tmp_path: Path) -> None:
    """P9: what was fsynced of generation 2 is newer than the previous content on another node."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    newer = change(one, content, appended, stop="open")
    with one.db.transaction():
        contents.record_fsync(one.db, inode, newer, 9, 1, 3)
    publish(one)
    write_back(one, newer, complete=False, size=9, mtime_ns=3)
    one.kill()
    assert ask(two, inode) == mover_requests.DONE
    assert shown(cluster, inode) == (0, 2, 9, 3)


def test_a_newer_former_content_takes_the_place_of_what_the_pfs_has(tmp_path: Path) -> None:
    """P9: its holder came to it late, and somebody has fetched the older one meanwhile."""
    cluster, content, one, two, three = make_replicated(tmp_path, 3)
    inode = one.inode(content)
    write_back(one, content)
    newer = change(one, content, appended)
    send_copy(one, two, newer)
    hear(two, newer)
    hear(one, newer)
    lost = overwrite(one, newer, "truncated")
    one.kill()
    assert ask(three, inode) == mover_requests.DONE and shown(cluster, inode)[:2] == (0, 1)
    fetched = {**file_of(cluster, inode).value, "content": 4242}
    cluster.put(f"i/{inode:016x}", fetched)
    decide(two)
    assert shown(cluster, inode)[:3] == (newer, 2, len(OLD + NEW)) and held(two, inode) == OLD + NEW
    assert (file_of(cluster, inode).salvaged or {})["content"] == lost


@pytest.mark.parametrize("had_it", [True, False])
@pytest.mark.parametrize("has_landed", [True, False])
def test_a_write_back_in_hand_is_waited_for(tmp_path: Path, had_it: bool, has_landed: bool) -> None:
    """P9: its writer died while it wrote the newer state back. What has landed there is shown, not what others had before."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    if had_it:
        write_back(one, content)
    newer = change(one, content, appended)
    on_pfs = locations.load_pfs_state(cluster.store, inode)
    before = {"names": []} if on_pfs is None else on_pfs.value
    cluster.put(f"f/{inode:016x}", {**before, "by": one.number})
    one.kill()
    back = fall_back_of(two)
    run_until_idle(back)
    assert shown(cluster, inode)[0] == newer and back.next_due_s() is not None, "the taker of its rows has not looked yet"
    if has_landed:
        write_back(one, newer, mtime_ns=3)
    else:
        cluster.put(f"f/{inode:016x}", before if had_it else None)
    decide(two)
    assert shown(cluster, inode) == ((newer, 2, len(OLD + NEW), 3) if has_landed else (content, 1, len(OLD), 2))


def test_what_is_undecided_outlives_a_store_that_is_away(tmp_path: Path) -> None:
    """P9: no other death comes to have all looked at again."""
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    change(one, content, appended)
    cluster.put(f"f/{inode:016x}", {"names": [], "by": one.number})
    one.kill()
    back = fall_back_of(two)
    run_until_idle(back)
    two.store.reachable = False
    with pytest.raises(StoreUnreachable):
        run_until_idle(back)
    two.store.reachable = True
    cluster.put(f"f/{inode:016x}", None)
    run_until_idle(back)
    assert shown(cluster, inode) == (content, 1, len(OLD), 2)


def test_what_cannot_be_decided_does_not_hold_up_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P9: there are more such files than one look takes."""
    monkeypatch.setattr(salvage, "BATCH_CONTENTS", 1)
    cluster, first, one, two = make_replicated(tmp_path, 2)
    second = one.make(b"second", OLD)
    one.seal()
    publish(one)
    send(one, second)
    AnnounceCopies(two.db, cluster_of(two)).step()
    inodes = [one.inode(content) for content in (first, second)]
    for inode, content in zip(inodes, (first, second), strict=True):
        change(one, content, appended)
        cluster.put(f"f/{inode:016x}", {"names": [], "by": one.number})
    one.kill()
    back = fall_back_of(two)
    run_until_idle(back)
    cluster.put(f"f/{inodes[1]:016x}", None)
    for _ in range(4):
        run_until_idle(back)
    assert [shown(cluster, inode)[0] == content for inode, content in zip(inodes, (first, second), strict=True)] == [False, True]


def test_a_pfs_that_is_away_with_a_write_back_in_hand_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, content, one, two = make_replicated(tmp_path, 2)
    inode = one.inode(content)
    change(one, content, appended)
    cluster.put(f"f/{inode:016x}", {"names": [], "by": one.number})
    one.kill()
    monkeypatch.setattr(limits, "FETCH_PATIENCE_S", -1.0)
    decide(two)
    assert shown(cluster, inode) == (content, 1, len(OLD), 2)


def test_the_pfs_knows_the_time_of_what_is_shown(tmp_path: Path) -> None:
    """The writer changed the file in place before it heard that another node had it, so no record says when that was written."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = alone(cluster)
    inode = one.inode(content)
    write_back(one, content)
    send_copy(one, two, content)
    AnnounceCopies(two.db, cluster_of(two)).step()
    assert change(one, content, appended) == content
    one.kill()
    decide(two)
    assert shown(cluster, inode)[1:] == (1, len(OLD), 2) and held(two, inode) == OLD


@HOW
@pytest.mark.parametrize("fetched", [True, False])
def test_the_writer_returns(tmp_path: Path, how: str, fetched: bool) -> None:
    """Nobody has written the file meanwhile: it holds what was closed last. Whoever fetched what the PFS has wrote nothing."""
    cluster, content, inode, one, two = make_on_pfs(tmp_path, 2)
    lost = write_anew(one, content, how)
    one.kill()
    assert ask(two, inode) == mover_requests.DONE
    if fetched:
        value = {**file_of(cluster, inode).value, "content": 4242}
        cluster.put(f"i/{inode:016x}", value)
        with two.db.transaction():
            keys.write_value(two.db, SharedKey(INODE, inode), value)
    one.db.is_journalled = True
    come_back(one, two, inode)
    assert shown(cluster, inode)[:2] == (lost, 2) and file_of(cluster, inode).salvaged is None
    assert one.data(lost) == (NEW if how == "truncated" else OLD + NEW)
    told = one.db.rows("SELECT op, inode, content FROM journal")
    assert told == [("content", inode, lost)], "the PFS gets it, though its writer has passed over its own row"


def test_the_writer_returns_after_the_file_was_written_again(tmp_path: Path) -> None:
    cluster, content, inode, one, two = make_on_pfs(tmp_path, 2)
    change(one, content, appended)
    one.kill()
    assert ask(two, inode) == mover_requests.DONE
    third = two.write(inode, b"third")
    two.seal()
    publish(two)
    one.revive()
    cache_file(one, inode)
    decide(two)
    tidy(one)
    assert shown(cluster, inode)[:2] == (third, 2)
    beside = namespace.find_child(one.db, ROOT, b"file.ckptfs-conflict-n1-1")
    assert beside is not None and (beside.content, beside.size) == (content, len(OLD + NEW))


def test_a_failure_after_the_store_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, content, inode, one, two = make_on_pfs(tmp_path, 2)
    change(one, content, appended)
    one.kill()
    inject_fault(monkeypatch, "salvage:pfs=EIO")
    with contextlib.suppress(OSError):
        ask(two, inode)
    inject_fault(monkeypatch, "")
    assert ask(two, inode) == mover_requests.DONE and (keys.get_value(two.db, SharedKey(INODE, inode)) or {})["content"] is None


def test_who_opens_it_gets_it(tmp_path: Path) -> None:
    """P9: at the first try, also long after the death."""
    cluster, one, two = make_cluster(tmp_path, 2)
    two.db = Database(two.root / "state" / "catalog.db", journalled=True, clustered=True, hooks=DirtyKeyTracker())
    content = alone(cluster)
    inode = one.inode(content)
    change(one, content, appended)
    (two.root / "pfs" / "file").write_bytes(OLD)
    there = os.stat(two.root / "pfs" / "file")
    published = [1, 1, len(OLD), there.st_mtime_ns, there.st_ino, None]
    value = {"names": [[ROOT, "file"]], "seen": [there.st_ino, there.st_mode, 0, 0], "published": published}
    for key, said in ((f"f/{inode:016x}", value), (f"x/{ROOT:016x}/file", {"inode": inode})):
        cluster.put(key, said)
    cluster.put(f"e/{ROOT:016x}/file", {"child": inode, "type": stat.S_IFREG})
    StoreSnapshot(two.db, two.store).load("", inodes=[inode])
    one.kill()
    shows = opens(two, inode)
    assert shows not in (None, content) and two.data(shows) == OLD


def test_without_copies_on_other_nodes(tmp_path: Path) -> None:
    """Where one copy is all that is wanted the PFS is all the more what is left."""
    cluster, content, inode, one, two = make_on_pfs(tmp_path, 2, factor=1)
    change(one, content, appended)
    one.kill()
    assert ask(two, inode) == mover_requests.DONE and shown(cluster, inode)[:2] == (0, 1)
