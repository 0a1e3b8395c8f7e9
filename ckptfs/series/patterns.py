"""Names: series of checkpoints among siblings, their order, and files that form one member (T5).

What each number of a name means decides (`numbers_in_names`):

- a counter is a `*` in the name of the series, whether it differs or not; an epoch decides the order before the steps within it;
- files that differ in the number of a part only belong to one member;
- names that differ in a label are never one series, unless a user writes that pattern;
- a metric is a `*`, too, and decides nothing about the order.

The numbers of a date count together; a name that is a decimal is one number. Of other numbers, the one that differs among siblings
counts. `X.cpt` and `X_prev.cpt` are a series of two. Files that a program restarts from under another name (`file_groups`) are one member
of that name. Lightning's `X-v1.ckpt` comes after `X.ckpt`. Temporary names are none.

Invariant: every function takes time in proportion to the number of names, even if each of them is a series.
"""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from ckptfs.model import SeriesRule
from ckptfs.series import rules
from ckptfs.series.file_groups import find_groups, replace_group
from ckptfs.series.numbers_in_names import (
    EPOCH,
    NUMBER,
    NumberRole,
    SplitName,
    find_bare_part,
    get_counter_class,
    get_roles,
    group_by_texts,
    join,
    list_dates,
    list_parts,
    mask_parts,
    replace_number,
    split,
)
from ckptfs.series.rules import WILDCARD

PREVIOUS_SUFFIX = b"_prev"
PAIRED_EXTENSION = b".cpt"
_MDRUN_TEMPORARY = re.compile(rb"(.+)_step[0-9]+\.cpt", re.DOTALL)
"""GROMACS saves under this name, renames X to X_prev, and then this to X. With -cpnum it keeps the name, and there is no X."""
_SHARD_EXTENSION = b".distcp"
_LIGHTNING_EXTENSION = b".ckpt"
_NEMO_ENDING = re.compile(rb"(-EMA)?(\.ckpt|\.nemo)?$")
_TEMPORARY = re.compile(
    rb"^\.?tmp[-_.]|[-_.]te?mp$|\.tmp([-_.]|\w*$)|\.tempstate\d|\.orbax-checkpoint-tmp|\.dirty(\.|$)|\.bak(-\d+)?$"
    rb"|\.(part|partial|incomplete|inprogress|crdownload|swp)$|~$|^#|\.ckptfs-|-unfinished$",
    re.IGNORECASE,
)
_SHAPE = bytes.maketrans(b"123456789", b"000000000")
"""Makes the names of thousands of checkpoints a few shapes. What `_TEMPORARY` finds depends on the shape only."""
_SIDE_PRODUCT = re.compile(rb"\.(py|sh|log|out|err|csv|md|distcp)$|tfevents", re.IGNORECASE)
"""Numbered files that are no checkpoints; a pattern may still name them."""
_FRACTION_DIGITS = 18
Order = tuple[tuple[int, ...], tuple[int, ...]]
"""Of two members of a series, the newer one has the greater value."""


