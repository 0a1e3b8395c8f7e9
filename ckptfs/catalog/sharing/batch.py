"""Makes of touched keys one transaction of the store: what is compared, what is put and deleted, and what is read instead when that fails.

Changes go whole and in their order as long as they fit. What keeps the shared tree whole: a name is put where its directory exists; the
last name that the store has of an inode is not deleted while it has another here; a directory goes when it is empty there; one that moves
does so only while all its new ancestors stay where they are (no loops).
If we die here: nothing was changed; what was sent and not noted is recognised by this node's own key `w/`.
"""

import stat
from dataclasses import dataclass, field

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import kinds, lost, seen, touching
from ckptfs.catalog.sharing.kinds import CONTENT, INODE, KINDS, LAST, NAME, TIMES, Key, Value
from ckptfs.catalog.sharing.seen import Seen
from ckptfs.catalog.store import Compare, Delete, Get, Operation, Put, Target, prefix_end
from ckptfs.model import ROOT

_TYPE_DIRECTORY = kinds.packed({"type": stat.S_IFDIR})[1:-1]
_ORDER = {CONTENT: 0, TIMES: 1, INODE: 2, NAME: 4}
_INODE_GOES, _NAME_GOES = 6, 5


@dataclass(slots=True)
class Batch:
    """`changed` are the keys that are put (value) or deleted (None); `same` those that are as the store has them; all up to change `up_to`.

    `compared` are keys that must be of a revision, `parents` directories that must be there, `emptied` such that must be empty. `going` are
    inodes that go later, and are told as they are until then.
    """

    number: int
    up_to: int
    changed: dict[Key, bytes | None] = field(default_factory=dict)
    same: list[Key] = field(default_factory=list)
    compared: dict[Key, int] = field(default_factory=dict)
    parents: set[int] = field(default_factory=set)
    emptied: set[int] = field(default_factory=set)
    going: set[Key] = field(default_factory=set)
    more: list[Delete] = field(default_factory=list)
    size: int = 0
    whole: bool = True

    @property
    def last(self) -> Key:
        """The key by which this node recognises its own transaction."""
        return Key(LAST, self.number)

    def compares(self) -> list[Compare]:
        """What must hold."""
        revisions = [Compare(kinds.wire(key), Target.MOD, "=", revision) for key, revision in self.compared.items()]
        there = [Compare(kinds.wire(Key(INODE, number)), Target.VERSION, ">", 0) for number in self.parents]
        empty = [Compare(names, Target.VERSION, "=", 0, prefix_end(names)) for names in map(_inside, self.emptied)]
        return revisions + there + empty

    def changes(self) -> list[Operation]:
        """What is done then."""
        done: list[Operation] = []
        for key, value in self.changed.items():
            raw = kinds.wire(key)
            done.append(Delete(raw) if value is None else Put(raw, value))
        once = {operation.key for operation in done}
        return [*done, *(operation for operation in self.more if operation.key not in once), Put(kinds.wire(self.last), self.note())]

    def note(self) -> bytes:
        """What this node's own key holds: which keys the transaction deleted, for a process that has to find out whether it passed."""
        deleted = [kinds.wire(key).decode("latin-1") for key, value in self.changed.items() if value is None]
        return kinds.packed({"deleted": deleted})

    def otherwise(self) -> list[Get]:
        """What is read when it does not hold: everything that was compared, and this node's own last transaction first."""
        keys = [self.last, *self.compared, *(Key(INODE, number) for number in self.parents)]
        return [Get(kinds.wire(key)) for key in keys] + [Get(names, prefix_end(names), limit=1) for names in map(_inside, self.emptied)]

    def questions(self) -> list[Key]:
        """The keys of `otherwise`, without the ranges."""
        return [self.last, *self.compared, *(Key(INODE, number) for number in self.parents)]

    @property
    def operations(self) -> int:
        """Of which there may be limits.ETCD_OPERATIONS_MAX."""
        return max(len(self.changed) + len(self.more) + 1, len(self.compared) + len(self.parents) + len(self.emptied) + 1)


def build(db: Database, number: int) -> Batch | None:
    """The next transaction of node `number`; None when nothing is touched."""
    with db.snapshot():
        return _Builder(db, number).build()


