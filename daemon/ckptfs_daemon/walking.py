"""Owns what the mount knows of walks along paths: which names a thread will look up next, so that one round trip brings all of them.

The kernel asks for one name of a path after the other, and each answer must be what the store says while the system call runs. What was
looked up in a directory the last time is read together with the directory. It counts as fresh for the same thread alone, in the order of
the path, once, and for WALK_FRESH_S: a guess that was wrong costs a key in a question that was asked anyway.
If we die here: nothing is kept.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

import trio

from ckptfs import limits
from ckptfs.catalog.sharing import reading
from ckptfs_daemon.sharing import Name, Sharing


@dataclass(slots=True)
class Walk:
    """What was read for one thread: the names that come next, and the inode that it has reached."""

    until_s: float
    names: deque[Name] = field(default_factory=deque)
    reached: int = 0


class Walks:
    """All walks on this mount."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._walks: OrderedDict[int, Walk] = OrderedDict()
        self._last: OrderedDict[int, bytes] = OrderedDict()

    async def fresh_name(self, pid: int, parent: int, name: bytes) -> None:
        """The rows of a name are as the store has them; `pid` is the thread that asks, 0 for one that is not known."""
        self._last[parent] = name
        self._last.move_to_end(parent)
        if len(self._last) > limits.WALKS_MAX:
            self._last.popitem(last=False)
        walk = self._walks.get(pid)
        if walk is not None and walk.names and walk.names[0] == (parent, name) and trio.current_time() < walk.until_s:
            walk.names.popleft()
            return
        ahead = self._ahead(parent, name)
        await self._sharing.fresh_name(parent, name, *ahead)
        if pid:
            self._walks.pop(pid, None)
            self._walks[pid] = Walk(trio.current_time() + limits.WALK_FRESH_S, deque(ahead))
            if len(self._walks) > limits.WALKS_MAX:
                self._walks.popitem(last=False)

    def reached(self, pid: int, inode: int) -> None:
        """The name that was made fresh leads there."""
        walk = self._walks.get(pid)
        if walk is not None:
            walk.reached = inode

    async def fresh_inode(self, pid: int, inode: int) -> None:
        """The rows of an inode are as the store has them, to which a thread has perhaps just walked."""
        walk = self._walks.get(pid)
        if walk is not None and walk.reached == inode and trio.current_time() < walk.until_s:
            walk.reached = 0
            return
        await self._sharing.fresh_inode(inode)

    def _ahead(self, parent: int, name: bytes) -> list[Name]:
        """What was looked up below this name the last time."""
        names: list[Name] = []
        while len(names) < limits.WALK_NAMES_MAX:
            child = reading.directory(self._sharing.db, parent, name)
            if child is None or child not in self._last:
                break
            parent, name = child, self._last[child]
            names.append((parent, name))
        return names
