"""Digests: xxh3-128 of each 4 MiB block, and one of a content.

The digest of a content covers all block digests in order and the size.

A file may be sparse and huge: `truncate -s 1P` makes 250 million empty blocks. Runs of zeros cost almost nothing, and block digests of a
file with more than `limits.BLOCK_DIGESTS_MAX` blocks are not kept.
"""

from collections.abc import Iterable

import xxhash

from ckptfs import limits

BLOCK_DIGEST_BYTES = 16
ZEROS = memoryview(bytes(256 * limits.KIB))
ZERO_BLOCK = xxhash.xxh3_128_digest(bytes(limits.BLOCK_BYTES))
ZERO_RUN_BLOCKS = 64 * limits.KIB
ZERO_RUN = ZERO_BLOCK * ZERO_RUN_BLOCKS


def hash_block(data: bytes | memoryview) -> bytes:
    """Return the digest of one block: 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def hash_content(block_digests: bytes, size: int) -> bytes:
    """Return the digest of a content of `size` bytes from the joined digests of its blocks: 16 bytes."""
    return xxhash.xxh3_128_digest(block_digests + size.to_bytes(8, "little"))


def split_digests(block_digests: bytes) -> list[bytes]:
    """Split joined block digests."""
    return [block_digests[start : start + BLOCK_DIGEST_BYTES] for start in range(0, len(block_digests), BLOCK_DIGEST_BYTES)]


def count_blocks(size: int) -> int:
    """Return the number of blocks of a content of `size` bytes."""
    return -(-size // limits.BLOCK_BYTES)


def get_block_range(offset: int, length: int, size: int) -> range:
    """Return the numbers of the blocks of a file of `size` bytes that have these bytes."""
    end = min(offset + length, size)
    return range(offset // limits.BLOCK_BYTES, count_blocks(end)) if offset < end else range(0)


def has_all_digests(block_digests: bytes, size: int) -> bool:
    """Return False if the digests of a content of `size` bytes are too many to be kept."""
    return len(block_digests) == BLOCK_DIGEST_BYTES * count_blocks(size)


def list_block_ranges(numbers: Iterable[int], size: int) -> list[tuple[int, int]]:
    """Return (offset, length) in bytes of each run of blocks of a file of `size` bytes.

    The numbers ascend.
    """
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        start = number * limits.BLOCK_BYTES
        end = min(start + limits.BLOCK_BYTES, size)
        if ranges and sum(ranges[-1]) == start:
            start = ranges.pop()[0]
        ranges.append((start, end - start))
    return ranges


class RunningDigest:
    """The digests of a stream, in pieces of any length."""

    def __init__(self) -> None:
        self.size = 0
        self._block_digests = bytearray()
        self._total = xxhash.xxh3_128()
        self._current = xxhash.xxh3_128()
        self._filled_bytes = 0

    def update(self, data: bytes | memoryview) -> None:
        """Digest the next piece."""
        view = memoryview(data)
        self.size += len(view)
        while view:
            piece = view[: limits.BLOCK_BYTES - self._filled_bytes]
            self._current.update(piece)
            self._filled_bytes += len(piece)
            view = view[len(piece) :]
            if self._filled_bytes == limits.BLOCK_BYTES:
                self._finish_block()

    def update_zeros(self, count: int) -> None:
        """Digest `count` zero bytes: a hole. Whole blocks only cost their known digest."""
        while count:
            if not self._filled_bytes and count >= limits.BLOCK_BYTES:
                whole_blocks = min(count // limits.BLOCK_BYTES, ZERO_RUN_BLOCKS)
                self._append_digests(ZERO_RUN[: whole_blocks * BLOCK_DIGEST_BYTES])
                self.size += whole_blocks * limits.BLOCK_BYTES
                count -= whole_blocks * limits.BLOCK_BYTES
                continue
            piece = min(count, limits.BLOCK_BYTES - self._filled_bytes, len(ZEROS))
            self.update(ZEROS[:piece])
            count -= piece

    def _finish_block(self) -> None:
        self._append_digests(self._current.digest())
        self._current = xxhash.xxh3_128()
        self._filled_bytes = 0

    def _append_digests(self, digests: bytes) -> None:
        self._total.update(digests)
        if len(self._block_digests) <= limits.BLOCK_DIGESTS_MAX * BLOCK_DIGEST_BYTES:
            self._block_digests += digests

    def finish(self) -> tuple[bytes, bytes]:
        """Return (digest of the content, joined block digests: empty if there are too many)."""
        if self._filled_bytes:
            self._finish_block()
        self._total.update(self.size.to_bytes(8, "little"))
        few = len(self._block_digests) <= limits.BLOCK_DIGESTS_MAX * BLOCK_DIGEST_BYTES
        return self._total.digest(), bytes(self._block_digests) if few else b""
