"""Which sets the history keeps when the application has deleted them (X3, P5)."""

import random

from ckptfs.model import Level
from ckptfs.series.retention import KeepReason, SetFacts, find_reasons


def keep(*levels: Level, rollback: int | None = None, pinned: int = 0, in_place: int = 0) -> dict[int, set[str]]:
    """Return what keeps each of the sets 1, 2, ... that stay."""
    sets = [SetFacts(number, level, number == in_place, number == pinned) for number, level in enumerate(levels, 1)]
    return {number: set(reasons) for number, reasons in find_reasons(sets[::-1], rollback).items() if reasons}


def test_only_the_newest_set_stays_if_it_is_as_safe_as_those_before() -> None:
    assert keep(Level.LOCAL, Level.LOCAL, Level.LOCAL) == {3: {"newest"}}
    assert keep(Level.PFS, Level.CLIQUE, Level.PFS) == {3: {"newest"}}


def test_an_older_set_stays_until_a_newer_one_is_as_safe() -> None:
    assert keep(Level.PFS, Level.CLIQUE, Level.LOCAL, Level.LOCAL) == {1: {"newest"}, 2: {"newest"}, 4: {"newest"}}
    assert keep(Level.PFS, Level.CLIQUE, Level.LOCAL, Level.CLIQUE) == {1: {"newest"}, 4: {"newest"}}


def test_the_newest_set_stays_though_it_cannot_be_read_now() -> None:
    assert keep(Level.LOCAL, Level.NONE, Level.NONE) == {1: {"newest"}, 3: {"newest"}}


def test_a_pin_a_rollback_and_the_place_each_keep_a_set() -> None:
    levels = [Level.LOCAL] * 5
    assert keep(*levels, pinned=1, rollback=2, in_place=3) == {1: {"pinned"}, 2: {"rollback"}, 3: {"in place"}, 5: {"newest"}}
    assert keep(*levels, pinned=5, in_place=5)[5] == {"pinned", "newest", "in place"}


def test_the_target_of_a_rollback_replaces_no_set() -> None:
    """After `--undo` the set that was the newest before is the latest again."""
    sets = [SetFacts(2, Level.LOCAL), SetFacts(3, Level.LOCAL), SetFacts(1, Level.LOCAL)]
    assert [number for number, reasons in find_reasons(sets, 2).items() if reasons] == [2, 3]


def test_a_much_smaller_set_does_not_replace_the_one_before_it() -> None:
    """X3: a cut file of an unknown format may look complete. A second small set shows that the first one was right."""

    def keep_sizes(*sizes: int) -> list[int]:
        sets = [SetFacts(number, Level.LOCAL, size=size) for number, size in enumerate(sizes, 1)]
        return sorted(number for number, reasons in find_reasons(sets[::-1]).items() if reasons)

    assert keep_sizes(100, 100, 89) == [2, 3]
    assert keep_sizes(100, 100, 90) == [3]
    assert keep_sizes(100, 40, 100) == [3]
    assert keep_sizes(100, 40, 40) == [3]


def test_no_order_of_deletion_lowers_what_is_safe() -> None:
    """Sets are completed and become safer in any order; after each step the best level of all that ever was is kept."""
    rng, levels = random.Random(12), list(Level)
    for _ in range(200):
        kept: dict[int, Level] = {}
        best = 0
        for number in range(1, 12):
            kept[number] = Level.LOCAL
            for one in rng.sample(sorted(kept), k=min(2, len(kept))):
                kept[one] = levels[max(levels.index(kept[one]), rng.randrange(4))]
            best = max(best, *(levels.index(level) for level in kept.values()))
            reasons = find_reasons([SetFacts(one, kept[one]) for one in sorted(kept, reverse=True)])
            kept = {one: level for one, level in kept.items() if KeepReason.NEWEST in reasons[one]}
            assert max(map(levels.index, kept.values())) == best
            assert max(kept) == number
            assert len(kept) <= 3
