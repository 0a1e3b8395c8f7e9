"""P3, P5: an open content that leaves a full tier is durable and verified in the next one before the former file goes."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
from local_node import MIB, Node, in_process

from ckptfs import disk
from ckptfs.catalog import copies
from ckptfs.errors import DigestMismatch
from ckptfs.flow.reclaim import Reclaim
from ckptfs.flow.recover import Recover
from ckptfs.model import CopyState, Tier
from ckptfs.tiers import local_copies, transfer

DATA = os.urandom(3 * MIB) + bytes(MIB) + b"end"
MOVES = [(Tier.RAM, Tier.NVME), (Tier.NVME, Tier.PFS), (Tier.RAM, Tier.PFS)]
LABELS = [
    "move:create", "move:copy:read", "move:copy:write", "move:fsync", "move:directory", "move:check:read", "move:recorded",
    "move:persist", "move:remove",
]  # fmt: skip
MOVE = """
from ckptfs.tiers import local_copies
content, = [row[0] for row in node.db.rows("SELECT id FROM content")]
source, target = node.tiers[Tier.{source}], node.tiers[Tier.{target}]
try:
    fd = local_copies.copy_open(source.open(content), target, content)
    local_copies.record_open_move(node.db, content, source, target.tier)
    local_copies.remove_moved(node.db, source, content)
except OSError:
    pass
"""


def make_open(root: Path, tier: Tier) -> tuple[Node, int]:
    node = Node(root)
    content = node.make(b"open", DATA, tier=tier, closed=False)
    os.truncate(node.path(content, tier), len(DATA) + MIB)
    return node, content


@pytest.mark.crash
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("action", ["kill", "kill-after", "EIO"])
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_dying_or_failing_anywhere_loses_nothing(tmp_path: Path, source: Tier, target: Tier, label: str, action: str) -> None:
    """The tier that the catalog names has all the bytes, at every moment."""
    node, content = make_open(tmp_path, source)
    in_process(tmp_path, MOVE.format(source=source.name, target=target.name), fault=f"{label}={action}")
    ((tier, state),) = node.copies(content).items()
    assert state is CopyState.GOOD and node.data(content, tier) == DATA + bytes(MIB)
    if action == "EIO" and label not in {"move:recorded", "move:persist", "move:remove"}:
        assert tier is source and node.files(target) == set(), "the copy is given up without a trace"


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_the_order_is_copy_persist_verify_publish_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Tier, target: Tier
) -> None:
    node, content = make_open(tmp_path, source)
    order: list[str] = []
    before = disk.act

    def record(label: str, *arguments: Any, **named: Any) -> Any:
        if label.startswith("move:") and (not order or order[-1] != label):
            order.append(label)
        return before(label, *arguments, **named)

    monkeypatch.setattr(disk, "act", record)
    fd = os.open(node.path(content, source), os.O_RDONLY)
    copy = local_copies.copy_open(fd, node.tiers[target], content)
    local_copies.record_open_move(node.db, content, node.tiers[source], target)
    local_copies.remove_moved(node.db, node.tiers[source], content)
    os.close(fd)
    os.close(copy)
    persisted = ["move:persist"] if source is Tier.NVME else []
    last = ["move:fsync", "move:directory", "move:check:read", "move:recorded", *persisted, "move:remove"]
    assert order[-len(last) :] == last, "what was fsynced stays durable on the way"
    assert node.files(source) == set() and node.copies(content) == {target: CopyState.GOOD}


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_a_mover_leaves_the_file_of_a_move_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Tier, target: Tier
) -> None:  # fmt: skip
    """P5: fsync and check of a large file take minutes, in which a mover may start, and sweep."""
    node, content = make_open(tmp_path, source)
    now = time.time()
    read = transfer.read

    def start_mover_and_read(fd: int, *, label: str) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr("ckptfs.flow.reclaim.time.time", lambda: now + 3600)
            Recover(node.db, node.tiers, node.told).run()
            copies.delete_filling_pfs_copies(node.db)
            sweep = Reclaim(node.db, node.tiers, node.config, node.told)
            sweep._sweep_s = 0.0
            sweep.step()
        return read(fd, label=label)

    monkeypatch.setattr(transfer, "read", start_mover_and_read)
    os.close(local_copies.copy_open(os.open(node.path(content, source), os.O_RDONLY), node.tiers[target], content))
    local_copies.record_open_move(node.db, content, node.tiers[source], target)
    local_copies.remove_moved(node.db, node.tiers[source], content)
    assert node.copies(content) == {target: CopyState.GOOD} and node.data(content, target) == DATA + bytes(MIB)


def test_a_copy_that_reads_back_otherwise_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4: the disk answered every write with success, and holds something else."""
    node, content = make_open(tmp_path, Tier.RAM)
    monkeypatch.setattr(transfer, "read", lambda *_, **__: (1, b"other", b""))
    with pytest.raises(DigestMismatch, match="does not read back from nvme"):
        local_copies.copy_open(node.tiers[Tier.RAM].open(content), node.tiers[Tier.NVME], content)
    assert node.files(Tier.NVME) == set() and node.copies(content) == {Tier.RAM: CopyState.GOOD}
    assert node.data(content) == DATA + bytes(MIB)
