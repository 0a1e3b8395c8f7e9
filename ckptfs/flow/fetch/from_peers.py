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
from ckptfs.catalog import fetching, holding, peers, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.fetching import FetchState
from ckptfs.catalog.holding import RemoteState
from ckptfs.catalog.peers import PeerCopy
from ckptfs.clique import holders
from ckptfs.clique.holders import ContentLocations
from ckptfs.clique.membership import Node
from ckptfs.clique.peers import ContentManifest, PeerFailed
from ckptfs.clique.surroundings import Cluster
from ckptfs.errors import Busy, CkptfsError, DigestMismatch, StoreRefused, StoreUnreachable
from ckptfs.flow.fetch.telling import Telling
from ckptfs.model import Content, ContentState, CopyState, Tier
from ckptfs.tiers import aside, older, removal, transfer
from ckptfs.tiers.place import Place, Places

log = logging.getLogger(__name__)

transfer.labels("gather:check")
disk.declare_labels("gather:reserved", "gather:write", "gather:fsync", "gather:directory", "gather:arrived")

Progress = Callable[[], None]


class NoneLeft(DigestMismatch):
    """No node that lives has the file, and the PFS does not show it."""


class FromPeers:
    """Brings contents from other nodes. Several threads may do so at once, of different files."""

    def __init__(self, db: Database, places: Places, around: Cluster) -> None:
        self._db = db
        self._places = places
        self._around = around

    def look(self, inode: int, progress: Progress) -> FetchState | None:
        """The file as it is known now that the store and its writer were asked. Raises Busy while its writer has not sealed it."""
        number = fetching.get_content_id(self._db, inode)
        if number is None:
            return fetching.load_fetch_state(self._db, inode)
        shared = self._refresh(number)
        settling.mark_found(self._db, number)
        found = fetching.load_fetch_state(self._db, inode)
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
        writer = None if shared.is_lost else self._around.view().by_number.get(shared.writer)
        # While its writer lives a file is what was closed there, and nothing older. Who writes in place may be half way through.
        heard = shared.state
        is_open = heard is not None and heard.is_open
        since = 0 if writer is None or heard is None else heard.generation - is_open
        if is_open and self._have_fsynced(found.content, shared, since):
            return fetching.load_fetch_state(self._db, inode)
        if writer is not None and self._have_sealed(found.content, writer):
            return fetching.load_fetch_state(self._db, inode)
        if is_open or not self._have_fsynced(found.content, shared, since):
            if shared.is_lost:
                raise NoneLeft("the node that wrote the file has lost it, and no other one has a copy")
            raise Busy("the node that wrote the file cannot be reached, and it was not sealed")
        return fetching.load_fetch_state(self._db, inode)

    def _refresh(self, number: int) -> ContentLocations | None:
        """Ask the store who has it. An island goes by what it knows."""
        try:
            return holders.refresh(self._db, self._around.store, [number], self._around.node_number)[number]
        except (StoreUnreachable, StoreRefused) as failure:
            log.debug("the holders of content %d cannot be asked for: %s", number, failure)
            return None

    def is_gone(self, inode: int) -> bool:
        """Whether other nodes have taken its last name away since this one asked the store."""
        if not holding.was_in_store(self._db, inode):
            return False
        try:
            file = holders.load_files(self._around.store, [inode]).get(inode)
        except (StoreUnreachable, StoreRefused):
            return False
        return file is None or not file.value.get("nlink", 1)

    def _have_sealed(self, content: Content, writer: Node) -> bool:
        """Have the writer seal what is closed there, or tell what an open file holds now. False: it does not answer."""
        try:
            record = self._around.peers.request_seal(writer, content.id, limits.SEAL_ASKED_S)
        except PeerFailed as failure:
            log.debug("%s wrote content %d and has not sealed it: %s", writer.name, content.id, failure)
            return False
        if record is None or record.generation - content.generation > limits.GENERATIONS_AHEAD_MAX:
            return False
        return self._heard_of(record, writer)

    def _have_fsynced(self, content: Content, shared: ContentLocations, since: int) -> bool:
        """The last state of a file that was verified before its writer died, here or on a node that lives, from the generation `since`
        on. False: there is none.
        """
        for copy in sorted((one for one in shared.copies if one.generation >= since), key=lambda one: -one.generation):
            if copy.node == self._around.node_number and self._have_older(content, copy):
                return True
            for node in self._around.list_live([copy.node]):
                try:
                    record = self._around.peers.get_manifest(node, content.id, copy.digest)
                except PeerFailed as failure:
                    log.debug("%s does not tell of content %d: %s", node.name, content.id, failure)
                    continue
                with self._db.transaction():
                    peers.insert_peer_copy(self._db, copy)
                    return holding.restore_verified(self._db, content, replace(_heard(record), generation=copy.generation), None)
        return False

    def _have_older(self, content: Content, copy: PeerCopy) -> bool:
        """The same, from what lies here."""
        found = older.find(self._db, self._places, content.id, copy.digest)
        if found is None:
            return False
        os.close(found.fd)
        state = RemoteState(content.id, content.inode, copy.generation, found.size, copy.digest, found.blocks)
        return holding.restore_verified(self._db, content, state, found.place.tier)

    def _heard_of(self, record: ContentManifest, node: Node) -> bool:
        with self._db.transaction():
            copy = peers.PeerCopy(record.content, node.number, record.generation, record.digest)
            peers.insert_peer_copy(self._db, copy)
            return holding.record_remote(self._db, _heard(record))

    # --- bringing it here --------------------------------------------------------------------------------------------

    def sources(self, content: Content) -> list[Node]:
        """The living nodes that are known to have exactly this generation, the fastest first."""
        nodes = self._around.list_live(peers.list_holders(self._db, content))
        by_name = {node.name: node for node in nodes}
        return [by_name[node.name] for node in self._around.peers.rank(nodes)]

    def bring(self, content: Content, sources: list[Node], tier: Tier, telling: Telling) -> None:
        """Make a good copy in `tier`. Raises PeerFailed when no source gave it, Busy when it has moved on, OSError from the tier."""
        record = self._record(content, sources)
        older = self._older(content, tier)
        try:
            place = self._places[tier]
            former = self._reserve(content, place)
            try:
                disk.act("gather:reserved", lambda: None)
                self._fill(content, record, sources, place, older, telling)
                if not disk.act("gather:arrived", holding.record_fetched_copy, self._db, content, tier, record.blocks):
                    raise Busy("the file changed while it was fetched")
            except BaseException:
                # A peer may have sent the same content meanwhile: then the row and the file are those of its copy, and stay.
                fetching.delete_filling_copy(self._db, content.id, tier)
                with suppress(OSError, CkptfsError):
                    aside.put_back(self._db, place, former)
                    removal.remove_forgotten(self._db, place, content.id)
                raise
            aside.forget(self._db, place, former)
        finally:
            if older >= 0:
                os.close(older)
        if tier is not Tier.RAM:
            self._db.persist()

    def _reserve(self, content: Content, place: Place) -> int | None:
        """Announce the copy, and take away the file of a former one: in one transaction, since a peer may send the same content. What may
        be all that is left of the file is put aside, under the id that is given.
        """
        with self._db.transaction():
            kept = aside.put(self._db, place, content.id)
            if not settling.insert_filling_copy(self._db, content, place.tier):
                raise Busy("the file changed while it was fetched")
            former = place.detach(content.id)
        if former >= 0:
            os.close(former)
        return kept

    def _record(self, content: Content, sources: list[Node]) -> ContentManifest:
        """The blocks' digests: from here, or from the first source that gives those of which the content's is made."""
        assert content.digest is not None
        if content.block_digests is not None and digest.hash_content(content.block_digests, content.size) == content.digest:
            return ContentManifest(content.id, content.inode, content.generation, content.size, content.digest, content.block_digests)
        failure = PeerFailed("no node that has the file can be reached")
        # One that does not answer is left soon while there are others.
        hasty = [(node, limits.PEER_PATIENCE_S) for node in sources if len(sources) > 1]
        for node, timeout_s in [*hasty, *((node, limits.PEER_STALL_S) for node in sources)]:
            try:
                record = self._around.peers.get_manifest(node, content.id, content.digest, timeout_s=timeout_s)
            except PeerFailed as refusal:
                failure = refusal
                continue
            if record.size == content.size and digest.hash_content(record.blocks, record.size) == content.digest:
                return record
            failure = PeerFailed(f"{node.name} tells of other blocks than those of this content")
        raise failure

    def _older(self, content: Content, tier: Tier) -> int:
        """A descriptor of a former generation that lies in `tier`, or of a bad copy, whose good blocks may serve; -1 without one."""
        states = {copy.tier: copy.state for copy in settling.list_copies(self._db, content.id)}
        if states.get(tier) in (CopyState.STALE, CopyState.QUARANTINED):
            with suppress(FileNotFoundError):
                return self._places[tier].open(content.id)
        return -1

    def _fill(self, content: Content, record: ContentManifest, sources: list[Node], place: Place, older: int, telling: Telling) -> None:
        with disk.closing(_created(place, record.content)) as target:
            os.ftruncate(target, record.size)
            lacking = _Lacking(record)
            if older >= 0:
                lacking.take_from(older, target)
            if lacking.numbers:
                with telling.published(content, place.tier, target, lacking.numbers) as blocks:
                    self._around.peers.fetch(sources, record, lacking.numbers, target, blocks.came, blocks.asked)
            if place.tier is not Tier.RAM:
                disk.act("gather:fsync", os.fsync, target)
                disk.act("gather:directory", place.persist_names)
                os.posix_fadvise(target, 0, 0, os.POSIX_FADV_DONTNEED)
                found = transfer.read(target, label="gather:check", before_block=telling)
                if found != (record.size, record.digest, record.blocks):
                    raise DigestMismatch(f"what was written to {place.tier} reads back as something else")


