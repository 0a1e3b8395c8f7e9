"""The release of chosen sets for the PFS: each node has its own files of them written back (D7).

A review of the tracker chooses a set (`retention_state.CHOSEN_XATTR`), on one node of a cluster. The transaction that publishes the choice
puts a key of the set below `keys.CHOSEN_PREFIX`. All nodes with such a rule watch these keys. A node that sees one reads the set and
releases its own files. What a dead node wrote, the others release when they know that it is dead.

Crash safety: a release is a change of the catalog. The next process reads the keys of all chosen sets again.
"""

import contextlib
import logging
import math
from collections.abc import Iterable

import trio

from ckptfs import limits
from ckptfs.catalog import history, identity, peer_copies, pfs_hold
from ckptfs.catalog.set_members import MANIFEST_NAMES
from ckptfs.coherence import keys
from ckptfs.errors import CkptfsError
from ckptfs_daemon import ipc
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.sets.set_refresh import SetRefresh

log = logging.getLogger(__name__)
RELEASED_TOGETHER_MAX = 16
"""Files of a chosen set that one change releases: they go with their journal rows in one transaction of the store."""


class SetRelease:
    """The task, and the chosen sets of which something is held. Belongs to the trio thread."""

    def __init__(self, context: MountContext, refresh: SetRefresh) -> None:
        self._context, self._refresh = context, refresh
        self._due: set[int] = set()  # Sets to look at now.
        self._left: dict[int, float] = {}
        """Sets of which other nodes had files to release at the last look, and when to see whether they did."""
        self._released: set[int] = set()
        self._live: frozenset[int] = frozenset()
        self._has_due = trio.Event()

    def add(self, chosen: Iterable[int]) -> None:
        """Release these sets, unless that is done."""
        self._due |= set(chosen) - self._released - self._left.keys()
        self._has_due.set()

    def release_moved(self, sealed: Iterable[int]) -> None:
        """Have written back what other nodes moved out of held places while it was open on this node."""
        if not self._context.shared_namespace.is_shared or self._context.db.holds_back is None or self._context.config.pfs is None:
            return
        with self._context.open_files.change() as db:
            moved = [inode for inode in sealed if pfs_hold.release_moved(db, inode)]
        if moved:
            self._context.wake_channel.notify(ipc.WORK)

    async def run(self) -> None:
        """Release until cancelled. A task."""
        if not any(rule.selects_for_pfs for rule in self._context.config.retention):
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._context.shared_namespace.follow_keys, keys.CHOSEN_PREFIX, self._add_keys)
            while True:
                self._has_due = trio.Event()
                self._add_left()
                for directory in sorted(self._due):
                    await self._release(directory)
                with trio.move_on_after(limits.SET_POLL_S):
                    await self._has_due.wait()

    def _add_keys(self, raw_keys: Iterable[bytes]) -> None:
        for raw in raw_keys:
            with contextlib.suppress(ValueError):
                self.add([keys.decode_chosen_key(raw)])

    def _add_left(self) -> None:
        """Look again at what other nodes had to release if one of them is gone, and now and then to forget it."""
        former, self._live = self._live, frozenset(peer_copies.list_live_nodes(self._context.db))
        now_s = math.inf if former - self._live else trio.current_time()
        self._due |= {directory for directory, due_s in self._left.items() if due_s <= now_s}

    async def _release(self, directory: int) -> None:
        """Release what this node or a dead one wrote of a set. It stays due until all its files are known."""
        try:
            if not await self._load(directory):
                return
            is_all = self._release_below(directory)
        except (OSError, CkptfsError) as failure:
            log.debug("chosen set %x: cannot be released yet: %s", directory, failure)
            return
        except Exception:
            log.exception("chosen set %x: cannot be released; trying again in %.0f s", directory, limits.SET_RETRY_MAX_S)
            is_all = False
        self._due.discard(directory)
        self._left.pop(directory, None)
        if is_all:
            self._released.add(directory)
        else:
            self._left[directory] = trio.current_time() + limits.SET_RETRY_MAX_S

    async def _load(self, directory: int) -> bool:
        """Load the files of a set. Return False if the store does not answer or they are not all known."""
        db, shared_namespace = self._context.db, self._context.shared_namespace
        await self._refresh.refresh_way(directory)
        await self._refresh.refresh_set(directory)
        chosen = history.get_set(db, directory)
        files = sum(inode.is_file and path not in MANIFEST_NAMES for path, inode in history.list_files(db, directory))
        return not shared_namespace.is_disconnected and (chosen is None or files >= chosen.record.files)

    def _release_below(self, directory: int) -> bool:
        """Return True if nothing of the set is held any more."""
        db = self._context.db
        own, live = identity.get_node_number(db), peer_copies.list_live_nodes(db)
        held = pfs_hold.list_held_below(db, directory)
        mine = [inode for inode, writer in held if writer in (0, own) or writer not in live]
        for start in range(0, len(mine), RELEASED_TOGETHER_MAX):
            with self._context.open_files.change():
                for inode in mine[start : start + RELEASED_TOGETHER_MAX]:
                    pfs_hold.release(db, inode)
        if mine:
            self._context.wake_channel.notify(ipc.WORK)
        return len(mine) == len(held)
