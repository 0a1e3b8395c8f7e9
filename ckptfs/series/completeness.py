"""The verdict on one member of a series: complete, or why not (N7, D6). Pure.

In doubt a member is incomplete: a late verdict is better than a wrong one. It is complete if nothing contradicts that:

1. Every file is sealed and readable, as the catalog says.
2. No file shows that it was not written to its end (`file_formats`).
3. Every directory has what its kinds ask for (`set_kinds`).
4. Where no file tells that all others are there, it has at least what the members before it have: names, and of files of unknown formats
   the sizes. A member without any before it must stay unchanged for a while instead.
"""

import itertools
import math
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from ckptfs import lifecycle
from ckptfs.lifecycle import FileRecord
from ckptfs.model import ContentState, Level, SeriesRule
from ckptfs.series import patterns, rules, set_kinds
from ckptfs.series.file_formats import LAMMPS_PART, FileFormat
from ckptfs.series.numbers_in_names import find_bare_gap
from ckptfs.series.set_kinds import DirectoryFacts, MemberFile, SetIndex, SetKind, text

COMPARED_MAX = 4
"""How many members before it a member is compared with."""
QUIET_S = 2.0
"""A set without any before it counts once nothing of it has changed for this long. A search waits that long."""
QUIET_RANKS_S = 30.0
"""The same, if its names count ranks: ranks finish at different times. No search waits that long."""
NEAR_SIZES = (9, 10)
"""Sizes of one file in several members vary by at most this ratio, or one of the files was cut."""

COUNTERPARTS_MAX = 256
"""How many names a file may have in another member: the numbers of a member may stand often in one path."""

