"""The import of a PFS directory into the catalog (tables `scan` and `scan_dirty_name`).

A scan lists a directory on the PFS outside of any transaction, and then compares name by name. A name has three states: in
the catalog (`entry`), as expected on the PFS (`pfs_entry`, `pfs_file`), and as observed. If the PFS differs from the expected state,
there was an external change; if the catalog differs from it, write-back has work to do. The listing is older than the transaction
that uses it. Names and inodes with journal rows are therefore left alone, those that were pending when the listing began
(`PendingChanges`) and those that write-back has finished meanwhile (`scan_dirty_name`, filled by triggers). Local changes win: an external
change never reverts what the PFS does not have yet; write-back settles that. Functions that change rows join the caller's transaction,
which is an `import_transaction`.

Crash safety: `reset_scans` forgets the scan; the directory is as complete as before, and is scanned again.
"""

import contextlib
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from ckptfs import limits
from ckptfs.catalog import handles, identity, inodes, journal, pfs_state
from ckptfs.catalog.database import Database
from ckptfs.lifecycle import is_same_file
from ckptfs.model import HISTORY_NAME, ROOT, PfsEntryStat

_ADOPTED = -1
"""`scanned_ns` of a local directory that turned out to be on the PFS too: the kernel may have cached absent names in it."""


class ScanVerdict(Enum):
    """The decision of a scan about one name."""

    SAME = auto()
    NOTE = auto()  # As expected, but its owner, mode and number were not observed yet.
    NEW = auto()
    ADOPT = auto()  # A directory that was made on this node before the PFS answered, and that the PFS has as well.
    ATTRIBUTES = auto()
    CONTENT = auto()
    FOUND = auto()  # A file that was lost on this node, and that the PFS has: it was written back before a power cut.
    REPLACED = auto()
    LEAVE = auto()  # The local state is newer, or of another type: write-back settles it.


@dataclass(frozen=True, slots=True)
class KnownName:
    """A name in the catalog."""

    child: int | None  # Its inode in the mount.
    child_mode: int
    inode: int | None  # Its inode on the PFS.
    mode: int
    last_stat: tuple[int, int, int, int] | None  # How it was last seen on the PFS.
    published: tuple[int, int, int] | None  # How it was last written there.
    is_lost: bool = False  # No copy of the mount's file is left.


@dataclass(slots=True)
class PendingChanges:
    """Names in a directory, and inodes, whose changes the PFS lacked at some time during the scan."""

    directory: int
    names: set[bytes] = field(default_factory=set)
    inodes: set[int] = field(default_factory=set)
    seq: int = 0

    def update(self, db: Database) -> None:
        """Add what was recorded since the last call."""
        for row in journal.list_oldest(db, -1, self.seq):
            self.seq = row.seq
            self.inodes.add(row.inode)
            self.names.update(name for directory, name in row.names if directory == self.directory)
        self.names.update(db.column("SELECT name FROM scan_dirty_name WHERE directory = ?", self.directory))

    def is_pending(self, name: bytes, *inodes: int | None) -> bool:
        """Return True if a name or inode must be left alone. Call `update` in this transaction."""
        return name in self.names or not self.inodes.isdisjoint(inodes)


# --- begin and end of a scan --------------------------------------------------------------------------------------------


def get_pfs_path(db: Database) -> str:
    """Return where the PFS of this catalog was mounted last; an empty string if it never had one."""
    return str(db.get_meta("pfs_root") or "")


def reset_scans(db: Database, pfs: str) -> None:
    """Forget the scans of a mover that died. Call it first when a mover starts with the PFS `pfs`.

    If this catalog meets that PFS for the first time, the root awaits its import. Does not touch the PFS.
    """
    with db.transaction():
        db.run("DELETE FROM scan")
        db.run("DELETE FROM scan_dirty_name")
        if get_pfs_path(db) != pfs:
            db.set_meta("pfs_root", pfs)
            db.run("UPDATE inode SET imported = 0, scanned_ns = 0 WHERE id = ?", ROOT)


def set_root_attributes(db: Database, pending: PendingChanges, observed: PfsEntryStat) -> bool:
    """Give the root the mode and owner of the PFS's root at its first scan. Return True if it did."""
    if pending.is_pending(b"", ROOT) or db.row("SELECT imported, scanned_ns FROM inode WHERE id = ?", ROOT) != (0, 0):
        return False
    values = (observed.mode, observed.uid, observed.gid, observed.mtime_ns, observed.ctime_ns, ROOT)
    db.run("UPDATE inode SET mode = ?, uid = ?, gid = ?, mtime_ns = max(mtime_ns, ?), ctime_ns = max(ctime_ns, ?) WHERE id = ?", *values)
    return True


