"""Which set of a series is the newest: N2, D2."""

import random

from ckptfs.series.set_order import build_set_order, list_overtaken

NAMES = {1: b"step_20", 2: b"step_30", 3: b"step_10", 4: b"step_20", 5: b"step_x"}


def order(rollback: int | None = None, since: tuple[int, ...] = (), replaced: tuple[int, ...] = ()) -> list[int]:
    get_order = build_set_order(b"step_*", rollback, since, replaced)
    return sorted(NAMES, key=lambda number: get_order(NAMES[number], number), reverse=True)


def test_the_steps_decide_then_the_last_one_completed() -> None:
    assert order() == [2, 4, 1, 3, 5]


def test_after_a_rollback_come_sets_made_since_then_its_target() -> None:
    assert order(1, (3, 4)) == [4, 3, 1, 2, 5]
    assert order(1, (3, 4), (3, 1)) == [4, 1, 2, 3, 5], "its target stays it, even if it was deleted"


def test_what_was_deleted_before_an_earlier_step_was_saved_is_passed_over() -> None:
    assert order(replaced=(2, 1)) == [4, 3, 5, 2, 1]


def test_the_last_set_that_overtook_another_is_found() -> None:
    rng = random.Random(7)
    for _ in range(200):
        names = {number: b"step_%d" % rng.randrange(6) for number in range(1, rng.randrange(2, 12))}
        get_order = build_set_order(b"step_*")
        orders = {number: get_order(name, number) for number, name in names.items()}
        lower = {one: [later for later in orders if later > one and orders[later] < orders[one]] for one in orders}
        assert dict(list_overtaken(orders)) == {one: max(found) for one, found in lower.items() if found}
