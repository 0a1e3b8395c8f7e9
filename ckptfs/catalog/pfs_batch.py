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
from ckptfs.catalog.adoption import again, can_tell
from ckptfs.catalog.database import Database
from ckptfs.catalog.pfs_view import Mark, Published, View


@dataclass(frozen=True, slots=True)
class Spot:
    """A name on the PFS: its directory as our inode, and the names that lead there from the root."""

    parent: int
    name: bytes
    path: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Action:
    """One change of the PFS: `act` is 'put' (rename `temporary` to `at`), 'link' (`at` also as `to`), 'move', 'exchange', 'unlink',
    'rmdir' or 'attributes'. `mark` recognises the subject, `other` what `at` (put) or `to` (the others) shows before; None for nothing.
    """

    act: str
    key: int
    inode: int
    at: Spot
    mark: Mark
    to: Spot | None = None
    other: Mark | None = None
    temporary: bytes = b""


@dataclass(frozen=True, slots=True)
class Shows:
    """What the PFS shows under a name when the batch is done; `inode` None: nothing of ours."""

    at: Spot
    inode: int | None
    mark: Mark


@dataclass(slots=True)
class Batch:
    """Changes in order, and what is true after them.

    `again`: (inode, content) whose rows go to the journal's end once more. `unfinished`: inodes that the PFS turned out not to show.
    `merged`: directories that were on the PFS already. `kept`: rows that stay in the journal, of files that the PFS refuses.
    """

    last: int
    actions: list[Action] = field(default_factory=list)
    shows: list[Shows] = field(default_factory=list)
    pendings: list[tuple[int, bytes, int | None]] = field(default_factory=list)
    published: list[Published] = field(default_factory=list)
    again: list[tuple[int, int]] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)
    after: int = 0
    kept: list[int] = field(default_factory=list)

    @property
    def restamped(self) -> list[int]:
        """The inodes whose attributes were set."""
        return [action.inode for action in self.actions if action.act == "attributes"]


@dataclass(frozen=True, slots=True)
class Found:
    """What was seen at the end: lstat's st_ino, st_mode, st_uid, st_gid, st_size and st_mtime_ns; what `pfs_entry` and `published` keep."""

    ino: int
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int


def batch_of(view: View, last: int) -> Batch:
    """The net effect of what was planned in `view`, for the rows up to `last`; actions and published rows are to be added."""
    batch = Batch(last)
    for (parent, name), shown in view.entries.items():
        spot = Spot(parent, name, view.path(parent) or ())
        batch.shows.append(Shows(spot, None, Mark()) if shown is None else Shows(spot, shown.inode, shown.mark))
    batch.pendings = [(parent, name, inode) for (parent, name), inode in view.pendings.items()]
    return batch


# --- the row ---------------------------------------------------------------------------------------------------------


def write(db: Database, batch: Batch, *, ready: bool) -> None:
    """Say what is in hand. Joins the caller's transaction."""
    db.run("INSERT OR REPLACE INTO pfs_batch (id, ready, body) VALUES (1, ?, ?)", ready, _encode(batch))


def read(db: Database) -> tuple[bool, Batch] | None:
    """(ready, batch) of what a mover had in hand."""
    row = db.row("SELECT ready, body FROM pfs_batch")
    return None if row is None else (bool(row[0]), _decode(row[1]))


def in_hand(db: Database) -> bool:
    """Whether there is anything to do on the PFS: rows of the journal, a batch, directories without their times."""
    tables = ("journal", "pfs_batch", "pfs_times")
    return any(db.value(f"SELECT 1 FROM {table} LIMIT 1") is not None for table in tables)


def take_back(db: Database) -> None:
    """Nothing is in hand."""
    db.run("DELETE FROM pfs_batch")


def _encode(batch: Batch) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.decode("latin-1")
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if hasattr(value, "__dataclass_fields__"):
            return [plain(getattr(value, name)) for name in value.__dataclass_fields__]
        return value

    return json.dumps(plain(batch))


def _decode(text: str) -> Batch:
    last, actions, shows, pendings, published, repeat, merged, after, kept = json.loads(text)
    return Batch(
        last,
        [_action(item) for item in actions],
        [Shows(_spot(at), inode, Mark(*mark)) for at, inode, mark in shows],
        [(parent, _raw(name), inode) for parent, name, inode in pendings],
        [_published(item) for item in published],
        [(inode, content) for inode, content in repeat],
        merged,
        after,
        kept,
    )


def _action(item: list[Any]) -> Action:
    act, key, inode, at, mark, to, other, temporary = item
    to_spot = None if to is None else _spot(to)
    return Action(act, key, inode, _spot(at), Mark(*mark), to_spot, None if other is None else Mark(*other), _raw(temporary))


def _published(item: list[Any]) -> Published:
    inode, generation, complete, size, mtime_ns, pfs_inode, digest, blocks = item
    return Published(inode, generation, complete, size, mtime_ns, pfs_inode, _maybe(digest), _maybe(blocks))


