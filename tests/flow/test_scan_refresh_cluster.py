"""F4 in a cluster: each node refreshes the directories that it knows, and one node at a time refreshes each."""

import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from shared_catalogs import settled, stored
from writers_together import Writer, WriterCluster, in_cluster

from ckptfs.catalog import copies, mover_requests, scans
from ckptfs.coherence.keys import PFS_NAME
from ckptfs.errors import StoreUnreachable
from ckptfs.flow import scan
from ckptfs.flow.scan import Scan
from ckptfs.model import ROOT


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriterCluster:
    monkeypatch.setattr(scan, "CLUSTER_PAUSE_S", 0.0)
    return WriterCluster(tmp_path, 3, 0)


async def refresh(node: Writer, interval_s: float) -> Scan:
    """Let a node look for directories that are due, a few times."""
    flow = Scan(node.db, node.tiers, replace(node.config, refresh_interval_s=interval_s), node.told, node.cluster)
    for _ in range(3):
        flow._next_refresh_s = 0.0
        await trio.to_thread.run_sync(flow.step)
    return flow


@in_cluster
async def test_a_node_finds_what_appears_in_a_directory_that_only_it_knows(cluster: WriterCluster) -> None:
    two = cluster.nodes[1]
    await two.mkdir("d")
    await cluster.settle()
    (cluster.pfs / "d" / "new").write_bytes(b"external")
    await refresh(two, 0.0)
    await settled(cluster.nodes)
    assert await two.names("d") == await cluster.nodes[2].names("d") == [b"new"]


@in_cluster
async def test_of_several_nodes_one_refreshes_a_directory_in_each_interval(cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Scan, int]] = []

    def note(flow: Scan, directory: int) -> None:
        seen.append((flow, directory))
        scans.record_postponed(flow._db, directory)

    monkeypatch.setattr(Scan, "_scan", note)
    one, two, _ = cluster.nodes
    await settled(cluster.nodes)
    for node in (one, two):
        node.db.run("UPDATE inode SET imported = 1")
    await settled(cluster.nodes)
    assert [node.db.value("SELECT imported FROM inode WHERE id = 1") for node in (one, two)] == [1, 1]
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + 10_000 * 10**9)  # It was made long ago.
    first = await refresh(one, 1000.0)
    await refresh(two, 1000.0)
    assert seen == [(first, 1)]
    one.die()
    two.db.run("UPDATE inode SET scanned_ns = 0")
    next_one = await refresh(two, 1000.0)
    assert seen == [(first, 1), (next_one, 1)], "another node takes over when the one that did it is dead"


@pytest.mark.parametrize("number", range(6))
@in_cluster
async def test_a_directory_that_another_node_renames_on_the_pfs_during_a_scan_keeps_its_files(cluster: WriterCluster, number: int) -> None:
    """P5: the PFS shows the new name before the store says so, and the store says so before the scan's read `number`."""
    one, two, _ = cluster.nodes
    await one.mkdir("d.tmp")
    await one.put("d.tmp/f", b"1")
    await cluster.settle()
    directory = (await one.stat("d.tmp")).id
    await one.rename("d.tmp", "d")
    await two.stat("d/f")
    reads, is_renamed, may_go_on, is_done = itertools.count(), trio.Event(), trio.Event(), trio.Event()

    async def stand_still() -> None:
        is_renamed.set()
        await may_go_on.wait()

    async def write_back() -> None:
        await cluster.step(one)
        is_done.set()

    async def go_on() -> None:
        may_go_on.set()
        await is_done.wait()

    def before_read() -> None:
        if getattr(cluster.stepping, "node", None) is two and next(reads) == number:
            trio.from_thread.run(go_on)

    two.store.before_read = before_read
    cluster.meanwhile["write_back:directory"] = stand_still
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write_back)
        await is_renamed.wait()
        assert (cluster.pfs / "d").is_dir()
        await cluster.compare(two, directory)
        await go_on()
    await cluster.settle()
    assert set(cluster.shared()) == {b"d", b"d/f"}
    cluster.exact()


