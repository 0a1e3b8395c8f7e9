"""Blocks that files on the PFS share: they are cloned into a temporary file instead of written.

A clone is made by the PFS itself. Nothing is believed of it: the copy that follows compares every piece with the content, as it does with
what an interrupted copy left, and writes what differs. So the files on the PFS may be changed by other programs at any time (P4).

If we die here: a temporary file with some right blocks, which the next mover resumes or removes.
"""

import logging
import os
from pathlib import Path

from ckptfs import disk, limits
from ckptfs.catalog import pfs_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.pfs_state import PublishedRow
from ckptfs.errors import CkptfsError
from ckptfs.tiers import pfs_tree, reflink
from ckptfs.tiers.reflink import BlockIndex

log = logging.getLogger(__name__)

FILES_MAX = 4096
"""Files on the PFS whose blocks are loaded at the first use."""


class PfsBlocks:
    """The blocks of files that this node has written back lately. Used by the write-back lane."""

    def __init__(self, db: Database, pfs: Path | None) -> None:
        self._db = db
        self._pfs = pfs
        self._index: BlockIndex | None = None
        self._can_share: bool | None = None
        """None until the PFS was asked."""
        self._sharing: set[int] = set()

    def has_any(self, fd: int, size: int) -> bool:
        """Return whether an empty temporary file may share blocks; digests are worth waiting for then."""
        if self._can_share is False or size < limits.SHARED_BYTES_MIN or os.fstat(fd).st_size or self._load().is_empty:
            return False
        if self._can_share is None:
            self._can_share = reflink.is_possible(fd)
            log.info("%s: %s", self._pfs, "equal blocks are stored once" if self._can_share else "the filesystem cannot share blocks")
        return self._can_share

    def clone_into(self, fd: int, inode: int, size: int, block_digests: bytes) -> None:
        """Clone what other files on the PFS have into an empty temporary file; the copy does the rest."""
        if not self.has_any(fd, size):
            return
        by_file: dict[int, list[tuple[int, int]]] = {}
        for number, (other, there) in self._load().find(block_digests).items():
            by_file.setdefault(other, []).append((number, there))
        for other, blocks in by_file.items():
            try:
                self._clone_from(other, blocks, fd, size)
            except (OSError, CkptfsError) as failure:
                log.debug("inode %d: shares no blocks with inode %d on the PFS: %s", inode, other, failure)
            else:
                self._sharing |= {inode, other}

    def _clone_from(self, other: int, blocks: list[tuple[int, int]], fd: int, size: int) -> None:
        assert self._pfs is not None
        with disk.closing(pfs_tree.open_inode(self._db, self._pfs, other)) as source:
            for number, there in blocks:
                start = number * limits.BLOCK_BYTES
                reflink.clone_range(source, there * limits.BLOCK_BYTES, fd, start, min(limits.BLOCK_BYTES, size - start))

    def record(self, rows: list[PublishedRow]) -> None:
        """Note what the PFS shows now: the next files may share its blocks."""
        if self._index is not None:
            for row in rows:
                if row.block_digests and row.size >= limits.SHARED_BYTES_MIN:
                    self._index.add(row.inode, row.block_digests)
        if self._sharing:
            pfs_state.mark_sharing(self._db, self._sharing)
            self._sharing = set()

    def _load(self) -> BlockIndex:
        if self._index is None:
            self._index = BlockIndex()
            for inode, block_digests in reversed(pfs_state.list_recent_blocks(self._db, limits.SHARED_BYTES_MIN, FILES_MAX)):
                self._index.add(inode, block_digests)
        return self._index
