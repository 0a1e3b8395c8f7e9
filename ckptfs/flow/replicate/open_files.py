"""Takes: wants of the kind 'secure': somebody has fsynced a file, and waits until as many nodes have it as make the level `clique`.
Leaves: what the file held then, verified there as a generation of its own, and its name told to all; a file that was closed meanwhile
reaches its level as ever.
If we die here: the want is still open; peers that have it already lack nothing.

What is sent of an open file is in secure/spreading.py; files that nobody waits for are copied by secure/regularly.py.

Takes: a content that somebody is writing.
Leaves: what it held at one moment, verified on enough other nodes as a generation of its own.
If we die here: peers that have it already lack nothing when it is sent again.

An open file may change while it is read: every block is compared by its receiver with the digest that was offered, and what changed
meanwhile is read once more, as the next generation. So a peer never has a mixture of states (P7).

Takes: files that stay open: those that were fsynced (wants of the kind 'copy', for which nobody waits), and those that were changed.
Leaves: what they held then, verified on enough other nodes, as after an fsync that waits; so that a log which is open for days is lost
with its node only from its last copy on.
If we die here: which state was copied is forgotten, and the next mover copies it once more, of which only the offer travels.

A file that is closed soon after its fsync, as a checkpoint is, is left to its seal. Between two copies of a file passes at least ten times
as long as the last one took, so that a large file that is written all the time costs a tenth of what copying it costs.
"""

import errno
import logging
import os
import threading
import time
from dataclasses import dataclass

from ckptfs import digest, disk, limits
from ckptfs.catalog import contents, copies, mover_requests, peer_copies, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.peer_copies import PeerCopy
from ckptfs.clique import placement
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.membership import ClusterView
from ckptfs.clique.peer_api import Offer, PeerCorrupt, PeerFailed
from ckptfs.model import Content, ContentState, CopyState, Level, Notifier, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.storage import Tiers

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
        tier = next((copy.tier for copy in copies.list_copies(self._db, number) if copy.state is CopyState.GOOD), None)
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
            snapshot = peer_copies.record_open_snapshot(self._db, number)
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
            disk.act("secure:counted", peer_copies.insert_peer_copy, self._db, copy)
            holding_nodes.add(node.number)
        return peer_copies.has_enough_domains(self._db, sorted(holding_nodes))


def _build_view_without(view: ClusterView, nodes: set[int]) -> ClusterView:
    return ClusterView(tuple(node for node in view.nodes if node.number not in nodes)) if nodes else view


