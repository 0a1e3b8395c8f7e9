"""Takes: wants of the kind 'secure': somebody has fsynced a file, and waits until as many nodes have it as make the level `clique`.
Leaves: what the file held then, verified there as a generation of its own; a file that was closed meanwhile reaches its level as ever.
If we die here: the want is still open; peers that have it already lack nothing.

An open file may change while it is read: every block is compared by its receiver with the digest that was offered, and what changed
meanwhile is read once more, as the next generation. So a peer never has a mixture of states (P7).
"""

import errno
import logging
import os
import threading
import time

from ckptfs import digest, disk, limits
from ckptfs.catalog import peers, report, settling, wants
from ckptfs.catalog.database import Database
from ckptfs.catalog.peers import PeerCopy
from ckptfs.clique import placement
from ckptfs.clique.membership import World
from ckptfs.clique.peers import PeerFailed, PeerLied
from ckptfs.clique.shelf import Offer
from ckptfs.clique.surroundings import Surroundings
from ckptfs.model import Content, ContentState, CopyState, Level, Notify, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.place import Places

log = logging.getLogger(__name__)

disk.labels("secure:read", "secure:counted")

TRIES_MAX = 5


class Secure:
    """Answers one want a step. Several threads may take steps at once, of different files."""

    def __init__(self, db: Database, places: Places, notify: Notify, around: Surroundings) -> None:
        self._db = db
        self._places = places
        self._notify = notify
        self._around = around
        self._lock = threading.Lock()
        self._in_hand: set[int] = set()
        self._again_s: dict[int, float] = {}

    def step(self) -> bool:
        """True: there may be more at once."""
        want = self._take()
        if want is None:
            return False
        try:
            self._answer(want)
        finally:
            with self._lock:
                self._in_hand.discard(want.inode)
        return True

    def due_s(self) -> float | None:
        """While somebody waits: until the first want is looked at again."""
        with self._lock:
            return max(0.0, min(self._again_s.values()) - time.monotonic()) if self._again_s else None

    def hurry(self) -> None:
        """Nothing is put off."""
        with self._lock:
            self._again_s = {}

    def _take(self) -> wants.Want | None:
        wanted = wants.wanted(self._db, wants.SECURE)
        now_s = time.monotonic()
        with self._lock:
            self._again_s = {want.id: self._again_s[want.id] for want in wanted if want.id in self._again_s}
            for want in wanted:
                if want.inode not in self._in_hand and self._again_s.get(want.id, 0.0) <= now_s:
                    self._in_hand.add(want.inode)
                    return want
        return None

    def _answer(self, want: wants.Want) -> None:
        found = report.record(self._db, want.inode)
        if found.content is None:
            self._done(want)
        elif found.content.state is not ContentState.OPEN:
            self._settled(want)
        elif self._copied(found.content.id):
            self._done(want)
        else:
            self._later(want)

    def _settled(self, want: wants.Want) -> None:
        """It was closed meanwhile: the replicate flow does the rest."""
        listed = report.listed(self._db, want.inode)
        if listed is None or listed.level in (Level.CLIQUE, Level.PFS):
            self._done(want)
        elif listed.record.content is not None and listed.record.content.state is ContentState.LOST:
            wants.failed(self._db, want.id, errno.EIO)
            self._notify.wants()
        else:
            self._later(want)

    def _done(self, want: wants.Want) -> None:
        wants.done(self._db, want.id)
        self._notify.wants()

    def _later(self, want: wants.Want) -> None:
        with self._lock:
            self._again_s[want.id] = time.monotonic() + limits.RETRY_FIRST_S

    # --- an open file ------------------------------------------------------------------------------------------------

    def _copied(self, number: int) -> bool:
        """Whether what the file holds now is on enough other nodes."""
        for _ in range(TRIES_MAX):
            try:
                return self._copied_once(number)
            except PeerLied:
                continue  # Somebody wrote to it while it was read.
            except FileNotFoundError:
                return False  # It moved to another tier.
        return False

    def _copied_once(self, number: int) -> bool:
        place = next((copy.tier for copy in settling.copies(self._db, number) if copy.state is CopyState.GOOD), None)
        if place is None or place is Tier.PFS or place not in self._places:
            return False
        fd = self._places[place].open(number)
        try:
            # The number first: of two states the one with the higher number was read later, and lacks nothing that the other one has.
            seen = peers.snapshot(self._db, number)
            size, whole, blocks = transfer.read(fd, label="secure")
            if seen is None or (size and len(blocks) != digest.BLOCK_DIGEST_BYTES * -(-size // limits.BLOCK_BYTES)):
                return False
            return self._spread(seen, Offer(number, seen.inode, seen.generation, size, whole, blocks), fd)
        finally:
            os.close(fd)

    def _spread(self, seen: Content, offer: Offer, fd: int) -> bool:
        """Send a state of an open file until enough nodes have it. False: there are too few that take it."""
        around, world = self._around, self._around.see()
        has: set[int] = {around.number}
        failed: set[int] = set()
        while wanted := placement.wanted(_without(world, failed), has, around.number, around.factor, around.jump):
            node = wanted[0]
            try:
                if not around.peers.send(node, offer, fd).verified:
                    failed.add(node.number)
                    continue
            except PeerLied:
                raise
            except PeerFailed as failure:
                log.debug("%s does not take content %d as it is now: %s", node.name, offer.content, failure)
                failed.add(node.number)
                continue
            assert offer.digest is not None
            copy = PeerCopy(offer.content, node.number, offer.generation, offer.digest)
            disk.act("secure:counted", peers.peer_has, self._db, copy)
            has.add(node.number)
        return peers.spans_enough(self._db, sorted(has))


def _without(world: World, nodes: set[int]) -> World:
    return World(tuple(node for node in world.nodes if node.number not in nodes)) if nodes else world
