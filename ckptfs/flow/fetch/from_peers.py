"""Reads of other nodes for fetches: holders of a content, digests of its blocks, and the copy itself.

A large file is fetched from one holder by few nodes at a time; the others get PeerBusy before anything is begun, and look again. By then
more nodes have the file. What was begun goes on as long as bytes arrive: the store is asked for other holders, and received blocks stay.
Every block is verified before the copy counts.

If we die here: a FILLING copy and its file, which recovery removes. The request is still open.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from ckptfs import digest, disk, limits
from ckptfs.catalog import copies, identity, peer_copies, remote_contents
from ckptfs.catalog.copies import FetchState
from ckptfs.catalog.database import Database
from ckptfs.clique import locations
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.locations import ContentLocations
from ckptfs.clique.membership import Node
from ckptfs.clique.peer_api import ContentManifest, PeerBusy, PeerCorrupt, PeerFailed, PeerRefused
from ckptfs.errors import Busy, CkptfsError, DigestMismatch, StoreRefused, StoreUnreachable
from ckptfs.flow.fetch.fetch_progress import BlockProgress, FetchProgress, choose_pause_s
from ckptfs.model import Content, ContentState, CopyState, Tier
from ckptfs.tiers import local_copies, transfer
from ckptfs.tiers.storage import Tiers, TierStorage

log = logging.getLogger(__name__)

transfer.declare_labels("fetch:peer:check")
disk.declare_labels("fetch:peer:reserved", "fetch:peer:fsync", "fetch:peer:directory", "fetch:peer:arrived")


class NoCopyLeft(DigestMismatch):
    """No live node has the file, and the PFS does not show it."""


class TooSlow(PeerFailed):
    """Blocks arrive so slowly that the PFS is the better source."""


def is_denial(failure: BaseException | None) -> bool:
    """Return True if a node has answered that it does not have a content."""
    return isinstance(failure, PeerRefused) and failure.code == errno.ENOENT


class PeerFetcher:
    """Fetches contents from other nodes. Several threads may do so at once, each for another file."""

    def __init__(self, db: Database, tiers: Tiers, cluster: Cluster) -> None:
        self._db = db
        self._tiers = tiers
        self._cluster = cluster
        self._pause = threading.Event()

    # --- loading -----------------------------------------------------------------------------------------------------

    def refresh(self, state: FetchState, progress: FetchProgress) -> FetchState | None:
        """Return a file as store and writer know it. Raises Busy or NoCopyLeft if it cannot be sealed."""
        if state.content_id is None:
            return state
        shared = self._refresh_locations(state.content_id)
        fresh = copies.load_fetch_state(self._db, state.inode)
        if fresh is None or fresh.has_local_copy or not (fresh.content is None or fresh.content.is_remote):
            return fresh
        if shared is not None and shared.state is None:
            progress.extend_wait()
            # Its row is unknown if it was deleted between the reads of the inode and of the content.
            self._record_deleted(fresh.content or Content(state.content_id, state.inode, 0, ContentState.OPEN, 0, None, None, 0), shared)
        elif fresh.content is not None and fresh.content.state is ContentState.CLOSED:
            progress.extend_wait()
            self._record_sealed(fresh.content, shared)
        else:
            return fresh
        return copies.load_fetch_state(self._db, state.inode)

    def _record_deleted(self, content: Content, shared: ContentLocations) -> None:
        """Learn who still has a content that was deleted meanwhile. Raises NoCopyLeft or Busy.

        Its maker keeps it for a while (`ReadGrace`). If the maker lives and does not answer, its mover may be restarting.
        """
        with self._db.transaction():
            for copy in shared.copies:
                peer_copies.insert_peer_copy(self._db, copy)
        origin = self._cluster.view().by_number.get(identity.get_origin_node(content.id))
        failure: PeerFailed | None = None
        if origin is not None and origin.number != self._cluster.node_number:
            try:
                if self._ask_to_seal(content, origin):
                    return
                failure = PeerFailed("it does not have it sealed yet")
            except PeerFailed as refusal:
                failure = refusal
        others = [node for node in peer_copies.list_holders(self._db, content) if origin is None or node != origin.number]
        if content.state is ContentState.SEALED and (others or not is_denial(failure)):
            return
        if failure is None or is_denial(failure):
            raise NoCopyLeft("the file was deleted, and the node that wrote it does not have it any more") from failure
        raise Busy(f"the file was deleted, and the node that wrote it cannot be reached: {failure}") from failure

    def _record_sealed(self, content: Content, shared: ContentLocations | None) -> None:
        """Learn the sealed state from the writer, or the last fsynced one. Raises Busy or NoCopyLeft."""
        if shared is None or shared.writer is None:
            raise Busy("the node that wrote the file is not known, and it was not sealed")
        writer = None if shared.is_lost else self._cluster.view().by_number.get(shared.writer)
        # While the writer lives, the file is what was closed there, and no previous state. A file that is open may be half overwritten.
        remote_state = shared.state
        is_open = remote_state is not None and remote_state.is_open
        generation_min = 0 if writer is None or remote_state is None else remote_state.generation - is_open
        if is_open and self._record_fsynced(content, shared, generation_min):
            return
        if writer is not None and self._request_seal(content, writer):
            return
        if is_open or not self._record_fsynced(content, shared, generation_min):
            if shared.is_lost:
                raise NoCopyLeft("the node that wrote the file has lost it, and no other one has a copy")
            raise Busy("the node that wrote the file cannot be reached, and it was not sealed")

    def _refresh_locations(self, number: int) -> ContentLocations | None:
        """Ask the store which nodes have a content. Returns None on an island, which uses what it knows."""
        try:
            return locations.refresh(self._db, self._cluster.store, [number], self._cluster.node_number)[number]
        except (StoreUnreachable, StoreRefused) as failure:
            log.debug("content %d: its holders cannot be read from the store: %s", number, failure)
            return None

    def is_gone(self, inode: int) -> bool:
        """Return whether other nodes have removed the last name of a file since this node asked the store."""
        if not remote_contents.was_in_store(self._db, inode):
            return False
        try:
            file = locations.load_files(self._cluster.store, [inode]).get(inode)
        except (StoreUnreachable, StoreRefused):
            return False
        return file is None or not file.value.get("nlink", 1)

    def _request_seal(self, content: Content, writer: Node) -> bool:
        """Have the writer seal the content, or describe what it has open. Return False without an answer."""
        try:
            return self._ask_to_seal(content, writer)
        except PeerFailed as failure:
            log.debug("content %d: not sealed by its writer %s: %s", content.id, writer.name, failure)
            return False

    def _ask_to_seal(self, content: Content, writer: Node) -> bool:
        manifest = self._cluster.peers.request_seal(writer, content.id, limits.SEAL_REQUEST_S)
        if manifest is None or manifest.generation - content.generation > limits.GENERATIONS_AHEAD_MAX:
            return False
        copy = peer_copies.PeerCopy(manifest.content, writer.number, manifest.generation, manifest.digest)
        with self._db.transaction():
            peer_copies.insert_peer_copy(self._db, copy)
            return remote_contents.record_remote(self._db, manifest)

    def _record_fsynced(self, content: Content, shared: ContentLocations, generation_min: int) -> bool:
        """Restore the last state of an open file, from `generation_min` on, that a live node has verified."""
        for copy in sorted((one for one in shared.copies if one.generation >= generation_min), key=lambda one: -one.generation):
            for node in self._cluster.list_live([copy.node]):
                try:
                    manifest = self._cluster.peers.get_manifest(node, content.id, copy.digest)
                except PeerFailed as failure:
                    log.debug("content %d: no manifest from %s: %s", content.id, node.name, failure)
                    continue
                with self._db.transaction():
                    peer_copies.insert_peer_copy(self._db, copy)
                    return remote_contents.restore_verified(self._db, content, replace(manifest, generation=copy.generation))
        return False

    # --- copying -----------------------------------------------------------------------------------------------------

    def list_sources(self, state: FetchState) -> list[Node]:
        """Return the live nodes that are known to have exactly this generation, the fastest first."""
        nodes = self._cluster.list_live(list(state.holders))
        by_name = {node.name: node for node in nodes}
        return [by_name[node.name] for node in self._cluster.peers.rank(nodes)]

    def fetch(
        self, state: FetchState, sources: Sequence[Node], tier: Tier, progress: FetchProgress, stalled: FetchProgress | None = None
    ) -> None:
        """Make a good copy in `tier`. Raises PeerFailed, Busy if the content changed, OSError of the tier.

        `stalled`: the step that hangs at the PFS with this file. A copy that it fills in `tier` is given up.
        """
        content, storage = state.content, self._tiers[tier]
        assert content is not None
        manifest, sources = self._load_manifest(content, sources, can_wait=progress.can_wait(content.size))
        stale_fd = self._open_previous(state, storage)
        try:
            stash_id = self._insert_copy(content, storage, stalled)
            try:
                disk.reach("fetch:peer:reserved")
                if tier is Tier.PFS:
                    storage.remove(content.id)
                self._fill(content, manifest, sources, storage, stale_fd, progress)
                if not disk.act("fetch:peer:arrived", remote_contents.record_fetched_copy, self._db, content, tier, manifest.blocks):
                    raise Busy("the file changed while it was fetched")
            except BaseException:
                # A peer may have sent the same content meanwhile. The row and the file are then those of its copy, and stay.
                copies.delete_filling_copy(self._db, content.id, tier)
                with suppress(OSError, CkptfsError):
                    local_copies.restore_stashed(self._db, storage, stash_id)
                    local_copies.remove_unrecorded(self._db, storage, content.id)
                raise
            local_copies.drop_stashed(self._db, storage, stash_id)
        finally:
            if stale_fd >= 0:
                os.close(stale_fd)
        if tier is not Tier.RAM:
            self._db.persist()

    def _insert_copy(self, content: Content, storage: TierStorage, stalled: FetchProgress | None) -> int | None:
        """Insert the FILLING row and unlink the file before. Return the id under which a stale one is stashed.

        The PFS may hang: there the file goes after the transaction, and peers send nothing that it could be mistaken for.
        """
        is_on_pfs = storage.tier is Tier.PFS
        with self._db.transaction():
            if stalled is not None and stalled.filling == (content.id, storage.tier):
                copies.delete_filling_copy(self._db, content.id, storage.tier)
                stalled.give_up_copy()
            stash_id = None if is_on_pfs else local_copies.stash(self._db, storage, content.id)
            if not copies.insert_filling_copy(self._db, content, storage.tier):
                raise Busy("the file changed while it was fetched")
            old_fd = -1 if is_on_pfs else storage.detach(content.id)
        if old_fd >= 0:
            os.close(old_fd)
        return stash_id

    def _open_previous(self, state: FetchState, storage: TierStorage) -> int:
        """Return a descriptor of a copy that does not count, and whose good blocks can be reused; or -1."""
        is_here = any(copy.tier is storage.tier and copy.state is not CopyState.GOOD for copy in state.copies)
        assert state.content is not None
        found = [(state.content.id, storage.tier)] if is_here else []
        found += [(content, tier) for content, tier, _ in remote_contents.list_blocks_of_file(self._db, state.inode, 1)]
        for content, tier in found:
            with suppress(FileNotFoundError):
                if tier in self._tiers:
                    return self._tiers[tier].open(content)
        return -1

    def _load_manifest(self, content: Content, sources: Sequence[Node], *, can_wait: bool) -> tuple[ContentManifest, Sequence[Node]]:
        """Return the block digests, and first the source that has a place for this node. Raises PeerFailed."""
        assert content.digest is not None
        failure = PeerFailed("no node that has the file can be reached")
        # A node that does not answer is given up soon while there are others.
        quick_attempts = [(node, limits.PEER_PATIENCE_S) for node in sources if len(sources) > 1]
        for node, timeout_s in [*quick_attempts, *((node, limits.PEER_STALL_S) for node in sources)]:
            try:
                manifest = self._cluster.peers.get_manifest(node, content.id, content.digest, timeout_s=timeout_s, can_wait=can_wait)
            except PeerFailed as refusal:
                failure = failure if isinstance(failure, PeerBusy) else refusal
                continue
            if manifest.size == content.size and digest.hash_content(manifest.blocks, manifest.size) == content.digest:
                return manifest, [node, *(other for other in sources if other is not node)]
            failure = PeerFailed(f"{node.name} sent the digests of other blocks than those of this content")
        raise failure

    def _fill(
        self,
        content: Content,
        manifest: ContentManifest,
        sources: Sequence[Node],
        storage: TierStorage,
        stale_fd: int,
        progress: FetchProgress,
    ) -> None:
        with disk.closing(_create_file(storage, manifest.content)) as target:
            os.ftruncate(target, manifest.size)
            if missing := _list_missing(manifest, stale_fd, target):
                storage.reserve_blocks(target, missing, manifest.size)
                with progress.publish_map(content, storage.tier, target, missing) as blocks:
                    self._fetch_blocks(manifest, sources, missing, target, blocks)
            if storage.tier is not Tier.RAM:
                storage.persist(target, "fetch:peer")
                found = transfer.read(target, label="fetch:peer:check", before_block=progress.extend_wait)
                if found != (manifest.size, manifest.digest, manifest.blocks):
                    raise DigestMismatch(f"what was written to {storage.tier} reads back as something else")

    def _fetch_blocks(
        self, manifest: ContentManifest, sources: Sequence[Node], missing: Collection[int], target: int, blocks: BlockProgress
    ) -> None:
        """Fetch into `target`. After a beginning, sources are asked again while anything arrives."""
        left = set(missing)
        begun_s = arrived_s = time.monotonic()

        def mark_present(number: int) -> None:
            nonlocal arrived_s
            left.discard(number)
            arrived_s = time.monotonic()
            blocks.mark_present(number)
            if blocks.progress.is_pfs_next and _is_too_slow(len(missing) - len(left), len(left), arrived_s - begun_s):
                raise TooSlow("the nodes that have the file send it too slowly")

        while left:
            can_wait = len(left) == len(missing) and blocks.progress.can_wait(manifest.size)
            try:
                self._cluster.peers.fetch(sources, manifest, sorted(left), target, mark_present, blocks.list_awaited, can_wait=can_wait)
                return
            except PeerFailed as failure:
                waited_s = time.monotonic() - arrived_s
                if len(left) == len(missing) or isinstance(failure, PeerCorrupt | TooSlow) or waited_s > limits.FETCH_PATIENCE_S:
                    raise
                log.debug("content %d: %d blocks left: %s; asking again", manifest.content, len(left), failure)
                self._pause.wait(choose_pause_s(waited_s))
                sources = self._list_fresh_sources(manifest)
                if not sources:
                    raise

    def _list_fresh_sources(self, manifest: ContentManifest) -> list[Node]:
        """Return the live nodes that have this content now, according to the store."""
        self._refresh_locations(manifest.content)
        state = copies.load_fetch_state(self._db, manifest.inode)
        return [] if state is None or state.content is None or state.content.digest != manifest.digest else self.list_sources(state)


def _list_missing(manifest: ContentManifest, previous: int, target: int) -> list[int]:
    """Return the blocks to fetch: no holes, and none that the file `previous` (-1: none) gives."""
    digests = digest.split_digests(manifest.blocks)
    missing = [number for number, wanted in enumerate(digests) if wanted != digest.ZERO_BLOCK]
    if previous < 0:
        return missing
    known = digest.split_digests(transfer.read(previous, label="fetch:peer:previous")[2])
    same = {number for number in missing if known[number : number + 1] == [digests[number]]}
    buffer = transfer.BlockBuffer("fetch:peer:previous")
    return [
        number
        for number in missing
        if number not in same or not buffer.copy(previous, number, target, number, manifest.size, digests[number])
    ]


def _is_too_slow(arrived_blocks: int, left_blocks: int, elapsed_s: float) -> bool:
    bytes_per_s = arrived_blocks * limits.BLOCK_BYTES / max(elapsed_s, 0.001)
    rest_s = left_blocks * limits.BLOCK_BYTES / bytes_per_s
    return bytes_per_s < limits.FETCH_SLOW_BYTES_PER_S and min(elapsed_s, rest_s) > limits.FETCH_PATIENCE_S


def _create_file(storage: TierStorage, content: int) -> int:
    try:
        return storage.create(content)
    except FileExistsError as failure:
        raise Busy("a peer is sending the file just now") from failure
