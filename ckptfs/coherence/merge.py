"""Merge of two changes of one value: pure.

`base` is the common ancestor, `ours` this node's value, `theirs` the store's.

A field is ours if this node changed it, else theirs. Names are not merged here: see `keys.list_shared_names`. Content, generation, size and
times of a file stay together and belong to the last writer: the node that writes the file now, else the one with the later generation,
then the later close, then the higher number. The mtime never decides: `cp -p` and tar set it. A row that is published after the death of
this node may be old. A salvage record is dropped if it is published with the data that replaced it, and stays if this node made it.
"""

import json
from collections.abc import Iterable, Mapping

from ckptfs import limits
from ckptfs.catalog import identity
from ckptfs.coherence.keys import CONTENT, INODE, PFS_NAME, PFS_STATE, Value, encode_fields, omit_fields

CONTENT_FIELDS = ("content", "generation", "size", "mtime_ns", "closed_ns")
LATEST_FIELDS = ("atime_ns", "ctime_ns")


def merge_values(kind: str, base: Value | None, ours: Value, theirs: Value, *, is_writing: bool = False) -> Value:
    """Return the merged value. `is_writing`: the file is open for writing on this node."""
    if kind == INODE:
        return merge_inode(base, ours, theirs, is_writing=is_writing)
    if kind == CONTENT:
        return merge_content(ours, theirs)
    return theirs if kind in (PFS_STATE, PFS_NAME) else ours  # A node that changes what the PFS shows has announced that before.


def merge_inode(base: Value | None, ours: Value, theirs: Value, *, is_writing: bool = False) -> Value:
    """Merge two values of an inode. Without a base (both put it first) it is theirs, with the later bytes."""
    if base is None:
        return merge_later_content(theirs, ours)
    merged: Value = {name: theirs[name] if ours.get(name) == base.get(name) else ours.get(name) for name in theirs}
    written = list_written(base, ours, theirs)
    # Neither a time set on this node nor the rest of a lost tier may hide what another node wrote.
    is_theirs = not is_writing and (written == (False, True) or _is_theirs_later(base, ours, theirs, have_both_written=all(written)))
    newer = theirs if is_theirs else ours
    if is_theirs or is_writing or written[0]:
        merged.update({name: newer[name] for name in CONTENT_FIELDS if name in newer})
    merged.pop("missed", None)
    merged.update(merge_missed(base, ours, theirs, ends_own=newer is ours and written[0]))
    # If another node wrote the file while a time was set on this one, the later time counts.
    is_time_set_here = is_theirs and ours.get("mtime_ns") != base.get("mtime_ns")
    latest_fields = (*LATEST_FIELDS, "mtime_ns") if is_time_set_here else LATEST_FIELDS
    merged.update({name: max(ours[name], theirs[name]) for name in latest_fields if name in theirs})
    xattrs = _merge_xattrs(base.get("xattrs", {}), ours.get("xattrs", {}), theirs.get("xattrs", {}))
    merged.pop("xattrs", None)
    if xattrs:
        merged["xattrs"] = xattrs
    return merged


def _is_theirs_later(base: Value, ours: Value, theirs: Value, *, have_both_written: bool) -> bool:
    """Return True if others wrote after this node, and do not only show a previous state."""
    if is_salvaged(theirs, base, ours):
        return not is_showing_previous(theirs)
    return have_both_written and get_write_order(theirs) > get_write_order(ours)


def is_salvaged(theirs: Value, *ours: Value) -> bool:
    """Return whether the others took one of these states for lost, and showed a previous one instead."""
    return any(record["content"] in [value.get("content") for value in ours] for record in list_missed(theirs))


def is_still_salvaged(theirs: Value, *ours: Value) -> bool:
    """Return True if the others took one of these states for lost, and have not written the file since."""
    return is_showing_previous(theirs) and is_salvaged(theirs, *ours)


