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
from ckptfs.lifecycle import is_same_file
from ckptfs.model import ROOT, PfsEntryStat

_ADOPTED = -1
"""`visited_ns` of a directory of ours that turned out to be on the PFS too: the kernel may know absent names in it."""


class ScanVerdict(Enum):
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
class KnownName:
    """What the catalog knows of one name: `child` in the mount, `inode` on the PFS, how that was last seen and published."""

    child: int | None
    child_mode: int
    inode: int | None
    mode: int
    last_stat: tuple[int, int, int, int] | None
    published: tuple[int, int, int] | None


@dataclass(slots=True)
class PendingChanges:
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
        self.names.update(bytes(row[0]) for row in db.rows("SELECT name FROM scan_dirty_name WHERE directory = ?", self.directory))

    def is_pending(self, name: bytes, *inodes: int | None) -> bool:
        """Whether this name must be left alone: by itself, or for one of the inodes it leads to. `update` in the same transaction."""
        return name in self.names or not self.inodes.isdisjoint(inodes)


# --- the frame of a visit --------------------------------------------------------------------------------------------


def reset_scans(db: Database, pfs: str) -> None:
    """Before anything else when a mover starts with a PFS known as `pfs`: forget visits that died. With a PFS that this catalog meets
    for the first time, the mount's root awaits its import. Asks nothing of the PFS.
    """
    with db.transaction():
        db.run("DELETE FROM scan")
        db.run("DELETE FROM scan_dirty_name")
        if db.value("SELECT value FROM meta WHERE key = 'pfs_root'") != pfs:
            db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('pfs_root', ?)", pfs)
            db.run("UPDATE inode SET imported = 0, scanned_ns = 0 WHERE id = ?", ROOT)


def set_root_attributes(db: Database, pending: PendingChanges, observed: PfsEntryStat) -> bool:
    """At its first visit the mount's root takes the mode and owner of the PFS's root; whether it did."""
    if pending.is_pending(b"", ROOT) or db.row("SELECT imported, scanned_ns FROM inode WHERE id = ?", ROOT) != (0, 0):
        return False
    values = (observed.mode, observed.uid, observed.gid, observed.mtime_ns, observed.ctime_ns, ROOT)
    db.run("UPDATE inode SET mode = ?, uid = ?, gid = ?, mtime_ns = max(mtime_ns, ?), ctime_ns = max(ctime_ns, ?) WHERE id = ?", *values)
    return True


def record_scan_begin(db: Database, directory: int) -> PendingChanges:
    """Start a visit, before the directory is listed: from now on what write-back changes in it is noted."""
    with db.transaction():
        db.run("INSERT OR REPLACE INTO scan (directory) VALUES (?)", directory)
        db.run("DELETE FROM scan_dirty_name WHERE directory = ?", directory)
    pending = PendingChanges(directory)
    pending.update(db)
    return pending


@contextlib.contextmanager
def import_transaction(db: Database, directory: int) -> Iterator[None]:
    """A transaction whose changes to `pfs_entry` and `published` are the visit's own."""
    with db.transaction():
        db.run("UPDATE scan SET importing = 1")
        yield
        db.run("UPDATE scan SET importing = 0")


def record_scan_end(db: Database, directory: int, *, whole: bool) -> None:
    """The visit is over; `whole`: everything was compared, so the catalog knows all names of this directory."""
    with db.transaction():
        db.run("DELETE FROM scan WHERE directory = ?", directory)
        db.run("DELETE FROM scan_dirty_name WHERE directory = ?", directory)
        if whole:
            db.run("UPDATE inode SET imported = 1, scanned_ns = ? WHERE id = ?", time.time_ns(), directory)


def is_imported(db: Database, directory: int) -> bool:
    """Whether the catalog knows all names of a directory, and so may say of a name that it is not there."""
    return bool(db.value("SELECT imported FROM inode WHERE id = ?", directory))


def can_cache_absent_names(db: Database, directory: int) -> bool:
    """Whether the mount's kernel may believe that a name is absent here."""
    return db.row("SELECT 1 FROM inode WHERE id = ? AND (imported = 1 OR scanned_ns = ?)", directory, _ADOPTED) is not None


