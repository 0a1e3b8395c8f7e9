"""P8, P9: an open waits for nodes that may have the content, as long as that makes sense, and no longer."""

import errno
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from clique_world import LocalCluster, Node, bring, cluster_of, fetch_of, make_cluster
from salvage_world import OLD, decide, make_replicated, overwrite, publish

from ckptfs import limits
from ckptfs.catalog import mover_requests, namespace
from ckptfs.catalog.database import Database
from ckptfs.clique import locations, membership
from ckptfs.clique.peer_api import PeerFailed, PeerRefused
from ckptfs.coherence import keys
from ckptfs.coherence.key_state import DirtyKeyTracker
from ckptfs.coherence.keys import CONTENT, INODE, SharedKey
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.reclaim import Reclaim
from ckptfs.model import ContentState, Tier
from ckptfs.store.kv import Delete, Put

FAILED = (mover_requests.FAILED, 5)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """One try is often enough, unless there is a reason for more."""
    for name, value in {"FETCH_TRIES_MAX": 1, "RETRY_FIRST_S": 0.02, "FETCH_PAUSE_MAX_S": 0.02, "SALVAGE_POLL_S": 0.0}.items():
        monkeypatch.setattr(limits, name, value)


def decided_after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """How long the others take to decide what is left of a file."""
    monkeypatch.setattr(limits, "SALVAGE_RIVALS_S", 0.0)
    monkeypatch.setattr(limits, "SALVAGE_MARGIN_S", seconds)


def knowing(cluster: LocalCluster, content: int) -> tuple[Node, int, Fetch]:
    """The last node, which has heard of the file that holds a content; the file; how it fetches."""
    one, reader = cluster.nodes[0], cluster.nodes[-1]
    inode = one.inode(content)
    reader.learn(inode, b"file", content, len(OLD))
    db = Database(reader.db.path, journalled=False, clustered=True, hooks=DirtyKeyTracker())
    return reader, inode, Fetch(db, reader.tiers, reader.config, reader.told, cluster_of(reader))


def tried(node: Node, inode: int, flow: Fetch, times: int) -> int:
    """Somebody opens the file, and it was tried so often or answered; the want."""
    want = mover_requests.insert_request(node.db, mover_requests.FETCH, inode)
    end_s, done = time.monotonic() + 60, 0
    while done < times and answer(node, want)[0] == mover_requests.OPEN:
        assert time.monotonic() < end_s
        done += flow.step()
        threading.Event().wait(0.005)
    return want


def answer(node: Node, want: int) -> tuple[int, int]:
    row = mover_requests.get(node.db, want)
    assert row is not None
    return row.state, row.error


def awaited(root: Path, times: int) -> tuple[LocalCluster, int, Fetch, int]:
    """Two nodes, of which the second one has tried so often to open a file of the first, which lives and does not answer: its content, how
    it is fetched, the want, which is open.
    """
    cluster, one, two = make_cluster(root, 2)
    content = one.written(b"a", b"hello")
    publish(one)
    cluster.cut.add("n1")
    flow = fetch_of(two)
    want = tried(two, one.inode(content), flow, times)
    assert answer(two, want) == (mover_requests.OPEN, 0)
    return cluster, content, flow, want


def test_a_writer_that_lives_and_does_not_answer_is_tried_again(tmp_path: Path) -> None:
    """P8: its mover was killed, and the next one begins only now."""
    cluster, content, flow, _ = awaited(tmp_path, 4)
    one, two = cluster.nodes
    cluster.cut.clear()
    assert bring(two, one.inode(content), flow=flow).result == mover_requests.FETCHED
    assert two.data(content) == b"hello"


