"""Takes: wants of the kind 'visit', and directories that the PFS was not compared with for a while.
Leaves: a catalog that shows what strangers put on the PFS, changed there and took away; new directories complete=0 until their own visit.
If we die here: what was imported stays, the directory is as complete as before and is visited again.

Lists outside of any transaction and takes over in short ones. What was written here and is not on the PFS yet always stays.
"""

import errno
import logging
import os
import time
from collections import deque

from ckptfs import disk, limits
from ckptfs.catalog import epoch, pfs_paths, settling, visits, wants
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import importing, touching, truth
from ckptfs.catalog.store import Get
from ckptfs.clique import holders
from ckptfs.clique.surroundings import Cluster
from ckptfs.config import Config
from ckptfs.errors import CkptfsError, TierUnavailable
from ckptfs.flow.visit.compare import DirectoryScan, RefreshNames
from ckptfs.model import ROOT, Notifier, Tier
from ckptfs.tiers import health, pfs_listing
from ckptfs.tiers.place import Tiers

log = logging.getLogger(__name__)

disk.declare_labels("visit:begin", "visit:end")

# A refresh that took t seconds is followed by a pause of this many times t, so that refreshing never loads the PFS.
PAUSE_RATIO = 9

BUSY_TRIES = 5
PUBLISHED_POLL_S = 0.005

DIRECTORY_ERRNOS = {errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBUSY}
"""Errors of one directory, not of the PFS."""


def request_scan(db: Database, inode: int, *, recursive: bool, wait_s: float = limits.VISIT_WAIT_S) -> int:
    """Want the directory `inode` to be compared with the PFS now, with all visited ones below it if `recursive`. The want's id."""
    return wants.insert_request(db, wants.SCAN, inode, wants.TREE if recursive else wants.COMPARE_AGAIN, wait_s=wait_s)


