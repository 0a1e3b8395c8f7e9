"""Which of the sets of a series is the newest: the order of all commands and rules (N2, D2, D5). Pure.

The numbers in the names decide, as for members; of sets with equal numbers the one that was completed last is newer. After a rollback,
the sets that were completed since come first, then its target, then all others. So the first set is the one that `latest` names.

What happened when is another question: sets are numbered as they were completed.
"""

from collections.abc import Callable, Container
from typing import NamedTuple

from ckptfs.series.patterns import Order, build_series


class SetOrder(NamedTuple):
    """Of two sets, the newer one has the greater value.

    `era`: 2 for sets that count, 1 for the target of a rollback, 0 for those that it passes over.
    """

    era: int
    order: Order
    number: int


def build_set_order(pattern: bytes, rollback: int | None = None, since: Container[int] = ()) -> Callable[[bytes, int], SetOrder]:
    """Return a function that gives the order of a set from its member's name and its number.

    `rollback`: the number of its target, if there is one; `since`: the numbers of the sets that were completed after it.
    """
    series = build_series(pattern)

    def get_set_order(name: bytes, number: int) -> SetOrder:
        era = 2 if rollback is None or number in since else int(number == rollback)
        return SetOrder(era, series.get_order(series.parse_numbers(name) or ()), number)

    return get_set_order
