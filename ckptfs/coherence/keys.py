"""Shared rows of the catalog: their keys in the store, and their values in compact JSON.

A key is (kind, number, name): `kind/number in 16 hex digits`, followed by `/name` if the kind has names. A row that other nodes must no
longer see (an inode without names, a deleted content) has no value.

Kinds of the PFS: `f/` is what the PFS shows of an inode, `x/` what it shows under a name, `j/<node>/<catalog>-<row>` what a node still
has to write back. A value of `x/` with `by` is an intent: that node is about to change the name on the PFS. Block digests are not shared.
"""

import base64
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ckptfs import limits
from ckptfs.catalog import identity, inodes, journal, pfs_state, remote_contents
from ckptfs.catalog.database import Database
from ckptfs.catalog.remote_contents import RemoteState
from ckptfs.model import ContentState

Value = dict[str, Any]
_PUBLISHED_COLUMNS = ("generation", "complete", "size", "mtime_ns", "pfs_inode", "digest")


def get_pfs_state_value(db: Database, inode: int, _: bytes) -> Value | None:
    """Return the state of an inode on the PFS: its names, its observed attributes, and its bytes."""
    rows = db.rows(
        "SELECT parent, name, seen_ino, seen_mode, seen_uid, seen_gid FROM pfs_entry WHERE inode = ? ORDER BY parent, name", inode
    )
    if not rows:
        return None
    value: Value = {"names": sorted([row[0], bytes(row[1]).decode("latin-1")] for row in rows)}
    if rows[0][2] is not None:
        value["seen"] = list(rows[0][2:])
    row = db.row(f"SELECT {', '.join(_PUBLISHED_COLUMNS)}, checked_ns FROM pfs_file WHERE inode = ?", inode)
    if row is not None:
        value["published"] = [*row[:5], None if row[5] is None else bytes(row[5]).hex()]
        if row[6]:
            value["is_checked"] = True
    return value


def write_pfs_state(db: Database, inode: int, _: bytes, value: Value | None) -> None:
    """Make the rows of an inode say so."""
    wanted = set(decode_names((value or {"names": ()})["names"]))
    before = {(row[0], bytes(row[1])) for row in db.rows("SELECT parent, name FROM pfs_entry WHERE inode = ?", inode)}
    for parent, name in before - wanted:
        db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
    if value is None:
        db.run("DELETE FROM pfs_file WHERE inode = ?", inode)
        return
    for parent, name in wanted:
        pfs_state.insert_entry(db, parent, name, inode, value.get("seen", (None,) * 4))
    _write_published(db, inode, value.get("published"))
    if value.get("is_checked"):
        db.run("UPDATE pfs_file SET checked_ns = ? WHERE inode = ? AND checked_ns = 0", time.time_ns(), inode)


def _write_published(db: Database, inode: int, published: list[Any] | None) -> None:
    if published is None:
        db.run("DELETE FROM pfs_file WHERE inode = ?", inode)
        return
    digest = None if published[5] is None else bytes.fromhex(published[5])
    row = [*published[:5], digest]
    known = db.row("SELECT digest, pfs_inode FROM pfs_file WHERE inode = ?", inode)
    if known is not None and digest is not None and known == (digest, published[4]):
        db.run("UPDATE pfs_file SET generation = ?, complete = ?, size = ?, mtime_ns = ? WHERE inode = ?", *row[:4], inode)
    else:
        db.run(f"INSERT OR REPLACE INTO pfs_file (inode, {', '.join(_PUBLISHED_COLUMNS)}) VALUES (?,?,?,?,?,?,?)", inode, *row)


def get_pfs_name_value(db: Database, parent: int, name: bytes) -> Value | None:
    """Return the entry that the PFS shows under a name."""
    inode = pfs_state.find_shown(db, parent, name)
    return None if inode is None else {"inode": inode}


def write_pfs_name(db: Database, parent: int, name: bytes, value: Value | None) -> None:
    """Make the row of a name say so. Of an intent the state before it counts."""
    inode = 0 if value is None else value["inode"]
    if not inode:
        db.run("DELETE FROM pfs_entry WHERE parent = ? AND name = ?", parent, name)
    elif pfs_state.find_shown(db, parent, name) != inode:
        pfs_state.insert_entry(db, parent, name, inode)


_NAMES_IN_ROW = ("name", "new_name")


def build_row_name(instance: str, seq: int) -> bytes:
    """Return the name of a journal row of the catalog `instance` in the store. Names sort by row."""
    return f"{instance}-{seq:016x}".encode()