@dataclass(frozen=True)
class Series:
    """All names that consist of these texts with a number between each two.

    One text is a name that is written again and again; then `previous` is the name that the former file gets, empty if there is none.
    """

    texts: tuple[bytes, ...]
    previous: bytes = b""

    @property
    def name(self) -> bytes:
        """Return the pattern that matches the members: "step_*"."""
        return WILDCARD.join(self.texts)

    @property
    def is_step_count(self) -> bool:
        """Return True if the word before a number says that it counts steps.

        The number in "run*" may count runs.
        """
        return len(self.texts) == 1 or self.rule is not None or NumberRole.COUNTER in get_roles(self.texts)

    @property
    def counts_steps(self) -> bool:
        """Return True if the first of a member's numbers is a step, not an epoch."""
        return 0 in self._classes

    @property
    def rule(self) -> SeriesRule | None:
        """Return the rule of the configuration for the series, if any."""
        return rules.get_rule(self.name)

    def parse_numbers(self, name: bytes) -> tuple[int, ...] | None:
        """Return the numbers of a member, the one that counts steps first. Returns None for any other name.

        Sets are recorded with them.
        """
        if len(self.texts) == 1:
            return (1,) if name == self.texts[0] else (0,) if self.previous and name == self.previous else None
        found = self._regex.fullmatch(name)
        if found is None:
            return None
        numbers = tuple(int(found[group]) for group in self._steps_first)
        more = found.groupdict().get("more")
        return (*numbers, int(more if any(self.texts) else more.ljust(_FRACTION_DIGITS, b"0")[:_FRACTION_DIGITS])) if more else numbers

    def get_order(self, numbers: tuple[int, ...]) -> Order:
        """Return what is greater for a newer member, from its numbers.

        An epoch decides before the steps within it. Metrics decide nothing.
        """
        counting = tuple(one for position, one in enumerate(numbers) if position not in self._metrics) if self._metrics else numbers
        return numbers[self._epochs], counting

    @cached_property
    def _metrics(self) -> frozenset[int]:
        """Where `parse_numbers` has the metrics."""
        roles = get_roles(self.texts)
        return frozenset(position for position, group in enumerate(self._steps_first) if roles[group - 1] is NumberRole.METRIC)

    @cached_property
    def _epochs(self) -> slice:
        """Where `parse_numbers` has the epochs."""
        first = sum(one < EPOCH for one in self._classes)
        return slice(first, first + self._classes.count(EPOCH))

    @cached_property
    def _regex(self) -> re.Pattern[bytes]:
        """The numbers are groups; `more` is the version of Lightning, or a fraction."""
        pattern = rb"([0-9]+)".join(map(re.escape, self.texts))
        if not any(self.texts):
            pattern += rb"(?:\.(?P<more>[0-9]+))?"
        elif self.texts[-1].endswith(_LIGHTNING_EXTENSION):
            pattern = pattern.removesuffix(re.escape(_LIGHTNING_EXTENSION)) + rb"(?:-v(?P<more>[0-9]+)|-last)?\.ckpt"
        return re.compile(pattern, re.DOTALL)

    @cached_property
    def _steps_first(self) -> list[int]:
        return sorted(range(1, len(self.texts)), key=lambda group: (self._classes[group - 1], group))

    @cached_property
    def _classes(self) -> list[int]:
        return list(itertools.starmap(get_counter_class, itertools.pairwise(self.texts)))


class Member(NamedTuple):
    """One member of a series."""

    numbers: tuple[int, ...]
    name: bytes  # What a program is given.
    entry: bytes  # The name that the series matches.
    files: tuple[bytes, ...]
    has_parts: bool = False  # `files` differ in the number of a part.
    has_bare_parts: bool = False  # They do so without a word that says so.


def is_temporary(name: bytes) -> bool:
    """Return whether programs use such names for what they have not finished."""
    return _is_temporary_shape(name.translate(_SHAPE))


@lru_cache(maxsize=4096)
def _is_temporary_shape(shape: bytes) -> bool:
    return _TEMPORARY.search(shape) is not None


def build_unfinished_mark(entry: bytes) -> bytes:
    """Return the name of the file that NeMo keeps beside a checkpoint until it is complete."""
    return _NEMO_ENDING.sub(b"", entry) + b"-unfinished"


def parse(name: bytes) -> Series | None:
    """Return the series of a pattern with a `*` for each number, or of a name with a rule.

    Returns None for any other name.
    """
    texts = tuple(name.split(WILDCARD))
    return Series(texts) if (len(texts) > 1 and all(texts[1:-1])) or rules.get_rule(name) is not None else None


def _list_ruled() -> list[Series]:
    return [one for pattern in rules.list_ruled_patterns() if (one := parse(pattern)) is not None]


def find_series(name: bytes, siblings: Iterable[bytes]) -> Series | None:
    """Return the series to which a name with a number belongs among its siblings.

    The file of a group belongs to that of the group.
    """
    names = {*siblings, name}
    groups = find_groups(names)
    for one in (*_list_ruled(), *_list_pairs(names)):
        if one.parse_numbers(name) is not None:
            return one
    entry = groups.get(name, name)
    if entry in groups.values() and not split(entry).numbers:
        return Series((entry,))
    texts = split(entry).texts
    return _choose_series({one for one in (names - groups.keys()) | {*groups.values()} if split(one).texts == texts}).get(entry)


