"""The plan of one batch: decisions over a view of the PFS and facts from the catalog. Touches no file.

Takes: the journal's next rows, and the catalog's record of what the PFS shows.
Leaves: PFS changes in journal order, and the entries that the PFS shows after them.
If we die here: the next mover plans again.

A file that the PFS does not show yet has its names in `pfs_pending` only; changes of these names cost nothing. A file that is created,
renamed and deleted before its first content is sealed leaves no trace. A file that a pending file replaces stays until the new bytes
are there.

What the PFS refuses to do with the names of an inode becomes pending in the same way: the row is planned as if it were done, and the names
that the inode should have are pending. Write-back appends a row of its own, `settle`, to the journal. When the inode is tried again, that
row brings its names on the PFS in line. What is below a directory that is missing for this reason waits for it.

A name is in one of these states:
- *shown*: the PFS has an entry under it, and it belongs to that inode (`pfs_entry`).
- *stale*: the PFS has an entry under it, but the journal gives the name to another inode, or to none.
- *pending*: it should show an inode, or nothing (`NO_INODE`), and does not yet (`pfs_pending`). A stale name is pending, too.

An entry *must stay* for now (`_must_stay`, P5) if it is all that the PFS shows of an inode with pending names, if a file must first get a
name in the history, or if it is a directory with entries. If the last name of a file goes and a name in the history is pending for it, the
file moves there instead of being removed.

Invariant: every path in a plan is valid from the beginning of the batch to its end. A row that needs a directory made by this batch,
or that moves a directory, begins the next batch. So each change can be recognised as done by its own names (apply.py).
"""

import stat
from collections.abc import Iterable
from dataclasses import replace

from ckptfs import limits
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import KEYS_PER_ROW, PfsAction, PfsBatch
from ckptfs.catalog.pfs_state import NO_INODE, Fingerprint, PfsEntry, PfsName, PfsView
from ckptfs.flow.write_back.plan_facts import BatchPlan, Facts, PlannedFile, SourceKind
from ckptfs.model import ROOT, Content, ContentState, Inode, PublishedRow

PUTS_MAX = 64
ACTIONS_MAX = 256
BATCH_BYTES_MAX = 64 * limits.MIB
_REPLACING = {"put", "link", "move", "exchange"}


