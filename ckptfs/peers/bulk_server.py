"""The server of bulk connections: a port, a thread that accepts, and a bounded number of threads that serve one connection each.

A connection begins with a token that `Connect` gave to an authenticated peer. It is valid once, and identifies the peer and the keys.
Commands follow, each with its blocks, until the peer closes the connection or is silent for `limits.PEER_IDLE_S`. A rejected command is
answered and ends the connection.

Crash safety: peers see their connections end, and ask again which blocks are missing.
"""

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptfs import limits
from ckptfs.errors import CkptfsError
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
from ckptfs.peers.security import KEY_BYTES, TOKEN_BYTES, ConnectionEnded, EncryptedConnection
from ckptfs.peers.transfer_table import BlockStreams

log = logging.getLogger(__name__)

ACCEPT_RETRY_S = 1.0
UNAUTHENTICATED_MAX = limits.PEER_CONNECTIONS_MAX // 4


@dataclass(frozen=True, slots=True)
class ConnectToken:
    """What a token is good for."""

    peer: str
    token: bytes
    keys: bytes
    expires_at: float


class ConnectTokens:
    """Tokens that were given and not used yet; bounded per peer, the oldest goes first."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, ConnectToken] = {}
        self._lock = threading.Lock()

    def issue(self, peer: str) -> ConnectToken:
        """A new token and new keys for `peer`."""
        now = time.monotonic()
        connect_token = ConnectToken(peer, secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(2 * KEY_BYTES), now + limits.PEER_TOKEN_S)
        with self._lock:
            self._tokens = {key: one for key, one in self._tokens.items() if one.expires_at > now}
            mine = [key for key, one in self._tokens.items() if one.peer == peer]
            for key in mine[: max(0, len(mine) - limits.PEER_TOKENS_PER_PEER_MAX + 1)]:
                del self._tokens[key]
            self._tokens[_get_lookup_key(connect_token.token)] = connect_token
        return connect_token

    def revoke(self, peer: str) -> None:
        """What was given to `peer` is not good any more."""
        with self._lock:
            self._tokens = {key: one for key, one in self._tokens.items() if one.peer != peer}

    def redeem(self, token: bytes) -> ConnectToken | None:
        """The ticket of this token, which is used up now."""
        with self._lock:
            connect_token = self._tokens.pop(_get_lookup_key(token), None)
        valid = (
            connect_token is not None and connect_token.expires_at > time.monotonic() and hmac.compare_digest(connect_token.token, token)
        )
        return connect_token if valid else None


def _get_lookup_key(token: bytes) -> bytes:
    """Looked up by half of it, compared as a whole in constant time."""
    return token[: TOKEN_BYTES // 2]


class BulkServer:
    """Bulk connections to this node. `port` is 0 when there is no socket."""

    def __init__(self, streams: BlockStreams, rejections: PeerRejections, host: str, port: int) -> None:
        self.tokens = ConnectTokens()
        self._streams = streams
        self._rejections = rejections
        self._socket = _create_listener(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._peer_by_socket: dict[socket.socket, str] = {}
        self._thread_count = 0
        self._lock = threading.Lock()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run_accept_loop, name="peer accept", daemon=True)
        self._thread.start()

    def count_connections(self) -> int:
        """How many are open."""
        return len(self._peer_by_socket)

    def close_peer(self, peer: str) -> None:
        """End the connections of one peer."""
        self.tokens.revoke(peer)
        with self._lock:
            for one, whose in self._peer_by_socket.items():
                if whose == peer:
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End all connections, and wait for their threads."""
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for one in self._peer_by_socket:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self._thread.join(limits.PEER_TOKEN_S)

    def _run_accept_loop(self) -> None:
        while not self._is_stopping:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                if not self._is_stopping:
                    time.sleep(ACCEPT_RETRY_S)  # No descriptors left, most likely.
                continue
            with self._lock:
                self._drop_oldest_unauthenticated()
                full = max(len(self._peer_by_socket), self._thread_count // 2) >= limits.PEER_CONNECTIONS_MAX
                if not full:
                    self._peer_by_socket[connected] = ""
                    self._thread_count += 1
            if full:
                self._rejections.record("unknown", Rejection(RejectReason.TOO_MANY, ""))
                connected.close()
            else:
                threading.Thread(target=self._serve_connection, args=(connected,), name="peer bulk", daemon=True).start()

    def _drop_oldest_unauthenticated(self) -> None:
        """Where too many have not said yet who they are the first of them goes: who has a token says it at once, and is not kept out by
        those who say nothing.
        """
        unauthenticated = [one for one, peer in self._peer_by_socket.items() if not peer]
        if len(unauthenticated) >= UNAUTHENTICATED_MAX:
            self._rejections.record("unknown", Rejection(RejectReason.TOO_MANY, ""))
            del self._peer_by_socket[unauthenticated[0]]
            with contextlib.suppress(OSError):
                unauthenticated[0].shutdown(socket.SHUT_RDWR)

    def _serve_connection(self, connected: socket.socket) -> None:
        peer = "unknown"
        try:
            connect_token = self._read_token(connected)
            peer = connect_token.peer
            self._serve_commands(EncryptedConnection(connected, connect_token.keys, server=True), peer)
        except Rejection as refusal:
            self._rejections.record(peer, refusal)
        except (ConnectionEnded, OSError):
            pass  # Whoever called is gone; what is lacking he asks for again.
        except Exception:
            log.exception("a bulk connection of %s ended", peer)
        finally:
            with self._lock:
                self._peer_by_socket.pop(connected, None)
                self._thread_count -= 1
                connected.close()

    def _read_token(self, connected: socket.socket) -> ConnectToken:
        """Read the token. One deadline for all of it, so that a slow stranger holds nothing for long."""
        deadline, token = time.monotonic() + limits.PEER_TOKEN_S, b""
        while len(token) < TOKEN_BYTES:
            connected.settimeout(max(0.01, deadline - time.monotonic()))
            piece = connected.recv(TOKEN_BYTES - len(token))
            if not piece or time.monotonic() > deadline:
                raise Rejection(RejectReason.STRANGER, "no token")
            token += piece
        connect_token = self.tokens.redeem(token)
        if connect_token is None:
            raise Rejection(RejectReason.STRANGER, "this token is not good")
        with self._lock:
            if connected not in self._peer_by_socket:
                raise ConnectionEnded
            if sum(peer == connect_token.peer for peer in self._peer_by_socket.values()) >= limits.PEER_CONNECTIONS_PER_PEER_MAX:
                raise Rejection(RejectReason.TOO_MANY, "too many connections of one peer")
            self._peer_by_socket[connected] = connect_token.peer
        return connect_token

    def _serve_commands(self, connection: EncryptedConnection, peer: str) -> None:
        buffer = memoryview(bytearray(COMMAND.size))
        while connection.has_input(limits.PEER_IDLE_S):
            connection.receive_into(buffer)
            try:
                command = Command.parse(buffer)
                (self._receive_blocks if command.kind == CommandKind.SEND else self._send_blocks)(connection, peer, command)
                connection.send_buffered()
            except ConnectionEnded:
                raise
            except (Rejection, CkptfsError, OSError) as failure:
                refusal = build_rejection(failure)
                self._send_rejection(connection, refusal)
                raise refusal from failure

    def _receive_blocks(self, connection: EncryptedConnection, peer: str, command: Command) -> None:
        with self._streams.open_incoming(peer, command) as receiver:
            receive_blocks(connection, receiver)
            connection.send(encode_end(receiver.block_count))

    def _send_blocks(self, connection: EncryptedConnection, peer: str, command: Command) -> None:
        with self._streams.open_outgoing(peer, command) as messages:
            for message in messages:
                connection.send(message)

    @staticmethod
    def _send_rejection(connection: EncryptedConnection, rejection: Rejection) -> None:
        with contextlib.suppress(ConnectionEnded, Rejection):
            for message in encode_rejection(rejection):
                if message:
                    connection.send(message)
            connection.send_buffered()
            connection.linger()


def receive_blocks(connection: EncryptedConnection, receiver: BlockReceiver, should_continue: Callable[[], bool] = lambda: True) -> None:
    """Take blocks until their end. Raises ConnectionEnded, Refusal."""
    while not receiver.has_ended and should_continue():
        connection.receive_into(receiver.next_buffer())
        receiver.accept_buffer()


def _create_listener(host: str, port: int) -> socket.socket:
    """A listening socket: on the wanted port, or on any when somebody has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=limits.PEER_CONNECTIONS_MAX)
    except OSError:
        if not port:
            raise
        return _create_listener(host, 0)
