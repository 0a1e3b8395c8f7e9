"""The frozen values that the parts of ckptfs pass to one another. Snapshots, never live views; no behaviour beyond reading itself."""

import stat
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Protocol

ROOT = 1
"""The inode id of the mount's root directory; FUSE demands it."""


class Level(StrEnum):
    """How much a file survives (P3). Derived from verified copies, never stored."""

    NONE = "none"
    LOCAL = "local"
    CLIQUE = "clique"
    PFS = "pfs"


class DataPath(StrEnum):
    """How bytes travel between an application and a tier."""

    AUTO = "auto"
    PASSTHROUGH = "passthrough"
    BUFFERED = "buffered"


class Bulk(StrEnum):
    """How blocks travel between nodes."""

    SOCKET = "socket"
    GRPC = "grpc"


class CliqueLost(StrEnum):
    """What fsync=clique does when no peer is left that could hold a copy: fail, or be content with this node."""

    ERROR = "error"
    LOCAL = "local"


class Tier(StrEnum):
    """A place on this node that holds bytes."""

    RAM = "ram"
    NVME = "nvme"
    PFS = "pfs"


class ContentState(IntEnum):
    """OPEN has writers, CLOSED awaits its seal, SEALED never changes, DOOMED awaits its deletion, LOST has no good copy left."""

    OPEN = 0
    CLOSED = 1
    SEALED = 2
    DOOMED = 3
    LOST = 4


class CopyState(IntEnum):
    """FILLING is being written by the mover, GOOD counts, QUARANTINED failed its digest and never counts.

    OLDER is of a former generation of a content that another node has written since: never counted nor read, but blocks of it may serve.
    """

    FILLING = 0
    GOOD = 1
    QUARANTINED = 2
    STALE = 3


@dataclass(frozen=True, slots=True)
class Inode:
    """One row of the catalog's `inode` table; times in ns since the epoch, sizes in bytes."""

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
    allocated_blocks: int | None = None
    """Files: 512-byte units allocated (st_blocks), where a backing file told; None: as many as the size needs."""

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


@dataclass(frozen=True, slots=True)
class Entry:
    """A name in a directory. `cookie` orders a directory's entries for ever, so that readdir is stable."""

    cookie: int
    parent: int
    name: bytes
    child: int


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of one generation of a file; `blocks` is the xxh3-128 of each 4 MiB block, joined (16 bytes each)."""

    id: int
    inode: int
    generation: int
    state: ContentState
    size: int
    digest: bytes | None
    block_digests: bytes | None
    change: int
    is_remote: bool = False
    """Another node wrote this generation."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One content at one tier of this node. Only GOOD copies count."""

    content: int
    tier: Tier
    state: CopyState
    verified_ns: int
    used_ns: int


@dataclass(frozen=True, slots=True)
class Handle:
    """An open file as the kernel knows it; survives the mount process. `backing` is the kernel's backing id, 0 for none."""

    id: int
    inode: int
    content: int | None
    is_writer: bool
    backing_id: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class PfsEntryStat:
    """What a listing of a PFS directory shows under one name: lstat, a symlink's target and the user's xattrs.

    `target` and `xattrs` are filled in only where they are needed: for what the catalog does not know yet.
    """

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
    """What a step of the mover tells the others, after its change is committed. Each is a hint that may be lost; none waits."""

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        """The mount's kernel must forget what it knows of this name, also that it is absent."""

    def invalidate_inode(self, inode: int) -> None:
        """The mount's kernel must forget this inode's attributes and pages."""

    def notify_replies(self) -> None:
        """Some wants were answered."""

    def wake_lanes(self, urgent_lane: str = "") -> None:
        """The other lanes may have something to do; the one named `at_once` shall not wait for company."""
