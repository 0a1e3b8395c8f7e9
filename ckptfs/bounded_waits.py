"""Waits with a bound: for a descriptor, and for a call that may hang."""

import select
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from ckptfs.errors import TimedOut

T = TypeVar("T")


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