def get_row_value(db: Database, node: int, name: bytes) -> Value | None:
    """Return a change of this node that the PFS does not have yet."""
    if node != identity.get_node_number(db):
        return None
    row = journal.get(db, int(name.rpartition(b"-")[2], 16))
    if row is None:
        return None
    value: Value = {"op": row.op, "inode": row.inode, "mode": row.mode, "at_ns": row.at_ns}
    value |= {field: held for field in ("parent", "new_parent", "content", "origin") if (held := getattr(row, field))}
    return value | {field: held.decode("latin-1") for field in _NAMES_IN_ROW if (held := getattr(row, field)) is not None}


def parse_row(value: Value, node: int) -> journal.JournalRow:
    """Return the journal row in a value of `get_row_value`, from `node`. It has no number in this catalog."""
    names = {field: value[field].encode("latin-1") for field in _NAMES_IN_ROW if field in value}
    return journal.JournalRow(seq=0, **{"origin": node, **value, **names})


NAME = "e"
INODE = "i"
TIMES = "m"
CONTENT = "c"
COPY = "p"
PFS_STATE = "f"
PFS_NAME = "x"
JOURNAL_ROW = "j"

LAST_COMMIT = "w"
"""`w/<node>`: the chain of a node's transactions (see `chain`)."""
CHOSEN_PREFIX = b"h/"
"""`h/<set>`, put with the attribute that chooses a set for the PFS: nodes that hold files of it watch these keys. Goes with the set."""
PRIOR_REVISION = "was"
"""A field that 0.2.0 gave to values when it put them again into a store that had lost its data. It means nothing now."""
CONFLICT_MARK = b".ckptfs-conflict-"

ISLAND_MARK = b".ckptfs-island-"
"""In the names of what others made or deleted meanwhile."""

INODE_FIELDS = (
    "mode", "uid", "gid", "rdev", "nlink", "size", "atime_ns", "mtime_ns", "ctime_ns", "birth_ns", "target", "content", "generation",
    "parent", "complete", "missed", "closed_ns",
)  # fmt: skip

FILE_ONLY_FIELDS = ("nlink", "size", "mtime_ns", "ctime_ns", "closed_ns")
"""What a directory keeps under `m/` or has not: many nodes make names and directories in one directory without contending."""
DIRECTORY_LINKS = 2
_INODE_COLUMN_BY_FIELD = {"complete": "imported", "missed": "salvaged"}
"""Fields of a shared inode whose column has another name; their names in the store never change."""
_SELECT_INODE = f"SELECT {', '.join(_INODE_COLUMN_BY_FIELD.get(name, name) for name in INODE_FIELDS)} FROM inode WHERE id = ?"

_SELECT_CONTENT = (
    "SELECT k.inode, k.generation, k.state, k.size, k.digest, k.closed_ns, k.superseded_mtime_ns,"
    " (SELECT value FROM meta WHERE key = 'number') FROM content k JOIN inode i ON i.id = k.inode"
    " WHERE k.id = ? AND k.remote = 0 AND k.state <> 3"
    # What is deleted here goes with its file: another node may have named that meanwhile.
    " AND (i.nlink > 0 OR EXISTS (SELECT 1 FROM cached_key s WHERE s.kind = 'i' AND s.number = i.id))"
)


_ENCODER = json.JSONEncoder(separators=(",", ":"), sort_keys=True)
_KEY = re.compile(rb"([a-z])/([0-7][0-9a-f]{15})(?:/([^/\0]+))?\Z")
"""Numbers are those of SQLite: below 2**63."""


class SharedKey(NamedTuple):
    """What names one shared value."""

    kind: str
    number: int
    name: bytes = b""


def encode_key(key: SharedKey) -> bytes:
    """Encode a key for the store."""
    head = f"{key.kind}/{key.number:016x}".encode()
    return head + b"/" + key.name if key.name or KINDS[key.kind].has_name else head


def decode_key(raw: bytes) -> SharedKey:
    """Decode a key of the store. Raises ValueError if ckptfs never makes such a key."""
    match = _KEY.match(raw)
    if match is None or match[3] in (b".", b"..") or len(match[3] or b"") > limits.NAME_BYTES_MAX:
        raise ValueError(f"{raw[:80]!a} is no key of ckptfs")
    return SharedKey(match[1].decode(), int(match[2], 16), match[3] or b"")


def encode_chosen_key(set_directory: int) -> bytes:
    """Return the key that tells of a set that was chosen for the PFS."""
    return CHOSEN_PREFIX + b"%016x" % set_directory


