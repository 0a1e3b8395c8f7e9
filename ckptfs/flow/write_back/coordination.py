"""Write-back of a node in a cluster: what other nodes have a part in.

Takes: the journal of a node in a cluster, planned and staged batches, and the store that all nodes share.
Leaves: batches whose intents are in the store before they touch the PFS, and completed after; intents of dead nodes resolved.
If we die here: the batch in hand is in the catalog, and its intents are in the store. `_finish_previous` finds out whether the batch still
belongs to this node.
"""

import contextlib
import logging
import os
import random
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import takewhile

from ckptfs import disk, limits
from ckptfs.catalog import copies, journal, mover_requests, namespace, pfs_batch, pfs_state, scans, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.inodes import get_shown_path
from ckptfs.catalog.journal import JournalRow
from ckptfs.catalog.pfs_batch import ObservedNames, ObservedStat, PfsAction, PfsBatch
from ckptfs.catalog.pfs_state import Fingerprint, PfsLocation, PfsName, PfsView
from ckptfs.clique import membership
from ckptfs.clique.cluster import Cluster
from ckptfs.coherence import chain, key_state, pfs_coordination, store_loss
from ckptfs.coherence.chain import ChainedStore
from ckptfs.coherence.keys import PFS_NAME, PFS_STATE, SharedKey
from ckptfs.coherence.pfs_coordination import NotLoaded, StoreSnapshot, build_row_key, list_published_rows
from ckptfs.config import Config
from ckptfs.errors import Busy, StoreUnreachable
from ckptfs.flow.write_back import TIMES_BATCH, WriteBack
from ckptfs.flow.write_back.apply import sync_directory
from ckptfs.flow.write_back.deferred import RefusedKind
from ckptfs.flow.write_back.plan import waits_for_seal
from ckptfs.flow.write_back.plan_facts import BatchPlan
from ckptfs.flow.write_back.plan_shared import SetAside, SharedPlanner
from ckptfs.flow.write_back.stage import remove_temporary
from ckptfs.model import ROOT, Notifier
from ckptfs.tiers.pfs_ownership import find_stat
from ckptfs.tiers.pfs_tree import DirectoryMissing, DirectoryPath
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

disk.declare_labels("write_back:intent_announced", "write_back:intent_settled")

BATCH_ROWS = 32
# In a cluster write-back mostly waits for rows that are being published to the store.
PUBLISHED_POLL_S = 0.05
PUBLISHED_POLL_S_MAX = 1.0
WAIT_TROUBLE = "write back waits"
# Other nodes may first have to write back large files.
LONG_WAIT_S = 600.0
WAIT_REMEDY = "look at the write-back of the other nodes: ckptfs status --cluster"


