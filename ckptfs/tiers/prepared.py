"""Prepared files of the RAM tier: memory that is allocated before an application writes into it.

A prepared file is an empty file with allocated pages beyond its end (fallocate with KEEP_SIZE), named `prepared/<bytes, hex>-<unique>` in
the root of the RAM tier. `take_file` renames it to the file of a new content. Writes then find their pages: they are faster, and the pages
are charged to the memory cgroup of the process that allocated them, not to that of the writer. The kernel returns zeros for a page that no
process has written, and SEEK_DATA skips it.

The execute bit of the owner marks a file with prepared pages, until `trim` removes those. The bit of the group says that the application
itself has called fallocate: then `trim` removes only what lies beyond the end.

`expected/<place, hex>` is a hole of the size that the last file of a place had (`ckptfs.series.patterns.get_place`). Its mtime says when.

Invariants:
- The two directories are the only record. The process that renames a prepared file owns it; the others get ENOENT.
- A file gets its name in `prepared` only when all its pages are allocated.

Crash safety: an unfinished file is `new-<unique>` and `remove_unfinished` deletes it. A file that was taken and has no row is a leftover
like any other.
"""

import contextlib
import errno
import os
import re
import stat
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckptfs import disk, libc, limits, procfs
from ckptfs.model import file_name
from ckptfs.tiers import health, huge_pages
from ckptfs.tiers.tier_root import TierRoot

disk.declare_labels(
    "prepare:create", "prepare:touch", "prepare:allocate", "prepare:publish", "prepare:remove", "prepare:take", "prepare:trim"
)

PREPARED_MODE = 0o700
PLAIN_MODE = 0o600
_PREPARED_NAME = re.compile(r"([0-9a-f]{1,16})-[0-9a-f]{32}")
_UNFINISHED = "new-"
_DIRECTORY_NAME = "prepared"
_PIECE_BYTES = 16 * limits.MIB
_ZEROS = bytes(2 * limits.MIB)
_TRIM_BYTES = 256 * limits.MIB
_BLOCK_BYTES = 512
_NOT_ENLARGED = {errno.ENOENT, errno.ENOSPC, errno.ENOMEM, errno.EINTR}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, order=True)
class PreparedFile:
    """One file that can be taken."""

    size_bytes: int
    name: str


@dataclass(frozen=True, slots=True)
class ExpectedSize:
    """The size of the last file of a place, and when that file was closed."""

    place: bytes
    size_bytes: int
    closed_ns: int


def measure_bytes(root: Path) -> int:
    """Return the bytes that are prepared in the tier at `root`."""
    with contextlib.suppress(FileNotFoundError):
        return sum(file.size_bytes for file in _parse_names(os.listdir(root / _DIRECTORY_NAME)))
    return 0


def _parse_names(names: list[str]) -> list[PreparedFile]:
    found = (_PREPARED_NAME.fullmatch(name) for name in names)
    return [PreparedFile(int(match[1], 16), match[0]) for match in found if match]


