"""Owns which calls of others wait for something to come, and since when: a call in which nothing moves for too long is cancelled.

gRPC hands a call to a thread as soon as its headers are here. Whoever sends no more than those would hold that thread for ever.
If we die here: every call ends with us.

Owns how many files a process of ours may have open: as many as we are given, and no more of them for strangers than leave us enough.

If we die here: nothing was changed but for this process.
"""

import contextlib
import errno
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from ckptfs.errors import CkptfsError, TimedOut

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


class CallWatchdog:
    """Calls, and until when something must have moved in each. `sweep` is to be called now and then; any thread may call."""

    def __init__(self) -> None:
        self._deadlines: dict[Call, float] = {}
        self._cancelled: set[Call] = set()

    @contextmanager
    def watch_call(self, context: Call, patience_s: float, on_abandoned: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Watch a call for the time of the block. Raises TimedOut when it was cancelled; where nothing can be raised any more, in a
        generator that gRPC has left, `left` is told.
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
                raise TimedOut("nothing came for too long") from failure
            raise
        finally:
            del self._deadlines[context]
            self._cancelled.discard(context)

    def read_message(self, messages: Iterator[bytes], context: Call, patience_s: float) -> bytes:
        """Return the one message of a call, awaited as the first of a stream. Raises TimedOut or MalformedCall."""
        with self.watch_call(context, patience_s):
            for message in messages:
                return message
            raise MalformedCall("a call has a message")

    def extend_deadline(self, context: Call, patience_s: float) -> None:
        """Something came; the next has so long."""
        self._deadlines[context] = time.monotonic() + patience_s

    def cancel_late_calls(self) -> None:
        """Cancel the calls whose time is over."""
        now = time.monotonic()
        for context, until in list(self._deadlines.items()):
            if now > until:
                self._cancelled.add(context)
                context.cancel()
                if context not in self._deadlines:
                    self._cancelled.discard(context)  # It ended just now.


CONNECTIONS_SHARE = 0.25


def raise_descriptor_limit() -> None:
    """Every file that is open, moved or sent costs a descriptor: take as many as we may, as root as many as there are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = int(Path("/proc/sys/fs/nr_open").read_text())
    for limit in (most, hard):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return


def get_connections_max(at_most: int) -> int:
    """How many connections of whoever calls may be open at once."""
    return min(at_most, int(CONNECTIONS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
