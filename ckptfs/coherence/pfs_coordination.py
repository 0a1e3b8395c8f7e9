"""Write-back and scans of several nodes on one PFS.

- `StoreSnapshot` loads what the store says of the names and inodes in journal rows, and of what the PFS shows of them. What later
  transactions rest on is compared with its revisions.
- A batch is announced before the PFS is touched, and settled when the PFS shows it. An intent under `x/` names the node that changes a
  name and each state that it will show in turn; one under `f/`, the node that adds or removes names of an inode, and these names, also
  temporary ones. So two nodes never change one name. The intent of a dead node is resolved by the node that needs the name or the inode,
  from what the PFS shows; that of an inode ends with the last of its names.
- A scan reads the store after the PFS listing, so it knows of every entry that another node made or is about to make.

Crash safety: a batch is in the catalog and its intents are in the store; the next mover finds out how far it came.
"""

import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from ckptfs import limits
from ckptfs.catalog import identity, journal, pfs_batch, pfs_state
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import find_child_id, list_names
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import ObservedNames, ObservedStat, PfsBatch
from ckptfs.catalog.pfs_state import ExpectedEntry, PfsName
from ckptfs.coherence import key_state, keys, read, store_loss
from ckptfs.coherence.key_state import CachedValue
from ckptfs.coherence.keys import CONTENT, INODE, JOURNAL_ROW, NAME, PFS_NAME, PFS_STATE, TIMES, SharedKey, Value, encode_key
from ckptfs.coherence.read import RecentDeletes, StoreValue
from ckptfs.coherence.value_checks import UNREADABLE, decode_item, parse_key, parse_value
from ckptfs.errors import Busy
from ckptfs.lifecycle import is_same_file
from ckptfs.model import ROOT
from ckptfs.store.kv import Compare, CompareTarget, Delete, Operation, Put, Transactions, iter_pages, read_all

ROUNDS_MAX = 64


def list_published_rows(db: Database, instance: str, rows: list[JournalRow]) -> list[JournalRow]:
    """Return the rows before the first unpublished one, which may still be undone."""
    return [*takewhile(lambda row: not key_state.is_dirty(db, build_row_key(db, instance, row)), rows)]


def build_row_key(db: Database, instance: str, row: JournalRow) -> SharedKey:
    """Return the key of a row of this node's journal."""
    return SharedKey(JOURNAL_ROW, identity.get_node_number(db), keys.build_row_name(instance, row.seq))


def load_inodes(db: Database, store: Transactions, *inodes: int) -> "StoreSnapshot":
    """Record these inodes and what the PFS shows of them; return what the store says.

    Raises as `StoreSnapshot.load`.
    """
    snapshot = StoreSnapshot(db, store)
    snapshot.load(journal.get_instance_id(db), inodes=inodes)
    return snapshot


class NotLoaded(Busy):
    """The rows of this inode were not read; they have to be read, too."""

    def __init__(self, inode: int) -> None:
        super().__init__(f"inode {inode} has to do with it")
        self.inode = inode


