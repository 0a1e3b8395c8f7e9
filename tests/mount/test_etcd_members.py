"""P1, G2, N1: an etcd of three members, as in production, loses each of them in turn while two nodes work; it has lost nothing, and nobody
takes it for that.
"""

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from daemon_under_test import DaemonUnderTest, eventually
from etcd_server import Etcd, node_options, revision_at
from etcd_server import three as three

from ckptfs import limits
from ckptfs.store.etcd import EtcdStore
from ckptfs.store.kv import Get

pytestmark = [pytest.mark.root, pytest.mark.fuse]

TURNS = 5


@pytest.fixture
def two(three: Etcd) -> Iterator[list[DaemonUnderTest]]:
    daemons = [DaemonUnderTest(pfs=None, nvme=None, ram="256M", **node_options(three.joined, node=name)) for name in ("a", "b")]
    try:
        for daemon in daemons:
            # Nobody answers while a leader is elected: on a busy machine that may take longer than a call.
            daemon.expect_warning("does not answer")
            daemon.start()
        yield daemons
        assert [line for daemon in daemons for line in daemon.complaints()] == []
    finally:
        # Together: who ends last would wait for copies on a node that is gone, until its lease runs out.
        with ThreadPoolExecutor() as pool:
            list(pool.map(DaemonUnderTest.close, daemons))


class Load(threading.Thread):
    """Makes, renames and deletes, each step in time."""

    def __init__(self, place: Path, other: Path) -> None:
        super().__init__(daemon=True)
        self.place, self.other = place, other
        self.turns, self.longest, self.failure = 0, 0.0, ""
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set() and not self.failure:
            began = time.monotonic()
            try:
                self._turn(self.place / f"{self.turns}")
            except OSError as failure:
                self.failure = str(failure)
            self.longest = max(self.longest, time.monotonic() - began)
            self.turns += 1

    def _turn(self, path: Path) -> None:
        path.with_suffix(".tmp").write_bytes(path.name.encode())
        path.with_suffix(".tmp").rename(path)
        path.with_suffix(".gone").mkdir()
        os.listdir(self.other)
        path.with_suffix(".gone").rmdir()


def epoch(three: Etcd) -> bytes:
    with closing(EtcdStore(three.addresses, "test")) as store:
        return store.read([Get(b"epoch")], timeout_s=60).results[0][0].value


def test_each_member_goes_and_returns(three: Etcd, two: list[DaemonUnderTest]) -> None:
    known, names = epoch(three), ["a", "b"]
    for name in names:
        (two[0].path / name).mkdir()
    loads = [Load(daemon.path / name, daemon.path) for daemon, name in zip(two, names, strict=True)]
    for load in loads:
        load.start()
    for member in three.members:
        member.stop()
        aims = [(load, load.turns + TURNS) for load in loads]
        eventually(lambda aims=aims: all(load.turns >= aim or load.failure for load, aim in aims), what="the load goes on")  # type: ignore[misc]
        three.start_member(member)
        revision = eventually(lambda member=member: revision_at(member), what="it is back")  # type: ignore[misc]
        three.compact(revision)
    for load in loads:
        load.ended.set()
        load.join(60)
    assert [load.failure for load in loads] == ["", ""]
    assert max(load.longest for load in loads) < limits.SCAN_WAIT_S
    assert epoch(three) == known and not any("lost" in daemon.log for daemon in two)
    for name, load in zip(names, loads, strict=True):
        expected = {f"{turn}" for turn in range(load.turns)}
        for daemon in two:
            eventually(lambda at=daemon.path / name, made=expected: set(os.listdir(at)) == made, what="all of it, and no more")  # type: ignore[misc]
