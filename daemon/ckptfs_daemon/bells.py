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
URGENT_REQUEST = b"!"
WRITER_OPENED = b"o"
LARGE_FILE_CLOSED = b"l"
REPLIES = b"w"
INVALIDATE_INODE = b"i"
INVALIDATE_ENTRY = b"e"
DIRTY_KEYS = b"p"
LEASE_RENEWED = b"k"

WAKE_MESSAGE_BYTES_MAX = 512
SEND_WAIT_S = 1.0
WORK_INTERVAL_MIN_S = limits.HINT_GATHER_S / 2


class WakeChannel:
    """One end of the socket pair between mount and mover."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._notified_s = {WORK: float("-inf"), WRITER_OPENED: float("-inf")}

    def notify(self, message: bytes) -> None:
        """Send without waiting, from any thread. Dropped when the other side has not listened for so long that the socket is full.

        `WORK` and `OPENED` are left out when they were rung a moment ago: the mover gathers hints for longer than that before it looks at
        the catalog.
        """
        if message in self._notified_s:
            now_s = time.monotonic()
            if now_s - self._notified_s[message] < WORK_INTERVAL_MIN_S:
                return
            self._notified_s[message] = now_s
        self._send(message)

    def notify_or_wait(self, message: bytes) -> None:
        """Like `ring`, but wait a moment for room: for worker threads with a message that is dear, as an invalidation is."""
        if not self._send(message):
            select.select([], [self._end], [], SEND_WAIT_S)
            self._send(message)

    def _send(self, message: bytes) -> bool:
        try:
            self._end.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    async def receive_messages(self) -> AsyncIterator[bytes]:
        """Every message that arrives, until the other end and the supervisor's are closed."""
        while True:
            await trio.lowlevel.wait_readable(self._end)
            try:
                message = self._end.recv(WAKE_MESSAGE_BYTES_MAX, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except ConnectionError:
                return
            if not message:
                return
            yield message


def build_invalidate_inode(inode: int) -> bytes:
    """Forget this inode's attributes and pages."""
    return INVALIDATE_INODE + inode.to_bytes(8, "little")


def build_invalidate_entry(parent: int, name: bytes) -> bytes:
    """Forget this name in this directory."""
    return INVALIDATE_ENTRY + parent.to_bytes(8, "little") + name


def build_lease_renewed(lease: int) -> bytes:
    """The mover has kept this node's lease."""
    return LEASE_RENEWED + lease.to_bytes(8, "little")


def parse_message(message: bytes) -> tuple[bytes, int, bytes]:
    """(kind, number, name) of a message; number 0 and name empty where it has none."""
    return message[:1], int.from_bytes(message[1:9], "little"), message[9:]


class MountNotify:
    """`model.Notify` over a bell: invalidations to the mount, and a wake-up for the lanes beside the one that calls."""

    def __init__(self, wake_channel: WakeChannel, wake_lanes: Callable[[str], None]) -> None:
        """`wake` wakes the lanes, the one that it is given at once; it may be called from any thread."""
        self._wake_channel = wake_channel
        self._wake_lanes = wake_lanes

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self._wake_channel.notify_or_wait(build_invalidate_entry(parent, name))

    def invalidate_inode(self, inode: int) -> None:
        self._wake_channel.notify_or_wait(build_invalidate_inode(inode))

    def notify_replies(self) -> None:
        self._wake_channel.notify(REPLIES)

    def wake_lanes(self, urgent_lane: str = "") -> None:
        self._wake_lanes(urgent_lane)
