"""Bytes between two nodes against a raw TCP socket, tmpfs to tmpfs, in turns: replicate (to a peer) and fetch (from one).

The peer is a process of its own with the product's shelf and server, mutual TLS included; the raw receiver is one too: sendfile here,
recv and write there. Alone: peers.py [--gib N] [--rounds N] [--only WORD], which also shows what TLS, sockets and gRPC cost.
"""

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("tests/support", "daemon", "client", ".")]

from ckptfs import digest, limits  # noqa: E402
from ckptfs.clique import certificates  # noqa: E402
from ckptfs.clique.peer_api import Offer  # noqa: E402
from ckptfs.peers.grpc_server import PeerServer  # noqa: E402
from ckptfs.peers.peer_client import PeerClient  # noqa: E402 - found by the line above

CLUSTER = "bench"
CONTENT = 1 << limits.ID_COUNTER_BITS
"""Its id says that the first node made it, so that the other one believes it."""
WAYS = {"socket": (True, True), "gRPC": (True, False), "gRPC without TLS": (False, False)}


# --- the other node: a process of its own ----------------------------------------------------------------------------


def serve(directory: Path, keyring: Path | None) -> None:
    """Serve peers and raw sockets until stdin ends; the ports on stdout."""
    from local_node import Node

    from ckptfs.catalog import identity
    from ckptfs.catalog.database import Database
    from ckptfs.clique import membership
    from ckptfs.clique.cluster import Cluster
    from ckptfs.flow.host import Host
    from ckptfs.tiers.storage import Tiers

    node = Node(directory)
    db = Database(node.root / "state" / "catalog.db", journalled=False, clustered=True)
    identity.set_node_number(db, 2)
    tiers = Tiers.from_config(replace(node.config, pfs=None, nvme=None, ram_bytes=limits.GIB * 64))
    world = membership.build_view(
        membership.Node(number, f"node{number}", f"node{number}:7420", number, f"node{number}") for number in (1, 2)
    )
    nobody: Any = None
    hold = Host(db, tiers, 0.9, node.told, Cluster(2, 2, 1, nobody, nobody, lambda: world))
    server = PeerServer(hold, "127.0.0.1:0", CLUSTER, certificates.load(keyring / "node2") if keyring else None)
    raw = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_raw_server, args=(raw, directory), daemon=True).start()
    print(server.port, raw.getsockname()[1], flush=True)
    sys.stdin.read()
    server.stop()


def _raw_server(listening: socket.socket, directory: Path) -> None:
    """`w` and a length: take so many bytes into a new file; `r`: send that file."""
    path = directory / "raw"
    while True:
        connected, _ = listening.accept()
        with connected:
            order, size = connected.recv(1), int.from_bytes(connected.recv(8, socket.MSG_WAITALL), "little")
            if order == b"w":
                path.unlink(missing_ok=True)
                raw_receive(connected, path, size)
                connected.sendall(b".")
            else:
                raw_send(connected, path, size)


def raw_receive(connected: socket.socket, path: Path, size: int) -> None:
    """What a plain receiver does: recv and write, a MiB at a time."""
    buffer, left = memoryview(bytearray(1 << 20)), size
    with open(path, "wb", buffering=0) as file:
        while left:
            count = connected.recv_into(buffer[: min(left, len(buffer))])
            if not count:
                raise OSError("the other side ended")
            file.write(buffer[:count])
            left -= count


def raw_send(connected: socket.socket, path: Path, size: int) -> None:
    """What a plain sender does: sendfile."""
    with open(path, "rb") as file:
        offset = 0
        while offset < size:
            offset += os.sendfile(connected.fileno(), file.fileno(), offset, size - offset)


@dataclass(frozen=True, slots=True)
class Other:
    """The other node, and how to reach it."""

    name: str
    address: str
    raw_port: int


