"""The records of copies in the store: announcements, and removal of unmaintained records.

Announcements are those of this node's copies. A record that no live node maintains is removed.

Takes: copies that arrived or were dropped since the last announcement; records of dead writers whose contents no live node has.
Leaves: keys `p/<content>/<this node>` that match the catalog, and no record of a content whose file is gone or holds a replicated
successor.
If we die here: an announcement that was not marked is repeated, which changes nothing. Each removal is one transaction that compares all
keys on which it depends.

A live node maintains its own records (`ckptfs.flow.reconcile`), and a holder removes those of a dead writer. One node removes the
rest for all, and only while known nodes are absent.
"""

import time

from ckptfs import limits
from ckptfs.catalog import peer_copies, remote_contents
from ckptfs.catalog.database import Database
from ckptfs.clique import locations, membership
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.locations import ContentLocations, SharedFile
from ckptfs.clique.membership import ClusterView
from ckptfs.coherence import store_loss
from ckptfs.coherence.keys import decode_key
from ckptfs.coherence.value_checks import decode_item
from ckptfs.store.kv import Compare, CompareTarget, Delete, Get, Item, prefix_end

DEAD_CONTENTS_BATCH = locations.LOAD_CONTENTS_MAX // 2
CONTENTS_PREFIX = b"c/"


class DropDeadRecords:
    """Sweeps through the content records of the store, a batch a step."""

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster
        self._next_s = time.monotonic() + limits.DROP_RECORDS_FIRST_S
        self._after: bytes | None = None

    def step(self) -> bool:
        """Check one batch. Return True if there is more. Raises StoreUnreachable; the batch is then repeated."""
        if self._after is None:
            if time.monotonic() < self._next_s:
                return False
            self._next_s = time.monotonic() + limits.DROP_RECORDS_INTERVAL_S
            if not self._acquire_lock():
                return False
            self._after = CONTENTS_PREFIX
        get = Get(self._after, prefix_end(CONTENTS_PREFIX), limit=DEAD_CONTENTS_BATCH)
        items = self._cluster.store.read([get]).results[0]
        self._drop_dead(items, self._cluster.view())
        self._after = items[-1].key + b"\0" if len(items) == DEAD_CONTENTS_BATCH else None
        return self._after is not None

    def next_due_s(self) -> float | None:
        return max(0.0, self._next_s - time.monotonic())

    def _acquire_lock(self) -> bool:
        """Acquire the lock for life. Return False if nothing is to be done, or another node has it."""
        gone = peer_copies.list_nodes(self._db).keys() - self._cluster.view().by_number.keys() - {self._cluster.node_number}
        if not gone or store_loss.is_adopting(self._db) or not self._cluster.lease():
            return False
        return self._cluster.locks.try_acquire("bury") is not None

    def _drop_dead(self, items: tuple[Item, ...], view: ClusterView) -> None:
        writers = {item.key: value["node"] for item in items if (value := decode_item(item)) is not None}
        content_ids = [decode_key(key).number for key, writer in writers.items() if writer not in view]
        content_locations = locations.load(self._cluster.store, content_ids)
        without_copy = {number: one for number, one in content_locations.items() if not any(copy.node in view for copy in one.copies)}
        files = locations.load_files(
            self._cluster.store, sorted({one.state.inode for one in without_copy.values() if one.state is not None})
        )
        for number, one in without_copy.items():
            if one.state is None or one.writer is None or one.writer in view:
                continue
            file = files.get(one.state.inode)
            if file is None or self._is_replaced(number, file, view):
                self._delete_records(number, one, one.writer, file)

    def _is_replaced(self, number: int, file: SharedFile, view: ClusterView) -> bool:
        """Return whether the file holds another, replicated content, and does not miss this one."""
        if file.content in {None, number} or file.misses(number):
            return False
        assert file.content is not None
        successor = locations.load(self._cluster.store, [file.content])[file.content]
        return any(node in view for node in successor.holders if node != successor.writer or self._cluster.factor < 2)

    def _delete_records(self, number: int, shared: ContentLocations, writer: int, file: SharedFile | None) -> None:
        remote_state = shared.state
        assert remote_state is not None
        compares = [Compare(item.key, CompareTarget.MOD, "=", item.mod_revision) for item in shared.items]
        compares.append(Compare(membership.node_key(writer), CompareTarget.VERSION, "=", 0))
        key = locations.build_inode_key(remote_state.inode) if file is None else file.item.key
        compares.append(Compare(key, CompareTarget.MOD, "=", 0 if file is None else file.item.mod_revision))
        copies = locations.build_copies_prefix(number)
        self._cluster.store.commit(compares, [Delete(locations.build_content_key(number)), Delete(copies, prefix_end(copies))])


ANNOUNCE_BATCH_CONTENTS = 256


class AnnounceCopies:
    """Announces a batch of copies a step. Raises StoreUnreachable."""

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster

    def prepare(self) -> None:
        """Mark announced copies that were lost with a tier. Called once, before the first step."""
        remote_contents.mark_all_unannounced(self._db)

    def step(self) -> bool:
        """Announce one batch. Return True if there may be more at once."""
        changes = remote_contents.list_unannounced(self._db, ANNOUNCE_BATCH_CONTENTS)
        if changes:
            self._cluster.copy_records.announce(changes, is_own_away=True)
            remote_contents.mark_announced(self._db, changes)
        return len(changes) == ANNOUNCE_BATCH_CONTENTS

    def next_due_s(self) -> float | None:
        """Return None: a wake-up follows every change of a copy."""
        return None
