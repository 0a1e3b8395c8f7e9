"""A content host in memory and a directory of files, with servers and clients of the peer protocol: for the tests of the transport."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptfs import digest, limits
from ckptfs.clique import certificates
from ckptfs.clique.certificates import Identity, RevocationList
from ckptfs.clique.peer_api import UNKNOWN_BLOCK, ContentManifest, CopyNotFound, Offer, OpenCopy, Reception
from ckptfs.errors import Busy, NoSpace
from ckptfs.peers.grpc_server import PeerServer
from ckptfs.peers.peer_client import PeerClient

CLUSTER = "moon"
WIDTH = digest.BLOCK_DIGEST_BYTES


def digests(data: bytes) -> tuple[bytes, bytes]:
    """(digest over all, blocks' digests) of a content."""
    running = digest.RunningDigest()
    running.update(data)
    return running.finish()


def offer_of(data: bytes, content: int = 7, generation: int = 1) -> Offer:
    return Offer(content, content + 1, generation, len(data), *digests(data))


def record_of(offer: Offer) -> ContentManifest:
    assert offer.digest is not None
    return ContentManifest(offer.content, offer.inode, offer.generation, offer.size, offer.digest, offer.blocks)


@dataclass(frozen=True, slots=True)
class There:
    name: str
    address: str


class MemoryContentHost:
    """The simplest `ContentHost`: a file for each content, no catalog."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.held: dict[int, Offer] = {}
        self.forgotten: list[int] = []
        self.abandoned = 0
        self.kept = 0
        self.sealed_soon: list[tuple[int, float]] = []
        self.room_bytes = 1 << 40
        self._arriving: dict[int, tuple[Offer, int]] = {}
        self._lock = threading.Lock()
        self._tokens = 0

    def path(self, content: int) -> Path:
        return self.directory / f"{content:016x}"

    def begin_reception(self, offer: Offer) -> Reception:
        with self._lock:
            if any(other.content == offer.content for other, _ in self._arriving.values()):
                raise Busy("it is arriving already")
            if offer.size > self.room_bytes:
                raise NoSpace("the share for peers is full")
            self._tokens += 1
            token = self._tokens
            fd = os.open(self.path(offer.content), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.truncate(fd, offer.size)
            if offer.size:
                os.posix_fallocate(fd, 0, offer.size)
            self._arriving[token] = (offer, fd)
        wanted = [offer.blocks[start : start + WIDTH] for start in range(0, len(offer.blocks), WIDTH)]
        lacking = [number for number, one in enumerate(wanted) if one != UNKNOWN_BLOCK and self._block(fd, offer, number) != one]
        return Reception(token, fd, lacking)

    def finish_reception(self, token: int) -> bool:
        with self._lock:
            offer, fd = self._arriving.pop(token)
        with os.fdopen(fd, "rb") as file:
            right = offer.is_early or digests(file.read()) == (offer.digest, offer.blocks)
        if right and not offer.is_early:
            self.held[offer.content] = offer
        return right

    def abort_reception(self, token: int, *, keep_blocks: bool = True) -> None:
        with self._lock:
            _, fd = self._arriving.pop(token)
            self.abandoned += 1
            self.kept += keep_blocks
        os.close(fd)

    def open_copy(self, content: int, digest: bytes | None) -> OpenCopy:
        offer = self.held.get(content)
        if offer is None or offer.digest is None or digest not in (None, offer.digest):
            raise CopyNotFound("no such copy")
        fd = os.open(self.path(content), os.O_RDONLY | os.O_CLOEXEC)
        return OpenCopy(offer.content, offer.inode, offer.generation, offer.size, offer.digest, offer.blocks, fd=fd)

    def seal_and_open(self, content: int, timeout_s: float) -> OpenCopy | None:
        self.sealed_soon.append((content, timeout_s))
        with suppress(CopyNotFound):
            return self.open_copy(content, None)
        return None

    def release_copies(self, contents: Sequence[int]) -> None:
        self.forgotten += contents

    def arriving(self) -> int:
        return len(self._arriving)

    def hold(self, data: bytes, content: int = 7) -> Offer:
        """Put a content here; what would be offered of it."""
        self.path(content).write_bytes(data)
        self.held[content] = offer_of(data, content)
        return self.held[content]

    @staticmethod
    def _block(fd: int, offer: Offer, number: int) -> bytes:
        return digest.hash_block(os.pread(fd, limits.BLOCK_BYTES, number * limits.BLOCK_BYTES))


class Keyring:
    """Identities of a cluster, made as they are asked for."""

    def __init__(self, directory: Path) -> None:
        certificates.init(directory, CLUSTER)
        self.directory = directory

    def __call__(self, node: str) -> Identity:
        target = self.directory / node
        return certificates.load(target if target.exists() else certificates.issue(self.directory, node))


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    return Keyring(tmp_path_factory.mktemp("keys") / "ca")


class PeerNode:
    """A node that serves: its content host, its server and its address."""

    def __init__(self, directory: Path, name: str, identity: Identity | None, *, revoked: RevocationList | None = None) -> None:
        self.host = MemoryContentHost(directory / name)
        self.server = PeerServer(self.host, "127.0.0.1:0", CLUSTER, identity, revoked=revoked)
        self.there = There(name, f"127.0.0.1:{self.server.port}")

    def stop(self) -> None:
        self.server.stop()


def client(name: str, identity: Identity | None, *, streams: int | None = None, revoked: RevocationList | None = None) -> PeerClient:
    """A client that calls itself `name`."""
    return PeerClient(name, CLUSTER, identity, streams=streams, revoked=revoked)
