"""Owns what this catalog remembers of the store that it shares: which one that is, and how far it had come.

Whoever joins an empty store writes the key `epoch` into it: a random id, and its turn, which counts how often the cluster's store was lost.
A store with another epoch or none, or one that is at an earlier revision than it was, is not the one that this catalog knows.
If we die here: each change is one transaction of the catalog; what was not remembered of the last seconds is found by the node's own key.
"""

import json
import time
import uuid
from collections.abc import Sequence

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.catalog.store import Compare, CompareTarget, Item, Put
from ckptfs.errors import StoreUnreachable

EPOCH_KEY = b"epoch"


def get_epoch(db: Database) -> bytes | None:
    """The value of the store's epoch, as this catalog knows it; None: it never met one."""
    text = db.value("SELECT value FROM meta WHERE key = 'epoch'")
    return None if text is None else str(text).encode()


def get_turn(value: bytes | None) -> int:
    """How many stores this one came after."""
    return 0 if value is None else int(json.loads(value)["turn"])


def get_highest_revision(db: Database) -> int:
    """The highest revision of that store that is remembered."""
    own = db.value("SELECT max(revision) FROM seen_key WHERE kind = 'w'") or 0
    return max(int(db.value("SELECT value FROM meta WHERE key = 'epoch revision'") or 0), int(own))


def record_revision(db: Database, value: bytes | None, revision_reached: int) -> None:
    """Remember how far the store of the epoch `value` has come: nothing, where another one is known by now."""
    if value is not None and revision_reached > get_highest_revision(db):
        same = "WHERE EXISTS (SELECT 1 FROM meta WHERE key = 'epoch' AND value = ?)"
        db.run(f"INSERT OR REPLACE INTO meta (key, value) SELECT 'epoch revision', ? {same}", revision_reached, value.decode())


def require_rebuilt(db: Database) -> None:
    """The nodes have had time to tell a store that has lost its data what the PFS shows. Raises Unreachable."""
    if get_loss_age_s(db) < limits.STORE_TELL_S or db.value("SELECT 1 FROM lost_key LIMIT 1") is not None:
        raise StoreUnreachable("the nodes are telling the store of the cluster what they know: it has lost its data")


def find_prior_revision_at(db: Database, found_revision: int) -> list[int] | None:
    """How new is what the store says since the revision `found`, which is from before it was set back; None: it is of this one."""
    first = int(db.value("SELECT value FROM meta WHERE key = 'epoch first'") or 0)
    return [get_turn(get_epoch(db)) - 1, found_revision] if 0 < found_revision < first else None


def record_epoch(db: Database, value: bytes, first_revision: int, now_ns: int = 0) -> None:
    """The store is this one from now on, and was at its revision `first`; `now_ns`: the former one was found lost then."""
    with db.transaction():
        db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('epoch first', ?)", first_revision)
        db.run("DELETE FROM meta WHERE key = 'epoch revision'")
        db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('epoch', ?)", value.decode())
        if now_ns:
            db.run("INSERT OR REPLACE INTO meta (key, value) VALUES ('store lost', ?)", now_ns)


def get_loss_age_s(db: Database) -> float:
    """How long ago the store was found lost."""
    lost_ns = db.value("SELECT value FROM meta WHERE key = 'store lost'")
    return float("inf") if lost_ns is None else max(0.0, (time.time_ns() - int(lost_ns)) / 1e9)


def is_recently_lost(db: Database) -> bool:
    """Whether the store was lost so lately that what it does not say need not be true: other nodes may not have told it yet."""
    return get_loss_age_s(db) < limits.STORE_LOST_REST_S


def build_new_epoch(found: Sequence[Item], before: bytes | None) -> tuple[Compare, Put] | None:
    """How a new epoch begins in a store that has no other one than `before`; None: somebody was faster."""
    if found and found[0].value != before:
        return None
    value = json.dumps({"id": uuid.uuid4().hex, "turn": get_turn(before) + 1}, separators=(",", ":")).encode()
    return Compare(EPOCH_KEY, CompareTarget.MOD, "=", found[0].mod_revision if found else 0), Put(EPOCH_KEY, value)
