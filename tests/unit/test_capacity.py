"""N5: the capacity that a run needs, and the capacity that exists."""

import json

import pytest
from ckptfs_client.analysis import capacity
from ckptfs_client.analysis.capacity import CapacityNeed
from ckptfs_client.json_answers import FitJson
from control_served import Served
from hypothesis import given
from hypothesis import strategies as st

from ckptfs.catalog import summary
from ckptfs.model import Tier as Which
from ckptfs.protocol import control_pb2 as pb

GIB = 1 << 30
TWO = CapacityNeed(40 * GIB, 1, 0)


def judged(
    need: CapacityNeed, ram: tuple[int, int], nvme: tuple[int, int] = (0, 0), peers: list[pb.Member] | None = None, pfs: bool = False
) -> FitJson:
    tiers = [
        pb.TierCapacity(name=name, usable_bytes=usable * GIB, usable_for_peers_bytes=for_peers * GIB)
        for name, (usable, for_peers) in (("ram", ram), ("nvme", nvme))
    ]
    return capacity.check_fit(need, tiers, peers or [], has_pfs=pfs)


@pytest.mark.parametrize(
    ("need", "ram", "nvme", "where", "words"),
    [
        (TWO, (80, 0), (0, 0), ["ram"], "fits in RAM: 80.0 GiB (40.0 GiB x 2 generations) of 80.0 GiB usable"),
        (TWO, (79, 0), (1, 0), ["ram", "nvme"], "fits in RAM and NVMe"),
        (CapacityNeed(40 * GIB, 0, 0), (40, 0), (0, 0), ["ram"], "40.0 GiB x 1 generation)"),
        (CapacityNeed(40 * GIB, 1, 1), (160, 80), (0, 0), ["ram"], "160 GiB (40.0 GiB x 2 generations x 2 copies)"),
        (CapacityNeed(40 * GIB, 1, 1), (160, 79), (0, 0), [], "80.0 GiB of them for peers, which may use 79.0 GiB; raise peer_share="),
        (CapacityNeed(40 * GIB, 1, 1), (160, 79), (9, 1), ["ram", "nvme"], "fits in RAM and NVMe"),
        (TWO, (79, 0), (0, 0), [], "which has 79.0 GiB usable; raise ram= or nvme="),
    ],
)
def test_a_checkpoint_fits_or_not(need: CapacityNeed, ram: tuple[int, int], nvme: tuple[int, int], where: list[str], words: str) -> None:
    found = judged(need, ram, nvme)
    assert found["where"] == where and words in found["sentence"]


def test_what_the_other_nodes_have_left() -> None:
    need = CapacityNeed(GIB, 1, 1)
    assert judged(need, (4, 2), peers=[pb.Member(name="b", capacity_bytes=2 * GIB)])["where"] == ["ram"]
    assert "b has 1.0 GiB left for others, and 2.0 GiB" in judged(need, (4, 2), peers=[pb.Member(name="b", capacity_bytes=GIB)])["sentence"]
    assert judged(CapacityNeed(GIB, 1, 0), (4, 2), peers=[pb.Member(name="b", capacity_bytes=0)])["where"] == ["ram"], (
        "who sends no copies needs no peer"
    )


def test_with_a_pfs_the_rest_is_slow_not_lost() -> None:
    """P10."""
    assert "is written to the PFS, at its speed; raise ram=" in judged(CapacityNeed(9 * GIB, 1, 0), (4, 0), pfs=True)["sentence"]


@given(st.integers(0, 50), st.integers(0, 4), st.integers(0, 3), *[st.integers(0, 400)] * 2)
def test_more_room_never_fits_less(size: int, kept: int, copies: int, ram: int, nvme: int) -> None:
    need = CapacityNeed(size * GIB, kept, copies)
    if judged(need, (ram, ram), (nvme, nvme))["fits"]:
        assert judged(need, (ram + 1, ram + 1), (nvme, nvme))["fits"] and judged(need, (ram, ram), (nvme + 1, nvme + 1))["fits"]
        assert need.own_bytes + need.peer_bytes <= (ram + nvme) * GIB


def test_the_clique_of_a_node() -> None:
    """Who holds copies for it, and for whom it does; of the first those that told how much they hold."""
    members = [
        pb.Member(name="me", alive=True, peers=["right"]),
        pb.Member(name="right", alive=True, peers=["far"], has_figures=True, capacity_bytes=10, held_bytes=4),
        pb.Member(name="left", alive=True, peers=["me"], capacity_bytes=3),
        pb.Member(name="far", alive=True, peers=["left"]),
        pb.Member(name="dead", alive=False, peers=["me"]),
    ]
    tier = pb.TierCapacity(name="ram", usable_bytes=100, usable_for_peers_bytes=100)
    mine, cluster = pb.Capacity(node="me", clustered=True, replication_factor=2, tiers=[tier]), pb.Cluster(members=members)
    found = capacity.build_report(mine, cluster, 4, 1)
    assert [member.name for member in found.clique] == ["right", "left"]
    assert found.fit is not None and "right has 6 B left for others, and 8 B of copies may go to it" in found.fit["sentence"]
    members[1].has_figures = False
    unknown = capacity.build_report(mine, pb.Cluster(members=members), 4, 1).fit
    assert unknown is not None and unknown["fits"]
    assert capacity.build_report(mine, None, None, 1) == (mine, [], None)


def test_what_a_node_says(served: Served) -> None:
    """What the PFS shows leaves RAM when room is needed, so it is as good as free; until somebody opens it."""
    node = served.node
    kept, gone = node.make(b"kept", b"x" * 3_000_000), node.make(b"gone", b"y" * 2_000_000)
    served.seal()
    node.publish(gone)
    assert summary.count_leaving_bytes(node.db, Which.RAM) == 2_000_000
    tiers = {tier.name: tier for tier in served.client.get_capacity().tiers}
    assert set(tiers) == {"ram", "nvme", "pfs"} and tiers["ram"].held_bytes == tiers["ram"].share_bytes == 0
    assert tiers["ram"].total_bytes == 64 << 20
    assert tiers["ram"].usable_bytes <= int(node.config.ram_high * (64 << 20)) - tiers["ram"].used_bytes + 2_000_000
    node.hold(gone)
    assert summary.count_leaving_bytes(node.db, Which.RAM) == 0
    node.publish(kept)
    assert summary.count_leaving_bytes(node.db, Which.RAM) == 3_000_000
    assert json.dumps(str(served.client.get_capacity().replication_factor)) == '"1"' and not served.client.get_capacity().clustered


def test_troubles_with_numbers_are_in_their_order(served: Served) -> None:
    """`status` shows them so."""
    wheres = [summary.DEFERRED_TROUBLE, *(f"{summary.DEFERRED_TROUBLE} {number}" for number in range(2, 12)), "seal"]
    for where in reversed(wheres):
        summary.set_trouble(served.node.db, where, {"what": "refused"})
    assert [where for where, *_ in summary.list_troubles(served.node.db)] == wheres
