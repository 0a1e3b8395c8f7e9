"""Takes: files whose content was on a node that died, and on no other, and of which a former one lies here: what the file held before it
was written anew (catalog/former.py), or the same content before it was changed in place (an OLDER copy, catalog/holding.py). Wants of the
kind 'left': somebody opens such a file, and no node that lives has any of it. What the PFS has may be of the file that was there before.
Leaves: the former content as what the file holds, or what the PFS shows where that is newer or all that is left; and in `inode.missed` what
it should hold; that again when its writer returns with it.
If we die here: the store was told all of it or nothing; the next mover looks through everything once.

A generation of a content that was changed in place becomes a content of its own, so that its writer may return with the newer one. Each
decision is one transaction of the store that compares all it rests on, so of several holders one decides, and whoever writes the file
meanwhile wins. What was written since then stays, and what was missed is put beside it by its writer, which alone has it.
"""

import errno
import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from ckptfs import disk, limits
from ckptfs.catalog import aside, epoch, fetching, holding, report, settling, wants
from ckptfs.catalog.database import Database
from ckptfs.catalog.holding import HeldCopy, RemoteState
from ckptfs.catalog.sharing import falling_back, kinds
from ckptfs.catalog.sharing.kinds import INODE, PFS_STATE, SharedKey
from ckptfs.catalog.store import Compare, CompareTarget, Delete, Get, Item, Operation, Put, Store
from ckptfs.clique import holders
from ckptfs.clique.holders import ContentLocations, SharedFile, SharedPfsState
from ckptfs.clique.membership import ClusterView
from ckptfs.clique.peers import PeerFailed, PeerRefused
from ckptfs.clique.surroundings import Cluster
from ckptfs.errors import DigestMismatch
from ckptfs.model import Content, ContentState, Notifier
from ckptfs.tiers import older, removal
from ckptfs.tiers.place import Places

log = logging.getLogger(__name__)

disk.declare_labels("fallback:shown", "fallback:pfs")

BATCH_CONTENTS = holders.LOAD_CONTENTS_MAX // 2


