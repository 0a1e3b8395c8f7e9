"""Takes: copies of other nodes' contents that came here, or went, since the cluster's store was told; of this node's own, that it lost.
Leaves: keys `p/<content>/<this node>` that say so.
If we die here: what was not marked as told is told again, which changes nothing.
"""

from ckptfs.catalog import telling
from ckptfs.catalog.database import Database
from ckptfs.clique import holders
from ckptfs.clique.surroundings import Cluster

BATCH_CONTENTS = 256


class Tell:
    """One batch a step. Raises Unreachable while the store is."""

    def __init__(self, db: Database, around: Cluster) -> None:
        self._db = db
        self._around = around

    def prepare(self) -> None:
        """Once, before the first step: a tier may have been lost, with copies that the store was told of."""
        telling.mark_dropped_unannounced(self._db)

    def step(self) -> bool:
        """Tell of one batch. True: there may be more at once."""
        news = telling.list_unannounced(self._db, BATCH_CONTENTS)
        if news:
            holders.announce(self._around.store, self._around.node_number, news, is_own_away=True)
            telling.mark_announced(self._db, news)
        return len(news) == BATCH_CONTENTS

    def next_due_s(self) -> float | None:
        """Only when something came or went."""
        return None