@in_cluster
async def test_a_scan_without_a_mount_takes_no_write_back_of_others_for_an_external_change(cluster: WriterCluster) -> None:
    """P5: nobody publishes what this mover has recorded, so it does not learn what other nodes have written back since."""
    one, two, _ = cluster.nodes
    await one.put("f", b"1")
    await cluster.settle()
    inode = (await two.stat("f")).id
    two.touching.on_dirty = lambda: None
    with two.db.transaction():
        two.db.run("UPDATE pfs_file SET checked_ns = 1 WHERE inode = ?", inode)
    await one.put("f", b"22")
    await cluster.write_back_all(one)
    await cluster.compare(two, ROOT)
    assert copies.get_content_id(two.db, inode) is not None


@in_cluster
async def test_a_request_fails_alone_while_the_store_cannot_serve_it(cluster: WriterCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane has no trouble of its own: the service that watches the store reports it, once."""

    def refuse(*_: object) -> None:
        raise StoreUnreachable("nodes have not adopted the store yet")

    monkeypatch.setattr(scan.pfs_coordination, "load_inodes", refuse)
    db = cluster.nodes[0].db
    request = mover_requests.insert_request(db, mover_requests.SCAN, ROOT, mover_requests.COMPARE_AGAIN)
    await refresh(cluster.nodes[0], 1e6)
    found = mover_requests.get(db, request)
    assert found is not None and found.state == mover_requests.FAILED


@pytest.mark.parametrize("known", ["d", "d/f"])
@in_cluster
async def test_a_directory_that_is_moved_on_the_pfs_goes_with_what_only_other_nodes_know(cluster: WriterCluster, known: str) -> None:
    """P3: one scan by any node, and the names and levels are right on all of them."""
    one, two, three = cluster.nodes
    await one.mkdir("d")
    await one.put("d/f", b"1")
    await two.stat(known)
    await one.mkdir("d/e")
    await one.put("d/e/g", b"2")
    await cluster.settle()
    (cluster.pfs / "d").rename(cluster.pfs / "moved")
    await cluster.compare(two, ROOT)
    await settled(cluster.nodes)
    assert await one.names() == await two.names() == await three.names() == [b"moved"]
    assert [key.name for key in stored(cluster.etcd) if key.kind == PFS_NAME] == [b"moved"]


@in_cluster
async def test_a_directory_that_vanished_is_looked_for_again_if_another_node_found_a_file_in_it_meanwhile(cluster: WriterCluster) -> None:
    """P3: the removal is refused as a whole; the directory would else stay for ever, and be on no PFS."""
    one, two, _ = cluster.nodes
    await one.mkdir("d")
    await one.put("g", b"2")
    await cluster.settle()
    directory, place, away = (await two.stat("d")).id, cluster.pfs / "d", cluster.pfs.parent / "moved"
    (place / "external").write_bytes(b"3")
    place.rename(away)

    async def find() -> None:
        away.rename(place)
        await cluster.compare(one, directory)
        await settled([one])
        place.rename(away)

    cluster.meanwhile["scan:vanish"] = find
    await cluster.compare(two, ROOT)
    await settled(cluster.nodes)
    assert await one.names("d") == [b"external"]
    await cluster.compare(two, ROOT)
    await settled(cluster.nodes)
    cluster.exact()


@pytest.mark.parametrize("change", ["removed", "written"])
@in_cluster
async def test_an_external_change_takes_nothing_that_another_node_wrote_since(cluster: WriterCluster, change: str) -> None:
    """P5: the PFS does not have it yet, and the node that scans does not hold it."""
    one, two, _ = cluster.nodes
    await one.put("f", b"1")
    await cluster.settle()
    await two.stat("f")
    await one.put("f", b"22")
    if change == "removed":
        (cluster.pfs / "f").unlink()
    else:
        (cluster.pfs / "f").write_bytes(b"external")
    await cluster.compare(two, ROOT)
    await cluster.settle()
    assert cluster.shared()[b"f"][1] == (cluster.pfs / "f").read_bytes() == b"22"