class StoreSnapshot:
    """The state of the store. `load` reads it; a question beyond that raises NotLoaded."""

    def __init__(self, db: Database, store: Transactions) -> None:
        self._db = db
        self._store = store
        self.store_values: dict[SharedKey, StoreValue] = {}
        self._directory_names: dict[int, PfsName | None] = {}
        self._pfs_names: dict[int, list[PfsName]] = {}
        self._named_elsewhere: set[tuple[int, PfsName]] | None = None
        self._guessed: dict[SharedKey, StoreValue] = {}
        self._is_loading = self._is_guessing = False

    def load(self, instance: str, rows: Iterable[JournalRow] = (), inodes: Iterable[int] = ()) -> None:
        """Read all that these rows and inodes lead to. Raises StoreUnreachable, and Busy if it keeps changing."""
        rows, inodes = list(rows), list(inodes)
        self._is_loading = self._is_guessing = True
        try:
            # What the catalog knows leads to most keys at once. Of these, `store_values` gets what is needed by what the store says.
            guessed = list(dict.fromkeys(self._list_needed_keys(instance, rows, inodes)))
            self._is_guessing = False
            self._guessed = self._read(guessed)
            for _ in range(ROUNDS_MAX):
                wanted = dict.fromkeys(self._list_needed_keys(instance, rows, inodes))
                missing = [key for key in wanted if key not in self.store_values]
                if not missing:
                    self._require_consistent()
                    return self._require_published()
                found = self._read(missing)
                self.store_values |= found
                self._apply_to_catalog(found)
        finally:
            self._is_loading = self._is_guessing = False
        raise Busy("what is to be written back moves about")

    def _read(self, wanted: list[SharedKey]) -> dict[SharedKey, StoreValue]:
        """Return what the store says of these keys, or of those among them that were read already."""
        known = {key: self._guessed[key] for key in wanted if key in self._guessed}
        return known or read.load_values(self._store, wanted)

    def _require_consistent(self) -> None:
        """Raise Busy if a node changed between two reads under which names the PFS shows an inode."""
        for key, one in self.store_values.items():
            for name in self.list_pfs_names(key.number) if key.kind == PFS_STATE else ():
                place = self.store_values.get(SharedKey(PFS_NAME, *name), one)
                if place.read_revision != one.read_revision and (place.value.fields or {}).get("inode") != key.number:
                    raise Busy("what the PFS shows was changed between two reads")

    def _require_published(self) -> None:
        """Raise Busy if this node has unpublished changes of PFS state that other nodes changed, too."""
        for key, one in self.store_values.items():
            if key.kind in {PFS_STATE, PFS_NAME} and one.value.raw != UNREADABLE and _is_unknown(self._db, key, one):
                raise Busy("what the PFS shows is being told to the other nodes")

    def _apply_to_catalog(self, found: dict[SharedKey, StoreValue]) -> None:
        known = {PFS_STATE, PFS_NAME}
        taken = {key: one for key, one in found.items() if key.kind in known or (key.kind in {INODE, TIMES, CONTENT} and one.value.raw)}
        read.apply_values(self._db, taken, RecentDeletes())

    # --- what is needed -----------------------------------------------------------------------------------------------

    def _list_needed_keys(self, instance: str, rows: list[JournalRow], inodes: list[int]) -> Iterator[SharedKey]:
        names: set[PfsName] = set()
        subjects = set(inodes)
        for row in rows:
            yield build_row_key(self._db, instance, row)
            subjects.add(row.inode)
            names.update(row.names)
            if row.content is not None:
                yield SharedKey(CONTENT, row.content)
        for _ in range(2):  # The inode of a name, and the directory that it belongs to.
            names.update(name for inode in subjects for name in self._list_all_names(inode))
            subjects |= {inode for name in names for inode in (self.get_child(name), self.get_pfs_inode(name)) if inode}
            names.update(name for inode in subjects if self._is_deleted_directory_on_pfs(inode) for name in self.list_pfs_names_in(inode))
        for name in names:
            yield SharedKey(NAME, *name)
            yield SharedKey(PFS_NAME, *name)
        for inode in subjects:
            yield SharedKey(INODE, inode)
            yield SharedKey(PFS_STATE, inode)
        for inode in inodes:
            yield SharedKey(TIMES, inode)
        yield from self._list_ancestor_keys({parent for parent, _ in names})

    def _is_deleted_directory_on_pfs(self, inode: int) -> bool:
        """Return whether the PFS still shows a deleted directory, whose entries there go first."""
        seen = (self.get_value(SharedKey(PFS_STATE, inode)) or {}).get("seen")
        return seen is not None and stat.S_ISDIR(seen[1]) and SharedKey(INODE, inode) in self.store_values and not self.is_alive(inode)

    def _list_ancestor_keys(self, directories: set[int]) -> Iterator[SharedKey]:
        """Return the keys that place directories in the tree and on the PFS, up to the root."""
        done: set[int] = set()
        while directories:
            directory = directories.pop()
            done.add(directory)
            yield SharedKey(INODE, directory)
            yield SharedKey(PFS_STATE, directory)
            for name in self._list_all_names(directory):
                yield SharedKey(NAME, *name)
                yield SharedKey(PFS_NAME, *name)
                directories |= {name[0]} - done

    # --- what it says -------------------------------------------------------------------------------------------------

    def list_pfs_names_in(self, directory: int) -> list[PfsName]:
        """Return the names that the PFS shows in a directory, or is about to show."""
        if directory not in self._pfs_names:
            _, items = read_all(self._store, encode_key(SharedKey(PFS_NAME, directory)), keys_only=True)
            found = [parse_key(item.key) for item in items]
            self._pfs_names[directory] = [(directory, key.name) for key in found if key is not None]
        return self._pfs_names[directory]

    def is_named_elsewhere(self, inode: int, name: PfsName) -> bool:
        """Return whether a row of another node is about this inode and name. Reads all rows, once."""
        if self._named_elsewhere is None:
            own = encode_key(SharedKey(JOURNAL_ROW, identity.get_node_number(self._db)))
            _, items = read_all(self._store, JOURNAL_ROW.encode() + b"/")
            rows = [keys.parse_row(value, 0) for item in items if not item.key.startswith(own) and (value := decode_item(item)) is not None]
            self._named_elsewhere = {(row.inode, one) for row in rows for one in row.names}
        return (inode, name) in self._named_elsewhere

    def get_value(self, key: SharedKey) -> Value | None:
        """Return the value of a key. Returns None if it is missing or was not read."""
        one = self.store_values.get(key)
        if one is None and self._is_guessing:
            return keys.get_value(self._db, key)
        if one is None and key.kind in {INODE, PFS_STATE} and not self._is_loading:
            raise NotLoaded(key.number)
        return None if one is None else one.value.fields

    def get_revision(self, key: SharedKey) -> int:
        """Return the revision of a key; 0 if it is missing."""
        one = self.store_values.get(key)
        return 0 if one is None else one.value.revision

    def require_loaded(self, inode: int) -> None:
        """Raise NotLoaded unless an inode and its names were read."""
        if any(SharedKey(PFS_NAME, *name) not in self.store_values for name in (*self.list_names(inode), *self.list_pfs_names(inode))):
            raise NotLoaded(inode)

    def is_alive(self, inode: int) -> bool:
        """Return whether an inode has a name."""
        return inode == ROOT or self.get_value(SharedKey(INODE, inode)) is not None

    def get_child(self, name: PfsName) -> int | None:
        """Return the inode that a name leads to."""
        value = self.get_value(SharedKey(NAME, *name))
        return None if value is None else int(value["child"])

    def get_pfs_inode(self, name: PfsName) -> int | None:
        """Return the inode that the PFS shows under a name."""
        value = self.get_value(SharedKey(PFS_NAME, *name))
        return None if value is None else value["inode"] or None

    def get_intent(self, name: PfsName) -> Value | None:
        """Return the intent of a node to change a name on the PFS."""
        value = self.get_value(SharedKey(PFS_NAME, *name))
        return value if value is not None and "by" in value else None

    def has_intent(self, inode: int) -> bool:
        """Return whether a node is about to change what the PFS shows of an inode."""
        return "by" in (self.get_value(SharedKey(PFS_STATE, inode)) or {})

    def list_intents(self) -> list[tuple[SharedKey, int]]:
        """Return all intents that were read: (name or inode, node)."""
        values = [(key, one.value.fields or {}) for key, one in self.store_values.items() if key.kind in {PFS_NAME, PFS_STATE}]
        return [(key, int(value["by"])) for key, value in values if "by" in value]

    def list_names(self, inode: int) -> list[PfsName]:
        """Return all names of an inode."""
        value = self.get_value(SharedKey(INODE, inode))
        if value is None or inode == ROOT:
            return []
        if "names" in value:
            return keys.decode_names(value["names"])
        name = self._get_directory_name(inode, value["parent"])
        return [] if name is None else [name]

    def list_pfs_names(self, inode: int) -> list[PfsName]:
        """Return the names under which the PFS shows an inode."""
        value = self.get_value(SharedKey(PFS_STATE, inode))
        return [] if value is None else keys.decode_names(value["names"])

    def _list_all_names(self, inode: int) -> list[PfsName]:
        """Return the names of an inode in the tree, on the PFS, and in the batch of a node that changes them."""
        value = self.get_value(SharedKey(PFS_STATE, inode)) or {}
        return [*self.list_names(inode), *self.list_pfs_names(inode), *keys.decode_names(value.get("changing", ()))]

    def get_writer(self, content: int) -> int:
        """Return the node that wrote a content last; 0 if the store knows none."""
        value = self.get_value(SharedKey(CONTENT, content))
        return 0 if value is None else int(value["node"])

    def get_content_id(self, inode: int) -> int | None:
        """Return the content that a file has now."""
        value = self.get_value(SharedKey(INODE, inode))
        return None if value is None else value.get("content")

    def _get_directory_name(self, directory: int, parent: int) -> PfsName | None:
        """Return a directory's name in its parent: the remembered one, or search for it."""
        if self._is_guessing:
            return next(iter(list_names(self._db, directory)), None)
        if directory not in self._directory_names or (name := self._directory_names[directory]) is None or name[0] != parent:
            self._directory_names[directory] = self._find_directory_name(directory, parent)
        return self._directory_names[directory]

    def _find_directory_name(self, directory: int, parent: int) -> PfsName | None:
        rows = self._db.rows("SELECT name FROM entry WHERE parent = ? AND child = ?", parent, directory)
        for (name,) in [*rows, *((key.name,) for key in self.store_values if key.kind == NAME and key.number == parent)]:
            key = SharedKey(NAME, parent, bytes(name))
            if key not in self.store_values:
                self.store_values |= self._read([key])
            if self.get_child((parent, key.name)) == directory:
                return parent, key.name
        for item in (item for _, items in iter_pages(self._store, keys.build_names_prefix(parent)) for item in items):
            named = parse_key(item.key)
            if named is not None and (keys.decode_value(parse_value(named, item)) or {"child": 0})["child"] == directory:
                return parent, named.name
        return None


