"""Frozen values that the parts of ckptfs exchange: snapshots, never live views."""

import stat
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol

ROOT = 1
"""The inode of the root directory, fixed by FUSE."""
HISTORY_NAME = b".ckptfs.history"
"""The entry of the root that holds the history of checkpoint sets. No application sees it under this name."""

UNIX_PREFIX = "unix:"
"""Begins the address of a socket in the filesystem."""


def file_name(content: int) -> str:
    """Return the name of the file of a content in the directory of a tier."""
    return f"{content:016x}"


class Level(StrEnum):
    """What a file survives (P3), the lowest first. Derived from verified copies, never stored."""

    NONE = "none"
    LOCAL = "local"
    CLIQUE = "clique"
    PFS = "pfs"

    @property
    def rank(self) -> int:
        """Return the place in the order of levels. The levels themselves compare as strings."""
        return _LEVEL_RANKS[self]


_LEVEL_RANKS = {level: rank for rank, level in enumerate(Level)}
WAITABLE_LEVELS = (Level.LOCAL, Level.CLIQUE, Level.PFS)
"""The levels that an application can wait for."""


class DataPath(StrEnum):
    """How data moves between an application and a tier."""

    AUTO = "auto"
    PASSTHROUGH = "passthrough"
    BUFFERED = "buffered"


class CliqueLost(StrEnum):
    """The result of fsync=clique if too few failure domains are left: an error, or level local."""

    ERROR = "error"
    LOCAL = "local"


class Tier(StrEnum):
    """A place on this node that holds bytes."""

    RAM = "ram"
    NVME = "nvme"
    PFS = "pfs"


LOCAL_TIERS = (Tier.RAM, Tier.NVME)
"""The tiers that belong to this node alone."""


class ContentState(IntEnum):
    """OPEN has writers, CLOSED awaits its seal, DOOMED awaits deletion, LOST has no good copy."""

    OPEN = 0
    CLOSED = 1
    SEALED = 2
    DOOMED = 3
    LOST = 4


class CopyState(IntEnum):
    """FILLING is being written by the mover, GOOD counts, QUARANTINED failed its digest and never counts.

    STALE is a generation of a content that was open and has a newer one: never counted or read, but a source of blocks.
    """

    FILLING = 0
    GOOD = 1
    QUARANTINED = 2
    STALE = 3


@dataclass(frozen=True, slots=True)
class Inode:
    """A row of the table `inode`. Times in ns since the epoch, sizes in bytes."""

    id: int
    mode: int
    uid: int
    gid: int
    rdev: int
    nlink: int
    size: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    target: bytes | None
    content: int | None
    generation: int
    parent: int
    is_imported: bool
    history: int = 0
    """Of a file: how many of its names are in the history of sets. Of a directory: 1 if it is in the history."""
    allocated_blocks: int | None = None
    """Allocated 512-byte units (st_blocks) of the backing file; None: derived from the size."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def shown_nlink(self) -> int:
        """Return the number of names that applications see, without those in the history."""
        return self.nlink if self.is_directory else self.nlink - self.history


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a directory. `cookie` orders the entries permanently, so that readdir is stable."""

    cookie: int
    parent: int
    name: bytes
    child: int


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of one generation of a file; `block_digests` are joined, 16 bytes for each 4 MiB block."""

    id: int
    inode: int
    generation: int
    state: ContentState
    size: int
    digest: bytes | None
    block_digests: bytes | None
    change: int
    is_remote: bool = False  # Another node wrote this generation.


@dataclass(frozen=True, slots=True)
class Copy:
    """One content at one tier of this node. Only GOOD copies count."""

    content: int
    tier: Tier
    state: CopyState
    verified_ns: int


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """The bytes of a file on the PFS: a row of `pfs_file`, and the action `key` of a batch that made it.

    `is_complete`: it is exactly the sealed generation `generation`. `digest`: None if it was never read; `is_checked`: it was read back.
    """

    inode: int
    generation: int
    is_complete: bool
    size: int
    mtime_ns: int
    pfs_inode: int
    digest: bytes | None
    block_digests: bytes | None
    key: int = 0
    is_checked: bool = False


@dataclass(frozen=True, slots=True)
class Handle:
    """An open file of the kernel; it survives the mount process. `backing_id` 0 means none."""

    id: int
    inode: int
    content: int | None
    is_writer: bool
    backing_id: int
    generation: int = 0
    shown: int = 0  # The number under which the history shows the inode to the kernel; 0: its own.


@dataclass(frozen=True, slots=True)
class PfsEntryStat:
    """An entry of a PFS directory. `target` and `xattrs` are loaded only for unknown entries."""

    name: bytes
    mode: int
    uid: int
    gid: int
    rdev: int
    nlink: int
    size: int
    ino: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    target: bytes | None = None
    xattrs: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


class Notifier(Protocol):
    """Hints of a flow to other lanes and processes, after its commit. They never wait and may be lost."""

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """Invalidate a name in the kernel's dentry cache, also a negative one."""

    def invalidate_inode(self, inode: int) -> None:
        """Invalidate the kernel's attributes and pages of an inode."""

    def notify_replies(self) -> None:
        """Announce answered mover requests."""

    def notify_sealed(self) -> None:
        """Announce contents that were sealed: a checkpoint set may be complete."""

    def wake_lanes(self, urgent_lane: str = "") -> None:
        """Wake the other lanes; `urgent_lane` runs without gathering."""


@dataclass(frozen=True, slots=True)
class SeriesRule:
    """Names that are a series, and when a member is complete: at most one of the last three is set.

    `last`: the file that is written last, in the member; with a `*` for each number, beside it. `files`: so many files. `quiet_s`: nothing
    of it changed for so long.
    """

    pattern: str
    last: str = ""
    files: int = 0
    quiet_s: float = 0.0

    @property
    def says_complete(self) -> bool:
        """Return True if the rule says when a member is complete."""
        return bool(self.last or self.files or self.quiet_s)
