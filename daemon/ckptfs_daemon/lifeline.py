"""Owns a child's tie to its supervisor: the sign of life that the watchdog waits for, and the supervisor's word: to stop, or what to log.

Invariant: a child whose supervisor is gone ends at once, since somebody else may already do its work.
If we die here: the supervisor sees the link's end and starts another.
"""

import contextlib
import logging
import os
import socket

import trio

from ckptfs_daemon import logs
from ckptfs_daemon.inherited import HEARTBEAT, LOG_LEVEL, STOP

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
