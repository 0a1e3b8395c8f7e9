"""Owns one question: does the process whose lookup we serve want to create the name?

FUSE asks LOOKUP before it asks CREATE or MKDIR, and does not say what for. While a directory's names on the PFS cannot be known, the two
must be answered differently: who wants to create goes on (P1), who wants to read must not be told that there is nothing. The kernel
shows in /proc/PID/syscall in which system call the process is, and with which arguments.
If we die here: nothing is kept.
"""

import os
import platform
import re

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
