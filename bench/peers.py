"""Transfers between two nodes against a raw TCP socket, tmpfs to tmpfs, in turns: replicate (to a peer) and fetch (from it).

The peer is a separate process with the product's host and server, mutual TLS included. The raw peer is one too: it receives with recv and
write; this side sends with sendfile. Alone: peers.py [--gib N] [--rounds N] [--only WORD], which also shows the cost of TLS.
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
from collections.abc import Callable, Iterator, Sequence
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
"""The id shows that node 1 wrote the content; the other node accepts it from no other."""
WAYS = {"TLS": True, "without TLS": False}


# --- the peer: a separate process -------------------------------------------------------------------------------------


def serve(directory: Path, keyring: Path | None) -> None:
    """Serve peers and raw sockets until stdin ends; print the ports."""
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
    view = membership.build_view(
        membership.Node(number, f"node{number}", f"node{number}:7420", number, f"node{number}") for number in (1, 2)
    )
    nobody: Any = None
    host = Host(db, tiers, 0.9, node.told, Cluster(db, 2, 2, 1, nobody, nobody, lambda: view, nobody))
    server = PeerServer(host, "127.0.0.1:0", CLUSTER, certificates.load(keyring / "node2") if keyring else None)
    raw = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_raw_server, args=(raw, directory), daemon=True).start()
    print(server.port, raw.getsockname()[1], flush=True)
    sys.stdin.read()
    server.stop()


def _raw_server(listening: socket.socket, directory: Path) -> None:
    """Serve `w` with a length: receive so many bytes into a new file; `r`: send that file."""
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
    """Receive with recv and write, a MiB at a time."""
    buffer, left = memoryview(bytearray(1 << 20)), size
    with open(path, "wb", buffering=0) as file:
        while left:
            count = connected.recv_into(buffer[: min(left, len(buffer))])
            if not count:
                raise OSError("the other side ended")
            file.write(buffer[:count])
            left -= count


def raw_send(connected: socket.socket, path: Path, size: int) -> None:
    """Send with sendfile."""
    with open(path, "rb") as file:
        offset = 0
        while offset < size:
            offset += os.sendfile(connected.fileno(), file.fileno(), offset, size - offset)


@dataclass(frozen=True, slots=True)
class Peer:
    """The peer and its addresses."""

    name: str
    address: str
    raw_port: int


@contextlib.contextmanager
def start_peer(root: Path, keyring: Path | None) -> Iterator[Peer]:
    """Start a fresh peer process; at the end stop it and delete its data."""
    directory = Path(tempfile.mkdtemp(dir=root))
    command = [sys.executable, __file__, "--serve", str(directory), *(["--keys", str(keyring)] if keyring else [])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        port, raw_port = process.stdout.readline().split()
        yield Peer("node2", f"127.0.0.1:{port}", int(raw_port))
    finally:
        process.stdin.close()
        process.wait(60)
        shutil.rmtree(directory, ignore_errors=True)


# --- measuring -------------------------------------------------------------------------------------------------------


class Source:
    """A file of `size` bytes; each round changes every block, so no peer has any of them."""

    def __init__(self, root: Path, size: int) -> None:
        self.path, self.size = root / "source", size
        noise = os.urandom(limits.BLOCK_BYTES)
        with open(self.path, "wb") as file:
            for _ in range(size // len(noise)):
                file.write(noise)
        self.fd = os.open(self.path, os.O_RDWR)

    def renew(self) -> Offer:
        """Change every block; return the offer of the new content."""
        blocks = bytearray()
        for offset in range(0, self.size, limits.BLOCK_BYTES):
            os.pwrite(self.fd, os.urandom(16), offset)
            blocks += digest.hash_block(os.pread(self.fd, limits.BLOCK_BYTES, offset))
        return Offer(CONTENT, CONTENT, 1, self.size, digest.hash_content(bytes(blocks), self.size), bytes(blocks))


def timed(act: Callable[[], object]) -> float:
    """Return the seconds that `act` takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def replicate_once(peer: Peer, peers: PeerClient, source: Source, root: Path, number: int) -> tuple[float, float]:
    """Return the seconds (ours, raw) until the peer has the whole, verified file."""
    offer = source.renew()

    def ours() -> None:
        assert peers.send(peer, offer, source.fd).is_verified

    def raw() -> None:
        with socket.create_connection(("127.0.0.1", peer.raw_port)) as connected:
            connected.sendall(b"w" + source.size.to_bytes(8, "little"))
            raw_send(connected, source.path, source.size)
            assert connected.recv(1) == b"."

    return _in_turns(ours, raw, number)


