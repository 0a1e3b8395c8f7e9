"""Owns the import of what a PFS directory shows, and the tables `visiting` and `touched`.

A visit lists a directory on the PFS, outside of any transaction, and then compares name by name. Three things are known of a name: what
the catalog shows (`entry`), what we believe the PFS shows (`pfs_entry`, `published`), and what it was seen to show. Only where the
PFS differs from our belief has a stranger been there; where the catalog differs from our belief, write-back has work to do.
A listing is older than the transaction that uses it. So names and inodes with journal rows are left alone, those that were pending when
the listing began (`Pending`) and those that write-back has finished meanwhile (`touched`, filled by triggers).
Ours wins: what was written here and is not on the PFS yet is never taken back by what a stranger did there; write-back settles that.
Functions that change something join the caller's transaction, which is between `importing(db, directory)` and its end.
If we die here: `clear` forgets the visit; the directory is as complete as it was before, and is visited again.
"""

import contextlib
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from ckptfs.catalog import handles, identity
from ckptfs.catalog.database import Database
from ckptfs.lifecycle import same_file
from ckptfs.model import ROOT, Seen

_ADOPTED = -1
"""`visited_ns` of a directory of ours that turned out to be on the PFS too: the kernel may know absent names in it."""


class Verdict(Enum):
    """What a visit does about one name."""

    SAME = auto()
    NOTE = auto()  # As we believed, but its owner, mode and number had not been seen yet.
    NEW = auto()
    ADOPT = auto()  # A directory that was made here before the PFS could be asked, and that is there as well.
    ATTRIBUTES = auto()
    CONTENT = auto()
    REPLACED = auto()
    LEAVE = auto()  # Ours is newer, or made of other things: write-back settles it.


@dataclass(frozen=True, slots=True)
class Known:
    """What the catalog knows of one name: `child` in the mount, `inode` on the PFS, how that was last seen and published."""

    child: int | None
    child_mode: int
    inode: int | None
    mode: int
    seen: tuple[int, int, int, int] | None
    published: tuple[int, int, int] | None


@dataclass(slots=True)
class Pending:
    """The names in one directory, and the inodes anywhere, of which the PFS was not told everything when the visit began, or that it was
    told of since. Only grows during a visit.
    """

    directory: int
    names: set[bytes] = field(default_factory=set)
    inodes: set[int] = field(default_factory=set)
    seq: int = 0

    def update(self, db: Database) -> None:
        """Take in what was recorded since the last time."""
        rows = db.rows("SELECT seq, inode, parent, name, new_parent, new_name FROM journal WHERE seq > ? ORDER BY seq", self.seq)
        for seq, inode, parent, name, new_parent, new_name in rows:
            self.seq = seq
            self.inodes.add(inode)
            if parent == self.directory and name is not None:
                self.names.add(bytes(name))
            if new_parent == self.directory and new_name is not None:
                self.names.add(bytes(new_name))
        self.names.update(bytes(row[0]) for row in db.rows("SELECT name FROM touched WHERE directory = ?", self.directory))

    def has(self, name: bytes, *inodes: int | None) -> bool:
        """Whether this name must be left alone: by itself, or for one of the inodes it leads to. `update` in the same transaction."""
        return name in self.names or not self.inodes.isdisjoint(inodes)


# --- the frame of a visit --------------------------------------------------------------------------------------------


def prepare(db: Database, pfs: str) -> None:
    """Before anything else when a mover starts with a PFS known as `pfs`: forget visits that died. With a PFS that this catalog meets
    for the first time, the mount's root awaits its import. Asks nothing of the PFS.
    """
    with db.change():
        db.run("DELETE FROM visiting")
        db.run("DELETE FROM touched")
        if db.value("SELECT value FROM meta WHERE key = 'pfs_root'") != pfs:
            db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('pfs_root', ?)", pfs)
            db.run("UPDATE inode SET complete = 0, visited_ns = 0 WHERE id = ?", ROOT)


