"""The handover between supervisors: what a trial refuses, what execve leaves when it fails, and what a successor takes."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ckptfs_daemon.fuse import connection, request_table, shim_build
from ckptfs_daemon.fuse.connection import Connection
from ckptfs_daemon.ipc import Successor
from ckptfs_daemon.supervisor import handover
from ckptfs_daemon.supervisor.handover import Handed

from ckptfs import __version__, procfs
from ckptfs.catalog import database, identity
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.config.schema import MS_RDONLY
from ckptfs.errors import CatalogTooNew, ConfigError, InvalidArgument
from ckptfs.model import DataPath


class Running:
    """A daemon that a test pretends to run: its configuration, its connection, its catalog."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = Config(name="unit", mountpoint=place / "mnt", state=place)
        self.served = Connection(-1, b"init", DataPath.BUFFERED, "a test", self.config.mountpoint, "0:9")
        self.table_fd = request_table.create(self.served.serialize())
        database.create(place / "catalog.db")
        (place / "processes.json").write_text(json.dumps({"supervisor": {"pid": os.getppid()}}))
        monkeypatch.setattr(shim_build, "ensure", lambda: None)
        entry = procfs.MountEntry(1, self.config.mountpoint, "0:9", procfs.CKPTFS_TYPE, "unit", "", "/")
        monkeypatch.setattr(procfs, "list_mount_entries", lambda: [entry])


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    made = Running(tmp_path, monkeypatch)
    yield made
    os.close(made.table_fd)


def test_the_same_version_can_take_over(running: Running) -> None:
    handover.require_takeover(running.config, running.table_fd)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mountpoint": Path("/other")}, "now names the mountpoint /other, and the mount is at .*/mnt"),
        # The mount has its flags from mount(2), and a daemon for the other kind would not start with its catalog.
        ({"mount_flags": MS_RDONLY}, "the mount is writable, and the configuration now says read-only"),
    ],
)
def test_a_mount_stays_where_and_what_it_is(running: Running, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        handover.require_takeover(replace(running.config, **changes), running.table_fd)


def test_another_state_directory_is_refused(running: Running) -> None:
    (running.config.state / "processes.json").write_text(json.dumps({"supervisor": {"pid": os.getpid()}}))
    with pytest.raises(InvalidArgument, match="is not that of the running daemon"):
        handover.require_takeover(running.config, running.table_fd)


def test_a_detached_mount_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be mounted anew, and its open files would fail."""
    monkeypatch.setattr(procfs, "list_mount_entries", list)
    with pytest.raises(InvalidArgument, match="is detached"):
        handover.require_takeover(running.config, running.table_fd)


def test_a_table_of_another_size_is_refused(running: Running) -> None:
    """The successor could not find the requests of its predecessor."""
    with os.fdopen(os.memfd_create("other"), "wb") as other, pytest.raises(ValueError, match="a table of requests has"):
        handover.require_takeover(running.config, other.fileno())


def test_a_catalog_that_is_too_new_is_refused(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SCHEMA_VERSION", database.SCHEMA_VERSION - 1)
    with pytest.raises(
        CatalogTooNew, match=f"has version {database.SCHEMA_VERSION + 1}, this ckptfs knows up to {database.SCHEMA_VERSION}"
    ):
        handover.require_takeover(running.config, running.table_fd)


def test_another_cluster_is_refused(running: Running) -> None:
    with contextlib.closing(Database(running.config.state / "catalog.db", journalled=False)) as db:
        identity.set_cluster(db, "known")
    with pytest.raises(ConfigError, match="belong to the cluster known, and none is configured"):
        handover.require_takeover(running.config, running.table_fd)


def test_a_program_that_does_not_run_is_refused(running: Running, tmp_path: Path) -> None:
    """What it says last is the reason; the programs of today know no other arguments than these."""
    missing = handover.try_successor(Successor(str(tmp_path / "none"), ("/",)), ["unit"], running.table_fd)
    assert missing.startswith("the other version cannot be started: ")
    (tmp_path / "ckptfs_daemon.py").write_text("import sys; sys.exit('too old for ' + ' '.join(sys.argv[1:]))")
    refused = handover.try_successor(Successor(sys.executable, (str(tmp_path),)), ["unit"], running.table_fd)
    assert refused == f"the other version cannot take over: too old for unit --trial {running.table_fd}"


def test_a_program_that_does_not_answer_is_refused(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "TRIAL_WAIT_S", 0.2)
    (tmp_path / "ckptfs_daemon.py").write_text("import signal; signal.pause()")
    refused = handover.try_successor(Successor(sys.executable, (str(tmp_path),)), ["unit"], running.table_fd)
    assert refused == "the other version does not say within 0.2 s whether it can take over"


def test_an_execve_that_fails_leaves_everything_as_it_was(running: Running, tmp_path: Path) -> None:
    handed = Handed(running.table_fd, running.table_fd, running.table_fd)
    handover.execute(Successor(str(tmp_path / "none"), ("/",)), ["unit"], handed, {})
    assert not os.get_inheritable(running.table_fd)


def test_a_successor_takes_what_it_is_given(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, under the names of the environment, once."""
    given = {
        "version": "0.1",
        "pid": os.getpid(),
        "fuse": running.table_fd,
        "table": running.table_fd,
        "lock": running.table_fd,
        "later": 1,
    }
    monkeypatch.setenv(handover.HANDOVER, json.dumps(given))
    os.set_inheritable(running.table_fd, True)
    assert handover.take() == Handed(running.table_fd, running.table_fd, running.table_fd)
    assert not os.get_inheritable(running.table_fd)
    assert connection.restore(-1, running.table_fd) == replace(running.served, table_fd=running.table_fd)
    assert handover.take() is None


@pytest.mark.parametrize("given", ["", "[]", '{"pid": 1}', "PID only", '{"pid": PID, "fuse": 99999, "table": 1, "lock": "x"}'])
def test_what_is_not_for_this_process_is_not_taken(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(handover.HANDOVER, given.replace("PID", str(os.getpid())))
    assert handover.take() is None


def test_the_own_installation_is_where_this_package_is() -> None:
    own = handover.get_own_successor()
    assert own.python == sys.executable and all(Path(place).is_dir() for place in own.places) and __version__
