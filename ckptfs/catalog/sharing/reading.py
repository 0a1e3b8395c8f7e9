"""Which keys a question depends on: what must be read of the store before the rows here may answer it. Reads only."""

from collections.abc import Iterable

from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import kinds, seen
from ckptfs.catalog.sharing.applying import Told
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, NAME, SHOWN, TIMES, Key
from ckptfs.catalog.sharing.seen import Seen
from ckptfs.catalog.store import Get, Outcome, prefix_end

DIRECTORY = 0o040000
FILE = 0o100000


def of_inode(db: Database, inode: int) -> list[Key]:
    """What stat and open depend on: attributes; a directory's times; a file's content, and what the PFS shows of it."""
    row = db.row("SELECT mode & 61440, content FROM inode WHERE id = ?", inode)
    if row is None:
        return [Key(INODE, inode), Key(TIMES, inode)]
    if row[0] == DIRECTORY:
        return [Key(INODE, inode), Key(TIMES, inode)]
    shown = [Key(SHOWN, inode)] if db.journalled and row[0] == FILE else []
    return [Key(INODE, inode), *shown] if row[1] is None else [Key(INODE, inode), *shown, Key(CONTENT, row[1])]


def of_name(db: Database, parent: int, name: bytes) -> list[Key]:
    """What a lookup depends on, as far as it is known here what the name leads to."""
    child = db.value("SELECT child FROM entry WHERE parent = ? AND name = ?", parent, name)
    return [Key(NAME, parent, name), *(of_inode(db, child) if child is not None else ())]


def directory(db: Database, parent: int, name: bytes) -> int | None:
    """The directory that a name leads to, as far as it is known here."""
    found: int | None = db.value(
        "SELECT i.id FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ? AND e.name = ? AND i.mode & 61440 = 16384", parent, name
    )
    return found


def above(db: Database, inode: int) -> tuple[list[Key], int]:
    """What the place of a directory depends on, and its parent as far as it is known here."""
    row = db.row("SELECT parent, name FROM entry WHERE child = ?", inode)
    parent: int = db.value("SELECT parent FROM inode WHERE id = ?", inode) or 0
    return [*of_inode(db, inode), *([] if row is None else [Key(NAME, row[0], bytes(row[1]))])], parent


def lacking(db: Database, told: dict[Key, Told]) -> list[Key]:
    """What these answers lead to and do not tell: inodes of names, contents of inodes."""
    wanted: list[Key] = []
    for key, one in told.items():
        value = one.seen.content
        if value is None:
            continue
        if key.kind == NAME:
            wanted.append(Key(INODE, value["child"]))
            if value["type"] == DIRECTORY:
                wanted.append(Key(TIMES, value["child"]))
        elif key.kind == INODE and value["mode"] & 0o170000 == FILE:
            if db.journalled:
                wanted.append(Key(SHOWN, key.number))
            if value["content"] is not None:
                wanted.append(Key(CONTENT, value["content"]))
    return [key for key in dict.fromkeys(wanted) if key not in told]


def overtaken(told: dict[Key, Told]) -> list[Key]:
    """Names that lead to what was gone when it was asked for a moment later: another file may have had its place at every moment. One that
    is overtaken again was changed again within a round trip.
    """
    found = []
    for key, one in told.items():
        if key.kind == NAME and (value := one.seen.content) is not None:
            child = told.get(Key(INODE, value["child"]))
            if child is not None and child.seen.value is None and child.asked > one.asked:
                found.append(key)
    return found


def unknown(db: Database, keys: Iterable[Key]) -> list[Key]:
    """Those of which nothing is known here."""
    return [key for key in keys if not seen.get(db, key).revision]


def gets(keys: Iterable[Key]) -> list[Get]:
    """How they are read."""
    return [Get(kinds.wire(key)) for key in keys]


def answers(keys: list[Key], outcome: Outcome) -> dict[Key, Told]:
    """What came of `gets(keys)`."""
    found: dict[Key, Told] = {}
    for key, items in zip(keys, outcome.results, strict=False):
        item = items[0] if items else None
        found[key] = Told(outcome.revision, seen.NEVER if item is None else Seen(item.mod_revision, item.value))
    return found


def page(directory: int, after: bytes, at_most: int) -> Get:
    """The names of a directory after one of them (empty: from the first)."""
    names = kinds.wire(Key(NAME, directory, after))
    return Get(names + b"\0" if after else names, prefix_end(kinds.names_in(directory)), limit=at_most)


def of_page(db: Database, directory: int, after: bytes, at_most: int, outcome: Outcome) -> tuple[dict[Key, Told], bytes | None]:
    """What a page says, of names that are gone too; and the name after which the next one begins, None: there is none."""
    items = outcome.results[0]
    found = {kinds.parse(item.key): Told(outcome.revision, Seen(item.mod_revision, item.value)) for item in items}
    last = kinds.parse(items[-1].key).name if len(items) == at_most else None
    for name in seen.names_between(db, directory, after, last):
        found.setdefault(Key(NAME, directory, name), Told(outcome.revision, seen.NEVER))
    return found, last