def root_attributes(db: Database, pending: Pending, seen: Seen) -> bool:
    """At its first visit the mount's root takes the mode and owner of the PFS's root; whether it did."""
    if pending.has(b"", ROOT) or db.row("SELECT complete, visited_ns FROM inode WHERE id = ?", ROOT) != (0, 0):
        return False
    values = (seen.mode, seen.uid, seen.gid, seen.mtime_ns, seen.ctime_ns, ROOT)
    db.run("UPDATE inode SET mode = ?, uid = ?, gid = ?, mtime_ns = max(mtime_ns, ?), ctime_ns = max(ctime_ns, ?) WHERE id = ?", *values)
    return True


def begin(db: Database, directory: int) -> Pending:
    """Start a visit, before the directory is listed: from now on what write-back changes in it is noted."""
    with db.change():
        db.run("INSERT OR REPLACE INTO visiting (directory) VALUES (?)", directory)
        db.run("DELETE FROM touched WHERE directory = ?", directory)
    pending = Pending(directory)
    pending.update(db)
    return pending


@contextlib.contextmanager
def importing(db: Database, directory: int) -> Iterator[None]:
    """A transaction whose changes to `pfs_entry` and `published` are the visit's own."""
    with db.change():
        db.run("UPDATE visiting SET importing = 1")
        yield
        db.run("UPDATE visiting SET importing = 0")


def end(db: Database, directory: int, *, whole: bool) -> None:
    """The visit is over; `whole`: everything was compared, so the catalog knows all names of this directory."""
    with db.change():
        db.run("DELETE FROM visiting WHERE directory = ?", directory)
        db.run("DELETE FROM touched WHERE directory = ?", directory)
        if whole:
            db.run("UPDATE inode SET complete = 1, visited_ns = ? WHERE id = ?", time.time_ns(), directory)


def complete(db: Database, directory: int) -> bool:
    """Whether the catalog knows all names of a directory, and so may say of a name that it is not there."""
    return bool(db.value("SELECT complete FROM inode WHERE id = ?", directory))


def cached(db: Database, directory: int) -> bool:
    """Whether the mount's kernel may believe that a name is absent here."""
    return db.row("SELECT 1 FROM inode WHERE id = ? AND (complete = 1 OR visited_ns = ?)", directory, _ADOPTED) is not None


def names_of(db: Database, inode: int) -> list[tuple[int, bytes]]:
    """(parent, name) of every name that leads to `inode`."""
    return [(row[0], bytes(row[1])) for row in db.rows("SELECT parent, name FROM entry WHERE child = ?", inode)]


def is_directory(db: Database, inode: int | None) -> bool:
    """Whether this inode is a directory."""
    return stat.S_ISDIR(int(db.value("SELECT mode FROM inode WHERE id = ?", inode) or 0))


def due(db: Database, before_ns: int) -> int | None:
    """The complete directory on the PFS that was compared longest ago, if neither that nor its making was after `before_ns`."""
    directory: int | None = db.value(
        "SELECT id FROM inode WHERE mode & 61440 = 16384 AND visited_ns < ? AND birth_ns < ? AND complete = 1 AND nlink > 0"
        " AND (id = 1 OR EXISTS (SELECT 1 FROM pfs_entry p WHERE p.inode = inode.id)) ORDER BY visited_ns LIMIT 1",
        before_ns, before_ns,
    )  # fmt: skip
    return directory


def postpone(db: Database, directory: int) -> None:
    """A directory could not be compared now: its next turn comes after all others'."""
    with db.change():
        db.run("UPDATE inode SET visited_ns = ? WHERE id = ?", time.time_ns(), directory)


def directories_in(db: Database, directory: int) -> list[int]:
    """The directories in `directory` that were visited before."""
    below = "SELECT id FROM inode WHERE id IN (SELECT child FROM entry WHERE parent = ?) AND mode & 61440 = 16384 AND complete = 1"
    return [row[0] for row in db.rows(below, directory)]


