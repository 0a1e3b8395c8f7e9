"""Exceptional states of the cluster in the mount process: store loss, reintegration, a dead mover.

`ensure_epoch` and `confirm_or_adopt` make sure that this catalog and the store know each other. If the store has lost its data, the node
stays an island until a person orders the adoption: `merge_store`, publishing as after a disconnection, `report_adoption`.

`StandbyLease` keeps the node's lease alive while the mover restarts (P8): it renews the lease only if the mover has been silent for
`STANDBY_AFTER_S`, and for a limited time, because a node without a mover serves no copies.

Crash safety: the step of an adoption is in the catalog, and the next process goes on with it; a step that is repeated changes nothing.
Without either process the lease expires.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace

import trio

from ckptfs import limits
from ckptfs.catalog import identity, peer_copies, summary
from ckptfs.catalog.database import Database
from ckptfs.clique import membership
from ckptfs.coherence import adopt, chain, read, store_loss
from ckptfs.coherence.keys import SharedKey
from ckptfs.coherence.read import StoreValue
from ckptfs.coherence.store_loss import AdoptionStep, EpochCheckedStore
from ckptfs.errors import CkptfsError, StoreLost, StoreUnreachable
from ckptfs.store.kv import WAIT_S, Get, Outcome, Store, prefix_end, split_changes
from ckptfs_daemon import ipc

log = logging.getLogger(__name__)
STRAY_MEMBER_TROUBLE = "etcd"
ADOPTION_TROUBLE = "adoption"
ADOPT_REMEDY = "see why; then run `ckptfs cluster adopt` on one node after the other, first on the one that wrote last"
_GET_TAKEN = Get(membership.TAKEN_PREFIX, prefix_end(membership.TAKEN_PREFIX))
_GET_ADOPTED = Get(membership.ADOPTED_PREFIX, prefix_end(membership.ADOPTED_PREFIX))
REST_REMEDY = (
    "run `ckptfs cluster adopt` there; if they are gone for good, as the number that a node had before it was wiped:"
    " `ckptfs cluster adopt --last` on this node"
)


async def wait_outcome(future: "Future[Outcome]") -> Outcome:
    """Wait for a future of the store in the trio thread, and return its result."""
    if not future.done():
        token = trio.lowlevel.current_trio_token()
        done = trio.Event()
        future.add_done_callback(lambda _: ipc.call_soon(token, done.set))
        await done.wait()
    else:
        await trio.lowlevel.checkpoint()
    return future.result()


async def ensure_epoch(db: Database, store: EpochCheckedStore) -> None:
    """Load the epoch of the store if this catalog does not know it yet. Raises StoreUnreachable."""
    if store_loss.get_epoch(db) is None:
        store_loss.record_epoch(db, await _load_or_create_epoch(store, None))


async def confirm_or_adopt(db: Database, store: EpochCheckedStore, name: str) -> bool:
    """Confirm that the store has the data of this catalog, or adopt it if that was ordered.

    Returns False if it has lost them and no adoption was ordered. A loss is believed if most members confirm it and none denies it: one
    started alone by mistake has no data either.
    """
    store_loss.record_revision(db, *store.epoch_and_revision)
    with contextlib.suppress(StoreLost):
        await _require_data(db, store, WAIT_S)
        summary.set_trouble(db, store_loss.LOSS_TROUBLE, None)
        return True
    is_ordered = store_loss.get_adoption_step(db) is AdoptionStep.ORDERED
    if not is_ordered and summary.list_troubles(db, store_loss.LOSS_TROUBLE):
        return False
    if await _confirm_at_members(db, store):
        return True
    if not is_ordered:
        await _end_epoch(db, store)
        _report_loss(db, "etcd has lost its data, or was set back: this node goes on as an island with all that it knows", ADOPT_REMEDY)
        return False
    return await _begin_adoption(db, store, name)


async def _end_epoch(db: Database, store: EpochCheckedStore) -> None:
    """Give a store that was set back another epoch, because its revision grows."""
    epoch = store_loss.get_epoch(db) or b""
    begun = store_loss.build_new_epoch((), epoch)
    if begun is not None:
        await wait_outcome(store.inner.commit_soon([store_loss.build_epoch_compare(epoch)], [begun[1]]))


def _report_loss(db: Database, what: str, remedy: str) -> None:
    summary.set_trouble(db, store_loss.LOSS_TROUBLE, {"what": what, "path": "", "remedy": remedy})
    log.warning("the store of the cluster: %s (%s)", what, remedy)


async def _begin_adoption(db: Database, store: EpochCheckedStore, name: str) -> bool:
    """Take the store for that of the cluster. Returns False if this node's number is another node's in it."""
    (taken,) = (await wait_outcome(store.inner.read_soon([_GET_TAKEN]))).results
    number = identity.get_node_number(db)
    if other := membership.find_number_conflict(name, number, taken):
        store_loss.set_adoption_step(db, None)
        _report_loss(db, other, "stop that node, give it an empty state directory, empty etcd, and run `ckptfs cluster adopt` again")
        return False
    epoch = await _load_or_create_epoch(store, store_loss.get_epoch(db))
    registration = membership.build_reregistration(name, identity.get_catalog_id(db), number, store_loss.list_node_numbers(db), taken)
    for puts in [*registration, *split_changes(adopt.build_intents(db))]:
        await wait_outcome(store.inner.commit_soon([store_loss.build_epoch_compare(epoch)], puts))
    # Takes seconds for a large catalog.
    await trio.to_thread.run_sync(adopt.begin, db, epoch)
    summary.set_trouble(db, store_loss.LOSS_TROUBLE, None)
    log.warning("etcd had lost its data: this node adopts it, and puts into it all that this node knows")
    return True


async def load_values(store: Store, wanted: list[SharedKey]) -> dict[SharedKey, StoreValue]:
    """Read keys. Raises what the store raises."""
    return read.parse_outcome(wanted, await wait_outcome(store.read_soon(read.build_gets(wanted)))) if wanted else {}


async def merge_store(db: Database, store: Store) -> None:
    """Compare this catalog with what other nodes put into an adopted store. Raises StoreUnreachable."""
    after = 0
    while inodes := adopt.list_inodes(db, after):
        values = await load_values(store, adopt.list_keys(db, inodes))
        values |= await load_values(store, adopt.list_names_in_store(values))
        for directory in adopt.list_parents_to_read(db, values):
            page: bytes | None = b""
            while page is not None:
                outcome = await wait_outcome(store.read_soon([read.build_page_get(directory, page, limits.ETCD_PAGE_ITEMS)]))
                found, page = read.parse_page(db, directory, page, limits.ETCD_PAGE_ITEMS, outcome)
                values |= found
        adopt.AdoptionBatch(db, values).apply(inodes)
        after = inodes[-1]
    store_loss.set_adoption_step(db, AdoptionStep.PUBLISHING)


async def report_adoption(db: Database, store: Store) -> None:
    """Tell the others that this node has adopted, and find out if all have. Raises StoreUnreachable."""
    if store_loss.get_adoption_step(db) is AdoptionStep.ORDERED:
        store_loss.set_adoption_step(db, None)  # There is nothing to adopt any more.
    epoch, number = store_loss.get_epoch(db) or b"", identity.get_node_number(db)
    taken, adopted = (await wait_outcome(store.read_soon([_GET_TAKEN, _GET_ADOPTED]))).results
    missing = membership.list_awaited(taken, adopted, epoch)
    ready = missing if store_loss.is_last_ordered(db) else [one for one in missing if one == number]
    for puts in membership.build_adopted(ready, epoch):
        await wait_outcome(store.commit_soon([], puts))
    missing = [one for one in missing if one not in ready]
    if not missing:
        store_loss.record_adopted(db)
        summary.set_trouble(db, ADOPTION_TROUBLE, None)
        return
    known = peer_copies.list_nodes(db)
    named = missing[: limits.NODES_NAMED_MAX]
    names = ", ".join(f"{known[one].name} with number {one}" if one in known else f"number {one}" for one in named)
    what = f"not adopted by {len(missing)} nodes yet ({names}); until then nothing is written back to the PFS or imported from it"
    if what not in str(summary.list_troubles(db, ADOPTION_TROUBLE)):
        summary.set_trouble(db, ADOPTION_TROUBLE, {"what": what, "path": "", "remedy": REST_REMEDY})


async def _confirm_at_members(db: Database, store: EpochCheckedStore) -> bool:
    """Ask each member for the cluster's data, and report those that lack it.

    Returns True if one has the data, False if most lack them and none has them. Raises StoreUnreachable if too few answer.
    """
    members = await trio.to_thread.run_sync(store.members)
    try:
        replies = [await _has_cluster_data(db, EpochCheckedStore(member, db)) for member in members]
    finally:
        for member in members:
            member.close()
    if True not in replies and 2 * replies.count(False) > len(replies):
        return False
    what = f"{replies.count(False)} of the {len(replies)} addresses of etcd lead to one without this cluster's data, or with older ones"
    remedy = "make it a member of the others again, with its directory emptied; if all data are lost, name in etcd= only what is there"
    if not summary.list_troubles(db, STRAY_MEMBER_TROUBLE):
        log.warning("%s; that is not believed: %s", what, "others have them" if True in replies else "too few answer")
    summary.set_trouble(db, STRAY_MEMBER_TROUBLE, {"what": what, "path": "", "remedy": remedy})
    if True in replies:
        return True
    raise StoreUnreachable(what, remedy=remedy)


async def _require_data(db: Database, store: EpochCheckedStore, timeout_s: float) -> None:
    """Raise StoreLost if the store has another epoch, or not all that this catalog has put there."""
    link = chain.load_next_link(db)
    reply = await wait_outcome(store.read_soon([link.build_get()], timeout_s=timeout_s))
    chain.parse_link(link, replace(reply, succeeded=False), link.build_fence())


async def _has_cluster_data(db: Database, member: EpochCheckedStore) -> bool | None:
    """Return None if the member does not answer."""
    try:
        await _require_data(db, member, limits.STORE_PROBE_WAIT_S)
    except StoreLost:
        return False
    except CkptfsError:
        return None
    return True


async def _load_or_create_epoch(store: EpochCheckedStore, known_epoch: bytes | None) -> bytes:
    """Return the epoch of the store; create one if the store has none other than `known_epoch`."""
    while True:
        (found,) = (await wait_outcome(store.inner.read_soon([Get(store_loss.EPOCH_KEY)]))).results
        begun = store_loss.build_new_epoch(found, known_epoch)
        if begun is None:
            return store_loss.require_epoch(found[0].value)
        if (await wait_outcome(store.inner.commit_soon([begun[0]], [begun[1]]))).succeeded:
            return begun[1].value


class StandbyLease:
    """Renews the node's lease while the mover is silent. Belongs to the trio thread."""

    def __init__(self, keep_alive: Callable[[int], Awaitable[float]]) -> None:
        """`keep_alive` renews a lease, and returns the seconds that it has left."""
        self._keep_alive = keep_alive
        self._lease = 0
        self._last_renewal_s = 0.0
        self._mover_renewed = trio.Event()

    def record_renewal(self, lease: int) -> None:
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
            with contextlib.suppress(CkptfsError):
                left_s = await self._keep_alive(lease)
        if left_s <= 0 and self._lease == lease:
            self._lease = 0