def record_scan_begin(db: Database, directory: int) -> PendingChanges:
    """Begin a scan before the directory is listed: changes by write-back are recorded from now on."""
    with db.transaction():
        db.run("INSERT OR REPLACE INTO scan (directory) VALUES (?)", directory)
        db.run("DELETE FROM scan_dirty_name WHERE directory = ?", directory)
    pending = PendingChanges(directory)
    pending.update(db)
    return pending


@contextlib.contextmanager
def import_transaction(db: Database) -> Iterator[None]:
    """Run a block as a transaction of a scan: the triggers do not take its changes for write-back's."""
    with db.transaction():
        db.run("UPDATE scan SET importing = 1")
        yield
        db.run("UPDATE scan SET importing = 0")


def record_scan_end(db: Database, directory: int, *, whole: bool) -> None:
    """End a scan. `whole`: everything was compared, and the catalog has all names of the directory."""
    with db.transaction():
        db.run("DELETE FROM scan WHERE directory = ?", directory)
        db.run("DELETE FROM scan_dirty_name WHERE directory = ?", directory)
        if whole:
            db.run("UPDATE inode SET imported = 1, scanned_ns = ? WHERE id = ?", time.time_ns(), directory)


def is_imported(db: Database, directory: int) -> bool:
    """Return True if the catalog has all names of a directory, so that a name it lacks does not exist."""
    return bool(db.value("SELECT imported FROM inode WHERE id = ?", directory))


def can_cache_absent_names(db: Database, directory: int) -> bool:
    """Return True if the kernel may cache that a name in the directory is absent."""
    return db.row("SELECT 1 FROM inode WHERE id = ? AND (imported = 1 OR scanned_ns = ?)", directory, _ADOPTED) is not None


def has_many_names(db: Database, directory: int) -> bool:
    """Return whether the PFS shows `limits.SHARED_NAMES_MAX` names or more in a directory."""
    return db.value("SELECT 1 FROM pfs_entry WHERE parent = ? LIMIT 1 OFFSET ?", directory, limits.SHARED_NAMES_MAX - 1) is not None


def is_directory(db: Database, inode: int | None) -> bool:
    return stat.S_ISDIR(int(db.value("SELECT mode FROM inode WHERE id = ?", inode) or 0))


def find_due_directory(db: Database, before_ns: int) -> int | None:
    """Return the imported PFS directory that was scanned, and made, longest before `before_ns`.

    What happened in the future, by a clock that was ahead, is long ago.
    """
    due: int | None = None
    for condition in ("scanned_ns < ?1", "scanned_ns > ?2"):  # Two queries, which the index answers.
        due = due or db.value(
            f"SELECT id FROM inode WHERE mode & 61440 = 16384 AND {condition} AND birth_ns NOT BETWEEN ?1 AND ?2 AND imported = 1"
            " AND nlink > 0 AND (id = 1 OR EXISTS (SELECT 1 FROM pfs_entry p WHERE p.inode = inode.id)) ORDER BY scanned_ns LIMIT 1",
            before_ns, max(before_ns, time.time_ns()),
        )  # fmt: skip
    return due


def record_postponed(db: Database, directory: int) -> None:
    """Postpone a directory that cannot be scanned now: its turn comes after all others."""
    db.change("UPDATE inode SET scanned_ns = ? WHERE id = ?", time.time_ns(), directory)


def list_scanned_directories(db: Database, directory: int) -> list[int]:
    """Return the directories in `directory` that were imported."""
    below = "SELECT id FROM inode WHERE id IN (SELECT child FROM entry WHERE parent = ?) AND mode & 61440 = 16384 AND imported = 1"
    return db.column(below, directory)


# --- comparing -------------------------------------------------------------------------------------------------------


def get_known_name(db: Database, directory: int, name: bytes) -> KnownName:
    """Return what the catalog knows of a name."""
    row = db.row(
        "SELECT e.child, coalesce(c.mode, 0), p.inode, coalesce(i.mode, 0), p.seen_ino, p.seen_mode, p.seen_uid, p.seen_gid,"
        " u.size, u.mtime_ns, u.pfs_inode, EXISTS (SELECT 1 FROM content t WHERE t.id = c.content AND t.state = 4)"
        " FROM (SELECT ? AS parent, ? AS name) k"
        " LEFT JOIN entry e ON e.parent = k.parent AND e.name = k.name LEFT JOIN inode c ON c.id = e.child"
        " LEFT JOIN pfs_entry p ON p.parent = k.parent AND p.name = k.name LEFT JOIN inode i ON i.id = p.inode"
        " LEFT JOIN pfs_file u ON u.inode = p.inode",
        directory, name,
    )  # fmt: skip
    assert row is not None
    child, child_mode, inode, inode_mode, *seen, size, mtime_ns, pfs_inode, is_lost = row
    last_stat = None if seen[0] is None else (seen[0], seen[1], seen[2], seen[3])
    published = None if size is None else (size, mtime_ns, pfs_inode)
    return KnownName(child, child_mode, inode, inode_mode, last_stat, published, bool(is_lost))