# --- comparing -------------------------------------------------------------------------------------------------------


def known(db: Database, directory: int, name: bytes) -> Known:
    """What the catalog knows of a name."""
    row = db.row(
        "SELECT e.child, coalesce(c.mode, 0), p.inode, coalesce(i.mode, 0), p.seen_ino, p.seen_mode, p.seen_uid, p.seen_gid,"
        " u.size, u.mtime_ns, u.pfs_inode FROM (SELECT ? AS parent, ? AS name) k"
        " LEFT JOIN entry e ON e.parent = k.parent AND e.name = k.name LEFT JOIN inode c ON c.id = e.child"
        " LEFT JOIN pfs_entry p ON p.parent = k.parent AND p.name = k.name LEFT JOIN inode i ON i.id = p.inode"
        " LEFT JOIN published u ON u.inode = p.inode",
        directory, name,
    )  # fmt: skip
    assert row is not None
    seen = None if row[4] is None else (row[4], row[5], row[6], row[7])
    return Known(row[0], row[1], row[2], row[3], seen, None if row[8] is None else (row[8], row[9], row[10]))


def verdict(found: Seen, what: Known) -> Verdict:
    """What the difference between the listing and the catalog means, if nothing is pending. Pure."""
    if what.inode is None or (what.child is None and what.mode == 0):
        if what.child is None:
            return Verdict.NEW
        return Verdict.ADOPT if found.is_directory and stat.S_ISDIR(what.child_mode) else Verdict.LEAVE
    if what.child != what.inode:
        return Verdict.LEAVE
    if stat.S_IFMT(found.mode) != stat.S_IFMT(what.mode):
        return Verdict.REPLACED
    if found.is_file and not (what.published and same_file(what.published, (found.size, found.mtime_ns, found.ino))):
        return Verdict.CONTENT
    if what.seen is None:
        return Verdict.NOTE
    if what.seen[0] != found.ino and not found.is_file:
        return Verdict.NOTE if found.is_directory else Verdict.REPLACED
    return Verdict.SAME if what.seen[1:] == (found.mode, found.uid, found.gid) else Verdict.ATTRIBUTES


def settled(db: Database, inode: int) -> bool:
    """Whether the PFS has all that this file holds and nobody has it open: then a stranger's change there may be taken over."""
    row = db.row(
        "SELECT k.state, u.complete, u.generation = k.generation FROM inode i LEFT JOIN content k ON k.id = i.content"
        " LEFT JOIN published u ON u.inode = i.id WHERE i.id = ?",
        inode,
    )
    if row is None or handles.is_open(db, inode):
        return False
    state, complete, same = row
    return state is None or state == 4 or (state == 2 and bool(complete) and bool(same))


# --- changing --------------------------------------------------------------------------------------------------------


def apply(db: Database, pending: Pending, found: Seen) -> tuple[Verdict, int | None]:
    """Take over what the PFS shows under one name; what was done (SAME and LEAVE: nothing), and the inode that the name leads to now.

    A directory that was replaced by something else is only reported: its tree has to be removed first.
    """
    directory = pending.directory
    what = known(db, directory, found.name)
    judged = verdict(found, what)
    if judged in {Verdict.SAME, Verdict.LEAVE} or pending.has(found.name, what.child, what.inode):
        return judged if judged is Verdict.SAME else Verdict.LEAVE, what.child
    if judged is Verdict.NEW:
        return judged, _new(db, directory, found)
    inode = what.child
    assert inode is not None
    if judged is Verdict.REPLACED:
        return _replaced(db, directory, found, what, inode)
    if judged is Verdict.CONTENT and not settled(db, inode):
        return Verdict.LEAVE, inode
    if judged is Verdict.ADOPT:
        db.run("UPDATE inode SET complete = 0, visited_ns = ? WHERE id = ?", _ADOPTED, inode)
    if judged is Verdict.CONTENT:
        _changed(db, inode, found)
    if judged in {Verdict.CONTENT, Verdict.ATTRIBUTES} and what.seen is not None:
        _attributes(db, inode, what.seen, found)
    _believe(db, directory, found, inode)
    return judged, inode


