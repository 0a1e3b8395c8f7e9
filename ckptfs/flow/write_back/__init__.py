"""Takes: the journal: what happened in the mount, in order, with the sealed contents of files.
Leaves: the same tree as plain files on the PFS, each whole or absent, always in a state that the mount passed through (P6).
If we die here: the batch in hand is in the catalog; the next mover finishes it if its temporary files were whole, and plans it anew if they
were not, going on with the large ones. No row of the journal goes before the PFS shows what it says.

One batch: `plan` decides, `stage` makes temporary files, the batch is written down, `apply` makes them appear, the catalog is told.
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator

from ckptfs import disk
from ckptfs.catalog import copies, journal, namespace, pfs_state, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_state import PfsBatch, PfsView
from ckptfs.clique.cluster import Cluster
from ckptfs.coherence import store_loss
from ckptfs.coherence.pfs_coordination import NotLoaded
from ckptfs.config import Config
from ckptfs.errors import Busy, StoreUnreachable, TierUnavailable
from ckptfs.flow.write_back.apply import Applier, set_directory_times
from ckptfs.flow.write_back.coordination import ClusterWriteBack
from ckptfs.flow.write_back.deferred import CatalogFacts, CopyPacing, DeferredFiles, build_unavailable_error
from ckptfs.flow.write_back.plan import KEYS_PER_ROW, PlannedFile, Planner, SourceKind
from ckptfs.flow.write_back.plan_shared import SharedPlanner
from ckptfs.flow.write_back.stage import Staged, Stager, Unfit, Unsealed, Unstable, build_batch
from ckptfs.model import ROOT, Level, Notifier, Tier
from ckptfs.tiers.pfs_tree import DirectoryMissing, DirectoryPath, PfsTree
from ckptfs.tiers.storage import Tiers

__all__ = ["WriteBack"]

log = logging.getLogger(__name__)

disk.declare_labels("write_back:begun", "write_back:written_down", "write_back:finish", "write_back:times")

BATCH_ROWS = 512
TIMES_BATCH = 64
PLANS_MAX = 8
WAITING_POLL_S = 0.25
# In a cluster it mostly waits for what the store is just being told.
PUBLISHED_POLL_S = 0.05
# An open file that took t seconds to copy after an fsync is copied again at most every so many times t.
PAUSE_RATIO = 4.0
PROGRESS_EVERY_S = 0.25

_STALE_PATH_ERRNOS = {errno.ENOENT, errno.ESTALE}


class WriteBack:
    """The one lane that changes the PFS under ordinary names."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, cluster: Cluster | None = None) -> None:
        """`around`: the other nodes, which write to the same PFS; None on a node that is alone."""
        self._db = db
        self._tiers = tiers
        self._config = config
        self._notify = notify
        self._tree = None if config.pfs is None else PfsTree(config.pfs)
        self._instance = journal.get_instance_id(db)
        self._cluster_write_back = (
            None if cluster is None or self._tree is None else ClusterWriteBack(db, cluster, self._instance, self._tree)
        )
        self._pacing = CopyPacing(0.0 if config.fsync is Level.PFS else PAUSE_RATIO)
        self._deferred = DeferredFiles(lambda key, value: summary.set_report(db, key, value))
        self._facts = CatalogFacts(db, self._pacing, self._deferred)
        self._poll_s = WAITING_POLL_S if self._cluster_write_back is None else PUBLISHED_POLL_S
        self._fence: int | None = None
        self._is_waiting = False
        self._has_checked = False
        self._has_retried_walk = False
        self._missing_directory: DirectoryPath | None = None
        self._gone_directory: DirectoryPath | None = None
        self._reported_s = 0.0
        self._is_reporting = False

    def prepare(self) -> None:
        """Once, before the mover is ready: what was made while there was no PFS is told to the journal. Asks nothing of the PFS."""
        if self._tree is not None and copies.get_tier_uuid(self._db, Tier.PFS) is None:
            journal.set_pfs(self._db, journal.UNIDENTIFIED)

    def step(self) -> bool:
        """Write back one batch. True: there may be more at once. Raises TierUnavailable: nothing is lost, it is to be tried again."""
        if self._tree is None:
            return False
        tree = self._tree
        try:
            more = self._write_batch(tree)
            self._has_retried_walk, self._missing_directory, self._gone_directory = False, None, None
            return more
        except DirectoryMissing as missing:
            if self._cluster_write_back is not None and missing.names != self._gone_directory:
                self._gone_directory = self._cluster_write_back.confirm_gone(missing.names)
                self._is_waiting = self._gone_directory is None
                return not self._is_waiting
            if missing.names == self._missing_directory:
                raise build_unavailable_error(missing, str(missing.filename)) from missing
            self._missing_directory = missing.names
            self._recreate_directory(missing)
            return True
        except NotLoaded as more:
            assert self._cluster_write_back is not None
            self._cluster_write_back.load_also(more.inode)
            return True
        except (Busy, StoreUnreachable) as reason:
            log.debug("write-back waits: %s", reason)
            self._is_waiting = True
            return False
        except OSError as failure:
            tree.clear_cache()
            if failure.errno in _STALE_PATH_ERRNOS and not self._has_retried_walk:
                self._has_retried_walk = True  # A directory that we had open may have been removed: walk there again, and see.
                return True
            raise build_unavailable_error(failure, os.fsdecode(os.fsencode(failure.filename or tree.root))) from failure

    def next_due_s(self) -> float | None:
        """Until a content that is not sealed yet, or an open file that had to wait for its turn, is looked at again."""
        waits = [
            self._pacing.next_due_s() if self._pacing.deferred else None,
            self._poll_s if self._is_waiting else None,
            self._deferred.next_due_s(),
            None if self._cluster_write_back is None else self._cluster_write_back.next_due_s(),
        ]
        return min((wait for wait in waits if wait is not None), default=None)

    def retry_now(self) -> None:
        """Somebody drains: whatever was put off is tried now."""
        self._fence = None
        self._pacing.retry_now()
        self._deferred.retry_now()

    # --- one batch ------------------------------------------------------------------------------------------------------

    def _write_batch(self, tree: PfsTree) -> bool:
        for inode, content in self._pacing.take_due():
            with self._db.transaction():
                journal.append(self._db, "synced", inode, content=content)
        if self._has_checked and not pfs_state.has_work(self._db):
            self._is_waiting = False
            return self._cluster_write_back is not None and self._cluster_write_back.requeue_left_out()
        if self._cluster_write_back is not None:
            store_loss.require_rebuilt(self._db)
        tree.reopen_root(self._adopt_pfs())
        self._has_checked = True
        found = pfs_state.find_batch(self._db)
        if found is not None and found[0]:
            self._finish_previous(tree, found[1])
            return True
        self._deferred.start_batch()
        after = self._deferred.after_seq
        rows = (
            journal.list_oldest(self._db, BATCH_ROWS, after)
            if self._cluster_write_back is None
            else self._cluster_write_back.list_rows(after)
        )
        if not rows:
            self._is_waiting = self._cluster_write_back is not None and bool(journal.list_oldest(self._db, 1, after))
            self._deferred.finish_journal()
            self._stager(tree).remove_leftovers([])
            return (
                not self._is_waiting and self._cluster_write_back is not None and self._cluster_write_back.requeue_left_out()
            ) or self._set_times(tree)
        return self._write_rows(tree, rows)

    def _adopt_pfs(self) -> str | None:
        """The uuid of our PFS, None where we may not leave one; at the first meeting all that exists is told to the journal."""
        uuid = copies.get_tier_uuid(self._db, Tier.PFS)
        if uuid is None:
            try:
                uuid = self._tiers[Tier.PFS].uuid
                copies.set_tier_uuid(self._db, Tier.PFS, uuid)
            except (PermissionError, TierUnavailable):
                log.debug("%s goes without a work area of ours", self._config.pfs)
        if journal.set_pfs(self._db, uuid or journal.UNIDENTIFIED):
            log.info("the PFS at %s is new to this catalog; everything is written back to it", self._config.pfs)
        return uuid

    def _write_rows(self, tree: PfsTree, rows: list[JournalRow]) -> bool:
        """Plan, stage and apply. What moves on meanwhile is planned anew."""
        for _ in range(PLANS_MAX):
            planner = self._plan(rows)
            self._is_waiting = planner.waiting_for is not None
            if isinstance(planner, SharedPlanner):
                self._wait_for_missing(planner)
            if planner.last_seq == 0 and not planner.actions:
                return False
            try:
                batch = self._stage(tree, planner)
            except Busy as reason:
                log.debug("planned anew: %s", reason)
                if self._cluster_write_back is not None:
                    return True
                continue
            self._apply(tree, batch)
            self._deferred.after_seq = max(self._deferred.after_seq, batch.last_seq)
            self._fence = None if self._fence is not None and batch.last_seq >= self._fence else self._fence
            return True
        return True

    def _plan(self, rows: list[JournalRow]) -> Planner:
        def temporary(key: int) -> bytes:
            return f".ckptfs.{self._instance}.{key:x}".encode()

        planner = Planner(PfsView(self._db), self._facts, temporary)
        if self._cluster_write_back is not None:
            planner = self._cluster_write_back.build_planner(self._facts, temporary)
        with self._db.read_transaction():
            for row in rows:
                if self._fence is not None and row.seq >= self._fence and planner.last_seq:
                    break
                if not planner.plan_row(row):
                    break
        return planner

    def _stage(self, tree: PfsTree, planner: Planner) -> PfsBatch:
        """Make the temporary files, and write the batch down."""
        batch = PfsBatch(planner.last_seq, [action for action in planner.actions if action.key in planner.puts])
        stager = self._stager(tree)
        stager.remove_leftovers(batch.actions)
        if batch.actions:
            with self._db.transaction():
                pfs_state.set_batch(self._db, batch, ready=False)
            disk.act("write_back:begun", lambda: None)
        try:
            staged = self._stage_files(stager, planner)
            self._sync(stager, planner)
        except BaseException:
            with contextlib.suppress(OSError):
                stager.discard(batch.actions)
                with self._db.transaction():
                    pfs_state.delete_batch(self._db)
            raise
        finally:
            stager.close()
            self._clear_progress()
        batch = build_batch(planner, staged)
        batch.after_seq = self._deferred.after_seq
        if batch.actions:
            with self._db.transaction():
                pfs_state.set_batch(self._db, batch, ready=True)
            disk.act("write_back:written_down", lambda: None)
        if self._cluster_write_back is not None:
            with self._or_give_up(tree, batch):
                self._cluster_write_back.publish_intents(batch)
        return batch

    @contextlib.contextmanager
    def _or_give_up(self, tree: PfsTree, batch: PfsBatch) -> Iterator[None]:
        """Where the other nodes went on, a batch that was staged is not to be: it is planned anew."""
        try:
            yield
        except Busy:
            self._give_up(tree, batch)
            raise

    def _give_up(self, tree: PfsTree, batch: PfsBatch) -> None:
        self._stager(tree).discard(batch.actions)
        with self._db.transaction():
            pfs_state.delete_batch(self._db)

    def _stager(self, tree: PfsTree) -> Stager:
        return Stager(self._db, self._tiers, tree, self._progress)

    def _stage_files(self, stager: Stager, planner: Planner) -> dict[int, Staged]:
        staged: dict[int, Staged] = {}
        for action in planner.actions:
            planned = planner.puts.get(action.key)
            if planned is None:
                continue
            began_s = time.monotonic()
            try:
                staged[action.key] = stager.stage(action, planned)
                if planned.kind is SourceKind.STABLE and planned.content is not None:
                    self._pacing.record_duration(planned.content.id, time.monotonic() - began_s)
            except Unfit:
                log.warning("%s: the PFS cannot hold such a file; it is left out there", self._path(planned.inode))
                self._facts.unfit_inodes.add(planned.inode)
                raise Busy("the PFS cannot hold this") from None
            except Unsealed:
                assert planned.content is not None
                self._facts.last_unsealed = (planned.content.id, planned.content.change)
                raise
            except Unstable as reason:
                log.info("%s: %s; it is written back when it is fsynced again or closed", self._path(planned.inode), reason)
                assert planned.content is not None
                self._facts.unstable_contents.add((planned.content.id, planned.content.change))
                raise
            except DirectoryMissing:
                raise
            except OSError as failure:
                # What comes before this one is written back all the same.
                is_first = min(planner.puts) == action.key and planner.actions[0] is action
                self._fence = action.key // KEYS_PER_ROW
                if not is_first:
                    raise Busy(str(failure)) from failure
                raise self._defer_file(planned, failure) from failure
        return staged

    def _sync(self, stager: Stager, planner: Planner) -> None:
        try:
            stager.sync()
        except OSError as failure:
            # Perhaps there is room for some of them.
            keys = sorted(planner.puts)
            if len(keys) > 1:
                self._fence = keys[len(keys) // 2] // KEYS_PER_ROW
                raise Busy(str(failure)) from failure
            raise self._defer_file(planner.puts[keys[0]], failure) from failure

    def _defer_file(self, planned: PlannedFile, failure: OSError) -> Busy | OSError:
        """What to raise for it: where it concerns this file alone, that is set aside and the others go on."""
        path = self._path(planned.inode)
        if planned.content is None or not self._deferred.defer(planned.inode, path, failure):
            return OSError(failure.errno, failure.strerror, path)
        self._fence = None
        return Busy(f"{path} is set aside")

    def _finish_previous(self, tree: PfsTree, batch: PfsBatch) -> None:
        """What was written down is done; in a cluster if the other nodes still count on us for it."""
        resumed = batch if self._cluster_write_back is None else self._cluster_write_back.resume(batch)
        if resumed is None:
            self._give_up(tree, batch)
        else:
            self._apply(tree, resumed)

    def _wait_for_missing(self, planner: SharedPlanner) -> None:
        self._is_waiting = self._is_waiting or planner.is_blocked
        if planner.missing_inode is not None and self._cluster_write_back is not None:
            self._cluster_write_back.fetch(planner.missing_inode)
            self._is_waiting = True
            self._notify.wake_lanes()

    def _apply(self, tree: PfsTree, batch: PfsBatch) -> None:
        """Make the batch true, and tell the catalog."""
        require_lease = (lambda: None) if self._cluster_write_back is None else self._cluster_write_back.require_lease
        applier = Applier(
            self._db, tree, batch, require_lease, is_shared=self._cluster_write_back is not None, gone_directory=self._gone_directory
        )
        try:
            found = applier.run() if batch.actions else {}
        except OSError as failure:
            if applier.current_action is not None and not isinstance(failure, DirectoryMissing):
                raise OSError(failure.errno, failure.strerror, self._path(applier.current_action.inode)) from failure
            raise
        for inode in pfs_state.list_unfinished(batch, found):
            log.warning("%s is not on the PFS any more; it is written back again if its bytes are here", self._path(inode))
        if self._cluster_write_back is not None:
            with self._or_give_up(tree, batch):
                self._cluster_write_back.complete_intents(batch, found)
        else:
            with self._db.transaction():
                pfs_state.record_batch_done(self._db, batch, found)
                disk.act("write_back:finish", lambda: None)
        if batch.published_rows:
            self._notify.wake_lanes()

    # --- around it ------------------------------------------------------------------------------------------------------

    def _recreate_directory(self, missing: DirectoryMissing) -> None:
        """A stranger removed a directory into which we have to write: it is made again, with all that is ours in it."""
        inode = pfs_state.find_inode(self._db, missing.names)
        if inode is None or inode == ROOT:
            raise build_unavailable_error(missing, str(missing.filename)) from missing
        log.warning("the directory %s is gone from the PFS; it is made again", missing.filename)
        with self._db.transaction():
            if not journal.insert_rows_for_tree(self._db, inode):
                pfs_state.delete_entries(self._db, inode)  # The mount has removed it too: what was to happen in it need not happen.

    def _set_times(self, tree: PfsTree) -> bool:
        """Nothing else is to be done: directories get the times that they have in the mount."""
        directories = pfs_state.list_stale_times(self._db, TIMES_BATCH)
        if self._cluster_write_back is not None and directories:
            self._cluster_write_back.load_directories(directories)
        view = PfsView(self._db)
        for number in directories:
            path = view.get_path(number)
            with contextlib.suppress(FileNotFoundError):
                inode = get(self._db, number)
                if path is None:
                    continue
                fd = tree.get_directory(path)
                disk.act("write_back:times", set_directory_times, fd, inode)
        pfs_state.delete_stale_times(self._db, directories)
        return bool(directories)

    def _progress(self, inode: int, copied: int, size: int) -> None:
        now = time.monotonic()
        if now - self._reported_s >= PROGRESS_EVERY_S:
            self._reported_s, self._is_reporting = now, True
            value = {"inode": inode, "path": self._path(inode), "copied_bytes": copied, "size_bytes": size}
            summary.set_report(self._db, "write_back", value)

    def _clear_progress(self) -> None:
        if self._is_reporting:
            self._is_reporting = False
            summary.set_report(self._db, "write_back", None)

    def _path(self, inode: int) -> str:
        return os.fsdecode(namespace.get_path(self._db, inode) or b"/")
