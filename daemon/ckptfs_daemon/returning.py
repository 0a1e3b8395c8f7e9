"""Reads what must be known before a refused batch of a node that returns is settled.

If we die here: nothing was changed but rows that say now what the store says.
"""

from collections.abc import Callable, Mapping

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import anew, island, lost, reading
from ckptfs.catalog.sharing.applying import StoreValue
from ckptfs.catalog.sharing.batch import StoreTransaction
from ckptfs.catalog.sharing.kinds import SharedKey
from ckptfs.catalog.store import Get, Outcome, Store
from ckptfs_daemon.store_calls import answer_of


class Look:
    """One refused batch's. Raises what the store raises."""

    def __init__(self, db: Database, store: Store, apply: Callable[[Mapping[SharedKey, StoreValue]], None]) -> None:
        """`apply` makes rows say what was read."""
        self._db, self._store, self._apply = db, store, apply

    async def beyond(self, made: StoreTransaction, came: Outcome) -> dict[SharedKey, StoreValue]:
        """What the answer to a batch leads to and does not tell."""
        told = reading.parse_outcome(made.list_conflict_keys(), came)
        more = await self._read(island.list_needed_keys(self._db, told))
        if lost.is_rebuilding(self._db):
            more |= await self._known_to_others(told)
        for directory in island.list_move_targets(self._db, made):
            await self._know_above(directory)
        return more

    async def _known_to_others(self, told: Mapping[SharedKey, StoreValue]) -> dict[SharedKey, StoreValue]:
        """Under which names the store has what this node tells anew."""
        more = await self._read(anew.list_stored_names(told))
        for directory in anew.list_unnamed_parents(self._db, told):
            after: bytes | None = b""
            while after is not None:
                page = await self._ask([reading.build_page_get(directory, after, limits.ETCD_PAGE_ITEMS)])
                found, after = reading.parse_page(self._db, directory, after, limits.ETCD_PAGE_ITEMS, page)
                more |= found
        return more

    async def _know_above(self, inode: int) -> None:
        """Where a directory lies."""
        passed: set[int] = set()
        while inode and inode not in passed:
            passed.add(inode)
            self._apply(await self._read(reading.load_directory_location(self._db, inode)[0]))
            inode = reading.load_directory_location(self._db, inode)[1]

    async def _read(self, keys: list[SharedKey]) -> dict[SharedKey, StoreValue]:
        return reading.parse_outcome(keys, await self._ask(reading.build_gets(keys))) if keys else {}

    async def _ask(self, gets: list[Get]) -> Outcome:
        return await answer_of(self._store.read_soon(gets))
