"""Takes: what lies here and what the cluster's store says of it: contents of other nodes, contents that this node took for its own.
Leaves: nothing here that another node has written anew, deleted or replaced, and no copy that is one too many.
If we die here: each decision is one transaction, taken from what the store says then; the next sweep begins anew.

A node that comes back with old data looks through all of it at once, and what somebody opens is asked for in the store anyhow, so what
is old is never served as new. Nothing goes while the store does not answer, nor at the word of a peer alone (P5). What came a moment ago is
left alone: its writer may not have told of it yet.
"""

import errno
import logging
import os
import time
from dataclasses import replace

from ckptfs import disk, limits
from ckptfs.catalog import epoch, former, holding, identity, peers, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import falling_back
from ckptfs.clique import holders, placement
from ckptfs.clique.holders import ContentLocations, SharedFile
from ckptfs.clique.membership import ClusterView, Node
from ckptfs.clique.peers import PeerFailed, PeerRefused
from ckptfs.clique.surroundings import Cluster
from ckptfs.model import Content, ContentState, Notifier, Tier
from ckptfs.tiers import removal
from ckptfs.tiers.place import Places

log = logging.getLogger(__name__)

disk.declare_labels("reconcile:forgotten", "reconcile:released")

BATCH_CONTENTS = holders.LOAD_CONTENTS_MAX // 2
LOCAL = (Tier.RAM, Tier.NVME)


