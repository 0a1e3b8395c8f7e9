"""P5: a tier that refuses while room is given back costs nothing but time."""

import os
import time
from pathlib import Path

import pytest
from local_node import Node, inject_fault

from ckptfs.flow.reclaim import Reclaim
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
    inject_fault(monkeypatch, "drop:leftover=EIO@*")
    with pytest.raises(OSError, match="injected"):
        sweep(node)
    assert node.files(Tier.RAM) == {4711}
    inject_fault(monkeypatch, "")
    sweep(node)
    assert node.files(Tier.RAM) == set()


def test_a_quarantined_copy_that_cannot_be_removed_is_forgotten_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path)
    content = node.make_sealed(b"file", b"data")
    row = node.row(content)
    local_copies.copy_to_tier(node.db, node.tiers, row, Tier.RAM, Tier.NVME)
    node.db.run("UPDATE copy SET state = ? WHERE tier = ?", int(CopyState.QUARANTINED), str(Tier.RAM))
    inject_fault(monkeypatch, "drop:quarantined=EIO@*")
    with pytest.raises(OSError, match="injected"):
        sweep(node)
    inject_fault(monkeypatch, "")
    assert node.copies(content) == {Tier.NVME: CopyState.GOOD}


def test_a_ram_tier_that_cannot_be_enlarged_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject_fault(monkeypatch, "ram:remount=EPERM")
    with pytest.raises(PermissionError, match="injected"):
        space.resize_ram(tmp_path, 1 << 20)
