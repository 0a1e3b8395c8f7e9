"""The repair step: copies that are missing after nodes died, joined or restarted.

Takes: a changed view of the live nodes.
Leaves: `content.under_replicated` for every content that has too few copies; the replicate step makes them. The newest files of a dead
node become candidates for checkpoint sets.
If we die here: the next mover compares the catalog with the view again, and checks the contents of all nodes that are dead then.

A live writer repairs its own contents, else the live holder with the lowest number. Only nodes that hold contents which a dead node made,
or of which it had a copy, ask the store, each after a random delay. Contents that this node lost with a tier are fetched from peers, a few
at a time, so that files for which an application waits come first.
"""

import errno
import logging
import time

from ckptfs import limits
from ckptfs.catalog import mover_requests, peer_copies, remote_contents, set_members
from ckptfs.catalog.database import Database
from ckptfs.catalog.peer_copies import KnownNode
from ckptfs.clique import locations
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import ClusterView
from ckptfs.model import Notifier

log = logging.getLogger(__name__)


class Repair:
    """Follows the view, and checks the hosted contents after a node died, one batch a step."""

    def __init__(self, db: Database, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._cluster = cluster
        self._last_view: ClusterView | None = None
        self._dead_nodes: dict[int, float] = {}
        self._after = 0
        self._marked_count = 0
        self._open_requests: list[int] = []
        self._refetch_after: int | None = None
        self._next_refetch_s = time.monotonic()

    def step(self) -> bool:
        """Apply a new view and check one batch. Return True if there is more to check."""
        view = self._cluster.view()
        if view is not self._last_view:
            self._apply_view(view)
            self._last_view = view
            self._next_refetch_s = time.monotonic()
        self._refetch_lost()
        due = [number for number, due_s in self._dead_nodes.items() if due_s <= time.monotonic()]
        if due and not self._check_hosted(due[0]):
            del self._dead_nodes[due[0]]
        return bool(due)

    def next_due_s(self) -> float | None:
        """Return the seconds until lost contents are looked for again, or those of a dead node are checked."""
        due_s = min([self._next_refetch_s, *self._dead_nodes.values()]) - time.monotonic()
        return max(0.0, min(due_s, limits.REQUEST_POLL_S) if self._open_requests else due_s)

    # --- the view ----------------------------------------------------------------------------------------------------

    def _apply_view(self, view: ClusterView) -> None:
        """Record the new view, and its consequences for this node's own contents."""
        current = {node.number: KnownNode(node.number, node.name, node.domain, node.incarnation) for node in view.nodes}
        factor = self._cluster.factor
        with self._db.transaction():
            previous = peer_copies.list_live_nodes(self._db)
            self._note_dead_nodes(current, previous)
            if previous == current and factor == peer_copies.get_replication_factor(self._db):
                return
            died = [node for node in previous.values() if node.number not in current]
            under_replicated = sum(peer_copies.mark_node_copies_lost(self._db, node.number) for node in died)
            under_replicated += sum(peer_copies.delete_copies_of_node(self._db, number) for number in self._list_restarted(current))
            if _can_place_more(previous, current, factor) or factor != peer_copies.get_replication_factor(self._db):
                under_replicated += peer_copies.mark_all_under_replicated(self._db)
            peer_copies.set_live_nodes(self._db, self._cluster.node_number, factor, current.values())
        if under_replicated:
            log.info("cluster: nodes changed; %d contents of this node may need copies", under_replicated)
        self._notify.wake_lanes()

    def _note_dead_nodes(self, current: dict[int, KnownNode], previous: dict[int, KnownNode]) -> None:
        """Note the nodes to check: at the start all dead ones, then each that dies, after a delay."""
        known = peer_copies.list_nodes(self._db) if self._last_view is None else previous
        delay_s = 0.0 if self._last_view is None else self._cluster.draw_delay_s(limits.SPREAD_URGENT_S_MAX)
        dead = {number: time.monotonic() + delay_s for number in known if number not in current}
        self._dead_nodes = {number: due_s for number, due_s in (dead | self._dead_nodes).items() if number not in current}

    def _list_restarted(self, current: dict[int, KnownNode]) -> list[int]:
        """Return the nodes that have restarted since they were last seen."""
        known = peer_copies.list_nodes(self._db)
        others = (node for number, node in current.items() if number in known and number != self._cluster.node_number)
        return [node.number for node in others if node.incarnation != known[node.number].incarnation]

    # --- contents that this node lost --------------------------------------------------------------------------------

    def _refetch_lost(self) -> None:
        """Request fetches of this node's own contents that only other nodes have."""
        if time.monotonic() >= self._next_refetch_s:
            self._next_refetch_s = time.monotonic() + limits.RECONCILE_INTERVAL_S
            self._refetch_after = 0
        answers = [mover_requests.get(self._db, number) for number in self._open_requests if not mover_requests.is_open(self._db, number)]
        if any(answer is not None and answer.error == errno.ENOSPC for answer in answers):
            self._refetch_after = None  # The next one would not fit either.
        self._open_requests = [number for number in self._open_requests if mover_requests.is_open(self._db, number)]
        while self._refetch_after is not None and len(self._open_requests) < limits.REFETCHES_MAX:
            content = peer_copies.find_rebuildable(self._db, self._refetch_after)
            self._refetch_after = None if content is None else content.id
            if content is not None:
                self._open_requests.append(
                    mover_requests.insert_request(self._db, mover_requests.FETCH, content.inode, wait_s=limits.FETCH_STALL_S)
                )
                self._notify.wake_lanes()

    # --- hosted contents ---------------------------------------------------------------------------------------------

    def _check_hosted(self, dead_node: int) -> bool:
        """Mark a batch of a dead node's contents to copy. Return False after the last. Repeated if it raises."""
        if not self._after:
            with self._db.transaction():
                set_members.insert_candidates_of_dead(self._db, dead_node)
        batch = remote_contents.list_hosted_with(self._db, dead_node, self._after, locations.LOAD_CONTENTS_MAX)
        content_locations = locations.refresh(self._db, self._cluster.store, [content.id for content in batch], self._cluster.node_number)
        to_copy = [content.id for content in batch if self._cluster.is_ours_to_copy(content, content_locations[content.id])]
        if peer_copies.mark_under_replicated(self._db, to_copy):
            self._marked_count += len(to_copy)
            self._notify.wake_lanes()
        self._after = batch[-1].id if batch else 0
        if not batch and self._marked_count:
            log.info("cluster: this node copies %d contents of dead nodes", self._marked_count)
            self._marked_count = 0
        return bool(batch)


def _can_place_more(previous: dict[int, KnownNode], current: dict[int, KnownNode], factor: int) -> bool:
    """Return whether a node joined while there were too few nodes or failure domains for all copies."""
    nodes, domains = len(previous), len({node.domain for node in previous.values()})
    joined = current.keys() - previous.keys()
    return bool(joined) and (nodes < factor or domains < factor)
