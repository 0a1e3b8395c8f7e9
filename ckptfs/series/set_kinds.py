"""Kinds of checkpoint sets: the marks of each kind of directory, and their completeness (T6, H4).

`KINDS` is the table. A directory may be of several kinds at once; then it must satisfy all of them. Functions are pure over names, sizes,
times and what its index files say.
"""

import functools
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckptfs.model import Level
from ckptfs.series import file_formats, ocdbt, pickle_scan
from ckptfs.series.file_formats import JSON_BYTES_MAX, LAMMPS, LAMMPS_END, LAMMPS_PART, FileFormat
from ckptfs.series.file_groups import DMTCP_IMAGE, DMTCP_SCRIPT
from ckptfs.series.pickle_scan import DamagedPickle, ReadRange, TooLong

PICKLE_BYTES_MAX = 64 << 20
"""`.metadata` of 50,000 tensors on 1,000 ranks has about half of it."""


@dataclass(frozen=True, slots=True)
class MemberFile:
    """A regular file of a member.

    `incomplete_reason` is empty if the catalog knows nothing that speaks against the file.
    """

    size: int
    level: Level
    incomplete_reason: str = ""
    mtime_ns: int = 0
    ctime_ns: int = 0


@dataclass(frozen=True, slots=True)
class ZeroWorld:
    """The job as a file of DeepSpeed describes it.

    `data_ranks` share the optimizer, `model_ranks` the model. `stage` is that of ZeRO.
    """

    data_ranks: int
    model_ranks: int
    stage: int


@dataclass(frozen=True, slots=True)
class SetIndex:
    """The statement of an index file about its directory.

    `files` has the named files with the bytes that each has at least. `flaw` is the fault of the index file.
    """

    files: Mapping[bytes, int] = field(default_factory=dict)
    flaw: str = ""
    is_commit: bool = False  # It says that nothing is still to come.
    world: ZeroWorld | None = None
    parts: int = 0  # How many files there are of processes; 0: not known.
    nodes: tuple[ocdbt.TreeNode, ...] = ()  # What `load_node` still has to read.


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """One directory of a member."""

    files: Mapping[bytes, MemberFile]
    directories: frozenset[bytes] = frozenset()
    indexes: Mapping[bytes, SetIndex] = field(default_factory=dict)
    formats: Mapping[bytes, FileFormat] = field(default_factory=dict)
    below: Mapping[bytes, MemberFile] = field(default_factory=dict)
    """The files in its subdirectories that its index files name, by their paths from here."""

    @property
    def names(self) -> list[bytes]:
        return sorted({*self.files, *self.directories})

    @property
    def world(self) -> ZeroWorld | None:
        return next((index.world for index in self.indexes.values() if index.world is not None), None)


@dataclass(frozen=True, slots=True)
class SetKind:
    """One row of the table."""

    name: str
    sign: re.Pattern[bytes]  # A directory with such a name is of this kind.
    find_gap: Callable[[DirectoryFacts], str]  # What the directory lacks; empty if nothing.
    covers: re.Pattern[bytes]  # Names that `find_gap` vouches for, so that they need not be those of the member before.
    last: re.Pattern[bytes]  # The file that is written when all others are there.
    tells_sizes: bool = False  # `find_gap` checks their sizes, too.
    awaits_all: bool = False  # `last` is written after all other files, whose names may be new each time.
    awaits_own: bool = False  # `last` is written after those of the same rank, whose names stay.
    applies: Callable[[DirectoryFacts], bool] = lambda directory: True  # What else must hold of it.

    def is_kind_of(self, directory: DirectoryFacts) -> bool:
        return any(map(self.sign.fullmatch, directory.names)) and self.applies(directory)

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


def is_index_needed(name: bytes) -> bool:
    """Return whether a set whose index cannot be read now cannot be judged.

    A file of DeepSpeed's model, or with "base" in its name, only adds to what names tell.
    """
    return not (_MODEL_RANK.fullmatch(name) or _LAMMPS_BASE.fullmatch(name))


def load_index(name: bytes, size: int, read: ReadRange) -> SetIndex:
    """Return what an index file says. Reads all of it, up to a bound; never runs a pickle."""
    load = next(load for pattern, load in _LOADERS if pattern.fullmatch(name))
    try:
        return load(size, read)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, DamagedPickle):
        return SetIndex(flaw="cannot be read; its writer did not finish it")
    except TooLong:
        return SetIndex(flaw=f"has {size} bytes, more than can be checked")


