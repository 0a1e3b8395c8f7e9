"""Reads of the store: the keys that an operation depends on, their results, the bound of the cache.

Results never overwrite unpublished changes of this node or newer values. Eviction forgets rows of other nodes that are needed least; the
store has them all. Rows stay if they are open, held, dirty or still to be written back to the PFS, and if this node made them. A
directory is evicted after its entries.

Crash safety: each result is one transaction of the catalog; evicted rows are read again on demand.
"""

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ckptfs import limits
from ckptfs.bounded_table import BoundedTable
from ckptfs.catalog import contents, handles, identity, journal
from ckptfs.catalog.content_rows import HAS_GOOD_COPY
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import find_child_id, get_parent
from ckptfs.coherence import chain, key_state, keys, merge
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import CONTENT, INODE, NAME, PFS_STATE, TIMES, SharedKey, Value, build_names_prefix, encode_key
from ckptfs.coherence.unreadable_keys import log_unreadable
from ckptfs.coherence.value_checks import UNREADABLE, ValueUnreadable, decode_item, parse_key, parse_value
from ckptfs.store.kv import Get, Outcome, Transactions, prefix_end, read_all


class StoreValue(NamedTuple):
    """A value of the store, and the revision at which it was read."""

    read_revision: int
    value: CachedValue


class RecentDeletes:
    """The latest deletions by revision. An answer that was under way must not bring the keys back."""

    def __init__(self) -> None:
        self._deleted = BoundedTable[SharedKey, int](limits.RECENT_KEYS_MAX)

    def record_deleted(self, key: SharedKey, revision: int) -> None:
        """Record that a key does not exist from this revision on."""
        self._deleted[key] = revision

    def is_outdated(self, key: SharedKey, store_value: StoreValue) -> bool:
        """Return whether an answer is older than what is known."""
        return store_value.read_revision < self._deleted.get(key, 0)


def list_new_values(
    db: Database, store_values: Mapping[SharedKey, StoreValue], recent_deletes: RecentDeletes
) -> dict[SharedKey, StoreValue]:
    """Return the values that are new and may replace what the rows say."""
    return {key: one for key, one in store_values.items() if _is_new(db, key, one, recent_deletes)}


def _is_new(db: Database, key: SharedKey, store_value: StoreValue, recent_deletes: RecentDeletes) -> bool:
    known = key_state.get_cached(db, key)
    if known.revision == store_value.value.revision or store_value.value.raw == UNREADABLE:
        return False
    newer = known.revision <= store_value.read_revision if store_value.value.raw is None else store_value.value.revision > known.revision
    is_outdated = recent_deletes.is_outdated(key, store_value) or (not known.revision and _may_be_removed_here(db, key, store_value))
    return newer and not is_outdated and not key_state.is_dirty(db, key)


def _may_be_removed_here(db: Database, key: SharedKey, store_value: StoreValue) -> bool:
    """Return True if an answer about an inode of this catalog is older than the last commit here.

    The mount may have removed the inode while the mover, which does not know what the mount deletes, waited for the answer.
    """
    is_own = key.kind in (INODE, TIMES, CONTENT) and identity.get_origin_node(key.number) == identity.get_node_number(db)
    if not is_own and (key.kind != INODE or db.value("SELECT 1 FROM inode WHERE id = ?", key.number) is None):
        return False
    return store_value.read_revision < chain.load_next_link(db).revision


def apply_values(db: Database, store_values: Mapping[SharedKey, StoreValue], recent_deletes: RecentDeletes) -> list[int]:
    """Apply values to the rows, names last. Return the inodes that have no name any more."""
    if not (found := list_new_values(db, store_values, recent_deletes)):
        return []
    nameless: list[int] = []
    with db.transaction():
        with key_state.change_unmarked(db):
            for key, one in sorted(list_new_values(db, found, recent_deletes).items(), key=lambda pair: pair[0].kind == NAME):
                apply_value(db, key, one.value, one.read_revision, recent_deletes)
                if key.kind == INODE and one.value.raw is None:
                    nameless.append(key.number)
        for key, one in found.items():
            if key.kind == INODE and b'"missed"' in (one.value.raw or b""):
                restore_own_state(db, key.number)
    return nameless


