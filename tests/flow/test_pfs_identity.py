"""P11: a catalog starts with its own PFS only; P1: a PFS that does not answer holds up no check for ever."""

from dataclasses import replace
from pathlib import Path

import pytest
from local_node import inject_fault
from write_back_world import Mount

from ckptfs import limits
from ckptfs.catalog import scans
from ckptfs.errors import ConfigError
from ckptfs.tiers import pfs_identity


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    """A node whose PFS has a file, and was at `pfs`."""
    mount = Mount(tmp_path)
    mount.put(b"file", b"data")
    mount.settle()
    scans.reset_scans(mount.db, str(mount.pfs))
    (tmp_path / "other").mkdir()
    return mount


def test_a_pfs_at_another_path_must_be_the_same(mount: Mount) -> None:
    pfs_identity.require_pfs_of_catalog(mount.db, mount.config)
    other = replace(mount.config, pfs=mount.root / "other")
    with pytest.raises(ConfigError, match=f"belong to the PFS that was at {mount.pfs}, and {other.pfs} is not that PFS"):
        pfs_identity.require_pfs_of_catalog(mount.db, other)
    (mount.root / "state" / pfs_identity.ACCEPT_PFS).touch()
    pfs_identity.require_pfs_of_catalog(mount.db, other)


def test_a_pfs_at_another_path_must_answer(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PFS_ACT_WAIT_S", 0.2)
    inject_fault(monkeypatch, "scan:root=hang@*")
    with pytest.raises(ConfigError, match=r"it does not answer within 0\.2 s"):
        pfs_identity.require_pfs_of_catalog(mount.db, replace(mount.config, pfs=mount.root / "other"))
    inject_fault(monkeypatch, "scan:root=ESTALE@*")
    with pytest.raises(ConfigError, match="Stale file handle"):
        pfs_identity.require_pfs_of_catalog(mount.db, replace(mount.config, pfs=mount.root / "other"))
    pfs_identity.require_pfs_of_catalog(mount.db, mount.config)


def test_a_catalog_that_never_met_its_pfs_may_get_another(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    scans.reset_scans(mount.db, str(mount.pfs))
    (tmp_path / "other").mkdir()
    pfs_identity.require_pfs_of_catalog(mount.db, replace(mount.config, pfs=tmp_path / "other"))


def test_a_node_of_a_cluster_gets_no_first_pfs_for_what_it_has(tmp_path: Path) -> None:
    mount = Mount(tmp_path)
    clustered = replace(mount.config, cluster="c1")
    pfs_identity.require_pfs_of_catalog(mount.db, clustered)
    mount.db.is_journalled = False
    mount.mkdir(b"d")
    pfs_identity.require_pfs_of_catalog(mount.db, mount.config)
    with pytest.raises(ConfigError, match="were written without a PFS, and would never be written back") as refusal:
        pfs_identity.require_pfs_of_catalog(mount.db, clustered)
    assert "leave out pfs=" in refusal.value.remedy
