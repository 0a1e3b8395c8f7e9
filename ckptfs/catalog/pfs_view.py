"""Owns what write-back knows of the PFS: `pfs_entry`, `published` and `pfs_pending` as they will be after what it is planning.

A `View` reads the tables and keeps planned changes to itself; they go into the tables with the batch that makes them true on the PFS
(catalog/pfs_batch.py). Import writes the same tables, but never names or inodes that the journal mentions.
If we die here: nothing was changed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ckptfs.catalog.database import Database
from ckptfs.model import ROOT

Name = tuple[int, bytes]
"""(directory, name in it)."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How something on the PFS is recognised: st_ino (0: not known), and size and mtime of a file (-1: not known).

    While a batch is planned `ino` may be negative: what the batch itself is going to make, by its key.
    """

    ino: int = 0
    size: int = -1
    mtime_ns: int = -1


@dataclass(frozen=True, slots=True)
class Shown:
    """What the PFS shows under a name."""

    inode: int
    mark: Mark


@dataclass(frozen=True, slots=True)
class Published:
    """A row of `published`: what the PFS shows of a file's bytes."""

    inode: int
    generation: int
    complete: bool
    size: int
    mtime_ns: int
    pfs_inode: int
    digest: bytes | None
    blocks: bytes | None


def published(db: Database, inode: int) -> Published | None:
    """What the PFS shows of a file's bytes."""
    row = db.row("SELECT inode, generation, complete, size, mtime_ns, pfs_inode, digest, blocks FROM published WHERE inode = ?", inode)
    return None if row is None else Published(row[0], row[1], bool(row[2]), *row[3:])


def inode_at(db: Database, names: tuple[bytes, ...]) -> int | None:
    """The inode that the PFS shows under a path from its root, as far as we know."""
    inode = ROOT
    for name in names:
        found = db.value("SELECT inode FROM pfs_entry WHERE parent = ? AND name = ?", inode, name)
        if found is None:
            return None
        inode = found
    return inode


def forget(db: Database, inode: int) -> None:
    """The PFS turned out not to show `inode`."""
    db.run("DELETE FROM pfs_entry WHERE inode = ?", inode)


def xattrs(db: Database, inode: int) -> dict[bytes, bytes]:
    """The extended attributes of an inode."""
    return {bytes(row[0]): bytes(row[1]) for row in db.rows("SELECT name, value FROM xattr WHERE inode = ?", inode)}


class View:
    """The PFS as it will be after what was planned so far."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.entries: dict[Name, Shown | None] = {}
        self.pendings: dict[Name, int | None] = {}
        self._paths: dict[int, tuple[bytes, ...] | None] = {ROOT: ()}

    # --- reading --------------------------------------------------------------------------------------------------------

    def shown(self, parent: int, name: bytes) -> Shown | None:
        """What the PFS shows under a name."""
        if (parent, name) in self.entries:
            return self.entries[parent, name]
        row = self._db.row(
            "SELECT e.inode, coalesce(p.pfs_inode, e.seen_ino, 0), coalesce(p.size, -1), coalesce(p.mtime_ns, -1) FROM pfs_entry e"
            " LEFT JOIN published p ON p.inode = e.inode WHERE e.parent = ? AND e.name = ?",
            parent, name,
        )  # fmt: skip
        return None if row is None else Shown(row[0], Mark(*row[1:]))

    def pending(self, parent: int, name: bytes) -> int | None:
        """The file that will appear under a name with its first content."""
        if (parent, name) in self.pendings:
            return self.pendings[parent, name]
        found: int | None = self._db.value("SELECT inode FROM pfs_pending WHERE parent = ? AND name = ?", parent, name)
        return found

    def names(self, inode: int) -> list[Name]:
        """The names under which the PFS shows an inode."""
        rows = self._db.rows("SELECT parent, name FROM pfs_entry WHERE inode = ? ORDER BY parent, name", inode)
        before = [(row[0], bytes(row[1])) for row in rows]
        kept = [name for name in before if name not in self.entries]
        return kept + [name for name, shown in self.entries.items() if shown is not None and shown.inode == inode]

    def pending_names(self, inode: int) -> list[Name]:
        """The names under which an inode will appear."""
        rows = self._db.rows("SELECT parent, name FROM pfs_pending WHERE inode = ? ORDER BY parent, name", inode)
        before = [(row[0], bytes(row[1])) for row in rows]
        kept = [name for name in before if name not in self.pendings]
        return kept + [name for name, other in self.pendings.items() if other == inode]

    def path(self, directory: int) -> tuple[bytes, ...] | None:
        """The names from the PFS's root down to a directory; None where it shows no such directory."""
        if directory in self._paths:
            return self._paths[directory]
        above = self.names(directory)
        chain = [directory]
        found: list[bytes] = []
        while above:
            parent, name = above[0]
            found.append(name)
            if parent == ROOT:
                break
            chain.append(parent)
            above = self.names(parent)
            if len(chain) > 4096:
                above = []
        path = tuple(reversed(found)) if above else None
        self._paths[directory] = path
        return path

    # --- planning -------------------------------------------------------------------------------------------------------

    def show(self, parent: int, name: bytes, shown: Shown) -> None:
        """The PFS will show this under a name."""
        self.entries[parent, name] = shown
        self._paths = {ROOT: ()} if shown.inode in self._paths else self._paths

    def hide(self, parent: int, name: bytes) -> None:
        """The PFS will show nothing of ours under a name."""
        self.entries[parent, name] = None
        self._paths = {ROOT: ()}

    def expect(self, parent: int, name: bytes, inode: int) -> None:
        """A file will appear under a name with its first content."""
        self.pendings[parent, name] = inode

    def drop(self, parent: int, name: bytes) -> None:
        """Nothing will appear under a name."""
        if self.pending(parent, name) is not None:
            self.pendings[parent, name] = None

    def remark(self, change: Callable[[Mark], Mark]) -> None:
        """Put `change` of each planned mark in its place: what the batch made has its real number now."""
        for name, shown in self.entries.items():
            if shown is not None:
                self.entries[name] = replace(shown, mark=change(shown.mark))
