"""P3, P5, P6: what an island wrote is on the PFS, beside the names, and goes when it has its name there."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from local_node import inject_fault
from writers_together import Writer, WriterCluster, in_cluster

from ckptfs import disk, limits
from ckptfs.catalog import peer_copies, summary
from ckptfs.catalog.peer_copies import KnownNode
from ckptfs.coherence import key_state
from ckptfs.flow import keep_island
from ckptfs.flow.keep_island import KeepIsland
from ckptfs.model import Tier


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriterCluster:
    monkeypatch.setattr(limits, "ISLAND_KEEP_AFTER_S", 0.0)
    monkeypatch.setattr(limits, "ISLAND_LOOK_S", 0.0)
    return WriterCluster(tmp_path, 2, 0)


def keeper(node: Writer) -> KeepIsland:
    return KeepIsland(node.db, node.tiers, replace(node.config, node=f"n{node.number}"))


async def keep(flow: KeepIsland) -> None:
    """A whole pass."""
    while await trio.to_thread.run_sync(flow.step):
        pass


def kept(cluster: WriterCluster, node: Writer) -> dict[str, bytes]:
    area = cluster.pfs / ".ckptfs" / f"island-n{node.number}"
    return {str(path.relative_to(area)): path.read_bytes() for path in area.rglob("*") if path.is_file()}


def trouble(node: Writer) -> list[str]:
    return [str(value) for _, value, _ in summary.list_troubles(node.db, keep_island.TROUBLE)]


async def make_island(cluster: WriterCluster, *nodes: Writer) -> None:
    await nodes[0].mkdir("d")
    await cluster.settle()
    for node in nodes:
        await node.stat("d")
        node.cut(True)
        await node.put("d/f", b"of %d" % node.number)
        assert key_state.get_disconnected_ns(node.db)


@in_cluster
async def test_an_island_keeps_its_files_until_they_have_their_names(cluster: WriterCluster) -> None:
    one, two = cluster.nodes
    await make_island(cluster, one)
    flow = keeper(one)
    await keep(flow)
    assert kept(cluster, one) == {"d/f": b"of 1"} and not (cluster.pfs / "d" / "f").exists()
    assert "1 files of this node are kept" in trouble(one)[0]
    await one.put("d/f", b"newer")
    await one.put("d/g", b"g")
    await one.rename("d/g", "d/h")
    await keep(flow)
    assert kept(cluster, one) == {"d/f": b"newer", "d/h": b"g"}
    one.cut(False)
    await cluster.settle()
    await keep(flow)
    assert kept(cluster, one) == {} and trouble(one) == [] and not (cluster.pfs / ".ckptfs" / "island-n1").exists()
    assert (cluster.pfs / "d" / "f").read_bytes() == b"newer"
    await keep(keeper(two))
    cluster.exact()


@in_cluster
async def test_two_islands_keep_files_of_one_name(cluster: WriterCluster) -> None:
    one, two = cluster.nodes
    await make_island(cluster, one, two)
    for node in cluster.nodes:
        await keep(keeper(node))
    assert (kept(cluster, one), kept(cluster, two)) == ({"d/f": b"of 1"}, {"d/f": b"of 2"})


@in_cluster
async def test_what_a_power_cut_took_from_the_island_stays_there(cluster: WriterCluster) -> None:
    """P5: the only copy that is left."""
    one, _ = cluster.nodes
    await make_island(cluster, one)
    await keep(keeper(one))
    for content in one.bytes:
        one.tiers[Tier.RAM].remove(content)
        one.db.run("DELETE FROM copy WHERE content = ?", content)
        one.db.run("UPDATE content SET state = 4 WHERE id = ?", content)
    one.cut(False)
    await cluster.settle()
    await keep(keeper(one))
    assert kept(cluster, one) == {"d/f": b"of 1"} and "are left" in trouble(one)[0]


@in_cluster
async def test_others_say_what_a_dead_island_has_kept(cluster: WriterCluster) -> None:
    """P5: nobody may ask that node for its status again."""
    one, two = cluster.nodes
    await make_island(cluster, one)
    await keep(keeper(one))
    flow, known = keeper(two), [KnownNode(node.number, f"n{node.number}", "") for node in cluster.nodes]
    peer_copies.set_live_nodes(two.db, two.number, 2, known)
    await keep(flow)
    assert trouble(two) == []
    peer_copies.set_live_nodes(two.db, two.number, 2, known[1:])
    await keep(flow)
    assert "island-n1" in trouble(two)[0] and kept(cluster, one) == {"d/f": b"of 1"}
    peer_copies.set_live_nodes(two.db, two.number, 2, known)
    await keep(flow)
    assert trouble(two) == []


@pytest.mark.parametrize("label", sorted(label for label in disk.LABELS if label.startswith("island:")))
@in_cluster
async def test_an_error_at_any_operation_leaves_whole_files(cluster: WriterCluster, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = cluster.nodes
    await make_island(cluster, one)
    flow = keeper(one)

    async def passes() -> None:
        for _ in range(3):
            with contextlib.suppress(OSError):
                await keep(flow)
            assert kept(cluster, one).get("d/f", b"of 1") == b"of 1", "whole or absent"

    inject_fault(monkeypatch, f"{label}=EIO")
    await passes()
    assert kept(cluster, one) == {"d/f": b"of 1"}
    await one.unlink("d/f")
    await passes()
    assert kept(cluster, one) == {}
    assert disk._calls[label] or label == "island:truncate"


@in_cluster
@pytest.mark.parametrize("is_first_on_pfs", [True, False])
async def test_both_versions_of_a_file_come_to_the_pfs(cluster: WriterCluster, is_first_on_pfs: bool) -> None:
    """P5, P6: the version that loses its name gets a conflict name, also if the PFS shows it under the lost one."""
    one, two = cluster.nodes
    await two.mkdir("d")
    await two.put("d/f", b"base")
    await cluster.settle()
    await one.stat("d/f")
    two.cut(True)
    with two.db.transaction() as db:
        db.run("UPDATE pfs_file SET checked_ns = 1")  # The island has read it back, which changes what it says of the PFS.
    for number in range(3):
        await two.put("d/f", b"island%d" % number)
    await one.put("d/f", b"other")
    if is_first_on_pfs:
        await cluster.write_back_all(one)
        assert (cluster.pfs / "d" / "f").read_bytes() == b"other"
    two.cut(False)
    await cluster.settle()
    cluster.exact()
    assert sorted(path.read_bytes() for path in (cluster.pfs / "d").iterdir()) == [b"island2", b"other"]
