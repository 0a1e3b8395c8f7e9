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
import time
from collections.abc import Iterator

from ckptfs import disk, step_durations
from ckptfs.catalog import copies, journal, mover_requests, pfs_batch, pfs_state, scans, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import KEYS_PER_ROW, ObservedStat, PfsAction, PfsBatch, PfsLocation, build_batch_before
from ckptfs.catalog.pfs_state import PfsName, PfsView
from ckptfs.clique.cluster import Cluster
from ckptfs.coherence import store_loss
from ckptfs.coherence.pfs_coordination import NotLoaded
from ckptfs.config import Config
from ckptfs.errors import Busy, StoreUnreachable
from ckptfs.flow.write_back.ahead import RowsAhead
from ckptfs.flow.write_back.apply import Applier, set_directory_times
from ckptfs.flow.write_back.coordination import ClusterWriteBack
from ckptfs.flow.write_back.deferred import CopyPacing, DeferredFiles, RefusedKind, build_unavailable_error, concerns_one_file
from ckptfs.flow.write_back.plan import Planner, format_path
from ckptfs.flow.write_back.plan_facts import Facts, PlannedFile, SourceKind
from ckptfs.flow.write_back.plan_shared import SetAside, SharedPlanner
from ckptfs.flow.write_back.shared_blocks import PfsBlocks
from ckptfs.flow.write_back.stage import Staged, Stager, Unfit, Unsealed, Unstable, build_batch
from ckptfs.model import ROOT, Level, Notifier, Tier
from ckptfs.tiers import pfs_identity, pfs_ownership
from ckptfs.tiers.pfs_tree import DirectoryMissing, DirectoryPath, PfsTree
from ckptfs.tiers.storage import Tiers

__all__ = ["WriteBack"]

log = logging.getLogger(__name__)

disk.declare_labels("write_back:begun", "write_back:written_down", "write_back:finish", "write_back:times", "write_back:probe")

BATCH_ROWS = 512
TIMES_BATCH = 64
PLANS_MAX = 8
WAITING_POLL_S = 0.25
# In a cluster write-back mostly waits for rows that are being published to the store.
PUBLISHED_POLL_S = 0.05
PUBLISHED_POLL_S_MAX = 1.0
# An open file that took t seconds to copy after an fsync is not copied again for PAUSE_RATIO times t.
PAUSE_RATIO = 4.0
PROGRESS_EVERY_S = 0.25

_STALE_PATH_ERRNOS = {errno.ENOENT, errno.ESTALE}


