"""How write-back of several nodes works on one PFS: a batch is announced before the PFS is touched, and settled when the PFS shows it.

Announced is every name that changes: `x/` says who is about to change it and what it will show then, and every inode that gets or loses a
name: `f/` says who is at it. The announcement passes only while
all that the batch was planned on is as it was read; so no two nodes ever act on one name, and nobody publishes a name that another has
taken away. What an intention says of a node that is gone is settled by whoever needs the name, by what the PFS shows.
If we die here: the batch is in the catalog with its intentions in the store; the next mover finds out by them how far it came.
"""

from collections.abc import Iterable

from ckptfs.catalog import identity, pfs_batch
from ckptfs.catalog.database import Database
from ckptfs.catalog.pfs_batch import ObservedStat, PfsBatch
from ckptfs.catalog.sharing import kinds, reading, seen
from ckptfs.catalog.sharing.kinds import INODE, NAME, PFS_NAME, PFS_STATE, SharedKey, Value
from ckptfs.catalog.sharing.seen import CachedValue
from ckptfs.catalog.sharing.truth import Name, StoreSnapshot
from ckptfs.catalog.store import Compare, CompareTarget, Delete, Operation, Put, Store
from ckptfs.errors import Busy

FoundByName = dict[Name, ObservedStat | None]


class _RolledBack(Exception):
    """What was tried is taken back."""


def list_pfs_name_keys(batch: PfsBatch) -> list[SharedKey]:
    """The names that a batch changes."""
    return [SharedKey(PFS_NAME, show.location.parent, show.location.name) for show in batch.expected_entries]


def _list_subjects(db: Database, batch: PfsBatch) -> set[int]:
    """Of what it changes what the PFS shows of them."""
    now = (
        {show.inode for show in batch.expected_entries if show.inode is not None}
        | {row.inode for row in batch.published_rows}
        | set(batch.inodes_with_set_attributes)
    )
    before = {
        db.value("SELECT inode FROM pfs_entry WHERE parent = ? AND name = ?", key.number, key.name) for key in list_pfs_name_keys(batch)
    }
    return {inode for inode in now | before if inode}


def publish_intents(db: Database, store: Store, snapshot: StoreSnapshot, batch: PfsBatch, instance: str) -> None:
    """Say what is about to be done. Raises Busy when something that it was planned on is not so any more, and Unreachable."""
    keys = [*list_pfs_name_keys(batch), *(SharedKey(PFS_STATE, inode) for inode in sorted(_list_subjects(db, batch)))]
    compares = [_build_unchanged_compare(snapshot, key) for key in keys]
    for show in batch.expected_entries:
        if show.inode is not None and snapshot.get_child((show.location.parent, show.location.name)) == show.inode:
            compares.append(_build_unchanged_compare(snapshot, SharedKey(NAME, show.location.parent, show.location.name)))
    mine = {"by": identity.get_node_number(db), "of": instance, "batch": batch.last_seq}
    values = {
        key: _build_intent(db, batch, key) | mine if key.kind == PFS_NAME else (snapshot.get_value(key) or {"names": []}) | mine
        for key in keys
    }
    changes = [Put(kinds.encode_key(key), kinds.encode_fields(value)) for key, value in values.items()]
    outcome = store.commit(compares, changes, reading.build_gets(keys))
    if outcome.succeeded:
        revisions = dict.fromkeys(keys, outcome.revision)
    else:
        told = reading.parse_outcome(keys, outcome)
        if not all(told[key].value.fields == values[key] for key in keys) or not keys:
            raise Busy("another node has changed what this was planned on")
        revisions = {key: told[key].value.revision for key in keys}
    with db.transaction():
        for key, value in values.items():
            seen.set_cached(db, key, CachedValue(revisions[key], kinds.encode_value(value)))


def _build_unchanged_compare(snapshot: StoreSnapshot, key: SharedKey) -> Compare:
    return Compare(kinds.encode_key(key), CompareTarget.MOD, "=", snapshot.get_revision(key))


def _build_intent(db: Database, batch: PfsBatch, key: SharedKey) -> Value:
    show = next(show for show in batch.expected_entries if (show.location.parent, show.location.name) == (key.number, key.name))
    value = kinds.get_value(db, key) or {"inode": 0}
    if show.inode is not None:
        value |= {"next": show.inode, "ino": show.fingerprint.ino}
        row = next((row for row in batch.published_rows if row.inode == show.inode), None)
        if row is not None:
            digest = None if row.digest is None else row.digest.hex()
            value["published"] = [row.generation, row.is_complete, row.size, row.mtime_ns, row.pfs_inode, digest]
    return value


