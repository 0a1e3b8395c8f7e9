"""Kinds of checkpoint sets: what marks a directory of each kind, and when its own marks say that it is complete (T6, H4).

`KINDS` is the table. A directory may be of several kinds at once; then it must satisfy all of them. Functions are pure over names, sizes,
times and what its index files say.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptfs.model import Level
from ckptfs.series import pickle_scan
from ckptfs.series.file_formats import JSON_BYTES_MAX
from ckptfs.series.pickle_scan import DamagedPickle, ReadRange, TooLong

PICKLE_BYTES_MAX = 64 << 20
"""`.metadata` of 50,000 tensors on 1,000 ranks has about half of it."""


@dataclass(frozen=True, slots=True)
class MemberFile:
    """A regular file of a member; `incomplete_reason` is empty if the catalog knows nothing that speaks against it."""

    size: int
    level: Level
    incomplete_reason: str = ""
    mtime_ns: int = 0
    ctime_ns: int = 0


@dataclass(frozen=True, slots=True)
class SetIndex:
    """What an index file says of its directory: the files that it names, with the bytes that each has at least, or what is wrong."""

    files: Mapping[bytes, int] = field(default_factory=dict)
    flaw: str = ""
    is_commit: bool = False
    """It says that nothing is still to come."""


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """One directory of a member."""

    files: Mapping[bytes, MemberFile]
    directories: frozenset[bytes] = frozenset()
    indexes: Mapping[bytes, SetIndex] = field(default_factory=dict)

    @property
    def names(self) -> list[bytes]:
        return sorted({*self.files, *self.directories})


@dataclass(frozen=True, slots=True)
class SetKind:
    """One row of the table.

    `sign`: a directory with such a name is of this kind. `find_gap`: what it lacks; empty if nothing. `covers`: names that `find_gap`
    vouches for, so that they need not be those of the member before. `last`: the file that is written when all others are there.
    `tells_sizes`: then their sizes are right, too.
    """

    name: str
    sign: re.Pattern[bytes]
    find_gap: Callable[[DirectoryFacts], str]
    covers: re.Pattern[bytes]
    last: re.Pattern[bytes]
    tells_sizes: bool = False

    def is_kind_of(self, directory: DirectoryFacts) -> bool:
        """Return whether a directory is of this kind."""
        return any(map(self.sign.fullmatch, directory.names))

    def is_closed(self, directory: DirectoryFacts) -> bool:
        """Return whether the file that is written last is there."""
        return any(map(self.last.fullmatch, directory.files)) or any(index.is_commit for index in directory.indexes.values())


def text(name: bytes) -> str:
    """Return a name for a message."""
    return name.decode(errors="backslashreplace")


# --- index files ------------------------------------------------------------------------------------------------------


def is_index(name: bytes) -> bool:
    """Return whether `load_index` can read files of this name."""
    return any(pattern.fullmatch(name) for pattern, _ in _LOADERS)


def load_index(name: bytes, size: int, read: ReadRange) -> SetIndex:
    """Return what an index file says. Reads all of it, up to a bound; never runs a pickle."""
    load = next(load for pattern, load in _LOADERS if pattern.fullmatch(name))
    try:
        return load(size, read)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, DamagedPickle):
        return SetIndex(flaw="cannot be read; its writer did not finish it")
    except TooLong:
        return SetIndex(flaw=f"has {size} bytes, more than can be checked")


_SHARD = re.compile(rb"__[0-9]+_[0-9]+\.distcp")


def _load_dcp_metadata(size: int, read: ReadRange) -> SetIndex:
    """`.metadata` of torch.distributed.checkpoint: a pickle with a `_StorageInfo` (relative_path, offset, length) for each piece."""
    if size > PICKLE_BYTES_MAX:
        raise TooLong
    ends: dict[bytes, int] = {}
    key: pickle_scan.Value = None
    piece: dict[pickle_scan.Value, Any] = {}
    end = 0
    for step in pickle_scan.scan(read, size):
        end, value = step.end, step.value
        if value is None:
            continue
        if isinstance(value, bytes) and _SHARD.fullmatch(value):
            ends.setdefault(value, 1)
        if key is not None:
            piece[key], key = value, None
        elif value in (b"relative_path", b"offset", b"length"):
            key = value
        if len(piece) == 3:
            path, offset, length = piece[b"relative_path"], piece[b"offset"], piece[b"length"]
            if isinstance(path, bytes) and isinstance(offset, int) and isinstance(length, int):
                ends[path] = max(ends.get(path, 0), offset + length)
            piece = {}
    return SetIndex(ends) if end == size else SetIndex(flaw="has more bytes than its pickle")


def _load_weight_map(size: int, read: ReadRange) -> SetIndex:
    """`model.safetensors.index.json`: the file of each tensor."""
    found = _load_json(size, read)["weight_map"]
    return SetIndex({str(name).encode(): 1 for name in found.values()})


def _load_orbax_metadata(size: int, read: ReadRange) -> SetIndex:
    found = _load_json(size, read)
    if "commit_timestamp_nsecs" not in found:
        return SetIndex()
    return (
        SetIndex(is_commit=True)
        if found["commit_timestamp_nsecs"]
        else SetIndex(flaw="has no time of commit; its writer did not finish it")
    )


def _load_json(size: int, read: ReadRange) -> dict[str, Any]:
    if size > JSON_BYTES_MAX:
        raise TooLong
    found: dict[str, Any] = json.loads(read(0, size))
    return found


_LOADERS: tuple[tuple[re.Pattern[bytes], Callable[[int, ReadRange], SetIndex]], ...] = (
    (re.compile(rb"\.metadata"), _load_dcp_metadata),
    (re.compile(rb".*\.index\.json"), _load_weight_map),
    (re.compile(rb"_CHECKPOINT_METADATA"), _load_orbax_metadata),
)


# --- gaps -------------------------------------------------------------------------------------------------------------


def _find_dcp_gap(directory: DirectoryFacts) -> str:
    """`.metadata` is written after all shards, names them, and knows how long they are."""
    metadata = directory.files.get(b".metadata")
    if metadata is None:
        return ".metadata is not there yet"
    index = directory.indexes.get(b".metadata", SetIndex())
    if not index.files and not index.flaw and any(map(_SHARD.fullmatch, directory.files)):
        return ".metadata names no shard"
    if gap := _find_index_gap(directory, b".metadata"):
        return gap
    newer = [name for name in index.files if name in directory.files and directory.files[name].mtime_ns > metadata.mtime_ns]
    return f".metadata is older than {text(min(newer))}: it belongs to the save before" if newer else ""


def _find_weights_gap(directory: DirectoryFacts) -> str:
    gaps = (_find_index_gap(directory, name) for name in sorted(directory.indexes) if name.endswith(b".index.json"))
    return next(filter(None, gaps), "")


def _find_index_gap(directory: DirectoryFacts, name: bytes) -> str:
    """Return the first file that an index names and that is not there, or is too short."""
    index = directory.indexes.get(name, SetIndex())
    if index.flaw:
        return f"{text(name)} {index.flaw}"
    for file, size in sorted(index.files.items()):
        # A path below the directory is checked as far as its first part.
        base, _, below = file.partition(b"/")
        if base not in (directory.directories if below else directory.files):
            return f"{text(file)} is missing, which {text(name)} names"
        if not below and directory.files[file].size < size:
            return f"{text(file)} has {directory.files[file].size} bytes, but {text(name)} says {size}"
    return ""


_OF = re.compile(rb"(.*?)([0-9]+)([-_]of[-_])([0-9]+)(.*)", re.IGNORECASE | re.DOTALL)
_WORLD = re.compile(rb"(.*world_?size_)([0-9]+)(_rank_)([0-9]+)(.*)", re.IGNORECASE | re.DOTALL)
_RANK = re.compile(rb"(.*?(?:rank|shard|part|proc|process|worker|node)[-_.=]?)([0-9]+)(.*)", re.IGNORECASE | re.DOTALL)


def _find_of_gap(directory: DirectoryFacts) -> str:
    """`00001-of-00004`: counted from 0 or from 1."""
    groups: dict[tuple[bytes, ...], set[int]] = defaultdict(set)
    for name in directory.names:
        if found := _OF.fullmatch(name):
            groups[found[1], found[3], found[4], found[5]].add(int(found[2]))
    for (before, of, total, after), numbers in sorted(groups.items()):
        first = 0 if 0 in numbers else 1
        missing = _find_missing(numbers, first, first + int(total))
        if missing is not None:
            return f"{text(before)}{missing:0{len(total)}}{text(of + total + after)} is missing"
    return ""


def _find_world_gap(directory: DirectoryFacts) -> str:
    """`world_size_4_rank_0`."""
    groups: dict[tuple[bytes, ...], set[int]] = defaultdict(set)
    for name in directory.names:
        if found := _WORLD.fullmatch(name):
            groups[found[1], found[2], found[3], found[5]].add(int(found[4]))
    for (before, total, rank, after), numbers in sorted(groups.items()):
        if (missing := _find_missing(numbers, 0, int(total))) is not None:
            return f"{text(before + total + rank)}{missing}{text(after)} is missing"
    return ""


def _find_rank_gap(directory: DirectoryFacts) -> str:
    """`rank_0`, `rank_1`, ...: without a gap. Only a comparison tells how many there must be, and whether a single number counts ranks."""
    groups: dict[tuple[bytes, bytes], dict[int, bytes]] = defaultdict(dict)
    for name in directory.names:
        if (found := _RANK.fullmatch(name)) and not _OF.fullmatch(name):
            groups[found[1], found[3]][int(found[2])] = found[2]
    for (before, after), numbers in sorted(groups.items()):
        missing = _find_missing(numbers, min(*numbers, 1), max(numbers)) if len(numbers) > 1 else None
        if missing is not None:
            return f"{text(before)}{missing:0{min(map(len, numbers.values()))}}{text(after)} is missing"
    return ""


def _find_missing(numbers: Container[int], first: int, end: int) -> int | None:
    """Return the first number of first..end that is not among `numbers`. Returns None if all are there."""
    while first in numbers:
        first += 1
    return first if first < end else None


def _find_deepspeed_gap(directory: DirectoryFacts) -> str:
    has_model = any(name.endswith(b"model_states.pt") for name in directory.names)
    return "" if has_model else "no file of model_states is there yet"


def _find_trainer_gap(directory: DirectoryFacts) -> str:
    return "" if b"trainer_state.json" in directory.files else "trainer_state.json is not there yet"


def _find_tensorflow_gap(directory: DirectoryFacts) -> str:
    for prefix in sorted({name.rpartition(b".data-")[0] for name in directory.files if _TENSORFLOW_DATA.fullmatch(name)}):
        if prefix + b".index" not in directory.files:
            return f"{text(prefix)}.index is not there yet"
    return ""


def _find_orbax_gap(directory: DirectoryFacts) -> str:
    return _find_index_gap(directory, b"_CHECKPOINT_METADATA")


_TENSORFLOW_DATA = re.compile(rb".+\.data-[0-9]+-of-[0-9]+", re.DOTALL)
_NOTHING = re.compile(rb"(?!)")

KINDS = (
    SetKind("torch.distributed.checkpoint", re.compile(rb"__[0-9]+_[0-9]+\.distcp|\.metadata"), _find_dcp_gap,
            re.compile(rb".*\.distcp|\.metadata", re.DOTALL), re.compile(rb"\.metadata"), tells_sizes=True),
    SetKind("Hugging Face Trainer", re.compile(rb"trainer_state\.json|training_args\.bin"), _find_trainer_gap,
            _NOTHING, re.compile(rb"trainer_state\.json")),
    SetKind("index of weights", re.compile(rb".*\.index\.json", re.DOTALL), _find_weights_gap,
            re.compile(rb".*\.index\.json", re.DOTALL), _NOTHING),
    SetKind("parts N of M", _OF, _find_of_gap, _OF, _NOTHING),
    SetKind("ranks of a world size", _WORLD, _find_world_gap, _WORLD, _NOTHING),
    SetKind("ranks", _RANK, _find_rank_gap, _NOTHING, _NOTHING),
    SetKind("DeepSpeed", re.compile(rb".*(model|optim)_states\.pt", re.DOTALL), _find_deepspeed_gap, _NOTHING, _NOTHING),
    SetKind("TensorFlow", _TENSORFLOW_DATA, _find_tensorflow_gap, re.compile(rb".+\.(index|meta|data-[0-9]+-of-[0-9]+)", re.DOTALL),
            re.compile(rb".+\.index", re.DOTALL)),
    SetKind("Orbax", re.compile(rb"_CHECKPOINT_METADATA|commit_success\.txt"), _find_orbax_gap,
            _NOTHING, re.compile(rb"commit_success\.txt"), tells_sizes=True),
)  # fmt: skip


def list_kinds(directory: DirectoryFacts) -> list[SetKind]:
    """Return the kinds of a directory."""
    return [kind for kind in KINDS if kind.is_kind_of(directory)]


def has_unknown_count(directory: DirectoryFacts) -> bool:
    """Return whether names count ranks, and none says how many there are."""
    return any(_RANK.fullmatch(name) and not _OF.fullmatch(name) and not _WORLD.fullmatch(name) for name in directory.names)
