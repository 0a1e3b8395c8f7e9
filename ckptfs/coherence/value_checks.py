"""The fields and types of values of the store, one table for each kind of key, and their version.

The store is shared with other nodes, so its values are checked like a message of a peer: known fields only, each of its type and within its
bounds. A value that fails is *unreadable*: it stays in the store, the log and `ckptfs status` name its key, and every read of it yields
`UNREADABLE`. The name or inode that it belongs to answers EIO; everything else goes on.

`FORMAT_VERSION` grows when a value gets a field that an older ckptfs would not know. The key `format` holds it, and which ckptfs wrote it
first. A node that knows less takes no part.
"""

import base64
import json
import re
import stat
from collections.abc import Callable, Container, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from ckptfs import limits
from ckptfs.catalog import history, namespace, set_members
from ckptfs.coherence.keys import (
    CONTENT,
    COPY,
    INODE,
    JOURNAL_ROW,
    LAST_COMMIT,
    NAME,
    PFS_NAME,
    PFS_STATE,
    PRIOR_REVISION,
    TIMES,
    SharedKey,
    Value,
    decode_key,
    decode_names,
    decode_value,
)
from ckptfs.coherence.unreadable_keys import log_unreadable
from ckptfs.errors import CkptfsError, StoreTooNew
from ckptfs.model import HISTORY_NAME, ROOT
from ckptfs.store.kv import Compare, CompareTarget, Item, Put

UNREADABLE = b"null"
"""Stands for a value that is not readable; it is no value of any kind."""

FORMAT_KEY = b"format"
FORMAT_VERSION = 4
"""1: ckptfs 0.2.0, which wrote no key `format`. 2: `closed_ns` of inodes, the chain of transactions. 3: `passes` of intents. 4: `earlier`
salvage records."""

Check = Callable[[object], bool]
_INT_MAX = 2**63 - 1
_TEMPORARY = re.compile(r"\.ckptfs\.[0-9a-f]{8}\.[0-9a-f]+\Z")
_HEX_DIGEST = re.compile(r"[0-9a-f]{32}\Z")
_KINDS_OF_FILES = {stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFBLK, stat.S_IFCHR}


class ValueUnreadable(CkptfsError):
    """The store holds something under a key that is no value of ckptfs. The name or inode answers EIO."""


def parse_json(raw: bytes | str) -> Any:
    """Return what a value of the store says. Raises ValueError if it is no JSON with whole numbers."""
    try:
        return json.loads(raw, parse_float=_refuse, parse_constant=_refuse)
    except RecursionError as failure:
        raise ValueError("it is nested too deeply") from failure


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{number[:40]} is no whole number")


def is_name(text: object) -> bool:
    """Return True for the name of an entry, as its bytes in latin-1: no `/`, NUL, `.` or `..`."""
    if not isinstance(text, str) or not 0 < len(text) <= limits.NAME_BYTES_MAX or text in (".", ".."):
        return False
    return text.isascii() or max(text) <= "\xff" if not ("/" in text or "\0" in text) else False


