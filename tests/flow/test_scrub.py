"""P4, P5, X5: bit rot is found by reading, and the content comes back from the nearest good copy: tier, node or PFS."""

import os
from pathlib import Path

import pytest
from ckptfs_daemon.control.admin import FileVerifier
from clique_world import bring, fetch_of, level, make_cluster, replicated
from local_node import run_until_idle
from pfs_world import World, bytes_here

from ckptfs import limits
from ckptfs.catalog import peer_copies
from ckptfs.clique import locations
from ckptfs.flow.verify import verify
from ckptfs.model import ContentState, CopyState, Level, Tier


@pytest.mark.parametrize("tiers", [1, 2])
def test_verify_takes_the_content_from_a_node_if_all_copies_here_are_bad(tmp_path: Path, tiers: int) -> None:
    cluster, one, _ = make_cluster(tmp_path, 2, nvme=True)
    content = replicated(cluster, b"a", data := os.urandom(2 * limits.BLOCK_BYTES))
    if tiers == 2:
        one.copy_to_tier(content, Tier.NVME)
    for tier in one.copies(content):
        one.spoil(content, tier)
    verifier = FileVerifier(one.config, one.db, one.tiers, lambda: run_until_idle(fetch_of(one)))
    findings, _ = verifier.verify_file(one.inode(content))
    assert [finding.what.partition("; ")[2] for finding in findings] == ["repaired from n2", "repaired from ram"][:tiers]
    assert set(one.copies(content).values()) == {CopyState.GOOD} and one.state(content) is ContentState.SEALED
    assert {one.data(content, tier) for tier in one.copies(content)} == {data}
    assert level(one, content) is Level.CLIQUE


def test_verify_takes_the_content_from_the_pfs_if_nothing_else_is_good(tmp_path: Path) -> None:
    world = World(tmp_path)
    (world.pfs / "file").write_bytes(data := os.urandom(5_000_000))
    world.visit("")
    world.bring("file")
    content = int(str(world.column("file", "content")))
    (path,) = world.tiers[Tier.RAM].root.glob(f"contents*/{content:016x}")
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    verifier = FileVerifier(world.config, world.db, world.tiers, lambda: run_until_idle(world.fetch))
    findings, _ = verifier.verify_file(world.inode("file"))
    assert findings[0].what.endswith("in block 1; repaired from the PFS") and findings[1].verdict == "good"
    assert bytes_here(world, "file") == (Tier.RAM, data)


def test_a_content_is_lost_only_until_the_store_names_a_node_that_has_it(tmp_path: Path) -> None:
    """P5: the node has restarted, so its copies are forgotten until it is asked; just then the copy here is found bad."""
    cluster, one, two = make_cluster(tmp_path, 2)
    content = replicated(cluster, b"a", data := os.urandom(100))
    peer_copies.delete_copies_of_node(one.db, two.number)
    one.spoil(content, Tier.RAM)
    verify(one.db, one.tiers, content)
    assert one.state(content) is ContentState.LOST
    locations.refresh(one.db, one.store, [content], one.number)  # As the reconcile step does.
    assert one.state(content) is ContentState.SEALED
    bring(one, one.inode(content))
    assert one.data(content) == data and level(one, content) is Level.CLIQUE
