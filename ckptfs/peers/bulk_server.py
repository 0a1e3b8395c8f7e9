"""The server of bulk connections: a port, an accepting thread, a bounded number of serving threads.

Each serving thread has one connection.

A connection begins with a TLS handshake, in which both sides show their certificates. Connections before the end of their handshake have
places of their own: if these are taken, the oldest one ends, so silent callers never take the place of a peer. Commands follow, each with
its blocks, until the peer closes the connection or is silent for `limits.PEER_IDLE_S`. A rejected command is answered and ends the
connection. If all places of peers are taken, the connection that is idle for longest ends; if none is idle, the new one is refused.

Crash safety: peers see their connections end, and ask again which blocks are missing.
"""

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptfs import limits
from ckptfs.clique.certificates import Identity
from ckptfs.errors import CkptfsError
from ckptfs.peers.bulk_connection import BulkConnection, ConnectionEnded
from ckptfs.peers.messages import (
    COMMAND,
    BlockReceiver,
    Command,
    CommandKind,
    PeerRejections,
    Rejection,
    RejectReason,
    build_rejection,
    encode_end,
    encode_rejection,
)
from ckptfs.peers.security import UNKNOWN, PeerAuthenticator, build_tls_context
from ckptfs.peers.transfer_table import BlockStreams

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 1.0
EVICTED_IDLE_S = 1.0
"""A connection between two commands of one transfer is not idle."""


@dataclass(slots=True)
class _PeerConnection:
    """A connection of an authenticated peer. `idle_since` is None while a command runs."""

    peer: str
    idle_since: float | None


class BulkServer:
    """Bulk connections to this node."""

    def __init__(
        self, streams: BlockStreams, authenticator: PeerAuthenticator, rejections: PeerRejections, identity: Identity, host: str, port: int
    ) -> None:
        self._streams = streams
        self._authenticator = authenticator
        self._rejections = rejections
        self._tls_context = build_tls_context(identity, server=True)
        self._socket = _create_listener(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._in_handshake: dict[BulkConnection, None] = {}
        self._connections: dict[BulkConnection, _PeerConnection] = {}
        self._lock = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run_accept_loop, name="peer accept", daemon=True)
        self._thread.start()

    def count_connections(self) -> int:
        """Return how many connections peers have open."""
        return len(self._connections)

    def close_peer(self, peer: str) -> None:
        """End the connections of one peer, and those that may turn out to be its own."""
        with self._lock:
            for connection in (*self._in_handshake, *(one for one, whose in self._connections.items() if whose.peer == peer)):
                connection.shutdown()

    def stop(self) -> None:
        """End all connections."""
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(limits.PEER_HANDSHAKE_S)
        with self._lock:
            for connection in (*self._in_handshake, *self._connections):
                connection.shutdown()

    def _run_accept_loop(self) -> None:
        while not self._is_stopping:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                if not self._is_stopping:
                    time.sleep(ACCEPT_RETRY_S)  # No descriptors left, most likely.
                continue
            connection = BulkConnection(connected, self._tls_context)
            with self._lock:
                if len(self._in_handshake) >= limits.PEER_HANDSHAKES_MAX:
                    oldest = next(iter(self._in_handshake))
                    oldest.shutdown()
                    del self._in_handshake[oldest]
                    self._rejections.record(UNKNOWN, Rejection(RejectReason.TOO_MANY, "too many handshakes"))
                self._in_handshake[connection] = None
            threading.Thread(target=self._serve_connection, args=(connection,), name="peer bulk", daemon=True).start()

    def _serve_connection(self, connection: BulkConnection) -> None:
        peer = UNKNOWN
        try:
            peer = self._authenticate(connection)
            try:
                self._serve_commands(connection, self._insert_connection(connection, peer))
            except Rejection as rejection:
                self._send_rejection(connection, rejection)
                raise
        except Rejection as rejection:
            self._rejections.record(peer, rejection)
        except (ConnectionEnded, OSError):
            pass  # The peer is gone; it asks again for what is missing.
        except Exception:
            log.exception("a bulk connection of %s ended", peer)
        finally:
            with self._lock:
                self._in_handshake.pop(connection, None)
                self._connections.pop(connection, None)
                connection.close()

    def _authenticate(self, connection: BulkConnection) -> str:
        """Return the name of the peer after the handshake."""
        try:
            certificate = connection.do_handshake()
        except ConnectionEnded as failure:
            with self._lock:
                if connection not in self._in_handshake:
                    raise  # It had to make room, or this server ends.
            raise Rejection(RejectReason.STRANGER, str(failure)) from failure
        return self._authenticator.authenticate_certificate(ssl.DER_cert_to_PEM_cert(certificate).encode())

    def _insert_connection(self, connection: BulkConnection, peer: str) -> _PeerConnection:
        """Move a connection from its handshake to the places of peers. Raises Rejection if there is none."""
        with self._lock:
            if connection not in self._in_handshake:
                raise ConnectionEnded
            if sum(one.peer == peer for one in self._connections.values()) >= limits.PEER_CONNECTIONS_PER_PEER_MAX:
                raise Rejection(RejectReason.TOO_MANY, "too many connections of one peer")
            if len(self._connections) >= limits.PEER_CONNECTIONS_MAX:
                self._evict_idle()
            del self._in_handshake[connection]
            entry = self._connections[connection] = _PeerConnection(peer, time.monotonic())
            return entry

    def _evict_idle(self) -> None:
        idle = {one: entry.idle_since for one, entry in self._connections.items() if entry.idle_since is not None}
        longest = min(idle, key=lambda one: idle[one], default=None)
        if longest is None or time.monotonic() - idle[longest] < EVICTED_IDLE_S:
            raise Rejection(RejectReason.TOO_MANY, "too many connections")
        longest.shutdown()
        del self._connections[longest]

    def _serve_commands(self, connection: BulkConnection, entry: _PeerConnection) -> None:
        buffer = memoryview(bytearray(COMMAND.size))
        while connection.has_input(limits.PEER_IDLE_S):
            entry.idle_since = None
            connection.receive_into(buffer)
            try:
                command = Command.parse(buffer)
                (self._receive_blocks if command.kind == CommandKind.SEND else self._send_blocks)(connection, entry.peer, command)
            except (CkptfsError, OSError) as failure:
                raise build_rejection(failure) from failure
            entry.idle_since = time.monotonic()

    def _receive_blocks(self, connection: BulkConnection, peer: str, command: Command) -> None:
        with self._streams.open_incoming(peer, command) as receiver:
            receive_blocks(connection, receiver)
        # Only after the stream has left its transfer: the peer then finishes it.
        connection.send(encode_end(receiver.block_count))

    def _send_blocks(self, connection: BulkConnection, peer: str, command: Command) -> None:
        with self._streams.open_outgoing(peer, command) as messages:
            for message in messages:
                connection.send(message)

    @staticmethod
    def _send_rejection(connection: BulkConnection, rejection: Rejection) -> None:
        with contextlib.suppress(ConnectionEnded, Rejection):
            connection.send(b"".join(encode_rejection(rejection)))
            connection.linger()


def receive_blocks(connection: BulkConnection, receiver: BlockReceiver, should_continue: Callable[[], bool] = lambda: True) -> None:
    """Receive blocks until their end. Raises ConnectionEnded, Rejection."""
    while not receiver.has_ended and should_continue():
        connection.receive_into(receiver.next_buffer())
        receiver.accept_buffer()


def _create_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket: on the wanted port, or on any if that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
    except OSError:
        if not port:
            raise
        return _create_listener(host, 0)
