"""Owns what files that are still being written held when another node asked for them: digests, as generations of their own.

A reader on another node sees what was written so far, as on this one. The blocks come from the open file itself; those that have changed
since no longer have their digests, and the reader asks anew. If we die here: readers ask anew.
"""

import os
import threading
from collections import OrderedDict
from dataclasses import replace

from ckptfs import digest, limits
from ckptfs.catalog import peers, settling
from ckptfs.catalog.database import Database
from ckptfs.clique.shelf import OpenCopy
from ckptfs.model import ContentState, CopyState, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.place import Place, Places

KEPT_MAX = 64

transfer.labels("hold:open")


class OpenStates:
    """The last ones that were asked for. Used by several threads."""

    def __init__(self, db: Database, places: Places) -> None:
        self._db = db
        self._places = places
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, bytes], OpenCopy] = OrderedDict()

    def now(self, content: int) -> OpenCopy | None:
        """What an open content holds now; None when it is not open, or lies where nobody else may read."""
        place = self._place(content)
        if place is None:
            return None
        fd = place.open(content)
        try:
            # The number first: of two states the one with the higher number was read later, and lacks nothing that the other one has.
            seen = peers.record_open_snapshot(self._db, content)
            size, whole, blocks = transfer.read(fd, label="hold:open")
            if seen is None or not self._is_open(content) or len(blocks) != digest.BLOCK_DIGEST_BYTES * -(-size // limits.BLOCK_BYTES):
                os.close(fd)
                return None
        except BaseException:
            os.close(fd)
            raise
        loan = OpenCopy(content, seen.inode, seen.generation, size, whole, blocks, fd)
        with self._lock:
            self._kept[content, whole] = replace(loan, fd=-1)
            while len(self._kept) > KEPT_MAX:
                self._kept.popitem(last=False)
        return loan

    def lend(self, content: int, whole: bytes | None) -> tuple[OpenCopy, Place] | None:
        """The state of an open content that has this digest; None: nobody asked for one."""
        with self._lock:
            kept = None if whole is None else self._kept.get((content, whole))
        place = self._place(content)
        if kept is None or place is None:
            return None
        return replace(kept, fd=place.open(content)), place

    def _is_open(self, content: int) -> bool:
        known = settling.get_content(self._db, content)
        return known is not None and known.state is ContentState.OPEN

    def _place(self, content: int) -> Place | None:
        good = [copy.tier for copy in settling.list_copies(self._db, content) if copy.state is CopyState.GOOD and copy.tier is not Tier.PFS]
        return self._places.get(good[0]) if good else None
