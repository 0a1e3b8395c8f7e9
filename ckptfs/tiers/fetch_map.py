"""The map of a content that is being fetched: present blocks, and blocks that readers wait for.

A map is a small file in the root of the RAM tier, mapped by the mover and the mount process. The mover marks blocks that are in the
target file and verified; readers mark blocks that they wait for.

Invariants:
- A block is marked present after its bytes are written, and stays marked.
- The map is published while its target lies under the name of the content, and removed before the target is.
- It names the inode of its target, so that its marks never apply to another file (P7).

Crash safety: the next mover removes published maps; readers wait until the content is fetched again.
"""

import contextlib
import mmap
import os
import struct
from collections.abc import Collection
from pathlib import Path

from ckptfs import digest, disk, limits
from ckptfs.model import Content, Tier

_HEADER = struct.Struct("<8s16sQQQ8s")
_MAGIC = b"arrival1"
_CLOSED_OFFSET = _HEADER.size
_MARKS_OFFSET = 64
_MARKED = b"\1"


def get_directory(ram: Path) -> Path:
    """Return the directory of maps, in the root of the RAM tier."""
    return ram / "arriving"


def delete_all(ram: Path) -> None:
    """Delete the maps of a previous mover."""
    with contextlib.suppress(FileNotFoundError):
        for path in get_directory(ram).iterdir():
            path.unlink(missing_ok=True)


class FetchMap:
    """The map of one content that is fetched into one file. Any thread and process may read and set marks."""

    def __init__(self, path: Path, memory: mmap.mmap, identity: tuple[int, int]) -> None:
        self._path = path
        self._memory = memory
        self._identity = identity
        _, self.digest, self.generation, self.size, self._target_inode, tier = _HEADER.unpack_from(memory)
        self.tier = Tier(tier.rstrip(b"\0").decode())
        self.block_count = digest.count_blocks(self.size)

    @classmethod
    def publish(cls, ram: Path, content: Content, tier: Tier, target_fd: int, missing_blocks: Collection[int]) -> "FetchMap":
        """Publish a map for the mover: every block except `missing_blocks` is in the target. Raises OSError."""
        assert content.digest is not None
        get_directory(ram).mkdir(mode=0o700, exist_ok=True)
        path = _get_path(ram, content.id)
        temporary = path.with_suffix(".new")
        block_count = digest.count_blocks(content.size)
        # Never truncated: access to a mapped page beyond the end of a file kills the process.
        temporary.unlink(missing_ok=True)
        try:
            with disk.closing(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)) as fd:
                # In a full tier, access to a mapped page that is not allocated kills the process.
                os.posix_fallocate(fd, 0, _MARKS_OFFSET + 2 * block_count)
                memory = mmap.mmap(fd, _MARKS_OFFSET + 2 * block_count)
                identity = _get_identity(fd)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        inode = os.fstat(target_fd).st_ino
        _HEADER.pack_into(memory, 0, _MAGIC, content.digest, content.generation, content.size, inode, tier.encode())
        memory[_MARKS_OFFSET : _MARKS_OFFSET + block_count] = _MARKED * block_count
        for number in missing_blocks:
            memory[_MARKS_OFFSET + number] = 0
        temporary.rename(path)
        return cls(path, memory, identity)

    @classmethod
    def find(cls, ram: Path, content: int) -> "FetchMap | None":
        """Return the published map of a content for a reader; None without one, or if it is damaged."""
        path = _get_path(ram, content)
        try:
            with disk.closing(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)) as fd:
                memory = mmap.mmap(fd, 0)
                found = cls(path, memory, _get_identity(fd))
            return found if memory[: len(_MAGIC)] == _MAGIC and len(memory) == _MARKS_OFFSET + 2 * found.block_count else None
        except (FileNotFoundError, ValueError, struct.error):
            return None

    def is_for(self, fd: int) -> bool:
        """Return True if `fd`, opened after `find`, is the target and is still being filled."""
        return self.is_published and os.fstat(fd).st_ino == self._target_inode

    @property
    def is_published(self) -> bool:
        """Return True while blocks may still arrive; False after a new mover started."""
        if self.is_closed:
            return False
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    @property
    def is_closed(self) -> bool:
        """Return True once the target is complete or given up."""
        return bool(self._memory[_CLOSED_OFFSET])

    @property
    def present_count(self) -> int:
        return int(self._memory[_MARKS_OFFSET : _MARKS_OFFSET + self.block_count].count(_MARKED))

    def has_blocks(self, numbers: range) -> bool:
        return bool(self._memory[_MARKS_OFFSET + numbers.start : _MARKS_OFFSET + numbers.stop].count(_MARKED) == len(numbers))

    def mark_present(self, number: int) -> bool:
        """Mark a block that is written and verified. Return True if a reader waits for it."""
        self._memory[_MARKS_OFFSET + number] = 1
        is_awaited = bool(self._memory[_MARKS_OFFSET + self.block_count + number])
        self._memory[_MARKS_OFFSET + self.block_count + number] = 0
        return is_awaited

    def request_blocks(self, numbers: range) -> None:
        """Mark those of these blocks that are missing as awaited."""
        for number in numbers:
            if not self._memory[_MARKS_OFFSET + number]:
                self._memory[_MARKS_OFFSET + self.block_count + number] = 1

    def list_awaited(self) -> list[int]:
        """Return awaited blocks in ascending order, at most `limits.AWAITED_BLOCKS_MAX`."""
        begin, end = _MARKS_OFFSET + self.block_count, _MARKS_OFFSET + 2 * self.block_count
        found: list[int] = []
        position = self._memory.find(_MARKED, begin, end)
        while position >= 0 and len(found) < limits.AWAITED_BLOCKS_MAX:
            if not self._memory[position - self.block_count]:
                found.append(position - begin)
            position = self._memory.find(_MARKED, position + 1, end)
        return found

    def close(self) -> None:
        """Close the map for new readers. The mover calls this before the target may be removed."""
        is_published = self.is_published
        self._memory[_CLOSED_OFFSET] = 1
        if is_published:  # Otherwise the name is that of a later map.
            self._path.unlink(missing_ok=True)


def _get_path(ram: Path, content: int) -> Path:
    return get_directory(ram) / f"{content:016x}"


def _get_identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino
