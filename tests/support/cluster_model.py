"""What readers of a cluster may see, for the storm: every byte follows from what wrote it, so each answer can be told for what it is.

A `Track` is one path, or one family of paths, with one writer at a time. `latest` was begun, `closed` was finished by its writer, `floor`
was finished while the writer reached everybody, `durable` had reached the clique. A number may stand for a deletion (`absent`).
"""

import random
import threading
from dataclasses import dataclass, field
from functools import lru_cache

RECORD_BYTES = 4096
SMALL, LARGE = (100, 60_000), (1_000_000, 6_000_000)


@lru_cache(maxsize=32)
def version_bytes(origin: str, number: int) -> bytes:
    source = random.Random(f"{origin}:{number}")
    size = source.randint(*(LARGE if source.random() < 0.2 else SMALL))
    return f"{origin}:{number}\n".encode() + source.randbytes(size)


def number_of(origin: str, data: bytes) -> int:
    """Which version these bytes are. Raises AssertionError for what nobody wrote."""
    told, _, number = data[:200].partition(b"\n")[0].decode(errors="replace").rpartition(":")
    if told != origin or not number.isdigit():
        raise AssertionError(f"{origin}: begins with {data[:60]!r}, {len(data)} bytes", data)
    if data != version_bytes(origin, int(number)):
        raise AssertionError(f"{origin}: version {number} is mixed or damaged, {len(data)} bytes", data)
    return int(number)


class History:
    """What a log may hold: what its writer appended, and what former writers did whose last records were lost."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._life = 0
        self.now = bytearray()
        self._former: list[bytes] = []

    def resume(self, records: int) -> None:
        """A new writer found so many records."""
        self._life += 1
        self._former.append(bytes(self.now))
        del self.now[records * RECORD_BYTES :]

    def more(self, count: int) -> bytes:
        begin = len(self.now) // RECORD_BYTES
        new = b"".join(random.Random(f"{self._origin}:{self._life}:{begin + i}").randbytes(RECORD_BYTES) for i in range(count))
        self.now += new
        return new

    def records(self, data: bytes, *, newest: bool) -> int:
        """How many whole records these are. Raises AssertionError for what nobody wrote or, with `newest`, what was given up."""
        known = [bytes(self.now)] if newest else [bytes(self.now), *self._former]
        if not any(one.startswith(data) for one in known):
            common = max(_common(one, data) for one in known)
            raise AssertionError(f"{self._origin}: {len(data)} bytes are no beginning of the log, which differs from byte {common} on")
        return len(data) // RECORD_BYTES


def _common(one: bytes, other: bytes) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass
class Track:
    """See above. `lost`: the last writer's node lost what it had before `latest` was safe. `life`: counts the deaths of its node.
    `broken` was being written when its writer's node died.
    """

    path: str
    origin: str
    history: History | None = None
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
        with self.lock:
            self.latest, self.writer = number, writer
            if absent:
                self.absent.add(number)

    def done(self, number: int, *, seen_by_all: bool) -> None:
        with self.lock:
            self.closed, self.lost = number, False
            if seen_by_all:
                self.floor = number

    def safe(self, number: int) -> None:
        with self.lock:
            if self.latest == self.closed == self.floor == number and not self.lost:
                self.durable = number

    def acknowledged(self, number: int) -> None:
        with self.lock:
            if not self.lost:
                self.durable = max(self.durable, number)

    def wiped(self, writer: int) -> None:
        with self.lock:
            if self.writer == writer and self.latest > self.durable:
                self.closed = self.floor = self.durable
                self.lost = True

    def killed(self, writer: int) -> None:
        """A node is away with what it has; until it is back, the others may show what had reached the clique."""
        with self.lock:
            if self.writer == writer:
                self.floor = self.durable

    def broken_off(self, writer: int) -> None:
        """A node has died: what somebody was writing there in place stays as far as it came, as on any filesystem."""
        with self.lock:
            if self.writer == writer and self.latest > self.closed:
                self.broken = self.latest

    def is_broken_off(self, data: bytes) -> bool:
        """Whether these are the first bytes of that."""
        return bool(self.broken) and self._in_place and version_bytes(self.origin, self.broken).startswith(data)

    def returned(self) -> None:
        with self.lock:
            self.floor = max(self.floor, self.closed)

    def may_show(self, found: int | None, floor: int, *, strict: bool) -> bool:
        """Whether a reader may see this (None: nothing there), which began to read when `floor` was so."""
        with self.lock:
            low = floor if strict else 0
            if found is None:
                # A version that is being written, or was when its writer died, may have taken the name away.
                return any(low <= number <= self.latest for number in self.absent) or (
                    self.latest > min(floor, self.floor) and self.loose_name
                )
            return low <= found <= self.latest

    def is_being_written(self, data: bytes, floor: int) -> bool:
        """Whether these are the first bytes of a version that was being written in place while somebody read it: that is what it holds."""
        return self._in_place and any(version_bytes(self.origin, number).startswith(data) for number in range(floor + 1, self.latest + 1))

    def is_written_over(self, data: bytes, floor: int) -> bool:
        """Whether these are the first bytes of a version, and after them what there is of a later one, if anything, which was written in
        its place while somebody on the same node read it: it is one file, as on any filesystem. Other nodes read what was sealed.
        """
        known = [version_bytes(self.origin, number) for number in range(floor, self.latest + 1) if number not in self.absent]
        pairs = [(old, new) for place, old in enumerate(known) for new in (b"", *known[place + 1 :])]
        return self._in_place and any(data[(same := _common(old, data)) :] == new[same : len(data)] for old, new in pairs)

    @property
    def _in_place(self) -> bool:
        return self.history is None and not self.origin.endswith(("cpt", "best", "step"))

    @property
    def hopeless(self) -> bool:
        """Whether nothing of it need be left: what was safe was deleted or has another name by now, or nothing ever was."""
        return not self.durable or self.path.endswith("/run.cpt") or any(self.durable <= number <= self.latest for number in self.absent)

    @property
    def loose_name(self) -> bool:
        """Whether its name is missing for a moment when it is replaced."""
        return self.origin.endswith("cpt")
