"""Snapshots of files that are still written: for a peer that reads one, a generation of its own.

If we die here: the snapshots are forgotten. A peer asks for a new one.
"""

import os
import threading
from dataclasses import replace

from ckptfs import digest, disk
from ckptfs.bounded_table import BoundedTable
from ckptfs.catalog import contents, copies, peer_copies
from ckptfs.catalog.database import Database
from ckptfs.clique.peer_api import OpenCopy
from ckptfs.model import ContentState, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.storage import Tiers, TierStorage

SNAPSHOTS_MAX = 64
transfer.declare_labels("host:open")


class OpenFileSnapshots:
    """The latest snapshots of open files, and of deleted unsealed ones. Thread-safe."""

    def __init__(self, db: Database, tiers: Tiers) -> None:
        self._db = db
        self._tiers = tiers
        self._lock = threading.Lock()
        self._snapshots = BoundedTable[tuple[int, bytes], OpenCopy](SNAPSHOTS_MAX)

    def take_snapshot(self, content: int) -> OpenCopy | None:
        """Return the present state of an open or doomed content; None if it is neither or cannot be read."""
        storage = self._find_storage(content)
        if storage is None:
            return None
        with disk.closing_on_failure(storage.open(content)) as fd:
            # The number first: of two states the one with the higher number was read later, and lacks nothing that the other one has.
            snapshot = peer_copies.record_open_snapshot(self._db, content) or contents.get_content(self._db, content)
            size, whole, blocks = transfer.read(fd, label="host:open")
            if snapshot is None or not digest.has_all_digests(blocks, size) or not self._is_unsealed(content):
                os.close(fd)
                return None
        opened = OpenCopy(content, snapshot.inode, snapshot.generation, size, whole, blocks, fd=fd)
        with self._lock:
            self._snapshots[content, whole] = replace(opened, fd=-1)
        return opened

    def open_snapshot(self, content: int, wanted_digest: bytes | None) -> tuple[OpenCopy, TierStorage] | None:
        """Open the snapshot of an open content with this digest. Returns None if no peer asked for it."""
        with self._lock:
            snapshot = None if wanted_digest is None else self._snapshots.get((content, wanted_digest))
        storage = self._find_storage(content)
        if snapshot is None or storage is None:
            return None
        return replace(snapshot, fd=storage.open(content)), storage

    def _is_unsealed(self, content: int) -> bool:
        known = contents.get_content(self._db, content)
        return known is not None and known.state in (ContentState.OPEN, ContentState.DOOMED)

    def _find_storage(self, content: int) -> TierStorage | None:
        tiers = copies.list_good_tiers(self._db, content, self._tiers.keys() - {Tier.PFS})
        return self._tiers[tiers[0]] if tiers else None