def test_a_writer_that_returns_is_waited_for_before_this_node_hears_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P9: it publishes after its record is back, but the watch that brings the record may be slower than the name."""
    decided_after(monkeypatch, 0.0)
    cluster, one, two = make_cluster(tmp_path, 2)
    content = one.written(b"a", b"hello")
    publish(one)
    cluster.view = membership.build_view([two.member])
    cluster.store.commit([], [Put(membership.node_key(one.number), membership.encode_node(one.member))])
    flow = fetch_of(two)
    want = tried(two, one.inode(content), flow, 3)
    assert answer(two, want) == (mover_requests.OPEN, 0)
    cluster.view = membership.build_view([one.member, two.member])
    assert bring(two, one.inode(content), flow=flow).result == mover_requests.FETCHED


def test_its_patience_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided_after(monkeypatch, 0.0)
    monkeypatch.setattr(limits, "FETCH_PATIENCE_S", 0.1)
    cluster, one, two = make_cluster(tmp_path, 2)
    content = one.written(b"a", b"hello")
    cluster.cut.add("n1")
    failed = bring(two, one.inode(content))
    assert (failed.state, failed.error) == FAILED
    assert len([act for act, _ in two.peers.asked if act == "record"]) > 1


@pytest.mark.parametrize("island", [False, True])
def test_who_says_that_it_has_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, island: bool) -> None:
    decided_after(monkeypatch, 0.0)
    _, one, two = make_cluster(tmp_path, 2)
    content = one.written(b"a", b"hello")

    def refuse(act: str, name: str) -> None:
        raise PeerFailed("it does not answer") if island else PeerRefused("it has none", 2)

    locations.refresh(two.db, two.store, [content], two.number)
    two.peers.fault = refuse
    two.store.reachable = not island
    failed = bring(two, one.inode(content))
    assert (failed.state, failed.error) == FAILED
    assert len([act for act, _ in two.peers.asked if act == "record"]) == 1


def test_an_island_looks_again_for_a_short_while_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes as long as the store takes not to answer: eight of them were half a minute in front of an EIO."""
    monkeypatch.setattr(limits, "FETCH_TRIES_MAX", 1000)
    monkeypatch.setattr(limits, "ETCD_WAIT_S", 0.1)
    cluster, one, two = make_cluster(tmp_path, 2)
    content = one.written(b"a", b"hello")
    locations.refresh(two.db, two.store, [content], two.number)
    cluster.cut.add("n1")
    two.store.reachable = False
    two.presence.lease_id = 0
    failed = bring(two, one.inode(content))
    assert (failed.state, failed.error) == FAILED
    assert 1 < len([act for act, _ in two.peers.asked if act == "record"]) < 500


@pytest.mark.parametrize("sealed", [True, False])
def test_a_replaced_file_is_waited_for_while_the_mover_of_its_writer_restarts(tmp_path: Path, sealed: bool) -> None:
    """P7, P8: the kernel looks up a name once more after ESTALE. The next file there waits for the same mover, and is replaced too."""
    cluster, content, flow, want = replaced_beside_a_dead_mover(tmp_path, sealed=sealed)
    one, two = cluster.nodes
    assert answer(two, want) == (mover_requests.OPEN, 0)
    cluster.cut.clear()
    assert bring(two, one.inode(content), flow=flow).result == mover_requests.FETCHED
    assert two.data(content) == b"hello"


def test_a_replaced_file_is_not_waited_for_after_the_death_of_its_writer(tmp_path: Path) -> None:
    """Whoever opens it looks up who has the name now."""
    cluster, content, flow, want = replaced_beside_a_dead_mover(tmp_path, sealed=False)
    one, two = cluster.nodes
    one.kill()
    tried(two, one.inode(content), flow, 1)
    assert answer(two, want) == (mover_requests.FAILED, errno.ESTALE)


def deleted_after_its_lookup(root: Path, *, sealed: bool) -> tuple[LocalCluster, int, int]:
    """Two nodes, and the content and inode of a file that the first one wrote, published and deleted."""
    cluster, one, _ = make_cluster(root, 2)
    content = one.make(b"a", b"hello")
    if sealed:
        one.seal()
    one.publish_shared(content)
    inode = one.inode(content)
    delete_everywhere(cluster, content)
    return cluster, content, inode