class Planner:
    """Plans the rows of one batch."""

    actions_max = ACTIONS_MAX
    puts_max = PUTS_MAX

    def __init__(self, view: PfsView, facts: Facts, instance: str) -> None:
        """`instance` tells the temporary names of this catalog from those of others."""
        self.view = view
        self.batch = PfsBatch(0, name_changes=view.name_changes, pending_changes=view.pending_changes)
        self.plan = BatchPlan(self.batch)
        self._facts = facts
        self._instance = instance
        self._made_directories: set[int] = set()
        self._with_set_attributes: set[int] = set()
        self._rewritten: set[int] = set()
        self._is_full = False

    def plan_rows(self, rows: Iterable[JournalRow], fence_seq: int = 0) -> BatchPlan:
        """Plan rows one after another. One that has to wait, or is behind the fence, begins a new batch."""
        for row in rows:
            if 0 < self.batch.last_seq < fence_seq <= row.seq or not self.plan_row(row):
                break
        return self.plan

    def plan_row(self, row: JournalRow) -> bool:
        """Plan one row. Return False if it has to wait for another batch; then nothing of it is planned."""
        is_full = self._is_full or len(self.batch.actions) >= self.actions_max or len(self.plan.puts) >= self.puts_max
        if is_full or self.plan.planned_bytes >= BATCH_BYTES_MAX or (self._made_directories and self._must_wait_for_history(row)):
            return False
        self.view.key = row.seq * KEYS_PER_ROW
        is_planned = self._plan_row(row)
        if is_planned:
            self.batch.last_seq = row.seq
        return is_planned

    def _plan_row(self, row: JournalRow) -> bool:
        return {
            "make": self._make, "link": self._link, "unlink": self._remove, "rmdir": self._remove, "rename": self._rename,
            "exchange": self._exchange, "attributes": self._attributes, "content": self._content, "synced": self._synced,
            "settle": self._settle,
        }[row.op](row)  # fmt: skip

    # --- actions ------------------------------------------------------------------------------------------------------

    def _get_shown(self, name: PfsName) -> PfsEntry:
        shown = self.view.get_entry(*name)
        assert shown is not None
        return shown

    def _find_fingerprint(self, name: PfsName) -> Fingerprint | None:
        """Return how the present entry is recognised: by st_ino alone if this batch sets its times."""
        shown = self.view.get_entry(*name)
        if shown is None:
            return None
        return Fingerprint(shown.fingerprint.ino) if shown.inode in self._with_set_attributes else shown.fingerprint

    def _list_linkable(self, names: list[PfsName], shown: list[PfsName]) -> list[PfsName]:
        """Return those of `names` that the PFS can show beside `shown`."""
        if self._facts.can_link_history:
            return names
        # Without links the history gets a file when it has no other name.
        others = [name for name in names if not self._facts.is_in_history(name[0])]
        return others if others or shown else names[:1]

    def _list_history_names(self, name: PfsName, inode: int = NO_INODE) -> list[PfsName]:
        """Return the pending names in the history to which a file may move if its last name `name` goes."""
        shown = self.view.get_shown_inode(*name)
        if shown in {NO_INODE, inode} or any(other != name for other in self.view.list_shown_names(shown)):
            return []
        return [other for other in self.view.list_pending_names(shown) if other != name and self._facts.is_in_history(other[0])]

    def _find_history_name(self, name: PfsName, inode: int = NO_INODE) -> PfsName | None:
        """Return the name in the history to which a file moves before `name` goes; None if none is needed."""
        return next((other for other in self._list_history_names(name, inode) if self.view.has_directory(*other)), None)

    def _lacks_history_name(self, name: PfsName, inode: int) -> bool:
        """Return True if a file must stay under a name, because its directory in the history is missing.

        It may go if other copies are left, unless the PFS is full: then the directory follows as soon as there is room.
        """
        others = self._list_history_names(name, inode)
        if not others or any(self.view.has_directory(*other) for other in others):
            return False
        return self._facts.is_pfs_full() or self._facts.is_only_on_pfs(self.view.get_shown_inode(*name))

    def _must_wait_for_history(self, row: JournalRow) -> bool:
        """Return True if a file must move into a directory that this batch makes."""
        names = row.names if row.op in ("unlink", "rename") else []
        others = (self._find_history_name(name, row.inode if row.op == "rename" else NO_INODE) for name in names)
        return any(name is not None and name[0] in self._made_directories for name in others)

    def _move_to_history(self, row: JournalRow, name: PfsName, inode: int = NO_INODE) -> bool:
        """Plan that a file moves to the history before `name` goes. Return False if it has no place there.

        If it is to have one, and the directory is missing, a row writes its bytes there later.
        """
        new = self._find_history_name(name, inode)
        if new is not None:
            self._plan_move(name, new)
            self.view.delete_pending(*new)
        elif self._list_history_names(name, inode):
            file = self._facts.get_inode(self.view.get_shown_inode(*name))
            if file is not None and file.content is not None:
                self._requeue(row, file.id, file.content)
        return new is not None

    def _must_stay(self, name: PfsName, inode: int = NO_INODE) -> bool:
        """Return True if an entry must stay for now.

        Its inode has no right name yet, or no place in the history, or is a directory with entries.
        """
        shown = self.view.get_shown_inode(*name)
        if shown in {NO_INODE, inode}:
            return False
        return (
            self.view.has_only_stale_names(shown)
            or self._lacks_history_name(name, inode)
            or (inode != NO_INODE and self.view.has_entries(shown))
        )

    def _is_refused(self, name: PfsName, inode: int = NO_INODE) -> bool:
        """Return True if a name cannot show `inode`, or nothing, for now; it may become pending."""
        return self._must_stay(name, inode) or self.view.is_directory_pending(*name) or self._facts.has_refused_names(inode)

    def _set_wanted(self, name: PfsName, inode: int, row: JournalRow) -> None:
        """Plan that a name shows `inode`, or nothing (`NO_INODE`), only when the PFS lets it."""
        self.view.set_pending(*name, inode)
        subject = inode or self.view.get_shown_inode(*name)
        if subject != NO_INODE:
            self._settle_later(subject, row)

    def _keep(self, row: JournalRow) -> bool:
        """Leave a row in the journal, because the PFS refuses its change; those behind it are planned."""
        self.batch.kept_seqs.append(row.seq)
        return True

    def _wait(self) -> bool:
        """Leave a row and all behind it to a later batch, because it waits for something outside the journal."""
        self.plan.is_waiting = True
        return False

    def _requeue(self, row: JournalRow, inode: int, content: int) -> None:
        self.batch.requeued.append((inode, content))
        self.batch.requeued_seqs.append(row.seq)

    def _settle_later(self, inode: int, row: JournalRow) -> None:
        if (inode, row.seq) not in self.batch.settle_rows:
            self.batch.settle_rows.append((inode, row.seq))

    def _append(self, act: str, inode: int, name: PfsName, own: Fingerprint | None, new: PfsName | None = None) -> PfsAction:
        """Plan an action on a name, to `new` if it has two. `own`: its subject; None for what it makes."""
        self.view.key += 1
        assert all(self.view.has_directory(*one) for one in (name, new) if one is not None), "the path of an action is known"
        key, at, to = self.view.key, self.view.get_location(*name), new and self.view.get_location(*new)
        replaced = self._find_fingerprint(new or name) if act in _REPLACING else None
        action = PfsAction(act, key, inode, at, own or Fingerprint(-key), to, replaced, f".ckptfs.{self._instance}.{key:x}".encode())
        self.batch.actions.append(action)
        return action

    def _plan_file(self, kind: SourceKind, inode: int, content: Content | None, mode: int, name: PfsName) -> None:
        action = self._append("put", inode, name, None)
        # If the name is known as another inode's, that one is ours, and this batch removes it first.
        can_merge = stat.S_ISDIR(mode) and self.view.get_recorded(*name)[0] in (None, inode)
        self.plan.puts[action.key] = PlannedFile(action, kind, content, mode, can_merge)
        self._rewritten.add(inode)
        if stat.S_ISDIR(mode):
            self._made_directories.add(inode)
        self.plan.planned_bytes += content.size if content is not None else 0
        self.view.delete_pending(*name)
        self.view.set_entry(*name, PfsEntry(inode, action.fingerprint))

    def _plan_link(self, inode: int, source: PfsName, target: PfsName) -> None:
        """Plan that `target` names the same inode as `source`."""
        fingerprint = self._get_shown(source).fingerprint
        self._append("link", inode, source, fingerprint, target)
        self.view.delete_pending(*target)
        self.view.set_entry(*target, PfsEntry(inode, fingerprint))

    def _plan_move(self, name: PfsName, new: PfsName) -> None:
        shown = self._get_shown(name)
        self._append("move", shown.inode, name, self._find_fingerprint(name), new)
        self.view.delete_entry(*name)
        self.view.set_entry(*new, shown)

    def _plan_exchange(self, name: PfsName, new: PfsName) -> None:
        one, other = self._get_shown(name), self._get_shown(new)
        self._append("exchange", one.inode, name, one.fingerprint, new)
        self.view.set_entry(*name, other)
        self.view.set_entry(*new, one)

    def _plan_removal(self, name: PfsName, act: str = "unlink") -> None:
        self._append(act, self.view.get_shown_inode(*name), name, self._find_fingerprint(name))
        self.view.delete_entry(*name)

    def _plan_attributes(self, inode: int, name: PfsName) -> None:
        self._append("attributes", inode, name, Fingerprint(self._get_shown(name).fingerprint.ino))
        self._with_set_attributes.add(inode)
        # All names are observed: the new times would look like an external change if the name that they were set under were removed later.
        for other in {name, *self.view.list_shown_names(inode)}:
            if (kept := self.view.get_entry(*other)) is not None:
                self.view.set_entry(*other, kept)

    # --- rows by operation --------------------------------------------------------------------------------------------

    def _make(self, row: JournalRow) -> bool:
        (name,) = row.names
        can_be_made = _can_be_made(row, self._facts.get_inode(row.inode))
        if self._is_refused(name, row.inode):
            self._set_wanted(name, row.inode, row)
            return True
        if not self.view.has_directory(*name) or row.inode in self._facts.unfit_inodes or not can_be_made:
            self.view.set_pending(*name, row.inode)
            return True
        if row.parent in self._made_directories:
            return False
        self._plan_file(SourceKind.INODE, row.inode, None, row.mode, name)
        return True

    def _link(self, row: JournalRow) -> bool:
        (name,) = row.names
        shown, stale = self.view.split_names(row.inode)
        is_refused = self._is_refused(name, row.inode)
        if not shown or is_refused or not self.view.has_directory(*name) or not self._list_linkable([name], shown):
            self.view.set_pending(*name, row.inode)
            if is_refused or stale:
                self._settle_later(row.inode, row)
            return True
        if name not in shown:
            self._plan_link(row.inode, shown[0], name)
        return True

    def _remove(self, row: JournalRow) -> bool:
        """Plan the removal of a name, and of the old file that a pending file under this name replaces."""
        (name,) = row.names
        has_pending = self.view.get_pending(*name) is not None
        self.view.delete_pending(*name)
        if self.view.get_shown_inode(*name) == row.inode or (has_pending and self.view.get_entry(*name) is not None):
            self._remove_shown(row, name, "unlink" if has_pending else row.op)
        return True

    def _remove_shown(self, row: JournalRow, name: PfsName, act: str) -> None:
        """Plan that a name shows nothing, now or when the PFS allows it."""
        shown = self.view.get_shown_inode(*name)
        if not self.view.has_directory(*name):
            self.view.delete_entry(*name)
        elif self._facts.has_refused_names(shown) or self._must_stay(name) or self.view.has_entries(shown):
            self._set_wanted(name, NO_INODE, row)
        elif not self._move_to_history(row, name):
            self._plan_removal(name, "remove" if stat.S_ISDIR(self.view.get_recorded(*name)[1]) and act == "unlink" else act)

    def _rename(self, row: JournalRow) -> bool:
        name, new = row.names
        if not self.view.shows(name, row.inode) or self.view.get_pending(*name) is not None:
            self._rename_pending(row, name, new)
            return True
        is_directory = stat.S_ISDIR(row.mode)
        if is_directory and self.batch.actions:
            return False
        if self._is_refused(new, row.inode):
            self.view.delete_pending(*new)
            self._set_wanted(name, NO_INODE, row)
            self._set_wanted(new, row.inode, row)
            return True
        self._is_full = self._is_full or is_directory
        self.view.delete_pending(*new)
        if not self.view.has_directory(*name) or not self.view.has_directory(*new):
            self.view.delete_entry(*name)
            self.view.set_pending(*new, row.inode)
            return True
        self._move_to_history(row, new, row.inode)
        self._plan_move(name, new)
        return True

    def _rename_pending(self, row: JournalRow, name: PfsName, new: PfsName) -> None:
        """Rename an inode that is not under its name on the PFS yet; the file that it replaced goes."""
        has_pending = self.view.get_pending(*name) is not None
        was_refused = stat.S_ISDIR(row.mode) or self._is_refused(name, row.inode) or self._facts.has_refused_bytes(row.inode)
        self.view.delete_pending(*name)
        if has_pending and self.view.get_entry(*name) is not None:
            self._remove_shown(row, name, "unlink")
        self.view.delete_pending(*new)
        self.view.set_pending(*new, row.inode)
        if was_refused:
            self.plan.moved_pending.add(row.inode)
        if has_pending and (self.view.list_names(row.inode) or not stat.S_ISREG(row.mode)):
            self._settle_later(row.inode, row)

    def _exchange(self, row: JournalRow) -> bool:
        """Exchange the two names as far as the PFS shows them."""
        if self.batch.actions:
            return False
        name, new = row.names
        one, other = self.view.get_entry(*name), self.view.get_entry(*new)
        one_pending, other_pending = self.view.get_pending(*name), self.view.get_pending(*new)
        if self._is_exchange_refused(name, new):
            wanted, other_wanted = self.view.get_wanted_inode(*name), self.view.get_wanted_inode(*new)
            self._set_wanted(name, other_wanted, row)
            self._set_wanted(new, wanted, row)
            self.plan.moved_pending.update({wanted, other_wanted} - {NO_INODE})
            return True
        self.view.delete_pending(*name)
        self.view.delete_pending(*new)
        if self.view.has_directory(*name) and self.view.has_directory(*new):
            self._is_full = True
            if one_pending is None and other_pending is None and one is not None and other is not None:
                self._plan_exchange(name, new)
                return True
            if one is not None and one_pending is None:
                self._plan_move(name, new)
            if other is not None and other_pending is None:
                self._plan_move(new, name)
        if one_pending is not None:
            self.view.set_pending(*new, one_pending)
        if other_pending is not None:
            self.view.set_pending(*name, other_pending)
        return True

    def _is_exchange_refused(self, *names: PfsName) -> bool:
        """Return True if one of the two names cannot be changed now."""
        for name in names:
            shown = self.view.get_entry(*name)
            if self.view.get_pending(*name) == NO_INODE or self._is_refused(name):
                return True
            if shown is not None and (
                self._facts.has_refused_names(shown.inode) or (self.view.is_stale(*name) and self.view.list_pending_names(shown.inode))
            ):
                return True
        return False

    def _attributes(self, row: JournalRow) -> bool:
        if self._facts.is_repeated(row) or self._facts.get_inode(row.inode) is None:
            return True
        if self._facts.has_refused_attributes(row.inode):
            return self._keep(row)
        if row.inode == ROOT:
            self._append("attributes", ROOT, (ROOT, b"."), Fingerprint())
            return True
        shown, stale = self.view.split_names(row.inode)
        for name in (shown or stale)[:1]:
            self._plan_attributes(row.inode, name)
        return True

    def _content(self, row: JournalRow) -> bool:
        content = self._facts.get_content(row.content or 0)
        if content is not None and content.state is ContentState.LOST:
            self.batch.lost_inodes.append(row.inode)
        if content is None or content.state not in {ContentState.CLOSED, ContentState.SEALED} or self._facts.needs_no_copy(row, content):
            return True
        if content.state is ContentState.SEALED:
            return self._publish(row, content, SourceKind.SEALED)
        if not self._facts.is_seal_overdue(row, content):
            # An early copy may wait for its seal: it goes alone into a batch, so that no finished row waits with it.
            if not self.batch.actions and _can_be_copied_early(self._facts, content):
                self._is_full = True
                return self._publish(row, content, SourceKind.EARLY)
            return self._wait()
        # A process still has the file mapped for writing. The row moves to the journal's end; the content is sealed later.
        published, is_unstable = self._facts.get_published(row.inode), (content.id, content.change) in self._facts.unstable_contents
        shown = published is not None and published.generation == content.generation
        if not shown and not is_unstable and not self._publish(row, content, SourceKind.STABLE):
            return False
        if row.seq not in self.batch.kept_seqs:
            self._requeue(row, row.inode, content.id)
        return True

    def _synced(self, row: JournalRow) -> bool:
        content = self._facts.get_content(row.content or 0)
        if content is None or content.state is not ContentState.OPEN or self._facts.needs_no_copy(row, content):
            return True
        if (content.id, content.change) in self._facts.unstable_contents or self._facts.defer_if_paused(content.inode, content.id):
            return True
        return self._publish(row, content, SourceKind.STABLE)

    def _publish(self, row: JournalRow, content: Content, kind: SourceKind) -> bool:
        """Plan that all names of a file show this content."""
        inode = self._facts.get_inode(row.inode)
        if inode is None or inode.nlink == 0:
            return True
        shown, stale = self.view.split_names(row.inode)
        published = self._facts.get_published(row.inode)
        pending = self._list_linkable(self.view.list_pending_names(row.inode), shown)
        refused = [name for name in pending if self._is_refused(name, row.inode)]
        waiting = [name for name in pending if name not in refused and self.view.has_directory(*name)]
        if not shown + waiting:
            return self._keep(row) if refused or self._facts.has_refused_names(row.inode) else True
        if any(parent in self._made_directories for parent, _ in shown + waiting):
            return False
        first, *others = shown + waiting
        if (
            kind is SourceKind.SEALED
            and shown
            and published is not None
            and _is_on_pfs(published, content)
            and row.inode not in self._rewritten
        ):
            others = [name for name in others if name in waiting]
            if published.generation != content.generation:
                if not self._facts.has_refused_attributes(row.inode):
                    self._plan_attributes(row.inode, first)
                self.batch.published_rows.append(replace(published, generation=content.generation, key=self.view.key, is_checked=False))
        elif kind is not SourceKind.SEALED or shown or not self._adopt_entry(row, content, first):
            if self._facts.has_refused_bytes(row.inode) or (len(shown) > 1 and self._facts.has_refused_names(row.inode)):
                self._keep(row)
                others = []
            elif self.plan.puts and self.plan.planned_bytes + content.size > BATCH_BYTES_MAX:
                return False
            else:
                self._remove_forgotten(row.inode, stale)
                self._plan_file(kind, row.inode, content, row.mode, first)
        for name in others:
            self._plan_link(row.inode, first, name)
        if len(waiting) < len(pending):
            self._settle_later(row.inode, row)
        return True

    def _remove_forgotten(self, inode: int, stale: list[PfsName]) -> None:
        """Plan the removal of names that deleted files of the history took over: they are not new bytes."""
        for name in stale:
            taker = self.view.get_pending(*name)
            gone = self._facts.get_inode(taker or NO_INODE)
            if taker and (gone is None or gone.nlink == 0) and not self._facts.has_refused_names(inode):
                self._plan_removal(name)

    def _adopt_entry(self, row: JournalRow, content: Content, name: PfsName) -> bool:
        """Let a set keep the file that the PFS shows for a separated one. Return False if it cannot.

        The file must have the bytes of the set. The other names show it until the separated one's new bytes come. Before there are any,
        the PFS may have the only copy of the old ones, so the separated file keeps them.
        """
        shown = self.view.get_entry(*name)
        published = None if shown is None or shown.inode in self._rewritten else self._facts.get_published(shown.inode)
        if shown is None or published is None or not _is_on_pfs(published, content) or not self._facts.is_in_history(name[0]):
            return False
        separated = self._facts.get_inode(shown.inode)
        if separated is not None and separated.nlink and separated.generation == published.generation:
            return False
        for other in self.view.list_shown_names(shown.inode):
            self.view.set_entry(*other, PfsEntry(row.inode, shown.fingerprint))
            self.view.set_pending(*other, shown.inode)
        self.view.delete_pending(*name)
        self.view.set_entry(*name, PfsEntry(row.inode, shown.fingerprint))
        self.batch.published_rows.append(
            replace(published, inode=row.inode, generation=content.generation, key=self.view.key, is_checked=False)
        )
        self._plan_attributes(row.inode, name)  # Those of the application's file may have been set since.
        return True

    # --- what the PFS refused before ----------------------------------------------------------------------------------

    def _settle(self, row: JournalRow) -> bool:
        """Bring the names of an inode on the PFS in line with the journal; if impossible now, keep the row."""
        if self._facts.is_repeated(row):
            return True
        shown, stale = self.view.split_names(row.inode)
        wanted = self._list_linkable(self.view.list_pending_names(row.inode), shown)
        if self._facts.has_refused_names(row.inode) or any(self.view.is_directory_pending(*name) for name in wanted):
            return self._keep(row)
        wanted = [name for name in wanted if self.view.has_directory(*name)]
        if not wanted and not stale:
            return True
        if not self.view.list_names(row.inode):
            return self._settle_missing(row, wanted)
        if not shown:
            if wanted:
                return self._settle_move(row, stale[0], wanted[0]) if stale else True
            if self.view.has_entries(row.inode):
                return self._keep(row)
        return self._settle_links(row, wanted, stale)

    def _settle_missing(self, row: JournalRow, wanted: list[PfsName]) -> bool:
        """Plan that an inode appears that the PFS does not show. A file with bytes appears with its content."""
        inode, name = self._facts.get_inode(row.inode), wanted[0]
        if inode is None or not _can_be_made(replace(row, mode=inode.mode), inode):
            return True
        if self._must_stay(name, row.inode):
            return self._keep(row)
        if name[0] in self._made_directories:
            return False
        self._plan_file(SourceKind.INODE, row.inode, None, inode.mode, name)
        return self._settle_links(row, wanted[1:], [])

    def _settle_move(self, row: JournalRow, name: PfsName, new: PfsName) -> bool:
        """Plan that an inode moves to a right name, or changes places with another one that waits for it."""
        if self.batch.actions:
            return False
        other = self.view.get_entry(*new)
        if other is not None and self._must_stay(new, row.inode):
            if self._facts.has_refused_names(other.inode) or not self.view.has_only_stale_names(other.inode):
                return self._keep(row)
            self._plan_exchange(name, new)
        else:
            other = None
            self._plan_move(name, new)
        if self.view.get_pending(*name) == (NO_INODE if other is None else other.inode):
            self.view.delete_pending(*name)
        self.view.delete_pending(*new)
        self._is_full = True
        self.plan.moved_pending.add(row.inode)
        self._settle_later(row.inode, row)
        return True

    def _settle_links(self, row: JournalRow, wanted: list[PfsName], stale: list[PfsName]) -> bool:
        """Plan the further names of an inode that has one, and the removal of those that it should not have."""
        for name in stale:
            self._plan_removal(name, "remove")
            if self.view.get_pending(*name) == NO_INODE:
                self.view.delete_pending(*name)
        for name in wanted:
            source = self.view.list_shown_names(row.inode)[0]
            if self._must_stay(name, row.inode):
                self._keep(row)
                continue
            self._plan_link(row.inode, source, name)
        self.plan.moved_pending.add(row.inode)
        return True


def waits_for_seal(facts: Facts, row: JournalRow) -> bool:
    """Return True if a row can only wait until this node has sealed its content."""
    content = facts.get_content(row.content) if row.op == "content" and row.content else None
    if content is None or content.is_remote or content.state is not ContentState.CLOSED or facts.needs_no_copy(row, content):
        return False
    return not facts.is_seal_overdue(row, content) and not _can_be_copied_early(facts, content)


def _can_be_copied_early(facts: Facts, content: Content) -> bool:
    """Return True if a CLOSED content is large, and no copy before its seal has been of no use."""
    is_new = (content.id, content.change) != facts.last_unsealed
    return is_new and content.size >= BATCH_BYTES_MAX and not facts.has_refused_bytes(content.inode)


def _can_be_made(row: JournalRow, inode: Inode | None) -> bool:
    """Return True if an inode is made without a content: a directory, or known and without bytes."""
    if stat.S_ISDIR(row.mode):
        return True
    if inode is None or inode.nlink == 0:
        return False
    return not stat.S_ISREG(inode.mode) or inode.content is None


def _is_on_pfs(published: PublishedRow, content: Content) -> bool:
    """Return True if the PFS shows exactly these bytes, of this or of an earlier generation."""
    return published.is_complete and content.digest is not None and (published.size, published.digest) == (content.size, content.digest)
