"""The take-over of the pending write-back of dead nodes.

Takes: the journal rows of dead nodes, in the store.
Leaves: the same rows, in order, at the end of this node's journal, and none under the dead node's name (P6).
If we die here: rows may be in both journals. Each is checked against the shared tree, so a second write-back changes nothing.

A cluster lock lets one node take over a dead one. File contents come from the nodes that hold copies. A node that returns writes back only
rows that no other node took. Rows of a previous catalog of this node are taken over in the same way.
"""

import logging
import random
import time
from dataclasses import replace

from ckptfs import disk, limits
from ckptfs.catalog import journal, peer_copies
from ckptfs.catalog.database import Database
from ckptfs.clique import membership
from ckptfs.clique.cluster import Cluster, ClusterLock
from ckptfs.clique.membership import ClusterView, ViewChange
from ckptfs.coherence import keys
from ckptfs.coherence.keys import JOURNAL_ROW, SharedKey
from ckptfs.coherence.value_checks import decode_item
from ckptfs.model import Notifier
from ckptfs.store.kv import Compare, CompareTarget, Delete, Get, Item, Operation, Put, prefix_end

log = logging.getLogger(__name__)

disk.declare_labels("take_over:appended")

ROWS_TOGETHER = limits.ETCD_OPERATIONS_MAX // 2 - 2
LOOK_S = 30.0
LOOK_S_MAX = 900.0
FORGET_S = 86_400.0
"""A dead node is forgotten if it had nothing to take over, and no copy that counts, for this long."""


class TakeOver:
    """The search for journals of dead nodes, after each death and then less and less often."""

    def __init__(self, db: Database, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._cluster = cluster
        self._instance = journal.get_instance_id(db)
        self._last_view: ClusterView | None = None
        self._nodes_left: list[int] = []
        self._next_look_s = 0.0
        self._pause_s = LOOK_S
        self._idle_since_s: dict[int, float] = {}

    def step(self) -> bool:
        """Take over from one node. Return True if there may be more at once."""
        view = self._cluster.view()
        if view is not self._last_view:
            if died := ViewChange(self._last_view or view, view).dead_nodes:
                self._pause_s, at_most_s = LOOK_S, limits.SPREAD_URGENT_S_MAX
                small_cluster_s = 0.0 if self._cluster.hosts_contents_of(died) else at_most_s
                self._next_look_s = time.monotonic() + self._cluster.draw_delay_s(at_most_s, small_cluster_s=small_cluster_s)
            self._last_view = view
        if not self._nodes_left and time.monotonic() >= self._next_look_s:
            dead = sorted(peer_copies.list_nodes(self._db).keys() - view.by_number.keys() - {self._cluster.node_number})
            self._nodes_left = self._find_nodes_with_rows(dead)
            self._forget_idle([number for number in dead if number not in self._nodes_left])
            self._next_look_s = time.monotonic() + self._pause_s * random.uniform(0.75, 1.25)
            self._pause_s = min(2 * self._pause_s, LOOK_S_MAX)
        if self._nodes_left and not self._take_from(self._nodes_left[-1]):
            self._nodes_left.pop()
        return bool(self._nodes_left)

    def next_due_s(self) -> float | None:
        return max(0.0, self._next_look_s - time.monotonic()) if self._cluster.view() is self._last_view else 0.0

    def _find_nodes_with_rows(self, dead: list[int]) -> list[int]:
        """Return those of the dead nodes with pending rows, and this one if a previous catalog of it has any."""
        asked = [(number, get) for number in (self._cluster.node_number, *dead) for get in self._build_gets(number, 1)]
        results = self._cluster.store.read([get for _, get in asked]).results
        return sorted({number for (number, _), items in zip(asked, results, strict=True) if items})

    def _forget_idle(self, dead: list[int]) -> None:
        """Forget the dead nodes that have been without rows for long: they are asked about no more."""
        self._idle_since_s = {number: self._idle_since_s.get(number, time.monotonic()) for number in dead}
        for number, since_s in self._idle_since_s.items():
            if time.monotonic() - since_s >= FORGET_S:
                peer_copies.delete_dead_node(self._db, number)

    def _take_from(self, number: int) -> bool:
        """Take one page of rows. Return False if nothing is left to take."""
        claim = self._cluster.locks.try_acquire(f"write-back/{number}")
        if claim is None:
            return False
        items = self._load_rows(number)
        is_dead = number == self._cluster.node_number or not membership.list_live(self._cluster.store, [number])
        if items and is_dead and self._append_rows(claim, items, number):
            log.info("node %d: this node takes over %d changes that it had not written back", number, len(items))
            self._notify.wake_lanes()
            return True
        self._cluster.locks.release(claim)
        return False

    def _load_rows(self, number: int) -> list[Item]:
        """Return the first pending rows of a node, without those that are unreadable."""
        items: list[Item] = []
        for get in self._build_gets(number, ROWS_TOGETHER):
            key = get.key
            while len(items) < ROWS_TOGETHER:
                (page,) = self._cluster.store.read([replace(get, key=key)]).results
                items += [item for item in page if decode_item(item) is not None]
                if len(page) < get.limit:
                    break
                key = page[-1].key + b"\0"
        return items[:ROWS_TOGETHER]

    def _build_gets(self, number: int, at_most: int) -> list[Get]:
        """Return the reads of the pending rows of a node; for this node, of those of a previous catalog."""
        start = keys.encode_key(SharedKey(JOURNAL_ROW, number, b""))
        if number != self._cluster.node_number:
            return [Get(start, prefix_end(start), limit=at_most)]
        own = start + self._instance.encode()
        return [Get(start, own, limit=at_most), Get(prefix_end(own), prefix_end(start), limit=at_most)]

    def _append_rows(self, claim: ClusterLock, items: list[Item], number: int) -> bool:
        """Move rows to this node. Return False if their node lives again, or another node has them."""
        rows = [keys.parse_row(decode_item(item) or {}, number) for item in items]
        with self._db.transaction():
            taken = journal.insert_taken_over(self._db, rows)
        disk.reach("take_over:appended")
        changes: list[Operation] = []
        for row, item in zip(taken, items, strict=True):
            key = SharedKey(JOURNAL_ROW, self._cluster.node_number, keys.build_row_name(self._instance, row.seq))
            changes += [Put(keys.encode_key(key), keys.encode_value(keys.get_value(self._db, key)) or b""), Delete(item.key)]
        compares = [claim.build_guard(), *(Compare(item.key, CompareTarget.MOD, "=", item.mod_revision) for item in items)]
        if self._cluster.store.commit(compares, changes).succeeded:
            return True
        journal.delete_rows(self._db, taken)
        return False
