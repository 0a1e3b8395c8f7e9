"""Applications for the storm, each as its checkpoints are really written; what they write follows `cluster_model`.

A job runs on one node at a time, in a thread. When its node dies it is started again, there or elsewhere, from what it finds, which must be
one of its checkpoints and no older than what had reached the clique.
"""

import contextlib
import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from cluster_model import RECORD_BYTES, History, Track, number_of, version_bytes

SMALL_FILES = 12
KEPT_STEPS = 2
BUSY_S = 30.0
RANKS = 2


class Lost(AssertionError):
    """What had reached the clique is not there."""


class Watch(Protocol):
    """What a job asks of the storm: whether all that it did since `mark` was seen by everybody."""

    synced: bool
    """Whether fsync waits for the clique: then jobs call it after each version."""

    def life(self, node: int) -> int:
        """Stays the same as long as the node reaches everybody who lives; -1 while it does not."""

    def another(self, node: int) -> int:
        """A node that is not away."""

    def mark(self, node: int) -> object:
        """Now."""

    def clean(self, node: int, mark: object) -> bool:
        """With a mark: whether the node reached everybody since; without: whether it lives."""


class Job:
    """One application; `turn` is one step of it."""

    def __init__(self, name: str, node: int, source: random.Random, watch: Watch) -> None:
        self.name, self.node, self.source, self.watch = name, node, source, watch
        self.tracks: list[Track] = []
        self.number = 0

    def begin(self, root: Path) -> None:
        """Start, or start again on another node: `root` is its directory there."""
        root.mkdir(exist_ok=True)
        self.number = max((track.latest for track in self.tracks), default=0)

    def turn(self, root: Path) -> None:
        """One step."""
        raise NotImplementedError

    def end(self) -> None:
        """Close what is open."""

    def found(self, track: Track, path: Path) -> int | None:
        """Which version a job that starts again finds. None: none."""
        data = self.read(track, path)
        if data is None:
            return None
        # What it was writing in place when its node died is there as far as it came.
        return track.broken if track.is_broken_off(data) else number_of(track.origin, data)

    def read(self, track: Track, path: Path) -> bytes | None:
        """What is in a file. What is lost for good is deleted, as people would."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as failure:
            if failure.errno == errno.EIO and track.lost and track.hopeless:
                path.unlink()
                return None
            raise

    def step(self, track: Track, act: Callable[[int], object], number: int | None = None, *, absent: bool = False) -> None:
        mark, life = self.watch.mark(self.node), self.watch.life(self.node)
        number = track.latest + 1 if number is None else number
        track.begin(number, self.node, absent=absent)
        act(number)
        if self.watch.clean(self.node, None):
            track.done(number, seen_by_all=self.watch.clean(self.node, mark))
        if self.acknowledged(life):
            track.acknowledged(number)

    def put(self, path: Path, data: bytes) -> None:
        with open(path, "wb") as file:
            file.write(data)
            if self.watch.synced:
                file.flush()
                os.fsync(file.fileno())

    def acknowledged(self, life: int) -> bool:
        """Whether what was fsynced, and the names that were made, are known to others whatever becomes of this node."""
        return self.watch.synced and life == self.watch.life(self.node) != -1

    def expect(self, track: Track, found: int | None) -> None:
        """What had reached the clique is there when a job starts again. An island shows what was known there."""
        if not track.hopeless and (found or 0) < track.durable and self.watch.mark(self.node) != -1:
            raise Lost(f"{track.path} on node {self.node} starts with {found} after {track}")


class Gromacs(Job):
    """A log that stays open, appended to and fsynced; `run_stepN.cpt` fsynced and renamed to `run.cpt`, that one to `run_prev.cpt`."""

    def __init__(self, name: str, node: int, source: random.Random, watch: Watch) -> None:
        super().__init__(name, node, source, watch)
        log = History(f"{name}/log")
        self.log, self.run = Track(f"{name}/md.log", f"{name}/log", log), Track(f"{name}/run.cpt", f"{name}/cpt")
        self.previous = Track(f"{name}/run_prev.cpt", f"{name}/cpt")
        self.tracks = [self.log, self.run, self.previous]
        self.fd, self.safe = -1, 0

    def begin(self, root: Path) -> None:
        super().begin(root)
        self.end()
        run, previous = self.found(self.run, root / "run.cpt"), self.found(self.previous, root / "run_prev.cpt")
        self.expect(self.run, max(run or 0, previous or 0))
        if max(run or 0, previous or 0) < self.safe:
            raise Lost(f"{root} has checkpoints {run} and {previous} after {self.safe} was acknowledged")
        assert self.log.history is not None
        path = root / "md.log"
        data = self.read(self.log, path) or b""
        records = self.log.history.records(data, newest=False)
        self.expect(self.log, records)
        self.log.history.resume(records)
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self.fd, records * RECORD_BYTES)
        os.lseek(self.fd, 0, os.SEEK_END)

    def turn(self, root: Path) -> None:
        if self.fd < 0:
            self.fd = os.open(root / "md.log", os.O_WRONLY | os.O_APPEND)
        history = self.log.history
        assert history is not None
        data = history.more(self.source.randint(1, 20))
        mark, life = self.watch.mark(self.node), self.watch.life(self.node)
        self.log.begin(len(history.now) // RECORD_BYTES, self.node)
        os.write(self.fd, data)
        os.fsync(self.fd)
        if self.acknowledged(life):
            self.log.acknowledged(self.log.latest)
        if self.source.random() < 0.3:
            self.end()
            if self.watch.clean(self.node, None):
                self.log.done(self.log.latest, seen_by_all=self.watch.clean(self.node, mark))
        self.number += 1
        self.step(self.run, lambda number: self._checkpoint(root, number), self.number)

    def _checkpoint(self, root: Path, number: int) -> None:
        life = self.watch.life(self.node)
        new, run = root / f"run_step{number}.cpt", root / "run.cpt"
        with open(new, "wb") as file:
            file.write(version_bytes(self.run.origin, number))
            file.flush()
            os.fsync(file.fileno())
        if run.exists():
            # Any of those before: what was being written when its node was lost may have been found again.
            self.previous.begin(number - 1, self.node)
            run.rename(root / "run_prev.cpt")
        new.rename(run)
        if self.acknowledged(life):
            self.safe = number

    def end(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)


class Torch(Job):
    """`torch.save` over the same name, and directories of several ranks' files made aside, renamed, the oldest removed."""

    def __init__(self, name: str, node: int, source: random.Random, watch: Watch) -> None:
        super().__init__(name, node, source, watch)
        self.model, self.aside = Track(f"{name}/model.pt", f"{name}/model"), Track(f"{name}/best.pt", f"{name}/best")
        self.steps = Track(f"{name}/steps", f"{name}/step")
        self.tracks = [self.model, self.aside, self.steps]

    def begin(self, root: Path) -> None:
        super().begin(root)
        (root / "steps").mkdir(exist_ok=True)
        for track, name in ((self.model, "model.pt"), (self.aside, "best.pt")):
            self.expect(track, self.found(track, root / name))
        try:
            newest = newest_step(root / "steps", self.steps.origin)
        except OSError as failure:
            if failure.errno != errno.EIO or not self.steps.lost or not self.steps.hopeless:
                raise
            shutil.rmtree(root / "steps")
            (root / "steps").mkdir()
            newest = None
        self.expect(self.steps, newest)
        for path in (root / "steps").iterdir():
            if path.suffix == ".tmp":
                shutil.rmtree(path)

    def turn(self, root: Path) -> None:
        chosen = self.source.randrange(3)
        if chosen == 0:
            self.step(self.model, lambda number: self.put(root / "model.pt", version_bytes(self.model.origin, number)))
        elif chosen == 1:
            self.step(self.aside, lambda number: self._aside(root, number))
        else:
            self.step(self.steps, lambda number: self._directory(root / "steps", number))
            for path in sorted((root / "steps").iterdir(), key=_step_of)[:-KEPT_STEPS]:
                shutil.rmtree(path)

    def _aside(self, root: Path, number: int) -> None:
        self.put(root / "best.tmp", version_bytes(self.aside.origin, number))
        (root / "best.tmp").rename(root / "best.pt")

    def _directory(self, steps: Path, number: int) -> None:
        making = steps / f"step_{number}.tmp"
        making.mkdir()
        for rank in range(RANKS):
            self.put(making / f"rank{rank}", version_bytes(f"{self.steps.origin}{rank}", number))
        making.rename(steps / f"step_{number}")


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_").removesuffix(".tmp"))


