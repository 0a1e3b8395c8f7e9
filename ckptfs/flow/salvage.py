"""The salvage step: previous states of files whose content only dead nodes had.

Takes: previous or STALE contents on this node whose successor was only on a dead node, and requests for a file that no live node has.
Leaves: the previous content as that of the file, or the state that the PFS shows if that is newer or all that is left. `inode.salvaged`
records what the file should hold; a writer that returns with it shows it again (see `reconcile`).
If we die here: the store has all of a decision or nothing. The next mover checks everything once.

Each decision is one store transaction that compares all keys on which it depends: of several holders one decides, and a node that writes
meanwhile wins. What was written since then stays, and the returning writer puts the missed content beside it.
"""

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptfs import disk, limits
from ckptfs.catalog import contents, copies, mover_requests, namespace, remote_contents, summary
from ckptfs.catalog.database import Database
from ckptfs.catalog.remote_contents import HeldCopy, RemoteState
from ckptfs.clique import locations
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.locations import ContentLocations, SharedFile, SharedPfsState
from ckptfs.clique.membership import ClusterView, ViewChange
from ckptfs.clique.peer_api import PeerFailed
from ckptfs.coherence import keys, merge, read, salvage_records, store_loss
from ckptfs.coherence.keys import INODE, PFS_STATE, SharedKey
from ckptfs.errors import DigestMismatch, StoreUnreachable
from ckptfs.model import Content, ContentState, Notifier
from ckptfs.store.kv import Compare, CompareTarget, Delete, Get, Item, Operation, Put, Store
from ckptfs.tiers import local_copies
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

disk.declare_labels("salvage:shown", "salvage:pfs")

BATCH_CONTENTS = locations.LOAD_CONTENTS_MAX // 2
PREVIOUS_SHOWN_TROUBLE = "former"
TROUBLES_CHECK_S = 30.0


@dataclass(frozen=True, slots=True)
class LostFile:
    """A file whose newest state, `successor`, no live node has; and what the PFS shows of it."""

    inode: int
    file: SharedFile
    successor: ContentLocations
    on_pfs: SharedPfsState | None

    def build_value(self, content: int | None, generation: int, size: int, mtime_ns: int) -> dict[str, Any]:
        """Return the value of the file with this state, and with a record of the lost one."""
        salvaged = {"node": self.successor.writer, **self.file.expected_state, "shows": content, "shown": generation}
        state = {"content": content, "generation": generation, "size": size, "mtime_ns": mtime_ns, "ctime_ns": time.time_ns()}
        return {**self.file.value, **state, "missed": merge.encode_missed([salvaged, *self.file.missed])}


