"""The gRPC server for peers, which authenticates, bounds and parses each call.

The content host answers the calls.

Calls run in a bounded number of threads. Send and Read occupy one while bytes move, other calls until their message has arrived. Each peer
may use a share of the threads, and a watchdog cancels calls that stall. All other work is short, or bounded by the disk. A rejected call
gets a status with the reason, `<ERRNO>: sentence`, and is counted. gRPC itself ends failed TLS handshakes and headers or messages beyond
the bounds; these are not counted.

Crash safety: peers see their calls fail and start again with the next mover. The content host deletes unfinished transfers.
"""

import ctypes
import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.message_factory import GetMessageClass

from ckptfs import digest, limits, server_limits
from ckptfs.clique.certificates import Identity, RevocationList
from ckptfs.clique.peer_api import ContentHost, Offer
from ckptfs.errors import CkptfsError
from ckptfs.peers.messages import (
    PROTOCOL_VERSION,
    BlockReceiver,
    Rejection,
    RejectReason,
    SourceChanged,
    build_fields,
    build_rejection,
    encode_bitmap,
    encode_blocks,
    encode_end,
    parse_block_range,
    parse_content_id,
    parse_digest,
    parse_forgotten_contents,
    parse_offer,
    parse_offers,
    parse_seal_timeout_s,
    require,
)
from ckptfs.peers.security import UNKNOWN, PeerAuthenticator, require_version
from ckptfs.peers.transfer_table import ConcurrencyLimit, TransferTable
from ckptfs.protocol import peer_pb2 as pb
from ckptfs.server_limits import CallWatchdog, RefusedCalls, parse_message

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
    RejectReason.VERSION: grpc.StatusCode.FAILED_PRECONDITION,
}
RpcHandler = Callable[..., Any]

_trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
"""Only glibc has it."""


class RpcGuard:
    """The entry of each call: authenticates, compares versions, turns errors into statuses, counts."""

    def __init__(self, authenticator: PeerAuthenticator, rejections: RefusedCalls) -> None:
        self._authenticator = authenticator
        self._rejections = rejections

    @contextmanager
    def guard_call(self, context: grpc.ServicerContext) -> Iterator[str]:
        """Yield the name of the peer. Errors inside become the status of the call."""
        peer = UNKNOWN
        try:
            peer = self._authenticator.authenticate_call(context)
            require_version(context)
            yield peer
        except Exception as failure:
            if not isinstance(failure, Rejection | CkptfsError | OSError):
                if not context.is_active():
                    raise  # The peer disconnected; gRPC ends the call.
                log.exception("peer %s: its call failed", peer)
            self._abort_call(context, peer, build_rejection(failure))

    def record_rejection(self, peer: str, rejection: Rejection) -> Rejection:
        """Count a rejection, of a call or of a part of one."""
        reason = rejection.reason.name.lower()
        log.debug("refused to %s: %s, %s", peer, reason, rejection)
        self._rejections.record(reason, peer)
        return rejection

    def _abort_call(self, context: grpc.ServicerContext, peer: str, rejection: Rejection) -> NoReturn:
        self.record_rejection(peer, rejection)
        context.abort(STATUS_OF_REASON[rejection.reason], f"{errno.errorcode[rejection.reason]}: {rejection}")
        raise AssertionError("abort raises")


