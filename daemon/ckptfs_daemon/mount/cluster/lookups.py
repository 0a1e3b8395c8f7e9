"""Guesses about the names that a thread looks up next, from its lookups and system call.

The kernel looks up one component of a path after the other, and each reply must be what the store says during the system call.
The name that was looked up last in a directory is read together with the directory, in one round trip. A prefetched name counts as fresh
once, for the same thread in the same system call with the same arguments, for LOOKUP_FRESH_S, and only if each step follows the previous
reply within LOOKUP_STEP_S: a thread that knows of another node's change has returned from its system call. A wrong guess costs one more key
in a read that happens anyway. Each name is read separately without /proc/PID/syscall, which needs CAP_SYS_PTRACE.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import trio

from ckptfs import disk, limits
from ckptfs.bounded_table import BoundedTable
from ckptfs.coherence import read
from ckptfs_daemon.mount.cluster.shared_namespace import Name, SharedNamespace


@dataclass(slots=True)
class PathWalk:
    """What one thread may use once: names that were prefetched, and inodes that it has reached by them."""

    call: bytes
    until_s: float
    step_until_s: float
    fresh: set[Name | int]

    def is_valid(self, call: bytes) -> bool:
        """Return True if a request of this system call continues the walk."""
        return self.call == call != b"" and trio.current_time() < min(self.until_s, self.step_until_s)


def read_syscall(thread: int) -> bytes:
    """Return the system call of a thread with its arguments, stack and code; b"" if it is unknown."""
    try:
        with disk.closing(os.open(f"/proc/{thread}/syscall", os.O_RDONLY)) as fd:
            said = os.read(fd, 512)
    except OSError:
        return b""
    return said if said[:1].isdigit() else b""


class LookupPrefetch:
    """The walks of all threads on this mount."""

    def __init__(self, shared_namespace: SharedNamespace, call_of: Callable[[int], bytes] = read_syscall) -> None:
        """`call_of` returns the system call of a thread."""
        self._shared_namespace = shared_namespace
        self._call_of = call_of
        self._walks = BoundedTable[int, PathWalk](limits.LOOKUPS_MAX)
        self._last_names = BoundedTable[int, bytes](limits.LOOKUPS_MAX)

    def consume_fresh(self, pid: int, what: Name | int) -> bool:
        """Return True, once, if thread `pid` has prefetched this name, or has just reached this inode."""
        walk = self._walks.get(pid)
        if walk is None or what not in walk.fresh or not walk.is_valid(self._call_of(pid)):
            return False
        walk.fresh.discard(what)
        walk.step_until_s = trio.current_time() + limits.LOOKUP_STEP_S
        return True

    async def refresh_name(self, parent: int, name: bytes, *, pid: int) -> None:
        """Make the rows of a name fresh. `pid`: the calling thread, 0 if unknown."""
        if self.consume_fresh(pid, (parent, name)):
            return
        self._last_names[parent] = name
        child = read.find_directory(self._shared_namespace.db, parent, name)
        ahead = [] if child is None else self._predict_steps(child)
        await self._shared_namespace.refresh_name(parent, name, *ahead)
        self._start_walk(pid, ahead)

    async def refresh_inode(self, inode: int, *, pid: int) -> None:
        """Make the rows of an inode fresh, which a walk may just have reached or may start from."""
        if self.consume_fresh(pid, inode):
            return
        ahead = self._predict_steps(inode)
        await self._shared_namespace.refresh_inode(inode, *ahead)
        self._start_walk(pid, ahead)

    def record_reached(self, pid: int, inode: int) -> None:
        """Record that the fresh name leads to `inode`; the reply goes out now."""
        walk = self._walks.get(pid)
        if walk is not None:
            walk.fresh.add(inode)
            walk.step_until_s = trio.current_time() + limits.LOOKUP_STEP_S

    def _start_walk(self, pid: int, ahead: list[Name]) -> None:
        if pid:
            now_s = trio.current_time()
            self._walks[pid] = PathWalk(self._call_of(pid), now_s + limits.LOOKUP_FRESH_S, now_s + limits.LOOKUP_STEP_S, {*ahead})

    def _predict_steps(self, directory: int) -> list[Name]:
        """Return the names that will probably be looked up from a directory on, step by step."""
        steps: list[Name] = []
        child: int | None = directory
        while child is not None and len(steps) < limits.LOOKUP_NAMES_MAX and (name := self._last_names.get(child)) is not None:
            steps.append((child, name))
            child = read.find_directory(self._shared_namespace.db, child, name)
        return steps
