"""The history of checkpoint sets: second names of files below the hidden `HISTORY_NAME` of the root.

`<directories of the application>/<series>/<set>/<files>`: a series is a directory such as `step_*`, a set one such as `step_100@17` (its
name and its number in the series). The files of a set are hard links: they share inode, content and copies with the application's names
while those exist, so they last as long as the file is kept. The record of a series or a set is an internal attribute of its directory (see
`inodes.INTERNAL_XATTR_PREFIX`), which other nodes get with the directory. Names that begin with `.` are sets that are being made or
removed: they do not exist for readers.

Functions that change rows join the caller's transaction and write journal rows as `namespace` does. They raise `NotImported` if the
history is on the PFS and was not imported yet.

Invariants:
- A `SetRecord` never changes. A number is never used twice in a series.
- A file that is open for writing gets no name in the history.
  If a program opens a file of the history for writing, `separate` comes first: the history keeps the old bytes.
- Directories have the owner of the application's directory and its mode, without write bits for others.

Crash safety: a set appears with one rename. `list_unfinished` finds what was being made or removed.
"""

import errno
import itertools
import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace

from ckptfs import limits
from ckptfs.catalog import contents, handles, identity, inodes, journal, namespace
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get, get_path, restore_xattrs, set_attributes, set_internal_xattr
from ckptfs.errors import Busy, posix_error
from ckptfs.model import HISTORY_NAME, ROOT, Inode

NAME = HISTORY_NAME
SET_XATTR = b"ckptfs.set"
SERIES_XATTR = b"ckptfs.series"
PIN_XATTR = b"ckptfs.pin"
NOTE_XATTR = b"ckptfs.note"
ROLLBACK_XATTR = b"ckptfs.rollback"
_IS_SERIES = f"x.name = x'{SERIES_XATTR.hex()}'"
_NEW, _OLD = b".new-", b".old-"
_RECORD_BYTES_MAX = limits.XATTR_VALUE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Producer:
    """A process that wrote files of a set. Texts are empty and numbers 0 where they are not known."""

    host: str
    pid: int
    command: str = ""
    job: str = ""
    rank: str = ""


@dataclass(frozen=True, slots=True)
class SetRecord:
    """What is fixed about a complete set.

    `size` in bytes. `numbers`: as in the name, the one that counts steps first. `is_group`: a single file or several; the directory of the
    set holds them under their own names.
    """

    number: int
    name: bytes
    numbers: tuple[int, ...]
    files: int
    size: int
    completed_ns: int
    producers: tuple[Producer, ...] = ()
    is_group: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointSet:
    """A set in the history. `directory` is the inode of its directory."""

    directory: int
    record: SetRecord
    is_pinned: bool = False
    note: str = ""

    @property
    def name(self) -> bytes:
        """Return the name of the directory of the set."""
        return _build_set_name(self.record)


@dataclass(frozen=True, slots=True)
class Rollback:
    """The set that counts as the newest, until a newer one completes after `at_ns`."""

    number: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class SeriesRecord:
    """A series of the directory `origin` of the application.

    `path`: below the history. Empty if this node has not read the names that lead to it.
    """

    directory: int
    origin: int
    path: bytes
    pattern: bytes
    rollback: Rollback | None = None


# --- reading ----------------------------------------------------------------------------------------------------------


def find_root(db: Database) -> int | None:
    """Return the directory of the history. Returns None if there is none yet."""
    found = namespace.find_child(db, ROOT, NAME)
    return None if found is None else found.id


_SELECT_SERIES = (
    "SELECT x.inode, x.value, r.value FROM xattr x JOIN inode i ON i.id = x.inode AND i.nlink > 0"
    f" LEFT JOIN xattr r ON r.inode = x.inode AND r.name = ? WHERE {_IS_SERIES}"
)


def list_series(db: Database) -> list[SeriesRecord]:
    """Return all series with a history, in order of their paths."""
    found = [_build_series(db, *row) for row in db.rows(_SELECT_SERIES, ROLLBACK_XATTR)]
    return sorted(found, key=lambda one: one.path)


