"""What readers of a cluster may see during a campaign.

Every byte follows from the version that was written. Pure.

A `Track` is one path, or one family of paths, with one writer at a time. Version `latest` was begun, `closed` was finished by its writer,
`floor` was finished while the writer reached all nodes, `durable` had reached the clique. A number may stand for a deletion (`absent`).
"""

import random
import threading
from dataclasses import dataclass, field
from functools import lru_cache

RECORD_BYTES = 4096
SMALL, LARGE = (100, 60_000), (1_000_000, 6_000_000)


class WrongContent(AssertionError):
    """Bytes that no application wrote. The second argument has them."""


class ContentMissing(AssertionError):
    """A version that had reached the clique, and is not there."""


@lru_cache(maxsize=32)
def build_version(origin: str, number: int) -> bytes:
    """Return the bytes of a version."""
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

    `lost`: the node of the last writer lost what it had before `latest` was safe. `broken` was being written when the writer's node died.
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

    def mark_returned(self) -> None:
        """Note that all nodes are back."""
        with self.lock:
            self.floor = max(self.floor, self.closed)

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
