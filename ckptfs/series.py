"""Pure: which sibling names are one series, and whether a member of it is complete.

A series are siblings whose names differ in one number only (T5). A member is complete when all its files are sealed and can be read (N7),
and when a directory that looks like one of torch.distributed.checkpoint has its `.metadata` (T6). Who wants the newest looks at
`newest_first`, one after the other, until `judged` finds one complete (N2).
If we die here: nothing happens, nothing is remembered.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
_LEVELS = list(Level)


@dataclass(frozen=True, slots=True)
class Series:
    """The names `before` NUMBER `after`."""

    prefix: bytes
    suffix: bytes

    @property
    def name(self) -> bytes:
        """With the number left out: "step_*"."""
        return self.prefix + WILDCARD + self.suffix

    @property
    def is_step_count(self) -> bool:
        """Whether the word before the number says so; "run*" may as well count runs."""
        return _STEP_WORD.fullmatch(self.prefix) is not None

    def parse_number(self, name: bytes) -> int | None:
        """The number of a member; None for any other name."""
        if not (name.startswith(self.prefix) and name.endswith(self.suffix)):
            return None
        middle = name[len(self.prefix) : len(name) - len(self.suffix)]
        return int(middle) if _NUMBER.fullmatch(middle) else None

    def sort_newest_first(self, names: Iterable[bytes]) -> list[bytes]:
        """Its members among these names. Of two with one number ("1" and "01") the shorter name is the newer one, always."""
        found = [(number, -len(name), name) for name in names if (number := self.parse_number(name)) is not None]
        return [name for _, _, name in sorted(found, reverse=True)]


def parse(name: bytes) -> Series | None:
    """The series of a name with one `*`; None for any other name."""
    before, mark, after = name.partition(WILDCARD)
    return Series(before, after) if mark and WILDCARD not in after else None


def find_series(name: bytes, siblings: Iterable[bytes]) -> Series | None:
    """The series to which a name belongs: of its numbers the one that differs among most siblings, the last one where that is even."""
    found = _list_candidates(name)
    return max(found, key=lambda one: (sum(one.parse_number(sibling) is not None for sibling in siblings), len(one.prefix)), default=None)


def list_series(names: Iterable[bytes]) -> list[Series]:
    """The series in a directory, by name. Names that have a number and no sibling count only where there is no other series, and those
    that look like parts of one checkpoint not at all.
    """
    names = [name for name in names if not _PART_NAME.fullmatch(name)]
    sizes = Counter(reading for name in names for reading in _list_candidates(name))
    found = {max(readings, key=lambda one: (sizes[one], len(one.prefix))) for name in names if (readings := _list_candidates(name))}
    return sorted({one for one in found if sizes[one] > 1} or found, key=lambda one: one.name)


def _list_candidates(name: bytes) -> list[Series]:
    return [Series(name[: found.start()], name[found.end() :]) for found in _NUMBER.finditer(name)]


# --- complete or not --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberFile:
    """What counts of a regular file; `lacks`: see there."""

    size: int
    level: Level
    incomplete_reason: str = ""


DELETED = MemberFile(0, Level.NONE, "was deleted just now")


@dataclass(frozen=True, slots=True)
class Completeness:
    """What a member is: its files, their bytes, and the level that all of them have; `lacks` is empty when it is complete."""

    files: int
    size: int
    level: Level
    incomplete_reason: str = ""

    def has_level(self, wanted: Level) -> bool:
        """Whether it is complete, and at least as safe as `wanted`."""
        return not self.incomplete_reason and _LEVELS.index(self.level) >= _LEVELS.index(wanted)


def find_incomplete_reason(record: FileRecord, size: int) -> str:
    """Why no checkpoint can rest on a regular file of that size; empty when it is sealed, and can be read from a copy that is alive."""
    content = record.content
    if lifecycle.is_on_pfs(record) or (content is None and size == 0):
        return ""
    if content is not None and content.state in {ContentState.OPEN, ContentState.CLOSED}:
        return "is not sealed yet"
    readable = content is not None and content.state is ContentState.SEALED and lifecycle.level(record) is not Level.NONE
    return "" if readable else "has no copy that could be read"


def judge_completeness(files: Mapping[bytes, MemberFile]) -> Completeness:
    """What a member is whose regular files these are, by their paths below it (a member that is a file: b"")."""
    level = min((file.level for file in files.values()), key=_LEVELS.index, default=Level.NONE)
    return Completeness(len(files), sum(file.size for file in files.values()), level, _find_first_reason(files))


def _find_first_reason(files: Mapping[bytes, MemberFile]) -> str:
    if not files:
        return "it holds no file"
    for path, file in sorted(files.items()):
        if file.incomplete_reason:
            return f"{path.decode(errors='backslashreplace') or 'it'} {file.incomplete_reason}"
    for directory in sorted({_split_path(path)[0] for path in files if _SHARD_NAME.fullmatch(_split_path(path)[1])}):
        if directory + _METADATA_NAME not in files:
            return f"{directory.decode(errors='backslashreplace')}.metadata is not there yet"
    return ""


def _split_path(path: bytes) -> tuple[bytes, bytes]:
    """(directory with its slash, name)."""
    directory, slash, name = path.rpartition(b"/")
    return directory + slash, name