def record_values(db: Database, values: Iterable[tuple[SharedKey, Value | None, int]]) -> None:
    """Apply values that this node has put or read: (key, value, revision)."""
    store_values = {key: StoreValue(at, CachedValue(at, keys.encode_value(value))) for key, value, at in values}
    apply_values(db, store_values, RecentDeletes())


def restore_own_state(db: Database, inode: int) -> None:
    """Show the lost state of a file if this node wrote it and has it. Joins the caller's transaction.

    A node that stood still was taken for dead. Its programs go on with what they closed; an open must not wait until others know.
    """
    raw = db.value("SELECT salvaged FROM inode WHERE id = ?", inode)
    if raw is None:
        return
    lost, *earlier = merge.decode_missed(raw)
    row = db.row(
        "SELECT k.size FROM content k JOIN inode i ON i.id = ?1"
        " WHERE k.id = ?2 AND k.generation = ?3 AND k.remote = 0 AND k.state IN (1, 2)"
        f" AND {HAS_GOOD_COPY.format('k')}"
        " AND i.generation = ?4 AND (?5 IS NULL OR i.content = ?5)"
        " AND NOT EXISTS (SELECT 1 FROM handle h WHERE h.inode = i.id AND h.writer = 1)",
        inode, lost["content"], lost["generation"], lost["shown"], lost["shows"],
    )  # fmt: skip
    if row is not None:
        what = (lost["content"], lost["generation"], row[0], lost["mtime_ns"], time.time_ns(), merge.encode_missed(earlier), inode)
        db.run("UPDATE inode SET content = ?, generation = ?, size = ?, mtime_ns = ?, ctime_ns = ?, salvaged = ? WHERE id = ?", *what)
        journal.append(db, "content", inode, content=lost["content"])


def apply_value(db: Database, key: SharedKey, now: CachedValue, read_revision: int, recent_deletes: RecentDeletes) -> None:
    """Apply one value without any check. A file that is open for writing keeps its bytes."""
    value = now.fields
    if value is None:
        recent_deletes.record_deleted(key, read_revision)
        if key.kind == INODE:
            apply_inode_deleted(db, key.number, read_revision, recent_deletes)
            return
    if key.kind == INODE and value is not None and handles.has_writer(db, key.number):
        ours = keys.get_value(db, key)
        if ours is not None:
            written = {name: ours[name] for name in merge.CONTENT_FIELDS if name in ours}
            missed = merge.merge_missed(key_state.get_cached(db, key).fields, ours, value)
            value = {**keys.omit_fields(value, "missed"), **written, **missed}
    if key.kind == NAME and value is not None and not _is_name_of(db, key, value["child"]):
        return  # Its inode is unknown on this node, or is a directory elsewhere. The next lookup asks for both.
    if key.kind == INODE and value is not None and "names" not in value and not _make_place(db, key.number, value["parent"]):
        return
    keys.write_value(db, key, value)
    key_state.set_cached(db, key, now)
    if key.kind == TIMES and value is not None and keys.get_value(db, key) not in (None, value):
        key_state.mark_dirty(db, key)  # Times are put without a compare: a node that knew older ones wrote last.


def _is_name_of(db: Database, key: SharedKey, child: int) -> bool:
    """Return True if a name leads to a known inode. A directory has one name only, in its parent."""
    row = db.row("SELECT mode & 61440, parent FROM inode WHERE id = ?", child)
    return row is not None and (row[0] != DIRECTORY_TYPE or row[1] == key.number or key_state.is_dirty(db, SharedKey(INODE, child)))


def _make_place(db: Database, directory: int, parent: int) -> bool:
    """Forget what contradicts that a directory is in `parent`. Return False if that is unpublished.

    What this node knew before is older. So no directory of a catalog is in itself, even if the store says so.
    """
    below = db.value(
        "WITH RECURSIVE up(id, parent) AS (SELECT id, parent FROM inode WHERE id = ?"
        " UNION SELECT i.id, i.parent FROM inode i JOIN up ON i.id = up.parent) SELECT id FROM up WHERE parent = ?",
        parent, directory,
    )  # fmt: skip
    if below is not None:
        above = SharedKey(INODE, below)
        if key_state.is_dirty(db, above):
            return False
        db.run("UPDATE inode SET parent = 0 WHERE id = ?", below)
        key_state.set_cached(db, above, key_state.ABSENT)
        _forget_names_outside(db, below, 0)
    _forget_names_outside(db, directory, parent)
    return True


