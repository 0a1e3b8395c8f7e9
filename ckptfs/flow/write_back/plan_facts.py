"""The input and the output of a planner: the facts that it reads, and its plan.

The facts come from the catalog and from earlier attempts. Nothing here outlives the mover: if we die, the next one plans again.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from ckptfs import limits
from ckptfs.catalog import contents, copies, inodes, journal, pfs_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import PfsAction, PfsBatch
from ckptfs.flow.write_back.deferred import CopyPacing, DeferredFiles, RefusedKind
from ckptfs.model import Content

# A content may block the rows behind it until its seal for as long as its digest takes on a slow disk, and a margin.
SEAL_WAIT_S = 10.0
SEAL_WAIT_REPEATED_S = 2.0
SEAL_BYTES_PER_S = 200 * limits.MIB


class SourceKind(Enum):
    """What a 'put' makes."""

    INODE = auto()  # The inode as the catalog has it.
    SEALED = auto()
    EARLY = auto()  # A closed content whose seal is still to come.
    STABLE = auto()  # A consistent state of an open file.


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to make for a 'put'. `mode`: if the inode's row is gone; `can_merge`: unless it is there."""

    action: PfsAction
    kind: SourceKind
    content: Content | None
    mode: int
    can_merge: bool


@dataclass(slots=True)
class BatchPlan:
    """The decisions of a planner: the batch, with files still to stage, and the fate of the next row."""

    batch: PfsBatch
    puts: dict[int, PlannedFile] = field(default_factory=dict)  # What the actions 'put' make, by key.
    planned_bytes: int = 0
    moved_pending: set[int] = field(default_factory=set)  # Inodes with new names: what the PFS refused of them is tried again.
    is_waiting: bool = False  # The next row waits for something outside the journal, such as a seal or another node.
    missing_inode: int | None = None  # It waits for the bytes of this file.


class Facts:
    """What the planner reads from the catalog and from earlier attempts."""

    def __init__(self, db: Database, pacing: CopyPacing, deferred: DeferredFiles) -> None:
        self._db = db
        self.pacing = pacing
        self.deferred = deferred
        self.is_pfs_full = deferred.is_pfs_full
        self.has_refused_bytes = partial(deferred.is_refused, RefusedKind.BYTES)
        self.has_refused_names = partial(deferred.is_refused, RefusedKind.NAMES)
        self.has_refused_attributes = partial(deferred.is_refused, RefusedKind.ATTRIBUTES)
        self.get_inode = partial(inodes.find, db)
        self.get_content = partial(contents.get_publishable, db)
        self.get_published = partial(pfs_state.get_published, db, with_blocks=True)
        self.is_repeated = partial(journal.is_repeated_later, db)
        self.is_only_on_pfs = partial(copies.is_only_on_pfs, db)
        self.is_in_history = partial(inodes.is_history, db)
        self.can_link_history = True  # False: the PFS refused a hard link into the history of sets.
        self.defer_if_paused = pacing.defer_if_paused
        self.unfit_inodes: set[int] = set()  # Those that the PFS cannot hold, such as devices.
        self.unstable_contents: set[tuple[int, int]] = set()
        """(id, change) of those that kept changing while they were read as open files."""
        self.lost_contents: set[int] = set()  # Those that no node has.
        self.last_unsealed = (0, 0)  # (id, change) of the last one that was copied early: that is tried once.

    def needs_no_copy(self, row: JournalRow, content: Content) -> bool:
        """Return True if a later row tells the same, or the content is too large to be sealed."""
        return self.is_repeated(row) or content.size > limits.FILE_BYTES_MAX

    def is_seal_overdue(self, row: JournalRow, content: Content) -> bool:
        """Return True if write-back has waited too long for the seal of a CLOSED content."""
        waited_s, has_waited_before = journal.get_seal_wait(self._db, row)
        return waited_s > (SEAL_WAIT_REPEATED_S if has_waited_before else SEAL_WAIT_S + content.size / SEAL_BYTES_PER_S)
