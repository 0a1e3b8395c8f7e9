"""What the store says now of all that some rows of a journal are about: names and inodes, and what the PFS shows of them and where.

Inodes, contents and what is on the PFS go into the catalog as they are read; what is gone there is only noted here, for it is the mount
that takes names away. Everything that was read has its revision: who acts on it compares that.
If we die here: what was read is in the catalog, or is read again.
"""

import stat
from collections.abc import Container, Iterable, Iterator

from ckptfs.catalog import adoption, identity
from ckptfs.catalog.database import Database
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.sharing import applying, kinds, pfs_kinds, reading, seen, touching
from ckptfs.catalog.sharing.applying import RecentDeletes, StoreValue
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, JOURNAL_ROW, NAME, PFS_NAME, PFS_STATE, TIMES, SharedKey, Value
from ckptfs.catalog.store import Store, iter_range, prefix_end
from ckptfs.errors import Busy
from ckptfs.model import ROOT

Name = tuple[int, bytes]

ROUNDS_MAX = 64


def list_published_rows(db: Database, instance: str, rows: list[JournalRow]) -> list[JournalRow]:
    """The rows up to the first of which the other nodes were not told yet: what it says may still be taken back."""
    for place, row in enumerate(rows):
        if touching.is_dirty(db, build_row_key(db, instance, row)):
            return rows[:place]
    return rows


def build_row_key(db: Database, instance: str, row: JournalRow) -> SharedKey:
    """Under which key the store has a row of this node's journal."""
    return SharedKey(JOURNAL_ROW, identity.get_node_number(db), pfs_kinds.build_row_name(instance, row.seq))


def load_inodes(db: Database, store: Store, *inodes: int) -> None:
    """The catalog knows what the store says of these inodes, and of where the PFS shows them. Raises what `Truth.learn` raises."""
    StoreSnapshot(db, store).load(adoption.get_instance_id(db), inodes=inodes)


class NotLoaded(Busy):
    """Of this inode nothing was read; it is to be read, too."""

    def __init__(self, inode: int) -> None:
        super().__init__(f"inode {inode} has to do with it")
        self.inode = inode


