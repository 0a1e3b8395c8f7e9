"""The plan of one batch in a cluster.

Takes: the journal's next rows, and a snapshot of the store about everything that they concern.
Leaves: a plan that brings the PFS nearer to the tree that all nodes share. Nothing is touched.
If we die here: the next mover plans again.

A row applies as written if the shared tree agrees with it: the name leads to the inode now, or a later row of this journal moves it on
and the PFS shows no file of another node there.
So the rows of one node keep their order (P6). If another node changed the same names, its row may come earlier or later. Then the
names on the PFS of that inode are aligned with its names in the shared tree, whichever node set them.

A name that leads nowhere now is freed by the last row of this journal that is about the inode under it. It is left to another node if that
node has a row about both and this row does not have the name. So a second name of a checkpoint stays until all is there that another node
has sealed before it removed that name.
"""

import stat
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial

from ckptfs.catalog import identity, journal
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import KEYS_PER_ROW
from ckptfs.catalog.pfs_state import NO_INODE, PfsName, PfsView
from ckptfs.coherence.keys import PFS_NAME, PFS_STATE, SharedKey
from ckptfs.coherence.pfs_coordination import StoreSnapshot, list_intent_inodes
from ckptfs.flow.write_back.plan import Planner
from ckptfs.flow.write_back.plan_facts import Facts, SourceKind
from ckptfs.model import ROOT, Content, ContentState

# One transaction of the store publishes the intents of a batch, and compares four keys for each action.
PUTS_MAX = 24
ACTIONS_MAX = 24
# Prefix of a temporary name for an inode whose own name is not free yet.
PARKED_PREFIX = b".ckptfs.parked."


class SetAside(Exception):
    """The row `seq` depends on an inode whose names the PFS refuses to change. The planner is void."""

    def __init__(self, seq: int) -> None:
        super().__init__(seq)
        self.seq = seq


