"""Owns `pfs_batch`: the changes that write-back has in hand, as they were decided. Written before the PFS is touched, so that a mover
that died is followed by one that finishes exactly these, whatever the catalog says by then.

`body` is JSON; bytes are strings of the same code points (latin-1). A batch covers the journal after the row `after` up to the row `last`.
`finish` makes the catalog say what the PFS shows, deletes the journal's rows and the batch, all at once: it joins the caller's transaction.
If we die here: the batch is there with all its journal rows, or it is done and neither is.
"""

import json
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ckptfs.catalog import journal
from ckptfs.catalog.adoption import can_recreate, insert_rows_for_tree
from ckptfs.catalog.database import Database
from ckptfs.catalog.pfs_view import Fingerprint, PfsView, PublishedRow


@dataclass(frozen=True, slots=True)
class PfsLocation:
    """A name on the PFS: its directory as our inode, and the names that lead there from the root."""

    parent: int
    name: bytes
    path: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PfsAction:
    """One change of the PFS: `act` is 'put' (rename `temporary` to `at`), 'link' (`at` also as `to`), 'move', 'exchange', 'unlink',
    'rmdir' or 'attributes'. `mark` recognises the subject, `other` what `at` (put) or `to` (the others) shows before; None for nothing.
    """

    act: str
    key: int
    inode: int
    location: PfsLocation
    fingerprint: Fingerprint
    new_location: PfsLocation | None = None
    replaced_fingerprint: Fingerprint | None = None
    temporary: bytes = b""


@dataclass(frozen=True, slots=True)
class ExpectedEntry:
    """What the PFS shows under a name when the batch is done; `inode` None: nothing of ours."""

    location: PfsLocation
    inode: int | None
    fingerprint: Fingerprint


@dataclass(slots=True)
class PfsBatch:
    """Changes in order, and what is true after them.

    `again`: (inode, content) whose rows go to the journal's end once more. `unfinished`: inodes that the PFS turned out not to show.
    `merged`: directories that were on the PFS already. `kept`: rows that stay in the journal, of files that the PFS refuses.
    """

    last_seq: int
    actions: list[PfsAction] = field(default_factory=list)
    expected_entries: list[ExpectedEntry] = field(default_factory=list)
    pending_entries: list[tuple[int, bytes, int | None]] = field(default_factory=list)
    published_rows: list[PublishedRow] = field(default_factory=list)
    requeued: list[tuple[int, int]] = field(default_factory=list)
    merged_directories: list[int] = field(default_factory=list)
    after_seq: int = 0
    kept_seqs: list[int] = field(default_factory=list)

    @property
    def inodes_with_set_attributes(self) -> list[int]:
        """The inodes whose attributes were set."""
        return [action.inode for action in self.actions if action.act == "attributes"]


@dataclass(frozen=True, slots=True)
class ObservedStat:
    """What was seen at the end: lstat's st_ino, st_mode, st_uid, st_gid, st_size and st_mtime_ns; what `pfs_entry` and `published` keep."""

    ino: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int


def build_batch(view: PfsView, last: int) -> PfsBatch:
    """The net effect of what was planned in `view`, for the rows up to `last`; actions and published rows are to be added."""
    batch = PfsBatch(last)
    for (parent, name), shown in view.entries.items():
        location = PfsLocation(parent, name, view.get_path(parent) or ())
        batch.expected_entries.append(
            ExpectedEntry(location, None, Fingerprint()) if shown is None else ExpectedEntry(location, shown.inode, shown.fingerprint)
        )
    batch.pending_entries = [(parent, name, inode) for (parent, name), inode in view.pending_entries.items()]
    return batch


# --- the row ---------------------------------------------------------------------------------------------------------


def set_batch(db: Database, batch: PfsBatch, *, ready: bool) -> None:
    """Say what is in hand. Joins the caller's transaction."""
    db.run("INSERT OR REPLACE INTO pfs_batch (id, ready, body) VALUES (1, ?, ?)", ready, _encode(batch))


def find_batch(db: Database) -> tuple[bool, PfsBatch] | None:
    """(ready, batch) of what a mover had in hand."""
    row = db.row("SELECT ready, body FROM pfs_batch")
    return None if row is None else (bool(row[0]), _decode(row[1]))


def has_work(db: Database) -> bool:
    """Whether there is anything to do on the PFS: rows of the journal, a batch, directories without their times."""
    tables = ("journal", "pfs_batch", "pfs_times")
    return any(db.value(f"SELECT 1 FROM {table} LIMIT 1") is not None for table in tables)


def delete_batch(db: Database) -> None:
    """Nothing is in hand."""
    db.run("DELETE FROM pfs_batch")


def _encode(batch: PfsBatch) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.decode("latin-1")
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if hasattr(value, "__dataclass_fields__"):
            return [plain(getattr(value, name)) for name in value.__dataclass_fields__]
        return value

    return json.dumps(plain(batch))


def _decode(text: str) -> PfsBatch:
    last, actions, shows, pendings, published, repeat, merged, after, kept = json.loads(text)
    return PfsBatch(
        last,
        [_decode_action(item) for item in actions],
        [ExpectedEntry(_decode_location(at), inode, Fingerprint(*mark)) for at, inode, mark in shows],
        [(parent, _decode_bytes(name), inode) for parent, name, inode in pendings],
        [_decode_published(item) for item in published],
        [(inode, content) for inode, content in repeat],
        merged,
        after,
        kept,
    )


def _decode_action(item: list[Any]) -> PfsAction:
    act, key, inode, at, mark, to, other, temporary = item
    to_spot = None if to is None else _decode_location(to)
    return PfsAction(
        act,
        key,
        inode,
        _decode_location(at),
        Fingerprint(*mark),
        to_spot,
        None if other is None else Fingerprint(*other),
        _decode_bytes(temporary),
    )


