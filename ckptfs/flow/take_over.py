"""The take-over of the pending write-back of dead nodes.

Takes: the journal rows of dead nodes, in the store.
Leaves: the same rows, in order, at the end of this node's journal, and none under the dead node's name (P6).
If we die here: rows may be in both journals. Each is checked against the shared tree, so a second write-back changes nothing.

A cluster lock lets one node take over a dead one. File contents come from the nodes that hold copies. A node that returns writes back only
rows that no other node took. Rows of a previous catalog of this node are taken over in the same way.
"""

import logging

from ckptfs import disk, limits
from ckptfs.catalog import journal, peer_copies
from ckptfs.catalog.database import Database
from ckptfs.clique import membership
from ckptfs.clique.cluster import Cluster, ClusterLock
from ckptfs.clique.membership import ClusterView
from ckptfs.coherence import keys
from ckptfs.coherence.keys import JOURNAL_ROW, SharedKey
from ckptfs.coherence.value_checks import is_readable
from ckptfs.model import Notifier
from ckptfs.store.kv import Compare, CompareTarget, Delete, Get, Item, Operation, Put, prefix_end

log = logging.getLogger(__name__)

disk.declare_labels("take_over:appended")

ROWS_TOGETHER = limits.ETCD_OPERATIONS_MAX // 2 - 2
LOOK_S = 30.0


class TakeOver:
    """Looks for journals of dead nodes whenever the view changes, and every `LOOK_S`."""

    def __init__(self, db: Database, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._cluster = cluster
        self._instance = journal.get_instance_id(db)
        self._last_view: ClusterView | None = None
        self._nodes_left: list[int] = []

    def step(self) -> bool:
        """Take over from one node. Return True if there may be more at once."""
        view = self._cluster.view()
        if not self._nodes_left:
            self._last_view = view
            known = set(peer_copies.list_node_names(self._db)) | {self._cluster.node_number}
            self._nodes_left = sorted(number for number in known if number not in view.by_number or number == self._cluster.node_number)
        number = self._nodes_left[-1]
        if not self._take_from(number):
            self._nodes_left.pop()
        return bool(self._nodes_left)

    def next_due_s(self) -> float | None:
        """Return the seconds until the next look: a death may go unnoticed."""
        return LOOK_S if self._cluster.view() is self._last_view else 0.0

    def _take_from(self, number: int) -> bool:
        """Take one page of rows. Return False if nothing is left to take."""
        if not self._list_rows(number, 1):
            return False
        claim = None if self._cluster.claims is None else self._cluster.claims.try_acquire(f"write-back/{number}")
        if claim is None or self._cluster.claims is None:
            return False
        items = self._list_rows(number, ROWS_TOGETHER)
        is_dead = number == self._cluster.node_number or not membership.list_live(self._cluster.store, [number])
        if items and is_dead and self._append_rows(claim, items, number):
            log.info("node %d: this node takes over %d changes that it had not written back", number, len(items))
            self._notify.wake_lanes()
            return True
        self._cluster.claims.release(claim)
        return False

    def _list_rows(self, number: int, at_most: int) -> list[Item]:
        """Return the pending rows of a node; for this node, those of a previous catalog."""
        start = keys.encode_key(SharedKey(JOURNAL_ROW, number, b""))
        if number != self._cluster.node_number:
            return list(filter(is_readable, self._cluster.store.read([Get(start, prefix_end(start), limit=at_most)]).results[0]))
        own = start + self._instance.encode()
        found = self._cluster.store.read([Get(start, own, limit=at_most), Get(prefix_end(own), prefix_end(start), limit=at_most)])
        return list(filter(is_readable, [*found.results[0], *found.results[1]]))[:at_most]

    def _append_rows(self, claim: ClusterLock, items: list[Item], number: int) -> bool:
        """Move rows to this node. Return False if their node lives again, or another node has them."""
        rows = [keys.parse_row(keys.decode_value(item.value) or {}, number) for item in items]
        with self._db.transaction():
            taken = journal.insert_taken_over(self._db, rows)
        disk.act("take_over:appended", lambda: None)
        changes: list[Operation] = []
        for row, item in zip(taken, items, strict=True):
            key = SharedKey(JOURNAL_ROW, self._cluster.node_number, keys.build_row_name(self._instance, row.seq))
            changes += [Put(keys.encode_key(key), keys.encode_value(keys.get_value(self._db, key)) or b""), Delete(item.key)]
        compares = [claim.build_guard(), *(Compare(item.key, CompareTarget.MOD, "=", item.mod_revision) for item in items)]
        if self._cluster.store.commit(compares, changes).succeeded:
            return True
        journal.delete_rows(self._db, taken)
        return False
