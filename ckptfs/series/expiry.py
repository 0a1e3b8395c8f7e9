"""What a retention rule says of the sets of a series: which are kept, and where (D5, D7, D8, G3, P5).

Pure.

A set expires if the rule bounds the sets and enough newer ones count against it. A newer set counts if it is as safe as the older one, or
as safe as it will ever be. So nothing goes before what replaces it is verified at the level that counts, and once all levels are reached,
just what the rule says is left. Pins, the target of a rollback and the unlink shield stand above every rule (`retention`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ckptfs.config.rule_tables import find_directory_rule, find_rule
from ckptfs.config.schema import RetentionRule
from ckptfs.model import HISTORY_NAME, Level
from ckptfs.series.patterns import is_temporary, list_series
from ckptfs.series.retention import KeepReason, SetFacts, find_reasons


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a rule says of sets, by their numbers."""

    kept: frozenset[int]  # The history keeps them, even if the application deletes them.
    expired: frozenset[int]  # The names of the application go as well.
    for_pfs: frozenset[int]  # They go to the PFS.
    not_local: frozenset[int]  # They leave RAM and NVMe once they are on the PFS.


@dataclass(frozen=True, slots=True)
class RuledSeries:
    """The sets of a series and all facts that its rule needs, by the numbers of the sets."""

    sets: tuple[SetFacts, ...]
    order: Mapping[int, tuple[Any, ...]]  # Of two sets, the newer one has the greater value.
    completed_ns: Mapping[int, int]  # When they were completed.
    chosen: frozenset[int] = frozenset()  # Those that were chosen for the PFS before.
    rollback: int | None = None  # The target of a rollback.
    has_pfs: bool = True
    base_level: Level = Level.LOCAL  # The level that a set reaches without the PFS.


def apply_rule(rule: RetentionRule, series: RuledSeries) -> Ruling:
    """Return what `rule` says of the sets of a series."""
    newest_first = sorted(series.sets, key=lambda one: series.order.get(one.number, ()), reverse=True)
    for_good = {one.number for one in newest_first if rule.keep_every is not None and one.number % rule.keep_every == 0}
    for_good |= {one.number for one in newest_first if one.is_pinned or one.number == series.rollback}
    for_pfs = for_good | _choose_for_pfs(rule, series) if series.has_pfs else set()
    newer = {one.number: count for one, count in _count_newer(newest_first, for_pfs, series.base_level)}
    kept = for_good | {number for number, count in newer.items() if _is_kept(rule, count, number in for_pfs)}
    # What goes to the PFS next stays until it is there.
    kept |= set([one.number for one in newest_first if one.number in for_pfs][:1] if rule.selects_for_pfs else ())
    bounded = {number for number, count in newer.items() if _is_bounded(rule, count, number in for_pfs)}
    beyond = {one.number for one in newest_first[rule.keep_local :]} if rule.keep_local is not None else set()
    shielded = {number for number, reasons in find_reasons(newest_first, series.rollback).items() if KeepReason.NEWEST in reasons}
    return Ruling(frozenset(kept), frozenset(bounded - kept - shielded), frozenset(for_pfs), frozenset(beyond & for_pfs))


def assume_final(series: RuledSeries, ruling: Ruling) -> RuledSeries:
    """Return the series as it will be when each set is as safe as it will ever be."""
    sets = (
        replace(one, level=max(one.level, Level.PFS if one.number in ruling.for_pfs else series.base_level, key=lambda level: level.rank))
        for one in series.sets
    )
    return replace(series, sets=tuple(sets), chosen=series.chosen | ruling.for_pfs)


def _choose_for_pfs(rule: RetentionRule, series: RuledSeries) -> set[int]:
    """Return the sets that go to the PFS, by the rule alone.

    What was chosen once stays chosen, and nothing before it is chosen later.
    """
    numbers = sorted(one.number for one in series.sets)
    if not rule.selects_for_pfs:
        return set(numbers)
    chosen = set(series.chosen)
    if rule.pfs_every is not None:
        return chosen | {number for number in numbers if number % rule.pfs_every == 0}
    assert rule.pfs_interval_s is not None
    last = max(chosen & set(numbers), default=0)
    for number in numbers:
        at_ns = series.completed_ns[number]
        if number > last and (not last or at_ns - series.completed_ns[last] >= rule.pfs_interval_s * 1e9):
            chosen.add(number)
            last = number
    return chosen


class _Newer(NamedTuple):
    """How many newer sets count against one, and how many of them are on the PFS."""

    sets: int
    on_pfs: int


def _count_newer(newest_first: Iterable[SetFacts], for_pfs: set[int], base_level: Level) -> Iterator[tuple[SetFacts, _Newer]]:
    """Yield each set with the newer ones that are as safe as it is, or as safe as they will ever be."""
    final, on_pfs = 0, 0
    rising = [0] * len(Level)
    for one in newest_first:
        reached = one.level.rank
        yield one, _Newer(final + sum(rising[reached:]), on_pfs)
        if reached >= (Level.PFS if one.number in for_pfs else base_level).rank:
            final += 1
        else:
            rising[reached] += 1
        on_pfs += one.number in for_pfs and one.level is Level.PFS


def _is_kept(rule: RetentionRule, newer: _Newer, is_for_pfs: bool) -> bool:
    """Return whether a bound of the rule reaches a set, so that the history keeps it."""
    return (rule.keep is not None and newer.sets < rule.keep) or (rule.keep_pfs is not None and is_for_pfs and newer.on_pfs < rule.keep_pfs)


def _is_bounded(rule: RetentionRule, newer: _Newer, is_for_pfs: bool) -> bool:
    """Return whether a set expires unless something keeps it."""
    if is_for_pfs or not rule.selects_for_pfs:
        return rule.keep is not None or (rule.keep_pfs is not None and is_for_pfs)
    return rule.keep is not None or (rule.keep_local is not None and newer.sets >= rule.keep_local)


def list_beyond(sets: Iterable[tuple[int, int, int]], excess: int) -> list[int]:
    """Return which sets go because the history holds `excess` bytes too many; the oldest go first.

    `sets`: (key, when it was completed, its bytes) of those that nothing but a rule keeps.
    """
    found = []
    for key, _, size in sorted(sets, key=lambda one: one[1]):
        if excess <= 0:
            break
        found.append(key)
        excess -= size
    return found


# --- what waits for its set to be chosen for the PFS ------------------------------------------------------------------


def build_hold_check(rules: Iterable[RetentionRule]) -> Callable[[bytes, bytes], bool] | None:
    """Return a function that tells whether the PFS has to wait for what is made under (directory, name).

    Returns None if no rule asks for that. By their names, the members of the rule's series wait, temporary names beside them, and the
    directories of their history. Other files in the same directory belong to no set, and go to the PFS at once (D14).
    """
    known = tuple(rules)
    if not any(rule.selects_for_pfs for rule in known):
        return None

    def is_held_back(directory: bytes, name: bytes) -> bool:
        if directory == HISTORY_NAME or directory.startswith(HISTORY_NAME + b"/"):
            path = _join(directory[len(HISTORY_NAME) + 1 :], name)
            rule = find_rule(known, path) or find_rule(known, path.rpartition(b"/")[0])
        elif is_temporary(name):
            rule = find_directory_rule((one for one in known if one.selects_for_pfs), directory)
        else:
            rule = next((find_rule(known, _join(directory, one.name)) for one in list_series([name])), None)
        return rule is not None and rule.selects_for_pfs

    return is_held_back


def _join(directory: bytes, name: bytes) -> bytes:
    return directory + b"/" + name if directory else name
