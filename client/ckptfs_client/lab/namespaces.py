"""Owns the network namespaces of a lab: one file for each in DIR/net, on which the namespace is mounted; so they outlive the command.

They are entered by setns(2) in a thread of our own, so the rest of the process stays where it is. Mount namespaces are not touched:
every mount of the lab is seen from everywhere. A process belongs to a node when it runs in its namespace, whatever its pid.
If we die here: the files and mounts are found again by name.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ckptfs_client.failures import CommandFailed

Result = TypeVar("Result")

CLONE_NEWNET = 0x4000_0000
MS_BIND = 4096
MNT_FORCE, MNT_DETACH = 1, 2
ACT_WAIT_S = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


def make_namespace(path: Path) -> None:
    """A new network namespace, mounted on `path`; one that is there already stays. Raises OSError."""
    if has_namespace(path):
        return
    path.touch()

    def unshared() -> None:
        _checked(_libc.unshare(CLONE_NEWNET), "a network namespace cannot be made")
        _checked(_libc.mount(b"/proc/thread-self/ns/net", os.fsencode(path), None, MS_BIND, None), f"{path} cannot be mounted")

    _in_a_thread(unshared)


def remove_namespace(path: Path) -> None:
    """Let go of a namespace; it ends, with its interfaces, when the last process in it has ended."""
    if has_namespace(path):
        detach_mount(path)
    path.unlink(missing_ok=True)


def has_namespace(path: Path) -> bool:
    """Whether a namespace is mounted on `path`."""
    return get_namespace_id(path) is not None


def get_namespace_id(path: Path) -> tuple[int, int] | None:
    """What tells a namespace from every other, as /proc/PID/ns/net shows it too; None when none is mounted there."""
    try:
        found = os.stat(path)
        own = os.stat("/proc/self/ns/net")
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_dev == own.st_dev else None


def enter_namespace(path: Path) -> None:
    """The calling thread, and what it starts, is in that namespace from now on. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(fd, CLONE_NEWNET), f"{path} cannot be entered")
    finally:
        os.close(fd)


def run_in_namespace(path: Path, act: Callable[[], Result]) -> Result:
    """The result of `act`, called in that namespace by a thread of its own. Raises what it raises, and Failed when it takes too long."""

    def entered() -> Result:
        enter_namespace(path)
        return act()

    return _in_a_thread(entered)


def detach_mount(point: Path) -> None:
    """umount2(2), lazily; what is not mounted is no error."""
    _libc.umount2(os.fsencode(point), MNT_DETACH)


def unmount(point: Path) -> None:
    """umount2(2) of what nobody uses. Raises OSError."""
    _checked(_libc.umount2(os.fsencode(point), 0), f"{point} cannot be unmounted")


def abort_mount(point: Path) -> None:
    """Detach a FUSE mount after its connection was ended: system calls that hang in it return with an error."""
    _libc.umount2(os.fsencode(point), MNT_FORCE | MNT_DETACH)


def _in_a_thread(act: Callable[[], Result]) -> Result:
    results: list[Result] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(act())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="in a namespace", daemon=True)
    thread.start()
    thread.join(ACT_WAIT_S)
    if failures:
        raise failures[0]
    if not results:
        raise CommandFailed(f"the kernel did not set up the lab's network within {ACT_WAIT_S:.0f} s")
    return results[0]


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
