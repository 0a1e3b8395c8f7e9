"""Owns the bell: how the mount and the mover wake each other. A message is a hint; what there is to do stands in the catalog.

From the mount: `WORK`, `OPENED` (a file is being written), `LARGE` (a large one was closed), and `URGENT` with the kind of a want (somebody
waits). From the mover: `WANTS` (some were answered), `INODE` and 8 bytes (forget its attributes and pages), `ENTRY` and 8 bytes and a name
(forget that name), `TOUCHED` (other nodes must learn of something), `LEASE` and 8 bytes (this node's lease was kept).
Numbers are little endian.
If we die here: what was rung waits in the socket, which the supervisor keeps open, for the next process.

What a child of the supervisor is given: its role, the configuration, its sockets, and in the mount the FUSE connection.

A child starts with one socket, the link. Over it the supervisor sends one message, the assignment: JSON and, beside it, the
descriptors. So a process that is already warm can take any role at once.
If we die here: the supervisor sees the link's end and gives the same assignment to the next child.

Owns a child's tie to its supervisor: the sign of life that the watchdog waits for, and the supervisor's word: to stop, or what to log.

Invariant: a child whose supervisor is gone ends at once, since somebody else may already do its work.
If we die here: the supervisor sees the link's end and starts another.

Owns the moments at which something got on in the mover, for threads that wait for what the catalog shows.

A pulse is a hint: whoever waits looks at the catalog, also when none came for a while. If we die here: nobody waits any more.
"""

import base64
import contextlib
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import trio

from ckptfs import config, limits
from ckptfs.config import Config
from ckptfs.model import DataPath
from ckptfs_daemon import logs

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


READY = b"ready"
HEARTBEAT = b"alive"
STOP = b"stop"

LOG_LEVEL = b"level "
"""Followed by a level of the log: from a child, who was asked for it, to the supervisor, and from there to all children."""
ASSIGNMENT_BYTES_MAX = 128 * 1024


@dataclass(frozen=True, slots=True)
class ChildSetup:
    """All that a child knows when it begins."""

    role: str
    config: Config
    link: socket.socket
    wake_socket: socket.socket
    fuse_fd: int
    init_request: bytes
    data_path: DataPath
    data_path_reason: str
    is_resumed: bool
    can_resend: bool


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the supervisor decides when it gives a child its role."""

    role: str
    config: Config
    init_request: bytes
    data_path: DataPath
    data_path_reason: str
    is_resumed: bool
    can_resend: bool


def send_assignment(link: socket.socket, assignment: Assignment, wake_socket: socket.socket, fuse_fd: int) -> None:
    """Give the child at the other end of `link` its role; `fuse_fd` is -1 for the mover. Raises OSError when it is gone."""
    message = {
        "role": assignment.role,
        "config": config.to_json(assignment.config),
        "init_request": base64.b64encode(assignment.init_request).decode(),
        "data_path": assignment.data_path.value,
        "data_path_reason": assignment.data_path_reason,
        "resumed": assignment.is_resumed,
        "resend": assignment.can_resend,
    }
    descriptors = [wake_socket.fileno()] + ([fuse_fd] if fuse_fd >= 0 else [])
    socket.send_fds(link, [json.dumps(message).encode()], descriptors)


def receive_assignment(link: socket.socket) -> ChildSetup | None:
    """Wait for the assignment. None: the supervisor went away or wants no more of us."""
    body, descriptors, _flags, _address = socket.recv_fds(link, ASSIGNMENT_BYTES_MAX, 2)
    if not body or body == STOP:
        return None
    message: dict[str, Any] = json.loads(body)
    return ChildSetup(
        role=message["role"],
        config=config.from_json(message["config"]),
        link=link,
        wake_socket=socket.socket(fileno=descriptors[0]),
        fuse_fd=descriptors[1] if len(descriptors) > 1 else -1,
        init_request=base64.b64decode(message["init_request"]),
        data_path=DataPath(message["data_path"]),
        data_path_reason=message["data_path_reason"],
        is_resumed=message["resumed"],
        can_resend=message["resend"],
    )


log = logging.getLogger(__name__)
HEARTBEAT_INTERVAL_S = 5.0
LINK_MESSAGE_BYTES_MAX = 64


async def send_heartbeats(link: socket.socket) -> None:
    """The task: tell the supervisor's watchdog that this thread still turns, whatever hangs in the others."""
    while True:
        # That nobody listens any more is noticed by `told_to_stop`.
        with contextlib.suppress(OSError):
            link.send(HEARTBEAT, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        await trio.sleep(HEARTBEAT_INTERVAL_S)


def request_log_level(link: socket.socket, level: str) -> None:
    """Ask the supervisor that all processes log at least that. Any thread may."""
    link.send(LOG_LEVEL + level.encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


async def wait_for_stop(link: socket.socket) -> None:
    """Return when the supervisor says so."""
    while True:
        await trio.lowlevel.wait_readable(link)
        try:
            message = link.recv(LINK_MESSAGE_BYTES_MAX)
        except ConnectionError:
            message = b""
        if message == STOP:
            return
        if message.startswith(LOG_LEVEL):
            logs.set_level(message.removeprefix(LOG_LEVEL).decode())
        if not message:
            log.warning("the supervisor is gone; ending")
            os._exit(1)


class ProgressSignal:
    """Any thread may beat it or wait."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """How many there were."""
        return self._count

    def notify(self) -> None:
        """Something got on."""
        with self._condition:
            self._count += 1
            self._condition.notify_all()

    def wait(self, seen_count: int, timeout_s: float) -> None:
        """Until there were more than `beats`, or for `timeout_s`."""
        with self._condition:
            self._condition.wait_for(lambda: self._count > seen_count, timeout_s)
