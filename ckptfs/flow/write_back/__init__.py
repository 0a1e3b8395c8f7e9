"""Write-back: the PFS follows the mount, in the order of the journal.

Takes: the journal's rows, with the sealed contents of files.
Leaves: the same tree as plain files on the PFS, each whole or absent, always in a state that the mount passed through (P6).
If we die here: the catalog has the batch in hand. The next mover finishes it if its temporary files were whole; otherwise it plans
again and resumes the large files. A journal row is deleted only after the PFS shows its change.

A step writes one batch:
1. Load and choose: `plan` reads the oldest rows and decides which changes they make on the PFS.
2. Act: `stage` makes temporary files, the batch is stored in the catalog, `apply` renames the files into place.
3. Record: one transaction stores the new state of the PFS and deletes the batch and its journal rows.

While a drain has too little time, `ahead` chooses rows that are planned before all others.

In a cluster `coordination` publishes the batch to the store before `apply` and completes it afterwards.
"""

import contextlib
import errno
import logging
import os
import random
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path

from ckptfs import disk
from ckptfs.catalog import copies, journal, mover_requests, pfs_batch, pfs_state, scans, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import KEYS_PER_ROW, ObservedNames, PfsBatch, build_batch_before
from ckptfs.catalog.pfs_state import PfsView
from ckptfs.clique.cluster import Cluster
from ckptfs.coherence import store_loss
from ckptfs.coherence.pfs_coordination import NotLoaded
from ckptfs.config import Config
from ckptfs.errors import Busy, StoreUnreachable
from ckptfs.flow.write_back.ahead import RowsAhead
from ckptfs.flow.write_back.apply import Applier, set_directory_times
from ckptfs.flow.write_back.coordination import ClusterWriteBack
from ckptfs.flow.write_back.deferred import (
    CopyPacing,
    DeferredFiles,
    build_unavailable_error,
    choose_kind,
    concerns_one_file,
)
from ckptfs.flow.write_back.plan import Planner, waits_for_seal
from ckptfs.flow.write_back.plan_facts import BatchPlan, Facts
from ckptfs.flow.write_back.plan_shared import SetAside
from ckptfs.flow.write_back.stage import Stager
from ckptfs.model import ROOT, Level, Notifier, Tier
from ckptfs.tiers import pfs_identity
from ckptfs.tiers.pfs_tree import DirectoryMissing, DirectoryPath, PfsTree
from ckptfs.tiers.storage import Tiers

__all__ = ["WriteBack"]

log = logging.getLogger(__name__)

disk.declare_labels("write_back:finish", "write_back:times")

BATCH_ROWS = 512
TIMES_BATCH = 64
PLANS_MAX = 8
WAITING_POLL_S = 0.25
# In a cluster write-back mostly waits for rows that are being published to the store.
PUBLISHED_POLL_S = 0.05
PUBLISHED_POLL_S_MAX = 1.0
# An open file that took t seconds to copy after an fsync is not copied again for PAUSE_RATIO times t.
PAUSE_RATIO = 4.0

_STALE_PATH_ERRNOS = {errno.ENOENT, errno.ESTALE}
_REMOVALS = {"unlink", "rmdir", "remove"}


