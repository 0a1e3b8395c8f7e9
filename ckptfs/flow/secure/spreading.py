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
from ckptfs.tiers.place import Places

log = logging.getLogger(__name__)

disk.declare_labels("secure:read", "secure:counted")

TRIES_MAX = 5


class Spreading:
    """Sends states of open files. Several threads may do so at once, of different files."""

    def __init__(self, db: Database, places: Places, around: Cluster) -> None:
        self._db = db
        self._places = places
        self._around = around

    def copied(self, number: int) -> bool:
        """Whether what the file holds now is on enough other nodes."""
        for _ in range(TRIES_MAX):
            try:
                return self._once(number)
            except PeerCorrupt:
                continue  # Somebody wrote to it while it was read.
            except FileNotFoundError:
                return False  # It moved to another tier.
        return False

    def _once(self, number: int) -> bool:
        place = next((copy.tier for copy in settling.list_copies(self._db, number) if copy.state is CopyState.GOOD), None)
        if place is None or place is Tier.PFS or place not in self._places:
            return False
        with disk.closing(self._places[place].open(number)) as fd:
            # The number first: of two states the one with the higher number was read later, and lacks nothing that the other one has.
            seen = self._snapshot(number, fd)
            size, whole, blocks = transfer.read(fd, label="secure")
            if seen is None or (size and len(blocks) != digest.BLOCK_DIGEST_BYTES * -(-size // limits.BLOCK_BYTES)):
                return False
            return self._spread(seen, Offer(number, seen.inode, seen.generation, size, whole, blocks), fd)

    def _snapshot(self, number: int, fd: int) -> Content | None:
        """A number for what the file holds now, with its size and times, by which others know it should it be the last."""
        status = os.fstat(fd)
        with self._db.transaction():
            seen = peers.record_open_snapshot(self._db, number)
            if seen is not None and contents.is_current(self._db, seen.inode, number):
                contents.record_written(self._db, seen.inode, status.st_size, status.st_atime_ns, status.st_mtime_ns)
        return seen

    def _spread(self, seen: Content, offer: Offer, fd: int) -> bool:
        """Send a state of an open file until enough nodes have it. False: there are too few that take it."""
        around, world = self._around, self._around.view()
        has: set[int] = {around.node_number}
        failed: set[int] = set()
        while wanted := placement.choose_new_holders(_without(world, failed), has, around.node_number, around.factor, around.jump):
            node = wanted[0]
            try:
                if not around.peers.send(node, offer, fd).is_verified:
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
            has.add(node.number)
        return peers.has_enough_domains(self._db, sorted(has))


def _without(world: ClusterView, nodes: set[int]) -> ClusterView:
    return ClusterView(tuple(node for node in world.nodes if node.number not in nodes)) if nodes else world
