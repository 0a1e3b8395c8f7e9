"""P3: what was said to be on the PFS is there after a power cut, which loses RAM and what the catalog had not synced."""

import os
import shutil
import sqlite3

import pytest
from write_back_world import Mount

from ckptfs import lifecycle
from ckptfs.catalog import contents, copies, mover_requests
from ckptfs.flow.evict import Evict
from ckptfs.flow.fetch import Fetch
from ckptfs.flow.recover import Recover
from ckptfs.flow.scan import Scan
from ckptfs.model import ROOT, ContentState, Level, Tier


class PowerCut:
    """The catalog as it is on disk: as of the last `persist`."""

    def __init__(self, mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
        self._mount = mount
        self._disk = mount.root / "on-disk.db"
        monkeypatch.setattr(mount.db, "persist", self.persist)
        self.persist()

    def persist(self) -> None:
        target = sqlite3.connect(self._disk)
        self._mount.db.connection.backup(target)
        target.close()

    def strike(self) -> Mount:
        """Return the node after the reboot, recovered."""
        self._mount.db.close()
        self._mount.tiers.close()
        state = self._mount.root / "state"
        for path in state.glob("catalog.db*"):
            path.unlink()
        shutil.copy(self._disk, state / "catalog.db")
        shutil.rmtree(state / "ram")
        mount = Mount(self._mount.root)
        Recover(mount.db, mount.tiers, mount.told).run()
        return mount


def level(mount: Mount, path: bytes) -> Level:
    content = mount.shown(mount.number(path))
    return Level.PFS if content is None else lifecycle.level(contents.get_file_record(mount.db, content))


def read_from_pfs(mount: Mount, path: bytes) -> bytes:
    """Scan as write-back asked for, fetch the file, and return its bytes."""
    scan = Scan(mount.db, mount.tiers, mount.config, mount.told)
    while mover_requests.list_open(mount.db, mover_requests.SCAN):
        scan.step()
    fetch = Fetch(mount.db, mount.tiers, mount.config, mount.told)
    request = mover_requests.insert_request(mount.db, mover_requests.FETCH, mount.number(path), mover_requests.NEEDS_COPY)
    fetch.step()
    answered = mover_requests.get(mount.db, request)
    assert answered is not None and answered.state == mover_requests.DONE, answered
    content = mount.shown(mount.number(path))
    assert content is not None
    return mount.data(content, next(iter(mount.copies(content))))


def test_what_is_on_the_pfs_is_not_lost(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    mount.mkdir(b"run")
    mount.put(b"run/step_1.pt", b"weights")
    power = PowerCut(mount, monkeypatch)
    flow = mount.write_back()
    while level(mount, b"run/step_1.pt") is not Level.PFS:
        assert flow.step()
    mount = power.strike()
    assert level(mount, b"run/step_1.pt") is Level.PFS
    assert read_from_pfs(mount, b"run/step_1.pt") == b"weights"


def test_the_last_copy_on_nvme_goes_after_the_row_that_replaces_it_is_on_disk(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    content = mount.put(b"a", b"x" * 5000, tier=Tier.NVME)
    mount.settle()
    mount.db.run("UPDATE pfs_file SET checked_ns = 1")
    mount.squeeze(Tier.NVME, 5100)
    persisted: list[bool] = []
    monkeypatch.setattr(mount.db, "persist", lambda: persisted.append(mount.path(content, Tier.NVME).exists()))
    Evict(mount.db, mount.tiers, mount.config, mount.told).step()
    assert not mount.path(content, Tier.NVME).exists()
    assert persisted and all(persisted)


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replacing another file"])
def test_a_lost_file_that_is_whole_on_the_pfs_is_taken_up_again(
    mount: Mount, replaces: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The power fails between the rename on the PFS and the catalog's sync."""
    mount.mkdir(b"run")
    if replaces:
        mount.put(b"run/a", b"former")
    mount.settle()
    mount.put(b"run/tmp", b"the bytes")
    mount.rename(b"run/tmp", b"run/a")
    power = PowerCut(mount, monkeypatch)
    monkeypatch.setattr(mount.db, "persist", lambda: None)
    mount.settle()
    mount = power.strike()
    lost = mount.shown(mount.number(b"run/a"))
    assert lost is not None and mount.state(lost) is ContentState.LOST
    mount.settle()
    assert read_from_pfs(mount, b"run/a") == b"the bytes"
    assert level(mount, b"run/a") is Level.PFS
    assert any("taken up again" in message for message in caplog.messages)
    mount.chmod(b"run/a", 0o600)
    mount.settle()
    assert mount.db.rows("SELECT * FROM pfs_pending") == []
    assert os.stat(mount.pfs / "run" / "a").st_mode & 0o777 == 0o600


def test_a_lost_file_is_not_taken_for_the_one_that_it_replaced(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: the PFS shows the former file; the new one is lost, and reads of it fail."""
    mount.put(b"a", b"former")
    mount.settle()
    mount.put(b"tmp", b"the bytes")
    mount.rename(b"tmp", b"a")
    mount = PowerCut(mount, monkeypatch).strike()
    mount.settle()
    scan = Scan(mount.db, mount.tiers, mount.config, mount.told)
    mover_requests.insert_request(mount.db, mover_requests.SCAN, ROOT, mover_requests.COMPARE_AGAIN)
    while mover_requests.list_open(mount.db, mover_requests.SCAN):
        scan.step()
    lost = mount.shown(mount.number(b"a"))
    assert lost is not None and mount.state(lost) is ContentState.LOST
    assert copies.list_copies(mount.db, lost) == ()
