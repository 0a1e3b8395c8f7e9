"""Write-back: the PFS follows the mount, in the order of the journal.

Takes: the journal's rows, with the sealed contents of files.
Leaves: the same tree as plain files on the PFS, each whole or absent, always in a state that the mount passed through (P6).
If we die here: the catalog has the batch in hand. The next mover finishes it if its temporary files were whole; otherwise it plans
again and resumes the large files. A journal row is deleted only after the PFS shows its change.

A step writes one batch:
1. Load and choose: `plan` reads the oldest rows and decides which changes they make on the PFS.
2. Act: `stage` makes temporary files and stores the batch in the catalog, `apply` renames the files into place.
3. Record: one transaction stores the new state of the PFS and deletes the batch and its journal rows.

While a drain has too little time, `ahead` chooses rows that are planned before all others.

`WriteBack` is the whole of it on a single node. In a cluster `coordination` overrides what other nodes have a part in: it publishes the
batch to the store before `apply` and completes it afterwards.
"""

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ckptfs import disk
from ckptfs.catalog import copies, journal, mover_requests, pfs_batch, pfs_state, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get, list_names
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import KEYS_PER_ROW, ObservedNames, PfsBatch, build_batch_before
from ckptfs.catalog.pfs_state import PfsView
from ckptfs.config import Config
from ckptfs.errors import Busy, StoreUnreachable
from ckptfs.flow.write_back.ahead import RowsAhead
from ckptfs.flow.write_back.apply import Applier, set_directory_times
from ckptfs.flow.write_back.deferred import CopyPacing, DeferredFiles, RefusedKind, build_unavailable_error, choose_kind
from ckptfs.flow.write_back.plan import Planner
from ckptfs.flow.write_back.plan_facts import BatchPlan, Facts
from ckptfs.flow.write_back.stage import Stager
from ckptfs.model import ROOT, Level, Notifier, Tier
from ckptfs.tiers import health
from ckptfs.tiers.pfs_tree import DirectoryMissing, DirectoryPath, PfsTree
from ckptfs.tiers.storage import Tiers

__all__ = ["WriteBack"]

log = logging.getLogger(__name__)

disk.declare_labels("write_back:finish", "write_back:times")

BATCH_ROWS = 512
TIMES_BATCH = 64
WAITING_POLL_S = 0.25
# An open file that took t seconds to copy after an fsync is not copied again for PAUSE_RATIO times t.
PAUSE_RATIO = 4.0

_STALE_PATH_ERRNOS = {errno.ENOENT, errno.ESTALE}
_REMOVALS = {"unlink", "rmdir", "remove"}