class ClusterWriteBack(WriteBack):
    """Write-back to a PFS to which other nodes write, too."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier, cluster: Cluster) -> None:
        super().__init__(db, tiers, config, notify)
        self._require_lease = self._check_lease
        self._cluster = cluster
        self._store = ChainedStore(cluster.store, db, chain.WRITE_BACK_CHAIN)
        self._snapshot = StoreSnapshot(db, self._store)
        self._fetch_requests: dict[int, int] = {}
        self._extra_inodes: set[int] = set()
        self._lease = 0
        self._waits = 0
        self._waiting_seq = 0
        self._waiting_since_s = 0.0
        self._is_wait_reported = False
        self._reintegrated_ns = key_state.get_reintegrated_ns(db)
        self._restart_search()

    def step(self) -> bool:
        """Write back one batch. Return True if more may be ready now. Raises TierUnavailable."""
        self._waits = self._waits + 1 if self._is_waiting else 0
        more = super().step()
        self._report_long_wait()
        return more

    def _report_long_wait(self) -> None:
        """Report that the next row has waited for other nodes for long, or that this is over.

        Without etcd, that is the trouble.
        """
        rows = journal.list_oldest(self._db, 1, self._deferred.after_seq) if self._is_waiting else []
        for_others = [row for row in rows if not waits_for_seal(self._facts, row) and not key_state.get_disconnected_ns(self._db)]
        seq, now_s = (for_others[0].seq if for_others else 0), time.monotonic()
        if seq != self._waiting_seq:
            self._waiting_seq, self._waiting_since_s = seq, now_s
        is_long = bool(seq) and now_s - self._waiting_since_s >= LONG_WAIT_S
        if is_long != self._is_wait_reported:
            self._is_wait_reported = is_long
            path = get_shown_path(self._db, for_others[0].inode) if is_long else ""
            value = {"what": "waits for other nodes, and so does all that was changed later", "path": path, "remedy": WAIT_REMEDY}
            summary.set_trouble(self._db, WAIT_TROUBLE, value if is_long else None)

    def next_due_s(self) -> float | None:
        """Return the seconds until something that waits is due, or the next search for what the PFS lacks."""
        due_s = super().next_due_s()
        if self._config.pfs is None or self._next_search_s >= self._search_until_s:
            return due_s
        search_s = max(limits.REQUEST_POLL_S, self._next_search_s - time.monotonic())
        return search_s if due_s is None else min(due_s, search_s)

    def _choose_poll_s(self) -> float:
        """Return the next pause of a wait: longer each time, because each look asks the store."""
        return min(PUBLISHED_POLL_S * 1.5 ** min(self._waits, 10), PUBLISHED_POLL_S_MAX) * random.uniform(0.75, 1.25)

    def _wait_for(self, reason: Exception) -> bool:
        """Wait for other nodes. Return True if only more has to be loaded, from the next plan on."""
        if not isinstance(reason, NotLoaded):
            return super()._wait_for(reason)
        self._extra_inodes.add(reason.inode)
        return True

    # --- before a batch -----------------------------------------------------------------------------------------------

    def _open_pfs(self) -> None:
        store_loss.require_adopted(self._db)
        super()._open_pfs()

    def _list_ready(self, rows: list[JournalRow]) -> list[JournalRow]:
        """Return the next rows that the store has. Raises Busy if the first one waits for a seal of this node.

        The store is not asked again and again about such a row.
        """
        sealed = [*takewhile(lambda row: not waits_for_seal(self._facts, row), rows)]
        if rows and not sealed:
            raise Busy("the next file is being sealed")
        return list_published_rows(self._db, self._instance, sealed[:BATCH_ROWS])

    def _write_rows(self, rows: list[JournalRow], *, is_ahead: bool) -> bool:
        """Write rows, if no other node has written any of them back meanwhile. Raises StoreUnreachable."""
        self._take_lease()
        self._load(rows, self._extra_inodes)
        if self._resolve_intents(self._snapshot.list_intents()):
            self._load(rows, self._extra_inodes)
        return self._delete_taken(rows) or super()._write_rows(rows, is_ahead=is_ahead)

    def _delete_taken(self, rows: list[JournalRow]) -> bool:
        """Delete those of the loaded rows that another node took over. Return True if there was any."""
        taken = [row for row in rows if self._snapshot.get_value(build_row_key(self._db, self._instance, row)) is None]
        if taken:
            log.info("journal: %d changes of this node were written back by another node", len(taken))
            journal.delete_rows(self._db, taken)
            self._restart_search()
        return bool(taken)

    def _restart_search(self) -> None:
        self._next_search_s = time.monotonic()
        self._search_until_s = self._next_search_s + limits.SKIPPED_SCAN_S

    def _requeue_left_out(self) -> bool:
        """Append a row for each content that the PFS lacks and no row covers. Return True if any was added.

        Other nodes that took over this node's rows may have lacked the bytes, or held the node for lost; or an island had to undo a change.
        """
        reintegrated_ns = key_state.get_reintegrated_ns(self._db)
        if self._reintegrated_ns != reintegrated_ns:
            self._reintegrated_ns = reintegrated_ns
            self._restart_search()
        now_s = time.monotonic()
        if not self._next_search_s <= now_s < self._search_until_s:
            return False
        self._next_search_s = now_s + limits.SKIPPED_SCAN_INTERVAL_S
        return journal.insert_missing(self._db, limits.CHANGE_ROWS_MAX) > 0

    def _load(self, rows: Iterable[JournalRow], inodes: Iterable[int], directories: Iterable[int] = ()) -> None:
        """Load what the store says of rows and inodes. Raises StoreUnreachable.

        These and the loaded directories are expected by st_ino. No descriptor is kept: others may have replaced them.
        """
        self._snapshot = StoreSnapshot(self._db, self._store)
        self._snapshot.load(self._instance, rows, inodes)
        self._tree.clear_cache()
        view, expected = PfsView(self._db), dict[DirectoryPath, int]()
        for directory in {key.number for key in self._snapshot.store_values if key.kind == PFS_NAME}.union(directories):
            number = None if directory == ROOT else pfs_state.find_pfs_inode(self._db, directory)
            path = None if number is None else view.get_path(directory)
            if path and number:
                expected[path] = number
        self._tree.set_expected_inodes(expected)

    def _plan(self, rows: list[JournalRow]) -> BatchPlan:
        """Plan the next rows, without those that depend on what the PFS refuses."""
        aside_seqs = set[int]()
        while True:
            planner = SharedPlanner(self._db, self._facts, self._instance, self._snapshot, aside_seqs)
            try:
                with self._db.read_transaction():
                    plan = planner.plan_rows(rows, self._deferred.fence_seq)
            except SetAside as row:
                aside_seqs.add(row.seq)
                continue
            if plan.missing_inode is not None:
                self._fetch(plan.missing_inode)
                self._notify.wake_lanes()
            return plan

    def _fetch(self, inode: int) -> None:
        """Request the bytes of a file that a dead node wrote; without them it is not written back."""
        request = mover_requests.get(self._db, self._fetch_requests[inode]) if inode in self._fetch_requests else None
        if request is not None and request.state == mover_requests.FAILED:
            self._facts.lost_contents.add(copies.get_content_id(self._db, inode) or 0)
            path = os.fsdecode(namespace.get_path(self._db, inode))
            log.warning("%s: not written back: no live node has its content", path)
        elif request is None or request.state != mover_requests.OPEN:
            self._fetch_requests = {inode: mover_requests.insert_request(self._db, mover_requests.FETCH, inode, mover_requests.NEEDS_COPY)}

    def _set_times(self) -> bool:
        if directories := pfs_state.list_stale_times(self._db, TIMES_BATCH):
            self._load([], directories)
        return super()._set_times()

    def _handle_missing(self, missing: DirectoryMissing) -> bool:
        """Find out whether a directory is gone or another node moves it. If it is gone, make it again."""
        if missing.names == self._gone_directory:
            return super()._handle_missing(missing)
        self._gone_directory = self._confirm_gone(missing.names)
        self._is_waiting = self._gone_directory is None
        return not self._is_waiting

    def _has_intents_elsewhere(self) -> bool:
        return any(number != self._cluster.node_number for _, number in self._snapshot.list_intents())

    def _confirm_gone(self, names: DirectoryPath) -> DirectoryPath | None:
        """Return `names` if that directory is gone from the PFS; None if another node moves it: plan again."""
        try:
            before = self._load_path_revisions(names)
            self._tree.clear_cache()
            self._tree.get_directory(names)
        except DirectoryMissing:
            with contextlib.suppress(Busy, StoreUnreachable):
                if self._load_path_revisions(names) == before:
                    self._load_names_below(names)
                    return names
        except (OSError, Busy, StoreUnreachable) as reason:
            log.debug("%s: directory moved on the PFS: %s", os.fsdecode(b"/".join(names)), reason)
        return None

    def _load_path_revisions(self, names: DirectoryPath) -> dict[SharedKey, int]:
        """Return the revisions of the keys that place a directory. Raises Busy while others change them."""
        inode = pfs_state.find_inode(self._db, names)
        if inode is None:
            return {}
        self._load([], [inode])
        others = [(key, number) for key, number in self._snapshot.list_intents() if number != self._cluster.node_number]
        self._resolve_intents(others)
        if others or PfsView(self._db).get_path(inode) != names:
            raise Busy("another node is moving the directory")
        return {key: self._snapshot.get_revision(key) for key in self._snapshot.store_values if key.kind in {PFS_NAME, PFS_STATE}}

    def _load_names_below(self, names: DirectoryPath) -> None:
        """Record what the PFS showed in a directory that is gone: this node makes all of it again."""
        inode = pfs_state.find_inode(self._db, names)
        directories = [] if inode is None else [inode]
        for directory in directories:
            pfs_coordination.load_names(self._db, self._store, directory)
            directories += scans.list_directory(self._db, directory)[1]

    # --- a batch ------------------------------------------------------------------------------------------------------

    def _announce(self, batch: PfsBatch) -> None:
        """Publish the intents of a batch. Raises Busy if it must be planned again, or StoreUnreachable."""
        try:
            if batch.expected_entries or batch.published_rows:
                pfs_coordination.publish_intents(self._db, self._store, self._snapshot, batch, self._instance)
        except Busy:
            self._stager.discard(batch)
            raise
        disk.reach("write_back:intent_announced")

    def _finish_previous(self, is_ready: bool, batch: PfsBatch) -> bool:
        """Apply an interrupted batch, or discard it if the other nodes do not expect it of this one any more.

        Return False if its temporary files are not whole. Raises Busy without a lease, StoreUnreachable.
        """
        self._take_lease()
        actions = [*batch.actions, *batch.abandoned]
        locations = [location for action in actions for location in (action.location, action.target)]
        directories = {location.parent for location in [*locations, *(show.location for show in batch.expected_entries)]}
        self._load([], directories, directories)
        batch = _relocate_batch(PfsView(self._db), batch)
        pfs_batch.set_batch(self._db, batch, ready=is_ready)  # Its temporary files are where other nodes have moved their directories.
        if is_ready and not pfs_coordination.resume_intents(self._db, self._store, batch, self._instance):
            self._stager.discard(batch)
            return True
        return super()._finish_previous(is_ready, batch)

    def _record_done(self, batch: PfsBatch, found: ObservedNames) -> None:
        """Publish that the PFS shows the batch. Raises Busy if this node was declared dead, StoreUnreachable.

        In both cases the next step finds out whether the batch still belongs to this node.
        """
        changed = pfs_coordination.complete_intents(self._db, self._store, batch, found, self._snapshot)
        disk.reach("write_back:intent_settled")
        self._extra_inodes = set()
        if changed:
            with self._db.transaction():
                for inode in changed:
                    journal.append(self._db, "attributes", inode)

    # --- the lease ----------------------------------------------------------------------------------------------------

    def _take_lease(self) -> None:
        """Note the node's lease, as long as which the snapshot is valid. Raises Busy without one."""
        self._lease = self._cluster.lease()
        if not self._lease:
            raise Busy("this node has no lease")

    def _check_lease(self) -> None:
        """Raise Busy if others may have declared this node dead and resolved its intents since the load."""
        if self._cluster.lease() != self._lease:
            raise Busy("other nodes may have declared this node dead")

    # --- intents of dead nodes ----------------------------------------------------------------------------------------

    def _resolve_intents(self, intended: list[tuple[SharedKey, int]]) -> bool:
        """Resolve intents of dead nodes, or of an earlier catalog of this one. Return True if any was.

        If the PFS does not show what a dead node has done, the inodes that its intent is about are deferred.
        """
        if not intended:
            return False
        live = membership.list_live(self._store, sorted({number for _, number in intended} - {self._cluster.node_number}))
        gone = sorted((key for key, number in intended if number not in live), key=lambda key: key.kind != PFS_NAME)  # Names first.
        is_any_resolved = False
        for key in gone:
            intent = self._snapshot.get_value(key) or {}
            inodes = pfs_coordination.list_intent_inodes(key, intent)
            if any(map(self._facts.has_refused_names, inodes)):
                continue
            try:
                found = self._observe((key.number, key.name), intent.get("temporary", ())) if key.kind == PFS_NAME else None
            except OSError as failure:
                self._defer_intent((key.number, key.name), inodes, failure)
                continue
            pfs_coordination.resolve_abandoned_intent(self._store, key, self._snapshot.store_values[key].value, found)
            is_any_resolved = True
        return is_any_resolved

    def _defer_intent(self, name: PfsName, inodes: Iterable[int], failure: OSError) -> None:
        """Defer what a dead node was changing under a name. Raises OSError if the failure concerns more."""
        location = PfsLocation(*name, PfsView(self._db).get_path(name[0]) or ())
        for inode in inodes:
            if not self._deferred.defer(PfsAction("put", 0, inode, location, Fingerprint()), RefusedKind.NAMES, failure):
                raise OSError(failure.errno, failure.strerror, location.text) from failure

    def _observe(self, name: PfsName, temporaries: Iterable[str]) -> ObservedStat | None:
        """Return what the PFS durably shows under a name, without the temporary names of the intent.

        A rename of the dead node that still hangs in the kernel then finds no source, and cannot land any more. The node may have died
        before it synced the directory.
        """
        path = PfsView(self._db).get_path(name[0])
        if path is None:
            return None
        for temporary in temporaries:
            remove_temporary(self._tree, PfsLocation(*name, path), temporary.encode("latin-1"))
        try:
            directory = self._tree.get_directory(path)
            found = find_stat(directory, name[1])
            sync_directory(directory)
        except DirectoryMissing:
            return None
        return None if found is None else ObservedStat.of(found)


def _relocate_batch(view: PfsView, batch: PfsBatch) -> PfsBatch:
    """Return the batch with the present paths of its directories; a path that is unknown now stays."""

    def now(location: PfsLocation) -> PfsLocation:
        path = view.get_path(location.parent)
        return location if path is None else PfsLocation(location.parent, location.name, path)

    def relocate(actions: list[PfsAction]) -> list[PfsAction]:
        return [replace(one, location=now(one.location), new_location=one.new_location and now(one.new_location)) for one in actions]

    return replace(
        batch,
        actions=relocate(batch.actions),
        abandoned=relocate(batch.abandoned),
        name_changes=[replace(change, location=now(change.location)) for change in batch.name_changes],
    )
