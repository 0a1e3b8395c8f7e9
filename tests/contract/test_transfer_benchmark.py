"""The benchmark of transfers between two nodes, which builds a node's host and server by hand."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptfs import limits

sys.path.append(str(Path(__file__).resolve().parent.parent.parent / "bench"))

import peers


@pytest.mark.parametrize("once", peers.MEASURES.values(), ids=peers.MEASURES)
def test_each_measure_moves_a_whole_file_both_ways(once: Callable[..., tuple[float, float]]) -> None:
    (pair,) = peers.measure(once, size=limits.BLOCK_BYTES, rounds=1)
    assert all(seconds > 0 for seconds in pair)
