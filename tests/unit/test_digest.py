"""Digests do not depend on how the bytes arrive, and holes cost next to nothing (P4)."""

import os

import pytest

from ckptfs import digest, limits

BLOCK = limits.BLOCK_BYTES


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 7])
def test_pieces_of_any_length_give_the_same(size: int) -> None:
    data = os.urandom(size)
    running, at_once = digest.RunningDigest(), digest.RunningDigest()
    for start in range(0, size, 1_000_003):
        running.update(data[start : start + 1_000_003])
    at_once.update(data)
    whole, blocks = running.finish()
    assert (whole, blocks) == at_once.finish()
    assert blocks == b"".join(digest.hash_block(data[start : start + BLOCK]) for start in range(0, size, BLOCK))
    assert whole == digest.hash_content(blocks, size)


@pytest.mark.parametrize("sizes", [[5], [BLOCK], [1, BLOCK - 1, 2 * BLOCK], [BLOCK + 1, 3 * BLOCK // 4], [3 * BLOCK + 12345]])
def test_holes_are_the_zeros_they_read_as(sizes: list[int]) -> None:
    holes, zeros = digest.RunningDigest(), digest.RunningDigest()
    holes.update(b"x")
    for size in sizes:
        holes.update_zeros(size)
    zeros.update(b"x" + bytes(sum(sizes)))
    assert (holes.size, holes.finish()) == (zeros.size, zeros.finish())


def test_length_counts_although_zeros_are_all_alike() -> None:
    digests = set()
    for size in (0, 1, BLOCK, BLOCK + 1):
        running = digest.RunningDigest()
        running.update_zeros(size)
        digests.add(running.finish()[0])
    assert len(digests) == 4


def test_a_petabyte_of_nothing_has_a_digest_and_no_list_of_blocks() -> None:
    running = digest.RunningDigest()
    running.update_zeros(10**15)
    whole, blocks = running.finish()
    assert (running.size, len(whole), blocks) == (10**15, 16, b"")