def load_node(index: SetIndex, node: ocdbt.TreeNode, _: int, read: ReadRange) -> SetIndex:
    """Return an index with what one of its nodes says."""
    try:
        found = ocdbt.load_node(node, read)
    except (ValueError, LookupError):
        return replace(index, flaw="names a node of its tree that cannot be read")
    except TooLong:
        return replace(index, flaw="names a node of its tree that is longer than can be checked")
    files = {path: max(index.files.get(path, 0), found.files.get(path, 0)) for path in index.files.keys() | found.files.keys()}
    return replace(index, files=files, nodes=(*index.nodes, *found.nodes))


_SHARD = re.compile(rb"__[0-9]+_[0-9]+\.distcp")
_TABLE_END = 0xDB4775248B80FB57.to_bytes(8, "little")
"""The last bytes of a sorted table."""
_MODEL_RANK = re.compile(rb"(?:.*zero_pp_rank_[0-9]+_)?mp_rank_([0-9]+)_model_states\.pt", re.DOTALL)
"""Of DeepSpeed. With a pipeline, or experts, files of layers stand beside it."""
_LAMMPS_BASE = re.compile(rb"(.*?)base(.*)", re.DOTALL)
_LAMMPS_TAIL_BYTES = 20 + len(LAMMPS_END)
_DMTCP_SCRIPT = re.compile(re.escape(DMTCP_SCRIPT).replace(rb"\.sh", rb"(_.+)?\.sh"), re.DOTALL)


def _load_dcp_metadata(size: int, read: ReadRange) -> SetIndex:
    """Load `.metadata` of torch.distributed.checkpoint.

    It is a pickle with a `_StorageInfo` (relative_path, offset, length) for each piece.
    """
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
    """Load `model.safetensors.index.json`: the file of each tensor."""
    found = _load_json(size, read)["weight_map"]
    return SetIndex({str(name).encode(): 1 for name in found.values()})


def _load_orbax_metadata(size: int, read: ReadRange) -> SetIndex:
    found = _load_json(size, read)
    if "commit_timestamp_nsecs" not in found:
        return SetIndex()
    if not found["commit_timestamp_nsecs"]:
        return SetIndex(flaw="has no time of commit; its writer did not finish it")
    items = found.get("item_handlers")  # What this save has, by the names of directories; text if it has no items.
    return SetIndex({name.encode(): 0 for name in items} if isinstance(items, dict) else {}, is_commit=True)


def _load_ocdbt_manifest(size: int, read: ReadRange) -> SetIndex:
    found = ocdbt.load_manifest(size, read)
    return SetIndex(found.files, nodes=found.nodes)


def _load_deepspeed_state(size: int, read: ReadRange) -> SetIndex:
    """Load `mp_rank_00_model_states.pt` of DeepSpeed.

    Its pickle has the number of ranks and the settings of ZeRO.
    """
    found = dict(_list_numbers(size, read, (b"dp_world_size", b"mp_world_size", b"stage")))
    if not found.keys() >= {b"dp_world_size", b"mp_world_size"}:
        return SetIndex()
    return SetIndex(world=ZeroWorld(found[b"dp_world_size"], found[b"mp_world_size"], found.get(b"stage", 0)))


def _load_lammps_base(size: int, read: ReadRange) -> SetIndex:
    """Load the end of the file with "base".

    It has (44, parts), in some versions (45, 0), and -1, each number in 4 bytes, before the last mark.
    """
    tail = read(max(0, size - _LAMMPS_TAIL_BYTES), _LAMMPS_TAIL_BYTES)
    if len(tail) < _LAMMPS_TAIL_BYTES or tail[16:] != b"\xff" * 4 + LAMMPS_END:
        return SetIndex()
    return SetIndex(parts=int.from_bytes(tail[12:16], "little") or int.from_bytes(tail[4:8], "little"))


def load_step(size: int, read: ReadRange) -> int | None:
    """Return the step that a checkpoint of Lightning says. Returns None for any other file."""
    return next((value for _, value in _list_numbers(size, read, (b"global_step",))), None)


def _list_numbers(size: int, read: ReadRange, keys: Container[bytes]) -> Iterator[tuple[bytes, int]]:
    """Yield these keys with their numbers in the pickle of a `torch.save`; none of any other file."""
    try:
        begin, end = file_formats.find_zip_member(size, read, b"/data.pkl")
        key: bytes | None = None
        for step in pickle_scan.scan(read, end, begin):
            if isinstance(step.value, int) and key is not None:
                yield key, step.value
            if step.value is not None:
                key = step.value if isinstance(step.value, bytes) and step.value in keys else None
    except (LookupError, DamagedPickle, TooLong):
        return


