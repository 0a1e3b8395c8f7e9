"""Exceptional states of the cluster, as the mount process handles them: lost store data, reintegration, a dead mover.

`ensure_epoch` and `rebuild_if_lost` make sure that this catalog and the store know each other, and start a rebuild if the store has lost
its data. `ReintegrationReader` reads what the resolver of a refused transaction needs. `StandbyLease` keeps the node's lease alive while
the mover restarts (P8): it renews the lease only if the mover has been silent for `STANDBY_AFTER_S`, and for a limited time, because a node
without a mover serves no copies.

Crash safety: a rebuild is recorded after all keys are marked dirty; until then the next process starts it again, which changes nothing in
the store. Without either process the lease expires.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress

import trio

from ckptfs import limits
from ckptfs.catalog import identity, summary
from ckptfs.catalog.database import Database
from ckptfs.clique import membership
from ckptfs.coherence import read, rebuild, reintegrate, store_loss
from ckptfs.coherence.commit import StoreTransaction
from ckptfs.coherence.keys import SharedKey
from ckptfs.coherence.read import StoreValue
from ckptfs.coherence.store_loss import EpochCheckedStore
from ckptfs.errors import CkptfsError, StoreLost, StoreUnreachable
from ckptfs.store.kv import Get, Outcome, Store, prefix_end


async def wait_outcome(future: "Future[Outcome]") -> Outcome:
    """Wait for a future of the store in the trio thread, and return its result."""
    if not future.done():
        token = trio.lowlevel.current_trio_token()
        done = trio.Event()

        def wake(_: object) -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(done.set)

        future.add_done_callback(wake)
        await done.wait()
    else:
        await trio.lowlevel.checkpoint()
    return future.result()


log = logging.getLogger(__name__)
STORE_LOST_KEY = "trouble:store"
STRAY_MEMBER_KEY = "trouble:etcd"


async def ensure_epoch(db: Database, store: EpochCheckedStore) -> None:
    """Load the epoch of the store if this catalog does not know it yet. Raises StoreUnreachable."""
    if store_loss.get_epoch(db) is None:
        store_loss.record_epoch(db, *await _load_or_create_epoch(store, None))


async def rebuild_if_lost(db: Database, store: EpochCheckedStore, name: str) -> bool:
    """Mark all rows dirty if the store has really lost its data. Returns False if it has not. Raises StoreUnreachable.

    The sign of a loss may be outdated. An etcd member that was started alone by mistake has no data either, so most members must confirm
    the loss, and none may deny it.
    """
    store_loss.record_revision(db, *store.epoch_and_revision)
    with contextlib.suppress(StoreLost):
        await wait_outcome(store.read_soon([]))
        return False
    if await _has_member_with_data(db, store):
        return False
    value, first = await _load_or_create_epoch(store, store_loss.get_epoch(db))
    await _reserve_numbers(db, store, name)
    # Takes seconds for a large catalog.
    await trio.to_thread.run_sync(store_loss.begin_rebuild, db, value, first)
    what = "etcd has lost data: the nodes tell it again what they know, and what was deleted shortly before may be there again"
    summary.set_report(
        db, STORE_LOST_KEY, {"what": what, "path": "", "remedy": "see why, and look through the files; this is shown for an hour"}
    )
    log.warning("etcd has lost its data, or was set back to an older state: this node tells it everything that is known here")
    return True


def record_store_progress(db: Database, store: EpochCheckedStore) -> None:
    """Record the revision of the store, and clear an old report of a loss."""
    store_loss.record_revision(db, *store.epoch_and_revision)
    if limits.STORE_LOST_SHOWN_S < store_loss.get_loss_age_s(db) < float("inf"):
        summary.set_report(db, STORE_LOST_KEY, None)


async def _has_member_with_data(db: Database, store: EpochCheckedStore) -> bool:
    """Return True if a member has the data that this catalog knows. Raises StoreUnreachable if too few answer to exclude it."""
    members = await trio.to_thread.run_sync(store.members)
    try:
        replies = [await _has_cluster_data(EpochCheckedStore(member, db)) for member in members]
    finally:
        for member in members:
            member.close()
    if True not in replies and 2 * replies.count(False) > len(replies):
        return False
    what = f"{replies.count(False)} of the {len(replies)} addresses of etcd lead to one without this cluster's data, or with older ones"
    remedy = "make it a member of the others again, with its directory emptied; if all data are lost, name in etcd= only what is there"
    if not summary.list_reports(db, STRAY_MEMBER_KEY):
        log.warning("%s; that is not believed: %s", what, "others have them" if True in replies else "too few answer")
    summary.set_report(db, STRAY_MEMBER_KEY, {"what": what, "path": "", "remedy": remedy})
    if True in replies:
        return True
    raise StoreUnreachable(what, remedy=remedy)


async def _has_cluster_data(member: EpochCheckedStore) -> bool | None:
    """Return None if the member does not answer."""
    try:
        await wait_outcome(member.read_soon([], timeout_s=limits.STORE_PROBE_WAIT_S))
    except StoreLost:
        return False
    except CkptfsError:
        return None
    return True


async def _load_or_create_epoch(store: EpochCheckedStore, known_epoch: bytes | None) -> tuple[bytes, int]:
    """Return (epoch, revision) of the store; create an epoch if the store has none other than `known_epoch`."""
    while True:
        (found,) = (await wait_outcome(store.inner.read_soon([Get(store_loss.EPOCH_KEY)]))).results
        begun = store_loss.build_new_epoch(found, known_epoch)
        if begun is None:
            return found[0].value, found[0].mod_revision
        reply = await wait_outcome(store.inner.commit_soon([begun[0]], [begun[1]]))
        if reply.succeeded:
            return begun[1].value, reply.revision


async def _reserve_numbers(db: Database, store: EpochCheckedStore, name: str) -> None:
    """Reserve the numbers of all known nodes, so that no new node gets one."""
    (taken,) = (
        await wait_outcome(store.inner.read_soon([Get(membership.TAKEN_PREFIX, prefix_end(membership.TAKEN_PREFIX), keys_only=True)]))
    ).results
    for puts in membership.build_reregistration(
        name, identity.get_catalog_id(db), identity.get_node_number(db), store_loss.list_node_numbers(db), taken
    ):
        await wait_outcome(store.inner.commit_soon([], puts))


class ReintegrationReader:
    """The reads for one refused transaction. Raises what the store raises."""

    def __init__(self, db: Database, store: Store) -> None:
        self._db, self._store = db, store

    async def load_missing(self, transaction: StoreTransaction, reply: Outcome) -> dict[SharedKey, StoreValue]:
        """Read the keys that the outcome of a transaction refers to without their values."""
        values = read.parse_outcome(transaction.list_conflict_keys(), reply)
        more = await self._read(reintegrate.list_needed_keys(self._db, values))
        if store_loss.is_rebuilding(self._db):
            more |= await self._load_published_names(values)
        return more

    async def _load_published_names(self, values: Mapping[SharedKey, StoreValue]) -> dict[SharedKey, StoreValue]:
        """Read the names under which the store has what this node publishes again."""
        more = await self._read(rebuild.list_stored_names(values))
        for directory in rebuild.list_unnamed_parents(self._db, values):
            after: bytes | None = b""
            while after is not None:
                page = await self._read_store([read.build_page_get(directory, after, limits.ETCD_PAGE_ITEMS)])
                found, after = read.parse_page(self._db, directory, after, limits.ETCD_PAGE_ITEMS, page)
                more |= found
        return more

    async def _read(self, keys: list[SharedKey]) -> dict[SharedKey, StoreValue]:
        return read.parse_outcome(keys, await self._read_store(read.build_gets(keys))) if keys else {}

    async def _read_store(self, gets: list[Get]) -> Outcome:
        return await wait_outcome(self._store.read_soon(gets))


class StandbyLease:
    """Renews the node's lease while the mover is silent. Belongs to the trio thread."""

    def __init__(self, keep_alive: Callable[[int], Awaitable[float]]) -> None:
        """`keep_alive` renews a lease, and returns the seconds that it has left."""
        self._keep_alive = keep_alive
        self._lease = 0
        self._last_renewal_s = 0.0
        self._mover_renewed = trio.Event()

    def record_renewal(self, lease: int) -> None:
        """Record that the mover has just renewed `lease`."""
        self._lease, self._last_renewal_s = lease, trio.current_time()
        self._mover_renewed.set()

    async def run(self) -> None:
        """Renew the lease whenever the mover is silent. A task."""
        while True:
            self._mover_renewed = trio.Event()
            with trio.move_on_at(self._last_renewal_s + limits.STANDBY_AFTER_S if self._lease else float("inf")):
                await self._mover_renewed.wait()
                continue
            while self._lease and not self._mover_renewed.is_set():
                await self._renew(self._lease)
                with trio.move_on_after(limits.NODE_LEASE_RENEW_S):
                    await self._mover_renewed.wait()

    async def _renew(self, lease: int) -> None:
        left_s = 0.0
        if trio.current_time() < self._last_renewal_s + limits.STANDBY_LEASE_S:
            left_s = limits.NODE_LEASE_S
            with suppress(CkptfsError):
                left_s = await self._keep_alive(lease)
        if left_s <= 0 and self._lease == lease:
            self._lease = 0
