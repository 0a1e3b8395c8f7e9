"""Settles what several nodes tell a store that has lost its data: each tells all that it knows, and what they know differs in age.

What the lost store said later is the newer one (`lost.was`): a name that it led elsewhere later leads there, an inode has the names that it
had last. What was changed since the loss is newer than all that; where both changed it, it is settled as after an island. The bytes of a
file are those of its latest generation, whoever tells the rest. What one node deleted and another still knows is there again.
If we die here: it happens inside one change of the catalog.
"""

import stat
from collections.abc import Mapping

from ckptfs.catalog import epoch
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import kinds, lost, merging, seen, touching
from ckptfs.catalog.sharing.applying import Told
from ckptfs.catalog.sharing.island import Returning
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, NAME, PLACE, SHOWN, Key, Value
from ckptfs.catalog.sharing.lost import Was
from ckptfs.catalog.sharing.refusal import Result
from ckptfs.catalog.sharing.seen import Seen

Names = set[tuple[int, bytes]]


def names_told(told: Mapping[Key, Told]) -> list[Key]:
    """The names that files have in the store, and those under which the PFS shows something, as it says: they are settled with these."""
    kinds_of = {INODE: NAME, SHOWN: PLACE}
    values = [(kinds_of[key.kind], one.seen.content or {}) for key, one in told.items() if key.kind in kinds_of]
    found = [Key(kind, *name) for kind, value in values for name in _names_in(value)]
    return [key for key in dict.fromkeys(found) if key not in told]


def lost_directories(db: Database, told: Mapping[Key, Told]) -> list[int]:
    """Where directories lie in the store, of which this node knows another name."""
    found = []
    for key, one in told.items():
        value = one.seen.content if key.kind == INODE else None
        if value is not None and stat.S_ISDIR(value["mode"]) and value["parent"] and not _is_named_so(db, key.number, told):
            found.append(int(value["parent"]))
    return list(dict.fromkeys(found))


def _is_named_so(db: Database, inode: int, told: Mapping[Key, Told]) -> bool:
    return any(_child(told.get(name)) == inode for name in kinds.names_here(db, inode))


def _child(one: Told | None) -> int:
    content = None if one is None else one.seen.content
    return int((content or {"child": 0})["child"])


def _names_in(value: Value) -> Names:
    return {(parent, name.encode("latin-1")) for parent, name in value.get("names", ())}


class Anew(Returning):
    """A refused batch of a node that tells anew what it knows."""

    def settle(self) -> Result:
        """Names that were read to be compared are not taken over."""
        self._read = {key: one for key, one in {**self._more, **self._told}.items() if key.kind in (NAME, PLACE)}
        self._more = {key: one for key, one in self._more.items() if key.kind not in (NAME, PLACE)}
        return super().settle()

    def _differs(self, key: Key, told: Told) -> None:
        if key not in self._batch.changed or told.seen.value is None:
            super()._differs(key, told)
        elif key.kind == NAME:
            self._named(key, told)
        else:
            self._merging.append((key, told.seen))

    # --- names --------------------------------------------------------------------------------------------------------

    def _named(self, key: Key, told: Told) -> None:
        here, there = self._here(key), _child(told)
        theirs, ours = self._was(told.seen), lost.was(self._db, key)
        if here == there:
            seen.put(self._db, key, told.seen)
        elif not here or theirs is None or ours is None:
            self._names[key] = told.seen
        elif self._is_directory(here if theirs >= ours else there):
            self._names[key] = told.seen  # What is in it may be all there is: it stays beside the other one.
        elif theirs >= ours:
            self._counted |= {here}
            self._adopt(key, told.seen)
        else:
            self._counted |= {here, there}
            seen.put(self._db, key, told.seen)

    def _is_directory(self, inode: int) -> bool:
        return stat.S_ISDIR(self._row(inode)[0])

    def _was(self, now: Seen) -> Was | None:
        """How new is what the store says; None: it was changed since."""
        if (known := kinds.was(now.value)) is not None:
            return known
        return epoch.was(self._db, now.revision)

    # --- all else -----------------------------------------------------------------------------------------------------

    def _merge(self, key: Key, now: Seen) -> None:
        theirs, ours = now.content, kinds.read(self._db, key)
        if theirs is not None and ours is not None and key.kind == INODE:
            self._inode(key, now, ours, theirs)
        elif theirs is not None and ours is not None and key.kind in (SHOWN, PLACE):
            if not self._is_ours(key, now):
                kinds.write(self._db, key, theirs)
            elif key.kind == SHOWN:
                self._take_places_away(key.number, theirs)
            seen.put(self._db, key, now)
        elif theirs is not None and key.kind == CONTENT and ours is None:
            before = kinds.unpack(lost.value(self._db, key))
            if before is None or merging.content(before, theirs) is theirs:
                lost.told(self._db, [key])
                kinds.write(self._db, key, theirs)
            seen.put(self._db, key, now)
        else:
            super()._merge(key, now)

    def _is_ours(self, key: Key, now: Seen) -> bool:
        """Whether what is known here is newer than what the store says."""
        theirs, ours = self._was(now), lost.was(self._db, key)
        return theirs is not None and (ours is None or ours > theirs)

    def _inode(self, key: Key, now: Seen, ours: Value, theirs: Value) -> None:
        here = self._names_here(key.number)
        there_was, here_was = self._was(now), lost.was(self._db, key)
        if there_was is None and here_was is None:
            merged = merging.side_by_side(ours, theirs)
            if stat.S_ISDIR(ours["mode"]):
                self._take_names_of(key.number, here, theirs)
        elif self._is_ours(key, now):
            merged = ours if here_was else merging.with_later_bytes(ours, theirs)
            self._take_names_away(key.number, here)
        else:
            merged = theirs if there_was else merging.with_later_bytes(theirs, ours)
            self._take_names_of(key.number, here, theirs)
        kinds.write(self._db, key, merged)
        seen.put(self._db, key, now)
        self._counted.add(key.number)

    def _names_here(self, inode: int) -> Names:
        return {(key.number, key.name) for key in kinds.names_here(self._db, inode)}

    def _take_names_of(self, inode: int, here: Names, theirs: Value) -> None:
        """Names that it had before, and has no more, go here; those that were given since the loss stay."""
        there = self._names_there(inode, theirs)
        if not there:
            return
        for name in here - there:
            key = Key(NAME, *name)
            if stat.S_ISDIR(theirs["mode"]) or lost.was(self._db, key) is not None:
                kinds.write(self._db, key, None)
                self._counted.add(key.number)

    def _take_names_away(self, inode: int, here: Names) -> None:
        """Names that the store has of it, and it has no more, go there."""
        for key, one in self._read.items():
            if key.kind == NAME and _child(one) == inode and (key.number, key.name) not in here and not self._here(key):
                seen.put(self._db, key, one.seen)
                touching.touch(self._db, key)
                self._counted.add(key.number)

    def _take_places_away(self, inode: int, theirs: Value) -> None:
        """Names under which the PFS does not show it any more go there."""
        for name in _names_in(theirs):
            key = Key(PLACE, *name)
            one = self._read.get(key)
            if one is not None and (one.seen.content or {}).get("inode") == inode and kinds.read(self._db, key) is None:
                seen.put(self._db, key, one.seen)
                touching.touch(self._db, key)

    def _names_there(self, inode: int, theirs: Value) -> Names:
        if "names" in theirs:
            return _names_in(theirs)
        return {(key.number, key.name) for key, one in self._read.items() if key.kind == NAME and _child(one) == inode}
