"""P5, P7, P9: a file that was renamed over one of which the PFS alone had the bytes is lost with its writer: the PFS has the older one."""

import os
import stat
from pathlib import Path

import pytest
from clique_world import LocalCluster, Node
from salvage_world import NEW, OLD, come_back, file_of, opens, publish, salvage_file, shown

from ckptfs.catalog import mover_requests, namespace
from ckptfs.catalog.database import Database
from ckptfs.clique import locations
from ckptfs.coherence import keys
from ckptfs.coherence.key_state import DirtyKeyTracker
from ckptfs.coherence.keys import INODE, PFS_NAME, PFS_STATE, SharedKey
from ckptfs.coherence.pfs_coordination import StoreSnapshot
from ckptfs.model import ROOT
from ckptfs.store.kv import Delete

NAME = f"x/{ROOT:016x}/file"


pytestmark = pytest.mark.usefixtures("no_rivals")


def world(tmp_path: Path, count: int = 2) -> tuple[LocalCluster, int, int, int]:
    """Nodes with catalogs of a cluster; what the PFS shows, which is gone, and what the first node alone has renamed over it: (inode of
    the former, inode, content).
    """
    cluster = LocalCluster(tmp_path, count)
    one, others = cluster.nodes[0], cluster.nodes[1:]
    for node in others:
        node.db = Database(node.root / "state" / "catalog.db", journalled=True, clustered=True, hooks=DirtyKeyTracker())
        (node.root / "pfs" / "file").write_bytes(OLD)
    there = os.stat(others[0].root / "pfs" / "file")
    content = one.make(b"file", OLD)
    one.seal()
    publish(one)
    former = one.inode(content)
    seen = [there.st_ino, there.st_mode, there.st_uid, there.st_gid]
    on_pfs = {"names": [[ROOT, "file"]], "seen": seen, "published": [5, 1, len(OLD), there.st_mtime_ns, there.st_ino, None]}
    cluster.put(f"f/{former:016x}", on_pfs)
    cluster.put(NAME, {"inode": former})
    newer = one.make(b"file.tmp", NEW)
    with one.db.transaction():
        namespace.rename(one.db, ROOT, b"file.tmp", ROOT, b"file")
        namespace.delete_forgotten(one.db, [former])
    cluster.store.commit([], [Delete(b"i/%016x" % former), Delete(b"c/%016x" % content)])
    one.seal()
    publish(one)
    inode = one.inode(newer)
    cluster.put(f"e/{ROOT:016x}/file", {"child": inode, "type": stat.S_IFREG})
    return cluster, former, inode, newer


def learn(node: Node, inode: int) -> None:
    StoreSnapshot(node.db, node.store).load("", inodes=[inode])


def ask(node: Node, inode: int) -> int:
    """Have the file salvaged on a node that knows it; how that ended."""
    learn(node, inode)
    return salvage_file(node, inode)


def test_it_shows_what_the_pfs_has(tmp_path: Path) -> None:
    """P9: when its writer is dead and not before; once; and what it missed is known."""
    cluster, former, inode, newer = world(tmp_path, 3)
    one, two, three = cluster.nodes
    assert ask(two, inode) == mover_requests.FAILED, "its writer lives"
    one.kill()
    assert ask(two, inode) == mover_requests.DONE
    assert shown(cluster, inode)[:3] == (0, 0, len(OLD))
    assert (file_of(cluster, inode).salvaged or {})["content"] == newer
    decided = file_of(cluster, inode).item
    assert ask(three, inode) == mover_requests.DONE and file_of(cluster, inode).item == decided, "once"
    assert locations.load_pfs_state(cluster.store, former) is None
    for node in (two, three):
        assert (keys.get_value(node.db, SharedKey(INODE, inode)) or {})["content"] is None
        assert (keys.get_value(node.db, SharedKey(PFS_STATE, inode)) or {})["published"][:3] == [0, 1, len(OLD)]
        assert keys.get_value(node.db, SharedKey(PFS_NAME, ROOT, b"file")) == {"inode": inode}
        assert keys.get_value(node.db, SharedKey(PFS_STATE, former)) is None


def test_who_opens_it_gets_it(tmp_path: Path) -> None:
    """P9: at the first try, and byte for byte."""
    cluster, _, inode, newer = world(tmp_path)
    one, two = cluster.nodes
    learn(two, inode)
    one.kill()
    shows = opens(two, inode)
    assert shows not in (None, newer) and two.data(shows) == OLD


def test_the_writer_returns(tmp_path: Path) -> None:
    cluster, _, inode, newer = world(tmp_path)
    one, two = cluster.nodes
    one.kill()
    assert ask(two, inode) == mover_requests.DONE
    one.db.is_journalled = True
    come_back(one, two, inode)
    assert shown(cluster, inode)[:3] == (newer, 1, len(NEW)) and file_of(cluster, inode).salvaged is None
    assert one.data(newer) == NEW
    assert one.db.rows("SELECT op, inode, content FROM journal") == [("content", inode, newer)]


@pytest.mark.parametrize("why", ["it has another name", "the PFS shows it twice", "it is being changed", "the name is"])
def test_what_is_not_certain_is_not_decided(tmp_path: Path, why: str) -> None:
    """P7: nothing that may belong to another file, or change just now."""
    cluster, former, inode, newer = world(tmp_path)
    one, two = cluster.nodes
    on_pfs = locations.load_pfs_state(cluster.store, former)
    assert on_pfs is not None
    match why:
        case "it has another name":
            cluster.put(f"i/{former:016x}", {**file_of(cluster, inode).value, "names": [[ROOT, "other"]]})
        case "the PFS shows it twice":
            cluster.put(f"f/{former:016x}", {**on_pfs.value, "names": [[ROOT, "file"], [ROOT, "other"]]})
        case "it is being changed":
            cluster.put(f"f/{former:016x}", {**on_pfs.value, "by": 1})
        case "the name is":
            cluster.put(NAME, {"inode": former, "by": 1, "next": inode})
    one.kill()
    waits = why in {"it is being changed", "the name is"}
    assert ask(two, inode) == (mover_requests.OPEN if waits else mover_requests.FAILED) and shown(cluster, inode)[0] == newer