def fetch_once(peer: Peer, peers: PeerClient, source: Source, root: Path, number: int) -> tuple[float, float]:
    """Return the seconds (ours, raw) until this node has the whole, verified file of the peer."""
    offer = source.renew()
    peers.send(peer, offer, source.fd)
    with socket.create_connection(("127.0.0.1", peer.raw_port)) as connected:
        connected.sendall(b"w" + source.size.to_bytes(8, "little"))
        raw_send(connected, source.path, source.size)
        connected.recv(1)
    target = root / "target"

    def ours() -> None:
        record = peers.get_manifest(peer, offer.content, offer.digest)
        with open(target, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, source.size)
            assert peers.fetch([peer], record, range(-(-source.size // limits.BLOCK_BYTES)), file.fileno()) == source.size

    def raw() -> None:
        with socket.create_connection(("127.0.0.1", peer.raw_port)) as connected:
            connected.sendall(b"r" + source.size.to_bytes(8, "little"))
            raw_receive(connected, target, source.size)

    def clear_target(act: Callable[[], None]) -> Callable[[], None]:
        target.unlink(missing_ok=True)
        return act

    if number % 2:
        return timed(clear_target(ours)), timed(clear_target(raw))
    theirs = timed(clear_target(raw))
    return timed(clear_target(ours)), theirs


def _in_turns(ours: Callable[[], None], raw: Callable[[], None], number: int) -> tuple[float, float]:
    if number % 2:
        return timed(ours), timed(raw)
    theirs = timed(raw)
    return timed(ours), theirs


def measure(once: Callable[..., tuple[float, float]], *, size: int, rounds: int) -> list[tuple[float, float]]:
    """Return `rounds` pairs of seconds (ours, raw), after one warm-up round."""
    return measure_ways(once, size=size, rounds=rounds, ways=["TLS"])["TLS"]


def measure_ways(
    once: Callable[..., tuple[float, float]], *, size: int, rounds: int, ways: Sequence[str]
) -> dict[str, list[tuple[float, float]]]:
    """Return the pairs of each way. The ways take turns in each round, so that they meet the same machine."""
    root = Path(tempfile.mkdtemp(prefix="ckptfs-bench-peers-", dir="/dev/shm"))
    try:
        keyring = root / "keys"
        certificates.init(keyring, CLUSTER)
        for name in ("node1", "node2"):
            certificates.issue(keyring, name)
        identity = certificates.load(keyring / "node1")
        peers = {way: PeerClient("node1", CLUSTER, identity if secure else None) for way, secure in WAYS.items()}
        source = Source(root, size)
        pairs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way in ways:
                with start_peer(root, keyring if WAYS[way] else None) as peer:
                    peers[way].ping(peer)
                    pairs[way].append(once(peer, peers[way], source, root, number))
        for one in peers.values():
            one.close()
        os.close(source.fd)
        return {way: found[1:] for way, found in pairs.items()}
    finally:
        shutil.rmtree(root)


MEASURES = {"replicate": replicate_once, "fetch": fetch_once}


def ratio(pairs: list[tuple[float, float]]) -> float:
    """Return the median of ours / raw."""
    return statistics.median(ours / raw for ours, raw in pairs)


def detail(pairs: list[tuple[float, float]], size: int) -> str:
    """Return both as GB/s, in words."""
    ours, raw = (size / statistics.median(column) / 1e9 for column in zip(*pairs, strict=True))
    return f"{ours:.2f} GB/s, raw socket {raw:.2f} GB/s"


def main() -> None:
    """Run every measure in every way."""
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
    size = int(arguments.gib * limits.GIB) // limits.BLOCK_BYTES * limits.BLOCK_BYTES
    for name, once in MEASURES.items():
        ways = [way for way in WAYS if arguments.only in f"{name} {way}"]
        if ways:
            for way, pairs in measure_ways(once, size=size, rounds=arguments.rounds, ways=ways).items():
                print(f"{name:10} {way:18} time {ratio(pairs):5.2f} of the raw socket's  {detail(pairs, size)}", flush=True)


if __name__ == "__main__":
    main()