def _replaced(db: Database, directory: int, found: Seen, what: Known, inode: int) -> tuple[Verdict, int]:
    if stat.S_ISDIR(what.mode):
        return Verdict.REPLACED, inode
    if not settled(db, inode):
        return Verdict.LEAVE, inode
    _drop_name(db, directory, found.name, inode)
    return Verdict.REPLACED, _new(db, directory, found)


def _new(db: Database, directory: int, found: Seen) -> int:
    """A name that the catalog does not have: a new inode, or another name for a file that it knows. The inode."""
    inode = _same_file(db, found)
    if inode is None:
        inode = _insert(db, directory, found)
    else:
        db.run("UPDATE inode SET nlink = nlink + 1 WHERE id = ?", inode)
    db.run("INSERT INTO entry (parent, name, child) VALUES (?,?,?)", directory, found.name, inode)
    _believe(db, directory, found, inode)
    return inode


def _insert(db: Database, directory: int, found: Seen) -> int:
    links, home, size = (2, directory, 0) if found.is_directory else (1, 0, found.size)
    inode = db.insert(
        "INSERT INTO inode (id, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns, birth_ns, target, parent, complete)"
        " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
        identity.fresh(db, "inode"),
        found.mode, found.uid, found.gid, found.rdev, links, size, found.atime_ns, found.mtime_ns, found.ctime_ns, found.ctime_ns,
        found.target, home, not found.is_directory,
    )  # fmt: skip
    for name, value in found.xattrs:
        db.run("INSERT INTO xattr (inode, name, value) VALUES (?,?,?)", inode, name, value)
    if found.is_directory:
        db.run("UPDATE inode SET nlink = nlink + 1 WHERE id = ?", directory)
    if found.is_file:
        _publish(db, inode, 0, found)
    return inode


def _same_file(db: Database, found: Seen) -> int | None:
    """The inode of which `found` is a further name: a hard link on the PFS."""
    if found.nlink < 2 or not found.is_file:
        return None
    inode: int | None = db.value(
        "SELECT u.inode FROM published u JOIN inode i ON i.id = u.inode WHERE u.pfs_inode = ? AND u.size = ? AND u.mtime_ns = ?"
        " AND i.nlink > 0 AND EXISTS (SELECT 1 FROM pfs_entry p WHERE p.inode = u.inode)",
        found.ino, found.size, found.mtime_ns,
    )  # fmt: skip
    return inode


def _publish(db: Database, inode: int, generation: int, found: Seen) -> None:
    db.run(
        "INSERT OR REPLACE INTO published (inode, generation, complete, size, mtime_ns, pfs_inode) VALUES (?,?,1,?,?,?)",
        inode, generation, found.size, found.mtime_ns, found.ino,
    )  # fmt: skip


def _believe(db: Database, directory: int, found: Seen, inode: int) -> None:
    """Remember what the PFS shows under this name."""
    db.run(
        "INSERT OR REPLACE INTO pfs_entry (parent, name, inode, seen_ino, seen_mode, seen_uid, seen_gid) VALUES (?,?,?,?,?,?,?)",
        directory, found.name, inode, found.ino, found.mode, found.uid, found.gid,
    )  # fmt: skip


def _changed(db: Database, inode: int, found: Seen) -> None:
    """A stranger has written this file on the PFS: its next generation lies there only."""
    newest = "SELECT max(i.generation, coalesce(u.generation, 0)) FROM inode i LEFT JOIN published u ON u.inode = i.id WHERE i.id = ?"
    generation = 1 + int(db.value(newest, inode))
    db.run("UPDATE content SET state = 3 WHERE inode = ? AND state <> 3", inode)
    db.run(
        "UPDATE inode SET content = NULL, generation = ?, size = ?, mtime_ns = ?, ctime_ns = ? WHERE id = ?",
        generation, found.size, found.mtime_ns, found.ctime_ns, inode,
    )  # fmt: skip
    _publish(db, inode, generation, found)