def list_series(names: Iterable[bytes]) -> list[Series]:
    """Return the series in a directory, sorted by name.

    A name without any that is alike counts if its number is a counter, or if there is no other series. Names of parts of one checkpoint,
    of experiments and of side products, and hidden names, never count. Of series that differ in a part only, the lowest part counts.
    """
    names = {name for name in names if not is_temporary(name) and not name.startswith(b".")}
    ruled = {one: {name for name in names if one.parse_numbers(name) is not None} for one in _list_ruled()}
    names -= {name for members in ruled.values() for name in members} | {*rules.find_marks(names).values()}
    groups = find_groups(names)
    fixed = [*_list_pairs(names), *(Series((name,)) for name in {*groups.values()} if not split(name).numbers)]
    names -= _list_mdrun_temporaries(names, fixed) | groups.keys() | {name for one in fixed for name in (one.name, one.previous)}
    chosen = _choose_series(names | {*groups.values()})
    found = {name: one for name, one in chosen.items() if not _SIDE_PRODUCT.search(name) and not _is_part_or_label(one)}
    alike = Counter(split(name).texts for name in chosen)
    large = {one for name, one in found.items() if one.is_step_count or alike[split(name).texts] > 1}
    large |= {*fixed} | {one for one in ruled if ruled[one]}
    return sorted(_leave_out_parts(large or {*found.values()}, chosen), key=lambda one: one.name)


def _leave_out_parts(found: Iterable[Series], names: Iterable[bytes]) -> Iterable[Series]:
    """Leave out series that differ from another one in a part only: their members are the same files."""
    bare = {texts: find_bare_part(texts, group) for texts, group in group_by_texts(names).items()}
    lowest: dict[bytes, Series] = {}
    for one in sorted(found, key=lambda one: (len(one.name), one.name)):
        name = one.name.replace(WILDCARD, b"0")
        lowest.setdefault(mask_parts(name, bare.get(split(name).texts)), one)
    return lowest.values()


def list_members(series: Series, names: Iterable[bytes]) -> list[Member]:
    """Return the members of a series among the names of a directory, newest first.

    Names do not tell which of several with equal counters is newer; the shorter one comes first.
    """
    names = {name for name in names if not is_temporary(name)}
    groups = find_groups(names)
    files: dict[bytes, list[bytes]] = defaultdict(list)
    for name, group in groups.items():
        files[group].append(name)
    numbers = {entry: one for entry in (*names, *files) if (one := series.parse_numbers(entry)) is not None}
    parts = {} if series.rule is not None else _group_parts(series, names, numbers)
    in_parts = {name for one in parts.values() for name in one.files}
    members = [Member(series.parse_numbers(entry) or (), entry, entry, one.files, True, one.are_bare) for entry, one in parts.items()]
    for entry in numbers.keys() - in_parts:
        name = groups.get(entry, entry)
        members.append(Member(numbers[entry], name, entry, tuple(sorted(files.get(name) or (entry,)))))
    return sorted(members, key=lambda one: (series.get_order(one.numbers), -len(one.entry), one.entry), reverse=True)


class _Parts(NamedTuple):
    """Names that differ in parts only; whether these are bare numbers."""

    files: tuple[bytes, ...]
    are_bare: bool


def _group_parts(series: Series, names: Iterable[bytes], entries: Collection[bytes]) -> dict[bytes, _Parts]:
    """Return the parts of each member that has any, by the name of its lowest part, which may be missing.

    The lowest part is that of all members.
    """
    found: dict[bytes, _Parts] = {}
    own_texts = {split(name).texts for name in names if name in entries}
    for texts, group in group_by_texts(name for name in names if split(name).texts in own_texts).items():
        bare = find_bare_part(texts, group)
        if not (positions := list_parts(texts, bare)):
            continue
        members: dict[bytes, list[bytes]] = defaultdict(list)
        for name in group:
            members[mask_parts(name, bare)].append(name)
        own = (split(name).numbers for name in group if name in entries)
        lowest = min(own, key=lambda numbers: [int(numbers[one]) for one in positions])
        for alike in members.values():
            mine = min((name for name in alike if name in entries), default=b"")
            entry = replace_number(alike[0], positions[0], lowest[positions[0]]) if len(positions) == 1 else mine
            if series.parse_numbers(entry) is not None:
                found[entry] = _Parts(tuple(sorted(alike)), bare is not None)
    return found