class _RolledBack(Exception):
    """The attempt was rolled back."""


def list_pfs_name_keys(batch: PfsBatch) -> list[SharedKey]:
    """Return the names that a batch changes."""
    shows = [*batch.expected_entries, *batch.abandoned_entries]
    return list(dict.fromkeys(SharedKey(PFS_NAME, show.location.parent, show.location.name) for show in shows))


def _list_subjects(db: Database, batch: PfsBatch) -> set[int]:
    """Return the inodes whose state on the PFS a batch changes."""
    now = (
        {show.inode for show in [*batch.name_changes, *batch.abandoned_entries] if show.inode is not None}
        | {row.inode for row in batch.published_rows}
        | set(batch.inodes_with_set_attributes)
    )
    before = {pfs_state.find_shown(db, key.number, key.name) for key in list_pfs_name_keys(batch)}
    return {inode for inode in now | before if inode}


def publish_intents(db: Database, store: Transactions, snapshot: StoreSnapshot, batch: PfsBatch, instance: str) -> None:
    """Announce a batch. Raises Busy if something that its plan rests on changed, and StoreUnreachable."""
    subjects = [*list_pfs_name_keys(batch), *(SharedKey(PFS_STATE, inode) for inode in sorted(_list_subjects(db, batch)))]
    compares = [_build_unchanged_compare(snapshot, key) for key in subjects]
    for show in batch.expected_entries:
        if show.inode is not None and snapshot.get_child((show.location.parent, show.location.name)) == show.inode:
            compares.append(_build_unchanged_compare(snapshot, SharedKey(NAME, show.location.parent, show.location.name)))
    mine = {"by": identity.get_node_number(db), "of": instance, "batch": batch.last_seq}
    values = {
        key: (_build_intent(db, batch, key) if key.kind == PFS_NAME else _build_inode_intent(snapshot, batch, key)) | mine
        for key in subjects
    }
    changes = [Put(encode_key(key), keys.encode_fields(value)) for key, value in values.items()]
    outcome = store.commit(compares, changes, read.build_gets(subjects))
    if outcome.succeeded:
        revisions = dict.fromkeys(subjects, outcome.revision)
    else:
        told = read.parse_outcome(subjects, outcome)
        if not all(told[key].value.fields == values[key] for key in subjects) or not subjects:
            raise Busy("another node has changed what this was planned on")
        revisions = {key: told[key].value.revision for key in subjects}
    with db.transaction():
        for key, value in values.items():
            key_state.set_cached(db, key, CachedValue(revisions[key], keys.encode_value(value)))


