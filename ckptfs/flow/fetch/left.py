"""Owns that somebody decides what is left of a file that nobody gives: the PFS may have a former state, which may be all there is, or
that of a file which this one has replaced. A want of the kind 'left' asks for it (flow/fall_back.py answers it).

If we die here: nothing is kept here; who still waits has it asked again.
"""

import threading
from collections.abc import Container

from ckptfs import limits
from ckptfs.catalog import fetching, wants
from ckptfs.catalog.database import Database
from ckptfs.clique.surroundings import Cluster
from ckptfs.model import Notifier


class SalvageWait:
    """One for all fetches of a node; any thread."""

    def __init__(self, db: Database, cluster: Cluster, notify: Notifier) -> None:
        self._db = db
        self._cluster = cluster
        self._notify = notify
        self._lock = threading.Lock()
        self._salvage_requests: dict[int, int] = {}
        self._known_decisions: set[int] = set()

    def forget_others(self, open_requests: Container[int]) -> None:
        """Forget all but these fetches."""
        with self._lock:
            self._salvage_requests = {want: asked for want, asked in self._salvage_requests.items() if want in open_requests}
            self._known_decisions = {want for want in self._known_decisions if want in open_requests}

    def should_retry(self, request: wants.MoverRequest) -> bool:
        """Whether what is left is being looked for, or was just decided: a fetch that failed is to be tried again then. Where nothing can
        be shown yet, as long as the writer counts as living, it is asked for anew each time, and nothing else waits for that. An island
        cannot decide.
        """
        if not self._cluster.lease():
            return False
        found = fetching.load_fetch_state(self._db, request.inode)
        if found is None or found.content is None:
            return self._take_decision(request)
        with self._lock:
            salvage_request = self._salvage_requests.get(request.id)
        if salvage_request is not None and wants.is_open(self._db, salvage_request):
            return True
        answer = None if salvage_request is None else wants.get(self._db, salvage_request)
        if answer is not None and answer.state == wants.DONE:
            return self._take_decision(request)
        new_request = wants.insert_request(self._db, wants.SALVAGE, request.inode, wait_s=limits.FALL_BACK_RIVALS_S + limits.FETCH_STALL_S)
        with self._lock:
            self._salvage_requests[request.id] = new_request
        self._notify.wake_lanes("fall-back")
        return salvage_request is None

    def _take_decision(self, request: wants.MoverRequest) -> bool:
        """Whether this fetch was not tried since it was decided."""
        with self._lock:
            is_new = request.id in self._salvage_requests and request.id not in self._known_decisions
            self._known_decisions.add(request.id)
            return is_new
