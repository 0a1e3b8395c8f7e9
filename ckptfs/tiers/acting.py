"""Owns who the current thread is for the PFS: most sites squash root there, so what root may not do is done as the file's owner.

The kernel keeps fsuid, fsgid and groups for each thread; glibc's setgroups would change all of them, so it is called by number.
Setting fsuid to anybody but root also takes the thread's capabilities over files away, and gives them back on the return to root.
If we die here: so does the thread.
"""

import contextlib
import ctypes
import os
import platform
import pwd
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TypeVar

Result = TypeVar("Result")
Owner = tuple[int, int]
"""(uid, gid)."""

_SETGROUPS = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}
_libc = ctypes.CDLL(None, use_errno=True)
_thread = threading.local()


class RootSquashed(PermissionError):
    """What root made belongs to somebody else: the filesystem does not take root for root."""


def can_impersonate() -> bool:
    """Whether this process may act as others."""
    return os.geteuid() == 0 and platform.machine() in _SETGROUPS


def is_root() -> bool:
    """Whether the thread is root for filesystems just now."""
    return os.geteuid() == 0 and not getattr(_thread, "acting", False)


@contextlib.contextmanager
def as_owner(uid: int, gid: int) -> Iterator[None]:
    """The thread is this user for filesystems inside the block."""
    own_groups = os.getgroups()
    _set_groups(list(_list_groups(uid, gid)))
    _libc.setfsgid(ctypes.c_uint32(gid))
    _libc.setfsuid(ctypes.c_uint32(uid))
    _thread.acting = True
    try:
        yield
    finally:
        _libc.setfsuid(ctypes.c_uint32(os.geteuid()))
        _libc.setfsgid(ctypes.c_uint32(os.getegid()))
        _set_groups(own_groups)
        _thread.acting = False


@contextlib.contextmanager
def as_process_user() -> Iterator[None]:
    """Inside a block of `as_owner`: the thread is itself again, for what is ours and nobody else's."""
    if not getattr(_thread, "acting", False):
        yield
        return
    uid = _libc.setfsuid(ctypes.c_uint32(os.geteuid()))
    try:
        yield
    finally:
        _libc.setfsuid(ctypes.c_uint32(uid))


def retry_as_owner(call: Callable[[], Result], owners: Callable[[], Iterable[Owner]]) -> Result:
    """`call()` as we are; where that is refused and we are root, as each of `owners()` in turn. Raises the first refusal."""
    try:
        return call()
    except PermissionError as refusal:
        if not can_impersonate() or getattr(_thread, "acting", False):
            raise
        for uid, gid in dict.fromkeys(owners()):
            if uid == 0:
                continue
            try:
                with as_owner(uid, gid):
                    return call()
            except PermissionError:
                continue
        raise refusal


def _set_groups(groups: list[int]) -> None:
    array = (ctypes.c_uint32 * len(groups))(*groups)
    if _libc.syscall(ctypes.c_long(_SETGROUPS[platform.machine()]), ctypes.c_size_t(len(groups)), array) != 0:
        code = ctypes.get_errno()
        raise PermissionError(code, f"setgroups: {os.strerror(code)}")


@lru_cache(maxsize=256)
def _list_groups(uid: int, gid: int) -> tuple[int, ...]:
    try:
        return tuple(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except (KeyError, OSError):
        return (gid,)