def _build_unchanged_compare(snapshot: StoreSnapshot, key: SharedKey) -> Compare:
    return Compare(encode_key(key), CompareTarget.MOD, "=", snapshot.get_revision(key))


def _build_intent(db: Database, batch: PfsBatch, key: SharedKey) -> Value:
    """Return the intent for a name: what it shows now, after the batch (`next`), and between (`passes`)."""
    *passed, last = [_build_step(db, batch, change) for change in batch.name_changes if change.location.pfs_name == (key.number, key.name)]
    value = (keys.get_value(db, key) or {"inode": 0}) | {"temporary": _list_temporaries(batch, key)}
    if last[0]:
        value |= {"next": last[0], "ino": last[1]} | ({"published": last[2]} if last[2] else {})
    return value | ({"passes": passed} if passed else {})


def _build_inode_intent(snapshot: StoreSnapshot, batch: PfsBatch, key: SharedKey) -> Value:
    """Return the intent for an inode: its state on the PFS now, and its names that the batch changes."""
    before = snapshot.list_pfs_names(key.number)
    changes = [(change.location.pfs_name, change.inode) for change in batch.name_changes]
    names = sorted({name for name, inode in changes if inode == key.number or name in before})
    value = snapshot.get_value(key) or {"names": []}
    return value | {"changing": [[parent, name.decode("latin-1")] for parent, name in names]}