def choose_verdict(observed: PfsEntryStat, known: KnownName) -> ScanVerdict:
    """Return what a difference between listing and catalog means, if nothing is pending. Pure."""
    if known.is_lost and known.child != known.inode and observed.is_file and not _is_expected_file(observed, known):
        return ScanVerdict.FOUND
    if known.inode is None or (known.child is None and known.mode == 0):
        if known.child is None:
            return ScanVerdict.NEW
        return ScanVerdict.ADOPT if observed.is_directory and stat.S_ISDIR(known.child_mode) else ScanVerdict.LEAVE
    if known.child != known.inode:
        return ScanVerdict.LEAVE
    if stat.S_IFMT(observed.mode) != stat.S_IFMT(known.mode):
        return ScanVerdict.REPLACED
    if observed.is_file and not _is_expected_file(observed, known):
        return ScanVerdict.CONTENT
    if known.last_stat is None:
        return ScanVerdict.NOTE
    if known.last_stat[0] != observed.ino and not observed.is_file:
        return ScanVerdict.NOTE if observed.is_directory else ScanVerdict.REPLACED
    return ScanVerdict.SAME if known.last_stat[1:] == (observed.mode, observed.uid, observed.gid) else ScanVerdict.ATTRIBUTES


def _is_expected_file(observed: PfsEntryStat, known: KnownName) -> bool:
    return known.published is not None and is_same_file(known.published, (observed.size, observed.mtime_ns, observed.ino))


def can_take_external_change(db: Database, inode: int) -> bool:
    """Return True if an external change may replace the file: the PFS has all of it, and it is not open."""
    row = db.row(
        "SELECT i.content, k.state, u.complete, u.generation = k.generation FROM inode i LEFT JOIN content k ON k.id = i.content"
        " LEFT JOIN pfs_file u ON u.inode = i.id WHERE i.id = ?",
        inode,
    )
    if row is None or handles.is_open(db, inode):
        return False
    content, state, complete, same = row
    return content is None or state == 4 or (state == 2 and bool(complete) and bool(same))


# --- changing --------------------------------------------------------------------------------------------------------