def choose_part(series: Series, names: Collection[bytes]) -> Series:
    """Return the series of one part if a * of a pattern stands for all parts.

    Of `step*_rank*.pt` it is `step*_rank0.pt`.
    """
    members = list_members(series, names) if len(series.texts) > 2 and series.rule is None else []
    is_group = bool(members) and (members[0].has_parts or members[0].files != (members[0].entry,))
    return find_series(members[0].entry, names) or series if is_group else series


def find_last_names(series: Series, names: Iterable[bytes]) -> list[bytes]:
    """Return the names under which programs keep their newest state beside a series.

    They are like `last.ckpt`, `checkpoint_last.pt`, `latest.pth`.
    """
    _, dot, extension = series.texts[-1].partition(b".")
    if not dot:
        return []
    prefix = rb"(?:%s[-_.]?)?" % re.escape(series.texts[0].rstrip(b"-_.="))
    wanted = re.compile(prefix + rb"(?:last|latest)(?:-v[0-9]+)?" + re.escape(dot + extension), re.DOTALL)
    return sorted(name for name in names if wanted.fullmatch(name))


def suggest_series(pattern: bytes, names: Iterable[bytes]) -> list[Series]:
    """Return the series that may be meant by a pattern that matches nothing.

    If a shell would match members of some series, only these are returned.
    """
    found = list_series(names)
    glob = re.compile(b".*".join(map(re.escape, pattern.split(WILDCARD))) + b".*", re.DOTALL)
    return [one for one in found if glob.fullmatch(one.name)] or found


def get_place(path: bytes) -> bytes:
    """Return the path without the numbers that differ between checkpoints.

    These are the counters. In a path without any, all numbers go but those in names of parts.
    """
    names = [split(one) for one in path.split(b"/")]
    has_counter = any(NumberRole.COUNTER in one.roles for one in names)
    return b"/".join(_get_place_of_name(one, has_counter) for one in names)


def _get_place_of_name(name: SplitName, has_counter: bool) -> bytes:
    is_part = NumberRole.PART in name.roles or name.texts[-1].endswith(_SHARD_EXTENSION)
    goes = [role is NumberRole.COUNTER if has_counter else not is_part for role in name.roles]
    return join(name.texts, tuple(WILDCARD if go else number for go, number in zip(goes, name.numbers, strict=True)))


def counts_checkpoints(path: bytes) -> bool:
    """Return whether a name on a path may be that of a checkpoint: it has a counter, or a rule."""
    names = path.split(b"/")
    ruled = _list_ruled()
    return any(NumberRole.COUNTER in split(name).roles for name in names) or any(
        one.parse_numbers(name) is not None for one in ruled for name in names
    )


def _is_part_or_label(series: Series) -> bool:
    """Return whether the only numbers count parts or experiments.

    Those of "run-*.restart" do not: the name goes on behind the number.
    """
    roles = set(get_roles(series.texts))
    return roles == {NumberRole.PART} or (roles <= {NumberRole.PART, NumberRole.LABEL} and not series.texts[-1])


# --- the series of each name ------------------------------------------------------------------------------------------


def _choose_series(names: Iterable[bytes]) -> dict[bytes, Series]:
    """Return the series of each name that has a number."""
    groups = group_by_texts(names)
    wildcards = {texts: _choose_wildcards(texts, group, find_bare_part(texts, group)) for texts, group in groups.items()}
    found = _choose_single_numbers([name for texts, group in groups.items() if not wildcards[texts] for name in group])
    for texts, positions in wildcards.items():
        fixed = [position for position in range(len(texts) - 1) if position not in positions]
        alike: dict[tuple[bytes, ...], list[bytes]] = defaultdict(list)
        for name in groups[texts] if positions else ():
            numbers = split(name).numbers
            alike[tuple(numbers[position] for position in fixed)].append(name)
        for members in alike.values():
            found.update(dict.fromkeys(members, _build_series(members[0], positions)))
    return found