def _forget_names_outside(db: Database, directory: int, parent: int) -> None:
    for other, name in db.rows("SELECT parent, name FROM entry WHERE child = ? AND parent <> ?", directory, parent):
        _forget_name(db, SharedKey(NAME, other, bytes(name)))


def apply_inode_deleted(db: Database, inode: int, read_revision: int, recent_deletes: RecentDeletes) -> None:
    """Delete the names of an inode that is gone in the store; its row stays until the kernel forgets it."""
    keys.write_value(db, SharedKey(INODE, inode), None)
    contents.mark_awaiting_store_check(db, inode)
    for key in (SharedKey(INODE, inode), SharedKey(TIMES, inode)):
        key_state.set_cached(db, key, key_state.ABSENT)
        recent_deletes.record_deleted(key, read_revision)
    forget_names(db, inode)


def forget_names(db: Database, inode: int) -> None:
    """Delete the cached names of an inode that is gone, and those in it: others have removed them before."""
    for parent, name in db.rows("SELECT parent, name FROM entry WHERE child = ?1 OR parent = ?1", inode):
        _forget_name(db, SharedKey(NAME, parent, bytes(name)))


def _forget_name(db: Database, key: SharedKey) -> None:
    if not key_state.is_dirty(db, key):
        keys.write_value(db, key, None)
        key_state.set_cached(db, key, key_state.ABSENT)


INODE_KEYS_MAX = 3
"""How many keys `list_inode_keys` returns at most."""
DIRECTORY_TYPE = 0o040000
FILE_TYPE = 0o100000


def list_inode_keys(db: Database, inode: int) -> list[SharedKey]:
    """Return the keys on which stat and open depend."""
    row = db.row("SELECT mode & 61440, content FROM inode WHERE id = ?", inode)
    if row is None or row[0] == DIRECTORY_TYPE:
        return [SharedKey(INODE, inode), SharedKey(TIMES, inode)]
    shown = [SharedKey(PFS_STATE, inode)] if db.is_journalled and row[0] == FILE_TYPE else []
    return [SharedKey(INODE, inode), *shown] if row[1] is None else [SharedKey(INODE, inode), *shown, SharedKey(CONTENT, row[1])]


def list_name_keys(db: Database, parent: int, name: bytes) -> list[SharedKey]:
    """Return the keys that a lookup depends on, as far as its target is known."""
    child = find_child_id(db, parent, name)
    return [SharedKey(NAME, parent, name), *(list_inode_keys(db, child) if child is not None else ())]


def find_directory(db: Database, parent: int, name: bytes) -> int | None:
    """Return the directory that a name leads to, if known."""
    found: int | None = db.value(
        "SELECT i.id FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ? AND e.name = ? AND i.mode & 61440 = 16384", parent, name
    )
    return found


def load_below(db: Database, store: Transactions, directory: int) -> set[int]:
    """Record what nodes have published below a directory, without the names; return the inodes."""
    found: set[int] = set()
    layer = [directory]
    while layer:
        items = [item for names in map(build_names_prefix, layer) for item in read_all(store, names)[1]]
        values = [value for item in items if (value := decode_item(item)) is not None]
        layer = [value["child"] for value in values if value["type"] == DIRECTORY_TYPE and value["child"] not in found]
        found.update(value["child"] for value in values)
    store_values = read_inodes(store, [inode for inode in found if not key_state.get_cached(db, SharedKey(INODE, inode)).revision])
    apply_values(db, {key: one for key, one in store_values.items() if one.value.raw is not None}, RecentDeletes())
    return found


def read_inodes(store: Transactions, inodes: Iterable[int]) -> dict[SharedKey, StoreValue]:
    """Return what the store says of inodes, of what the PFS shows of them, and of their contents."""
    found: dict[SharedKey, StoreValue] = {}
    keys = [SharedKey(kind, inode) for kind in (INODE, PFS_STATE) for inode in inodes]
    while keys:
        told = load_values(store, keys)
        found |= told
        keys = [SharedKey(CONTENT, content) for one in told.values() if (content := (one.value.fields or {}).get("content"))]
    return found


