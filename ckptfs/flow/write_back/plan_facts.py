"""The input and output of a plan: facts that the planner reads, temporary files that it needs.

Values and an interface only. Nothing here outlives the plan: if we die, the next mover plans again.
"""

import stat
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_state import PublishedRow
from ckptfs.model import Content, Inode


class SourceKind(Enum):
    """What a 'put' makes.

    INODE: the inode as the catalog has it. SEALED: a sealed content. EARLY: a closed content whose seal is still to come. STABLE: a
    consistent state of an open file.
    """

    INODE = auto()
    SEALED = auto()
    EARLY = auto()
    STABLE = auto()


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A temporary file to make: `inode` with the bytes of `content`.

    `mode` is used if the inode's row is gone; `path` is the target's path on the PFS, for messages.
    """

    kind: SourceKind
    inode: int
    content: Content | None
    mode: int
    path: str


class Facts(Protocol):
    """What the planner reads from the catalog and from earlier attempts."""

    def get_inode(self, inode: int) -> Inode | None:
        """Return the row of an inode."""

    def get_content(self, content: int) -> Content | None:
        """Return the row of a content."""

    def get_published(self, inode: int) -> PublishedRow | None:
        """Return what the PFS shows of a file's bytes."""

    can_link_history: bool
    """False: the PFS refused a hard link into the history of sets."""

    def is_in_history(self, directory: int) -> bool:
        """Return True for a directory of the history of sets."""

    def is_repeated(self, row: JournalRow) -> bool:
        """Return True if a later row makes this one redundant."""

    def is_seal_overdue(self, row: JournalRow, content: Content) -> bool:
        """Return True if write-back has waited too long for the seal of a CLOSED content."""

    def can_copy_early(self, content: Content) -> bool:
        """Return True if a CLOSED content may be copied while its digest is being computed."""

    def is_unstable(self, content: Content) -> bool:
        """Return True if the content kept changing while it was read as an open file."""

    def is_paused(self, content: Content) -> bool:
        """Return True if a recent copy of the open file took so long that this fsync must wait."""

    def is_unfit(self, inode: int) -> bool:
        """Return True if the PFS cannot hold this kind of inode."""

    def is_deferred(self, inode: int) -> bool:
        """Return True if the PFS refuses the bytes of this file for now; its rows stay in the journal."""

    def is_held(self, inode: int) -> bool:
        """Return True if the PFS refuses changes of the names of this inode for now."""

    def has_refused_attributes(self, inode: int) -> bool:
        """Return True if the PFS refuses the attributes of this inode for now; their row stays in the journal."""


def can_be_made(row: JournalRow, inode: Inode | None) -> bool:
    """Return True if the inode of this row can be made before any content is sealed.

    That holds for directories, and, as long as the catalog knows them, for other inodes that have no bytes.
    """
    if stat.S_ISDIR(row.mode):
        return True
    if inode is None or inode.nlink == 0:
        return False
    return not stat.S_ISREG(inode.mode) or inode.content is None
