"""Reads of the PFS for fetches.

If each block's digest is known, the file is copied block by block, and each block is verified before it is written. The application
reads blocks as they arrive; blocks that it waits for are copied first.

One node reads a file for all (G4): it holds a cluster lock, and the other nodes wait and take the file from there. The lock ends with
the lease of its node. A node that has waited too long reads the file itself, and so does a node that cannot reach the store.

If we die here: a FILLING copy and its file, which recovery removes. The lock expires.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

from ckptfs import digest, disk, limits
from ckptfs.catalog import copies, mover_requests, remote_contents
from ckptfs.catalog.copies import FetchedContent, FetchState
from ckptfs.catalog.database import Database
from ckptfs.clique import locations
from ckptfs.clique.cluster import Cluster
from ckptfs.coherence import pfs_coordination
from ckptfs.config import Config
from ckptfs.errors import Busy, CkptfsError, DigestMismatch, StoreRefused, StoreUnreachable
from ckptfs.flow.fetch.fetch_progress import BlockProgress, FetchProgress, OthersFirst
from ckptfs.model import Content, ContentState, Notifier, Tier
from ckptfs.tiers import health, local_copies, pfs_tree, transfer
from ckptfs.tiers.storage import Tiers, TierStorage
from ckptfs.tiers.transfer import WriteBehind

log = logging.getLogger(__name__)
transfer.declare_labels("fetch")
disk.declare_labels("fetch:check:read", "fetch:reserved", "fetch:fsync", "fetch:directory", "fetch:arrived")


class PfsFetcher:
    """Copies files from the PFS. Several threads may do so at once, each for another file."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, cluster: Cluster | None) -> None:
        self._single_flight = None if cluster is None else PfsSingleFlight(db, cluster)
        self._db = db
        self._tiers = tiers
        self._root = config.pfs
        self._notify = notify

    def fetch(self, state: FetchState, tier: Tier | None, progress: FetchProgress) -> str:
        """Copy a file into `tier`, or the PFS's own, or verify it in place. Raises OthersFirst and Busy."""
        with nullcontext(state) if self._single_flight is None else self._single_flight.hold_lock(state, progress) as locked:
            result = self._fetch_locked(locked, tier, progress)
            if self._single_flight is not None and result == mover_requests.FETCHED:
                self._single_flight.announce(locked)
        return result

    def _fetch_locked(self, state: FetchState, tier: Tier | None, progress: FetchProgress) -> str:
        with disk.closing(self._open(state)) as source:
            if tier is not None and self._try_copy(state, tier, source, progress):
                return mover_requests.FETCHED
            if progress.is_copy_required:
                self._copy(state, self._tiers[Tier.PFS], source, progress)
                return mover_requests.FETCHED
            self._verify_in_place(state, source, progress)
        return mover_requests.DIRECT

    def _open(self, state: FetchState) -> int:
        """Open the file in its known state; otherwise request a scan and raise Busy."""
        assert self._root is not None
        try:
            return pfs_tree.open_published(self._root, state)
        except OSError as failure:
            if failure.errno in pfs_tree.REPLACED_ERRNOS:
                raise self._request_scan(state) from failure
            raise

    def _request_scan(self, state: FetchState) -> Busy:
        mover_requests.insert_request(self._db, mover_requests.SCAN, state.pfs_parent, mover_requests.COMPARE_AGAIN)
        self._notify.wake_lanes()
        return Busy("the PFS shows another file than the one that is known")

    def _try_copy(self, state: FetchState, tier: Tier, source: int, progress: FetchProgress) -> bool:
        """Copy a file into `tier`. Return False if the tier has filled up meanwhile."""
        try:
            self._copy(state, self._tiers[tier], source, progress)
        except OSError as failure:
            if failure.errno not in health.FULL_ERRNOS or tier is Tier.PFS:
                raise
            log.info("%s: no room is left in %s", state.path, tier)
            self._notify.wake_lanes()
            return False
        return True

    def _copy(self, state: FetchState, storage: TierStorage, source: int, progress: FetchProgress) -> None:
        if state.content is None:
            number = copies.insert_reserved_copy(self._db, storage.tier)
        elif copies.insert_filling_copy(self._db, state.content, storage.tier):
            number = state.content.id
        else:
            raise Busy("the file changed while it was fetched")
        progress.filling = number, storage.tier
        try:
            disk.reach("fetch:reserved")
            storage.remove(number)
            fetched = _copy_to_storage(state, storage, number, source, progress)
            self._verify(state, fetched.size, fetched.digest, source)
            if not disk.act("fetch:arrived", self._record, state, fetched, progress):
                raise Busy("the file changed while it was fetched")
        except BaseException:
            with suppress(OSError, CkptfsError):
                if storage.tier is Tier.PFS:
                    storage.remove(number)
            with self._db.transaction():
                if progress.filling is not None:
                    copies.delete_filling_copy(self._db, number, storage.tier)
            with suppress(OSError, CkptfsError):
                local_copies.remove_unrecorded(self._db, storage, number)
            raise

    def _record(self, state: FetchState, fetched: FetchedContent, progress: FetchProgress) -> bool:
        with self._db.transaction():
            return progress.filling is not None and copies.record_fetched(self._db, state, fetched)

    def _verify(self, state: FetchState, size: int, found: bytes, source: int) -> None:
        """Raise DigestMismatch if the bytes differ from the known ones, Busy if the file changed."""
        assert state.published is not None
        if not pfs_tree.matches_catalog(source, state.published):
            raise self._request_scan(state)
        known = state.content.digest if state.content is not None else state.published.digest
        if size != state.published.size or (known is not None and found != known):
            raise DigestMismatch("the file on the PFS does not have the digest that it was sealed with, and no other copy is left")

    def _verify_in_place(self, state: FetchState, source: int, progress: FetchProgress) -> None:
        """Verify a file on the PFS once if its digest is known: applications will read it there."""
        assert state.published is not None
        if state.published.digest is None or state.published.is_checked:
            return
        size, found, blocks = transfer.read(source, label="fetch:check", before_block=progress.extend_wait)
        self._verify(state, size, found, source)
        if not copies.record_pfs_verified(self._db, state, found, blocks):
            raise Busy("the file changed while it was read")


