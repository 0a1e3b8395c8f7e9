"""Which of the sets of a series is the newest: the order of all commands and rules (N2, D2, D5). Pure.

The numbers in the names decide, as for members; of sets with equal numbers the one that was completed last is newer. After a rollback,
the sets that were completed since come first, then its target, then all others. An application that deletes the newest checkpoints and
goes on from an older one has gone back, too: what is gone counts less than all others as soon as a set was saved since. So the first set
is the one that `latest` names.

What happened when is another question: sets are numbered as they were completed.
"""

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple

from ckptfs.series.patterns import Order, build_series


class SetOrder(NamedTuple):
    """Of two sets, the newer one has the greater value.

    `era`: 2 for sets that count, 1 for the target of a rollback, 0 for those that are passed over.
    """

    era: int
    order: Order
    number: int


def build_set_order(
    pattern: bytes, rollback: int | None = None, since: Container[int] = (), replaced: Container[int] = ()
) -> Callable[[bytes, int], SetOrder]:
    """Return a function that gives the order of a set from its member's name and its number.

    `rollback`: the number of its target, if there is one; `since`: the numbers of the sets that were completed after it. `replaced`: the
    numbers of those that were deleted before a set of an earlier step was saved.
    """
    series = build_series(pattern)

    def get_set_order(name: bytes, number: int) -> SetOrder:
        counts = (rollback is None or number in since) and number not in replaced
        era = 2 if counts else int(number == rollback)
        return SetOrder(era, series.get_order(series.parse_numbers(name) or ()), number)

    return get_set_order


def list_overtaken(orders: Mapping[int, SetOrder]) -> list[tuple[int, int]]:
    """Return (set, the last one of those completed later that are older by their names), by numbers."""
    found, lower = [], list[int]()
    for number in sorted(orders, reverse=True):
        if not lower or orders[number] < orders[lower[-1]]:
            lower.append(number)
        else:
            found.append((number, next(one for one in lower if orders[one] < orders[number])))
    return found