@contextlib.contextmanager
def other(root: Path, keyring: Path | None) -> Iterator[Other]:
    """A fresh node in a process of its own, gone afterwards with all it holds."""
    directory = Path(tempfile.mkdtemp(dir=root))
    command = [sys.executable, __file__, "--serve", str(directory), *(["--keys", str(keyring)] if keyring else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        port, raw_port = process.stdout.readline().split()
        yield Other("node2", f"127.0.0.1:{port}", int(raw_port))
    finally:
        process.stdin.close()
        process.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


# --- measuring -------------------------------------------------------------------------------------------------------


class Source:
    """A file of `size` bytes whose every block is new in every round: a peer never has any of them."""

    def __init__(self, root: Path, size: int) -> None:
        self.path, self.size = root / "source", size
        noise = os.urandom(limits.BLOCK_BYTES)
        with open(self.path, "wb") as file:
            for _ in range(size // len(noise)):
                file.write(noise)
        self.fd = os.open(self.path, os.O_RDWR)

    def renewed(self) -> Offer:
        """Other bytes; the offer of them."""
        blocks = bytearray()
        for offset in range(0, self.size, limits.BLOCK_BYTES):
            os.pwrite(self.fd, os.urandom(16), offset)
            blocks += digest.hash_block(os.pread(self.fd, limits.BLOCK_BYTES, offset))
        return Offer(CONTENT, CONTENT, 1, self.size, digest.hash_content(bytes(blocks), self.size), bytes(blocks))


def timed(act: Callable[[], object]) -> float:
    """Seconds."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def replicate_once(there: Other, peers: PeerClient, source: Source, root: Path, number: int) -> tuple[float, float]:
    """(ours, raw): the file is at the peer, whole and verified."""
    offer = source.renewed()

    def ours() -> None:
        assert peers.send(there, offer, source.fd).is_verified

    def raw() -> None:
        with socket.create_connection(("127.0.0.1", there.raw_port)) as connected:
            connected.sendall(b"w" + source.size.to_bytes(8, "little"))
            raw_send(connected, source.path, source.size)
            assert connected.recv(1) == b"."

    return _in_turns(ours, raw, number)


def fetch_once(there: Other, peers: PeerClient, source: Source, root: Path, number: int) -> tuple[float, float]:
    """(ours, raw): a file of the peer is here, whole and verified."""
    offer = source.renewed()
    peers.send(there, offer, source.fd)
    with socket.create_connection(("127.0.0.1", there.raw_port)) as connected:
        connected.sendall(b"w" + source.size.to_bytes(8, "little"))
        raw_send(connected, source.path, source.size)
        connected.recv(1)
    target = root / "target"

    def ours() -> None:
        record = peers.get_manifest(there, offer.content, offer.digest)
        with open(target, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, source.size)
            assert peers.fetch([there], record, range(-(-source.size // limits.BLOCK_BYTES)), file.fileno()) == source.size

    def raw() -> None:
        with socket.create_connection(("127.0.0.1", there.raw_port)) as connected:
            connected.sendall(b"r" + source.size.to_bytes(8, "little"))
            raw_receive(connected, target, source.size)

    def cleared(act: Callable[[], None]) -> Callable[[], None]:
        target.unlink(missing_ok=True)
        return act

    if number % 2:
        return timed(cleared(ours)), timed(cleared(raw))
    theirs = timed(cleared(raw))
    return timed(cleared(ours)), theirs


def _in_turns(ours: Callable[[], None], raw: Callable[[], None], number: int) -> tuple[float, float]:
    if number % 2:
        return timed(ours), timed(raw)
    theirs = timed(raw)
    return timed(ours), theirs


def measure(once: Callable[..., tuple[float, float]], *, size: int, rounds: int, way: str = "socket") -> list[tuple[float, float]]:
    """`rounds` pairs of seconds (ours, raw); one more first, which does not count."""
    secure, bulk = WAYS[way]
    root = Path(tempfile.mkdtemp(prefix="ckptfs-bench-peers-", dir="/dev/shm"))
    try:
        keyring = root / "keys" if secure else None
        if keyring:
            certificates.init(keyring, CLUSTER)
            for name in ("node1", "node2"):
                certificates.issue(keyring, name)
        peers = PeerClient("node1", CLUSTER, certificates.load(keyring / "node1") if keyring else None, bulk=bulk)
        source = Source(root, size)
        pairs = []
        for number in range(rounds + 1):
            with other(root, keyring) as there:
                peers.ping(there)
                pairs.append(once(there, peers, source, root, number))
        peers.close()
        os.close(source.fd)
        return pairs[1:]
    finally:
        shutil.rmtree(root)


MEASURES = {"replicate": replicate_once, "fetch": fetch_once}


def ratio(pairs: list[tuple[float, float]]) -> float:
    """The median of ours / raw."""
    return statistics.median(ours / raw for ours, raw in pairs)


def detail(pairs: list[tuple[float, float]], size: int) -> str:
    """Both, as GB/s."""
    ours, raw = (size / statistics.median(column) / 1e9 for column in zip(*pairs, strict=True))
    return f"{ours:.2f} GB/s, raw socket {raw:.2f} GB/s"


def main() -> None:
    """Every way of every measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keys", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.keys)
        return
    size = int(arguments.gib * limits.GIB)
    for name, once in MEASURES.items():
        for way in WAYS:
            if arguments.only in f"{name} {way}":
                pairs = measure(once, size=size, rounds=arguments.rounds, way=way)
                print(f"{name:10} {way:18} time {ratio(pairs):5.2f} of the raw socket's  {detail(pairs, size)}", flush=True)


if __name__ == "__main__":
    main()
