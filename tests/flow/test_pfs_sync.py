"""P3, P4: the files of a batch are durable before they get their names, on every kind of filesystem."""

import os
from collections import Counter

import pytest
from local_node import inject_fault
from loop_disk import tmpfs_at
from write_back_world import Mount, intercepted

from ckptfs.errors import TierUnavailable
from ckptfs.flow.write_back import deferred
from ckptfs.tiers import pfs_sync


def sync_labels(mount: Mount) -> Counter[str]:
    seen: list[str] = []
    with intercepted(seen.append):
        mount.settle_exactly()
    return Counter(label for label in seen if label in {"write_back:fsync", "write_back:syncfs"})


def put_files(mount: Mount, *directories: bytes) -> None:
    for directory in directories:
        for number in range(6):
            mount.put(directory + b"%d" % number, b"data")


def test_one_syncfs_on_a_local_filesystem(mount: Mount) -> None:
    put_files(mount, b"")
    assert sync_labels(mount) == {"write_back:syncfs": 1}


@pytest.mark.parametrize(("name", "value"), [("_LOCAL_MAGIC", {}), ("_get_kernel_version", lambda: (4, 18))], ids=["NFS", "4.18"])
def test_each_file_is_synced_where_syncfs_is_not_enough(mount: Mount, monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """On Lustre, NFS or FUSE, and on kernels whose syncfs reports no errors."""
    monkeypatch.setattr(pfs_sync, name, value)
    put_files(mount, b"")
    assert sync_labels(mount) == {"write_back:fsync": 6}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_each_filesystem_below_the_pfs_is_synced(mount: Mount) -> None:
    mount.mkdir(b"in")
    mount.settle()
    with tmpfs_at(mount.pfs / "in"):
        put_files(mount, b"", b"in/")
        assert sync_labels(mount) == {"write_back:syncfs": 2}


def test_a_failed_fsync_in_a_thread_is_not_passed_over(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pfs_sync, "_LOCAL_MAGIC", {})
    monkeypatch.setattr(deferred, "RETRY_FIRST_S", 1000.0)
    put_files(mount, b"")
    inject_fault(monkeypatch, "write_back:fsync=EIO@*")
    with pytest.raises(TierUnavailable):
        mount.settle()
    assert mount.on_pfs() == {}
    inject_fault(monkeypatch, "")
    mount.settle_exactly()


def test_only_known_local_filesystems_are_synced_as_a_whole() -> None:
    with open("/proc/version", "rb") as file:
        assert not pfs_sync.can_sync_filesystem(file.fileno())