class FsyncReplication:
    """Answers one want a step. Several threads may take steps at once, of different files."""

    def __init__(self, db: Database, tiers: Tiers, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._replicator = SnapshotReplicator(db, tiers, cluster)
        self._lock = threading.Lock()
        self._active_inodes: set[int] = set()
        self._retry_at_s: dict[int, float] = {}

    def step(self) -> bool:
        """True: there may be more at once."""
        request = self._take_request()
        if request is None:
            return False
        try:
            self._answer(request)
        finally:
            with self._lock:
                self._active_inodes.discard(request.inode)
        return True

    def next_due_s(self) -> float | None:
        """While somebody waits: until the first want is looked at again."""
        with self._lock:
            return max(0.0, min(self._retry_at_s.values()) - time.monotonic()) if self._retry_at_s else None

    def retry_now(self) -> None:
        """Nothing is put off."""
        with self._lock:
            self._retry_at_s = {}

    def _take_request(self) -> mover_requests.MoverRequest | None:
        requests = mover_requests.list_open(self._db, mover_requests.REPLICATE_NOW)
        now_s = time.monotonic()
        with self._lock:
            self._retry_at_s = {want.id: self._retry_at_s[want.id] for want in requests if want.id in self._retry_at_s}
            for want in requests:
                if want.inode not in self._active_inodes and self._retry_at_s.get(want.id, 0.0) <= now_s:
                    self._active_inodes.add(want.inode)
                    return want
        return None

    def _answer(self, request: mover_requests.MoverRequest) -> None:
        found = summary.load_file_record(self._db, request.inode)
        if found.content is None or found.content.state is not ContentState.OPEN:
            self._answer_closed(request)
        elif self._replicator.replicate(found.content.id) and peer_copies.is_published(self._db, found.content):
            self._mark_done(request)
        else:
            self._retry_later(request)

    def _answer_closed(self, request: mover_requests.MoverRequest) -> None:
        """It was closed meanwhile: the replicate flow does the rest."""
        listed = summary.get_listed_file(self._db, request.inode)
        if listed is None or listed.level in (Level.CLIQUE, Level.PFS):
            self._mark_done(request)
        elif listed.record.content is not None and listed.record.content.state is ContentState.LOST:
            mover_requests.mark_failed(self._db, request.id, errno.EIO)
            self._notify.notify_replies()
        else:
            self._retry_later(request)

    def _mark_done(self, request: mover_requests.MoverRequest) -> None:
        mover_requests.mark_done(self._db, request.id)
        self._notify.notify_replies()

    def _retry_later(self, request: mover_requests.MoverRequest) -> None:
        with self._lock:
            self._retry_at_s[request.id] = time.monotonic() + limits.RETRY_FIRST_S


PAUSE_RATIO = 10


@dataclass(slots=True)
class _TrackedFile:
    """An open file: its (size, mtime) when it was copied last, when a change of it is copied, and when an fsync may be."""

    copied_state: tuple[int, int] | None
    change_due_s: float
    fsync_due_s: float


class PeriodicReplication:
    """Looks through the open files, and copies those that are due, one after the other."""

    def __init__(self, db: Database, tiers: Tiers, cluster: Cluster) -> None:
        self._db = db
        self._tiers = tiers
        self._cluster = cluster
        self._replicator = SnapshotReplicator(db, tiers, cluster)
        self._tracked: dict[int, _TrackedFile] = {}

    def step(self) -> bool:
        """Never more to do at once."""
        if len(self._cluster.view()) < 2 or self._cluster.factor < 2:
            self._tracked = {}
            return False
        open_contents = peer_copies.list_being_written(self._db, limits.OPEN_FILES_MAX)
        fsynced = {want.inode: want for want in mover_requests.list_open(self._db, mover_requests.REPLICATE_LATER)}
        now_s = time.monotonic()
        known, self._tracked = self._tracked, {}
        for content, tier in open_contents:
            self._tracked[content.id] = known.get(content.id) or self._start_tracking(content, tier, now_s)
        for content, tier in open_contents:
            self._replicate_if_due(self._tracked[content.id], content, tier, fsynced.pop(content.inode, None))
        for want in fsynced.values():
            mover_requests.mark_done(self._db, want.id)  # It was closed: its seal does the rest.
        return False

    def next_due_s(self) -> float | None:
        """Soon while somebody writes; now and then else, because nobody tells of an open."""
        return limits.OPEN_FILES_POLL_S if contents.count_writers(self._db) else limits.OPEN_IDLE_S

    def _start_tracking(self, content: Content, tier: Tier, now_s: float) -> _TrackedFile:
        """What was verified after it was changed last had its copies made when it was sealed."""
        state = self._get_file_state(content, tier)
        verified_ns = next((copy.verified_ns for copy in copies.list_copies(self._db, content.id) if copy.tier is tier), 0)
        is_unchanged = state is not None and state[1] < verified_ns
        return _TrackedFile(state if is_unchanged else None, now_s + limits.OPEN_REPLICATE_S, now_s + limits.OPEN_REPLICATE_FSYNCED_S)

    def _replicate_if_due(self, tracked: _TrackedFile, content: Content, tier: Tier, fsynced: mover_requests.MoverRequest | None) -> None:
        now_s, state = time.monotonic(), self._get_file_state(content, tier)
        if state is None or state == tracked.copied_state or not state[0]:
            if fsynced is not None:
                mover_requests.mark_done(self._db, fsynced.id)
            return
        is_fsync_due = (
            fsynced is not None
            and now_s >= tracked.fsync_due_s
            and time.time_ns() - fsynced.at_ns >= int(limits.OPEN_REPLICATE_FSYNCED_S * 1e9)
        )
        if not is_fsync_due and now_s < tracked.change_due_s:
            return
        if fsynced is not None:
            mover_requests.mark_done(self._db, fsynced.id)  # First: what is fsynced from here on is wanted anew.
        if self._replicator.replicate(content.id):
            tracked.copied_state = state
        else:
            log.debug("too few nodes take content %d as it is now; again in a while", content.id)
            if fsynced is not None:
                mover_requests.insert_request(self._db, mover_requests.REPLICATE_LATER, content.inode, wait_s=limits.REQUEST_KEEP_S)
        end_s = time.monotonic()
        pause_s = PAUSE_RATIO * (end_s - now_s)
        tracked.change_due_s = end_s + max(limits.OPEN_REPLICATE_S, pause_s)
        tracked.fsync_due_s = end_s + max(limits.OPEN_REPLICATE_FSYNCED_S, pause_s)

    def _get_file_state(self, content: Content, tier: Tier) -> tuple[int, int] | None:
        found = self._tiers[tier].stat(content.id) if tier in self._tiers else None
        return None if found is None else (found.st_size, found.st_mtime_ns)