class FallBack:
    """Looks through what lies here whenever the world has changed, and again while something is not decided. One batch a step."""

    def __init__(self, db: Database, places: Places, notify: Notifier, around: Cluster) -> None:
        self._db = db
        self._places = places
        self._notify = notify
        self._around = around
        self._seen: ClusterView | None = None
        self._after: int | None = None
        self._undecided: set[int] = set()
        self._returning = False
        self._look_s = 0.0
        self._since_s = 0.0

    def step(self) -> bool:
        """True: there is more to look through. Raises Unreachable; then the same batch comes again."""
        world = self._around.view()
        if epoch.is_recently_lost(self._db):
            return False
        if world is not self._seen:
            self._after, self._returning, self._seen, self._since_s = 0, True, world, time.monotonic()
        if self._around.factor < 2:
            self._after = None  # Nobody holds anything for others; the PFS has what it has.
        if self._after is not None:
            batch = holding.list_held_copies(self._db, self._after, BATCH_CONTENTS)
            self._look_at(batch, world)
            self._after = batch[-1].content.id if batch else None
            self._undecided |= aside.list_stashed_contents(self._db)
            return True
        self._answer_all(world)
        if time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + limits.FALL_BACK_LOOK_S
            numbers = sorted(self._undecided)[:BATCH_CONTENTS]
            self._undecided -= set(numbers)
            self._look_at([found for number in numbers if (found := holding.find_held_copy(self._db, number)) is not None], world)
            self._undecided |= aside.list_stashed_contents(self._db)
            self._returning = self._returning and self._look_for_what_is_missed(world)
        return False

    def next_due_s(self) -> float | None:
        """Until the next look at what is not decided; nothing is decided while nodes tell a store anew that has lost its data."""
        if epoch.is_recently_lost(self._db):
            return limits.FALL_BACK_LOOK_S
        waiting = self._undecided or self._returning or wants.list_open(self._db, wants.SALVAGE, at_most=1)
        return max(0.0, self._look_s - time.monotonic()) if waiting else None

    # --- falling back ------------------------------------------------------------------------------------------------

    def _look_at(self, batch: list[HeldCopy], world: ClusterView) -> None:
        if not batch:
            return
        store = self._around.store
        told = holders.load(store, [kept.content.id for kept in batch])
        inodes = {number: one.state.inode for number, one in told.items() if one.state is not None}
        files = holders.load_files(store, sorted(set(inodes.values())))
        suspects = [kept for kept in batch if _may_be_left(kept, told[kept.content.id], files.get(inodes.get(kept.content.id, 0)))]
        successors = {kept.content.id: files[inodes[kept.content.id]].expected_state["content"] or 0 for kept in suspects}
        shared = holders.load(store, sorted(set(successors.values())))
        for kept in sorted(suspects, key=lambda one: (told[one.content.id].superseded_mtime_ns is None, -one.generation)):
            number = kept.content.id
            inode, one, now = inodes[number], told[number], shared[successors[number]]
            if self._is_shown_by_us(kept, one, files[inode]):
                self._finish(kept.content, inode, files[inode], one)
                continue
            on_pfs = holders.load_pfs_state(store, inode)
            if self._is_safe(on_pfs, now, world, itself=successors[number] == number):
                continue
            if (not now.is_lost and now.writer in world) or self._rivals(kept, one, world):
                self._undecided.add(number)
            elif on_pfs is None or on_pfs.generation <= kept.generation:
                self._show(inode, files[inode], kept, one, now)
            elif not self._show_pfs(inode, files[inode], on_pfs, now):
                self._undecided.add(number)

    def _is_safe(self, on_pfs: SharedPfsState | None, now: ContentLocations, world: ClusterView, *, itself: bool) -> bool:
        """Whether a living node besides its writer, or the PFS, has what the file holds; or, of another content than the one that lies
        here, a state of it. What an open file held last nobody can know, and its writer, while it lives, goes on.
        """
        heard = now.state
        if heard is None or (itself and heard.is_open and not now.is_lost and now.writer in world):
            return True
        living = [copy for copy in now.copies if copy.node in world and copy.node != now.writer]
        if any(not itself or _is_it(copy.generation, copy.digest, heard) for copy in living):
            return True
        return on_pfs is not None and on_pfs.generation >= heard.generation and (on_pfs.is_complete or not itself)

    def _rivals(self, kept: HeldCopy, told: ContentLocations, world: ClusterView) -> bool:
        """Whether another node that lives has a newer generation of it, or may have and did not say so yet."""
        newest, _ = told.get_newest([node.number for node in world.nodes if node.number != self._around.node_number])
        if newest > kept.generation:
            return True
        young = time.monotonic() - self._since_s < limits.FALL_BACK_RIVALS_S
        return young and told.replicated_before is not None and told.replicated_before[0] > kept.generation

    def _show(self, inode: int, file: SharedFile, kept: HeldCopy, told: ContentLocations, now: ContentLocations) -> None:
        """Let the file hold what lies here, if the store agrees."""
        heard, content = told.state, kept.content
        if heard is not None and _is_it(kept.generation, kept.digest, heard):
            if not self._fall_back(inode, file, content, told, now):
                self._undecided.add(content.id)
            return
        try:
            made = older.apart(self._db, self._places, kept, inode)
        except (OSError, DigestMismatch) as failure:
            log.error("what is left of %s cannot be shown: %s", self._name(inode, file), failure)
            made = None
        if made is None:
            self._undecided.add(content.id)
        elif self._fall_back(inode, file, made, told, now):
            settling.delete_copy(self._db, content.id, kept.tier)
            removal.remove_forgotten(self._db, self._places[kept.tier], content.id)
        else:
            settling.set_state(self._db, made.id, ContentState.DOOMED)
            self._undecided.add(content.id)

    def _fall_back(self, inode: int, file: SharedFile, content: Content, told: ContentLocations, now: ContentLocations) -> bool:
        missed = _missed(file, now, content.id, content.generation)
        shows = {"content": content.id, "generation": content.generation, "size": content.size, "mtime_ns": _mtime_ns(content, told, file)}
        value = {**file.value, **shows, "ctime_ns": time.time_ns(), "missed": kinds.encode_fields(missed).decode()}
        owned = falling_back.build_content_value(content, inode, self._around.node_number)
        items = {item.key: item for item in (file.item, *told.items, *_of_content(now.items))}
        revision = _agreed(
            self._around.store, list(items.values()), [(file.item.key, value), (holders.build_content_key(content.id), owned)]
        )
        if not revision:
            return False
        disk.act("fallback:shown", lambda: None)
        falling_back.record_previous_shown(self._db, content, inode, (value, owned), revision)
        self._report(inode, file, now)
        self._notify.wake_lanes()
        return True

    # --- falling back to the PFS --------------------------------------------------------------------------------------

    def _answer_all(self, world: ClusterView) -> None:
        """Decide for those who wait for it; what cannot be decided yet stays to be asked."""
        for want in wants.list_open(self._db, wants.SALVAGE, at_most=BATCH_CONTENTS):
            shown = self._is_left_on_pfs(want.inode, world)
            if shown is not None:
                wants.mark_done(self._db, want.id) if shown else wants.mark_failed(self._db, want.id, errno.EIO)
                self._notify.wake_lanes()

    def _is_left_on_pfs(self, inode: int, world: ClusterView) -> bool | None:
        """Have the file show what the PFS has of it, when no node that lives has any newer state. None: that is not certain yet.

        A node that has one, and did not say so in that time, shows it all the same when it comes to it: see `_may_be_left`.
        """
        store = self._around.store
        file, on_pfs = holders.load_files(store, [inode]).get(inode), holders.load_pfs_state(store, inode)
        if file is None:
            return False
        if file.content is None or file.content != fetching.get_content_id(self._db, inode):
            return on_pfs is not None and self._learn(inode, file, on_pfs)
        on_pfs = on_pfs or holders.find_replaced_pfs_state(store, inode, file)
        if on_pfs is None:
            return False
        now = holders.load(store, [file.content])[file.content]
        if now.state is None or (not now.is_lost and now.writer in world) or now.state.generation < on_pfs.generation:
            return False
        newer = on_pfs.generation + on_pfs.is_complete
        if any(copy.node in world and copy.generation >= newer and copy.node != now.writer for copy in now.copies):
            return False
        if time.monotonic() - self._since_s < limits.FALL_BACK_RIVALS_S:
            return None
        return self._show_pfs(inode, file, on_pfs, now) or None

    def _learn(self, inode: int, file: SharedFile, on_pfs: SharedPfsState) -> bool:
        """Another node was faster."""
        told = [(PFS_STATE, on_pfs.value, on_pfs.item), (INODE, file.value, file.item)]
        falling_back.record_pfs_shown(self._db, [(SharedKey(kind, inode), value, item.mod_revision) for kind, value, item in told])
        self._notify.invalidate_inode(inode)
        return True

    def _show_pfs(self, inode: int, file: SharedFile, on_pfs: SharedPfsState, now: ContentLocations) -> bool:
        """Let the file show what the PFS has of it, if the store agrees; what was fsynced of an open file is the whole of it now."""
        if on_pfs.in_hand:
            return False
        missed = _missed(file, now, None, on_pfs.generation)
        shows = {"content": None, "generation": on_pfs.generation, "size": on_pfs.size, "mtime_ns": on_pfs.mtime_ns}
        value = {**file.value, **shows, "ctime_ns": time.time_ns(), "missed": kinds.encode_fields(missed).decode()}
        puts = [*on_pfs.build_puts(inode, complete=True), (file.item.key, value)]
        revision = _agreed(self._around.store, [file.item, on_pfs.item, *on_pfs.rests_on, *now.items], puts)
        if not revision:
            return False
        disk.act("fallback:pfs", lambda: None)
        known = [] if on_pfs.replaces else [(SharedKey(PFS_STATE, inode), on_pfs.value, on_pfs.item.mod_revision)]
        falling_back.record_pfs_shown(self._db, [*known, *((kinds.decode_key(key), said, revision) for key, said in puts)])
        self._returning = True
        self._report(inode, file, now)
        self._notify.invalidate_inode(inode)
        return True

    def _is_shown_by_us(self, kept: HeldCopy, told: ContentLocations, file: SharedFile) -> bool:
        """Whether the store was told that the file holds this, and this node died before it wrote that down."""
        return kept.is_current and kept.content.is_remote and told.writer == self._around.node_number and file.content == kept.content.id

    def _finish(self, content: Content, inode: int, file: SharedFile, told: ContentLocations) -> None:
        values = file.value, json.loads(_of_content(told.items)[0].value)
        falling_back.record_previous_shown(
            self._db, content, inode, values, max(file.item.mod_revision, *(item.mod_revision for item in told.items))
        )
        self._notify.wake_lanes()

    def _report(self, inode: int, file: SharedFile, now: ContentLocations) -> None:
        name, node = self._name(inode, file), now.writer
        log.warning("%s shows its former content: the newer one is lost with node %s, which alone had it", name, node)
        what = f"the file shows its former content: the newer one is lost with node {node}, unless that returns with it"
        remedy = "start that node again without wiping its RAM, or go on with the former content"
        settling.set_report(self._db, _trouble(inode), {"what": what, "path": name, "remedy": remedy})

    def _name(self, inode: int, file: SharedFile) -> str:
        name = os.fsdecode(report.get_path(self._db, inode))
        return "/".join(str(part) for _, part in file.value["names"][:1]) if name == "?" else name

    # --- when the writer returns ---------------------------------------------------------------------------------------

    def _look_for_what_is_missed(self, world: ClusterView) -> bool:
        """Ask writers that live for what is missed. True: something is not decided."""
        left = False
        for inode, raw in falling_back.list_salvaged(self._db):
            missed = json.loads(raw)
            file = holders.load_files(self._around.store, [inode]).get(inode)
            if file is None or file.salvaged != missed:
                if file is None:
                    falling_back.delete_salvage_record(self._db, inode)
                else:
                    falling_back.apply_inode_value(self._db, inode, file.value, file.item.mod_revision)
                settling.set_report(self._db, _trouble(inode), None)
            elif missed["node"] in world:
                left = not self._decide(inode, file, missed, world) or left
        return left

    def _decide(self, inode: int, file: SharedFile, missed: dict[str, Any], world: ClusterView) -> bool:
        """Show again what was missed, when its writer has it and the file was not written since. False: later."""
        node = world.by_number[missed["node"]]
        value = {name: held for name, held in file.value.items() if name != "missed"}
        if file.active_salvage is None:
            return True  # The writer puts it beside: see `Reconcile`.
        try:
            record = self._around.peers.request_seal(node, missed["content"], limits.SEAL_ASKED_S)
        except PeerRefused:
            return True  # It has lost it, too.
        except PeerFailed:
            return False
        if record is None:
            return False
        shows = {"content": missed["content"], "generation": record.generation, "size": record.size, "mtime_ns": missed["mtime_ns"]}
        value |= {**shows, "ctime_ns": time.time_ns()}
        revision = _agreed(self._around.store, [file.item], [(file.item.key, value)])
        if not revision:
            return False
        holding.record_remote(self._db, RemoteState(record.content, inode, record.generation, record.size, record.digest, record.blocks))
        falling_back.record_salvage_undone(self._db, inode, value, revision, node.number)
        self._notify.wake_lanes()
        settling.set_report(self._db, _trouble(inode), None)
        log.info("%s has returned with what %s should hold", node.name, os.fsdecode(report.get_path(self._db, inode)))
        return True


