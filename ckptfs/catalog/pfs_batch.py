"""The batch of changes that write-back applies to the PFS (table `pfs_batch`), and its results.

A batch holds changes as they were decided, for the journal rows after `after_seq` up to `last_seq`. It is stored before the PFS is changed.
Afterwards `record_batch_done` records what the PFS shows and deletes the rows and the batch, in the caller's transaction. If the PFS
refuses an action, `build_batch_before` returns the batch of those before it; the rows from the refused one on stay in the journal.

Crash safety: a batch exists together with all its journal rows, or neither does. The next mover finishes exactly that batch.
"""

import json
import os
import stat
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

from ckptfs import disk
from ckptfs.catalog import journal
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import can_recreate, insert_rows_for_tree
from ckptfs.catalog.pfs_state import NO_INODE, ExpectedEntry, Fingerprint, PfsLocation, PfsName, PlannedPending, find_shown, insert_entry
from ckptfs.errors import CatalogTooNew
from ckptfs.model import PublishedRow

KEYS_PER_ROW = 1 << 20
"""The key of an action is `seq * KEYS_PER_ROW` plus its number among the actions of the row `seq`."""


@dataclass(frozen=True, slots=True)
class PfsAction:
    """One change of the PFS.

    `act` is 'put' (rename `temporary` to `location`), 'link' (`location` also as `new_location`), 'move', 'exchange', 'unlink', 'rmdir',
    'remove' (either of the two) or 'attributes'.
    """

    act: str
    key: int
    inode: int
    location: PfsLocation
    fingerprint: Fingerprint  # That of the subject.
    new_location: PfsLocation | None = None
    replaced_fingerprint: Fingerprint | None = None  # That of the entry now at `location` (put) or `new_location` (others).
    temporary: bytes = b""

    @property
    def target(self) -> PfsLocation:
        """Return where the subject appears: `new_location`, or `location` of an act with one name."""
        return self.new_location or self.location


@dataclass(slots=True)
class PfsBatch:
    """Changes in order, and what each of them leads to. The names of its fields are stored in the catalog."""

    last_seq: int
    actions: list[PfsAction] = field(default_factory=list)
    published_rows: list[PublishedRow] = field(default_factory=list)
    requeued: list[tuple[int, int]] = field(default_factory=list)  # (inode, content) whose rows go to the end of the journal again.
    merged_directories: list[int] = field(default_factory=list)  # They were on the PFS already.
    after_seq: int = 0
    kept_seqs: list[int] = field(default_factory=list)  # Rows that stay in the journal, of files that the PFS refuses.
    lost_inodes: list[int] = field(default_factory=list)  # Files without a copy, which the PFS may show nevertheless.
    requeued_seqs: list[int] = field(default_factory=list)  # The rows of `requeued`.
    settle_rows: list[tuple[int, int]] = field(default_factory=list)  # (inode, row) of inodes that get a row 'settle'.
    name_changes: list[ExpectedEntry] = field(default_factory=list)  # What each name shows, and after which action.
    pending_changes: list[PlannedPending] = field(default_factory=list)  # What a name is to show later, and after which action.
    abandoned: list[PfsAction] = field(default_factory=list)  # Actions whose temporary files go: cut off, or older.
    abandoned_entries: list[ExpectedEntry] = field(default_factory=list)  # The names that the batch was to change.
    announced_seq: int = 0  # `last_seq` before the cut; 0 without one.

    @property
    def expected_entries(self) -> list[ExpectedEntry]:
        """Return what each name shows after the batch."""
        return list({change.location.pfs_name: change for change in self.name_changes}.values())

    @property
    def pending_entries(self) -> dict[PfsName, int | None]:
        """Return what each name is to show later."""
        return {change.name: change.inode for change in self.pending_changes}

    @property
    def inodes_with_set_attributes(self) -> list[int]:
        return [action.inode for action in self.actions if action.act == "attributes"]


@dataclass(frozen=True, slots=True)
class ObservedStat:
    """lstat of an entry after a batch, as far as `pfs_entry` and `pfs_file` keep it."""

    ino: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "ObservedStat":
        return cls(disk.get_lasting_ino(found), found.st_mode, found.st_uid, found.st_gid, found.st_size, found.st_mtime_ns)