def _build_step(db: Database, batch: PfsBatch, change: ExpectedEntry) -> list[Any]:
    """Return what a name shows after a change: [inode or 0, st_ino, published bytes or None]."""
    if change.inode is None:
        return [0, 0, None]
    ino = change.fingerprint.ino
    rows = (row for row in batch.published_rows if (row.inode, row.pfs_inode) == (change.inode, ino))
    row = next(rows, None) or pfs_state.get_published(db, change.inode)
    digest = None if row is None or row.digest is None else row.digest.hex()
    return [change.inode, ino, row and [row.generation, row.is_complete, row.size, row.mtime_ns, row.pfs_inode, digest]]


def _list_temporaries(batch: PfsBatch, key: SharedKey) -> list[str]:
    """Return the temporary names for this name. Once they are removed, no late rename can land."""
    made = [action for action in batch.actions if action.act in {"put", "link", "move"}]
    return [action.temporary.decode("latin-1") for action in made if action.target.pfs_name == (key.number, key.name)]


def resume_intents(db: Database, store: Transactions, batch: PfsBatch, instance: str) -> bool:
    """Record the intents of an interrupted batch.

    Return False if it was never announced, or another node has resolved it.
    """
    names, mine = list_pfs_name_keys(batch), (identity.get_node_number(db), instance, batch.announced_seq or batch.last_seq)
    told = read.load_values(store, names)
    for one in told.values():
        value = one.value.fields or {}
        if (value.get("by"), value.get("of"), value.get("batch")) != mine:
            return False
    with db.transaction():
        for key, one in told.items():
            key_state.set_cached(db, key, one.value)
    return True


def complete_intents(db: Database, store: Transactions, batch: PfsBatch, found: ObservedNames, snapshot: StoreSnapshot) -> list[int]:
    """Record what the PFS shows. Return inodes with newer attributes. Raises Busy if taken for dead."""
    subjects = _list_subjects(db, batch) | set(pfs_batch.list_unfinished(batch, found))
    changed = [*list_pfs_name_keys(batch), *(SharedKey(PFS_STATE, inode) for inode in sorted(subjects))]
    values = _build_final_values(db, batch, found, changed)
    changes = [Delete(encode_key(key)) if value is None else Put(encode_key(key), value) for key, value in values.items()]
    names = [key for key in changed if key.kind == PFS_NAME]
    compares = [Compare(encode_key(key), CompareTarget.MOD, "=", key_state.get_cached(db, key).revision) for key in names]
    attributes = [SharedKey(INODE, inode) for inode in sorted(subjects)]
    outcome = store.commit(compares, [*changes, *read.build_gets(attributes)], read.build_gets(changed))
    if outcome.succeeded:
        revision, items = outcome.revision, outcome.results
    elif all(one.value.raw == values[key] for key, one in read.parse_outcome(changed, outcome).items()):
        revision, items = outcome.revision, ()
    else:
        raise Busy("this node was taken for dead, and another one settled what it had in hand")
    with db.transaction():
        pfs_batch.record_batch_done(db, batch, found)
        for key, value in values.items():
            key_state.set_cached(db, key, CachedValue(revision, value))
        published = [key for key, value in values.items() if keys.encode_value(keys.get_value(db, key)) == value]
        key_state.mark_clean(db, published, key_state.get_last_change(db))
    if not items:
        return sorted(subjects)
    told = {key: (one[0].mod_revision if one else 0) for key, one in zip(attributes, items, strict=True)}
    return [key.number for key in attributes if key in snapshot.store_values and told[key] not in (0, snapshot.get_revision(key))]


