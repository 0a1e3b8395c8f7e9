"""One transaction of the store, built from dirty keys: compares, changes, reads after a refusal.

Changes are sent whole and in order, as many as fit. Invariants, which keep the shared tree consistent:
- A name is put only if its directory exists, and leads only to a directory that is where this node saw it.
- The last name of an inode in the store is not deleted while the inode has another name on this node.
- A directory is deleted with its name, and only if it is empty in the store.
- A directory is moved only while all its new ancestors stay in place (no loops).

Crash safety: nothing is changed. A transaction that was sent but not recorded is recognised by its link (see `chain`).
"""

import stat
from dataclasses import dataclass, field, fields, replace

from ckptfs import limits
from ckptfs.catalog import inodes
from ckptfs.catalog.database import Database
from ckptfs.catalog.identity import is_history_directory
from ckptfs.catalog.retention_state import CHOSEN_XATTR
from ckptfs.coherence import chain, key_state, keys
from ckptfs.coherence.chain import ChainLink
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import CONTENT, COPY, INODE, KINDS, NAME, PFS_NAME, PFS_STATE, TIMES, SharedKey, Value, encode_key
from ckptfs.model import ROOT
from ckptfs.store.kv import Compare, CompareTarget, Delete, Get, Operation, Put, prefix_end

_DIRECTORY_TYPE_JSON = keys.encode_fields({"type": stat.S_IFDIR})[1:-1]
_RANKS = {CONTENT: 0, TIMES: 1, INODE: 2, NAME: 4}
_DELETED_INODE_RANK, _DELETED_NAME_RANK = 6, 5


@dataclass(slots=True)
class StoreTransaction:
    """One transaction, as far as it is built."""

    link: ChainLink
    change_last: int
    new_values: dict[SharedKey, bytes | None] = field(default_factory=dict)  # All changes up to `change_last`. None: to delete.
    unchanged_keys: list[SharedKey] = field(default_factory=list)  # Dirty keys up to `change_last` that equal the store already.
    expected_revisions: dict[SharedKey, int] = field(default_factory=dict)  # Keys that must still have this revision.
    required_directories: set[int] = field(default_factory=set)  # They must exist.
    required_empty: set[int] = field(default_factory=set)  # They must have no entries.
    deleted_later: set[SharedKey] = field(default_factory=set)  # Inodes that a later transaction deletes. Until then they keep their value.
    extra_deletes: list[Delete] = field(default_factory=list)
    chosen_changes: dict[bytes, Operation] = field(default_factory=dict)  # Keys of sets chosen for the PFS, which other nodes watch.
    size_bytes: int = 0
    change_count: int = 0
    is_complete: bool = True

    def build_compares(self) -> list[Compare]:
        """Return what must hold for the transaction to pass."""
        revisions = [Compare(encode_key(key), CompareTarget.MOD, "=", revision) for key, revision in self.expected_revisions.items()]
        present = [Compare(encode_key(SharedKey(INODE, number)), CompareTarget.VERSION, ">", 0) for number in self.required_directories]
        empty = [
            Compare(names, CompareTarget.VERSION, "=", 0, prefix_end(names)) for names in map(keys.build_names_prefix, self.required_empty)
        ]
        return [self.link.build_compare(), *revisions, *present, *empty]

    def build_changes(self) -> list[Operation]:
        """Return what the transaction changes if it passes."""
        changes = [Delete(encode_key(key)) if value is None else Put(encode_key(key), value) for key, value in self.new_values.items()]
        changed = {operation.key for operation in changes}
        return [
            *changes,
            *(operation for operation in self.extra_deletes if operation.key not in changed),
            *self.chosen_changes.values(),
            self.build_link_put(),
        ]

    def build_link_put(self) -> Put:
        """Return the change by which the transaction takes its link of the chain."""
        return self.link.build_put(key for key, value in self.new_values.items() if value is None)

    def build_conflict_gets(self) -> list[Get]:
        """Return what to read after a refusal: the chain first, then everything that was compared."""
        return [Get(encode_key(key)) for key in self.list_conflict_keys()] + [
            Get(names, prefix_end(names), limit=1) for names in map(keys.build_names_prefix, self.required_empty)
        ]

    def list_conflict_keys(self) -> list[SharedKey]:
        """Return the single keys of `build_conflict_gets`, in its order."""
        return [self.link.key, *self.expected_revisions, *(SharedKey(INODE, number) for number in self.required_directories)]

    def is_full(self) -> bool:
        """Return True if it exceeds the bounds of etcd. One value alone always goes."""
        if len(self.new_values) < 2:
            return False
        changes = len(self.new_values) + len(self.extra_deletes) + len(self.chosen_changes) + 1
        compares = len(self.expected_revisions) + len(self.required_directories) + len(self.required_empty) + 1
        is_in_removed = any(key.kind == NAME and key.number in self.required_empty for key in self.new_values)
        is_large = self.size_bytes > limits.ETCD_REQUEST_BYTES_MAX - 64 * limits.KIB
        return is_in_removed or is_large or max(changes, compares) > limits.ETCD_OPERATIONS_MAX

    def copy(self) -> "StoreTransaction":
        """Return a copy that changes on its own."""
        copied = replace(self)
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, dict | list | set):
                setattr(copied, one.name, value.copy())
        return copied


