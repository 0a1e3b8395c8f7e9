"""What an open asks for, and what came of it: the values that travel between the handlers, the attempts and the kept answers.

Nothing here outlives the process but `Opened.pack`, which the table of answers holds.
"""

import struct
from dataclasses import dataclass

from ckptfs_daemon.edge import Request

_OPENED = struct.Struct("<QQI?")


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody asks for. `request` is None for ourselves: such a handle is not recorded. `root`: writes keep set-id bits.
    `hasty`: with O_NONBLOCK, which the kernel hands on to the backing file: it must not meet a lease of the mover's there.
    """

    inode: int
    writer: bool
    truncate: bool
    request: Request | None
    root: bool = True
    hasty: bool = False


@dataclass(frozen=True, slots=True)
class Opened:
    """What came of it. `direct`: reads and writes come to us even on the passthrough path."""

    inode: int
    handle: int
    backing: int
    direct: bool

    @property
    def fh(self) -> int:
        """What the kernel gets: the handle, and the backing id in the upper half."""
        return self.handle | self.backing << 32

    def pack(self) -> bytes:
        return _OPENED.pack(self.inode, self.handle, self.backing, self.direct)

    @classmethod
    def unpack(cls, body: bytes) -> "Opened":
        return cls(*_OPENED.unpack(body))
