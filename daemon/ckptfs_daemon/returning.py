"""Reads what must be known before a refused batch of a node that returns is settled.

If we die here: nothing was changed but rows that say now what the store says.
"""

from collections.abc import Callable, Mapping

from ckptfs import limits
from ckptfs.catalog.database import Database
from ckptfs.catalog.sharing import anew, island, lost, reading
from ckptfs.catalog.sharing.applying import Told
from ckptfs.catalog.sharing.batch import Batch
from ckptfs.catalog.sharing.kinds import Key
from ckptfs.catalog.store import Get, Outcome, Store
from ckptfs_daemon.store_calls import answer_of


class Look:
    """One refused batch's. Raises what the store raises."""

    def __init__(self, db: Database, store: Store, apply: Callable[[Mapping[Key, Told]], None]) -> None:
        """`apply` makes rows say what was read."""
        self._db, self._store, self._apply = db, store, apply

    async def beyond(self, made: Batch, came: Outcome) -> dict[Key, Told]:
        """What the answer to a batch leads to and does not tell."""
        told = reading.answers(made.questions(), came)
        more = await self._read(island.wanted(self._db, told))
        if lost.is_any(self._db):
            more |= await self._known_to_others(told)
        for directory in island.moved(self._db, made):
            await self._know_above(directory)
        return more

    async def _known_to_others(self, told: Mapping[Key, Told]) -> dict[Key, Told]:
        """Under which names the store has what this node tells anew."""
        more = await self._read(anew.names_told(told))
        for directory in anew.lost_directories(self._db, told):
            after: bytes | None = b""
            while after is not None:
                page = await self._ask([reading.page(directory, after, limits.ETCD_PAGE_ITEMS)])
                found, after = reading.of_page(self._db, directory, after, limits.ETCD_PAGE_ITEMS, page)
                more |= found
        return more

    async def _know_above(self, inode: int) -> None:
        """Where a directory lies."""
        passed: set[int] = set()
        while inode and inode not in passed:
            passed.add(inode)
            self._apply(await self._read(reading.above(self._db, inode)[0]))
            inode = reading.above(self._db, inode)[1]

    async def _read(self, keys: list[Key]) -> dict[Key, Told]:
        return reading.answers(keys, await self._ask(reading.gets(keys))) if keys else {}

    async def _ask(self, gets: list[Get]) -> Outcome:
        return await answer_of(self._store.read_soon(gets))