class _Builder:
    """One batch in the making."""

    def __init__(self, db: Database, number: int) -> None:
        self._db = db
        self._batch = Batch(number, touching.last(db))
        self._rows = touching.first(db, 4 * limits.ETCD_OPERATIONS_MAX)
        self._values: dict[Key, tuple[Seen, bytes | None]] = {}
        self._taking: list[Key] = []
        self._anew = lost.is_any(db)

    def build(self) -> Batch | None:
        if not self._rows:
            return None
        changes: dict[int, list[Key]] = {}
        for change, key in self._rows:
            changes.setdefault(change, []).append(key)
        for keys in changes.values():
            if not self._take(sorted(dict.fromkeys(keys), key=self._rank)):
                self._batch.whole = False
                break
        else:
            self._batch.whole = len(self._rows) < 4 * limits.ETCD_OPERATIONS_MAX
        self._postpone()
        self._count_links()
        self._count_names()
        return self._batch

    def _value(self, key: Key) -> tuple[Seen, bytes | None]:
        """(what the store has, what the rows say)."""
        if key not in self._values:
            known = seen.get(self._db, key)
            others = key.kind == CONTENT and self._db.value("SELECT peer FROM content WHERE id = ?", key.number) == 1
            value = self._of_others(key, known) if others else kinds.pack(kinds.read(self._db, key))
            if self._anew and KINDS[key.kind].compared:
                value = lost.with_was(value, lost.was(self._db, key))
            self._values[key] = known, value
        return self._values[key]

    def _of_others(self, key: Key, known: Seen) -> bytes | None:
        """What another node wrote is told by that one, and by who renamed over it what it was before.

        A store that has lost its data is told by all what it said.
        """
        before = lost.value(self._db, key) if self._anew else kinds.pack(kinds.read(self._db, key))
        return known.value if before is None else before

    def _rank(self, key: Key) -> int:
        """Inodes before the names that lead to them; what goes, afterwards."""
        if self._value(key)[1] is not None or key.kind not in (NAME, INODE):
            return _ORDER.get(key.kind, 3)
        return _NAME_GOES if key.kind == NAME else _INODE_GOES

    def _take(self, keys: list[Key]) -> bool:
        """Take one change along. False: it does not fit any more; a change that is too large for any transaction goes in parts."""
        before = _copied(self._batch)
        new = self._taking = [key for key in keys if key not in self._batch.changed or key in self._batch.going]
        for key in new:
            self._add(key)
        if not self._full():
            return True
        self._batch = before
        if not before.changed:
            self._take_part(new)
        return False

    def _take_part(self, keys: list[Key]) -> None:
        for key in keys:
            kept = _copied(self._batch)
            self._add(key)
            if self._full():
                self._batch = kept
                return

    def _full(self) -> bool:
        batch = self._batch
        inside = any(key.kind == NAME and key.number in batch.emptied for key in batch.changed)
        if inside and len(batch.changed) > 1:
            return True
        return len(batch.changed) > 1 and (
            batch.operations > limits.ETCD_OPERATIONS_MAX or batch.size > limits.ETCD_REQUEST_BYTES_MAX - 64 * limits.KIB
        )

    def _add(self, key: Key) -> None:
        known, value = self._value(key)
        if key.kind in (kinds.PLACE, kinds.SHOWN) and "by" in (known.content or {}):
            value = known.value  # A write-back is at it, and will say what became of it: until then nobody else may.
        batch = self._batch
        batch.going.discard(key)
        if value == known.value or (self._anew and value is not None and kinds.unpack(value) == known.content):
            batch.same.append(key)
            return
        batch.changed[key] = value
        batch.size += len(value or b"") + len(key.name) + 100
        if KINDS[key.kind].compared:
            batch.compared[key] = known.revision
            batch.parents.discard(key.number if key.kind == INODE else -1)
        if key.kind == NAME and _is_directory(known.value) != _is_directory(value):
            self._demand_links(key.number)
        if key.kind == NAME:
            self._demand_named(known.value, value)
        if key.kind == NAME and value is not None:
            self._demand_parent(key.number)
        elif key.kind == INODE:
            self._inode(key, known, value)

    def _demand_links(self, directory: int) -> None:
        """A directory that gets or loses one inside is told with it."""
        key = Key(INODE, directory)
        value = self._value(key)[1]
        if key in self._batch.changed:
            return
        if value is None:
            self._go_later(key)
        else:
            self._carry(key, value)
            self._batch.parents.discard(directory)

    def _go_later(self, key: Key) -> None:
        """What is gone here loses something now, and goes with a change that comes later: somebody may bring it back until then."""
        value = self._value(key)[0].value
        if value is not None:
            self._carry(key, value)
            self._batch.going.add(key)

    def _carry(self, key: Key, value: bytes) -> None:
        """Tell an inode as `value`, and nothing of what else that may mean."""
        self._batch.changed[key] = value
        self._batch.size += len(value) + 100
        self._batch.compared[key] = self._value(key)[0].revision

    def _demand_named(self, before: bytes | None, now: bytes | None) -> None:
        """What gets or loses a name is told with it, and what loses one to another with its other names here. A directory that gets one
        loses the one that it had: nobody may see it under two.
        """
        for entry in (before, now):
            key = Key(INODE, _child(entry))
            if not key.number or key in self._batch.changed or key in self._batch.same:
                continue
            if self._value(key)[1] is not None:
                self._add(key)
            else:
                self._go_later(key)
        if now is not None and _child(before) not in (0, _child(now)):
            for name in kinds.names_here(self._db, _child(before)):
                if name not in self._batch.changed and touching.is_touched(self._db, name):
                    self._add(name)
        if now is not None and _is_directory(now) and self._value(Key(INODE, _child(now)))[0].revision:
            for name in touching.names(self._db):
                if name not in self._batch.changed and _child(seen.get(self._db, name).value) == _child(now):
                    self._add(name)

    def _count_names(self) -> None:
        """A file is told by the names that it has in the store with this transaction: others may be taken back before they are there."""
        if self._anew:
            return
        given: dict[int, set[tuple[int, str]]] = {}
        taken: dict[int, set[tuple[int, str]]] = {}
        for key, value in self._batch.changed.items():
            if key.kind == NAME:
                name = key.number, key.name.decode("latin-1")
                taken.setdefault(_child(self._value(key)[0].value), set()).add(name)
                given.setdefault(_child(value), set()).add(name)
        for key, value in self._batch.changed.items():
            if key.kind == INODE and (now := kinds.unpack(value)) is not None and "names" in now:
                before = {(parent, name) for parent, name in (self._value(key)[0].content or {"names": ()})["names"]}
                names = (before - taken.get(key.number, set())) | given.get(key.number, set())
                if names:
                    self._batch.changed[key] = kinds.pack({**now, "names": [list(name) for name in sorted(names)]})

    def _count_links(self) -> None:
        """A directory's links are told as they are in the store with this transaction: what else was changed in it here goes later."""
        inside: dict[int, int] = {}
        for key, value in self._batch.changed.items():
            if key.kind == NAME:
                more = _is_directory(value) - _is_directory(self._value(key)[0].value)
                inside[key.number] = inside.get(key.number, 0) + more
        for key, value in self._batch.changed.items():
            # Directories are changed seldom: a file has names in its value.
            if key.kind != INODE or value is None or b'"names":' in value:
                continue
            if (now := kinds.unpack(value)) is not None and stat.S_ISDIR(now["mode"]):
                before = (self._value(key)[0].content or {"nlink": 2})["nlink"]
                told = kinds.pack({**now, "nlink": before + inside.get(key.number, 0)})
                self._batch.changed[key] = lost.with_was(told, kinds.was(value))

    def _demand_parent(self, directory: int) -> None:
        key = Key(INODE, directory)
        if key not in self._batch.compared and seen.get(self._db, key).revision:
            self._batch.parents.add(directory)

    def _inode(self, key: Key, known: Seen, value: bytes | None) -> None:
        before, now = known.content, kinds.unpack(value)
        kind = stat.S_IFMT((now or before or {"mode": 0})["mode"])
        if now is None and kind == stat.S_IFDIR:
            self._batch.emptied.add(key.number)
            self._batch.more.append(Delete(kinds.wire(Key(TIMES, key.number))))
        elif now is None and before is not None and before["content"] is not None:
            self._forget_content(key.number, before["content"])
        elif now is not None and before is not None and kind == stat.S_IFDIR and now["parent"] != before["parent"]:
            self._demand_ancestors(now)
        elif now is not None and before is None and kind != stat.S_IFDIR and not self._anew:
            self._demand_name(key.number)

    def _demand_name(self, inode: int) -> None:
        """What the store has not is told with a name: what it says of names that go later may become wrong until then."""
        names = kinds.names_here(self._db, inode)
        if not any(name in self._taking or name in self._batch.changed for name in names):
            self._bring(*[name for name in names if touching.is_touched(self._db, name)][:1])

    def _forget_content(self, inode: int, content: int) -> None:
        """The file's last name goes: with it what its bytes were, and who has copies of them, unless they are what its heir held before."""
        if self._db.value("SELECT 1 FROM content WHERE id = ? AND inode <> ? AND former_ns IS NOT NULL", content, inode):
            return
        copies = kinds.wire(Key(CONTENT, content)).replace(b"c/", b"p/", 1) + b"/"
        self._batch.more.append(Delete(copies, prefix_end(copies)))
        key = Key(CONTENT, content)
        if key not in self._batch.changed:
            self._batch.more.append(Delete(kinds.wire(key)))

    def _demand_ancestors(self, moved: Value) -> None:
        """The names of all directories above must stay what they are."""
        directory, passed = moved["parent"], set()
        while directory not in (ROOT, 0) and directory not in passed:
            passed.add(directory)
            row = self._db.row(
                "SELECT e.parent, e.name FROM entry e JOIN inode i ON i.id = e.child AND i.parent = e.parent WHERE e.child = ?", directory
            )
            # Where its name is not known here, the directory itself says where it lies.
            key = Key(INODE, directory) if row is None else Key(NAME, row[0], bytes(row[1]))
            self._batch.compared.setdefault(key, seen.get(self._db, key).revision)
            directory = row[0] if row is not None else self._db.value("SELECT parent FROM inode WHERE id = ?", directory) or 0

    def _postpone(self) -> None:
        """What has another name here keeps the one that the store has until that other one is there, too."""
        if self._batch.whole:
            return
        waiting: dict[Key, list[Key]] = {}
        for key in [key for key, value in self._batch.changed.items() if key.kind == NAME and value is None]:
            others = kinds.names_here(self._db, _child(self._value(key)[0].value))
            if others and not any(other in self._batch.changed or not touching.is_touched(self._db, other) for other in others):
                waiting[key] = others
        rest = {*self._batch.changed, *self._batch.same} - {*waiting} - self._batch.going
        if waiting and not any(touching.is_touched(self._db, key) for key in rest):
            self._bring(*waiting.popitem()[1])  # What comes next may wait for this.
        for key in waiting:
            del self._batch.changed[key]
            self._batch.compared.pop(key)

    def _bring(self, *names: Key) -> None:
        """Take names along, and where the store has not the directory of one, that too."""
        for name in names:
            self._add(name)
            directory = Key(INODE, name.number)
            if not seen.get(self._db, directory).revision and directory not in self._batch.changed:
                self._add(directory)
                self._add(Key(TIMES, name.number))
                self._bring(*kinds.names_here(self._db, name.number))


def _child(entry: bytes | None) -> int:
    """What a name leads to; 0: nowhere."""
    return int((kinds.unpack(entry) or {"child": 0})["child"])


def _is_directory(entry: bytes | None) -> int:
    """Whether a name leads to one; it is asked of each, so without unpacking."""
    return int(entry is not None and _TYPE_DIRECTORY in entry)


def _copied(batch: Batch) -> Batch:
    return Batch(
        batch.number, batch.up_to, dict(batch.changed), list(batch.same), dict(batch.compared), set(batch.parents), set(batch.emptied),
        set(batch.going), list(batch.more), batch.size, batch.whole,
    )  # fmt: skip


def _inside(directory: int) -> bytes:
    return kinds.names_in(directory)
