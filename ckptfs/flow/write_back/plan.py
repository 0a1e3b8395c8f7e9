"""Takes: the journal's next rows, and what the PFS shows as far as we know.
Leaves: a plan: changes of the PFS in the journal's order, and what it will show after them. Nothing is touched here.
If we die here: the next mover plans anew.

A file that the PFS does not show yet only has names in `pfs_pending`: what happens to them costs nothing, so a file that is made,
renamed and deleted before its first content is sealed leaves no trace, and what it is renamed over stays until its own bytes are there.
What would need a directory that the same batch makes, or moves one, begins the next batch: so every path in a plan holds from its
beginning to its end, and each change can be told from its own names whether it was done (see apply.py).
"""

import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Protocol

from ckptfs import limits
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_state import Fingerprint, PfsAction, PfsEntry, PfsLocation, PfsName, PfsView, PublishedRow
from ckptfs.model import ROOT, Content, ContentState, Inode

PUTS_MAX = 64
ACTIONS_MAX = 256
BATCH_BYTES_MAX = 64 * limits.MIB
KEYS_PER_ROW = 1 << 20


class SourceKind(Enum):
    """What a 'put' makes: an inode as the catalog has it, a sealed content, one whose seal is still to come, or a stable state of an open
    file.
    """

    INODE = auto()
    SEALED = auto()
    EARLY = auto()
    STABLE = auto()


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """What is to be made under a temporary name: what `inode` is, with the bytes of `content`. `mode` counts where its row is gone."""

    kind: SourceKind
    inode: int
    content: Content | None
    mode: int


class Facts(Protocol):
    """What planning asks of the catalog."""

    def get_inode(self, inode: int) -> Inode | None:
        """The row of an inode."""

    def get_content(self, content: int) -> Content | None:
        """The row of a content."""

    def get_published(self, inode: int) -> PublishedRow | None:
        """What the PFS shows of a file's bytes."""

    def is_repeated(self, row: JournalRow) -> bool:
        """Whether a later row makes this one needless."""

    def is_seal_overdue(self, row: JournalRow, content: Content) -> bool:
        """Whether a CLOSED content kept write-back waiting for its seal too long."""

    def can_copy_early(self, content: Content) -> bool:
        """Whether a CLOSED content may be copied while its digest is still being computed."""

    def is_unstable(self, content: Content) -> bool:
        """Whether the content changed all the time when it was to be read while open."""

    def is_paused(self, content: Content) -> bool:
        """Whether an open file was copied so recently, and that took so long, that this fsync of it has to wait for its turn."""

    def is_unfit(self, inode: int) -> bool:
        """Whether the PFS refused to have such a thing as this inode."""

    def is_deferred(self, inode: int) -> bool:
        """Whether the bytes of this file are refused for now: its rows stay in the journal."""


