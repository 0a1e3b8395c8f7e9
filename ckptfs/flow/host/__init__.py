"""The host of peer copies: offers, blocks and questions of peers about contents, by content id.

Takes: offers of peers, block by block, and requests for contents of this node. Called by the threads of the peer server.
Leaves: verified copies (`content.remote = 1`) within the peers' share of the tiers.
If we die here: an incoming copy is a FILLING row without a content, which recovery removes with its file. The peer offers again.

An incoming copy has an id of its own until every digest is verified; then it takes the name of the content. A reader of an older generation
keeps its open file, and a part is never taken for the whole (P4, P7).

For a file that is still written, `OpenFileSnapshots` records digests as a generation of its own. The blocks come from the open file; if one
has changed since, its digest differs and the reader asks again.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from ckptfs import digest, disk, limits
from ckptfs.catalog import copies, identity, peer_copies, remote_contents
from ckptfs.catalog.contents import get_content, is_unchanged
from ckptfs.catalog.database import Database
from ckptfs.catalog.peer_copies import PeerCopy
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.peer_api import CopyNotFound, CopyUnavailable, Offer, OpenCopy, Reception
from ckptfs.errors import Busy, CkptfsError, InvalidArgument
from ckptfs.flow.host.incoming import IncomingCopy, OfferValidator, PeerQuota
from ckptfs.flow.host.open_file_snapshots import OpenFileSnapshots
from ckptfs.model import Content, ContentState, CopyState, Notifier, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.storage import Tiers, TierStorage

log = logging.getLogger(__name__)
transfer.declare_labels("host:check")
disk.declare_labels("host:fsync", "host:directory", "host:outdated", "host:rename", "host:counted", "host:persist")
SEAL_POLL_S = 0.01

SEARCH_BYTES_MIN = 256 * limits.KIB
"""Less than this is sent sooner than looked for."""


class Host:
    """Serves peers: accepts their copies and lends them contents of this node."""

    def __init__(self, db: Database, tiers: Tiers, share: float, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._offer_validator = OfferValidator(db, cluster)
        self._tiers = tiers
        self._notify = notify
        self._cluster = cluster
        self._quota = PeerQuota(db, tiers, share)
        self._lock = threading.Lock()
        self._tokens = itertools.count(1)
        self._incoming: dict[int, IncomingCopy] = {}
        self._busy_tokens: dict[int, int] = {}  # Content -> the token of the peer that is sending it.
        self._pause = threading.Event()
        self._open_snapshots = OpenFileSnapshots(db, tiers)
        self.reported_unneeded: set[int] = set()
        """Contents that a peer said need not be held: the reconcile flow asks the store."""

    def step(self) -> bool:
        """Drop abandoned incoming copies. Return False."""
        self._drop_idle()
        return False

    def next_due_s(self) -> float | None:
        return limits.RECEPTION_KEEP_S if self._incoming else None

    # --- receiving ---------------------------------------------------------------------------------------------------

    def begin_reception(self, offer: Offer) -> Reception:
        self._validate_generation(offer)
        self._offer_validator.validate(offer)
        token = self._take_token(offer.content)
        try:
            incoming = self._prepare_incoming(offer)
        except BaseException:
            self._release_token(offer.content)
            raise
        return Reception(token, incoming.fd, incoming.missing_blocks)

    def _take_token(self, content: int) -> int:
        with self._lock:
            if content in self._busy_tokens:
                raise Busy(f"content {content} is arriving already")
            if len(self._busy_tokens) >= limits.RECEPTIONS_MAX:
                raise Busy(f"{limits.RECEPTIONS_MAX} contents are arriving already")
            token = self._busy_tokens[content] = next(self._tokens)
        self._drop_idle()
        return token

    def _release_token(self, content: int) -> None:
        with self._lock:
            self._busy_tokens.pop(content, None)

    def _validate_generation(self, offer: Offer) -> None:
        """Refuse older generations, and contents that are being written on this node."""
        known = get_content(self._db, offer.content)
        ahead = offer.generation - (0 if known is None else known.generation)
        if ahead > limits.GENERATIONS_AHEAD_MAX:
            raise InvalidArgument(f"generation {offer.generation} of this content is too far ahead of what is known here")
        if known is None:
            return
        if known.state is ContentState.OPEN:
            raise Busy("somebody writes this content here")
        if known.state is ContentState.DOOMED:
            raise InvalidArgument("this content was deleted")
        if known.generation > offer.generation:
            raise InvalidArgument(f"generation {known.generation} of this content is known here; offered: {offer.generation}")
        if known.generation == offer.generation and None not in (known.digest, offer.digest) and known.digest != offer.digest:
            raise InvalidArgument("this generation of the content has another digest here")

    def _prepare_incoming(self, offer: Offer) -> IncomingCopy:
        """Return what came of this content before, or a new file with the blocks that this node has."""
        with self._lock:
            incoming = self._incoming.pop(offer.content, None)
        if incoming is None:
            if offer.digest is not None and (local_copy := self._open_verified_copy(offer)) is not None:
                incoming = IncomingCopy.from_local_copy(offer, *local_copy)
            else:
                incoming = IncomingCopy.create(self._db, self._tiers[self._quota.choose_tier(offer.size)], offer)
        try:
            incoming.set_offer(offer)
            if not incoming.is_complete:
                self._copy_local_blocks(incoming)
        except BaseException:
            incoming.discard(self._db)
            raise
        with self._lock:
            self._incoming[offer.content] = incoming
        return incoming

    def _open_verified_copy(self, offer: Offer) -> tuple[TierStorage, int] | None:
        """Return (storage, descriptor) of a verified copy of exactly this content. Returns None without one."""
        try:
            opened, storage = self._open_copy(offer.content, offer.digest)
        except CopyNotFound:
            return None
        return storage, opened.fd

    def _copy_local_blocks(self, incoming: IncomingCopy) -> None:
        """Copy blocks of previous contents and generations of the file, or of the content that came last."""
        if incoming.is_unsearched and incoming.offer.size >= SEARCH_BYTES_MIN:
            previous = set()
            for content, tier, blocks in remote_contents.list_blocks_of_file(self._db, incoming.offer.inode, limits.BLOCK_SOURCES_MAX):
                if tier in self._tiers:
                    previous.add(content)
                    incoming.add_source(self._tiers[tier], content, blocks)
            blocks_left = limits.BLOCK_SOURCES_BLOCKS_MAX
            for content, tier, blocks in remote_contents.list_recent_blocks(self._db, SEARCH_BYTES_MIN, limits.BLOCK_SOURCES_MAX):
                blocks_left -= len(blocks) // digest.BLOCK_DIGEST_BYTES
                if content not in previous and tier in self._tiers and blocks_left >= 0:
                    incoming.add_source(self._tiers[tier], content, blocks)
        incoming.is_unsearched = False
        incoming.copy_local_blocks()
        incoming.allocate_missing()

    def finish_reception(self, token: int) -> bool:
        """Finish a reception: every missing block was written, and its digest was right."""
        incoming = self._find_incoming(token)
        offer = incoming.offer
        try:
            if incoming.is_complete:
                incoming.close()
                counts = remote_contents.record_remote(self._db, offer)
                remote_contents.mark_unannounced(self._db, offer.content)
            else:
                incoming.mark_received()
                if offer.is_early:
                    incoming.idle_s = time.monotonic()
                    return True
                counts = self._record_copy(incoming, offer)
            if counts:
                self._forget(incoming)
            else:
                self._discard(incoming)
            return counts
        except BaseException:
            self._discard(incoming)
            raise
        finally:
            self._release_token(offer.content)

    def _forget(self, incoming: IncomingCopy) -> None:
        with self._lock:
            self._incoming.pop(incoming.offer.content, None)

    def _discard(self, incoming: IncomingCopy) -> None:
        """Forget what arrived, and drop its file and rows."""
        self._forget(incoming)
        incoming.discard(self._db)

    def _record_copy(self, incoming: IncomingCopy, offer: Offer) -> bool:
        """Make a complete file a copy that counts, under the content's name."""
        if not incoming.has_whole_offer() or not self._verify_on_disk(incoming.storage, incoming.fd, offer):
            log.error("what arrived of content %d does not have the digest that was offered; it was thrown away", offer.content)
            return False
        storage = incoming.storage
        # The old copy stops counting before its file changes. What this node has written since is never replaced.
        with self._db.transaction():
            self._require_replaceable(offer)
            disk.act("host:outdated", remote_contents.mark_copies_stale, self._db, offer.content)
        with self._db.transaction():
            # One generation of a content arrives at a time. A fetch that runs now finds this one in its place.
            self._require_replaceable(offer)
            disk.act("host:rename", storage.rename, incoming.reserved_id, offer.content)
            if not remote_contents.record_hosted_copy(self._db, offer, incoming.reserved_id, storage.tier):
                raise Busy("the content moved on")
        incoming.close()
        disk.reach("host:counted")
        if storage.tier is not Tier.RAM:
            storage.fsync_directory()
            disk.act("host:persist", self._db.persist)
        self._drop_stale_copies(offer.content, storage.tier)
        self._record_sender(offer)
        self._notify.wake_lanes()
        return True

    def _record_sender(self, offer: Offer) -> None:
        """Record the copy of a sender that did not make the content: after its death this node checks."""
        sender = next((node.number for node in self._cluster.view().nodes if node.name == offer.sender), 0)
        if sender and sender != identity.get_origin_node(offer.content) and offer.digest is not None:
            peer_copies.insert_peer_copy(self._db, PeerCopy(offer.content, sender, offer.generation, offer.digest))

    def _require_replaceable(self, offer: Offer) -> None:
        """Refuse if this node has written or deleted the content since the offer began."""
        known = get_content(self._db, offer.content)
        if known is None:
            return
        is_written_here = known.state is ContentState.CLOSED and not known.is_remote
        is_same = known.generation == offer.generation and known.digest in (None, offer.digest)
        can_replace = known.generation < offer.generation and not remote_contents.is_own_unpublished(self._db, offer.content)
        if known.state in (ContentState.OPEN, ContentState.DOOMED) or is_written_here or not (is_same or can_replace):
            raise Busy("the content moved on")

    def _verify_on_disk(self, storage: TierStorage, fd: int, offer: Offer) -> bool:
        """Read the bytes back from a disk. In RAM the receiver has just checked them."""
        if storage.tier is Tier.RAM:
            return True
        storage.persist(fd, "host")
        return transfer.read(fd, label="host:check") == (offer.size, offer.digest, offer.blocks)

    def _drop_stale_copies(self, content: int, tier: Tier) -> None:
        """Drop copies of the previous generation in other tiers."""
        for copy in copies.list_copies(self._db, content):
            if copy.tier is not tier and copy.state is CopyState.STALE and copy.tier is not Tier.PFS and copy.tier in self._tiers:
                copies.delete_copy(self._db, content, copy.tier)
                self._tiers[copy.tier].remove(content)

    def abort_reception(self, token: int, *, keep_blocks: bool = True) -> None:
        """End a transfer early. What came is used when the rest is offered."""
        try:
            incoming = self._find_incoming(token)
        except InvalidArgument:
            return
        if incoming.is_complete:
            incoming.close()
            self._forget(incoming)
        elif not (keep_blocks or incoming.has_received):
            self._discard(incoming)
        else:
            incoming.mark_unverified()
            incoming.idle_s = time.monotonic()
        self._release_token(incoming.offer.content)

    def _find_incoming(self, token: int) -> IncomingCopy:
        with self._lock:
            for content, known in self._busy_tokens.items():
                if known == token and content in self._incoming:
                    return self._incoming[content]
        raise InvalidArgument("no such transfer is under way")

    def _drop_idle(self) -> None:
        """Drop incoming copies whose sender stopped, and the oldest ones if there are too many."""
        now_s = time.monotonic()
        with self._lock:
            idle = sorted((one.idle_s, content) for content, one in self._incoming.items() if content not in self._busy_tokens)
            excess = len(idle) - limits.RECEPTIONS_MAX
            gone = [content for rank, (since_s, content) in enumerate(idle) if rank < excess or now_s - since_s > limits.RECEPTION_KEEP_S]
            stale = [self._incoming.pop(content) for content in gone]
        for incoming in stale:
            incoming.discard(self._db)

    # --- lending -----------------------------------------------------------------------------------------------------

    def open_copy(self, content: int, digest: bytes | None) -> OpenCopy:
        """Open a copy for reading. It stays readable if it is dropped meanwhile."""
        return self._open_copy(content, digest)[0]

    def _open_copy(self, number: int, digest: bytes | None) -> tuple[OpenCopy, TierStorage]:
        known = get_content(self._db, number)
        if (
            known is not None
            and known.state in (ContentState.OPEN, ContentState.DOOMED)
            and (opened := self._open_snapshots.open_snapshot(number, digest)) is not None
        ):
            return opened
        # A doomed content is opened for readers that know it; for others it does not exist any more.
        accepted = {ContentState.SEALED: (None, known.digest), ContentState.DOOMED: (known.digest,)} if known is not None else {}
        if known is None or known.digest is None or digest not in accepted.get(known.state, ()):
            raise _build_not_found(known, f"content {number} is not here, or not in that state")
        for tier in copies.list_good_tiers(self._db, number, self._tiers.keys() - {Tier.PFS}):
            try:
                fd = self._tiers[tier].open(number)
            except FileNotFoundError:
                continue
            if is_unchanged(self._db, known):
                blocks = known.block_digests or b""
                return OpenCopy(number, known.inode, known.generation, known.size, known.digest, blocks, fd=fd), self._tiers[tier]
            os.close(fd)
        raise _build_not_found(known, f"no copy of content {number} is here")

    def seal_and_open(self, content: int, timeout_s: float) -> OpenCopy | None:
        """Open a closed content when it is sealed, and an open or deleted one in its present state."""
        until_s = time.monotonic() + min(timeout_s, limits.SEAL_REQUEST_MAX_S)
        while True:
            known = get_content(self._db, content)
            if known is None or known.is_remote:
                raise CopyNotFound(f"content {content} is not this node's own")
            is_doomed = known.state is ContentState.DOOMED
            if known.state is ContentState.SEALED or (is_doomed and known.digest is not None):
                return self.open_copy(content, known.digest)
            if known.state not in (ContentState.OPEN, ContentState.CLOSED, ContentState.DOOMED):
                raise CopyNotFound(f"content {content} is gone")
            if known.state is not ContentState.CLOSED and (copy := self._take_snapshot(content)) is not None:
                return copy
            if is_doomed:
                raise CopyNotFound(f"content {content} is gone")
            if time.monotonic() > until_s:
                return None
            self._notify.wake_lanes()
            self._pause.wait(SEAL_POLL_S)

    def _take_snapshot(self, content: int) -> OpenCopy | None:
        with suppress(FileNotFoundError):
            return self._open_snapshots.take_snapshot(content)
        return None

    # --- the rest ----------------------------------------------------------------------------------------------------

    def release_copies(self, contents: Sequence[int]) -> None:
        """Note contents that a peer reports as unneeded, for the reconcile step to ask the store."""
        with self._lock:
            # The next sweep finds the rest.
            self.reported_unneeded.update(contents[: max(0, limits.UNCONFIRMED_MAX - len(self.reported_unneeded))])
        self._notify.wake_lanes()

    def close(self) -> None:
        """Abort all receptions."""
        with self._lock:
            unfinished, self._incoming = list(self._incoming.values()), {}
        for incoming in unfinished:
            try:
                incoming.discard(self._db)
            except (OSError, CkptfsError) as failure:
                log.warning("what had arrived of content %d stays until the next start: %s", incoming.offer.content, failure)


def _build_not_found(known: Content | None, message: str) -> CopyNotFound:
    """Return the error for a missing copy. An own content that cannot be opened is not gone."""
    is_own = known is not None and not known.is_remote and known.state is not ContentState.DOOMED
    return CopyUnavailable(message) if is_own else CopyNotFound(message)