def _may_be_left(kept: HeldCopy, told: ContentLocations, file: SharedFile | None) -> bool:
    """Whether the file of a content that lies here holds another one by now, or a later generation of it."""
    heard = told.state
    if heard is None or file is None or (file.content is None and file.pfs_generation is None):
        return False
    if file.pfs_generation is not None and kept.generation <= file.pfs_generation:
        return False
    if not _is_it(kept.generation, kept.digest, heard):
        return heard.digest is None or kept.generation < heard.generation
    if file.content == kept.content.id:
        return kept.content.is_remote and kept.is_current  # It may be this node's by now: see `_is_shown_by_us`.
    return (file.salvaged or {}).get("content") != kept.content.id


def _missed(file: SharedFile, now: ContentLocations, shows: int | None, shown: int) -> dict[str, Any]:
    """What `inode.missed` shall say (catalog/sharing/falling_back.py)."""
    return {"node": now.writer, **file.expected_state, "shows": shows, "shown": shown}


def _is_it(generation: int, digest: bytes, heard: RemoteState) -> bool:
    """Whether this generation is what was heard of a content: of one that was closed and not sealed the digest is not known."""
    return generation == heard.generation and (heard.digest == digest if heard.digest is not None else not heard.is_open)


def _mtime_ns(content: Content, told: ContentLocations, file: SharedFile) -> int:
    """The file's time of change when it held this, as far as that is known."""
    heard = told.state
    if told.replicated_before is not None and told.replicated_before[0] == content.generation:
        return told.replicated_before[1]
    if told.superseded_mtime_ns is not None and heard is not None and heard.generation == content.generation:
        return told.superseded_mtime_ns
    return int(file.value["mtime_ns"])


def _of_content(items: Sequence[Item]) -> list[Item]:
    return [item for item in items if item.key.startswith(b"c/")]


def _agreed(store: Store, compared: Sequence[Item], puts: Sequence[tuple[bytes, dict[str, Any] | None]]) -> int:
    """Put these, None: delete it, while all that was compared is as it was read; the revision, 0 when something has changed."""
    compares = [Compare(item.key, CompareTarget.MOD, "=", item.mod_revision) for item in compared]
    changes: list[Operation] = [Delete(key) if value is None else Put(key, kinds.encode_fields(value)) for key, value in puts]
    outcome = store.commit(compares, changes, [Get(item.key) for item in compared])
    return outcome.revision if outcome.succeeded else 0


def _trouble(inode: int) -> str:
    return f"trouble:former:{inode:016x}"