ObservedNames = dict[PfsName, ObservedStat | None]
"""What the names of a batch show when it is done; None: another inode than the one that was meant, or nothing."""


def build_batch_before(batch: PfsBatch, refused_key: int, *, has_both_names: bool = False) -> PfsBatch:
    """Return the batch that ends before a refused action; of its row only what was done counts.

    `has_both_names`: a move has got as far as a link.
    """
    index = next(index for index, action in enumerate(batch.actions) if action.key == refused_key)
    seq = refused_key // KEYS_PER_ROW
    done_keys = {action.key for action in batch.actions[:index]}

    def counts(key: int) -> bool:
        return key in done_keys or key < seq * KEYS_PER_ROW

    # A name that still shows the previous bytes of a file needs a link to its new ones, and so does its row.
    unlinked = {
        one.inode for one in batch.actions[index:] if one.act == "link" and one.replaced_fingerprint and one.key // KEYS_PER_ROW == seq
    }

    def is_linked(change: ExpectedEntry) -> bool:
        return has_both_names and change.key == refused_key and change.inode is not None

    return replace(
        batch,
        last_seq=min(batch.last_seq, seq - 1),
        actions=batch.actions[:index],
        published_rows=[row for row in batch.published_rows if counts(row.key) and row.inode not in unlinked],
        name_changes=[change for change in batch.name_changes if counts(change.key) or is_linked(change)],
        pending_changes=[change for change in batch.pending_changes if counts(change.key)],
        settle_rows=[(inode, row) for inode, row in batch.settle_rows if row < seq],
        requeued=[one for one, row in zip(batch.requeued, batch.requeued_seqs, strict=True) if row < seq],
        requeued_seqs=[row for row in batch.requeued_seqs if row < seq],
        abandoned=[*batch.abandoned, *batch.actions[index:]],
        abandoned_entries=[*batch.abandoned_entries, *batch.expected_entries],
        announced_seq=batch.announced_seq or batch.last_seq,
    )


def set_batch(db: Database, batch: PfsBatch, *, ready: bool) -> None:
    """Store the batch that is being applied."""
    body = json.dumps({"version": _BATCH_VERSION, **_encode(batch)})
    db.change("INSERT OR REPLACE INTO pfs_batch (id, ready, body) VALUES (1, ?, ?)", ready, body)


def find_batch(db: Database) -> tuple[bool, PfsBatch] | None:
    """Return (ready, batch) of the batch that is being applied. Returns None if there is none."""
    row = db.row("SELECT ready, body FROM pfs_batch")
    return None if row is None else (bool(row[0]), _load_batch(row[1]))


def set_leftovers(db: Database, actions: list[PfsAction]) -> None:
    """Delete the batch, but for temporary files of these actions, which the PFS did not let go."""
    if actions:
        set_batch(db, PfsBatch(0, abandoned=actions), ready=False)
    else:
        db.change("DELETE FROM pfs_batch")


_BATCH_VERSION = 5


