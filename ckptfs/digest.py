"""Digests: xxh3-128 of every 4 MiB block, and one over all of the blocks' digests in order (with the size)."""

import os
from collections.abc import Callable

import xxhash

from ckptfs import limits

BLOCK_DIGEST_BYTES = 16
ZEROS = memoryview(bytes(256 * limits.KIB))
ZERO_BLOCK = xxhash.xxh3_128_digest(bytes(limits.BLOCK_BYTES))


def block(data: bytes | memoryview) -> bytes:
    """The digest of one block: 16 bytes."""
    return xxhash.xxh3_128_digest(data)


def whole(blocks: bytes, size: int) -> bytes:
    """The digest of a content of `size` bytes whose blocks' digests, joined, are `blocks`: 16 bytes."""
    return xxhash.xxh3_128_digest(size.to_bytes(8, "little") + blocks)


class Running:
    """Digests of bytes that pass by in order, in pieces of any length."""

    def __init__(self) -> None:
        self.size = 0
        self._blocks: list[bytes] = []
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
                whole_blocks = count // limits.BLOCK_BYTES
                self._blocks.extend([ZERO_BLOCK] * whole_blocks)
                self.size += whole_blocks * limits.BLOCK_BYTES
                count %= limits.BLOCK_BYTES
                continue
            piece = min(count, limits.BLOCK_BYTES - self._filled, len(ZEROS))
            self.update(ZEROS[:piece])
            count -= piece

    def _end_block(self) -> None:
        self._blocks.append(self._current.digest())
        self._current = xxhash.xxh3_128()
        self._filled = 0

    def finish(self) -> tuple[bytes, bytes]:
        """(digest over all, the blocks' digests joined)."""
        if self._filled:
            self._end_block()
        blocks = b"".join(self._blocks)
        return whole(blocks, self.size), blocks


def of_file(fd: int, *, before_block: Callable[[], None] = lambda: None) -> tuple[int, bytes, bytes]:
    """Read the file behind `fd` from its start to its end: (size, digest, blocks). `before_block` may raise to stop early."""
    running = Running()
    buffer = bytearray(limits.BLOCK_BYTES)
    view = memoryview(buffer)
    while True:
        before_block()
        count = os.preadv(fd, [view], running.size)
        if count == 0:
            break
        running.update(view[:count])
    digest, blocks = running.finish()
    return running.size, digest, blocks