class WriteBack:
    """The only lane that changes the PFS under ordinary names."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, cluster: Cluster | None = None) -> None:
        """`cluster`: the other nodes, which write to the same PFS; None on a single node."""
        self._db = db
        self._tiers = tiers
        self._config = config
        self._notify = notify
        self._tree = None if config.pfs is None else PfsTree(config.pfs)
        self._instance = journal.get_instance_id(db)
        self._coordination = None if cluster is None or self._tree is None else ClusterWriteBack(db, cluster, self._instance, self._tree)
        self._pfs_blocks = PfsBlocks(db, config.pfs)
        self._pacing = CopyPacing(0.0 if config.fsync is Level.PFS else PAUSE_RATIO)
        self._deferred = DeferredFiles(lambda where, value: summary.set_trouble(db, where, value))
        self._ahead = RowsAhead(db)
        self._facts = Facts(db, self._pacing, self._deferred)
        self._poll_s = WAITING_POLL_S if self._coordination is None else PUBLISHED_POLL_S
        self._fence: int | None = None
        self._is_waiting = False
        self._waits = 0
        self._has_checked = False
        self._has_retried_walk = False
        self._missing_directory: DirectoryPath | None = None
        self._gone_directory: DirectoryPath | None = None
        self._reported_s = 0.0
        self._is_reporting = False

    def prepare(self) -> None:
        """Record the files made before a PFS was configured. Call once; does not access the PFS."""
        if self._tree is not None and copies.get_tier_uuid(self._db, Tier.PFS) is None:
            journal.set_pfs(self._db, journal.UNIDENTIFIED)

    def step(self) -> bool:
        """Write back one batch. Return True if more may be ready now. Raises TierUnavailable."""
        if self._tree is None:
            return False
        tree = self._tree
        self._waits = self._waits + 1 if self._is_waiting else 0
        try:
            more = self._write_batch(tree)
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
            tree.clear_cache()
            if failure.errno in _STALE_PATH_ERRNOS and not self._has_retried_walk:
                self._has_retried_walk = True  # A directory in the cache may have been removed: walk its path again.
                return True
            raise build_unavailable_error(failure, os.fsdecode(os.fsencode(failure.filename or tree.root))) from failure

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
            return self._poll_s
        return min(self._poll_s * 1.5 ** min(self._waits, 10), PUBLISHED_POLL_S_MAX) * random.uniform(0.75, 1.25)

    def retry_now(self) -> None:
        """Try everything that was deferred in the next step, for `ckptfs drain`."""
        self._fence = None
        self._pacing.retry_now()
        self._deferred.retry_now()

    # --- load and choose ----------------------------------------------------------------------------------------------

    def _write_batch(self, tree: PfsTree) -> bool:
        for inode, content in self._pacing.take_due():
            with self._db.transaction():
                journal.append(self._db, "synced", inode, content=content)
        if self._has_checked and not pfs_state.has_work(self._db):
            self._is_waiting = False
            return self._coordination is not None and self._coordination.requeue_left_out()
        if self._coordination is not None:
            store_loss.require_adopted(self._db)
        tree.reopen_root(self._db)
        self._record_pfs()
        self._has_checked = True
        if self._finish_previous(tree):
            return True
        self._deferred.start_batch()
        after = self._deferred.after_seq
        urgent = self._ahead.list_next(after, BATCH_ROWS)
        rows = urgent or journal.list_oldest(self._db, BATCH_ROWS, after)
        if self._coordination is not None:
            rows = self._coordination.choose_rows(rows)
        if not rows:
            self._is_waiting = self._coordination is not None and bool(journal.list_oldest(self._db, 1, after))
            self._deferred.finish_journal()
            self._build_stager(tree).remove_leftovers([])
            requeued = not self._is_waiting and self._coordination is not None and self._coordination.requeue_left_out()
            return requeued or self._set_times(tree)
        return self._write_rows(tree, rows, is_ahead=bool(urgent))

    def _record_pfs(self) -> None:
        """Record the PFS that was opened. A new one gets everything that exists."""
        identity = copies.get_tier_uuid(self._db, Tier.PFS)
        assert identity is not None
        if journal.set_pfs(self._db, identity if pfs_identity.is_mark(identity) else journal.UNIDENTIFIED):
            log.info("%s: new PFS for this catalog; all files are written back to it", self._config.pfs)

    def _write_rows(self, tree: PfsTree, rows: list[JournalRow], *, is_ahead: bool) -> bool:
        """Plan, stage and apply rows, again if a content changes. `is_ahead`: older rows stay."""
        for _ in range(PLANS_MAX):
            planner = self._plan(rows)
            self._is_waiting = planner.waiting_for is not None
            if isinstance(planner, SharedPlanner):
                self._wait_for_missing(planner)
            if planner.last_seq == 0 and not planner.actions:
                return False
            if is_ahead:
                seqs = [row.seq for row in rows]
                planner.kept_seqs += journal.list_other_seqs(self._db, self._deferred.after_seq, planner.last_seq, seqs)
            try:
                batch = self._stage(tree, planner)
            except Busy as reason:
                log.debug("batch planned again: %s", reason)
                if self._coordination is not None:
                    return True
                continue
            applied = self._apply(tree, batch)
            if is_ahead:
                self._ahead.drop_planned(applied.last_seq)
            else:
                self._deferred.after_seq = max(self._deferred.after_seq, applied.last_seq)
            if planner.moved_pending and applied is batch:
                self._deferred.release(planner.moved_pending)
            if self._fence is not None and applied.last_seq >= self._fence:
                self._fence = None
            return True
        return True

    def _plan(self, rows: list[JournalRow]) -> Planner:
        """Plan the next rows, without those that depend on what the PFS refuses."""
        aside_seqs: set[int] = set()
        while True:
            planner = self._build_planner(aside_seqs)
            with self._db.read_transaction():
                for row in rows:
                    if self._fence is not None and row.seq >= self._fence and planner.last_seq:
                        return planner
                    try:
                        if not planner.plan_row(row):
                            return planner
                    except SetAside:
                        aside_seqs.add(row.seq)
                        break
                else:
                    return planner

    def _build_planner(self, aside_seqs: set[int]) -> Planner:
        def temporary(key: int) -> bytes:
            return f".ckptfs.{self._instance}.{key:x}".encode()

        if self._coordination is None:
            return Planner(PfsView(self._db), self._facts, temporary)
        return self._coordination.build_planner(self._facts, temporary, aside_seqs)

    def _wait_for_missing(self, planner: SharedPlanner) -> None:
        """Note what the plan of a cluster waits for, and request bytes that only another node has."""
        self._is_waiting = self._is_waiting or planner.is_blocked
        if planner.missing_inode is not None and self._coordination is not None:
            self._coordination.fetch(planner.missing_inode)
            self._is_waiting = True
            self._notify.wake_lanes()

    # --- act: stage ---------------------------------------------------------------------------------------------------

    def _stage(self, tree: PfsTree, planner: Planner) -> PfsBatch:
        batch = PfsBatch(planner.last_seq, [action for action in planner.actions if action.key in planner.puts])
        stager = self._build_stager(tree)
        stager.remove_leftovers(batch.actions)
        if batch.actions:
            with self._db.transaction():
                pfs_batch.set_batch(self._db, batch, ready=False)
            disk.act("write_back:begun", lambda: None)
        try:
            began_s = time.monotonic()
            staged = self._stage_files(stager, planner)
            self._sync(stager, planner)
            summary.record_pfs_speed(self._db, planner.planned_bytes, time.monotonic() - began_s)
        except BaseException:
            with contextlib.suppress(OSError):
                stager.discard(batch.actions)
                with self._db.transaction():
                    pfs_batch.delete_batch(self._db)
            raise
        finally:
            stager.close()
            self._clear_progress()
        batch = build_batch(planner, staged)
        batch.after_seq = self._deferred.after_seq
        if batch.actions:
            with self._db.transaction():
                pfs_batch.set_batch(self._db, batch, ready=True)
            disk.act("write_back:written_down", lambda: None)
        if self._coordination is not None:
            with self._discarded_if_busy(tree, batch):
                self._coordination.publish_intents(batch)
        return batch

    @contextlib.contextmanager
    def _discarded_if_busy(self, tree: PfsTree, batch: PfsBatch) -> Iterator[None]:
        """Discard a staged batch if other nodes have moved on, so that it is planned again."""
        try:
            yield
        except Busy:
            self._discard_batch(tree, batch)
            raise

    def _discard_batch(self, tree: PfsTree, batch: PfsBatch) -> None:
        self._build_stager(tree).discard(batch.actions)
        with self._db.transaction():
            pfs_batch.delete_batch(self._db)

    def _build_stager(self, tree: PfsTree) -> Stager:
        return Stager(self._db, self._tiers, tree, self._pfs_blocks, self._report_progress)

    def _stage_files(self, stager: Stager, planner: Planner) -> dict[int, Staged]:
        staged: dict[int, Staged] = {}
        for action in planner.actions:
            planned = planner.puts.get(action.key)
            if planned is None:
                continue
            began_s = time.monotonic()
            try:
                staged[action.key] = stager.stage(action, planned)
                if planned.content is not None:
                    step_durations.record(step_durations.WRITE_BACK, time.monotonic() - began_s, planned.content.size)
                if planned.kind is SourceKind.STABLE and planned.content is not None:
                    self._pacing.record_duration(planned.content.id, time.monotonic() - began_s)
            except Unfit:
                log.warning("%s: not written back: the PFS cannot hold this type of file", planned.path)
                self._facts.unfit_inodes.add(planned.inode)
                raise Busy("the PFS cannot hold this") from None
            except Unsealed:
                assert planned.content is not None
                self._facts.last_unsealed = (planned.content.id, planned.content.change)
                raise
            except Unstable as reason:
                log.info("%s: not written back yet: %s; the next fsync or the close tries again", planned.path, reason)
                assert planned.content is not None
                self._facts.unstable_contents.add((planned.content.id, planned.content.change))
                raise
            except DirectoryMissing:
                raise
            except OSError as failure:
                # The rows before this one are written back without it.
                is_first = min(planner.puts) == action.key and planner.actions[0] is action
                self._fence = action.key // KEYS_PER_ROW
                if not is_first:
                    raise Busy(str(failure)) from failure
                raise self._defer_file(stager.tree, action, planned, failure) from failure
        return staged

    def _sync(self, stager: Stager, planner: Planner) -> None:
        try:
            stager.sync()
        except OSError as failure:
            # The PFS may have room for half of them.
            keys = sorted(planner.puts)
            if len(keys) > 1:
                self._fence = keys[len(keys) // 2] // KEYS_PER_ROW
                raise Busy(str(failure)) from failure
            action = next(action for action in planner.actions if action.key == keys[0])
            raise self._defer_file(stager.tree, action, planner.puts[keys[0]], failure) from failure

    def _defer_file(self, tree: PfsTree, action: PfsAction, planned: PlannedFile, failure: OSError) -> Busy | OSError:
        """Return the exception to raise. An error of this file alone defers it, so that others proceed."""
        kind = RefusedKind.NAMES if planned.content is None else RefusedKind.BYTES
        if not self._defer(tree, planned.inode, planned.path, failure, kind, "creation", action.location):
            return OSError(failure.errno, failure.strerror, planned.path)
        self._fence = None
        return Busy(f"{planned.path} is deferred")

    def _defer(self, tree: PfsTree, inode: int, path: str, failure: OSError, kind: RefusedKind, act: str, location: PfsLocation) -> bool:
        return self._deferred.defer(
            inode, path, failure, kind, act, lambda: _is_elsewhere(tree, location.path), lambda: self._takes_a_file(tree)
        )

    def _takes_a_file(self, tree: PfsTree) -> bool:
        """Return True if the PFS takes a small file. Then it is well, even if it refuses another one."""
        root, name = tree.get_directory(()), f".ckptfs.{self._instance}.0".encode()
        above = os.fstat(root)
        try:
            pfs_ownership.retry_as_owner(
                lambda: disk.act("write_back:probe", _make_and_remove, root, name), lambda: [(above.st_uid, above.st_gid)]
            )
        except OSError as failure:
            log.debug("the PFS does not take a file: %s", failure)
            return False
        return True

    # --- act: apply, and record ---------------------------------------------------------------------------------------

    def _finish_previous(self, tree: PfsTree) -> bool:
        """Apply an interrupted batch whose temporary files are whole. Return False without one.

        In a cluster it is discarded if the other nodes do not expect it of this one any more.
        """
        found = pfs_batch.find_batch(self._db)
        if found is None:
            return False
        is_ready, batch = found
        if self._coordination is not None:
            batch = self._coordination.relocate(batch)
            with self._db.transaction():  # Its temporary files are where other nodes have moved their directories.
                pfs_batch.set_batch(self._db, batch, ready=is_ready)
        if not is_ready:
            return False
        if self._coordination is None or self._coordination.resume(batch):
            self._apply(tree, batch)
        else:
            self._discard_batch(tree, batch)
        return True

    def _apply(self, tree: PfsTree, batch: PfsBatch) -> PfsBatch:
        """Apply and record a batch. Return it, or the part of it before an action that the PFS refused."""
        require_lease = (lambda: None) if self._coordination is None else self._coordination.require_lease
        applier = Applier(
            self._db, tree, batch, require_lease, is_shared=self._coordination is not None, gone_directory=self._gone_directory
        )
        self._build_stager(tree).discard(batch.abandoned)
        try:
            found = applier.run() if batch.actions or any(entry.inode is not None for entry in batch.expected_entries) else {}
        except OSError as failure:
            action = applier.current_action
            if action is None or isinstance(failure, DirectoryMissing):
                raise
            if applier.is_history_link(action, failure):
                log.info("the PFS cannot link: %s; a file goes to the history of sets when it loses all other names", failure.strerror)
                self._facts.can_link_history = False
                return self._apply_before(tree, batch, action)
            if not applier.is_half_done and self._defer_action(tree, action, failure):
                return self._apply_before(tree, batch, action)
            raise OSError(failure.errno, failure.strerror, format_path(action.location)) from failure
        self._record(tree, batch, found)
        return batch

    def _defer_action(self, tree: PfsTree, action: PfsAction, failure: OSError) -> bool:
        """Defer what the PFS refused. Returns False if the error concerns more than this file."""
        row = journal.get(self._db, action.key // KEYS_PER_ROW)
        has_bytes = row is not None and row.op in {"content", "synced"} and row.inode == action.inode
        kind = RefusedKind.BYTES if action.act == "put" and has_bytes else RefusedKind.NAMES
        if action.act == "attributes":
            kind = RefusedKind.ATTRIBUTES
        path = format_path(action.location if action.new_location is None else action.new_location)
        return self._defer(tree, action.inode, path, failure, kind, _describe_act(action), action.new_location or action.location)

    def _apply_before(self, tree: PfsTree, batch: PfsBatch, action: PfsAction) -> PfsBatch:
        """Record what was done before a refused action. The rows from the refused one on are planned again."""
        cut = build_batch_before(batch, action.key)
        with self._db.transaction():
            pfs_batch.set_batch(self._db, cut, ready=True)
        return self._apply(tree, cut)

    def _record(self, tree: PfsTree, batch: PfsBatch, found: dict[PfsName, ObservedStat | None]) -> None:
        for entry in batch.expected_entries:
            if entry.inode is not None and found.get(entry.location.pfs_name) is None:
                log.warning("%s: gone from the PFS; it is written back again if this node has its bytes", format_path(entry.location))
        if self._coordination is not None:
            with self._discarded_if_busy(tree, batch):
                self._coordination.complete_intents(batch, found)
        else:
            with self._db.transaction():
                pfs_batch.record_batch_done(self._db, batch, found)
                disk.act("write_back:finish", lambda: None)
        self._pfs_blocks.record(batch.published_rows)
        if batch.published_rows:
            self._db.persist()  # A file that is reported to be on the PFS must not be lost with the last seconds of the catalog.
            self._notify.wake_lanes()
        self._request_scans(batch.lost_inodes)

    def _request_scans(self, inodes: list[int]) -> None:
        """Request scans of the present places of lost files: the PFS may have them."""
        for inode in inodes:
            for parent, _ in scans.list_names(self._db, inode):
                mover_requests.insert_request(self._db, mover_requests.SCAN, parent, mover_requests.COMPARE_AGAIN)
        if inodes:
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

    def _set_times(self, tree: PfsTree) -> bool:
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
                disk.act("write_back:times", set_directory_times, tree.get_directory(path), inode)
            except OSError as failure:
                if not isinstance(failure, FileNotFoundError) and not concerns_one_file(failure):
                    raise
                log.debug("%s: its times on the PFS are left as they are: %s", os.fsdecode(b"/".join(path)), failure)
        pfs_state.delete_stale_times(self._db, directories)
        return bool(directories)

    def _report_progress(self, inode: int, path: str, copied: int, size: int) -> None:
        now = time.monotonic()
        if now - self._reported_s >= PROGRESS_EVERY_S:
            self._reported_s, self._is_reporting = now, True
            value = {"inode": inode, "path": path, "copied_bytes": copied, "size_bytes": size}
            summary.set_report(self._db, "write_back", value)

    def _clear_progress(self) -> None:
        if self._is_reporting:
            self._is_reporting = False
            summary.set_report(self._db, "write_back", None)


def _describe_act(action: PfsAction) -> str:
    old = format_path(action.location)
    names = {"put": "creation", "link": f"link to {old}", "move": f"rename from {old}", "exchange": f"exchange with {old}"}
    return names.get(action.act, "removal")


def _is_elsewhere(tree: PfsTree, path: DirectoryPath) -> bool:
    """Return True if a directory is on a filesystem that is mounted below the PFS's root."""
    try:
        directory, root = tree.get_directory(path), tree.get_directory(())
        found, whole = os.fstatvfs(directory), os.fstatvfs(root)
        # Subvolumes have devices of their own, but the same figures.
        return os.fstat(directory).st_dev != os.fstat(root).st_dev and (found.f_blocks, found.f_bfree) != (whole.f_blocks, whole.f_bfree)
    except OSError:
        return False


def _make_and_remove(directory: int, name: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    try:
        with disk.closing(
            os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        ) as fd:
            os.write(fd, b"probe")
            os.fsync(fd)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