def _load_tensorflow_index(size: int, read: ReadRange) -> SetIndex:
    is_whole = size >= len(_TABLE_END) and read(size - len(_TABLE_END), len(_TABLE_END)) == _TABLE_END
    return SetIndex(flaw="" if is_whole else "ends before its last mark; its writer did not finish it")


def _load_restart_script(size: int, read: ReadRange) -> SetIndex:
    """Load `dmtcp_restart_script_ID.sh`, which names the images, wherever they were."""
    if size > JSON_BYTES_MAX:
        raise TooLong
    script = read(0, size)
    images = {name.rpartition(b"/")[2] for name in re.findall(rb"[^\s\"':]+\.dmtcp", script)}
    processes = re.search(rb"processes in the computation = ([0-9]+)", script)
    if processes and len(images) < int(processes[1]):
        return SetIndex(flaw="does not name all images; its writer did not finish it")
    return SetIndex({name: 1 for name in images if DMTCP_IMAGE.fullmatch(name)})


def _load_json(size: int, read: ReadRange) -> dict[str, Any]:
    if size > JSON_BYTES_MAX:
        raise TooLong
    found: dict[str, Any] = json.loads(read(0, size))
    return found


_LOADERS: tuple[tuple[re.Pattern[bytes], Callable[[int, ReadRange], SetIndex]], ...] = (
    (re.compile(rb"\.metadata"), _load_dcp_metadata),
    (re.compile(rb".*\.index\.json"), _load_weight_map),
    (re.compile(rb"_CHECKPOINT_METADATA"), _load_orbax_metadata),
    (re.compile(re.escape(ocdbt.MANIFEST)), _load_ocdbt_manifest),
    (_MODEL_RANK, _load_deepspeed_state),
    (re.compile(rb".+\.index", re.DOTALL), _load_tensorflow_index),
    (_DMTCP_SCRIPT, _load_restart_script),
    (_LAMMPS_BASE, _load_lammps_base),
)


# --- gaps -------------------------------------------------------------------------------------------------------------


def _find_dcp_gap(directory: DirectoryFacts) -> str:
    """Find a gap by `.metadata`, which is written after all shards and has their names and lengths."""
    metadata = directory.files.get(b".metadata")
    if metadata is None:
        return ".metadata is not there yet"
    index = directory.indexes.get(b".metadata", SetIndex())
    if not index.files and not index.flaw and any(map(_SHARD.fullmatch, directory.files)):
        return ".metadata names no shard"
    if gap := _find_index_gap(directory, b".metadata"):
        return gap
    return _find_newer(directory, b".metadata", (name for name in index.files if name in directory.files))


def _find_newer(directory: DirectoryFacts, last: bytes, names: Iterable[bytes]) -> str:
    """Return which of these files is newer than the one that is written last.

    Such a file belongs to a save that did not end.
    """
    newer = [name for name in names if directory.files[name].mtime_ns > directory.files[last].mtime_ns]
    return f"{text(last)} is older than {text(min(newer))}: it belongs to the save before" if newer else ""


def _find_weights_gap(directory: DirectoryFacts) -> str:
    gaps = (_find_index_gap(directory, name) for name in sorted(directory.indexes) if name.endswith(b".index.json"))
    return next(filter(None, gaps), "")


def _find_index_gap(directory: DirectoryFacts, name: bytes) -> str:
    """Return the first file that an index names and that is not there, or is too short."""
    index = directory.indexes.get(name, SetIndex())
    for file, size in sorted(index.files.items()):
        found = directory.files.get(file) or directory.below.get(file)
        if file in directory.directories:
            continue
        if found is None:
            return f"{text(file)} is missing, which {text(name)} names"
        if found.size < size:
            return f"{text(file)} has {found.size} bytes, but {text(name)} says {size}"
    return f"{text(name)} {index.flaw}" if index.flaw else ""


