"""Owns how a file whose blocks' digests are known comes from the PFS: block by block, each found right before it is written, so that the
application reads it as it comes. What somebody waits for is read first, then what follows it.

If we die here: the target has some of the blocks, and no copy counts yet.
"""

import os
from collections import deque

from ckptfs import digest, disk, limits
from ckptfs.flow.fetch.telling import BlockProgress
from ckptfs.tiers.write_behind import WriteBehind


class BlockwiseCopy:
    """One file: `blocks` are its blocks' digests, joined. The target is as long as the file, and empty."""

    def __init__(self, size: int, blocks: bytes) -> None:
        self.size = size
        self._digests = digest.split_digests(blocks)
        self.missing_blocks = [number for number, wanted in enumerate(self._digests) if wanted != digest.ZERO_BLOCK]

    def copy(self, source: int, target: int, progress: BlockProgress) -> bool:
        """Copy what is lacking. False when a block on the PFS is not what it should be; nothing of it was written."""
        remaining = deque(self.missing_blocks)
        write_behind, expected = WriteBehind(target), 0
        while remaining:
            self._prioritize_awaited(remaining, progress)
            number = remaining.popleft()
            data = self._read_block(source, number)
            if digest.hash_block(data) != self._digests[number]:
                return False
            if number != expected:
                write_behind = WriteBehind(target, number * limits.BLOCK_BYTES)
            disk.write_all("fetch:write", target, data, number * limits.BLOCK_BYTES)
            write_behind.advance(number * limits.BLOCK_BYTES + len(data))
            expected = number + 1
            progress.mark_present(number)
        return True

    def _prioritize_awaited(self, remaining: deque[int], progress: BlockProgress) -> None:
        awaited = next((number for number in progress.list_awaited() if number in remaining), None)
        if awaited is not None:
            remaining.rotate(-remaining.index(awaited))

    def _read_block(self, source: int, number: int) -> bytes:
        """A whole block; less where the file is shorter."""
        start, pieces = number * limits.BLOCK_BYTES, list[bytes]()
        end = min(start + limits.BLOCK_BYTES, self.size)
        while start < end and (piece := disk.act("fetch:read", os.pread, source, end - start, start)):
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)