def _build_final_values(db: Database, batch: PfsBatch, found: ObservedNames, wanted: Iterable[SharedKey]) -> dict[SharedKey, bytes | None]:
    """Return the values of these keys after the batch."""
    values: dict[SharedKey, bytes | None] = {}
    try:
        with db.transaction():
            pfs_batch.record_batch_done(db, batch, found)
            values = {key: keys.encode_value(keys.get_value(db, key)) for key in wanted}
            raise _RolledBack
    except _RolledBack:
        return values


def resolve_abandoned_intent(store: Transactions, key: SharedKey, cached: CachedValue, found: ObservedStat | None) -> None:
    """Resolve the intent of a dead node. `found`: what the PFS shows under that name, None for nothing."""
    intent = cached.fields or {}
    if key.kind == PFS_STATE:
        states, told = {key.number: _strip_intent(cached.fields or {"names": []})}, {key: cached}
        changes: list[Operation] = []
    else:
        subjects = [SharedKey(PFS_STATE, inode) for inode in sorted(list_intent_inodes(key, intent))]
        read_values = read.load_values(store, subjects)
        told = {key: cached} | {subject: one.value for subject, one in read_values.items()}
        before = {subject.number: one.value.fields or {"names": []} for subject, one in read_values.items()}
        shows, states = choose_outcome((key.number, key.name), intent, before, found)
        changes = [Put(encode_key(key), keys.encode_fields({"inode": shows})) if shows else Delete(encode_key(key))]
    for inode, state in states.items():
        wire = encode_key(SharedKey(PFS_STATE, inode))
        changes.append(Put(wire, keys.encode_fields(state)) if state["names"] or "by" in state else Delete(wire))
    store.commit([Compare(encode_key(one), CompareTarget.MOD, "=", value.revision) for one, value in told.items()], changes)


def choose_outcome(name: PfsName, intent: Value, states: Mapping[int, Value], found: ObservedStat | None) -> tuple[int, dict[int, Value]]:
    """Return what a name shows after the intent of a dead node, and the new `states`. Pure.

    The inode is 0 if the name shows none. The PFS shows which of the announced steps was the last: the one whose inode has the st_ino that
    is found. If none has, or it is that of the inode that was there before, nothing was done. Without lasting numbers, size and time tell.
    """
    before, shared_name = intent.get("inode", 0), [name[0], name[1].decode("latin-1")]
    done = next((step for step in reversed(_list_steps(intent)) if _is_shown(step, found)), None)
    former = states.get(before, {})
    is_done = done is not None and (found is None or not _is_shown([before, _get_ino(former), former.get("published")], found))
    shows, _, published = done if done is not None and is_done else (before, 0, None)
    outcome: dict[int, Value] = {}
    for inode, state in states.items():
        left = [other for other in state.get("changing", ()) if other != shared_name]
        now = outcome[inode] = state | {"changing": left} if left else _strip_intent(state)
        now["names"] = sorted([*(other for other in now["names"] if other != shared_name), *([shared_name] if inode == shows else [])])
        if inode == shows and published:
            now["published"] = published
        if inode == shows and found is not None and (is_done or found.ino == _get_ino(now)):
            now |= _build_observed(now, found)
    return shows, outcome


def list_intent_inodes(key: SharedKey, intent: Value) -> set[int]:
    """Return the inodes that an intent is about."""
    shown = {intent.get("inode", 0), *(inode for inode, _, _ in _list_steps(intent))} - {0}
    return shown if key.kind == PFS_NAME else {key.number}


def _list_steps(intent: Value) -> list[list[Any]]:
    """Return what a name shows after each change of an intent, as `_build_step` does."""
    return [*intent.get("passes", ()), [intent.get("next", 0), intent.get("ino", 0), intent.get("published")]]


