"""Takes over what was read of the store: never over a change of this node that was not told, never back to something older.

If we die here: one change of the catalog, whole or not at all.
"""

from collections import OrderedDict
from collections.abc import Container, Mapping
from typing import NamedTuple

from ckptfs import limits
from ckptfs.catalog import former
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import kinds, merging, seen, touching
from ckptfs.catalog.sharing.kinds import INODE, NAME, TIMES, SharedKey
from ckptfs.catalog.sharing.seen import CachedValue


class StoreValue(NamedTuple):
    """What the store said of a key, when it was at `asked`."""

    read_revision: int
    value: CachedValue


class RecentDeletes:
    """Keys that are gone, and since which revision: an answer that was under way then must not bring them back."""

    def __init__(self) -> None:
        self._deleted: OrderedDict[SharedKey, int] = OrderedDict()

    def record_deleted(self, key: SharedKey, revision: int) -> None:
        """It is not there from this revision on."""
        self._deleted.pop(key, None)
        self._deleted[key] = revision
        if len(self._deleted) > limits.RECENT_KEYS_MAX:
            self._deleted.popitem(last=False)

    def is_outdated(self, key: SharedKey, store_value: StoreValue) -> bool:
        """Whether this answer is older than what is known."""
        return store_value.read_revision < self._deleted.get(key, 0)


def list_new_values(
    db: Database, store_values: Mapping[SharedKey, StoreValue], recent_deletes: RecentDeletes
) -> dict[SharedKey, StoreValue]:
    """What of it is not known yet and may be taken over."""
    return {key: one for key, one in store_values.items() if _is_new(db, key, one, recent_deletes)}


def _is_new(db: Database, key: SharedKey, store_value: StoreValue, recent_deletes: RecentDeletes) -> bool:
    known = seen.get_cached(db, key)
    if known.revision == store_value.value.revision:
        return False
    newer = known.revision <= store_value.read_revision if store_value.value.raw is None else store_value.value.revision > known.revision
    return newer and not recent_deletes.is_outdated(key, store_value) and not touching.is_dirty(db, key)


def apply_values(
    db: Database, store_values: Mapping[SharedKey, StoreValue], recent_deletes: RecentDeletes, open_inodes: Container[int] = ()
) -> list[int]:
    """Make the rows say what the store says; `written` are inodes that are open for writing here. Inodes that have no name any more.

    Names come last, so that none leads to an inode that is not there.
    """
    if not (found := list_new_values(db, store_values, recent_deletes)):
        return []
    nameless: list[int] = []
    with touching.change_unmarked(db):
        for key, one in sorted(list_new_values(db, found, recent_deletes).items(), key=lambda pair: pair[0].kind == NAME):
            apply_value(db, key, one.value, one.read_revision, recent_deletes, open_inodes)
            if key.kind == INODE and one.value.raw is None:
                nameless.append(key.number)
    return nameless


def apply_value(
    db: Database, key: SharedKey, now: CachedValue, read_revision: int, recent_deletes: RecentDeletes, open_inodes: Container[int] = ()
) -> None:
    """One key, without asking anything."""
    value = now.fields
    if value is None:
        recent_deletes.record_deleted(key, read_revision)
        if key.kind == INODE:
            apply_inode_deleted(db, key.number, read_revision, recent_deletes)
            return
    if key.kind == INODE and value is not None and key.number in open_inodes:
        ours = kinds.get_value(db, key)
        if ours is not None:
            value = {**value, **{name: ours[name] for name in merging.CONTENT_FIELDS if name in ours}}
    if key.kind == NAME and value is not None and db.value("SELECT 1 FROM inode WHERE id = ?", value["child"]) is None:
        return  # It leads to what is not known here: whoever asks for it asks for both.
    kinds.write_value(db, key, value)
    seen.set_cached(db, key, now)
    if key.kind == TIMES and value is not None and kinds.get_value(db, key) not in (None, value):
        touching.mark_dirty(db, key)  # It is put without comparing: somebody who knew only older times was the last one.


def apply_inode_deleted(db: Database, inode: int, read_revision: int, recent_deletes: RecentDeletes) -> None:
    """An inode is not in the store any more: here it stays without a name until the kernel forgets it."""
    kinds.write_value(db, SharedKey(INODE, inode), None)
    former.mark_awaiting_store_check(db, inode)
    for key in (SharedKey(INODE, inode), SharedKey(TIMES, inode)):
        seen.set_cached(db, key, seen.ABSENT)
        recent_deletes.record_deleted(key, read_revision)
    for parent, name in db.rows("SELECT parent, name FROM entry WHERE child = ?1 OR parent = ?1", inode):
        key = SharedKey(NAME, parent, bytes(name))
        if not touching.is_dirty(db, key):
            kinds.write_value(db, key, None)
            seen.set_cached(db, key, seen.ABSENT)
