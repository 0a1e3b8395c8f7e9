"""The import of external changes on the PFS, one directory at a time.

Takes: mover requests of the kind SCAN, and directories whose last comparison with the PFS is older than the refresh interval.
Leaves: a catalog that shows what other programs created, changed and removed on the PFS. New directories stay unimported (imported=0)
until their own scan. A name or inode with changes that are not on the PFS yet is left alone.
If we die here: imported names stay; the directory counts as it did before, and is scanned again.

A directory that hangs, such as that of a filesystem which is mounted inside, holds up its own scan only: a spare lane takes the others.

`Scan` chooses the next directory and opens it. `DirectoryScan` lists it outside of any transaction and imports the differences in short
ones. Each transaction checks the pending changes again before it uses the listing, because write-back may have moved on since
(catalog/scans.py).
"""

import contextlib
import errno
import functools
import itertools
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from ckptfs import disk, limits
from ckptfs.bounded_waits import list_stalled
from ckptfs.catalog import inodes, mover_requests, namespace, pfs_state, scans, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.scans import PendingChanges, ScanVerdict
from ckptfs.clique import locations
from ckptfs.clique.cluster import Cluster, ClusterLock
from ckptfs.coherence import key_state, pfs_coordination, store_loss
from ckptfs.config import Config
from ckptfs.errors import Busy, CkptfsError, StoreRefused, StoreUnreachable, TierUnavailable
from ckptfs.model import ROOT, Notifier, PfsEntryStat
from ckptfs.store.kv import Get, Transactions
from ckptfs.tiers import health, pfs_identity, pfs_ownership, pfs_tree
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

disk.declare_labels("scan:begin", "scan:end", "scan:import", "scan:vanish", "scan:parked")

# A refresh that took t seconds is followed by a pause of PAUSE_RATIO times t, so that refreshing never loads the PFS.
PAUSE_RATIO = 9
# Of a cluster each node refreshes one directory in about this time at most.
CLUSTER_PAUSE_S = 1.0
CLUSTER_AGE_MAX = 1.5
"""By this factor a refresh in a cluster may come later."""
BUSY_TRIES = 5
PUBLISHED_POLL_S = 0.005
LISTED_BATCH = 256
HIDDEN_TROUBLE = "hidden"
# Names in one transaction: each takes four rows, and some more for its xattrs.
IMPORT_BATCH = limits.CHANGE_ROWS_MAX // 8
# In a cluster the store has to accept all keys of a name at once: up to six.
CLUSTER_IMPORT_BATCH = limits.ETCD_OPERATIONS_MAX // 10
# Errors of one directory, not of the PFS.
DIRECTORY_ERRNOS = {errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBUSY}

Item = TypeVar("Item")


