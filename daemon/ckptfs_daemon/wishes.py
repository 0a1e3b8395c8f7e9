"""What an open asks for, and what came of it: the values that travel between the handlers, the attempts and the kept answers.

Nothing here outlives the process but `Opened.pack`, which the table of answers holds.
"""

import struct
from dataclasses import dataclass

from ckptfs_daemon.edge import Request

_OPENED = struct.Struct("<QQI?")


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What somebody asks for. `request` is None for ourselves: such a handle is not recorded. `root`: writes keep set-id bits.
    `hasty`: with O_NONBLOCK, which the kernel hands on to the backing file: it must not meet a lease of the mover's there.
    """

    inode: int
    is_writer: bool
    truncates: bool
    fuse_request: Request | None
    is_root: bool = True
    nonblocking: bool = False


@dataclass(frozen=True, slots=True)
class OpenResult:
    """What came of it. `direct`: reads and writes come to us even on the passthrough path."""

    inode: int
    handle: int
    backing_id: int
    direct: bool

    @property
    def fh(self) -> int:
        """What the kernel gets: the handle, and the backing id in the upper half."""
        return self.handle | self.backing_id << 32

    def pack(self) -> bytes:
        return _OPENED.pack(self.inode, self.handle, self.backing_id, self.direct)

    @classmethod
    def unpack(cls, body: bytes) -> "OpenResult":
        return cls(*_OPENED.unpack(body))
