"""Series of checkpoints: which sibling names form one, which members are complete, and which complete member is the newest.

The members of a series are siblings whose names differ in one number (T5). A member is complete if all its files are sealed and readable
(N7), and if each of its directories with shards of torch.distributed.checkpoint has a `.metadata` (T6). `find_newest` is the only search
for the newest complete member (N2): `ckptfs latest` and `.ckptfs/latest` both call it, each with its own way of reading a member.
"""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ckptfs import lifecycle
from ckptfs.lifecycle import FileRecord
from ckptfs.model import ContentState, Level

WILDCARD = b"*"
"""Stands for the number in the name of a series."""
_NUMBER = re.compile(rb"[0-9]+")
_SHARD_NAME = re.compile(rb"__[0-9]+_[0-9]+\.distcp")
_METADATA_NAME = b".metadata"
_PART_NAME = re.compile(rb"__[0-9]+_[0-9]+\.distcp|.*[0-9]-of-[0-9].*|.*(rank|shard)[-_.]?[0-9].*", re.IGNORECASE | re.DOTALL)
"""Names whose numbers count parts of one checkpoint."""
_STEP_WORD = re.compile(rb".*(step|ckpt|chk|checkpoint|iter|iteration|epoch)[-_.=]?", re.IGNORECASE | re.DOTALL)
_STEP_NUMBER = re.compile(rb"((?:step|ckpt|chk|checkpoint|iter|iteration|epoch)[-_.=]?)[0-9]+", re.IGNORECASE)
_LEVELS = list(Level)
Entry = TypeVar("Entry")
"""How a caller of `find_newest` identifies a file or directory: by path, or by inode number."""


@dataclass(frozen=True, slots=True)
class Series:
    """All names of the form PREFIX NUMBER SUFFIX."""

    prefix: bytes
    suffix: bytes

    @property
    def name(self) -> bytes:
        """The pattern that matches the members: "step_*"."""
        return self.prefix + WILDCARD + self.suffix

    @property
    def is_step_count(self) -> bool:
        """Whether the word before the number says that it counts steps; the number in "run*" may count runs."""
        return _STEP_WORD.fullmatch(self.prefix) is not None

    def parse_number(self, name: bytes) -> int | None:
        """Return the number of a member. Returns None for any other name."""
        if not (name.startswith(self.prefix) and name.endswith(self.suffix)):
            return None
        middle = name[len(self.prefix) : len(name) - len(self.suffix)]
        return int(middle) if _NUMBER.fullmatch(middle) else None

    def sort_newest_first(self, names: Iterable[bytes]) -> list[bytes]:
        """Return the members among `names`. If two have the same number ("1" and "01"), the shorter name counts as newer."""
        found = [(number, -len(name), name) for name in names if (number := self.parse_number(name)) is not None]
        return [name for _, _, name in sorted(found, reverse=True)]


def parse(name: bytes) -> Series | None:
    """Return the series of a pattern with one `*`. Returns None for any other name."""
    before, mark, after = name.partition(WILDCARD)
    return Series(before, after) if mark and WILDCARD not in after else None


def find_series(name: bytes, siblings: Iterable[bytes]) -> Series | None:
    """Return the series of a name that has a number.

    If it has several, the one that differs among most siblings counts; among equals, the last one.
    """
    found = _list_candidates(name)
    return max(found, key=lambda one: (sum(one.parse_number(sibling) is not None for sibling in siblings), len(one.prefix)), default=None)


def list_series(names: Iterable[bytes]) -> list[Series]:
    """Return the series in a directory, sorted by name.

    A name with a number but without siblings counts only if there is no other series. Names of parts of one checkpoint never count.
    """
    names = [name for name in names if not _PART_NAME.fullmatch(name)]
    sizes = Counter(reading for name in names for reading in _list_candidates(name))
    found = {max(readings, key=lambda one: (sizes[one], len(one.prefix))) for name in names if (readings := _list_candidates(name))}
    return sorted({one for one in found if sizes[one] > 1} or found, key=lambda one: one.name)


def get_place(path: bytes) -> bytes:
    """Return the path without the number that differs from one checkpoint to the next; numbers of parts stay.

    That number follows a word for steps. Without such a word, all numbers go but those in names of parts.
    """
    place, count = _STEP_NUMBER.subn(rb"\1" + WILDCARD, path)
    if count:
        return place
    return b"/".join(one if _PART_NAME.fullmatch(one) else _NUMBER.sub(WILDCARD, one) for one in path.split(b"/"))