class Reconcile:
    """Sweeps through everything now and then, one batch a step: first what is held for others, then this node's own."""

    def __init__(self, db: Database, places: Places, notify: Notifier, around: Cluster, doubted: set[int]) -> None:
        """`doubted`: contents of which a peer said that they need not be held, or that their files are gone; they are looked at first, and
        taken out of the set.
        """
        self._db = db
        self._places = places
        self._notify = notify
        self._around = around
        self._doubted = doubted
        self._sweep_s = time.monotonic()
        self._lease = 0
        self._returned = False
        self._held_after: int | None = None
        self._own_after: int | None = None
        self._dropped = 0
        self._asked: set[int] = set()
        self._unsure: dict[int, int] = {}
        self._unsure_s = 0.0
        self._tries: dict[int, int] = {}

    def step(self) -> bool:
        """Look at one batch. True: there is more. Raises Unreachable while the store is; then the same batch comes again."""
        self._follow()
        if epoch.is_recently_lost(self._db):
            # What the store does not say, other nodes may not have told it yet since it lost its data.
            self._sweep_s = time.monotonic() + limits.STORE_LOST_REST_S
            return False
        if self._unsure and time.monotonic() >= self._unsure_s:
            self._tries |= self._unsure
            self._doubted.update(self._unsure)
            self._unsure = {}
        if self._doubted:
            doubted = [self._doubted.pop() for _ in range(min(len(self._doubted), BATCH_CONTENTS))]
            found = [content for number in doubted if (content := settling.get_content(self._db, number)) is not None and content.is_remote]
            self._look_again_at(self._look_at_held(found, young=True), doubted)
            self._look_at_own(holding.list_own_of_same_files(self._db, doubted, BATCH_CONTENTS))
            return bool(self._doubted)
        if asked := [
            content for content in former.list_awaiting_store_check(self._db, limits.DOUBTED_MAX) if content.id not in self._asked
        ][:BATCH_CONTENTS]:
            self._look_at_own(asked)
            self._asked |= {content.id for content in asked}  # What is not decided by that waits for a sweep.
            return True
        if time.monotonic() >= self._sweep_s:
            self._asked = set()
            self._sweep_s = time.monotonic() + (limits.RECONCILE_AGE_S if self._returned else limits.RECONCILE_INTERVAL_S)
            self._returned = False
            self._held_after = 0
        return self._sweep()

    def _follow(self) -> None:
        """Who was dead to the others was told nothing by them: it looks through all that it has, a while later at what was too young."""
        lease = self._around.lease()
        if lease and lease != self._lease:
            self._lease, self._returned, self._sweep_s = lease, True, time.monotonic()

    def next_due_s(self) -> float | None:
        """Until the next sweep, or until what is not sure is looked at again."""
        return max(0.0, min(self._sweep_s, self._unsure_s if self._unsure else self._sweep_s) - time.monotonic())

    def _look_again_at(self, unsure: list[int], doubted: list[int]) -> None:
        """Who deletes a file tells everybody at once: its writer may not have heard of it yet when it is asked."""
        tries = {number: self._tries.pop(number, 0) + 1 for number in doubted}
        again = {number: tries[number] for number in unsure if tries[number] < limits.DOUBT_TRIES}
        if again:
            self._unsure |= again
            self._unsure_s = time.monotonic() + limits.DOUBT_AGAIN_S

    def _sweep(self) -> bool:
        if self._held_after is not None:
            batch = holding.list_hosted(self._db, self._held_after, BATCH_CONTENTS)
            self._look_at_held(batch)
            self._held_after = batch[-1].id if batch else None
            self._own_after = self._own_after if batch else 0
            return True
        if self._own_after is not None:
            own = holding.list_own(self._db, self._own_after, time.time_ns() - _ns(limits.RECONCILE_AGE_S), BATCH_CONTENTS)
            self._look_at_own(own)
            self._own_after = own[-1].id if own else None
            if not own:
                self._drop_older()
                if self._dropped:
                    log.info("%d contents that were here are of no use any more: other nodes changed or deleted them", self._dropped)
                    self._dropped = 0
            return bool(own)
        return False

    # --- what is held for others -------------------------------------------------------------------------------------

    def _look_at_held(self, batch: list[Content], *, young: bool = False) -> list[int]:
        """Those of which the store says nothing any more while their writer says that it has them are returned."""
        batch, told, files = self._ask(batch)
        unsure = []
        replaced = self._sealed_successors(batch, told, files)
        for content in batch:
            shared = told[content.id]
            age_s = (time.time_ns() - holding.get_last_used_ns(self._db, content.id)) / 1e9
            if not young and age_s < limits.RECONCILE_AGE_S:
                continue
            if shared.state is None:
                replaced_there = content.inode not in files or files[content.inode].content != content.id
                gone = replaced_there and self._nobody_knows(content, age_s)
                unsure += [content.id] if replaced_there and not gone else []
            else:
                gone = content.inode not in files or content.id in replaced
            if gone:
                if content.inode not in files and shared.writer not in self._around.view():
                    holders.delete_content(self._around.store, content.id, shared)
                self._drop(content)
            elif age_s > limits.SPARE_KEPT_S and self._is_spare(content, shared):
                self._release(content, shared)
        return unsure

    def _ask(self, batch: list[Content]) -> tuple[list[Content], dict[int, ContentLocations], dict[int, SharedFile]]:
        """The contents with the files to which they belong by now, and what the store says of both; the catalog learns of newer
        generations by it.
        """
        around = self._around
        told = holders.refresh(self._db, around.store, [content.id for content in batch], around.node_number)
        heard = {number: shared.state for number, shared in told.items()}
        batch = [content if (known := heard[content.id]) is None else replace(content, inode=known.inode) for content in batch]
        return batch, told, holders.load_files(around.store, sorted({content.inode for content in batch}))

    def _sealed_successors(self, batch: list[Content], told: dict[int, ContentLocations], files: dict[int, SharedFile]) -> set[int]:
        """Contents whose files have another one now, which is sealed, and on other nodes where this one was: until then the former one
        stays (P5). So does what a file should hold.
        """
        holding_now = {content.id: files[content.inode] for content in batch if content.inode in files}
        successors = {number: file.content for number, file in holding_now.items() if file.content not in (None, number)}
        shared = holders.load(self._around.store, sorted({now for now in successors.values() if now is not None}))
        return {
            number
            for number, now in successors.items()
            if now is not None
            and (holding_now[number].salvaged or {}).get("content") != number
            and self._succeeds(told[number], shared[now])
        }

    def _succeeds(self, former: ContentLocations, now: ContentLocations) -> bool:
        if now.state is None or now.state.digest is None:
            return False
        if self._around.factor < 2 or (former.superseded_mtime_ns is None and former.writer == now.writer):
            return True
        return any(node in self._around.view() for node in now.holders if node != now.writer)

    def _nobody_knows(self, content: Content, age_s: float) -> bool:
        """The store never heard of a content: its writer may be an island. Whether that one is gone, or has it no more."""
        home = self._around.view().by_number.get(identity.get_origin_node(content.id))
        if epoch.get_loss_age_s(self._db) < limits.UNTOLD_KEPT_S:
            return False
        if home is None:
            return age_s > limits.UNTOLD_KEPT_S
        if home.number == self._around.node_number:
            return True
        try:
            self._around.peers.get_manifest(home, content.id, None)
        except PeerRefused as refusal:
            return refusal.code == errno.ENOENT
        except PeerFailed:
            return False
        return False

    def _is_spare(self, content: Content, shared: ContentLocations) -> bool:
        """Whether enough other nodes that live have it, by the order of placement."""
        around, heard = self._around, shared.state
        if heard is None or shared.writer is None or (heard.generation, heard.digest) != (content.generation, content.digest):
            return False
        world = around.view()
        if not self._is_superfluous(world, shared.holders, shared.writer):
            return False
        # What the store says may be older than the loss of a tier: nothing goes but for copies that are there (P5).
        there = [node.number for node in around.list_live(shared.holders) if self._has(node, content)]
        return self._is_superfluous(world, [around.node_number, *there], shared.writer)

    def _is_superfluous(self, world: ClusterView, holding_it: list[int], writer: int) -> bool:
        around = self._around
        spare = placement.choose_superfluous(world, holding_it, writer, around.factor, around.jump)
        return any(node.number == around.node_number for node in spare)

    def _has(self, node: Node, content: Content) -> bool:
        """Whether a node lends exactly this when it is asked."""
        try:
            record = self._around.peers.get_manifest(node, content.id, content.digest)
        except PeerFailed as failure:
            log.debug("%s does not tell of content %d: %s", node.name, content.id, failure)
            return False
        return (record.generation, record.digest) == (content.generation, content.digest)

    def _drop(self, content: Content) -> None:
        holders.announce(self._around.store, self._around.node_number, [(content, False)])
        if disk.act("reconcile:forgotten", holding.delete_unneeded, self._db, content, gone=True):
            self._dropped += 1
            self._notify.wake_lanes()

    def _release(self, content: Content, shared: ContentLocations) -> None:
        """Drop a copy that is one too many. The others' word for theirs must stand while ours is taken back: they may be at the same."""
        mine = holders.build_copy_key(content.id, self._around.node_number)
        if not holders.withdraw_copy(
            self._around.store, self._around.node_number, content.id, [item for item in shared.items if item.key != mine]
        ):
            return
        if not disk.act("reconcile:released", holding.delete_unneeded, self._db, content, gone=False):
            holding.mark_unannounced(self._db, content.id)
            return
        for tier in LOCAL:
            if tier in self._places:
                removal.remove_forgotten(self._db, self._places[tier], content.id)

    # --- this node's own ---------------------------------------------------------------------------------------------

    def _look_at_own(self, batch: list[Content]) -> None:
        batch, told, files = self._ask(batch)
        replaced = self._sealed_successors(batch, told, files)
        for content in batch:
            shared = told[content.id]
            if holding.is_own_unpublished(self._db, content.id):
                continue
            if shared.writer not in (None, self._around.node_number):
                holding.mark_remote(self._db, content)  # Another node finished what this one had begun.
            elif content.inode not in files and former.is_awaiting_store_check(self._db, content.id):
                if holding.delete_unneeded(self._db, content, gone=True):
                    self._dropped += 1
                    self._notify.wake_lanes()
            elif shared.superseded_mtime_ns is None and not holding.was_in_store(self._db, content.inode):
                continue  # What the store does not know was not told yet.
            elif (file := files.get(content.inode)) is not None and (file.salvaged or {}).get("content") == content.id:
                self._put_beside(content, file)
            elif (content.inode not in files or content.id in replaced) and holding.delete_unneeded(self._db, content, gone=True):
                self._dropped += 1
                self._notify.wake_lanes()
            elif content.state is ContentState.SEALED:
                self._doubt_silent(content, shared)

    def _doubt_silent(self, content: Content, shared: ContentLocations) -> None:
        """Nodes that live and said once that they have a copy, and in the store say so no more: it went bad, or with its tier."""
        said = {copy.node for copy in shared.copies if (copy.generation, copy.digest) == (content.generation, content.digest)}
        silent = [node.number for node in self._around.list_live(peers.list_holders(self._db, content)) if node.number not in said]
        if silent:
            peers.delete_unconfirmed_copies(self._db, content, silent)
            self._notify.wake_lanes()

    def _put_beside(self, content: Content, file: SharedFile) -> None:
        """Others took what is here for lost, and show a former content. Where the file was written since, both stay."""
        missed = file.salvaged or {}
        if file.active_salvage is not None or (file.content, file.value["generation"]) == (content.id, content.generation):
            return
        label = self._around.view().by_number[self._around.node_number].name
        name = falling_back.insert_conflict_copy(self._db, content, {**file.value, "missed_mtime_ns": missed["mtime_ns"]}, label)
        if name is not None:
            log.info("what others missed and wrote anew is beside it, as %s", os.fsdecode(name))

    def _drop_older(self) -> None:
        """Former generations that lend their blocks to nobody, once what came after them is safe, as the store says."""
        self._learn_of_older()
        before_ns = time.time_ns() - _ns(limits.SPARE_KEPT_S)
        for tier in LOCAL:
            if tier not in self._places:
                continue
            for number in holding.list_stale(self._db, tier, before_ns, BATCH_CONTENTS):
                settling.delete_copy(self._db, number, tier)
                removal.remove_forgotten(self._db, self._places[tier], number)

    def _learn_of_older(self) -> None:
        """What came after them may be elsewhere by now, or the file may be gone, or hold another content that is."""
        after = 0
        while batch := holding.list_only_stale(self._db, after, BATCH_CONTENTS):
            after = batch[-1].id
            batch, told, files = self._ask(batch)
            replaced = self._sealed_successors(batch, told, files)
            for content in batch:
                if content.inode not in files or content.id in replaced:
                    self._drop(content)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
