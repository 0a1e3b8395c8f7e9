"""The entry of control calls: waits for the message, parses it, and turns errors into gRPC statuses.

A remedy travels as trailing metadata. Rejected calls are counted and leave no line in the log.
"""

import contextlib
import errno
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message_factory import GetMessageClass

from ckptfs import limits
from ckptfs.errors import CkptfsError, InvalidArgument, TierUnavailable, posix_error
from ckptfs.protocol import control_pb2 as pb
from ckptfs.server_limits import CallWatchdog, RefusedCalls, parse_message

log = logging.getLogger(__name__)
REMEDY_KEY = "ckptfs-remedy-bin"
KEEPALIVE_S = 2.0


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


@contextlib.contextmanager
def _turned_into_statuses(servicer: Any, context: grpc.ServicerContext, name: str) -> Iterator[None]:
    """Turn an error of the block into the status of the call, and count it."""
    try:
        yield
    except (CkptfsError, OSError) as failure:
        _abort(servicer.refused, context, failure)
    except grpc.RpcError:
        raise  # The client disconnected before its message arrived; gRPC ends the call.
    except Exception:
        log.exception("control call %s: failed", name)
        context.abort(grpc.StatusCode.INTERNAL, "the daemon failed to answer; its log says why")


def translate_errors(call: Call) -> Call:
    """Wrap a unary method of a servicer: errors become statuses and are counted in its `refused`."""

    @functools.wraps(call)
    def wrapped(self: Any, *asked: Any) -> Any:
        with _turned_into_statuses(self, asked[-1], call.__name__):
            return call(self, *asked)

    return wrapped  # type: ignore[return-value]


def translate_stream_errors(call: Call) -> Call:
    """Wrap a streaming method of a servicer likewise."""

    @functools.wraps(call)
    def wrapped(self: Any, *asked: Any) -> Iterator[Any]:
        with _turned_into_statuses(self, asked[-1], call.__name__):
            yield from call(self, *asked)

    return wrapped  # type: ignore[return-value]


def _abort(refused: RefusedCalls, context: grpc.ServicerContext, failure: CkptfsError | OSError) -> None:
    """End the call with the status of `failure`, and count it."""
    if isinstance(failure, InvalidArgument):
        code = grpc.StatusCode.FAILED_PRECONDITION
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


def stream_changes(steps: Iterator[pb.Progress], context: grpc.ServicerContext) -> Iterator[pb.Progress]:
    """Yield the steps that differ from the last one sent, until one is done.

    One is sent periodically, to notice a client that disconnected. `steps` waits between two of them.
    """
    last_sent, last_sent_at = pb.Progress(), 0.0
    for progress in steps:
        if not context.is_active():
            return
        if progress != last_sent or time.monotonic() - last_sent_at > KEEPALIVE_S:
            last_sent, last_sent_at = progress, time.monotonic()
            yield progress
        if progress.done:
            return


def require_inode_number(number: int) -> int:
    """Return `number` if it can be an inode number. Raises ENOENT."""
    if not is_inode_number(number):
        raise posix_error(errno.ENOENT)
    return number


def is_inode_number(number: int) -> bool:
    return 0 < number < 2**63


class ControlMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """All methods of a service by name.

    Messages arrive as bytes and are parsed here, so that calls with no message, a malformed message or an unknown method are counted too.
    """

    def __init__(self, service: str, servicer: Any, watchdog: CallWatchdog) -> None:
        self.refused: RefusedCalls = servicer.refused
        self._watchdog = watchdog
        described = pb.DESCRIPTOR.services_by_name[service]
        self._handlers = {f"/{described.full_name}/{method.name}": self._build_handler(method, servicer) for method in described.methods}
        self._unknown = grpc.stream_unary_rpc_method_handler(self._reject_unknown_method)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.get(handler_call_details.method, self._unknown)

    def _build_handler(self, method: Any, servicer: Any) -> Any:
        """Build a handler that takes a stream, so that the wait for the one message of a call is bounded."""
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