def newest_step(steps: Path, origin: str) -> int | None:
    """The newest whole directory, verified; None: none. Raises FileNotFoundError when it is being removed."""
    names = [path for path in steps.iterdir() if path.name.startswith("step_") and path.suffix != ".tmp"]
    if not names:
        return None
    newest = max(names, key=_step_of)
    for rank in range(RANKS):
        found = number_of(f"{origin}{rank}", (newest / f"rank{rank}").read_bytes())
        assert found == _step_of(newest), f"{newest} holds version {found}"
    return _step_of(newest)


class Small(Job):
    """Many small files in a directory that all nodes share: written, replaced, deleted."""

    def __init__(self, name: str, node: int, source: random.Random, watch: Watch) -> None:
        super().__init__(name, node, source, watch)
        self.tracks = [Track(f"common/{name}-{i}", f"{name}/{i}") for i in range(SMALL_FILES)]

    def begin(self, root: Path) -> None:
        super().begin(root)
        (root.parent / "common").mkdir(exist_ok=True)
        for track in self.tracks:
            self.expect(track, self.found(track, root.parent / track.path))

    def turn(self, root: Path) -> None:
        for track in self.source.sample(self.tracks, 4):
            path = root.parent / track.path
            if path.exists() and self.source.random() < 0.2:
                self.step(track, lambda _, path=path: path.unlink(), absent=True)
            else:
                self.step(track, lambda number, path=path, track=track: self.put(path, version_bytes(track.origin, number)))


