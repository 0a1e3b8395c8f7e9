"""Takes: what planning asks of the catalog.
Leaves: the answers, with what write-back itself has learned on the PFS: what it cannot hold, what changes all the time.
If we die here: what was learned is learned again.
"""

from ckptfs.catalog import journal, pfs_view, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.namespace import get
from ckptfs.catalog.pfs_view import PublishedRow
from ckptfs.flow.write_back.pauses import CopyPacing
from ckptfs.flow.write_back.refusals import DeferredFiles
from ckptfs.limits import MIB
from ckptfs.model import Content, Inode

# How long a content may keep the others waiting for its seal: what its digest takes on a slow disk, and a while.
SEAL_WAIT_S = 10.0
SEAL_WAIT_REPEATED_S = 2.0
SEAL_BYTES_PER_S = 200 * MIB


class CatalogFacts:
    """`Facts` for the planner: what the catalog says, and what was learned on the PFS."""

    def __init__(self, db: Database, pacing: CopyPacing, deferred: DeferredFiles) -> None:
        self._db = db
        self.is_deferred = deferred.is_deferred
        self._pacing = pacing
        self.unfit_inodes: set[int] = set()
        self.unstable_contents: set[tuple[int, int]] = set()
        self.last_unsealed = (0, 0)

    def get_inode(self, inode: int) -> Inode | None:
        try:
            return get(self._db, inode)
        except FileNotFoundError:
            return None

    def get_content(self, content: int) -> Content | None:
        return settling.get_content(self._db, content)

    def get_published(self, inode: int) -> PublishedRow | None:
        return pfs_view.get_published(self._db, inode)

    def is_repeated(self, row: JournalRow) -> bool:
        return journal.is_repeated_later(self._db, row)

    def is_seal_overdue(self, row: JournalRow, content: Content) -> bool:
        waited_s, has_waited_before = journal.get_seal_wait(self._db, row)
        return waited_s > (SEAL_WAIT_REPEATED_S if has_waited_before else SEAL_WAIT_S + content.size / SEAL_BYTES_PER_S)

    def can_copy_early(self, content: Content) -> bool:
        return (content.id, content.change) != self.last_unsealed

    def is_unstable(self, content: Content) -> bool:
        return (content.id, content.change) in self.unstable_contents

    def is_paused(self, content: Content) -> bool:
        return self._pacing.defer_if_early(content.inode, content.id)

    def is_unfit(self, inode: int) -> bool:
        return inode in self.unfit_inodes
