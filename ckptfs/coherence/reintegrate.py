"""Return of a node that could not reach the store: what others did not contradict is replayed.

Its applications saw success, so nothing that they wrote is lost. `ownership` bounds what it may have changed.

- Two things under one new name, or two states of one file that both sides wrote, stay side by side: the one that was closed last keeps the
  name, the other becomes `NAME.ckptfs-conflict-NODE-N`. Directories that both sides made are merged.
- A file that is open for writing keeps its inode. What others closed of it is in its salvage record from the next close on, until its
  writer puts it beside the file (see `flow.reconcile`).
- What others removed, and this node wrote or made something in, is new again, with the directories above it.
- What this node removed, and others wrote or replaced, stays. A previous state that they show of it is no write. A directory that others
  moved, replaced or filled is theirs.

Crash safety: everything is one change of the catalog.
"""

import stat
from collections.abc import Iterable, Mapping
from typing import Any

from ckptfs.catalog import handles, history, history_names, identity, inodes, journal, namespace, remote_contents
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import CheckpointSet
from ckptfs.coherence import key_state, keys, merge, read, salvage_records
from ckptfs.coherence.commit import StoreTransaction
from ckptfs.coherence.conflict import CommitResult, ConflictResolver
from ckptfs.coherence.key_state import ABSENT, CachedValue
from ckptfs.coherence.keys import CONFLICT_MARK, CONTENT, INODE, ISLAND_MARK, JOURNAL_ROW, NAME, TIMES, SharedKey, Value
from ckptfs.coherence.ownership import is_shared
from ckptfs.coherence.read import RecentDeletes, StoreValue
from ckptfs.model import ROOT


def list_needed_keys(db: Database, store_values: Mapping[SharedKey, StoreValue]) -> list[SharedKey]:
    """Return the keys to read before a refusal is resolved: the inodes of names that others made."""
    names = {key: one for key, one in store_values.items() if key.kind == NAME}
    return [key for key in read.list_missing_keys(db, names) if key.kind != CONTENT]


def record_missed(db: Database, store_values: Mapping[SharedKey, CachedValue]) -> None:
    """Record what others closed of files that are open for writing on this node.

    The next close overwrites it, and publishes the record. Files that others removed are published now, while this node restores them.
    """
    with key_state.change_unmarked(db):
        for key, now in store_values.items():
            base, ours, theirs = key_state.get_cached(db, key).fields, keys.get_value(db, key), now.fields
            if base and theirs is None:
                key_state.mark_dirty(db, key)
            if base and ours and theirs and merge.is_closed_since(base, theirs) and not merge.is_still_salvaged(theirs, base, ours):
                db.run("UPDATE inode SET salvaged = ? WHERE id = ?", salvage_records.build_overwritten(theirs), key.number)


