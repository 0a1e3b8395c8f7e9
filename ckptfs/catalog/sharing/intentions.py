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
from ckptfs.catalog.pfs_batch import Batch, Found
from ckptfs.catalog.sharing import kinds, reading, seen
from ckptfs.catalog.sharing.kinds import INODE, NAME, PLACE, SHOWN, Key, Value
from ckptfs.catalog.sharing.seen import Seen
from ckptfs.catalog.sharing.truth import Name, Truth
from ckptfs.catalog.store import Compare, Delete, Operation, Put, Store, Target
from ckptfs.errors import Busy

FoundAt = dict[Name, Found | None]


class _Undone(Exception):
    """What was tried is taken back."""


def places(batch: Batch) -> list[Key]:
    """The names that a batch changes."""
    return [Key(PLACE, show.at.parent, show.at.name) for show in batch.shows]


def _subjects(db: Database, batch: Batch) -> set[int]:
    """Of what it changes what the PFS shows of them."""
    now = {show.inode for show in batch.shows if show.inode is not None} | {row.inode for row in batch.published} | set(batch.restamped)
    before = {db.value("SELECT inode FROM pfs_entry WHERE parent = ? AND name = ?", key.number, key.name) for key in places(batch)}
    return {inode for inode in now | before if inode}


def announce(db: Database, store: Store, truth: Truth, batch: Batch, instance: str) -> None:
    """Say what is about to be done. Raises Busy when something that it was planned on is not so any more, and Unreachable."""
    keys = [*places(batch), *(Key(SHOWN, inode) for inode in sorted(_subjects(db, batch)))]
    compares = [_unchanged(truth, key) for key in keys]
    for show in batch.shows:
        if show.inode is not None and truth.child((show.at.parent, show.at.name)) == show.inode:
            compares.append(_unchanged(truth, Key(NAME, show.at.parent, show.at.name)))
    mine = {"by": identity.number(db), "of": instance, "batch": batch.last}
    values = {key: _intention(db, batch, key) | mine if key.kind == PLACE else (truth.value(key) or {"names": []}) | mine for key in keys}
    changes = [Put(kinds.wire(key), kinds.packed(value)) for key, value in values.items()]
    outcome = store.commit(compares, changes, reading.gets(keys))
    if outcome.succeeded:
        revisions = dict.fromkeys(keys, outcome.revision)
    else:
        told = reading.answers(keys, outcome)
        if not all(told[key].seen.content == values[key] for key in keys) or not keys:
            raise Busy("another node has changed what this was planned on")
        revisions = {key: told[key].seen.revision for key in keys}
    with db.change():
        for key, value in values.items():
            seen.put(db, key, Seen(revisions[key], kinds.pack(value)))


def _unchanged(truth: Truth, key: Key) -> Compare:
    return Compare(kinds.wire(key), Target.MOD, "=", truth.revision(key))


def _intention(db: Database, batch: Batch, key: Key) -> Value:
    show = next(show for show in batch.shows if (show.at.parent, show.at.name) == (key.number, key.name))
    value = kinds.read(db, key) or {"inode": 0}
    if show.inode is not None:
        value |= {"next": show.inode, "ino": show.mark.ino}
        row = next((row for row in batch.published if row.inode == show.inode), None)
        if row is not None:
            digest = None if row.digest is None else row.digest.hex()
            value["published"] = [row.generation, row.complete, row.size, row.mtime_ns, row.pfs_inode, digest]
    return value


def standing(store: Store, batch: Batch, number: int, instance: str) -> dict[Key, Seen] | None:
    """The intentions of a batch that is in hand, if the store has them all; None: it never was announced, or was settled, or taken away."""
    keys = places(batch)
    if not keys:
        return {}
    told = reading.answers(keys, store.read(reading.gets(keys)))
    for key in keys:
        value = told[key].seen.content or {}
        if (value.get("by"), value.get("of"), value.get("batch")) != (number, instance, batch.last):
            return None
    return {key: told[key].seen for key in keys}


