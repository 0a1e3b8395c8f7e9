"""Where errors of the control servers become gRPC statuses: once, here. The remedy travels as trailing metadata.

If we die here: the client sees the connection end.
"""

import errno
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from ckptfs.errors import CkptfsError, Refused, TierUnavailable, TimedOut

log = logging.getLogger(__name__)
REMEDY = "ckptfs-remedy-bin"


class Counted:
    """How often calls were refused, by reason. Several threads add."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, reason: str) -> None:
        """One more."""
        with self._lock:
            self._counts[reason] += 1

    def figures(self) -> dict[str, int]:
        """{reason: count}; a snapshot."""
        with self._lock:
            return dict(self._counts)


Call = TypeVar("Call", bound=Callable[..., Any])

STATUS_OF_ERRNO = {
    errno.ENOENT: grpc.StatusCode.NOT_FOUND,
    errno.EINVAL: grpc.StatusCode.INVALID_ARGUMENT,
    errno.ENOTDIR: grpc.StatusCode.INVALID_ARGUMENT,
    errno.EACCES: grpc.StatusCode.PERMISSION_DENIED,
    errno.EPERM: grpc.StatusCode.PERMISSION_DENIED,
    errno.ETIMEDOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    errno.EUSERS: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def translated(call: Call) -> Call:
    """A servicer's unary method that answers errors with their status, and counts them in its `refused`."""

    @functools.wraps(call)
    def wrapped(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return call(self, request, context)
        except (CkptfsError, OSError) as failure:
            _abort(self.refused, context, failure)
        except Exception:
            log.exception("a control call failed: %s", call.__name__)
            context.abort(grpc.StatusCode.INTERNAL, "the daemon failed to answer; its log says why")

    return wrapped  # type: ignore[return-value]


def translated_stream(call: Call) -> Call:
    """A servicer's streaming method that ends with the status of its error."""

    @functools.wraps(call)
    def wrapped(self: Any, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from call(self, request, context)
        except (CkptfsError, OSError) as failure:
            _abort(self.refused, context, failure)
        except GeneratorExit:
            raise
        except Exception:
            log.exception("a control call failed: %s", call.__name__)
            context.abort(grpc.StatusCode.INTERNAL, "the daemon failed to answer; its log says why")

    return wrapped  # type: ignore[return-value]


def _abort(refused: Counted, context: grpc.ServicerContext, failure: CkptfsError | OSError) -> None:
    """End the call with the status that belongs to `failure`, and count it."""
    if isinstance(failure, Refused):
        code = grpc.StatusCode.FAILED_PRECONDITION
    elif isinstance(failure, TimedOut):
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    elif isinstance(failure, TierUnavailable):
        code = grpc.StatusCode.UNAVAILABLE
    else:
        code = STATUS_OF_ERRNO.get(failure.errno or 0, grpc.StatusCode.UNKNOWN)
    refused.add(code.name.lower())
    remedy = failure.remedy if isinstance(failure, CkptfsError) else ""
    if remedy:
        context.set_trailing_metadata(((REMEDY, remedy.encode()),))
    words = str(failure) if isinstance(failure, CkptfsError) else failure.strerror or str(failure)
    context.abort(code, words)