def replaced_beside_a_dead_mover(root: Path, *, sealed: bool) -> tuple[LocalCluster, int, Fetch, int]:
    """The second node opens what it has looked up, its writer has replaced it since, and does not answer just now."""
    cluster, content, inode = deleted_after_its_lookup(root, sealed=sealed)
    two = cluster.nodes[1]
    cluster.cut.add("n1")
    flow = fetch_of(two)
    return cluster, content, flow, tried(two, inode, flow, 3)


@pytest.mark.parametrize(("sealed", "known"), [(True, True), (False, True), (False, False)])
def test_a_file_that_is_deleted_after_its_lookup_is_fetched_all_the_same(tmp_path: Path, sealed: bool, known: bool) -> None:
    """P7: the store knows nothing of it any more, and its writer keeps the bytes for a while, sealed or not.

    `known`: the reader has learned of its content; it may have been deleted between the reads of the inode and of the content.
    """
    cluster, content, inode = deleted_after_its_lookup(tmp_path, sealed=sealed)
    two = cluster.nodes[1]
    if not known:
        two.db.run("DELETE FROM content WHERE id = ?", content)
    assert bring(two, inode).result == mover_requests.FETCHED
    assert two.data(content) == b"hello"


@pytest.mark.parametrize("sealed", [True, False])
def test_a_deleted_file_that_no_node_has_any_more_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool) -> None:
    monkeypatch.setattr(limits, "FETCH_TRIES_MAX", 100)
    cluster, _, inode = deleted_after_its_lookup(tmp_path, sealed=sealed)
    one, two = cluster.nodes
    one.config = replace(one.config, ram_bytes=1)
    one.squeeze(Tier.RAM, 1)
    Reclaim(one.db, one.tiers, one.config, one.told, (Tier.RAM,)).step()
    failed = bring(two, inode)
    assert (failed.state, failed.error) == (mover_requests.FAILED, errno.ESTALE)
    assert len([act for act, _ in two.peers.asked if act == "seal_soon"]) == 1


def delete_everywhere(cluster: LocalCluster, content: int) -> None:
    """Another node has the name now, and both know it; the writer's kernel has forgotten the inode, the reader's has not."""
    one, two = cluster.nodes
    inode = one.inode(content)
    cluster.store.commit([], [Delete(b"c/%016x" % content), Delete(b"i/%016x" % inode)])
    for node in (one, two):
        with node.db.transaction():
            keys.write_value(node.db, SharedKey(INODE, inode), None)
            keys.write_value(node.db, SharedKey(CONTENT, content), None)
            node.db.run("DELETE FROM entry WHERE child = ?", inode)
    with one.db.transaction():
        namespace.delete_forgotten(one.db, [inode])
    assert one.state(content) is ContentState.DOOMED


@pytest.mark.parametrize("how", ["truncated", "renamed"])
def test_after_a_death_the_former_content_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """P9: until those who hold it have decided, opening the file is no error; then it shows what is left."""
    decided_after(monkeypatch, 40.0)
    cluster, content, one, two, _ = make_replicated(tmp_path, 3)
    newer = overwrite(one, content, how)
    three, inode, flow = knowing(cluster, newer)
    cluster.cut.add("n1")
    want = tried(three, inode, flow, 2)
    one.kill()
    tried(three, inode, flow, 2)
    assert answer(three, want) == (mover_requests.OPEN, 0), "nobody has decided"
    decide(two)
    assert bring(three, inode, flow=flow).result == mover_requests.FETCHED
    assert three.data(content) == OLD


def test_long_after_a_death_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decided_after(monkeypatch, 0.0)
    cluster, one, *_ = make_cluster(tmp_path, 3)
    content = one.written(b"a", b"hello")
    publish(one)
    three, inode, flow = knowing(cluster, content)
    one.kill()
    want = tried(three, inode, flow, 1)
    assert answer(three, want) == FAILED
