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
from ckptfs.tiers.place import Tiers, TierStorage

SNAPSHOTS_MAX = 64

transfer.declare_labels("hold:open")


class OpenFileSnapshots:
    """The last ones that were asked for. Used by several threads."""

    def __init__(self, db: Database, tiers: Tiers) -> None:
        self._db = db
        self._tiers = tiers
        self._lock = threading.Lock()
        self._snapshots: OrderedDict[tuple[int, bytes], OpenCopy] = OrderedDict()

    def take_snapshot(self, content: int) -> OpenCopy | None:
        """What an open content holds now; None when it is not open, or lies where nobody else may read."""
        storage = self._find_storage(content)
        if storage is None:
            return None
        fd = storage.open(content)
        try:
            # The number first: of two states the one with the higher number was read later, and lacks nothing that the other one has.
            snapshot = peers.record_open_snapshot(self._db, content)
            size, whole, blocks = transfer.read(fd, label="hold:open")
            if snapshot is None or not self._is_open(content) or len(blocks) != digest.BLOCK_DIGEST_BYTES * -(-size // limits.BLOCK_BYTES):
                os.close(fd)
                return None
        except BaseException:
            os.close(fd)
            raise
        opened = OpenCopy(content, snapshot.inode, snapshot.generation, size, whole, blocks, fd)
        with self._lock:
            self._snapshots[content, whole] = replace(opened, fd=-1)
            while len(self._snapshots) > SNAPSHOTS_MAX:
                self._snapshots.popitem(last=False)
        return opened

    def open_snapshot(self, content: int, wanted_digest: bytes | None) -> tuple[OpenCopy, TierStorage] | None:
        """The state of an open content that has this digest; None: nobody asked for one."""
        with self._lock:
            snapshot = None if wanted_digest is None else self._snapshots.get((content, wanted_digest))
        storage = self._find_storage(content)
        if snapshot is None or storage is None:
            return None
        return replace(snapshot, fd=storage.open(content)), storage

    def _is_open(self, content: int) -> bool:
        known = settling.get_content(self._db, content)
        return known is not None and known.state is ContentState.OPEN

    def _find_storage(self, content: int) -> TierStorage | None:
        good_tiers = [
            copy.tier for copy in settling.list_copies(self._db, content) if copy.state is CopyState.GOOD and copy.tier is not Tier.PFS
        ]
        return self._tiers.get(good_tiers[0]) if good_tiers else None
