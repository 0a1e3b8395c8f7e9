"""P1: the system call of a process shows whether a look-up means to create or to read."""

import os

import pytest
from ckptfs_daemon.mount import lookups

CREATING = os.O_CREAT | os.O_WRONLY


def line(number: int, *arguments: int) -> str:
    """A line of /proc/PID/syscall: number, six arguments, stack pointer, program counter."""
    six = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    return f"{number} {' '.join(hex(value) for value in six)} 0x7ffe10 0x7f0010\n"


@pytest.mark.parametrize(
    ("machine", "text", "expected"),
    [
        ("x86_64", line(257, 0xFFFFFF9C, 0x5555, CREATING, 0o644), True),
        ("x86_64", line(257, 0xFFFFFF9C, 0x5555, os.O_RDONLY), False),
        ("x86_64", line(2, 0x5555, CREATING), True),
        ("x86_64", line(2, 0x5555, os.O_RDWR), False),
        ("x86_64", line(83, 0x5555, 0o755), True),  # mkdir
        ("x86_64", line(82, 0x5555, 0x6666), True),  # rename
        ("x86_64", line(332, 0xFFFFFF9C, 0x5555), False),  # statx
        ("x86_64", line(262, 0xFFFFFF9C, 0x5555), False),  # newfstatat
        ("aarch64", line(56, 0xFFFFFF9C, 0x5555, CREATING), True),
        ("aarch64", line(56, 0xFFFFFF9C, 0x5555, os.O_RDONLY), False),
        ("aarch64", line(79, 0xFFFFFF9C, 0x5555), False),
        ("riscv64", line(56, 0xFFFFFF9C, 0x5555, os.O_RDONLY), True),
        ("x86_64", "running\n", True),
        ("x86_64", "", True),
        ("x86_64", "-1 0x7ffe10 0x7f0010\n", True),
    ],
)
def test_the_system_call_decides(machine: str, text: str, expected: bool) -> None:
    assert lookups.is_creating_syscall(text, machine) is expected


def test_where_nothing_can_be_known_creating_goes_on() -> None:
    assert lookups.may_create(2**22 + 1) is True
