"""Outcomes of transactions: successes are recorded, conflicts resolved, so that the next one passes.

If another node changed a name first, the changes of this node that involve the name are undone, with every dirty name of the same inodes.
Attributes are merged. An inode that is gone in the store is deleted in the catalog. `chain` says if a commit passed without an answer.

Crash safety: an outcome is applied in one transaction of the catalog. The next process recognises an unrecorded success by the chain.
"""

import base64
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ckptfs import limits
from ckptfs.catalog import handles, history, history_names, identity, inodes, journal, peer_copies, set_members
from ckptfs.catalog.database import Database
from ckptfs.catalog.history import CheckpointSet
from ckptfs.coherence import chain, key_state, keys, merge, read
from ckptfs.coherence.chain import ChainLink
from ckptfs.coherence.commit import StoreTransaction
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import CONTENT, INODE, NAME, PFS_NAME, PFS_STATE, SharedKey, Value, decode_key
from ckptfs.coherence.ownership import is_shared
from ckptfs.coherence.read import RecentDeletes, StoreValue
from ckptfs.store.kv import Outcome


@dataclass(slots=True)
class CommitResult:
    """The names whose changes were undone, and the inodes that have no name any more."""

    reverted_names: set[SharedKey] = field(default_factory=set)
    unlinked_inodes: list[int] = field(default_factory=list)


