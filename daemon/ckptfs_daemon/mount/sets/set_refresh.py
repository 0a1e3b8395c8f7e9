"""Rows of other nodes for the tracker of sets, and the division of its work among the nodes.

Each node looks for sets where it sealed, renamed or removed something. A set of a thousand nodes must not be judged a thousand times. So
each look comes at a random time within a period that grows with the number of nodes: the first one that finds the set complete makes it,
and the others then see from their own files that these are in the history. Outside a cluster nothing is loaded, and nothing waits.
"""

import contextlib
import random
from collections.abc import Iterable

from ckptfs import limits
from ckptfs.catalog import history, identity, inodes, peer_copies, set_members
from ckptfs.coherence import keys
from ckptfs.model import ROOT
from ckptfs_daemon.mount.context import MountContext
from ckptfs_daemon.mount.sets.member_reader import MountMemberReader


class SetRefresh:
    """Loads rows of other nodes. Belongs to the trio thread."""

    def __init__(self, context: MountContext, reader: MountMemberReader) -> None:
        self._context, self._reader = context, reader

    def choose_delay_s(self) -> float:
        """Return after which time this node looks at what it has just changed."""
        return random.uniform(0.0, self.get_spread_s())

    def get_spread_s(self) -> float:
        """Return the period within which all nodes look."""
        if not self._context.shared_namespace.is_shared:
            return 0.0
        return limits.SET_SPREAD_S * len(peer_copies.list_live_nodes(self._context.db))

    async def refresh_above(self, inodes: list[int], paused: Iterable[int]) -> None:
        """Load these inodes and the names in all directories above them, but none from a `paused` one on.

        Publish first what this node sealed: of nodes that look at the same time, one then sees the files of all.
        """
        shared_namespace, seen = self._context.shared_namespace, set(paused)
        await shared_namespace.wait_published()
        await shared_namespace.refresh_inodes(inodes)
        for inode in inodes if shared_namespace.is_shared else ():
            if not (places := set_members.list_places(self._context.db, inode)):
                await self._refresh_names(inode)
                places = set_members.list_places(self._context.db, inode)
            for directory, _ in places:
                while directory and directory not in seen:
                    seen.add(directory)
                    await shared_namespace.refresh_directory(directory)
                    directory = 0 if directory == ROOT else self._context.get_inode(directory).parent

    async def _refresh_names(self, inode: int) -> None:
        """Load the names of a file that this node only has a copy of."""
        with contextlib.suppress(FileNotFoundError):
            is_file = self._context.get_inode(inode).is_file
            for directory, name in keys.list_shared_names(self._context.db, inode) if is_file else ():
                if not identity.is_history_directory(directory):
                    await self._context.shared_namespace.refresh_inode(directory)
                    await self._context.shared_namespace.refresh_name(directory, name.encode("latin-1"))

    async def list_sets_of_file(self, inode: int) -> list[tuple[int, int]]:
        """Return (series, set) of all directories of sets in which a file has a name.

        Sets that this node has never read count, too.
        """
        db, shared_namespace = self._context.db, self._context.shared_namespace
        if not shared_namespace.is_shared:
            return set_members.list_sets_of_file(db, inode)
        with contextlib.suppress(FileNotFoundError):
            if self._context.get_inode(inode).is_directory:
                return []  # A candidate may be a directory that was renamed.
        found = []
        for directory in {name[0] for name in keys.list_shared_names(db, inode) if identity.is_history_directory(name[0])}:
            below, seen = directory, set[int]()
            while directory > ROOT and directory not in seen:
                seen.add(directory)
                await shared_namespace.refresh_inode(directory)
                if history.get_series(db, directory) is not None:
                    found.append((directory, below))
                    break
                below, directory = directory, inodes.get_parent(db, directory)
        return found

    async def refresh_way(self, directory: int) -> None:
        """Load a directory of the history and the names that lead to it."""
        shared_namespace = self._context.shared_namespace
        await shared_namespace.refresh_name(ROOT, history.NAME)
        seen = set[int]()
        while shared_namespace.is_shared and directory > ROOT and directory not in seen:
            seen.add(directory)
            await shared_namespace.refresh_inode(directory)
            directory = inodes.get_parent(self._context.db, directory)
            if directory > ROOT:
                await shared_namespace.refresh_directory(directory)

    async def refresh_place(self, directory: int, pattern: bytes) -> None:
        """Load what other nodes made of a series that this one may not know."""
        shared_namespace = self._context.shared_namespace
        if shared_namespace.is_shared and (place := await self._reader.find_place(directory, pattern)) is not None:
            await shared_namespace.refresh_directory(place)

    async def refresh_set(self, directory: int, *, with_copies: bool = False) -> None:
        """Load what is in a set, and where the copies of its files are."""
        shared_namespace = self._context.shared_namespace
        below = await self._reader.list_tree(directory) if shared_namespace.is_shared else {}
        for inode in below.values() if with_copies else ():
            await shared_namespace.refresh_copies(inode.id)
