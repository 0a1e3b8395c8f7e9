"""Takes: what dead nodes still had to tell the PFS: the rows of their journals, in the store.
Leaves: the same rows, in their order, at the end of this node's journal, and no more under the dead node's name (P6).
If we die here: rows may be in both journals; each says what the shared tree bears out or nothing, so writing back twice changes nothing.

One node does this for a dead one, by a claim. Files' bytes come from the nodes that hold copies. A node that comes back writes back only
what nobody took. What a former catalog of this node left is taken in the same way.
"""

import logging

from ckptfs import disk, limits
from ckptfs.catalog import adoption, journal, peers
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import kinds, pfs_kinds
from ckptfs.catalog.sharing.kinds import JOURNAL_ROW, SharedKey
from ckptfs.catalog.store import Compare, CompareTarget, Delete, Get, Item, Operation, Put, prefix_end
from ckptfs.clique import membership
from ckptfs.clique.claims import ClusterLock
from ckptfs.clique.membership import ClusterView
from ckptfs.clique.surroundings import Cluster
from ckptfs.model import Notifier

log = logging.getLogger(__name__)

disk.declare_labels("take_over:appended")

ROWS_TOGETHER = limits.ETCD_OPERATIONS_MAX // 2 - 2
LOOK_S = 30.0


class TakeOver:
    """Looks whenever the world changes, and now and then."""

    def __init__(self, db: Database, notify: Notifier, around: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._around = around
        self._instance = adoption.get_instance_id(db)
        self._seen: ClusterView | None = None
        self._todo: list[int] = []

    def step(self) -> bool:
        """Take over from one node. True: there may be more at once."""
        world = self._around.view()
        if not self._todo:
            self._seen = world
            known = set(peers.list_node_names(self._db)) | {self._around.node_number}
            self._todo = sorted(number for number in known if number not in world.by_number or number == self._around.node_number)
        number = self._todo[-1]
        if not self._take_from(number):
            self._todo.pop()
        return bool(self._todo)

    def next_due_s(self) -> float | None:
        """Nodes may have died unseen."""
        return LOOK_S if self._around.view() is self._seen else 0.0

    def _take_from(self, number: int) -> bool:
        """Take one page of rows. False: there is nothing left to take."""
        if not self._rows(number, 1):
            return False
        claim = None if self._around.claims is None else self._around.claims.try_acquire(f"write-back/{number}")
        if claim is None or self._around.claims is None:
            return False
        items = self._rows(number, ROWS_TOGETHER)
        gone = number == self._around.node_number or not membership.list_live(self._around.store, [number])
        if items and gone and self._append(claim, items, number):
            log.info("%d changes that node %d had not written back are written back from here", len(items), number)
            self._notify.wake_lanes()
            return True
        self._around.claims.release(claim)
        return False

    def _rows(self, number: int, at_most: int) -> list[Item]:
        """What a node has to write back; of this one only what a former catalog left."""
        start = kinds.encode_key(SharedKey(JOURNAL_ROW, number, b""))
        if number != self._around.node_number:
            return list(self._around.store.read([Get(start, prefix_end(start), limit=at_most)]).results[0])
        own = start + self._instance.encode()
        found = self._around.store.read([Get(start, own, limit=at_most), Get(prefix_end(own), prefix_end(start), limit=at_most)])
        return [*found.results[0], *found.results[1]][:at_most]

    def _append(self, claim: ClusterLock, items: list[Item], number: int) -> bool:
        """Make them this node's. False: the node lives again, or another one has them."""
        rows = [pfs_kinds.parse_row(kinds.decode_value(item.value) or {}, number) for item in items]
        with self._db.transaction():
            taken = journal.insert_taken_over(self._db, rows)
        disk.act("take_over:appended", lambda: None)
        changes: list[Operation] = []
        for row, item in zip(taken, items, strict=True):
            key = SharedKey(JOURNAL_ROW, self._around.node_number, pfs_kinds.build_row_name(self._instance, row.seq))
            changes += [Put(kinds.encode_key(key), kinds.encode_value(kinds.get_value(self._db, key)) or b""), Delete(item.key)]
        compares = [claim.build_guard(), *(Compare(item.key, CompareTarget.MOD, "=", item.mod_revision) for item in items)]
        if self._around.store.commit(compares, changes).succeeded:
            return True
        journal.delete_rows(self._db, taken)
        return False