def _spot(item: list[Any]) -> Spot:
    return Spot(item[0], _raw(item[1]), tuple(_raw(name) for name in item[2]))


def _raw(text: str) -> bytes:
    return text.encode("latin-1")


def _maybe(text: str | None) -> bytes | None:
    return None if text is None else _raw(text)


# --- its end ---------------------------------------------------------------------------------------------------------


def finish(db: Database, batch: Batch, found: dict[tuple[int, bytes], Found | None]) -> None:
    """Everything in `batch` was done. `found`: what the names of `shows` were seen to show then, None where it is something else."""
    losers = _entries(db, batch, found)
    for row in batch.published:
        _publish(db, row)
    for inode in batch.restamped:
        _restamp(db, inode, [seen for show in batch.shows if show.inode == inode and (seen := found.get((show.at.parent, show.at.name)))])
    for inode in losers:
        if db.value("SELECT 1 FROM pfs_entry WHERE inode = ? LIMIT 1", inode) is None:
            db.run("DELETE FROM published WHERE inode = ?", inode)
    _pending(db, batch)
    for inode in batch.merged:
        db.run("UPDATE inode SET complete = 0 WHERE id = ?", inode)
    # What came and went before it could appear has changed its directory's times in the mount, too.
    for directory in {show.at.parent for show in batch.shows} | {parent for parent, _, _ in batch.pendings}:
        db.run("INSERT OR IGNORE INTO pfs_times (directory) VALUES (?)", directory)
    for inode, content in batch.again:
        journal.append(db, "content", inode, content=content)
    for inode in unfinished(batch, found):
        again(db, inode)
    journal.applied(db, batch.after, batch.last, batch.kept)
    take_back(db)


def unfinished(batch: Batch, found: dict[tuple[int, bytes], Found | None]) -> list[int]:
    """The inodes that the PFS should show and does not."""
    return sorted({show.inode for show in batch.shows if show.inode is not None and found.get((show.at.parent, show.at.name)) is None})


def _entries(db: Database, batch: Batch, found: dict[tuple[int, bytes], Found | None]) -> set[int]:
    """Write what the names show; the inodes that lost one."""
    losers = set()
    for show in batch.shows:
        parent, name = show.at.parent, show.at.name
        before = db.value("SELECT inode FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
        seen = found.get((parent, name))
        if before is not None and before != show.inode:
            losers.add(before)
        if show.inode is None or (seen is None and can_tell(db, show.inode)):
            db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
            continue
        # A file of which only the PFS had the bytes is still believed to be there: the next visit finds out what became of it.
        look = (None, None, None, None) if seen is None else (seen.ino, seen.mode, seen.uid, seen.gid)
        db.run(
            "INSERT OR REPLACE INTO pfs_entry (parent, name, inode, seen_ino, seen_mode, seen_uid, seen_gid) VALUES (?,?,?,?,?,?,?)",
            parent, name, show.inode, *look,
        )  # fmt: skip
    return losers


def _publish(db: Database, row: Published) -> None:
    db.run(
        "INSERT OR REPLACE INTO published (inode, generation, complete, size, mtime_ns, pfs_inode, digest, blocks, checked_ns)"
        " VALUES (?,?,?,?,?,?,?,?,0)",
        row.inode, row.generation, row.complete, row.size, row.mtime_ns, row.pfs_inode, row.digest, row.blocks,
    )  # fmt: skip


def _restamp(db: Database, inode: int, seen: Iterable[Found]) -> None:
    """Attributes of a file were set: what the PFS shows of it now is ours."""
    for one in seen:
        seen_now = "UPDATE pfs_entry SET seen_ino = ?, seen_mode = ?, seen_uid = ?, seen_gid = ? WHERE inode = ?"
        db.run(seen_now, one.ino, one.mode, one.uid, one.gid, inode)
        if stat.S_ISREG(one.mode):
            same = "UPDATE published SET mtime_ns = ? WHERE inode = ? AND size = ? AND pfs_inode = ?"
            db.run(same, one.mtime_ns, inode, one.size, one.ino)


def _pending(db: Database, batch: Batch) -> None:
    for parent, name, inode in batch.pendings:
        if inode is None:
            db.run("DELETE FROM pfs_pending WHERE parent = ? AND name = ?", parent, name)
        else:
            db.run("INSERT OR REPLACE INTO pfs_pending (parent, name, inode) VALUES (?,?,?)", parent, name, inode)


# --- directories' times ----------------------------------------------------------------------------------------------


def untimed(db: Database, at_most: int) -> list[int]:
    """Directories whose times on the PFS are not the mount's."""
    return [row[0] for row in db.rows("SELECT directory FROM pfs_times LIMIT ?", at_most)]


def timed(db: Database, directories: Iterable[int]) -> None:
    """These have their times."""
    with db.change():
        for directory in directories:
            db.run("DELETE FROM pfs_times WHERE directory = ?", directory)
