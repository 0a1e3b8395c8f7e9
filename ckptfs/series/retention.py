"""Which sets of a series stay in the history, and why (X3, P5), and which repeat another. Pure.

A set stays while at least one reason holds. A set without any goes from the history at once; files of the application never go here.

`is_unchanged` says whether two successive sets have equal bytes, which means no progress of the training (X11). A counter or the state of a
random generator differs in any case. So only large files count, by their digests and not by their names, which may have the number of the
step. Files whose names are in their bytes, as in a zip archive of `torch.save`, differ as well.

A writer that is killed may leave a file whose format does not show that it was cut. So a set that is much smaller than the one before it
does not take its place at once: the larger one stays until another set follows.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckptfs.model import Level
from ckptfs.series.completeness import NEAR_SIZES

LARGE_SHARE = 0.01
"""A file is large if it has at least this share of the bytes of its set."""


class KeepReason(StrEnum):
    """Why a set stays."""

    PINNED = "pinned"
    ROLLBACK = "rollback"  # A rollback made it the latest.
    NEWEST = "newest"  # No newer set is as safe: the unlink shield.
    IN_PLACE = "in place"  # The application still has all its files, so that it costs nothing.


@dataclass(frozen=True, slots=True)
class SetFacts:
    """What retention knows of one set. `level` is the lowest of its files."""

    number: int
    level: Level
    is_in_place: bool = False
    is_pinned: bool = False
    size: int = 0


def find_reasons(sets: Iterable[SetFacts], rollback: int | None = None) -> dict[int, frozenset[KeepReason]]:
    """Return why each set of a series stays, by its number; empty: nothing keeps it.

    `sets`: the newest first. `rollback`: the number of its target, which replaces no other set: the rollback may be undone.
    """
    known = list(sets)
    newest = _find_newest([one for one in known if one.number != rollback])
    return {one.number: frozenset(_list_reasons(one, newest, rollback)) for one in known}


def _find_newest(sets: Sequence[SetFacts]) -> set[int]:
    """Return for each level the newest set with that level or a higher one.

    If the set before it is much larger, that one is returned, too. The newest of all belongs to them, even if it cannot be read now: the
    node that has its copies may return.
    """
    found: set[int] = set()
    part, whole = NEAR_SIZES
    for lowest in Level:
        newest = list(itertools.islice((one for one in sets if one.level.rank >= lowest.rank), 2))
        is_doubtful = len(newest) == 2 and newest[0].size * whole < newest[1].size * part
        found |= {one.number for one in (newest if is_doubtful else newest[:1])}
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


def is_unchanged(newer: Iterable[tuple[int, bytes | None]], older: Iterable[tuple[int, bytes | None]]) -> bool:
    """Return whether each large file of the newer set has the bytes of one of the older set.

    Files are (size, digest, None: not known).
    """
    files = list(newer)
    total = sum(size for size, _ in files)
    large = {digest for size, digest in files if size and size >= total * LARGE_SHARE}
    return bool(large) and None not in large and large <= {digest for _, digest in older}
