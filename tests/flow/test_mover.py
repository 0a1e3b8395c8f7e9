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
from daemon_under_test import eventually
from local_node import Node

from ckptfs.catalog import mover_requests
from ckptfs.model import ContentState, Tier

DEADLINE_S = 90.0

PROGRAM = """
import socket, sys
from pathlib import Path
from local_node import Node
from ckptfs_daemon.mover import main as mover
from ckptfs_daemon.ipc import ChildSetup
root, link, bell, pfs = sys.argv[1:]
node = Node(Path(root))
node.configure(name=f"test-{link}-{Path(root).name}", drain_deadline_s=float(pfs or 30))
node.tiers.close()
node.db.close()
ends = [socket.socket(fileno=int(number)) for number in (link, bell)]
given = ChildSetup("mover", node.config, False, *ends, -1, -1)
sys.exit(mover.run(given))
"""


class Mover:
    """A mover over a node's catalog and tiers, and our ends of its sockets."""

    def __init__(self, root: Path, *, fault: str = "", deadline_s: str = "") -> None:
        self.link, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.bell, bell = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), CKPTFS_FAULT=fault, XDG_RUNTIME_DIR=str(root))
        descriptors = (link.fileno(), bell.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(root), *map(str, descriptors), deadline_s],
            pass_fds=descriptors, env=environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        link.close()
        bell.close()
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


def test_it_recovers_before_it_is_ready(node: Node, start: Callable[..., Mover]) -> None:
    lost = node.make(b"lost", b"data")
    node.tiers[Tier.RAM].remove(lost)
    start().hear(READY)
    assert node.state(lost) is ContentState.LOST


def test_it_says_that_it_lives(start: Callable[..., Mover]) -> None:
    start().hear(HEARTBEAT)


@pytest.mark.parametrize("hint", [b".", b"!"])
def test_a_hint_takes_a_closed_file_all_the_way_to_the_pfs(node: Node, start: Callable[..., Mover], hint: bytes) -> None:
    mover = start()
    mover.hear(READY)
    content = node.make(b"file", b"data")
    mover.bell.send(hint)
    eventually((node.root / "pfs" / "file").exists)
    assert (node.root / "pfs" / "file").read_bytes() == b"data"
    assert node.state(content) is ContentState.SEALED


def test_a_request_is_answered_and_the_mount_notified(node: Node, start: Callable[..., Mover]) -> None:
    (node.root / "pfs" / "theirs").write_text("already there")
    mover = start()
    mover.hear(READY)
    want = mover_requests.insert_request(node.db, mover_requests.SCAN, 1)
    mover.bell.send(b"!")
    mover.bell.settimeout(DEADLINE_S)
    heard = set()
    while b"w" not in heard:
        heard.add(mover.bell.recv(512)[:1])
    answered = mover_requests.get(node.db, want)
    assert answered is not None and answered.state == mover_requests.DONE


def test_stop_drains_and_ends_well(node: Node, start: Callable[..., Mover]) -> None:
    for number in range(20):
        node.make(b"%d" % number, b"data")
    mover = start()
    mover.link.send(STOP)
    assert mover.end() == 0
    assert len([path for path in (node.root / "pfs").iterdir() if not path.name.startswith(".")]) == 20
    assert node.db.value("SELECT count(*) FROM journal") == 0


def test_stop_ends_at_the_deadline_and_says_what_is_left(node: Node, start: Callable[..., Mover]) -> None:
    content = node.make(b"file", b"data")
    mover = start(fault="seal:read=EIO@*", deadline_s="1")
    mover.hear(READY)
    mover.link.send(STOP)
    _, log = mover.process.communicate(timeout=DEADLINE_S)
    assert mover.process.returncode == 0
    assert "1 files are not sealed" in log
    assert node.state(content) is ContentState.CLOSED and node.data(content) == b"data"


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