def load_directory_location(db: Database, inode: int) -> tuple[list[SharedKey], int]:
    """Return the keys that say where a directory is, and its parent if known."""
    return [*list_inode_keys(db, inode), *keys.list_local_names(db, inode)[:1]], get_parent(db, inode)


def list_missing_keys(db: Database, store_values: dict[SharedKey, StoreValue]) -> list[SharedKey]:
    """Return the keys that these answers lead to and do not contain: inodes of names, contents of inodes."""
    wanted: list[SharedKey] = []
    for key, one in store_values.items():
        value = one.value.fields if key.kind in (NAME, INODE) else None
        if value is None:
            continue
        if key.kind == NAME:
            wanted.append(SharedKey(INODE, value["child"]))
            if value["type"] == DIRECTORY_TYPE:
                wanted.append(SharedKey(TIMES, value["child"]))
        elif value["mode"] & 0o170000 == FILE_TYPE:
            if db.is_journalled:
                wanted.append(SharedKey(PFS_STATE, key.number))
            if value["content"] is not None:
                wanted.append(SharedKey(CONTENT, value["content"]))
    return [key for key in dict.fromkeys(wanted) if key not in store_values]


def list_overtaken_names(store_values: dict[SharedKey, StoreValue]) -> list[SharedKey]:
    """Return the names whose inode was gone when it was asked for: another file may have taken its place."""
    found = []
    for key, one in store_values.items():
        if key.kind == NAME and (value := one.value.fields) is not None:
            child = store_values.get(SharedKey(INODE, value["child"]))
            if child is not None and child.value.raw is None and child.read_revision > one.read_revision:
                found.append(key)
    return found


def list_unknown(db: Database, directory: int, keys: Iterable[SharedKey]) -> list[SharedKey]:
    """Return the keys without a cached value, and those of directories that were in another one."""
    moved = "SELECT 1 FROM inode WHERE id = ? AND mode & 61440 = 16384 AND parent <> ?"
    return [
        key
        for key in keys
        if not key_state.get_cached(db, key).revision or (key.kind == INODE and db.value(moved, key.number, directory) is not None)
    ]


def build_gets(keys: Iterable[SharedKey]) -> list[Get]:
    """Return the reads of these keys."""
    return [Get(encode_key(key)) for key in keys]


def load_values(store: Transactions, wanted: list[SharedKey]) -> dict[SharedKey, StoreValue]:
    """Return what the store says of these keys. Raises StoreUnreachable."""
    return parse_outcome(wanted, store.read(build_gets(wanted))) if wanted else {}


def parse_outcome(keys: list[SharedKey], outcome: Outcome) -> dict[SharedKey, StoreValue]:
    """Return the values that the reads of `build_gets` found."""
    found: dict[SharedKey, StoreValue] = {}
    for key, items in zip(keys, outcome.results, strict=False):
        value = CachedValue(items[0].mod_revision, parse_value(key, items[0])) if items else key_state.ABSENT
        found[key] = StoreValue(outcome.revision, value)
    return found


def require_readable(store_values: Mapping[SharedKey, StoreValue], keys: Iterable[SharedKey]) -> None:
    """Raise ValueUnreadable if one of these values, or what it leads to, is unreadable or missing."""
    for key in keys:
        one = store_values.get(key)
        if one is not None and one.value.raw == UNREADABLE:
            raise ValueUnreadable(f"etcd holds no value of ckptfs under {encode_key(key)!a}")
        fields = one.value.fields if one is not None and key.kind in (NAME, INODE) else None
        if one is not None and fields is not None and key.kind == NAME:
            child = SharedKey(INODE, fields["child"])
            require_readable(store_values, [child])
            target = store_values.get(child)
            if target is not None and target.value.raw is None and target.read_revision <= one.read_revision:
                log_unreadable(encode_key(key), one.value.revision, "there is no such inode")
                raise ValueUnreadable(f"etcd holds a name that leads nowhere under {encode_key(key)!a}")
        elif fields is not None and fields["content"] is not None:
            require_readable(store_values, [SharedKey(CONTENT, fields["content"])])


