"""X1, M3: which files of the RAM tier get huge pages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_node import Node, run_until_idle
from loop_disk import tmpfs_at

from ckptfs import limits, procfs
from ckptfs.catalog import contents
from ckptfs.flow.prepare import Prepare
from ckptfs.model import Tier
from ckptfs.tiers import huge_pages, prepared
from ckptfs.tiers.storage import Tiers, TierStorage

pytestmark = pytest.mark.root


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs without huge pages."""
    place = tmp_path / "ram"
    place.mkdir()
    with tmpfs_at(place, "mode=700,nosuid,nodev"):
        huge_pages.set_for_fresh_files(place, False)
        yield place


def gives_memory_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bool) -> None:
    """Let the features of a balloon say so."""
    device = tmp_path / "driver" / "virtio7"
    device.mkdir(parents=True)
    (device / "features").write_text("01100" + str(int(answer)) + "0" * 58 + "\n")
    monkeypatch.setattr(huge_pages, "_BALLOON", device.parent)


def has_huge_pages(tier: Path) -> bool:
    """Whether fresh files of the tmpfs get them."""
    (mounted,) = [entry for entry in procfs.list_mount_entries() if entry.mountpoint == tier]
    return "huge=within_size" in mounted.options


def test_all_files_get_them(tier: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gives_memory_back(monkeypatch, tmp_path, False)
    huge_pages.set_for_fresh_files(tier, True)
    assert has_huge_pages(tier)
    with huge_pages.for_prepared_files(tier):
        assert has_huge_pages(tier)
    assert has_huge_pages(tier)


def test_where_the_host_takes_free_memory_only_prepared_files_get_them(
    tier: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    """A huge page from such memory costs its first writer many times what a small one does."""
    gives_memory_back(monkeypatch, tmp_path, True)
    huge_pages.set_for_fresh_files(tier, True)
    assert not has_huge_pages(tier)
    node, found, between = Node(tmp_path / "node"), [], []
    ram = TierStorage(Tier.RAM, tier, budget_bytes=1024 * limits.MIB)
    node.tiers = Tiers(dict(node.tiers) | {Tier.RAM: ram}, node.config.ram_high, has_huge_pages=True)
    top_up = prepared.top_up

    def look(*values: Any) -> None:
        found.append(has_huge_pages(tier))
        top_up(*values)

    def count_writers(_: object) -> int:
        """Asked before each piece: writers go first, and get small pages."""
        between.append(has_huge_pages(tier))
        return 0

    monkeypatch.setattr(prepared, "top_up", look)
    monkeypatch.setattr(contents, "count_writers", count_writers)
    monkeypatch.setattr(procfs, "get_memory_pressure", lambda: 0.0)
    monkeypatch.setattr(limits, "PASSTHROUGH_SPACE_UNKNOWN_BYTES_MIN", 64 * limits.MIB)
    node.tiers.prepared.record_size(b"a", 16 * limits.MIB)
    run_until_idle(Prepare(node.db, node.tiers, node.config, node.told))
    assert found == [True]
    assert between == [False]
    monkeypatch.setattr(limits, "TOP_UP_AHEAD_BYTES", 32 * limits.MIB)
    enlarged = node.tiers.find_prepared(16 * limits.MIB, is_limited=True)
    assert enlarged is not None and enlarged.size_bytes == 32 * limits.MIB and found == [True, True]
    assert not has_huge_pages(tier)
    node.tiers.close()


def test_no_file_gets_them_if_the_mount_does_not_want_them(tier: Path) -> None:
    huge_pages.set_for_fresh_files(tier, False)
    assert not has_huge_pages(tier)


def test_a_machine_without_a_balloon_keeps_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_BALLOON", tmp_path / "absent")
    assert not huge_pages.gives_memory_back()
