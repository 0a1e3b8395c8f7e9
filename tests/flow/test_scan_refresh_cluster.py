"""F4 in a cluster: each node refreshes the directories that it knows, and one node at a time refreshes each."""

from dataclasses import replace
from pathlib import Path

import pytest
import trio
from shared_catalogs import settled
from writers_together import Writer, WriterCluster, in_cluster

from ckptfs.catalog import scans
from ckptfs.flow import scan
from ckptfs.flow.scan import Scan


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
        node.db.run("UPDATE inode SET birth_ns = 0, imported = 1")
    await settled(cluster.nodes)
    assert [node.db.value("SELECT imported FROM inode WHERE id = 1") for node in (one, two)] == [1, 1]
    first = await refresh(one, 1000.0)
    await refresh(two, 1000.0)
    assert seen == [(first, 1)]
    one.die()
    two.db.run("UPDATE inode SET scanned_ns = 0")
    next_one = await refresh(two, 1000.0)
    assert seen == [(first, 1), (next_one, 1)], "another node takes over when the one that did it is dead"