class Planner:
    """Rows are taken one after another, until `take` refuses one: it begins the next batch."""

    actions_max = ACTIONS_MAX
    puts_max = PUTS_MAX

    def __init__(self, view: PfsView, facts: Facts, temporary: Callable[[int], bytes]) -> None:
        """`temporary` names a temporary file after an action's key."""
        self.view = view
        self.actions: list[PfsAction] = []
        self.puts: dict[int, PlannedFile] = {}
        self.requeued: list[tuple[int, int]] = []
        self.kept_seqs: list[int] = []
        self.renewed_rows: list[PublishedRow] = []
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
        """Plan one row. False: it has to wait for another batch, and nothing was planned of it."""
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
        """What got its times under a name that went afterwards is looked at under one that it kept: else it seems changed by a stranger."""
        for inode in self._with_set_attributes:
            for name in self.view.list_names(inode)[-1:]:
                if (shown := self.view.get_entry(*name)) is not None and self._find_location(name) is not None:
                    self.view.set_entry(*name, shown)

    def _plan_row(self, row: JournalRow) -> bool:
        return {
            "make": self._make, "link": self._link, "unlink": self._remove, "rmdir": self._remove, "rename": self._rename,
            "exchange": self._exchange, "attributes": self._attributes, "content": self._content, "synced": self._synced,
        }[row.op](row)  # fmt: skip

    # --- pieces ---------------------------------------------------------------------------------------------------------

    def _find_location(self, name: PfsName) -> PfsLocation | None:
        path = self.view.get_path(name[0])
        return None if path is None else PfsLocation(name[0], name[1], path)

    def _next_key(self) -> int:
        self._key += 1
        return self._key

    def _find_fingerprint(self, name: PfsName) -> Fingerprint | None:
        """What is there before, to be recognised. A file whose times this batch sets is recognised by its number alone."""
        shown = self.view.get_entry(*name)
        if shown is None:
            return None
        return Fingerprint(shown.fingerprint.ino) if shown.inode in self._with_set_attributes else shown.fingerprint

    def _plan_file(self, planned: PlannedFile, name: PfsName, spot: PfsLocation) -> Fingerprint:
        """Plan that `name` shows what `put` makes; how it is recognised then."""
        key = self._next_key()
        mark = Fingerprint(-key)
        self.actions.append(
            PfsAction(
                "put", key, planned.inode, spot, mark, replaced_fingerprint=self._find_fingerprint(name), temporary=self._temporary(key)
            )
        )
        self.puts[key] = planned
        self._rewritten.add(planned.inode)
        self._planned_bytes += planned.content.size if planned.content is not None else 0
        self.view.delete_pending(*name)
        self.view.set_entry(*name, PfsEntry(planned.inode, mark))
        return mark

    def _plan_link(self, inode: int, source: PfsName, target: PfsName, mark: Fingerprint) -> None:
        """Plan that `target` names what `source` names."""
        at, to = self._find_location(source), self._find_location(target)
        assert at is not None and to is not None
        key = self._next_key()
        self.actions.append(PfsAction("link", key, inode, at, mark, to, self._find_fingerprint(target), self._temporary(key)))
        self.view.delete_pending(*target)
        self.view.set_entry(*target, PfsEntry(inode, mark))

    def _plan_removal(self, name: PfsName, spot: PfsLocation, act: str = "unlink") -> None:
        shown = self.view.get_entry(*name)
        assert shown is not None
        self.actions.append(PfsAction(act, self._next_key(), shown.inode, spot, self._find_fingerprint(name) or Fingerprint()))
        self.view.delete_entry(*name)

    def _plan_attributes(self, inode: int, name: PfsName) -> None:
        """Plan that what is shown under `name` gets the attributes of `inode`."""
        shown, spot = self.view.get_entry(*name), self._find_location(name)
        assert shown is not None and spot is not None
        self.actions.append(PfsAction("attributes", self._next_key(), inode, spot, Fingerprint(shown.fingerprint.ino)))
        self._with_set_attributes.add(inode)
        self.view.set_entry(*name, shown)

    # --- what the rows mean ---------------------------------------------------------------------------------------------

    def _make(self, row: JournalRow) -> bool:
        name = _name(row)
        inode = self._facts.get_inode(row.inode)
        spot = self._find_location(name)
        if spot is None or self._facts.is_unfit(row.inode) or not _can_be_made(row, inode):
            self.view.set_pending(*name, row.inode)
            return True
        if row.parent in self._made_directories:
            return False
        self._plan_file(PlannedFile(SourceKind.INODE, row.inode, None, row.mode), name, spot)
        if stat.S_ISDIR(row.mode):
            self._made_directories.add(row.inode)
        return True

    def _link(self, row: JournalRow) -> bool:
        name = _name(row)
        shown = [source for source in self.view.list_names(row.inode) if self._find_location(source) is not None]
        if not shown or self._find_location(name) is None:
            self.view.set_pending(*name, row.inode)
            return True
        if name not in shown:
            source = self.view.get_entry(*shown[0])
            assert source is not None
            self._plan_link(row.inode, shown[0], name, source.fingerprint)
        return True

    def _remove(self, row: JournalRow) -> bool:
        """Take a name away; what a file that did not appear yet has covered goes with it."""
        name = _name(row)
        has_pending = self.view.get_pending(*name) is not None
        self.view.delete_pending(*name)
        spot, shown = self._find_location(name), self.view.get_entry(*name)
        if shown is None or not (has_pending or shown.inode == row.inode):
            return True
        if spot is None:
            self.view.delete_entry(*name)
        else:
            self._plan_removal(name, spot, "unlink" if has_pending else row.op)
        return True

    def _rename(self, row: JournalRow) -> bool:
        name, new = _name(row), _new_name(row)
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
        key = self._next_key()
        self.actions.append(
            PfsAction(
                "move",
                key,
                row.inode,
                at,
                self._find_fingerprint(name) or Fingerprint(),
                to,
                self._find_fingerprint(new),
                self._temporary(key),
            )
        )
        self.view.delete_entry(*name)
        self.view.set_entry(*new, shown)
        return True

    def _rename_pending(self, row: JournalRow, name: PfsName, new: PfsName, at: PfsLocation | None) -> None:
        """Rename what the PFS does not show yet. What it covered under its old name goes, as it has gone in the mount."""
        has_pending = self.view.get_pending(*name) is not None
        self.view.delete_pending(*name)
        if has_pending and self.view.get_entry(*name) is not None and at is not None:
            self._plan_removal(name, at)
        self.view.set_pending(*new, row.inode)

    def _exchange(self, row: JournalRow) -> bool:
        """What is there of the two changes places."""
        if self.actions:
            return False
        name, new = _name(row), _new_name(row)
        at, to = self._find_location(name), self._find_location(new)
        one, other = self.view.get_entry(*name), self.view.get_entry(*new)
        one_pending, other_pending = self.view.get_pending(*name), self.view.get_pending(*new)
        self.view.delete_pending(*name)
        self.view.delete_pending(*new)
        if at is not None and to is not None:
            self._is_full = True
            if one_pending is None and other_pending is None and one is not None and other is not None:
                key = self._next_key()
                self.actions.append(PfsAction("exchange", key, one.inode, at, one.fingerprint, to, other.fingerprint, self._temporary(key)))
                self.view.set_entry(*name, other)
                self.view.set_entry(*new, one)
                return True
            self._move_shown(name, at, new, to, one if one_pending is None else None)
            self._move_shown(new, to, name, at, other if other_pending is None else None)
        if one_pending is not None:
            self.view.set_pending(*new, one_pending)
        if other_pending is not None:
            self.view.set_pending(*name, other_pending)
        return True

    def _move_shown(self, name: PfsName, at: PfsLocation, new: PfsName, to: PfsLocation, shown: PfsEntry | None) -> None:
        """One half of an exchange whose other half the PFS does not show."""
        if shown is not None:
            key = self._next_key()
            self.actions.append(
                PfsAction("move", key, shown.inode, at, shown.fingerprint, to, self._find_fingerprint(new), self._temporary(key))
            )
            self.view.delete_entry(*name)
            self.view.set_entry(*new, shown)

    def _attributes(self, row: JournalRow) -> bool:
        if self._facts.is_repeated(row) or self._facts.get_inode(row.inode) is None:
            return True
        if row.inode == ROOT:
            self.actions.append(PfsAction("attributes", self._next_key(), ROOT, PfsLocation(ROOT, b".", ()), Fingerprint()))
            return True
        name = next((name for name in self.view.list_names(row.inode) if self._find_location(name) is not None), None)
        if name is None:
            return True
        self._plan_attributes(row.inode, name)
        return True

    def _content(self, row: JournalRow) -> bool:
        content = self._facts.get_content(row.content or 0)
        if content is None or content.state not in {ContentState.CLOSED, ContentState.SEALED} or self._facts.is_repeated(row):
            return True
        if content.state is ContentState.SEALED:
            return self._publish(row, content, SourceKind.SEALED)
        if not self._facts.is_seal_overdue(row, content):
            # Nothing that could have been done at once waits for a seal: a large content begins a batch, and is alone in it.
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
        # Somebody still has it mapped for writing: its seal will come, and with it another turn at the journal's end.
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
        shown = [name for name in self.view.list_names(row.inode) if self._find_location(name) is not None]
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
            mark, others = kept.fingerprint, [name for name in others if name in waiting]
            if published.generation != content.generation:
                self.renewed_rows.append(replace(published, generation=content.generation))
                self._plan_attributes(row.inode, first)
        else:
            if self._facts.is_deferred(row.inode):
                self.kept_seqs.append(row.seq)
                return True
            if self.puts and self._planned_bytes + content.size > BATCH_BYTES_MAX:
                return False
            spot = self._find_location(first)
            assert spot is not None
            mark = self._plan_file(PlannedFile(kind, row.inode, content, row.mode), first, spot)
        for name in others:
            self._plan_link(row.inode, first, name, mark)
        return True


def _is_on_pfs(published: PublishedRow, content: Content) -> bool:
    """Whether the PFS shows exactly these bytes, of this or of an earlier generation."""
    return published.is_complete and content.digest is not None and (published.size, published.digest) == (content.size, content.digest)


def _can_be_made(row: JournalRow, inode: Inode | None) -> bool:
    """Whether what this row made can appear at once: directories always, files without bytes of their own, the rest while it is known."""
    if stat.S_ISDIR(row.mode):
        return True
    if inode is None or inode.nlink == 0:
        return False
    return not stat.S_ISREG(inode.mode) or inode.content is None


def _name(row: JournalRow) -> PfsName:
    assert row.name is not None
    return row.parent, row.name


def _new_name(row: JournalRow) -> PfsName:
    assert row.new_name is not None
    return row.new_parent, row.new_name
