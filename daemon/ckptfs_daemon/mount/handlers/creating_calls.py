"""System calls that create: whether the thread behind a lookup is about to create the name.

FUSE sends LOOKUP before CREATE, MKDIR and the like, and does not say why. While a directory of the PFS cannot be read, the reply "no such
name" lets a create go on (P1). A program that reads would take it for the truth: a job that looks for its checkpoint begins at zero. So the
reply goes only to a thread that is known to create this very name: its system call creates, the last part of its path is the name, and no
other part is. What is unknown counts as reading, and gets the error of the PFS: requests through io_uring (threads of the kernel make the
call), processes outside of our pid namespace, 32-bit programs, machines without a table, and everything without CAP_SYS_PTRACE.

The thread waits for the reply, so its call and its memory stay as they are. Another thread of the program may change the path meanwhile;
it deceives only itself. Reading the memory of a program may wait for a filesystem (this one as well): call it in a worker thread.
"""

import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

RUNNING_TRIES = 5
RUNNING_WAIT_S = 0.01
PATH_BYTES_MAX = 4096
_PAGE_BYTES = 4096
_RENAME_EXCHANGE = 2
_LOW_BYTES = 1 << 32
"""Stack and code of a 32-bit program lie below. The numbers of its system calls are others."""
_ARGUMENTS = 6
_LINE = re.compile(rf"(\d+)((?: 0x[0-9a-f]+){{{_ARGUMENTS}}}) (0x[0-9a-f]+) (0x[0-9a-f]+)\s*")

ReadMemory = Callable[[int, int], bytes]
"""(address, count) -> bytes of the thread's memory, fewer at the end of a page. Raises OSError."""


@dataclass(frozen=True, slots=True)
class CreatingCall:
    """The argument positions of a system call that may create. `open_how` begins with flags."""

    path: int
    other_path: int | None = None
    open_flags: int | None = None
    open_how: int | None = None
    rename_flags: int | None = None


_OPENAT, _OPENAT2 = CreatingCall(1, open_flags=2), CreatingCall(1, open_how=2)
_FIRST, _SECOND, _THIRD = CreatingCall(0), CreatingCall(1), CreatingCall(2)
_MOVE, _MOVE_AT, _MOVE_AT2 = CreatingCall(1, other_path=0), CreatingCall(3, other_path=1), CreatingCall(3, other_path=1, rename_flags=4)
_GENERIC = {
    56: _OPENAT, 437: _OPENAT2, 34: _SECOND, 33: _SECOND, 36: _THIRD, 37: _MOVE_AT, 38: _MOVE_AT, 276: _MOVE_AT2,
}  # fmt: skip
_CALLS: dict[str, dict[int, CreatingCall]] = {
    # open, openat, openat2, creat; mkdir, mkdirat, mknod, mknodat, symlink, symlinkat; link, linkat, rename, renameat, renameat2
    "x86_64": {
        2: CreatingCall(0, open_flags=1), 257: _OPENAT, 437: _OPENAT2, 85: _FIRST,
        83: _FIRST, 258: _SECOND, 133: _FIRST, 259: _SECOND, 88: _SECOND, 266: _THIRD,
        86: _MOVE, 265: _MOVE_AT, 82: _MOVE, 264: _MOVE_AT, 316: _MOVE_AT2,
    },
    # openat, openat2; mkdirat, mknodat, symlinkat; linkat, renameat (not on riscv64), renameat2
    "aarch64": _GENERIC,
    "riscv64": {number: call for number, call in _GENERIC.items() if number != 38},
}  # fmt: skip


def is_creating(thread: int, name: bytes) -> bool:
    """Return True if `thread`, which waits for the lookup of `name`, is certainly about to create it.

    May wait.
    """
    try:
        # Of another pid namespace, the numbers mean other processes.
        if thread <= 0 or os.readlink("/proc/self") != str(os.getpid()):
            return False
        line = _read_line(thread)
        with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
            found = is_creating_call(line, platform.machine(), name, lambda address, count: os.pread(memory.fileno(), count, address))
        return found and _read_line(thread) == line
    except (OSError, OverflowError):
        return False


def _read_line(thread: int) -> str:
    """Return /proc/PID/syscall. A thread that has just made its call may not sleep yet."""
    for _ in range(RUNNING_TRIES):
        with open(f"/proc/{thread}/syscall", encoding="ascii") as file:
            line = file.read()
        if line != "running\n":
            break
        time.sleep(RUNNING_WAIT_S)
    return line


def is_creating_call(line: str, machine: str, name: bytes, read_memory: ReadMemory) -> bool:
    """Return the same from a line of /proc/PID/syscall on a machine of that type."""
    match = _LINE.fullmatch(line)
    if match is None:
        return False
    arguments, stack, code = [int(word, 16) for word in match[2].split()], int(match[3], 16), int(match[4], 16)
    call = _CALLS.get(machine, {}).get(int(match[1]))
    if call is None or (stack < _LOW_BYTES and code < _LOW_BYTES) or not _asks_for_new_name(call, arguments, read_memory):
        return False
    if call.other_path is not None and name in _read_names(arguments[call.other_path], read_memory):
        return False
    names = _read_names(arguments[call.path], read_memory)
    return names[-1:] == [name] and names.count(name) == 1


def _asks_for_new_name(call: CreatingCall, arguments: list[int], read_memory: ReadMemory) -> bool:
    if call.rename_flags is not None:
        return not arguments[call.rename_flags] & _RENAME_EXCHANGE
    if call.open_flags is not None:
        flags = arguments[call.open_flags]
    elif call.open_how is not None:
        flags = int.from_bytes(read_memory(arguments[call.open_how], 8), "little")
    else:
        return True
    return bool(flags & os.O_CREAT) and not flags & os.O_PATH


def _read_names(address: int, read_memory: ReadMemory) -> list[bytes]:
    path = b""
    while b"\0" not in path and len(path) < PATH_BYTES_MAX:
        piece = read_memory(address + len(path), _PAGE_BYTES - (address + len(path)) % _PAGE_BYTES)
        if not piece:
            return []
        path += piece
    return [name for name in path.partition(b"\0")[0].split(b"/") if name not in (b"", b".")]