class ConflictResolver:
    """The resolution of one refused transaction. Runs inside `key_state.change_unmarked`."""

    def __init__(
        self,
        db: Database,
        transaction: StoreTransaction,
        store_values: dict[SharedKey, StoreValue],
        read_revision: int,
        recent_deletes: RecentDeletes,
    ) -> None:
        self._db = db
        self._transaction = transaction
        self._store_values = store_values
        self._read_revision = read_revision
        self._recent_deletes = recent_deletes
        self._contested_names: set[SharedKey] = set()
        self._deleted_inodes: set[int] = set()
        self._restored_inodes: set[int] = set()
        self._moved_directories: set[int] = set()
        self._values_to_merge: list[tuple[SharedKey, CachedValue]] = []
        self._inodes_to_recount: set[int] = set()
        self._result = CommitResult()

    def mark_not_empty(self, directory: int) -> None:
        """Give back a directory that was removed on this node but has entries in the store."""
        self._contested_names |= self._list_names_of(directory)
        self._restore_removed(directory)

    def resolve(self) -> CommitResult:
        """Resolve all conflicts; inodes first, because they decide about names and contents."""
        for key, one in sorted(self._store_values.items(), key=lambda pair: pair[0].kind != INODE):
            if key in self._transaction.expected_revisions and one.value.revision != self._transaction.expected_revisions[key]:
                self._handle_difference(key, one)
            elif key.kind == INODE and key not in self._transaction.expected_revisions and one.value.raw is None:
                self._handle_inode_deleted(key.number)
        if self._contested_names:
            self._revert_contested()
            handles.delete_replies(self._db)
        for key, now in self._values_to_merge:
            self._merge_key(key, now)
        return self._result

    def _handle_difference(self, key: SharedKey, store_value: StoreValue) -> None:
        """Another node changed this key since it was cached."""
        if key.kind == INODE and store_value.value.raw is None:
            self._handle_inode_deleted(key.number)
        elif key not in self._transaction.new_values and key.kind == INODE:
            self._handle_directory_change(key, store_value.value)
        elif key not in self._transaction.new_values:
            self._handle_ancestor_change(key, store_value)
        elif key.kind == NAME:
            self._contested_names.add(key)
        else:
            self._revert_sets(self._list_outdated_links(key, store_value.value))
            self._contested_names |= {*self._record_used_numbers(key, store_value.value)}
            self._values_to_merge.append((key, store_value.value))

    def _list_outdated_links(self, key: SharedKey, now: CachedValue) -> set[SharedKey]:
        """Return names in the history of a file that another node has written since, or writes now."""
        base, theirs = key_state.get_cached(self._db, key).fields, now.fields
        if key.kind != INODE or not base or not theirs or not (merge.is_written_since(base, theirs) or self._is_claimed(theirs)):
            return set()
        links = {name for name in self._list_names_of(key.number) if self._get_local_child(name) == key.number}
        return {name for name in links if identity.is_history_directory(name.number)}

    def _is_claimed(self, theirs: Value) -> bool:
        """Return True if another node has opened a file for writing, and has not published what it writes."""
        claim = theirs.get("xattrs", {}).get(set_members.CLAIM_XATTR.decode())
        return set_members.is_claimed_elsewhere(
            self._db, None if claim is None else base64.b64decode(claim), theirs["content"], theirs["generation"]
        )

    def _revert_sets(self, links: set[SharedKey]) -> None:
        """Undo sets of which these are links."""
        self._contested_names |= links
        for directory in {name.number for name in links}:
            while directory and not is_shared(self._db, directory):
                self._contested_names |= self._list_names_of(directory)  # The set goes as a whole.
                directory = inodes.get_parent(self._db, directory)

    def _record_used_numbers(self, key: SharedKey, now: CachedValue) -> dict[SharedKey, CheckpointSet]:
        """Record the numbers of sets that others used. Return the unpublished sets if one has such a number."""
        record = (now.fields or {}).get("xattrs", {}).get(history.SERIES_XATTR.decode())
        if key.kind != INODE or record is None or not history_names.is_series(self._db, key.number):
            return {}
        used = history.get_recorded_next_number(base64.b64decode(record))
        history.record_used_numbers(self._db, key.number, used)
        rows = self._db.rows("SELECT name, child FROM entry WHERE parent = ? ORDER BY cookie", key.number)
        new = [(bytes(name), child) for name, child in rows if not is_shared(self._db, child)]
        found = {SharedKey(NAME, key.number, name): one for name, child in new if (one := history.get_set(self._db, child)) is not None}
        return found if any(one.record.number < used for one in found.values()) else {}

    def _handle_ancestor_change(self, key: SharedKey, store_value: StoreValue) -> None:
        """Handle a changed name above a moved directory. Other changes below it are published by themselves."""
        if not key_state.is_dirty(self._db, key):
            read.apply_value(self._db, key, store_value.value, self._read_revision, self._recent_deletes)
        self._contested_names |= self._list_moved_names()

    def _handle_directory_change(self, key: SharedKey, now: CachedValue) -> None:
        """Handle a changed directory that got a name here, or is above a moved one. It stays where it is."""
        self._values_to_merge.append((key, now))
        if (key_state.get_cached(self._db, key).fields or {}).get("parent") != (now.fields or {}).get("parent"):
            self._moved_directories.add(key.number)
            self._contested_names |= self._list_names_of(key.number) | self._list_moved_names()

    def _merge_key(self, key: SharedKey, now: CachedValue) -> None:
        base, ours, theirs = key_state.get_cached(self._db, key).fields, keys.get_value(self._db, key), now.fields
        if theirs is not None and ours is not None:
            writing = key.kind == INODE and handles.has_writer(self._db, key.number)
            merged = merge.merge_values(key.kind, base, ours, theirs, is_writing=writing)
            if key.kind == INODE and "names" in merged:  # The names on the PFS are another matter.
                merged["names"] = keys.list_shared_names(self._db, key.number, theirs)
                if not merged["names"]:
                    # Two nodes removed one name each, and these were the last two.
                    self._result.unlinked_inodes.append(key.number)
            keys.write_value(self._db, key, merged)
            if key.kind == INODE:
                self._take_back_content(key.number, merged.get("content"))
        elif theirs is not None and key.kind == INODE:
            self._keep_if_named(key, base, theirs)
        elif theirs is not None and not self._is_deleted_here(key, theirs):
            keys.write_value(self._db, key, theirs)
        key_state.set_cached(self._db, key, now)

    def _is_deleted_here(self, key: SharedKey, theirs: Value) -> bool:
        """Return True for a content that this node wrote and deleted: it goes in any case."""
        own = key.kind == CONTENT and theirs["node"] == self._transaction.link.key.number
        return own and self._db.value("SELECT 1 FROM content WHERE id = ?", key.number) is None

    def _keep_if_named(self, key: SharedKey, base: Value | None, theirs: Value) -> None:
        """Keep an inode that lost its last name on this node, if the store has others.

        It shows what this node wrote before, unless another node has written it.
        """
        names = keys.list_shared_names(self._db, key.number, theirs) if "names" in theirs else []
        if base is None or not names:
            return
        row = self._db.row(f"SELECT {', '.join(merge.CONTENT_FIELDS)} FROM inode WHERE id = ?", key.number)
        ours = theirs if row is None or merge.is_written_since(base, theirs) else dict(zip(merge.CONTENT_FIELDS, row, strict=True))
        value = {**merge.merge_later_content(theirs, ours), "names": names}
        keys.write_value(self._db, key, value)
        self._take_back_content(key.number, value["content"])

    def _take_back_content(self, inode: int, content: int | None) -> None:
        """Give a file its content back: it may have become the previous one of the file that took its name."""
        take_back = (
            "UPDATE content SET inode = ?1, superseded_mtime_ns = NULL, change = change + 1 WHERE id = ?2 AND inode <> ?1 AND state <> 3"
        )
        if content is not None and self._db.run(take_back, inode, content):
            key_state.mark_dirty(self._db, SharedKey(CONTENT, content))

    def _handle_inode_deleted(self, inode: int) -> None:
        """Handle an inode that was deleted in the store: names made in it or for it are undone."""
        read.apply_inode_deleted(self._db, inode, self._read_revision, self._recent_deletes)
        self._deleted_inodes.add(inode)
        self._result.unlinked_inodes.append(inode)
        self._contested_names |= self._list_names_of(inode)
        self._contested_names |= {key for key in key_state.list_dirty_names(self._db) if key.number == inode}

    def _list_names_of(self, inode: int) -> set[SharedKey]:
        """Return the dirty names that lead or led to an inode."""
        return {key for key in key_state.list_dirty_names(self._db) if inode in (self._get_local_child(key), self._get_store_child(key))}

    def _list_moved_names(self) -> set[SharedKey]:
        """Return the dirty names of directories that this transaction moves."""
        found: set[SharedKey] = set()
        for key in self._transaction.new_values:
            before = key_state.get_cached(self._db, key).fields if key.kind == INODE else None
            now = keys.get_value(self._db, key) if before else None
            if before and now and now["parent"] != before["parent"]:
                found |= self._list_names_of(key.number)
        return found

    def _get_local_child(self, key: SharedKey) -> int:
        """Return the inode of a name in the catalog."""
        return inodes.find_child_id(self._db, key.number, key.name) or 0

    def _get_store_child(self, key: SharedKey) -> int:
        """Return the inode of a name in the store, as last seen; 0 for none."""
        return int((key_state.get_cached(self._db, key).fields or {"child": 0})["child"])

    # --- undoing ------------------------------------------------------------------------------------------------------

    def _revert_contested(self) -> None:
        """Undo the contested names, and all dirty names of the same inodes, which build on them."""
        touched = key_state.list_dirty_names(self._db)
        # A restored inode keeps its names on this node, except those of others, and does not get back those of the store.
        free = {0} | self._deleted_inodes | self._restored_inodes
        touched = [
            key
            for key in touched
            if (self._get_local_child(key) or self._get_store_child(key)) not in self._restored_inodes
            or self._get_store_child(key) not in free
        ]
        reverting = {key for key in self._contested_names if key in touched}
        while True:
            children = {child for key in reverting for child in (self._get_local_child(key), self._get_store_child(key)) if child}
            more = {key for key in touched if self._is_bound_to(key, children) or key.number in self._list_new_inodes(children)} - reverting
            if not more:
                break
            reverting |= more
        for key in sorted(reverting):
            self._restore_inodes(key)
        for key in sorted(reverting):
            self._set_name(key)
        self._restore_on_pfs([*(SharedKey(PFS_NAME, *key[1:]) for key in reverting), *(SharedKey(PFS_STATE, child) for child in children)])
        self._inodes_to_recount |= children
        self._set_link_counts()
        never = {inode for inode in self._result.unlinked_inodes if not is_shared(self._db, inode)}
        journal.delete_reverted(self._db, journal.get_instance_id(self._db), [(key.number, key.name) for key in reverting], never)
        self._result.reverted_names = reverting | self._contested_names

    def _is_bound_to(self, key: SharedKey, children: set[int]) -> bool:
        """Return whether a name led or leads to one of these.

        The link of a file in a set is bound to nothing: a set is whole or gone.
        """
        found = {self._get_local_child(key), self._get_store_child(key)} & children
        return any(self._is_directory(child) or not identity.is_history_directory(key.number) for child in found)

    def _list_new_inodes(self, children: set[int]) -> set[int]:
        """Return those inodes that the store has never had."""
        return {child for child in children if not is_shared(self._db, child)}

    def _restore_inodes(self, key: SharedKey) -> None:
        """Undo the changes of this name: a new entry disappears, a removed one reappears."""
        here, there = self._get_local_child(key), self._get_store_child(key)
        self._inodes_to_recount |= {key.number, here, there} - {0}
        if here == there:
            return
        if here and self._is_directory(here) and not is_shared(self._db, here):
            self._db.run("UPDATE inode SET nlink = 0 WHERE id = ?", here)
        if there not in self._deleted_inodes | self._restored_inodes:
            self._restore_removed(there)

    def _restore_removed(self, inode: int) -> None:
        """Undo the removal of an inode, or the move of a directory, as far as the store has it."""
        known = key_state.get_cached(self._db, SharedKey(INODE, inode)).fields
        if known is None:
            return
        if not self._get_mode(inode):
            keys.write_value(self._db, SharedKey(INODE, inode), known)
        if self._is_directory(inode):
            self._db.run("UPDATE inode SET nlink = max(nlink, 2), parent = ? WHERE id = ?", known["parent"], inode)
            key_state.mark_dirty(self._db, SharedKey(INODE, inode))

    def _get_mode(self, inode: int) -> int:
        """Return the mode of an inode; 0 without a row."""
        return int(self._db.value("SELECT mode FROM inode WHERE id = ?", inode) or 0)

    def _is_directory(self, inode: int) -> bool:
        return stat.S_ISDIR(self._get_mode(inode))

    def _set_link_counts(self) -> None:
        """Set the link counts of files to the number of their names; those of directories are not shared."""
        for inode in self._inodes_to_recount - self._deleted_inodes:
            if keys.set_link_count(self._db, inode):
                key_state.mark_dirty(self._db, SharedKey(INODE, inode))
            if self._db.value("SELECT nlink FROM inode WHERE id = ?", inode) == 0:
                self._result.unlinked_inodes.append(inode)

    def _set_name(self, key: SharedKey) -> None:
        """Let a name lead where the store says."""
        known = self._store_values.get(key)
        now = key_state.get_cached(self._db, key) if known is None else known.value
        child = (now.fields or {"child": 0})["child"]
        comes_back = known is None and child in self._restored_inodes
        if not child or comes_back or child in self._deleted_inodes or not self._get_mode(child):
            now = key_state.ABSENT
        keys.write_value(self._db, key, now.fields)
        key_state.set_cached(self._db, key, now)

    def _restore_on_pfs(self, keys_on_pfs: Iterable[SharedKey]) -> None:
        """Let the PFS show what the store says: a scan that found a name gone finds it again."""
        for key in keys_on_pfs:
            if key_state.is_dirty(self._db, key):
                keys.write_value(self._db, key, key_state.get_cached(self._db, key).fields)


