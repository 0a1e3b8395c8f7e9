"""The applications of a campaign, and what readers of a cluster may see of their files meanwhile.

An application writes checkpoints as real programs do. It runs on one node at a time, in a thread. When its node dies, it starts again there
or on another node, from what it finds. That must be one of its checkpoints, and none older than what had reached the clique.

Every byte follows from the version that was written. A `Track` is one path, or one family of paths, with one writer at a time. Version
`latest` was begun, `closed` was finished by its writer, `floor` was finished while the writer reached all nodes, `durable` had reached the
clique. A number may stand for a deletion (`absent`). Tracks and versions are pure.
"""

import contextlib
import errno
import functools
import os
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptfs_client.chaos.campaign import Campaign

RECORD_BYTES = 4096
SMALL, LARGE = (100, 60_000), (1_000_000, 6_000_000)
SMALL_FILES = 12
KEPT_STEPS = 2
RANKS = 2


class WrongContent(AssertionError):
    """Bytes that no application wrote. The second argument has them."""


class ContentMissing(AssertionError):
    """A version that had reached the clique, and is not there."""


@functools.lru_cache(maxsize=32)
def build_version(origin: str, number: int) -> bytes:
    source = random.Random(f"{origin}:{number}")
    size = source.randint(*(LARGE if source.random() < 0.2 else SMALL))
    return f"{origin}:{number}\n".encode() + source.randbytes(size)


def identify_version(origin: str, data: bytes) -> int:
    """Return the number of the version with these bytes. Raises WrongContent."""
    named, _, number = data[:200].partition(b"\n")[0].decode(errors="replace").rpartition(":")
    if named != origin or not number.isdigit():
        raise WrongContent(f"{origin}: begins with {data[:60]!r}, {len(data)} bytes", data)
    if data != build_version(origin, int(number)):
        raise WrongContent(f"{origin}: version {number} is mixed or damaged, {len(data)} bytes", data)
    return int(number)


