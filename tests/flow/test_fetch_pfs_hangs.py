"""P1, P8: a PFS that hangs holds up the fetches of files that only it has, and no others."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from clique_world import LocalCluster, Node, cluster_of, is_done, make_cluster, replicated, until
from local_node import inject_fault
from salvage_world import publish

from ckptfs import disk, limits
from ckptfs.catalog import mover_requests
from ckptfs.coherence import pfs_coordination
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.fetch.fetch_progress import FetchProgress
from ckptfs.model import ROOT, CopyState, Tier
from ckptfs.tiers.fetch_map import FetchMap

HANGS, FAILS = "pfs:open=hang@*", "pfs:open=EIO@*"
DATA = b"data" * 1000
LARGE = os.urandom(limits.BLOCK_BYTES) + DATA


@pytest.fixture(autouse=True)
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FETCH_SHARED_POLL_S_MAX", 0.01)
    monkeypatch.setattr(limits, "PFS_STALL_S", 0.01)
    monkeypatch.setattr(pfs_coordination, "load_inodes", lambda *_: None)
    inject_fault(monkeypatch, HANGS)


@contextmanager
def lanes(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fetch]:
    """The fetch lanes of the mover of a node. At the end of the block the PFS answers."""
    flow = Fetch(node.db, node.tiers, replace(node.config, pfs=node.root / "pfs"), node.told, cluster_of(node))
    end = threading.Event()

    def run() -> None:
        while not end.wait(0.002):
            while flow.step():
                pass

    with ThreadPoolExecutor(limits.FETCHES_SHARED_MAX) as threads:
        running = [threads.submit(run) for _ in range(limits.FETCHES_SHARED_MAX)]
        try:
            yield flow
        finally:
            end.set()
            inject_fault(monkeypatch, "")
        assert all(lane.result(60) is None for lane in running)


def written(cluster: LocalCluster, name: bytes, reader: Node, data: bytes = DATA) -> int:
    """A file of node 1 that the reader finds on the PFS as well; its content."""
    content = cluster.nodes[0].written(name, data)
    show_on_pfs(reader, content, name, data)
    return content


def show_on_pfs(reader: Node, content: int, name: bytes, data: bytes = DATA) -> None:
    path = reader.root / "pfs" / os.fsdecode(name)
    path.write_bytes(data)
    reader.publish(content)
    inode, found = reader.inode(content), path.stat()
    reader.db.run("UPDATE pfs_file SET mtime_ns = ?, pfs_inode = ? WHERE inode = ?", found.st_mtime_ns, found.st_ino, inode)
    reader.db.run("INSERT OR REPLACE INTO pfs_entry (parent, name, inode) VALUES (?, ?, ?)", ROOT, name, inode)


def request(node: Node, content: int) -> int:
    return mover_requests.insert_request(node.db, mover_requests.FETCH, node.inode(content))


def count_opens() -> int:
    """How many fetches have come to the PFS."""
    return disk._calls["pfs:open"]


def test_a_file_that_comes_to_the_pfs_while_its_nodes_do_not_answer_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N3: the reader reaches the store and the PFS, and no other node; the store says that the PFS has the file now."""
    for name, value in {"FETCH_TRIES_MAX": 1, "RETRY_FIRST_S": 0.01, "FETCH_PAUSE_MAX_S": 0.01}.items():
        monkeypatch.setattr(limits, name, value)
    cluster, one, two = make_cluster(tmp_path, 2)
    content = one.written(b"file", DATA)
    publish(one)
    cluster.cut.add("n1")
    told = [lambda: show_on_pfs(two, content, b"file")]
    monkeypatch.setattr(pfs_coordination, "load_inodes", lambda *_: told.pop()() if told else None)
    with lanes(two, monkeypatch) as flow:
        flow._salvage_wait = None  # The writer lives: there is nothing to decide.
        inject_fault(monkeypatch, "")
        wanted = request(two, content)
        until(lambda: is_done(two, wanted))
    assert two.data(content) == DATA


def test_files_of_other_nodes_come_while_many_reads_of_the_pfs_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, one, _, three = make_cluster(tmp_path, 3)
    on_peer = replicated(cluster, b"peer", DATA)
    on_pfs = [written(cluster, b"pfs%d" % number, three) for number in range(2 * limits.FETCHES_SHARED_MAX)]
    one.kill()
    with lanes(three, monkeypatch):
        hanging = [request(three, content) for content in on_pfs]
        until(lambda: count_opens() == limits.FETCHES_PFS_MAX)
        other = request(three, on_peer)
        until(lambda: is_done(three, other))
        assert count_opens() == limits.FETCHES_PFS_MAX and not any(is_done(three, one) for one in hanging)
        inject_fault(monkeypatch, "")
        until(lambda: all(is_done(three, one) for one in hanging))
    assert all(three.data(content) == DATA for content in [*on_pfs, on_peer])