def is_shown_by_pfs(state: FetchState) -> bool:
    """Return whether the PFS shows exactly what the file must hold."""
    if state.published is None or not state.published.is_complete:
        return False
    content = state.content
    return content is None or (content.state is ContentState.SEALED and state.published.generation == content.generation)


def _copy_to_storage(state: FetchState, storage: TierStorage, number: int, source: int, progress: FetchProgress) -> FetchedContent:
    with disk.closing(storage.create(number)) as target:
        found = _copy_bytes(state.content, storage, source, target, progress)
        if storage.tier is not Tier.RAM:
            storage.persist(target, "fetch")
            if transfer.read(target, label="fetch:check", before_block=progress.extend_wait) != found:
                raise DigestMismatch(f"what was written to {storage.tier} reads back as something else")
    return FetchedContent(number, storage.tier, *found)


def _copy_bytes(
    content: Content | None, storage: TierStorage, source: int, target: int, progress: FetchProgress
) -> transfer.ContentDigests:
    """Copy a file, by blocks that are readable as they arrive if their digests are known."""
    if content is None or not _has_block_digests(content):
        storage.reserve_copy(target, source)
        return transfer.copy(source, target, label="fetch", before_block=progress.extend_wait)
    assert content.digest is not None and content.block_digests is not None
    disk.act("fetch:truncate", os.ftruncate, target, content.size)
    digests = digest.split_digests(content.block_digests)
    missing = [number for number, wanted in enumerate(digests) if wanted != digest.ZERO_BLOCK]
    storage.reserve_blocks(target, missing, content.size)
    with progress.publish_map(content, storage.tier, target, missing) as blocks:
        if os.fstat(source).st_size != content.size or not _copy_blocks(source, target, digests, missing, blocks):
            return 0, b"", b""
    return content.size, content.digest, content.block_digests


