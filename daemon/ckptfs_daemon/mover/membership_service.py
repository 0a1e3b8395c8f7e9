"""This node's membership: keeps its lease, follows the others' records, tells the flows of changes.

Two tasks call the store, each in its own thread: one renews the lease, one watches the records. Both feed the member table. A third task
turns it into views a moment later, so that many joins at once are one change. While the store does not answer, the last view stays; the
catalog keeps it too, for a mover that starts meanwhile. Failures are reported as those of lanes are, and retried for ever.

Crash safety: the lease expires unless the next mover starts in time; that one takes a new lease and reads all records again.
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
from ckptfs.clique import membership
from ckptfs.clique.cluster import ClusterLocks
from ckptfs.clique.membership import ClusterView, MemberTable, NameTaken, Node, NodeLease, ViewChange
from ckptfs.config import Config
from ckptfs.errors import CATALOG_FAILURES, CkptfsError, Compacted, StoreUnreachable
from ckptfs.store.kv import Store, WatchEvents

log = logging.getLogger(__name__)

TROUBLE = "cluster"
Report = Callable[[str, Mapping[str, Any] | None], None]
ViewListener = Callable[[ViewChange], None]


def record_node_start(config: Config, db: Database, number: int, capacity_bytes: int) -> Node:
    """Record a new start of this node; return its record."""
    rank = number if config.rank is None else config.rank
    incarnation = f"{identity.get_catalog_id(db)[:8]}.{identity.record_start(db)}"
    return Node(number, config.node, config.address, rank, config.failure_domain, capacity_bytes, incarnation)


class MembershipService:
    """This node's membership. `view`, `is_connected` and `locks` may be used by any thread."""

    def __init__(self, db: Database, store: Store, node: Node, report: Report, *, is_member: bool = True) -> None:
        """`report(key, value)` publishes a failure in the catalog. It is called in a worker thread.

        A node that is no member sees the others, and they do not see it.
        """
        self.number = node.number
        self.node_lease = NodeLease(store, node, identity.get_catalog_id(db), is_member=is_member)
        self.locks = ClusterLocks(store, self.node_lease)
        self._db, self._store, self._report = db, store, report
        cached_nodes = (membership.decode_node(record) for record in identity.list_last_members(db))
        self._member_table = MemberTable(node, (one for one in cached_nodes if one is not None))
        self.view = self._member_table.build_view()  # The newest known view. This node is always alive in it.
        self._view_listeners: list[ViewListener] = []
        self._view_may_change = trio.Event()
        self.on_lease_renewed: Callable[[int], None] = lambda _: None
        """Called with the lease after each renewal, in the trio thread."""
        self._watch_backoff = Backoff()
        self._has_read = False
        self.view_loaded = trio.Event()
        """Set once the view comes from the store. Before that, a new node knows no other node."""
        self._trouble = ""

    @property
    def is_connected(self) -> bool:
        """True if the store answers."""
        return self._member_table.is_connected

    def subscribe(self, listener: ViewListener) -> None:
        """Call `listener` after each change, in the trio thread."""
        self._view_listeners.append(listener)

    async def run(self) -> None:
        """Run until cancelled. The record stays until its lease expires, so a quick restart is no absence."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_lease_loop, name="lease")
            nursery.start_soon(self._run_watch_loop, name="watch")
            nursery.start_soon(self._run_view_loop, name="view")

    # --- lease -------------------------------------------------------------------------------------------------------

    async def _run_lease_loop(self) -> None:
        backoff = Backoff()
        while True:
            try:
                is_new = await _run_in_thread(self.node_lease.renew)
                self.on_lease_renewed(self.node_lease.lease_id)
                if is_new:
                    log.info("in the cluster as node %s, number %d", self.node_lease.node.name, self.number)
                self._record_store_answer()
                await self._clear_trouble()
                backoff.reset()
                await trio.sleep(limits.NODE_LEASE_RENEW_S * random.uniform(0.8, 1.0))
            except CkptfsError as failure:
                await self._record_trouble(failure)
                await trio.sleep(limits.NODE_LEASE_RENEW_S if isinstance(failure, NameTaken) else backoff.next_delay_s())

    # --- watch -------------------------------------------------------------------------------------------------------

    async def _run_watch_loop(self) -> None:
        while True:
            try:
                nodes, revision = await _run_in_thread(lambda: membership.load_nodes(self._store))
                self._member_table.replace_nodes(nodes, trio.current_time())
                self._has_read = True
                self._record_store_answer()
                await self._watch_nodes(revision + 1)
            except Compacted:
                log.debug("etcd: compacted revisions that were not read; reading all nodes again")
            except CkptfsError as failure:
                await self._record_trouble(failure)
            await trio.sleep(self._watch_backoff.next_delay_s())

    async def _watch_nodes(self, revision: int) -> None:
        """Apply every change from that revision on, until the watch ends."""
        with contextlib.closing(self._store.watch(membership.NODES_PREFIX, membership.NODES_END, revision)) as watch:
            while (events := await _run_in_thread(lambda: next(watch, None))) is not None:
                self._apply_events(events)

    def _apply_events(self, batch: WatchEvents) -> None:
        self._watch_backoff.reset()
        for event in batch.events:
            if event.item is None:
                with contextlib.suppress(ValueError):  # The key is not that of a record.
                    self._member_table.mark_gone(int(event.key[len(membership.NODES_PREFIX) :], 16), trio.current_time())
            elif (node := membership.decode_node(event.item.value)) is not None:
                self._member_table.mark_alive(node)
                self.node_lease.record_seen_node(node, event.revision)
        self._view_may_change.set()

    # --- view --------------------------------------------------------------------------------------------------------

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
        change = ViewChange(self.view, now)
        if now == change.before:
            return
        self.view = now
        for words, nodes in (("died", change.dead_nodes), ("joined", change.joined_nodes), ("was started again", change.restarted_nodes)):
            for node in nodes[: limits.NODES_NAMED_MAX]:
                log.info("node %s %s", node.name, words)
        for listener in self._view_listeners:
            listener(change)
        with contextlib.suppress(*CATALOG_FAILURES):
            await _run_in_thread(lambda: identity.record_last_members(self._db, [membership.encode_node(node) for node in now.nodes]))

    # --- failures ----------------------------------------------------------------------------------------------------

    def _record_store_answer(self) -> None:
        self._member_table.mark_connected(trio.current_time())
        self._view_may_change.set()

    async def _clear_trouble(self) -> None:
        if self._trouble:
            await _run_in_thread(lambda: self._report(TROUBLE, None))
            log.info("etcd: answers again")
            self._trouble = ""

    async def _record_trouble(self, failure: CkptfsError) -> None:
        if isinstance(failure, StoreUnreachable):
            self._member_table.mark_disconnected()
        if str(failure) == self._trouble or (self._trouble and type(failure) is StoreUnreachable):
            return
        self._trouble = str(failure)
        remedy = failure.remedy or "nothing is lost meanwhile; see that etcd runs and can be reached"
        log.warning("%s; this node goes on with what it knows of the others (%s)", failure, remedy)
        with contextlib.suppress(*CATALOG_FAILURES):
            await _run_in_thread(lambda: self._report(TROUBLE, {"what": str(failure), "path": "", "remedy": remedy}))


class Backoff:
    """Growing delays between retries, randomized so that nodes do not retry in step."""

    def __init__(self) -> None:
        self._s = 0.0

    def reset(self) -> None:
        self._s = 0.0

    def next_delay_s(self) -> float:
        self._s = min(max(2 * self._s, limits.RETRY_FIRST_S), limits.NODE_LEASE_RENEW_S)
        return self._s * random.uniform(0.5, 1.0)


async def _run_in_thread(act: Callable[[], Any]) -> Any:
    return await trio.to_thread.run_sync(act, abandon_on_cancel=True)
