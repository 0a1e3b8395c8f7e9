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
from ckptfs_daemon.store_calls import answer_of

log = logging.getLogger(__name__)

LOST = "trouble:store"
STRAY = "trouble:etcd"


async def agree(db: Database, store: EpochCheckedStore) -> None:
    """See that this catalog knows an epoch, which is asked for once. Raises Unreachable."""
    if epoch.get_epoch(db) is None:
        epoch.record_epoch(db, *await _meet(store, None))


async def begin_anew(db: Database, store: EpochCheckedStore, name: str) -> bool:
    """The store seemed to be lost. Where it is, all that is known here is marked to be told; False where it is not. Raises Unreachable.

    What said so may have been under way when the store was found lost. A member that was begun alone by mistake has no data either, so
    most of them have to say it, and none the opposite.
    """
    epoch.record_revision(db, *store.epoch_and_revision)
    with contextlib.suppress(StoreLost):
        await answer_of(store.read_soon([]))
        return False
    if await _is_known_to_some(db, store):
        return False
    value, first = await _meet(store, epoch.get_epoch(db))
    await _number_again(db, store, name)
    # Of a large catalog this takes seconds.
    await trio.to_thread.run_sync(lost.begin_rebuild, db, value, first)
    what = "etcd has lost data: the nodes tell it again what they know, and what was deleted shortly before may be there again"
    settling.set_report(db, LOST, {"what": what, "path": "", "remedy": "see why, and look through the files; this is shown for an hour"})
    log.warning("etcd has lost its data, or was set back to an older state: this node tells it everything that is known here")
    return True


def keep(db: Database, store: EpochCheckedStore) -> None:
    """Remember how far the store has come, and say no more what was long ago."""
    epoch.record_revision(db, *store.epoch_and_revision)
    if limits.STORE_LOST_SHOWN_S < epoch.get_loss_age_s(db) < float("inf"):
        settling.set_report(db, LOST, None)


async def _is_known_to_some(db: Database, store: EpochCheckedStore) -> bool:
    """Whether a member has the store that this catalog knows. Raises Unreachable where too few answer to say that none has."""
    members = await trio.to_thread.run_sync(store.members)
    try:
        said = [await _is_known_to(EpochCheckedStore(member, db)) for member in members]
    finally:
        for member in members:
            member.close()
    if True not in said and 2 * said.count(False) > len(said):
        return False
    what = f"{said.count(False)} of the {len(said)} addresses of etcd lead to one without this cluster's data, or with older ones"
    remedy = "make it a member of the others again, with its directory emptied; if all data are lost, name in etcd= only what is there"
    if not report.list_reports(db, STRAY):
        log.warning("%s; that is not believed: %s", what, "others have them" if True in said else "too few answer")
    settling.set_report(db, STRAY, {"what": what, "path": "", "remedy": remedy})
    if True in said:
        return True
    raise StoreUnreachable(what, remedy=remedy)


async def _is_known_to(member: EpochCheckedStore) -> bool | None:
    """None: it does not answer."""
    try:
        await answer_of(member.read_soon([], timeout_s=limits.ISLAND_PROBE_WAIT_S))
    except StoreLost:
        return False
    except CkptfsError:
        return None
    return True


async def _meet(store: EpochCheckedStore, before: bytes | None) -> tuple[bytes, int]:
    """(the epoch of the store, its revision), for one who knew `before`."""
    while True:
        (found,) = (await answer_of(store.inner.read_soon([Get(epoch.EPOCH_KEY)]))).results
        begun = epoch.build_new_epoch(found, before)
        if begun is None:
            return found[0].value, found[0].mod_revision
        came = await answer_of(store.inner.commit_soon([begun[0]], [begun[1]]))
        if came.succeeded:
            return begun[1].value, came.revision


async def _number_again(db: Database, store: EpochCheckedStore, name: str) -> None:
    """Nobody is given a number that a node has already."""
    (taken,) = (await answer_of(store.inner.read_soon([Get(joining.TAKEN_PREFIX, prefix_end(joining.TAKEN_PREFIX), keys_only=True)]))).results
    for puts in joining.build_reregistration(name, belonging.get_catalog_id(db), identity.get_node_number(db), lost.list_node_numbers(db), taken):
        await answer_of(store.inner.commit_soon([], puts))
