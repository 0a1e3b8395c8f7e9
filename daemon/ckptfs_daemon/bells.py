"""Owns the bell: how the mount and the mover wake each other. A message is a hint; what there is to do stands in the catalog.

From the mount: `WORK`, `OPENED` (a file is being written), `LARGE` (a large one was closed), and `URGENT` with the kind of a want (somebody
waits). From the mover: `WANTS` (some were answered), `INODE` and 8 bytes (forget its attributes and pages), `ENTRY` and 8 bytes and a name
(forget that name), `TOUCHED` (other nodes must learn of something), `LEASE` and 8 bytes (this node's lease was kept).
Numbers are little endian.
If we die here: what was rung waits in the socket, which the supervisor keeps open, for the next process.
"""

import select
import socket
import time
from collections.abc import AsyncIterator, Callable

import trio

from ckptfs import limits

WORK = b"."
URGENT = b"!"
OPENED = b"o"
LARGE = b"l"
WANTS = b"w"
INODE = b"i"
ENTRY = b"e"
TOUCHED = b"p"
LEASE = b"k"

MESSAGE_BYTES_MAX = 512
PATIENCE_S = 1.0
WORK_APART_S = limits.HINT_GATHER_S / 2


class Bell:
    """One end of the socket pair between mount and mover."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rung_s = {WORK: float("-inf"), OPENED: float("-inf")}

    def ring(self, message: bytes) -> None:
        """Send without waiting, from any thread. Dropped when the other side has not listened for so long that the socket is full.

        `WORK` and `OPENED` are left out when they were rung a moment ago: the mover gathers hints for longer than that before it looks at
        the catalog.
        """
        if message in self._rung_s:
            now_s = time.monotonic()
            if now_s - self._rung_s[message] < WORK_APART_S:
                return
            self._rung_s[message] = now_s
        self._send(message)

    def ring_patiently(self, message: bytes) -> None:
        """Like `ring`, but wait a moment for room: for worker threads with a message that is dear, as an invalidation is."""
        if not self._send(message):
            select.select([], [self._end], [], PATIENCE_S)
            self._send(message)

    def _send(self, message: bytes) -> bool:
        try:
            self._end.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    async def messages(self) -> AsyncIterator[bytes]:
        """Every message that arrives, until the other end and the supervisor's are closed."""
        while True:
            await trio.lowlevel.wait_readable(self._end)
            try:
                message = self._end.recv(MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except ConnectionError:
                return
            if not message:
                return
            yield message


def inode_message(inode: int) -> bytes:
    """Forget this inode's attributes and pages."""
    return INODE + inode.to_bytes(8, "little")


def entry_message(parent: int, name: bytes) -> bytes:
    """Forget this name in this directory."""
    return ENTRY + parent.to_bytes(8, "little") + name


def lease_message(lease: int) -> bytes:
    """The mover has kept this node's lease."""
    return LEASE + lease.to_bytes(8, "little")


def parse(message: bytes) -> tuple[bytes, int, bytes]:
    """(kind, number, name) of a message; number 0 and name empty where it has none."""
    return message[:1], int.from_bytes(message[1:9], "little"), message[9:]


class MountNotify:
    """`model.Notify` over a bell: invalidations to the mount, and a wake-up for the lanes beside the one that calls."""

    def __init__(self, bell: Bell, wake: Callable[[str], None]) -> None:
        """`wake` wakes the lanes, the one that it is given at once; it may be called from any thread."""
        self._bell = bell
        self._wake = wake

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self._bell.ring_patiently(entry_message(parent, name))

    def invalidate_inode(self, inode: int) -> None:
        self._bell.ring_patiently(inode_message(inode))

    def notify_replies(self) -> None:
        self._bell.ring(WANTS)

    def wake_lanes(self, urgent_lane: str = "") -> None:
        self._wake(urgent_lane)
