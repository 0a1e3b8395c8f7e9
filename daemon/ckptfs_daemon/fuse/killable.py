"""Waits of handlers that end when the caller is killed.

A caller that was killed lives in the kernel until its request is answered. So a wait inside of `killable_wait` ends with EINTR if SIGKILL
is pending for the calling thread. The kernel makes SIGKILL of each signal that ends a process, except those that dump core. A signal that
the program handles ends no wait, as on NFS: few programs expect EINTR from a file. INTERRUPT requests do not tell enough: the kernel sends
one at the first signal, none for a SIGKILL after it, and none for O_DIRECT. So the callers of all waits are looked at in turn.

A handler is ended nowhere else. In such a wait it must be able to fail: it holds nothing that is half changed, or gives it back, as at any
other error. A call in a thread that may change something is awaited to its end, and so is the store, which answers or counts as
disconnected within seconds.

A caller in a foreign pid namespace has pid 0, so nothing ends its waits. Waits outside of a request are never ended.
"""

import contextlib
import errno
from collections.abc import Iterator
from contextvars import ContextVar

import trio

from ckptfs import procfs
from ckptfs.errors import posix_error
from ckptfs_daemon.fuse import session
from ckptfs_daemon.fuse.request import Request, get_current_request

POLL_S, POLL_WAITS = 0.2, 100
"""The callers are looked at this often, and less often if more than so many wait."""

_request: ContextVar[Request | None] = ContextVar("request", default=None)
_waits: dict[trio.CancelScope, Request] = {}
_THREAD = trio.CapacityLimiter(1)
"""Other threads may all hang in calls on a tier."""


def set_request() -> None:
    """Note that this task serves the request being processed. Call it before the first await."""
    _request.set(get_current_request())


def is_interrupted() -> bool:
    """Return True if any signal came for the caller of this task's request."""
    request = _request.get()
    return request is not None and request.number in session.interrupted_requests


@contextlib.contextmanager
def killable_wait() -> Iterator[None]:
    """End the wait in this block when the caller is killed. Raises EINTR then."""
    request = _request.get()
    if request is None:
        yield
        return
    with trio.CancelScope() as scope:
        _waits[scope] = request
        try:
            yield
        finally:
            del _waits[scope]
    if scope.cancelled_caught:
        raise posix_error(errno.EINTR)


async def sleep(seconds: float) -> None:
    """Sleep. Raises EINTR if the caller is killed."""
    with killable_wait():
        await trio.sleep(seconds)


async def end_waits() -> None:
    """End the waits of killed callers. A task."""
    while True:
        await trio.sleep(POLL_S * (1 + len(_waits) // POLL_WAITS))
        if not _waits:
            continue
        for scope in await trio.to_thread.run_sync(_list_killed, dict(_waits), limiter=_THREAD):
            scope.cancel()


def _list_killed(waits: dict[trio.CancelScope, Request]) -> list[trio.CancelScope]:
    return [scope for scope, request in waits.items() if procfs.is_killed(request.pid)]