class LogRecords:
    """What a log may hold: records of its writer, and of former writers whose last ones were lost."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._life = 0
        self.now = bytearray()
        self._former: list[bytes] = []

    def resume(self, records: int) -> None:
        """Begin with a new writer, which found so many records."""
        self._life += 1
        self._former.append(bytes(self.now))
        del self.now[records * RECORD_BYTES :]

    def append(self, count: int) -> bytes:
        """Return the next records."""
        begin = len(self.now) // RECORD_BYTES
        new = b"".join(random.Random(f"{self._origin}:{self._life}:{begin + i}").randbytes(RECORD_BYTES) for i in range(count))
        self.now += new
        return new

    def count(self, data: bytes) -> int:
        """Return the number of whole records in `data`. Raises WrongContent."""
        known = [bytes(self.now), *self._former]
        if not any(one.startswith(data) for one in known):
            common = max(_count_common(one, data) for one in known)
            raise WrongContent(f"{self._origin}: {len(data)} bytes are no beginning of the log, which differs from byte {common} on", data)
        return len(data) // RECORD_BYTES


def _count_common(one: bytes, other: bytes) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass
class Track:
    """One path and the versions of it that readers may see; see the module.

    `lost`: the node of the last writer lost what it had before `latest` was safe; `lost_versions` has all versions of which that was so.
    `broken` was being written when the writer's node died.
    """

    path: str
    origin: str
    records: LogRecords | None = None
    latest: int = 0
    closed: int = 0
    floor: int = 0
    durable: int = 0
    writer: int = -1
    lost: bool = False
    lost_versions: set[int] = field(default_factory=set)
    broken: int = 0
    absent: set[int] = field(default_factory=lambda: {0})
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, number: int, writer: int, *, absent: bool = False) -> None:
        """Note that node `writer` begins a version."""
        with self.lock:
            self.latest, self.writer = number, writer
            if absent:
                self.absent.add(number)

    def finish(self, number: int, *, seen_by_all: bool) -> None:
        """Note that its writer has closed a version."""
        with self.lock:
            self.closed, self.lost = number, False
            if seen_by_all:
                self.floor = number

    def mark_safe(self, number: int) -> None:
        """Note that a version has reached the clique, if it is still the last one."""
        with self.lock:
            if self.latest == self.closed == self.floor == number and not self.lost:
                self.durable = number

    def mark_acknowledged(self, number: int) -> None:
        """Note that fsync has told the writer of a version that it is in the clique."""
        with self.lock:
            if not self.lost:
                self.durable = max(self.durable, number)

    def mark_wiped(self, node: int) -> None:
        """Note that a node has lost what it had."""
        with self.lock:
            if self.writer == node and self.latest > self.durable:
                self.closed = self.floor = self.durable
                self.lost = True
                self.lost_versions |= {*range(self.durable + 1, self.latest + 1)}

    def mark_away(self, node: int) -> None:
        """Note that a node is away with what it has.

        Until it is back, the others may show what had reached the clique.
        """
        with self.lock:
            if self.writer == node:
                self.floor = self.durable

    def mark_broken_off(self, node: int) -> None:
        """Note that a node has died.

        A version that it was writing in place stays as far as it came, as on any filesystem.
        """
        with self.lock:
            if self.writer == node and self.latest > self.closed:
                self.broken = self.latest

    def mark_beside(self, shown: int) -> None:
        """Note that version `shown` has the name, and a later one of an island lies beside it."""
        with self.lock:
            self.closed = self.floor = shown
            self.durable = min(self.durable, shown)

    def mark_returned(self) -> None:
        """Note that all nodes are back."""
        with self.lock:
            self.floor = max(self.floor, self.closed)

    def may_be_without_bytes(self, path: Path) -> bool:
        """Return True if a file of this track may be a name without bytes, which went with a node."""
        if self.is_directory and _step_of(path.parent) in self.lost_versions:
            return True
        return self.lost and self.hopeless

    def is_broken_off(self, data: bytes) -> bool:
        """Return True if these are the first bytes of the version that was broken off."""
        return bool(self.broken) and self._is_in_place and build_version(self.origin, self.broken).startswith(data)

    def may_show(self, found: int | None, floor: int, *, strict: bool) -> bool:
        """Return True if a reader that began when `floor` held may see version `found` (None: no such name)."""
        with self.lock:
            low = floor if strict else 0
            if found is None:
                # A version that is being written, or was when its writer died, may have taken the name away.
                return any(low <= number <= self.latest for number in self.absent) or (
                    self.latest > min(floor, self.floor) and self.has_gaps
                )
            return low <= found <= self.latest

    def is_being_written(self, data: bytes, floor: int) -> bool:
        """Return True if these are the first bytes of a version that was written in place during the read."""
        begun = range(floor + 1, self.latest + 1)
        return self._is_in_place and any(build_version(self.origin, number).startswith(data) for number in begun)

    def is_written_over(self, data: bytes, floor: int) -> bool:
        """Return True if `data` begins with one version and ends with a later one in its place.

        A reader on the node of the writer sees that, as on any filesystem. Readers on other nodes see what was sealed.
        """
        known = [build_version(self.origin, number) for number in range(floor, self.latest + 1) if number not in self.absent]
        pairs = [(old, new) for place, old in enumerate(known) for new in (b"", *known[place + 1 :])]
        return self._is_in_place and any(data[(same := _count_common(old, data)) :] == new[same : len(data)] for old, new in pairs)

    @property
    def _is_in_place(self) -> bool:
        return self.records is None and not self.origin.endswith(("cpt", "best", "step"))

    @property
    def is_changed_in_place(self) -> bool:
        """Whether a writer overwrites or extends the file that readers may be fetching."""
        return self._is_in_place or self.records is not None

    @property
    def is_directory(self) -> bool:
        """Whether the versions are directories below the path."""
        return self.path.endswith("steps")

    @property
    def hopeless(self) -> bool:
        """Whether nothing need be left: the safe version was deleted or renamed since, or there was none."""
        return not self.durable or self.path.endswith("/run.cpt") or any(self.durable <= number <= self.latest for number in self.absent)

    @property
    def has_gaps(self) -> bool:
        """Whether the name is missing for a moment when it is replaced."""
        return self.origin.endswith("cpt")


# --- applications -----------------------------------------------------------------------------------------------------


class Application:
    """One application; `turn` is one step of it.

    It asks the campaign which nodes reached all others meanwhile.
    """

    def __init__(self, name: str, node: int, source: random.Random, campaign: "Campaign") -> None:
        self.name, self.node, self.source, self.campaign = name, node, source, campaign
        self.number = 0
        self.tracks = self.build_tracks(name)

    def build_tracks(self, name: str) -> list[Track]:
        """Return the files of the application."""
        raise NotImplementedError

    def begin(self, root: Path) -> None:
        """Start, or start again on another node, where `root` is the application's directory."""
        root.mkdir(exist_ok=True)
        self.number = max((track.latest for track in self.tracks), default=0)

    def turn(self, root: Path) -> None:
        """Do one step."""
        raise NotImplementedError

    def end(self) -> None:
        """Close what is open."""

    def found(self, track: Track, path: Path) -> int | None:
        """Return the version that an application finds when it starts again. Returns None if there is none."""
        data = self.read(track, path)
        if data is None:
            return None
        # A version that was written in place when the node died is there as far as it came.
        return track.broken if track.is_broken_off(data) else identify_version(track.origin, data)

    def read(self, track: Track, path: Path) -> bytes | None:
        """Return the bytes of a file. One that is lost for good is deleted, as its user would."""
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
        """Write the next version by `act`, and note how far it came."""
        epoch, life = self.campaign.get_epoch(self.node), self.campaign.get_life(self.node)
        number = track.latest + 1 if number is None else number
        track.begin(number, self.node, absent=absent)
        act(number)
        if self.campaign.is_alive(self.node):
            track.finish(number, seen_by_all=self.campaign.is_connected_since(self.node, epoch))
        if self.is_acknowledged(life):
            track.mark_acknowledged(number)

    def put(self, path: Path, data: bytes) -> None:
        """Write a file, with fsync if the mounts wait for the clique."""
        with open(path, "wb") as file:
            file.write(data)
            if self.campaign.synced:
                file.flush()
                os.fsync(file.fileno())

    def is_acknowledged(self, life: int) -> bool:
        """Return True if other nodes have what was fsynced, and its name, even if this node is lost now."""
        return self.campaign.synced and life == self.campaign.get_life(self.node) != -1

    def expect(self, track: Track, found: int | None) -> None:
        """Demand what had reached the clique when the application starts again.

        An island shows what was known there.
        """
        if not track.hopeless and (found or 0) < track.durable and self.campaign.get_epoch(self.node) != -1:
            raise ContentMissing(f"{track.path} on node {self.node} starts with {found} after {track}")