def record_commit(db: Database, transaction: StoreTransaction, revision: int, recent_deletes: RecentDeletes) -> None:
    """Record that the store applied the transaction at `revision`; 0 if there was nothing to apply."""
    with key_state.change_unmarked(db):
        key_state.set_cached_each(db, ((key, CachedValue(revision, value)) for key, value in transaction.new_values.items()))
        for key, value in transaction.new_values.items():
            if value is None:
                recent_deletes.record_deleted(key, revision)
            if value is None and key.kind == INODE:
                read.forget_names(db, key.number)
        for operation in transaction.extra_deletes:
            if operation.end is None:
                key = decode_key(operation.key)
                if key.kind == CONTENT and (writer := _get_writer(db, key)) != transaction.link.key.number:
                    peer_copies.insert_unneeded_copy(db, key.number, writer)
                key_state.set_cached(db, key, key_state.ABSENT)
                recent_deletes.record_deleted(key, revision)
        told = [key for key in (*transaction.new_values, *transaction.unchanged_keys) if key not in transaction.deleted_later]
        key_state.mark_clean(db, told, transaction.change_last)
        for key in told if key_state.get_disconnected_ns(db) else ():
            if key.kind == INODE:
                keys.set_link_count(db, key.number)
        if revision:
            key_state.set_cached(db, transaction.link.key, CachedValue(revision, transaction.build_link_put().value))


