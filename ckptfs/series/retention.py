"""Which sets of a series stay in the history, and why (X3, P5). Pure.

A set stays while at least one reason holds. A set without any goes from the history at once; files of the application never go here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from ckptfs.model import Level


class KeepReason(StrEnum):
    """Why a set stays."""

    PINNED = "pinned"
    ROLLBACK = "rollback"
    """A rollback made it the latest."""
    NEWEST = "newest"
    """No newer set is as safe: the unlink shield."""
    IN_PLACE = "in place"
    """The application still has all its files, so that it costs nothing."""


@dataclass(frozen=True, slots=True)
class SetFacts:
    """What retention knows of one set. `level` is the lowest of its files; sets of a series are numbered as they were completed."""

    number: int
    level: Level
    is_in_place: bool = False
    is_pinned: bool = False


def find_reasons(sets: Iterable[SetFacts], rollback: int | None = None) -> dict[int, frozenset[KeepReason]]:
    """Return why each set of a series stays, by its number; empty: nothing keeps it. `rollback`: the number of its target."""
    known = list(sets)
    newest = _find_newest(known)
    return {one.number: frozenset(_list_reasons(one, newest, rollback)) for one in known}


def _find_newest(sets: Iterable[SetFacts]) -> set[int]:
    """Return for each level the newest set that has it or a higher one.

    The newest of all belongs to them, even if it cannot be read now: the node that has its copies may return.
    """
    found: set[int] = set()
    levels, wanted = list(Level), 0
    for one in sorted(sets, key=lambda one: one.number, reverse=True):
        reached = levels.index(one.level)
        if reached >= wanted:
            found.add(one.number)
            wanted = reached + 1
    return found


def _list_reasons(one: SetFacts, newest: set[int], rollback: int | None) -> Iterable[KeepReason]:
    if one.is_pinned:
        yield KeepReason.PINNED
    if one.number == rollback:
        yield KeepReason.ROLLBACK
    if one.number in newest:
        yield KeepReason.NEWEST
    if one.is_in_place:
        yield KeepReason.IN_PLACE
