"""The search for files that were lost with nodes that never return.

Takes: files of nodes that were replaced, of which this node knows no copy on a live node or the PFS.
Leaves: the report `lost`, with the contents of those that no node can have any more, for `ckptfs status`.
If we die here: the report of the former search stays until the next one is complete.

A node that is merely down may return with its copies. One whose name another catalog has by now does not: it was wiped.
Only the store knows all holders, so each node asks it about the files that it knows.
"""

import time

from ckptfs import limits
from ckptfs.catalog import peer_copies, summary
from ckptfs.catalog.database import Database
from ckptfs.clique import locations, membership
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import ClusterView
from ckptfs.coherence import pfs_coordination

INTERVAL_S = 60.0
LOST_MAX = 10_000
"""So many lost files are counted."""


class FindLost:
    """The search, a batch a step.

    It asks the store about each file once, and about all of them again after a change of the view or a long time.
    """

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster
        self._last_view: ClusterView | None = None
        self._next_s = self._all_again_s = 0.0
        self._makers: list[int] | None = None  # The nodes whose files are still to be looked at.
        self._after = 0
        self._asked: set[int] = set()
        self._found: list[int] = []

    def step(self) -> bool:
        """Check one batch. Return True if there is more. Raises StoreUnreachable; the batch is then repeated."""
        view, now_s = self._cluster.view(), time.monotonic()
        if view is not self._last_view or now_s >= self._all_again_s:
            self._last_view, self._all_again_s = view, now_s + limits.RECONCILE_INTERVAL_S
            self._makers, self._asked, self._found = None, set(), []
            self._next_s = now_s + (self._cluster.draw_delay_s() if self._list_suspects(view) else INTERVAL_S)
        if self._makers is None:
            if now_s < self._next_s:
                return False
            self._next_s = now_s + INTERVAL_S
            if not self._cluster.lease():
                return False
            self._makers, self._after = self._list_suspects(view), 0
        if self._makers and len(self._found) < LOST_MAX:
            self._check_batch(self._makers)
            return True
        self._makers = None
        found = {"contents": self._found} if self._found else {}
        if found != summary.get_report(self._db, summary.LOST_REPORT):
            summary.set_report(self._db, summary.LOST_REPORT, found or None)
        return False

    def next_due_s(self) -> float | None:
        return max(0.0, self._next_s - time.monotonic())

    def _list_suspects(self, view: ClusterView) -> list[int]:
        """Return the nodes that made files which this node knows and that may have been replaced.

        Those that are merely down cost nothing.
        """
        known, live_names = peer_copies.list_nodes(self._db), {node.name for node in view.nodes}
        gone = [number for number in peer_copies.list_makers(self._db) if number not in view]
        return [number for number in gone if number not in known or known[number].name in live_names]

    def _check_batch(self, makers: list[int]) -> None:
        batch = peer_copies.list_without_holder(self._db, makers[-1], self._after, locations.LOAD_CONTENTS_MAX)
        if unknown := [one for one in batch if one[0] not in self._asked]:
            self._found += self._choose_lost(unknown)
            self._asked |= {content for content, _ in unknown}
        self._after = batch[-1][0] if batch else 0
        if not batch:
            makers.pop()

    def _choose_lost(self, batch: list[tuple[int, int]]) -> list[int]:
        """Return the contents of which only nodes that never return had copies; record where the others are."""
        store = self._cluster.store
        found = locations.refresh(self._db, store, [content for content, _ in batch], self._cluster.node_number)
        pfs_coordination.load_inodes(self._db, store, *(inode for _, inode in batch))
        known = [(number, one.writer, one.copies) for number, one in found.items() if one.state is not None]
        holders = {number: {writer, *(copy.node for copy in copies)} for number, writer, copies in known if writer is not None}
        replaced = membership.list_replaced(store, {node for nodes in holders.values() for node in nodes})
        return [number for number, nodes in holders.items() if nodes <= replaced]