def _decode_published(item: list[Any]) -> PublishedRow:
    inode, generation, complete, size, mtime_ns, pfs_inode, digest, blocks = item
    return PublishedRow(
        inode, generation, complete, size, mtime_ns, pfs_inode, _decode_optional_bytes(digest), _decode_optional_bytes(blocks)
    )


def _decode_location(item: list[Any]) -> PfsLocation:
    return PfsLocation(item[0], _decode_bytes(item[1]), tuple(_decode_bytes(name) for name in item[2]))


def _decode_bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _decode_optional_bytes(text: str | None) -> bytes | None:
    return None if text is None else _decode_bytes(text)


# --- its end ---------------------------------------------------------------------------------------------------------


def record_batch_done(db: Database, batch: PfsBatch, observed: dict[tuple[int, bytes], ObservedStat | None]) -> None:
    """Everything in `batch` was done. `found`: what the names of `shows` were seen to show then, None where it is something else."""
    losers = _record_entries(db, batch, observed)
    for row in batch.published_rows:
        _insert_published(db, row)
    for inode in batch.inodes_with_set_attributes:
        _record_set_attributes(
            db,
            inode,
            [
                seen
                for show in batch.expected_entries
                if show.inode == inode and (seen := observed.get((show.location.parent, show.location.name)))
            ],
        )
    for inode in losers:
        if db.value("SELECT 1 FROM pfs_entry WHERE inode = ? LIMIT 1", inode) is None:
            db.run("DELETE FROM published WHERE inode = ?", inode)
    _record_pending(db, batch)
    for inode in batch.merged_directories:
        db.run("UPDATE inode SET complete = 0 WHERE id = ?", inode)
    # What came and went before it could appear has changed its directory's times in the mount, too.
    for directory in {show.location.parent for show in batch.expected_entries} | {parent for parent, _, _ in batch.pending_entries}:
        db.run("INSERT OR IGNORE INTO pfs_times (directory) VALUES (?)", directory)
    for inode, content in batch.requeued:
        journal.append(db, "content", inode, content=content)
    for inode in list_unfinished(batch, observed):
        insert_rows_for_tree(db, inode)
    journal.delete_applied(db, batch.after_seq, batch.last_seq, batch.kept_seqs)
    delete_batch(db)


def list_unfinished(batch: PfsBatch, observed: dict[tuple[int, bytes], ObservedStat | None]) -> list[int]:
    """The inodes that the PFS should show and does not."""
    return sorted(
        {
            show.inode
            for show in batch.expected_entries
            if show.inode is not None and observed.get((show.location.parent, show.location.name)) is None
        }
    )


def _record_entries(db: Database, batch: PfsBatch, observed: dict[tuple[int, bytes], ObservedStat | None]) -> set[int]:
    """Write what the names show; the inodes that lost one."""
    losers = set()
    for show in batch.expected_entries:
        parent, name = show.location.parent, show.location.name
        before = db.value("SELECT inode FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
        seen = observed.get((parent, name))
        if before is not None and before != show.inode:
            losers.add(before)
        if show.inode is None or (seen is None and can_recreate(db, show.inode)):
            db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
            continue
        # A file of which only the PFS had the bytes is still believed to be there: the next visit finds out what became of it.
        look = (None, None, None, None) if seen is None else (seen.ino, seen.mode, seen.uid, seen.gid)
        db.run(
            "INSERT OR REPLACE INTO pfs_entry (parent, name, inode, seen_ino, seen_mode, seen_uid, seen_gid) VALUES (?,?,?,?,?,?,?)",
            parent, name, show.inode, *look,
        )  # fmt: skip
    return losers


def _insert_published(db: Database, row: PublishedRow) -> None:
    db.run(
        "INSERT OR REPLACE INTO published (inode, generation, complete, size, mtime_ns, pfs_inode, digest, blocks, checked_ns)"
        " VALUES (?,?,?,?,?,?,?,?,0)",
        row.inode, row.generation, row.is_complete, row.size, row.mtime_ns, row.pfs_inode, row.digest, row.block_digests,
    )  # fmt: skip


def _record_set_attributes(db: Database, inode: int, observed: Iterable[ObservedStat]) -> None:
    """Attributes of a file were set: what the PFS shows of it now is ours."""
    for one in observed:
        seen_now = "UPDATE pfs_entry SET seen_ino = ?, seen_mode = ?, seen_uid = ?, seen_gid = ? WHERE inode = ?"
        db.run(seen_now, one.ino, one.mode, one.uid, one.gid, inode)
        if stat.S_ISREG(one.mode):
            same = "UPDATE published SET mtime_ns = ? WHERE inode = ? AND size = ? AND pfs_inode = ?"
            db.run(same, one.mtime_ns, inode, one.size, one.ino)


def _record_pending(db: Database, batch: PfsBatch) -> None:
    for parent, name, inode in batch.pending_entries:
        if inode is None:
            db.run("DELETE FROM pfs_pending WHERE parent = ? AND name = ?", parent, name)
        else:
            db.run("INSERT OR REPLACE INTO pfs_pending (parent, name, inode) VALUES (?,?,?)", parent, name, inode)


# --- directories' times ----------------------------------------------------------------------------------------------


def list_stale_times(db: Database, at_most: int) -> list[int]:
    """Directories whose times on the PFS are not the mount's."""
    return [row[0] for row in db.rows("SELECT directory FROM pfs_times LIMIT ?", at_most)]


def delete_stale_times(db: Database, directories: Iterable[int]) -> None:
    """These have their times."""
    with db.transaction():
        for directory in directories:
            db.run("DELETE FROM pfs_times WHERE directory = ?", directory)