class StoreSnapshot:
    """What the store says. Read with `learn`; questions that need more than that raise Unread."""

    def __init__(self, db: Database, store: Store) -> None:
        self._db = db
        self._store = store
        self.store_values: dict[SharedKey, StoreValue] = {}
        self._directory_names: dict[int, Name | None] = {}
        self._pfs_names: dict[int, list[Name]] = {}
        self._is_loading = False

    def load(self, instance: str, rows: Iterable[JournalRow] = (), inodes: Iterable[int] = ()) -> None:
        """Read all that these rows and inodes lead to. Raises Unreachable, and Busy when that moves on all the time."""
        rows, inodes = list(rows), list(inodes)
        self._is_loading = True
        try:
            self._load_in_rounds(instance, rows, inodes)
        finally:
            self._is_loading = False

    def _load_in_rounds(self, instance: str, rows: list[JournalRow], inodes: list[int]) -> None:
        for _ in range(ROUNDS_MAX):
            wanted = dict.fromkeys(self._list_needed_keys(instance, rows, inodes))
            keys = [key for key in wanted if key not in self.store_values]
            if not keys:
                return self._require_published()
            found = reading.parse_outcome(keys, self._store.read(reading.build_gets(keys)))
            self.store_values |= found
            self._apply_to_catalog(found)
        raise Busy("what is to be written back moves about")

    def _require_published(self) -> None:
        """What was changed here of what the PFS shows, and elsewhere too, is told before anything is built on it."""
        for key, one in self.store_values.items():
            if key.kind in {PFS_STATE, PFS_NAME} and seen.get_cached(self._db, key).revision != one.value.revision:
                raise Busy("what the PFS shows is being told to the other nodes")

    def _apply_to_catalog(self, found: dict[SharedKey, StoreValue]) -> None:
        known = {PFS_STATE, PFS_NAME}
        taken = {key: one for key, one in found.items() if key.kind in known or (key.kind in {INODE, TIMES, CONTENT} and one.value.raw)}
        applying.apply_values(self._db, taken, RecentDeletes(), _OpenForWriting(self._db))

    # --- what is needed -----------------------------------------------------------------------------------------------

    def _list_needed_keys(self, instance: str, rows: list[JournalRow], inodes: list[int]) -> Iterator[SharedKey]:
        names: set[Name] = set()
        subjects = set(inodes)
        for row in rows:
            yield build_row_key(self._db, instance, row)
            subjects.add(row.inode)
            names.update(list_row_names(row))
            if row.content is not None:
                yield SharedKey(CONTENT, row.content)
        for _ in range(2):  # What a name leads to, and where that belongs.
            names.update(name for inode in subjects for name in (*self.list_names(inode), *self.list_pfs_names(inode)))
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
        """Whether the PFS still shows a directory that is gone: what it shows in there has to go first."""
        seen = (self.get_value(SharedKey(PFS_STATE, inode)) or {}).get("seen")
        return seen is not None and stat.S_ISDIR(seen[1]) and SharedKey(INODE, inode) in self.store_values and not self.is_alive(inode)

    def _list_ancestor_keys(self, directories: set[int]) -> Iterator[SharedKey]:
        """Where directories are, in the tree and on the PFS, up to the root."""
        done: set[int] = set()
        while directories:
            directory = directories.pop()
            done.add(directory)
            yield SharedKey(INODE, directory)
            yield SharedKey(PFS_STATE, directory)
            for name in (*self.list_names(directory), *self.list_pfs_names(directory)):
                yield SharedKey(NAME, *name)
                yield SharedKey(PFS_NAME, *name)
                directories |= {name[0]} - done

    # --- what it says -------------------------------------------------------------------------------------------------

    def list_pfs_names_in(self, directory: int) -> list[Name]:
        """The names that the PFS shows in a directory, or is about to."""
        if directory not in self._pfs_names:
            start = kinds.encode_key(SharedKey(PFS_NAME, directory))
            items = iter_range(self._store, start, prefix_end(start), keys_only=True)
            self._pfs_names[directory] = [(directory, kinds.decode_key(item.key).name) for _, item in items]
        return self._pfs_names[directory]

    def get_value(self, key: SharedKey) -> Value | None:
        """What was read; None for what is not there, or was not read."""
        one = self.store_values.get(key)
        if one is None and key.kind in {INODE, PFS_STATE} and not self._is_loading:
            raise NotLoaded(key.number)
        return None if one is None else one.value.fields

    def get_revision(self, key: SharedKey) -> int:
        """The revision of what was read; 0 for what is not there."""
        one = self.store_values.get(key)
        return 0 if one is None else one.value.revision

    def require_loaded(self, inode: int) -> None:
        """All was read of an inode and its names. Raises Unread."""
        if any(SharedKey(PFS_NAME, *name) not in self.store_values for name in (*self.list_names(inode), *self.list_pfs_names(inode))):
            raise NotLoaded(inode)

    def is_alive(self, inode: int) -> bool:
        """Whether it has a name."""
        return inode == ROOT or self.get_value(SharedKey(INODE, inode)) is not None

    def get_child(self, name: Name) -> int | None:
        """What a name leads to."""
        value = self.get_value(SharedKey(NAME, *name))
        return None if value is None else int(value["child"])

    def get_pfs_inode(self, name: Name) -> int | None:
        """What the PFS shows under a name."""
        value = self.get_value(SharedKey(PFS_NAME, *name))
        return None if value is None else value["inode"] or None

    def get_intent(self, name: Name) -> Value | None:
        """The intention of a node to change what the PFS shows under a name."""
        value = self.get_value(SharedKey(PFS_NAME, *name))
        return value if value is not None and "by" in value else None

    def has_intent(self, inode: int) -> bool:
        """Whether a node is about to change what the PFS shows of an inode."""
        return "by" in (self.get_value(SharedKey(PFS_STATE, inode)) or {})

    def list_intents(self) -> list[tuple[SharedKey, int]]:
        """All that were read: of which name or inode, by which node."""
        values = [(key, one.value.fields or {}) for key, one in self.store_values.items() if key.kind in {PFS_NAME, PFS_STATE}]
        return [(key, int(value["by"])) for key, value in values if "by" in value]

    def list_names(self, inode: int) -> list[Name]:
        """All names of an inode."""
        value = self.get_value(SharedKey(INODE, inode))
        if value is None or inode == ROOT:
            return []
        if "names" in value:
            return [(parent, name.encode("latin-1")) for parent, name in value["names"]]
        name = self._get_directory_name(inode, value["parent"])
        return [] if name is None else [name]

    def list_pfs_names(self, inode: int) -> list[Name]:
        """The names under which the PFS shows an inode."""
        value = self.get_value(SharedKey(PFS_STATE, inode))
        return [] if value is None else [(parent, name.encode("latin-1")) for parent, name in value["names"]]

    def get_writer(self, content: int) -> int:
        """The node that wrote a content last; 0 where the store knows none."""
        value = self.get_value(SharedKey(CONTENT, content))
        return 0 if value is None else int(value["node"])

    def get_content_id(self, inode: int) -> int | None:
        """The content that a file has now."""
        value = self.get_value(SharedKey(INODE, inode))
        return None if value is None else value.get("content")

    def _get_directory_name(self, directory: int, parent: int) -> Name | None:
        """A directory's value says in which one it is; its name there is remembered, or looked for."""
        if directory not in self._directory_names or (name := self._directory_names[directory]) is None or name[0] != parent:
            self._directory_names[directory] = self._find_directory_name(directory, parent)
        return self._directory_names[directory]

    def _find_directory_name(self, directory: int, parent: int) -> Name | None:
        rows = self._db.rows("SELECT name FROM entry WHERE parent = ? AND child = ?", parent, directory)
        for (name,) in [*rows, *((key.name,) for key in self.store_values if key.kind == NAME and key.number == parent)]:
            key = SharedKey(NAME, parent, bytes(name))
            if key not in self.store_values:
                found = reading.parse_outcome([key], self._store.read(reading.build_gets([key])))
                self.store_values |= found
            if self.get_child((parent, key.name)) == directory:
                return parent, key.name
        inside = kinds.build_names_prefix(parent)
        for _, item in iter_range(self._store, inside, prefix_end(inside)):
            if (kinds.decode_value(item.value) or {"child": 0})["child"] == directory:
                return parent, kinds.decode_key(item.key).name
        return None


class _OpenForWriting(Container[int]):
    """The inodes that are open for writing here."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def __contains__(self, inode: object) -> bool:
        return self._db.value("SELECT 1 FROM handle WHERE inode = ? AND writer = 1 LIMIT 1", inode) is not None


def list_row_names(row: JournalRow) -> list[Name]:
    """The names that a row is about."""
    found = [] if row.name is None else [(row.parent, row.name)]
    return found if row.new_name is None else [*found, (row.new_parent, row.new_name)]