def _list_candidates(name: bytes) -> list[Series]:
    return [Series(name[: found.start()], name[found.end() :]) for found in _NUMBER.finditer(name)]


# --- completeness -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberFile:
    """A regular file of a member; `incomplete_reason` is empty if a checkpoint can rest on it."""

    size: int
    level: Level
    incomplete_reason: str = ""


@dataclass(frozen=True, slots=True)
class Completeness:
    """The verdict on a member. `level` is the lowest of its files' levels; `incomplete_reason` is empty if it is complete."""

    files: int
    size: int
    level: Level
    incomplete_reason: str = ""

    def has_level(self, wanted: Level) -> bool:
        """Whether the member is complete and at least as safe as `wanted`."""
        return not self.incomplete_reason and _LEVELS.index(self.level) >= _LEVELS.index(wanted)


class LatestMember(NamedTuple):
    """The outcome of a search: a member and the verdict on it."""

    number: int
    name: bytes
    verdict: Completeness


ReadMember = Callable[[Entry], Awaitable[tuple[dict[bytes, MemberFile], dict[bytes, Entry]]]]
"""Return the regular files and the subdirectories of a directory by name; for a file, only the file itself under the name b"".

May leave out entries after the first incomplete file. Raises FileNotFoundError.
"""


async def find_newest(series: Series, siblings: Mapping[bytes, Entry], read: ReadMember[Entry], wanted: Level) -> LatestMember | None:
    """Return the newest complete member that has the level, else the newest member. Returns None without any.

    The caller checks `verdict.has_level(wanted)`.
    """
    newest = None
    for name in series.sort_newest_first(siblings):
        found = LatestMember(series.parse_number(name) or 0, name, judge_completeness(await _read_files(siblings[name], read)))
        if found.verdict.has_level(wanted):
            return found
        newest = newest or found
    return newest


async def _read_files(member: Entry, read: ReadMember[Entry]) -> dict[bytes, MemberFile]:
    """Return the regular files of a member by their paths below it, up to the directory with the first incomplete file."""
    files: dict[bytes, MemberFile] = {}
    todo = [(b"", member)]
    while todo:
        path, entry = todo.pop()
        try:
            found, directories = await read(entry)
        except FileNotFoundError:
            return {path: MemberFile(0, Level.NONE, "was deleted just now")}
        files |= {_join(path, name): file for name, file in found.items()}
        if any(file.incomplete_reason for file in found.values()):
            break
        todo += [(_join(path, name), child) for name, child in directories.items()]
    return files


def judge_completeness(files: Mapping[bytes, MemberFile]) -> Completeness:
    """Return the verdict on a member with these regular files, by their paths below it (b"" if the member is a file)."""
    level = min((file.level for file in files.values()), key=_LEVELS.index, default=Level.NONE)
    return Completeness(len(files), sum(file.size for file in files.values()), level, _find_first_reason(files))


def _find_first_reason(files: Mapping[bytes, MemberFile]) -> str:
    if not files:
        return "it holds no file"
    for path, file in sorted(files.items()):
        if file.incomplete_reason:
            return f"{path.decode(errors='backslashreplace') or 'it'} {file.incomplete_reason}"
    for directory, _, _ in sorted(path.rpartition(b"/") for path in files if _SHARD_NAME.fullmatch(path.rpartition(b"/")[2])):
        if (metadata := _join(directory, _METADATA_NAME)) not in files:
            return f"{metadata.decode(errors='backslashreplace')} is not there yet"
    return ""


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory and name else directory or name


def find_incomplete_reason(record: FileRecord, size: int) -> str:
    """Return why no checkpoint can rest on a regular file of `size` bytes; empty if it is sealed and has a living copy."""
    content = record.content
    if lifecycle.is_on_pfs(record) or (content is None and size == 0):
        return ""
    if content is not None and content.state in {ContentState.OPEN, ContentState.CLOSED}:
        return "is not sealed yet"
    readable = content is not None and content.state is ContentState.SEALED and lifecycle.level(record) is not Level.NONE
    return "" if readable else "has no copy that could be read"
