"""P1, G2: an etcd that is paused, slow, or comes and goes: system calls end in time all the same, and nothing is lost."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_lab import ClusterUnderTest
from daemon_under_test import eventually

from ckptfs import limits

EXPECTED = "etcd|does not answer|store of the cluster|island|has died|took over|not reach|no longer"
CALL_S_MAX = limits.SCAN_WAIT_S
TURNS = 4


def paused(lab: ClusterUnderTest, worked: Callable[[], bool]) -> None:
    """It stops in the middle, and goes on when much was done without it."""
    lab.pause_etcd()
    eventually(worked, what="the load goes on")
    lab.resume_etcd()


def slow(lab: ClusterUnderTest, worked: Callable[[], bool]) -> None:
    """It sleeps a quarter of a second before every few answers."""
    pause = threading.Event()
    while not worked():
        lab.pause_etcd()
        pause.wait(0.25)
        lab.resume_etcd()
        pause.wait(0.02)


def flapping(lab: ClusterUnderTest, worked: Callable[[], bool]) -> None:
    pause = threading.Event()
    for turn in itertools.count():
        lab.stop_etcd()
        pause.wait(0.5)
        lab.start_etcd()
        pause.wait(0.5)
        if turn > 3 and worked():
            return


class Load:
    """An application on one node: makes, replaces, renames, reads, lists and deletes, in a directory of its own and a shared one."""

    def __init__(self, shared: Path, name: str) -> None:
        self.shared, self.own, self.name = shared, shared / f"of-{name}", name
        self.kept: dict[str, bytes] = {}
        self.complaints: list[str] = []
        self.longest = (0.0, "")
        self.turns = 0
        self.ended = threading.Event()
        self.own.mkdir()

    def run(self) -> None:
        while not self.ended.is_set() and not self.complaints:
            try:
                self._turn(f"{self.turns:05}", os.urandom(20_000))
                self.turns += 1
            except OSError as failure:
                self.complaints.append(f"{self.name}: {failure}")

    def _turn(self, number: str, data: bytes) -> None:
        path, name = self.own / number, f"{self.name}-{number}"
        self._timed("mkdir", (self.own / f"d{number}").mkdir)
        self._timed("write", lambda: path.with_suffix(".tmp").write_bytes(data))
        self._timed("rename", lambda: path.with_suffix(".tmp").rename(path))
        self._timed("shared", lambda: (self.shared / name).write_bytes(data))
        self.kept |= {f"of-{self.name}/{number}": data, name: data}
        self._timed("list", lambda: os.listdir(self.own))
        self._timed("rmdir", (self.own / f"d{number}").rmdir)
        if self._timed("read", path.read_bytes) != data:
            self.complaints.append(f"{self.name} read something else than it wrote")

    def _timed(self, what: str, act: Callable[[], object]) -> object:
        began = time.monotonic()
        try:
            return act()
        finally:
            self.longest = max(self.longest, (time.monotonic() - began, what))


@contextlib.contextmanager
def running(loads: list[Load]) -> Iterator[None]:
    threads = [threading.Thread(target=load.run, daemon=True) for load in loads]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for load in loads:
            load.ended.set()
        for thread in threads:
            thread.join(120)


@pytest.mark.parametrize("how", [paused, slow, flapping])
def test_an_etcd_that_is_ill(lab: ClusterUnderTest, how: Callable[[ClusterUnderTest, Callable[[], bool]], None]) -> None:
    lab.expect_warning(EXPECTED)
    (lab[0].path / how.__name__).mkdir()
    loads = [Load(node.path / how.__name__, node.name) for node in lab.nodes]
    with running(loads):
        how(lab, lambda: all(load.turns >= TURNS or load.complaints for load in loads))
    assert [load.complaints for load in loads] == [[], [], []]
    lab.mend()
    expected = {name: data for load in loads for name, data in load.kept.items()}
    for load in loads:
        # Who waits for ever has found a bug; how long exactly depends on how busy the machine is.
        assert load.longest[0] < CALL_S_MAX, load.longest
        eventually(lambda load=load: expected.items() <= lab.tree(load.shared).items(), what="all is there")  # type: ignore[misc]
    assert {name for name, data in lab.tree(loads[0].shared).items() if data is not None} == set(expected)
