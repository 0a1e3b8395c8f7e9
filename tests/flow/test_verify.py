"""P4, X5: a copy that differs from the sealed content never counts. It is remade from a good copy."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ckptfs_daemon.control.admin import GOOD, FileVerifier
from ckptfs_daemon.control.control_context import ControlContext
from local_node import MIB, Node, in_process
from write_back_world import Mount

from ckptfs.catalog import copies
from ckptfs.errors import Busy
from ckptfs.flow.verify import verify
from ckptfs.model import ContentState, CopyState, Tier
from ckptfs.tiers import local_copies, transfer

GOOD_BOTH = {Tier.RAM: CopyState.GOOD, Tier.NVME: CopyState.GOOD}


def twice(node: Node, data: bytes = b"data" * 1000) -> int:
    """A sealed content with a copy in RAM and one on NVMe."""
    content = node.make_sealed(b"file", data)
    node.copy_to_tier(content, Tier.NVME)
    return content


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.NVME])
def test_a_bad_copy_is_remade_from_the_good_one(node: Node, tier: Tier) -> None:
    content = twice(node, os.urandom(9 * MIB))
    good = node.data(content)
    node.spoil(content, tier)
    (bad,) = [found for found in verify(node.db, node.tiers, content) if not found.ok]
    assert bad.tier is tier and bad.repaired and "block 1" in bad.problem
    assert node.copies(content) == GOOD_BOTH and node.data(content, tier) == good


@pytest.mark.parametrize("harm", ["shorter", "gone"])
def test_a_file_that_is_short_or_gone_is_remade(node: Node, harm: str) -> None:
    content = twice(node)
    path = node.path(content, Tier.NVME)
    os.truncate(path, 10) if harm == "shorter" else path.unlink()
    assert verify(node.db, node.tiers, content)[1].repaired
    assert node.copies(content) == GOOD_BOTH and node.data(content, Tier.NVME) == b"data" * 1000


def test_a_published_content_is_not_lost(node: Node) -> None:
    content = node.make_sealed(b"file", b"data")
    node.publish(content)
    node.spoil(content, Tier.RAM)
    assert not verify(node.db, node.tiers, content)[0].ok
    assert node.state(content) is ContentState.SEALED, "the next open fetches it"


def test_an_unsealed_content_is_not_verified(node: Node) -> None:
    assert verify(node.db, node.tiers, node.make(b"file", b"data")) == []
    assert verify(node.db, node.tiers, 4711) == []


@pytest.mark.parametrize("meanwhile", ["written", "evicted"])
def test_what_changes_during_the_check_is_not_judged(node: Node, monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    content = twice(node)
    whole = transfer.read

    def read(fd: int, **named: object) -> object:
        if meanwhile == "written":
            node.reopen(content, Tier.RAM)
            node.path(content).write_bytes(b"new")
        else:
            copies.delete_copy(node.db, content, Tier.RAM)
        return whole(fd, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer, "read", read)
    with pytest.raises(Busy):
        verify(node.db, node.tiers, content)
    assert node.copies(content) == {Tier.RAM if meanwhile == "written" else Tier.NVME: CopyState.GOOD}


def test_a_writer_after_the_check_keeps_its_only_copy(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: the file was bad when it was read; by the time of the verdict a program writes it, and the copy is that of the writer."""
    content = node.make_sealed(b"file", b"data")
    node.spoil(content, Tier.RAM)
    check = local_copies.find_problem

    def check_then_write(*arguments: Any, **named: Any) -> str:
        problem = check(*arguments, **named)
        node.reopen(content, Tier.RAM)
        return problem

    seen = node.row(content)
    monkeypatch.setattr(local_copies, "find_problem", check_then_write)
    with pytest.raises(Busy):
        verify(node.db, node.tiers, content)
    assert not local_copies.quarantine(node.db, seen, Tier.RAM, "its digest differs")
    assert node.copies(content) == {Tier.RAM: CopyState.GOOD} and node.state(content) is ContentState.OPEN


def test_a_tier_that_is_not_mounted_is_no_proof(node: Node) -> None:
    """P5: the copies there are taken again when the tier returns."""
    content = twice(node)
    node.configure(nvme=None)
    node.spoil(content, Tier.RAM)
    assert [one.tier for one in verify(node.db, node.tiers, content)] == [Tier.RAM]
    assert node.copies(content) == {Tier.RAM: CopyState.QUARANTINED, Tier.NVME: CopyState.GOOD}
    assert node.state(content) is ContentState.SEALED


@pytest.mark.crash
@pytest.mark.parametrize("label", ["verify:quarantined", "duplicate:announced", "duplicate:write", "duplicate:counted", "verify:repaired"])
@pytest.mark.parametrize("action", ["kill", "kill-after", "EIO"])
def test_dying_during_the_repair_never_counts_the_bad_copy(tmp_path: Path, label: str, action: str) -> None:
    node = Node(tmp_path)
    content = twice(node)
    node.spoil(content, Tier.NVME)
    script = f"""
from ckptfs.flow.verify import verify
try:
    verify(node.db, node.tiers, {content})
except OSError:
    pass
"""
    in_process(tmp_path, script, fault=f"{label}={action}")
    for tier, state in node.copies(content).items():
        assert state is not CopyState.GOOD or node.data(content, tier) == b"data" * 1000
    assert node.copies(content)[Tier.RAM] is CopyState.GOOD


def test_what_another_node_has_deleted_on_the_pfs_is_no_bad_copy(mount: Mount) -> None:
    """This node has not heard of the removal yet, and the store tells it before the PFS is read."""
    content = mount.put(b"file", b"data")
    mount.settle()
    inode = mount.inode(content)

    def refresh(_: int) -> None:
        (mount.pfs / "file").unlink()
        mount.db.run("DELETE FROM pfs_file WHERE inode = ?", inode)
        mount.db.run("DELETE FROM pfs_entry WHERE inode = ?", inode)

    found = [(finding.tier, finding.verdict) for finding in verifier_of(mount, lambda _: None).verify_file(inode)[0]]
    assert found == [("ram", GOOD), ("pfs", GOOD)]
    assert [finding.tier for finding in verifier_of(mount, refresh).verify_file(inode)[0]] == ["ram"]


def test_a_name_that_is_no_text_is_shown_as_everywhere(mount: Mount) -> None:
    content = mount.put(b"\xff.pt", b"data")
    mount.settle()
    assert verifier_of(mount, lambda _: None).verify_file(mount.inode(content))[0][0].path == "\\xff.pt"


def verifier_of(mount: Mount, refresh: Callable[[int], None]) -> FileVerifier:
    return FileVerifier(ControlContext(mount.config, mount.db, mount.tiers, refresh_pfs_path=refresh))