class PreparedFiles:
    """The prepared files and expected sizes in one RAM tier, for any process and thread."""

    def __init__(self, storage: TierRoot, *, has_huge_pages: bool = False) -> None:
        """`has_huge_pages`: the tier is a tmpfs that shall use them."""
        self._storage = storage
        self._allocating: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        if has_huge_pages:
            self._allocating = partial(huge_pages.for_prepared_files, storage.root)
        self._directories: dict[str, int] = {}

    # --- taking -------------------------------------------------------------------------------------------------------

    def list_files(self) -> list[PreparedFile]:
        """Return what can be taken, in no order."""
        try:
            return _parse_names(os.listdir(self._directory))
        except OSError as failure:
            if not health.is_tier_failure(failure):
                raise
            return []  # The RAM tier was given up.

    def get_bytes(self) -> int:
        """Return the bytes of all files that can be taken."""
        return sum(file.size_bytes for file in self.list_files())

    def find(self, expected_bytes: int, *, is_limited: bool = False) -> PreparedFile | None:
        """Return the smallest file that suits a content of about `expected_bytes` (0: unknown), or None.

        `is_limited`: the writer must not reach fresh pages. It gets a file that one write(2) cannot outgrow if there is one, for an unknown
        size too.
        """
        if expected_bytes < limits.PREPARED_BYTES_MIN and (expected_bytes or not is_limited):
            return None
        files, bytes_max = self.list_files(), limits.PREPARED_SURPLUS_RATIO * expected_bytes
        if is_limited:
            bytes_min = max(expected_bytes, limits.TOP_UP_AHEAD_BYTES)
            enough = min((file for file in files if file.size_bytes >= bytes_min), default=None)
            if enough is not None:
                return enough
        return min((file for file in files if expected_bytes <= file.size_bytes <= bytes_max), default=None)

    def take_file(self, file: PreparedFile, content: int) -> bool:
        """Make `file` the file of `content`. Return False if another process has taken it."""
        try:
            disk.rename("prepare:take", file.name, file_name(content), old_fd=self._directory, new_fd=self._storage.directory)
        except FileNotFoundError:
            return False
        return True

    def enlarge(self, file: PreparedFile, size_bytes: int, cpu_s_max: float) -> PreparedFile:
        """Allocate the pages that `file` lacks of `size_bytes`, without a touch. Return the larger file.

        Returns `file` if that takes more than `cpu_s_max` of this thread, if the tier is full, or if another process has taken it.
        """
        until_s = time.thread_time() + cpu_s_max
        larger = PreparedFile(size_bytes, f"{size_bytes:x}-{uuid.uuid4().hex}")
        try:
            fd = os.open(file.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._directory)
            with disk.closing(fd), self._allocating():
                for offset in range(file.size_bytes, size_bytes, _PIECE_BYTES):
                    if time.thread_time() > until_s:
                        return file
                    top_up(fd, offset, min(_PIECE_BYTES, size_bytes - offset))
            disk.rename("prepare:publish", file.name, larger.name, old_fd=self._directory, new_fd=self._directory)
        except OSError as failure:
            if failure.errno not in _NOT_ENLARGED:
                raise
            return file
        return larger

    # --- preparing ----------------------------------------------------------------------------------------------------

    def add(self, size_bytes: int, before_piece: Callable[[int], None] = lambda _: None, *, touches: bool = False) -> PreparedFile:
        """Prepare one file.

        `before_piece` gets the bytes still to be allocated and may raise to stop. A failure leaves nothing. `touches`: see
        `_touch_free_pages`.
        """
        unique = uuid.uuid4().hex
        unfinished, file = _UNFINISHED + unique, PreparedFile(size_bytes, f"{size_bytes:x}-{unique}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = disk.open_file("prepare:create", unfinished, flags, PREPARED_MODE, dir_fd=self._directory)
        try:
            for offset in range(0, size_bytes, _PIECE_BYTES):
                before_piece(size_bytes - offset)
                with self._allocating():
                    if touches:
                        self._touch_free_pages(_PIECE_BYTES)
                    top_up(fd, offset, min(_PIECE_BYTES, size_bytes - offset))
            disk.rename("prepare:publish", unfinished, file.name, old_fd=self._directory, new_fd=self._directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(unfinished, dir_fd=self._directory)
            raise
        finally:
            os.close(fd)
        return file

    def _touch_free_pages(self, size_bytes: int) -> None:
        """Write `size_bytes` of zeros to a file without a name and free them.

        The kernel next gives out the pages that were freed last. The host of a virtual machine backs a page at its first use, and takes it
        back some seconds after it was freed. A page that was allocated but never written would cost its first writer that time: a prepared
        file would be no faster than a fresh one.
        """
        with disk.closing(os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, PLAIN_MODE, dir_fd=self._directory)) as fd:
            os.ftruncate(fd, size_bytes)  # Huge pages are used within the size only.
            for offset in range(0, size_bytes, len(_ZEROS)):
                disk.act("prepare:touch", os.pwrite, fd, _ZEROS, offset)

    def remove(self, file: PreparedFile) -> bool:
        """Give the memory of a file back. Return False if another process has taken it."""
        try:
            disk.unlink("prepare:remove", file.name, dir_fd=self._directory)
        except FileNotFoundError:
            return False
        return True

    def give_back(self, bytes_wanted: int) -> int:
        """Remove files, the largest first, until `bytes_wanted` are free. Return what is free."""
        freed = 0
        for file in sorted(self.list_files(), reverse=True):
            if freed >= bytes_wanted:
                break
            if self.remove(file):
                freed += file.size_bytes
        return freed

    def remove_unfinished(self) -> None:
        """Remove unfinished files of a dead mover. Only the mover calls this, before it prepares anything."""
        for name in os.listdir(self._directory):
            if name.startswith(_UNFINISHED):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=self._directory)

    # --- expected sizes -----------------------------------------------------------------------------------------------

    def record_size(self, place: bytes, size_bytes: int) -> None:
        """Remember that a file of this place was closed with `size_bytes`."""
        with disk.closing(
            os.open(place.hex(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PLAIN_MODE, dir_fd=self._expected)
        ) as fd:
            os.ftruncate(fd, size_bytes)
            os.utime(fd)

    def prune_expected(self) -> list[ExpectedSize]:
        """Forget old and excess sizes. Return the others, the newest first."""
        found = []
        with os.scandir(self._expected) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError, ValueError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(ExpectedSize(bytes.fromhex(entry.name), status.st_size, status.st_mtime_ns))
        found.sort(key=lambda one: (-one.closed_ns, one.place))
        oldest_ns = time.time_ns() - int(limits.PREPARED_AGE_S * 1e9)
        kept = [one for one in found[: limits.PREPARED_PLACES_MAX] if one.closed_ns >= oldest_ns]
        for one in found[len(kept) :]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(one.place.hex(), dir_fd=self._expected)
        return kept

    def close(self) -> None:
        while self._directories:
            os.close(self._directories.popitem()[1])

    @property
    def _directory(self) -> int:
        return self._open_directory(_DIRECTORY_NAME)

    @property
    def _expected(self) -> int:
        return self._open_directory("expected")

    def _open_directory(self, name: str) -> int:
        """Return a descriptor of a directory in the root of the tier; create it at first use."""
        if name not in self._directories:
            _ = self._storage.directory  # Checks the owner of the root.
            path = self._storage.root / name
            path.mkdir(mode=0o700, exist_ok=True)
            self._directories[name] = os.open(path, _DIRECTORY)
        return self._directories[name]


# --- a file that was taken --------------------------------------------------------------------------------------------


def is_prepared(status: os.stat_result) -> bool:
    """Return True if the file may have prepared pages that no process has written."""
    return bool(status.st_mode & stat.S_IXUSR)


def get_allocated_bytes(fd: int) -> int:
    """Return the bytes that are allocated for an open file, prepared ones included."""
    return os.fstat(fd).st_blocks * _BLOCK_BYTES


def top_up(fd: int, offset: int, length: int) -> None:
    """Allocate missing pages of a range; the size stays, and the caller's cgroup pays. Raises ENOSPC."""
    disk.act("prepare:allocate", libc.fallocate, fd, libc.KEEP_SIZE, offset, length)


def mark_allocated_by_application(fd: int) -> None:
    """Mark a prepared file whose application has called fallocate: it expects its pages to stay."""
    status = os.fstat(fd)
    if is_prepared(status):
        os.fchmod(fd, stat.S_IMODE(status.st_mode) | stat.S_IXGRP)


def begin_trim(fd: int) -> bool:
    """Return True if a prepared file has pages that no process wrote. Remove its mark if it has none."""
    status = os.fstat(fd)
    if not is_prepared(status):
        return False
    end = _round_to_page(status.st_size)
    if status.st_blocks * _BLOCK_BYTES > end or (not status.st_mode & stat.S_IXGRP and _list_holes(fd, end, at_most=1)):
        return True
    os.fchmod(fd, PLAIN_MODE)
    return False


def trim_end(fd: int) -> None:
    """Remove the pages beyond the end of a prepared file that no process writes, unless they are many."""
    status = os.fstat(fd)
    end = _round_to_page(status.st_size)
    if is_prepared(status) and 0 < status.st_blocks * _BLOCK_BYTES - end <= limits.PREPARED_TRIM_BYTES_MAX:
        _punch(fd, end, limits.OFFSET_MAX - procfs.PAGE_BYTES - end)
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def trim(fd: int, *, holes: bool) -> bool:
    """Remove a piece of the prepared pages of a file, and then the mark.

    The pages lie beyond the end of the file, and with `holes` also below it. No process may write the file. Pages below the end may be
    written through a mapping. `holes` therefore needs a write lease on `fd`. Without it the mark stays if there are any. Returns True if
    there is more to remove. The times of the file stay.
    """
    status = os.fstat(fd)
    if not is_prepared(status):
        return False
    end = _round_to_page(status.st_size)
    try:
        if _trim_end(fd, end):
            return True
        found = [] if status.st_mode & stat.S_IXGRP else _list_holes(fd, end)
        for start, stop in found if holes else ():
            _punch(fd, start, stop - start)
        if holes or not found:
            os.fchmod(fd, PLAIN_MODE)
        return False
    finally:
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))