def _is_shown(step: list[Any], found: ObservedStat | None) -> bool:
    """Return True if the PFS shows what a step leads to."""
    inode, ino, published = step
    if found is None or not inode:
        return found is None and not inode
    if found.ino or ino:
        return bool(ino == found.ino)
    return published is not None and is_same_file((published[2], published[3], ino), (found.size, found.mtime_ns, found.ino))


def _get_ino(state: Value) -> int | None:
    """Return the st_ino of what the PFS shows of an inode. Returns None if it is not known."""
    ino: int | None = state["published"][4] if "published" in state else (state.get("seen") or [None])[0]
    return ino


def _build_observed(state: Value, found: ObservedStat) -> Value:
    """Return the changes of a state by what the PFS shows.

    The dead node may have set attributes of the same file.
    """
    changes: Value = {"seen": [found.ino, found.mode, found.uid, found.gid]}
    if "published" in state and (state["published"][2], state["published"][4]) == (found.size, found.ino):
        changes["published"] = [*state["published"][:3], found.mtime_ns, *state["published"][4:]]
    return changes


def _strip_intent(value: Value) -> Value:
    return keys.omit_fields(value, "by", "of", "batch", "changing")


def load_names(db: Database, store: Transactions, directory: int) -> None:
    """Record the names in a directory that are new on this node, with what the PFS shows, or gone.

    Raises StoreUnreachable.
    """
    after: bytes | None = b""
    while after is not None:
        outcome = store.read([read.build_page_get(directory, after, limits.ETCD_PAGE_ITEMS)])
        names, after = read.parse_page(db, directory, after, limits.ETCD_PAGE_ITEMS, outcome)
        read.apply_values(db, {key: one for key, one in names.items() if one.value.raw is None}, RecentDeletes())
        shown = [SharedKey(PFS_NAME, directory, key.name) for key, one in names.items() if one.value.raw is not None]
        refresh_names(db, store, directory, [key.name for key in shown if not key_state.get_cached(db, key).revision])


def refresh_names(db: Database, store: Transactions, directory: int, names: Sequence[bytes]) -> set[bytes]:
    """Record names of a directory. Return those that other nodes change. Raises StoreUnreachable."""
    store_loss.require_adopted(db)
    left: set[bytes] = set()
    for start in range(0, len(names), limits.ETCD_OPERATIONS_MAX // 2):
        left |= _refresh_batch(db, store, directory, names[start : start + limits.ETCD_OPERATIONS_MAX // 2])
    return left


def _refresh_batch(db: Database, store: Transactions, directory: int, names: Sequence[bytes]) -> set[bytes]:
    wanted = [SharedKey(kind, directory, name) for name in names for kind in (NAME, PFS_NAME)]
    told = read.load_values(store, wanted)
    subjects = {value["child"] for key in wanted if key.kind == NAME and (value := told[key].value.fields)}
    subjects |= {value["inode"] for key in wanted if key.kind == PFS_NAME and (value := told[key].value.fields)}
    told |= read.read_inodes(store, sorted(subjects - {0}))
    read.apply_values(
        db, {key: one for key, one in told.items() if key.kind in {PFS_NAME, PFS_STATE} or one.value.raw is not None}, RecentDeletes()
    )
    return {name for name in names if _is_changed_elsewhere(db, told, directory, name)}


def _is_changed_elsewhere(db: Database, store_values: dict[SharedKey, StoreValue], directory: int, name: bytes) -> bool:
    """Return True if another node is changing a name on the PFS, or did and this node does not know it."""
    named, place = SharedKey(NAME, directory, name), SharedKey(PFS_NAME, directory, name)
    here, shown = find_child_id(db, directory, name), pfs_state.find_shown(db, directory, name)
    child, inode = ((store_values[key].value.fields or {}).get(field) for key, field in ((named, "child"), (place, "inode")))
    if key_state.is_dirty(db, named) or (here, shown) != (child, inode) or (child is None and inode is not None):
        return True
    places = [place, *(SharedKey(PFS_STATE, one) for one in (child, inode) if one)]
    return any(_is_unknown(db, key, store_values[key]) or "by" in (store_values[key].value.fields or {}) for key in places)


def _is_unknown(db: Database, key: SharedKey, store_value: StoreValue) -> bool:
    """Return True if a value of the store was not applied, because this node has an unpublished change."""
    return key_state.get_cached(db, key).revision != store_value.value.revision
