"""How long a failed fetch is tried again: what the nodes know of the file, and salvage, decide.

If we die here: the requests are still open. The next mover begins to count again.
"""

import threading
import time
from collections.abc import Container
from contextlib import suppress

from ckptfs import limits
from ckptfs.catalog import identity, mover_requests
from ckptfs.catalog.copies import FetchState
from ckptfs.catalog.database import Database
from ckptfs.clique import locations, membership
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.locations import ContentLocations
from ckptfs.coherence import pfs_coordination
from ckptfs.errors import CkptfsError, StoreRefused, StoreUnreachable
from ckptfs.model import Notifier


class RetryPolicy:
    """How long to try for a file that did not arrive. One for all fetches of a node; any thread."""

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster
        self._view_since = (cluster.view(), time.monotonic())

    def record_view(self) -> None:
        """Note when the set of live nodes changes. Called before each fetch."""
        view = self._cluster.view()
        if view is not self._view_since[0]:
            self._view_since = view, time.monotonic()

    def is_connected(self) -> bool:
        """Return False if this node is an island."""
        return bool(self._cluster.lease())

    def refresh_and_judge(self, state: FetchState | None, since_s: float, *, is_denied: bool) -> bool:
        """Read the store again; return whether a file that was first tried at `since_s` may still arrive.

        `is_denied`: the nodes that were asked lack it. An island cannot ask other nodes, and does not wait. This node learns what the file
        and the PFS show by now. A deleted file is tried as long as the node that made its content may answer.
        """
        if state is None or state.content_id is None or not self.is_connected():
            return False
        inode, number = state.inode, state.content_id
        try:
            file = locations.load_files(self._cluster.store, [inode]).get(inode)
            shared = locations.load(self._cluster.store, [number])[number]
            is_on_live_node = not is_denied and self._is_on_live_node(shared)
        except (StoreUnreachable, StoreRefused):
            return False
        waited_s = time.monotonic() - since_s
        if file is None:
            maker = identity.get_origin_node(number)
            can_answer = not is_denied and maker in self._view_since[0] and maker != self._cluster.node_number
            return can_answer and waited_s < limits.FETCH_PATIENCE_S
        with suppress(CkptfsError):
            pfs_coordination.load_inodes(self._db, self._cluster.store, inode)
        if file.content != number:
            return waited_s < limits.FETCH_PATIENCE_S + _get_salvage_wait_s()
        if is_on_live_node:
            return waited_s < limits.FETCH_PATIENCE_S
        return self._may_be_salvaged() and waited_s < limits.FETCH_PATIENCE_S + _get_salvage_wait_s()

    def _is_on_live_node(self, shared: ContentLocations) -> bool:
        """Return whether another live node wrote what the file holds, or announced a copy of it.

        The store counts, too: a node that has just returned may publish before it is in the view.
        """
        remote_state, view = shared.state, self._view_since[0]
        if remote_state is None:
            return False
        candidates = {copy.node for copy in shared.copies if copy.generation == remote_state.generation}
        if not shared.is_lost and shared.writer is not None:
            candidates.add(shared.writer)
        others = sorted(candidates - {self._cluster.node_number})
        return any(node in view for node in others) or bool(membership.list_live(self._cluster.store, others))

    def _may_be_salvaged(self) -> bool:
        """Return whether other nodes may still decide: the view changed a moment ago."""
        return self._cluster.factor > 1 and time.monotonic() - self._view_since[1] < _get_salvage_wait_s()


def _get_salvage_wait_s() -> float:
    return limits.SALVAGE_RIVALS_S + limits.SALVAGE_POLL_S + limits.SALVAGE_MARGIN_S


class SalvageWait:
    """The salvage requests of failed fetches: the PFS may have a previous state. Any thread."""

    def __init__(self, db: Database, cluster: Cluster, notify: Notifier) -> None:
        self._db = db
        self._cluster = cluster
        self._notify = notify
        self._lock = threading.Lock()
        self._salvage_requests: dict[int, int] = {}
        self._known_decisions: set[int] = set()

    def forget_others(self, open_requests: Container[int]) -> None:
        """Forget all fetches but these."""
        with self._lock:
            self._salvage_requests = {fetch: salvage for fetch, salvage in self._salvage_requests.items() if fetch in open_requests}
            self._known_decisions = {fetch for fetch in self._known_decisions if fetch in open_requests}

    def request_salvage(self, request: mover_requests.MoverRequest, state: FetchState | None) -> bool:
        """Ask salvage about the file. Return whether it still decides, or has just decided.

        While the writer counts as alive, salvage can show nothing. It is then asked again after each attempt, and nothing else waits
        for it. An island cannot decide.
        """
        if not self._cluster.lease():
            return False
        if state is None or state.content is None:
            return self._take_decision(request.id)
        with self._lock:
            salvage_request = self._salvage_requests.get(request.id)
        if salvage_request is not None and mover_requests.is_open(self._db, salvage_request):
            return True
        answer = None if salvage_request is None else mover_requests.get(self._db, salvage_request)
        if answer is not None and answer.state == mover_requests.DONE:
            return self._take_decision(request.id)
        wait_s = limits.SALVAGE_RIVALS_S + limits.FETCH_STALL_S
        new_request = mover_requests.insert_request(self._db, mover_requests.SALVAGE, request.inode, wait_s=wait_s)
        with self._lock:
            self._salvage_requests[request.id] = new_request
        self._notify.wake_lanes("salvage")
        return salvage_request is None

    def _take_decision(self, request: int) -> bool:
        """Return whether this fetch was not tried since the decision."""
        with self._lock:
            is_new = request in self._salvage_requests and request not in self._known_decisions
            self._known_decisions.add(request)
            return is_new
