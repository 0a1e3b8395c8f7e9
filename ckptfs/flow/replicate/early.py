"""Early replication: blocks of large files that are still being written.

Takes: large files that are open for writing.
Leaves: their complete blocks on the future holders, so that only the rest is sent after the seal (X7).
If we die here: peers keep the blocks for a while. The next mover offers them again; blocks that arrived are not sent twice.

Early blocks do not count as copies. The offer after the seal names the digest of every block, and the peer asks for those that it lacks.
A block counts as complete if the file has grown beyond it since the last look. Each block is read once. Reads are small while the file is
written, so that the writer keeps the processor.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from ckptfs import digest, disk, limits
from ckptfs.catalog import peer_copies
from ckptfs.catalog.database import Database
from ckptfs.clique import placement
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import Node
from ckptfs.clique.peer_api import UNKNOWN_BLOCK, Offer, PeerCorrupt, PeerFailed
from ckptfs.model import Content, Tier
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

disk.declare_labels("early:read")

BLOCK = limits.BLOCK_BYTES
NICE = 15


@contextlib.contextmanager
def _low_priority() -> Iterator[None]:
    """Lower the priority of this thread. Does nothing without root, which alone could raise it again."""
    thread = threading.get_native_id()
    before = os.getpriority(os.PRIO_PROCESS, thread)
    if os.geteuid() != 0:
        yield
        return
    os.setpriority(os.PRIO_PROCESS, thread, max(before, NICE))
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, thread, before)


@dataclass(slots=True)
class _GrowingFile:
    """A file that is being written: the digests of its first blocks, and its size at the last look."""

    content: Content
    blocks: list[bytes] = field(default_factory=list)
    last_size: int = 0
    sent_count: int = 0


class EarlyReplication:
    """Sends the blocks of growing files, a piece at a time."""

    def __init__(self, db: Database, tiers: Tiers, cluster: Cluster) -> None:
        self._db = db
        self._tiers = tiers
        self._cluster = cluster
        self._growing_files: dict[int, _GrowingFile] = {}
        self._block = memoryview(bytearray(BLOCK))

    @_low_priority()
    def step(self) -> bool:
        """Send new complete blocks of each file. Return True if there are more."""
        if not self._cluster.has_peers():
            self._growing_files = {}
            return False
        written = peer_copies.list_being_written(self._db, limits.EARLY_FILES_MAX)
        self._growing_files = {content.id: self._growing_files.get(content.id, _GrowingFile(content)) for content, _ in written}
        more = False
        for content, tier in written:
            if tier not in self._tiers:
                continue
            try:
                more |= self._send_complete(self._growing_files[content.id], content, tier)
            except OSError as failure:
                log.debug("content %d: cannot be read while it is written: %s", content.id, failure)
        return more

    def next_due_s(self) -> float | None:
        """Return a short interval while files are written, else a long one: a wake-up may be lost."""
        return limits.EARLY_POLL_S if self._growing_files else limits.EARLY_IDLE_S

    def _send_complete(self, growing: _GrowingFile, content: Content, tier: Tier) -> bool:
        """Send the next blocks of one file. Return whether more are complete."""
        if growing.content.generation != content.generation:
            growing.content, growing.blocks, growing.last_size, growing.sent_count = content, [], 0, 0
        found = self._tiers[tier].stat(content.id)
        if found is None or found.st_size < limits.EARLY_BYTES_MIN:
            return False
        # The last block at the time of the last look, and those after it, may still change.
        complete, growing.last_size = min(growing.last_size, found.st_size) // BLOCK, found.st_size
        with disk.closing(self._tiers[tier].open(content.id)) as fd:
            self._digest_complete(growing, fd, complete)
            is_sent = len(growing.blocks) > growing.sent_count and self._send_new(growing, fd)
        return is_sent and growing.sent_count < complete

    def _digest_complete(self, growing: _GrowingFile, fd: int, complete: int) -> None:
        """Digest a bounded number of complete blocks that were not read yet."""
        del growing.blocks[complete:]
        growing.sent_count = min(growing.sent_count, complete)
        for number in range(len(growing.blocks), min(complete, len(growing.blocks) + limits.EARLY_BLOCKS_MAX)):
            if disk.act("early:read", os.preadv, fd, [self._block], number * BLOCK) < BLOCK:
                return
            growing.blocks.append(digest.hash_block(self._block))

    def _send_new(self, growing: _GrowingFile, fd: int) -> bool:
        """Send the blocks that were read. Return whether all targets took them."""
        content, cluster = growing.content, self._cluster
        count = -(-growing.last_size // BLOCK)
        stable = growing.blocks[:count]
        # A block of zeros may not have been written yet.
        digests = [UNKNOWN_BLOCK if one == digest.ZERO_BLOCK else one for one in stable]
        blocks = b"".join(digests) + UNKNOWN_BLOCK * (count - len(digests))
        offer = Offer(content.id, content.inode, content.generation, growing.last_size, None, blocks)
        nodes = placement.choose_peers(cluster.view(), cluster.node_number, cluster.factor, cluster.jump)
        taken = [self._send_to(node, offer, growing, fd) for node in nodes]
        growing.sent_count = len(growing.blocks)
        return all(taken)

    def _send_to(self, node: Node, offer: Offer, growing: _GrowingFile, fd: int) -> bool:
        try:
            sent = self._cluster.peers.send(node, offer, fd)
            log.debug("content %d: %d bytes sent early to %s", offer.content, sent.bytes_moved, node.name)
            return True
        except PeerCorrupt:
            growing.blocks = []  # The file is not written in sequence: blocks have changed since they were read.
        except PeerFailed as failure:
            log.debug("content %d: early blocks refused by %s: %s", offer.content, node.name, failure)
        return False