def decode_chosen_key(raw: bytes) -> int:
    """Return the directory of the set. Raises ValueError if ckptfs never makes such a key."""
    directory = int(raw.removeprefix(CHOSEN_PREFIX), 16)
    if not 0 < directory < 1 << 63 or encode_chosen_key(directory) != raw:
        raise ValueError(f"{raw[:80]!a} is no key of a chosen set")
    return directory


def build_names_prefix(directory: int) -> bytes:
    """Return the prefix of the keys of all names in a directory."""
    return encode_key(SharedKey(NAME, directory))


def encode_value(value: Value | None) -> bytes | None:
    """Encode a value for the store; equal values have equal bytes."""
    return None if value is None else encode_fields(value)


def encode_fields(value: Value) -> bytes:
    """Encode a value that exists, as `encode_value` does."""
    return _ENCODER.encode(value).encode()


def decode_names(names: Iterable[Any]) -> list[tuple[int, bytes]]:
    """Return names of a value, [directory, text], as the catalog has them: (directory, bytes)."""
    return [(parent, name.encode("latin-1")) for parent, name in names]


def omit_fields(value: Value, *names: str) -> Value:
    """Return a value without these fields."""
    return {name: held for name, held in value.items() if name not in names}


def decode_value(raw: bytes | None) -> Value | None:
    """Return the value that `encode_value` encoded; None for a missing or unreadable one."""
    value: Value | None = None if raw is None else json.loads(raw)
    if value is not None:
        value.pop(PRIOR_REVISION, None)
    return value


def _get_name_value(db: Database, number: int, name: bytes) -> Value | None:
    row = db.row("SELECT e.child, i.mode FROM entry e JOIN inode i ON i.id = e.child WHERE e.parent = ? AND e.name = ?", number, name)
    return None if row is None else {"child": row[0], "type": stat.S_IFMT(row[1])}


def _get_inode_value(db: Database, number: int, _: bytes) -> Value | None:
    row = db.row(_SELECT_INODE, number)
    if row is None or row[4] == 0:
        return None
    value: Value = dict(zip(INODE_FIELDS, row, strict=True))
    if stat.S_ISDIR(value["mode"]):
        for field in FILE_ONLY_FIELDS:
            del value[field]
    else:
        del value["nlink"]
        value["names"] = list_shared_names(db, number)
        if not value["names"]:
            return None
        if not value["closed_ns"]:
            del value["closed_ns"]
    if value["missed"] is None:
        del value["missed"]
    if value["target"] is not None:
        value["target"] = bytes(value["target"]).decode("latin-1")
    xattrs = db.rows("SELECT name, value FROM xattr WHERE inode = ?", number)
    if xattrs:
        value["xattrs"] = {bytes(name).decode("latin-1"): base64.b64encode(held).decode() for name, held in xattrs}
    return value


def list_local_names(db: Database, inode: int) -> list[SharedKey]:
    """Return the keys of all names of an inode in the catalog."""
    return [SharedKey(NAME, *name) for name in inodes.list_names(db, inode)]


def list_shared_names(db: Database, inode: int, theirs: Value | None = None) -> list[list[Any]]:
    """Return the names of a file, sorted: those of the store without removed ones, and new ones.

    `theirs`: its value in the store; None: the cached one.
    """
    cached = "SELECT value FROM cached_key WHERE kind = 'i' AND number = ? AND name = x''"
    fields = theirs or decode_value(db.value(cached, inode))
    here = {(parent, name.decode("latin-1")) for parent, name in inodes.list_names(db, inode)}
    if fields is None or "names" not in fields:  # A directory is named by its entry alone.
        return [list(name) for name in sorted(here)]
    there = {(parent, name) for parent, name in fields["names"]}
    changed = {name for name in here | there if _is_name_changed(db, *name)}
    removed = {(parent, name) for parent, name in changed if _get_cached_child(db, parent, name.encode("latin-1")) == inode}
    return [list(name) for name in sorted((there - removed) | (here & changed))]


def _get_cached_child(db: Database, parent: int, name: bytes) -> int | None:
    value = db.value("SELECT value FROM cached_key WHERE kind = 'e' AND number = ? AND name = ?", parent, name)
    child: int | None = (decode_value(value) or {"child": None})["child"]
    return child


def count_in_history(names: Iterable[Sequence[Any]]) -> int:
    """Return how many of these names are in the history, also in directories that were never read here."""
    return sum(identity.is_history_directory(name[0]) for name in names)