def get_series(db: Database, series: int) -> SeriesRecord | None:
    """Return the series in this directory. Returns None if it holds no series."""
    row = db.row(f"{_SELECT_SERIES} AND x.inode = ?", ROLLBACK_XATTR, series)
    return None if row is None else _build_series(db, *row)


def find_series(db: Database, origin: int, pattern: bytes) -> SeriesRecord | None:
    """Return the series of a pattern in a directory of the application. Returns None if it has no history."""
    is_wanted = "json_extract(CAST(x.value AS TEXT), '$.origin') = ? AND json_extract(CAST(x.value AS TEXT), '$.pattern') = ?"
    row = db.row(f"{_SELECT_SERIES} AND {is_wanted}", ROLLBACK_XATTR, origin, _to_text(pattern))
    return None if row is None else _build_series(db, *row)


def _build_series(db: Database, directory: int, value: bytes, rollback: bytes | None) -> SeriesRecord:
    known = json.loads(value)
    path = get_path(db, directory).partition(NAME + b"/")[2]
    target = None if rollback is None else Rollback(**json.loads(rollback))
    return SeriesRecord(directory, known["origin"], path, _to_bytes(known["pattern"]), target)


_SELECT_SETS = (
    "SELECT s.inode, s.value, p.value, n.value FROM {} JOIN xattr s ON s.inode = {} AND s.name = ?"
    " LEFT JOIN xattr p ON p.inode = s.inode AND p.name = ? LEFT JOIN xattr n ON n.inode = s.inode AND n.name = ?"
)
_SET_XATTRS = (SET_XATTR, PIN_XATTR, NOTE_XATTR)


def list_sets(db: Database, series: int) -> list[CheckpointSet]:
    """Return the sets of a series, in reverse order of their completion."""
    query = _SELECT_SETS.format("entry e", "e.child") + " WHERE e.parent = ? AND substr(e.name, 1, 1) <> x'2e'"
    found = [_build_set(*row) for row in db.rows(query, *_SET_XATTRS, series)]
    return sorted(found, key=lambda one: -one.record.number)


def get_set(db: Database, set_directory: int) -> CheckpointSet | None:
    """Return the set in this directory, finished or not. Returns None if it holds no set."""
    row = db.row(_SELECT_SETS.format("inode i", "i.id") + " WHERE i.id = ? AND i.nlink > 0", *_SET_XATTRS, set_directory)
    return None if row is None else _build_set(*row)


def list_set_directories(db: Database, series: int) -> list[int]:
    """Return the directories of the sets of a series, in reverse order of their completion."""
    rows = db.rows("SELECT name, child FROM entry WHERE parent = ? AND substr(name, 1, 1) <> x'2e'", series)
    numbered = [(name.rpartition(b"@")[2], child) for name, child in rows]
    return [child for _, child in sorted(((int(number), child) for number, child in numbered if number.isdigit()), reverse=True)]


def list_unfinished(db: Database, series: int) -> list[int]:
    """Return the directories of sets that are being made or removed."""
    return db.column("SELECT child FROM entry WHERE parent = ? AND substr(name, 1, 1) = x'2e' ORDER BY cookie", series)


def list_files(db: Database, set_directory: int) -> Iterator[tuple[bytes, Inode]]:
    """Yield (path in the set, inode) of everything but directories. Do not await in between."""
    todo = [(b"", set_directory)]
    while todo:
        path, directory = todo.pop()
        for entry, inode in namespace.iterate_entries(db, directory):
            if inode.is_directory:
                todo.append((path + entry.name + b"/", inode.id))
            else:
                yield path + entry.name, inode


# --- making a set -----------------------------------------------------------------------------------------------------


def insert_series(db: Database, origin: int, pattern: bytes) -> SeriesRecord:
    """Return the series of a pattern in an application's directory; create its directories if missing."""
    known = find_series(db, origin, pattern)
    if known is not None:
        return known
    root = find_root(db)
    parent = namespace.create_history_root(db, _get_shown_mode(get(db, ROOT))) if root is None else root
    for directory, name in _list_ancestors(db, origin):
        parent = _find_or_insert_directory(db, parent, name, directory)
    like = get(db, origin)
    for count in range(1, limits.LINKS_MAX):
        name = pattern if count == 1 else pattern + b"~%d" % count
        series = _find_or_insert_directory(db, parent, name, like)
        former = get_series(db, series)
        if former is None or (former.pattern == pattern and not contents.has_name(db, former.origin)):
            break
    _record_series(db, series, origin, pattern)
    found = get_series(db, series)
    assert found is not None
    return found


