"""P5: a tier that refuses while room is given back costs nothing but time."""

import os
import time
from pathlib import Path

import pytest
from local_node import Node

from ckptfs import disk
from ckptfs.catalog import contents
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.seal import Seal
from ckptfs.model import CopyState, Tier
from ckptfs.tiers import local_copies, space


def sweep(node: Node) -> None:
    """One step, the sweep for leftovers included."""
    step = Reclaim(node.db, node.tiers, node.config, node.told)
    step._sweep_s = 0.0
    step.step()


def test_a_leftover_that_cannot_be_removed_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)
    os.close(node.tiers[Tier.RAM].create(4711))
    now = time.time()
    monkeypatch.setattr("ckptfs.flow.reclaim.time.time", lambda: now + 3600)
    monkeypatch.setattr(disk, "_fault", "drop:leftover=EIO@*")
    with pytest.raises(OSError, match="injected"):
        sweep(node)
    assert node.files(Tier.RAM) == {4711}
    monkeypatch.setattr(disk, "_fault", "")
    sweep(node)
    assert node.files(Tier.RAM) == set()


def test_a_quarantined_copy_that_cannot_be_removed_is_forgotten_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)
    content = node.make(b"file", b"data")
    Seal(node.db, node.tiers, node.config, node.told).step()
    row = contents.get_content(node.db, content)
    assert row is not None
    local_copies.copy_to_tier(node.db, node.tiers, row, Tier.RAM, Tier.NVME)
    with node.db.transaction():
        node.db.run("UPDATE copy SET state = ? WHERE tier = ?", int(CopyState.QUARANTINED), str(Tier.RAM))
    monkeypatch.setattr(disk, "_fault", "drop:quarantined=EIO@*")
    with pytest.raises(OSError, match="injected"):
        sweep(node)
    monkeypatch.setattr(disk, "_fault", "")
    assert node.copies(content) == {Tier.NVME: CopyState.GOOD}


def test_a_ram_tier_that_cannot_be_enlarged_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_fault", "ram:remount=EPERM")
    monkeypatch.setattr(disk, "_calls", type(disk._calls)())
    with pytest.raises(PermissionError, match="injected"):
        space.resize_ram(tmp_path, 1 << 20)
