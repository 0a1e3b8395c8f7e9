"""The places of blocks of recent files, by digest. A new file may share blocks with these files.

The index is a hint in memory. A file that it names may be gone or changed, so its users compare bytes. It is bounded: the blocks that
were added longest ago go first.
"""

from ckptfs import digest, limits


class BlockIndex:
    """Blocks of files, which are numbers: contents of a tier, or inodes on the PFS. Used by one thread."""

    def __init__(self, blocks_max: int = limits.SHARED_BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._places: dict[bytes, tuple[int, int]] = {}

    def add(self, file: int, block_digests: bytes) -> None:
        """Add the blocks of a file but for holes. Of equal blocks the last one is found."""
        for number, block_digest in enumerate(digest.split_digests(block_digests)):
            if block_digest != digest.ZERO_BLOCK:
                self._places.pop(block_digest, None)
                self._places[block_digest] = file, number
        while len(self._places) > self._blocks_max:
            del self._places[next(iter(self._places))]

    @property
    def is_empty(self) -> bool:
        return not self._places

    def find(self, block_digests: bytes) -> dict[int, tuple[int, int]]:
        """Return {number of a block: (file, number there)} for the blocks of a new file."""
        wanted = enumerate(digest.split_digests(block_digests))
        return {number: place for number, one in wanted if (place := self._places.get(one)) is not None}
