"""Owns how a content comes here from other nodes: who has it, what its blocks are, and every block found right before the copy counts.

The copy is FILLING under the content's own id from before its file exists. Sources that fail, lie or stall are left by `Peers.fetch` in the
middle of the file; when nobody is left the file may still be on the PFS, which is the caller's to try.
If we die here: a FILLING copy and its file, which recovery removes; the want is still open.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ckptfs import digest, disk, limits
from ckptfs.catalog import contents, copies, peer_copies, remote_contents
from ckptfs.catalog.copies import FetchState
from ckptfs.catalog.database import Database
from ckptfs.catalog.peer_copies import PeerCopy
from ckptfs.catalog.remote_contents import RemoteState
from ckptfs.clique import locations
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.locations import ContentLocations
from ckptfs.clique.membership import Node
from ckptfs.clique.peer_api import ContentManifest, PeerFailed
from ckptfs.errors import Busy, CkptfsError, DigestMismatch, StoreRefused, StoreUnreachable
from ckptfs.flow.fetch.fetch_progress import FetchProgress
from ckptfs.model import Content, ContentState, CopyState, Tier
from ckptfs.tiers import local_copies, transfer
from ckptfs.tiers.storage import Tiers, TierStorage

log = logging.getLogger(__name__)

transfer.declare_labels("fetch:peer:check")
disk.declare_labels("fetch:peer:reserved", "fetch:peer:write", "fetch:peer:fsync", "fetch:peer:directory", "fetch:peer:arrived")

OnProgress = Callable[[], None]


class NoCopyLeft(DigestMismatch):
    """No node that lives has the file, and the PFS does not show it."""


class PeerFetcher:
    """Brings contents from other nodes. Several threads may do so at once, of different files."""

    def __init__(self, db: Database, tiers: Tiers, cluster: Cluster) -> None:
        self._db = db
        self._tiers = tiers
        self._cluster = cluster

    def refresh_file(self, inode: int, progress: OnProgress) -> FetchState | None:
        """The file as it is known now that the store and its writer were asked. Raises Busy while its writer has not sealed it."""
        number = copies.get_content_id(self._db, inode)
        if number is None:
            return copies.load_fetch_state(self._db, inode)
        shared = self._refresh_locations(number)
        contents.mark_found(self._db, number)
        found = copies.load_fetch_state(self._db, inode)
        if (
            found is None
            or found.has_local_copy
            or found.content is None
            or not found.content.is_remote
            or found.content.state is not ContentState.CLOSED
        ):
            return found
        progress()
        if shared is None or shared.writer is None:
            raise Busy("the node that wrote the file is not known, and it was not sealed")
        writer = None if shared.is_lost else self._cluster.view().by_number.get(shared.writer)
        # While its writer lives a file is what was closed there, and nothing older. Who writes in place may be half way through.
        remote_state = shared.state
        is_open = remote_state is not None and remote_state.is_open
        generation_min = 0 if writer is None or remote_state is None else remote_state.generation - is_open
        if is_open and self._record_fsynced(found.content, shared, generation_min):
            return copies.load_fetch_state(self._db, inode)
        if writer is not None and self._request_seal(found.content, writer):
            return copies.load_fetch_state(self._db, inode)
        if is_open or not self._record_fsynced(found.content, shared, generation_min):
            if shared.is_lost:
                raise NoCopyLeft("the node that wrote the file has lost it, and no other one has a copy")
            raise Busy("the node that wrote the file cannot be reached, and it was not sealed")
        return copies.load_fetch_state(self._db, inode)

    def _refresh_locations(self, number: int) -> ContentLocations | None:
        """Ask the store who has it. An island goes by what it knows."""
        try:
            return locations.refresh(self._db, self._cluster.store, [number], self._cluster.node_number)[number]
        except (StoreUnreachable, StoreRefused) as failure:
            log.debug("the holders of content %d cannot be asked for: %s", number, failure)
            return None

    def is_gone(self, inode: int) -> bool:
        """Whether other nodes have taken its last name away since this one asked the store."""
        if not remote_contents.was_in_store(self._db, inode):
            return False
        try:
            file = locations.load_files(self._cluster.store, [inode]).get(inode)
        except (StoreUnreachable, StoreRefused):
            return False
        return file is None or not file.value.get("nlink", 1)

    def _request_seal(self, content: Content, writer: Node) -> bool:
        """Have the writer seal what is closed there, or tell what an open file holds now. False: it does not answer."""
        try:
            manifest = self._cluster.peers.request_seal(writer, content.id, limits.SEAL_REQUEST_S)
        except PeerFailed as failure:
            log.debug("%s wrote content %d and has not sealed it: %s", writer.name, content.id, failure)
            return False
        if manifest is None or manifest.generation - content.generation > limits.GENERATIONS_AHEAD_MAX:
            return False
        return self._record_manifest(manifest, writer)

    def _record_fsynced(self, content: Content, shared: ContentLocations, generation_min: int) -> bool:
        """The last state of a file that was verified before its writer died, here or on a node that lives, from the generation `since`
        on. False: there is none.
        """
        for copy in sorted((one for one in shared.copies if one.generation >= generation_min), key=lambda one: -one.generation):
            if copy.node == self._cluster.node_number and self._record_local_stale(content, copy):
                return True
            for node in self._cluster.list_live([copy.node]):
                try:
                    manifest = self._cluster.peers.get_manifest(node, content.id, copy.digest)
                except PeerFailed as failure:
                    log.debug("%s does not tell of content %d: %s", node.name, content.id, failure)
                    continue
                with self._db.transaction():
                    peer_copies.insert_peer_copy(self._db, copy)
                    return remote_contents.restore_verified(
                        self._db, content, replace(_build_remote_state(manifest), generation=copy.generation), None
                    )
        return False

    def _record_local_stale(self, content: Content, copy: PeerCopy) -> bool:
        """The same, from what lies here."""
        found = local_copies.find_stale(self._db, self._tiers, content.id, copy.digest)
        if found is None:
            return False
        os.close(found.fd)
        state = RemoteState(content.id, content.inode, copy.generation, found.size, copy.digest, found.blocks)
        return remote_contents.restore_verified(self._db, content, state, found.storage.tier)

    def _record_manifest(self, manifest: ContentManifest, node: Node) -> bool:
        with self._db.transaction():
            copy = peer_copies.PeerCopy(manifest.content, node.number, manifest.generation, manifest.digest)
            peer_copies.insert_peer_copy(self._db, copy)
            return remote_contents.record_remote(self._db, _build_remote_state(manifest))

    # --- bringing it here --------------------------------------------------------------------------------------------

    def list_sources(self, content: Content) -> list[Node]:
        """The living nodes that are known to have exactly this generation, the fastest first."""
        nodes = self._cluster.list_live(peer_copies.list_holders(self._db, content))
        by_name = {node.name: node for node in nodes}
        return [by_name[node.name] for node in self._cluster.peers.rank(nodes)]

    def fetch(self, content: Content, sources: list[Node], tier: Tier, progress: FetchProgress) -> None:
        """Make a good copy in `tier`. Raises PeerFailed when no source gave it, Busy when it has moved on, OSError from the tier."""
        manifest = self._load_manifest(content, sources)
        stale_fd = self._open_stale(content, tier)
        try:
            storage = self._tiers[tier]
            stash_id = self._insert_copy(content, storage)
            try:
                disk.act("fetch:peer:reserved", lambda: None)
                self._fill(content, manifest, sources, storage, stale_fd, progress)
                if not disk.act("fetch:peer:arrived", remote_contents.record_fetched_copy, self._db, content, tier, manifest.blocks):
                    raise Busy("the file changed while it was fetched")
            except BaseException:
                # A peer may have sent the same content meanwhile: then the row and the file are those of its copy, and stay.
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

    def _insert_copy(self, content: Content, storage: TierStorage) -> int | None:
        """Announce the copy, and take away the file of a former one: in one transaction, since a peer may send the same content. What may
        be all that is left of the file is put aside, under the id that is given.
        """
        with self._db.transaction():
            stash_id = local_copies.stash(self._db, storage, content.id)
            if not copies.insert_filling_copy(self._db, content, storage.tier):
                raise Busy("the file changed while it was fetched")
            old_fd = storage.detach(content.id)
        if old_fd >= 0:
            os.close(old_fd)
        return stash_id

    def _load_manifest(self, content: Content, sources: list[Node]) -> ContentManifest:
        """The blocks' digests: from here, or from the first source that gives those of which the content's is made."""
        assert content.digest is not None
        if content.block_digests is not None and digest.hash_content(content.block_digests, content.size) == content.digest:
            return ContentManifest(content.id, content.inode, content.generation, content.size, content.digest, content.block_digests)
        failure = PeerFailed("no node that has the file can be reached")
        # One that does not answer is left soon while there are others.
        quick_attempts = [(node, limits.PEER_PATIENCE_S) for node in sources if len(sources) > 1]
        for node, timeout_s in [*quick_attempts, *((node, limits.PEER_STALL_S) for node in sources)]:
            try:
                manifest = self._cluster.peers.get_manifest(node, content.id, content.digest, timeout_s=timeout_s)
            except PeerFailed as refusal:
                failure = refusal
                continue
            if manifest.size == content.size and digest.hash_content(manifest.blocks, manifest.size) == content.digest:
                return manifest
            failure = PeerFailed(f"{node.name} tells of other blocks than those of this content")
        raise failure

    def _open_stale(self, content: Content, tier: Tier) -> int:
        """A descriptor of a former generation that lies in `tier`, or of a bad copy, whose good blocks may serve; -1 without one."""
        states = {copy.tier: copy.state for copy in copies.list_copies(self._db, content.id)}
        if states.get(tier) in (CopyState.STALE, CopyState.QUARANTINED):
            with suppress(FileNotFoundError):
                return self._tiers[tier].open(content.id)
        return -1

    def _fill(
        self, content: Content, manifest: ContentManifest, sources: list[Node], storage: TierStorage, stale_fd: int, progress: FetchProgress
    ) -> None:
        with disk.closing(_create_file(storage, manifest.content)) as target:
            os.ftruncate(target, manifest.size)
            missing = _MissingBlocks(manifest)
            if stale_fd >= 0:
                missing.copy_from(stale_fd, target)
            if missing.numbers:
                with progress.publish_map(content, storage.tier, target, missing.numbers) as blocks:
                    self._cluster.peers.fetch(sources, manifest, missing.numbers, target, blocks.mark_present, blocks.list_awaited)
            if storage.tier is not Tier.RAM:
                disk.act("fetch:peer:fsync", os.fsync, target)
                disk.act("fetch:peer:directory", storage.fsync_directory)
                os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
                found = transfer.read(target, label="fetch:peer:check", before_block=progress)
                if found != (manifest.size, manifest.digest, manifest.blocks):
                    raise DigestMismatch(f"what was written to {storage.tier} reads back as something else")


class _MissingBlocks:
    """The blocks that are not in the file yet. Holes need not come."""

    def __init__(self, manifest: ContentManifest) -> None:
        self._digests = digest.split_digests(manifest.blocks)
        self.numbers = [number for number, wanted in enumerate(self._digests) if wanted != digest.ZERO_BLOCK]

    def copy_from(self, source: int, target: int) -> None:
        """Copy the blocks that are the same in a former generation."""
        blocks = transfer.read(source, label="fetch:peer:older")[2]
        stale_digests = digest.split_digests(blocks)
        remaining = []
        for number in self.numbers:
            if not (
                number < len(stale_digests) and stale_digests[number] == self._digests[number] and self._copy_block(source, target, number)
            ):
                remaining.append(number)
        self.numbers = remaining

    def _copy_block(self, source: int, target: int, number: int) -> bool:
        data = os.pread(source, limits.BLOCK_BYTES, number * limits.BLOCK_BYTES)
        if digest.hash_block(data) != self._digests[number]:
            return False
        disk.write_all("fetch:peer:write", target, data, number * limits.BLOCK_BYTES)
        return True


def _build_remote_state(manifest: ContentManifest) -> RemoteState:
    return RemoteState(manifest.content, manifest.inode, manifest.generation, manifest.size, manifest.digest, manifest.blocks)


def _create_file(storage: TierStorage, content: int) -> int:
    try:
        return storage.create(content)
    except FileExistsError as failure:
        raise Busy("a peer sends the file just now") from failure