_OF = re.compile(rb"(?P<before>.*?)(?P<number>[0-9]+)(?P<after>[-_]of[-_](?P<total>[0-9]+).*)", re.IGNORECASE | re.DOTALL)
_WORLD = re.compile(rb"(?P<before>.*world_?size_(?P<total>[0-9]+)_rank_)(?P<number>[0-9]+)(?P<after>.*)", re.IGNORECASE | re.DOTALL)
_RANK = re.compile(
    rb"(?P<before>.*?(?:rank|shard|part|proc|process|processor|worker|node|rng_state|random_states|\.file)[-_.=]?)(?P<number>[0-9]+)"
    rb"(?P<after>.*)",
    re.IGNORECASE | re.DOTALL,
)
_ZERO = re.compile(rb"(.*zero_pp_rank_)([0-9]+)(_mp_rank_)([0-9]+)(_.*)", re.DOTALL)


def _find_of_gap(directory: DirectoryFacts) -> str:
    """Find a missing file of `00001-of-00004`, counted from 0 or from 1."""
    return _find_numbered_gap(directory.names, _OF, lambda numbers, total: (0, total) if 0 in numbers else (1, total + 1))


def _find_world_gap(directory: DirectoryFacts) -> str:
    """Find a missing file of `world_size_4_rank_0`."""
    return _find_numbered_gap(directory.names, _WORLD, lambda _, total: (0, total))


def _find_rank_gap(directory: DirectoryFacts) -> str:
    """Find a gap in `rank_0`, `rank_1`, ...

    Only a comparison with other members shows how many there must be, and whether a single number counts ranks.
    """
    names = [name for name in directory.names if not _OF.fullmatch(name)]
    return _find_numbered_gap(names, _RANK, lambda numbers, _: (min(*numbers, 1), max(numbers)) if len(numbers) > 1 else (0, 0))


def _find_numbered_gap(
    names: Iterable[bytes], pattern: re.Pattern[bytes], get_range: Callable[[Mapping[int, bytes], int], tuple[int, int]]
) -> str:
    """Find a missing file among names that differ in a number only.

    `get_range` gets these numbers and the total in the names, and returns (first, end) of those that there must be.
    """
    groups: dict[tuple[bytes, bytes, int], dict[int, bytes]] = defaultdict(dict)
    for name in names:
        if found := pattern.fullmatch(name):
            total = int(found.groupdict().get("total", 0))
            groups[found["before"], found["after"], total][int(found["number"])] = found["number"]
    for (before, after, total), numbers in sorted(groups.items()):
        if (missing := _find_missing(numbers, *get_range(numbers, total))) is not None:
            return f"{text(before)}{missing:0{min(map(len, numbers.values()))}}{text(after)} is missing"
    return ""


def _find_missing(numbers: Container[int], first: int, end: int) -> int | None:
    """Return the first number of first..end that is not among `numbers`. Returns None if all are there."""
    while first in numbers:
        first += 1
    return first if first < end else None


def _find_lammps_gap(directory: DirectoryFacts) -> str:
    """Find a missing or cut file of `melt.base.100` and `melt.0.100`, `melt.1.100`, ...

    The file with "base" says how many there must be.
    """
    for before, after in _list_lammps_parts(directory):
        parts = [name for name in directory.files if _is_lammps_part(name, before, after)]
        files = [before + b"base" + after, *parts]
        if cut := [name for name in files if directory.formats.get(name, FileFormat()).name not in (LAMMPS, LAMMPS_PART)]:
            return f"{text(min(cut))} ends before its last mark; its writer did not finish it"
        numbers = {int(name[len(before) : len(name) - len(after)]) for name in parts}
        count = directory.indexes.get(files[0], SetIndex()).parts
        if (missing := _find_missing(numbers, 0, count or max(numbers))) is not None:
            return f"{text(before)}{missing}{text(after)} is missing"
    return ""


def _has_lammps_count(directory: DirectoryFacts) -> bool:
    """Return whether the files of LAMMPS say themselves how many there are."""
    bases = [before + b"base" + after for before, after in _list_lammps_parts(directory)]
    return bool(bases) and all(directory.indexes.get(name, SetIndex()).parts for name in bases)


def _list_lammps_parts(directory: DirectoryFacts) -> list[tuple[bytes, bytes]]:
    """Return the texts before and after the numbers of the parts.

    Returns nothing if only a name looks like LAMMPS.
    """
    bases = [(found[1], found[2]) for name in directory.files if (found := _LAMMPS_BASE.fullmatch(name))]
    return [parts for parts in bases if any(_is_lammps_part(name, *parts) for name in directory.files)]


def _is_lammps_part(name: bytes, before: bytes, after: bytes) -> bool:
    return name.startswith(before) and name.endswith(after) and name[len(before) : len(name) - len(after)].isdigit()


