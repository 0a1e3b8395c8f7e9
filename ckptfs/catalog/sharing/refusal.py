"""Brings a refused batch and what the store has together, so that the next batch can pass.

A name that another node changed first: the changes here that have to do with it are taken back, with every touched name of the same
inodes. Attributes are merged. An inode that is gone there is gone here.
If we die here: it happens inside one change of the catalog.
"""

from dataclasses import dataclass, field

from ckptfs.catalog import adoption, answers, handles, holding, journal
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import applying, kinds, merging, reading, seen, touching
from ckptfs.catalog.sharing.applying import Recent, Told
from ckptfs.catalog.sharing.batch import Batch
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, NAME, Key, Value
from ckptfs.catalog.sharing.seen import Seen


@dataclass(slots=True)
class Result:
    """`told`: the batch passed. `reverted` are names whose changes were taken back; `nameless` inodes that have no name any more."""

    told: bool
    reverted: set[Key] = field(default_factory=set)
    nameless: list[int] = field(default_factory=list)


class Refusal:
    """One refused batch on its way. Inside `touching.applying`."""

    def __init__(self, db: Database, batch: Batch, told: dict[Key, Told], asked: int, recent: Recent) -> None:
        self._db = db
        self._batch = batch
        self._told = told
        self._asked = asked
        self._recent = recent
        self._contested: set[Key] = set()
        self._dead: set[int] = set()
        self._kept: set[int] = set()
        self._merging: list[tuple[Key, Seen]] = []
        self._counted: set[int] = set()
        self._result = Result(False)

    def not_empty(self, names: list[Key]) -> None:
        """A directory that was removed here holds something there."""
        for name in names:
            self._contested |= self._leading_to(name.number)

    def settle(self) -> Result:
        """Inodes first: what became of them decides about their names and contents."""
        own = seen.get(self._db, self._batch.last).revision
        for key, one in sorted(self._told.items(), key=lambda pair: pair[0].kind != INODE):
            if one.seen.revision == own and own:
                # Put by a process of this node that died before it could note that.
                seen.put(self._db, key, one.seen)
            elif key in self._batch.compared and one.seen.revision != self._batch.compared[key]:
                self._differs(key, one)
            elif key.kind == INODE and key not in self._batch.compared and one.seen.value is None:
                self._gone(key.number)
        self._find_loops()
        if self._contested:
            self._take_back()
            answers.forget_all(self._db)
        for key, now in self._merging:
            self._merge(key, now)
        return self._result

    def _differs(self, key: Key, told: Told) -> None:
        """Another node changed this key since it was seen here."""
        if key.kind == INODE and told.seen.value is None:
            self._gone(key.number)
        elif key not in self._batch.changed:
            self._above(key, told)
        elif key.kind == NAME:
            self._contested.add(key)
        else:
            self._merging.append((key, told.seen))

    def _above(self, key: Key, told: Told) -> None:
        """The name of a directory above one that moves is another one there. What was made under it here since is told by itself."""
        if not touching.is_touched(self._db, key):
            applying.apply(self._db, key, told.seen, self._asked, self._recent)
        self._contested |= self._moved()

    def _find_loops(self) -> None:
        """A directory that moves below itself by what moved there: whatever moves was contested by the names above it."""

    def _merge(self, key: Key, now: Seen) -> None:
        base, ours, theirs = seen.get(self._db, key).content, kinds.read(self._db, key), now.content
        if theirs is not None and ours is not None:
            writing = key.kind == INODE and handles.is_written(self._db, key.number)
            merged = merging.merge(key.kind, base, ours, theirs, writing=writing)
            if "names" in merged:
                merged["names"] = [
                    name for name in merged["names"] if not self._is_taken(key.number, Key(NAME, name[0], name[1].encode("latin-1")))
                ]
            if key.kind == INODE and merging.gives_way(ours, theirs, merged):
                holding.give_way(self._db, merged["content"], merged["generation"])
            kinds.write(self._db, key, merged)
            if merged.get("names") == []:
                # Each of two nodes took a name away, and these were all.
                self._result.nameless.append(key.number)
        elif theirs is not None and key.kind == INODE:
            self._renamed_or_linked(key, base, theirs)
        elif theirs is not None and not self._is_dropped(key, theirs):
            kinds.write(self._db, key, theirs)
        seen.put(self._db, key, now)

    def _is_dropped(self, key: Key, theirs: Value) -> bool:
        """Whether it is a content of this node's own that is gone here, whatever others made of it meanwhile: then it goes there, too."""
        own = key.kind == CONTENT and theirs["node"] == self._batch.number
        return own and self._db.value("SELECT 1 FROM content WHERE id = ?", key.number) is None

    def _is_taken(self, inode: int, name: Key) -> bool:
        """Whether an inode lost this name here, which will be told: it may be one that another node had given it, as was seen here."""
        return self._there(name) == inode != self._here(name)

    def _renamed_or_linked(self, key: Key, base: Value | None, theirs: Value) -> None:
        """It lost its last name here, and has changed there: where it has other names now, it lives on."""
        if base is not None and "names" in theirs and (names := merging.names(base, None, theirs)):
            kinds.write(self._db, key, {**theirs, "names": names})

    def _gone(self, inode: int) -> None:
        """It was deleted there. Names that were made here in it or of it cannot be."""
        applying.gone(self._db, inode, self._asked, self._recent)
        self._dead.add(inode)
        self._result.nameless.append(inode)
        self._contested |= self._leading_to(inode)
        self._contested |= {key for key in touching.names(self._db) if key.number == inode}

    def _leading_to(self, inode: int) -> set[Key]:
        """The touched names that lead or led to an inode."""
        return {key for key in touching.names(self._db) if inode in (self._here(key), self._there(key))}

    def _moved(self) -> set[Key]:
        """The touched names of directories that this batch moves."""
        found: set[Key] = set()
        for key in self._batch.changed:
            before = seen.get(self._db, key).content if key.kind == INODE else None
            now = kinds.read(self._db, key) if before else None
            if before and now and now["parent"] != before["parent"]:
                found |= self._leading_to(key.number)
        return found

    def _here(self, key: Key) -> int:
        """What a name leads to here."""
        return int(self._db.value("SELECT child FROM entry WHERE parent = ? AND name = ?", key.number, key.name) or 0)

    def _there(self, key: Key) -> int:
        """What it led to in the store, when that was seen."""
        return int((seen.get(self._db, key).content or {"child": 0})["child"])

    # --- taking back --------------------------------------------------------------------------------------------------

    def _take_back(self) -> None:
        """Undo the contested names, and every other touched name of the same inodes: they are one change, or build on one another."""
        touched = touching.names(self._db)
        # What comes back keeps the names that it has here, and does not get those again that it had there.
        touched = [key for key in touched if (self._here(key) or self._there(key)) not in self._kept]
        reverting = {key for key in self._contested if key in touched}
        while True:
            children = {child for key in reverting for child in (self._here(key), self._there(key)) if child}
            more = {
                key for key in touched if {self._here(key), self._there(key)} & children or key.number in self._new(children)
            } - reverting
            if not more:
                break
            reverting |= more
        for key in sorted(reverting):
            self._restore(key)
        for key in sorted(reverting):
            self._set(key)
        self._counted |= children
        self._recount()
        never = {inode for inode in self._result.nameless if not seen.get(self._db, Key(INODE, inode)).revision}
        journal.never_was(self._db, adoption.instance(self._db), [(key.number, key.name) for key in reverting], never)
        self._result.reverted = reverting | self._contested

    def _new(self, children: set[int]) -> set[int]:
        """Those that the store has never had."""
        return {child for child in children if not seen.get(self._db, Key(INODE, child)).revision}

    def _restore(self, key: Key) -> None:
        """What was made under this name here never was; what was taken from it is there again, a directory where it was."""
        here, there = self._here(key), self._there(key)
        self._counted |= {key.number, here, there} - {0}
        if here == there:
            return
        if here and self._mode(here) == reading.DIRECTORY and not seen.get(self._db, Key(INODE, here)).revision:
            self._db.run("UPDATE inode SET nlink = 0 WHERE id = ?", here)
        known = seen.get(self._db, Key(INODE, there)).content
        if known is None or there in self._dead or there in self._kept:
            return
        if not self._mode(there):
            kinds.write(self._db, Key(INODE, there), known)
        if self._mode(there) == reading.DIRECTORY:
            self._db.run("UPDATE inode SET nlink = max(nlink, 2), parent = ? WHERE id = ?", known["parent"], there)
            touching.touch(self._db, Key(INODE, there))

    def _mode(self, inode: int) -> int:
        """What kind of thing it is; 0: there is no row of it."""
        return int(self._db.value("SELECT mode & 61440 FROM inode WHERE id = ?", inode) or 0)

    def _recount(self) -> None:
        """The links of files are their names, those of directories what is in them."""
        for inode in self._counted - self._dead:
            row = self._db.row("SELECT mode & 61440, nlink FROM inode WHERE id = ?", inode)
            if row is None:
                continue
            if row[0] == reading.DIRECTORY:
                links = kinds.links_of(self._db, inode) if row[1] else 0
            else:
                links = len(kinds.names_of(self._db, inode))
            if links != row[1]:
                self._db.run("UPDATE inode SET nlink = ? WHERE id = ?", links, inode)
                touching.touch(self._db, Key(INODE, inode))
            if links == 0:
                self._result.nameless.append(inode)

    def _set(self, key: Key) -> None:
        """The name leads where the store says."""
        known = self._told.get(key)
        now = seen.get(self._db, key) if known is None else known.seen
        child = (now.content or {"child": 0})["child"]
        comes_back = known is None and child in self._kept
        if not child or comes_back or child in self._dead or self._db.value("SELECT 1 FROM inode WHERE id = ?", child) is None:
            now = seen.NEVER
        kinds.write(self._db, key, now.content)
        seen.put(self._db, key, now)
