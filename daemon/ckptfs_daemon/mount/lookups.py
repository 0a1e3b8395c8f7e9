"""Owns what the mount knows of walks along paths: which names a thread will look up next, so that one round trip brings all of them.

The kernel asks for one name of a path after the other, and each answer must be what the store says while the system call runs. What was
looked up in a directory the last time, or follows that (f2 after f1), is read together with the directory. It counts as fresh for the same
thread alone, while it is in the same system call with the same arguments, in the order of the path, once, for LOOKUP_FRESH_S, and only if
each step follows the answer to the one before within LOOKUP_STEP_S: a thread that was told of what another node did has come back from its
system call. A wrong guess costs a key in a question that was asked anyway; where /proc does not say what a thread does (CAP_SYS_PTRACE is
needed for that), each name is asked for by itself.
If we die here: nothing is kept.

Owns one question: does the process whose lookup we serve want to create the name?

FUSE asks LOOKUP before it asks CREATE or MKDIR, and does not say what for. While a directory's names on the PFS cannot be known, the two
must be answered differently: who wants to create goes on (P1), who wants to read must not be told that there is nothing. The kernel
shows in /proc/PID/syscall in which system call the process is, and with which arguments.
If we die here: nothing is kept.
"""

import os
import platform
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from ckptfs import disk, limits
from ckptfs.coherence import read
from ckptfs_daemon.mount.shared_namespace import Name, SharedNamespace

_NUMBERED = re.compile(rb"(.*?)([0-9]{1,18})([^0-9]*)", re.DOTALL)


@dataclass(slots=True)
class PathWalk:
    """What was read for one thread: any of the names that come next, step by step, and the inode that it has reached."""

    call: bytes
    until_s: float
    step_until_s: float
    names: deque[tuple[Name, ...]]
    reached: int = 0

    def is_valid(self, call: bytes) -> bool:
        """Whether what is asked now, in this system call, belongs to what was asked before."""
        return self.call == call != b"" and trio.current_time() < min(self.until_s, self.step_until_s)


@dataclass(slots=True)
class StaleOpen:
    """A thread in a system call that opened what was replaced meanwhile, and the file to which its next look-up has led it; 0: none yet."""

    call: bytes
    inode: int = 0


@dataclass(slots=True)
class LookupPattern:
    """What is looked up in a directory: the last names, the newest first, and what they let expect."""

    recent_names: tuple[bytes, ...]
    expected_names: tuple[bytes, ...]

    def record_name(self, name: bytes) -> None:
        """It was looked up. Two rows of names may take turns, as where each file is renamed when it is whole."""
        for one in self.recent_names:
            if successor(one) == name:
                self.recent_names = (name, *(other for other in self.recent_names if other != one))
                self.expected_names = tuple(filter(None, map(successor, self.recent_names)))
                return
        self.recent_names = (name, *(other for other in self.recent_names if other != name))[:2]
        self.expected_names = (name,)


def read_syscall(thread: int) -> bytes:
    """In which one a thread waits: its number and arguments, where it was called and on which stack; empty where nobody says."""
    try:
        with disk.closing(os.open(f"/proc/{thread}/syscall", os.O_RDONLY)) as fd:
            said = os.read(fd, 512)
    except OSError:
        return b""
    return said if said[:1].isdigit() else b""


def successor(name: bytes) -> bytes | None:
    """The name with the next number; None for one without a number."""
    match = _NUMBERED.fullmatch(name)
    if match is None:
        return None
    before, number, after = match.groups()
    return before + b"%0*d" % (len(number), int(number) + 1) + after


