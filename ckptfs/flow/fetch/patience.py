"""Owns how long a file that did not come is tried for: by what is known of those who may have it, and not by how often it was tried.

While a node lives that told of it, its processes may be on their way back (P8). When the last such node has died, a former content of the
file may be shown soon (flow/fall_back.py), which is then what is opened (P9). Otherwise nothing is worth waiting for.
If we die here: nothing is kept here; the want is still open, and its patience begins anew.
"""

import time
from contextlib import suppress

from ckptfs import limits
from ckptfs.catalog import fetching
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import truth
from ckptfs.clique import holders
from ckptfs.clique.holders import ContentLocations
from ckptfs.clique.surroundings import Cluster
from ckptfs.errors import CkptfsError, StoreRefused, StoreUnreachable


class RetryPolicy:
    """One for all fetches of a node; any thread."""

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster
        self._view_since = (cluster.view(), time.monotonic())

    def record_view(self) -> None:
        """Note when the world changes. Called before each fetch."""
        view = self._cluster.view()
        if view is not self._view_since[0]:
            self._view_since = view, time.monotonic()

    def is_connected(self) -> bool:
        """Whether this node is no island."""
        return bool(self._cluster.lease())

    def should_retry(self, inode: int, since_s: float, *, is_denied: bool) -> bool:
        """Whether a file that was first tried at `since_s` is to be tried again. `denied`: those who were asked say that they have it not.

        An island has nobody to ask, and does not wait. When it fell back, what it holds now is taken over, with what the PFS shows of it.
        """
        number = fetching.get_content_id(self._db, inode)
        if number is None or not self.is_connected():
            return False
        try:
            file = holders.load_files(self._cluster.store, [inode]).get(inode)
            shared = holders.load(self._cluster.store, [number])[number]
        except (StoreUnreachable, StoreRefused):
            return False
        if file is None:
            return False
        waited_s = time.monotonic() - since_s
        if file.content != number:
            with suppress(CkptfsError):
                truth.load_inodes(self._db, self._cluster.store, inode)
            return waited_s < limits.FETCH_PATIENCE_S + _get_salvage_wait_s()
        if not is_denied and self._is_on_live_node(shared):
            return waited_s < limits.FETCH_PATIENCE_S
        return self._may_be_salvaged() and waited_s < limits.FETCH_PATIENCE_S + _get_salvage_wait_s()

    def _is_on_live_node(self, shared: ContentLocations) -> bool:
        """Whether another node lives that wrote what the file holds, or said that it has it."""
        remote_state, view = shared.state, self._view_since[0]
        if remote_state is None:
            return False
        candidates = [copy.node for copy in shared.copies if copy.generation == remote_state.generation]
        if not shared.is_lost and shared.writer is not None:
            candidates.append(shared.writer)
        return any(node in view and node != self._cluster.node_number for node in candidates)

    def _may_be_salvaged(self) -> bool:
        """Whether the world changed so short a time ago that others may not have decided yet what is left of the file."""
        return self._cluster.factor > 1 and time.monotonic() - self._view_since[1] < _get_salvage_wait_s()


def _get_salvage_wait_s() -> float:
    return limits.FALL_BACK_RIVALS_S + limits.FALL_BACK_LOOK_S + limits.FALL_BACK_MARGIN_S