def _attributes(db: Database, inode: int, before: tuple[int, int, int, int], found: Seen) -> None:
    """Take over the mode and the owner where a stranger changed them."""
    for column, old, new in zip(("mode", "uid", "gid"), before[1:], (found.mode, found.uid, found.gid), strict=True):
        if old != new:
            db.run(f"UPDATE inode SET {column} = ?, ctime_ns = max(ctime_ns, ?) WHERE id = ?", new, found.ctime_ns, inode)


def stranger_was_here(db: Database, directory: int, seen: Seen) -> None:
    """Names in `directory` were changed on the PFS: so were its times."""
    times = "UPDATE inode SET mtime_ns = max(mtime_ns, ?), ctime_ns = max(ctime_ns, ?) WHERE id = ?"
    db.run(times, seen.mtime_ns, seen.ctime_ns, directory)


# --- what vanished ---------------------------------------------------------------------------------------------------


def believed(db: Database, directory: int) -> list[tuple[bytes, int, int]]:
    """(name, inode, its mode) of all that we believe to be in this directory on the PFS."""
    shown = "SELECT p.name, p.inode, coalesce(i.mode, 0) FROM pfs_entry p LEFT JOIN inode i ON i.id = p.inode WHERE p.parent = ?"
    rows = db.rows(shown, directory)
    return [(bytes(row[0]), row[1], row[2]) for row in rows]


def vanish(db: Database, pending: Pending, name: bytes) -> bool:
    """A name is gone from the PFS. Forget it, unless ours is newer or a directory that still holds something; whether it is gone."""
    what = known(db, pending.directory, name)
    if what.inode is None or pending.has(name, what.child, what.inode):
        return False
    if what.child == what.inode:
        if stat.S_ISDIR(what.mode):
            if db.value("SELECT 1 FROM entry WHERE parent = ? LIMIT 1", what.inode) is not None:
                return False
        elif not settled(db, what.inode):
            return False
        _drop_name(db, pending.directory, name, what.inode)
    db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", pending.directory, name)
    return True


def tree(db: Database, inode: int) -> list[tuple[int, list[bytes]]]:
    """(directory, its names) of everything below `inode`, the deepest first; empty when it is no directory."""
    found: list[tuple[int, list[bytes]]] = []
    level = [inode] if is_directory(db, inode) else []
    while level:
        below: list[int] = []
        for directory in level:
            rows = db.rows("SELECT e.name, e.child, i.mode FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ?", directory)
            found.append((directory, [bytes(row[0]) for row in rows]))
            below += [row[1] for row in rows if stat.S_ISDIR(row[2])]
        level = below
    return found[::-1]


def _drop_name(db: Database, directory: int, name: bytes, inode: int) -> None:
    """Remove a name and, with its last one, what it led to. Nothing is recorded for the PFS: it is the PFS that says so."""
    db.run("DELETE FROM entry WHERE parent = ? AND name = ? AND child = ?", directory, name, inode)
    db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", directory, name)
    row = db.row("SELECT mode, nlink FROM inode WHERE id = ?", inode)
    assert row is not None
    if stat.S_ISDIR(row[0]):
        db.run("UPDATE inode SET nlink = nlink - 1 WHERE id = ?", directory)
    left = 0 if stat.S_ISDIR(row[0]) else row[1] - 1
    db.run("UPDATE inode SET nlink = ?, ctime_ns = ? WHERE id = ?", left, time.time_ns(), inode)
    if left == 0:
        db.run("UPDATE content SET state = 3 WHERE inode = ? AND state <> 3", inode)
        db.run("DELETE FROM published WHERE inode = ?", inode)
