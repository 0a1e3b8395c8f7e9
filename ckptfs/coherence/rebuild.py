"""Rebuild of a store that lost its data: each node publishes all that it knows, of different ages.

The value that the lost store had last is the newer one (its prior revision): it decides where a name leads and which names an inode has.
Changes since the loss are newer still; if two nodes changed the same row, they are resolved as after a disconnection. The bytes of a file
are those of its latest generation. A row that one node deleted and another still knows reappears.

Crash safety: everything is one change of the catalog.
"""

import stat
from collections.abc import Mapping

from ckptfs.catalog.database import Database
from ckptfs.coherence import key_state, keys, merge, store_loss
from ckptfs.coherence.conflict import CommitResult
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import CONTENT, INODE, NAME, PFS_NAME, PFS_STATE, SharedKey, Value
from ckptfs.coherence.read import StoreValue
from ckptfs.coherence.reintegrate import ReintegrationResolver
from ckptfs.coherence.store_loss import PriorRevision

NameSet = set[tuple[int, bytes]]


def list_stored_names(store_values: Mapping[SharedKey, StoreValue]) -> list[SharedKey]:
    """The names that files have in the store, and those under which the PFS shows something, as it says: they are settled with these."""
    kinds_of = {INODE: NAME, PFS_STATE: PFS_NAME}
    values = [(kinds_of[key.kind], one.value.fields or {}) for key, one in store_values.items() if key.kind in kinds_of]
    found = [SharedKey(kind, *name) for kind, value in values for name in _parse_names(value)]
    return [key for key in dict.fromkeys(found) if key not in store_values]


def list_unnamed_parents(db: Database, store_values: Mapping[SharedKey, StoreValue]) -> list[int]:
    """Where directories lie in the store, of which this node knows another name."""
    found = []
    for key, one in store_values.items():
        value = one.value.fields if key.kind == INODE else None
        if value is not None and stat.S_ISDIR(value["mode"]) and value["parent"] and not _has_stored_name(db, key.number, store_values):
            found.append(int(value["parent"]))
    return list(dict.fromkeys(found))


def _has_stored_name(db: Database, inode: int, store_values: Mapping[SharedKey, StoreValue]) -> bool:
    return any(_get_child(store_values.get(name)) == inode for name in keys.list_local_names(db, inode))


def _get_child(one: StoreValue | None) -> int:
    content = None if one is None else one.value.fields
    return int((content or {"child": 0})["child"])


def _parse_names(value: Value) -> NameSet:
    return {(parent, name.encode("latin-1")) for parent, name in value.get("names", ())}