def _encode(value: Any) -> Any:
    """Return a value for JSON: the fields that are no defaults by name, bytes as strings of code points."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if is_dataclass(value):
        return {field.name: _encode(item) for field in fields(value) if (item := getattr(value, field.name)) != field.default}
    return value


def _decode(kind: Any, value: Any) -> Any:
    """Return the value of the type `kind` that `_encode` has encoded."""
    options = get_args(kind)
    if isinstance(kind, UnionType):
        return None if value is None else _decode(options[0], value)
    if get_origin(kind) is list or options[1:] == (...,):
        return get_origin(kind)(_decode(options[0], item) for item in value)
    if get_origin(kind) is tuple:
        return tuple(_decode(option, item) for option, item in zip(options, value, strict=True))
    if isinstance(kind, type) and is_dataclass(kind):
        kinds = _load_kinds(kind)
        named = value if isinstance(value, dict) else dict(zip(kinds, value, strict=False))  # By position in a batch of 0.2.0.
        return kind(**{name: _decode(kinds[name], item) for name, item in named.items()})
    return value.encode("latin-1") if kind is bytes else value


_load_kinds = cache(get_type_hints)  # It evaluates the annotations with each call.


def _load_batch(text: str) -> PfsBatch:
    """Return a stored batch. Raises CatalogTooNew if neither this version nor 0.2.0 wrote it."""
    body = json.loads(text)
    if isinstance(body, list):
        return _load_batch_of_0_2_0(body)
    if (version := body.pop("version")) != _BATCH_VERSION:
        raise CatalogTooNew(
            f"the catalog's write-back batch has version {version}, this ckptfs knows {_BATCH_VERSION} and that of 0.2.0",
            remedy="install the ckptfs again that wrote it; nothing was changed",
        )
    return cast(PfsBatch, _decode(PfsBatch, body))


def _load_batch_of_0_2_0(body: list[Any]) -> PfsBatch:
    """Return a batch of 0.2.0: values by position, and the state after the batch instead of changes."""
    order = "last_seq actions expected_entries pending_entries published_rows requeued merged_directories after_seq kept_seqs"
    named = dict(zip(order.split(), body, strict=True))
    expected = _decode(list[ExpectedEntry], named.pop("expected_entries"))
    pending = _decode(list[tuple[int, bytes, int | None]], named.pop("pending_entries"))
    batch = cast(PfsBatch, _decode(PfsBatch, named))
    _derive_changes(batch, expected, pending)
    return batch


def _derive_changes(batch: PfsBatch, expected: list[ExpectedEntry], pending: list[tuple[int, bytes, int | None]]) -> None:
    """Fill in what 0.2.0 did not store: which action leads to which part of the state."""
    final = {show.location.pfs_name: show for show in expected}
    key_of: dict[PfsName, int] = {}

    def add(action: PfsAction, location: PfsLocation, inode: int | None) -> None:
        name = location.pfs_name
        show = final.get(name)
        fingerprint = action.fingerprint if inode == action.inode or show is None else show.fingerprint
        batch.name_changes.append(ExpectedEntry(location, inode, fingerprint if inode is not None else Fingerprint(), action.key))
        key_of[name] = action.key

    for action in batch.actions:
        new = action.new_location
        if action.act == "exchange" and new is not None:
            other = final.get(action.location.pfs_name)
            add(action, action.location, None if other is None else other.inode)
            add(action, new, action.inode)
        elif action.act in {"unlink", "rmdir", "move"}:
            add(action, action.location, None)
        elif action.act in {"put", "attributes"}:
            add(action, action.location, action.inode)
        if action.act in {"move", "link"} and new is not None:
            add(action, new, action.inode)
    batch.name_changes += [show for name, show in final.items() if name not in key_of]
    for action in batch.actions:  # What a put shows was pending until then.
        if action.act == "put":
            name = action.location.pfs_name
            batch.pending_changes += [PlannedPending(0, name, action.inode), PlannedPending(action.key, name, None)]
    batch.pending_changes += [PlannedPending(key_of.get((parent, name), 0), (parent, name), inode) for parent, name, inode in pending]
    put_keys = {action.inode: action.key for action in batch.actions if action.act == "put"}
    batch.published_rows = [replace(row, key=put_keys.get(row.inode, 0)) for row in batch.published_rows]
    batch.requeued_seqs = [0] * len(batch.requeued)


def record_batch_done(db: Database, batch: PfsBatch, observed: ObservedNames) -> None:
    """Record that `batch` was done. `observed`: what its names show; None: another inode."""
    losers = _record_entries(db, batch, observed)
    for row in batch.published_rows:
        _insert_published(db, row)
    for inode in losers:
        db.run("DELETE FROM pfs_file WHERE inode = ?1 AND NOT EXISTS (SELECT 1 FROM pfs_entry WHERE inode = ?1)", inode)
    _record_observed(db, batch, observed)
    _record_pending(db, batch)
    for inode in batch.merged_directories:
        db.run("UPDATE inode SET imported = 0 WHERE id = ?", inode)
    # A name that was removed before it appeared has changed the times of its directory in the mount, too.
    for directory in {show.location.parent for show in batch.name_changes} | {change.name[0] for change in batch.pending_changes}:
        db.run("INSERT OR IGNORE INTO pfs_stale_times (directory) VALUES (?)", directory)
    for inode, content in batch.requeued:
        journal.append(db, "content", inode, content=content)
    for inode in dict.fromkeys(inode for inode, _ in batch.settle_rows):
        journal.append(db, "settle", inode)
    for inode in list_unfinished(batch, observed):
        insert_rows_for_tree(db, inode)
    set_leftovers(db, batch.abandoned)
    journal.delete_applied(db, batch.after_seq, batch.last_seq, batch.kept_seqs)


def list_unfinished(batch: PfsBatch, observed: ObservedNames) -> list[int]:
    """Return the inodes that the PFS should show and does not."""
    shows = batch.expected_entries
    return sorted({show.inode for show in shows if show.inode is not None and observed.get(show.location.pfs_name) is None})


def _record_entries(db: Database, batch: PfsBatch, observed: ObservedNames) -> set[int]:
    """Record what the names show. Return the inodes that lost a name."""
    losers = set()
    for show in batch.expected_entries:
        parent, name = show.location.parent, show.location.name
        before = find_shown(db, parent, name)
        seen = observed.get((parent, name))
        if before is not None and before != show.inode:
            losers.add(before)
        if show.inode is None or (seen is None and can_recreate(db, show.inode)):
            db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
            continue
        # A file whose bytes only the PFS had is still expected to be there: the next scan finds out its state.
        insert_entry(db, parent, name, show.inode, (None,) * 4 if seen is None else (seen.ino, seen.mode, seen.uid, seen.gid))
    return losers


def _insert_published(db: Database, row: PublishedRow) -> None:
    # The content of an open file may have been lost since the batch began: then the PFS has the whole file, see `restore_previous`.
    is_all = bool(db.value("SELECT 1 FROM inode WHERE id = ? AND content IS NULL", row.inode))
    db.run(
        "INSERT OR REPLACE INTO pfs_file (inode, generation, complete, size, mtime_ns, pfs_inode, digest, blocks, checked_ns)"
        " VALUES (?,?,?,?,?,?,?,?,0)",
        row.inode, row.generation, row.is_complete or is_all, row.size, row.mtime_ns, row.pfs_inode, row.digest, row.block_digests,
    )  # fmt: skip
    if is_all and not row.is_complete:
        db.run("UPDATE inode SET size = ?, mtime_ns = ? WHERE id = ?", row.size, row.mtime_ns, row.inode)


def _record_observed(db: Database, batch: PfsBatch, observed: ObservedNames) -> None:
    """Record set attributes, and the new st_ino of files that were copied to a filesystem below the PFS."""
    restamped = set(batch.inodes_with_set_attributes)
    moved = {action.inode for action in batch.actions if action.act in {"move", "exchange"}}
    for show in batch.expected_entries:
        seen = observed.get(show.location.pfs_name)
        if seen is None:
            continue
        if show.inode in restamped:  # A stale name may show a previous file of this inode, which has its own attributes.
            seen_now = "UPDATE pfs_entry SET seen_mode = ?, seen_uid = ?, seen_gid = ? WHERE inode = ? AND seen_ino = ?"
            db.run(seen_now, seen.mode, seen.uid, seen.gid, show.inode, seen.ino)
        if not stat.S_ISREG(seen.mode):
            continue
        if show.inode in restamped:
            same = "UPDATE pfs_file SET mtime_ns = ? WHERE inode = ? AND size = ? AND pfs_inode = ?"
            db.run(same, seen.mtime_ns, show.inode, seen.size, seen.ino)
        if show.inode in moved:
            same = "UPDATE pfs_file SET pfs_inode = ?, mtime_ns = ?, checked_ns = 0 WHERE inode = ? AND size = ? AND pfs_inode <> ?"
            db.run(same, seen.ino, seen.mtime_ns, show.inode, seen.size, seen.ino)


def _record_pending(db: Database, batch: PfsBatch) -> None:
    for (parent, name), inode in batch.pending_entries.items():
        if inode is None:
            db.run("DELETE FROM pfs_pending WHERE parent = ? AND name = ?", parent, name)
        else:
            db.run("INSERT OR REPLACE INTO pfs_pending (parent, name, inode) VALUES (?,?,?)", parent, name, inode)
    db.run(
        "DELETE FROM pfs_pending WHERE inode = ? AND NOT EXISTS"
        " (SELECT 1 FROM pfs_entry e WHERE e.parent = pfs_pending.parent AND e.name = pfs_pending.name)",
        NO_INODE,
    )
