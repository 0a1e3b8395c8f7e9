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


class Left:
    """One for all fetches of a node; any thread."""

    def __init__(self, db: Database, around: Cluster, notify: Notifier) -> None:
        self._db = db
        self._around = around
        self._notify = notify
        self._lock = threading.Lock()
        self._asked: dict[int, int] = {}
        self._decided: set[int] = set()

    def keep(self, still_wanted: Container[int]) -> None:
        """Forget all but these fetches."""
        with self._lock:
            self._asked = {want: asked for want, asked in self._asked.items() if want in still_wanted}
            self._decided = {want for want in self._decided if want in still_wanted}

    def may_come(self, want: wants.MoverRequest) -> bool:
        """Whether what is left is being looked for, or was just decided: a fetch that failed is to be tried again then. Where nothing can
        be shown yet, as long as the writer counts as living, it is asked for anew each time, and nothing else waits for that. An island
        cannot decide.
        """
        if not self._around.lease():
            return False
        found = fetching.load_fetch_state(self._db, want.inode)
        if found is None or found.content is None:
            return self._is_news(want)
        with self._lock:
            asked = self._asked.get(want.id)
        if asked is not None and wants.is_open(self._db, asked):
            return True
        answer = None if asked is None else wants.get(self._db, asked)
        if answer is not None and answer.state == wants.DONE:
            return self._is_news(want)
        again = wants.insert_request(self._db, wants.SALVAGE, want.inode, wait_s=limits.FALL_BACK_RIVALS_S + limits.FETCH_STALL_S)
        with self._lock:
            self._asked[want.id] = again
        self._notify.wake_lanes("fall-back")
        return asked is None

    def _is_news(self, want: wants.MoverRequest) -> bool:
        """Whether this fetch was not tried since it was decided."""
        with self._lock:
            news = want.id in self._asked and want.id not in self._decided
            self._decided.add(want.id)
            return news