def _record_series(db: Database, series: int, origin: int, pattern: bytes) -> None:
    fields = {"origin": origin, "pattern": _to_text(pattern), "next": get_next_number(db, series)}
    set_internal_xattr(db, series, SERIES_XATTR, json.dumps(fields).encode())


def _find_or_insert_directory(db: Database, parent: int, name: bytes, like: Inode) -> int:
    found = namespace.find_child(db, parent, name)
    return found.id if found is not None and found.is_directory else insert_directory(db, parent, name, like)


def _list_ancestors(db: Database, directory: int) -> list[tuple[Inode, bytes]]:
    """Return the directories below the root that lead to this one, itself included, and their names."""
    found: list[tuple[Inode, bytes]] = []
    while directory != ROOT:
        parent, name = _find_place(db, directory) or (ROOT, b"%016x" % directory)
        found.append((get(db, directory), name))
        directory = parent
    return found[::-1]


def get_next_number(db: Database, series: int) -> int:
    """Return the number of the next set of a series: greater than all that were used."""
    value = inodes.find_xattr(db, series, SERIES_XATTR)
    names = [bytes(row[0]).rpartition(b"@")[2] for row in db.rows("SELECT name FROM entry WHERE parent = ?", series)] if not value else []
    return get_recorded_next_number(value) if value else 1 + max((int(name) for name in names if name.isdigit()), default=0)


def get_recorded_next_number(record: bytes) -> int:
    """Return the number of the next set by the record of a series."""
    return int(json.loads(record)["next"])


def record_used_numbers(db: Database, series: int, next_number: int) -> None:
    """Record that no set of this series gets a number below `next_number` any more."""
    fields = json.loads(inodes.get_xattr(db, series, SERIES_XATTR))
    fields["next"] = max(fields["next"], next_number)
    set_internal_xattr(db, series, SERIES_XATTR, json.dumps(fields).encode())


def set_next_number(db: Database, series: int, found: CheckpointSet, former_name: bytes) -> bytes:
    """Give the next number of a series to a set that only this node knows. Return its name.

    It is hidden if `former_name` is.
    """
    record = replace(found.record, number=get_next_number(db, series))
    set_internal_xattr(db, found.directory, SET_XATTR, _encode_record(record))
    record_used_numbers(db, series, record.number + 1)
    rollback = (known := get_series(db, series)) and known.rollback
    if rollback and rollback.number == found.record.number:
        set_rollback(db, series, replace(rollback, number=record.number))
    return build_hidden_name(record) if former_name.startswith(b".") else _build_set_name(record)


def begin_set(db: Database, series: int, record: SetRecord, like: Inode | None = None) -> int:
    """Make the directory of a set under a hidden name, and return it.

    Raises EEXIST if this node or another one makes it. `like`: the application's directory of the set, from which it has mode and owner;
    None: those of the series.
    """
    directory = insert_directory(db, series, build_hidden_name(record), like or get(db, series))
    set_internal_xattr(db, directory, SET_XATTR, _encode_record(record))
    record_used_numbers(db, series, record.number + 1)
    return directory


def has_unrecorded(db: Database) -> bool:
    """Return True if directories of the history may be sets without a record: imported, or not read."""
    if find_root(db) is None:
        return not get(db, ROOT).is_imported
    unknown = (
        "SELECT 1 FROM inode d JOIN entry e ON e.child = d.id WHERE d.history > 0 AND d.parent > 0 AND (d.imported = 0 OR"
        " (CAST(e.name AS TEXT) GLOB '[^.]*@[0-9]*' AND NOT EXISTS (SELECT 1 FROM xattr x WHERE x.inode = d.id AND x.name = ?))) LIMIT 1"
    )
    return db.value(unknown, SET_XATTR) is not None