def list_unread_history(db: Database, inode: int) -> list[tuple[int, bytes]]:
    """Return (directory, name) of names of a file in the history that this node has not read yet."""
    names = [name for name in decode_names(list_shared_names(db, inode)) if identity.is_history_directory(name[0])]
    return [name for name in names if inodes.find_child_id(db, *name) is None]


def set_link_count(db: Database, inode: int) -> bool:
    """Set the links of a file to the number of its names. Return True if that changed them."""
    names = list_shared_names(db, inode)
    changed = "UPDATE inode SET nlink = ?1, history = ?2 WHERE id = ?3 AND mode & 61440 <> 16384 AND (nlink <> ?1 OR history <> ?2)"
    return db.run(changed, len(names), count_in_history(names), inode) > 0


def _is_name_changed(db: Database, parent: int, name: str) -> bool:
    """Return True if this node changed a name and did not take that back."""
    key = (parent, name.encode("latin-1"))
    if db.value("SELECT 1 FROM dirty_key WHERE kind = 'e' AND number = ? AND name = ? LIMIT 1", *key) is None:
        return False
    return bool(_get_cached_child(db, *key) != inodes.find_child_id(db, *key))


def _get_times_value(db: Database, number: int, _: bytes) -> Value | None:
    row = db.row("SELECT mtime_ns, ctime_ns FROM inode WHERE id = ? AND nlink > 0 AND mode & 61440 = 16384", number)
    return None if row is None else {"mtime_ns": row[0], "ctime_ns": row[1]}


def _get_content_value(db: Database, number: int, _: bytes) -> Value | None:
    row = db.row(_SELECT_CONTENT, number)
    if row is None:
        return _get_inherited_value(db, number)
    digest = None if row[4] is None else bytes(row[4]).hex()
    superseded = {} if row[6] is None else {"former_ns": row[6]}
    return {
        "node": row[7] or 0, "inode": row[0], "generation": row[1], "state": row[2], "size": row[3], "digest": digest,
        "closed_ns": row[5], **superseded,
    }  # fmt: skip


def _get_inherited_value(db: Database, number: int) -> Value | None:
    """Return the value of another node's content that this node gave to a file, also as its previous one."""
    row = db.row(
        "SELECT k.inode, k.superseded_mtime_ns, s.value FROM content k JOIN inode i ON i.id = k.inode AND i.nlink > 0"
        " JOIN cached_key s ON s.kind = 'c' AND s.number = k.id WHERE k.id = ? AND k.remote = 1 AND k.state <> 3",
        number,
    )
    value = None if row is None else decode_value(row[2])
    if row is None or value is None or not (row[1] or (row[1] is None and row[0] != value["inode"])):
        return None
    superseded = {} if row[1] is None else {"former_ns": row[1]}
    return {**omit_fields(value, "former_ns"), "inode": row[0], **superseded}


def _write_name(db: Database, number: int, name: bytes, value: Value | None) -> None:
    if value is None:
        db.run("DELETE FROM entry WHERE parent = ? AND name = ?", number, name)
    elif not db.run("UPDATE entry SET child = ? WHERE parent = ? AND name = ?", value["child"], number, name):
        db.run("INSERT INTO entry (parent, name, child) VALUES (?,?,?)", number, name, value["child"])


def _write_inode(db: Database, number: int, _: bytes, value: Value | None) -> None:
    """Keep the row of a deleted inode without names until the kernel forgets it."""
    if value is None:
        db.run("UPDATE inode SET nlink = 0 WHERE id = ?", number)
        return
    target = value["target"]
    known = {name: value[name] for name in INODE_FIELDS if name in value}
    columns = {"missed": None, "closed_ns": 0, **known, "target": None if target is None else target.encode("latin-1")}
    columns = {_INODE_COLUMN_BY_FIELD.get(name, name): field for name, field in columns.items()}
    names = value.get("names")
    columns["nlink"] = DIRECTORY_LINKS if names is None else len(names)
    columns["history"] = int(identity.is_history_directory(number)) if names is None else count_in_history(names)
    if db.row("SELECT 1 FROM inode WHERE id = ?", number):
        db.run(f"UPDATE inode SET {', '.join(f'{name} = ?' for name in columns)} WHERE id = ?", *columns.values(), number)
    else:
        born = columns["birth_ns"]
        columns = {"id": number, "mtime_ns": born, "ctime_ns": born, **columns}
        db.run(f"INSERT INTO inode ({', '.join(columns)}) VALUES ({','.join('?' * len(columns))})", *columns.values())
    _write_xattrs(db, number, value.get("xattrs", {}))


