"""Takes what came of a batch: notes what was told, or has a refusal settled. What was told but whose answer was lost is recognised by this
node's own key.

If we die here: one change of the catalog, whole or not at all; of a success that was not noted the next process hears by that key.
"""

from collections.abc import Callable

from ckptfs.catalog import identity, peers
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import kinds, lost, reading, seen, touching
from ckptfs.catalog.sharing.applying import RecentDeletes, StoreValue
from ckptfs.catalog.sharing.batch import StoreTransaction
from ckptfs.catalog.sharing.kinds import CONTENT, LAST_COMMIT, SharedKey
from ckptfs.catalog.sharing.refusal import CommitResult, ConflictResolver
from ckptfs.catalog.sharing.seen import CachedValue
from ckptfs.catalog.store import Outcome


def record_commit(
    db: Database, transaction: StoreTransaction, revision: int, recent_deletes: RecentDeletes, *, recount_links: bool = False
) -> CommitResult:
    """The store has taken the batch, at this revision; 0: there was nothing that it had to take. `recount`: links may be wrong here."""
    with touching.change_unmarked(db):
        seen.set_cached_each(db, ((key, CachedValue(revision, value)) for key, value in transaction.new_values.items()))
        for key, value in transaction.new_values.items():
            if value is None:
                recent_deletes.record_deleted(key, revision)
        for operation in transaction.extra_deletes:
            if operation.end is None:
                key = kinds.decode_key(operation.key)
                if key.kind == CONTENT and (writer := _get_writer(db, key)) != transaction.node_number:
                    peers.insert_unneeded_copy(db, key.number, writer)
                seen.set_cached(db, key, seen.ABSENT)
                recent_deletes.record_deleted(key, revision)
        told = [key for key in (*transaction.new_values, *transaction.unchanged_keys) if key not in transaction.deleted_later]
        touching.mark_clean(db, told, transaction.change_last)
        if lost.is_rebuilding(db):
            lost.mark_resent(db, told)
        if recount_links:
            for key in told:
                kinds.set_link_count(db, key)
        if revision:
            seen.set_cached(db, transaction.marker_key, CachedValue(revision, transaction.build_marker()))
    return CommitResult(True)


def _get_writer(db: Database, content: SharedKey) -> int:
    """Who wrote it last, as far as that is known here."""
    told = seen.get_cached(db, content).fields or {}
    return int(told.get("node", identity.get_origin_node(content.number)))


def recover_lost_answer(db: Database, own: StoreValue, sent: StoreTransaction | None, recent_deletes: RecentDeletes) -> CommitResult | None:
    """What this node's own key says of the batch `sent`, whose answer did not come; None: it has not passed.

    Without `sent`, of one that another process of this node sent before it died: all that it changed is taken for untold, but for what it
    deleted, which would look as if somebody else had.
    """
    if own.value.revision <= seen.get_cached(db, SharedKey(LAST_COMMIT, identity.get_node_number(db))).revision:
        return None
    if sent is not None:
        return record_commit(db, sent, own.value.revision, recent_deletes)
    with touching.change_unmarked(db):
        for raw in (own.value.fields or {"deleted": []})["deleted"]:
            seen.set_cached(db, kinds.decode_key(raw.encode("latin-1")), seen.ABSENT)
        seen.set_cached(db, SharedKey(LAST_COMMIT, identity.get_node_number(db)), own.value)
    return CommitResult(False)


def resolve_conflict(
    db: Database,
    transaction: StoreTransaction,
    outcome: Outcome,
    recent_deletes: RecentDeletes,
    resolver_class: Callable[..., ConflictResolver] = ConflictResolver,
) -> CommitResult:
    """Some of what the batch compared was not so. `settling`: who settles it."""
    keys = transaction.list_conflict_keys()
    told = reading.parse_outcome(keys, outcome)
    own = told.pop(transaction.marker_key).value
    if own.revision > seen.get_cached(db, transaction.marker_key).revision:
        # The batch had passed, that answer was lost, and the store was asked once more.
        return record_commit(db, transaction, own.revision, recent_deletes)
    with touching.change_unmarked(db):
        refusal = resolver_class(db, transaction, told, outcome.revision, recent_deletes)
        for items in outcome.results[len(keys) :]:
            refusal.mark_not_empty([kinds.decode_key(item.key) for item in items])
        return refusal.resolve()
