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
from ckptfs_daemon.store_calls import wait_outcome


class ReintegrationReader:
    """One refused batch's. Raises what the store raises."""

    def __init__(self, db: Database, store: Store, apply: Callable[[Mapping[SharedKey, StoreValue]], None]) -> None:
        """`apply` makes rows say what was read."""
        self._db, self._store, self._apply = db, store, apply

    async def load_missing(self, transaction: StoreTransaction, reply: Outcome) -> dict[SharedKey, StoreValue]:
        """What the answer to a batch leads to and does not tell."""
        values = reading.parse_outcome(transaction.list_conflict_keys(), reply)
        more = await self._read(island.list_needed_keys(self._db, values))
        if lost.is_rebuilding(self._db):
            more |= await self._load_published_names(values)
        for directory in island.list_move_targets(self._db, transaction):
            await self._load_ancestors(directory)
        return more

    async def _load_published_names(self, values: Mapping[SharedKey, StoreValue]) -> dict[SharedKey, StoreValue]:
        """Under which names the store has what this node tells anew."""
        more = await self._read(anew.list_stored_names(values))
        for directory in anew.list_unnamed_parents(self._db, values):
            after: bytes | None = b""
            while after is not None:
                page = await self._read_store([reading.build_page_get(directory, after, limits.ETCD_PAGE_ITEMS)])
                found, after = reading.parse_page(self._db, directory, after, limits.ETCD_PAGE_ITEMS, page)
                more |= found
        return more

    async def _load_ancestors(self, inode: int) -> None:
        """Where a directory lies."""
        visited_inodes: set[int] = set()
        while inode and inode not in visited_inodes:
            visited_inodes.add(inode)
            self._apply(await self._read(reading.load_directory_location(self._db, inode)[0]))
            inode = reading.load_directory_location(self._db, inode)[1]

    async def _read(self, keys: list[SharedKey]) -> dict[SharedKey, StoreValue]:
        return reading.parse_outcome(keys, await self._read_store(reading.build_gets(keys))) if keys else {}

    async def _read_store(self, gets: list[Get]) -> Outcome:
        return await wait_outcome(self._store.read_soon(gets))