class LookupPrefetch:
    """All walks on this mount."""

    def __init__(self, shared_namespace: SharedNamespace, call_of: Callable[[int], bytes] = read_syscall) -> None:
        """`call_of` says in which system call a thread is."""
        self._shared_namespace = shared_namespace
        self._call_of = call_of
        self._walks: OrderedDict[int, PathWalk] = OrderedDict()
        self._stale_opens: OrderedDict[int, StaleOpen] = OrderedDict()
        self._patterns: OrderedDict[int, LookupPattern] = OrderedDict()

    def consume_fresh_name(self, pid: int, parent: int, name: bytes) -> bool:
        """Whether the rows of a name are as the store has them, because a walk brought them; once. `pid` is the thread that asks."""
        walk = self._walks.get(pid)
        if walk is None or not walk.names or (parent, name) not in walk.names[0] or not walk.is_valid(self._call_of(pid)):
            return False
        walk.names.popleft()
        self._record_lookup(parent, name)
        return True

    def consume_fresh_inode(self, pid: int, inode: int) -> bool:
        """Whether the rows of an inode are as the store has them, because a thread has just walked there; once."""
        walk = self._walks.get(pid)
        if walk is None or walk.reached != inode or not walk.is_valid(self._call_of(pid)):
            return False
        walk.reached = 0
        self.extend_step_deadline(pid)
        return True

    async def refresh_name(self, pid: int, parent: int, name: bytes) -> None:
        """The rows of a name are as the store has them; `pid` is the thread that asks, 0 for one that is not known."""
        if self.consume_fresh_name(pid, parent, name):
            return
        self._record_lookup(parent, name)
        child = read.find_directory(self._shared_namespace.db, parent, name)
        ahead = [] if child is None else self._predict_steps(child)
        await self._shared_namespace.refresh_name(parent, name, *_once(ahead))
        self._start_walk(pid, ahead)

    async def refresh_inode(self, pid: int, inode: int) -> None:
        """The rows of an inode are as the store has them, to which a thread has perhaps just walked, or from which it will."""
        if self.consume_fresh_inode(pid, inode):
            return
        ahead = self._predict_steps(inode)
        await self._shared_namespace.refresh_inode(inode, *_once(ahead))
        self._start_walk(pid, ahead)

    def record_reached(self, pid: int, inode: int) -> None:
        """The name that was made fresh leads there; the answer goes out now."""
        walk = self._walks.get(pid)
        if walk is not None:
            walk.reached = inode
            self.extend_step_deadline(pid)

    def extend_step_deadline(self, pid: int) -> None:
        """The thread gets an answer now."""
        walk = self._walks.get(pid)
        if walk is not None:
            walk.step_until_s = trio.current_time() + limits.LOOKUP_STEP_S

    def record_stale_open(self, pid: int) -> None:
        """What the thread looked up and opens was replaced while it waited for that: the kernel looks up the path once more, no oftener."""
        self._walks.pop(pid, None)
        call = self._call_of(pid)
        if call:
            self._stale_opens[pid] = StaleOpen(call)
            if len(self._stale_opens) > limits.LOOKUPS_MAX:
                self._stale_opens.popitem(last=False)

    def has_stale_open(self, pid: int) -> bool:
        """Whether the thread is still in the system call in which that happened."""
        found = self._stale_opens.get(pid)
        if found is not None and found.call != self._call_of(pid):
            del self._stale_opens[pid]
            return False
        return found is not None

    def record_stale_open_target(self, pid: int, inode: int) -> None:
        """A name that such a thread looks up leads to this file, whose bytes are here."""
        if pid in self._stale_opens:
            self._stale_opens[pid].inode = inode

    def is_stale_open_target(self, pid: int, inode: int) -> bool:
        """Whether that is so in the same system call: it opens this file as it was then, whatever others do to it meanwhile."""
        return pid in self._stale_opens and self._stale_opens[pid].inode == inode and self.has_stale_open(pid)

    def _start_walk(self, pid: int, ahead: list[tuple[Name, ...]]) -> None:
        if pid:
            now_s = trio.current_time()
            self._walks.pop(pid, None)
            self._walks[pid] = PathWalk(self._call_of(pid), now_s + limits.LOOKUP_FRESH_S, now_s + limits.LOOKUP_STEP_S, deque(ahead))
            if len(self._walks) > limits.LOOKUPS_MAX:
                self._walks.popitem(last=False)

    def _record_lookup(self, parent: int, name: bytes) -> None:
        habit = self._patterns.get(parent)
        if habit is None:
            self._patterns[parent] = LookupPattern((name,), (name,))
            if len(self._patterns) > limits.LOOKUPS_MAX:
                self._patterns.popitem(last=False)
            return
        habit.record_name(name)
        self._patterns.move_to_end(parent)

    def _predict_steps(self, directory: int) -> list[tuple[Name, ...]]:
        """What will probably be looked up from a directory on, step by step."""
        steps: list[tuple[Name, ...]] = []
        child: int | None = directory
        while child is not None and len(steps) < limits.LOOKUP_NAMES_MAX and (habit := self._patterns.get(child)) is not None:
            names = tuple((child, name) for name in habit.expected_names)
            steps.extend([names] * len(names))
            child = next(filter(None, (read.find_directory(self._shared_namespace.db, *name) for name in names)), None)
        return steps


def _once(steps: list[tuple[Name, ...]]) -> list[Name]:
    return list(dict.fromkeys(name for step in steps for name in step))


_OPEN_FLAGS_ARGUMENT = {"x86_64": {2: 1, 257: 2}, "aarch64": {56: 2}}
"""Number of a system call that opens -> which argument holds its flags. openat2 keeps them in memory: taken for creating."""

_NON_CREATING_SYSCALLS = {
    "x86_64": {4, 6, 21, 59, 76, 80, 84, 87, 89, 90, 92, 94, 137, 188, 189, 191, 192, 194, 195, 197, 198, 254, 260, 262, 263, 267, 268, 269}
    | {280, 303, 322, 332, 439},
    "aarch64": {5, 6, 8, 9, 11, 12, 14, 15, 27, 35, 43, 45, 48, 49, 53, 54, 78, 79, 88, 221, 264, 281, 291, 439},
}
"""System calls that need a name to exist: stat, access, execve, readlink, unlink, chmod, xattrs and their kind."""
_LINE = re.compile(r"(\d+)((?: 0x[0-9a-f]+)*)")


def may_create(pid: int) -> bool:
    """Whether the thread `pid` may be creating a name. True wherever that cannot be known: creating must not fail."""
    try:
        with open(f"/proc/{pid}/syscall", encoding="ascii") as file:
            return is_creating_syscall(file.read(), platform.machine())
    except OSError:
        return True


def is_creating_syscall(line: str, machine: str) -> bool:
    """The same from the line that /proc shows, on a machine of that kind. Pure."""
    match = _LINE.match(line)
    if match is None:
        return True
    number, arguments = int(match[1]), [int(word, 16) for word in match[2].split()]
    flags_at = _OPEN_FLAGS_ARGUMENT.get(machine, {}).get(number)
    if flags_at is not None and flags_at < len(arguments):
        return bool(arguments[flags_at] & os.O_CREAT)
    return number not in _NON_CREATING_SYSCALLS.get(machine, set())
