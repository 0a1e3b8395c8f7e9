"""Owns this node's membership, in the mover: keeps its lease, follows the records of the others, and tells the flows how the World changed.

Two tasks ask the store, each in a thread of its own: one beats, one follows. What they learn comes together in a Roster, and a third one
makes Worlds of it, a moment later, so that many joins at once are one change. While the store does not answer, the last World stays; the
catalog keeps it too, for a mover that starts meanwhile. Trouble is reported as the lanes do, and tried again for ever.
If we die here: the lease runs out unless the next mover is there before; it takes another one and follows anew.
"""

import contextlib
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

import trio

from ckptfs import limits
from ckptfs.catalog import belonging
from ckptfs.catalog.database import Database
from ckptfs.catalog.store import Store, Watch, WatchEvents
from ckptfs.clique.claims import Claims
from ckptfs.clique.joining import NameTaken
from ckptfs.clique.membership import NODES, NODES_END, Change, Node, World, from_value, read_nodes, to_value
from ckptfs.clique.presence import Presence
from ckptfs.clique.roster import Roster
from ckptfs.config import Config
from ckptfs.errors import CkptfsError, Compacted, Unreachable

log = logging.getLogger(__name__)

TROUBLE = "trouble:cluster"
Report = Callable[[str, Mapping[str, Any] | None], None]
Told = Callable[[Change], None]


def describe(config: Config, db: Database, number: int, capacity_bytes: int) -> Node:
    """This node, as it begins now."""
    rank = number if config.rank is None else config.rank
    incarnation = f"{belonging.catalog_id(db)[:8]}.{belonging.begin(db)}"
    return Node(number, config.node, config.address, rank, config.failure_domain, capacity_bytes, incarnation)


class Member:
    """This node among the others. `world`, `in_touch` and `claims` may be used by any thread."""

    def __init__(self, db: Database, store: Store, node: Node, report: Report) -> None:
        """`report(key, value)` tells people what fails; it is called in a worker thread."""
        self.number = node.number
        self.presence = Presence(store, node, belonging.catalog_id(db))
        self.claims = Claims(store, self.presence)
        self._db, self._store, self._report = db, store, report
        kept = (from_value(record) for record in belonging.last_world(db))
        self._roster = Roster(node, (one for one in kept if one is not None))
        self._world = self._roster.world()
        self._told: list[Told] = []
        self._news = trio.Event()
        self._kept: Callable[[int], None] = lambda _: None
        self._has_read = False
        self.met = trio.Event()
        """Set once the World is what the store shows: before that, nobody is known to a node that is new."""
        self._trouble = ""

    @property
    def world(self) -> World:
        """The newest that is known; this node always lives in it."""
        return self._world

    @property
    def in_touch(self) -> bool:
        """Whether the store answers."""
        return self._roster.in_touch

    def subscribe(self, told: Told) -> None:
        """Call `told` after each change, in the trio thread."""
        self._told.append(told)

    def tell_lease(self, kept: Callable[[int], None]) -> None:
        """Call `kept` with the lease whenever it was kept, in the trio thread."""
        self._kept = kept

    async def run(self) -> None:
        """Until cancelled. The record stays until its lease runs out: a node that is started again at once was never away."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat, name="beat")
            nursery.start_soon(self._follow, name="follow")
            nursery.start_soon(self._settle, name="settle")

    # --- living ------------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        pauses = Pauses()
        while True:
            try:
                anew = await _in_thread(self.presence.beat)
                self._kept(self.presence.lease)
                if anew:
                    log.info("in the cluster as node %s, number %d", self.presence.node.name, self.number)
                self._answered()
                await self._well()
                pauses.over()
                await trio.sleep(limits.NODE_BEAT_S * random.uniform(0.8, 1.0))
            except CkptfsError as failure:
                await self._failed(failure)
                await trio.sleep(limits.NODE_BEAT_S if isinstance(failure, NameTaken) else pauses.next_s())

    # --- following ---------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        pauses = Pauses()
        while True:
            try:
                nodes, revision = await _in_thread(lambda: read_nodes(self._store))
                self._roster.read(nodes, trio.current_time())
                self._has_read = True
                self._answered()
                pauses.over()
                await self._watch(revision + 1)
            except Compacted:
                log.debug("the store has forgotten what we had not read; reading all nodes again")
            except CkptfsError as failure:
                await self._failed(failure)
            await trio.sleep(pauses.next_s())

    async def _watch(self, revision: int) -> None:
        """Every change from that revision on, until the watch ends."""
        watch = self._store.watch(NODES, NODES_END, revision)
        try:
            while (told := await _in_thread(lambda: _next(watch))) is not None:
                self._take(told)
        finally:
            watch.close()

    def _take(self, told: WatchEvents) -> None:
        for event in told.events:
            if event.item is None:
                with contextlib.suppress(ValueError):  # Somebody put there what is no record.
                    self._roster.gone(int(event.key[len(NODES) :], 16), trio.current_time())
            elif (node := from_value(event.item.value)) is not None:
                self._roster.lives(node)
                self.presence.seen(node, event.revision)
        self._news.set()

    # --- telling -----------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        while True:
            due_s = self._roster.due_s()
            with trio.move_on_at(float("inf") if due_s is None else due_s):
                await self._news.wait()
            await trio.sleep(limits.WORLD_GATHER_S)
            self._news = trio.Event()
            self._roster.settle(trio.current_time())
            await self._become(self._roster.world())
            if self._has_read:
                self.met.set()

    async def _become(self, now: World) -> None:
        change = Change(self._world, now)
        if now == change.before:
            return
        self._world = now
        for words, nodes in (("died", change.died), ("joined", change.joined), ("was started again", change.returned)):
            for node in nodes[: limits.NODES_NAMED_MAX]:
                log.info("node %s %s", node.name, words)
        for told in self._told:
            told(change)
        await _in_thread(lambda: belonging.keep_world(self._db, [to_value(node) for node in now.nodes]))

    # --- trouble -----------------------------------------------------------------------------------------------------

    def _answered(self) -> None:
        self._roster.answered(trio.current_time())
        self._news.set()

    async def _well(self) -> None:
        if self._trouble:
            log.info("the cluster's etcd answers again")
            self._trouble = ""
            await _in_thread(lambda: self._report(TROUBLE, None))

    async def _failed(self, failure: CkptfsError) -> None:
        if isinstance(failure, Unreachable):
            self._roster.out_of_touch()
        if str(failure) == self._trouble or (self._trouble and isinstance(failure, Unreachable)):
            return
        self._trouble = str(failure)
        remedy = failure.remedy or "nothing is lost meanwhile; see that etcd runs and can be reached"
        log.warning("%s; this node goes on with what it knows of the others (%s)", failure, remedy)
        await _in_thread(lambda: self._report(TROUBLE, {"what": str(failure), "path": "", "remedy": remedy}))


class Pauses:
    """How long to wait before something is tried again: ever longer, and never the same as everybody else."""

    def __init__(self) -> None:
        self._s = 0.0

    def over(self) -> None:
        self._s = 0.0

    def next_s(self) -> float:
        self._s = min(max(2 * self._s, limits.RETRY_FIRST_S), limits.NODE_BEAT_S)
        return self._s * random.uniform(0.5, 1.0)


def _next(watch: Watch) -> WatchEvents | None:
    return next(watch, None)


async def _in_thread(act: Callable[[], Any]) -> Any:
    """In a worker thread, which is left behind when we are cancelled."""
    return await trio.to_thread.run_sync(act, abandon_on_cancel=True)