def _get_writer(db: Database, content: SharedKey) -> int:
    """Return the last known writer of a content."""
    told = key_state.get_cached(db, content).fields or {}
    return int(told.get("node", identity.get_origin_node(content.number)))


def record_fence(
    db: Database,
    link: ChainLink,
    found: CachedValue,
    sent: StoreTransaction | None,
    recent_deletes: RecentDeletes,
    dirty_values: Mapping[SharedKey, StoreValue],
) -> None:
    """Record if `sent` has passed; without it, what a process that died has put and deleted.

    `dirty_values`: what the store has of the dirty keys. The rows may have changed back since that process put its values.
    """
    if sent is not None and sent.link.is_taken(found):
        record_commit(db, sent, found.revision, recent_deletes)
        return
    with key_state.change_unmarked(db):
        for key in chain.list_deleted(found):
            key_state.set_cached(db, key, key_state.ABSENT)
        own = chain.get_own_revision(found)
        key_state.set_cached_each(db, ((key, one.value) for key, one in dirty_values.items() if one.value.revision == own))
        key_state.set_cached(db, link.key, found)


def drop_change(db: Database, transaction: StoreTransaction) -> str:
    """Keep a change on this node only, as the store refuses it for ever. Return its path."""
    with db.transaction():
        change = min(change for change, _ in key_state.list_dirty(db, 1))
        path = keys.describe_path(db, [*transaction.new_values, *(key for _, key in key_state.list_dirty(db, limits.ETCD_OPERATIONS_MAX))])
        key_state.mark_clean(db, [*transaction.new_values, *transaction.unchanged_keys], change)
    return path


def resolve_conflict(
    db: Database,
    transaction: StoreTransaction,
    outcome: Outcome,
    recent_deletes: RecentDeletes,
    resolver_class: Callable[..., ConflictResolver] = ConflictResolver,
) -> CommitResult:
    """Resolve the conflicts of a refused transaction, unless it had passed after all. Raises StoreLost."""
    keys = transaction.list_conflict_keys()
    told = read.parse_outcome(keys, outcome)
    found = told.pop(transaction.link.key).value
    transaction.link.require_kept(found)
    if transaction.link.is_taken(found):
        # The transaction had passed, but the answer was lost and the request was sent again.
        record_commit(db, transaction, found.revision, recent_deletes)
        return CommitResult()
    with db.transaction():
        with key_state.change_unmarked(db):
            key_state.set_cached(db, transaction.link.key, found)
            refusal = resolver_class(db, transaction, told, outcome.revision, recent_deletes)
            for directory, items in zip(transaction.required_empty, outcome.results[len(keys) :], strict=False):
                if items:
                    refusal.mark_not_empty(directory)
            result = refusal.resolve()
        for key in told:
            if key.kind == INODE:
                read.restore_own_state(db, key.number)
    return result