def _find_deepspeed_gap(directory: DirectoryFacts) -> str:
    return "" if any(map(_MODEL_RANK.fullmatch, directory.names)) else "no file of model_states is there yet"


def _find_zero_gap(directory: DirectoryFacts) -> str:
    """Find a missing file of the model, or with ZeRO of a rank's optimizer.

    The model's file says how many there must be.
    """
    world = directory.world
    assert world is not None
    model_ranks = {int(found[1]) for name in directory.files if (found := _MODEL_RANK.fullmatch(name))}
    if (missing := _find_missing(model_ranks, 0, world.model_ranks)) is not None:
        return f"a file of mp_rank_{missing:02} is missing"
    ranks: dict[tuple[bytes, bytes, bytes], set[tuple[int, int]]] = defaultdict(set)
    for name in directory.files:
        if found := _ZERO.fullmatch(name):
            ranks[found[1], found[3], found[5]].add((int(found[2]), int(found[4])))
    if world.stage and not any(after.endswith(b"_optim_states.pt") for *_, after in ranks):
        return "no file of optim_states is there yet"
    wanted = list(itertools.product(range(world.data_ranks), range(world.model_ranks)))
    for (before, between, after), numbers in sorted(ranks.items()):
        if missing_ranks := [one for one in wanted if one not in numbers]:
            return f"{text(before)}{missing_ranks[0][0]}{text(between)}{missing_ranks[0][1]:02}{text(after)} is missing"
    return ""


def _find_trainer_gap(directory: DirectoryFacts) -> str:
    return "" if TRAINER_END in directory.files else f"{text(TRAINER_END)} is not there yet"


def find_named_gap(name: bytes, directory: DirectoryFacts) -> str:
    """Return what a directory lacks that has the name of a known program.

    A program that is killed early leaves none of its marks, only the name.
    """
    is_trainer = _TRAINER_NAME.fullmatch(name) and not any(map(_ACCELERATE.fullmatch, directory.names))
    return _find_trainer_gap(directory) if is_trainer else ""


def _find_tensorflow_gap(directory: DirectoryFacts) -> str:
    for prefix in sorted({name.rpartition(b".data-")[0] for name in directory.files if _TENSORFLOW_DATA.fullmatch(name)}):
        if prefix + b".index" not in directory.files:
            return f"{text(prefix)}.index is not there yet"
        if flaw := directory.indexes.get(prefix + b".index", SetIndex()).flaw:
            return f"{text(prefix)}.index {flaw}"
    return ""


def _find_arrays_gap(directory: DirectoryFacts) -> str:
    """Find a gap by the manifest of the arrays, which leads to all their bytes.

    Orbax needs `_METADATA` beside what its processes wrote.
    """
    wanted = [ocdbt.MANIFEST, *([b"_METADATA"] if any(map(_ORBAX_PROCESS.fullmatch, directory.directories)) else [])]
    missing = [name for name in sorted({*wanted, *directory.files}) if name not in directory.files or not directory.files[name].size]
    return f"{text(missing[0])} is missing or empty" if missing else _find_index_gap(directory, ocdbt.MANIFEST)


def _find_dmtcp_gap(directory: DirectoryFacts) -> str:
    """Find a gap by the script of DMTCP.

    The coordinator writes the script after all images; each checkpoint replaces them.
    """
    scripts = {name: file for name, file in directory.files.items() if _DMTCP_SCRIPT.fullmatch(name)}
    if not scripts:
        return f"{text(DMTCP_SCRIPT)} is not there yet"
    newest = max(scripts, key=lambda name: (scripts[name].mtime_ns, name))
    if gap := _find_index_gap(directory, newest):
        return gap
    if not directory.indexes.get(newest, SetIndex()).files:
        return f"{text(newest)} names no image"
    return _find_newer(directory, newest, (name for name in directory.files if DMTCP_IMAGE.fullmatch(name)))


def _find_criu_gap(directory: DirectoryFacts) -> str:
    return "" if b"inventory.img" in directory.files else "inventory.img is not there yet"


