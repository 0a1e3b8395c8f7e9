"""The replicate step: copies of sealed contents on other nodes.

Takes: sealed contents with too few copies (`content.under_replicated`): this node's own, and those of dead nodes that it repairs.
Leaves: verified copies on enough peers in different failure domains, and their `peer_copy` rows.
If we die here: only copies that a peer has reported as verified count. The content is still under-replicated and is offered again.

Each peer has its own queue and threads, so a slow or dead peer delays no other. Contents that a peer does not take go to the next node in
placement order. A content that is written again meanwhile is skipped: its next generation is replicated separately.

During a drain with a deadline the catalog has an order of urgency. When set or changed, the queues are filled again in that order; only
what is being sent goes on.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence

from ckptfs import disk, limits, step_durations
from ckptfs.catalog import exposure, peer_copies, summary
from ckptfs.catalog.contents import expire_previous, is_unchanged
from ckptfs.catalog.database import Database
from ckptfs.catalog.peer_copies import PeerCopy
from ckptfs.clique import locations
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import ClusterView, Node
from ckptfs.clique.peer_api import Offer, PeerCorrupt, PeerFailed, PeerRefused, SendResult
from ckptfs.errors import StoreUnreachable
from ckptfs.flow.replicate.peer_queues import Job, PeerBackoff, PeerLoad, PeerQueues
from ckptfs.model import Content, Notifier, Tier
from ckptfs.tiers import local_copies
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

disk.declare_labels("replicate:check:read", "replicate:counted")

BATCH_CONTENTS = 256
UNREACHABLE_TROUBLE = "copies"
UNREACHABLE_REMEDY = "check the network between the nodes, their `listen=` ports and their keys: `ckptfs doctor` on both"
FORGET_BATCH = locations.LOAD_CONTENTS_MAX


class Replicate:
    """Plans in its lane; sends in the threads of the peers."""

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
        self._urgent_groups: tuple[tuple[int, ...], ...] = ()
        self._failures: dict[int, str] = {}  # The last failure of each peer.
        self._unreachable: list[int] = []  # The peers that the trouble names.

    def step(self) -> bool:
        """Queue one batch of under-replicated contents. Return True if there may be more at once."""
        self._report_unreachable()
        with self._planning_lock:
            more = self._plan_batch()
        if not more:
            # Last, since it asks the store: copies are also made while the store does not answer.
            more = self._release_unneeded(self._cluster.view())
        return more

    def next_due_s(self) -> float | None:
        """Return the seconds until an avoided peer or content is tried again."""
        return self._backoff.next_due_s()

    def retry_now(self) -> None:
        """Forget all backoffs."""
        self._backoff.clear()

    def close(self) -> None:
        """End the threads of the peers and abandon their transfers."""
        self._queues.close()

    def list_loads(self) -> list[PeerLoad]:
        """Return what is queued or being sent, for each peer."""
        return self._queues.list_loads()

    # --- planning ----------------------------------------------------------------------------------------------------

    def _plan_batch(self) -> bool:
        self._backoff.begin_plan()
        if not self._cluster.has_peers():
            return False
        # If this step fails, the next one begins with the first content.
        after, self._after = self._after, 0
        if self._plan_urgent():
            return False  # Those that are left are planned when a queue has room.
        batch = peer_copies.list_under_replicated(self._db, after, BATCH_CONTENTS)
        for content, tier in batch:
            if tier in self._tiers:  # Else it waits until its tier returns.
                self._plan(content, tier)
        more = len(batch) == BATCH_CONTENTS
        if more:
            self._after = batch[-1][0].id
        return more

    def _plan_urgent(self) -> bool:
        """Queue the urgent contents in their order. Return True if they fill the queues."""
        order = exposure.load_order(self._db)
        groups = () if order is None else order.groups
        if groups != self._urgent_groups:
            self._urgent_groups = groups
            self._queues.clear_waiting()
        urgent = peer_copies.list_under_replicated_of(self._db, [inode for group in groups for inode in group])
        for content, tier in urgent:
            if tier in self._tiers:
                self._plan(content, tier)
        return len(urgent) == limits.PEER_QUEUE_MAX

    def _plan(self, content: Content, tier: Tier) -> None:
        """Queue a content for its new holders. If no candidate is left, it has all copies that it can get."""
        cluster = self._cluster
        if content.digest is None or (content.size and not content.block_digests):
            peer_copies.mark_replicated(self._db, content)  # More blocks than can be offered.
            return
        receiving_nodes = self._queues.list_nodes_for(content.id)
        holding_nodes = {cluster.node_number, *peer_copies.list_holders(self._db, content), *receiving_nodes}
        targets = cluster.choose_new_holders(holding_nodes)
        if not targets:
            if not receiving_nodes:
                peer_copies.mark_replicated(self._db, content)
                expire_previous(self._db, content)
            return
        avoided = self._backoff.list_avoided(content.id)
        for node in cluster.choose_new_holders(holding_nodes, avoided) if avoided else targets:
            if node.number not in holding_nodes:
                self._queues.put(node, content, tier)

    def _report_unreachable(self) -> None:
        """Say which nodes cannot be reached although they count as alive, while files wait for copies."""
        view = self._cluster.view()
        nodes = [number for number in self._backoff.list_failing() if number in view]
        if nodes and not peer_copies.list_under_replicated(self._db, 0, 1):
            nodes = []
        if nodes != self._unreachable:
            what = "files wait for copies: " + "; ".join(self._failures.get(number, "") for number in nodes[:3])
            summary.set_trouble(self._db, UNREACHABLE_TROUBLE, {"what": what, "path": "", "remedy": UNREACHABLE_REMEDY} if nodes else None)
            self._unreachable = nodes

    # --- sending, in the peers' threads ------------------------------------------------------------------------------

    def _send(self, node: Node, jobs: Sequence[Job]) -> bool:
        """Send contents to one peer, small ones together. Return True if it has them all."""
        try:
            return self._try_send(node, jobs)
        except BaseException:
            for content, _ in jobs:
                self._backoff.record_refusal(node.number, content.id, 0)  # Else it would be tried again at once, without end.
            raise

    def _try_send(self, node: Node, jobs: Sequence[Job]) -> bool:
        began_s = time.monotonic()
        outcomes = self._offer_batch(node, jobs)
        took_s = time.monotonic() - began_s
        # A failure that ended all jobs counts once.
        ends = {id(outcome): outcome for outcome in outcomes}
        verified = []
        for (content, tier), outcome in zip(jobs, outcomes, strict=True):
            if isinstance(outcome, SendResult):
                verified += [content] if self._record_outcome(node, content, outcome) else []
            elif ends.pop(id(outcome), None) is not None or isinstance(outcome, PeerRefused | PeerCorrupt | OSError):
                self._handle_failure(node, content, tier, outcome)
        self._record_verified(node, verified)
        for content in verified:
            step_durations.record(step_durations.REPLICATE, took_s / len(jobs), content.size)
        return len(verified) == len(jobs)

    def _handle_failure(self, node: Node, content: Content, tier: Tier, failure: PeerFailed | OSError) -> None:
        if isinstance(failure, PeerRefused):
            self._backoff.record_refusal(node.number, content.id, failure.code)
            log.debug("content %d: refused by %s: %s", content.id, node.name, failure)
        elif isinstance(failure, PeerCorrupt):
            self._verify_own_copy(node, content, tier, failure)
        elif isinstance(failure, PeerFailed):
            self._failures[node.number] = str(failure)
            if is_unchanged(self._db, content) and self._backoff.record_failure(node.number):
                log.info("node %s: cannot be reached for copies: %s", node.name, failure)
        else:
            # The content was deleted or moved, or the disk fails. The next plan finds out.
            self._backoff.record_refusal(node.number, content.id, failure.errno or 0)
            log.debug("content %d: cannot be sent from %s: %s", content.id, tier, failure)

    def _handle_batch_end(self, node: Node, is_ok: bool) -> None:
        """Plan failed contents again at once, and refill an empty queue."""
        if not is_ok or self._queues.take_refill_request(node):
            self._notify.wake_lanes()
            with self._planning_lock:
                self._plan_batch()

    def _offer_batch(self, node: Node, jobs: Sequence[Job]) -> list[SendResult | PeerFailed | OSError]:
        """Offer contents to a peer. Return the outcome of each."""
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
            return [sender.send(node, *offers[0], is_wanted=lambda: is_unchanged(self._db, first))]
        return sender.send_many(node, offers) if offers else ()

    def _record_outcome(self, node: Node, content: Content, sent: SendResult) -> bool:
        log.debug("content %d: on %s, %d of %d bytes were sent", content.id, node.name, sent.bytes_moved, content.size)
        self._backoff.record_success(node.number)
        if not sent.is_verified:
            self._backoff.record_refusal(node.number, content.id, 0)
        return sent.is_verified

    def _record_verified(self, node: Node, contents: list[Content]) -> None:
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
        """Record verified copies. Those that arrive during the commit of another thread share the next one."""
        with self._commit_lock:
            with self._lock:
                done, self._verified = self._verified, []
            if done:
                with self._db.transaction():
                    for copy in done:
                        peer_copies.insert_peer_copy(self._db, copy)
                disk.reach("replicate:counted")

    def _finish_content(self, content: Content) -> bool:
        """Mark a content replicated if it has all its copies. Return whether it has."""
        if self._cluster.choose_new_holders({self._cluster.node_number, *peer_copies.list_holders(self._db, content)}):
            return False
        peer_copies.mark_replicated(self._db, content)
        expire_previous(self._db, content)
        return True

    def _verify_own_copy(self, node: Node, content: Content, tier: Tier, failure: PeerCorrupt) -> None:
        """Check the copy of which a peer got wrong data: it is being written, or bad (P4)."""
        self._backoff.record_refusal(node.number, content.id, 0)
        try:
            problem = local_copies.find_problem(self._tiers[tier], content, label="replicate:check")
        except OSError as trouble:
            log.warning("content %d: cannot be read in %s: %s", content.id, tier, trouble)
            return
        if problem and local_copies.quarantine(self._db, content, tier, f"{problem} ({failure})"):
            self._notify.wake_lanes()

    # --- copies that are not needed any more --------------------------------------------------------------------------

    def _release_unneeded(self, view: ClusterView) -> bool:
        """Tell peers which copies of deleted contents may go, also later. Return True if there is more."""
        avoided = [number for number in self._backoff.list_avoided() if number in view]
        gone = peer_copies.list_unneeded(self._db, FORGET_BATCH, avoided)
        if not gone:
            return False
        try:
            copies = locations.delete_copies(self._cluster.store, sorted({copy.content for copy in gone}))
        except StoreUnreachable as failure:
            log.debug("copies not needed any more: not released yet: %s", failure)
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
                    log.debug("node %s: its unneeded copies are not released yet: %s", node.name, failure)
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
