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
from ckptfs.catalog import former, peers, report, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.peers import PeerCopy
from ckptfs.clique import holders, placement
from ckptfs.clique.membership import ClusterView, Node
from ckptfs.clique.peers import PeerCorrupt, PeerFailed, PeerRefused, SendResult
from ckptfs.clique.shelf import Offer
from ckptfs.clique.surroundings import Cluster
from ckptfs.errors import StoreUnreachable
from ckptfs.flow.replicate.avoiding import Avoiding
from ckptfs.flow.replicate.queues import Job, Load, Queues
from ckptfs.model import Content, CopyState, Notifier, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.place import Places

log = logging.getLogger(__name__)

disk.declare_labels("replicate:check:read", "replicate:counted")

BATCH_CONTENTS = 256
FORGET_BATCH = holders.LOAD_CONTENTS_MAX


class Replicate:
    """Plans in its lane; sends in the peers' threads."""

    def __init__(self, db: Database, places: Places, notify: Notifier, around: Cluster) -> None:
        self._db = db
        self._places = places
        self._notify = notify
        self._around = around
        self._avoiding = Avoiding()
        self._queues = Queues(self._send, self._ended)
        self._lock = threading.Lock()
        self._planning = threading.Lock()
        self._done: list[PeerCopy] = []
        self._committing = threading.Lock()
        self._after = 0
        self._small: tuple[ClusterView | None, frozenset[int], ClusterView] = (None, frozenset(), ClusterView())

    def step(self) -> bool:
        """Hand one batch of what is lacking to the peers' queues. True: there may be more at once."""
        with self._planning:
            more = self._plan_batch()
        if not more:
            # Last: it asks the store, and copies are made while that does not answer, too.
            more = self._forget_unneeded(self._around.view())
        return more

    def next_due_s(self) -> float | None:
        """Until the first peer, or content, that is being avoided is tried again."""
        return self._avoiding.due_s()

    def retry_now(self) -> None:
        """Nobody is avoided any more."""
        self._avoiding.forget()

    def close(self) -> None:
        """End the peers' threads; what they are sending is given up."""
        self._queues.close()

    def in_flight(self) -> tuple[int, int]:
        """(contents, bytes) that are queued or on their way."""
        return self._queues.load()

    def loads(self) -> list[Load]:
        """The same for each peer."""
        return self._queues.loads()

    # --- planning ----------------------------------------------------------------------------------------------------

    def _plan_batch(self) -> bool:
        world = self._around.view()
        if len(world) < 2 or self._around.factor < 2:
            return False
        # A step that fails leaves the next one to begin with the first content.
        after, self._after = self._after, 0
        batch = peers.list_under_replicated(self._db, after, BATCH_CONTENTS)
        for content, tier in batch:
            if tier in self._places:  # Else it waits until its tier is there again.
                self._plan(content, tier, world)
        more = len(batch) == BATCH_CONTENTS
        if more:
            self._after = batch[-1][0].id
        return more

    def _plan(self, content: Content, tier: Tier, world: ClusterView) -> None:
        """Queue a content for those who shall get it; nobody left to ask: it has what copies it can get."""
        around = self._around
        if content.digest is None or (content.size and not content.block_digests):
            peers.mark_replicated(self._db, content)  # More blocks than can be offered.
            return
        on_way = self._queues.nodes_of(content.id)
        has = {around.node_number, *peers.list_holders(self._db, content), *on_way}
        wanted = placement.choose_new_holders(world, has, around.node_number, around.factor, around.jump)
        if not wanted:
            if not on_way:
                peers.mark_replicated(self._db, content)
                former.expire_previous(self._db, content)
            return
        avoided = self._avoiding.nodes(content.id)
        for node in (
            placement.choose_new_holders(self._without(world, avoided), has, around.node_number, around.factor, around.jump)
            if avoided
            else wanted
        ):
            if node.number not in has:
                self._queues.put(node, content, tier)

    def _without(self, world: ClusterView, avoided: frozenset[int]) -> ClusterView:
        """The world as it would be if these had left. Kept, because placement remembers what it found in a World."""
        seen, gone, smaller = self._small
        if seen is not world or gone != avoided:
            smaller = ClusterView(tuple(node for node in world.nodes if node.number not in avoided))
            self._small = (world, avoided, smaller)
        return smaller

    # --- sending, in the peers' threads ------------------------------------------------------------------------------

    def _send(self, node: Node, jobs: Sequence[Job]) -> bool:
        """Send contents to one peer, several small ones at once; whether it has them all now. Raises nothing that can be foreseen."""
        try:
            return self._tried(node, jobs)
        except BaseException:
            for content, _ in jobs:
                self._avoiding.refused(node.number, content.id, 0)  # Else it would be tried again at once, for ever.
            raise

    def _tried(self, node: Node, jobs: Sequence[Job]) -> bool:
        outcomes = self._offered(node, jobs)
        # What ended all of them is one failure of the node.
        ends = {id(outcome): outcome for outcome in outcomes}
        there = []
        for (content, tier), outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, SendResult):
                there += [content] if self._is_there(node, content, outcome) else []
            elif ends.pop(id(outcome), None) is not None or isinstance(outcome, PeerRefused | PeerCorrupt | OSError):
                self._failed(node, content, tier, outcome)
        self._count(node, there)
        return len(there) == len(jobs)

    def _failed(self, node: Node, content: Content, tier: Tier, failure: PeerFailed | OSError) -> None:
        if isinstance(failure, PeerRefused):
            self._avoiding.refused(node.number, content.id, failure.code)
            log.debug("%s does not take content %d: %s", node.name, content.id, failure)
        elif isinstance(failure, PeerCorrupt):
            self._doubt(node, content, tier, failure)
        elif isinstance(failure, PeerFailed):
            if settling.is_unchanged(self._db, content) and self._avoiding.failed(node.number):
                log.info("%s cannot be reached for copies: %s", node.name, failure)
        else:
            # The tier gave it up: it was deleted, moved, or the disk fails. The next plan sees which.
            self._avoiding.refused(node.number, content.id, failure.errno or 0)
            log.debug("content %d cannot be sent from %s: %s", content.id, tier, failure)

    def _ended(self, node: Node, well: bool) -> None:
        """What failed goes to somebody else at once; an empty queue is filled."""
        if not well or self._queues.low(node):
            self._notify.wake_lanes()
            with self._planning:
                self._plan_batch()

    def _offered(self, node: Node, jobs: Sequence[Job]) -> list[SendResult | PeerFailed | OSError]:
        """Offer contents to a peer; what became of each."""
        found: dict[int, SendResult | PeerFailed | OSError] = {}
        offers: dict[int, tuple[Offer, int]] = {}
        with contextlib.ExitStack() as opened:
            for index, (content, tier) in enumerate(jobs):
                try:
                    fd = opened.enter_context(disk.closing(self._places[tier].open(content.id)))
                    offers[index] = _offer(content), fd
                except OSError as failure:
                    found[index] = failure
            try:
                found |= zip(offers, self._passed(node, jobs[0][0], list(offers.values())), strict=True)
            except (PeerFailed, OSError) as failure:
                found |= dict.fromkeys(offers, failure)
        return [found[index] for index in range(len(jobs))]

    def _passed(self, node: Node, first: Content, offers: list[tuple[Offer, int]]) -> Sequence[SendResult | PeerFailed]:
        sender = self._around.peers
        if len(offers) == 1:
            return [sender.send(node, *offers[0], wanted=lambda: settling.is_unchanged(self._db, first))]
        return sender.send_many(node, offers) if offers else ()

    def _is_there(self, node: Node, content: Content, sent: SendResult) -> bool:
        log.debug("%s has content %d, %d of %d bytes went there", node.name, content.id, sent.bytes_moved, content.size)
        self._avoiding.well(node.number)
        if not sent.is_verified:
            self._avoiding.refused(node.number, content.id, 0)
        return sent.is_verified

    def _count(self, node: Node, there: list[Content]) -> None:
        """A peer has verified these."""
        if not there:
            return
        with self._lock:
            self._done += [PeerCopy(content.id, node.number, content.generation, content.digest or b"") for content in there]
        self._commit_done()
        with self._db.transaction():
            finished = [content for content in there if self._finish(content)]
        if finished:
            self._notify.wake_lanes()

    def _commit_done(self) -> None:
        """Record what peers have verified: what came in while another thread committed goes together."""
        with self._committing:
            with self._lock:
                done, self._done = self._done, []
            if done:
                with self._db.transaction():
                    for copy in done:
                        peers.insert_peer_copy(self._db, copy)
                disk.act("replicate:counted", lambda: None)

    def _finish(self, content: Content) -> bool:
        """Whether that was the last copy that was wanted: then who waits for it shall look."""
        around = self._around
        has = {around.node_number, *peers.list_holders(self._db, content)}
        if placement.choose_new_holders(around.view(), has, around.node_number, around.factor, around.jump):
            return False
        peers.mark_replicated(self._db, content)
        former.expire_previous(self._db, content)
        return True

    def _doubt(self, node: Node, content: Content, tier: Tier, failure: PeerCorrupt) -> None:
        """What was sent is not what was sealed: somebody writes it, or the copy here is bad (P4)."""
        self._avoiding.refused(node.number, content.id, 0)
        if not settling.is_unchanged(self._db, content):
            return
        try:
            fd = self._places[tier].open(content.id)
        except OSError:
            return
        try:
            found = transfer.read(fd, label="replicate:check")[:2]
        except OSError as trouble:
            log.warning("content %d cannot be read in %s: %s", content.id, tier, trouble)
            return
        finally:
            os.close(fd)
        if found != (content.size, content.digest) and settling.is_unchanged(self._db, content):
            settling.set_copy_state(self._db, content.id, tier, CopyState.QUARANTINED)
            name = os.fsdecode(report.get_path(self._db, content.inode))
            log.error("the copy of %s in %s is bad and does not count any more: %s", name, tier, failure)
            if settling.mark_lost(self._db, content):
                log.error("%s is lost: no copy is what was sealed; it gives EIO", name)

    # --- what need not be held any more --------------------------------------------------------------------------------

    def _forget_unneeded(self, world: ClusterView) -> bool:
        """Contents that are gone here, and of which the store knows no more: nobody need hold them, and the peers are told. What another
        node has made of one is held for that. Who lives and cannot be told now is told later; who was dead looks for itself. True: there
        may be more of them.
        """
        avoided = [number for number in self._avoiding.now() if number in world]
        gone = peers.list_unneeded(self._db, FORGET_BATCH, avoided)
        if not gone:
            return False
        try:
            having = holders.delete_copies(self._around.store, sorted({copy.content for copy in gone}))
        except StoreUnreachable as failure:
            log.debug("what need not be held any more cannot be told yet: %s", failure)
            return False
        having |= {(copy.content, copy.node) for copy in gone}
        silent = set(avoided)
        for number in {node for _, node in having} - {self._around.node_number}:
            node = world.by_number.get(number)
            if node is not None and number not in silent:
                try:
                    self._around.peers.release_copies(node, sorted(content for content, holder in having if holder == number))
                except PeerFailed as failure:
                    self._avoiding.failed(number)
                    silent.add(number)
                    log.debug("%s cannot be told yet what it may forget: %s", node.name, failure)
        with self._db.transaction():
            for copy in gone:
                if copy.node not in silent:
                    peers.delete_peer_copy(self._db, copy.content, copy.node)
            for content, number in having:
                if number in silent:
                    peers.insert_unneeded_copy(self._db, content, number)
        return len(gone) == FORGET_BATCH


def _offer(content: Content) -> Offer:
    assert content.digest is not None
    return Offer(content.id, content.inode, content.generation, content.size, content.digest, content.block_digests or b"")