MEGATRON_MODEL = b"model_optim_rng.pt"
"""The file of each rank of Megatron, in a directory of its own. Nothing in the member says how many ranks there are."""
TRAINER_END = b"trainer_state.json"
"""The file that a Trainer of Hugging Face writes last."""
_TRAINER_NAME = re.compile(rb"checkpoint-[0-9]+")
_ACCELERATE = re.compile(rb"random_states_[0-9]+\.pkl")
"""Without a Trainer, programs use the name and end with this file."""
_TENSORFLOW_DATA = re.compile(rb".+\.data-[0-9]+-of-[0-9]+", re.DOTALL)
_DEEPSPEED = re.compile(rb".*(model|optim)_states\.pt", re.DOTALL)
_ORBAX_PROCESS = re.compile(rb"ocdbt\.process_[0-9]+")
_LAMMPS_BASE_OR_NUMBER = re.compile(rb".*(base|[0-9]).*", re.DOTALL)
_NOTHING = re.compile(rb"(?!)")

KINDS = (
    SetKind("torch.distributed.checkpoint", re.compile(rb"__[0-9]+_[0-9]+\.distcp|\.metadata"), _find_dcp_gap,
            re.compile(rb".*\.distcp|\.metadata", re.DOTALL), re.compile(rb"\.metadata"), tells_sizes=True),
    SetKind("Hugging Face Trainer", re.compile(rb"trainer_state\.json|training_args\.bin"), _find_trainer_gap,
            _NOTHING, re.compile(rb"trainer_state\.json"), awaits_own=True),
    SetKind("index of weights", re.compile(rb".*\.index\.json", re.DOTALL), _find_weights_gap,
            re.compile(rb".*\.index\.json", re.DOTALL), _NOTHING),
    SetKind("parts N of M", _OF, _find_of_gap, _OF, _NOTHING),
    SetKind("ranks of a world size", _WORLD, _find_world_gap, _WORLD, _NOTHING),
    SetKind("ranks", _RANK, _find_rank_gap, _NOTHING, _NOTHING),
    SetKind("DeepSpeed", _DEEPSPEED, _find_deepspeed_gap, _NOTHING, _NOTHING),
    SetKind("DeepSpeed of a known world", _DEEPSPEED, _find_zero_gap,
            re.compile(_MODEL_RANK.pattern + b"|" + _ZERO.pattern, re.DOTALL), _NOTHING,
            applies=lambda directory: directory.world is not None),
    SetKind("TensorFlow", _TENSORFLOW_DATA, _find_tensorflow_gap, re.compile(rb".+\.(index|meta|data-[0-9]+-of-[0-9]+)", re.DOTALL),
            re.compile(rb".+\.index", re.DOTALL)),
    SetKind("Orbax", re.compile(rb"_CHECKPOINT_METADATA|commit_success\.txt"),
            functools.partial(_find_index_gap, name=b"_CHECKPOINT_METADATA"),
            _NOTHING, re.compile(rb"commit_success\.txt"), tells_sizes=True, awaits_all=True),
    SetKind("arrays of Orbax", re.compile(_ORBAX_PROCESS.pattern + b"|" + re.escape(ocdbt.MANIFEST)), _find_arrays_gap, _NOTHING, _NOTHING),
    SetKind("LAMMPS", _LAMMPS_BASE, _find_lammps_gap, _NOTHING, _NOTHING, applies=lambda directory: bool(_list_lammps_parts(directory))),
    SetKind("LAMMPS with a count", _LAMMPS_BASE, _find_lammps_gap, _LAMMPS_BASE_OR_NUMBER, _NOTHING, applies=_has_lammps_count),
    SetKind("DMTCP", re.compile(DMTCP_IMAGE.pattern + b"|" + _DMTCP_SCRIPT.pattern, re.DOTALL), _find_dmtcp_gap,
            _NOTHING, _DMTCP_SCRIPT, tells_sizes=True, awaits_all=True),
    SetKind("CRIU", re.compile(rb"(inventory|pstree|(core|mm|pagemap)-[0-9]+)\.img"), _find_criu_gap,
            _NOTHING, re.compile(rb"stats-dump|inventory\.img"), tells_sizes=True, awaits_all=True),
)  # fmt: skip


def list_kinds(directory: DirectoryFacts) -> list[SetKind]:
    return [kind for kind in KINDS if kind.is_kind_of(directory)]


def is_of_rank(name: bytes) -> bool:
    """Return whether a name counts ranks without saying how many there are."""
    return bool(_RANK.fullmatch(name)) and not _OF.fullmatch(name) and not _WORLD.fullmatch(name)


def has_unknown_count(directory: DirectoryFacts) -> bool:
    """Return whether names count ranks, and none says how many there are."""
    return any(map(is_of_rank, directory.names)) or (bool(_list_lammps_parts(directory)) and not _has_lammps_count(directory))
