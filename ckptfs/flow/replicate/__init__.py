"""Takes: sealed contents that more nodes shall hold (`content.lacking`): this node's own, and those of dead nodes that it repairs.
Leaves: verified copies on as many peers as are wanted, in other failure domains, and their `peer_copy` rows.
If we die here: what a peer has not said it has verified does not count; the content is still lacking, and is offered again.

Each peer has a queue and threads of its own: a slow or dead one delays nobody else, and what it does not take goes to the next in the
order of placement. A content that is written again meanwhile is left alone: its next generation is another matter.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Sequence

from ckptfs import disk
from ckptfs.catalog import namespace, peer_copies
from ckptfs.catalog.contents import expire_previous, is_unchanged, mark_lost
from ckptfs.catalog.copies import set_copy_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.peer_copies import PeerCopy
from ckptfs.clique import locations, placement
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import ClusterView, Node
from ckptfs.clique.peer_api import Offer, PeerCorrupt, PeerFailed, PeerRefused, SendResult
from ckptfs.errors import StoreUnreachable
from ckptfs.flow.replicate.peer_queues import Job, PeerBackoff, PeerLoad, PeerQueues
from ckptfs.model import Content, CopyState, Notifier, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

disk.declare_labels("replicate:check:read", "replicate:counted")

BATCH_CONTENTS = 256
FORGET_BATCH = locations.LOAD_CONTENTS_MAX


class Replicate:
    """Plans in its lane; sends in the peers' threads."""

    def __init__(self, db: Database, tiers: Tiers, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._tiers = tiers
        self._notify = notify
        self._cluster = cluster
        self._backoff = PeerBackoff()
        self._queues = PeerQueues(self._send, self._handle_batch_end)
        self._lock = threading.Lock()
        self._planning_lock = threading.Lock()
        self._verified: list[PeerCopy] = []
        self._commit_lock = threading.Lock()
        self._after = 0
        self._reduced_view: tuple[ClusterView | None, frozenset[int], ClusterView] = (None, frozenset(), ClusterView())

    def step(self) -> bool:
        """Hand one batch of what is lacking to the peers' queues. True: there may be more at once."""
        with self._planning_lock:
            more = self._plan_batch()
        if not more:
            # Last: it asks the store, and copies are made while that does not answer, too.
            more = self._release_unneeded(self._cluster.view())
        return more

    def next_due_s(self) -> float | None:
        """Until the first peer, or content, that is being avoided is tried again."""
        return self._backoff.next_due_s()

    def retry_now(self) -> None:
        """Nobody is avoided any more."""
        self._backoff.clear()

    def close(self) -> None:
        """End the peers' threads; what they are sending is given up."""
        self._queues.close()

    def in_flight(self) -> tuple[int, int]:
        """(contents, bytes) that are queued or on their way."""
        return self._queues.count_in_flight()

    def list_loads(self) -> list[PeerLoad]:
        """The same for each peer."""
        return self._queues.list_loads()

    # --- planning ----------------------------------------------------------------------------------------------------

    def _plan_batch(self) -> bool:
        view = self._cluster.view()
        if len(view) < 2 or self._cluster.factor < 2:
            return False
        # A step that fails leaves the next one to begin with the first content.
        after, self._after = self._after, 0
        batch = peer_copies.list_under_replicated(self._db, after, BATCH_CONTENTS)
        for content, tier in batch:
            if tier in self._tiers:  # Else it waits until its tier is there again.
                self._plan(content, tier, view)
        more = len(batch) == BATCH_CONTENTS
        if more:
            self._after = batch[-1][0].id
        return more

    def _plan(self, content: Content, tier: Tier, view: ClusterView) -> None:
        """Queue a content for those who shall get it; nobody left to ask: it has what copies it can get."""
        cluster = self._cluster
        if content.digest is None or (content.size and not content.block_digests):
            peer_copies.mark_replicated(self._db, content)  # More blocks than can be offered.
            return
        receiving_nodes = self._queues.list_nodes_for(content.id)
        holding_nodes = {cluster.node_number, *peer_copies.list_holders(self._db, content), *receiving_nodes}
        targets = placement.choose_new_holders(view, holding_nodes, cluster.node_number, cluster.factor, cluster.jump)
        if not targets:
            if not receiving_nodes:
                peer_copies.mark_replicated(self._db, content)
                expire_previous(self._db, content)
            return
        avoided = self._backoff.list_avoided_for(content.id)
        for node in (
            placement.choose_new_holders(
                self._build_view_without(view, avoided), holding_nodes, cluster.node_number, cluster.factor, cluster.jump
            )
            if avoided
            else targets
        ):
            if node.number not in holding_nodes:
                self._queues.put(node, content, tier)

    def _build_view_without(self, view: ClusterView, avoided: frozenset[int]) -> ClusterView:
        """The world as it would be if these had left. Kept, because placement remembers what it found in a World."""
        base, excluded, reduced = self._reduced_view
        if base is not view or excluded != avoided:
            reduced = ClusterView(tuple(node for node in view.nodes if node.number not in avoided))
            self._reduced_view = (view, avoided, reduced)
        return reduced

    # --- sending, in the peers' threads ------------------------------------------------------------------------------

    def _send(self, node: Node, jobs: Sequence[Job]) -> bool:
        """Send contents to one peer, several small ones at once; whether it has them all now. Raises nothing that can be foreseen."""
        try:
            return self._try_send(node, jobs)
        except BaseException:
            for content, _ in jobs:
                self._backoff.record_refusal(node.number, content.id, 0)  # Else it would be tried again at once, for ever.
            raise

    def _try_send(self, node: Node, jobs: Sequence[Job]) -> bool:
        outcomes = self._offer_batch(node, jobs)
        # What ended all of them is one failure of the node.
        ends = {id(outcome): outcome for outcome in outcomes}
        verified = []
        for (content, tier), outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, SendResult):
                verified += [content] if self._record_outcome(node, content, outcome) else []
            elif ends.pop(id(outcome), None) is not None or isinstance(outcome, PeerRefused | PeerCorrupt | OSError):
                self._handle_failure(node, content, tier, outcome)
        self._record_verified(node, verified)
        return len(verified) == len(jobs)

    def _handle_failure(self, node: Node, content: Content, tier: Tier, failure: PeerFailed | OSError) -> None:
        if isinstance(failure, PeerRefused):
            self._backoff.record_refusal(node.number, content.id, failure.code)
            log.debug("%s does not take content %d: %s", node.name, content.id, failure)
        elif isinstance(failure, PeerCorrupt):
            self._verify_own_copy(node, content, tier, failure)
        elif isinstance(failure, PeerFailed):
            if is_unchanged(self._db, content) and self._backoff.record_failure(node.number):
                log.info("%s cannot be reached for copies: %s", node.name, failure)
        else:
            # The tier gave it up: it was deleted, moved, or the disk fails. The next plan sees which.
            self._backoff.record_refusal(node.number, content.id, failure.errno or 0)
            log.debug("content %d cannot be sent from %s: %s", content.id, tier, failure)

    def _handle_batch_end(self, node: Node, is_ok: bool) -> None:
        """What failed goes to somebody else at once; an empty queue is filled."""
        if not is_ok or self._queues.take_refill_request(node):
            self._notify.wake_lanes()
            with self._planning_lock:
                self._plan_batch()

    def _offer_batch(self, node: Node, jobs: Sequence[Job]) -> list[SendResult | PeerFailed | OSError]:
        """Offer contents to a peer; what became of each."""
        found: dict[int, SendResult | PeerFailed | OSError] = {}
        offers: dict[int, tuple[Offer, int]] = {}
        with contextlib.ExitStack() as opened:
            for index, (content, tier) in enumerate(jobs):
                try:
                    fd = opened.enter_context(disk.closing(self._tiers[tier].open(content.id)))
                    offers[index] = _build_offer(content), fd
                except OSError as failure:
                    found[index] = failure
            try:
                found |= zip(offers, self._transmit(node, jobs[0][0], list(offers.values())), strict=True)
            except (PeerFailed, OSError) as failure:
                found |= dict.fromkeys(offers, failure)
        return [found[index] for index in range(len(jobs))]

    def _transmit(self, node: Node, first: Content, offers: list[tuple[Offer, int]]) -> Sequence[SendResult | PeerFailed]:
        sender = self._cluster.peers
        if len(offers) == 1:
            return [sender.send(node, *offers[0], wanted=lambda: is_unchanged(self._db, first))]
        return sender.send_many(node, offers) if offers else ()

    def _record_outcome(self, node: Node, content: Content, sent: SendResult) -> bool:
        log.debug("%s has content %d, %d of %d bytes went there", node.name, content.id, sent.bytes_moved, content.size)
        self._backoff.record_success(node.number)
        if not sent.is_verified:
            self._backoff.record_refusal(node.number, content.id, 0)
        return sent.is_verified

    def _record_verified(self, node: Node, contents: list[Content]) -> None:
        """A peer has verified these."""
        if not contents:
            return
        with self._lock:
            self._verified += [PeerCopy(content.id, node.number, content.generation, content.digest or b"") for content in contents]
        self._commit_verified()
        with self._db.transaction():
            finished = [content for content in contents if self._finish_content(content)]
        if finished:
            self._notify.wake_lanes()

    def _commit_verified(self) -> None:
        """Record what peers have verified: what came in while another thread committed goes together."""
        with self._commit_lock:
            with self._lock:
                done, self._verified = self._verified, []
            if done:
                with self._db.transaction():
                    for copy in done:
                        peer_copies.insert_peer_copy(self._db, copy)
                disk.act("replicate:counted", lambda: None)

    def _finish_content(self, content: Content) -> bool:
        """Whether that was the last copy that was wanted: then who waits for it shall look."""
        cluster = self._cluster
        holding_nodes = {cluster.node_number, *peer_copies.list_holders(self._db, content)}
        if placement.choose_new_holders(cluster.view(), holding_nodes, cluster.node_number, cluster.factor, cluster.jump):
            return False
        peer_copies.mark_replicated(self._db, content)
        expire_previous(self._db, content)
        return True

    def _verify_own_copy(self, node: Node, content: Content, tier: Tier, failure: PeerCorrupt) -> None:
        """What was sent is not what was sealed: somebody writes it, or the copy here is bad (P4)."""
        self._backoff.record_refusal(node.number, content.id, 0)
        if not is_unchanged(self._db, content):
            return
        try:
            fd = self._tiers[tier].open(content.id)
        except OSError:
            return
        try:
            found = transfer.read(fd, label="replicate:check")[:2]
        except OSError as trouble:
            log.warning("content %d cannot be read in %s: %s", content.id, tier, trouble)
            return
        finally:
            os.close(fd)
        if found != (content.size, content.digest) and is_unchanged(self._db, content):
            set_copy_state(self._db, content.id, tier, CopyState.QUARANTINED)
            name = os.fsdecode(namespace.get_path(self._db, content.inode))
            log.error("the copy of %s in %s is bad and does not count any more: %s", name, tier, failure)
            if mark_lost(self._db, content):
                log.error("%s is lost: no copy is what was sealed; it gives EIO", name)

    # --- what need not be held any more --------------------------------------------------------------------------------

    def _release_unneeded(self, view: ClusterView) -> bool:
        """Contents that are gone here, and of which the store knows no more: nobody need hold them, and the peers are told. What another
        node has made of one is held for that. Who lives and cannot be told now is told later; who was dead looks for itself. True: there
        may be more of them.
        """
        avoided = [number for number in self._backoff.list_avoided() if number in view]
        gone = peer_copies.list_unneeded(self._db, FORGET_BATCH, avoided)
        if not gone:
            return False
        try:
            copies = locations.delete_copies(self._cluster.store, sorted({copy.content for copy in gone}))
        except StoreUnreachable as failure:
            log.debug("what need not be held any more cannot be told yet: %s", failure)
            return False
        copies |= {(copy.content, copy.node) for copy in gone}
        unreachable = set(avoided)
        for number in {node for _, node in copies} - {self._cluster.node_number}:
            node = view.by_number.get(number)
            if node is not None and number not in unreachable:
                try:
                    self._cluster.peers.release_copies(node, sorted(content for content, holder in copies if holder == number))
                except PeerFailed as failure:
                    self._backoff.record_failure(number)
                    unreachable.add(number)
                    log.debug("%s cannot be told yet what it may forget: %s", node.name, failure)
        with self._db.transaction():
            for copy in gone:
                if copy.node not in unreachable:
                    peer_copies.delete_peer_copy(self._db, copy.content, copy.node)
            for content, number in copies:
                if number in unreachable:
                    peer_copies.insert_unneeded_copy(self._db, content, number)
        return len(gone) == FORGET_BATCH


def _build_offer(content: Content) -> Offer:
    assert content.digest is not None
    return Offer(content.id, content.inode, content.generation, content.size, content.digest, content.block_digests or b"")