def is_showing_previous(value: Value) -> bool:
    """Return True if the file still shows the replacement of a lost state."""
    return any(value["generation"] == one["shown"] and one["shows"] in (None, value["content"]) for one in list_missed(value)[:1])


def is_written_since(base: Value, theirs: Value) -> bool:
    """Return True if others wrote a file since `base`."""
    return any(theirs.get(name) != base.get(name) for name in ("content", "generation"))


def is_closed_since(base: Value, theirs: Value) -> bool:
    """Return True if others wrote and closed a file since `base`."""
    return is_written_since(base, theirs) and theirs.get("content") is not None and theirs.get("closed_ns") != base.get("closed_ns")


def list_missed(value: Value | None) -> list[Value]:
    """Return the salvage records of a file, the last one first."""
    return decode_missed((value or {}).get("missed"))


def decode_missed(field: str | None) -> list[Value]:
    """Return the salvage records in a field, the last one first."""
    last = json.loads(field or "null")
    return [] if last is None else [last, *last.get("earlier", ())]


def encode_missed(records: Iterable[Value]) -> str | None:
    """Return the field for these salvage records, one for each content.

    The oldest go if there are too many.
    """
    once: dict[int, Value] = {}
    for record in records:
        once.setdefault(record["content"], omit_fields(record, "earlier"))
    last, earlier = next(iter(once.values()), None), [*once.values()][1 : limits.MISSED_STATES_MAX]
    return None if last is None else encode_fields({**last, "earlier": earlier} if earlier else last).decode()


def merge_missed(base: Value | None, ours: Value, theirs: Value, *, ends_own: bool = False) -> Value:
    """Return the field of the salvage records: those of the store, and new ones of this node.

    Records that this node has deleted are left out; with `ends_own`, so are those of the contents that it shows now and showed at `base`.
    """
    known, here = ([record["content"] for record in list_missed(value)] for value in (base, ours))
    ended = [content for content in known if content not in here] + [ours.get("content"), (base or {}).get("content")] * ends_own
    new = [record for record in list_missed(ours) if record["content"] not in known]
    field = encode_missed([*new, *(record for record in list_missed(theirs) if record["content"] not in ended)])
    return {} if field is None else {"missed": field}


def merge_later_content(newer: Value, other: Value) -> Value:
    """Return `newer` with the later bytes of both: its last writer may not have known those."""
    if "generation" not in newer or get_write_order(newer) >= get_write_order(other):
        return newer
    return {**newer, **{name: other[name] for name in CONTENT_FIELDS if name in other}}


def get_write_order(value: Value) -> tuple[int, int, int]:
    """Return the order of two states of one file: generation, close time, node that made the content."""
    return int(value.get("generation") or 0), int(value.get("closed_ns") or 0), identity.get_origin_node(value.get("content") or 0)


def _merge_xattrs(base: Mapping[str, str], ours: Mapping[str, str], theirs: Mapping[str, str]) -> Mapping[str, str]:
    merged = dict(theirs)
    for name in {*base, *ours}:
        if ours.get(name) != base.get(name):
            if name in ours:
                merged[name] = ours[name]
            else:
                merged.pop(name, None)
    return merged


def merge_content(ours: Value, theirs: Value) -> Value:
    """Return the later generation; of two with the same number, the one that was closed last."""
    later = (theirs["generation"], theirs["closed_ns"]) > (ours["generation"], ours["closed_ns"])
    return theirs if later and theirs["node"] != ours["node"] else ours


def list_written(base: Value, ours: Value, theirs: Value) -> tuple[bool, bool]:
    """Return whether this node wrote a file since `base`, and whether others did.

    An open file may have published its generation before. Its close then changes only the time, which counts if others wrote, too.
    """
    have_others = is_written_since(base, theirs)
    is_closed = ours.get("closed_ns") != base.get("closed_ns")
    return ours.get("generation") != base.get("generation") or (have_others and is_closed), have_others
