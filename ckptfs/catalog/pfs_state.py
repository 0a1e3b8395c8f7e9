"""The PFS as write-back knows it: what it shows, and what a plan will make of it.

`pfs_entry`, `pfs_file` and `pfs_pending` say what the PFS shows. Import writes them too, but never for names or inodes in the journal.
`PfsView` reads them and keeps planned changes to itself, until the batch that makes them true is done. Between an action of write-back on
the PFS and its commit the PFS is ahead of the catalog: code that follows these names must compare what it reaches with the fingerprint.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfs import digest, limits
from ckptfs.catalog import inodes
from ckptfs.catalog.content_rows import UNPUBLISHED
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import INTERNAL_XATTR_PREFIX, XATTRS_ON_PFS
from ckptfs.model import ROOT, Inode, PublishedRow

PfsName = tuple[int, bytes]
"""(directory, name in it)."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of an entry on the PFS: st_ino (0: unknown), size and mtime of a file (-1: unknown).

    While a batch is planned, a negative `ino` stands for something that the batch is going to make, by its key.
    """

    ino: int = 0
    size: int = -1
    mtime_ns: int = -1


@dataclass(frozen=True, slots=True)
class PfsEntry:
    """An entry that the PFS shows under a name."""

    inode: int
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class PfsLocation:
    """A name on the PFS: the inode of its directory, and the names from the root to that."""

    parent: int
    name: bytes
    path: tuple[bytes, ...]

    @property
    def pfs_name(self) -> PfsName:
        """Return (directory, name in it)."""
        return self.parent, self.name

    @property
    def text(self) -> str:
        """Return the path below the PFS's root, for messages."""
        return "/" if self.name == b"." else os.fsdecode(b"/".join((*self.path, self.name)))


@dataclass(frozen=True, slots=True)
class ExpectedEntry:
    """What a name shows after the action `key`; `inode` None: no inode of the catalog."""

    location: PfsLocation
    inode: int | None
    fingerprint: Fingerprint
    key: int = 0


@dataclass(frozen=True, slots=True)
class PlannedPending:
    """After the action `key` the name is to show `inode` or nothing later; None: what it shows."""

    key: int
    name: PfsName
    inode: int | None


NO_INODE = 0
"""As a pending inode: the name is to show nothing, and the PFS still shows something there."""


def get_published(db: Database, inode: int, *, with_blocks: bool = False) -> PublishedRow | None:
    """Return the bytes that the PFS shows of a file. Returns None if it shows none."""
    columns = f"inode, generation, complete, size, mtime_ns, pfs_inode, digest, {'blocks' if with_blocks else 'NULL'}, 0, checked_ns <> 0"
    row = db.row(f"SELECT {columns} FROM pfs_file WHERE inode = ?", inode)
    return None if row is None else PublishedRow(row[0], row[1], bool(row[2]), *row[3:])


def find_unpublished(db: Database, after: int) -> tuple[int, int] | None:
    """Return (inode, content) of the first sealed own content after `after` that the PFS lacks."""
    row = db.row(f"SELECT c.inode, c.id FROM {UNPUBLISHED} AND c.id > ? ORDER BY c.id LIMIT 1", after)
    return None if row is None else (row[0], row[1])


