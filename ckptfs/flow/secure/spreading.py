"""Takes: a content that somebody is writing.
Leaves: what it held at one moment, verified on enough other nodes as a generation of its own.
If we die here: peers that have it already lack nothing when it is sent again.

An open file may change while it is read: every block is compared by its receiver with the digest that was offered, and what changed
meanwhile is read once more, as the next generation. So a peer never has a mixture of states (P7).
"""

import logging
import os

from ckptfs import digest, disk, limits
from ckptfs.catalog import contents, peers, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.peers import PeerCopy
from ckptfs.clique import placement
from ckptfs.clique.membership import ClusterView
from ckptfs.clique.peers import PeerCorrupt, PeerFailed
from ckptfs.clique.shelf import Offer
from ckptfs.clique.surroundings import Cluster
from ckptfs.model import Content, CopyState, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.place import Tiers

log = logging.getLogger(__name__)

disk.declare_labels("secure:read", "secure:counted")

TRIES_MAX = 5


class SnapshotReplicator:
    """Sends states of open files. Several threads may do so at once, of different files."""

    def __init__(self, db: Database, tiers: Tiers, cluster: Cluster) -> None:
        self._db = db
        self._tiers = tiers
        self._cluster = cluster

    def replicate(self, number: int) -> bool:
        """Whether what the file holds now is on enough other nodes."""
        for _ in range(TRIES_MAX):
            try:
                return self._replicate_once(number)
            except PeerCorrupt:
                continue  # Somebody wrote to it while it was read.
            except FileNotFoundError:
                return False  # It moved to another tier.
        return False

    def _replicate_once(self, number: int) -> bool:
        tier = next((copy.tier for copy in settling.list_copies(self._db, number) if copy.state is CopyState.GOOD), None)
        if tier is None or tier is Tier.PFS or tier not in self._tiers:
            return False
        with disk.closing(self._tiers[tier].open(number)) as fd:
            # The number first: of two states the one with the higher number was read later, and lacks nothing that the other one has.
            snapshot = self._take_snapshot(number, fd)
            size, whole, blocks = transfer.read(fd, label="secure")
            if snapshot is None or (size and len(blocks) != digest.BLOCK_DIGEST_BYTES * -(-size // limits.BLOCK_BYTES)):
                return False
            return self._send_until_enough(snapshot, Offer(number, snapshot.inode, snapshot.generation, size, whole, blocks), fd)

    def _take_snapshot(self, number: int, fd: int) -> Content | None:
        """A number for what the file holds now, with its size and times, by which others know it should it be the last."""
        status = os.fstat(fd)
        with self._db.transaction():
            snapshot = peers.record_open_snapshot(self._db, number)
            if snapshot is not None and contents.is_current(self._db, snapshot.inode, number):
                contents.record_written(self._db, snapshot.inode, status.st_size, status.st_atime_ns, status.st_mtime_ns)
        return snapshot

    def _send_until_enough(self, snapshot: Content, offer: Offer, fd: int) -> bool:
        """Send a state of an open file until enough nodes have it. False: there are too few that take it."""
        cluster, view = self._cluster, self._cluster.view()
        holding_nodes: set[int] = {cluster.node_number}
        failed: set[int] = set()
        while targets := placement.choose_new_holders(
            _build_view_without(view, failed), holding_nodes, cluster.node_number, cluster.factor, cluster.jump
        ):
            node = targets[0]
            try:
                if not cluster.peers.send(node, offer, fd).is_verified:
                    failed.add(node.number)
                    continue
            except PeerCorrupt:
                raise
            except PeerFailed as failure:
                log.debug("%s does not take content %d as it is now: %s", node.name, offer.content, failure)
                failed.add(node.number)
                continue
            assert offer.digest is not None
            copy = PeerCopy(offer.content, node.number, offer.generation, offer.digest)
            disk.act("secure:counted", peers.insert_peer_copy, self._db, copy)
            holding_nodes.add(node.number)
        return peers.has_enough_domains(self._db, sorted(holding_nodes))


def _build_view_without(view: ClusterView, nodes: set[int]) -> ClusterView:
    return ClusterView(tuple(node for node in view.nodes if node.number not in nodes)) if nodes else view
