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
from ckptfs.lifecycle import Record
from ckptfs.model import ContentState, Level

MARK = b"*"
"""Stands for the number in the name of a series."""
_NUMBER = re.compile(rb"[0-9]+")
_SHARD = re.compile(rb"__[0-9]+_[0-9]+\.distcp")
_SHARDS_DONE = b".metadata"
_PART = re.compile(rb"__[0-9]+_[0-9]+\.distcp|.*[0-9]-of-[0-9].*|.*(rank|shard)[-_.]?[0-9].*", re.IGNORECASE | re.DOTALL)
"""Names whose numbers count parts of one checkpoint."""
_STEP = re.compile(rb".*(step|ckpt|chk|checkpoint|iter|iteration|epoch)[-_.=]?", re.IGNORECASE | re.DOTALL)
_LEVELS = list(Level)


@dataclass(frozen=True, slots=True)
class Series:
    """The names `before` NUMBER `after`."""

    before: bytes
    after: bytes

    @property
    def name(self) -> bytes:
        """With the number left out: "step_*"."""
        return self.before + MARK + self.after

    @property
    def counts_steps(self) -> bool:
        """Whether the word before the number says so; "run*" may as well count runs."""
        return _STEP.fullmatch(self.before) is not None

    def number(self, name: bytes) -> int | None:
        """The number of a member; None for any other name."""
        if not (name.startswith(self.before) and name.endswith(self.after)):
            return None
        middle = name[len(self.before) : len(name) - len(self.after)]
        return int(middle) if _NUMBER.fullmatch(middle) else None

    def newest_first(self, names: Iterable[bytes]) -> list[bytes]:
        """Its members among these names. Of two with one number ("1" and "01") the shorter name is the newer one, always."""
        found = [(number, -len(name), name) for name in names if (number := self.number(name)) is not None]
        return [name for _, _, name in sorted(found, reverse=True)]


def parsed(name: bytes) -> Series | None:
    """The series of a name with one `*`; None for any other name."""
    before, mark, after = name.partition(MARK)
    return Series(before, after) if mark and MARK not in after else None


def of(name: bytes, siblings: Iterable[bytes]) -> Series | None:
    """The series to which a name belongs: of its numbers the one that differs among most siblings, the last one where that is even."""
    found = _readings(name)
    return max(found, key=lambda one: (sum(one.number(sibling) is not None for sibling in siblings), len(one.before)), default=None)


def among(names: Iterable[bytes]) -> list[Series]:
    """The series in a directory, by name. Names that have a number and no sibling count only where there is no other series, and those
    that look like parts of one checkpoint not at all.
    """
    names = [name for name in names if not _PART.fullmatch(name)]
    sizes = Counter(reading for name in names for reading in _readings(name))
    found = {max(readings, key=lambda one: (sizes[one], len(one.before))) for name in names if (readings := _readings(name))}
    return sorted({one for one in found if sizes[one] > 1} or found, key=lambda one: one.name)


def _readings(name: bytes) -> list[Series]:
    return [Series(name[: found.start()], name[found.end() :]) for found in _NUMBER.finditer(name)]


# --- complete or not --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class File:
    """What counts of a regular file; `lacks`: see there."""

    size: int
    level: Level
    lacks: str = ""


DELETED = File(0, Level.NONE, "was deleted just now")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a member is: its files, their bytes, and the level that all of them have; `lacks` is empty when it is complete."""

    files: int
    size: int
    level: Level
    lacks: str = ""

    def has(self, wanted: Level) -> bool:
        """Whether it is complete, and at least as safe as `wanted`."""
        return not self.lacks and _LEVELS.index(self.level) >= _LEVELS.index(wanted)


def lacks(record: Record, size: int) -> str:
    """Why no checkpoint can rest on a regular file of that size; empty when it is sealed, and can be read from a copy that is alive."""
    content = record.content
    if lifecycle.published_whole(record) or (content is None and size == 0):
        return ""
    if content is not None and content.state in {ContentState.OPEN, ContentState.CLOSED}:
        return "is not sealed yet"
    readable = content is not None and content.state is ContentState.SEALED and lifecycle.level(record) is not Level.NONE
    return "" if readable else "has no copy that could be read"


def judged(files: Mapping[bytes, File]) -> Verdict:
    """What a member is whose regular files these are, by their paths below it (a member that is a file: b"")."""
    level = min((file.level for file in files.values()), key=_LEVELS.index, default=Level.NONE)
    return Verdict(len(files), sum(file.size for file in files.values()), level, _lacking(files))


def _lacking(files: Mapping[bytes, File]) -> str:
    if not files:
        return "it holds no file"
    for path, file in sorted(files.items()):
        if file.lacks:
            return f"{path.decode(errors='backslashreplace') or 'it'} {file.lacks}"
    for directory in sorted({_parted(path)[0] for path in files if _SHARD.fullmatch(_parted(path)[1])}):
        if directory + _SHARDS_DONE not in files:
            return f"{directory.decode(errors='backslashreplace')}.metadata is not there yet"
    return ""


def _parted(path: bytes) -> tuple[bytes, bytes]:
    """(directory with its slash, name)."""
    directory, slash, name = path.rpartition(b"/")
    return directory + slash, name
