"""Where calls of the control servers come in: each message awaited for a bounded time, parsed, and errors turned into gRPC statuses:
once, here. The remedy travels as trailing metadata.

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
from google.protobuf.message_factory import GetMessageClass

from ckptfs import limits
from ckptfs.errors import CkptfsError, InvalidArgument, TierUnavailable, TimedOut, posix_error
from ckptfs.protocol import control_pb2 as pb
from ckptfs.server_limits import CallWatchdog, parse_message

log = logging.getLogger(__name__)
REMEDY_KEY = "ckptfs-remedy-bin"


class RefusedCalls:
    """How often calls were refused, by reason. Several threads add."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def record(self, reason: str) -> None:
        """One more."""
        with self._lock:
            self._counts[reason] += 1

    def get_counts(self) -> dict[str, int]:
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
    errno.ENOSYS: grpc.StatusCode.UNIMPLEMENTED,
}


def translate_errors(call: Call) -> Call:
    """A servicer's unary method that answers errors with their status, and counts them in its `refused`."""

    @functools.wraps(call)
    def wrapped(self: Any, *asked: Any) -> Any:
        context: grpc.ServicerContext = asked[-1]
        try:
            return call(self, *asked)
        except (CkptfsError, OSError) as failure:
            _abort(self.refused, context, failure)
        except grpc.RpcError:
            raise  # The client went away before its message was here: gRPC knows.
        except Exception:
            log.exception("a control call failed: %s", call.__name__)
            context.abort(grpc.StatusCode.INTERNAL, "the daemon failed to answer; its log says why")

    return wrapped  # type: ignore[return-value]


def translate_stream_errors(call: Call) -> Call:
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


def _abort(refused: RefusedCalls, context: grpc.ServicerContext, failure: CkptfsError | OSError) -> None:
    """End the call with the status that belongs to `failure`, and count it."""
    if isinstance(failure, InvalidArgument):
        code = grpc.StatusCode.FAILED_PRECONDITION
    elif isinstance(failure, TimedOut):
        code = grpc.StatusCode.DEADLINE_EXCEEDED
    elif isinstance(failure, TierUnavailable):
        code = grpc.StatusCode.UNAVAILABLE
    else:
        code = STATUS_OF_ERRNO.get(failure.errno or 0, grpc.StatusCode.UNKNOWN)
    refused.record(code.name.lower())
    remedy = failure.remedy if isinstance(failure, CkptfsError) else ""
    if remedy:
        context.set_trailing_metadata(((REMEDY_KEY, remedy.encode()),))
    words = str(failure) if isinstance(failure, CkptfsError) else failure.strerror or str(failure)
    context.abort(code, words)


def require_inode_number(number: int) -> int:
    """A number that can be an inode's. Raises ENOENT."""
    if not is_inode_number(number):
        raise posix_error(errno.ENOENT)
    return number


def is_inode_number(number: int) -> bool:
    """Whether an inode may have that number."""
    return 0 < number < 2**63


class ControlMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Every method of a service by its name. Messages come as bytes and are parsed here, so that what is no message, what never comes, and
    what is asked of a method that does not exist, is counted, and leaves no line in the log.
    """

    def __init__(self, service: str, servicer: Any, watchdog: CallWatchdog) -> None:
        self.refused: RefusedCalls = servicer.refused
        self._watchdog = watchdog
        described = pb.DESCRIPTOR.services_by_name[service]
        self._handlers = {f"/{described.full_name}/{method.name}": self._build_handler(method, servicer) for method in described.methods}
        self._unknown = grpc.stream_unary_rpc_method_handler(self._reject_unknown_method)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call."""
        return self._handlers.get(handler_call_details.method, self._unknown)

    def _build_handler(self, method: Any, servicer: Any) -> Any:
        """On the wire one message comes; here it is awaited as the first one of a stream, for a bounded time."""
        kind, call = GetMessageClass(method.input_type), getattr(servicer, method.name)

        def one(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            return call(self._read_message(kind, messages, context), context)

        def several(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
            yield from call(self._read_message(kind, messages, context), context)

        if method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(several, response_serializer=_serialize)
        return grpc.stream_unary_rpc_method_handler(one, response_serializer=_serialize)

    @translate_errors
    def _read_message(self, kind: Any, messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        return parse_message(kind, self._watchdog.read_message(messages, context, limits.CONTROL_MESSAGE_S))

    @translate_errors
    def _reject_unknown_method(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        raise OSError(errno.ENOSYS, "there is no such method")


def _serialize(reply: Any) -> bytes:
    data: bytes = reply.SerializeToString()
    return data