class Gromacs(Application):
    """A log that stays open and is fsynced; a checkpoint that is renamed twice.

    `run_stepN.cpt` becomes `run.cpt`, which becomes `run_prev.cpt`.
    """

    def build_tracks(self, name: str) -> list[Track]:
        log = LogRecords(f"{name}/log")
        self.log, self.run = Track(f"{name}/md.log", f"{name}/log", log), Track(f"{name}/run.cpt", f"{name}/cpt")
        self.previous = Track(f"{name}/run_prev.cpt", f"{name}/cpt")
        self.fd, self.safe = -1, 0
        return [self.log, self.run, self.previous]

    def begin(self, root: Path) -> None:
        super().begin(root)
        self.end()
        for path in root.glob("run_step*.cpt"):
            path.unlink()  # A run that was killed left it, perhaps empty.
        run, previous = self.found(self.run, root / "run.cpt"), self.found(self.previous, root / "run_prev.cpt")
        self.expect(self.run, max(run or 0, previous or 0))
        if max(run or 0, previous or 0) < self.safe:
            raise ContentMissing(f"{root} has checkpoints {run} and {previous} after {self.safe} was acknowledged")
        assert self.log.records is not None
        path = root / "md.log"
        data = self.read(self.log, path) or b""
        records = self.log.records.count(data)
        self.expect(self.log, records)
        self.log.records.resume(records)
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        os.ftruncate(self.fd, records * RECORD_BYTES)
        os.lseek(self.fd, 0, os.SEEK_END)

    def turn(self, root: Path) -> None:
        if self.fd < 0:
            self.fd = os.open(root / "md.log", os.O_WRONLY | os.O_APPEND)
        records = self.log.records
        assert records is not None
        data = records.append(self.source.randint(1, 20))
        epoch, life = self.campaign.get_epoch(self.node), self.campaign.get_life(self.node)
        self.log.begin(len(records.now) // RECORD_BYTES, self.node)
        os.write(self.fd, data)
        os.fsync(self.fd)
        if self.is_acknowledged(life):
            self.log.mark_acknowledged(self.log.latest)
        if self.source.random() < 0.3:
            self.end()
            if self.campaign.is_alive(self.node):
                self.log.finish(self.log.latest, seen_by_all=self.campaign.is_connected_since(self.node, epoch))
        self.number += 1
        self.step(self.run, lambda number: self._checkpoint(root, number), self.number)

    def _checkpoint(self, root: Path, number: int) -> None:
        life = self.campaign.get_life(self.node)
        new, run = root / f"run_step{number}.cpt", root / "run.cpt"
        with open(new, "wb") as file:
            file.write(build_version(self.run.origin, number))
            file.flush()
            os.fsync(file.fileno())
        if run.exists():
            # Any earlier one: a version that was being written when its node was lost may be there again.
            self.previous.begin(number - 1, self.node)
            run.rename(root / "run_prev.cpt")
        new.rename(run)
        if self.is_acknowledged(life):
            self.safe = number

    def end(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            with contextlib.suppress(OSError):
                os.close(fd)


class Torch(Application):
    """`torch.save` over one name, and directories of several ranks' files.

    The directories are made aside and renamed; the oldest are removed.
    """

    def build_tracks(self, name: str) -> list[Track]:
        self.model, self.aside = Track(f"{name}/model.pt", f"{name}/model"), Track(f"{name}/best.pt", f"{name}/best")
        self.steps = Track(f"{name}/steps", f"{name}/step")
        return [self.model, self.aside, self.steps]

    def begin(self, root: Path) -> None:
        super().begin(root)
        (root / "steps").mkdir(exist_ok=True)
        for track, name in ((self.model, "model.pt"), (self.aside, "best.pt")):
            self.expect(track, self.found(track, root / name))
        try:
            newest = find_newest_step(root / "steps", self.steps.origin)
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
            self.step(self.model, lambda number: self.put(root / "model.pt", build_version(self.model.origin, number)))
        elif chosen == 1:
            self.step(self.aside, lambda number: self._aside(root, number))
        else:
            self.step(self.steps, lambda number: self._directory(root / "steps", number))
            for path in sorted((root / "steps").iterdir(), key=_step_of)[:-KEPT_STEPS]:
                shutil.rmtree(path)

    def _aside(self, root: Path, number: int) -> None:
        self.put(root / "best.tmp", build_version(self.aside.origin, number))
        (root / "best.tmp").rename(root / "best.pt")

    def _directory(self, steps: Path, number: int) -> None:
        making = steps / f"step_{number}.tmp"
        making.mkdir()
        for rank in range(RANKS):
            self.put(making / f"rank{rank}", build_version(f"{self.steps.origin}{rank}", number))
        making.rename(steps / f"step_{number}")


def _step_of(path: Path) -> int:
    # In the history, the name has the number of the set behind it.
    return int(path.name.removeprefix("step_").removesuffix(".tmp").partition("@")[0])


def find_newest_step(steps: Path, origin: str) -> int | None:
    """Return the number of the newest directory, all of it verified. Returns None if there is none.

    Raises WrongContent, FileNotFoundError if the directory is being removed.
    """
    names = [path for path in steps.iterdir() if path.name.startswith("step_") and path.suffix != ".tmp"]
    if not names:
        return None
    return read_step(max(names, key=_step_of), origin)


def read_step(step: Path, origin: str) -> int:
    """Return the number of a directory whose files all have its bytes. Raises WrongContent, OSError."""
    for rank in range(RANKS):
        found = identify_version(f"{origin}{rank}", (step / f"rank{rank}").read_bytes())
        if found != _step_of(step):
            raise WrongContent(f"{step} holds version {found}", b"?")
    return _step_of(step)


class Small(Application):
    """Many small files in a directory that all nodes share: written, replaced, deleted."""

    def build_tracks(self, name: str) -> list[Track]:
        return [Track(f"common/{name}-{i}", f"{name}/{i}") for i in range(SMALL_FILES)]

    def begin(self, root: Path) -> None:
        super().begin(root)
        (root.parent / "common").mkdir(exist_ok=True)
        for track in self.tracks:
            self.expect(track, self.found(track, root.parent / track.path))

    def turn(self, root: Path) -> None:
        for track in self.source.sample(self.tracks, 4):
            path = root.parent / track.path
            if path.exists() and self.source.random() < 0.2:
                self.step(track, functools.partial(_delete, path), absent=True)
            else:
                self.step(track, functools.partial(self._write, path, track))

    def _write(self, path: Path, track: Track, number: int) -> None:
        self.put(path, build_version(track.origin, number))


def _delete(path: Path, _: int) -> None:
    path.unlink()


KINDS = (Gromacs, Torch, Small)