class WriteBack:
    """The only lane that changes the PFS under ordinary names."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier) -> None:
        self._db = db
        self._config = config
        self._notify = notify
        self._tree = PfsTree(config.pfs or Path())  # Not used without a PFS.
        self._instance = journal.get_instance_id(db)
        self._pacing = CopyPacing(0.0 if config.fsync is Level.PFS else PAUSE_RATIO)
        self._deferred = DeferredFiles(partial(summary.set_trouble, db), self._tree, f".ckptfs.{self._instance}.0".encode())
        self._ahead = RowsAhead(db)
        self._facts = Facts(db, self._pacing, self._deferred)
        self._stager = Stager(db, tiers, self._tree, self._facts)
        self._is_waiting = False
        self._require_lease: Callable[[], None] | None = None
        self._has_met_pfs = False
        self._has_retried_walk = False
        self._missing_directory: DirectoryPath | None = None
        self._gone_directory: DirectoryPath | None = None
        self._unsynced: dict[DirectoryPath, OSError] = {}

    def prepare(self) -> None:
        """Record the files made before a PFS was configured. Call once; does not access the PFS."""
        if self._config.pfs is not None and copies.get_tier_uuid(self._db, Tier.PFS) is None:
            journal.record_pfs(self._db)

    def step(self) -> bool:
        """Write back one batch. Return True if more may be ready now. Raises TierUnavailable."""
        more = False
        try:
            more = self._config.pfs is not None and self._write_batch()
            self._has_retried_walk, self._missing_directory, self._gone_directory = False, None, None
        except DirectoryMissing as missing:
            more = self._handle_missing(missing)
        except (Busy, StoreUnreachable) as reason:
            more = self._wait_for(reason)
        except OSError as failure:
            more = self._handle_failure(failure)
        finally:
            if not more:
                self._deferred.note_rest()
                self._tree.close()  # The PFS can be unmounted while write-back is idle or fails.
        return more

    def next_due_s(self) -> float | None:
        """Return the seconds until a waiting content or a deferred file is due; None if there is none."""
        waits = [
            self._pacing.next_due_s() if self._pacing.deferred else None,
            self._choose_poll_s() if self._is_waiting else None,
            self._deferred.next_due_s(),
        ]
        return min((wait for wait in waits if wait is not None), default=None)

    def _choose_poll_s(self) -> float:
        return WAITING_POLL_S

    def retry_now(self) -> None:
        """Try everything that was deferred in the next step, for `ckptfs drain`."""
        self._pacing.retry_now()
        self._deferred.retry_now()

    # --- load and choose ----------------------------------------------------------------------------------------------

    def _write_batch(self) -> bool:
        self._deferred.start_batch()
        for inode, content in self._pacing.take_due():
            with self._db.transaction():
                journal.append(self._db, "synced", inode, content=content)
        if self._has_met_pfs and not pfs_state.has_work(self._db):
            self._is_waiting = False
            self._deferred.finish_journal()
            return self._requeue_left_out()
        self._open_pfs()
        if (found := pfs_batch.find_batch(self._db)) is not None and self._finish_previous(*found):
            return True
        after = self._deferred.after_seq
        urgent = self._ahead.list_next(after, BATCH_ROWS)
        rows = self._list_ready(urgent or journal.list_oldest(self._db, BATCH_ROWS, after))
        if rows:
            return self._write_rows(rows, is_ahead=bool(urgent))
        self._is_waiting = bool(journal.list_oldest(self._db, 1, after))
        self._deferred.finish_journal()
        self._stager.remove_leftovers([])
        if self._deferred.skips_bytes:
            self._deferred.try_bytes_again()
            return True
        return (not self._is_waiting and self._requeue_left_out()) or self._set_times()

    def _open_pfs(self) -> None:
        """Open the PFS, and find out whether it is that of the catalog."""
        self._tree.reopen_root(self._db)
        if not self._has_met_pfs and journal.record_pfs(self._db):
            log.info("%s: new PFS for this catalog; all files are written back to it", self._config.pfs)
        self._has_met_pfs = True

    def _list_ready(self, rows: list[JournalRow]) -> list[JournalRow]:
        """Return those of the next rows that can be planned. Raises Busy if the first has to wait."""
        return rows

    def _write_rows(self, rows: list[JournalRow], *, is_ahead: bool) -> bool:
        """Plan, stage and apply rows; the next step does if a content changes. `is_ahead`: older rows stay."""
        plan = self._plan(rows)
        self._is_waiting = plan.is_waiting
        if plan.batch.last_seq == 0 and not plan.batch.actions:
            return False
        if is_ahead:
            seqs = [row.seq for row in rows]
            plan.batch.kept_seqs += journal.list_other_seqs(self._db, self._deferred.after_seq, plan.batch.last_seq, seqs)
        try:
            batch = self._stager.stage(plan)
            self._announce(batch)
        except Busy as reason:
            log.debug("batch planned again: %s", reason)
            return True
        applied = self._apply(batch)
        if is_ahead:
            self._ahead.drop_planned(applied.last_seq)
        else:
            self._deferred.after_seq = max(self._deferred.after_seq, applied.last_seq)
        if plan.moved_pending and applied is batch:
            self._deferred.release(plan.moved_pending)
        return True

    def _plan(self, rows: list[JournalRow]) -> BatchPlan:
        with self._db.read_transaction():
            return Planner(PfsView(self._db), self._facts, self._instance).plan_rows(rows, self._deferred.fence_seq)

    # --- act and record -----------------------------------------------------------------------------------------------

    def _finish_previous(self, is_ready: bool, batch: PfsBatch) -> bool:
        """Apply an interrupted batch. Return False if its temporary files are not whole."""
        if is_ready:
            self._apply(batch)
        return is_ready

    def _announce(self, batch: PfsBatch) -> None:
        """Tell other nodes of a staged batch. Raises Busy if it must be planned again."""

    def _apply(self, batch: PfsBatch) -> PfsBatch:
        """Apply and record a batch. Return it, or the part of it before an action that the PFS refused."""
        applier = Applier(self._db, self._tree, batch, self._require_lease, self._gone_directory, self._unsynced)
        if batch.abandoned:
            batch.abandoned = self._stager.remove(batch.abandoned)
        try:
            found = applier.run()
        except OSError as failure:
            action = applier.current_action
            if action is None or isinstance(failure, DirectoryMissing):
                raise
            seq = action.key // KEYS_PER_ROW
            if applier.is_history_link(action, failure):
                log.info("the PFS cannot link: %s; a file goes to the history of sets when it loses all other names", failure.strerror)
                self._facts.can_link_history = False
            elif applier.is_half_done or not self._deferred.defer(action, choose_kind(action, journal.get(self._db, seq)), failure):
                raise OSError(failure.errno, failure.strerror, action.location.text) from failure
            # The rows from the refused one on are planned again.
            cut = build_batch_before(batch, action.key, has_both_names=applier.has_both_names)
            pfs_batch.set_batch(self._db, cut, ready=True)
            return self._apply(cut)
        for path, reason in self._unsynced.items():
            self._keep_unsynced(batch, path, reason)
        self._record(batch, found)
        return batch

    def _keep_unsynced(self, batch: PfsBatch, path: DirectoryPath, failure: OSError) -> None:
        """Count nothing below a directory as on the PFS that a crash may undo: write it again (P3)."""
        locations = {show.inode: show.location for show in batch.expected_entries if show.location.path[: len(path)] == path}
        if not locations:
            return
        if not path or failure.errno in _STALE_PATH_ERRNOS or not self._deferred.concerns_part(path, failure):
            raise OSError(failure.errno, failure.strerror, os.fsdecode(b"/".join(path)) or "/") from failure
        what = f"{health.describe(failure)}: its directory is not known to be on the PFS's disk"
        for number, row in enumerate(batch.published_rows):
            seq = row.key // KEYS_PER_ROW
            found = journal.get(self._db, seq) if row.inode in locations else None
            if found is not None and found.op in {"content", "synced"}:
                batch.published_rows[number] = replace(row, is_complete=False)
                batch.kept_seqs += [] if seq in batch.requeued_seqs else [seq]
                self._deferred.set_aside(row.inode, RefusedKind.BYTES, locations[row.inode], what, failure)

    def _record(self, batch: PfsBatch, found: ObservedNames) -> None:
        if any(action.act in _REMOVALS or action.replaced_fingerprint is not None for action in batch.actions):
            self._deferred.note_removal()
        for entry in batch.expected_entries:
            if entry.inode is not None and found.get(entry.location.pfs_name) is None:
                log.warning("%s: gone from the PFS; it is written back again if this node has its bytes", entry.location.text)
        self._record_done(batch, found)
        self._stager.blocks.record(batch.published_rows)
        if batch.published_rows:
            self._db.persist()  # A file that is reported to be on the PFS must not be lost with the last seconds of the catalog.
        for inode in batch.lost_inodes:  # The PFS may have them where they are now.
            for parent, _ in list_names(self._db, inode):
                mover_requests.insert_request(self._db, mover_requests.SCAN, parent, mover_requests.COMPARE_AGAIN)
        if batch.published_rows or batch.lost_inodes:
            self._notify.wake_lanes()
        self._notify.notify_replies()  # An fsync may wait for what was recorded.

    def _record_done(self, batch: PfsBatch, found: ObservedNames) -> None:
        with self._db.transaction():
            pfs_batch.record_batch_done(self._db, batch, found)
            disk.reach("write_back:finish")

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _wait_for(self, reason: Exception) -> bool:
        """Wait for something outside the journal. Return True if that is over."""
        log.debug("write-back waits: %s", reason)
        self._is_waiting = True
        return False

    def _handle_failure(self, failure: OSError) -> bool:
        """Choose what follows an error of the PFS. Return True for another try. Raises TierUnavailable."""
        self._tree.clear_cache()
        if failure.errno == errno.ENOSPC and not self._deferred.skips_bytes and journal.has_removal(self._db):
            self._deferred.skip_bytes(failure)
            return True
        if failure.errno in _STALE_PATH_ERRNOS:
            if not self._has_retried_walk:
                self._has_retried_walk = True  # A directory in the cache may have been removed: walk its path again.
                return True
            if self._has_intents_elsewhere():
                return self._wait_for(failure)
        raise build_unavailable_error(failure, os.fsdecode(os.fsencode(failure.filename or self._tree.root))) from failure

    def _handle_missing(self, missing: DirectoryMissing) -> bool:
        """Make a directory again that is needed but was removed on the PFS, with everything in it."""
        inode = pfs_state.find_inode(self._db, missing.names)
        if missing.names == self._missing_directory or inode is None or inode == ROOT:
            raise build_unavailable_error(missing, str(missing.filename)) from missing
        self._missing_directory = missing.names
        log.warning("%s: directory gone from the PFS; it is made again with everything in it", missing.filename)
        with self._db.transaction():
            if not journal.insert_rows_for_tree(self._db, inode):
                pfs_state.delete_entries(self._db, inode)  # The mount has removed it too; changes in it are obsolete.
        return True

    def _has_intents_elsewhere(self) -> bool:
        """Return True if another node may be moving a directory of the last batch."""
        return False

    def _requeue_left_out(self) -> bool:
        """Append rows for what the PFS lacks and no row covers. Return True if any was added."""
        return False

    def _set_times(self) -> bool:
        """Set the times of directories on the PFS as in the mount. Runs when the journal is empty."""
        directories = pfs_state.list_stale_times(self._db, TIMES_BATCH)
        view = PfsView(self._db)
        for number in directories:
            path = view.get_path(number)
            if path is None:
                continue
            try:
                inode = get(self._db, number)
                disk.act("write_back:times", set_directory_times, self._tree.get_directory(path), inode)
            except OSError as failure:
                if not isinstance(failure, FileNotFoundError) and not self._deferred.concerns_part(path, failure):
                    raise
                log.debug("%s: its times on the PFS are left as they are: %s", os.fsdecode(b"/".join(path)), failure)
        pfs_state.delete_stale_times(self._db, directories)
        return bool(directories)
