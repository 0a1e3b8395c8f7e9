"""Adoption of a store that lost its data: this catalog as an island that returns, whose base is empty.

`begin` marks all shared rows dirty, from the root down. `AdoptionBatch` then compares them with what other nodes have put into the store
before, inode by inode; the return of an island (`reintegrate`) publishes the rest and settles two things under one name.

Invariants:
- What the store has stays, unless this node knows a later state of the file: by generation, then by the time of the last write.
- Of one inode, the names count of the side where it changed last (ctime). A rename by one node thus wins against a catalog that does not
  know it yet. With equal times, names are added.
- A name that leads to another inode in the store gives way if another node made its file, and no bytes of it are on this node.
- Deletions leave no mark: what one node deleted and another one still knows may be there again. Better a file too many than one lost.

Crash safety: a batch is one change of the catalog, and the next process begins with the first batch again, which changes nothing.
"""

import stat
from collections.abc import Iterable, Mapping, Sequence

from ckptfs.catalog import identity
from ckptfs.catalog.database import Database
from ckptfs.catalog.remote_contents import IS_ANNOUNCED
from ckptfs.coherence import key_state, keys, merge, store_loss
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import INODE, NAME, PFS_NAME, PFS_STATE, TIMES, SharedKey, Value
from ckptfs.coherence.read import StoreValue
from ckptfs.coherence.store_loss import AdoptionStep
from ckptfs.store.kv import Operation, Put

BATCH_INODES = 64
StoreValues = Mapping[SharedKey, StoreValue]

# From the root downwards, so that a directory is published before its entries; then what is not known to be below the root.
_WALK_STATEMENTS = [
    "CREATE TEMP TABLE IF NOT EXISTS walk (change INTEGER PRIMARY KEY, id INTEGER UNIQUE)",
    "DELETE FROM walk",
    "INSERT INTO walk (id) WITH RECURSIVE below (id, depth) AS (SELECT 1, 0 UNION SELECT e.child, depth + 1 FROM below b"
    " JOIN entry e ON e.parent = b.id WHERE depth < 4096) SELECT id FROM below GROUP BY id ORDER BY max(depth), id",
    "INSERT OR IGNORE INTO walk (id) SELECT child FROM entry",
]
_INSERT_DIRTY = "INSERT OR IGNORE INTO dirty_key (change, kind, number, name) "
_AFTER_WALK = "SELECT (SELECT max(change) FROM walk) + row_number() OVER ()"
_MARK_ALL_DIRTY = [
    _INSERT_DIRTY + "SELECT w.change, 'i', w.id, x'' FROM walk w JOIN inode i ON i.id = w.id",
    _INSERT_DIRTY + "SELECT w.change, 'm', w.id, x'' FROM walk w JOIN inode i ON i.id = w.id WHERE i.mode & 61440 = 16384",
    _INSERT_DIRTY + "SELECT w.change, 'e', e.parent, e.name FROM walk w JOIN entry e ON e.child = w.id",
    _INSERT_DIRTY + "SELECT w.change, 'c', k.id, x'' FROM walk w JOIN content k ON k.inode = w.id WHERE k.state <> 3",
    _INSERT_DIRTY + "SELECT w.change, 'f', w.id, x'' FROM walk w JOIN pfs_entry p ON p.inode = w.id",
    _INSERT_DIRTY + _AFTER_WALK + ", 'x', parent, name FROM pfs_entry",
    _INSERT_DIRTY + "SELECT (SELECT max(change) FROM dirty_key) + seq,"
    f" 'j', {key_state.ROW_NODE_SQL}, {key_state.ROW_NAME_SQL.format('journal')} FROM journal",
]
# The state of a content that another node wrote is only known as the lost store had it.
_FORGET_STORE = [
    "DELETE FROM dirty_key",
    "DELETE FROM cached_key WHERE kind <> 'c' OR number NOT IN (SELECT id FROM content WHERE remote = 1)",
    "UPDATE cached_key SET revision = 0",
]


def build_intents(db: Database) -> list[Operation]:
    """Return puts of the intents of the batch in progress, which continues after the adoption."""
    rows = db.rows(
        "SELECT kind, number, name, value FROM cached_key WHERE kind IN ('f', 'x') AND json_extract(CAST(value AS TEXT), '$.by') = ?",
        identity.get_node_number(db),
    )
    return [Put(keys.encode_key(SharedKey(kind, number, bytes(name))), bytes(value)) for kind, number, name, value in rows]


def begin(db: Database, epoch: bytes) -> None:
    """Mark all rows of this node as not yet published in the store of this epoch."""
    with key_state.change_unmarked(db):
        _delete_stale_names(db)
        for statement in (*_FORGET_STORE, *_WALK_STATEMENTS, *_MARK_ALL_DIRTY):
            db.run(statement)
        db.run("DELETE FROM walk")
        db.run(f"UPDATE content SET announce_state = 2 WHERE {IS_ANNOUNCED}")
        store_loss.record_epoch(db, epoch)
        store_loss.set_adoption_step(db, AdoptionStep.MERGING)