def restore_series(db: Database, series: int, origin: int, pattern: bytes, records: Mapping[int, SetRecord]) -> None:
    """Record sets of a series by their directories, as they were recorded in a catalog that is lost."""
    for directory, record in records.items():
        set_internal_xattr(db, directory, SET_XATTR, _encode_record(record))
        restore_xattrs(db, directory)
    restore_xattrs(db, series)
    if get_series(db, series) is None:
        _record_series(db, series, origin, pattern)


def build_hidden_name(record: SetRecord) -> bytes:
    """Return the name of a set while it is being made."""
    return _NEW + b"%d" % record.number


def insert_directory(db: Database, parent: int, name: bytes, like: Inode) -> int:
    """Make a directory of the history with owner and mode of another one. Raises EEXIST."""
    return namespace.create(db, parent, name, _get_shown_mode(like), uid=like.uid, gid=like.gid).id


def insert_link(db: Database, inode: int, parent: int, name: bytes) -> None:
    """Give a file a name in the history. Raises OSError, and Busy if a program writes the file."""
    if db.value("SELECT 1 FROM inode i JOIN content k ON k.id = i.content AND k.state = 0 WHERE i.id = ?", inode) is not None:
        raise Busy("a file that is open for writing belongs to no complete set")
    namespace.link(db, inode, parent, name)


def insert_symlink(db: Database, parent: int, name: bytes, like: Inode) -> None:
    """Make a symlink in the history as another one is. Raises EEXIST."""
    namespace.create(db, parent, name, like.mode, uid=like.uid, gid=like.gid, target=like.target)


def finish_set(db: Database, set_directory: int) -> None:
    """Give a set its name: from now on it exists. Raises EEXIST, or ENOENT if it was removed."""
    found, place = get_set(db, set_directory), _find_place(db, set_directory)
    if found is None or place is None:
        raise posix_error(errno.ENOENT)
    parent, name = place
    namespace.rename(db, parent, name, parent, found.name, namespace.NOREPLACE)


def _build_set_name(record: SetRecord) -> bytes:
    end = b"@%d" % record.number
    return record.name[: limits.NAME_BYTES_MAX - len(end)] + end


def _find_place(db: Database, directory: int) -> tuple[int, bytes] | None:
    return next(iter(inodes.list_names(db, directory)), None)


def _get_shown_mode(like: Inode) -> int:
    return stat.S_IFDIR | like.mode & 0o755


def copy_rights(db: Database, directory: int) -> None:
    """Give directories of the history the owner and mode of the directory they stand for (F6)."""
    like = get(db, directory)
    for one in _list_counterparts(db, directory):
        set_attributes(db, one, mode=stat.S_IMODE(_get_shown_mode(like)), uid=like.uid, gid=like.gid)


def _list_counterparts(db: Database, directory: int) -> Iterator[int]:
    """Yield the directories of the history that stand for a directory of the application."""
    root = find_root(db)
    if root is None:
        return
    above = _list_ancestors(db, directory)
    origins = [ROOT, *(inode.id for inode, _ in above)]
    names = [name for _, name in above]
    yield from _walk(db, root, names)
    for series in [one for one in list_series(db) if one.origin in origins]:
        name, *below = names[origins.index(series.origin) :] or [b""]
        if not name:
            yield series.directory
        for made in list_sets(db, series.directory) if name else ():
            if made.record.name == name and not made.record.is_group:
                yield from _walk(db, made.directory, below)


def _walk(db: Database, directory: int, names: Iterable[bytes]) -> Iterator[int]:
    """Yield the directory that a path leads to, if there is one."""
    for name in names:
        found = namespace.find_child(db, directory, name)
        if found is None or not found.is_directory:
            return
        directory = found.id
    yield directory


# --- separation -------------------------------------------------------------------------------------------------------


def list_names(db: Database, inode: int) -> list[tuple[int, bytes]]:
    """Return (directory, name) of the names of a file in the history that this node has."""
    return db.rows("SELECT e.parent, e.name FROM entry e JOIN inode d ON d.id = e.parent WHERE e.child = ? AND d.history = 1", inode)


