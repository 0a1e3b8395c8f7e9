"""A random I/O checker in the manner of fsx: one file in the mount, a model of its bytes in memory, and a seed that replays.

Every act is done on the file and on the model; every read, through whichever of several handles, mappings or names, is compared.
"""

import ctypes
import mmap
import os
import random
from pathlib import Path

SIZE_MAX = 300_000
LENGTH_MAX = 40_000
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class RandomIO:
    """`step` does one act; `check` compares everything."""

    def __init__(self, path: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.path = path
        self.model = bytearray()
        self.handles = [os.open(path, os.O_RDWR | os.O_CREAT, 0o644)]
        self.history: list[str] = []
        self._acts = [
            *[self.write] * 8, *[self.read] * 8, *[self.map_write] * 3, *[self.map_read] * 3, *[self.truncate] * 3, self.append, self.punch,
            self.zero, self.allocate, self.copy, self.reopen, self.another, self.sync, self.by_name,
        ]  # fmt: skip

    def step(self) -> None:
        """One act of a random kind."""
        act = self.random.choice(self._acts)
        fd = self.random.choice(self.handles)
        offset = self.random.randrange(SIZE_MAX)
        length = self.random.randrange(1, LENGTH_MAX)
        if self.random.random() < 0.2:
            offset, length = offset // 4096 * 4096, max(4096, length // 4096 * 4096)
        self.history.append(f"{len(self.history)}: {act.__name__}({fd}, {offset}, {length}) at size {len(self.model)}")
        act(fd, offset, length)

    def check(self) -> None:
        """Compare the size and all bytes, through a handle and by name."""
        fd = self.random.choice(self.handles)
        self._same(os.fstat(fd).st_size, len(self.model), "size")
        self._same(os.pread(fd, SIZE_MAX * 2, 0), bytes(self.model), "all by handle")
        self._same(self.path.read_bytes(), bytes(self.model), "all by name")

    def close(self) -> None:
        """Close every handle."""
        for fd in self.handles:
            os.close(fd)
        self.handles = []

    # --- acts ---------------------------------------------------------------------------------------------------------

    def write(self, fd: int, offset: int, length: int) -> None:
        data = self.random.randbytes(length)
        os.pwrite(fd, data, offset)
        self._put(offset, data)

    def append(self, fd: int, offset: int, length: int) -> None:
        if len(self.model) + length > 2 * SIZE_MAX:
            return
        data = self.random.randbytes(length)
        appending = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(appending, data)
        os.close(appending)
        self.model += data

    def read(self, fd: int, offset: int, length: int) -> None:
        self._same(os.pread(fd, length, offset), bytes(self.model[offset : offset + length]), "read")

    def by_name(self, fd: int, offset: int, length: int) -> None:
        self._same(self.path.read_bytes(), bytes(self.model), "read by name")
        self._same(self.path.stat().st_size, len(self.model), "stat")

    def map_write(self, fd: int, offset: int, length: int) -> None:
        length = min(length, len(self.model) - offset)
        if length <= 0:
            return
        data = self.random.randbytes(length)
        with mmap.mmap(fd, len(self.model)) as mapping:
            mapping[offset : offset + length] = data
            if self.random.random() < 0.5:
                mapping.flush()
        self._put(offset, data)

    def map_read(self, fd: int, offset: int, length: int) -> None:
        if self.model:
            with mmap.mmap(fd, len(self.model), prot=mmap.PROT_READ) as mapping:
                self._same(mapping[offset : offset + length], bytes(self.model[offset : offset + length]), "read through a mapping")

    def truncate(self, fd: int, offset: int, length: int) -> None:
        if self.random.random() < 0.5:
            os.ftruncate(fd, offset)
        else:
            os.truncate(self.path, offset)
        self._resize(offset)

    def punch(self, fd: int, offset: int, length: int) -> None:
        self._fallocate(fd, PUNCH_HOLE | KEEP_SIZE, offset, length)
        length = max(0, min(length, len(self.model) - offset))
        self.model[offset : offset + length] = bytes(length)

    def zero(self, fd: int, offset: int, length: int) -> None:
        self._fallocate(fd, ZERO_RANGE, offset, length)
        self._put(offset, bytes(length))

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._fallocate(fd, 0, offset, length)
        self._resize(max(len(self.model), offset + length))

    def copy(self, fd: int, offset: int, length: int) -> None:
        target = self.random.randrange(SIZE_MAX)
        length = min(length, len(self.model) - offset, abs(target - offset))
        if length > 0:
            count = os.copy_file_range(fd, fd, length, offset, target)
            self._put(target, bytes(self.model[offset : offset + count]))

    def reopen(self, fd: int, offset: int, length: int) -> None:
        os.close(fd)
        flags = os.O_RDWR | (os.O_TRUNC if self.random.random() < 0.1 else 0)
        self.handles[self.handles.index(fd)] = os.open(self.path, flags)
        if flags & os.O_TRUNC:
            self.model.clear()

    def another(self, fd: int, offset: int, length: int) -> None:
        if len(self.handles) < 4:
            self.handles.append(os.open(self.path, os.O_RDWR))
        elif self.random.random() < 0.5:
            os.close(self.handles.pop())

    def sync(self, fd: int, offset: int, length: int) -> None:
        os.fsync(fd)

    # --- the model ----------------------------------------------------------------------------------------------------

    def _put(self, offset: int, data: bytes) -> None:
        if offset > len(self.model):
            self._resize(offset)
        self.model[offset : offset + len(data)] = data

    def _resize(self, size: int) -> None:
        del self.model[size:]
        self.model += bytes(size - len(self.model))

    def _fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        if _libc.fallocate(fd, mode, offset, length):
            raise OSError(ctypes.get_errno(), f"fallocate\n{self._recent()}")

    def _same(self, found: object, expected: object, what: str) -> None:
        if found != expected:
            where = ""
            if isinstance(found, bytes) and isinstance(expected, bytes):
                at = next((n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected)))
                found, expected, where = f"{len(found)} bytes", f"{len(expected)} bytes", f", first differing at {at} of that"
            raise AssertionError(f"{what}: {found} instead of {expected}{where}\n{self._recent()}")

    def _recent(self) -> str:
        return "\n".join(self.history[-25:])
