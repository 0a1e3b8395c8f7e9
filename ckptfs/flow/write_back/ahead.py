"""New files that go to the PFS ahead of older changes, while a drain is short of time.

Takes: the order of urgency in the catalog, and the journal.
Leaves: for each group of urgent files the rows of the journal that make them, which write-back then plans before all others.
If we die here: nothing of this is persistent. The next drain chooses again.

The exception to P6: the PFS shows a state that the mount has passed through, and beside it whole new files of a later state. Nothing is
replaced, moved or removed ahead of its turn, so all that the PFS had in order it still has.

A group goes ahead with all rows of its files; of the directories that the PFS does not show yet; and of all inodes that had one of their
names before. These rows keep their order. The PFS must show none of these inodes and nothing under these names, and no directory above
them may have yet to move on the PFS. Then the rows commute with every older row that stays behind: no such row is about one of these
inodes or names, or makes or moves a directory above them. A group of which this does not hold waits for its turn.
"""

from collections import defaultdict, deque
from collections.abc import Iterable

from ckptfs import limits
from ckptfs.catalog import exposure, journal
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_state import PfsName, PfsView
from ckptfs.model import ROOT

_COMMUTING_OPS = {"make", "link", "unlink", "rename", "content", "synced", "attributes"}


class RowsAhead:
    """The rows that are planned before all others, group by group. None, unless a drain is short of time."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._order: tuple[tuple[int, ...], ...] = ()
        self._groups: deque[tuple[int, ...]] = deque()
        self._chooser = _Chooser((), PfsView(db))
        self._begun: list[int] = []

    def list_next(self, after: int, at_most: int) -> list[JournalRow]:
        """Return the next rows after `after` of the most urgent group; a begun one goes on first."""
        order = exposure.load_order(self._db)
        groups = order.groups if order is not None and order.is_ahead else ()
        if groups != self._order:
            self._order, self._groups = groups, deque(groups)
            rows = journal.list_oldest(self._db, limits.AHEAD_ROWS_MAX, after) if groups else []
            self._chooser = _Chooser(rows, PfsView(self._db))
        while self._begun or self._groups:
            self._begun = self._begun or self._chooser.take_group(self._groups.popleft())
            if found := journal.list_by_seq(self._db, self._begun[:at_most]):
                return found
            del self._begun[:at_most]
        return []

    def drop_planned(self, up_to: int) -> None:
        """Forget the rows of the group up to the row `up_to`: what the PFS refused waits for its turn."""
        self._begun = [seq for seq in self._begun if seq > up_to]


class _Chooser:
    """The rows of a journal by inode and by name."""

    def __init__(self, rows: Iterable[JournalRow], view: PfsView) -> None:
        self._rows_of: dict[int, list[JournalRow]] = defaultdict(list)
        self._inodes_of: dict[PfsName, set[int]] = defaultdict(set)
        self._moved: set[int] = set()
        self._chosen: set[int] = set()
        self._view = view
        for row in rows:
            self._rows_of[row.inode].append(row)
            for name in row.names:
                self._inodes_of[name].add(row.inode)
                if row.op in {"rename", "exchange"}:
                    self._moved |= {row.inode, view.get_shown_inode(*name)}

    def take_group(self, group: Iterable[int]) -> list[int]:
        """Return the rows that go ahead for a group, in order; none if it has to wait for its turn."""
        inodes = self._close_over(group)
        self._chosen |= inodes
        self._moved -= inodes
        return sorted(row.seq for inode in inodes for row in self._rows_of[inode])

    def _close_over(self, group: Iterable[int]) -> set[int]:
        """Return the inodes whose rows go ahead together with a group."""
        found: set[int] = set()
        todo = [inode for inode in group if inode in self._rows_of and inode not in self._chosen]
        while todo:
            inode = todo.pop()
            if inode in found:
                continue
            needed = self._list_needed(inode)
            if needed is None:
                return set()
            found.add(inode)
            todo += needed
        return found

    def _list_needed(self, inode: int) -> set[int] | None:
        """Return the inodes that have to go ahead with this one. Returns None if it cannot."""
        rows, view = self._rows_of[inode], self._view
        if view.list_names(inode) or not all(row.op in _COMMUTING_OPS for row in rows):
            return None
        needed: set[int] = set()
        for name in {*view.list_pending_names(inode), *(name for row in rows for name in row.names)}:
            if view.get_entry(*name) is not None or self._is_below_moved(name[0]):
                return None
            pending = view.get_pending(*name)
            needed |= self._inodes_of[name] | ({pending} if pending else set())
            if name[0] != ROOT and not view.list_names(name[0]):
                needed.add(name[0])
        return needed - self._chosen

    def _is_below_moved(self, directory: int) -> bool:
        """Return whether a directory that the PFS shows, or one above it, has yet to be moved there."""
        seen: set[int] = set()
        while directory != ROOT and directory not in seen and (names := self._view.list_names(directory)):
            if directory in self._moved:
                return True
            seen.add(directory)
            directory = names[0][0]
        return False
