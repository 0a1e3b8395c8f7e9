"""The catalog's connections live and die with the threads that use them: a mover's worker threads come and go for months."""

import os
import threading
from pathlib import Path

import pytest

from ckptfs.catalog import database
from ckptfs.catalog.database import Database
from ckptfs.errors import NoSpace


def opened(path: Path) -> int:
    """How many descriptors of this process lead to `path`."""
    return sum(os.path.realpath(f"/proc/self/fd/{fd}") == str(path) for fd in os.listdir("/proc/self/fd"))


def test_threads_that_end_leave_no_descriptor_behind(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "catalog.db"
    database.create(path)
    db = Database(path, journalled=False)
    assert db.value("SELECT count(*) FROM inode") == 1
    before = opened(path)
    for _ in range(20):
        thread = threading.Thread(target=db.value, args=("SELECT count(*) FROM inode",))
        thread.start()
        thread.join()
    # SQLite keeps a descriptor until no other connection of this process holds a lock, so one may stay.
    assert opened(path) <= before + 1
    db.close()
    assert opened(path) == 0


def test_a_closed_database_closes_the_connections_of_threads_that_live_on(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "catalog.db"
    database.create(path)
    db = Database(path, journalled=False)
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        db.value("SELECT count(*) FROM inode")
        begun.set()
        ended.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(60)
    db.close()
    assert opened(path) == 0
    ended.set()
    thread.join()


def test_a_commit_that_fails_leaves_no_change_open(tmp_path: Path) -> None:
    """A change that stayed open would take in all later ones, and none of them would ever be committed."""
    database.create(tmp_path / "catalog.db")
    db = Database(tmp_path / "catalog.db", journalled=False)
    pages = int(db.value("PRAGMA page_count"))
    db.run(f"PRAGMA max_page_count={pages}")
    with pytest.raises(NoSpace, match="the catalog cannot be written"), db.transaction():
        for number in range(10_000):
            db.run("INSERT INTO report (key, value, at_ns) VALUES (?, ?, 0)", f"key{number}", "x" * 500)
    assert not db.connection.in_transaction
    db.run("PRAGMA max_page_count=1000000")
    with db.transaction():
        db.run("INSERT INTO report (key, value, at_ns) VALUES ('after', '', 0)")
    assert db.rows("SELECT key FROM report") == [("after",)]


def test_a_change_waits_for_another_one_in_short_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: SQLite would sleep for up to 100 ms at a time, and each create beside the mover would take that long."""
    database.create(tmp_path / "catalog.db")
    db = Database(tmp_path / "catalog.db", journalled=False)
    begun, may_end, slept = threading.Event(), threading.Event(), list[float]()

    def change() -> None:
        with db.transaction():
            begun.set()
            assert may_end.wait(60)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            may_end.set()
            thread.join()

    thread = threading.Thread(target=change)
    thread.start()
    assert begun.wait(60)
    monkeypatch.setattr(database.time, "sleep", sleep)
    with db.transaction():
        assert slept == [database.LOCK_POLL_S] * 3
    db.close()


def test_a_catalog_without_a_file_for_its_lock_can_be_changed(tmp_path: Path) -> None:
    database.create(tmp_path / "catalog.db")
    (tmp_path / "catalog.db-lock").mkdir()
    db = Database(tmp_path / "catalog.db", journalled=False)
    with db.transaction():
        db.run("UPDATE inode SET uid = 7")
    assert db.value("SELECT uid FROM inode") == 7
    db.close()