def list_names(db: Database, inode: int) -> list[tuple[int, bytes]]:
    """(parent, name) of every name that leads to `inode`."""
    return [(row[0], bytes(row[1])) for row in db.rows("SELECT parent, name FROM entry WHERE child = ?", inode)]


def is_directory(db: Database, inode: int | None) -> bool:
    """Whether this inode is a directory."""
    return stat.S_ISDIR(int(db.value("SELECT mode FROM inode WHERE id = ?", inode) or 0))


def find_due_directory(db: Database, before_ns: int) -> int | None:
    """The complete directory on the PFS that was compared longest ago, if neither that nor its making was after `before_ns`."""
    directory: int | None = db.value(
        "SELECT id FROM inode WHERE mode & 61440 = 16384 AND scanned_ns < ? AND birth_ns < ? AND imported = 1 AND nlink > 0"
        " AND (id = 1 OR EXISTS (SELECT 1 FROM pfs_entry p WHERE p.inode = inode.id)) ORDER BY scanned_ns LIMIT 1",
        before_ns, before_ns,
    )  # fmt: skip
    return directory


def record_postponed(db: Database, directory: int) -> None:
    """A directory could not be compared now: its next turn comes after all others'."""
    with db.transaction():
        db.run("UPDATE inode SET scanned_ns = ? WHERE id = ?", time.time_ns(), directory)


def list_scanned_directories(db: Database, directory: int) -> list[int]:
    """The directories in `directory` that were visited before."""
    below = "SELECT id FROM inode WHERE id IN (SELECT child FROM entry WHERE parent = ?) AND mode & 61440 = 16384 AND imported = 1"
    return [row[0] for row in db.rows(below, directory)]


# --- comparing -------------------------------------------------------------------------------------------------------


def get_known_name(db: Database, directory: int, name: bytes) -> KnownName:
    """What the catalog knows of a name."""
    row = db.row(
        "SELECT e.child, coalesce(c.mode, 0), p.inode, coalesce(i.mode, 0), p.seen_ino, p.seen_mode, p.seen_uid, p.seen_gid,"
        " u.size, u.mtime_ns, u.pfs_inode FROM (SELECT ? AS parent, ? AS name) k"
        " LEFT JOIN entry e ON e.parent = k.parent AND e.name = k.name LEFT JOIN inode c ON c.id = e.child"
        " LEFT JOIN pfs_entry p ON p.parent = k.parent AND p.name = k.name LEFT JOIN inode i ON i.id = p.inode"
        " LEFT JOIN pfs_file u ON u.inode = p.inode",
        directory, name,
    )  # fmt: skip
    assert row is not None
    last_stat = None if row[4] is None else (row[4], row[5], row[6], row[7])
    return KnownName(row[0], row[1], row[2], row[3], last_stat, None if row[8] is None else (row[8], row[9], row[10]))


def choose_verdict(observed: PfsEntryStat, known: KnownName) -> ScanVerdict:
    """What the difference between the listing and the catalog means, if nothing is pending. Pure."""
    if known.inode is None or (known.child is None and known.mode == 0):
        if known.child is None:
            return ScanVerdict.NEW
        return ScanVerdict.ADOPT if observed.is_directory and stat.S_ISDIR(known.child_mode) else ScanVerdict.LEAVE
    if known.child != known.inode:
        return ScanVerdict.LEAVE
    if stat.S_IFMT(observed.mode) != stat.S_IFMT(known.mode):
        return ScanVerdict.REPLACED
    if observed.is_file and not (known.published and is_same_file(known.published, (observed.size, observed.mtime_ns, observed.ino))):
        return ScanVerdict.CONTENT
    if known.last_stat is None:
        return ScanVerdict.NOTE
    if known.last_stat[0] != observed.ino and not observed.is_file:
        return ScanVerdict.NOTE if observed.is_directory else ScanVerdict.REPLACED
    return ScanVerdict.SAME if known.last_stat[1:] == (observed.mode, observed.uid, observed.gid) else ScanVerdict.ATTRIBUTES


def can_take_external_change(db: Database, inode: int) -> bool:
    """Whether the PFS has all that this file holds and nobody has it open: then a stranger's change there may be taken over."""
    row = db.row(
        "SELECT k.state, u.complete, u.generation = k.generation FROM inode i LEFT JOIN content k ON k.id = i.content"
        " LEFT JOIN pfs_file u ON u.inode = i.id WHERE i.id = ?",
        inode,
    )
    if row is None or handles.is_open(db, inode):
        return False
    state, complete, same = row
    return state is None or state == 4 or (state == 2 and bool(complete) and bool(same))


