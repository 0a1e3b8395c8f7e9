"""The reconcile step: hosted and own contents compared with the store.

Takes: contents on this node, and what the store says about them.
Leaves: no copy of a content that was written again, deleted or replaced on another node, and no copy in excess.
If we die here: each decision is one transaction on the state of the store; the next sweep begins again.

A node that returns checks all at once; opens ask the store anyway. Nothing is dropped while the store does not answer, nor because a peer
alone says so (P5), nor while it is so young that its writer may not have published it.

Sweeps are spread over time, with pauses between batches. For a part of the contents, a sweep also asks the nodes that announced
copies. A node that lacks its copy withdraws the announcement.
"""

import errno
import logging
import os
import random
import time
from collections.abc import Iterable
from dataclasses import replace

from ckptfs import disk, limits
from ckptfs.catalog import contents, copies, handles, identity, peer_copies, remote_contents
from ckptfs.catalog.database import Database
from ckptfs.clique import locations, placement
from ckptfs.clique.cluster import Cluster
from ckptfs.clique.locations import ContentLocations, SharedFile
from ckptfs.clique.membership import ClusterView, Node
from ckptfs.clique.peer_api import PeerFailed, PeerRefused
from ckptfs.coherence import read, salvage_records, store_loss
from ckptfs.coherence.keys import INODE, SharedKey
from ckptfs.errors import StoreUnreachable
from ckptfs.model import LOCAL_TIERS, Content, ContentState, Notifier
from ckptfs.tiers import local_copies
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)

disk.declare_labels("reconcile:forgotten", "reconcile:released")

BATCH_CONTENTS = locations.LOAD_CONTENTS_MAX // 2


