"""Bounds of our gRPC servers, and counters of what they refuse.

Calls in which nothing moves are cancelled, descriptors are kept free.
gRPC assigns a thread to a call when its headers arrive. A client that sends nothing more would hold that thread for ever.
"""

import contextlib
import errno
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from ckptfs import limits
from ckptfs.errors import CkptfsError, TimedOut

CONNECTIONS_SHARE = 0.25
OTHERS = "others"
Call = Any
"""A `grpc.ServicerContext`."""


class MalformedCall(CkptfsError):
    """A call without a message, or with bytes that are not one."""

    errno = errno.EINVAL


def parse_message(kind: Any, data: bytes) -> Any:
    """Parse a protobuf message of the class `kind`. Raises MalformedCall."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise MalformedCall(f"this is no {kind.DESCRIPTOR.name}") from None


class RefusedCalls:
    """Counters of rejected calls by caller and reason. Thread-safe.

    Callers beyond `limits.PEER_COUNTERS_MAX` share one.
    """

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()

    def record(self, reason: str, caller: str = "") -> None:
        with self._lock:
            name = caller if caller in self._counts or len(self._counts) < limits.PEER_COUNTERS_MAX else OTHERS
            self._counts.setdefault(name, Counter())[reason] += 1

    def get_counts(self) -> dict[str, dict[str, int]]:
        """Return a snapshot {caller: {reason: count}}."""
        with self._lock:
            return {caller: dict(counts) for caller, counts in self._counts.items()}


class CallWatchdog:
    """Deadlines of running calls. `cancel_late_calls` must run regularly. Safe for several threads."""

    def __init__(self) -> None:
        self._deadlines: dict[Call, float] = {}
        self._cancelled: set[Call] = set()

    @contextlib.contextmanager
    def watch_call(self, context: Call, patience_s: float, on_abandoned: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Watch a call during the block. Raises TimedOut if it was cancelled.

        In a generator that gRPC has left nothing can be raised; `on_abandoned` is called instead.
        """
        self.extend_deadline(context, patience_s)
        try:
            yield
        except GeneratorExit:
            if context in self._cancelled:
                on_abandoned()
            raise
        except Exception as failure:
            if context in self._cancelled:
                raise TimedOut("no progress for too long") from failure
            raise
        finally:
            del self._deadlines[context]
            self._cancelled.discard(context)

    def read_message(self, messages: Iterator[bytes], context: Call, patience_s: float) -> bytes:
        """Return the one message of a call, from a stream. Raises TimedOut or MalformedCall."""
        with self.watch_call(context, patience_s):
            for message in messages:
                return message
            raise MalformedCall("a call has a message")

    def extend_deadline(self, context: Call, patience_s: float) -> None:
        """Note progress of a call and give it `patience_s` more."""
        self._deadlines[context] = time.monotonic() + patience_s

    def cancel_late_calls(self) -> None:
        now = time.monotonic()
        for context, until in list(self._deadlines.items()):
            if now > until:
                self._cancelled.add(context)
                context.cancel()
                if context not in self._deadlines:
                    self._cancelled.discard(context)  # The call has just ended.


def raise_descriptor_limit() -> None:
    """Raise the limit of open files: as root to the system's maximum, else to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = int(Path("/proc/sys/fs/nr_open").read_text())
    for limit in (most, hard):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return


def get_connections_max(at_most: int) -> int:
    """Return how many connections of callers may be open: at most `at_most`."""
    return min(at_most, int(CONNECTIONS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
