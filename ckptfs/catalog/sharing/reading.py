"""Which keys a question depends on: what must be read of the store before the rows here may answer it. Reads only."""

from collections.abc import Iterable

from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import kinds, seen
from ckptfs.catalog.sharing.applying import StoreValue
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, NAME, PFS_STATE, TIMES, SharedKey
from ckptfs.catalog.sharing.seen import CachedValue
from ckptfs.catalog.store import Get, Outcome, prefix_end

DIRECTORY_TYPE = 0o040000
FILE_TYPE = 0o100000


def list_inode_keys(db: Database, inode: int) -> list[SharedKey]:
    """What stat and open depend on: attributes; a directory's times; a file's content, and what the PFS shows of it."""
    row = db.row("SELECT mode & 61440, content FROM inode WHERE id = ?", inode)
    if row is None:
        return [SharedKey(INODE, inode), SharedKey(TIMES, inode)]
    if row[0] == DIRECTORY_TYPE:
        return [SharedKey(INODE, inode), SharedKey(TIMES, inode)]
    shown = [SharedKey(PFS_STATE, inode)] if db.is_journalled and row[0] == FILE_TYPE else []
    return [SharedKey(INODE, inode), *shown] if row[1] is None else [SharedKey(INODE, inode), *shown, SharedKey(CONTENT, row[1])]


def list_name_keys(db: Database, parent: int, name: bytes) -> list[SharedKey]:
    """What a lookup depends on, as far as it is known here what the name leads to."""
    child = db.value("SELECT child FROM entry WHERE parent = ? AND name = ?", parent, name)
    return [SharedKey(NAME, parent, name), *(list_inode_keys(db, child) if child is not None else ())]


def find_directory(db: Database, parent: int, name: bytes) -> int | None:
    """The directory that a name leads to, as far as it is known here."""
    found: int | None = db.value(
        "SELECT i.id FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ? AND e.name = ? AND i.mode & 61440 = 16384", parent, name
    )
    return found


def load_directory_location(db: Database, inode: int) -> tuple[list[SharedKey], int]:
    """What the place of a directory depends on, and its parent as far as it is known here."""
    row = db.row("SELECT parent, name FROM entry WHERE child = ?", inode)
    parent: int = db.value("SELECT parent FROM inode WHERE id = ?", inode) or 0
    return [*list_inode_keys(db, inode), *([] if row is None else [SharedKey(NAME, row[0], bytes(row[1]))])], parent


def list_missing_keys(db: Database, store_values: dict[SharedKey, StoreValue]) -> list[SharedKey]:
    """What these answers lead to and do not tell: inodes of names, contents of inodes."""
    wanted: list[SharedKey] = []
    for key, one in store_values.items():
        value = one.value.fields
        if value is None:
            continue
        if key.kind == NAME:
            wanted.append(SharedKey(INODE, value["child"]))
            if value["type"] == DIRECTORY_TYPE:
                wanted.append(SharedKey(TIMES, value["child"]))
        elif key.kind == INODE and value["mode"] & 0o170000 == FILE_TYPE:
            if db.is_journalled:
                wanted.append(SharedKey(PFS_STATE, key.number))
            if value["content"] is not None:
                wanted.append(SharedKey(CONTENT, value["content"]))
    return [key for key in dict.fromkeys(wanted) if key not in store_values]


def list_overtaken_names(store_values: dict[SharedKey, StoreValue]) -> list[SharedKey]:
    """Names that lead to what was gone when it was asked for a moment later: another file may have had its place at every moment. One that
    is overtaken again was changed again within a round trip.
    """
    found = []
    for key, one in store_values.items():
        if key.kind == NAME and (value := one.value.fields) is not None:
            child = store_values.get(SharedKey(INODE, value["child"]))
            if child is not None and child.value.raw is None and child.read_revision > one.read_revision:
                found.append(key)
    return found


def list_uncached(db: Database, keys: Iterable[SharedKey]) -> list[SharedKey]:
    """Those of which nothing is known here."""
    return [key for key in keys if not seen.get_cached(db, key).revision]


def build_gets(keys: Iterable[SharedKey]) -> list[Get]:
    """How they are read."""
    return [Get(kinds.encode_key(key)) for key in keys]


def parse_outcome(keys: list[SharedKey], outcome: Outcome) -> dict[SharedKey, StoreValue]:
    """What came of `gets(keys)`."""
    found: dict[SharedKey, StoreValue] = {}
    for key, items in zip(keys, outcome.results, strict=False):
        item = items[0] if items else None
        found[key] = StoreValue(outcome.revision, seen.ABSENT if item is None else CachedValue(item.mod_revision, item.value))
    return found


def build_page_get(directory: int, after: bytes, at_most: int) -> Get:
    """The names of a directory after one of them (empty: from the first)."""
    names = kinds.encode_key(SharedKey(NAME, directory, after))
    return Get(names + b"\0" if after else names, prefix_end(kinds.build_names_prefix(directory)), limit=at_most)


def parse_page(
    db: Database, directory: int, after: bytes, at_most: int, outcome: Outcome
) -> tuple[dict[SharedKey, StoreValue], bytes | None]:
    """What a page says, of names that are gone too; and the name after which the next one begins, None: there is none."""
    items = outcome.results[0]
    found = {kinds.decode_key(item.key): StoreValue(outcome.revision, CachedValue(item.mod_revision, item.value)) for item in items}
    last = kinds.decode_key(items[-1].key).name if len(items) == at_most else None
    for name in seen.list_cached_names(db, directory, after, last):
        found.setdefault(SharedKey(NAME, directory, name), StoreValue(outcome.revision, seen.ABSENT))
    return found, last
