"""A dict with a bound."""

from ckptfs.bounded_table import BoundedTable


def test_the_entry_that_was_set_longest_ago_goes() -> None:
    table = BoundedTable[str, int](2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        table[key] = value
    assert list(table.items()) == [("a", 3), ("c", 4)]
    assert table.pop("a") == 3 and list(table) == ["c"]