def _has_block_digests(content: Content) -> bool:
    """Return whether each block can be verified by itself. Small files arrive at once anyway."""
    if content.size <= limits.BLOCK_BYTES or not content.block_digests or content.digest is None:
        return False
    return digest.hash_content(content.block_digests, content.size) == content.digest


def _copy_blocks(source: int, target: int, digests: Sequence[bytes], missing: Sequence[int], progress: BlockProgress) -> bool:
    """Copy blocks into an empty file of the same size. Return False at one with a wrong digest."""
    remaining, buffer = deque(missing), transfer.BlockBuffer("fetch")
    write_behind, expected = WriteBehind(target), 0
    while remaining:
        awaited = next((number for number in progress.list_awaited() if number in remaining), None)
        if awaited is not None:
            remaining.rotate(-remaining.index(awaited))
        number = remaining.popleft()
        data = buffer.read(source, number)
        if digest.hash_block(data) != digests[number]:
            return False
        if number != expected:
            write_behind = WriteBehind(target, number * limits.BLOCK_BYTES)
        disk.write_all("fetch:write", target, data, number * limits.BLOCK_BYTES)
        write_behind.advance(number * limits.BLOCK_BYTES + len(data))
        expected = number + 1
        progress.mark_present(number)
    return True


class PfsSingleFlight:
    """The cluster locks under which one node reads a file from the PFS for all; any thread."""

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster
        self._pause = threading.Event()

    @contextmanager
    def hold_lock(self, state: FetchState, progress: FetchProgress) -> Iterator[FetchState]:
        """Hold the lock of a file; yield its fresh state. Raises OthersFirst to wait, Busy if it changed."""
        assert state.published is not None
        locks, lock = self._cluster.locks, None
        try:
            if state.published.size >= limits.FETCH_SHARED_BYTES_MIN:
                with suppress(StoreUnreachable, StoreRefused):
                    lock = locks.try_acquire(_get_lock_name(state))
                    if lock is None and progress.can_wait(state.published.size):
                        raise OthersFirst("another node reads it from the PFS just now")
            locked = self._load(state, is_locked=lock is not None)
            if lock is not None and self._is_fetched_elsewhere(state, locked):
                raise OthersFirst("another node has read it from the PFS")
            if locked is None or locked.has_local_copy or locked.content != state.content or not is_shown_by_pfs(locked):
                raise Busy("the file changed before it was fetched")
            yield locked
        finally:
            if lock is not None:
                with suppress(CkptfsError):
                    locks.release(lock)

    def announce(self, state: FetchState) -> None:
        """Announce a new copy before others may read the PFS, or wait for that of a new content."""
        if state.content is not None:
            with suppress(StoreUnreachable, StoreRefused):
                self._cluster.copy_records.announce([(state.content, True)])
            return
        end_s = time.monotonic() + limits.PUBLISHED_WAIT_S
        while not remote_contents.was_in_store(self._db, state.inode) and time.monotonic() < end_s:
            self._pause.wait(limits.STORE_PUBLISHED_POLL_S)

    def _load(self, state: FetchState, *, is_locked: bool) -> FetchState | None:
        """Load the file again with the rows of the store: others may have moved or fetched it."""
        with suppress(CkptfsError):
            pfs_coordination.load_inodes(self._db, self._cluster.store, state.inode)
        if is_locked and state.content is not None:
            with suppress(StoreUnreachable, StoreRefused):
                locations.refresh(self._db, self._cluster.store, [state.content.id], self._cluster.node_number)
        return copies.load_fetch_state(self._db, state.inode)

    def _is_fetched_elsewhere(self, state: FetchState, locked: FetchState | None) -> bool:
        if locked is None or state.content is None:
            return locked is not None and locked.content_id is not None
        return bool(self._cluster.list_live([node for node in locked.holders if node not in state.holders]))


def _get_lock_name(state: FetchState) -> str:
    return f"fetch/file/{state.inode:016x}" if state.content is None else f"fetch/{state.content.id:016x}"