T = TypeVar("T")
_NUMBER = re.compile(rb"([0-9]+)")
_TEXT_FILE = re.compile(rb".*\.(txt|ya?ml|md|log|csv|cfg|ini|toml|py|sh|xml|jsonl)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Completeness:
    """The verdict on a member.

    `level` is the lowest of its files' levels; `incomplete_reason` is empty if it is complete. `quiet_s`: the only reason is that it was
    changed less than this time ago and has no member before it.
    """

    files: int
    size: int
    level: Level
    incomplete_reason: str = ""
    quiet_s: float = 0.0

    def has_level(self, wanted: Level) -> bool:
        """Return True if the member is complete and at least as safe as `wanted`."""
        return not self.incomplete_reason and self.level.rank >= wanted.rank


@dataclass(frozen=True, slots=True)
class OlderMember:
    """A member before the one that is judged: the sizes of its files by path."""

    name: str
    numbers: tuple[int, ...]
    sizes: Mapping[bytes, int]


@dataclass(frozen=True)
class MemberFacts:
    """All that is known of a member. Paths are below it, and b"" if the member is a single file.

    `formats` and `indexes` are what its files show of themselves.
    """

    numbers: tuple[int, ...]
    files: Mapping[bytes, MemberFile]
    formats: Mapping[bytes, FileFormat] = field(default_factory=dict)
    indexes: Mapping[bytes, SetIndex] = field(default_factory=dict)
    name: bytes = b""
    rule: SeriesRule | None = None
    mark: MemberFile | None = None  # The file beside it that the rule says is written last.
    has_parts: bool = False  # Its files differ in the number of a part. Its name is that of the lowest one.
    has_bare_parts: bool = False  # No word says that this number counts ranks.

    @property
    def is_single_file(self) -> bool:
        return set(self.files) == {b""}

    @cached_property
    def directories(self) -> dict[bytes, DirectoryFacts]:
        """Return every directory of the member by its path; b"" is the member itself."""
        paths = {above for path in self.files for above in _list_directories(path)}
        directories: dict[bytes, set[bytes]] = defaultdict(set)
        for path in paths - {b""}:
            directory, _, name = path.rpartition(b"/")
            directories[directory].add(name)
        files, indexes, formats = _split_by_directory(self.files), _split_by_directory(self.indexes), _split_by_directory(self.formats)
        return {
            path: DirectoryFacts(
                files[path], frozenset(directories[path]), indexes[path], formats[path], self._get_named_below(path, indexes[path])
            )
            for path in sorted(paths)
        }

    def _get_named_below(self, directory: bytes, indexes: Mapping[bytes, SetIndex]) -> dict[bytes, MemberFile]:
        prefix = directory + b"/" if directory else b""
        named = {name for index in indexes.values() for name in index.files if b"/" in name}
        return {name: self.files[prefix + name] for name in named if prefix + name in self.files}

    @cached_property
    def kinds(self) -> dict[bytes, list[SetKind]]:
        """Return the kinds of each directory."""
        return {path: set_kinds.list_kinds(directory) for path, directory in self.directories.items()}

    @cached_property
    def closed_directories(self) -> dict[bytes, list[SetKind]]:
        """Return the directories in which a file says that all others are present.

        The values are the kinds of that file.
        """
        closing = {path: [kind for kind in kinds if kind.is_closed(self.directories[path])] for path, kinds in self.kinds.items()}
        return {path: kinds for path, kinds in closing.items() if kinds}

    def is_vouched_for(self, path: bytes) -> bool:
        """Return whether the marks of a kind tell that no such file is missing."""
        directories = _list_directories(path)
        closing = [kind for directory in directories for kind in self.closed_directories.get(directory, ())]
        if any(kind.awaits_all for kind in closing):
            return True
        name = path.rpartition(b"/")[2]
        is_covered = any(kind.covers.fullmatch(name) for kind in self.kinds.get(directories[0], ()))
        # The files of a member tell how many there must be of their own sort, and nothing of a sort that is not begun.
        return is_covered and _mask_numbers(path) in self._sorts

    @cached_property
    def _sorts(self) -> set[bytes]:
        return set(map(_mask_numbers, self.files))

    def is_size_right(self, path: bytes) -> bool:
        """Return whether a file shows its end itself, or a kind tells the sizes."""
        is_whole = self.formats.get(path, FileFormat()).is_whole
        directories = _list_directories(path)
        return is_whole or any(kind.tells_sizes for one in directories for kind in self.closed_directories.get(one, ()))


def _split_by_directory(found: Mapping[bytes, T]) -> dict[bytes, dict[bytes, T]]:
    """Return what is known of paths by directory and name."""
    split: dict[bytes, dict[bytes, T]] = defaultdict(dict)
    for path, one in found.items():
        directory, _, name = path.rpartition(b"/")
        split[directory][name] = one
    return split


def _mask_numbers(path: bytes) -> bytes:
    return _NUMBER.sub(b"0", path)


def _list_directories(path: bytes) -> list[bytes]:
    """Return the directories above a path, the nearest first."""
    found = [path.rpartition(b"/")[0]]
    while found[-1]:
        found.append(found[-1].rpartition(b"/")[0])
    return found


def judge(member: MemberFacts, older: Sequence[OlderMember], age_s: float) -> Completeness:
    """Return the verdict on a member.

    `older`: those before it, the newest first. `age_s`: the time since its last change.
    """
    reason, quiet_s = find_reason(member.files) or _find_flaw(member), 0.0
    if member.rule is not None and member.rule.says_complete:
        reason = reason or _find_rule_gap(member, member.rule, age_s)
        quiet_s = member.rule.quiet_s if reason and member.rule.quiet_s > age_s else 0.0
        return replace(judge_set(member.files), incomplete_reason=reason, quiet_s=quiet_s)
    reason = reason or _find_gap(member)
    if not reason and not older:
        quiet_s = _get_quiet_s(member)
        if quiet_s <= age_s:
            quiet_s = 0.0
        elif quiet_s == math.inf:
            reason = "Megatron has not named it in latest_checkpointed_iteration.txt yet; `ckptfs commit` makes it a set without that"
        else:
            reason = f"there is none before it to compare it with, and it was changed {age_s:.0f} s ago; accepted: {quiet_s:g} s"
    if not reason:
        named, shortfall = _find_named_gap(member, older), _find_shortfall(member, older)
        is_else_complete = named and not shortfall and age_s >= QUIET_S and not any(set_kinds.TRAINER_END in one.sizes for one in older)
        reason = f"{named}; if no Trainer writes here, `ckptfs commit` makes it a set" if is_else_complete else named or shortfall
    return replace(judge_set(member.files), incomplete_reason=reason, quiet_s=quiet_s)


def judge_set(files: Mapping[bytes, MemberFile]) -> Completeness:
    """Return the verdict on files that are a set: it was complete once, or a user says so.

    Only the catalog can contradict.
    """
    level = min((file.level for file in files.values()), key=lambda level: level.rank, default=Level.NONE)
    return Completeness(len(files), sum(file.size for file in files.values()), level, find_reason(files))


def is_comparable(member: MemberFacts) -> bool:
    """Return whether the verdict depends on the members before it."""
    if member.rule is not None and member.rule.says_complete:
        return False
    if member.is_single_file:
        return not member.is_size_right(b"")
    return not any(kind.tells_sizes and kind.awaits_all for kind in member.closed_directories.get(b"", ()))


def find_reason(files: Mapping[bytes, MemberFile]) -> str:
    """Return why the catalog calls these files incomplete; empty if it does not."""
    if not files:
        return "it holds no file"
    return next((f"{text(path) or 'it'} {file.incomplete_reason}" for path, file in sorted(files.items()) if file.incomplete_reason), "")


def _find_flaw(member: MemberFacts) -> str:
    for path, file in sorted(member.files.items()):
        if is_left_over(member, path):
            continue
        if patterns.is_temporary(path.rpartition(b"/")[2]):
            return f"{text(path)} is a temporary name; its writer did not finish it"
        if flaw := member.formats.get(path, FileFormat()).flaw:
            return f"{text(path) or 'it'} {flaw}"
        if member.is_single_file and not file.size:
            return "it is empty"
        if member.is_single_file and member.formats.get(path, FileFormat()).name == LAMMPS_PART:
            return "it is the part of one process of LAMMPS, and the file of the name with base is missing"
    return "" if any(file.size for file in member.files.values()) else "all its files are empty"


def is_left_over(member: MemberFacts, path: bytes) -> bool:
    """Return whether a file of a temporary name lies in a directory that is complete without it."""
    is_ended = member.mark is not None or (member.rule is not None and os.fsencode(member.rule.last) in member.files)
    is_closed = is_ended or any(directory in member.closed_directories for directory in _list_directories(path))
    return is_closed and patterns.is_temporary(path.rpartition(b"/")[2])


def _find_gap(member: MemberFacts) -> str:
    if member.is_single_file:
        return ""
    if member.has_parts and member.name not in member.files:
        return f"{text(member.name)} is missing"
    if member.has_bare_parts and (missing := find_bare_gap(member.files, member.name)):
        return f"{text(missing)} is missing"
    for path, directory in member.directories.items():
        for kind in member.kinds[path]:
            if gap := kind.find_gap(directory):
                return f"{text(path)}/{gap}" if path else gap
    return ""


def _get_quiet_s(member: MemberFacts) -> float:
    """Return how long a member without any before it must be left alone.

    Returns infinity if a file beside it must name it.
    """
    if any(set_kinds.MEGATRON_MODEL in directory.files for directory in member.directories.values()):
        return math.inf
    closing = member.closed_directories.get(b"", ())
    awaits_own = any(kind.awaits_own for kind in closing)
    awaited = [path for path in member.files if not member.is_vouched_for(path) and not (awaits_own and not _is_of_rank(path))]
    if member.is_single_file or (closing and not awaited):
        return 0.0
    counts_ranks = member.has_bare_parts or any(map(set_kinds.has_unknown_count, member.directories.values()))
    return QUIET_RANKS_S if counts_ranks else QUIET_S


def _is_of_rank(path: bytes) -> bool:
    return any(map(set_kinds.is_of_rank, path.split(b"/")))


def _find_rule_gap(member: MemberFacts, rule: SeriesRule, age_s: float) -> str:
    if member.mark is not None and member.mark.incomplete_reason:
        return f"{rule.last} {member.mark.incomplete_reason}"
    mark_ns = member.mark.mtime_ns if member.mark is not None else None
    return rules.find_gap(rule, {path: file.mtime_ns for path, file in member.files.items()}, mark_ns, age_s)


def _find_named_gap(member: MemberFacts, older: Sequence[OlderMember]) -> str:
    """Return the gap that the name of the member shows; empty if there is none.

    It counts unless the two members before have exactly the files of this one.
    """
    if member.is_single_file or b"" in member.closed_directories or _is_usual(member, older):
        return ""
    return set_kinds.find_named_gap(member.name, member.directories[b""])


# --- comparison with the members before -------------------------------------------------------------------------------


def _find_shortfall(member: MemberFacts, older: Sequence[OlderMember]) -> str:
    """Return what the member lacks of what those before it have."""
    if not older or not is_comparable(member):
        return ""
    # Fewer files than before are accepted if the two members before have exactly these: the job may run on fewer nodes.
    for one in () if _is_usual(member, older) else older:
        if path := _find_missing(member, one):
            is_renamed = len(_list_counterparts(member, one, path)) > 1
            return f"{f'no file is like {text(path)}' if is_renamed else f'{text(path)} is missing'}, which {one.name} has"
    return _find_short_file(member, older)


def _is_usual(member: MemberFacts, older: Sequence[OlderMember]) -> bool:
    """Return whether the two members before have exactly the files of this one."""
    return len(older) > 1 and all(not _find_missing(member, one) and _has_no_more(member, one) for one in older[:2])


def _find_missing(member: MemberFacts, older: OlderMember) -> bytes:
    """Return the first file of an older member that this one should have and lacks."""
    wanted = (path for path in sorted(older.sizes) if not patterns.is_temporary(path.rpartition(b"/")[2]))
    return next((path for path in wanted if not member.is_vouched_for(path) and not _find_same(member, older, path)), b"")


def _has_no_more(member: MemberFacts, older: OlderMember) -> bool:
    mine = {path for path in member.files if not member.is_vouched_for(path)}
    theirs = {same for path in older.sizes for same in _find_same(member, older, path)}
    return mine <= theirs


def _find_same(member: MemberFacts, older: OlderMember, path: bytes) -> set[bytes]:
    """Return the files of this member that correspond to `path` in an older one."""
    return _list_counterparts(member, older, path) & member.files.keys()


def _list_counterparts(member: MemberFacts, older: OlderMember, path: bytes) -> set[bytes]:
    """Return the names that a file of an older member may have in this one.

    Each number in its path is the same, or is one of the older member and becomes that of this one.
    """
    pieces = [[piece] for piece in _NUMBER.split(path)]
    for piece in pieces[1::2]:
        number, width = int(piece[0]), len(piece[0])
        piece[:0] = [b"%0*d" % (width, new) for old, new in zip(older.numbers, member.numbers, strict=False) if old == number]
    return {b"".join(one) for one in itertools.islice(itertools.product(*pieces), COUNTERPARTS_MAX)}


def _find_short_file(member: MemberFacts, older: Sequence[OlderMember]) -> str:
    """Return the first file of an unknown format that is smaller than it should be."""
    before: dict[bytes, list[int]] = defaultdict(list)
    for one in older:
        for path, size in one.sizes.items():
            for same in _find_same(member, one, path):
                before[same].append(size)
    for path, file in sorted(member.files.items()):
        sizes = before[path]
        # A text may be of any length, but is not empty if it never was.
        if member.is_size_right(path) or (_TEXT_FILE.fullmatch(path) and (file.size or 0 in sizes)):
            continue
        if not is_plausible_size(file.size, sizes):
            return f"{text(path) or 'it'} has {file.size} bytes, fewer than before ({max(sizes)}), and its format does not tell its end"
    return ""


def is_plausible_size(size: int, older: Sequence[int]) -> bool:
    """Return whether a file may be whole, by its sizes in older members.

    If those vary, it may be smaller than the smallest by the share in `NEAR_SIZES`.
    """
    part, whole = NEAR_SIZES
    near = [one for one in older if one * whole >= max(older) * part]
    if len(set(near)) > 1:
        return size * whole >= min(near) * part
    return size >= min(near, default=0)


def find_incomplete_reason(record: FileRecord, size: int) -> str:
    """Return why no checkpoint can rest on a regular file of `size` bytes.

    Returns an empty string if the file is sealed and has a living copy.
    """
    content = record.content
    if lifecycle.is_on_pfs(record) or (content is None and size == 0):
        return ""
    if content is not None and content.state in {ContentState.OPEN, ContentState.CLOSED}:
        return "is not sealed yet"
    readable = content is not None and content.state is ContentState.SEALED and lifecycle.level(record) is not Level.NONE
    return "" if readable else "has no copy that could be read"