def test_steps_that_hang_leave_their_places_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are places; each gets a lane in its place, and none while the PFS gets on."""
    cluster, one, two = make_cluster(tmp_path, 2)
    monkeypatch.setattr(limits, "FETCHES_PFS_MAX", 2)
    monkeypatch.setattr(limits, "PFS_STALLED_MAX", 3)
    on_pfs = [written(cluster, b"pfs%d" % number, two) for number in range(limits.FETCHES_SHARED_MAX)]
    one.kill()
    with lanes(two, monkeypatch) as flow:
        assert flow.list_stalled() == []
        reading = [request(two, content) for content in on_pfs]
        until(lambda: len(flow.list_stalled()) == 3)
        until(lambda: count_opens() == 5)
        assert not any(is_done(two, one) for one in reading)
        inject_fault(monkeypatch, "")
        until(lambda: all(is_done(two, one) for one in reading))
        until(lambda: flow.list_stalled() == [])


@pytest.mark.parametrize("then", ["", FAILS])
def test_a_node_that_returns_serves_a_file_whose_read_of_the_pfs_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """The read that comes back late, with the bytes or with an error, changes nothing."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = written(cluster, b"file", two)
    one.kill()
    with lanes(two, monkeypatch) as flow:
        reading = request(two, content)
        until(lambda: count_opens() == 1)
        one.revive()
        until(lambda: is_done(two, reading))
        file = two.path(content).stat().st_ino
        inject_fault(monkeypatch, then)
        until(lambda: not flow._steps_at_pfs)
    assert two.data(content) == DATA and two.path(content).stat().st_ino == file
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD} and is_done(two, reading)


@pytest.mark.parametrize("then", ["", "fetch:read=EIO@*"])
@pytest.mark.parametrize(("data", "hanging_at"), [(DATA, 1), (LARGE, 2)])
def test_a_node_takes_over_what_hangs_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, hanging_at: int, then: str
) -> None:
    """The blocks that came are kept. The read that comes back late changes nothing, and readers have left its map."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = written(cluster, b"file", two, data)
    two.db.run("UPDATE content SET blocks = ? WHERE id = ?", one.row(content).block_digests, content)
    one.kill()
    inject_fault(monkeypatch, f"fetch:read=hang@{hanging_at}")
    sent: list[str] = []
    two.peers.fault = lambda act, what: sent.append(what) if act == "fetch block" else None
    with lanes(two, monkeypatch) as flow:
        reading = request(two, content)
        until(lambda: disk._calls["fetch:read"] == hanging_at)
        arriving = FetchMap.find(two.tiers[Tier.RAM].root, content)
        one.revive()
        until(lambda: is_done(two, reading))
        file = two.path(content).stat().st_ino
        assert flow._steps_at_pfs and (arriving is None if data is DATA else arriving is not None and arriving.is_closed)
        inject_fault(monkeypatch, then)
        until(lambda: not flow._steps_at_pfs)
    assert two.data(content) == data and two.path(content).stat().st_ino == file and len(sent) == 1
    assert two.copies(content) == {Tier.RAM: CopyState.GOOD} and is_done(two, reading)


def test_a_slow_read_of_the_pfs_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, one, two = make_cluster(tmp_path, 2)
    content = written(cluster, b"file", two)
    one.kill()
    looks: list[bool] = []
    monkeypatch.setattr(FetchProgress, "has_stalled", lambda _: bool(looks.append(True)))
    inject_fault(monkeypatch, "fetch:read=hang@1")
    sent: list[str] = []
    two.peers.fault = lambda act, what: sent.append(what) if act == "fetch block" else None
    with lanes(two, monkeypatch):
        reading = request(two, content)
        until(lambda: disk._calls["fetch:read"] == 1)
        one.revive()
        looks.clear()
        until(lambda: len(looks) > 2)
        inject_fault(monkeypatch, "")
        until(lambda: is_done(two, reading))
    assert two.data(content) == DATA and not sent


@pytest.mark.parametrize("then", ["", FAILS])
def test_the_pfs_answers_while_a_node_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    cluster, one, two = make_cluster(tmp_path, 2)
    content = written(cluster, b"file", two)
    one.kill()
    begun, ended = threading.Event(), threading.Event()

    def serve(act: str, _: str) -> None:
        if act == "fetch block":
            begun.set()
            assert ended.wait(60)

    two.peers.fault = serve
    with lanes(two, monkeypatch) as flow:
        reading = request(two, content)
        until(lambda: count_opens() == 1)
        one.revive()
        assert begun.wait(60)
        inject_fault(monkeypatch, then)
        until(lambda: not flow._steps_at_pfs)
        assert not is_done(two, reading)
        ended.set()
        until(lambda: is_done(two, reading))
    assert two.data(content) == DATA and two.copies(content) == {Tier.RAM: CopyState.GOOD}


def test_the_catalog_changes_while_the_pfs_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P10: what comes from a node has room on the PFS alone. An older file of an unfinished fetch is in its place there."""
    cluster, _, _, three = make_cluster(tmp_path, 3)
    content = replicated(cluster, b"file", DATA)
    three.configure(pfs=three.root / "pfs")
    assert three.tiers[Tier.PFS].uuid
    os.close(three.tiers[Tier.PFS].create(content))
    three.squeeze(Tier.RAM, 100)
    monkeypatch.setattr(limits, "CATALOG_BUSY_S", 0.5)
    inject_fault(monkeypatch, "tier:remove=hang@*")
    with lanes(three, monkeypatch):
        reading = mover_requests.insert_request(three.db, mover_requests.FETCH, three.inode(content), mover_requests.NEEDS_COPY)
        until(lambda: disk._calls["tier:remove"])
        with ThreadPoolExecutor(1) as application:
            application.submit(three.make, b"new", b"data", tier=Tier.RAM).result(60)
        inject_fault(monkeypatch, "")
        until(lambda: is_done(three, reading))
    assert three.copies(content) == {Tier.PFS: CopyState.GOOD} and three.data(content, Tier.PFS) == DATA
