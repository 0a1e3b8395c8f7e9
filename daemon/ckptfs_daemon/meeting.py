"""Meets the store of the cluster: sees that this catalog knows it, and begins anew with one that has lost its data.

If we die here: the catalog knows the new store when everything is marked to be told to it, and not before; until then the next process
begins again, which changes nothing in the store.
"""

import contextlib
import logging

import trio

from ckptfs import limits
from ckptfs.catalog import belonging, epoch, identity, report, settling
from ckptfs.catalog.database import Database
from ckptfs.catalog.same_store import EpochCheckedStore
from ckptfs.catalog.sharing import lost
from ckptfs.catalog.store import Get, prefix_end
from ckptfs.clique import joining
from ckptfs.errors import CkptfsError, StoreLost, StoreUnreachable
from ckptfs_daemon.store_calls import wait_outcome

log = logging.getLogger(__name__)

STORE_LOST_KEY = "trouble:store"
STRAY_MEMBER_KEY = "trouble:etcd"


async def ensure_epoch(db: Database, store: EpochCheckedStore) -> None:
    """See that this catalog knows an epoch, which is asked for once. Raises Unreachable."""
    if epoch.get_epoch(db) is None:
        epoch.record_epoch(db, *await _load_or_create_epoch(store, None))


async def rebuild_if_lost(db: Database, store: EpochCheckedStore, name: str) -> bool:
    """The store seemed to be lost. Where it is, all that is known here is marked to be told; False where it is not. Raises Unreachable.

    What said so may have been under way when the store was found lost. A member that was begun alone by mistake has no data either, so
    most of them have to say it, and none the opposite.
    """
    epoch.record_revision(db, *store.epoch_and_revision)
    with contextlib.suppress(StoreLost):
        await wait_outcome(store.read_soon([]))
        return False
    if await _has_member_with_data(db, store):
        return False
    value, first = await _load_or_create_epoch(store, epoch.get_epoch(db))
    await _reserve_numbers(db, store, name)
    # Of a large catalog this takes seconds.
    await trio.to_thread.run_sync(lost.begin_rebuild, db, value, first)
    what = "etcd has lost data: the nodes tell it again what they know, and what was deleted shortly before may be there again"
    settling.set_report(
        db, STORE_LOST_KEY, {"what": what, "path": "", "remedy": "see why, and look through the files; this is shown for an hour"}
    )
    log.warning("etcd has lost its data, or was set back to an older state: this node tells it everything that is known here")
    return True


def record_store_progress(db: Database, store: EpochCheckedStore) -> None:
    """Remember how far the store has come, and say no more what was long ago."""
    epoch.record_revision(db, *store.epoch_and_revision)
    if limits.STORE_LOST_SHOWN_S < epoch.get_loss_age_s(db) < float("inf"):
        settling.set_report(db, STORE_LOST_KEY, None)


async def _has_member_with_data(db: Database, store: EpochCheckedStore) -> bool:
    """Whether a member has the store that this catalog knows. Raises Unreachable where too few answer to say that none has."""
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
    if not report.list_reports(db, STRAY_MEMBER_KEY):
        log.warning("%s; that is not believed: %s", what, "others have them" if True in replies else "too few answer")
    settling.set_report(db, STRAY_MEMBER_KEY, {"what": what, "path": "", "remedy": remedy})
    if True in replies:
        return True
    raise StoreUnreachable(what, remedy=remedy)


async def _has_cluster_data(member: EpochCheckedStore) -> bool | None:
    """None: it does not answer."""
    try:
        await wait_outcome(member.read_soon([], timeout_s=limits.ISLAND_PROBE_WAIT_S))
    except StoreLost:
        return False
    except CkptfsError:
        return None
    return True


async def _load_or_create_epoch(store: EpochCheckedStore, known_epoch: bytes | None) -> tuple[bytes, int]:
    """(the epoch of the store, its revision), for one who knew `before`."""
    while True:
        (found,) = (await wait_outcome(store.inner.read_soon([Get(epoch.EPOCH_KEY)]))).results
        begun = epoch.build_new_epoch(found, known_epoch)
        if begun is None:
            return found[0].value, found[0].mod_revision
        reply = await wait_outcome(store.inner.commit_soon([begun[0]], [begun[1]]))
        if reply.succeeded:
            return begun[1].value, reply.revision


async def _reserve_numbers(db: Database, store: EpochCheckedStore, name: str) -> None:
    """Nobody is given a number that a node has already."""
    (taken,) = (
        await wait_outcome(store.inner.read_soon([Get(joining.TAKEN_PREFIX, prefix_end(joining.TAKEN_PREFIX), keys_only=True)]))
    ).results
    for puts in joining.build_reregistration(
        name, belonging.get_catalog_id(db), identity.get_node_number(db), lost.list_node_numbers(db), taken
    ):
        await wait_outcome(store.inner.commit_soon([], puts))
