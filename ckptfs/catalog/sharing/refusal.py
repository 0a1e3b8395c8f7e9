"""Brings a refused batch and what the store has together, so that the next batch can pass.

A name that another node changed first: the changes here that have to do with it are taken back, with every touched name of the same
inodes. Attributes are merged. An inode that is gone there is gone here.
If we die here: it happens inside one change of the catalog.
"""

from dataclasses import dataclass, field

from ckptfs.catalog import answers
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import applying, kinds, merging, reading, seen, touching
from ckptfs.catalog.sharing.applying import Recent, Told
from ckptfs.catalog.sharing.batch import Batch
from ckptfs.catalog.sharing.kinds import INODE, NAME, Key, Value
from ckptfs.catalog.sharing.seen import Seen

LINKS = "SELECT 2 + count(*) FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ?1 AND i.mode & 61440 = 16384"
"""The links of a directory that is known here as a whole."""


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
        for key, one in sorted(self._told.items(), key=lambda pair: pair[0].kind != INODE):
            if key in self._batch.compared and one.seen.revision != self._batch.compared[key]:
                self._differs(key, one)
            elif key.kind == INODE and key not in self._batch.compared and one.seen.value is None:
                self._gone(key.number)
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
        """The name of a directory above one that moves is another one there."""
        applying.apply(self._db, key, told.seen, self._asked, self._recent)
        self._contested |= self._moved()

    def _merge(self, key: Key, now: Seen) -> None:
        base, ours, theirs = seen.get(self._db, key).content, kinds.read(self._db, key), now.content
        if theirs is not None and ours is not None:
            kinds.write(self._db, key, merging.merge(key.kind, base, ours, theirs))
        elif theirs is not None and key.kind == INODE:
            self._renamed_or_linked(key, base, theirs)
        elif theirs is not None:
            kinds.write(self._db, key, theirs)
        seen.put(self._db, key, now)

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
        touched = [key for key in touched if not {self._here(key), self._there(key)} & self._kept]
        reverting = {key for key in self._contested if key in touched}
        while True:
            children = {child for key in reverting for child in (self._here(key), self._there(key)) if child}
            more = {
                key for key in touched if {self._here(key), self._there(key)} & children or key.number in self._new(children)
            } - reverting
            if not more:
                break
            reverting |= more
        for key in reverting:
            self._undo_links(key)
        for key in reverting:
            self._set(key)
        self._counted |= children
        self._recount()
        self._result.reverted = reverting | self._contested

    def _new(self, children: set[int]) -> set[int]:
        """Those that the store has never had."""
        return {child for child in children if not seen.get(self._db, Key(INODE, child)).revision}

    def _undo_links(self, key: Key) -> None:
        """What making or taking this name did to the links of what it leads to, and of its directory."""
        here, there = self._here(key), self._there(key)
        if here != there:
            self._count(key.number, here, -1)
            self._count(key.number, there, 1)

    def _count(self, parent: int, child: int, links: int) -> None:
        """Subdirectories are counted; a file's links are its names, and are counted in the end."""
        row = self._db.row("SELECT mode & 61440, nlink FROM inode WHERE id = ?", child)
        known = seen.get(self._db, Key(INODE, child)).content
        if not child or (row is None and known is None):
            return
        if row is None:
            assert known is not None
            kinds.write(self._db, Key(INODE, child), known)
            row = (known["mode"] & 0o170000, 0)
        self._counted.add(child)
        if row[0] == reading.DIRECTORY:
            self._db.run("UPDATE inode SET nlink = nlink + ? WHERE id = ? AND nlink > 0", links, parent)
            touching.touch(self._db, Key(INODE, parent))
            if child not in self._dead:
                self._directory(child, known, row[1], links)

    def _directory(self, child: int, known: Value | None, nlink: int, links: int) -> None:
        """A directory that was made here never was; one that was moved or removed is where it was."""
        if known is None:
            if links < 0:
                self._db.run("UPDATE inode SET nlink = 0 WHERE id = ?", child)
        elif links > 0:
            self._db.run("UPDATE inode SET nlink = ?, parent = ? WHERE id = ?", nlink or known["nlink"], known["parent"], child)

    def _recount(self) -> None:
        """The links of files are their names."""
        for inode in self._counted - self._dead:
            row = self._db.row("SELECT mode & 61440, nlink FROM inode WHERE id = ?", inode)
            if row is None:
                continue
            links = self._subdirectories(inode, row[1]) if row[0] == reading.DIRECTORY else len(kinds.names_of(self._db, inode))
            if links != row[1]:
                self._db.run("UPDATE inode SET nlink = ? WHERE id = ?", links, inode)
                touching.touch(self._db, Key(INODE, inode))
            if links == 0:
                self._result.nameless.append(inode)

    def _subdirectories(self, inode: int, links: int) -> int:
        """Of a directory that the store has never had, all that is in it is here."""
        if links == 0 or seen.get(self._db, Key(INODE, inode)).revision:
            return links
        return int(self._db.value(LINKS, inode))

    def _set(self, key: Key) -> None:
        """The name leads where the store says."""
        known = self._told.get(key)
        now = seen.get(self._db, key) if known is None else known.seen
        child = (now.content or {"child": 0})["child"]
        if not child or child in self._dead or self._db.value("SELECT 1 FROM inode WHERE id = ?", child) is None:
            now = seen.NEVER
        kinds.write(self._db, key, now.content)
        seen.put(self._db, key, now)
