"""P1, P7: a name is said not to exist only to a system call that certainly creates this very name."""

import os

import pytest
from ckptfs_daemon.mount.handlers import creating_calls

CREATE = os.O_CREAT | os.O_WRONLY
NEW, OLD, HOW_CREATE, HOW_READ, BOTH, DEEP, AGAIN, LONG = (0x7F00_0000_1000 * number for number in range(1, 9))
MEMORY = {
    NEW: b"/ckpt/run/new\0", OLD: b"/ckpt/old/\0", HOW_CREATE: CREATE.to_bytes(8, "little"), HOW_READ: bytes(8), BOTH: b"there/new\0",
    DEEP: b"/ckpt/new/file\0", AGAIN: b"new/./new/\0", LONG: b"x" * 10_000,
}  # fmt: skip
CWD = 0xFFFF_FF9C


def line(number: int, *arguments: int, stack: int = 0x7FFE_1234_5678, code: int = 0x7F12_3456_7890) -> str:
    """A line of /proc/PID/syscall: number, six arguments, stack pointer, program counter."""
    six = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    return f"{number} {' '.join(hex(value) for value in six)} {stack:#x} {code:#x}\n"


def read(address: int, count: int) -> bytes:
    start = max((known for known in MEMORY if known <= address), default=0)
    if not start or address >= start + len(MEMORY[start]):
        raise OSError(5, "no memory there")
    return MEMORY[start][address - start :][:count]


@pytest.mark.parametrize(
    ("machine", "text", "expected"),
    [
        ("x86_64", line(257, CWD, NEW, CREATE, 0o644), True),
        ("x86_64", line(257, CWD, NEW, os.O_RDONLY), False),
        ("x86_64", line(257, CWD, NEW, os.O_PATH | os.O_CREAT), False),  # O_PATH creates nothing
        ("x86_64", line(2, NEW, CREATE), True),
        ("x86_64", line(2, NEW, os.O_RDWR), False),
        ("x86_64", line(437, CWD, NEW, HOW_CREATE, 24), True),  # openat2
        ("x86_64", line(437, CWD, NEW, HOW_READ, 24), False),
        ("x86_64", line(437, CWD, NEW, 0x1234, 24), False),  # unreadable
        ("x86_64", line(85, NEW, 0o644), True),  # creat
        ("x86_64", line(85, NEW, 0o644, stack=0xFFB0_0000, code=0x0804_8000), False),  # readlink of a 32-bit program
        ("x86_64", line(83, NEW, 0o755), True),  # mkdir
        ("x86_64", line(258, CWD, NEW, 0o755), True),  # mkdirat
        ("x86_64", line(133, NEW), True),  # mknod
        ("x86_64", line(88, OLD, NEW), True),  # symlink
        ("x86_64", line(266, OLD, CWD, NEW), True),  # symlinkat
        ("x86_64", line(82, OLD, NEW), True),  # rename
        ("x86_64", line(82, NEW, OLD), False),  # the name is renamed, so it must exist
        ("x86_64", line(82, BOTH, NEW), False),  # either of them
        ("x86_64", line(316, CWD, OLD, CWD, NEW, 1), True),  # RENAME_NOREPLACE
        ("x86_64", line(316, CWD, OLD, CWD, NEW, 2), False),  # RENAME_EXCHANGE
        ("x86_64", line(265, CWD, OLD, CWD, NEW, 0), True),  # linkat
        ("x86_64", line(257, CWD, DEEP, CREATE, 0o644), False),  # a directory on the way
        ("x86_64", line(257, CWD, AGAIN, CREATE, 0o644), False),  # either of them
        ("x86_64", line(257, CWD, LONG, CREATE, 0o644), False),
        ("x86_64", line(257, CWD, 0x10, CREATE, 0o644), False),
        ("x86_64", line(332, CWD, NEW), False),  # statx
        ("x86_64", line(262, CWD, NEW), False),  # newfstatat
        ("x86_64", line(426, 3, 1, 1, 1), False),  # io_uring_enter
        ("aarch64", line(56, CWD, NEW, CREATE), True),
        ("aarch64", line(56, CWD, NEW, os.O_RDONLY), False),
        ("aarch64", line(34, CWD, NEW), True),
        ("aarch64", line(79, CWD, NEW), False),
        ("riscv64", line(38, CWD, OLD, CWD, NEW), False),
        ("s390x", line(288, CWD, NEW, CREATE), False),
        ("x86_64", "running\n", False),
        ("x86_64", "", False),
        ("x86_64", "-1 0x7ffe10 0x7f0010\n", False),
    ],
)
def test_the_system_call_decides(machine: str, text: str, expected: bool) -> None:
    assert certain(text, machine) is expected


def certain(text: str, machine: str) -> bool:
    """As `is_creating`, which takes memory that cannot be read for an unknown call."""
    try:
        return creating_calls.is_creating_call(text, machine, b"new", read)
    except OSError:
        return False


@pytest.mark.parametrize("thread", [0, -1, 2**22 + 1, os.getpid()], ids=["none", "wrong", "gone", "self"])
def test_what_cannot_be_known_counts_as_reading(thread: int) -> None:
    assert creating_calls.is_creating(thread, b"new") is False
