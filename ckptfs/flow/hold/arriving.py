"""Owns one content on its way here: its file under a reserved id, and which of its blocks are in place.

Invariant: `present` names only blocks whose digest was found right in the file, by us or by the server as they came.
If we die here: the FILLING copy and its file are removed by recovery.
"""

import contextlib
import errno
import os
import time

from ckptfs import digest, disk, limits
from ckptfs.catalog import fetching
from ckptfs.catalog.database import Database
from ckptfs.clique.shelf import UNKNOWN_BLOCK, Offer
from ckptfs.errors import CkptfsError, NoSpace
from ckptfs.tiers import transfer
from ckptfs.tiers.place import Place

transfer.labels("hold")
disk.declare_labels("hold:create", "hold:allocate")


class Arriving:
    """A reception between its first offer and its end. Used by one thread at a time."""

    def __init__(self, place: Place, number: int, fd: int, offer: Offer) -> None:
        self.place = place
        self.number = number
        self.fd = fd
        self.offer = offer
        self.lacking: list[int] = []
        self.done = False
        """All of it was here before: there is nothing to receive, and nothing to make of it."""
        self.fresh = True
        """Nothing was looked for on this node yet."""
        self.begun = False
        """A peer has sent some of it."""
        self.idle_s = time.monotonic()
        self._present: dict[int, bytes] = {}
        self._doubtful: set[int] = set()
        self._allocated = 0
        self._sources: list[tuple[Place, int, dict[bytes, int]]] = []

    @classmethod
    def begin(cls, db: Database, place: Place, offer: Offer) -> "Arriving":
        """A new file for an offer. Raises NoRoom."""
        number = fetching.insert_reserved_copy(db, place.tier)
        try:
            place.remove(number)
            return cls(place, number, disk.act("hold:create", place.create, number), offer)
        except BaseException:
            _tidy(db, place, number)
            raise

    @classmethod
    def whole(cls, offer: Offer, place: Place, fd: int) -> "Arriving":
        """What is here already."""
        arriving = cls(place, 0, fd, offer)
        arriving.done = True
        return arriving

    def aim(self, offer: Offer) -> None:
        """From now on `offer` is what shall come; `lacking` is what it takes."""
        self.offer = offer
        if self.done:
            return
        digests = digest.split_digests(offer.blocks)
        self._stretch(offer.size, digests)
        self._present = {number: known for number, known in self._present.items() if number < len(digests)}
        buffer = _Buffer()
        for number in sorted(self._doubtful):
            if (
                number < len(digests)
                and digests[number] != UNKNOWN_BLOCK
                and digest.hash_block(buffer.read(self.fd, number)) == digests[number]
            ):
                self._present[number] = digests[number]
        self._doubtful = set()
        if self.fresh:
            # A hole reads as zeros, and need not come.
            self._present |= {number: known for number, known in enumerate(digests) if known == digest.ZERO_BLOCK}
        self._find_lacking(digests)

    def _find_lacking(self, digests: list[bytes]) -> None:
        self.lacking = [number for number, wanted in enumerate(digests) if wanted != UNKNOWN_BLOCK and self._present.get(number) != wanted]

    def _stretch(self, size: int, digests: list[bytes]) -> None:
        """The file's length, and room for all that is no hole."""
        os.ftruncate(self.fd, size)
        try:
            for start, end in _runs(digests):
                first, last = max(start * limits.BLOCK_BYTES, self._allocated), min(end * limits.BLOCK_BYTES, size)
                if first < last:
                    disk.act("hold:allocate", os.posix_fallocate, self.fd, first, last - first)
        except OSError as failure:
            if failure.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise NoSpace(f"{self.place.tier} is full") from failure
        self._allocated = size

    def know(self, place: Place, content: int, joined: bytes | None) -> None:
        """A file here that may have blocks of this one. `joined`: its digests; None: they are found out now."""
        if joined is None:
            joined = _read_digests(place, content)
        self._sources.append((place, content, {known: number for number, known in enumerate(digest.split_digests(joined))}))

    def take_from_here(self) -> None:
        """Copy what blocks those files have in common with what is lacking."""
        digests = digest.split_digests(self.offer.blocks)
        buffer = _Buffer()
        for place, content, index in self._sources:
            wanted = [number for number in self.lacking if digests[number] in index]
            if wanted:
                with contextlib.suppress(FileNotFoundError), disk.closing(place.open(content)) as fd:
                    for number in wanted:
                        self._take_block(buffer.read(fd, index[digests[number]]), number, digests[number])
                self._find_lacking(digests)

    def _take_block(self, data: memoryview, here: int, wanted: bytes) -> None:
        """Put a block of another file in place, if it is what it is said to be."""
        if digest.hash_block(data) == wanted:
            disk.write_all("hold:write", self.fd, data, here * limits.BLOCK_BYTES)
            self._present[here] = wanted

    def came(self) -> None:
        """All that was lacking is in place, and right."""
        digests = digest.split_digests(self.offer.blocks)
        for number in self.lacking:
            self._present[number] = digests[number]
        self.begun |= bool(self.lacking)
        self.lacking = []

    def doubt(self) -> None:
        """Of what was lacking some may have come."""
        self.begun = True
        self._doubtful = set(self.lacking)
        for number in self.lacking:
            self._present.pop(number, None)
        self.lacking = []

    def right(self) -> bool:
        """Whether every block of the offer is in place, and the file as long as it says."""
        present = all(self._present.get(number) == wanted for number, wanted in enumerate(digest.split_digests(self.offer.blocks)))
        return present and os.fstat(self.fd).st_size == self.offer.size

    def close(self) -> None:
        """Give the descriptor back."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def give_up(self, db: Database) -> None:
        """Throw away what came."""
        self.close()
        if self.number:
            _tidy(db, self.place, self.number)


def _tidy(db: Database, place: Place, number: int) -> None:
    with contextlib.suppress(OSError, CkptfsError):
        place.remove(number)
    fetching.delete_filling_copy(db, number, place.tier)


class _Buffer:
    """One block's room, used over and over: fresh memory for each would cost more than the reading."""

    def __init__(self) -> None:
        self._bytes: memoryview | None = None

    def read(self, fd: int, number: int) -> memoryview:
        """A block of a file, until the next is read."""
        if self._bytes is None:
            self._bytes = memoryview(bytearray(limits.BLOCK_BYTES))
        count = disk.act("hold:read", os.preadv, fd, [self._bytes], number * limits.BLOCK_BYTES)
        return self._bytes[:count]


def _read_digests(place: Place, content: int) -> bytes:
    """The digests of a file's blocks; none of a file that is gone."""
    try:
        fd = place.open(content)
    except FileNotFoundError:
        return b""
    with disk.closing(fd):
        return transfer.read(fd, label="hold")[2]


def _runs(digests: list[bytes]) -> list[tuple[int, int]]:
    """(first, end) of the blocks that are no holes, joined where they touch."""
    runs: list[tuple[int, int]] = []
    for number, wanted in enumerate(digests):
        if wanted == digest.ZERO_BLOCK:
            continue
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