def build_transaction(db: Database, changes_max: int = limits.ETCD_OPERATIONS_MAX) -> StoreTransaction | None:
    """Return the next transaction, with at most so many changes. Returns None if no key is dirty."""
    with db.read_transaction():
        return _TransactionBuilder(db).build(changes_max)


class _TransactionBuilder:
    """A transaction that is being built."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._transaction = StoreTransaction(chain.load_next_link(db), key_state.get_last_change(db))
        self._dirty = key_state.list_dirty(db, 4 * limits.ETCD_OPERATIONS_MAX)
        self._values: dict[SharedKey, tuple[CachedValue, bytes | None]] = {}
        self._keys_of_change: list[SharedKey] = []

    def build(self, changes_max: int) -> StoreTransaction | None:
        if not self._dirty:
            return None
        changes: dict[int, list[SharedKey]] = {}
        for change, key in self._dirty:
            changes.setdefault(change, []).append(key)
        self._transaction.is_complete = len(self._dirty) < 4 * limits.ETCD_OPERATIONS_MAX
        for change, marked in changes.items():
            changed = [key for key in dict.fromkeys(marked) if not self._is_deleted_later(key, change)]
            if not changed:
                continue
            is_added = self._transaction.change_count < changes_max and self._add_change(sorted(changed, key=self._get_rank))
            if not is_added:
                self._transaction.is_complete = False
                break
            self._transaction.change_count += 1
        self._defer_name_deletes()
        self._set_file_names()
        return self._transaction

    def _load_value(self, key: SharedKey) -> tuple[CachedValue, bytes | None]:
        """Return (what the store has, what the rows say)."""
        if key not in self._values:
            known, value = key_state.get_cached(self._db, key), keys.encode_value(keys.get_value(self._db, key))
            # The writer of another node's content publishes it, unless a file replaced it here.
            if value is None and key.kind == CONTENT and self._db.value("SELECT remote FROM content WHERE id = ?", key.number) == 1:
                value = known.raw
            self._values[key] = known, value
        return self._values[key]

    def _get_cached(self, key: SharedKey) -> CachedValue:
        """Return what the store has, as last seen."""
        return self._load_value(key)[0]

    def _get_local(self, key: SharedKey) -> bytes | None:
        """Return what the rows say."""
        return self._load_value(key)[1]

    def _is_missing(self, key: SharedKey) -> bool:
        """Return True for a dirty key that the transaction does not have yet."""
        return key not in self._transaction.new_values and key_state.is_dirty(self._db, key)

    def _get_rank(self, key: SharedKey) -> int:
        """Return the place of a key in its change: inodes before names that lead to them, deletions last."""
        if self._get_local(key) is not None or key.kind not in (NAME, INODE):
            return _RANKS.get(key.kind, 3)
        return _DELETED_NAME_RANK if key.kind == NAME else _DELETED_INODE_RANK

    def _add_change(self, changed: list[SharedKey]) -> bool:
        """Add one change, if too large for any transaction in parts. Returns False if it does not fit."""
        before = self._transaction.copy()
        added = {*self._transaction.new_values} - self._transaction.deleted_later
        new = self._keys_of_change = [key for key in changed if key not in added and not self._goes_with_directory(key)]
        for key in new:
            self._add_key(key)
        if not self._transaction.is_full():
            return True
        self._transaction = before
        if not before.new_values:
            self._add_part_of_change(new)
        return False

    def _goes_with_directory(self, key: SharedKey) -> bool:
        """Return True for the name of a removed directory: both go when it is empty in the store."""
        if key.kind != NAME:
            return False
        known, value = self._load_value(key)
        if value is not None or not _is_directory(known.raw):
            return False
        directory = SharedKey(INODE, _get_child(known.raw))
        is_removed = bool(self._get_cached(directory).revision) and self._get_local(directory) is None
        return is_removed and key_state.is_dirty(self._db, directory)

    def _is_deleted_later(self, key: SharedKey, change: int) -> bool:
        """Return True for a removed directory of which a later change is: it goes with that, when empty."""
        if key.kind != INODE or self._get_local(key) is not None:
            return False
        is_directory = stat.S_ISDIR((self._get_cached(key).fields or {"mode": 0})["mode"])
        later = "SELECT 1 FROM dirty_key WHERE kind = ? AND number = ? AND change > ? LIMIT 1"
        return is_directory and self._db.value(later, INODE, key.number, change) is not None

    def _add_part_of_change(self, changed: list[SharedKey]) -> None:
        for key in changed:
            kept = self._transaction.copy()
            self._add_key(key)
            if self._transaction.is_full():
                self._transaction = kept
                return

    def _add_key(self, key: SharedKey) -> None:
        known, value = self._load_value(key)
        if key.kind in (PFS_NAME, PFS_STATE) and "by" in (known.fields or {}):
            value = known.raw  # A write-back changes it now and publishes the result; no one else may change it meanwhile.
        transaction = self._transaction
        transaction.deleted_later.discard(key)
        # A value of revision 0 comes from a store that lost its data.
        if value == known.raw and (known.revision or value is None):
            transaction.unchanged_keys.append(key)
            return
        transaction.new_values[key] = value
        transaction.size_bytes += len(value or b"") + len(key.name) + 100
        if KINDS[key.kind].is_compared:
            transaction.expected_revisions[key] = known.revision
            transaction.required_directories.discard(key.number if key.kind == INODE else -1)
        if key.kind == NAME:
            self._include_named_inodes(known.raw, value)
        if key.kind == NAME and value is not None:
            self._require_directory(key.number)
        elif key.kind == INODE:
            self._add_inode_conditions(key, known, value)

    def _defer_inode_delete(self, key: SharedKey) -> None:
        """Leave the deletion of an inode to a later transaction: another node may still name it."""
        known = self._get_cached(key)
        if known.raw is not None:
            self._transaction.new_values[key] = known.raw
            self._transaction.size_bytes += len(known.raw) + 100
            self._transaction.expected_revisions[key] = known.revision
            self._transaction.deleted_later.add(key)

    def _include_named_inodes(self, before: bytes | None, now: bytes | None) -> None:
        """Add the inodes that gain or lose a name, with the names that must change together with them."""
        for entry in (before, now):
            key = SharedKey(INODE, _get_child(entry))
            if key.number and not _is_directory(entry):  # A stale value may not list the name that goes.
                self._transaction.expected_revisions[key] = self._get_cached(key).revision
            if not key.number or key in self._transaction.new_values or key in self._transaction.unchanged_keys:
                continue
            if self._get_local(key) is None and (now is None or not _is_directory(entry)):
                self._defer_inode_delete(key)
            else:
                self._add_key(key)
        if now is None:
            return
        child = SharedKey(INODE, _get_child(now))
        if _get_child(before) not in (0, child.number):
            for name in keys.list_local_names(self._db, _get_child(before)):
                if self._is_missing(name):
                    self._add_key(name)
        if _is_directory(now) and (revision := self._get_cached(child).revision):
            # Another node may have moved or removed it, also if nothing but its name changes.
            self._transaction.expected_revisions.setdefault(child, revision)
            self._add_changed_names(child.number)

    def _add_changed_names(self, inode: int) -> None:
        """Add the names that an inode has in the store, and no longer on this node."""
        known = key_state.get_cached(self._db, SharedKey(INODE, inode)).fields or {}
        if "names" in known:
            names = [SharedKey(NAME, *name) for name in keys.decode_names(known["names"])]
        else:
            names = key_state.list_dirty_names(self._db)  # A directory does not know its name.
        for name in names:
            if self._is_missing(name) and _get_child(key_state.get_cached(self._db, name).raw) == inode:
                self._add_key(name)

    def _set_file_names(self) -> None:
        """Give each file the names that it has after this transaction; other new names may still be undone."""
        given: dict[int, set[tuple[int, str]]] = {}
        taken: dict[int, set[tuple[int, str]]] = {}
        for key, value in self._transaction.new_values.items():
            if key.kind == NAME:
                name = key.number, key.name.decode("latin-1")
                taken.setdefault(_get_child(self._get_cached(key).raw), set()).add(name)
                given.setdefault(_get_child(value), set()).add(name)
        for key, value in self._transaction.new_values.items():
            if key.kind == INODE and (now := keys.decode_value(value)) is not None and "names" in now:
                before = {(parent, name) for parent, name in (self._get_cached(key).fields or {"names": ()})["names"]}
                names = (before - taken.get(key.number, set())) | given.get(key.number, set())
                self._transaction.new_values[key] = keys.encode_value({**now, "names": [list(name) for name in sorted(names)]})

    def _require_directory(self, directory: int) -> None:
        """Require that a directory exists; add it with its name if the store does not have it yet."""
        key = SharedKey(INODE, directory)
        if key in self._transaction.new_values or key in self._transaction.expected_revisions:
            return
        is_known = key_state.get_cached(self._db, key).revision != 0
        if is_known and not (is_history_directory(directory) and key_state.is_dirty(self._db, key)):
            self._transaction.required_directories.add(directory)
            return
        self._add_key(key)  # Of a series it says which numbers are used.
        if not is_known:
            self._add_key(SharedKey(TIMES, directory))
            for name in keys.list_local_names(self._db, directory):
                self._add_key(name)

    def _add_inode_conditions(self, key: SharedKey, known: CachedValue, value: bytes | None) -> None:
        """Add what must hold for a change of an inode, and what changes with it."""
        before, now = known.fields, keys.decode_value(value)
        kind = stat.S_IFMT((now or before or {"mode": 0})["mode"])
        if _is_chosen(before) != _is_chosen(now):
            chosen = keys.encode_chosen_key(key.number)
            self._transaction.chosen_changes[chosen] = Put(chosen, b"1") if _is_chosen(now) else Delete(chosen)
        if now is None:
            self._add_changed_names(key.number)
        if now is None and kind == stat.S_IFDIR:
            self._transaction.required_empty.add(key.number)
            self._transaction.extra_deletes.append(Delete(encode_key(SharedKey(TIMES, key.number))))
        elif now is None and before is not None and before["content"] is not None:
            self._delete_content(key.number, before["content"])
        elif now is not None and before is not None and kind == stat.S_IFDIR and now["parent"] != before["parent"]:
            self._require_ancestors(now)
        elif now is not None and before is None and kind != stat.S_IFDIR:
            self._include_one_name(key.number)
        if now is not None and now.get("content") is not None:
            content = SharedKey(CONTENT, now["content"])
            if self._is_missing(content) and not self._get_cached(content).revision:
                self._add_key(content)  # This node has made it, and the store does not have it yet.

    def _include_one_name(self, inode: int) -> None:
        """Add one name of a new inode, which would else list names that may never be published."""
        names = keys.list_local_names(self._db, inode)
        if not any(name in self._keys_of_change or name in self._transaction.new_values for name in names):
            for name in [name for name in names if self._is_missing(name)][:1]:
                self._add_key(name)

    def _delete_content(self, inode: int, content: int) -> None:
        """Delete the content of a removed file and its copies, unless another file has or had it."""
        is_held = "superseded_mtime_ns IS NOT NULL OR EXISTS (SELECT 1 FROM inode i WHERE i.id = k.inode AND i.content = k.id)"
        if self._db.value(f"SELECT 1 FROM content k WHERE id = ? AND inode <> ? AND ({is_held})", content, inode):
            return
        copies = encode_key(SharedKey(COPY, content))
        self._transaction.extra_deletes.append(Delete(copies, prefix_end(copies)))
        key = SharedKey(CONTENT, content)
        self._values[key] = self._get_cached(key), None
        if key in self._transaction.new_values:
            self._transaction.new_values[key] = None
        else:
            self._transaction.extra_deletes.append(Delete(encode_key(key)))

    def _require_ancestors(self, moved: Value) -> None:
        """Require that no directory above a moved directory moves."""
        directory, passed = moved["parent"], set()
        while directory not in (ROOT, 0) and directory not in passed:
            passed.add(directory)
            row = self._db.row(
                "SELECT e.parent, e.name FROM entry e JOIN inode i ON i.id = e.child AND i.parent = e.parent WHERE e.child = ?", directory
            )
            # If its name is unknown, the directory itself says where it is.
            key = SharedKey(INODE, directory) if row is None else SharedKey(NAME, row[0], bytes(row[1]))
            self._transaction.expected_revisions.setdefault(key, key_state.get_cached(self._db, key).revision)
            directory = row[0] if row is not None else inodes.get_parent(self._db, directory)

    def _defer_name_deletes(self) -> None:
        """Keep the name that the store has until another name of the inode is in the store."""
        if self._transaction.is_complete:
            return
        waiting: dict[SharedKey, list[SharedKey]] = {}
        for key in [key for key, value in self._transaction.new_values.items() if key.kind == NAME and value is None]:
            others = keys.list_local_names(self._db, _get_child(self._get_cached(key).raw))
            if others and not any(other in self._transaction.new_values or not key_state.is_dirty(self._db, other) for other in others):
                waiting[key] = others
        rest = {*self._transaction.new_values, *self._transaction.unchanged_keys} - {*waiting} - self._transaction.deleted_later
        if waiting and not any(key_state.is_dirty(self._db, key) for key in rest):
            for name in waiting.popitem()[1]:  # The next changes may depend on this one.
                self._add_key(name)
        for key in waiting:
            del self._transaction.new_values[key]
            self._transaction.expected_revisions.pop(key)


def _get_child(entry: bytes | None) -> int:
    """Return the inode that a name leads to; 0 for none."""
    return int((keys.decode_value(entry) or {"child": 0})["child"])


def _is_chosen(inode: Value | None) -> bool:
    """Return True for the directory of a set that was chosen for the PFS."""
    return CHOSEN_XATTR.decode() in (inode or {}).get("xattrs", {})


def _is_directory(entry: bytes | None) -> bool:
    """Return whether a name leads to a directory, without decoding the value: each name is asked."""
    return entry is not None and _DIRECTORY_TYPE_JSON in entry