class Salvage:
    """The salvage lane: checks previous contents after each change of the view, one batch a step."""

    def __init__(self, db: Database, tiers: Tiers, notify: Notifier, cluster: Cluster) -> None:
        self._db = db
        self._tiers = tiers
        self._notify = notify
        self._cluster = cluster
        self._last_view: ClusterView | None = None
        self._after: int | None = None
        self._undecided: set[int] = set()
        self._undecided_after = 0
        self._writers_may_return = False
        self._next_look_s = 0.0
        self._view_since_s = 0.0
        self._has_troubles = True
        self._troubles_checked_s = 0.0
        self._batches = 0
        self._next_batch_s = 0.0

    def step(self) -> bool:
        """Check one batch. Return True if there is more. Raises StoreUnreachable; the batch is then repeated."""
        view = self._cluster.view()
        if store_loss.is_adopting(self._db):
            return False
        if view is not self._last_view:
            self._note_view(view)
        if self._cluster.factor < 2:
            self._after = None  # No node hosts copies of others.
        if self._after is not None and time.monotonic() >= self._next_batch_s:
            self._batches += 1
            if self._batches >= limits.SWEEP_BATCHES:
                self._next_batch_s = time.monotonic() + limits.SWEEP_PAUSE_S
            batch = remote_contents.list_held_copies(self._db, self._after, BATCH_CONTENTS)
            self._salvage_batch(batch, view)
            self._after = batch[-1].content.id if batch else None
            self._undecided |= copies.list_stashed_contents(self._db)
            return True
        self._answer_all(view)
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + limits.SALVAGE_POLL_S
            self._salvage_undecided(view)
            self._writers_may_return = self._writers_may_return and self._tell_returned()
            if self._has_troubles and time.monotonic() >= self._troubles_checked_s + TROUBLES_CHECK_S:
                self._has_troubles, self._troubles_checked_s = self._end_troubles(), time.monotonic()
        return False

    def _salvage_undecided(self, view: ClusterView) -> None:
        """Check the next batch of what could not be decided. It stays so if the store does not answer."""
        later = [number for number in self._undecided if number > self._undecided_after]
        numbers = sorted(later or self._undecided)[:BATCH_CONTENTS]
        self._undecided_after = numbers[-1] if numbers else 0
        self._undecided -= set(numbers)
        batch = [held_copy for number in numbers if (held_copy := remote_contents.find_held_copy(self._db, number)) is not None]
        try:
            self._salvage_batch(batch, view)
        except StoreUnreachable:
            self._undecided.update(numbers)
            raise
        self._undecided |= copies.list_stashed_contents(self._db)

    def next_due_s(self) -> float | None:
        """Return the seconds until the next check; nothing is decided before all have adopted the store."""
        if store_loss.is_adopting(self._db):
            return limits.SALVAGE_POLL_S
        waiting = self._undecided or self._writers_may_return or mover_requests.list_open(self._db, mover_requests.SALVAGE, at_most=1)
        due = [self._next_look_s] * bool(waiting) + [self._next_batch_s] * (self._after is not None)
        due += [max(self._next_look_s, self._troubles_checked_s + TROUBLES_CHECK_S)] * self._has_troubles
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _note_view(self, view: ClusterView) -> None:
        """Begin a check of all contents if a node died or restarted, after a random delay."""
        previous, self._last_view = self._last_view, view
        self._writers_may_return, self._view_since_s = True, time.monotonic()
        change = ViewChange(previous or ClusterView(), view)
        ended = (*change.dead_nodes, *change.restarted_nodes)
        if previous is None or ended:
            self._after, self._batches = 0, 0
            # Readers, and the nodes that would show the PFS, wait for SALVAGE_RIVALS_S.
            small_cluster_s = limits.SALVAGE_RIVALS_S / 2 if ended and not self._cluster.hosts_contents_of(ended) else 0.0
            self._next_batch_s = time.monotonic() + self._cluster.draw_delay_s(small_cluster_s=small_cluster_s)

    # --- falling back ------------------------------------------------------------------------------------------------

    def _salvage_batch(self, batch: list[HeldCopy], view: ClusterView) -> None:
        if not batch:
            return
        store = self._cluster.store
        content_locations = locations.load(store, [kept.content.id for kept in batch])
        inodes = {number: one.state.inode for number, one in content_locations.items() if one.state is not None}
        files = locations.load_files(store, sorted(set(inodes.values())))
        candidates = [
            kept for kept in batch if _is_candidate(kept, content_locations[kept.content.id], files.get(inodes.get(kept.content.id, 0)))
        ]
        successors = {kept.content.id: files[inodes[kept.content.id]].expected_state["content"] or 0 for kept in candidates}
        successor_locations = locations.load(store, sorted(set(successors.values())))
        for held_copy in sorted(
            candidates, key=lambda one: (content_locations[one.content.id].superseded_mtime_ns is None, -one.generation)
        ):
            number = held_copy.content.id
            inode, one, now = inodes[number], content_locations[number], successor_locations[successors[number]]
            on_pfs = locations.load_pfs_state(store, inode)
            if self._is_safe(on_pfs, now, view, is_same_content=successors[number] == number):
                continue
            lost = LostFile(inode, files[inode], now, on_pfs)
            must_wait = (not now.is_lost and now.writer in view) or self._has_rivals(held_copy, one, view) or self._may_pfs_be_newer(on_pfs)
            is_pfs_newer = on_pfs is not None and on_pfs.generation > held_copy.generation
            if must_wait or not (self._show_pfs(lost) if is_pfs_newer else self._show_held_copy(lost, held_copy, one)):
                self._undecided.add(number)

    def _is_safe(self, on_pfs: SharedPfsState | None, successor: ContentLocations, view: ClusterView, *, is_same_content: bool) -> bool:
        """Return whether the newest state of a file is safe.

        It is if a living node besides its writer, or the PFS, has it. For a content other than the one on this node, any state of
        it counts. No other node can know the last state of an open file; its writer goes on while it lives.
        """
        remote_state = successor.state
        if remote_state is None or (is_same_content and remote_state.is_open and not successor.is_lost and successor.writer in view):
            return True
        living = [copy for copy in successor.copies if copy.node in view and copy.node != successor.writer]
        if any(not is_same_content or _is_same_state(copy.generation, copy.digest, remote_state) for copy in living):
            return True
        return on_pfs is not None and on_pfs.generation >= remote_state.generation and (on_pfs.is_complete or not is_same_content)

    def _has_rivals(self, held_copy: HeldCopy, shared: ContentLocations, view: ClusterView) -> bool:
        """Return whether another living node has a newer generation."""
        newest, _ = shared.get_newest([node.number for node in view.nodes if node.number != self._cluster.node_number])
        return newest > held_copy.generation

    def _may_pfs_be_newer(self, on_pfs: SharedPfsState | None) -> bool:
        """Return whether a dead node was changing the file on the PFS, and no node has looked there since.

        If that takes long, because the PFS is away, the file shows what other nodes have.
        """
        return on_pfs is not None and on_pfs.in_hand and time.monotonic() - self._view_since_s < limits.FETCH_PATIENCE_S

    def _show_held_copy(self, lost: LostFile, held_copy: HeldCopy, shared: ContentLocations) -> bool:
        """Make the previous content that of the file, if the store agrees."""
        remote_state, content = shared.state, held_copy.content
        if remote_state is not None and _is_same_state(held_copy.generation, held_copy.digest, remote_state):
            return self._restore_previous(lost, content, shared)
        try:
            promoted = local_copies.promote_stale(self._db, self._tiers, held_copy, lost.inode)
        except (OSError, DigestMismatch) as failure:
            log.error("what is left of %s cannot be shown: %s", self._name(lost), failure)
            return False
        if promoted is None or not self._restore_previous(lost, promoted, shared):
            if promoted is not None:
                contents.set_state(self._db, promoted.id, ContentState.DOOMED)
            return False
        copies.delete_copy(self._db, content.id, held_copy.tier)
        local_copies.remove_unrecorded(self._db, self._tiers[held_copy.tier], content.id)
        return True

    def _restore_previous(self, lost: LostFile, content: Content, shared: ContentLocations) -> bool:
        value = lost.build_value(content.id, content.generation, content.size, _get_mtime_ns(lost, content, shared))
        content_value = salvage_records.build_content_value(content, lost.inode, self._cluster.node_number)
        items = {item.key: item for item in (lost.file.item, *shared.items, *_list_content_items(lost.successor.items))}
        puts = [(lost.file.item.key, value), (locations.build_content_key(content.id), content_value)]
        revision = _commit_if_unchanged(self._cluster.store, list(items.values()), puts)
        if not revision:
            return False
        disk.reach("salvage:shown")
        salvage_records.record_previous_shown(self._db, content, lost.inode, (value, content_value), revision)
        self._report(lost)
        self._notify.wake_lanes()
        return True

    # --- falling back to the PFS --------------------------------------------------------------------------------------

    def _answer_all(self, view: ClusterView) -> None:
        """Decide for the callers that wait. What cannot be decided yet remains open."""
        for request in mover_requests.list_open(self._db, mover_requests.SALVAGE, at_most=BATCH_CONTENTS):
            is_shown = self._try_show_pfs(request.inode, view)
            if is_shown is not None:
                mover_requests.mark_done(self._db, request.id) if is_shown else mover_requests.mark_failed(self._db, request.id, errno.EIO)
                self._notify.wake_lanes()

    def _try_show_pfs(self, inode: int, view: ClusterView) -> bool | None:
        """Let a file show what the PFS has, if no living node has a newer state.

        Returns None while that is uncertain. A node that has one and did not say so in time still shows it later.
        """
        store = self._cluster.store
        file, on_pfs = locations.load_files(store, [inode]).get(inode), locations.load_pfs_state(store, inode)
        if file is None or not file.is_readable:
            return False
        if file.content is None or file.content != copies.get_content_id(self._db, inode):
            return on_pfs is not None and "published" in on_pfs.value and self._record_pfs_shown(inode, file, on_pfs)
        on_pfs = on_pfs or locations.find_replaced_pfs_state(store, inode, file)
        if on_pfs is None:
            return False
        successor = locations.load(store, [file.content])[file.content]
        if (
            successor.state is None
            or (not successor.is_lost and successor.writer in view)
            or successor.state.generation < on_pfs.generation
        ):
            return False
        newer = on_pfs.generation + on_pfs.is_complete
        if any(copy.node in view and copy.generation >= newer and copy.node != successor.writer for copy in successor.copies):
            return False
        if time.monotonic() - self._view_since_s < limits.SALVAGE_RIVALS_S:
            return None
        return self._show_pfs(LostFile(inode, file, successor, on_pfs)) or None

    def _record_pfs_shown(self, inode: int, file: SharedFile, on_pfs: SharedPfsState) -> bool:
        """Record the decision of another node."""
        rows = [(PFS_STATE, on_pfs.value, on_pfs.item), (INODE, file.value, file.item)]
        read.record_values(self._db, [(SharedKey(kind, inode), value, item.mod_revision) for kind, value, item in rows])
        self._notify.invalidate_inode(inode)
        return True

    def _show_pfs(self, lost: LostFile) -> bool:
        """Let the file show what the PFS has, if the store agrees, also a state that was only fsynced."""
        file, on_pfs = lost.file, lost.on_pfs
        if on_pfs is None or on_pfs.in_hand:
            return False
        value = lost.build_value(None, on_pfs.generation, on_pfs.size, on_pfs.mtime_ns)
        puts = [*on_pfs.build_puts(lost.inode), (file.item.key, value)]
        compared = [file.item, on_pfs.item, *on_pfs.rests_on, *lost.successor.items]
        revision = _commit_if_unchanged(self._cluster.store, compared, puts)
        if not revision:
            return False
        disk.reach("salvage:pfs")
        known = [] if on_pfs.replaces else [(SharedKey(PFS_STATE, lost.inode), on_pfs.value, on_pfs.item.mod_revision)]
        read.record_values(self._db, [*known, *((keys.decode_key(key), said, revision) for key, said in puts)])
        self._writers_may_return = True
        self._report(lost)
        self._notify.invalidate_inode(lost.inode)
        return True

    def _report(self, lost: LostFile) -> None:
        name, node = self._name(lost), lost.successor.writer
        log.warning("%s shows its former content: the newer one is lost with node %s, which alone had it", name, node)
        what = f"the file shows its former content: the newer one is lost with node {node}, unless that returns with it"
        remedy = "start that node again without wiping its RAM, or go on with the former content"
        summary.set_trouble(self._db, _get_trouble_name(lost.inode), {"what": what, "path": name, "remedy": remedy})
        self._has_troubles = True

    def _name(self, lost: LostFile) -> str:
        name = os.fsdecode(namespace.get_path(self._db, lost.inode))
        return "/".join(str(part) for _, part in lost.file.value["names"][:1]) if name == "?" else name

    # --- when the writer returns ---------------------------------------------------------------------------------------

    def _tell_returned(self) -> bool:
        """Tell live writers which contents of theirs are missed. Return True for a while if one is."""
        is_waiting = False
        for inode, raw in salvage_records.list_salvaged(self._db):
            salvaged = json.loads(raw)
            file = locations.load_files(self._cluster.store, [inode]).get(inode)
            if file is not None and not file.is_readable:
                continue
            if file is None or file.salvaged != salvaged:
                if file is None:
                    salvage_records.delete_salvage_record(self._db, inode)
                else:
                    read.record_values(self._db, [(SharedKey(INODE, inode), file.value, file.item.mod_revision)])
                self._troubles_checked_s = 0.0
            for record in file.missed if file is not None and file.active_salvage == salvaged else ():
                for node in self._cluster.list_live([record["node"]]):
                    is_waiting = time.monotonic() - self._view_since_s < limits.FETCH_PATIENCE_S
                    with contextlib.suppress(PeerFailed):
                        self._cluster.peers.release_copies(node, [record["content"]])
        return is_waiting

    def _end_troubles(self) -> bool:
        """End the troubles of files that show no previous state any more. Return True if any is left."""
        found = [int(where.rpartition(":")[2], 16) for where, _, _ in summary.list_troubles(self._db, f"{PREVIOUS_SHOWN_TROUBLE}:")]
        files: dict[int, SharedFile] = {}
        for first in range(0, len(found), BATCH_CONTENTS):
            files |= locations.load_files(self._cluster.store, found[first : first + BATCH_CONTENTS])
        shown = [one for one in found if one in files and (not files[one].is_readable or merge.is_showing_previous(files[one].value))]
        for inode in set(found).difference(shown):
            summary.set_trouble(self._db, _get_trouble_name(inode), None)
        return bool(shown)


