"""Owns how far a content that is being fetched has come, for those who read it meanwhile: a small file beside the RAM tier's contents that
mover and mount both map into memory. The mover marks the blocks that are in the target and right, readers mark those that they wait for.

A block's mark is set after its bytes are written, and never taken back. The file is published while its target lies under the content's
name and gone before the target goes; it names the target's inode, so that marks are never believed of another file (P7).
If we die here: the next mover removes what is published, and readers wait until the content is fetched anew.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Collection
from pathlib import Path

from ckptfs import limits
from ckptfs.model import Content, Tier

_HEADER = struct.Struct("<8s16sQQQ8s")
_MAGIC = b"arrival1"
_CLOSED_OFFSET = _HEADER.size
_MARKS_OFFSET = 64
_MARKED = b"\1"


def get_directory(ram: Path) -> Path:
    """Where arrivals are published, in the root of the RAM tier."""
    return ram / "arriving"


def delete_all(ram: Path) -> None:
    """A new mover begins: whatever the last one published goes on no more."""
    with contextlib.suppress(FileNotFoundError):
        for path in get_directory(ram).iterdir():
            path.unlink(missing_ok=True)


class FetchMap:
    """One content on its way into one file. Marks may be set and looked at from any thread and process."""

    def __init__(self, path: Path, memory: mmap.mmap, marker: tuple[int, int]) -> None:
        self._path = path
        self._memory = memory
        self._marker = marker
        _, self.digest, self.generation, self.size, self._target_inode, tier = _HEADER.unpack_from(memory)
        self.tier = Tier(tier.rstrip(b"\0").decode())
        self.block_count = -(-self.size // limits.BLOCK_BYTES)

    @classmethod
    def publish(cls, ram: Path, content: Content, tier: Tier, target_fd: int, missing_blocks: Collection[int]) -> "FetchMap":
        """The mover's: everything but the blocks `lacking` is in the target already. Raises OSError."""
        assert content.digest is not None
        get_directory(ram).mkdir(mode=0o700, exist_ok=True)
        path = _path(ram, content.id)
        temporary = path.with_suffix(".new")
        block_count = -(-content.size // limits.BLOCK_BYTES)
        # Never cut off: what somebody has mapped and is gone from the file would end his process.
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Without its pages a mapping would be a way to die by a signal where the tier is full.
            os.posix_fallocate(fd, 0, _MARKS_OFFSET + 2 * block_count)
            memory = mmap.mmap(fd, _MARKS_OFFSET + 2 * block_count)
            marker = _identity(fd)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        inode = os.fstat(target_fd).st_ino
        _HEADER.pack_into(memory, 0, _MAGIC, content.digest, content.generation, content.size, inode, tier.encode())
        memory[_MARKS_OFFSET : _MARKS_OFFSET + block_count] = _MARKED * block_count
        for number in missing_blocks:
            memory[_MARKS_OFFSET + number] = 0
        temporary.rename(path)
        return cls(path, memory, marker)

    @classmethod
    def find(cls, ram: Path, content: int) -> "FetchMap | None":
        """A reader's: what is published of a content. What is damaged is nothing."""
        path = _path(ram, content)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            memory = mmap.mmap(fd, 0)
            found = cls(path, memory, _identity(fd))
            return found if memory[: len(_MAGIC)] == _MAGIC and len(memory) == _MARKS_OFFSET + 2 * found.block_count else None
        except (ValueError, struct.error):
            return None
        finally:
            os.close(fd)

    def is_for(self, fd: int) -> bool:
        """Whether this descriptor, opened since the arrival was found, is that of its target: it is, and is still being filled."""
        return self.is_published and os.fstat(fd).st_ino == self._target_inode

    @property
    def is_published(self) -> bool:
        """Whether blocks still come. Not so when its mover has died, and another one has begun."""
        if self.is_closed:
            return False
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._marker

    # --- marks --------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Nothing more comes into this target: it is whole, or given up."""
        return bool(self._memory[_CLOSED_OFFSET])

    @property
    def present_count(self) -> int:
        """How many blocks are there."""
        return int(self._memory[_MARKS_OFFSET : _MARKS_OFFSET + self.block_count].count(_MARKED))

    def has_blocks(self, numbers: range) -> bool:
        """Whether all of these blocks are there."""
        return bool(self._memory[_MARKS_OFFSET + numbers.start : _MARKS_OFFSET + numbers.stop].count(_MARKED) == len(numbers))

    def mark_present(self, number: int) -> bool:
        """A block is in the target, and right; whether somebody waits for it."""
        self._memory[_MARKS_OFFSET + number] = 1
        is_awaited = bool(self._memory[_MARKS_OFFSET + self.block_count + number])
        self._memory[_MARKS_OFFSET + self.block_count + number] = 0
        return is_awaited

    def request_blocks(self, numbers: range) -> None:
        """Somebody waits for those of these blocks that are not there."""
        for number in numbers:
            if not self._memory[_MARKS_OFFSET + number]:
                self._memory[_MARKS_OFFSET + self.block_count + number] = 1

    def list_awaited(self) -> list[int]:
        """The blocks that somebody waits for, in their order, a bounded number."""
        begin, end = _MARKS_OFFSET + self.block_count, _MARKS_OFFSET + 2 * self.block_count
        found: list[int] = []
        at = self._memory.find(_MARKED, begin, end)
        while at >= 0 and len(found) < limits.AWAITED_BLOCKS_MAX:
            if not self._memory[at - self.block_count]:
                found.append(at - begin)
            at = self._memory.find(_MARKED, at + 1, end)
        return found

    def close(self) -> None:
        """The mover's: from here on nobody begins to read by it. Before the target may go."""
        self._memory[_CLOSED_OFFSET] = 1
        self._path.unlink(missing_ok=True)


def _path(ram: Path, content: int) -> Path:
    return get_directory(ram) / f"{content:016x}"


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
