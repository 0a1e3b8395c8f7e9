"""Copies of files that are still open: after an fsync that waits, after other fsyncs, and on a timer.

Takes: requests of applications that wait in fsync for the level `clique`, requests for fsyncs that do not wait, and changed open files.
Leaves: a snapshot of the content, verified on enough nodes as a generation of its own. For a waiting fsync, the file's name is published.
If we die here: the request is still open. Peers that have the snapshot receive only the offer again.

If a block changed while the file was read, its digest differs, and the file is read again as the next generation (P7). A file that is
closed soon after its fsync is left to its seal. Copies of a file that is always written take at most a tenth of the time.
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
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.peer_api import Offer, PeerCorrupt, PeerFailed
from ckptfs.model import Content, ContentState, Level, Notifier, Tier
from ckptfs.tiers import transfer
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)
disk.declare_labels("replicate:open:read", "replicate:open:counted")
TRIES_MAX = 5


class SnapshotReplicator:
    """Sends snapshots of open files. Several threads may do so at once, each for another file."""

    def __init__(self, db: Database, tiers: Tiers, cluster: Cluster) -> None:
        self._db = db
        self._tiers = tiers
        self._cluster = cluster

    def replicate(self, number: int) -> set[int]:
        """Send a snapshot of a file. Return the nodes that have it, with this one; none if that failed."""
        for _ in range(TRIES_MAX):
            try:
                return self._replicate_once(number)
            except PeerCorrupt:
                continue  # The file changed while it was read.
            except FileNotFoundError:
                break  # It moved to another tier.
        return set()

    def _replicate_once(self, number: int) -> set[int]:
        tiers = copies.list_good_tiers(self._db, number, self._tiers.keys() - {Tier.PFS})
        if not tiers:
            return set()
        with disk.closing(self._tiers[tiers[0]].open(number)) as fd:
            # The generation first: of two snapshots, the higher generation was read later and includes all writes of the other.
            snapshot = self._take_snapshot(number, fd)
            size, whole, blocks = transfer.read(fd, label="replicate:open")
            if snapshot is None or not digest.has_all_digests(blocks, size):
                return set()
            return self._send_until_enough(Offer(number, snapshot.inode, snapshot.generation, size, whole, blocks), fd)

    def _take_snapshot(self, number: int, fd: int) -> Content | None:
        """Record a generation for the present content, its size and times; None if it is not open."""
        status = os.fstat(fd)
        with self._db.transaction():
            snapshot = peer_copies.record_open_snapshot(self._db, number)
            if snapshot is not None and contents.is_current(self._db, snapshot.inode, number):
                contents.record_written(self._db, snapshot.inode, status.st_size, status.st_atime_ns, status.st_mtime_ns)
        return snapshot

    def _send_until_enough(self, offer: Offer, fd: int) -> set[int]:
        """Send a snapshot until enough nodes have it, or no other one takes it. Return the nodes that have it."""
        cluster = self._cluster
        holding_nodes: set[int] = {cluster.node_number}
        failed: set[int] = set()
        while targets := cluster.choose_new_holders(holding_nodes, frozenset(failed)):
            node = targets[0]
            try:
                if not cluster.peers.send(node, offer, fd).is_verified:
                    failed.add(node.number)
                    continue
            except PeerCorrupt:
                raise
            except PeerFailed as failure:
                log.debug("content %d: snapshot refused by %s: %s", offer.content, node.name, failure)
                failed.add(node.number)
                continue
            assert offer.digest is not None
            copy = PeerCopy(offer.content, node.number, offer.generation, offer.digest)
            disk.act("replicate:open:counted", peer_copies.insert_peer_copy, self._db, copy)
            holding_nodes.add(node.number)
        return holding_nodes


class FsyncReplication:
    """Answers one waiting fsync a step. Several threads may step at once, each for another file."""

    def __init__(self, db: Database, tiers: Tiers, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._notify = notify
        self._replicator = SnapshotReplicator(db, tiers, cluster)
        self._lock = threading.Lock()
        self._active_inodes: set[int] = set()
        self._retry_at_s: dict[int, float] = {}

    def step(self) -> bool:
        """Answer one request. Return True if there may be more at once."""
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
        """Return the seconds until the first deferred request is tried again; None without one."""
        with self._lock:
            return max(0.0, min(self._retry_at_s.values()) - time.monotonic()) if self._retry_at_s else None

    def retry_now(self) -> None:
        """Retry all deferred work now."""
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
        content = summary.load_file_record(self._db, request.inode).content
        if content is None or content.state is not ContentState.OPEN:
            return self._answer_closed(request)
        domains = peer_copies.count_domains(self._db)
        if request.id in self._retry_at_s and not domains.are_enough:
            return self._retry_later(request)  # Those that live have its bytes: reading all of it again would bring nothing.
        is_enough = peer_copies.has_domains(self._db, self._replicator.replicate(content.id), domains.required)
        if is_enough and peer_copies.is_published(self._db, content):
            return self._mark_done(request)
        return self._retry_later(request)

    def _answer_closed(self, request: mover_requests.MoverRequest) -> None:
        """Answer for a file that was closed meanwhile. The replicate step copies it."""
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
    """An open file: its (size, mtime) at the last copy, and when the next change or fsync may be copied."""

    copied_state: tuple[int, int] | None
    change_due_s: float
    fsync_due_s: float


class PeriodicReplication:
    """Copies open files that are due, one after the other."""

    def __init__(self, db: Database, tiers: Tiers, cluster: Cluster) -> None:
        self._db = db
        self._tiers = tiers
        self._cluster = cluster
        self._replicator = SnapshotReplicator(db, tiers, cluster)
        self._tracked: dict[int, _TrackedFile] = {}

    def step(self) -> bool:
        """Copy all files that are due. Return False."""
        if not self._cluster.has_peers():
            self._tracked = {}
            return False
        open_contents = peer_copies.list_being_written(self._db, limits.OPEN_FILES_MAX)
        fsynced = {request.inode: request for request in mover_requests.list_open(self._db, mover_requests.REPLICATE_LATER)}
        now_s = time.monotonic()
        known, self._tracked = self._tracked, {}
        for content, tier in open_contents:
            self._tracked[content.id] = known.get(content.id) or self._start_tracking(content, tier, now_s)
        for content, tier in open_contents:
            self._replicate_if_due(self._tracked[content.id], content, tier, fsynced.pop(content.inode, None))
        for request in fsynced.values():
            mover_requests.mark_done(self._db, request.id)  # The file was closed: it is copied after its seal.
        return False

    def next_due_s(self) -> float | None:
        """Return a short interval while files are written, else a long one: an open sends no wake-up."""
        return limits.OPEN_FILES_POLL_S if contents.count_writers(self._db) else limits.OPEN_IDLE_S

    def _start_tracking(self, content: Content, tier: Tier, now_s: float) -> _TrackedFile:
        """Begin to track an open file. What was verified after its last change has copies of its seal."""
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
            mover_requests.mark_done(self._db, fsynced.id)  # First: a later fsync makes a new request.
        domains = peer_copies.count_domains(self._db)
        if peer_copies.has_domains(self._db, self._replicator.replicate(content.id), min(domains)):
            tracked.copied_state = state
        else:
            log.debug("content %d: too few nodes take its snapshot; next try later", content.id)
            if fsynced is not None:
                mover_requests.insert_request(self._db, mover_requests.REPLICATE_LATER, content.inode, wait_s=limits.REQUEST_KEEP_S)
        end_s = time.monotonic()
        pause_s = PAUSE_RATIO * (end_s - now_s)
        tracked.change_due_s = end_s + max(limits.OPEN_REPLICATE_S, pause_s)
        tracked.fsync_due_s = end_s + max(limits.OPEN_REPLICATE_FSYNCED_S, pause_s)

    def _get_file_state(self, content: Content, tier: Tier) -> tuple[int, int] | None:
        found = self._tiers[tier].stat(content.id) if tier in self._tiers else None
        return None if found is None else (found.st_size, found.st_mtime_ns)