class WriteBack:
    """The only lane that changes the PFS under ordinary names."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, cluster: Cluster | None = None) -> None:
        """`cluster`: the other nodes, which write to the same PFS; None on a single node."""
        self._db = db
        self._config = config
        self._notify = notify
        self._tree = PfsTree(config.pfs or Path())  # Not used without a PFS.
        self._instance = journal.get_instance_id(db)
        self._coordination = None if cluster is None or config.pfs is None else ClusterWriteBack(db, cluster, self._instance, self._tree)
        self._pacing = CopyPacing(0.0 if config.fsync is Level.PFS else PAUSE_RATIO)
        self._deferred = DeferredFiles(partial(summary.set_trouble, db), self._tree, f".ckptfs.{self._instance}.0".encode())
        self._ahead = RowsAhead(db)
        self._facts = Facts(db, self._pacing, self._deferred)
        self._stager = Stager(db, tiers, self._tree, self._facts, self._deferred, self._pacing, keeps_batch=self._coordination is not None)
        self._is_waiting = False
        self._waits = 0
        self._has_checked = False
        self._has_retried_walk = False
        self._missing_directory: DirectoryPath | None = None
        self._gone_directory: DirectoryPath | None = None

    def prepare(self) -> None:
        """Record the files made before a PFS was configured. Call once; does not access the PFS."""
        if self._config.pfs is not None and copies.get_tier_uuid(self._db, Tier.PFS) is None:
            journal.set_pfs(self._db, journal.UNIDENTIFIED)

    def step(self) -> bool:
        """Write back one batch. Return True if more may be ready now. Raises TierUnavailable."""
        if self._config.pfs is None:
            return False
        self._waits = self._waits + 1 if self._is_waiting else 0
        try:
            more = self._write_batch()
            self._has_retried_walk, self._missing_directory, self._gone_directory = False, None, None
            return more
        except DirectoryMissing as missing:
            if self._coordination is not None and missing.names != self._gone_directory:
                self._gone_directory = self._coordination.confirm_gone(missing.names)
                self._is_waiting = self._gone_directory is None
                return not self._is_waiting
            if missing.names == self._missing_directory:
                raise build_unavailable_error(missing, str(missing.filename)) from missing
            self._missing_directory = missing.names
            self._recreate_directory(missing)
            return True
        except NotLoaded as more:
            assert self._coordination is not None
            self._coordination.load_also(more.inode)
            return True
        except (Busy, StoreUnreachable) as reason:
            log.debug("write-back waits: %s", reason)
            self._is_waiting = True
            return False
        except OSError as failure:
            self._tree.clear_cache()
            if failure.errno == errno.ENOSPC and not self._deferred.skips_bytes and journal.has_removal(self._db):
                self._deferred.skip_bytes(failure)
                return True
            if failure.errno in _STALE_PATH_ERRNOS and not self._has_retried_walk:
                self._has_retried_walk = True  # A directory in the cache may have been removed: walk its path again.
                return True
            raise build_unavailable_error(failure, os.fsdecode(os.fsencode(failure.filename or self._tree.root))) from failure

    def next_due_s(self) -> float | None:
        """Return the seconds until a waiting content or a deferred file is due; None if there is none."""
        waits = [
            self._pacing.next_due_s() if self._pacing.deferred else None,
            self._build_poll_s() if self._is_waiting else None,
            self._deferred.next_due_s(),
            None if self._coordination is None else self._coordination.next_due_s(),
        ]
        return min((wait for wait in waits if wait is not None), default=None)

    def _build_poll_s(self) -> float:
        """Return the next pause of a wait: longer each time in a cluster, where each look asks the store."""
        if self._coordination is None:
            return WAITING_POLL_S
        return min(PUBLISHED_POLL_S * 1.5 ** min(self._waits, 10), PUBLISHED_POLL_S_MAX) * random.uniform(0.75, 1.25)

    def retry_now(self) -> None:
        """Try everything that was deferred in the next step, for `ckptfs drain`."""
        self._pacing.retry_now()
        self._deferred.retry_now()

    # --- load and choose ----------------------------------------------------------------------------------------------

    def _write_batch(self) -> bool:
        for inode, content in self._pacing.take_due():
            with self._db.transaction():
                journal.append(self._db, "synced", inode, content=content)
        if self._has_checked and not pfs_state.has_work(self._db):
            self._is_waiting = False
            return self._coordination is not None and self._coordination.requeue_left_out()
        if self._coordination is not None:
            store_loss.require_adopted(self._db)
        self._tree.reopen_root(self._db)
        identity = copies.get_tier_uuid(self._db, Tier.PFS)
        assert identity is not None
        if journal.set_pfs(self._db, identity if pfs_identity.is_mark(identity) else journal.UNIDENTIFIED):
            log.info("%s: new PFS for this catalog; all files are written back to it", self._config.pfs)
        self._has_checked = True
        if self._finish_previous():
            return True
        self._deferred.start_batch()
        after = self._deferred.after_seq
        urgent = self._ahead.list_next(after, BATCH_ROWS)
        rows = urgent or journal.list_oldest(self._db, BATCH_ROWS, after)
        if self._coordination is not None:
            # The store is asked about rows that can be written back, not again and again about one that waits for a seal of this node.
            sealed = [*takewhile(lambda row: not waits_for_seal(self._facts, row), rows)]
            if rows and not sealed:
                self._is_waiting = True
                return False
            rows = self._coordination.choose_rows(sealed)
        if not rows:
            self._is_waiting = self._coordination is not None and bool(journal.list_oldest(self._db, 1, after))
            self._deferred.finish_journal()
            self._stager.remove_leftovers([])
            if self._deferred.skips_bytes:
                self._deferred.try_bytes_again()
                return True
            requeued = not self._is_waiting and self._coordination is not None and self._coordination.requeue_left_out()
            return requeued or self._set_times()
        return self._write_rows(rows, is_ahead=bool(urgent))

    def _write_rows(self, rows: list[JournalRow], *, is_ahead: bool) -> bool:
        """Plan, stage and apply rows, again if a content changes. `is_ahead`: older rows stay."""
        for _ in range(PLANS_MAX):
            plan = self._plan(rows)
            self._is_waiting = plan.is_waiting
            if plan.missing_inode is not None and self._coordination is not None:
                self._coordination.fetch(plan.missing_inode)
                self._notify.wake_lanes()
            if plan.batch.last_seq == 0 and not plan.batch.actions:
                return False
            if is_ahead:
                seqs = [row.seq for row in rows]
                plan.batch.kept_seqs += journal.list_other_seqs(self._db, self._deferred.after_seq, plan.batch.last_seq, seqs)
            try:
                batch = self._stager.stage(plan)
                if self._coordination is not None:
                    with self._discarded_if_busy(batch):
                        self._coordination.publish_intents(batch)
            except Busy as reason:
                log.debug("batch planned again: %s", reason)
                if self._coordination is not None:
                    return True
                continue
            applied = self._apply(batch)
            if is_ahead:
                self._ahead.drop_planned(applied.last_seq)
            else:
                self._deferred.after_seq = max(self._deferred.after_seq, applied.last_seq)
            if plan.moved_pending and applied is batch:
                self._deferred.release(plan.moved_pending)
            if self._deferred.is_fenced(applied.last_seq):
                self._deferred.fence_seq = None
            return True
        return True

    def _plan(self, rows: list[JournalRow]) -> BatchPlan:
        """Plan the next rows, without those that depend on what the PFS refuses."""
        aside_seqs: set[int] = set()
        while True:
            if self._coordination is None:
                planner = Planner(PfsView(self._db), self._facts, self._instance)
            else:
                planner = self._coordination.build_planner(self._facts, aside_seqs)
            with self._db.read_transaction():
                for row in rows:
                    if planner.batch.last_seq and self._deferred.is_fenced(row.seq):
                        return planner.plan
                    try:
                        if not planner.plan_row(row):
                            return planner.plan
                    except SetAside:
                        aside_seqs.add(row.seq)
                        break
                else:
                    return planner.plan

    # --- apply, and record ---------------------------------------------------------------------------------------

    def _finish_previous(self) -> bool:
        """Apply an interrupted batch whose temporary files are whole. Return False without one.

        In a cluster it is discarded if the other nodes do not expect it of this one any more.
        """
        found = pfs_batch.find_batch(self._db)
        if found is None:
            return False
        is_ready, batch = found
        if self._coordination is not None:
            batch = self._coordination.relocate(batch)
            pfs_batch.set_batch(self._db, batch, ready=is_ready)  # Its temporary files are where other nodes have moved their directories.
        if not is_ready:
            return False
        if self._coordination is None or self._coordination.resume(batch):
            self._apply(batch)
        else:
            self._stager.discard(batch)
        return True

    def _apply(self, batch: PfsBatch) -> PfsBatch:
        """Apply and record a batch. Return it, or the part of it before an action that the PFS refused."""
        require_lease = None if self._coordination is None else self._coordination.require_lease
        applier = Applier(self._db, self._tree, batch, require_lease, self._gone_directory)
        if batch.abandoned:
            self._stager.remove(batch.abandoned)
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
        self._record(batch, found)
        return batch

    @contextlib.contextmanager
    def _discarded_if_busy(self, batch: PfsBatch) -> Iterator[None]:
        """Discard a staged batch if other nodes have moved on, so that it is planned again."""
        try:
            yield
        except Busy:
            self._stager.discard(batch)
            raise

    def _record(self, batch: PfsBatch, found: ObservedNames) -> None:
        if any(action.act in _REMOVALS or action.replaced_fingerprint is not None for action in batch.actions):
            self._deferred.note_removal()
        for entry in batch.expected_entries:
            if entry.inode is not None and found.get(entry.location.pfs_name) is None:
                log.warning("%s: gone from the PFS; it is written back again if this node has its bytes", entry.location.text)
        if self._coordination is not None:
            with self._discarded_if_busy(batch):
                self._coordination.complete_intents(batch, found)
        else:
            with self._db.transaction():
                pfs_batch.record_batch_done(self._db, batch, found)
                disk.reach("write_back:finish")
        self._stager.blocks.record(batch.published_rows)
        if batch.published_rows:
            self._db.persist()  # A file that is reported to be on the PFS must not be lost with the last seconds of the catalog.
        for inode in batch.lost_inodes:  # The PFS may have them where they are now.
            for parent, _ in scans.list_names(self._db, inode):
                mover_requests.insert_request(self._db, mover_requests.SCAN, parent, mover_requests.COMPARE_AGAIN)
        if batch.published_rows or batch.lost_inodes:
            self._notify.wake_lanes()

    # --- the rest -----------------------------------------------------------------------------------------------------

    def _recreate_directory(self, missing: DirectoryMissing) -> None:
        """Make a directory again that is needed but was removed on the PFS, with everything in it."""
        inode = pfs_state.find_inode(self._db, missing.names)
        if inode is None or inode == ROOT:
            raise build_unavailable_error(missing, str(missing.filename)) from missing
        log.warning("%s: directory gone from the PFS; it is made again with everything in it", missing.filename)
        with self._db.transaction():
            if not journal.insert_rows_for_tree(self._db, inode):
                pfs_state.delete_entries(self._db, inode)  # The mount has removed it too; changes in it are obsolete.

    def _set_times(self) -> bool:
        """Set the times of directories on the PFS as in the mount. Runs when the journal is empty."""
        directories = pfs_state.list_stale_times(self._db, TIMES_BATCH)
        if self._coordination is not None and directories:
            self._coordination.load_directories(directories)
        view = PfsView(self._db)
        for number in directories:
            path = view.get_path(number)
            if path is None:
                continue
            try:
                inode = get(self._db, number)
                disk.act("write_back:times", set_directory_times, self._tree.get_directory(path), inode)
            except OSError as failure:
                if not isinstance(failure, FileNotFoundError) and not concerns_one_file(failure):
                    raise
                log.debug("%s: its times on the PFS are left as they are: %s", os.fsdecode(b"/".join(path)), failure)
        pfs_state.delete_stale_times(self._db, directories)
        return bool(directories)
