"""Messages between the processes of a daemon.

Mount and mover wake each other over a socket pair, the wake channel. A wake-up is a hint: the catalog says what there is to do. Numbers in
its messages are little endian.

Each child has one socket to its supervisor, the link. It carries READY and heartbeats to the supervisor, the stop request to the child,
and log levels and upgrades both ways.

`ProgressSignal` wakes threads of the mover that wait for a change in the catalog.

Invariants:
- A child whose supervisor has ended exits at once, because another daemon may already do its work.

Crash safety: messages wait in the sockets, which the supervisor keeps open, for the next process. If a child dies, the supervisor sees the
end of its link and starts another one.
"""

import contextlib
import json
import logging
import os
import queue
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NoReturn

import trio

from ckptfs import limits
from ckptfs.bounded_waits import wait_ready
from ckptfs.config import Config
from ckptfs.errors import Busy, CkptfsError, InvalidArgument, TimedOut
from ckptfs_daemon import logs

# To the mover. URGENT_REQUEST is followed by the kind of a request on which an application waits.
WORK = b"."
URGENT_REQUEST = b"!"
WRITER_OPENED = b"o"
LARGE_FILE_CLOSED = b"l"

# To the mount: requests were answered; the kernel must forget an inode's attributes and pages, or a name in a directory; rows must be
# published to the other nodes; contents were sealed, so that a checkpoint set may be complete; the mover renewed this node's lease.
REPLIES = b"w"
INVALIDATE_INODE = b"i"
INVALIDATE_ENTRY = b"e"
DIRTY_KEYS = b"p"
SEALED = b"s"
LEASE_RENEWED = b"k"
WAKE_MESSAGE_BYTES_MAX = 512
SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
SEND_WAIT_S = 1.0
WORK_INTERVAL_MIN_S = limits.HINT_GATHER_S / 2
READY = b"ready"
HEARTBEAT = b"alive"
STOP = b"stop"

DRAIN = b"drain"
"""To the mover: drain while the mount serves. It answers DRAINED when it is done or the deadline has passed, and goes on working."""
DRAINED = b"drained"

DRAINING = b"draining "
"""From a mover that drains, followed by the seconds that it may still take and by what is left in words."""

LOG_LEVEL = b"level "
"""Followed by a level: from the child that received the request to the supervisor, and from there to all children."""

UPGRADE = b"upgrade "
"""Followed by a `Successor` from the mover, and by why it is refused from the supervisor. It ends the mover if it is not refused."""

log = logging.getLogger(__name__)
HEARTBEAT_INTERVAL_S = 5.0
LINK_MESSAGE_BYTES_MAX = 1024