class ReintegrationResolver(ConflictResolver):
    """The resolution of a refused transaction of a node that returns."""

    def __init__(
        self, db: Database, transaction: StoreTransaction, store_values: dict[SharedKey, StoreValue], read_revision: int,
        recent_deletes: RecentDeletes, *,
        more: Mapping[SharedKey, StoreValue], label: str,
    ) -> None:  # fmt: skip
        """Take the refused transaction and the values of `list_needed_keys`."""
        super().__init__(db, transaction, store_values, read_revision, recent_deletes)
        self._extra_values = more
        self._node_label = label.encode()
        self._conflicting_names: dict[SharedKey, CachedValue] = {}
        self._named_in_store: set[int] = set()

    def resolve(self) -> CommitResult:
        """Resolve all conflicts; names that are undone first, conflict names last."""
        for key, one in self._extra_values.items():
            if one.value.raw is not None and not self._is_cached(key) and keys.get_value(self._db, key) is None:
                read.apply_value(self._db, key, one.value, one.read_revision, self._recent_deletes)
        result = super().resolve()
        for key, now in self._conflicting_names.items():
            if key not in result.reverted_names:
                self._resolve_name(key, now)
        self._set_link_counts()
        return result

    def _handle_difference(self, key: SharedKey, store_value: StoreValue) -> None:
        if key.kind == NAME and key in self._transaction.new_values:
            before = self._get_store_child(key)
            if self._is_directory(before) and before not in self._restored_inodes | self._deleted_inodes:
                self._contested_names.add(key)
            else:
                self._conflicting_names[key] = store_value.value
        elif key.kind == INODE and self._is_losing_last_name(key, store_value.value.fields) and (live := self._list_live_names(key.number)):
            self._contested_names |= live
        else:
            super()._handle_difference(key, store_value)

    def _is_cached(self, key: SharedKey) -> bool:
        return key_state.get_cached(self._db, key).revision != 0

    def _is_losing_last_name(self, key: SharedKey, theirs: Value | None) -> bool:
        """Return True if others wrote a file to which no name would lead after the removals of this node.

        Names in sets do not count. That others show a previous state of the file is no write.
        """
        known, ours = key_state.get_cached(self._db, key).fields or {}, keys.get_value(self._db, key)
        if theirs is None or merge.is_still_salvaged(theirs, known):
            return False
        is_written = any(theirs.get(name) != known.get(name) for name in merge.CONTENT_FIELDS)
        return is_written and (ours is None or ("names" in ours and self._is_unnamed(key.number, theirs)))

    def _is_unnamed(self, inode: int, theirs: Value | None = None) -> bool:
        """Return True if no name outside sets leads to a file. `theirs`: see `list_shared_names`."""
        names = keys.list_shared_names(self._db, inode, theirs)
        return keys.count_in_history(names) == len(names)

    def _list_names_outside_sets(self, inode: int) -> list[SharedKey]:
        return [name for name in keys.list_local_names(self._db, inode) if not identity.is_history_directory(name.number)]

    def _list_live_names(self, inode: int) -> set[SharedKey]:
        """Return the dirty names of a file outside sets: the removal of a set is whole, or none."""
        return {name for name in self._list_names_of(inode) if not identity.is_history_directory(name.number)}

    def _list_new_inodes(self, children: set[int]) -> set[int]:
        """Keep what this node made, with its contents."""
        return set()

    def _revert_contested(self) -> None:
        self._named_in_store = self._moved_directories | {self._get_store_child(key) for key in key_state.list_dirty_names(self._db)}
        super()._revert_contested()

    def _set_name(self, key: SharedKey) -> None:
        """Keep an entry that this node made and that has no other name, under a conflict name."""
        here = self._get_local_child(key)
        # A new directory may be in the store before its name.
        is_unnamed = not is_shared(self._db, here) or (self._is_directory(here) and here not in self._named_in_store)
        made = here and here not in self._deleted_inodes and is_unnamed and not identity.is_history_directory(key.number)
        super()._set_name(key)
        if not made or self._get_local_child(key) == here:
            return
        self._add_conflict_name(key, here)
        if self._is_directory(here):
            self._db.run("UPDATE inode SET nlink = 2, parent = ? WHERE id = ?", key.number, here)
        self._inodes_to_recount |= {here, key.number}

    # --- names --------------------------------------------------------------------------------------------------------

    def _resolve_name(self, key: SharedKey, now: CachedValue) -> None:
        """Resolve a name that both sides changed."""
        here, before, there = self._get_local_child(key), self._get_store_child(key), int((now.fields or {"child": 0})["child"])
        self._inodes_to_recount |= {key.number, here, before, there} - {0}
        is_link_of_set = identity.is_history_directory(key.number) and stat.S_ISREG((now.fields or {}).get("type", 0))
        if here and is_link_of_set and self._get_mode(there):
            # Both sides separated a file from this set. The set has the same bytes by either.
            self._take_store_name(key, now)
            self._take_back_content(there, self._db.value("SELECT content FROM inode WHERE id = ?", there))
            return
        if not here and not is_link_of_set:
            self._take_store_name(key, now)
            return
        if there not in (0, here):
            known = key_state.get_cached(self._db, SharedKey(INODE, there)).fields
            if not self._get_mode(there) and known is not None:
                keys.write_value(self._db, SharedKey(INODE, there), known)  # This node has forgotten it; its deletion is not published.
            child = self._extra_values.get(SharedKey(INODE, there))
            if self._get_mode(there):
                if here:  # Else this node removed the set, which goes as a whole.
                    self._resolve_both_named(key, here, there, now)
            elif child is None or child.value.raw is not None:
                return  # It is not known yet. The next transaction finds out.
            # Without an inode the name leads nowhere, or the next transaction finds out that it is gone.
        key_state.set_cached(self._db, key, now)

    def _resolve_both_named(self, key: SharedKey, here: int, there: int, now: CachedValue) -> None:
        is_directory = self._is_directory(here), self._is_directory(there)
        if all(is_directory) and not is_shared(self._db, here):
            self._merge_directories(here, there)
            keys.write_value(self._db, key, now.fields)
        elif any(is_directory) or self._get_last_write(there) > self._get_last_write(here):
            self._add_conflict_name(key, here)
            keys.write_value(self._db, key, now.fields)
        else:
            self._add_conflict_name(key, there)

    def _add_conflict_name(self, key: SharedKey, child: int) -> None:
        """Give an entry a conflict name, and a set another number."""
        if (found := history.get_set(self._db, child)) is not None:
            number_name = history.set_next_number(self._db, key.number, found, key.name)
            self._insert_name(SharedKey(NAME, key.number, number_name), child)
            key_state.mark_dirty(self._db, SharedKey(INODE, key.number))
            return
        self._add_first_free_name(key.number, key.name.split(CONFLICT_MARK)[0], CONFLICT_MARK, child)

    def _add_first_free_name(self, directory: int, stem: bytes, mark: bytes, child: int) -> None:
        for name in keys.build_conflict_names(stem, mark, self._node_label):
            beside = SharedKey(NAME, directory, name)
            if not self._get_local_child(beside) and not self._is_cached(beside):
                self._insert_name(beside, child)
                return

    def _insert_name(self, key: SharedKey, child: int) -> None:
        keys.write_value(self._db, key, {"child": child})
        key_state.mark_dirty(self._db, key)
        key_state.mark_dirty(self._db, SharedKey(INODE, child))
        self._append_journal_row("make", child, parent=key.number, name=key.name)

    def _take_store_name(self, key: SharedKey, now: CachedValue) -> None:
        """Accept the name of the store; its previous inode has other names."""
        self._inodes_to_recount.add(key.number)
        child = (now.fields or {"child": 0})["child"]
        now = now if child and self._get_mode(child) else ABSENT
        keys.write_value(self._db, key, now.fields)
        key_state.set_cached(self._db, key, now)

    def _merge_directories(self, ours: int, theirs: int) -> None:
        """Move the entries of this node's directory into the other node's. Sets get new numbers."""
        if history_names.is_series(self._db, ours):
            history.record_used_numbers(self._db, theirs, history.get_next_number(self._db, ours))
        for name, child in self._db.rows("SELECT name, child FROM entry WHERE parent = ?", ours):
            old, new = SharedKey(NAME, ours, bytes(name)), SharedKey(NAME, theirs, bytes(name))
            keys.write_value(self._db, old, None)
            key_state.mark_dirty(self._db, old)
            directory = self._is_directory(child)
            if directory and (found := history.get_set(self._db, child)) is not None:
                new = new._replace(name=history.set_next_number(self._db, theirs, found, old.name))
            other = self._get_local_child(new)
            if other and directory and self._is_directory(other) and not is_shared(self._db, child):
                self._merge_directories(child, other)
                continue
            self._inodes_to_recount.add(child)
            if other:
                self._add_conflict_name(new, child)
            else:
                self._insert_name(new, child)
            if directory:
                self._db.run("UPDATE inode SET parent = ? WHERE id = ?", theirs, child)
                key_state.mark_dirty(self._db, SharedKey(INODE, child))
        self._inodes_to_recount.add(theirs)
        key_state.mark_dirty(self._db, SharedKey(INODE, theirs))
        self._delete_directory(ours)

    def _revert_sets(self, links: set[SharedKey]) -> None:
        """Remove sets of which these are links: another node has written a file before it knew the set."""
        for directory in {name.number for name in links}:
            while directory and history.get_set(self._db, directory) is None:
                directory = inodes.get_parent(self._db, directory)
            for parent, name, is_directory in [*namespace.iterate_names_below(self._db, directory)] if directory else []:
                self._remove_name(SharedKey(NAME, parent, name), is_directory=is_directory)
            for key in keys.list_local_names(self._db, directory) if directory else []:
                self._remove_name(key, is_directory=True)

    def _remove_name(self, key: SharedKey, *, is_directory: bool) -> None:
        child = self._get_local_child(key)
        keys.write_value(self._db, key, None)
        key_state.mark_dirty(self._db, key)
        self._inodes_to_recount.add(child)
        if is_directory:
            self._delete_directory(child)

    def _delete_directory(self, inode: int) -> None:
        self._db.run("UPDATE inode SET nlink = 0 WHERE id = ?", inode)
        key_state.mark_dirty(self._db, SharedKey(INODE, inode))
        self._result.unlinked_inodes.append(inode)

    def _record_used_numbers(self, key: SharedKey, now: CachedValue) -> dict[SharedKey, CheckpointSet]:
        """Give such sets new numbers: they may be all that is left of what this node closed."""
        for name, found in super()._record_used_numbers(key, now).items():
            new = history.set_next_number(self._db, key.number, found, name.name)
            keys.write_value(self._db, name, None)
            self._insert_name(name._replace(name=new), found.directory)
        return {}

    def _get_last_write(self, inode: int) -> tuple[int, int]:
        """Return the order of two files of one name: the last close, else the birth; then the node."""
        return int(self._db.value("SELECT max(closed_ns, birth_ns) FROM inode WHERE id = ?", inode) or 0), identity.get_origin_node(inode)

    # --- what others removed ------------------------------------------------------------------------------------------

    def _handle_inode_deleted(self, inode: int) -> None:
        """Handle an inode that others deleted: what this node made or wrote in it makes it new again."""
        is_directory = self._is_directory(inode)
        if self._has_changed_names(inode) if is_directory else self._is_worth_restoring(inode):
            self._restore_deleted(inode, is_directory=is_directory)
        else:
            super()._handle_inode_deleted(inode)

    def _has_changed_names(self, directory: int) -> bool:
        if identity.is_history_directory(directory):
            return False  # A set is whole or gone.
        changed = [key for key in key_state.list_dirty_names(self._db) if self._get_local_child(key) not in (0, self._get_store_child(key))]
        return any(directory in (key.number, self._get_local_child(key)) for key in changed)

    def _is_worth_restoring(self, inode: int) -> bool:
        """Return whether this node wrote or named a file and has its bytes."""
        content, nlink = self._db.row("SELECT content, nlink FROM inode WHERE id = ?", inode) or (None, 0)
        if not nlink or (content is not None and not journal.has_local_copy(self._db, content)):
            return False
        now = keys.get_value(self._db, SharedKey(INODE, inode)) or {}
        before = key_state.get_cached(self._db, SharedKey(INODE, inode)).fields or {}
        return any(now.get(name) != before.get(name) for name in merge.CONTENT_FIELDS) or any(
            self._get_local_child(key) == inode != self._get_store_child(key) for key in key_state.list_dirty_names(self._db)
        )

    def _restore_deleted(self, inode: int, *, is_directory: bool) -> None:
        """Publish a deleted inode again, under its names on this node. This node owns its content now."""
        self._restored_inodes.add(inode)
        content, generation, closed_ns = self._db.row(
            "SELECT i.content, k.generation, k.closed_ns FROM inode i LEFT JOIN content k ON k.id = i.content WHERE i.id = ?", inode
        ) or (None, 0, 0)
        remote_contents.mark_own(self._db, content or 0, inode, generation, closed_ns)
        more = [SharedKey(TIMES, inode)] if is_directory else [] if content is None else [SharedKey(CONTENT, content)]
        self._mark_unpublished([SharedKey(INODE, inode), *more])
        if is_directory:
            self._delete_known_names(inode)
            self._delete_stale_names(inode)
        names = keys.list_local_names(self._db, inode)
        self._mark_unpublished(key for key in names if self._get_store_child(key) == inode)
        if content is not None:
            self._append_journal_row("content", inode, content=content)  # Earlier rows are about another file.
        if not names:
            self._add_first_free_name(ROOT, b"", ISLAND_MARK, inode)
            self._db.run("UPDATE inode SET parent = ? WHERE id = ? AND mode & 61440 = 16384", ROOT, inode)
        self._inodes_to_recount |= {inode, *(key.number for key in names)}

    def _delete_known_names(self, inode: int) -> None:
        """Delete the names in a directory that another node deleted, except those of this node."""
        for (name,) in self._db.rows("SELECT name FROM entry WHERE parent = ?", inode):
            key = SharedKey(NAME, inode, bytes(name))
            if self._get_local_child(key) == self._get_store_child(key):
                keys.write_value(self._db, key, None)
            key_state.set_cached(self._db, key, ABSENT)

    def _delete_stale_names(self, directory: int) -> None:
        """Delete cached names from which others have moved this directory."""
        names = keys.list_local_names(self._db, directory)
        names.sort(key=lambda key: (key_state.is_dirty(self._db, key), key_state.get_cached(self._db, key).revision))
        for key in names[:-1]:
            keys.write_value(self._db, key, None)
            key_state.set_cached(self._db, key, ABSENT)
            self._inodes_to_recount.add(key.number)

    def _mark_unpublished(self, unpublished: Iterable[SharedKey]) -> None:
        """Mark keys as missing in the store, so that they are published again."""
        for key in unpublished:
            key_state.set_cached(self._db, key, ABSENT)
            key_state.mark_dirty(self._db, key)

    def _append_journal_row(self, op: str, inode: int, **what: Any) -> None:
        if self._db.is_journalled:
            journal.append(self._db, op, inode, **what)
            row = keys.build_row_name(journal.get_instance_id(self._db), journal.get_last_seq(self._db, inode))
            key_state.mark_dirty(self._db, SharedKey(JOURNAL_ROW, identity.get_node_number(self._db), row))

    # --- what both wrote ----------------------------------------------------------------------------------------------

    def _merge_key(self, key: SharedKey, now: CachedValue) -> None:
        base, ours, theirs = key_state.get_cached(self._db, key).fields, keys.get_value(self._db, key), now.fields
        is_written = key.kind == INODE and handles.has_writer(self._db, key.number)
        if key.kind == INODE and base and ours and theirs and not is_written and self._split_file(key, base, ours, theirs):
            missed = merge.merge_missed(base, ours, theirs, ends_own=True)
            keys.write_value(self._db, key, {**keys.omit_fields(theirs, "missed"), **missed})
            key_state.set_cached(self._db, key, now)
            return
        if is_written:
            record_missed(self._db, {key: now})  # It was opened, or closed by others, during the return.
        is_kept = key.kind == INODE and self._is_worth_restoring(key.number)
        super()._merge_key(key, now)
        if is_kept and self._is_unnamed(key.number):
            names = self._list_names_outside_sets(key.number)  # Each side removed some; these are made again.
            self._mark_unpublished(names)
            self._inodes_to_recount |= {key.number, *(name.number for name in names)}

    def _split_file(self, key: SharedKey, base: Value, ours: Value, theirs: Value) -> bool:
        """Make what this node wrote a file of its own if others wrote it, too.

        Returns False if one side did not write it, if others only took this node's for lost, or if the bytes are not on this node.
        """
        content = ours.get("content")
        if not all(merge.list_written(base, ours, theirs)) or merge.is_still_salvaged(theirs, base, ours):
            return False
        if content in (None, theirs.get("content")) or not journal.has_local_copy(self._db, content):
            return False
        made = identity.allocate_id(self._db, "inode")
        assert made is not None
        self._db.run("UPDATE content SET inode = ? WHERE id = ?", made, content)
        keys.write_value(self._db, SharedKey(INODE, made), ours)
        self._inodes_to_recount |= {made, key.number}
        self._mark_unpublished([SharedKey(INODE, made), SharedKey(CONTENT, content)])
        self._name_split_file(key.number, made, later=merge.get_write_order(ours) > merge.get_write_order(theirs))
        self._append_journal_row("content", made, content=content)
        return True

    def _name_split_file(self, theirs: int, ours: int, *, later: bool) -> None:
        """Give the name to the later of two files, and a conflict name to the other one.

        Names in sets that only this node knows are ours.
        """
        names = keys.list_local_names(self._db, theirs)
        for key in [name for name in names if identity.is_history_directory(name.number) and self._get_store_child(name) != theirs]:
            self._insert_name(key, ours)
        for key in self._list_names_outside_sets(theirs)[:1]:
            self._add_conflict_name(key, theirs if later else ours)
            if later:
                self._insert_name(key, ours)
