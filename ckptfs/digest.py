"""Digests: xxh3-128 of every 4 MiB block, and one over all of the blocks' digests in order and the size.

A file is as long as somebody says: `truncate -s 1P` makes 250 million blocks of nothing. Runs of zeros cost next to nothing here, and the
blocks' digests of a file of more than `limits.BLOCK_DIGESTS_MAX` blocks are not kept, only the one over all.
"""

import xxhash

from ckptfs import limits

BLOCK_DIGEST_BYTES = 16
ZEROS = memoryview(bytes(256 * limits.KIB))
ZERO_BLOCK = xxhash.xxh3_128_digest(bytes(limits.BLOCK_BYTES))
ZERO_RUN_BLOCKS = 64 * limits.KIB
ZERO_RUN = ZERO_BLOCK * ZERO_RUN_BLOCKS


def block(data: bytes | memoryview) -> bytes:
    """The digest of one block: 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def whole(blocks: bytes, size: int) -> bytes:
    """The digest of a content of `size` bytes whose blocks' digests, joined, are `blocks`: 16 bytes."""
    return xxhash.xxh3_128_digest(blocks + size.to_bytes(8, "little"))


def split(blocks: bytes) -> list[bytes]:
    """The digests that are joined in `blocks`."""
    return [blocks[start : start + BLOCK_DIGEST_BYTES] for start in range(0, len(blocks), BLOCK_DIGEST_BYTES)]


class Running:
    """Digests of bytes that pass by in order, in pieces of any length."""

    def __init__(self) -> None:
        self.size = 0
        self._blocks = bytearray()
        self._whole = xxhash.xxh3_128()
        self._current = xxhash.xxh3_128()
        self._filled = 0

    def update(self, data: bytes | memoryview) -> None:
        """Take the next piece."""
        view = memoryview(data)
        self.size += len(view)
        while view:
            piece = view[: limits.BLOCK_BYTES - self._filled]
            self._current.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == limits.BLOCK_BYTES:
                self._end_block()

    def zeros(self, count: int) -> None:
        """Take `count` zero bytes: a hole. Whole blocks of it cost nothing but their known digest."""
        while count:
            if not self._filled and count >= limits.BLOCK_BYTES:
                whole_blocks = min(count // limits.BLOCK_BYTES, ZERO_RUN_BLOCKS)
                self._take(ZERO_RUN[: whole_blocks * BLOCK_DIGEST_BYTES])
                self.size += whole_blocks * limits.BLOCK_BYTES
                count -= whole_blocks * limits.BLOCK_BYTES
                continue
            piece = min(count, limits.BLOCK_BYTES - self._filled, len(ZEROS))
            self.update(ZEROS[:piece])
            count -= piece

    def _end_block(self) -> None:
        self._take(self._current.digest())
        self._current = xxhash.xxh3_128()
        self._filled = 0

    def _take(self, digests: bytes) -> None:
        """The next blocks' digests."""
        self._whole.update(digests)
        if len(self._blocks) <= limits.BLOCK_DIGESTS_MAX * BLOCK_DIGEST_BYTES:
            self._blocks += digests

    def finish(self) -> tuple[bytes, bytes]:
        """(digest over all, the blocks' digests joined: empty where there are too many)."""
        if self._filled:
            self._end_block()
        self._whole.update(self.size.to_bytes(8, "little"))
        few = len(self._blocks) <= limits.BLOCK_DIGESTS_MAX * BLOCK_DIGEST_BYTES
        return self._whole.digest(), bytes(self._blocks) if few else b""
