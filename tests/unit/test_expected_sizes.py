"""X1: how large a new file will probably be. Small files cost no look at the catalog."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckptfs_daemon.mount.open_files.expected_sizes import ExpectedSizes

from ckptfs import limits
from ckptfs.catalog import namespace
from ckptfs.catalog.database import Database
from ckptfs.model import ROOT, Tier
from ckptfs.tiers.prepared import PreparedFiles
from ckptfs.tiers.storage import TierStorage

MIB = limits.MIB


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[PreparedFiles]:
    with tempfile.TemporaryDirectory(dir=tmp_path) as root:
        storage = TierStorage(Tier.RAM, Path(root))
        found = PreparedFiles(storage)
        yield found
        found.close()
        storage.close()


def _make_directory(db: Database, name: bytes) -> int:
    with db.transaction():
        return namespace.create(db, ROOT, name, 0o40755, uid=0, gid=0).id


def test_the_last_file_of_a_kind_counts(db: Database, pool: PreparedFiles) -> None:
    sizes = ExpectedSizes(db, pool)
    assert sizes.get(ROOT, b"log_1") == 0
    sizes.record(ROOT, b"log_1", 1000)
    assert sizes.get(ROOT, b"log_27") == 1000
    assert sizes.get(ROOT, b"trace_27") == 0
    assert pool.prune_expected() == [], "a small file has no place"


def test_the_place_of_a_large_file_counts_more(db: Database, pool: PreparedFiles) -> None:
    """X1: the ranks of a set differ in size, and one may be small."""
    sizes, first, second = ExpectedSizes(db, pool), _make_directory(db, b"step_1"), _make_directory(db, b"step_2")
    for rank, size in enumerate((64 * MIB, 32 * MIB, 1000)):
        sizes.record(first, b"rank%d.pt" % rank, size)
    assert [sizes.get(second, b"rank%d.pt" % rank) for rank in range(4)] == [64 * MIB, 32 * MIB, 1000, 1000]
    sizes.record(second, b"rank0.pt", 100)
    assert sizes.get(first, b"rank0.pt") == 100
    assert {one.size_bytes for one in pool.prune_expected()} == {100, 32 * MIB}


def test_large_files_are_known_after_a_restart(db: Database, pool: PreparedFiles) -> None:
    """P8."""
    ExpectedSizes(db, pool).record(ROOT, b"step_1.pt", 64 * MIB)
    again = ExpectedSizes(db, pool)
    assert again.get(ROOT, b"step_2.pt") == 64 * MIB
    assert again.get(ROOT, b"other_2.pt") == 0


def test_a_small_file_costs_no_query(db: Database, pool: PreparedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: a create of a small file is as fast as it was, also beside large files."""
    sizes = ExpectedSizes(db, pool)
    sizes.record(ROOT, b"step_1.pt", 64 * MIB)
    monkeypatch.setattr(namespace, "get_path", lambda *_: pytest.fail("a query"))
    sizes.record(ROOT, b"small_1", 4096)
    assert sizes.get(ROOT, b"small_2") == 4096
    assert sizes.get(ROOT, b"unknown_2") == 0
