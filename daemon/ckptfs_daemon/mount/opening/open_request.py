"""The values of one open: request, result, and reasons to wait.

Crash safety: the reply cache keeps an `OpenResult` packed, so its layout must not change while a connection lives.
"""

import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ckptfs_daemon.fuse.request import Request

_OPENED = struct.Struct("<QQI?")


class MustWait(Exception):
    """The attempt must await `wait()` first."""

    def __init__(self, wait: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self.wait = wait


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """What to open, and how.

    `fuse_request` is None for an internal open, whose handle is not recorded. `is_root`: writes keep set-id bits. `nonblocking`: the
    kernel passes O_NONBLOCK on to the backing file, so the open must not meet a lease of the mover. `pid`: the calling thread. `shown`: the
    number under which the history shows the file; 0 outside of it.
    """

    inode: int
    is_writer: bool
    truncates: bool
    fuse_request: Request | None
    is_root: bool = True
    nonblocking: bool = False
    pid: int = 0
    shown: int = 0

    @property
    def number(self) -> int:
        """Return the number under which the kernel knows the file."""
        return self.shown or self.inode


@dataclass(frozen=True, slots=True)
class OpenResult:
    """A handle.

    `direct`: reads and writes pass through this process, and the kernel keeps no pages of them. The reply cache keeps it packed.
    """

    inode: int
    handle: int
    backing_id: int
    direct: bool

    @property
    def fh(self) -> int:
        """Return FUSE's `fh`: the handle, with the backing id in the upper half."""
        return self.handle | self.backing_id << 32

    def pack(self) -> bytes:
        return _OPENED.pack(self.inode, self.handle, self.backing_id, self.direct)

    @classmethod
    def unpack(cls, body: bytes) -> "OpenResult":
        return cls(*_OPENED.unpack(body))