def _trim_end(fd: int, end: int) -> bool:
    """Punch the first piece beyond `end` that has pages, and return True; or else all the rest."""
    allocated = get_allocated_bytes(fd)
    for start in range(end, end + allocated, _TRIM_BYTES):
        _punch(fd, start, _TRIM_BYTES)
        if get_allocated_bytes(fd) < allocated - _TRIM_BYTES // 2:
            return True
    _punch(fd, end, limits.OFFSET_MAX - procfs.PAGE_BYTES - end)
    return False


def _punch(fd: int, offset: int, length: int) -> None:
    disk.act("prepare:trim", libc.fallocate, fd, libc.KEEP_SIZE | libc.PUNCH_HOLE, offset, length)


def _round_to_page(size: int) -> int:
    return -(-size // procfs.PAGE_BYTES) * procfs.PAGE_BYTES


def get_data_bytes(fd: int, status: os.stat_result) -> int:
    """Return the bytes in whole pages that were written to a prepared file, if it has few holes."""
    end = _round_to_page(status.st_size)
    allocated = min(end, status.st_blocks * _BLOCK_BYTES)
    if status.st_mode & stat.S_IXGRP:
        return allocated
    holes = _list_holes(fd, end, at_most=limits.PREPARED_EXTENTS_MAX)
    return min(allocated, end - sum(stop - start for start, stop in holes))


def _list_holes(fd: int, end: int, at_most: int | None = None) -> list[tuple[int, int]]:
    """Return (start, end) of the holes below `end`, in whole pages, at most `at_most` of them."""
    found: list[tuple[int, int]] = []
    offset = 0
    while offset < end and (at_most is None or len(found) < at_most):
        start = _round_to_page(seek(fd, offset, os.SEEK_HOLE))
        if start >= end:
            break
        offset = min(end, seek(fd, start, os.SEEK_DATA))
        found.append((start, offset))
    return found


def seek(fd: int, offset: int, whence: int) -> int:
    """Call lseek(2) for data or a hole; without one the result is beyond any file."""
    try:
        return os.lseek(fd, offset, whence)
    except OSError as failure:
        if failure.errno == errno.ENXIO:
            return limits.OFFSET_MAX
        if failure.errno in {errno.EINVAL, errno.EOPNOTSUPP}:
            return offset if whence == os.SEEK_DATA else limits.OFFSET_MAX
        raise