class PeerMethods(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """All methods by name. A message is awaited after authentication, in bounded number and time."""

    def __init__(self, calls: Any, send: RpcHandler, read: RpcHandler, guard: RpcGuard, watchdog: CallWatchdog) -> None:
        self._guard = guard
        self._watchdog = watchdog
        self._awaited = ConcurrencyLimit("call", limits.PEER_CALLS_MAX, limits.PEER_AWAITED_PER_PEER_MAX)
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
        return self._handlers.get(handler_call_details.method, self._unknown)

    def _read_message(self, peer: str, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._awaited.hold_slot(peer):
            message = self._watchdog.read_message(messages, context, limits.PEER_PIECE_S)
        self._has_read_large_message |= len(message) > LARGE_BYTES
        return message

    def _build_unary_handler(self, kind: Any, call: Callable[[str, Any], Any]) -> RpcHandler:
        def handle(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
            with self._guard.guard_call(context) as peer:
                return call(peer, parse_message(kind, self._read_message(peer, messages, context)))
            raise AssertionError

        return handle

    def _build_read_handler(self, read: Callable[[str, bytes, grpc.ServicerContext], Iterator[bytes]]) -> RpcHandler:
        def handle(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._guard.guard_call(context) as peer:
                yield from read(peer, self._read_message(peer, messages, context), context)

        return handle

    def trim_memory(self) -> None:
        """Return the memory of large messages to the system. They arrive in pieces, which malloc would keep."""
        if self._has_read_large_message:
            self._has_read_large_message = False
            _trim(0)

    def _reject_unknown_method(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        with self._guard.guard_call(context):
            raise Rejection(RejectReason.NO_METHOD, "there is no such method")
        raise AssertionError


STOP_GRACE_S = 1.0

OPTIONS = [
    ("grpc.max_receive_message_length", limits.PEER_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.PEER_MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", 16 * limits.KIB),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", int(limits.PEER_KEEP_ALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(limits.PEER_KEEP_ALIVE_WAIT_S * 1000)),
    ("grpc.http2.min_ping_interval_without_data_ms", int(limits.PEER_KEEP_ALIVE_S * 500)),
    ("grpc.keepalive_permit_without_calls", 1),
]


class UnaryCalls:
    """The short calls of an authenticated peer, by the names of their methods."""

    def __init__(self, table: TransferTable, guard: RpcGuard) -> None:
        self._table = table
        self._content_host = table.content_host
        self._guard = guard
        self._seal_slots = ConcurrencyLimit("wait", limits.PEER_SEALS_MAX, limits.PEER_SEALS_MAX)

    def Offer(self, peer: str, request: pb.OfferRequest) -> pb.OfferReply:
        offer = parse_offer(request)
        require(not request.whole, "a content travels inside an offer only with OfferMany")
        number, missing_blocks = self._table.begin_transfer(peer, offer)
        return pb.OfferReply(transfer=number, lacking=encode_bitmap(missing_blocks, digest.count_blocks(offer.size)))

    def OfferMany(self, peer: str, request: pb.OffersRequest) -> pb.OffersReply:
        pairs = zip(parse_offers(request), request.offers, strict=True)
        return pb.OffersReply(verdicts=[receive_one(self._table, self._guard, peer, offer, one.whole) for offer, one in pairs])

    def Progress(self, peer: str, request: pb.TransferRequest) -> pb.ProgressReply:
        transfer = self._table.get_transfer(peer, request.transfer)
        transfer.touch()
        return pb.ProgressReply(lacking=encode_bitmap(transfer.list_missing_blocks(), digest.count_blocks(transfer.size)))

    def Finish(self, peer: str, request: pb.TransferRequest) -> pb.FinishReply:
        return pb.FinishReply(verified=self._table.finish(peer, request.transfer))

    def Abandon(self, peer: str, request: pb.TransferRequest) -> pb.Nothing:
        self._table.abandon(peer, request.transfer)
        return pb.Nothing()

    def GetRecord(self, peer: str, request: pb.RecordRequest) -> pb.Record:
        content, wanted = parse_content_id(request.content), parse_digest(request.digest)
        return pb.Record(**build_fields(self._table.describe_copy(peer, content, wanted, can_wait=request.queued)))

    def EndRead(self, peer: str, request: pb.RecordRequest) -> pb.Nothing:
        self._table.end_reading(peer, request.content)
        return pb.Nothing()

    def SealSoon(self, peer: str, request: pb.SealRequest) -> pb.SealReply:
        with self._seal_slots.hold_slot(peer):
            copy = self._content_host.seal_and_open(parse_content_id(request.content), parse_seal_timeout_s(request))
            if copy is None:
                return pb.SealReply()
            os.close(copy.fd)
            return pb.SealReply(record=pb.Record(**build_fields(copy)))

    def Forget(self, peer: str, request: pb.ForgetRequest) -> pb.Nothing:
        self._content_host.release_copies(parse_forgotten_contents(request))
        return pb.Nothing()

    def Ping(self, peer: str, request: pb.Nothing) -> pb.PingReply:
        return pb.PingReply(now_ns=time.time_ns(), version=PROTOCOL_VERSION)


def receive_one(table: TransferTable, guard: RpcGuard, peer: str, offer: Offer, data: bytes) -> pb.Verdict:
    """Receive one of several contents. Its rejection does not affect the others."""
    try:
        return pb.Verdict(verified=table.receive_whole(peer, offer, data))
    except (Rejection, CkptfsError, OSError) as failure:
        rejection = guard.record_rejection(peer, build_rejection(failure))
        return pb.Verdict(code=rejection.reason, why=str(rejection))


class RawStreams:
    """Send and Read: streams of raw messages, bounded in number. The watchdog cancels stalled ones."""

    def __init__(self, table: TransferTable, guard: RpcGuard, watchdog: CallWatchdog) -> None:
        self._table = table
        self._guard = guard
        self._watchdog = watchdog
        self._slots = ConcurrencyLimit("stream", limits.PEER_STREAMS_MAX, limits.PEER_STREAMS_PER_PEER_MAX)

    def send(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Receive blocks of a transfer."""
        with self._guard.guard_call(context) as peer, self._watch_call(context, peer), self._slots.hold_slot(peer):
            transfer = self._table.get_transfer(peer, parse_message(pb.TransferRequest, next(messages, b"")).transfer)
            with transfer.hold_stream(), closing(BlockReceiver(transfer)) as receiver:
                for message in messages:
                    receiver.accept_message(message)
                    self._watchdog.extend_deadline(context, limits.PEER_STALL_S)
                if not receiver.has_ended:
                    raise Rejection(RejectReason.INCOMPLETE, "the stream stopped before its end")
                return encode_end(receiver.block_count)
        raise AssertionError

    def read(self, peer: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Stream blocks of a copy."""
        with self._watch_call(context, peer):
            for message in self.encode_run(peer, parse_message(pb.ReadRequest, request)):
                yield message
                self._watchdog.extend_deadline(context, limits.PEER_STALL_S)

    def encode_run(self, peer: str, request: pb.ReadRequest) -> Iterator[bytes]:
        """Yield the messages of blocks of a copy, with their end. Raises Rejection, CopyNotFound, OSError."""
        content, wanted = parse_content_id(request.content), parse_digest(request.digest) or b""
        with self._slots.hold_slot(peer), self._table.lend_copy(peer, content, wanted, can_wait=request.queued) as copy:
            numbers = parse_block_range(request, copy.size)
            try:
                yield from encode_blocks(copy.fd, copy.size, numbers, compress=request.compress)
            except SourceChanged:
                raise Rejection(RejectReason.BROKEN, "the copy became shorter") from None
        yield encode_end(len(numbers))

    def _watch_call(self, context: grpc.ServicerContext, peer: str) -> AbstractContextManager[None]:
        return self._watchdog.watch_call(
            context, limits.PEER_STALL_S, partial(self._guard.record_rejection, peer, Rejection(RejectReason.STALLED, ""))
        )


class PeerServer:
    """The running server. `port` is where it listens."""

    def __init__(
        self, content_host: ContentHost, listen: str, cluster: str, identity: Identity | None, *, revoked: RevocationList | None = None
    ) -> None:
        self.rejections = RefusedCalls()
        self.table = TransferTable(content_host)
        self._revoked = revoked or RevocationList(None)
        self._revoked_before = self._revoked.get_counts()
        authenticator = PeerAuthenticator(cluster, identity, self._revoked)
        guard = RpcGuard(authenticator, self.rejections)
        self._watchdog = CallWatchdog()
        self._raw_streams = RawStreams(self.table, guard, self._watchdog)
        self._executor = ThreadPoolExecutor(limits.PEER_WORKERS, thread_name_prefix="peer")
        channels = server_limits.get_connections_max(limits.PEER_CHANNELS_MAX)
        options = [
            *OPTIONS, ("grpc.server_handshake_timeout_ms", int(limits.PEER_HANDSHAKE_S * 1000)),
            ("grpc.max_allowed_incoming_connections", channels),
        ]  # fmt: skip
        self._server = grpc.server(self._executor, options=options, maximum_concurrent_rpcs=limits.PEER_CALLS_MAX)
        self._methods = PeerMethods(UnaryCalls(self.table, guard), self._raw_streams.send, self._raw_streams.read, guard, self._watchdog)
        self._server.add_generic_rpc_handlers((self._methods,))
        if identity is None:
            self.port = self._server.add_insecure_port(listen)  # RuntimeError if it is in use.
        else:  # TLS demands a certificate of the cluster's CA.
            own = [(identity.key, identity.certificate)]
            self.port = self._server.add_secure_port(listen, grpc.ssl_server_credentials(own, identity.ca, require_client_auth=True))
        self._departed_nodes: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._sweeper = threading.Thread(target=self._run_sweep_loop, name="peer sweep", daemon=True)
        self._server.start()
        self._sweeper.start()

    def get_figures(self) -> dict[str, Any]:
        """Return the figures for `ckptfs status`."""
        return {"transfers": self.table.transfer_count, "reads": self.table.read_count, "refused": self.rejections.get_counts()}

    def end_all_of_node(self, node: str) -> None:
        """End soon the transfers and reads of a node that has died or was restarted."""
        self._departed_nodes.put(node)

    def stop(self) -> None:
        """End every call and every transfer."""
        self._stopped.set()
        stopping = self._server.stop(STOP_GRACE_S)
        stopping.wait(2 * STOP_GRACE_S)
        self._sweeper.join()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.table.end_idle(everything=True)

    def _run_sweep_loop(self) -> None:
        while not self._stopped.wait(limits.PEER_SWEEP_S):
            try:
                self._watchdog.cancel_late_calls()
                self._end_departed()
                self.table.end_idle()
                self._end_revoked()
                self._methods.trim_memory()
            except Exception:
                log.exception("peer server: the sweep of idle transfers failed; retrying")

    def _end_departed(self) -> None:
        while not self._departed_nodes.empty():
            self.table.end_all_of_peer(self._departed_nodes.get())

    def _end_revoked(self) -> None:
        """End the transfers and reads of nodes with newly revoked keys."""
        before, self._revoked_before = self._revoked_before, self._revoked.get_counts()
        for node, count in self._revoked_before.items():
            if count > before.get(node, 0):
                log.info("node %s: its keys were revoked; ending its transfers", node)
                self.table.end_all_of_peer(node)
