"""What the store says now of all that some rows of a journal are about: names and inodes, and what the PFS shows of them and where.

Inodes, contents and what is on the PFS go into the catalog as they are read; what is gone there is only noted here, for it is the mount
that takes names away. Everything that was read has its revision: who acts on it compares that.
If we die here: what was read is in the catalog, or is read again.
"""

import stat
from collections.abc import Container, Iterable, Iterator

from ckptfs.catalog import adoption, identity
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import Row
from ckptfs.catalog.sharing import applying, kinds, pfs_kinds, reading, seen, touching
from ckptfs.catalog.sharing.applying import Recent, Told
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, NAME, PLACE, ROW, SHOWN, TIMES, Key, Value
from ckptfs.catalog.store import Store, prefix_end, scan
from ckptfs.errors import Busy
from ckptfs.model import ROOT

Name = tuple[int, bytes]

ROUNDS_MAX = 64


def told_rows(db: Database, instance: str, rows: list[Row]) -> list[Row]:
    """The rows up to the first of which the other nodes were not told yet: what it says may still be taken back."""
    for place, row in enumerate(rows):
        if touching.is_touched(db, row_key(db, instance, row)):
            return rows[:place]
    return rows


def row_key(db: Database, instance: str, row: Row) -> Key:
    """Under which key the store has a row of this node's journal."""
    return Key(ROW, identity.number(db), pfs_kinds.row_name(instance, row.seq))


def look_up(db: Database, store: Store, *inodes: int) -> None:
    """The catalog knows what the store says of these inodes, and of where the PFS shows them. Raises what `Truth.learn` raises."""
    Truth(db, store).learn(adoption.instance(db), inodes=inodes)


class Unread(Busy):
    """Of this inode nothing was read; it is to be read, too."""

    def __init__(self, inode: int) -> None:
        super().__init__(f"inode {inode} has to do with it")
        self.inode = inode