def import_entry(db: Database, pending: PendingChanges, observed: PfsEntryStat) -> tuple[ScanVerdict, int | None]:
    """Import what the PFS shows under one name. Return (what was done, the inode under the name now).

    SAME and LEAVE change nothing. A directory that something else replaced is only reported: its tree has to be removed first.
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
    if verdict is ScanVerdict.CONTENT and inodes.is_history(db, inode):
        if inodes.is_history(db, directory) and journal.can_recreate(db, inode):
            journal.insert_rows_for_tree(db, inode)  # A set never changes: the PFS gets its bytes again.
            return ScanVerdict.LEAVE, inode
        verdict = ScanVerdict.CONTENT if inodes.is_history(db, directory) else ScanVerdict.REPLACED  # The history keeps the previous bytes.
    if verdict is ScanVerdict.REPLACED:
        return _import_replacement(db, directory, observed, known, inode)
    if verdict in {ScanVerdict.CONTENT, ScanVerdict.FOUND} and not can_take_external_change(db, inode):
        return ScanVerdict.LEAVE, inode
    if verdict is ScanVerdict.ADOPT:
        db.run("UPDATE inode SET imported = 0, scanned_ns = ? WHERE id = ?", _ADOPTED, inode)
    if verdict in {ScanVerdict.CONTENT, ScanVerdict.FOUND}:
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
    """Insert a name: of a new inode, or of a file that the catalog knows. Return the inode."""
    inode = _find_linked_inode(db, observed)
    if inode is None:
        inode = _insert_inode(db, directory, observed)
    else:
        db.run("UPDATE inode SET nlink = nlink + 1, history = history + ? WHERE id = ?", inodes.is_history(db, directory), inode)
    db.run("INSERT INTO entry (parent, name, child) VALUES (?,?,?)", directory, observed.name, inode)
    _record_expected(db, directory, observed, inode)
    return inode


def _insert_inode(db: Database, directory: int, observed: PfsEntryStat) -> int:
    links, home, size = (2, directory, 0) if observed.is_directory else (1, 0, observed.size)
    in_history = inodes.is_history(db, directory) or (directory, observed.name) == (ROOT, HISTORY_NAME)
    inode = db.insert(
        "INSERT INTO inode (id, mode, uid, gid, rdev, nlink, size, atime_ns, mtime_ns, ctime_ns, birth_ns, target, parent, imported,"
        " history) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
        identity.allocate_id(db, "inode", in_history=in_history and observed.is_directory),
        observed.mode, observed.uid, observed.gid, observed.rdev, links, size, observed.atime_ns, observed.mtime_ns,
        observed.ctime_ns, observed.ctime_ns, observed.target, home, not observed.is_directory, in_history,
    )  # fmt: skip
    for name, value in observed.xattrs:
        db.run("INSERT INTO xattr (inode, name, value) VALUES (?,?,?)", inode, name, value)
    if observed.is_directory and observed.name != HISTORY_NAME:
        db.run("UPDATE inode SET nlink = nlink + 1 WHERE id = ?", directory)
    if observed.is_file:
        _record_published(db, inode, 0, observed)
    return inode


def _find_linked_inode(db: Database, observed: PfsEntryStat) -> int | None:
    """Return the inode of which `observed` is a further hard link on the PFS."""
    if observed.nlink < 2 or not observed.is_file or not observed.ino:
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
    pfs_state.insert_entry(db, directory, observed.name, inode, (observed.ino, observed.mode, observed.uid, observed.gid))


def _record_external_write(db: Database, inode: int, observed: PfsEntryStat) -> None:
    """Record that the file was written on the PFS: only the PFS has its next generation."""
    newest = "SELECT max(i.generation, coalesce(u.generation, 0)) FROM inode i LEFT JOIN pfs_file u ON u.inode = i.id WHERE i.id = ?"
    generation = 1 + int(db.value(newest, inode))
    db.run("UPDATE content SET state = 3 WHERE inode = ? AND state <> 3", inode)
    db.run(
        "UPDATE inode SET content = NULL, generation = ?, size = ?, mtime_ns = ?, ctime_ns = ? WHERE id = ?",
        generation, observed.size, observed.mtime_ns, observed.ctime_ns, inode,
    )  # fmt: skip
    _record_published(db, inode, generation, observed)


def _record_external_attributes(db: Database, inode: int, last_stat: tuple[int, int, int, int], observed: PfsEntryStat) -> None:
    """Take over mode and owner where they were changed on the PFS."""
    for column, old, new in zip(("mode", "uid", "gid"), last_stat[1:], (observed.mode, observed.uid, observed.gid), strict=True):
        if old != new:
            db.run(f"UPDATE inode SET {column} = ?, ctime_ns = max(ctime_ns, ?) WHERE id = ?", new, observed.ctime_ns, inode)


def record_external_change(db: Database, directory: int, observed: PfsEntryStat) -> None:
    """Take over the times of a directory in which names were changed on the PFS."""
    times = "UPDATE inode SET mtime_ns = max(mtime_ns, ?), ctime_ns = max(ctime_ns, ?) WHERE id = ?"
    db.run(times, observed.mtime_ns, observed.ctime_ns, directory)


# --- vanished names --------------------------------------------------------------------------------------------------


def list_expected(db: Database, directory: int) -> list[bytes]:
    """Return the names that the PFS is expected to show in this directory."""
    return [bytes(name) for name in db.column("SELECT name FROM pfs_entry WHERE parent = ?", directory)]


def record_vanished(db: Database, pending: PendingChanges, name: bytes) -> bool:
    """Delete a name that is gone from the PFS, unless the local state is newer. Return True if it is."""
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


def list_directory(db: Database, directory: int) -> tuple[list[bytes], list[int]]:
    """Return (names, subdirectories) of a directory in the mount."""
    rows = db.rows("SELECT e.name, e.child, i.mode FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ?", directory)
    return [bytes(row[0]) for row in rows], [row[1] for row in rows if stat.S_ISDIR(row[2])]


def _delete_name(db: Database, directory: int, name: bytes, inode: int) -> None:
    """Delete a name and, with its last one, its inode. The journal gets no row: the PFS has this already."""
    db.run("DELETE FROM entry WHERE parent = ? AND name = ? AND child = ?", directory, name, inode)
    db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", directory, name)
    row = db.row("SELECT mode, nlink FROM inode WHERE id = ?", inode)
    assert row is not None
    mode, nlink = row
    if stat.S_ISDIR(mode) and name != HISTORY_NAME:
        db.run("UPDATE inode SET nlink = nlink - 1 WHERE id = ?", directory)
    left = 0 if stat.S_ISDIR(mode) else nlink - 1
    gone = inodes.is_history(db, directory)
    db.run("UPDATE inode SET nlink = ?, history = max(history - ?, 0), ctime_ns = ? WHERE id = ?", left, gone, time.time_ns(), inode)
    if left == 0:
        db.run("UPDATE content SET state = 3 WHERE inode = ? AND state <> 3", inode)
        db.run("DELETE FROM pfs_file WHERE inode = ?", inode)
