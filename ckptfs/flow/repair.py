"""Takes: a world of nodes that has changed: some died, some joined, some live again and may have lost what they had.
Leaves: `content.lacking` for every content that has fewer copies now than are wanted, which the replicate flow makes again.
If we die here: the world that was compared with is the one in the catalog, and the comparison is made again.

For a content whose writer lives that one sees to it. For one whose writer is dead the first of the living holders does, who stands for
it in placement too: all of them ask the same store and see the same world, and two that do not only make a copy too many.
What this node wrote and has lost with a tier comes back from the others, a few files at a time, so that whoever waits for one comes first.
"""

import errno
import logging
import time

from ckptfs import limits
from ckptfs.catalog import mover_requests, peer_copies, remote_contents
from ckptfs.catalog.database import Database
from ckptfs.catalog.peer_copies import KnownNode
from ckptfs.clique import locations, placement
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.locations import ContentLocations
from ckptfs.clique.membership import ClusterView
from ckptfs.model import Content, Notifier

log = logging.getLogger(__name__)


class Repair:
    """Follows the world, and after a death looks through what is held here, one batch a step."""

    def __init__(self, db: Database, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._cluster = cluster
        self._last_view: ClusterView | None = None
        self._after: int | None = None
        self._marked_count = 0
        self._open_requests: list[int] = []
        self._refetch_after: int | None = None
        self._next_refetch_s = time.monotonic()

    def step(self) -> bool:
        """True: there is more to look through."""
        view = self._cluster.view()
        if view is not self._last_view:
            self._apply_view(view)
            self._last_view = view
            self._next_refetch_s = time.monotonic()
        self._refetch_lost()
        return self._after is not None and self._check_hosted(view, self._after)

    def next_due_s(self) -> float | None:
        """When the world changes; and until what was lost here is looked for again."""
        return limits.REQUEST_POLL_S if self._open_requests else max(0.0, self._next_refetch_s - time.monotonic())

    # --- the world ---------------------------------------------------------------------------------------------------

    def _apply_view(self, view: ClusterView) -> None:
        """Take the new world into the catalog, together with what it means for this node's own contents."""
        current = {node.number: KnownNode(node.number, node.name, node.domain, node.incarnation) for node in view.nodes}
        factor = self._cluster.factor
        with self._db.transaction():
            previous = peer_copies.list_live_nodes(self._db)
            if previous == current and factor == peer_copies.get_replication_factor(self._db):
                return
            died = [node for node in previous.values() if node.number not in current]
            under_replicated = sum(peer_copies.mark_node_copies_lost(self._db, node.number) for node in died)
            under_replicated += sum(peer_copies.delete_copies_of_node(self._db, number) for number in self._list_restarted(current))
            if _can_place_more(previous, current, factor) or factor != peer_copies.get_replication_factor(self._db):
                under_replicated += peer_copies.mark_all_under_replicated(self._db)
            peer_copies.set_live_nodes(self._db, self._cluster.node_number, factor, current.values())
        if died:
            self._after = 0
        if under_replicated:
            log.info("the nodes have changed: %d contents of this one may want copies elsewhere", under_replicated)
        self._notify.wake_lanes()

    def _list_restarted(self, current: dict[int, KnownNode]) -> list[int]:
        """Nodes that live another life than the one in which they were last seen."""
        known = {number: peer_copies.find_incarnation(self._db, number) for number in current if number != self._cluster.node_number}
        return [number for number, incarnation in known.items() if incarnation not in (None, current[number].incarnation)]

    # --- what was lost here ------------------------------------------------------------------------------------------

    def _refetch_lost(self) -> None:
        """Have the next of this node's own contents fetched that only others have."""
        if time.monotonic() >= self._next_refetch_s:
            self._next_refetch_s = time.monotonic() + limits.RECONCILE_INTERVAL_S
            self._refetch_after = 0
        answers = [mover_requests.get(self._db, want) for want in self._open_requests if not mover_requests.is_open(self._db, want)]
        if any(answer is not None and answer.error == errno.ENOSPC for answer in answers):
            self._refetch_after = None  # The next one would not fit either.
        self._open_requests = [want for want in self._open_requests if mover_requests.is_open(self._db, want)]
        while self._refetch_after is not None and len(self._open_requests) < limits.REFETCHES_MAX:
            content = peer_copies.find_rebuildable(self._db, self._refetch_after)
            self._refetch_after = None if content is None else content.id
            if content is not None:
                self._open_requests.append(
                    mover_requests.insert_request(self._db, mover_requests.FETCH, content.inode, wait_s=limits.FETCH_STALL_S)
                )
                self._notify.wake_lanes()

    # --- what is held here -------------------------------------------------------------------------------------------

    def _check_hosted(self, view: ClusterView, after: int) -> bool:
        """Which contents of dead nodes are this one's to copy. Raises Unreachable; then the same batch comes again."""
        batch = remote_contents.list_hosted(self._db, after, locations.LOAD_CONTENTS_MAX)
        content_locations = locations.refresh(self._db, self._cluster.store, [content.id for content in batch], self._cluster.node_number)
        to_copy = [content.id for content in batch if self._is_ours_to_copy(content, content_locations[content.id], view)]
        if peer_copies.mark_under_replicated(self._db, to_copy):
            self._marked_count += len(to_copy)
            self._notify.wake_lanes()
        self._after = batch[-1].id if batch else None
        if not batch and self._marked_count:
            log.info("%d contents of nodes that died are copied from here, to have as many copies as before", self._marked_count)
            self._marked_count = 0
        return bool(batch)

    def _is_ours_to_copy(self, content: Content, shared: ContentLocations, view: ClusterView) -> bool:
        """Whether this node is the one to copy a content that it holds."""
        cluster, remote_state = self._cluster, shared.state
        if remote_state is None or shared.writer is None or shared.writer in view:
            return False
        # What was still open when its writer died is what was fsynced of it last: nobody can say more of it now.
        written = (remote_state.generation, remote_state.digest) if remote_state.digest is not None else shared.get_newest(view)
        if written != (content.generation, content.digest):
            return False
        living = {number for number in shared.list_holders_of(*written) if number in view} | {cluster.node_number}
        if not placement.choose_new_holders(view, living, shared.writer, cluster.factor, cluster.jump):
            return False
        return min(living) == cluster.node_number


def _can_place_more(previous: dict[int, KnownNode], current: dict[int, KnownNode], factor: int) -> bool:
    """Whether contents that could not have all their copies may have them now: there were too few nodes, or too few failure domains."""
    nodes, domains = len(previous), len({node.domain for node in previous.values()})
    joined = current.keys() - previous.keys()
    return bool(joined) and (nodes < factor or domains < factor)