# --- changing --------------------------------------------------------------------------------------------------------


def import_entry(db: Database, pending: PendingChanges, observed: PfsEntryStat) -> tuple[ScanVerdict, int | None]:
    """Take over what the PFS shows under one name; what was done (SAME and LEAVE: nothing), and the inode that the name leads to now.

    A directory that was replaced by something else is only reported: its tree has to be removed first.
    """
    directory = pending.directory
    known = get_known_name(db, directory, observed.name)
    verdict = choose_verdict(observed, known)
    if verdict in {ScanVerdict.SAME, ScanVerdict.LEAVE} or pending.is_pending(observed.name, known.child, known.inode):
        return verdict if verdict is ScanVerdict.SAME else ScanVerdict.LEAVE, known.child
    if verdict is ScanVerdict.NEW:
        return verdict, _import_new(db, directory, observed)
    inode = known.child
    assert inode is not None
    if verdict is ScanVerdict.REPLACED:
        return _import_replacement(db, directory, observed, known, inode)
    if verdict is ScanVerdict.CONTENT and not can_take_external_change(db, inode):
        return ScanVerdict.LEAVE, inode
    if verdict is ScanVerdict.ADOPT:
        db.run("UPDATE inode SET imported = 0, scanned_ns = ? WHERE id = ?", _ADOPTED, inode)
    if verdict is ScanVerdict.CONTENT:
        _record_external_write(db, inode, observed)
    if verdict in {ScanVerdict.CONTENT, ScanVerdict.ATTRIBUTES} and known.last_stat is not None:
        _record_external_attributes(db, inode, known.last_stat, observed)
    _record_expected(db, directory, observed, inode)
    return verdict, inode


def _import_replacement(db: Database, directory: int, observed: PfsEntryStat, known: KnownName, inode: int) -> tuple[ScanVerdict, int]:
    if stat.S_ISDIR(known.mode):
        return ScanVerdict.REPLACED, inode
    if not can_take_external_change(db, inode):
        return ScanVerdict.LEAVE, inode
    _delete_name(db, directory, observed.name, inode)
    return ScanVerdict.REPLACED, _import_new(db, directory, observed)


def _import_new(db: Database, directory: int, observed: PfsEntryStat) -> int:
    """A name that the catalog does not have: a new inode, or another name for a file that it knows. The inode."""
    inode = _find_linked_inode(db, observed)
    if inode is None:
        inode = _insert_inode(db, directory, observed)
    else:
        db.run("UPDATE inode SET nlink = nlink + 1 WHERE id = ?", inode)
    db.run("INSERT INTO entry (parent, name, child) VALUES (?,?,?)", directory, observed.name, inode)
    _record_expected(db, directory, observed, inode)
    return inode


def _insert_inode(db: Database, directory: int, observed: PfsEntryStat) -> int:
    links, home, size = (2, directory, 0) if observed.is_directory else (1, 0, observed.size)
    inode = db.insert(
        "INSERT INTO inode (id, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns, birth_ns, target, parent, imported)"
        " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
        identity.allocate_id(db, "inode"),
        observed.mode, observed.uid, observed.gid, observed.rdev, links, size, observed.atime_ns, observed.mtime_ns,
        observed.ctime_ns, observed.ctime_ns, observed.target, home, not observed.is_directory,
    )  # fmt: skip
    for name, value in observed.xattrs:
        db.run("INSERT INTO xattr (inode, name, value) VALUES (?,?,?)", inode, name, value)
    if observed.is_directory:
        db.run("UPDATE inode SET nlink = nlink + 1 WHERE id = ?", directory)
    if observed.is_file:
        _record_published(db, inode, 0, observed)
    return inode


def _find_linked_inode(db: Database, observed: PfsEntryStat) -> int | None:
    """The inode of which `found` is a further name: a hard link on the PFS."""
    if observed.nlink < 2 or not observed.is_file:
        return None
    inode: int | None = db.value(
        "SELECT u.inode FROM pfs_file u JOIN inode i ON i.id = u.inode WHERE u.pfs_inode = ? AND u.size = ? AND u.mtime_ns = ?"
        " AND i.nlink > 0 AND EXISTS (SELECT 1 FROM pfs_entry p WHERE p.inode = u.inode)",
        observed.ino, observed.size, observed.mtime_ns,
    )  # fmt: skip
    return inode