class Scan:
    """One directory a step: those that somebody waits for first."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, cluster: Cluster | None = None) -> None:
        """`around`: the other nodes, which look at the same PFS; None on a node that is alone."""
        self._cluster = cluster
        self._db = db
        self._tiers = tiers
        self._config = config
        self._notify = notify
        self._tree_queues: dict[int, deque[int]] = {}
        self._next_refresh_s = 0.0
        self._swept_s = 0.0
        self._progress_s = 0.0
        self._request_id = 0

    def prepare(self) -> None:
        """Once, before the mover is ready: forget visits that died. Asks nothing of the PFS."""
        if self._config.pfs is not None:
            visits.reset_scans(self._db, os.fsdecode(self._config.pfs))

    def step(self) -> bool:
        """Visit one directory. True: there may be more at once."""
        self._request_id = 0
        self._sweep_requests()
        requests = wants.list_open(self._db, wants.SCAN)
        single = next((want for want in requests if want.argument != wants.TREE), None)
        if single is not None:
            self._answer(single)
            return True
        self._tree_queues = {want.id: self._tree_queues.get(want.id) or deque([want.inode]) for want in requests}
        if requests:
            self._scan_next_of_tree(requests[0])
            return True
        return self._refresh_next()

    def next_due_s(self) -> float | None:
        """Until directories whose turn it may be are looked for."""
        return max(0.0, self._next_refresh_s - time.monotonic())

    # --- what is asked --------------------------------------------------------------------------------------------------

    def _sweep_requests(self) -> None:
        if time.monotonic() - self._swept_s > limits.WANT_SWEEP_S:
            self._swept_s = time.monotonic()
            wants.delete_stale(self._db)

    def _report_progress(self) -> None:
        """Whoever waits for a large directory shall know that it is coming."""
        if self._request_id and time.monotonic() - self._progress_s > limits.WANT_LOOK_S:
            self._progress_s = time.monotonic()
            wants.record_progress(self._db, self._request_id, wait_s=limits.VISIT_WAIT_S)

    def _answer(self, request: wants.MoverRequest) -> None:
        """Visit what one want asks for. It fails with the visit, at once: whoever asked may ask again."""
        self._request_id = request.id
        try:
            if request.argument == wants.COMPARE_AGAIN or not visits.is_imported(self._db, request.inode):
                self._scan_when_undisturbed(request.inode)
        except Exception as failure:
            if self._fail_request(request.id, request.inode, failure):
                return
            raise
        wants.mark_done(self._db, request.id)
        self._notify.notify_replies()

    def _fail_request(self, request_id: int, inode: int, failure: Exception) -> bool:
        """Answer with what went wrong; whether that is the asker's business only, and no trouble of the PFS."""
        code = failure.errno if isinstance(failure, OSError) and _is_directory_error(failure) else errno.EIO
        wants.mark_failed(self._db, request_id, code or errno.EIO)
        self._notify.notify_replies()
        log.debug("visit of inode %d: %s", inode, failure)
        return _is_directory_error(failure)

    def _scan_next_of_tree(self, request: wants.MoverRequest) -> None:
        """Visit the next directory of a tree; the want is done with the last one. One below that cannot be listed is left out."""
        self._request_id = request.id
        queue = self._tree_queues[request.id]
        directory = queue.popleft()
        try:
            self._scan_when_undisturbed(directory)
        except Exception as failure:
            if not _is_directory_error(failure) or directory == request.inode:
                del self._tree_queues[request.id]
                if self._fail_request(request.id, directory, failure):
                    return
                raise
        queue.extend(visits.list_scanned_directories(self._db, directory))
        if queue:
            wants.record_progress(self._db, request.id, wait_s=limits.VISIT_WAIT_S)
            return
        del self._tree_queues[request.id]
        wants.mark_done(self._db, request.id)
        self._notify.notify_replies()

    def _refresh_next(self) -> bool:
        """Compare the directory whose turn it is; never True, so that the pause after it is kept. In a cluster one node does it for all."""
        if time.monotonic() < self._next_refresh_s:
            return False
        if self._cluster is not None and self._cluster.node_number != min(
            self._cluster.view().by_number, default=self._cluster.node_number
        ):
            self._next_refresh_s = time.monotonic() + limits.DUE_LOOK_S
            return False
        started_s = time.monotonic()
        found = visits.find_due_directory(self._db, time.time_ns() - int(self._config.refresh_interval_s * 1e9))
        if found is None:
            self._next_refresh_s = started_s + min(self._config.refresh_interval_s, limits.DUE_LOOK_S)
            return False
        try:
            self._scan(found)
        except Exception as failure:
            visits.record_postponed(self._db, found)
            if not _is_directory_error(failure):
                raise
        finally:
            ended_s = time.monotonic()
            self._next_refresh_s = ended_s + PAUSE_RATIO * (ended_s - started_s)
        return False

    def _scan_when_undisturbed(self, directory: int) -> None:
        """Write-back may be renaming a directory on the way just now: look again in a moment."""
        for _ in range(BUSY_TRIES):
            try:
                return self._scan(directory)
            except OSError as failure:
                if failure.errno != errno.EBUSY:
                    raise
            time.sleep(limits.RETRY_FIRST_S)
        return self._scan(directory)

    # --- one visit ------------------------------------------------------------------------------------------------------

    def _scan(self, directory: int) -> None:
        """Compare one directory with the PFS. Raises OSError and TierUnavailable when it cannot be listed."""
        root_fd = self._open_root()
        try:
            pending = disk.act("visit:begin", visits.record_scan_begin, self._db, directory)
            self._refresh_pfs_path(directory)
            names = pfs_paths.find_path(self._db, directory)
            if names is None:
                visits.record_scan_end(self._db, directory, whole=True)  # Not on the PFS: there is nothing to import.
                return
            with disk.closing(self._open_directory(root_fd, names, directory)) as fd:
                DirectoryScan(
                    self._db, self._notify, pending, fd, self._report_progress, self._build_refresh_names(directory), self._is_gone
                ).run()
        except BaseException:
            visits.record_scan_end(self._db, directory, whole=False)
            raise
        finally:
            os.close(root_fd)
        disk.act("visit:end", visits.record_scan_end, self._db, directory, whole=True)
        self._wait_published()

    def _is_gone(self, inode: int) -> bool:
        """Whether the store has no such file; not while nodes tell one anew that has lost its data."""
        if self._cluster is None or epoch.get_loss_age_s(self._db) < limits.UNTOLD_KEPT_S:
            return False
        try:
            return not self._cluster.store.read([Get(holders.build_inode_key(inode), keys_only=True)]).results[0]
        except CkptfsError:
            return False

    def _refresh_pfs_path(self, directory: int) -> None:
        """Where the PFS shows a directory now: other nodes may have moved it."""
        if self._cluster is not None:
            truth.load_inodes(self._db, self._cluster.store, directory)

    def _build_refresh_names(self, directory: int) -> RefreshNames | None:
        """What asks the store about names that were listed."""
        if self._cluster is None:
            return None
        store = self._cluster.store
        return lambda names: importing.refresh_names(self._db, store, directory, names)

    def _wait_published(self) -> None:
        """What was imported is the other nodes' before anybody here uses it; or theirs is, where they were faster."""
        until_s, last = time.monotonic() + limits.ETCD_WAIT_S, touching.get_last_change(self._db)
        while self._cluster is not None and touching.has_dirty(self._db, last) and time.monotonic() < until_s:
            time.sleep(PUBLISHED_POLL_S)

    def _open_root(self) -> int:
        if self._config.pfs is None:
            raise TierUnavailable("there is no PFS to visit")
        if settling.get_tier_uuid(self._db, Tier.PFS) is None:
            self._adopt_pfs()
        try:
            return pfs_listing.open_root(self._config.pfs, settling.get_tier_uuid(self._db, Tier.PFS))
        except OSError as failure:
            remedy = health.remedy(failure.errno)
            raise TierUnavailable(f"{self._config.pfs} cannot be opened: {failure.strerror}", remedy=remedy) from failure

    def _adopt_pfs(self) -> None:
        """The first time: leave a mark by which this PFS is known again. One that takes no mark is believed whatever it shows."""
        try:
            uuid = self._tiers[Tier.PFS].uuid
        except (OSError, TierUnavailable) as failure:
            log.info("the PFS takes no mark of ours: %s", failure)
            return
        settling.set_tier_uuid(self._db, Tier.PFS, uuid)

    def _open_directory(self, root_fd: int, names: tuple[bytes, ...], directory: int) -> int:
        """A descriptor of the directory itself, also while write-back is about to rename what is above it."""
        try:
            fd = pfs_listing.open_directory(root_fd, names)
        except (FileNotFoundError, NotADirectoryError):
            if pfs_paths.is_path_changing(self._db, directory):
                raise _build_busy_error(names) from None
            self._scan_missing_ancestor(root_fd, names, directory)
            raise
        known = pfs_paths.find_pfs_inode(self._db, directory)
        is_moved = directory != ROOT and known != os.fstat(fd).st_ino
        if is_moved and (pfs_paths.is_path_changing(self._db, directory) or (self._cluster is not None and known is not None)):
            os.close(fd)
            raise _build_busy_error(names)
        return fd

    def _scan_missing_ancestor(self, root_fd: int, names: tuple[bytes, ...], directory: int) -> None:
        """A directory is gone from the PFS: compare the nearest one above that is there, so that the catalog learns of it."""
        ancestor = directory
        for depth in range(len(names) - 1, -1, -1):
            ancestor = pfs_paths.get_parent(self._db, ancestor)
            try:
                fd = pfs_listing.open_directory(root_fd, names[:depth])
            except (FileNotFoundError, NotADirectoryError):
                continue
            with disk.closing(fd):
                pending = visits.record_scan_begin(self._db, ancestor)
                try:
                    DirectoryScan(
                        self._db, self._notify, pending, fd, refresh_names=self._build_refresh_names(ancestor)
                    ).record_vanished_name(names[depth])
                finally:
                    visits.record_scan_end(self._db, ancestor, whole=False)
            return


def _is_directory_error(failure: Exception) -> bool:
    return isinstance(failure, OSError) and failure.errno in DIRECTORY_ERRNOS


def _build_busy_error(names: tuple[bytes, ...]) -> OSError:
    return OSError(errno.EBUSY, "a directory on the way is being renamed", os.fsdecode(b"/".join(names)))