class Wandering(Job):
    """Two files that another node writes anew each time, in place and renamed over: a node that comes back has older ones of them."""

    def __init__(self, name: str, node: int, source: random.Random, watch: Watch) -> None:
        super().__init__(name, node, source, watch)
        self.whole, self.aside = Track(f"{name}/whole", f"{name}/whole"), Track(f"{name}/aside", f"{name}/best")
        self.tracks = [self.whole, self.aside]

    def begin(self, root: Path) -> None:
        super().begin(root)
        for track in self.tracks:
            self.expect(track, self.found(track, root.parent / track.path))

    def turn(self, root: Path) -> None:
        if self.source.random() < 0.3:
            self.step(self.whole, lambda number: self._over(root / "whole", version_bytes(self.whole.origin, number)))
        else:
            self.step(self.aside, lambda number: self._aside(root, number))
        self.node = self.watch.another(self.node)

    def _aside(self, root: Path, number: int) -> None:
        self.put(root / f"aside.{self.node}", version_bytes(self.aside.origin, number))
        (root / f"aside.{self.node}").rename(root / "aside")

    def _over(self, path: Path, data: bytes) -> None:
        """While a reader on this node has it open as it was before another node wrote it, it cannot be written here."""
        until = time.monotonic() + BUSY_S
        while True:
            try:
                self.put(path, data)
                return
            except OSError as failure:
                if failure.errno != errno.EBUSY or time.monotonic() > until:
                    raise
                threading.Event().wait(0.02)


KINDS = (Gromacs, Torch, Small)
ALL_KINDS = (Gromacs, Wandering, Torch, Small, Wandering)