def build_page_get(directory: int, after: bytes, at_most: int) -> Get:
    """Return the read of one page of a directory, after the name `after` (empty: from the first)."""
    names = encode_key(SharedKey(NAME, directory, after))
    return Get(names + b"\0" if after else names, prefix_end(build_names_prefix(directory)), limit=at_most)


def parse_page(
    db: Database, directory: int, after: bytes, at_most: int, outcome: Outcome, *, only_new: bool = False
) -> tuple[dict[SharedKey, StoreValue], bytes | None]:
    """Return the values of a page with the names that are gone, and after which name the next begins.

    `only_new`: without the names that are cached together with their inodes.
    """
    items, start = outcome.results[0], len(build_names_prefix(directory))
    last = items[-1].key[start:] if len(items) == at_most else None
    revisions = key_state.load_name_revisions(db, directory, after, last)
    found = {}
    for item in items:
        is_known = revisions.pop(item.key[start:], 0) == item.mod_revision
        if not (is_known and only_new) and (key := parse_key(item.key)) is not None:
            found[key] = StoreValue(outcome.revision, CachedValue(item.mod_revision, parse_value(key, item)))
    for name in revisions:
        found[SharedKey(NAME, directory, name)] = StoreValue(outcome.revision, key_state.ABSENT)
    return found, last


_SELECT_UNNEEDED = (
    "SELECT i.id FROM inode i WHERE i.id > ?1 AND i.id >> 40 <> ?2 AND i.id > 1 AND i.nlink > 0"
    " AND NOT EXISTS (SELECT 1 FROM handle h WHERE h.inode = i.id) AND NOT EXISTS (SELECT 1 FROM entry e WHERE e.parent = i.id)"
    " AND NOT EXISTS (SELECT 1 FROM copy c WHERE c.content = i.content) AND NOT EXISTS (SELECT 1 FROM journal j WHERE j.inode = i.id)"
    " AND NOT EXISTS (SELECT 1 FROM content k WHERE k.inode = i.id"
    " AND (k.remote = 0 OR EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id)))"
    " AND NOT EXISTS (SELECT 1 FROM pfs_file p WHERE p.inode = i.id) AND NOT EXISTS (SELECT 1 FROM pfs_entry p WHERE p.inode = i.id)"
    " AND NOT EXISTS (SELECT 1 FROM dirty_key t WHERE t.kind IN ('i', 'm') AND t.number = i.id)"
    " AND NOT EXISTS (SELECT 1 FROM entry e JOIN dirty_key t ON t.kind = 'e' AND t.number = e.parent AND t.name = e.name"
    " WHERE e.child = i.id) ORDER BY i.id LIMIT ?3"
)


def is_cache_full(db: Database, keys_max: int = limits.CACHED_KEYS_MAX) -> bool:
    """Return whether the cache holds more than its bound."""
    return int(db.value("SELECT count(*) FROM cached_key")) > keys_max


def delete_unneeded(db: Database, after: int, at_most: int = limits.CACHED_KEYS_DROPPED) -> int:
    """Forget some inodes of other nodes with ids above `after`. Return the last id, 0 at the end."""
    with key_state.change_unmarked(db):
        inodes = db.column(_SELECT_UNNEEDED, after, identity.get_node_number(db), at_most)
        for inode in inodes:
            db.run("DELETE FROM cached_key WHERE kind = 'e' AND (number, name) IN (SELECT parent, name FROM entry WHERE child = ?)", inode)
            db.run("DELETE FROM entry WHERE child = ?", inode)
            db.run("DELETE FROM cached_key WHERE kind = 'c' AND number IN (SELECT id FROM content WHERE inode = ?)", inode)
            db.run("DELETE FROM content WHERE inode = ?", inode)
            db.run("DELETE FROM xattr WHERE inode = ?", inode)
            db.run("DELETE FROM cached_key WHERE kind IN ('i', 'm') AND number = ?", inode)
            db.run("DELETE FROM inode WHERE id = ?", inode)
    return inodes[-1] if inodes else 0
