"""Wires the mount process: the session, the operations, and the watch on the supervisor's link.

Invariant: READY is sent before the first request is read, so a child that died without it has served nobody.
If we die here: the supervisor keeps the connection and starts the next one, which is told that it resumes.
"""

import logging
import os
import socket

import trio

from ckptfs_daemon import door
from ckptfs_daemon.inherited import ALIVE, READY, STOP, Inherited

import pyfuse3  # isort: skip

log = logging.getLogger(__name__)

ALIVE_INTERVAL_S = 5.0


def run(inherited: Inherited) -> int:
    """Serve the connection; 0 when it was unmounted."""
    operations = pyfuse3.Operations()
    door.open_session(operations, inherited)
    trio.run(_serve, inherited)
    door.close_session()
    return 0


async def _serve(inherited: Inherited) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_link, inherited.link)
        nursery.start_soon(send_alive, inherited.link)
        inherited.link.send(READY)
        await door.serve()
        nursery.cancel_scope.cancel()


async def watch_link(link: socket.socket) -> None:
    """Obey the supervisor: end at its word. When it is gone, so are we: at once, since somebody else may already serve."""
    while True:
        await trio.lowlevel.wait_readable(link)
        message = link.recv(64)
        if not message:
            log.warning("the supervisor is gone; ending")
            os._exit(1)
        if message == STOP:
            door.stop()


async def send_alive(link: socket.socket) -> None:
    """Tell the supervisor's watchdog that this thread still turns."""
    while True:
        link.send(ALIVE)
        await trio.sleep(ALIVE_INTERVAL_S)