class Reconcile:
    """Sweeps through all contents, one batch a step: first the hosted ones, then this node's own."""

    def __init__(self, db: Database, tiers: Tiers, notify: Notifier, cluster: Cluster, reported_unneeded: set[int]) -> None:
        """Take `reported_unneeded`: contents that peers reported. They are checked first, and leave the set."""
        self._db = db
        self._tiers = tiers
        self._notify = notify
        self._cluster = cluster
        self._reported_unneeded = reported_unneeded
        self._sweep_s = time.monotonic()
        self._sweeps = random.randrange(limits.AUDIT_SWEEPS)
        self._batches_left = 0
        self._next_batch_s = 0.0
        self._lease = 0
        self._was_dead = False
        self._after: int | None = None
        self._is_own_turn = False
        self._dropped = 0
        self._checked: set[int] = set()
        self._unconfirmed: dict[int, int] = {}
        self._recheck_s = 0.0

    def step(self) -> bool:
        """Check one batch. Return True if there is more. Raises StoreUnreachable; the batch is then repeated."""
        self._check_lease()
        if store_loss.is_adopting(self._db):
            self._sweep_s = time.monotonic() + limits.RECONCILE_AGE_S
            return False
        if self._unconfirmed and time.monotonic() >= self._recheck_s:
            self._reported_unneeded.update(self._unconfirmed)
        if self._reported_unneeded:
            reported = [self._reported_unneeded.pop() for _ in range(min(len(self._reported_unneeded), BATCH_CONTENTS))]
            try:
                self._check_reported(reported)
            except StoreUnreachable:
                self._reported_unneeded.update(reported)  # They are reported only once.
                raise
            return bool(self._reported_unneeded)
        marked = [one for one in contents.list_awaiting_store_check(self._db) if one.id not in self._checked][:BATCH_CONTENTS]
        if marked:
            self._check_own(marked)
            self._checked |= {content.id for content in marked}  # What is not decided by that waits for a sweep.
            return True
        if time.monotonic() >= self._sweep_s:
            self._checked = set()
            interval_s = limits.RECONCILE_AGE_S if self._was_dead else limits.RECONCILE_INTERVAL_S
            self._sweep_s = time.monotonic() + interval_s * random.uniform(0.75, 1.25)
            self._was_dead = False
            self._after, self._is_own_turn = 0, False
            self._batches_left, self._next_batch_s = limits.SWEEP_BATCHES, 0.0
            self._sweeps += 1
        return time.monotonic() >= self._next_batch_s and self._sweep()

    def _check_lease(self) -> None:
        """Begin a sweep after the lease was lost: peers tell nothing to a node that counts as dead."""
        lease = self._cluster.lease()
        if lease and lease != self._lease:
            self._lease, self._was_dead = lease, True
            self._sweep_s = time.monotonic() + self._cluster.draw_delay_s()

    def next_due_s(self) -> float | None:
        """Return the seconds until the next batch or sweep, or until unconfirmed contents are checked again."""
        due_s = self._sweep_s if self._after is None else self._next_batch_s
        return max(0.0, min(due_s, self._recheck_s if self._unconfirmed else due_s) - time.monotonic())

    def _check_reported(self, reported: list[int]) -> None:
        found = [content for number in reported if (content := contents.get_content(self._db, number)) is not None and content.is_remote]
        self._schedule_recheck(self._check_hosted(found, include_young=True), reported)
        self._check_own(remote_contents.list_own_of_same_files(self._db, reported, BATCH_CONTENTS))
        self._withdraw_phantoms(reported)

    def _schedule_recheck(self, unconfirmed: list[int], reported: list[int]) -> None:
        """Check again later: the writer may not know of a deletion yet that another node announced at once."""
        for number in reported:
            tries = self._unconfirmed.pop(number, 0) + 1
            if number in unconfirmed and tries < limits.UNCONFIRMED_TRIES:
                self._unconfirmed[number] = tries
                self._recheck_s = time.monotonic() + limits.UNCONFIRMED_RECHECK_S

    def _sweep(self) -> bool:
        """Check the next batch of the sweep. Return True if there is more to check at once."""
        self._batches_left -= 1
        if self._batches_left <= 0:
            self._next_batch_s = time.monotonic() + limits.SWEEP_PAUSE_S * random.uniform(0.75, 1.25)
        return self._after is not None and self._sweep_batch(self._after) and self._batches_left > 0

    def _sweep_batch(self, after: int) -> bool:
        """Check a batch: hosted contents, then own ones, then stale generations. False: the end."""
        if self._is_own_turn:
            batch = remote_contents.list_own(self._db, after, time.time_ns() - _to_ns(limits.RECONCILE_AGE_S), BATCH_CONTENTS)
            self._check_own(batch)
        else:
            batch = remote_contents.list_hosted(self._db, after, BATCH_CONTENTS)
            self._check_hosted(batch)
        self._ask_holders(batch)
        if batch or not self._is_own_turn:
            self._after, self._is_own_turn = batch[-1].id if batch else 0, self._is_own_turn or not batch
            return True
        self._after = None
        self._drop_stale()
        if self._dropped:
            log.info("%d contents on this node are no longer needed: other nodes changed or deleted them", self._dropped)
            self._dropped = 0
        return False

    # --- what nodes have announced -----------------------------------------------------------------------------------

    def _ask_holders(self, batch: list[Content]) -> None:
        """Ask holders of contents whose turn it is, as their maker or after its death."""
        turn = self._sweeps % limits.AUDIT_SWEEPS
        announced: dict[int, list[int]] = {}
        for number in (content.id for content in batch if content.id % limits.AUDIT_SWEEPS == turn):
            origin = identity.get_origin_node(number)
            if origin == self._cluster.node_number or origin not in self._cluster.view():
                for copy in peer_copies.list_peer_copies(self._db, number):
                    announced.setdefault(copy.node, []).append(number)
        nodes = self._cluster.list_live(sorted(announced))
        for node in random.sample(nodes, min(len(nodes), limits.AUDIT_NODES_MAX)):
            try:
                self._cluster.peers.release_copies(node, announced[node.number])
            except PeerFailed as failure:
                log.debug("node %s: not asked about its copies: %s", node.name, failure)

    def _withdraw_phantoms(self, reported: Iterable[int]) -> None:
        """Withdraw announcements of copies that this node lacks."""
        if phantoms := remote_contents.list_not_held(self._db, reported):
            self._cluster.copy_records.withdraw_all(phantoms)
            for content in phantoms:
                remote_contents.mark_unannounced(self._db, content)  # A copy may have arrived and been announced meanwhile.

    # --- what is held for others -------------------------------------------------------------------------------------

    def _check_hosted(self, batch: list[Content], *, include_young: bool = False) -> list[int]:
        """Check hosted contents. Return those that the store lacks and their writer has."""
        announced = remote_contents.list_announced(self._db, [content.id for content in batch])
        batch, content_locations, files = self._load_store_records(batch)
        unconfirmed = []
        replaced = self._list_replaced(batch, content_locations, files)
        for content in batch:
            shared = content_locations[content.id]
            age_s = (time.time_ns() - remote_contents.get_last_used_ns(self._db, content.id)) / 1e9
            if not include_young and age_s < limits.RECONCILE_AGE_S:
                continue
            if shared.state is None:
                file = files.get(content.inode)
                is_replaced = file is None or (file.is_readable and file.content != content.id)
                own_key = locations.build_copy_key(content.id, self._cluster.node_number)
                is_revoked = content.id in announced and all(item.key != own_key for item in shared.items)
                is_unneeded = is_replaced and self._is_unknown_everywhere(content, age_s, is_revoked=is_revoked)
                unconfirmed += [content.id] if is_replaced and not is_unneeded else []
            else:
                is_unneeded = content.inode not in files or content.id in replaced
            if is_unneeded:
                # The writer does not: it is gone, or it is this node, and the content became another file's previous one.
                is_orphan = content.inode not in files and shared.writer not in self._cluster.view()
                if is_orphan or shared.writer == self._cluster.node_number:
                    locations.delete_content(self._cluster.store, content.id, shared)
                self._drop_content(content)
            elif age_s > limits.SURPLUS_KEEP_S and self._is_surplus(content, shared):
                self._release_surplus(content, shared)
            elif self._cluster.is_ours_to_copy(content, shared) and peer_copies.mark_under_replicated(self._db, [content.id]):
                self._notify.wake_lanes()  # This node did not know that the writer or another holder has it.
        return unconfirmed

    def _load_store_records(self, batch: list[Content]) -> tuple[list[Content], dict[int, ContentLocations], dict[int, SharedFile]]:
        """Load contents, their present files, and what the store says of both; record newer generations."""
        cluster = self._cluster
        content_locations = locations.refresh(self._db, cluster.store, [content.id for content in batch], cluster.node_number)
        remote_states = {number: shared.state for number, shared in content_locations.items()}
        batch = [content if (known := remote_states[content.id]) is None else replace(content, inode=known.inode) for content in batch]
        return batch, content_locations, locations.load_files(cluster.store, sorted({content.inode for content in batch}))

    def _list_replaced(
        self, batch: list[Content], content_locations: dict[int, ContentLocations], files: dict[int, SharedFile]
    ) -> set[int]:
        """List contents whose file has another, safe content now and does not miss them (P5)."""
        current_files = {content.id: files[content.inode] for content in batch if content.inode in files}
        successors = {number: file.content for number, file in current_files.items() if file.content not in (None, number)}
        successor_locations = locations.load(self._cluster.store, sorted({now for now in successors.values() if now is not None}))
        return {
            number
            for number, now in successors.items()
            if now is not None
            and not current_files[number].misses(number)
            and self._is_safe_successor(content_locations[number], successor_locations[now])
        }

    def _is_safe_successor(self, previous: ContentLocations, successor: ContentLocations) -> bool:
        if successor.state is None or successor.state.digest is None:
            return False
        if self._cluster.factor < 2 or (previous.superseded_mtime_ns is None and previous.writer == successor.writer):
            return True
        return any(node in self._cluster.view() for node in successor.holders if node != successor.writer)

    def _is_unknown_everywhere(self, content: Content, age_s: float, *, is_revoked: bool) -> bool:
        """Return True if the writer of a content is gone or lacks it: an island may not have published it.

        `is_revoked`: another node deleted the key of the copy here, as it does with a content that was published.
        """
        home = self._cluster.view().by_number.get(identity.get_origin_node(content.id))
        if home is None:
            return is_revoked or age_s > limits.UNPUBLISHED_KEEP_S
        if home.number == self._cluster.node_number:
            return True
        try:
            self._cluster.peers.get_manifest(home, content.id, None)
        except PeerFailed as failure:
            return isinstance(failure, PeerRefused) and failure.code == errno.ENOENT
        return False

    def _is_surplus(self, content: Content, shared: ContentLocations) -> bool:
        """Return whether enough other live nodes have it, in placement order."""
        cluster, remote_state = self._cluster, shared.state
        if (
            remote_state is None
            or shared.writer is None
            or (remote_state.generation, remote_state.digest) != (content.generation, content.digest)
        ):
            return False
        view = cluster.view()
        if not self._is_own_copy_superfluous(view, shared.holders, shared.writer):
            return False
        # The store may be older than the loss of a tier: drop a copy only if others exist (P5).
        confirmed = [node.number for node in cluster.list_live(shared.holders) if self._has_copy(node, content)]
        return self._is_own_copy_superfluous(view, [cluster.node_number, *confirmed], shared.writer)

    def _is_own_copy_superfluous(self, view: ClusterView, holding_nodes: list[int], writer: int) -> bool:
        cluster = self._cluster
        spare = placement.choose_superfluous(view, holding_nodes, writer, cluster.factor, cluster.jump)
        return any(node.number == cluster.node_number for node in spare)

    def _has_copy(self, node: Node, content: Content) -> bool:
        """Return whether a node can open exactly this copy."""
        try:
            record = self._cluster.peers.get_manifest(node, content.id, content.digest)
        except PeerFailed as failure:
            log.debug("%s does not tell of content %d: %s", node.name, content.id, failure)
            return False
        return (record.generation, record.digest) == (content.generation, content.digest)

    def _drop_content(self, content: Content) -> None:
        if remote_contents.is_uncommitted(self._db, content):
            return  # This node returns, and gave a file a name that another one deleted.
        self._cluster.copy_records.announce([(content, False)])
        if disk.act("reconcile:forgotten", remote_contents.delete_unneeded, self._db, content, gone=True):
            self._dropped += 1
            self._notify.wake_lanes()

    def _release_surplus(self, content: Content, shared: ContentLocations) -> None:
        """Drop a surplus copy if the other holders still announce theirs: they may be dropping them, too."""
        mine = locations.build_copy_key(content.id, self._cluster.node_number)
        if not self._cluster.copy_records.withdraw(content.id, [item for item in shared.items if item.key != mine]):
            return
        if not disk.act("reconcile:released", remote_contents.delete_unneeded, self._db, content, gone=False):
            remote_contents.mark_unannounced(self._db, content.id)
            return
        for tier in LOCAL_TIERS:
            if tier in self._tiers:
                local_copies.remove_unrecorded(self._db, self._tiers[tier], content.id)

    # --- this node's own ---------------------------------------------------------------------------------------------

    def _check_own(self, batch: list[Content]) -> None:
        batch, content_locations, files = self._load_store_records(batch)
        replaced = self._list_replaced(batch, content_locations, files)
        for content in batch:
            shared = content_locations[content.id]
            if remote_contents.is_own_unpublished(self._db, content.id):
                continue
            if shared.writer not in (None, self._cluster.node_number):
                remote_contents.mark_remote(self._db, content)  # Another node has completed the change that this one began.
            elif content.inode not in files and contents.is_awaiting_store_check(self._db, content.id):
                if remote_contents.delete_unneeded(self._db, content, gone=True):
                    self._dropped += 1
                    self._notify.wake_lanes()
            elif shared.superseded_mtime_ns is None and not remote_contents.was_in_store(self._db, content.inode):
                continue  # The store does not have it yet.
            elif (file := files.get(content.inode)) is not None and file.misses(content.id):
                self._keep_missed(content, file)
            elif (content.inode not in files or content.id in replaced) and remote_contents.delete_unneeded(self._db, content, gone=True):
                self._dropped += 1
                self._notify.wake_lanes()
            elif content.state is ContentState.SEALED:
                self._recheck_unconfirmed_copies(content, shared)

    def _recheck_unconfirmed_copies(self, content: Content, shared: ContentLocations) -> None:
        """Check copies on living nodes that the store does not list any more."""
        confirmed = {copy.node for copy in shared.copies if (copy.generation, copy.digest) == (content.generation, content.digest)}
        unconfirmed = [
            node.number for node in self._cluster.list_live(peer_copies.list_holders(self._db, content)) if node.number not in confirmed
        ]
        if unconfirmed:
            peer_copies.delete_unconfirmed_copies(self._db, content, unconfirmed)
            self._notify.wake_lanes()

    def _keep_missed(self, content: Content, file: SharedFile) -> None:
        """Show a content again that others took for lost, or keep it beside what they wrote since."""
        record = next(one for one in file.missed if one["content"] == content.id)
        if file.active_salvage is not None and not handles.has_writer(self._db, content.inode):
            read.record_values(self._db, [(SharedKey(INODE, content.inode), file.value, file.item.mod_revision)])
        if record == file.active_salvage or (file.content, file.value["generation"]) == (content.id, content.generation):
            return
        label = self._cluster.view().by_number[self._cluster.node_number].name
        name = salvage_records.insert_conflict_copy(self._db, content, {**file.value, "missed_mtime_ns": record["mtime_ns"]}, label)
        if name is not None:
            log.info("%s: kept beside the file: other nodes missed this content and wrote the file again", os.fsdecode(name))

    def _drop_stale(self) -> None:
        """Drop stale generations whose blocks no node needs, once the store has a safe successor."""
        self._drop_replaced()
        before_ns = time.time_ns() - _to_ns(limits.SURPLUS_KEEP_S)
        for tier in LOCAL_TIERS:
            if tier not in self._tiers:
                continue
            for number in remote_contents.list_stale(self._db, tier, before_ns, BATCH_CONTENTS):
                copies.delete_copy(self._db, number, tier)
                local_copies.remove_unrecorded(self._db, self._tiers[tier], number)

    def _drop_replaced(self) -> None:
        """Drop contents whose successor is safe elsewhere, or whose file is gone or has another safe content."""
        after = 0
        while batch := remote_contents.list_only_stale(self._db, after, BATCH_CONTENTS):
            after = batch[-1].id
            batch, content_locations, files = self._load_store_records(batch)
            replaced = self._list_replaced(batch, content_locations, files)
            for content in batch:
                if content.inode not in files or content.id in replaced:
                    self._drop_content(content)


def _to_ns(seconds: float) -> int:
    return int(seconds * 1e9)