def _delete_stale_names(db: Database) -> None:
    """Delete cached names of inodes that have been renamed since."""
    rows = db.rows(
        "SELECT e.cookie, e.parent, e.name, i.value FROM entry e"
        " JOIN cached_key n ON n.kind = 'e' AND n.number = e.parent AND n.name = e.name"
        " JOIN cached_key i ON i.kind = 'i' AND i.number = e.child AND i.revision > n.revision"
        " WHERE NOT EXISTS (SELECT 1 FROM dirty_key t WHERE t.kind = 'e' AND t.number = e.parent AND t.name = e.name)"
    )
    for cookie, parent, name, known in rows:
        value = keys.decode_value(bytes(known)) or {}
        if "names" in value and [parent, bytes(name).decode("latin-1")] not in value["names"]:
            db.run("DELETE FROM entry WHERE cookie = ?", cookie)
    revision = "SELECT coalesce(max(n.revision), 0) FROM cached_key n WHERE n.kind = 'e' AND n.number = {0}.parent AND n.name = {0}.name"
    dirty = "EXISTS (SELECT 1 FROM dirty_key t WHERE t.kind = 'e' AND t.number = {0}.parent AND t.name = {0}.name)"
    newer = f"({dirty.format('o')} OR ({revision.format('o')}) > ({revision.format('e')}))"
    db.run(
        "DELETE FROM entry WHERE cookie IN (SELECT e.cookie FROM entry e JOIN inode i ON i.id = e.child AND i.mode & 61440 = 16384"
        f" WHERE NOT {dirty.format('e')} AND EXISTS (SELECT 1 FROM entry o WHERE o.child = e.child AND o.cookie <> e.cookie AND {newer}))"
    )


def list_inodes(db: Database, after: int) -> list[int]:
    """Return the next inodes to compare, in the order of their ids."""
    return db.column("SELECT id FROM inode WHERE id > ? AND nlink > 0 ORDER BY id LIMIT ?", after, BATCH_INODES)


def list_keys(db: Database, inodes: Iterable[int]) -> list[SharedKey]:
    """Return the keys that say where inodes and their names are in the store."""
    found: list[SharedKey] = []
    for inode in inodes:
        found += [SharedKey(INODE, inode), SharedKey(TIMES, inode), SharedKey(PFS_STATE, inode)]
        found += [*keys.list_local_names(db, inode), *_list_local_pfs_names(db, inode)]
    return found


def list_names_in_store(values: StoreValues) -> list[SharedKey]:
    """Return the names that files have in the store, and those that the PFS shows by its records."""
    found: list[SharedKey] = []
    for key, one in values.items():
        kind = {INODE: NAME, PFS_STATE: PFS_NAME}.get(key.kind)
        if kind is not None:
            found += _parse_names(kind, one.value.fields)
    return [key for key in dict.fromkeys(found) if key not in values]


def list_parents_to_read(db: Database, values: StoreValues) -> list[int]:
    """Return the directories that hold, in the store, a directory which has another name on this node."""
    found = []
    for key, one in values.items():
        fields = one.value.fields if key.kind == INODE else None
        if fields is None or not stat.S_ISDIR(fields["mode"]) or not fields["parent"]:
            continue
        if not any(_get_child(values, name) == key.number for name in keys.list_local_names(db, key.number)):
            found.append(int(fields["parent"]))
    return list(dict.fromkeys(found))


def _parse_names(kind: str, fields: Value | None) -> list[SharedKey]:
    return [SharedKey(kind, *name) for name in keys.decode_names((fields or {}).get("names", ()))]


def _list_local_pfs_names(db: Database, inode: int) -> list[SharedKey]:
    return [SharedKey(PFS_NAME, row[0], bytes(row[1])) for row in db.rows("SELECT parent, name FROM pfs_entry WHERE inode = ?", inode)]


def _get_child(values: StoreValues, key: SharedKey) -> int:
    """Return the inode that a name leads to in the store; 0 for none."""
    fields = values[key].value.fields if key in values else None
    return 0 if fields is None else int(fields["child" if key.kind == NAME else "inode"])


