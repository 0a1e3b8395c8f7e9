"""The gRPC server for peers, inside the mover: each call checked, bounded, and handed to the shelf.

Calls run in a bounded number of threads. Send and Read hold one for as long as bytes move, any other until its message is here: they
have shares, and a watch ends those that stall. Everything else is short, or bounded by the disk. What is refused gets a status that says
why: `<ERRNO>: sentence`.
If we die here: peers see their calls fail and begin anew with the next mover; the shelf finds what never came to its end.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import grpc
import trio

from ckptfs import limits
from ckptfs.clique.keys import Identity
from ckptfs.clique.revoked import Revoked
from ckptfs.clique.shelf import Loan, Offer, Shelf
from ckptfs.config import host_of
from ckptfs.digest import block
from ckptfs.errors import CkptfsError
from ckptfs.protocol import peer_pb2 as pb
from ckptfs.protocol import peer_pb2_grpc as rpc
from ckptfs_daemon import descriptors, peer_checks, peer_frames
from ckptfs_daemon.peer_bulk import BulkServer
from ckptfs_daemon.peer_desk import Desk, Methods
from ckptfs_daemon.peer_frames import Command, bitmap, blocks_of
from ckptfs_daemon.peer_gate import Gate, server_credentials
from ckptfs_daemon.peer_refusals import Refusal, Refusals, Why, from_failure
from ckptfs_daemon.peer_streams import Slots, Streams
from ckptfs_daemon.peer_transfers import Ledger
from ckptfs_daemon.stalled import Watch

log = logging.getLogger(__name__)

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


class Calls(rpc.PeerServicer):  # type: ignore[misc]
    """The short calls."""

    def __init__(self, ledger: Ledger, desk: Desk, connect: Callable[[str], pb.ConnectReply]) -> None:
        self._ledger = ledger
        self._shelf = ledger.shelf
        self._desk = desk
        self._connect = connect
        self._seals = Slots("wait", limits.PEER_SEALS_MAX, limits.PEER_SEALS_MAX)

    def Offer(self, request: pb.OfferRequest, context: grpc.ServicerContext) -> pb.OfferReply:
        with self._desk.received(context) as peer:
            offer = peer_checks.offer(request)
            if request.whole or not offer.size:
                need_digest(request, offer.blocks)
            if request.whole:
                return pb.OfferReply(verified=self._ledger.whole(peer, offer, request.whole))
            number, lacking = self._ledger.offer(peer, offer)
            return pb.OfferReply(transfer=number, lacking=bitmap(lacking, blocks_of(offer.size)))
        raise AssertionError

    def OfferMany(self, request: pb.OffersRequest, context: grpc.ServicerContext) -> pb.OffersReply:
        with self._desk.received(context) as peer:
            pairs = zip(peer_checks.offers(request), request.offers, strict=True)
            verdicts = [verdict(self._ledger, self._desk, peer, offer, one.whole) for offer, one in pairs]
            return pb.OffersReply(verdicts=verdicts)
        raise AssertionError

    def Progress(self, request: pb.TransferRequest, context: grpc.ServicerContext) -> pb.ProgressReply:
        with self._desk.received(context) as peer:
            transfer = self._ledger.transfers.get(peer, request.transfer)
            transfer.touch()
            return pb.ProgressReply(lacking=bitmap(transfer.lacking(), blocks_of(transfer.size)))
        raise AssertionError

    def Finish(self, request: pb.TransferRequest, context: grpc.ServicerContext) -> pb.FinishReply:
        with self._desk.received(context) as peer:
            return pb.FinishReply(verified=self._ledger.finish(peer, request.transfer))
        raise AssertionError

    def Abandon(self, request: pb.TransferRequest, context: grpc.ServicerContext) -> pb.Nothing:
        with self._desk.received(context) as peer:
            self._ledger.abandon(peer, request.transfer)
        return pb.Nothing()

    def GetRecord(self, request: pb.RecordRequest, context: grpc.ServicerContext) -> pb.Record:
        with self._desk.received(context) as peer:
            content = peer_checks.content_id(request.content)
            number, loan = self._ledger.lend(peer, content, peer_checks.content_digest(request.digest))
            if not request.borrow:
                self._ledger.give_back(peer, number)
            return record(loan, number if request.borrow else 0)
        raise AssertionError

    def Return(self, request: pb.ReturnRequest, context: grpc.ServicerContext) -> pb.Nothing:
        with self._desk.received(context) as peer:
            self._ledger.give_back(peer, request.loan)
        return pb.Nothing()

    def SealSoon(self, request: pb.SealRequest, context: grpc.ServicerContext) -> pb.SealReply:
        with self._desk.received(context) as peer, self._seals.one(peer):
            content, timeout_s = peer_checks.content_id(request.content), peer_checks.seal_timeout(request)
            loan = self._shelf.seal_soon(content, timeout_s)
            if loan is None:
                return pb.SealReply()
            os.close(loan.fd)
            return pb.SealReply(record=record(loan, 0))
        raise AssertionError

    def Forget(self, request: pb.ForgetRequest, context: grpc.ServicerContext) -> pb.Nothing:
        with self._desk.received(context):
            self._shelf.forget(peer_checks.forgotten(request))
        return pb.Nothing()

    def Ping(self, request: pb.Nothing, context: grpc.ServicerContext) -> pb.PingReply:
        with self._desk.received(context):
            return pb.PingReply(room=max(0, self._shelf.room()), now_ns=time.time_ns())
        raise AssertionError

    def Connect(self, request: pb.Nothing, context: grpc.ServicerContext) -> pb.ConnectReply:
        with self._desk.received(context) as peer:
            return self._connect(peer)
        raise AssertionError


def verdict(ledger: Ledger, desk: Desk, peer: str, offer: Offer, data: bytes) -> pb.Verdict:
    """Take one of several contents; what is wrong with it does not concern the others."""
    try:
        return pb.Verdict(verified=ledger.whole(peer, offer, data))
    except (Refusal, CkptfsError, OSError) as failure:
        refusal = desk.counted(peer, from_failure(failure))
        return pb.Verdict(code=refusal.why, why=str(refusal))


def need_digest(request: pb.OfferRequest, blocks: bytes) -> None:
    """A content that travels inside its offer has the digest that the offer says."""
    if request.whole and block(request.whole) != blocks:
        raise Refusal(Why.WRONG_DIGEST, "the bytes are not those of the digest")


def record(loan: Loan, number: int) -> pb.Record:
    """A loan as it travels."""
    return pb.Record(
        content=loan.content,
        inode=loan.inode,
        generation=loan.generation,
        size=loan.size,
        digest=loan.digest,
        blocks=loan.blocks,
        loan=number,
    )


class RawStreams:
    """Send and Read: raw messages over gRPC. A watch cancels those in which nothing moves."""

    def __init__(self, streams: Streams, desk: Desk, watch: Watch) -> None:
        self._streams = streams
        self._desk = desk
        self._watch = watch
        self._waiting = Slots("stream", limits.PEER_STREAMS_MAX, limits.PEER_STREAMS_OF_ONE_MAX)

    def send(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """Blocks of a transfer. Whoever opens streams and says nothing holds no more threads than those who send."""
        with self._desk.received(context) as peer, self._watched(context, peer), self._waiting.one(peer):
            command = Command.parsed(next(messages, b""))
            with self._streams.arriving(peer, command) as arriving:
                for message in messages:
                    arriving.take(message)
                    self._watch.moved(context, limits.PEER_STALL_S)
                if not arriving.ended:
                    raise Refusal(Why.INCOMPLETE, "the stream stopped before its end")
                return peer_frames.end(arriving.count)
        raise AssertionError

    def read(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Blocks of a loan."""
        with (
            self._desk.received(context) as peer,
            self._watched(context, peer),
            self._streams.departing(peer, Command.parsed(request)) as messages,
        ):
            for message in messages:
                yield bytes(message)
                self._watch.moved(context, limits.PEER_STALL_S)

    def _watched(self, context: grpc.ServicerContext, peer: str) -> AbstractContextManager[None]:
        return self._watch.over(context, limits.PEER_STALL_S, partial(self._desk.counted, peer, Refusal(Why.STALLED, "")))