def _write_xattrs(db: Database, number: int, xattrs: Mapping[str, str]) -> None:
    wanted = {name.encode("latin-1"): base64.b64decode(held) for name, held in xattrs.items()}
    present = {bytes(name): bytes(held) for name, held in db.rows("SELECT name, value FROM xattr WHERE inode = ?", number)}
    if wanted != present:
        db.run("DELETE FROM xattr WHERE inode = ?", number)
        for name, held in wanted.items():
            db.run("INSERT INTO xattr (inode, name, value) VALUES (?,?,?)", number, name, held)


def _write_times(db: Database, number: int, _: bytes, value: Value | None) -> None:
    """Write the times of the last change of a directory. Older values do not override it."""
    if value is not None:
        db.run(
            "UPDATE inode SET mtime_ns = ?1, ctime_ns = ?2 WHERE id = ?3 AND mode & 61440 = 16384"
            " AND (ctime_ns <= ?2 OR NOT EXISTS (SELECT 1 FROM cached_key WHERE kind = 'm' AND number = ?3))",
            value["mtime_ns"], value["ctime_ns"], number,
        )  # fmt: skip


def _write_content(db: Database, number: int, _: bytes, value: Value | None) -> None:
    """Write what another node wrote last; that of a deleted file stays until the kernel forgets it."""
    if value is None:
        held = "SELECT 1 FROM inode i WHERE i.id = content.inode AND i.content = content.id"
        db.run(
            f"UPDATE content SET state = ?, change = change + 1 WHERE id = ? AND remote = 1 AND state <> 3 AND NOT EXISTS ({held})",
            ContentState.DOOMED, number,
        )  # fmt: skip
        return
    digest = None if value["digest"] is None else bytes.fromhex(value["digest"])
    is_open = value["state"] == ContentState.OPEN
    is_own = value["node"] == identity.get_node_number(db)
    remote_contents.mark_restored(db, number, value["inode"], is_own=is_own, superseded_mtime_ns=value.get("former_ns"))
    state = RemoteState(number, value["inode"], value["generation"], value["size"], digest, is_open=is_open)
    remote_contents.record_remote(db, state, is_from_store=True)


@dataclass(frozen=True, slots=True)
class KeyKind:
    """How rows of one kind are read as a value (None: others see none) and written from one."""

    read: Callable[[Database, int, bytes], Value | None] = lambda *_: None
    write: Callable[[Database, int, bytes, Value | None], None] = lambda *_: None
    has_name: bool = False
    is_compared: bool = True  # False: put without a comparison; the last writer wins.


KINDS: dict[str, KeyKind] = {
    NAME: KeyKind(_get_name_value, _write_name, has_name=True),
    INODE: KeyKind(_get_inode_value, _write_inode),
    TIMES: KeyKind(_get_times_value, _write_times, is_compared=False),
    CONTENT: KeyKind(_get_content_value, _write_content),
    COPY: KeyKind(has_name=True, is_compared=False),
    LAST_COMMIT: KeyKind(is_compared=False),
    PFS_STATE: KeyKind(get_pfs_state_value, write_pfs_state),
    PFS_NAME: KeyKind(get_pfs_name_value, write_pfs_name, has_name=True),
    JOURNAL_ROW: KeyKind(get_row_value, has_name=True, is_compared=False),
}


def describe_path(db: Database, keys: Iterable[SharedKey]) -> str:
    """Return the path of the first of these keys that has one."""
    for key in keys:
        if key.kind == NAME:
            return os.path.join(inodes.get_shown_path(db, key.number), os.fsdecode(key.name))
        if key.kind in (INODE, TIMES) and db.value("SELECT 1 FROM entry WHERE child = ?", key.number):
            return inodes.get_shown_path(db, key.number)
    return ""


def get_value(db: Database, key: SharedKey) -> Value | None:
    """Return the value of the rows."""
    return KINDS[key.kind].read(db, key.number, key.name)


def write_value(db: Database, key: SharedKey, value: Value | None) -> None:
    """Write `value` to the rows."""
    KINDS[key.kind].write(db, key.number, key.name, value)


def build_conflict_names(stem: bytes, conflict_mark: bytes, node_label: bytes) -> Iterator[bytes]:
    """Yield names for an entry that cannot have the name `stem`, one after the other until one is free."""
    for number in range(1, limits.LINKS_MAX):
        end = conflict_mark + node_label + b"-%d" % number
        yield stem[: limits.NAME_BYTES_MAX - len(end)] + end
