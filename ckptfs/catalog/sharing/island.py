"""Settles what a node did while it could not reach the store: applications were told that it is done, so nothing of it may be lost.

Two files of one name: the one that was closed later has it, the other stays beside it as `NAME.ckptfs-conflict-NODE-N`. Directories that
both made are one. What was deleted there and written here comes back, with the directories above it, as `/.ckptfs-island-NODE-N` where it
had no name here. What was deleted here and written there stays. A file that both wrote becomes two. What cannot be (a directory inside
itself, one removed here and used there, one moved to two places) is taken back.
If we die here: it happens inside one change of the catalog; a bytes' file that got a second name has no row then, and is swept.
"""

import stat
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckptfs.catalog import adoption, identity, journal
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import applying, kinds, merging, pfs_kinds, reading, seen, touching
from ckptfs.catalog.sharing.applying import Recent, Told
from ckptfs.catalog.sharing.batch import Batch
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, NAME, ROW, TIMES, Key, Value
from ckptfs.catalog.sharing.refusal import Refusal, Result
from ckptfs.catalog.sharing.seen import Seen
from ckptfs.model import ROOT


def wanted(db: Database, told: Mapping[Key, Told]) -> list[Key]:
    """What else must be read before a refusal is settled: what the names lead to that others made, and who wrote what is known here."""
    made = [key for key in reading.lacking(db, {key: one for key, one in told.items() if key.kind == NAME}) if key.kind != CONTENT]
    held = {Key(CONTENT, (one.seen.content or {}).get("content") or 0) for key, one in told.items() if key.kind == INODE}
    return made + [key for key in sorted(held) if key not in told and seen.get(db, key).revision]


def moved(db: Database, batch: Batch) -> list[int]:
    """The directories into which this batch moves others: where they lie must be known before loops can be told."""
    found = []
    for key in batch.changed:
        before, now = (seen.get(db, key).content, kinds.read(db, key)) if key.kind == INODE else (None, None)
        if before and now and now["parent"] != before["parent"]:
            found.append(int(now["parent"]))
    return found