class WakeChannel:
    """One end of the socket pair between mount and mover."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._notified_s = {WORK: float("-inf"), WRITER_OPENED: float("-inf")}

    def notify(self, message: bytes) -> None:
        """Send without waiting; any thread may call. The message is dropped if the socket is full.

        `WORK` and `WRITER_OPENED` are skipped shortly after the previous one, because the mover gathers hints for longer than that.
        """
        if message in self._notified_s:
            now_s = time.monotonic()
            if now_s - self._notified_s[message] < WORK_INTERVAL_MIN_S:
                return
            self._notified_s[message] = now_s
        self._send(message)

    def notify_or_wait(self, message: bytes) -> None:
        """Send like `notify`, but wait up to SEND_WAIT_S for room: in threads whose message must not be lost."""
        if not self._send(message):
            wait_ready(self._end, select.POLLOUT, SEND_WAIT_S)
            self._send(message)

    def _send(self, message: bytes) -> bool:
        try:
            self._end.send(message, SEND_FLAGS)
        except OSError:
            return False
        return True

    async def receive_messages(self) -> AsyncIterator[bytes]:
        """Yield every message until all copies of the other end are closed."""
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


def build_message(kind: bytes, number: int, name: bytes = b"") -> bytes:
    return kind + number.to_bytes(8, "little") + name


def parse_message(message: bytes) -> tuple[bytes, int, bytes]:
    """Return (kind, number, name). Number is 0 and name empty in messages without them."""
    return message[:1], int.from_bytes(message[1:9], "little"), message[9:]


def call_soon(token: trio.lowlevel.TrioToken, act: Callable[..., object], *arguments: object) -> None:
    """Run `act` in trio's thread soon. Any thread may call this.

    Nothing runs if the loop has ended.
    """
    with contextlib.suppress(trio.RunFinishedError):
        token.run_sync_soon(act, *arguments, idempotent=True)


class MountNotify:
    """`model.Notifier` of the mover: sends invalidations to the mount and wakes the other lanes."""

    def __init__(self, wake_channel: WakeChannel, wake_lanes: Callable[[str], None]) -> None:
        """`wake_lanes` wakes all lanes, and the named one at once. Any thread may call it."""
        self._wake_channel = wake_channel
        self._wake_lanes = wake_lanes

    def invalidate_entry(self, parent: int, name: bytes) -> None:
        self._wake_channel.notify_or_wait(build_message(INVALIDATE_ENTRY, parent, name))

    def invalidate_inode(self, inode: int) -> None:
        self._wake_channel.notify_or_wait(build_message(INVALIDATE_INODE, inode))

    def notify_replies(self) -> None:
        self._wake_channel.notify(REPLIES)

    def notify_sealed(self) -> None:
        self._wake_channel.notify(SEALED)

    def wake_lanes(self, urgent_lane: str = "") -> None:
        self._wake_lanes(urgent_lane)


@dataclass(frozen=True, slots=True)
class ChildSetup:
    """What the supervisor gives a child: its role, and the descriptors for it.

    `fuse_fd` and `table_fd`, of the connection and the table of its requests, are -1 for the mover.
    """

    role: str
    config: Config
    is_resumed: bool
    link: socket.socket
    wake_socket: socket.socket
    fuse_fd: int
    table_fd: int

    def list_descriptors(self) -> list[int]:
        return [fd for fd in (self.link.fileno(), self.wake_socket.fileno(), self.fuse_fd, self.table_fd) if fd >= 0]


ServeRole = Callable[[ChildSetup], int]
"""What a child runs. Returns its exit code."""


async def send_heartbeats(link: socket.socket) -> None:
    """Send heartbeats until cancelled: they show that the trio thread runs, even if worker threads hang."""
    while True:
        # If the supervisor has ended, `wait_for_stop` notices.
        with contextlib.suppress(OSError):
            link.send(HEARTBEAT, SEND_FLAGS)
        await trio.sleep(HEARTBEAT_INTERVAL_S)


def request_log_level(link: socket.socket, level: str) -> None:
    """Ask the supervisor to set the log level of all processes. Any thread may call."""
    link.send(LOG_LEVEL + level.encode(), SEND_FLAGS)


@dataclass(frozen=True, slots=True)
class Successor:
    """The program to which a supervisor hands over: a Python, and the directories of its packages."""

    python: str
    places: tuple[str, ...]

    def serialize(self) -> bytes:
        """Return the body of an UPGRADE message."""
        return json.dumps([self.python, *self.places]).encode()


def parse_successor(body: bytes) -> Successor:
    python, *places = json.loads(body)
    return Successor(python, tuple(places))


class UpgradeRefused(CkptfsError):
    """The successor cannot take over, or the supervisor is about to end."""


class UpgradeRequests:
    """The requests of a mover to its supervisor that it hand over to a successor, one at a time."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()
        self._refusals: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask(self, successor: Successor) -> None:
        """Ask, and wait until the supervisor ends this process. Raises UpgradeRefused, Busy or TimedOut."""
        message = UPGRADE + successor.serialize()
        if len(message) > LINK_MESSAGE_BYTES_MAX:
            raise InvalidArgument(f"the paths of the other version have more than {LINK_MESSAGE_BYTES_MAX} bytes")
        if not self._lock.acquire(blocking=False):
            raise Busy("another upgrade is under way", remedy="wait for its end")
        try:
            self._link.send(message, SEND_FLAGS)
            refusal = self._refusals.get(timeout=limits.UPGRADE_WAIT_S)
        except (OSError, queue.Empty):
            raise TimedOut("the supervisor does not answer", remedy="its log says why") from None
        finally:
            self._lock.release()
        raise UpgradeRefused(refusal, remedy="nothing was changed; this version goes on")

    def refuse(self, reason: str) -> None:
        self._refusals.put(reason)


def report_drain(link: socket.socket, seconds: float, text: str) -> None:
    """Tell the supervisor how long the drain may still take, and what is left."""
    with contextlib.suppress(OSError):
        link.send((DRAINING + f"{seconds:.1f} {text}".encode())[:LINK_MESSAGE_BYTES_MAX], SEND_FLAGS)


def parse_drain_report(message: bytes) -> tuple[float, str]:
    seconds, _, text = message.removeprefix(DRAINING).decode(errors="replace").partition(" ")
    return float(seconds), text


async def wait_for_stop(
    link: socket.socket, on_drain: Callable[[], None] = lambda: None, on_refusal: Callable[[str], None] = lambda reason: None
) -> None:
    """Wait for the stop request; exit if the supervisor has ended. Serve its other messages meanwhile."""
    while True:
        await trio.lowlevel.wait_readable(link)
        try:
            message = link.recv(LINK_MESSAGE_BYTES_MAX)
        except ConnectionError:
            message = b""
        if message == STOP:
            return
        if message == DRAIN:
            on_drain()
        if message.startswith(UPGRADE):
            on_refusal(message.removeprefix(UPGRADE).decode(errors="replace"))
        if message.startswith(LOG_LEVEL):
            logs.set_level(message.removeprefix(LOG_LEVEL).decode())
        if not message:
            _exit_alone()


def announce_ready(link: socket.socket) -> None:
    """Tell the supervisor that this child serves; exit if the supervisor has ended."""
    try:
        link.send(READY)
    except OSError:
        _exit_alone()


def _exit_alone() -> NoReturn:
    log.warning("the supervisor has ended; exiting")
    os._exit(1)


class ProgressSignal:
    """A counter of changes in the mover, to wait on. A hint: check the catalog after each wait."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.count = 0

    def notify(self) -> None:
        with self._condition:
            self.count += 1
            self._condition.notify_all()

    def wait(self, seen_count: int, timeout_s: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self.count > seen_count, timeout_s)
