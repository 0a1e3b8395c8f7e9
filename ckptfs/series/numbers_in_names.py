"""Numbers in names: what each of them means (T5). Pure.

A name is cut into text and numbers. The word before a number says what it means; the names beside it may say it of a bare number.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

_LOCAL_SUFFIX = b"_local."
"""NVIDIA's local checkpoints: `iter_0000010_3_local.pt` is the part of rank 3."""
_RESTART_EXTENSION = b".restart"
"""Of LAMMPS, whose users name files as its manual does: `restart 100 melt.*.restart`."""
_VERSION = re.compile(rb"-(?:v[0-9]+|last)(?=\.ckpt$)")
"""Lightning adds it if a file of the name exists, as after a restart; NeMo adds `-last` to a second file of its newest state."""
_VELOC_TEXTS = (b"-", b".dat")
"""Of `NAME-RANK-VERSION.dat`, behind NAME."""
_CACTUS_FILE = b".file_"
"""Behind the number of the iteration: `checkpoint.chkpt.it_1024.file_0.h5` is the part of one process."""

NUMBER = re.compile(rb"[0-9]+")
_DECIMAL = re.compile(rb"[0-9]+\.[0-9]+")
"""As the whole name: a time, as OpenFOAM names its directories."""
_DATE = re.compile(
    rb"(?<![0-9])(?:[0-9]{4}-(?:0[1-9]|1[0-2])-[0-3][0-9]|(?:19|20)[0-9]{2}(?:0[1-9]|1[0-2])[0-3][0-9](?=[-_T.][0-9]{4}))"
    rb"(?:[-_T:. ][0-9]{2,6})*(?![0-9])"
)
"""`2026-01-02_12:00:00` or `20260102_120000`: its numbers count together."""
_EXTENSION = re.compile(rb"\.(h5|hdf5|he5|nc4|bz2|lz4|7z|pt2|fp16|fp32|bf16)$", re.IGNORECASE)
"""Their digits are no numbers."""
_WORD = re.compile(rb"([A-Za-z]*)[-_.=:@ ]?$")
_COUNTERS = (("step", "iter", "iteration", "batch"), ("epoch",), ("ckpt", "chk", "checkpoint", "restart", "dump", "snapshot", "snap"))
"""A number of the first class is shown as the step. A word counts if it is the end of the text before the number."""
EPOCH = 1
_COMPOSER_BATCH = b"-ba"
"""Between two numbers, as in `ep1-ba100`. Alone, `ep` may count ranks that share experts."""
_PARTS = {
    "rank", "ranks", "shard", "part", "proc", "process", "processor", "worker", "node", "host", "gpu", "tp", "pp", "dp", "mp", "stage",
    "layer",
}  # fmt: skip
_RANDOM_STATE = re.compile(rb"(rng_state|random_states)[-_.]?$", re.IGNORECASE)
"""Of a rank: a part of the checkpoints of Hugging Face."""
_LABELS = {
    "rep", "replica", "replicate", "run", "exp", "experiment", "trial", "seed", "fold", "job", "task", "sim", "walker", "version",
    "size", "of",
}  # fmt: skip


class NumberRole(Enum):
    """What a number in a name means."""

    COUNTER = "counter"  # It counts checkpoints (`step`, `epoch`, `ckpt`, ...).
    PART = "part"  # It counts the files of one checkpoint (`rank`, `shard`, `1-of-4`, ...).
    LABEL = "label"  # It tells experiments apart (`run`, `exp`, `rep`, ...).
    METRIC = "metric"  # It ends with `=`, as in `loss=0.25`, or is a decimal at the end, as in `weights.01-0.25.h5`.
    BARE = "bare"  # No word stands before it.
    OTHER = "other"


class SplitName(NamedTuple):
    """A name cut at its numbers: one text more than numbers."""

    texts: tuple[bytes, ...]
    numbers: tuple[bytes, ...]

    @property
    def roles(self) -> tuple[NumberRole, ...]:
        return get_roles(self.texts)


@lru_cache(maxsize=65536)
def split(name: bytes) -> SplitName:
    """Cut a name at its numbers."""
    if _DECIMAL.fullmatch(name):
        return SplitName((b"", b""), (name,))
    name = _VERSION.sub(b"", name)
    extension = _EXTENSION.search(name)
    end = len(name) if extension is None else extension.start()
    found = list(NUMBER.finditer(name, 0, end))
    starts = [0, *(one.end() for one in found)]
    ends = [*(one.start() for one in found), len(name)]
    return SplitName(tuple(name[start:end] for start, end in zip(starts, ends, strict=True)), tuple(one[0] for one in found))


@lru_cache(maxsize=4096)
def get_roles(texts: tuple[bytes, ...]) -> tuple[NumberRole, ...]:
    """Return what the number behind each text but the last means."""
    if texts[1:] == _VELOC_TEXTS and texts[0].endswith(b"-"):
        return NumberRole.PART, NumberRole.COUNTER
    found: list[NumberRole] = []
    for text, after in itertools.pairwise(texts):
        is_decimal = text == b"." and found and found[-1] is NumberRole.METRIC
        found.append(NumberRole.METRIC if is_decimal else _get_role(text, after))
    if len(found) > 2 and _has_decimal_end(texts) and found[-2] in (NumberRole.BARE, NumberRole.OTHER):
        found[-2:] = [NumberRole.METRIC] * 2
    return tuple(found)


