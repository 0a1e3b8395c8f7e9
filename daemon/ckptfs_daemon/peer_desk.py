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
from ckptfs_daemon.peer_gate import UNKNOWN, Gate
from ckptfs_daemon.peer_refusals import Refusal, Refusals, Why, from_failure
from ckptfs_daemon.peer_streams import Slots
from ckptfs_daemon.stalled import Watch

log = logging.getLogger(__name__)

SERVICE = "ckptfs.peer.Peer"
LARGE_BYTES = limits.MIB
STATUS = {
    Why.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Why.OUT_OF_ORDER: grpc.StatusCode.FAILED_PRECONDITION,
    Why.UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Why.FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Why.BUSY: grpc.StatusCode.ABORTED,
    Why.TOO_MANY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Why.STRANGER: grpc.StatusCode.PERMISSION_DENIED,
    Why.WRONG_DIGEST: grpc.StatusCode.DATA_LOSS,
    Why.INCOMPLETE: grpc.StatusCode.FAILED_PRECONDITION,
    Why.ENDED: grpc.StatusCode.ABORTED,
    Why.STALLED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Why.BROKEN: grpc.StatusCode.INTERNAL,
    Why.NO_METHOD: grpc.StatusCode.UNIMPLEMENTED,
}

Handler = Callable[..., Any]
_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
"""Of glibc; others do without."""


class Desk:
    """Receives each caller: names him, turns failures into statuses, counts refusals."""

    def __init__(self, gate: Gate, refusals: Refusals) -> None:
        self._gate = gate
        self._refusals = refusals

    @contextmanager
    def received(self, context: grpc.ServicerContext) -> Iterator[str]:
        """The name of the peer; what is raised inside becomes the call's status."""
        peer = UNKNOWN
        try:
            peer = self._gate.peer(context)
            yield peer
        except (Refusal, CkptfsError, OSError) as failure:
            self._refuse(context, peer, from_failure(failure))
        except Exception as failure:
            if not context.is_active():
                raise  # The peer went away in the middle of it: gRPC knows.
            log.exception("a call of peer %s failed", peer)
            self._refuse(context, peer, from_failure(failure))

    def counted(self, peer: str, refusal: Refusal) -> Refusal:
        """A refusal of a part of what a peer asked."""
        self._refusals.add(peer, refusal)
        return refusal

    def _refuse(self, context: grpc.ServicerContext, peer: str, refusal: Refusal) -> NoReturn:
        self._refusals.add(peer, refusal)
        context.abort(STATUS[refusal.why], f"{errno.errorcode[refusal.why]}: {refusal}")
        raise AssertionError("abort raises")


class Methods(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Every method by its name. Messages come as bytes and are parsed at the desk, so that what is no message, and what is asked of a
    method that does not exist, is counted as well.

    On the wire they are calls with one message. Here that is awaited as a stream's first one: after the caller was named, by as many
    calls of his as he may hold threads with, and no longer than `limits.PEER_PIECE_S`.
    """

    def __init__(self, calls: Any, send: Handler, read: Handler, desk: Desk, watch: Watch) -> None:
        self._desk = desk
        self._watch = watch
        self._awaited = Slots("call", limits.PEER_CALLS_MAX, limits.PEER_AWAITED_OF_ONE_MAX)
        self._large = False
        self._handlers = {
            f"/{SERVICE}/Send": grpc.stream_unary_rpc_method_handler(send),
            f"/{SERVICE}/Read": grpc.stream_stream_rpc_method_handler(self._asked_to_read(read)),
        }
        for method in pb.DESCRIPTOR.services_by_name["Peer"].methods:
            parsed = self._parsed(GetMessageClass(method.input_type), getattr(calls, method.name))
            handler = grpc.stream_unary_rpc_method_handler(parsed, response_serializer=lambda reply: reply.SerializeToString())
            self._handlers[f"/{SERVICE}/{method.name}"] = handler
        self._unknown = grpc.stream_unary_rpc_method_handler(self._no_method)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call."""
        return self._handlers.get(handler_call_details.method, self._unknown)

    def _message(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """The one message of a call."""
        with self._desk.received(context) as peer, self._awaited.one(peer), self._watch.over(context, limits.PEER_PIECE_S):
            for message in messages:
                self._large |= len(message) > LARGE_BYTES
                return message
            raise Refusal(Why.MALFORMED, "a call has a message")
        raise AssertionError

    def _parsed(self, kind: Any, call: Handler) -> Handler:
        def parsed(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            message = self._message(messages, context)
            try:
                request = kind.FromString(message)
            except DecodeError:
                with self._desk.received(context):
                    raise Refusal(Why.MALFORMED, f"this is no {kind.DESCRIPTOR.name}") from None
            return call(request, context)

        return parsed

    def _asked_to_read(self, read: Handler) -> Handler:
        def asked(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            yield from read(self._message(messages, context), context)

        return asked

    def give_back(self) -> None:
        """After large messages what they took goes back to the system: they come in pieces, which malloc would keep for ever."""
        if self._large:
            self._large = False
            _trim(0)

    def _no_method(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._desk.received(context):
            raise Refusal(Why.NO_METHOD, "there is no such method")
        raise AssertionError