def find_shown(db: Database, parent: int, name: bytes) -> int | None:
    """Return the inode that the PFS shows under a name, as far as known."""
    found: int | None = db.value("SELECT inode FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
    return found


def find_inode(db: Database, names: tuple[bytes, ...]) -> int | None:
    """Return the inode that the PFS shows under a path from its root, as far as known. May be None."""
    inode = ROOT
    for name in names:
        found = find_shown(db, inode, name)
        if found is None:
            return None
        inode = found
    return inode


def insert_entry(db: Database, parent: int, name: bytes, inode: int, seen: Sequence[int | None] = (None,) * 4) -> None:
    """Record that the PFS shows an inode under a name, so that none is pending there.

    `seen`: st_ino, mode, uid and gid, if known.
    """
    columns = "parent, name, inode, seen_ino, seen_mode, seen_uid, seen_gid"
    db.run(f"INSERT OR REPLACE INTO pfs_entry ({columns}) VALUES (?,?,?,?,?,?,?)", parent, name, inode, *seen)
    db.run("DELETE FROM pfs_pending WHERE parent = ? AND name = ? AND inode = ?", parent, name, inode)


def delete_entries(db: Database, inode: int) -> None:
    """Delete all entries of `inode`: the PFS does not show it."""
    db.run("DELETE FROM pfs_entry WHERE inode = ?", inode)


def find_attributes(db: Database, inode: int) -> tuple[Inode, dict[bytes, bytes]] | None:
    """Return an inode and its extended attributes that go to the PFS. Returns None if it is gone."""
    found = inodes.find(db, inode)
    if found is None:
        return None
    rows = db.rows("SELECT name, value FROM xattr WHERE inode = ?", inode)
    named = ((XATTRS_ON_PFS.get(bytes(name), bytes(name)), bytes(value)) for name, value in rows)
    return found, {name: value for name, value in named if not name.startswith(INTERNAL_XATTR_PREFIX)}


class PfsView:
    """The PFS as it will be after all that was planned so far. `key` is the action that is being planned."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.key = 0
        self.name_changes: list[ExpectedEntry] = []
        self.pending_changes: list[PlannedPending] = []
        self.entries: dict[PfsName, PfsEntry | None] = {}
        self.pending_entries: dict[PfsName, int | None] = {}
        self._paths: dict[int, tuple[bytes, ...] | None] = {ROOT: ()}

    # --- reading --------------------------------------------------------------------------------------------------------

    def get_entry(self, parent: int, name: bytes) -> PfsEntry | None:
        """Return the entry under a name. Returns None if there is none."""
        if (parent, name) in self.entries:
            return self.entries[parent, name]
        # A stale name may show the previous bytes of a file that has new ones elsewhere.
        row = self._db.row(
            "SELECT e.inode, coalesce(p.pfs_inode, e.seen_ino, 0), coalesce(p.size, -1), coalesce(p.mtime_ns, -1) FROM pfs_entry e"
            " LEFT JOIN pfs_file p ON p.inode = e.inode AND (p.pfs_inode = e.seen_ino OR e.seen_ino IS NULL OR NOT EXISTS"
            " (SELECT 1 FROM pfs_pending w WHERE w.parent = e.parent AND w.name = e.name AND w.inode <> e.inode))"
            " WHERE e.parent = ? AND e.name = ?",
            parent, name,
        )  # fmt: skip
        return None if row is None else PfsEntry(row[0], Fingerprint(*row[1:]))

    def get_pending(self, parent: int, name: bytes) -> int | None:
        """Return the inode that is to appear under a name, or `NO_INODE`; None: it is as it should be."""
        if (parent, name) in self.pending_entries:
            return self.pending_entries[parent, name]
        found: int | None = self._db.value("SELECT inode FROM pfs_pending WHERE parent = ? AND name = ?", parent, name)
        return found

    def list_names(self, inode: int) -> list[PfsName]:
        kept = [name for name in self._list_catalogued("pfs_entry", inode) if name not in self.entries]
        return kept + [name for name, shown in self.entries.items() if shown is not None and shown.inode == inode]

    def list_pending_names(self, inode: int) -> list[PfsName]:
        """Return the names under which an inode will appear."""
        kept = [name for name in self._list_catalogued("pfs_pending", inode) if name not in self.pending_entries]
        return kept + [name for name, other in self.pending_entries.items() if other == inode]

    def _list_catalogued(self, table: str, inode: int) -> list[PfsName]:
        return [(row[0], bytes(row[1])) for row in self._db.rows(f"SELECT parent, name FROM {table} WHERE inode = ? ORDER BY 1, 2", inode)]

    def get_shown_inode(self, parent: int, name: bytes) -> int:
        """Return the inode that the PFS shows under a name, or `NO_INODE`."""
        shown = self.get_entry(parent, name)
        return NO_INODE if shown is None else shown.inode

    def get_wanted_inode(self, parent: int, name: bytes) -> int:
        """Return the inode that the PFS is to show under a name, or `NO_INODE`."""
        pending = self.get_pending(parent, name)
        return self.get_shown_inode(parent, name) if pending is None else pending

    def is_stale(self, parent: int, name: bytes) -> bool:
        """Return True if the PFS shows an inode under a name that belongs to another one by now, or to none."""
        return self.get_shown_inode(parent, name) not in {NO_INODE, self.get_wanted_inode(parent, name)}

    def shows(self, name: PfsName, inode: int) -> bool:
        """Return True if the PFS shows an inode under a name."""
        return self.get_shown_inode(*name) == inode

    def list_shown_names(self, inode: int) -> list[PfsName]:
        """Return the names under which the PFS shows an inode, and is to show it."""
        return self.split_names(inode)[0]

    def split_names(self, inode: int) -> tuple[list[PfsName], list[PfsName]]:
        """Return the names under which the PFS shows an inode: (shown, stale)."""
        names = [name for name in self.list_names(inode) if self.has_directory(*name)]
        stale = [name for name in names if self.is_stale(*name)]
        return [name for name in names if name not in stale], stale

    def has_only_stale_names(self, inode: int) -> bool:
        """Return True if the PFS shows an inode under stale names only, and others are pending."""
        return bool(self.list_pending_names(inode)) and not self.list_shown_names(inode)

    def is_directory_pending(self, parent: int, name: bytes) -> bool:
        """Return True if the directory of a name is missing on the PFS, and will appear later."""
        return not self.has_directory(parent, name) and bool(self.list_pending_names(parent))

    def get_recorded(self, parent: int, name: bytes) -> tuple[int | None, int]:
        """Return (inode, st_mode) of what a name showed before this plan; (None, 0) if nothing."""
        query = "SELECT inode, coalesce(seen_mode, 0) FROM pfs_entry WHERE parent = ? AND name = ?"
        return self._db.row(query, parent, name) or (None, 0)

    def has_entries(self, directory: int) -> bool:
        """Return True if the PFS shows any inode of the catalog in a directory."""
        rows = self._db.rows("SELECT name FROM pfs_entry WHERE parent = ?", directory)
        names = {(directory, bytes(row[0])) for row in rows} | {name for name in self.entries if name[0] == directory}
        return any(self.get_entry(*name) is not None for name in names)

    def get_path(self, directory: int) -> tuple[bytes, ...] | None:
        """Return the names from the PFS's root to an inode. Returns None if the PFS does not show it."""
        if directory in self._paths:
            return self._paths[directory]
        found: list[bytes] = []
        inode = directory
        while inode != ROOT and (names := self.list_names(inode)) and len(found) < 4096:
            inode, name = names[0]
            found.append(name)
        path = self._paths[directory] = tuple(reversed(found)) if inode == ROOT else None
        return path

    def has_directory(self, parent: int, name: bytes) -> bool:
        """Return True if the PFS shows the directory of a name."""
        return self.get_path(parent) is not None

    def get_location(self, parent: int, name: bytes) -> PfsLocation:
        """Return the location of a name; the path of a directory that the PFS does not show is empty."""
        return PfsLocation(parent, name, self.get_path(parent) or ())

    # --- planning -------------------------------------------------------------------------------------------------------

    def set_entry(self, parent: int, name: bytes, entry: PfsEntry) -> None:
        """Plan an entry under a name."""
        self.entries[parent, name] = entry
        self._add_change(parent, name, entry.inode, entry.fingerprint)
        self._paths = {ROOT: ()} if entry.inode in self._paths else self._paths

    def delete_entry(self, parent: int, name: bytes) -> None:
        """Plan that nothing is under a name."""
        self.entries[parent, name] = None
        self._add_change(parent, name, None, Fingerprint())
        self._paths = {ROOT: ()}

    def _add_change(self, parent: int, name: bytes, inode: int | None, fingerprint: Fingerprint) -> None:
        self.name_changes.append(ExpectedEntry(self.get_location(parent, name), inode, fingerprint, self.key))

    def set_pending(self, parent: int, name: bytes, inode: int) -> None:
        """Plan that an inode or nothing is under a name later, unless the name shows it already."""
        if inode == self.get_shown_inode(parent, name):
            self.delete_pending(parent, name)
            return
        self.pending_entries[parent, name] = inode
        self.pending_changes.append(PlannedPending(self.key, (parent, name), inode))

    def delete_pending(self, parent: int, name: bytes) -> None:
        """Plan that a name is as it should be."""
        if self.get_pending(parent, name) is not None:
            self.pending_entries[parent, name] = None
            self.pending_changes.append(PlannedPending(self.key, (parent, name), None))


_SELECT_MOVES = (
    "SELECT 1 FROM journal WHERE op IN ('rename', 'exchange', 'rmdir')"
    " AND ((parent = ? AND name = ?) OR (new_parent = ? AND new_name = ?)) LIMIT 1"
)


def find_path(db: Database, inode: int) -> tuple[bytes, ...] | None:
    """Return the names from the PFS's root to `inode`. Returns None if the PFS does not show it."""
    with db.read_transaction():
        return PfsView(db).get_path(inode)


def get_parent(db: Database, inode: int) -> int:
    """Return the directory of `inode` on the PFS; the root if the PFS does not show it."""
    return int(db.value("SELECT parent FROM pfs_entry WHERE inode = ? LIMIT 1", inode) or ROOT)


def find_pfs_inode(db: Database, inode: int) -> int | None:
    """Return st_ino of a directory on the PFS as last scanned. Returns None if it never was."""
    found: Any = db.value("SELECT seen_ino FROM pfs_entry WHERE inode = ? LIMIT 1", inode)
    return None if found is None else int(found)


def is_path_changing(db: Database, inode: int) -> bool:
    """Return True if write-back may be moving `inode` or a directory above it on the PFS."""
    while inode != ROOT:
        row = db.row("SELECT parent, name FROM pfs_entry WHERE inode = ? LIMIT 1", inode)
        if row is None:
            return True
        if db.value(_SELECT_MOVES, row[0], row[1], row[0], row[1]) is not None:
            return True
        inode = row[0]
    return False


def has_work(db: Database) -> bool:
    """Return True if the journal has rows, a batch is pending, or directories have stale times on the PFS."""
    tables = ("journal", "pfs_batch", "pfs_stale_times")
    return any(db.value(f"SELECT 1 FROM {table} LIMIT 1") is not None for table in tables)


def list_stale_times(db: Database, at_most: int) -> list[int]:
    """Return directories whose times on the PFS differ from the mount's."""
    return db.column("SELECT directory FROM pfs_stale_times LIMIT ?", at_most)


def delete_stale_times(db: Database, directories: Iterable[int]) -> None:
    """Record that these directories have their times on the PFS."""
    db.change("DELETE FROM pfs_stale_times WHERE directory IN (SELECT value FROM json_each(?))", json.dumps([*directories]))


def mark_sharing(db: Database, inodes: Iterable[int]) -> None:
    """Record that these files share blocks with others on the PFS."""
    db.change("UPDATE pfs_file SET sharing = 1 WHERE inode IN (SELECT value FROM json_each(?))", json.dumps([*inodes]))


def count_sharing(db: Database) -> tuple[int, ...]:
    """Return numbers that differ if files that share blocks came or went."""
    return tuple(db.row("SELECT count(*), total(inode), total(generation) FROM pfs_file WHERE sharing = 1") or ())


def count_shared_bytes(db: Database) -> int:
    """Return how many bytes the PFS does not store because files that this node knows share blocks there."""
    shared, seen = 0, {digest.ZERO_BLOCK}
    for size, blocks in db.rows("SELECT size, blocks FROM pfs_file WHERE sharing = 1 AND blocks IS NOT NULL"):
        numbers = {block: number for number, block in enumerate(digest.split_digests(blocks))}
        shared += sum(
            min(limits.BLOCK_BYTES, size - numbers[block] * limits.BLOCK_BYTES) for block in seen & numbers.keys() - {digest.ZERO_BLOCK}
        )
        seen |= numbers.keys()
    return shared


def list_recent_blocks(db: Database, size_min: int, at_most: int) -> list[tuple[int, bytes]]:
    """Return (inode, block digests) of files of at least `size_min` bytes, the newest first."""
    recent = "SELECT inode, blocks FROM pfs_file WHERE size >= ? AND length(blocks) > 0 ORDER BY mtime_ns DESC LIMIT ?"
    return db.rows(recent, size_min, at_most)
