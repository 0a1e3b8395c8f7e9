"""Owns what write-back knows of the PFS: `pfs_entry`, `published` and `pfs_pending` as they will be after what it is planning.

A `View` reads the tables and keeps planned changes to itself; they go into the tables with the batch that makes them true on the PFS
(catalog/pfs_batch.py). Import writes the same tables, but never names or inodes that the journal mentions.
If we die here: nothing was changed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptfs.catalog.database import Database
from ckptfs.model import ROOT

PfsName = tuple[int, bytes]
"""(directory, name in it)."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """How something on the PFS is recognised: st_ino (0: not known), and size and mtime of a file (-1: not known).

    While a batch is planned `ino` may be negative: what the batch itself is going to make, by its key.
    """

    ino: int = 0
    size: int = -1
    mtime_ns: int = -1


@dataclass(frozen=True, slots=True)
class PfsEntry:
    """What the PFS shows under a name."""

    inode: int
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A row of `published`: what the PFS shows of a file's bytes."""

    inode: int
    generation: int
    is_complete: bool
    size: int
    mtime_ns: int
    pfs_inode: int
    digest: bytes | None
    block_digests: bytes | None


def get_published(db: Database, inode: int) -> PublishedRow | None:
    """What the PFS shows of a file's bytes."""
    row = db.row("SELECT inode, generation, complete, size, mtime_ns, pfs_inode, digest, blocks FROM published WHERE inode = ?", inode)
    return None if row is None else PublishedRow(row[0], row[1], bool(row[2]), *row[3:])


def find_inode(db: Database, names: tuple[bytes, ...]) -> int | None:
    """The inode that the PFS shows under a path from its root, as far as we know."""
    inode = ROOT
    for name in names:
        found = db.value("SELECT inode FROM pfs_entry WHERE parent = ? AND name = ?", inode, name)
        if found is None:
            return None
        inode = found
    return inode


def delete_entries(db: Database, inode: int) -> None:
    """The PFS turned out not to show `inode`."""
    db.run("DELETE FROM pfs_entry WHERE inode = ?", inode)


def get_xattrs(db: Database, inode: int) -> dict[bytes, bytes]:
    """The extended attributes of an inode."""
    return {bytes(row[0]): bytes(row[1]) for row in db.rows("SELECT name, value FROM xattr WHERE inode = ?", inode)}


class PfsView:
    """The PFS as it will be after what was planned so far."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.entries: dict[PfsName, PfsEntry | None] = {}
        self.pending_entries: dict[PfsName, int | None] = {}
        self._paths: dict[int, tuple[bytes, ...] | None] = {ROOT: ()}

    # --- reading --------------------------------------------------------------------------------------------------------

    def get_entry(self, parent: int, name: bytes) -> PfsEntry | None:
        """What the PFS shows under a name."""
        if (parent, name) in self.entries:
            return self.entries[parent, name]
        row = self._db.row(
            "SELECT e.inode, coalesce(p.pfs_inode, e.seen_ino, 0), coalesce(p.size, -1), coalesce(p.mtime_ns, -1) FROM pfs_entry e"
            " LEFT JOIN published p ON p.inode = e.inode WHERE e.parent = ? AND e.name = ?",
            parent, name,
        )  # fmt: skip
        return None if row is None else PfsEntry(row[0], Fingerprint(*row[1:]))

    def get_pending(self, parent: int, name: bytes) -> int | None:
        """The file that will appear under a name with its first content."""
        if (parent, name) in self.pending_entries:
            return self.pending_entries[parent, name]
        found: int | None = self._db.value("SELECT inode FROM pfs_pending WHERE parent = ? AND name = ?", parent, name)
        return found

    def list_names(self, inode: int) -> list[PfsName]:
        """The names under which the PFS shows an inode."""
        rows = self._db.rows("SELECT parent, name FROM pfs_entry WHERE inode = ? ORDER BY parent, name", inode)
        catalogued = [(row[0], bytes(row[1])) for row in rows]
        kept = [name for name in catalogued if name not in self.entries]
        return kept + [name for name, shown in self.entries.items() if shown is not None and shown.inode == inode]

    def list_pending_names(self, inode: int) -> list[PfsName]:
        """The names under which an inode will appear."""
        rows = self._db.rows("SELECT parent, name FROM pfs_pending WHERE inode = ? ORDER BY parent, name", inode)
        catalogued = [(row[0], bytes(row[1])) for row in rows]
        kept = [name for name in catalogued if name not in self.pending_entries]
        return kept + [name for name, other in self.pending_entries.items() if other == inode]

    def get_path(self, directory: int) -> tuple[bytes, ...] | None:
        """The names from the PFS's root down to a directory; None where it shows no such directory."""
        if directory in self._paths:
            return self._paths[directory]
        above = self.list_names(directory)
        chain = [directory]
        found: list[bytes] = []
        while above:
            parent, name = above[0]
            found.append(name)
            if parent == ROOT:
                break
            chain.append(parent)
            above = self.list_names(parent)
            if len(chain) > 4096:
                above = []
        path = tuple(reversed(found)) if above else None
        self._paths[directory] = path
        return path

    # --- planning -------------------------------------------------------------------------------------------------------

    def set_entry(self, parent: int, name: bytes, entry: PfsEntry) -> None:
        """The PFS will show this under a name."""
        self.entries[parent, name] = entry
        self._paths = {ROOT: ()} if entry.inode in self._paths else self._paths

    def delete_entry(self, parent: int, name: bytes) -> None:
        """The PFS will show nothing of ours under a name."""
        self.entries[parent, name] = None
        self._paths = {ROOT: ()}

    def set_pending(self, parent: int, name: bytes, inode: int) -> None:
        """A file will appear under a name with its first content."""
        self.pending_entries[parent, name] = inode

    def delete_pending(self, parent: int, name: bytes) -> None:
        """Nothing will appear under a name."""
        if self.get_pending(parent, name) is not None:
            self.pending_entries[parent, name] = None

    def replace_fingerprints(self, change: Callable[[Fingerprint], Fingerprint]) -> None:
        """Put `change` of each planned mark in its place: what the batch made has its real number now."""
        for name, shown in self.entries.items():
            if shown is not None:
                self.entries[name] = replace(shown, fingerprint=change(shown.fingerprint))
