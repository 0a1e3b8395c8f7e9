"""Many nodes open one file of two holders at once, over the real transport with small bounds (2.2): all of them get it."""

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from clique_world import LocalCluster, Node, bring, replicated
from peer_world import CLUSTER, Keyring
from peer_world import keyring as keyring

from ckptfs import limits
from ckptfs.catalog import mover_requests
from ckptfs.peers.grpc_server import PeerServer
from ckptfs.peers.peer_client import PeerClient

READERS = 12
BOUNDS = {
    "PEER_STREAMS_MAX": 2, "PEER_STREAMS_PER_PEER_MAX": 1, "PEER_IDLE_COPIES_MAX": 4, "FETCH_TRIES_MAX": 1,
    "FETCH_SHARED_POLL_S": 0.01, "FETCH_PATIENCE_S": 0.0,
}  # fmt: skip


class RealPeers:
    """Two holders that serve, and readers that fetch with clients of their own."""

    def __init__(self, root: Path, keyring: Keyring) -> None:
        self.cluster = LocalCluster(root, 2 + READERS)
        self.content = replicated(self.cluster, b"model.pt", os.urandom(5 * limits.BLOCK_BYTES))
        self.servers = [self._serve(node, keyring) for node in self.cluster.nodes[:2]]
        for node in self.cluster.nodes[2:]:
            node.peers = PeerClient(node.member.name, CLUSTER, keyring(node.member.name))  # type: ignore[assignment]
        self.cluster.changed()

    def _serve(self, node: Node, keyring: Keyring) -> PeerServer:
        server = PeerServer(node.host, "127.0.0.1:0", CLUSTER, keyring(node.member.name))
        node.member = replace(node.member, address=f"127.0.0.1:{server.port}")
        return server

    def stop(self) -> None:
        for node in self.cluster.nodes[2:]:
            node.peers.close()
        for server in self.servers:
            server.stop()


@pytest.fixture
def peers(keyring: Keyring, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealPeers]:
    for name, value in BOUNDS.items():
        monkeypatch.setattr(limits, name, value)
    monkeypatch.setattr(limits, "BLOCK_BYTES", 256 * limits.KIB)
    with tempfile.TemporaryDirectory(prefix="ckptfs-test-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
        made = RealPeers(Path(root), keyring)
        yield made
        made.stop()


def test_all_readers_of_two_holders_get_the_file(peers: RealPeers) -> None:
    """Whoever finds no place for a stream or an open copy waits, and goes on where it was."""
    inode = peers.cluster.nodes[0].inode(peers.content)
    with ThreadPoolExecutor(READERS) as threads:
        results = list(threads.map(lambda node: bring(node, inode).result, peers.cluster.nodes[2:]))
    assert results == [mover_requests.FETCHED] * READERS
    assert {node.data(peers.content) for node in peers.cluster.nodes} == {peers.cluster.nodes[0].data(peers.content)}
    refused = [counts for server in peers.servers for counts in server.rejections.get_counts().values()]
    assert sum(counts.get("too_many", 0) for counts in refused) > 0, "there was a crowd"