class RebuildResolver(ReintegrationResolver):
    """Conflicts of a node that republishes its catalog."""

    def resolve(self) -> CommitResult:
        """Names that were read to be compared are not taken over."""
        self._values_to_compare = {
            key: one for key, one in {**self._extra_values, **self._store_values}.items() if key.kind in (NAME, PFS_NAME)
        }
        self._extra_values = {key: one for key, one in self._extra_values.items() if key.kind not in (NAME, PFS_NAME)}
        return super().resolve()

    def _handle_difference(self, key: SharedKey, store_value: StoreValue) -> None:
        if key not in self._transaction.new_values or store_value.value.raw is None:
            super()._handle_difference(key, store_value)
        elif key.kind == NAME:
            self._resolve_name_by_age(key, store_value)
        else:
            self._values_to_merge.append((key, store_value.value))

    # --- names --------------------------------------------------------------------------------------------------------

    def _resolve_name_by_age(self, key: SharedKey, store_value: StoreValue) -> None:
        here, there = self._get_local_child(key), _get_child(store_value)
        theirs, ours = self._get_prior_revision(store_value.value), store_loss.find_prior_revision(self._db, key)
        if here == there:
            key_state.set_cached(self._db, key, store_value.value)
        elif not here or theirs is None or ours is None:
            self._conflicting_names[key] = store_value.value
        elif self._is_directory(here if theirs >= ours else there):
            self._conflicting_names[key] = store_value.value  # What is in it may be all there is: it stays beside the other one.
        elif theirs >= ours:
            self._inodes_to_recount |= {here}
            self._take_store_name(key, store_value.value)
        else:
            self._inodes_to_recount |= {here, there}
            key_state.set_cached(self._db, key, store_value.value)

    def _is_directory(self, inode: int) -> bool:
        return stat.S_ISDIR(self._get_mode(inode))

    def _get_prior_revision(self, now: CachedValue) -> PriorRevision | None:
        """How new is what the store says; None: it was changed since."""
        if (known := keys.get_prior_revision(now.raw)) is not None:
            return known
        return store_loss.find_prior_revision_at(self._db, now.revision)

    # --- all else -----------------------------------------------------------------------------------------------------

    def _merge_key(self, key: SharedKey, now: CachedValue) -> None:
        theirs, ours = now.fields, keys.get_value(self._db, key)
        if theirs is not None and ours is not None and key.kind == INODE:
            self._merge_inode(key, now, ours, theirs)
        elif theirs is not None and ours is not None and key.kind in (PFS_STATE, PFS_NAME):
            if not self._is_ours_newer(key, now):
                keys.write_value(self._db, key, theirs)
            elif key.kind == PFS_STATE:
                self._delete_pfs_names_in_store(key.number, theirs)
            key_state.set_cached(self._db, key, now)
        elif theirs is not None and key.kind == CONTENT and ours is None:
            before = keys.decode_value(store_loss.get_lost_value(self._db, key))
            if before is None or merge.merge_content(before, theirs) is theirs:
                store_loss.mark_resent(self._db, [key])
                keys.write_value(self._db, key, theirs)
            key_state.set_cached(self._db, key, now)
        else:
            super()._merge_key(key, now)

    def _is_ours_newer(self, key: SharedKey, now: CachedValue) -> bool:
        """Return True if the value of this node is newer than the store's."""
        theirs, ours = self._get_prior_revision(now), store_loss.find_prior_revision(self._db, key)
        return theirs is not None and (ours is None or ours > theirs)

    def _merge_inode(self, key: SharedKey, now: CachedValue, ours: Value, theirs: Value) -> None:
        here = self._list_local_names(key.number)
        there_was, here_was = self._get_prior_revision(now), store_loss.find_prior_revision(self._db, key)
        if there_was is None and here_was is None:
            merged = merge.merge_both(ours, theirs)
            if stat.S_ISDIR(ours["mode"]):
                self._delete_superseded_names(key.number, here, theirs)
        elif self._is_ours_newer(key, now):
            merged = ours if here_was else merge.merge_later_content(ours, theirs)
            self._delete_names_in_store(key.number, here)
        else:
            merged = theirs if there_was else merge.merge_later_content(theirs, ours)
            self._delete_superseded_names(key.number, here, theirs)
        keys.write_value(self._db, key, merged)
        key_state.set_cached(self._db, key, now)
        self._inodes_to_recount.add(key.number)

    def _list_local_names(self, inode: int) -> NameSet:
        return {(key.number, key.name) for key in keys.list_local_names(self._db, inode)}

    def _delete_superseded_names(self, inode: int, here: NameSet, theirs: Value) -> None:
        """Delete names that the inode no longer has; names added since the loss stay."""
        there = self._list_store_names(inode, theirs)
        if not there:
            return
        for name in here - there:
            key = SharedKey(NAME, *name)
            if stat.S_ISDIR(theirs["mode"]) or store_loss.find_prior_revision(self._db, key) is not None:
                keys.write_value(self._db, key, None)
                self._inodes_to_recount.add(key.number)

    def _delete_names_in_store(self, inode: int, here: NameSet) -> None:
        """Names that the store has of it, and it has no more, go there."""
        for key, one in self._values_to_compare.items():
            if key.kind == NAME and _get_child(one) == inode and (key.number, key.name) not in here and not self._get_local_child(key):
                key_state.set_cached(self._db, key, one.value)
                key_state.mark_dirty(self._db, key)
                self._inodes_to_recount.add(key.number)

    def _delete_pfs_names_in_store(self, inode: int, theirs: Value) -> None:
        """Names under which the PFS does not show it any more go there."""
        for name in _parse_names(theirs):
            key = SharedKey(PFS_NAME, *name)
            one = self._values_to_compare.get(key)
            if one is not None and (one.value.fields or {}).get("inode") == inode and keys.get_value(self._db, key) is None:
                key_state.set_cached(self._db, key, one.value)
                key_state.mark_dirty(self._db, key)

    def _list_store_names(self, inode: int, theirs: Value) -> NameSet:
        if "names" in theirs:
            return _parse_names(theirs)
        return {(key.number, key.name) for key, one in self._values_to_compare.items() if key.kind == NAME and _get_child(one) == inode}
