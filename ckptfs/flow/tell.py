"""Takes: copies of other nodes' contents that came here, or went, since the cluster's store was told; of this node's own, that it lost.
Leaves: keys `p/<content>/<this node>` that say so.
If we die here: what was not marked as told is told again, which changes nothing.
"""

from ckptfs.catalog import telling
from ckptfs.catalog.database import Database
from ckptfs.clique import holders
from ckptfs.clique.surroundings import Cluster

ANNOUNCE_BATCH_CONTENTS = 256


class AnnounceCopies:
    """One batch a step. Raises Unreachable while the store is."""

    def __init__(self, db: Database, cluster: Cluster) -> None:
        self._db = db
        self._cluster = cluster

    def prepare(self) -> None:
        """Once, before the first step: a tier may have been lost, with copies that the store was told of."""
        telling.mark_dropped_unannounced(self._db)

    def step(self) -> bool:
        """Tell of one batch. True: there may be more at once."""
        changes = telling.list_unannounced(self._db, ANNOUNCE_BATCH_CONTENTS)
        if changes:
            holders.announce(self._cluster.store, self._cluster.node_number, changes, is_own_away=True)
            telling.mark_announced(self._db, changes)
        return len(changes) == ANNOUNCE_BATCH_CONTENTS

    def next_due_s(self) -> float | None:
        """Only when something came or went."""
        return None