class AdoptionBatch:
    """Some inodes of this catalog, compared with the store. `values` is what the store has."""

    def __init__(self, db: Database, values: StoreValues) -> None:
        self._db = db
        self._values = values

    def apply(self, inodes: Sequence[int]) -> None:
        """Make the rows and marks of these inodes what `reintegrate` is to publish."""
        with key_state.change_unmarked(self._db):
            for inode in inodes:
                theirs = self._get(SharedKey(INODE, inode))
                if theirs.fields is None:
                    self._yield_names(inode)
                else:
                    self._merge_inode(inode, theirs.fields)
                    self._merge_pfs_state(inode)

    def _get(self, key: SharedKey) -> CachedValue:
        one = self._values.get(key)
        return key_state.ABSENT if one is None else one.value

    # --- what the store does not have ---------------------------------------------------------------------------------

    def _yield_names(self, inode: int) -> None:
        """Give up names of a file that only this node knows, where the store has another file."""
        if self._is_of_this_node(inode):
            return
        names = keys.list_local_names(self._db, inode)
        taken = [key for key in names if _get_child(self._values, key) not in (0, inode)]
        for key in taken:
            self._drop(key)
        if taken and len(taken) == len(names):
            self._db.run("UPDATE inode SET nlink = 0 WHERE id = ?", inode)
            contents = self._db.column("SELECT id FROM content WHERE inode = ?", inode)
            self._mark_clean(SharedKey(INODE, inode), *(SharedKey(keys.CONTENT, content) for content in contents))

    def _is_of_this_node(self, inode: int) -> bool:
        """Return True for directories, and for files that this node made or wrote, or whose bytes it has."""
        if identity.get_origin_node(inode) == identity.get_node_number(self._db):
            return True
        held = "SELECT 1 FROM content k WHERE k.inode = ? AND (k.remote = 0 OR EXISTS (SELECT 1 FROM copy c WHERE c.content = k.id))"
        directory = "SELECT 1 FROM inode WHERE id = ? AND mode & 61440 = 16384"
        return self._db.value(held, inode) is not None or self._db.value(directory, inode) is not None

    # --- what both have -----------------------------------------------------------------------------------------------

    def _merge_inode(self, inode: int, theirs: Value) -> None:
        key = SharedKey(INODE, inode)
        ours = keys.get_value(self._db, key)
        if ours is None:
            return
        is_directory = stat.S_ISDIR(ours["mode"])
        order = self._compare_ctime(inode, ours, theirs)
        here = keys.list_local_names(self._db, inode)
        there = self._list_names_of_directory(inode) if is_directory else _parse_names(NAME, theirs)
        # A directory has one name.
        self._merge_names(inode, here, there, keep_here=order > 0 or (order == 0 and not is_directory), keep_there=order <= 0)
        newer, other = (ours, theirs) if order > 0 else (theirs, ours)
        merged = merge.merge_later_content(newer, other)
        key_state.set_cached(self._db, key, self._get(key))
        names = {} if is_directory else {"names": keys.list_shared_names(self._db, inode)}
        keys.write_value(self._db, key, {**merged, **names})
        if is_directory and order <= 0 and (times := self._get(SharedKey(TIMES, inode))).fields is not None:
            keys.write_value(self._db, SharedKey(TIMES, inode), times.fields)
            key_state.set_cached(self._db, SharedKey(TIMES, inode), times)
            self._mark_clean(SharedKey(TIMES, inode))

    def _compare_ctime(self, inode: int, ours: Value, theirs: Value) -> int:
        """Return 1 if the inode changed last on this node, -1 if it did in the store, 0 for the same time."""
        key = SharedKey(TIMES, inode)
        here = int((keys.get_value(self._db, key) or ours)["ctime_ns"])
        there = int((self._get(key).fields or theirs).get("ctime_ns", 0))
        return (here > there) - (here < there)

    def _list_names_of_directory(self, inode: int) -> list[SharedKey]:
        return [key for key in self._values if key.kind == NAME and _get_child(self._values, key) == inode]

    def _merge_names(self, inode: int, here: list[SharedKey], there: list[SharedKey], *, keep_here: bool, keep_there: bool) -> None:
        for key in here:
            if key not in there and not keep_here and there:
                self._drop(key)
        for key in there:
            known = self._get(key)
            if _get_child(self._values, key) != inode:
                continue
            if key in here or (keep_there and keys.get_value(self._db, key) is None):
                keys.write_value(self._db, key, known.fields)
                self._mark_clean(key)
            elif keys.get_value(self._db, key) is not None:
                continue  # Another inode has this name on this node: the return settles that.
            else:
                key_state.mark_dirty(self._db, key)
            key_state.set_cached(self._db, key, known)

    def _merge_pfs_state(self, inode: int) -> None:
        """Keep the later state on the PFS: by generation, then the one that agrees with the tree."""
        key = SharedKey(PFS_STATE, inode)
        theirs, ours = self._get(key), keys.get_value(self._db, key)
        if theirs.fields is None or ours is None:
            return
        names = {(name.number, name.name.decode("latin-1")) for name in keys.list_local_names(self._db, inode)}
        is_ours = _get_pfs_order(ours, names) > _get_pfs_order(theirs.fields, names)
        here, there = _list_local_pfs_names(self._db, inode), _parse_names(PFS_NAME, theirs.fields)
        self._merge_names(inode, here, there, keep_here=is_ours, keep_there=not is_ours)
        if not is_ours:
            keys.write_value(self._db, key, theirs.fields)
            self._mark_clean(key)
        key_state.set_cached(self._db, key, theirs)

    def _drop(self, key: SharedKey) -> None:
        keys.write_value(self._db, key, None)
        self._mark_clean(key)

    def _mark_clean(self, *cleaned: SharedKey) -> None:
        key_state.mark_clean(self._db, cleaned, key_state.get_last_change(self._db))


def _get_pfs_order(value: Value, names: set[tuple[int, str]]) -> tuple[int, bool]:
    return int((value.get("published") or [0])[0] or 0), names.issuperset(map(tuple, value["names"]))