class SharedPlanner(Planner):
    """Plans over a snapshot of the store.

    If the plan depends on an inode that the snapshot lacks, NotLoaded is raised and nothing is planned.
    """

    actions_max = ACTIONS_MAX
    puts_max = PUTS_MAX

    def __init__(self, db: Database, facts: Facts, instance: str, snapshot: StoreSnapshot, aside_seqs: Container[int]) -> None:
        """`aside_seqs`: rows that wait for what the PFS refuses."""
        super().__init__(PfsView(db), facts, instance)
        self._is_named_later, self._is_unlinked_later = partial(journal.is_named_later, db), partial(journal.is_unlinked_later, db)
        self._has_later_row, self._has_local_copy = partial(journal.has_later_row, db), partial(journal.has_local_copy, db)
        self._snapshot = snapshot
        self._own_number = identity.get_node_number(db)
        self._aside_seqs = aside_seqs
        self._aligning: set[int] = set()

    def _plan_row(self, row: JournalRow) -> bool:
        """Plan a row. Raises SetAside if it depends on an inode of which the PFS refuses a change of names."""
        if row.seq in self._aside_seqs or self._facts.has_refused_names(row.inode):
            return self._keep(row)
        plans: dict[str, Callable[[JournalRow], bool]] = {
            "make": self._shared_name, "link": self._shared_name, "unlink": self._shared_remove, "rmdir": self._shared_remove,
            "rename": self._shared_rename, "exchange": self._shared_exchange,
            "attributes": lambda row: not self._snapshot.is_alive(row.inode) or self._attributes(row),
            "content": self._shared_content, "synced": self._shared_content, "settle": lambda row: self._align(row.inode),
        }  # fmt: skip
        shown = self.view.list_names(row.inode)
        names = {*row.names, *shown}
        if self._snapshot.has_intent(row.inode) or any(self._is_changing(name) for name in names):
            return self._wait()
        for name in {*names, *self.view.list_pending_names(row.inode)}:
            self._forget_pending(row, name)
        return plans[row.op](row) and all(self._remove_gone(row, name) for name in (*row.names, *shown))

    def _forget_pending(self, row: JournalRow, name: PfsName) -> None:
        """Drop a pending name that another node has already shown, or that the inode no longer has."""
        inode = self.view.get_pending(*name)
        if inode is None:
            return
        is_due = inode == row.inode or self._is_kept(replace(row, inode=inode), name)
        if self.view.shows(name, inode) or not is_due:
            self.view.delete_pending(*name)

    def _remove_gone(self, row: JournalRow, name: PfsName) -> bool:
        """Free a name that no inode has now, unless a row that is not done yet will.

        A name that the row itself has is not left to another node, for that one may leave it to this row.
        """
        shown = self.view.get_shown_inode(*name)
        if not shown or self._snapshot.get_child(name) is not None or self._has_later_row(shown, row.seq):
            return True
        if name not in row.names and self._snapshot.is_named_elsewhere(shown, name):
            return True
        return self._align(shown, name)

    # --- rows by operation --------------------------------------------------------------------------------------------

    def _shared_name(self, row: JournalRow) -> bool:
        (name,) = row.names
        is_made = row.op == "make"
        if self.view.shows(name, row.inode):
            return True
        if is_made and not self._snapshot.is_alive(row.inode) and not self._is_unlinked_later(row, name):
            return True
        if not self._has_name(row, name) or (is_made and self.view.list_names(row.inode)):
            return self._align(row.inode)
        return self._ensure_directory(name[0]) and self._vacate(name, row.inode) and super()._plan_row(row)

    def _shared_remove(self, row: JournalRow) -> bool:
        (name,) = row.names
        shown = self.view.get_shown_inode(*name)
        if self._snapshot.get_child(name) == (shown or row.inode) and not self._is_named_later(row, name):
            self.view.delete_pending(*name)
            return True
        is_to_stay = shown != row.inode or self.view.list_names(row.inode) == [name]
        if shown and is_to_stay and self._snapshot.is_alive(shown):
            self.view.delete_pending(*name)
            return self._align(shown)
        return self._empty_directory(row.inode) and self._remove(row) if row.op == "rmdir" else self._remove(row)

    def _shared_rename(self, row: JournalRow) -> bool:
        name, new = row.names
        if self.view.shows(new, row.inode) and not self.view.shows(name, row.inode):
            self.view.delete_pending(*name)
            return True
        has_old_name = self._snapshot.get_child(name) == row.inode and not self._is_named_later(row, name)
        if has_old_name or not self._has_name(row, new):
            self.view.delete_pending(*name)
            return self._align(row.inode)
        if not self._ensure_directory(new[0]) or not self._vacate(new, row.inode):
            return False
        can_move = self.view.has_directory(*name) and self.view.has_directory(*new) and not self._is_one_in_other(name, new)
        if self.view.shows(name, row.inode) and can_move:
            self.view.delete_pending(*name)
            return self._rename(row)
        if stat.S_ISREG(row.mode) and not self.view.list_names(row.inode):
            self.view.delete_pending(*name)
            self.view.delete_pending(*new)
            self.view.set_pending(*new, row.inode)
            return True
        return self._align(row.inode)

    def _shared_exchange(self, row: JournalRow) -> bool:
        name, new = row.names
        other = self._snapshot.get_child(name)
        if self.view.shows(new, row.inode) and not self.view.shows(name, row.inode):
            return other is None or self._align(other)
        shown = self.view.get_shown_inode(*new)
        is_kept = self._is_kept(row, new) and self.view.shows(name, row.inode)
        is_possible = is_kept and not self._is_one_in_other(name, new)
        if shown and is_possible and self._is_kept(replace(row, inode=shown), name):
            return self._exchange(row)
        return all(self._align(inode) for inode in (row.inode, other) if inode is not None)

    def _shared_content(self, row: JournalRow) -> bool:
        """Publish a content under the file's present names, if this node wrote it or took it over."""
        content, snapshot = row.content or 0, self._snapshot
        if (
            not snapshot.is_alive(row.inode)
            or snapshot.get_content_id(row.inode) != content
            or snapshot.get_writer(content) not in {0, self._own_number, row.origin}
        ):
            return True
        known = self._facts.get_content(content)
        if known is not None and known.is_remote and known.state is not ContentState.SEALED:
            return True  # A dead node had not sealed it, so no node has it.
        if known is not None and known.state is ContentState.SEALED and self._lacks_bytes(row, known):
            if content not in self._facts.lost_contents:
                self.plan.missing_inode = row.inode
                return self._wait()
            if known.is_remote:
                return True
        for name in self.view.list_pending_names(row.inode):
            if not self._has_name(row, name):
                self.view.delete_pending(*name)
        names = [*self.view.list_names(row.inode), *self.view.list_pending_names(row.inode)]
        # Another node may have removed the directory of a name that a later row changes: then the bytes go to that row's name at once.
        can_appear = any(self.view.get_path(parent) is not None or snapshot.is_alive(parent) for parent, _ in names)
        for name in snapshot.list_names(row.inode):
            if name not in names and not (can_appear and self._is_named_later(row, name)):
                self.view.set_pending(*name, row.inode)
                names.append(name)
        if not all(self._ensure_directory(parent) and self._vacate((parent, name), row.inode) for parent, name in names):
            return False
        return self._content(row) if row.op == "content" else self._synced(row)

    def _lacks_bytes(self, row: JournalRow, content: Content) -> bool:
        """Return True if the PFS is to show a content of which this node has no copy.

        A dead node wrote it, or a set keeps what this node has replaced since.
        """
        published = self._facts.get_published(row.inode)
        return (published is None or published.generation != content.generation) and not self._has_local_copy(content.id)

    # --- alignment ----------------------------------------------------------------------------------------------------

    def _align(self, inode: int, freed: PfsName | None = None) -> bool:
        """Plan that the PFS shows an inode under its present names. Return False if that is not possible yet.

        A deleted inode loses the name `freed` only.
        """
        if self._facts.has_refused_names(inode):
            raise SetAside(self.view.key // KEYS_PER_ROW)
        self._snapshot.require_loaded(inode)
        if inode in self._aligning or self._snapshot.has_intent(inode):
            return self._wait()
        self._aligning.add(inode)
        try:
            return self._show_names(inode) and self._remove_stale_names(inode, freed)
        finally:
            self._aligning.discard(inode)

    def _show_names(self, inode: int) -> bool:
        """Show an inode under each name that it lacks: move it, link it, or make it if it needs no bytes."""
        shared_names = self._snapshot.list_names(inode)
        shown = self.view.list_names(inode)
        if any(self._is_changing(name) for name in {*shared_names, *shown}):
            return self._wait()
        missing = [name for name in shared_names if name not in shown and self._snapshot.is_alive(name[0])]
        for name in self._list_linkable(missing, [name for name in shown if name in shared_names]):
            if not self._ensure_directory(name[0]) or not self._vacate(name, inode):
                return False
            known = self._facts.get_inode(inode)
            stale = next((other for other in self.view.list_names(inode) if other not in shared_names), None)
            if stale is not None and not self._move(inode, stale, name):
                return False
            if not self.view.list_names(inode) and known is not None and not (known.is_file and known.content is not None):
                self._plan_file(SourceKind.INODE, inode, None, known.mode, name)
            elif (others := self.view.list_shown_names(inode)) and name not in others:
                self._plan_link(inode, others[0], name)
        return True

    def _remove_stale_names(self, inode: int, freed: PfsName | None) -> bool:
        """Remove `freed` from a deleted inode; from others what they no longer have, if a right name is shown."""
        shared_names = self._snapshot.list_names(inode)
        shown = self.view.list_names(inode)
        if shared_names and not any(name in shared_names for name in shown):
            return True  # The row that gave it a name will move it.
        stale = [name for name in shown if (name not in shared_names if shared_names else name == freed)]
        if not shared_names and stale and not self._empty_directory(inode):
            return False
        for name in stale:
            if not self.view.has_directory(*name):
                self.view.delete_entry(*name)
                continue
            self._plan_removal(name, "rmdir" if self._is_directory(inode) else "unlink")
        return True

    def _move(self, inode: int, name: PfsName, new: PfsName) -> bool:
        if self.view.get_entry(*name) is None or not (self.view.has_directory(*name) and self.view.has_directory(*new)):
            return self._wait()
        if self._is_directory(inode):
            if not self._leave(inode, name, new) or self.batch.actions:
                return False
            self._is_full = True
        self._plan_move(name, new)
        self.view.delete_pending(*new)
        return True

    def _leave(self, inode: int, name: PfsName, new: PfsName) -> bool:
        """Move the directory of `new` out of `inode`, if it is still below. Return False if that has to wait.

        Another node has moved it in the mount, and not on the PFS yet.
        """
        directory = new[0]
        while self._is_one_in_other(name, new) and directory not in (ROOT, inode):
            if not self._align(directory):
                return False
            directory = next((parent for parent, _ in self.view.list_names(directory)), ROOT)
        return not self._is_one_in_other(name, new) or self._wait()

    def _park(self, inode: int, name: PfsName, directory: int) -> bool:
        """Move an inode that is being aligned out of the way, to a temporary name in a directory."""
        return self._move(inode, name, (directory, PARKED_PREFIX + b"%x" % inode))

    def _vacate(self, name: PfsName, inode: int) -> bool:
        """Free a name for `inode`: who lives moves to its own name, who is deleted goes unless replaced."""
        shown = self.view.get_shown_inode(*name)
        if self._is_changing(name):
            return self._wait()
        if shown in {NO_INODE, inode} or name in self._snapshot.list_names(shown):
            return True
        if not self._snapshot.is_alive(shown):
            for pending in self.view.list_pending_names(shown):  # A deleted file gets no name any more.
                self.view.delete_pending(*pending)
            kinds = self._is_directory(shown), self._is_directory(inode)
            if kinds == (False, False) or (kinds == (True, True) and not self._snapshot.list_pfs_names_in(shown)):
                return True
        if self._is_in_ring(shown):
            return self._park(shown, name, name[0])
        if not self._align(shown, name):
            return False
        return not self.view.shows(name, shown) or self._wait()

    def _is_in_ring(self, inode: int) -> bool:
        """Return True if an inode cannot go to its own name before another one has the name that it leaves."""
        above = [inode]
        while above[-1] not in self._aligning:
            missing = [parent for parent, _ in self._snapshot.list_names(above[-1]) if self.view.get_path(parent) is None]
            if not missing or missing[0] in above:  # Read at different times, directories may seem to be in each other.
                return False
            above.append(missing[0])
        return True

    def _empty_directory(self, directory: int) -> bool:
        """Move the entries of a directory that is to be removed; they need a batch of their own."""
        remaining = []
        for name in self._snapshot.list_pfs_names_in(directory):
            if self._is_changing(name):
                return self._wait()
            if shown := self.view.get_shown_inode(*name):
                remaining.append((shown, name))
        if remaining and not any(action.location.parent == directory for action in self.batch.actions):
            for inode, name in remaining:
                if inode in self._aligning:  # It takes the name of the directory, which has to go first.
                    self._park(inode, name, self.view.list_names(directory)[0][0])
                elif not self._align(inode, name):
                    return False
            self.plan.is_waiting = not self.batch.actions
        return not remaining

    def _ensure_directory(self, directory: int) -> bool:
        """Return True if the PFS shows the directory before this batch; if not, plan it as far as possible."""
        if directory in self._made_directories:
            return False
        if self.view.get_path(directory) is not None or not self._snapshot.is_alive(directory) or directory == ROOT:
            return True
        names = self._snapshot.list_names(directory)
        if not names:
            return self._wait()
        if not self._ensure_directory(names[0][0]):
            return False
        self._align(directory)
        self.plan.is_waiting = self.plan.is_waiting or not self.batch.actions
        return False

    # --- pieces -------------------------------------------------------------------------------------------------------

    def _has_name(self, row: JournalRow, name: PfsName) -> bool:
        """Return True if the inode has the name that the row gives, or had it until a later row.

        A file of another node that is there by now may be newer (P6). The PFS then goes on with what the name holds in the end.
        """
        child, shown = self._snapshot.get_child(name), self.view.get_shown_inode(*name)
        if child == row.inode or not shown:
            return self._is_kept(row, name)
        is_of_same_node = identity.get_origin_node(shown) == identity.get_origin_node(row.inode)
        return is_of_same_node and shown != child and self._is_kept(row, name)

    def _is_kept(self, row: JournalRow, name: PfsName) -> bool:
        """Return True if the inode of a row has a name now, or has it until a later row."""
        return self._snapshot.get_child(name) == row.inode or self._is_unlinked_later(row, name)

    def _is_changing(self, name: PfsName) -> bool:
        """Return True if another node is about to change a name, or what the PFS shows of the inode under it.

        Raises SetAside if that node is dead, and the PFS does not show what it has done.
        """
        shown, intent = self.view.get_shown_inode(*name), self._snapshot.get_intent(name)
        inodes = set() if intent is None else list_intent_inodes(SharedKey(PFS_NAME, *name), intent)
        if shown and self._snapshot.has_intent(shown):
            inodes.add(shown)
        if any(map(self._facts.has_refused_names, inodes)):
            raise SetAside(self.view.key // KEYS_PER_ROW)
        return bool(inodes)

    def _is_one_in_other(self, *names: PfsName) -> bool:
        """Return True if one of two names lies below the other.

        Another node has shown later moves of directories then.
        """
        one, other = sorted(((*(self.view.get_path(parent) or ()), name) for parent, name in names), key=len)
        return other[: len(one)] == one

    def _is_directory(self, inode: int) -> bool:
        if inode in self._made_directories:
            return True  # It may be deleted and forgotten by now.
        known = self._facts.get_inode(inode)
        seen = (self._snapshot.get_value(SharedKey(PFS_STATE, inode)) or {}).get("seen")
        return known.is_directory if known is not None else seen is not None and stat.S_ISDIR(seen[1])