class _Lacking:
    """The blocks that are not in the file yet. Holes need not come."""

    def __init__(self, record: ContentManifest) -> None:
        self._digests = digest.split_digests(record.blocks)
        self.numbers = [number for number, wanted in enumerate(self._digests) if wanted != digest.ZERO_BLOCK]

    def take_from(self, source: int, target: int) -> None:
        """Copy the blocks that are the same in a former generation."""
        blocks = transfer.read(source, label="gather:older")[2]
        former = digest.split_digests(blocks)
        left = []
        for number in self.numbers:
            if not (number < len(former) and former[number] == self._digests[number] and self._copied(source, target, number)):
                left.append(number)
        self.numbers = left

    def _copied(self, source: int, target: int, number: int) -> bool:
        data = os.pread(source, limits.BLOCK_BYTES, number * limits.BLOCK_BYTES)
        if digest.hash_block(data) != self._digests[number]:
            return False
        disk.write_all("gather:write", target, data, number * limits.BLOCK_BYTES)
        return True


def _heard(record: ContentManifest) -> RemoteState:
    return RemoteState(record.content, record.inode, record.generation, record.size, record.digest, record.blocks)


def _created(place: Place, content: int) -> int:
    try:
        return place.create(content)
    except FileExistsError as failure:
        raise Busy("a peer sends the file just now") from failure
