"""Takes what came of a batch: notes what was told, or has a refusal settled. What was told but whose answer was lost is recognised by this
node's own key.

If we die here: one change of the catalog, whole or not at all; of a success that was not noted the next process hears by that key.
"""

from collections.abc import Callable

from ckptfs.catalog import identity, peers
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import kinds, lost, reading, seen, touching
from ckptfs.catalog.sharing.applying import Recent, Told
from ckptfs.catalog.sharing.batch import Batch
from ckptfs.catalog.sharing.kinds import CONTENT, LAST, Key
from ckptfs.catalog.sharing.refusal import Refusal, Result
from ckptfs.catalog.sharing.seen import Seen
from ckptfs.catalog.store import Outcome


def passed(db: Database, batch: Batch, revision: int, recent: Recent, *, recount: bool = False) -> Result:
    """The store has taken the batch, at this revision; 0: there was nothing that it had to take. `recount`: links may be wrong here."""
    with touching.applying(db):
        seen.put_each(db, ((key, Seen(revision, value)) for key, value in batch.changed.items()))
        for key, value in batch.changed.items():
            if value is None:
                recent.gone(key, revision)
        for operation in batch.more:
            if operation.end is None:
                key = kinds.parse(operation.key)
                if key.kind == CONTENT and (writer := _writer(db, key)) != batch.number:
                    peers.is_to_hear(db, key.number, writer)
                seen.put(db, key, seen.NEVER)
                recent.gone(key, revision)
        told = [key for key in (*batch.changed, *batch.same) if key not in batch.going]
        touching.told(db, told, batch.up_to)
        if lost.is_any(db):
            lost.told(db, told)
        if recount:
            for key in told:
                kinds.recount(db, key)
        if revision:
            seen.put(db, batch.last, Seen(revision, batch.note()))
    return Result(True)


def _writer(db: Database, content: Key) -> int:
    """Who wrote it last, as far as that is known here."""
    told = seen.get(db, content).content or {}
    return int(told.get("node", identity.home(content.number)))


def look_back(db: Database, own: Told, sent: Batch | None, recent: Recent) -> Result | None:
    """What this node's own key says of the batch `sent`, whose answer did not come; None: it has not passed.

    Without `sent`, of one that another process of this node sent before it died: all that it changed is taken for untold, but for what it
    deleted, which would look as if somebody else had.
    """
    if own.seen.revision <= seen.get(db, Key(LAST, identity.number(db))).revision:
        return None
    if sent is not None:
        return passed(db, sent, own.seen.revision, recent)
    with touching.applying(db):
        for raw in (own.seen.content or {"deleted": []})["deleted"]:
            seen.put(db, kinds.parse(raw.encode("latin-1")), seen.NEVER)
        seen.put(db, Key(LAST, identity.number(db)), own.seen)
    return Result(False)


def refused(db: Database, batch: Batch, outcome: Outcome, recent: Recent, settling: Callable[..., Refusal] = Refusal) -> Result:
    """Some of what the batch compared was not so. `settling`: who settles it."""
    keys = batch.questions()
    told = reading.answers(keys, outcome)
    own = told.pop(batch.last).seen
    if own.revision > seen.get(db, batch.last).revision:
        # The batch had passed, that answer was lost, and the store was asked once more.
        return passed(db, batch, own.revision, recent)
    with touching.applying(db):
        refusal = settling(db, batch, told, outcome.revision, recent)
        for items in outcome.results[len(keys) :]:
            refusal.not_empty([kinds.parse(item.key) for item in items])
        return refusal.settle()