class PeerServer:
    """All of it, started; `stop` ends it. `port` is where it listens."""

    def __init__(
        self,
        shelf: Shelf,
        listen: str,
        cluster: str,
        identity: Identity | None,
        *,
        bulk: bool = True,
        revoked: Revoked | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refusals = Refusals()
        self.ledger = Ledger(shelf, clock)
        streams = Streams(self.ledger)
        self._revoked = revoked or Revoked(None)
        self._revoked_before = self._revoked.now()
        desk = Desk(Gate(cluster, identity, self._revoked), self.refusals)
        self._watch = Watch()
        self._raw = RawStreams(streams, desk, self._watch)
        self._executor = ThreadPoolExecutor(limits.PEER_WORKERS, thread_name_prefix="peer")
        channels = descriptors.for_strangers(limits.PEER_CHANNELS_MAX)
        options = [
            *OPTIONS, ("grpc.server_handshake_timeout_ms", int(limits.PEER_TOKEN_S * 1000)),
            ("grpc.max_allowed_incoming_connections", channels),
        ]  # fmt: skip
        self._server = grpc.server(self._executor, options=options, maximum_concurrent_rpcs=limits.PEER_CALLS_MAX)
        self._methods = Methods(Calls(self.ledger, desk, self._connect), self._raw.send, self._raw.read, desk, self._watch)
        self._server.add_generic_rpc_handlers((self._methods,))
        self.port = _bind(self._server, listen, identity)
        self.bulk = BulkServer(streams, self.refusals, host_of(listen), self.port + 1) if bulk else None
        self._left: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="peer sweep", daemon=True)
        self._server.start()
        self._sweeper.start()

    def figures(self) -> dict[str, Any]:
        """What status shows."""
        connections = self.bulk.connections() if self.bulk else 0
        return {
            "transfers": len(self.ledger.transfers), "loans": len(self.ledger.loans), "connections": connections,
            "refused": self.refusals.figures(),
        }  # fmt: skip

    def left(self, node: str) -> None:
        """This node does not live any more, or lives anew: nobody goes on with what it had begun, which ends soon."""
        self._left.put(node)

    def stop(self) -> None:
        """End every call, and whatever peers had begun."""
        self._stopped.set()
        stopping = self._server.stop(STOP_GRACE_S)
        if self.bulk:
            self.bulk.stop()
        stopping.wait(2 * STOP_GRACE_S)
        self._sweeper.join()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self.ledger.sweep(everything=True)

    def _connect(self, peer: str) -> pb.ConnectReply:
        if self.bulk is None:
            return pb.ConnectReply()
        ticket = self.bulk.tickets.give(peer)
        return pb.ConnectReply(port=self.bulk.port, token=ticket.token, keys=ticket.keys)

    def _sweep(self) -> None:
        while not self._stopped.wait(limits.PEER_SWEEP_S):
            try:
                self._watch.sweep()
                self._end_left()
                self.ledger.sweep()
                self._end_revoked()
                self._methods.give_back()
            except Exception:
                log.exception("what peers left could not be ended")

    def _end_left(self) -> None:
        while not self._left.empty():
            self.ledger.end(self._left.get())

    def _end_revoked(self) -> None:
        """Nodes whose keys were revoked just now keep nothing that they had begun; with new keys they begin anew."""
        before, self._revoked_before = self._revoked_before, self._revoked.now()
        for node, count in self._revoked_before.items():
            if count > before.get(node, 0):
                log.info("the keys of node %s were revoked", node)
                self.ledger.end(node)
                if self.bulk:
                    self.bulk.shut(node)


def _bind(server: grpc.Server, listen: str, identity: Identity | None) -> int:
    """Raises RuntimeError when the address is taken."""
    if identity is None:
        return server.add_insecure_port(listen)
    return server.add_secure_port(listen, server_credentials(identity))


async def serve(server: Callable[[], PeerServer], started: Callable[[PeerServer], None], failed: Callable[[str], None]) -> None:
    """Serve until cancelled. A server that cannot start, because its port is still taken, is tried again, after `failed` heard of it."""
    while True:
        try:
            running = await trio.to_thread.run_sync(server)
        except (OSError, RuntimeError) as failure:
            what = str(failure).partition("; set GRPC_VERBOSITY")[0]
            log.error("peers cannot reach this node: %s", what)
            await trio.to_thread.run_sync(failed, what)
            await trio.sleep(limits.RETRY_LAST_S)
            continue
        try:
            await trio.to_thread.run_sync(started, running)
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(running.stop)