class Truth:
    """What the store says. Read with `learn`; questions that need more than that raise Unread."""

    def __init__(self, db: Database, store: Store) -> None:
        self._db = db
        self._store = store
        self.told: dict[Key, Told] = {}
        self._names: dict[int, Name | None] = {}
        self._inside: dict[int, list[Name]] = {}
        self._learning = False

    def learn(self, instance: str, rows: Iterable[Row] = (), inodes: Iterable[int] = ()) -> None:
        """Read all that these rows and inodes lead to. Raises Unreachable, and Busy when that moves on all the time."""
        rows, inodes = list(rows), list(inodes)
        self._learning = True
        try:
            self._learn(instance, rows, inodes)
        finally:
            self._learning = False

    def _learn(self, instance: str, rows: list[Row], inodes: list[int]) -> None:
        for _ in range(ROUNDS_MAX):
            wanted = dict.fromkeys(self._wanted(instance, rows, inodes))
            keys = [key for key in wanted if key not in self.told]
            if not keys:
                return self._demand_told()
            found = reading.answers(keys, self._store.read(reading.gets(keys)))
            self.told |= found
            self._apply(found)
        raise Busy("what is to be written back moves about")

    def _demand_told(self) -> None:
        """What was changed here of what the PFS shows, and elsewhere too, is told before anything is built on it."""
        for key, one in self.told.items():
            if key.kind in {SHOWN, PLACE} and seen.get(self._db, key).revision != one.seen.revision:
                raise Busy("what the PFS shows is being told to the other nodes")

    def _apply(self, found: dict[Key, Told]) -> None:
        known = {SHOWN, PLACE}
        taken = {key: one for key, one in found.items() if key.kind in known or (key.kind in {INODE, TIMES, CONTENT} and one.seen.value)}
        applying.take_over(self._db, taken, Recent(), _Written(self._db))

    # --- what is needed -----------------------------------------------------------------------------------------------

    def _wanted(self, instance: str, rows: list[Row], inodes: list[int]) -> Iterator[Key]:
        names: set[Name] = set()
        subjects = set(inodes)
        for row in rows:
            yield row_key(self._db, instance, row)
            subjects.add(row.inode)
            names.update(names_of(row))
            if row.content is not None:
                yield Key(CONTENT, row.content)
        for _ in range(2):  # What a name leads to, and where that belongs.
            names.update(name for inode in subjects for name in (*self.names(inode), *self.shown(inode)))
            subjects |= {inode for name in names for inode in (self.child(name), self.inode_at(name)) if inode}
            names.update(name for inode in subjects if self._is_directory_gone(inode) for name in self.inside(inode))
        for name in names:
            yield Key(NAME, *name)
            yield Key(PLACE, *name)
        for inode in subjects:
            yield Key(INODE, inode)
            yield Key(SHOWN, inode)
        for inode in inodes:
            yield Key(TIMES, inode)
        yield from self._above({parent for parent, _ in names})

    def _is_directory_gone(self, inode: int) -> bool:
        """Whether the PFS still shows a directory that is gone: what it shows in there has to go first."""
        seen = (self.value(Key(SHOWN, inode)) or {}).get("seen")
        return seen is not None and stat.S_ISDIR(seen[1]) and Key(INODE, inode) in self.told and not self.alive(inode)

    def _above(self, directories: set[int]) -> Iterator[Key]:
        """Where directories are, in the tree and on the PFS, up to the root."""
        done: set[int] = set()
        while directories:
            directory = directories.pop()
            done.add(directory)
            yield Key(INODE, directory)
            yield Key(SHOWN, directory)
            for name in (*self.names(directory), *self.shown(directory)):
                yield Key(NAME, *name)
                yield Key(PLACE, *name)
                directories |= {name[0]} - done

    # --- what it says -------------------------------------------------------------------------------------------------

    def inside(self, directory: int) -> list[Name]:
        """The names that the PFS shows in a directory, or is about to."""
        if directory not in self._inside:
            start = kinds.wire(Key(PLACE, directory))
            items = scan(self._store, start, prefix_end(start), keys_only=True)
            self._inside[directory] = [(directory, kinds.parse(item.key).name) for _, item in items]
        return self._inside[directory]

    def value(self, key: Key) -> Value | None:
        """What was read; None for what is not there, or was not read."""
        one = self.told.get(key)
        if one is None and key.kind in {INODE, SHOWN} and not self._learning:
            raise Unread(key.number)
        return None if one is None else one.seen.content

    def revision(self, key: Key) -> int:
        """The revision of what was read; 0 for what is not there."""
        one = self.told.get(key)
        return 0 if one is None else one.seen.revision

    def demand(self, inode: int) -> None:
        """All was read of an inode and its names. Raises Unread."""
        if any(Key(PLACE, *name) not in self.told for name in (*self.names(inode), *self.shown(inode))):
            raise Unread(inode)

    def alive(self, inode: int) -> bool:
        """Whether it has a name."""
        return inode == ROOT or self.value(Key(INODE, inode)) is not None

    def child(self, name: Name) -> int | None:
        """What a name leads to."""
        value = self.value(Key(NAME, *name))
        return None if value is None else int(value["child"])

    def inode_at(self, name: Name) -> int | None:
        """What the PFS shows under a name."""
        value = self.value(Key(PLACE, *name))
        return None if value is None else value["inode"] or None

    def intended(self, name: Name) -> Value | None:
        """The intention of a node to change what the PFS shows under a name."""
        value = self.value(Key(PLACE, *name))
        return value if value is not None and "by" in value else None

    def in_hand(self, inode: int) -> bool:
        """Whether a node is about to change what the PFS shows of an inode."""
        return "by" in (self.value(Key(SHOWN, inode)) or {})

    def intentions(self) -> list[tuple[Key, int]]:
        """All that were read: of which name or inode, by which node."""
        values = [(key, one.seen.content or {}) for key, one in self.told.items() if key.kind in {PLACE, SHOWN}]
        return [(key, int(value["by"])) for key, value in values if "by" in value]

    def names(self, inode: int) -> list[Name]:
        """All names of an inode."""
        value = self.value(Key(INODE, inode))
        if value is None or inode == ROOT:
            return []
        if "names" in value:
            return [(parent, name.encode("latin-1")) for parent, name in value["names"]]
        name = self._name_of_directory(inode, value["parent"])
        return [] if name is None else [name]

    def shown(self, inode: int) -> list[Name]:
        """The names under which the PFS shows an inode."""
        value = self.value(Key(SHOWN, inode))
        return [] if value is None else [(parent, name.encode("latin-1")) for parent, name in value["names"]]

    def writer(self, content: int) -> int:
        """The node that wrote a content last; 0 where the store knows none."""
        value = self.value(Key(CONTENT, content))
        return 0 if value is None else int(value["node"])

    def holds(self, inode: int) -> int | None:
        """The content that a file has now."""
        value = self.value(Key(INODE, inode))
        return None if value is None else value.get("content")

    def _name_of_directory(self, directory: int, parent: int) -> Name | None:
        """A directory's value says in which one it is; its name there is remembered, or looked for."""
        if directory not in self._names or (name := self._names[directory]) is None or name[0] != parent:
            self._names[directory] = self._search(directory, parent)
        return self._names[directory]

    def _search(self, directory: int, parent: int) -> Name | None:
        rows = self._db.rows("SELECT name FROM entry WHERE parent = ? AND child = ?", parent, directory)
        for (name,) in [*rows, *((key.name,) for key in self.told if key.kind == NAME and key.number == parent)]:
            key = Key(NAME, parent, bytes(name))
            if key not in self.told:
                found = reading.answers([key], self._store.read(reading.gets([key])))
                self.told |= found
            if self.child((parent, key.name)) == directory:
                return parent, key.name
        inside = kinds.names_in(parent)
        for _, item in scan(self._store, inside, prefix_end(inside)):
            if (kinds.unpack(item.value) or {"child": 0})["child"] == directory:
                return parent, kinds.parse(item.key).name
        return None


class _Written(Container[int]):
    """The inodes that are open for writing here."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def __contains__(self, inode: object) -> bool:
        return self._db.value("SELECT 1 FROM handle WHERE inode = ? AND writer = 1 LIMIT 1", inode) is not None


def names_of(row: Row) -> list[Name]:
    """The names that a row is about."""
    found = [] if row.name is None else [(row.parent, row.name)]
    return found if row.new_name is None else [*found, (row.new_parent, row.new_name)]
