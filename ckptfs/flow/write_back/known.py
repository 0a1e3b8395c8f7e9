"""Takes: what planning asks of the catalog.
Leaves: the answers, with what write-back itself has learned on the PFS: what it cannot hold, what changes all the time.
If we die here: what was learned is learned again.
"""

from ckptfs.catalog import journal, pfs_view, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.namespace import get
from ckptfs.catalog.pfs_view import PublishedRow
from ckptfs.flow.write_back.pauses import Pauses
from ckptfs.flow.write_back.refusals import Aside
from ckptfs.limits import MIB
from ckptfs.model import Content, Inode

# How long a content may keep the others waiting for its seal: what its digest takes on a slow disk, and a while.
SEAL_WAIT_S = 10.0
SEAL_WAIT_AGAIN_S = 2.0
SEAL_BYTES_PER_S = 200 * MIB


class Known:
    """`Facts` for the planner: what the catalog says, and what was learned on the PFS."""

    def __init__(self, db: Database, pauses: Pauses, aside: Aside) -> None:
        self._db = db
        self.set_aside = aside.holds
        self._pauses = pauses
        self.refused: set[int] = set()
        self.changing: set[tuple[int, int]] = set()
        self.in_vain = (0, 0)

    def inode(self, inode: int) -> Inode | None:
        try:
            return get(self._db, inode)
        except FileNotFoundError:
            return None

    def content(self, content: int) -> Content | None:
        return settling.get_content(self._db, content)

    def published(self, inode: int) -> PublishedRow | None:
        return pfs_view.get_published(self._db, inode)

    def repeated(self, row: JournalRow) -> bool:
        return journal.is_repeated_later(self._db, row)

    def overdue(self, row: JournalRow, content: Content) -> bool:
        waited_s, before = journal.get_seal_wait(self._db, row)
        return waited_s > (SEAL_WAIT_AGAIN_S if before else SEAL_WAIT_S + content.size / SEAL_BYTES_PER_S)

    def early(self, content: Content) -> bool:
        return (content.id, content.change) != self.in_vain

    def unstable(self, content: Content) -> bool:
        return (content.id, content.change) in self.changing

    def paused(self, content: Content) -> bool:
        return self._pauses.deferring(content.inode, content.id)

    def unfit(self, inode: int) -> bool:
        return inode in self.refused