def settle(db: Database, store: Store, batch: Batch, found: FoundAt, truth: Truth | None) -> list[int]:
    """Say what the PFS shows now, here and in the store; inodes whose attributes have changed meanwhile. Raises Busy when another node
    has settled it, taking this one for dead, and Unreachable.
    """
    subjects = _subjects(db, batch) | set(pfs_batch.unfinished(batch, found))
    keys = [*places(batch), *(Key(SHOWN, inode) for inode in sorted(subjects))]
    values = _afterwards(db, batch, found, keys)
    changes: list[Operation] = []
    for key, value in values.items():
        changes.append(Delete(kinds.wire(key)) if value is None else Put(kinds.wire(key), value))
    compares = [Compare(kinds.wire(key), Target.MOD, "=", seen.get(db, key).revision) for key in places(batch)]
    attributes = [Key(INODE, inode) for inode in sorted(subjects)]
    outcome = store.commit(compares, [*changes, *reading.gets(attributes)], reading.gets(keys))
    if outcome.succeeded:
        revision, items = outcome.revision, outcome.results
    elif all(one.seen.value == values[key] for key, one in reading.answers(keys, outcome).items()):
        revision, items = outcome.revision, ()
    else:
        raise Busy("this node was taken for dead, and another one settled what it had in hand")
    with db.change():
        pfs_batch.finish(db, batch, found)
        for key, value in values.items():
            seen.put(db, key, Seen(revision, value))
    if truth is None or not items:
        return sorted(subjects)
    told = {key: (one[0].mod_revision if one else 0) for key, one in zip(attributes, items, strict=True)}
    return [key.number for key in attributes if key in truth.told and told[key] not in (0, truth.revision(key))]


def _afterwards(db: Database, batch: Batch, found: FoundAt, keys: Iterable[Key]) -> dict[Key, bytes | None]:
    """What the rows will say when the batch is finished."""
    values: dict[Key, bytes | None] = {}
    try:
        with db.change():
            pfs_batch.finish(db, batch, found)
            values = {key: kinds.pack(kinds.read(db, key)) for key in keys}
            raise _Undone
    except _Undone:
        return values


def decide(store: Store, key: Key, told: Seen, found: int | None) -> None:
    """Settle the intention of a node that is gone: the PFS shows a thing of the number `found` under that name, None for nothing."""
    value = told.content or {}
    if key.kind == SHOWN:
        _release(store, key, told)
        return
    before, after = value.get("inode", 0), value.get("next", 0)
    name = [key.number, key.name.decode("latin-1")]
    done = found == (value.get("ino") if after else None)
    shows = after if done else before
    changes: list[Operation] = [Put(kinds.wire(key), kinds.packed({"inode": shows})) if shows else Delete(kinds.wire(key))]
    compares = [Compare(kinds.wire(key), Target.MOD, "=", told.revision)]
    subjects = [Key(SHOWN, inode) for inode in sorted({before, after} - {0})]
    for subject, one in reading.answers(subjects, store.read(reading.gets(subjects))).items():
        now = _plain(one.seen.content or {"names": []})
        now["names"] = sorted([*(other for other in now["names"] if other != name), *([name] if subject.number == shows else [])])
        if done and subject.number == after and "published" in value:
            now["published"] = value["published"]
        wire = kinds.wire(subject)
        changes.append(Put(wire, kinds.packed(now)) if now["names"] else Delete(wire))
        compares.append(Compare(wire, Target.MOD, "=", one.seen.revision))
    store.commit(compares, changes)


def _release(store: Store, key: Key, told: Seen) -> None:
    """What the PFS shows of an inode was in the hands of a node that is gone; of its names each is decided by itself."""
    value, wire = _plain(told.content or {"names": []}), kinds.wire(key)
    change: Operation = Put(wire, kinds.packed(value)) if value["names"] else Delete(wire)
    store.commit([Compare(wire, Target.MOD, "=", told.revision)], [change])


def _plain(value: Value) -> Value:
    return {name: held for name, held in value.items() if name not in {"by", "of", "batch"}}