class Scan:
    """Scans one directory per step, requested ones first. Steps overlap while one of them hangs."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, cluster: Cluster | None = None) -> None:
        """`cluster`: the other nodes, which use the same PFS; None on a single node."""
        self._cluster = cluster
        self._store = None if cluster is None else cluster.store
        self._db = db
        self._config = config
        self._notify = notify
        self._queues: dict[int, deque[int]] = {}
        self._next_refresh_s = 0.0
        self._turns: dict[ClusterLock, float] = {}
        self._progress_s = 0.0
        self._lock = threading.Lock()
        self._in_hand: dict[int, float] = {}  # Directory -> when its scan last got on.
        self._requests_in_hand: set[int] = set()
        self._large_directories: set[int] = set()

    def prepare(self) -> None:
        """Forget unfinished scans. Call once before the mover is ready; does not access the PFS."""
        if self._config.pfs is not None:
            scans.reset_scans(self._db, os.fsdecode(self._config.pfs))

    def step(self) -> bool:
        """Scan one directory. Return True if more work may be ready now."""
        requests = mover_requests.list_open(self._db, mover_requests.SCAN)
        with self._lock:
            busy = {one.id: self._queues.get(one.id, deque()) for one in requests if one.id in self._requests_in_hand}
            self._queues = {one.id: self._queues.get(one.id) or deque([one.inode]) for one in requests} | busy
            free = [one for one in requests if one.id not in busy and self._queues[one.id][0] not in self._in_hand]
            request = next((one for one in free if one.argument != mover_requests.TREE), free[0] if free else None)
            if request is not None:
                queue = self._queues[request.id]
                self._requests_in_hand.add(request.id)
                self._in_hand[queue[0]] = time.monotonic()
        if request is None:
            return self._refresh_next()
        directory = queue.popleft()
        try:
            self._answer(request, queue, directory)
        finally:
            self._leave(directory)
            self._requests_in_hand.discard(request.id)
        return True

    def list_stalled(self) -> list[int]:
        """Return the directories whose scans hang: for each there must be a lane more from now on."""
        return list_stalled(self._in_hand)

    def _take(self, directory: int) -> bool:
        """Reserve a directory for this step. Return False if another one has it."""
        with self._lock:
            if directory in self._in_hand:
                return False
            self._in_hand[directory] = time.monotonic()
            return True

    def _leave(self, directory: int) -> None:
        with self._lock:
            self._in_hand.pop(directory, None)

    def next_due_s(self) -> float | None:
        """Return the seconds until the next look for a directory that is due."""
        return max(0.0, self._next_refresh_s - time.monotonic())

    # --- requests -----------------------------------------------------------------------------------------------------

    def _report_progress(self, directory: int) -> None:
        """Extend the deadlines of all requests but those that other steps have: a large directory takes long."""
        with self._lock:
            self._in_hand[directory] = time.monotonic()
            others = [one for one in self._in_hand if one != directory]
        if time.monotonic() - self._progress_s > limits.REQUEST_POLL_S:
            self._progress_s = time.monotonic()
            mover_requests.record_lane_progress(self._db, mover_requests.SCAN, in_hand=others, wait_s=limits.SCAN_WAIT_S)

    def _answer(self, request: mover_requests.MoverRequest, queue: deque[int], directory: int) -> None:
        """Scan the next directory of a request; the last one completes it.

        A failed scan fails the request at once; but in a tree a directory that cannot be listed is skipped.
        """
        try:
            if request.argument or not scans.is_imported(self._db, directory):
                self._scan_when_undisturbed(directory)
        except Exception as failure:
            is_directory_error = _is_directory_error(failure)
            if not is_directory_error or directory == request.inode:
                code = failure.errno if isinstance(failure, OSError) and is_directory_error else errno.EIO
                mover_requests.mark_failed(self._db, request.id, code or errno.EIO)
                self._notify.notify_replies()
                log.debug("inode %d: scan failed: %s", directory, failure)
                if is_directory_error or isinstance(failure, StoreUnreachable):
                    return  # The service that watches the store reports it.
                raise
        if request.argument == mover_requests.TREE:
            queue.extend(scans.list_scanned_directories(self._db, directory))
        if queue:
            mover_requests.record_progress(self._db, request.id, wait_s=limits.SCAN_WAIT_S)
            return
        mover_requests.mark_done(self._db, request.id)
        self._notify.notify_replies()

    def _refresh_next(self) -> bool:
        """Scan the directory whose refresh is due. Return False: the pause after it is kept."""
        if time.monotonic() < self._next_refresh_s:
            return False
        started_s = time.monotonic()
        if self._cluster is not None and store_loss.is_adopting(self._db):
            self._next_refresh_s = started_s + limits.DUE_POLL_S
            return False
        # All nodes of a cluster learn of a directory at the same time. A random age spreads their refreshes, each of which asks the store.
        age_s = self._config.refresh_interval_s * (1.0 if self._cluster is None else random.uniform(1.0, CLUSTER_AGE_MAX))
        found = scans.find_due_directory(self._db, time.time_ns() - int(age_s * 1e9))
        if found is None:
            self._next_refresh_s = started_s + min(self._config.refresh_interval_s, limits.DUE_POLL_S)
            return False
        if not self._take(found):
            scans.record_postponed(self._db, found)
            return True
        try:
            if self._take_turn(found):
                self._scan(found)
            else:
                scans.record_postponed(self._db, found)
        except Exception as failure:
            scans.record_postponed(self._db, found)
            if not _is_directory_error(failure):
                raise
        finally:
            self._leave(found)
            ended_s = time.monotonic()
            pause_s = 0.0 if self._cluster is None else random.uniform(0.5, 1.5) * CLUSTER_PAUSE_S
            self._next_refresh_s = ended_s + max(pause_s, PAUSE_RATIO * (ended_s - started_s))
        return False

    def _take_turn(self, directory: int) -> bool:
        """Take the lock for refreshing the directory in this interval. Return True if this node has it."""
        if self._cluster is None:
            return True
        locks, now_s, mine = self._cluster.locks, time.monotonic(), None
        with contextlib.suppress(StoreUnreachable, StoreRefused):
            for lock in [lock for lock, until_s in list(self._turns.items()) if until_s <= now_s]:
                if self._turns.pop(lock, None) is not None:
                    locks.release(lock)
            mine = locks.try_acquire(f"refresh/{directory:016x}")
        if mine is not None:
            self._turns[mine] = now_s + self._config.refresh_interval_s
        return mine is not None

    def _scan_when_undisturbed(self, directory: int) -> None:
        """Scan a directory; try again if write-back is just renaming a directory on its path."""
        for _ in range(BUSY_TRIES):
            try:
                return self._scan(directory)
            except OSError as failure:
                if failure.errno != errno.EBUSY:
                    raise
            time.sleep(limits.RETRY_FIRST_S)
        return self._scan(directory)

    # --- one directory ------------------------------------------------------------------------------------------------

    def _scan(self, directory: int) -> None:
        """Compare one directory with the PFS. Raises OSError or TierUnavailable if it cannot be listed."""
        root_fd = self._open_root()
        try:
            pending = disk.act("scan:begin", _begin_scan, self._db, self._store, directory)
            self._load_location(directory)
            names = pfs_state.find_path(self._db, directory)
            if names is None:
                scans.record_scan_end(self._db, directory, whole=True)  # Not on the PFS: there is nothing to import.
                return
            with disk.closing(self._open_directory(root_fd, names, directory)) as fd:
                progress = functools.partial(self._report_progress, directory)
                DirectoryScan(self._db, self._notify, pending, fd, progress, self._store, self._is_gone).run()
        except BaseException:
            scans.record_scan_end(self._db, directory, whole=False)
            raise
        finally:
            os.close(root_fd)
        disk.act("scan:end", scans.record_scan_end, self._db, directory, whole=True)
        if self._cluster is not None:
            self._warn_if_large(directory)
        self._wait_published()

    def _load_location(self, directory: int) -> bool:
        """Record where a directory is on the PFS now. Return True if another node is about to change that.

        Raises StoreUnreachable, and OSError (EBUSY) if it keeps changing.
        """
        if self._cluster is None:
            return False
        try:
            return bool(pfs_coordination.load_inodes(self._db, self._cluster.store, directory).list_intents())
        except Busy:
            raise _build_busy_error(pfs_state.find_path(self._db, directory) or ()) from None

    def _warn_if_large(self, directory: int) -> None:
        """Warn once of a directory that may fill the store with four keys for every name."""
        if directory in self._large_directories or not scans.has_many_names(self._db, directory):
            return
        self._large_directories.add(directory)
        remedy = "raise etcd's quota, or give pfs= a directory with fewer files"
        path = os.fsdecode(namespace.get_path(self._db, directory)) or "the top directory"
        log.warning(
            "%s: %d names or more: each takes 4 keys in etcd, whose quota may not hold them (%s)", path, limits.SHARED_NAMES_MAX, remedy
        )

    def _is_gone(self, inode: int) -> bool:
        """Return True if the store has no such file. False until all nodes have adopted a new store."""
        if self._cluster is None or store_loss.is_adopting(self._db):
            return False
        try:
            return not self._cluster.store.read([Get(locations.build_inode_key(inode), keys_only=True)]).results[0]
        except CkptfsError:
            return False

    def _wait_published(self) -> None:
        """Wait up to `ETCD_WAIT_S` until the store has the names: all nodes then agree on them."""
        until_s, last = time.monotonic() + limits.ETCD_WAIT_S, key_state.get_last_change(self._db)
        while self._cluster is not None and key_state.has_dirty(self._db, last) and time.monotonic() < until_s:
            time.sleep(PUBLISHED_POLL_S)

    def _open_root(self) -> int:
        if self._config.pfs is None:
            raise TierUnavailable("no PFS is configured")
        try:
            return pfs_identity.open_adopted_root(self._db, self._config.pfs, may_mark=not self._config.is_read_only)
        except OSError as failure:
            remedy = health.remedy(failure.errno)
            raise TierUnavailable(f"{self._config.pfs} cannot be opened: {failure.strerror}", remedy=remedy) from failure

    def _open_directory(self, root_fd: int, names: tuple[bytes, ...], directory: int) -> int:
        """Return a descriptor of the directory. Raises OSError (EBUSY) if its path is being renamed."""
        try:
            fd = pfs_tree.open_directory(root_fd, names)
        except (FileNotFoundError, NotADirectoryError):
            if self._is_path_changing(directory, names):
                raise _build_busy_error(names) from None
            self._scan_missing_ancestor(root_fd, names, directory)
            raise
        known, ino = pfs_state.find_pfs_inode(self._db, directory), disk.get_lasting_ino(disk.fstat(fd))
        is_moved = directory != ROOT and ino not in (0, known)
        if is_moved and (self._is_path_changing(directory, names) or (self._cluster is not None and known is not None)):
            os.close(fd)
            raise _build_busy_error(names)
        return fd

    def _is_path_changing(self, directory: int, names: tuple[bytes, ...]) -> bool:
        """Return True if a write-back renames a directory on this path, or has done so since the look at it."""
        is_changing = self._load_location(directory) or pfs_state.is_path_changing(self._db, directory)
        return is_changing or pfs_state.find_path(self._db, directory) != names

    def _scan_missing_ancestor(self, root_fd: int, names: tuple[bytes, ...], directory: int) -> None:
        """Record in the catalog that a directory is gone, by scanning its nearest ancestor on the PFS."""
        ancestor = directory
        for depth in range(len(names) - 1, -1, -1):
            ancestor = pfs_state.get_parent(self._db, ancestor)
            try:
                fd = pfs_tree.open_directory(root_fd, names[:depth])
            except (FileNotFoundError, NotADirectoryError):
                continue
            with disk.closing(fd):
                if not self._take(ancestor):
                    return
                pending = _begin_scan(self._db, self._store, ancestor)
                try:
                    DirectoryScan(self._db, self._notify, pending, fd, store=self._store).record_vanished_name(names[depth])
                finally:
                    scans.record_scan_end(self._db, ancestor, whole=False)
                    self._leave(ancestor)
            return


class DirectoryScan:
    """The comparison of one listed directory with the catalog."""

    def __init__(
        self, db: Database, notify: Notifier, pending: PendingChanges, fd: int, progress: Callable[[], None] = lambda: None,
        store: Transactions | None = None, is_gone: Callable[[int], bool] = lambda inode: False,
    ) -> None:  # fmt: skip
        """`store` has the names that other nodes have made or change; None on a single node.

        `is_gone` returns True if a file certainly has no name any more. `progress` is called for each batch of the listing.
        """
        self._is_gone = is_gone
        self._store = store
        self._db = db
        self._notify = notify
        self._pending = pending
        self._directory = pending.directory
        self._fd = fd
        self._can_cache_absent_names = scans.can_cache_absent_names(db, pending.directory)
        self._is_first_scan = not scans.is_imported(db, pending.directory)
        self._progress = progress
        self._names_changed = False
        self._external_names: list[bytes] = []

    def run(self) -> None:
        """Import new and changed names, then removals, then names that changed to or from a directory."""
        if self._directory == ROOT:
            self._import_root()
        names: set[bytes] = set()
        replaced: list[PfsEntryStat] = []
        listing = pfs_tree.list_entries(self._fd, is_root=self._directory == ROOT, on_external=self._external_names.append)
        for batch in _split(listing, LISTED_BATCH):
            self._progress()
            names.update(seen.name for seen in batch)
            self._exclude_pending_elsewhere(self._pending, [seen.name for seen in batch])
            replaced += self._import_entries(self._list_differing(batch))
        self._report_external()
        self._record_vanished(name for name in scans.list_expected(self._db, self._directory) if name not in names)
        for seen in replaced:
            self._delete_tree(seen.name)
            self._import_entries([seen])
        if self._names_changed:
            found = pfs_tree.stat_descriptor(self._fd)
            with self._db.transaction():
                scans.record_external_change(self._db, self._directory, found)
            self._notify.invalidate_inode(self._directory)

    def _remove_parked(self, name: bytes) -> bool:
        """Remove a parked name that a dead node left, if its file is deleted. Return False if it stays."""
        inode = pfs_tree.parse_parked_name(name)
        if inode is None or not self._is_gone(inode):
            return False
        parent = pfs_tree.stat_descriptor(self._fd)
        try:
            pfs_ownership.retry_as_owner(lambda: disk.unlink("scan:parked", name, dir_fd=self._fd), lambda: [(parent.uid, parent.gid)])
        except OSError as failure:
            log.debug("%s: parked name cannot be removed: %s; the next scan tries again", os.fsdecode(name), failure)
            return False
        log.info("%s: removed from the PFS: its file is deleted, and the node that was renaming it died", os.fsdecode(name))
        return True

    def _report_external(self) -> None:
        """Report names on the PFS that the mount hides because they look like ckptfs's own."""
        self._external_names = [name for name in self._external_names if not self._remove_parked(name)]
        where = f"{HIDDEN_TROUBLE}:{self._directory:016x}"
        if not self._external_names:
            summary.set_trouble(self._db, where, None)
            return
        path = b"/".join(part for part in (namespace.get_path(self._db, self._directory), min(self._external_names)) if part)
        count = len(self._external_names)
        what = "is hidden in the mount" if count == 1 else f"and {count - 1} more are hidden in the mount"
        what += ": names that begin with .ckptfs are reserved for ckptfs"
        remedy = "rename it on the PFS to a name that does not begin with .ckptfs"
        if not summary.list_troubles(self._db, where):
            log.warning("%s %s (%s)", os.fsdecode(path), what, remedy)
        summary.set_trouble(self._db, where, {"what": what, "path": os.fsdecode(path), "remedy": remedy})

    def _import_root(self) -> None:
        found = pfs_tree.stat_descriptor(self._fd)
        with scans.import_transaction(self._db):
            is_changed = scans.set_root_attributes(self._db, self._pending, found)
        if is_changed:
            self._notify.invalidate_inode(ROOT)

    def record_vanished_name(self, name: bytes) -> None:
        """Record that one name is gone from the PFS."""
        self._record_vanished([name])
        if self._names_changed:
            self._notify.invalidate_inode(self._directory)

    def _list_differing(self, batch: list[PfsEntryStat]) -> list[PfsEntryStat]:
        """Return the entries that may differ from the catalog; the others cost one query and no transaction."""
        if self._is_first_scan:
            return batch
        with self._db.read_transaction():
            return [
                seen
                for seen in batch
                if scans.choose_verdict(seen, scans.get_known_name(self._db, self._directory, seen.name)) is not ScanVerdict.SAME
            ]

    def _import_entries(self, batch: list[PfsEntryStat]) -> list[PfsEntryStat]:
        """Import the entries that differ. Return those that changed to or from a directory; they come last."""
        replaced = []
        for part in _split(self._load_details(batch), IMPORT_BATCH if self._store is None else CLUSTER_IMPORT_BATCH):
            done: list[tuple[PfsEntryStat, ScanVerdict, int | None]] = []
            with scans.import_transaction(self._db):
                self._pending.update(self._db)
                done += [(seen, *scans.import_entry(self._db, self._pending, seen)) for seen in part]
                disk.reach("scan:import")
            for seen, verdict, inode in done:
                self._notify_mount(seen, verdict, inode)
                if verdict is ScanVerdict.REPLACED and seen.is_directory != scans.is_directory(self._db, inode):
                    replaced.append(seen)
        return replaced

    def _load_details(self, batch: Iterable[PfsEntryStat]) -> Iterator[PfsEntryStat]:
        for entry in batch:
            with contextlib.suppress(FileNotFoundError):
                yield pfs_tree.load_details(self._fd, entry)

    def _notify_mount(self, entry: PfsEntryStat, verdict: ScanVerdict, inode: int | None) -> None:
        """Invalidate what the kernel caches about an entry that was imported."""
        if verdict in {ScanVerdict.NEW, ScanVerdict.REPLACED}:
            self._names_changed = self._names_changed or self._can_cache_absent_names
            if self._can_cache_absent_names:
                self._notify.invalidate_entry(self._directory, entry.name)
        if verdict in {ScanVerdict.ATTRIBUTES, ScanVerdict.CONTENT, ScanVerdict.FOUND, ScanVerdict.ADOPT} and inode is not None:
            self._notify.invalidate_inode(inode)
        if verdict in {ScanVerdict.CONTENT, ScanVerdict.FOUND} and inode is not None:
            # A kernel that caches writes keeps its own size and times as long as it knows the inode, so its names must go too.
            for parent, name in inodes.list_names(self._db, inode):
                self._notify.invalidate_entry(parent, name)
            shown = os.fsdecode(entry.name)
            if verdict is ScanVerdict.FOUND:
                log.warning("%s: it was lost on this node, and the PFS has it: it is taken up again from the PFS", shown)
            else:
                log.info("%s: changed on the PFS from outside of ckptfs; the new content is imported", shown)

    def _exclude_pending_elsewhere(self, pending: PendingChanges, names: list[bytes]) -> None:
        if self._store is not None and names:
            pending.names |= pfs_coordination.refresh_names(self._db, self._store, pending.directory, names)

    def _record_vanished(self, candidates: Iterable[bytes]) -> None:
        """Record that these names are gone, after looking for each one on its own."""
        gone = [name for name in candidates if pfs_tree.is_absent(self._fd, name)]
        self._exclude_pending_elsewhere(self._pending, gone)  # After the look: else another node could rename the file between the two.
        for name in gone:
            self._delete_tree(name)

    def _delete_tree(self, name: bytes) -> None:
        """Delete a name and all below it from the catalog, but for what the PFS lacks as yet."""
        known = scans.get_known_name(self._db, self._directory, name)
        self._pending.update(self._db)
        if known.inode is None or self._pending.is_pending(name, known.inode):
            return
        # A directory that the mount shows elsewhere has moved: only its old name goes.
        is_tree = known.child == known.inode and scans.is_directory(self._db, known.inode)
        level, tree = [known.inode] if is_tree else [], list[tuple[PendingChanges, list[bytes]]]()
        try:
            for directory in level:
                pending = _begin_scan(self._db, self._store, directory)
                names, below = scans.list_directory(self._db, directory)
                tree.append((pending, names))
                level.extend(below)
                self._exclude_pending_elsewhere(pending, names)
            for pending, names in reversed(tree):  # The deepest first.
                self._delete_names(pending, names)
        finally:
            for pending, _ in tree:
                scans.record_scan_end(self._db, pending.directory, whole=False)
        self._names_changed = self._delete_names(self._pending, [name]) or self._names_changed

    def _delete_names(self, pending: PendingChanges, names: list[bytes]) -> bool:
        """Delete names in one directory from the catalog. Return True if any was deleted."""
        gone: list[bytes] = []
        for part in _split(names, IMPORT_BATCH):
            with scans.import_transaction(self._db):
                pending.update(self._db)
                gone += [name for name in part if scans.record_vanished(self._db, pending, name)]
                disk.reach("scan:vanish")
        for name in gone:
            self._notify.invalidate_entry(pending.directory, name)
        if gone:
            self._notify.wake_lanes()
        return bool(gone)


def _begin_scan(db: Database, store: Transactions | None, directory: int) -> PendingChanges:
    """Begin a scan that knows the names of other nodes in a directory. `store`: None on a single node."""
    if store is not None:
        pfs_coordination.load_names(db, store, directory)
    return scans.record_scan_begin(db, directory)


def _is_directory_error(failure: Exception) -> bool:
    return isinstance(failure, OSError) and failure.errno in DIRECTORY_ERRNOS


def _build_busy_error(names: tuple[bytes, ...]) -> OSError:
    return OSError(errno.EBUSY, "a directory on the path is being renamed", os.fsdecode(b"/".join(names)))


def _split(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
