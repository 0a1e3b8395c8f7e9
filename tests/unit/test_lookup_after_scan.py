"""P2, P1: a look-up in a directory of the PFS that another node changes while this node imports it."""

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from ckptfs_daemon.mount.context import SCANS_PER_REQUEST_MAX, ChangeRunner

from ckptfs.catalog import namespace
from ckptfs.catalog.database import Database
from ckptfs.model import ROOT


def look_up(db: Database, scans_needed: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Look up a name of which a scan, at the n-th time, is the end of the import."""
    db.run("UPDATE inode SET imported=0 WHERE id=?", ROOT)
    scans = 0

    async def request_scan(directory: int, *, must_succeed: bool = False) -> bool:
        nonlocal scans
        assert (directory, must_succeed) == (ROOT, True)
        scans += 1
        db.run("UPDATE inode SET imported=? WHERE id=?", int(scans == scans_needed), ROOT)
        return True

    changes = ChangeRunner(SimpleNamespace(db=db))  # type: ignore[arg-type]
    monkeypatch.setattr(changes, "request_scan", request_scan)
    return trio.run(changes.lookup_after_scan, ROOT, b"a")


def test_a_directory_that_is_still_not_imported_is_scanned_again(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    made = namespace.create(db, ROOT, b"b", 0o100644, uid=0, gid=0)
    with pytest.raises(FileNotFoundError):
        look_up(db, 2, monkeypatch)
    db.run("UPDATE entry SET name=? WHERE child=?", b"a", made.id)
    assert look_up(db, 2, monkeypatch).id == made.id


def test_it_does_not_scan_for_ever(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError) as failure:
        look_up(db, SCANS_PER_REQUEST_MAX + 1, monkeypatch)
    assert failure.value.errno == errno.EAGAIN