def find_intents(store: Store, batch: PfsBatch, number: int, instance: str) -> dict[SharedKey, CachedValue] | None:
    """The intentions of a batch that is in hand, if the store has them all; None: it never was announced, or was settled, or taken away."""
    keys = list_pfs_name_keys(batch)
    if not keys:
        return {}
    told = reading.parse_outcome(keys, store.read(reading.build_gets(keys)))
    for key in keys:
        value = told[key].value.fields or {}
        if (value.get("by"), value.get("of"), value.get("batch")) != (number, instance, batch.last_seq):
            return None
    return {key: told[key].value for key in keys}


def complete_intents(db: Database, store: Store, batch: PfsBatch, found: FoundByName, snapshot: StoreSnapshot | None) -> list[int]:
    """Say what the PFS shows now, here and in the store; inodes whose attributes have changed meanwhile. Raises Busy when another node
    has settled it, taking this one for dead, and Unreachable.
    """
    subjects = _list_subjects(db, batch) | set(pfs_batch.list_unfinished(batch, found))
    keys = [*list_pfs_name_keys(batch), *(SharedKey(PFS_STATE, inode) for inode in sorted(subjects))]
    values = _build_final_values(db, batch, found, keys)
    changes: list[Operation] = []
    for key, value in values.items():
        changes.append(Delete(kinds.encode_key(key)) if value is None else Put(kinds.encode_key(key), value))
    compares = [
        Compare(kinds.encode_key(key), CompareTarget.MOD, "=", seen.get_cached(db, key).revision) for key in list_pfs_name_keys(batch)
    ]
    attributes = [SharedKey(INODE, inode) for inode in sorted(subjects)]
    outcome = store.commit(compares, [*changes, *reading.build_gets(attributes)], reading.build_gets(keys))
    if outcome.succeeded:
        revision, items = outcome.revision, outcome.results
    elif all(one.value.raw == values[key] for key, one in reading.parse_outcome(keys, outcome).items()):
        revision, items = outcome.revision, ()
    else:
        raise Busy("this node was taken for dead, and another one settled what it had in hand")
    with db.transaction():
        pfs_batch.record_batch_done(db, batch, found)
        for key, value in values.items():
            seen.set_cached(db, key, CachedValue(revision, value))
    if snapshot is None or not items:
        return sorted(subjects)
    told = {key: (one[0].mod_revision if one else 0) for key, one in zip(attributes, items, strict=True)}
    return [key.number for key in attributes if key in snapshot.store_values and told[key] not in (0, snapshot.get_revision(key))]


def _build_final_values(db: Database, batch: PfsBatch, found: FoundByName, keys: Iterable[SharedKey]) -> dict[SharedKey, bytes | None]:
    """What the rows will say when the batch is finished."""
    values: dict[SharedKey, bytes | None] = {}
    try:
        with db.transaction():
            pfs_batch.record_batch_done(db, batch, found)
            values = {key: kinds.encode_value(kinds.get_value(db, key)) for key in keys}
            raise _RolledBack
    except _RolledBack:
        return values


def resolve_abandoned_intent(store: Store, key: SharedKey, cached: CachedValue, found: int | None) -> None:
    """Settle the intention of a node that is gone: the PFS shows a thing of the number `found` under that name, None for nothing."""
    value = cached.fields or {}
    if key.kind == PFS_STATE:
        _clear_pfs_state_intent(store, key, cached)
        return
    before, after = value.get("inode", 0), value.get("next", 0)
    name = [key.number, key.name.decode("latin-1")]
    done = found == (value.get("ino") if after else None)
    shows = after if done else before
    changes: list[Operation] = [
        Put(kinds.encode_key(key), kinds.encode_fields({"inode": shows})) if shows else Delete(kinds.encode_key(key))
    ]
    compares = [Compare(kinds.encode_key(key), CompareTarget.MOD, "=", cached.revision)]
    subjects = [SharedKey(PFS_STATE, inode) for inode in sorted({before, after} - {0})]
    for subject, one in reading.parse_outcome(subjects, store.read(reading.build_gets(subjects))).items():
        now = _strip_intent(one.value.fields or {"names": []})
        now["names"] = sorted([*(other for other in now["names"] if other != name), *([name] if subject.number == shows else [])])
        if done and subject.number == after and "published" in value:
            now["published"] = value["published"]
        wire = kinds.encode_key(subject)
        changes.append(Put(wire, kinds.encode_fields(now)) if now["names"] else Delete(wire))
        compares.append(Compare(wire, CompareTarget.MOD, "=", one.value.revision))
    store.commit(compares, changes)


def _clear_pfs_state_intent(store: Store, key: SharedKey, cached: CachedValue) -> None:
    """What the PFS shows of an inode was in the hands of a node that is gone; of its names each is decided by itself."""
    value, wire = _strip_intent(cached.fields or {"names": []}), kinds.encode_key(key)
    change: Operation = Put(wire, kinds.encode_fields(value)) if value["names"] else Delete(wire)
    store.commit([Compare(wire, CompareTarget.MOD, "=", cached.revision)], [change])


def _strip_intent(value: Value) -> Value:
    return {name: held for name, held in value.items() if name not in {"by", "of", "batch"}}