def _is_between(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


_is_int, _is_count, _is_id = (_is_between(low, _INT_MAX) for low in (-_INT_MAX, 0, 1))
_is_generation = _is_between(0, limits.GENERATION_MAX)
_is_owner = _is_between(0, 2**32 - 2)
"""-1 is no user to the kernel: a chown to it changes nothing."""


def _is_flag(value: object) -> bool:
    return value in (0, 1, True, False)


def is_plain_text(value: object) -> bool:
    """Return True for text that can be shown, logged and encoded: no half of a surrogate pair."""
    return isinstance(value, str) and value.isprintable()


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _HEX_DIGEST.match(value) is not None


def _is_temporary(value: object) -> bool:
    """Return True for a temporary name of write-back, which any node may remove."""
    return isinstance(value, str) and _TEMPORARY.match(value) is not None


def _is_mode(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**16 and stat.S_IFMT(value) in _KINDS_OF_FILES


def _is_bytes_text(value: object) -> bool:
    return isinstance(value, str) and all(letter <= "\xff" for letter in value)


def _is_one_of(kind: type, accepted: Container[object]) -> Check:
    return lambda value: type(value) is kind and value in accepted


def _is_c_string(bytes_max: int) -> Check:
    """Return the check of bytes in latin-1 that a system call takes: not empty, and without NUL."""
    return lambda value: isinstance(value, str) and _is_bytes_text(value) and 0 < len(value) <= bytes_max and "\0" not in value


_is_target = _is_c_string(limits.PATH_BYTES_MAX)


def _is_key(value: object) -> bool:
    """Return True for a key of a shared value, as its bytes in latin-1."""
    try:
        return isinstance(value, str) and bool(decode_key(value.encode("latin-1")))
    except ValueError:
        return False


def _is_xattrs(value: object) -> bool:
    if not isinstance(value, dict) or not all(_is_xattr_name(name) and isinstance(held, str) for name, held in value.items()):
        return False
    try:
        return all(_is_xattr(name, base64.b64decode(held, validate=True)) for name, held in value.items())
    except ValueError:
        return False


def _is_xattr_name(value: object) -> bool:
    """Return True for an attribute that programs may set, or one of ckptfs itself.

    Write-back sets them as root.
    """
    return isinstance(value, str) and value.startswith(("user.", "trusted.", "ckptfs.")) and _is_c_string(limits.NAME_BYTES_MAX)(value)


def _is_xattr(name: str, value: bytes) -> bool:
    """Return False for a record of sets that is none. Raises ValueError for what is no JSON."""
    check = _RECORDS.get(name)
    return check is None or check(parse_json(value))


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _is_reserved(parent: int, name: bytes) -> bool:
    """Return True for a name that no program can make: write-back would take it for one of its own."""
    return namespace.is_reserved_name(parent, name) and (parent, name) != (ROOT, HISTORY_NAME)


def _is_list_of(*checks: Check) -> Check:
    """Return the check of a list of this length, with these members."""
    return lambda value: (
        isinstance(value, list) and len(value) == len(checks) and all(check(one) for check, one in zip(checks, value, strict=True))
    )


def _is_each(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _is_record(required: Mapping[str, Check], optional: Mapping[str, Check] = MappingProxyType({})) -> Check:
    """Return the check of an object with these fields."""
    return lambda value: isinstance(value, dict) and not _find_field_fault(value, required, optional)


def _find_field_fault(value: Mapping[str, object], required: Mapping[str, Check], optional: Mapping[str, Check]) -> str:
    if missing := required.keys() - value.keys():
        return f"the field {min(missing)} is missing"
    for name, held in value.items():
        check = required.get(name) or optional.get(name) or _ALWAYS.get(name)
        if check is None:
            return f"the field {name[:40]!r} is unknown"
        if not check(held):
            return f"the field {name} is wrong"
    return ""


def _is_salvage_record(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return _is_record(_SALVAGE_RECORD, {"earlier": _is_each(_is_record(_SALVAGE_RECORD))})(parse_json(value))
    except ValueError:
        return False


_SALVAGE_RECORD: Mapping[str, Check] = {
    "node": _or_none(_is_count), "content": _or_none(_is_id), "generation": _is_generation, "mtime_ns": _is_int, "shows": _or_none(_is_id),
    "shown": _is_generation,
}  # fmt: skip
_is_whole, _is_text = (lambda value: type(value) is int), (lambda value: isinstance(value, str))


def _is_producer(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and _is_list_of(_is_text, _is_whole, *[_is_text] * min(3, len(value) - 2))(value)


_RECORDS: Mapping[str, Check] = {
    history.SERIES_XATTR.decode(): _is_record({"origin": _is_count, "pattern": _is_bytes_text, "next": _is_count}),
    history.ROLLBACK_XATTR.decode(): _is_record({"number": _is_count, "at_ns": _is_int}),
    history.SET_XATTR.decode(): _is_record(
        {
            "number": _is_count, "name": _is_bytes_text, "numbers": _is_each(_is_whole), "files": _is_count, "size": _is_count,
            "completed_ns": _is_int, "producers": _is_each(_is_producer),
        },
        {"is_group": _is_flag},
    ),
    set_members.CLAIM_XATTR.decode(): _is_record({"node": _is_count, "content": _or_none(_is_id), "generation": _is_generation}),
    set_members.PRODUCER_XATTR.decode(): _is_record(
        {"host": _is_text, "pid": _is_whole}, {"command": _is_text, "job": _is_text, "rank": _is_text}
    ),
}  # fmt: skip
"""Extended attributes of ckptfs itself that are JSON."""
_PUBLISHED = _or_none(_is_list_of(_is_generation, _is_flag, _is_count, _is_int, _is_count, _or_none(_is_digest)))
_NAMES_OF_OPERATIONS: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("make", "link", "unlink", "rmdir"), frozenset({"parent", "name"})),
    **dict.fromkeys(("rename", "exchange"), frozenset({"parent", "name", "new_parent", "new_name"})),
    **dict.fromkeys(("attributes", "content", "synced", "settle"), frozenset[str]()),
}
"""The changes that write-back knows, and the fields that say which names each is about."""


_INTENT: dict[str, Check] = {"by": _is_id, "of": is_plain_text, "batch": _is_count}

REQUIRED: Mapping[str, Mapping[str, Check]] = {
    NAME: {"child": _is_id, "type": _is_one_of(int, _KINDS_OF_FILES)},
    INODE: {
        "mode": _is_mode, "uid": _is_owner, "gid": _is_owner, "rdev": _is_between(0, 2**32 - 1), "atime_ns": _is_int, "birth_ns": _is_int,
        "target": _or_none(_is_target), "content": _or_none(_is_id), "generation": _is_generation, "parent": _is_count,
        "complete": _is_flag,
    },
    TIMES: {"mtime_ns": _is_int, "ctime_ns": _is_int},
    CONTENT: {
        "node": _is_count, "inode": _is_count, "generation": _is_generation, "state": lambda value: value in range(5), "size": _is_count,
        "digest": _or_none(_is_digest), "closed_ns": _is_int,
    },
    COPY: {"generation": _is_generation, "digest": _is_digest},
    LAST_COMMIT: {"deleted": _is_each(_is_key)},
    PFS_NAME: {"inode": _is_count},
    PFS_STATE: {"names": _is_each(_is_list_of(_is_id, is_name))},
    JOURNAL_ROW: {"op": _is_one_of(str, _NAMES_OF_OPERATIONS), "inode": _is_count, "mode": _is_count, "at_ns": _is_int},
}  # fmt: skip
"""Fields that a value of a kind always has. Kinds that are not named here are checked where they are read."""

OPTIONAL: Mapping[str, Mapping[str, Check]] = {
    NAME: {},
    INODE: {
        "nlink": _is_count, "names": _is_each(_is_list_of(_is_id, is_name)), "size": _is_count, "mtime_ns": _is_int, "ctime_ns": _is_int,
        "closed_ns": _is_int, "missed": _is_salvage_record, "xattrs": _is_xattrs,
    },
    TIMES: {},
    CONTENT: {"former_ns": _is_int, "before": _is_list_of(_is_count, _or_none(_is_int))},
    COPY: {"away": _is_flag},
    LAST_COMMIT: {"sequence": _is_count, "fence": _is_count},
    PFS_NAME: {
        **_INTENT, "next": _is_count, "ino": _is_count, "published": _PUBLISHED, "temporary": _is_each(_is_temporary),
        "passes": _is_each(_is_list_of(_is_count, _is_count, _PUBLISHED)),
    },
    PFS_STATE: {
        **_INTENT, "changing": _is_each(_is_list_of(_is_id, is_name)), "seen": _is_list_of(_or_none(_is_count), *3 * [_or_none(_is_int)]),
        "published": _PUBLISHED, "is_checked": _is_flag,
    },
    JOURNAL_ROW: {
        "parent": _is_count, "name": is_name, "new_parent": _is_count, "new_name": is_name, "content": _is_id, "origin": _is_count,
    },
}  # fmt: skip

_ALWAYS: Mapping[str, Check] = {PRIOR_REVISION: _is_list_of(_is_int, _is_int)}
_PLACES = (("parent", "name"), ("new_parent", "new_name"))
_OF_FILES = ("names", "size", "mtime_ns", "ctime_ns")


def find_fault(key: SharedKey, raw: bytes) -> str:
    """Return what is wrong with a value of the store; empty if nothing is."""
    if key.kind not in REQUIRED:
        return ""
    try:
        value = parse_json(raw)
    except ValueError:
        return "it is not JSON"
    if not isinstance(value, dict):
        return "it has no fields"
    return _find_field_fault(value, REQUIRED[key.kind], OPTIONAL[key.kind]) or _find_contradiction(key, value)


def _find_contradiction(key: SharedKey, value: Mapping[str, Any]) -> str:
    """Return what is wrong with fields that are right one by one."""
    if missing := _find_missing(key.kind, value):
        return missing
    if key.kind in (NAME, INODE) and key.number in (value.get("parent"), value.get("child")):
        return "it is in itself"
    names = [(key.number, key.name)] if key.kind == NAME else []
    if key.kind == INODE:
        if stat.S_ISDIR(value["mode"]) and ("names" in value or value["content"] is not None):
            return "it is a directory and a file"
        names = decode_names(value.get("names", ()))
        if len(set(names)) < len(names):
            return "it has one name twice"
    elif key.kind == JOURNAL_ROW:
        names = [(value[parent], value[name].encode("latin-1")) for parent, name in _PLACES if name in value and parent in value]
    if reserved := [name for name in names if _is_reserved(*name)]:
        return f"the name {reserved[0][1]!a} is reserved for ckptfs"
    is_sealed = key.kind == CONTENT and value["digest"] is not None
    return "it is too large to be sealed" if is_sealed and value["size"] > limits.FILE_BYTES_MAX else ""


def _find_missing(kind: str, value: Mapping[str, Any]) -> str:
    """Return which field is missing that only some values of this kind have."""
    needed: Iterable[str] = ()
    if kind == INODE and not stat.S_ISDIR(value["mode"]):
        needed = _OF_FILES
    elif kind == JOURNAL_ROW:
        needed = _NAMES_OF_OPERATIONS[value["op"]]
    return next((f"the field {name} is missing" for name in needed if name not in value), "")


def parse_value(key: SharedKey, item: Item) -> bytes:
    """Return the value of an item; `UNREADABLE` if it is none."""
    fault = find_fault(key, item.value)
    if fault:
        log_unreadable(item.key, item.mod_revision, fault)
        return UNREADABLE
    return item.value


def parse_key(raw: bytes) -> SharedKey | None:
    """Return a key of the store; None if it is none of ckptfs."""
    try:
        key = decode_key(raw)
    except ValueError as fault:
        log_unreadable(raw, 0, str(fault))
        return None
    return key


def decode_item(item: Item) -> Value | None:
    """Return the fields of an item; None if its key or value is none of ckptfs."""
    key = parse_key(item.key)
    return None if key is None else decode_value(parse_value(key, item))


def check_format(items: tuple[Item, ...], release: str) -> tuple[Compare, Put] | None:
    """Return how to record the format of the values; None if it is known. Raises StoreTooNew."""
    own = json.dumps({"version": FORMAT_VERSION, "release": release}, separators=(",", ":")).encode()
    if not items:
        return Compare(FORMAT_KEY, CompareTarget.VERSION, "=", 0), Put(FORMAT_KEY, own)
    try:
        known = parse_json(items[0].value)
        version, by = int(known["version"]), str(known["release"])
    except (ValueError, TypeError, KeyError):
        version, by = FORMAT_VERSION + 1, "an unknown version"
    if version > FORMAT_VERSION:
        raise StoreTooNew(
            f"etcd holds values of format {version}, written by ckptfs {by[:40]}; this ckptfs {release} knows format {FORMAT_VERSION}",
            remedy="install the newer ckptfs on this node",
        )
    return (Compare(FORMAT_KEY, CompareTarget.MOD, "=", items[0].mod_revision), Put(FORMAT_KEY, own)) if version < FORMAT_VERSION else None
