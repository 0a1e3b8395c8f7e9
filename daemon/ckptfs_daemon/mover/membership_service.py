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
from ckptfs.catalog import identity
from ckptfs.catalog.database import Database
from ckptfs.clique.cluster import ClusterLocks
from ckptfs.clique.membership import (
    NODES_END,
    NODES_PREFIX,
    ClusterView,
    MemberTable,
    NameTaken,
    Node,
    NodeLease,
    ViewChange,
    decode_node,
    encode_node,
    load_nodes,
)
from ckptfs.config import Config
from ckptfs.errors import CkptfsError, Compacted, StoreUnreachable
from ckptfs.store.kv import Store, Watch, WatchEvents

log = logging.getLogger(__name__)

TROUBLE = "trouble:cluster"
Report = Callable[[str, Mapping[str, Any] | None], None]
ViewListener = Callable[[ViewChange], None]


def build_node(config: Config, db: Database, number: int, capacity_bytes: int) -> Node:
    """This node, as it begins now."""
    rank = number if config.rank is None else config.rank
    incarnation = f"{identity.get_catalog_id(db)[:8]}.{identity.record_start(db)}"
    return Node(number, config.node, config.address, rank, config.failure_domain, capacity_bytes, incarnation)


class MembershipService:
    """This node among the others. `world`, `in_touch` and `claims` may be used by any thread."""

    def __init__(self, db: Database, store: Store, node: Node, report: Report) -> None:
        """`report(key, value)` tells people what fails; it is called in a worker thread."""
        self.number = node.number
        self.node_lease = NodeLease(store, node, identity.get_catalog_id(db))
        self.locks = ClusterLocks(store, self.node_lease)
        self._db, self._store, self._report = db, store, report
        cached_nodes = (decode_node(record) for record in identity.list_last_members(db))
        self._member_table = MemberTable(node, (one for one in cached_nodes if one is not None))
        self._view = self._member_table.build_view()
        self._view_listeners: list[ViewListener] = []
        self._view_may_change = trio.Event()
        self._on_lease_renewed: Callable[[int], None] = lambda _: None
        self._has_read = False
        self.view_loaded = trio.Event()
        """Set once the World is what the store shows: before that, nobody is known to a node that is new."""
        self._trouble = ""

    @property
    def view(self) -> ClusterView:
        """The newest that is known; this node always lives in it."""
        return self._view

    @property
    def is_connected(self) -> bool:
        """Whether the store answers."""
        return self._member_table.is_connected

    def subscribe(self, listener: ViewListener) -> None:
        """Call `told` after each change, in the trio thread."""
        self._view_listeners.append(listener)

    def subscribe_lease(self, listener: Callable[[int], None]) -> None:
        """Call `kept` with the lease whenever it was kept, in the trio thread."""
        self._on_lease_renewed = listener

    async def run(self) -> None:
        """Until cancelled. The record stays until its lease runs out: a node that is started again at once was never away."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_lease_loop, name="beat")
            nursery.start_soon(self._run_watch_loop, name="follow")
            nursery.start_soon(self._run_view_loop, name="settle")

    # --- living ------------------------------------------------------------------------------------------------------

    async def _run_lease_loop(self) -> None:
        backoff = Backoff()
        while True:
            try:
                anew = await _run_in_thread(self.node_lease.renew)
                self._on_lease_renewed(self.node_lease.lease_id)
                if anew:
                    log.info("in the cluster as node %s, number %d", self.node_lease.node.name, self.number)
                self._record_store_answer()
                await self._clear_trouble()
                backoff.reset()
                await trio.sleep(limits.NODE_LEASE_RENEW_S * random.uniform(0.8, 1.0))
            except CkptfsError as failure:
                await self._record_trouble(failure)
                await trio.sleep(limits.NODE_LEASE_RENEW_S if isinstance(failure, NameTaken) else backoff.next_delay_s())

    # --- following ---------------------------------------------------------------------------------------------------

    async def _run_watch_loop(self) -> None:
        backoff = Backoff()
        while True:
            try:
                nodes, revision = await _run_in_thread(lambda: load_nodes(self._store))
                self._member_table.replace_nodes(nodes, trio.current_time())
                self._has_read = True
                self._record_store_answer()
                backoff.reset()
                await self._watch_nodes(revision + 1)
            except Compacted:
                log.debug("the store has forgotten what we had not read; reading all nodes again")
            except CkptfsError as failure:
                await self._record_trouble(failure)
            await trio.sleep(backoff.next_delay_s())

    async def _watch_nodes(self, revision: int) -> None:
        """Every change from that revision on, until the watch ends."""
        watch = self._store.watch(NODES_PREFIX, NODES_END, revision)
        try:
            while (events := await _run_in_thread(lambda: _read_events(watch))) is not None:
                self._apply_events(events)
        finally:
            watch.close()

    def _apply_events(self, batch: WatchEvents) -> None:
        for event in batch.events:
            if event.item is None:
                with contextlib.suppress(ValueError):  # Somebody put there what is no record.
                    self._member_table.mark_gone(int(event.key[len(NODES_PREFIX) :], 16), trio.current_time())
            elif (node := decode_node(event.item.value)) is not None:
                self._member_table.mark_alive(node)
                self.node_lease.record_seen_node(node, event.revision)
        self._view_may_change.set()

    # --- telling -----------------------------------------------------------------------------------------------------

    async def _run_view_loop(self) -> None:
        while True:
            due_s = self._member_table.next_due_s()
            with trio.move_on_at(float("inf") if due_s is None else due_s):
                await self._view_may_change.wait()
            await trio.sleep(limits.VIEW_GATHER_S)
            self._view_may_change = trio.Event()
            self._member_table.delete_expired(trio.current_time())
            await self._set_view(self._member_table.build_view())
            if self._has_read:
                self.view_loaded.set()

    async def _set_view(self, now: ClusterView) -> None:
        change = ViewChange(self._view, now)
        if now == change.before:
            return
        self._view = now
        for words, nodes in (("died", change.dead_nodes), ("joined", change.joined_nodes), ("was started again", change.restarted_nodes)):
            for node in nodes[: limits.NODES_NAMED_MAX]:
                log.info("node %s %s", node.name, words)
        for listener in self._view_listeners:
            listener(change)
        await _run_in_thread(lambda: identity.record_last_members(self._db, [encode_node(node) for node in now.nodes]))

    # --- trouble -----------------------------------------------------------------------------------------------------

    def _record_store_answer(self) -> None:
        self._member_table.mark_connected(trio.current_time())
        self._view_may_change.set()

    async def _clear_trouble(self) -> None:
        if self._trouble:
            log.info("the cluster's etcd answers again")
            self._trouble = ""
            await _run_in_thread(lambda: self._report(TROUBLE, None))

    async def _record_trouble(self, failure: CkptfsError) -> None:
        if isinstance(failure, StoreUnreachable):
            self._member_table.mark_disconnected()
        if str(failure) == self._trouble or (self._trouble and isinstance(failure, StoreUnreachable)):
            return
        self._trouble = str(failure)
        remedy = failure.remedy or "nothing is lost meanwhile; see that etcd runs and can be reached"
        log.warning("%s; this node goes on with what it knows of the others (%s)", failure, remedy)
        await _run_in_thread(lambda: self._report(TROUBLE, {"what": str(failure), "path": "", "remedy": remedy}))


class Backoff:
    """How long to wait before something is tried again: ever longer, and never the same as everybody else."""

    def __init__(self) -> None:
        self._s = 0.0

    def reset(self) -> None:
        self._s = 0.0

    def next_delay_s(self) -> float:
        self._s = min(max(2 * self._s, limits.RETRY_FIRST_S), limits.NODE_LEASE_RENEW_S)
        return self._s * random.uniform(0.5, 1.0)


def _read_events(watch: Watch) -> WatchEvents | None:
    return next(watch, None)


async def _run_in_thread(act: Callable[[], Any]) -> Any:
    """In a worker thread, which is left behind when we are cancelled."""
    return await trio.to_thread.run_sync(act, abandon_on_cancel=True)
