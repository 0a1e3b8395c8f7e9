"""Waits with a bound: for a descriptor, and for a call that may hang. Which calls hang now."""

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

from ckptfs import limits
from ckptfs.errors import TimedOut

T = TypeVar("T")


def list_stalled(moved_s: Mapping[int, float]) -> list[int]:
    """Return which steps hang at the PFS, at most PFS_STALLED_MAX.

    `moved_s`: when each of them last got on, by the monotonic clock.
    """
    stalled_s = time.monotonic() - limits.PFS_STALL_S
    return [step for step, one in list(moved_s.items()) if one < stalled_s][: limits.PFS_STALLED_MAX]


def wait_ready(file: int | socket.socket, event: int, timeout_s: float) -> bool:
    """Wait until a descriptor is ready for `event` (select.POLLIN, ...). Returns False if time is up."""
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def run_in_time(act: Callable[[], T], timeout_s: float, name: str) -> T:
    """Run `act` in a thread, which stays behind if it hangs. Raises TimedOut, and what `act` raises."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as failure:
            future.set_exception(failure)

    threading.Thread(target=run, name=name, daemon=True).start()
    if not wait([future], timeout_s).done:
        raise TimedOut(f"{name} does not answer within {timeout_s:g} s")
    return future.result()
