"""What rules keep, and where: exactly what they say, whatever the order in which sets and levels arrive (D5, D7, D8, H6, P5)."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfs.config.schema import RetentionRule
from ckptfs.model import Level
from ckptfs.series.expiry import RuledSeries, Ruling, apply_rule, assume_final, build_hold_check, list_beyond
from ckptfs.series.retention import SetFacts

STEPS = 1000
LEVELS = list(Level)
RULES = {
    "keep": RetentionRule("*", keep=3),
    "keep one": RetentionRule("*", keep=1),
    "keep every": RetentionRule("*", keep=5, keep_every=100),
    "keep every only": RetentionRule("*", keep_every=100),
    "local": RetentionRule("*", keep_local=2),
    "local and keep": RetentionRule("*", keep=10, keep_local=2),
    "pfs": RetentionRule("*", keep_pfs=4),
    "dragon": RetentionRule("*", keep_local=3, keep_pfs=2, pfs_every=10),
    "pfs every": RetentionRule("*", keep=30, pfs_every=7),
    "pfs interval": RetentionRule("*", keep_local=2, keep_pfs=3, pfs_interval_s=25.0),
    "everything": RetentionRule("*", keep_local=4, keep_pfs=5, pfs_every=20, keep_every=250),
}  # fmt: skip
# One step takes a second.
LEFT = {
    "keep": {998, 999, 1000},
    "keep one": {1000},
    "keep every": {*range(996, 1001), *range(100, 1001, 100)},
    "keep every only": set(range(1, 1001)),
    "local": set(range(1, 1001)),
    "local and keep": set(range(991, 1001)),
    "pfs": {997, 998, 999, 1000},
    "dragon": {990, 998, 999, 1000},
    "pfs every": set(range(971, 1001)),
    "pfs interval": {926, 951, 976, 999, 1000},
    "everything": {250, 500, 750, *range(920, 1001, 20), 997, 998, 999},
}
# Where it is not all that is left.
ON_PFS = {
    "dragon": {990, 1000},
    "pfs every": {973, 980, 987, 994},
    "pfs interval": {926, 951, 976},
    "everything": {250, 500, 750, *range(920, 1001, 20)},
}
IN_RAM = {
    "local": {999, 1000},
    "local and keep": {999, 1000},
    "dragon": {998, 999, 1000},
    "pfs interval": {999, 1000},
    "everything": {997, 998, 999, 1000},
}


class Run:
    """A series under a rule: sets complete one after another, become safer, and go as the rule says."""

    def __init__(self, rule: RetentionRule, pinned: frozenset[int] = frozenset(), rollback: int | None = None) -> None:
        self.rule, self.pinned, self.rollback = rule, pinned, rollback
        self.sets: dict[int, SetFacts] = {}
        self.chosen: frozenset[int] = frozenset()
        self.best = 0

    def complete(self, number: int) -> None:
        self.sets[number] = SetFacts(number, Level.LOCAL, is_in_place=True, is_pinned=number in self.pinned)

    def rise(self, number: int) -> None:
        """A set reaches the PFS, if it is to go there."""
        if number in self.chosen:
            self.sets[number] = replace(self.sets[number], level=Level.PFS)

    def apply(self, rng: random.Random | None = None) -> Ruling:
        """Do what the rule says. No set that nothing newer is as safe as may go."""
        known = list(self.sets.values())
        if rng is not None:
            rng.shuffle(known)
        at_ns = {number: number * 1_000_000_000 for number in self.sets}
        order = {number: (number,) for number in self.sets}
        ruling = apply_rule(self.rule, RuledSeries(tuple(known), order, at_ns, self.chosen, self.rollback))
        before = max(LEVELS.index(one.level) for one in known)
        self.chosen |= ruling.for_pfs
        for number in ruling.expired:
            assert number not in self.pinned and number != self.rollback
            del self.sets[number]
        assert max(LEVELS.index(one.level) for one in self.sets.values()) == before
        assert max(one.number for one in known) in self.sets
        return ruling


def build_series(*sets: SetFacts) -> RuledSeries:
    return RuledSeries(sets, {one.number: (one.number,) for one in sets}, {one.number: one.number * 10**9 for one in sets})


@pytest.mark.parametrize("name", RULES)
def test_a_run_of_1000_steps_keeps_exactly_what_the_rule_says(name: str) -> None:
    """Whatever the delay with which sets reach the PFS."""
    rng = random.Random(name)
    run, late = Run(RULES[name]), []
    for number in range(1, STEPS + 1):
        run.complete(number)
        run.apply()
        late.append(number)
        rng.shuffle(late)
        while late and rng.random() < 0.6:
            if (one := late.pop()) in run.sets:
                run.rise(one)
    for number in list(run.sets):
        run.rise(number)
    run.apply()
    ruling = run.apply()
    assert not ruling.expired
    assert set(run.sets) == LEFT[name]
    assert {number for number, one in run.sets.items() if one.level is Level.PFS} == ON_PFS.get(name, LEFT[name])
    if name in IN_RAM:
        assert set(run.sets) - ruling.not_local == IN_RAM[name]
    else:
        assert not ruling.not_local


@settings(max_examples=300)
@given(
    rule=st.sampled_from(sorted(RULES)),
    steps=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    pinned=st.frozensets(st.integers(1, 40), max_size=3),
    rollback=st.none() | st.integers(1, 40),
    seed=st.integers(0, 2**32),
)
def test_the_last_verified_set_pins_and_the_target_of_a_rollback_never_go(
    rule: str, steps: list[int], pinned: frozenset[int], rollback: int | None, seed: int
) -> None:
    """P5, whatever the order of completions and levels. What is left in the end does not depend on that order."""
    rng, run = random.Random(seed), Run(RULES[rule], pinned, rollback)
    run.complete(1)
    for step in steps:
        if step:
            run.complete(max(run.sets) + 1)
        else:
            run.rise(rng.choice(sorted(run.sets)))
        run.apply(rng)
    for number in list(run.sets):
        run.rise(number)
    run.apply(rng)
    count = max(run.sets)
    at_once = Run(RULES[rule], pinned, rollback)
    for number in range(1, count + 1):
        at_once.complete(number)
        at_once.apply()
        at_once.rise(number)
        at_once.apply()
    assert set(run.sets) == set(at_once.sets)


def test_the_oldest_goes_only_after_the_newest_is_on_the_pfs() -> None:
    """D8. Dragon does the reverse."""
    run = Run(RetentionRule("*", keep_pfs=2))
    for number in (1, 2):
        run.complete(number)
        run.apply()
        run.rise(number)
    for number in (3, 4):
        run.complete(number)
        assert not run.apply().expired
    run.rise(3)
    assert run.apply().expired == {1}


def test_a_late_set_of_an_early_step_is_not_the_newest() -> None:
    """Sets are numbered as they were completed, and expire by their steps."""
    sets = [SetFacts(number, Level.PFS) for number in range(1, 5)]
    series = replace(build_series(*sets), order={1: (20,), 2: (30,), 3: (10,), 4: (40,)})
    assert apply_rule(RetentionRule("*", keep=2), series).expired == {1, 3}
    assert apply_rule(RetentionRule("*", keep_local=1), series).not_local == {1, 2, 3}


def test_what_goes_to_the_pfs_next_stays_until_it_is_there() -> None:
    """D7: a slow PFS gets its sets, too, though many newer ones are complete by then, and the application has deleted them."""
    run = Run(RetentionRule("*", keep=2, pfs_every=10))
    for number in range(1, 20):
        run.complete(number)
        assert 10 not in run.apply().expired and (number < 10 or 10 in run.apply().kept)
    assert set(run.sets) == {10, 18, 19}
    run.rise(10)
    run.apply()
    run.complete(20)
    run.apply()
    assert set(run.sets) == {10, 19, 20}
    run.rise(20)
    run.apply()
    assert set(run.sets) == {19, 20}


def test_what_only_waits_for_a_level_is_known() -> None:
    sets = tuple(SetFacts(number, Level.PFS if number < 5 else Level.LOCAL) for number in range(1, 7))
    series, rule = build_series(*sets), RetentionRule("*", keep=2)
    ruling = apply_rule(rule, series)
    assert ruling.expired == {1, 2}
    assert apply_rule(rule, assume_final(series, ruling)).expired == {1, 2, 3, 4}


def test_what_the_rule_reaches_stays_though_the_application_deletes_it() -> None:
    sets = tuple(SetFacts(number, Level.PFS) for number in range(1, 11))
    series = build_series(*sets)
    assert apply_rule(RetentionRule("*", keep=3, keep_every=4), series).kept == {4, 8, 9, 10}
    assert apply_rule(RetentionRule("*", keep_local=3), series).kept == frozenset()
    assert apply_rule(RetentionRule("*", keep_pfs=2), series).kept == {9, 10}


def test_without_a_pfs_nothing_is_for_it() -> None:
    """G2: and a set is as safe as it will ever be without it."""
    sets = tuple(SetFacts(number, Level.LOCAL) for number in range(1, 6))
    ruling = apply_rule(RetentionRule("*", keep=2), replace(build_series(*sets), has_pfs=False))
    assert (ruling.for_pfs, ruling.expired) == (frozenset(), {1, 2, 3})


def test_the_oldest_go_beyond_the_bound_of_the_history() -> None:
    sets = [(9, 90, 5), (6, 60, 1), (7, 70, 5)]
    assert [list_beyond(sets, excess) for excess in (0, 1, 2, 6, 7, 100)] == [[], [6], [6, 7], [6, 7], [6, 7, 9], [6, 7, 9]]


HELD_RULES = (
    RetentionRule("run*/every_*", keep=3),
    RetentionRule("run*/*", keep=3, pfs_every=10),
    RetentionRule("step_*", keep=3, pfs_interval_s=60),
)


@pytest.mark.parametrize(
    ("directory", "name", "is_held"),
    [
        (b"", b"step_100", True),
        (b"", b"step_100.pt", True),
        (b"", b".tmp-step_100", True),
        (b"", b"config.json", False),
        (b"run1", b"checkpoint-500", True),
        (b"run1", b"ckpt-2.data-00000-of-00001", True),
        (b"run1", b"every_3", False),
        (b"run1", b"config.json", False),
        (b"run1", b"tokenizer.model", False),
        (b"run1", b"log_5.csv", False),
        (b"run1", b"config.json.tmp", True),
        (b"run1/a", b"checkpoint-500", False),
        (b"other", b".tmp-3", False),
        (b".ckptfs.history", b"step_*", True),
        (b".ckptfs.history", b"run1", False),
        (b".ckptfs.history/run1", b"checkpoint-*", True),
        (b".ckptfs.history/run1/checkpoint-*", b".new-17", True),
        (b".ckptfs.history/run1/every_*", b".new-17", False),
    ],
)
def test_members_wait_for_the_pfs_and_other_files_do_not(directory: bytes, name: bytes, is_held: bool) -> None:
    """D7, D14."""
    check = build_hold_check(HELD_RULES)
    assert check is not None and check(directory, name) == is_held


def test_without_such_a_rule_nothing_waits() -> None:
    assert build_hold_check(HELD_RULES[:1]) is None
