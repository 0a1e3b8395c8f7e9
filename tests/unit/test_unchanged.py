"""Two sets with the same bytes: training may not progress (X11)."""

import pytest

from ckptfs.series.retention import is_unchanged

MODEL, OPTIMIZER, STATE = (1000, b"m"), (2000, b"o"), (5, b"s")


@pytest.mark.parametrize(
    ("newer", "older", "expected"),
    [
        ([MODEL, OPTIMIZER, STATE], [OPTIMIZER, MODEL, STATE], True),
        ([MODEL, OPTIMIZER, (5, b"other")], [MODEL, OPTIMIZER, STATE], True),
        ([MODEL, (2000, b"other"), STATE], [MODEL, OPTIMIZER, STATE], False),
        ([MODEL], [MODEL, OPTIMIZER], True),
        ([MODEL, OPTIMIZER], [MODEL], False),
        ([(1000, None)], [(1000, None)], False),
        ([(0, b"e")], [(0, b"e")], False),
        ([], [], False),
    ],
)
def test_equal_sets(newer: list[tuple[int, bytes | None]], older: list[tuple[int, bytes | None]], expected: bool) -> None:
    """X11: the large files decide; what is not known is not equal."""
    assert is_unchanged(newer, older) == expected
