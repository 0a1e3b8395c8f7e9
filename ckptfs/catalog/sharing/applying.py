"""Takes over what was read of the store: never over a change of this node that was not told, never back to something older.

If we die here: one change of the catalog, whole or not at all.
"""

from collections import OrderedDict
from collections.abc import Container, Mapping
from typing import NamedTuple

from ckptfs import limits
from ckptfs.catalog import former
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import kinds, merging, seen, touching
from ckptfs.catalog.sharing.kinds import INODE, NAME, TIMES, Key
from ckptfs.catalog.sharing.seen import Seen


class Told(NamedTuple):
    """What the store said of a key, when it was at `asked`."""

    asked: int
    seen: Seen


class Recent:
    """Keys that are gone, and since which revision: an answer that was under way then must not bring them back."""

    def __init__(self) -> None:
        self._gone: OrderedDict[Key, int] = OrderedDict()

    def gone(self, key: Key, revision: int) -> None:
        """It is not there from this revision on."""
        self._gone.pop(key, None)
        self._gone[key] = revision
        if len(self._gone) > limits.RECENT_KEYS_MAX:
            self._gone.popitem(last=False)

    def outdated(self, key: Key, told: Told) -> bool:
        """Whether this answer is older than what is known."""
        return told.asked < self._gone.get(key, 0)


def news(db: Database, told: Mapping[Key, Told], recent: Recent) -> dict[Key, Told]:
    """What of it is not known yet and may be taken over."""
    return {key: one for key, one in told.items() if _is_news(db, key, one, recent)}


def _is_news(db: Database, key: Key, told: Told, recent: Recent) -> bool:
    known = seen.get(db, key)
    if known.revision == told.seen.revision:
        return False
    newer = known.revision <= told.asked if told.seen.value is None else told.seen.revision > known.revision
    return newer and not recent.outdated(key, told) and not touching.is_touched(db, key)


def take_over(db: Database, told: Mapping[Key, Told], recent: Recent, written: Container[int] = ()) -> list[int]:
    """Make the rows say what the store says; `written` are inodes that are open for writing here. Inodes that have no name any more.

    Names come last, so that none leads to an inode that is not there.
    """
    if not (found := news(db, told, recent)):
        return []
    nameless: list[int] = []
    with touching.applying(db):
        for key, one in sorted(news(db, found, recent).items(), key=lambda pair: pair[0].kind == NAME):
            apply(db, key, one.seen, one.asked, recent, written)
            if key.kind == INODE and one.seen.value is None:
                nameless.append(key.number)
    return nameless


def apply(db: Database, key: Key, now: Seen, asked: int, recent: Recent, written: Container[int] = ()) -> None:
    """One key, without asking anything."""
    value = now.content
    if value is None:
        recent.gone(key, asked)
        if key.kind == INODE:
            gone(db, key.number, asked, recent)
            return
    if key.kind == INODE and value is not None and key.number in written:
        ours = kinds.read(db, key)
        if ours is not None:
            value = {**value, **{name: ours[name] for name in merging.BYTES if name in ours}}
    if key.kind == NAME and value is not None and db.value("SELECT 1 FROM inode WHERE id = ?", value["child"]) is None:
        return  # It leads to what is not known here: whoever asks for it asks for both.
    kinds.write(db, key, value)
    seen.put(db, key, now)
    if key.kind == TIMES and value is not None and kinds.read(db, key) not in (None, value):
        touching.touch(db, key)  # It is put without comparing: somebody who knew only older times was the last one.


def gone(db: Database, inode: int, asked: int, recent: Recent) -> None:
    """An inode is not in the store any more: here it stays without a name until the kernel forgets it."""
    kinds.write(db, Key(INODE, inode), None)
    former.gone_elsewhere(db, inode)
    for key in (Key(INODE, inode), Key(TIMES, inode)):
        seen.put(db, key, seen.NEVER)
        recent.gone(key, asked)
    for parent, name in db.rows("SELECT parent, name FROM entry WHERE child = ?1 OR parent = ?1", inode):
        key = Key(NAME, parent, bytes(name))
        if not touching.is_touched(db, key):
            kinds.write(db, key, None)
            seen.put(db, key, seen.NEVER)
