"""The probable sizes of new files: those of the last files at the same place in their series.

A file is looked up by its kind first, its name without numbers: that costs nothing for small files. A large file is then looked up by its
place (`patterns.get_place`), because the files of one set may differ in size. Sizes of large files are recorded in the RAM tier as well,
where the mover reads what to prepare.

Crash safety: the next mount process loads what was recorded. It learns the kinds again.
"""

import contextlib
import hashlib
import logging
import re

from ckptfs import limits
from ckptfs.bounded_table import BoundedTable
from ckptfs.catalog import namespace
from ckptfs.catalog.database import Database
from ckptfs.series import patterns
from ckptfs.tiers.prepared import PreparedFiles

log = logging.getLogger(__name__)
_PLACE_BYTES = 16
_DIGITS = re.compile(rb"\d+")


class ExpectedSizes:
    """Sizes by kind and by place. Belongs to the trio thread."""

    def __init__(self, db: Database, prepared: PreparedFiles) -> None:
        self._db = db
        self._prepared = prepared
        self._by_kind = BoundedTable[bytes, int](limits.EXPECTED_NAMES_MAX)
        self._large_kinds = BoundedTable[bytes, None](limits.EXPECTED_NAMES_MAX)
        """Kinds of which a file was large: only their files have a place."""
        self._by_place: BoundedTable[bytes, int] | None = None
        self._has_restored_places = False

    def get(self, directory: int, name: bytes) -> int:
        """Return the probable size of a new file, 0 if unknown."""
        places, kind = self._load_places(), _strip_numbers(name)
        expected = self._by_kind.get(kind, 0)
        # After a restart of this process, places are known and kinds are not.
        if kind in self._large_kinds or (self._has_restored_places and kind not in self._by_kind):
            return places.get(self._get_place(directory, name), expected)
        return expected

    def record(self, directory: int, name: bytes, size: int) -> None:
        """Remember the size of a file that its last writer has closed, by where it was created."""
        places, kind, is_large = self._load_places(), _strip_numbers(name), size >= limits.PREPARED_BYTES_MIN
        self._by_kind[kind] = size
        if is_large:
            self._large_kinds[kind] = None
        elif kind not in self._large_kinds:
            return
        place = self._get_place(directory, name)
        if not is_large and place not in places:
            return
        places[place] = size
        with contextlib.suppress(OSError):  # Then the next file of this place is not prepared.
            self._prepared.record_size(place, size)

    def _load_places(self) -> BoundedTable[bytes, int]:
        if self._by_place is None:
            self._by_place = BoundedTable(limits.PREPARED_PLACES_MAX)
            with contextlib.suppress(OSError):
                for one in reversed(self._prepared.prune_expected()):
                    self._by_place[one.place] = one.size_bytes
            self._has_restored_places = bool(self._by_place)
        return self._by_place

    def _get_place(self, directory: int, name: bytes) -> bytes:
        path = namespace.get_path(self._db, directory) + b"/" + name
        return hashlib.blake2b(patterns.get_place(path), digest_size=_PLACE_BYTES).digest()


def _strip_numbers(name: bytes) -> bytes:
    """Return the name without its numbers, which all files of a series share."""
    return _DIGITS.sub(b"#", name)
