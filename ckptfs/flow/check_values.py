"""The values of the store that cannot be read, for `ckptfs status`.

Takes: keys that the mount or the mover found unreadable.
Leaves: the trouble `unreadable` as long as one of these keys holds what was found there.
If we die here: the catalog lists the keys, and the next step looks again.
"""

import random
import time

from ckptfs import limits
from ckptfs.catalog import summary
from ckptfs.catalog.database import Database
from ckptfs.coherence import keys, unreadable_keys
from ckptfs.coherence.unreadable_keys import UnreadableKey
from ckptfs.coherence.value_checks import decode_item
from ckptfs.store.kv import Get, Item, Transactions

TROUBLE = "unreadable"


class CheckValues:
    """Looks at the keys that the catalog lists as unreadable."""

    def __init__(self, db: Database, store: Transactions, cluster: str) -> None:
        self._db = db
        self._store = store
        self._cluster = cluster
        self._next_s = 0.0

    def step(self) -> bool:
        """Look at all of them. Return False. Raises StoreUnreachable."""
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + limits.STORE_POLL_S * random.uniform(0.75, 1.25)
        unreadable_keys.record_found(self._db)
        listed = unreadable_keys.list_recorded(self._db)
        results = self._store.read([Get(one.key) for one in listed]).results if listed else ()
        left = [one for one, items in zip(listed, results, strict=True) if _is_still_there(one, items)]
        for one in set(listed) - set(left):
            unreadable_keys.forget(self._db, one.key)
        if listed:
            summary.set_trouble(self._db, TROUBLE, self._describe(left) if left else None)
        return False

    def next_due_s(self) -> float | None:
        return max(0.0, self._next_s - time.monotonic())

    def _describe(self, left: list[UnreadableKey]) -> dict[str, str]:
        first = min(left, key=lambda one: not self._find_path(one.key))
        name = f"/ckptfs/{self._cluster}/{first.key.decode('ascii', 'backslashreplace')}"
        many = f"{len(left)} keys of etcd are not readable, and their files may answer EIO; the first is"
        one = "a key of etcd is not readable, and its file may answer EIO:"
        what = f"{many if len(left) > 1 else one} {name}: {first.fault}"
        return {"what": what, "path": self._find_path(first.key), "remedy": unreadable_keys.describe_remedy(first.revision)}

    def _find_path(self, raw: bytes) -> str:
        """Return the path of the file that a key is about, if this node knows it."""
        try:
            return keys.describe_path(self._db, [keys.decode_key(raw)])
        except ValueError:
            return ""


def _is_still_there(one: UnreadableKey, items: tuple[Item, ...]) -> bool:
    """Return True if a key holds what was found.

    What it holds instead is noted if that is not readable either.
    """
    if not items:
        return False
    if one.revision in (0, items[0].mod_revision):
        return True
    decode_item(items[0])
    return False