def _record_published(db: Database, inode: int, generation: int, observed: PfsEntryStat) -> None:
    db.run(
        "INSERT OR REPLACE INTO pfs_file (inode, generation, complete, size, mtime_ns, pfs_inode) VALUES (?,?,1,?,?,?)",
        inode, generation, observed.size, observed.mtime_ns, observed.ino,
    )  # fmt: skip


def _record_expected(db: Database, directory: int, observed: PfsEntryStat, inode: int) -> None:
    """Remember what the PFS shows under this name."""
    db.run(
        "INSERT OR REPLACE INTO pfs_entry (parent, name, inode, seen_ino, seen_mode, seen_uid, seen_gid) VALUES (?,?,?,?,?,?,?)",
        directory, observed.name, inode, observed.ino, observed.mode, observed.uid, observed.gid,
    )  # fmt: skip


def _record_external_write(db: Database, inode: int, observed: PfsEntryStat) -> None:
    """A stranger has written this file on the PFS: its next generation lies there only."""
    newest = "SELECT max(i.generation, coalesce(u.generation, 0)) FROM inode i LEFT JOIN pfs_file u ON u.inode = i.id WHERE i.id = ?"
    generation = 1 + int(db.value(newest, inode))
    db.run("UPDATE content SET state = 3 WHERE inode = ? AND state <> 3", inode)
    db.run(
        "UPDATE inode SET content = NULL, generation = ?, size = ?, mtime_ns = ?, ctime_ns = ? WHERE id = ?",
        generation, observed.size, observed.mtime_ns, observed.ctime_ns, inode,
    )  # fmt: skip
    _record_published(db, inode, generation, observed)


def _record_external_attributes(db: Database, inode: int, last_stat: tuple[int, int, int, int], observed: PfsEntryStat) -> None:
    """Take over the mode and the owner where a stranger changed them."""
    for column, old, new in zip(("mode", "uid", "gid"), last_stat[1:], (observed.mode, observed.uid, observed.gid), strict=True):
        if old != new:
            db.run(f"UPDATE inode SET {column} = ?, ctime_ns = max(ctime_ns, ?) WHERE id = ?", new, observed.ctime_ns, inode)


def record_external_change(db: Database, directory: int, observed: PfsEntryStat) -> None:
    """Names in `directory` were changed on the PFS: so were its times."""
    times = "UPDATE inode SET mtime_ns = max(mtime_ns, ?), ctime_ns = max(ctime_ns, ?) WHERE id = ?"
    db.run(times, observed.mtime_ns, observed.ctime_ns, directory)


# --- what vanished ---------------------------------------------------------------------------------------------------


def list_expected(db: Database, directory: int) -> list[tuple[bytes, int, int]]:
    """(name, inode, its mode) of all that we believe to be in this directory on the PFS."""
    shown = "SELECT p.name, p.inode, coalesce(i.mode, 0) FROM pfs_entry p LEFT JOIN inode i ON i.id = p.inode WHERE p.parent = ?"
    rows = db.rows(shown, directory)
    return [(bytes(row[0]), row[1], row[2]) for row in rows]


def record_vanished(db: Database, pending: PendingChanges, name: bytes) -> bool:
    """A name is gone from the PFS. Forget it, unless ours is newer or a directory that still holds something; whether it is gone."""
    known = get_known_name(db, pending.directory, name)
    if known.inode is None or pending.is_pending(name, known.child, known.inode):
        return False
    if known.child == known.inode:
        if stat.S_ISDIR(known.mode):
            if db.value("SELECT 1 FROM entry WHERE parent = ? LIMIT 1", known.inode) is not None:
                return False
        elif not can_take_external_change(db, known.inode):
            return False
        _delete_name(db, pending.directory, name, known.inode)
    db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", pending.directory, name)
    return True


def list_tree(db: Database, inode: int) -> list[tuple[int, list[bytes]]]:
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


def _delete_name(db: Database, directory: int, name: bytes, inode: int) -> None:
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
        db.run("DELETE FROM pfs_file WHERE inode = ?", inode)