def _choose_wildcards(texts: tuple[bytes, ...], group: list[bytes], part: int | None) -> list[int]:
    """Return the numbers that are left out of the name of the series.

    The names of the group have the same texts; `part` is what `find_bare_part` finds in them. Returns none if only a comparison with each
    sibling can tell.
    """
    roles = get_roles(texts)
    varying = [position for position in range(len(roles)) if len({split(name).numbers[position] for name in group}) > 1]
    dates = set[int]().union(*map(list_dates, group))
    if NumberRole.COUNTER in roles:
        always, first = (NumberRole.COUNTER, NumberRole.METRIC), roles.index(NumberRole.COUNTER)
        # A number before the counter tells models apart: `qwen2-0.5b_step100`, `llama3-8b_step100`.
        free = {one for one in (*varying, *dates) if one > first and (roles[one] is NumberRole.BARE or one in dates)} - {part}
        return [position for position, role in enumerate(roles) if role in always or position in free]
    able = [position for position, role in enumerate(roles) if role not in (NumberRole.PART, NumberRole.LABEL)]
    if not able:
        return [len(roles) - 1]
    if all(roles[position] in (NumberRole.BARE, NumberRole.METRIC) for position in able):
        return able
    metrics = [position for position in able if roles[position] is NumberRole.METRIC]
    if dates and dates.issubset(able):
        return sorted(dates.union(metrics))
    counting = [position for position in able if position not in metrics]
    differing = [position for position in counting if position in varying]
    return sorted(metrics + (differing or counting[-1:])) if len(differing) < 2 else []


def _choose_single_numbers(names: list[bytes]) -> dict[bytes, Series]:
    """Return for each name the series of one number to which most siblings belong.

    Among equals it is that of the last number.
    """
    readings = {name: [_build_series(name, [position]) for position in range(len(split(name).numbers))] for name in names}
    sizes = Counter(one for found in readings.values() for one in found)
    return {name: max(found, key=lambda one: (sizes[one], len(one.texts[0]))) for name, found in readings.items()}


def _build_series(name: bytes, wildcards: Collection[int]) -> Series:
    texts, numbers = split(name)
    found = [texts[0]]
    for position, number in enumerate(numbers):
        if position in wildcards:
            found.append(texts[position + 1])
        else:
            found[-1] += number + texts[position + 1]
    return Series(tuple(found))


def _list_pairs(names: Iterable[bytes]) -> list[Series]:
    """Return the pairs X and X_prev.

    A lone X.cpt without a number is one whose second file is still to come.
    """
    names = set(names)
    found = {}
    for name in names:
        if PREVIOUS_SUFFIX not in name and not name.endswith(PAIRED_EXTENSION):
            continue
        stem, dot, extension = name.rpartition(b".")
        stem, extension = (stem, dot + extension) if stem else (name, b"")
        current = stem.removesuffix(PREVIOUS_SUFFIX) + extension
        is_pair = stem.endswith(PREVIOUS_SUFFIX) and (current in names or extension == PAIRED_EXTENSION)
        if current != extension and (is_pair or (extension == PAIRED_EXTENSION and not NUMBER.search(name))):
            previous = current.removesuffix(extension) + PREVIOUS_SUFFIX + extension
            found[current] = Series((current,), previous)
    return list(found.values())


def _list_mdrun_temporaries(names: Iterable[bytes], pairs: Iterable[Series]) -> set[bytes]:
    """Return the files of pairs that a killed mdrun did not rename."""
    current_names = {one.name for one in pairs}
    found = {name: _MDRUN_TEMPORARY.fullmatch(name) for name in names if name.endswith(PAIRED_EXTENSION)}
    return {name for name, parts in found.items() if parts is not None and parts[1] + PAIRED_EXTENSION in current_names}


def list_patterns(names: Iterable[bytes]) -> list[bytes]:
    """Return the name of each series in a directory.

    Of groups, these are the patterns of the newest group's files, because they can be opened.
    """
    names = {name for name in names if not is_temporary(name)}
    groups = find_groups(names)
    of = _choose_series({*groups.values()})
    newest: dict[Series, tuple[Order | tuple[()], bytes]] = {}
    for group, one in of.items():
        newest[one] = max(newest.get(one, ((), b"")), (one.get_order(one.parse_numbers(group) or ()), group))
    files = [(file, group, of[group]) for file, group in groups.items() if group in of and newest[of[group]][1] == group]
    own = {one.name for one in list_series(names) if one not in newest}
    return sorted(own | {replace_group(one.name, group, file) for file, group, one in files})


def build_series(name: bytes) -> Series:
    """Return the series that has this name: a pattern, or the first name of a pair."""
    stem, dot, extension = name.rpartition(b".")
    previous = stem + PREVIOUS_SUFFIX + dot + extension if stem else name + PREVIOUS_SUFFIX
    return parse(name) or Series((name,), previous)