def _is_candidate(held_copy: HeldCopy, shared: ContentLocations, file: SharedFile | None) -> bool:
    """Return whether the file of a content on this node has another content or a later generation now."""
    remote_state = shared.state
    if remote_state is None or file is None or (file.content is None and file.pfs_generation is None):
        return False
    if file.pfs_generation is not None and held_copy.generation <= file.pfs_generation:
        return False
    if not _is_same_state(held_copy.generation, held_copy.digest, remote_state):
        return remote_state.digest is None or held_copy.generation < remote_state.generation
    return held_copy.content.id not in (file.content, (file.salvaged or {}).get("content"))


def _is_same_state(generation: int, digest: bytes, remote_state: RemoteState) -> bool:
    """Return True if a generation is the recorded state, which has no digest before its seal."""
    return generation == remote_state.generation and (
        remote_state.digest == digest if remote_state.digest is not None else not remote_state.is_open
    )


def _get_mtime_ns(lost: LostFile, content: Content, shared: ContentLocations) -> int:
    """Return the mtime of the file with this content, if its last writer or the PFS has recorded it."""
    remote_state = shared.state
    if shared.superseded_mtime_ns is not None and remote_state is not None and remote_state.generation == content.generation:
        return shared.superseded_mtime_ns
    if lost.on_pfs is not None and lost.on_pfs.generation == content.generation:
        return lost.on_pfs.mtime_ns
    return int(lost.file.value["mtime_ns"])


def _list_content_items(items: Sequence[Item]) -> list[Item]:
    return [item for item in items if item.key.startswith(b"c/")]


def _commit_if_unchanged(store: Store, compared: Sequence[Item], puts: Sequence[tuple[bytes, dict[str, Any] | None]]) -> int:
    """Put these values (None: delete) if all that was read is unchanged. Return the revision, else 0."""
    compares = [Compare(item.key, CompareTarget.MOD, "=", item.mod_revision) for item in compared]
    changes: list[Operation] = [Delete(key) if value is None else Put(key, keys.encode_fields(value)) for key, value in puts]
    outcome = store.commit(compares, changes, [Get(item.key) for item in compared])
    return outcome.revision if outcome.succeeded else 0


def _get_trouble_name(inode: int) -> str:
    return f"{PREVIOUS_SHOWN_TROUBLE}:{inode:016x}"
