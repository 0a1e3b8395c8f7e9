"""D7, P5: what the history of sets keeps comes to the PFS, whichever node writes, moves or replaces its files meanwhile."""

import pytest
import trio
from simulated_cluster import SETTLE_S, SimulatedCluster
from simulated_mount import list_history, simulated

from ckptfs.config.schema import RetentionRule
from ckptfs.flow.write_back.coordination import ClusterWriteBack


@pytest.mark.parametrize("number", [1, 2])
@simulated(RetentionRule("step_*", keep=10))
async def test_an_island_writes_a_file_of_a_set_that_its_writer_has_not_written_back(
    cluster: SimulatedCluster, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The set keeps the content in the store. The island writes it back: the writer, or another node which only had a copy."""
    step, is_slow = ClusterWriteBack.step, True

    def step_unless_slow(write_back: ClusterWriteBack) -> bool:
        return not (is_slow and write_back._cluster.node_number == 1) and step(write_back)

    monkeypatch.setattr(ClusterWriteBack, "step", step_unless_slow)
    writer, island, other = cluster.nodes[1], cluster.nodes[number], cluster.nodes[3]
    assert cluster.pfs is not None
    await writer.write("step_1.bin", b"former")
    for node in (island, other):
        assert await node.mount.read("step_1.bin") == b"former"
    island.cut(True)
    await trio.sleep(SETTLE_S)
    await island.mount.overwrite("step_1.bin", b"newest", 0.0)
    assert sorted(await list_history(other)) == ["step_*.bin/step_1.bin@1"]
    island.cut(False)
    await trio.sleep(SETTLE_S)
    is_slow = False
    writer.mover.wake_lanes()
    await trio.sleep(SETTLE_S)
    kept = cluster.pfs / ".ckptfs.history/step_*.bin/step_1.bin@1/step_1.bin"
    assert ((cluster.pfs / "step_1.bin").read_bytes(), kept.read_bytes()) == (b"newest", b"former")