class Returning(Refusal):
    """A refused batch of a node that returns."""

    def __init__(
        self, db: Database, batch: Batch, told: dict[Key, Told], asked: int, recent: Recent, *,
        more: Mapping[Key, Told], label: str, again: Callable[[int, int], bool], is_written: Callable[[int], bool],
    ) -> None:  # fmt: skip
        """`more` is what `wanted` asked for; `label` names this node in names; `again(content, other)` gives its bytes here a second id."""
        super().__init__(db, batch, told, asked, recent)
        self._more = more
        self._label = label.encode()
        self._again = again
        self._is_written = is_written
        self._names: dict[Key, Seen] = {}
        self._moved_there: set[int] = set()

    def settle(self) -> Result:
        """Names that are taken back first, those that stay side by side afterwards."""
        for key, one in self._more.items():
            if one.seen.value is not None and not touching.is_touched(self._db, key) and not self._known(key):
                applying.apply(self._db, key, one.seen, one.asked, self._recent)
        result = super().settle()
        names = {key: now for key, now in self._names.items() if key not in result.reverted}
        for key, now in names.items():
            self._live_on(self._there(key), now)
        for key, now in names.items():
            self._name(key, now)
        self._recount()
        return result

    def _differs(self, key: Key, told: Told) -> None:
        if key.kind != NAME or key not in self._batch.changed:
            super()._differs(key, told)
        elif self._moved_twice(self._there(key)) or not (self._here(key) or self._there(key) in self._kept):
            self._contested.add(key)
        else:
            self._names[key] = told.seen

    def _known(self, key: Key) -> bool:
        return seen.get(self._db, key).revision != 0

    def _moved_twice(self, inode: int) -> bool:
        """What both moved away from this name: it has another name there already."""
        if not inode or inode in self._kept or inode in self._dead:
            return False
        return any(self._here(key) == inode for key in touching.names(self._db))

    def _new(self, children: set[int]) -> set[int]:
        """What was made here stays, and what is in it."""
        return set()

    def _take_back(self) -> None:
        """What is back where it was finds its place taken by what comes back: that goes beside it."""
        taken = [(key, self._there(key)) for key in touching.names(self._db) if self._here(key) in self._kept]
        super()._take_back()
        for key, there in taken:
            if not there or there in self._kept or there in self._dead or not self._lives(there):
                continue
            if self._db.value("SELECT 1 FROM entry WHERE child = ?", there) is None and self._here(key) in self._kept:
                self._aside(key, self._here(key))
                self._enter(key, there)
                self._db.run("UPDATE inode SET parent = ? WHERE id = ? AND mode & 61440 = 16384", key.number, there)
                self._counted |= {key.number, there}

    def _set(self, key: Key) -> None:
        """What was made here and has no other name stays, beside what has this one."""
        here = self._here(key)
        made = here and here not in self._dead and not self._known(Key(INODE, here))
        super()._set(key)
        if not made or self._here(key) == here:
            return
        self._aside(key, here)
        if stat.S_ISDIR(self._row(here)[0]):
            self._db.run("UPDATE inode SET nlink = 2, parent = ? WHERE id = ?", key.number, here)
        self._counted |= {here, key.number}

    # --- names --------------------------------------------------------------------------------------------------------

    def _name(self, key: Key, now: Seen) -> None:
        """Both changed what this name leads to."""
        here, before, there = self._here(key), self._there(key), int((now.content or {"child": 0})["child"])
        if not here:
            self._adopt(key, now)
            return
        self._counted |= {key.number, here, before, there} - {0}
        if here == there:
            pass
        elif there and not self._has_row(there):
            return  # It went meanwhile: the next batch finds out.
        else:
            if there:
                self._both(key, here, there, now)
        seen.put(self._db, key, now)

    def _both(self, key: Key, here: int, there: int, now: Seen) -> None:
        ours, theirs = self._row(here), self._row(there)
        both = stat.S_ISDIR(ours[0]) and stat.S_ISDIR(theirs[0])
        if both and not self._known(Key(INODE, here)):
            self._merge_directories(here, there)
            kinds.write(self._db, key, now.content)
        elif stat.S_ISDIR(ours[0]) or stat.S_ISDIR(theirs[0]) or theirs[1] >= ours[1]:
            self._aside(key, here)
            kinds.write(self._db, key, now.content)
        else:
            self._aside(key, there)

    def _aside(self, key: Key, child: int) -> None:
        """Give what cannot have this name one beside it."""
        self._beside(key.number, key.name.split(kinds.CONFLICT)[0], kinds.CONFLICT, child)

    def _beside(self, directory: int, stem: bytes, mark: bytes, child: int) -> None:
        for name in kinds.names_beside(stem, mark, self._label):
            beside = Key(NAME, directory, name)
            if not self._here(beside) and not self._known(beside):
                self._enter(beside, child)
                return

    def _enter(self, key: Key, child: int) -> None:
        kinds.write(self._db, key, {"child": child})
        touching.touch(self._db, key)
        touching.touch(self._db, Key(INODE, child))
        self._for_the_pfs("make", child, parent=key.number, name=key.name)

    def _adopt(self, key: Key, now: Seen) -> None:
        """The name is as the store has it; what it led to has others here."""
        self._counted.add(key.number)
        child = (now.content or {"child": 0})["child"]
        now = now if child and self._has_row(child) else seen.NEVER
        kinds.write(self._db, key, now.content)
        seen.put(self._db, key, now)

    def _merge_directories(self, ours: int, theirs: int) -> None:
        """What was put into the directory that was made here goes into the one that was made there."""
        for name, child in self._db.rows("SELECT name, child FROM entry WHERE parent = ?", ours):
            old, new = Key(NAME, ours, bytes(name)), Key(NAME, theirs, bytes(name))
            kinds.write(self._db, old, None)
            touching.touch(self._db, old)
            directory = stat.S_ISDIR(self._row(child)[0])
            other = self._here(new)
            if other and directory and stat.S_ISDIR(self._row(other)[0]) and not self._known(Key(INODE, child)):
                self._merge_directories(child, other)
                continue
            self._counted.add(child)
            if other:
                self._aside(new, child)
            else:
                self._enter(new, child)
            if directory:
                self._db.run("UPDATE inode SET parent = ? WHERE id = ?", theirs, child)
                touching.touch(self._db, Key(INODE, child))
        self._counted.add(theirs)
        touching.touch(self._db, Key(INODE, theirs))
        self._db.run("UPDATE inode SET nlink = 0 WHERE id = ?", ours)
        touching.touch(self._db, Key(INODE, ours))
        self._result.nameless.append(ours)

    def _has_row(self, inode: int) -> bool:
        return self._db.value("SELECT 1 FROM inode WHERE id = ?", inode) is not None

    def _lives(self, inode: int) -> bool:
        """Whether there is such an inode; a directory that was removed here stays so."""
        row = self._db.row("SELECT mode, nlink FROM inode WHERE id = ?", inode)
        return row is not None and (row[1] > 0 or not stat.S_ISDIR(row[0]))

    def _row(self, inode: int) -> tuple[int, int]:
        """(mode, time of change)."""
        row = self._db.row("SELECT mode, mtime_ns FROM inode WHERE id = ?", inode)
        return (0, 0) if row is None else (row[0], row[1])

    # --- inodes -------------------------------------------------------------------------------------------------------

    def _above(self, key: Key, told: Told) -> None:
        """A directory was moved there below which something was moved here: wrong only where that makes a loop."""
        if self._here(key) in self._kept:
            self._names[key] = told.seen  # It comes back, and its name is another's by now.
            return
        applying.apply(self._db, key, told.seen, self._asked, self._recent)

    def _find_loops(self) -> None:
        for changed in self._batch.changed:
            if changed.kind == INODE and (now := kinds.read(self._db, changed)) and now["mode"] & 0o170000 == reading.DIRECTORY:
                before = seen.get(self._db, changed).content
                if before and before["parent"] != now["parent"] and self._is_below(now["parent"], changed.number):
                    self._contested |= self._leading_to(changed.number)

    def _is_below(self, directory: int, other: int) -> bool:
        """Whether a directory is another one or lies below it, where those that were moved there lie there."""
        passed: set[int] = set()
        while directory not in passed and directory:
            if directory == other:
                return True
            passed.add(directory)
            told, before = self._told.get(Key(INODE, directory)), seen.get(self._db, Key(INODE, directory)).content
            theirs = None if told is None else told.seen.content
            if theirs is not None and before is not None and theirs["parent"] != before["parent"]:
                directory = theirs["parent"]
            else:
                directory = self._db.value("SELECT parent FROM inode WHERE id = ?", directory) or 0
        return False

    def _gone(self, inode: int) -> None:
        """It was deleted there. What was made in it or written into it here brings it back."""
        row = self._row(inode)
        if row[0] and (self._used(inode) if stat.S_ISDIR(row[0]) else self._worth(inode)):
            self._bring_back(inode, directory=stat.S_ISDIR(row[0]))
        else:
            super()._gone(inode)

    def _used(self, directory: int) -> bool:
        return any(key.number == directory and self._here(key) for key in touching.names(self._db)) or any(
            self._here(key) == directory for key in touching.names(self._db)
        )

    def _worth(self, inode: int) -> bool:
        """Whether a file was written or given a name here, and its bytes are here."""
        content, nlink = self._db.row("SELECT content, nlink FROM inode WHERE id = ?", inode) or (None, 0)
        if not nlink:
            return False
        if content is not None and self._db.value("SELECT 1 FROM copy WHERE content = ? AND state = 1", content) is None:
            return False
        now, before = kinds.read(self._db, Key(INODE, inode)) or {}, seen.get(self._db, Key(INODE, inode)).content or {}
        written = any(now.get(name) != before.get(name) for name in merging.BYTES)
        return written or any(self._here(key) == inode != self._there(key) for key in touching.names(self._db))

    def _bring_back(self, inode: int, *, directory: bool) -> None:
        self._kept.add(inode)
        content = self._db.value("SELECT content FROM inode WHERE id = ?", inode)
        keys = [Key(INODE, inode), Key(TIMES, inode)] if directory else [Key(INODE, inode)]
        self._untold([*keys, *([] if content is None else [Key(CONTENT, content)])])
        for key in touching.names(self._db):
            if self._there(key) == inode != self._here(key):
                seen.put(self._db, key, seen.NEVER)  # What it was called there went with it: whose that name is now is no matter of its.
        if directory:
            self._drop_untouched(inode)
            self._drop_stale_names(inode)
        for key in kinds.names_here(self._db, inode):
            if self._there(key) == inode or not touching.is_touched(self._db, key):
                self._untold([key])
                self._counted.add(key.number)
        if content is not None:
            self._write_back(inode, content)
        if self._db.value("SELECT 1 FROM entry WHERE child = ?", inode) is None:
            self._beside(ROOT, b"", kinds.HOMELESS, inode)
            if directory:
                self._db.run("UPDATE inode SET parent = ? WHERE id = ?", ROOT, inode)
                self._counted.add(ROOT)
        self._counted.add(inode)

    def _write_back(self, inode: int, content: int) -> None:
        """What the journal says so far of these bytes is about another file, or about one that went from the PFS."""
        self._for_the_pfs("content", inode, content=content)

    def _for_the_pfs(self, op: str, inode: int, **what: Any) -> None:
        if self._db.journalled:
            journal.append(self._db, op, inode, **what)
            row = pfs_kinds.row_name(adoption.instance(self._db), journal.last(self._db, inode))
            touching.touch(self._db, Key(ROW, identity.number(self._db), row))

    def _untold(self, keys: Iterable[Key]) -> None:
        """The store has these no more, and shall."""
        for key in keys:
            seen.put(self._db, key, seen.NEVER)
            touching.touch(self._db, key)

    def _drop_stale_names(self, directory: int) -> None:
        """A name from which others had moved it was known here beside the one that it had: nobody had asked for that again."""
        keys = kinds.names_here(self._db, directory)
        keys.sort(key=lambda key: (touching.is_touched(self._db, key), seen.get(self._db, key).revision))
        for key in keys[:-1]:
            kinds.write(self._db, key, None)
            seen.put(self._db, key, seen.NEVER)
            self._counted.add(key.number)

    def _drop_untouched(self, directory: int) -> None:
        """Who deleted the directory had emptied it."""
        for (name,) in self._db.rows("SELECT name FROM entry WHERE parent = ?", directory):
            key = Key(NAME, directory, bytes(name))
            if not touching.is_touched(self._db, key):
                kinds.write(self._db, key, None)
            seen.put(self._db, key, seen.NEVER)

    def _merge(self, key: Key, now: Seen) -> None:
        base, ours, theirs = seen.get(self._db, key).content, kinds.read(self._db, key), now.content
        wrote = merging.both_wrote(base, ours, theirs) and key.kind == INODE and not self._is_written(key.number)
        if wrote and base and ours and theirs and not self._is_from_here(base, ours, theirs) and self._split(key, ours, theirs):
            kinds.write(self._db, key, theirs)
            seen.put(self._db, key, now)
        else:
            super()._merge(key, now)

    def _live_on(self, child: int, now: Seen) -> None:
        """A directory that was replaced here lives on where others had moved it: the name that it lost here they had taken away before."""
        key = Key(INODE, child)
        there = seen.get(self._db, key).content
        if there is None or "names" in there or child in self._dead | self._kept or (now.content or {}).get("child") == child:
            return
        if kinds.read(self._db, key) is None:
            kinds.write(self._db, key, there)
            self._moved_there.add(child)

    def _recount(self) -> None:
        # What is in a directory that lives on elsewhere was not all read.
        self._counted -= self._moved_there
        super()._recount()

    def _is_from_here(self, base: Value, ours: Value, theirs: Value) -> bool:
        """Whether nobody else wrote the file: the others show a former state while they miss this node's, or one that it gave them."""
        if merging.shows_former(theirs) and merging.is_missed(theirs, base, ours):
            return True
        key = Key(CONTENT, theirs["content"] or 0)
        told = self._told.get(key) or self._more.get(key)
        content = None if told is None else told.seen.content
        return theirs["content"] == ours["content"] and content is not None and content["node"] == identity.number(self._db)

    def _split(self, key: Key, ours: Value, theirs: Value) -> bool:
        """Both wrote this file: what was written here becomes a file of its own. False: its bytes are not here."""
        content = ours["content"]
        made, kept = identity.fresh(self._db, "inode"), content
        if made is None or content is None or self._db.value("SELECT 1 FROM copy WHERE content = ? AND state = 1", content) is None:
            return False
        if content == theirs["content"]:
            kept = identity.fresh(self._db, "content")
            if kept is None or not self._again(content, kept):
                return False
            self._db.run(
                "INSERT INTO content (id, inode, generation, state, size, digest, blocks, change, closed_ns)"
                " SELECT ?, ?, generation, state, size, digest, blocks, change + 1, closed_ns FROM content WHERE id = ?",
                kept, made, content,
            )  # fmt: skip
            self._db.run("UPDATE copy SET content = ? WHERE content = ?", kept, content)
            self._db.run("DELETE FROM content WHERE id = ?", content)
        else:
            self._db.run("UPDATE content SET inode = ? WHERE id = ?", made, content)
        kinds.write(self._db, Key(INODE, made), {**ours, "content": kept})
        self._counted |= {made, key.number}
        self._untold([Key(INODE, made), Key(CONTENT, kept)])
        self._place(key.number, made, later=ours["mtime_ns"] > theirs["mtime_ns"])
        self._write_back(made, kept)
        return True

    def _place(self, theirs: int, ours: int, *, later: bool) -> None:
        """The later of the two has the name, the other one beside it."""
        row = self._db.row("SELECT parent, name FROM entry WHERE child = ?", theirs)
        if row is None:
            return
        key = Key(NAME, row[0], bytes(row[1]))
        self._aside(key, theirs if later else ours)
        if later:
            self._enter(key, ours)
