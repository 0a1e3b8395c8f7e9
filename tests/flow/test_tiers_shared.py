"""P5: two mounts, or two nodes, that are given the same directory on NVMe or on the PFS do not touch each other's contents."""

import os
from pathlib import Path

import pytest
from local_node import Node

from ckptfs.catalog import journal
from ckptfs.errors import TierUnavailable
from ckptfs.flow.reclaim import Reclaim
from ckptfs.model import Tier
from ckptfs.tiers.storage import Tiers


def test_two_listings_at_the_same_time_are_both_whole(tmp_path: Path) -> None:
    """The reclaim step takes the files of one for leftovers that the other one has not seen."""
    storage = Node(tmp_path).tiers[Tier.NVME]
    for content in range(1, 3001):
        os.close(storage.create(content))
    first = storage.contents()
    found = {next(first)}
    assert set(storage.contents()) == {*range(1, 3001)}
    assert found | set(first) == {*range(1, 3001)}


@pytest.mark.parametrize("tier", [Tier.NVME, Tier.PFS])
def test_equal_ids_of_two_catalogs_are_two_files(tmp_path: Path, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node(tmp_path / name) for name in ("one", "two")]
    for node in nodes:
        node.configure(nvme=tmp_path / "one" / "nvme", pfs=tmp_path / "one" / "pfs")
        node.tiers = Tiers.from_config(node.config, journal.get_instance_id(node.db))
        assert node.tiers[Tier.PFS].uuid
    first, second = (node.make(b"file", os.urandom(8), tier=tier) for node in nodes)
    assert first == second, "the ids must be equal for this test to mean anything"
    assert nodes[0].data(first, tier) != nodes[1].data(second, tier)
    monkeypatch.setattr("ckptfs.flow.reclaim.LEFTOVER_AGE_S", -1.0)
    nodes[1].make(b"later", b"x", tier=tier)
    sweep = Reclaim(nodes[0].db, nodes[0].tiers, nodes[0].config, nodes[0].told)
    sweep._sweep_s = 0.0
    sweep.step()
    assert len(nodes[1].files(tier)) == 2, "the other one's contents are no leftovers of ours"


def test_a_shared_directory_has_one_identity(tmp_path: Path) -> None:
    nodes = [Node(tmp_path / name) for name in ("one", "two")]
    for node in nodes:
        node.configure(pfs=tmp_path / "one" / "pfs")
        node.tiers = Tiers.from_config(node.config, journal.get_instance_id(node.db))
    assert nodes[0].tiers[Tier.PFS].uuid == nodes[1].tiers[Tier.PFS].uuid


def test_a_pfs_that_is_not_mounted_is_not_filled(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "pfs").rename(tmp_path / "away")
    (tmp_path / "pfs").mkdir()
    node.tiers = Tiers.from_config(node.config)
    with pytest.raises(TierUnavailable, match="mount"):
        node.make(b"file", b"data", tier=Tier.PFS)
    assert list((tmp_path / "pfs").iterdir()) == []