def separate(db: Database, inode: int, copied: int | None = None) -> int:
    """Give the names of a file in the history to a new inode, and return the inode.

    The caller is about to write the file. `copied`: a reserved content whose file is a copy of the file's content; it becomes the content
    of the new inode. None: the new inode gets the content itself, and the file has none. On the PFS the new inode is a new file.
    """
    row, names = get(db, inode), list_names(db, inode)
    columns = "mode, uid, gid, size, atime_ns, mtime_ns, ctime_ns, birth_ns, generation, closed_ns"
    made = db.insert(
        f"INSERT INTO inode (id, rdev, nlink, history, {columns}) SELECT ?1, 0, ?2, ?2, {columns} FROM inode WHERE id = ?3",
        identity.allocate_id(db, "inode"), len(names), inode,
    )  # fmt: skip
    db.run("INSERT INTO xattr (inode, name, value) SELECT ?, name, value FROM xattr WHERE inode = ?", made, inode)
    for index, (parent, name) in enumerate(names):
        db.run("UPDATE entry SET child = ? WHERE parent = ? AND name = ?", made, parent, name)
        journal.append(db, "link" if index else "make", made, parent=parent, name=bytes(name))
    counted = min(len(names), row.history)  # A node without etcd may know names that are not counted yet.
    db.run("UPDATE inode SET nlink = nlink - ?1, history = history - ?1 WHERE id = ?2", counted, inode)
    content = row.content if copied is None else copied
    if copied is not None:
        contents.record_duplicate(db, copied, inode, made)
    else:
        db.run("UPDATE content SET inode = ? WHERE id = ?", made, content)
        db.run("UPDATE inode SET content = NULL WHERE id = ?", inode)
    db.run("UPDATE inode SET content = ? WHERE id = ?", content, made)
    handles.move_shown(db, inode, made, content)
    if content is not None:
        journal.append(db, "content", made, content=content)
    return made


# --- changing and removing a set --------------------------------------------------------------------------------------


def set_rollback(db: Database, series: int, rollback: Rollback | None) -> None:
    """Set which set of a series counts as the newest; None: no rollback."""
    set_internal_xattr(db, series, ROLLBACK_XATTR, None if rollback is None else json.dumps(asdict(rollback)).encode())


def delete_set(db: Database, set_directory: int, at_most: int) -> bool:
    """Hide a set, then remove up to `at_most` names of it, or one directory. Return True if it is gone.

    Readers see it whole or not: each step is a change of its own, and the store applies them one after the other.
    """
    place = _find_place(db, set_directory)
    if place is None:
        return True
    parent, name = place
    if not name.startswith(b"."):
        namespace.rename(db, parent, name, parent, _OLD + name.rpartition(b"@")[2], namespace.NOREPLACE)
        return False
    names = list(itertools.islice(namespace.iterate_names_below(db, set_directory), at_most))
    for directory, child, _ in itertools.takewhile(lambda one: not one[2], names):
        namespace.unlink(db, directory, child)
    if not names:
        namespace.rmdir(db, parent, name)
    elif names[0][2]:
        namespace.rmdir(db, *names[0][:2])
    return not names


# --- records ----------------------------------------------------------------------------------------------------------


def _encode_record(record: SetRecord) -> bytes:
    """Encode a record in JSON. The first producers stand for all if there are too many."""
    fields = {**asdict(record), "name": _to_text(record.name), "producers": [astuple(one) for one in record.producers]}
    while len(encoded := json.dumps(fields, separators=(",", ":")).encode()) > _RECORD_BYTES_MAX:
        fields["producers"] = fields["producers"][: len(fields["producers"]) // 2]
    return encoded


def _build_set(directory: int, value: bytes, pin: bytes | None, note: bytes | None) -> CheckpointSet:
    fields = json.loads(value)
    fields["name"], fields["numbers"] = _to_bytes(fields["name"]), tuple(fields["numbers"])
    fields["producers"] = tuple(Producer(*one) for one in fields["producers"])
    return CheckpointSet(directory, SetRecord(**fields), pin is not None, (note or b"").decode(errors="replace"))


def _to_text(name: bytes) -> str:
    return name.decode("latin-1")


def _to_bytes(text: str) -> bytes:
    return text.encode("latin-1")
