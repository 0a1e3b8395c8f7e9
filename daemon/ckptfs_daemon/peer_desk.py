"""Where calls of peers come in: each named, its message parsed, what is raised turned into a status, and every refusal counted.

What gRPC itself ends before that is not seen here: failed TLS handshakes, and headers or messages beyond the bounds.
If we die here: nothing is kept.
"""

import ctypes
import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from ckptfs import limits
from ckptfs.errors import CkptfsError
from ckptfs.protocol import peer_pb2 as pb
from ckptfs_daemon.peer_gate import UNKNOWN, PeerAuthenticator
from ckptfs_daemon.peer_refusals import PeerRejections, Rejection, RejectReason, build_rejection
from ckptfs_daemon.peer_streams import ConcurrencyLimit
from ckptfs_daemon.stalled import CallWatchdog

log = logging.getLogger(__name__)

SERVICE = "ckptfs.peer.Peer"
LARGE_BYTES = limits.MIB
STATUS_OF_REASON = {
    RejectReason.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    RejectReason.OUT_OF_ORDER: grpc.StatusCode.FAILED_PRECONDITION,
    RejectReason.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    RejectReason.FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RejectReason.BUSY: grpc.StatusCode.ABORTED,
    RejectReason.TOO_MANY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RejectReason.STRANGER: grpc.StatusCode.PERMISSION_DENIED,
    RejectReason.WRONG_DIGEST: grpc.StatusCode.DATA_LOSS,
    RejectReason.INCOMPLETE: grpc.StatusCode.FAILED_PRECONDITION,
    RejectReason.ENDED: grpc.StatusCode.ABORTED,
    RejectReason.STALLED: grpc.StatusCode.DEADLINE_EXCEEDED,
    RejectReason.BROKEN: grpc.StatusCode.INTERNAL,
    RejectReason.NO_METHOD: grpc.StatusCode.UNIMPLEMENTED,
}

RpcHandler = Callable[..., Any]
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
"""Of glibc; others do without."""


class RpcGuard:
    """Receives each caller: names him, turns failures into statuses, counts refusals."""

    def __init__(self, authenticator: PeerAuthenticator, rejections: PeerRejections) -> None:
        self._authenticator = authenticator
        self._rejections = rejections

    @contextmanager
    def guard_call(self, context: grpc.ServicerContext) -> Iterator[str]:
        """The name of the peer; what is raised inside becomes the call's status."""
        peer = UNKNOWN
        try:
            peer = self._authenticator.authenticate(context)
            yield peer
        except (Rejection, CkptfsError, OSError) as failure:
            self._abort_call(context, peer, build_rejection(failure))
        except Exception as failure:
            if not context.is_active():
                raise  # The peer went away in the middle of it: gRPC knows.
            log.exception("a call of peer %s failed", peer)
            self._abort_call(context, peer, build_rejection(failure))

    def record_rejection(self, peer: str, rejection: Rejection) -> Rejection:
        """A refusal of a part of what a peer asked."""
        self._rejections.record(peer, rejection)
        return rejection

    def _abort_call(self, context: grpc.ServicerContext, peer: str, rejection: Rejection) -> NoReturn:
        self._rejections.record(peer, rejection)
        context.abort(STATUS_OF_REASON[rejection.reason], f"{errno.errorcode[rejection.reason]}: {rejection}")
        raise AssertionError("abort raises")


class PeerMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Every method by its name. Messages come as bytes and are parsed at the desk, so that what is no message, and what is asked of a
    method that does not exist, is counted as well.

    On the wire they are calls with one message. Here that is awaited as a stream's first one: after the caller was named, by as many
    calls of his as he may hold threads with, and no longer than `limits.PEER_PIECE_S`.
    """

    def __init__(self, calls: Any, send: RpcHandler, read: RpcHandler, guard: RpcGuard, watchdog: CallWatchdog) -> None:
        self._guard = guard
        self._watchdog = watchdog
        self._awaited = ConcurrencyLimit("call", limits.PEER_CALLS_MAX, limits.PEER_AWAITED_OF_ONE_MAX)
        self._has_read_large_message = False
        self._handlers = {
            f"/{SERVICE}/Send": grpc.stream_unary_rpc_method_handler(send),
            f"/{SERVICE}/Read": grpc.stream_stream_rpc_method_handler(self._build_read_handler(read)),
        }
        for method in pb.DESCRIPTOR.services_by_name["Peer"].methods:
            parsed = self._build_unary_handler(GetMessageClass(method.input_type), getattr(calls, method.name))
            handler = grpc.stream_unary_rpc_method_handler(parsed, response_serializer=lambda reply: reply.SerializeToString())
            self._handlers[f"/{SERVICE}/{method.name}"] = handler
        self._unknown = grpc.stream_unary_rpc_method_handler(self._reject_unknown_method)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call."""
        return self._handlers.get(handler_call_details.method, self._unknown)

    def _read_message(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """The one message of a call."""
        with (
            self._guard.guard_call(context) as peer,
            self._awaited.hold_slot(peer),
            self._watchdog.watch_call(context, limits.PEER_PIECE_S),
        ):
            for message in messages:
                self._has_read_large_message |= len(message) > LARGE_BYTES
                return message
            raise Rejection(RejectReason.MALFORMED, "a call has a message")
        raise AssertionError

    def _build_unary_handler(self, kind: Any, call: RpcHandler) -> RpcHandler:
        def parsed(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            message = self._read_message(messages, context)
            try:
                request = kind.FromString(message)
            except DecodeError:
                with self._guard.guard_call(context):
                    raise Rejection(RejectReason.MALFORMED, f"this is no {kind.DESCRIPTOR.name}") from None
            return call(request, context)

        return parsed

    def _build_read_handler(self, read: RpcHandler) -> RpcHandler:
        def asked(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            yield from read(self._read_message(messages, context), context)

        return asked

    def trim_memory(self) -> None:
        """After large messages what they took goes back to the system: they come in pieces, which malloc would keep for ever."""
        if self._has_read_large_message:
            self._has_read_large_message = False
            _trim(0)

    def _reject_unknown_method(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._guard.guard_call(context):
            raise Rejection(RejectReason.NO_METHOD, "there is no such method")
        raise AssertionError
