"""The plan of one batch: pure decisions over a view of the PFS and facts from the catalog.

Takes: the journal's next rows, and the catalog's record of what the PFS shows.
Leaves: PFS changes in journal order, and the entries that the PFS shows after them. The PFS is not touched.
If we die here: the next mover plans again.

A file that the PFS does not show yet has its names in `pfs_pending` only; changes of these names cost nothing. A file that is created,
renamed and deleted before its first content is sealed leaves no trace. A file that a pending file replaces stays until the new bytes
are there.

Invariant: every path in a plan is valid from the beginning of the batch to its end. A row that needs a directory made by this batch,
or that moves a directory, begins the next batch. So each change can be recognised as done by its own names (apply.py).
"""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

from ckptfs import limits
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import PfsAction, PfsLocation
from ckptfs.catalog.pfs_state import Fingerprint, PfsEntry, PfsName, PfsView, PublishedRow
from ckptfs.coherence.pfs_coordination import list_row_names
from ckptfs.model import ROOT, Content, ContentState, Inode

PUTS_MAX = 64
ACTIONS_MAX = 256
BATCH_BYTES_MAX = 64 * limits.MIB
KEYS_PER_ROW = 1 << 20


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


class Planner:
    """Plans rows one after another until `plan_row` refuses one, which begins the next batch."""

    actions_max = ACTIONS_MAX
    puts_max = PUTS_MAX

    def __init__(self, view: PfsView, facts: Facts, temporary: Callable[[int], bytes]) -> None:
        """`temporary` builds the name of a temporary file from an action's key."""
        self.view = view
        self.actions: list[PfsAction] = []
        self.puts: dict[int, PlannedFile] = {}
        self.requeued: list[tuple[int, int]] = []
        self.kept_seqs: list[int] = []
        self.renewed_rows: list[PublishedRow] = []
        self.lost_inodes: list[int] = []
        self.last_seq = 0
        self.waiting_for: Content | None = None
        self._facts = facts
        self._temporary = temporary
        self._key = 0
        self._made_directories: set[int] = set()
        self._with_set_attributes: set[int] = set()
        self._rewritten: set[int] = set()
        self._planned_bytes = 0
        self._is_full = False

    def plan_row(self, row: JournalRow) -> bool:
        """Plan one row. Return False if it has to wait for another batch; then nothing of it is planned."""
        if (
            self._is_full
            or len(self.actions) >= self.actions_max
            or len(self.puts) >= self.puts_max
            or self._planned_bytes >= BATCH_BYTES_MAX
        ):
            return False
        self._key = row.seq * KEYS_PER_ROW
        is_planned = self._plan_row(row)
        if is_planned:
            self.last_seq = row.seq
        return is_planned

    def observe_kept_names(self) -> None:
        """Expect an inode whose attributes are set under a name that it keeps.

        Otherwise its new times look like an external change if the name that they were set under is removed later in the batch.
        """
        for inode in self._with_set_attributes:
            for name in self.view.list_names(inode)[-1:]:
                if (shown := self.view.get_entry(*name)) is not None and self._find_location(name) is not None:
                    self.view.set_entry(*name, shown)

    def _plan_row(self, row: JournalRow) -> bool:
        return {
            "make": self._make, "link": self._link, "unlink": self._remove, "rmdir": self._remove, "rename": self._rename,
            "exchange": self._exchange, "attributes": self._attributes, "content": self._content, "synced": self._synced,
        }[row.op](row)  # fmt: skip

    # --- actions ------------------------------------------------------------------------------------------------------

    def _find_location(self, name: PfsName) -> PfsLocation | None:
        path = self.view.get_path(name[0])
        return None if path is None else PfsLocation(name[0], name[1], path)

    def _next_key(self) -> int:
        self._key += 1
        return self._key

    def _find_fingerprint(self, name: PfsName) -> Fingerprint | None:
        """Return how the present entry is recognised: by st_ino alone if this batch sets its times."""
        shown = self.view.get_entry(*name)
        if shown is None:
            return None
        return Fingerprint(shown.fingerprint.ino) if shown.inode in self._with_set_attributes else shown.fingerprint

    def _list_shown_names(self, inode: int) -> list[PfsName]:
        return [name for name in self.view.list_names(inode) if self._find_location(name) is not None]

    def _append(
        self, act: str, inode: int, at: PfsLocation, fingerprint: Fingerprint, to: PfsLocation | None, replaced: Fingerprint | None
    ) -> None:
        key = self._next_key()
        self.actions.append(PfsAction(act, key, inode, at, fingerprint, to, replaced, self._temporary(key)))

    def _plan_file(
        self, kind: SourceKind, inode: int, content: Content | None, mode: int, name: PfsName, location: PfsLocation
    ) -> Fingerprint:
        """Plan that `name` shows the new file. Return how it is recognised afterwards."""
        key = self._next_key()
        fingerprint = Fingerprint(-key)
        self.actions.append(PfsAction("put", key, inode, location, fingerprint, None, self._find_fingerprint(name), self._temporary(key)))
        self.puts[key] = PlannedFile(kind, inode, content, mode, format_path(location))
        self._rewritten.add(inode)
        self._planned_bytes += content.size if content is not None else 0
        self.view.delete_pending(*name)
        self.view.set_entry(*name, PfsEntry(inode, fingerprint))
        return fingerprint

    def _plan_link(self, inode: int, source: PfsName, target: PfsName, fingerprint: Fingerprint) -> None:
        """Plan that `target` names the same inode as `source`."""
        at, to = self._find_location(source), self._find_location(target)
        assert at is not None and to is not None
        self._append("link", inode, at, fingerprint, to, self._find_fingerprint(target))
        self.view.delete_pending(*target)
        self.view.set_entry(*target, PfsEntry(inode, fingerprint))

    def _plan_move(self, shown: PfsEntry, name: PfsName, at: PfsLocation, new: PfsName, to: PfsLocation) -> None:
        self._append("move", shown.inode, at, self._find_fingerprint(name) or shown.fingerprint, to, self._find_fingerprint(new))
        self.view.delete_entry(*name)
        self.view.set_entry(*new, shown)

    def _plan_removal(self, name: PfsName, location: PfsLocation, act: str = "unlink") -> None:
        shown = self.view.get_entry(*name)
        assert shown is not None
        self.actions.append(PfsAction(act, self._next_key(), shown.inode, location, self._find_fingerprint(name) or Fingerprint()))
        self.view.delete_entry(*name)

    def _plan_attributes(self, inode: int, name: PfsName) -> None:
        """Plan that the entry under `name` gets the attributes of `inode`."""
        shown, location = self.view.get_entry(*name), self._find_location(name)
        assert shown is not None and location is not None
        self.actions.append(PfsAction("attributes", self._next_key(), inode, location, Fingerprint(shown.fingerprint.ino)))
        self._with_set_attributes.add(inode)
        self.view.set_entry(*name, shown)

    # --- rows by operation --------------------------------------------------------------------------------------------

    def _make(self, row: JournalRow) -> bool:
        (name,) = list_row_names(row)
        inode = self._facts.get_inode(row.inode)
        location = self._find_location(name)
        if location is None or self._facts.is_unfit(row.inode) or not _can_be_made(row, inode):
            self.view.set_pending(*name, row.inode)
            return True
        if row.parent in self._made_directories:
            return False
        self._plan_file(SourceKind.INODE, row.inode, None, row.mode, name, location)
        if stat.S_ISDIR(row.mode):
            self._made_directories.add(row.inode)
        return True

    def _link(self, row: JournalRow) -> bool:
        (name,) = list_row_names(row)
        shown = self._list_shown_names(row.inode)
        if not shown or self._find_location(name) is None:
            self.view.set_pending(*name, row.inode)
            return True
        if name not in shown:
            source = self.view.get_entry(*shown[0])
            assert source is not None
            self._plan_link(row.inode, shown[0], name, source.fingerprint)
        return True

    def _remove(self, row: JournalRow) -> bool:
        """Plan the removal of a name, and of the old file that a pending file under this name replaces."""
        (name,) = list_row_names(row)
        has_pending = self.view.get_pending(*name) is not None
        self.view.delete_pending(*name)
        location, shown = self._find_location(name), self.view.get_entry(*name)
        if shown is None or not (has_pending or shown.inode == row.inode):
            return True
        if location is None:
            self.view.delete_entry(*name)
        else:
            self._plan_removal(name, location, "unlink" if has_pending else row.op)
        return True

    def _rename(self, row: JournalRow) -> bool:
        name, new = list_row_names(row)
        shown, at, to = self.view.get_entry(*name), self._find_location(name), self._find_location(new)
        if shown is None or shown.inode != row.inode or self.view.get_pending(*name) is not None:
            self._rename_pending(row, name, new, at)
            return True
        if stat.S_ISDIR(row.mode):
            if self.actions:
                return False
            self._is_full = True
        self.view.delete_pending(*new)
        if at is None or to is None:
            self.view.delete_entry(*name)
            self.view.set_pending(*new, row.inode)
            return True
        self._plan_move(shown, name, at, new, to)
        return True

    def _rename_pending(self, row: JournalRow, name: PfsName, new: PfsName, at: PfsLocation | None) -> None:
        """Rename a file that the PFS does not show yet. The file that it replaced under its old name goes."""
        has_pending = self.view.get_pending(*name) is not None
        self.view.delete_pending(*name)
        if has_pending and self.view.get_entry(*name) is not None and at is not None:
            self._plan_removal(name, at)
        self.view.set_pending(*new, row.inode)

    def _exchange(self, row: JournalRow) -> bool:
        """Exchange the two names as far as the PFS shows them."""
        if self.actions:
            return False
        name, new = list_row_names(row)
        at, to = self._find_location(name), self._find_location(new)
        one, other = self.view.get_entry(*name), self.view.get_entry(*new)
        one_pending, other_pending = self.view.get_pending(*name), self.view.get_pending(*new)
        self.view.delete_pending(*name)
        self.view.delete_pending(*new)
        if at is not None and to is not None:
            self._is_full = True
            if one_pending is None and other_pending is None and one is not None and other is not None:
                self._append("exchange", one.inode, at, one.fingerprint, to, other.fingerprint)
                self.view.set_entry(*name, other)
                self.view.set_entry(*new, one)
                return True
            if one is not None and one_pending is None:
                self._plan_move(one, name, at, new, to)
            if other is not None and other_pending is None:
                self._plan_move(other, new, to, name, at)
        if one_pending is not None:
            self.view.set_pending(*new, one_pending)
        if other_pending is not None:
            self.view.set_pending(*name, other_pending)
        return True

    def _attributes(self, row: JournalRow) -> bool:
        if self._facts.is_repeated(row) or self._facts.get_inode(row.inode) is None:
            return True
        if row.inode == ROOT:
            self.actions.append(PfsAction("attributes", self._next_key(), ROOT, PfsLocation(ROOT, b".", ()), Fingerprint()))
            return True
        for name in self._list_shown_names(row.inode)[:1]:
            self._plan_attributes(row.inode, name)
        return True

    def _content(self, row: JournalRow) -> bool:
        content = self._facts.get_content(row.content or 0)
        if content is not None and content.state is ContentState.LOST:
            self.lost_inodes.append(row.inode)
        if content is None or content.state not in {ContentState.CLOSED, ContentState.SEALED} or self._facts.is_repeated(row):
            return True
        if content.state is ContentState.SEALED:
            return self._publish(row, content, SourceKind.SEALED)
        if not self._facts.is_seal_overdue(row, content):
            # An early copy may wait for its seal: it goes alone into a batch, so that no finished row waits with it.
            if (
                content.size >= BATCH_BYTES_MAX
                and not self.actions
                and not self._facts.is_deferred(row.inode)
                and self._facts.can_copy_early(content)
            ):
                self._is_full = True
                return self._publish(row, content, SourceKind.EARLY)
            self.waiting_for = content
            return False
        # A process still has the file mapped for writing. The row moves to the journal's end; the content is sealed later.
        published = self._facts.get_published(row.inode)
        shown = published is not None and published.generation == content.generation
        if not shown and not self._facts.is_unstable(content) and not self._publish(row, content, SourceKind.STABLE):
            return False
        if row.seq not in self.kept_seqs:
            self.requeued.append((row.inode, content.id))
        return True

    def _synced(self, row: JournalRow) -> bool:
        content = self._facts.get_content(row.content or 0)
        if content is None or content.state is not ContentState.OPEN or self._facts.is_repeated(row):
            return True
        if self._facts.is_unstable(content) or self._facts.is_paused(content):
            return True
        return self._publish(row, content, SourceKind.STABLE)

    def _publish(self, row: JournalRow, content: Content, kind: SourceKind) -> bool:
        """Plan that all names of a file show this content."""
        inode = self._facts.get_inode(row.inode)
        shown = self._list_shown_names(row.inode)
        waiting = [name for name in self.view.list_pending_names(row.inode) if self._find_location(name) is not None]
        if inode is None or inode.nlink == 0 or not shown + waiting:
            return True
        if any(parent in self._made_directories for parent, _ in shown + waiting):
            return False
        first, *others = shown + waiting
        published = self._facts.get_published(row.inode)
        if (
            kind is SourceKind.SEALED
            and shown
            and published is not None
            and _is_on_pfs(published, content)
            and row.inode not in self._rewritten
        ):
            kept = self.view.get_entry(*first)
            assert kept is not None
            fingerprint, others = kept.fingerprint, [name for name in others if name in waiting]
            if published.generation != content.generation:
                self.renewed_rows.append(replace(published, generation=content.generation))
                self._plan_attributes(row.inode, first)
        else:
            if self._facts.is_deferred(row.inode):
                self.kept_seqs.append(row.seq)
                return True
            if self.puts and self._planned_bytes + content.size > BATCH_BYTES_MAX:
                return False
            location = self._find_location(first)
            assert location is not None
            fingerprint = self._plan_file(kind, row.inode, content, row.mode, first, location)
        for name in others:
            self._plan_link(row.inode, first, name, fingerprint)
        return True


def _is_on_pfs(published: PublishedRow, content: Content) -> bool:
    """Return True if the PFS shows exactly these bytes, of this or of an earlier generation."""
    return published.is_complete and content.digest is not None and (published.size, published.digest) == (content.size, content.digest)


def _can_be_made(row: JournalRow, inode: Inode | None) -> bool:
    """Return True if the inode of this row can be made before any content is sealed.

    That holds for directories, and, as long as the catalog knows them, for other inodes that have no bytes.
    """
    if stat.S_ISDIR(row.mode):
        return True
    if inode is None or inode.nlink == 0:
        return False
    return not stat.S_ISREG(inode.mode) or inode.content is None


def format_path(location: PfsLocation) -> str:
    """Return the path of a location below the PFS's root, for messages."""
    return "/" if location.name == b"." else os.fsdecode(b"/".join((*location.path, location.name)))
