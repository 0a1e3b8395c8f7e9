"""Owns how a file whose blocks' digests are known comes from the PFS: block by block, each found right before it is written, so that the
application reads it as it comes. What somebody waits for is read first, then what follows it.

If we die here: the target has some of the blocks, and no copy counts yet.

Owns that one reading of the PFS serves many nodes (G4): who reads a file there claims it first, the others wait and take it from there.

A claim ends with the lease of its node, so nobody waits for the dead; whom a slow one keeps waiting for too long reads for itself. Without
the store nobody can say, and each does for itself.
If we die here: the claim runs out, and what was read and not told of is found by nobody but this node.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ckptfs import digest, disk, limits
from ckptfs.catalog import contents, copies, peer_copies, remote_contents
from ckptfs.catalog.copies import FetchState
from ckptfs.catalog.database import Database
from ckptfs.clique import locations
from ckptfs.clique.cluster import Cluster
from ckptfs.coherence import pfs_coordination
from ckptfs.errors import Busy, CkptfsError, StoreRefused, StoreUnreachable
from ckptfs.flow.fetch.fetch_progress import BlockProgress
from ckptfs.model import Content, CopyState
from ckptfs.tiers.transfer import WriteBehind


class BlockwiseCopy:
    """One file: `blocks` are its blocks' digests, joined. The target is as long as the file, and empty."""

    def __init__(self, size: int, blocks: bytes) -> None:
        self.size = size
        self._digests = digest.split_digests(blocks)
        self.missing_blocks = [number for number, wanted in enumerate(self._digests) if wanted != digest.ZERO_BLOCK]

    def copy(self, source: int, target: int, progress: BlockProgress) -> bool:
        """Copy what is lacking. False when a block on the PFS is not what it should be; nothing of it was written."""
        remaining = deque(self.missing_blocks)
        write_behind, expected = WriteBehind(target), 0
        while remaining:
            self._prioritize_awaited(remaining, progress)
            number = remaining.popleft()
            data = self._read_block(source, number)
            if digest.hash_block(data) != self._digests[number]:
                return False
            if number != expected:
                write_behind = WriteBehind(target, number * limits.BLOCK_BYTES)
            disk.write_all("fetch:write", target, data, number * limits.BLOCK_BYTES)
            write_behind.advance(number * limits.BLOCK_BYTES + len(data))
            expected = number + 1
            progress.mark_present(number)
        return True

    def _prioritize_awaited(self, remaining: deque[int], progress: BlockProgress) -> None:
        awaited = next((number for number in progress.list_awaited() if number in remaining), None)
        if awaited is not None:
            remaining.rotate(-remaining.index(awaited))

    def _read_block(self, source: int, number: int) -> bytes:
        """A whole block; less where the file is shorter."""
        start, pieces = number * limits.BLOCK_BYTES, list[bytes]()
        end = min(start + limits.BLOCK_BYTES, self.size)
        while start < end and (piece := disk.act("fetch:read", os.pread, source, end - start, start)):
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)


class FetchedElsewhere(Busy):
    """Another node reads it, or has read it: look again soon."""


class PfsSingleFlight:
    """Which of the nodes reads what. Several threads may ask at once."""

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster
        self._waiting_since_s: dict[int, float] = {}
        self._lock = threading.Lock()
        self._pause = threading.Event()

    @contextmanager
    def hold_lock(self, found: FetchState) -> Iterator[None]:
        """While this node reads a file on the PFS. Raises Elsewhere when it had better wait for another one."""
        assert found.published is not None
        locks, claim = self._cluster.claims, None
        if locks is None or found.published.size < limits.FETCH_SHARED_BYTES_MIN:
            yield
            return
        try:
            with suppress(StoreUnreachable, StoreRefused):
                claim = locks.try_acquire(_get_lock_name(found))
                if claim is None and self._should_wait(found):
                    raise FetchedElsewhere("another node reads it from the PFS just now")
                if claim is not None and self._has_copy_elsewhere(found):
                    raise FetchedElsewhere("another node has read it from the PFS")
            self._stop_waiting(found)
            yield
            self._announce(found)
        finally:
            if claim is not None:
                with suppress(CkptfsError):
                    locks.release(claim)

    def _should_wait(self, found: FetchState) -> bool:
        """Whether to go on waiting for the other one."""
        assert found.published is not None
        with self._lock:
            waiting_since_s = self._waiting_since_s.setdefault(found.inode, time.monotonic())
        return time.monotonic() - waiting_since_s < limits.FETCH_SHARED_WAIT_S + found.published.size / limits.FETCH_SHARED_BYTES_PER_S

    def _stop_waiting(self, found: FetchState) -> None:
        with self._lock:
            self._waiting_since_s.pop(found.inode, None)

    def _has_copy_elsewhere(self, found: FetchState) -> bool:
        """Whether somebody has it of whom was nothing known when we set out for the PFS."""
        if found.content is None:
            pfs_coordination.load_inodes(self._db, self._cluster.store, found.inode)
            return copies.get_content_id(self._db, found.inode) is not None
        known_holders = set(peer_copies.list_holders(self._db, found.content))
        locations.refresh(self._db, self._cluster.store, [found.content.id], self._cluster.node_number)
        content = contents.get_content(self._db, found.content.id) or found.content
        return bool(self._cluster.list_live([node for node in peer_copies.list_holders(self._db, content) if node not in known_holders]))

    def _announce(self, found: FetchState) -> None:
        """The others shall know of the copy before they may read the PFS themselves."""
        number = copies.get_content_id(self._db, found.inode)
        content = None if number is None else contents.get_content(self._db, number)
        if content is None or not self._has_local_copy(content):
            return
        if found.content is None:
            self._wait_published(found.inode)
            return
        with suppress(StoreUnreachable, StoreRefused):
            locations.announce(self._cluster.store, self._cluster.node_number, [(content, True)])

    def _has_local_copy(self, content: Content) -> bool:
        return any(copy.state is CopyState.GOOD for copy in copies.list_copies(self._db, content.id))

    def _wait_published(self, inode: int) -> None:
        """A file that had no content before: that it has one now is told like every change of a file, in a moment."""
        end_s = time.monotonic() + limits.PUBLISHED_WAIT_S
        while not remote_contents.was_in_store(self._db, inode) and time.monotonic() < end_s:
            self._pause.wait(limits.STORE_PUBLISHED_POLL_S)


def _get_lock_name(found: FetchState) -> str:
    return f"fetch/file/{found.inode:016x}" if found.content is None else f"fetch/{found.content.id:016x}"
