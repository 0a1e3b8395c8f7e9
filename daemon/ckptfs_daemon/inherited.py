"""What a child of the supervisor is given: its role, the configuration, its sockets, and in the mount the FUSE connection.

A child starts with one socket, the link. Over it the supervisor sends one message, the assignment: JSON and, beside it, the
descriptors. So a process that is already warm can take any role at once.
If we die here: the supervisor sees the link's end and gives the same assignment to the next child.
"""

import base64
import json
import socket
from dataclasses import dataclass
from typing import Any

from ckptfs import config as configuration
from ckptfs.config import Config
from ckptfs.model import DataPath

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
        "config": configuration.to_json(assignment.config),
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
        config=configuration.from_json(message["config"]),
        link=link,
        wake_socket=socket.socket(fileno=descriptors[0]),
        fuse_fd=descriptors[1] if len(descriptors) > 1 else -1,
        init_request=base64.b64decode(message["init_request"]),
        data_path=DataPath(message["data_path"]),
        data_path_reason=message["data_path_reason"],
        is_resumed=message["resumed"],
        can_resend=message["resend"],
    )
