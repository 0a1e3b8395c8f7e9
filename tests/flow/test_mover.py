"""P6, P8: the mover as a process of its own, without FUSE: it recovers, works at a hint, drains at the supervisor's word, ends with it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ckptfs_daemon.ipc import HEARTBEAT, READY, STOP
from local_node import Node

DEADLINE_S = 90.0

PROGRAM = """
import socket, sys
from pathlib import Path
from local_node import Node
from ckptfs_daemon.mover import main as mover
from ckptfs_daemon.ipc import ChildSetup
root, link, channel, pfs = sys.argv[1:]
node = Node(Path(root))
node.configure(name=f"test-{link}-{Path(root).name}", drain_deadline_s=float(pfs or 30))
node.tiers.close()
node.db.close()
ends = [socket.socket(fileno=int(number)) for number in (link, channel)]
given = ChildSetup("mover", node.config, False, *ends, -1, -1)
sys.exit(mover.run(given))
"""


class Mover:
    """A mover over a node's catalog and tiers, and our ends of its sockets."""

    def __init__(self, root: Path, *, fault: str = "", deadline_s: str = "") -> None:
        self.link, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), CKPTFS_FAULT=fault, XDG_RUNTIME_DIR=str(root))
        descriptors = (link.fileno(), channel.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(root), *map(str, descriptors), deadline_s],
            pass_fds=descriptors, env=environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        link.close()
        channel.close()
        self.link.settimeout(DEADLINE_S)

    def hear(self, message: bytes) -> None:
        while (heard := self.link.recv(64)) != message:
            assert heard, self.process.communicate()[1]

    def end(self) -> int:
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def start(node: Node) -> Iterator[Callable[..., Mover]]:
    movers: list[Mover] = []

    def begin(**named: str) -> Mover:
        movers.append(Mover(node.root, **named))
        return movers[-1]

    yield begin
    for mover in movers:
        with contextlib.suppress(ProcessLookupError):
            mover.process.kill()
        mover.process.communicate()


def test_it_says_that_it_lives(start: Callable[..., Mover]) -> None:
    start().hear(HEARTBEAT)


def test_it_ends_with_its_supervisor(start: Callable[..., Mover]) -> None:
    mover = start()
    mover.hear(READY)
    mover.link.close()
    assert mover.end() == 1


def test_a_lease_that_is_wanted_back_does_not_kill_it(start: Callable[..., Mover]) -> None:
    mover = start()
    mover.hear(READY)
    mover.process.send_signal(signal.SIGIO)
    mover.process.send_signal(signal.SIGINT)
    mover.link.send(STOP)
    assert mover.end() == 0