def _has_decimal_end(texts: tuple[bytes, ...]) -> bool:
    """Return whether the last two numbers are one decimal behind another: `weights.01-0.25.h5`."""
    return texts[-2] == b"." and texts[-3].endswith((b"-", b"_")) and texts[-1][:1] in (b"", b".")


def _get_role(text: bytes, after: bytes) -> NumberRole:
    word = _get_word(text, after)
    if re.match(rb"[-_]of[-_]$", after, re.IGNORECASE) or re.search(rb"[-_]of[-_]$", text, re.IGNORECASE):
        return NumberRole.PART
    if after.startswith(_LOCAL_SUFFIX) or text == _CACTUS_FILE:
        return NumberRole.PART
    if get_counter_class(text, after) < len(_COUNTERS):
        return NumberRole.COUNTER
    if word in _PARTS or _RANDOM_STATE.search(text):
        return NumberRole.PART
    if word in _LABELS:
        return NumberRole.LABEL
    if text.rstrip(b"-+").endswith(b"="):
        return NumberRole.METRIC
    if after == _RESTART_EXTENSION and text.endswith((b".", b"_", b"-")):
        return NumberRole.COUNTER
    return NumberRole.OTHER if re.search(rb"[^-_.,: ]", text) else NumberRole.BARE


def _get_word(text: bytes, after: bytes) -> str:
    found = _WORD.search(text)
    word = "" if found is None else found[1].decode("ascii").lower()
    return "batch" if text == _COMPOSER_BATCH else "epoch" if (word, after) == ("ep", _COMPOSER_BATCH) else word


def get_counter_class(text: bytes, after: bytes) -> int:
    """Return the class of the counter that a text announces; the number of classes if it announces none."""
    word = _get_word(text, after)
    return next((number for number, words in enumerate(_COUNTERS) if word.endswith(words)), len(_COUNTERS))


def list_parts(texts: tuple[bytes, ...], bare: int | None) -> list[int]:
    """Return which numbers are those of parts. `bare`: what `find_bare_part` has found."""
    return [position for position, role in enumerate(get_roles(texts)) if role is NumberRole.PART or position == bare]


def mask_parts(name: bytes, bare: int | None) -> bytes:
    """Return a key that is the same for names that differ in the numbers of their parts only."""
    for position in list_parts(split(name).texts, bare):
        name = replace_number(name, position, b"0")
    return name


def replace_number(name: bytes, position: int, number: bytes) -> bytes:
    """Return a name with another number."""
    texts, numbers = split(name)
    return join(texts, (*numbers[:position], number, *numbers[position + 1 :]))


def join(texts: tuple[bytes, ...], numbers: tuple[bytes, ...]) -> bytes:
    return b"".join(one for pair in zip(texts, (*numbers, b""), strict=True) for one in pair)


def group_by_texts(names: Iterable[bytes]) -> dict[tuple[bytes, ...], list[bytes]]:
    """Return the names that have numbers by their texts."""
    groups: dict[tuple[bytes, ...], list[bytes]] = defaultdict(list)
    for name in names:
        if split(name).numbers:
            groups[split(name).texts].append(name)
    return groups


def find_bare_part(texts: tuple[bytes, ...], group: Collection[bytes]) -> int | None:
    """Return which bare number behind a counter counts ranks: `ckpt_100_0.bin`, `ckpt_100_1.bin`.

    The names of the group have the same texts. Its numbers are those from 0 on, or from 1 if several checkpoints have them all, and some
    checkpoint has all that any has. Behind an epoch it counts steps.
    """
    roles = get_roles(texts)
    for position in range(1, len(roles)):
        counter = position - 1
        if (roles[counter], roles[position]) != (NumberRole.COUNTER, NumberRole.BARE):
            continue
        if get_counter_class(*texts[counter : position + 1]) == EPOCH or any(position in list_dates(name) for name in group):
            continue
        members: dict[tuple[bytes, ...], set[int]] = defaultdict(set)
        for name in group:
            numbers = split(name).numbers
            members[numbers[:position] + numbers[position + 1 :]].add(int(numbers[position]))
        # `1.5` may be a decimal, `001.5` is none.
        if texts[position] == b"." and not any(len(one[counter]) > 1 and one[counter].startswith(b"0") for one in members):
            continue
        every = set[int]().union(*members.values())
        whole = sum(one == every for one in members.values())
        if whole > (0 not in every) and min(every) < 2 and max(every) < 2 * len(every):
            return position
    return None


def list_dates(name: bytes) -> Iterable[int]:
    """Return which numbers of a name are those of a date, or of a time behind it."""
    for found in _DATE.finditer(name):
        before = len(NUMBER.findall(name, 0, found.start()))
        yield from range(before, before + len(NUMBER.findall(found[0])))


def find_bare_gap(files: Collection[bytes], lowest: bytes) -> bytes:
    """Return the first name that is missing of names that differ in one number, counted from the lowest.

    Returns an empty name if none is.
    """
    varying = [set(one) for one in zip(*(split(name).numbers for name in files), strict=True)]
    position = next((position for position, one in enumerate(varying) if len(one) > 1), None)
    if position is None:
        return b""
    first, present = split(lowest).numbers[position], {*map(int, varying[position])}
    missing = next((one for one in range(int(first), max(present)) if one not in present), None)
    return b"" if missing is None else replace_number(lowest, position, b"%0*d" % (len(first), missing))
