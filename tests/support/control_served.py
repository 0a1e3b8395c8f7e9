"""The control servers on a node without FUSE, in a thread of their own, and a client of them."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import trio
from ckptfs_client.client import Client
from ckptfs_client.mounts import Mount
from ckptfs_daemon.control import server
from ckptfs_daemon.control.control_context import ControlContext
from daemon_under_test import eventually
from local_node import Node

from ckptfs.flow.seal import Seal


class CountingScheduler:
    """Lanes that count."""

    def __init__(self) -> None:
        self.times = 0
        self.wake_ups = 0

    def wake(self) -> None:
        self.wake_ups += 1

    def retry_now(self) -> None:
        self.times += 1


class Served:
    """A node whose control servers run in a thread of their own, and a client of them."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.lanes = CountingScheduler()
        self.mount = Mount("test", node.config.mountpoint, os.geteuid(), 0)
        self.client = Client(self.mount, answer_s=20.0)
        self._scope = trio.CancelScope()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        async def serve() -> None:
            with self._scope:
                node, lanes = self.node, self.lanes
                context = ControlContext(node.config, node.db, node.tiers, retry_now=lanes.retry_now, wake_lanes=lanes.wake)
                await server.serve(context)

        self._scope = trio.CancelScope()
        self._token: trio.lowlevel.TrioToken | None = None

        async def main() -> None:
            self._token = trio.lowlevel.current_trio_token()
            await serve()

        self._thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
        self._thread.start()
        eventually(lambda: self.mount.socket.exists() and self.mount.admin_socket.exists(), what="the control sockets are there")

    def stop(self) -> None:
        assert self._thread is not None and self._token is not None
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def seal(self) -> None:
        while Seal(self.node.db, self.node.tiers, self.node.config, self.node.told).step():
            pass


@contextmanager
def serving(node: Node) -> Iterator[Served]:
    served = Served(node)
    served.start()
    try:
        yield served
    finally:
        served.client.close()
        served.stop()
