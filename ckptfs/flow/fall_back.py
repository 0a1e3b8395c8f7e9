"""Takes: files whose content was on a node that died, and on no other, and of which the former content lies here (catalog/former.py).
Leaves: the former content as what the file holds, and in `inode.missed` what it should hold; that again when its writer returns with it.
If we die here: the store was told all of it or nothing; the next mover looks through everything once.

Each decision is one transaction of the store that compares all it rests on, so of several holders one decides, and whoever writes the
file meanwhile wins. What was written since then stays, and what was missed is put beside it by its writer, which alone has it.
"""

import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from ckptfs import disk, limits
from ckptfs.catalog import holding, report, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import falling_back
from ckptfs.catalog.store import Compare, Get, Item, Put, Store, Target
from ckptfs.clique import holders
from ckptfs.clique.holders import File, Shared
from ckptfs.clique.membership import World
from ckptfs.clique.peers import PeerFailed, PeerRefused
from ckptfs.clique.surroundings import Surroundings
from ckptfs.model import Content, Notify

log = logging.getLogger(__name__)

disk.labels("fallback:shown")

BATCH_CONTENTS = holders.LOOKED_AT_MAX // 2


class FallBack:
    """Looks through what lies here whenever the world has changed, and again while something is not decided. One batch a step."""

    def __init__(self, db: Database, notify: Notify, around: Surroundings) -> None:
        self._db = db
        self._notify = notify
        self._around = around
        self._seen: World | None = None
        self._after: int | None = None
        self._undecided: set[int] = set()
        self._returning = False
        self._look_s = 0.0

    def step(self) -> bool:
        """True: there is more to look through. Raises Unreachable; then the same batch comes again."""
        world = self._around.see()
        if self._around.factor < 2:
            return False
        if world is not self._seen:
            self._after, self._returning, self._seen = 0, True, world
        if self._after is not None:
            batch = holding.sealed_after(self._db, self._after, BATCH_CONTENTS)
            self._look_at(batch, world)
            self._after = batch[-1].id if batch else None
            return True
        if time.monotonic() >= self._look_s:
            self._look_s = time.monotonic() + limits.FALL_BACK_LOOK_S
            again = [found for number in sorted(self._undecided)[:BATCH_CONTENTS] if (found := settling.content(self._db, number))]
            self._undecided -= {content.id for content in again}
            self._look_at(again, world)
            self._returning = self._returning and self._look_for_what_is_missed(world)
        return False

    def due_s(self) -> float | None:
        """Until the next look at what is not decided."""
        return max(0.0, self._look_s - time.monotonic()) if self._undecided or self._returning else None

    # --- falling back ------------------------------------------------------------------------------------------------

    def _look_at(self, batch: list[Content], world: World) -> None:
        if not batch:
            return
        store = self._around.store
        told = holders.read(store, [content.id for content in batch])
        inodes = {content.id: heard.inode for content in batch if (heard := told[content.id].heard) is not None}
        files = holders.files(store, sorted(set(inodes.values())))
        suspects = [content for content in batch if _may_be_former(content, told[content.id], files.get(inodes.get(content.id, 0)))]
        successors = {content.id: files[inodes[content.id]].content or 0 for content in suspects}
        shared = holders.read(store, sorted(set(successors.values())))
        for content in sorted(suspects, key=lambda one: (told[one.id].former_ns is None, -one.generation)):
            inode, now = inodes[content.id], shared[successors[content.id]]
            if not self._is_safe(inode, now, world):
                if now.lost or now.writer not in world:
                    self._fall_back(inode, files[inode], content, told[content.id], now)
                else:
                    self._undecided.add(content.id)

    def _is_safe(self, inode: int, now: Shared, world: World) -> bool:
        """Whether a living node besides its writer, or the PFS, has what the file holds, or a state of it."""
        if now.heard is None or any(copy.node in world and copy.node != now.writer for copy in now.copies):
            return True
        shown = holders.shown_generation(self._around.store, inode)
        return shown is not None and shown >= now.heard.generation

    def _fall_back(self, inode: int, file: File, content: Content, told: Shared, now: Shared) -> None:
        missed = {
            "content": file.content, "node": now.writer, "generation": file.value["generation"], "mtime_ns": file.value["mtime_ns"],
            "shows": content.id, "shown": content.generation,
        }  # fmt: skip
        mtime_ns = file.value["mtime_ns"] if told.former_ns is None else told.former_ns
        shows = {"content": content.id, "generation": content.generation, "size": content.size, "mtime_ns": mtime_ns}
        value = {**file.value, **shows, "ctime_ns": time.time_ns(), "missed": _packed(missed).decode()}
        owned = falling_back.owned(content, inode, self._around.number)
        items = [file.item, *_of_content(told.items), *_of_content(now.items)]
        revision = _agreed(self._around.store, items, [(file.item.key, value), (holders.content_key(content.id), owned)])
        if not revision:
            self._undecided.add(content.id)
            return
        disk.act("fallback:shown", lambda: None)
        falling_back.shown(self._db, content, inode, (value, owned), revision)
        self._report(inode, file, now)
        self._notify.work()

    def _report(self, inode: int, file: File, now: Shared) -> None:
        name = os.fsdecode(report.path_of(self._db, inode))
        if name == "?":
            name = "/".join(str(part) for _, part in file.value["names"][:1])
        node = now.writer
        log.warning("%s shows its former content: the newer one is lost with node %s, which alone had it", name, node)
        what = f"the file shows its former content: the newer one is lost with node {node}, unless that returns with it"
        remedy = "start that node again without wiping its RAM, or go on with the former content"
        settling.report(self._db, _trouble(inode), {"what": what, "path": name, "remedy": remedy})

    # --- when the writer returns ---------------------------------------------------------------------------------------

    def _look_for_what_is_missed(self, world: World) -> bool:
        """Ask writers that live for what is missed. True: something is not decided."""
        left = False
        for inode, raw in falling_back.missed(self._db):
            missed = json.loads(raw)
            file = holders.files(self._around.store, [inode]).get(inode)
            if file is None or file.missed != missed:
                if file is None:
                    falling_back.forget(self._db, inode)
                else:
                    falling_back.take_over(self._db, inode, file.value, file.item.mod_revision)
                settling.report(self._db, _trouble(inode), None)
            elif missed["node"] in world:
                left = not self._decide(inode, file, missed, world) or left
        return left

    def _decide(self, inode: int, file: File, missed: dict[str, Any], world: World) -> bool:
        """Show again what was missed, when its writer has it and the file was not written since. False: later."""
        node = world.by_number[missed["node"]]
        value = {name: held for name, held in file.value.items() if name != "missed"}
        written = (file.content, file.value["generation"]) != (missed["shows"], missed["shown"])
        if written:
            return True  # The writer puts it beside: see `Reconcile`.
        try:
            record = self._around.peers.seal_soon(node, missed["content"], limits.SEAL_ASKED_S)
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
        falling_back.take_over(self._db, inode, value, revision)
        settling.report(self._db, _trouble(inode), None)
        log.info("%s has returned with what %s should hold", node.name, os.fsdecode(report.path_of(self._db, inode)))
        return True


def _may_be_former(content: Content, told: Shared, file: File | None) -> bool:
    """Whether the file of a content that lies here holds another one by now."""
    heard = told.heard
    if heard is None or file is None or file.content in (None, content.id):
        return False
    return (heard.generation, heard.digest) == (content.generation, content.digest) and (file.missed or {}).get("content") != content.id


def _of_content(items: Sequence[Item]) -> list[Item]:
    return [item for item in items if item.key.startswith(b"c/")]


def _agreed(store: Store, compared: Sequence[Item], puts: Sequence[tuple[bytes, dict[str, Any]]]) -> int:
    """Put these while all that was compared is as it was read; the revision, 0 when something has changed."""
    compares = [Compare(item.key, Target.MOD, "=", item.mod_revision) for item in compared]
    outcome = store.commit(compares, [Put(key, _packed(value)) for key, value in puts], [Get(item.key) for item in compared])
    return outcome.revision if outcome.succeeded else 0


def _packed(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _trouble(inode: int) -> str:
    return f"trouble:former:{inode:016x}"
