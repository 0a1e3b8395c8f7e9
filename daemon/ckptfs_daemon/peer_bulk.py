"""The server's side of bulk connections: a port, a thread that accepts, and a bounded number of threads that each serve one connection.

A connection begins with a token that `Connect` gave to an authenticated peer just before: it is good once, and names the peer and the keys.
Then commands follow, each with its blocks, until the peer closes it or is silent for `limits.PEER_IDLE_S`. A refusal is told and ends it.
If we die here: peers see their connections end, and ask again what is lacking.
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
from ckptfs_daemon import peer_frames
from ckptfs_daemon.peer_frames import Arriving, Command, Kind
from ckptfs_daemon.peer_refusals import Refusal, Refusals, Why, from_failure
from ckptfs_daemon.peer_sealed import KEY_BYTES, TOKEN_BYTES, ConnectionEnded, Sealed
from ckptfs_daemon.peer_streams import Streams

log = logging.getLogger(__name__)

ACCEPT_LOOK_S = 1.0
STRANGERS_MAX = limits.PEER_CONNECTIONS_MAX // 4


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a token is good for."""

    peer: str
    token: bytes
    keys: bytes
    until: float


class Tickets:
    """Tokens that were given and not used yet; bounded per peer, the oldest goes first."""

    def __init__(self) -> None:
        self._tickets: dict[bytes, Ticket] = {}
        self._lock = threading.Lock()

    def give(self, peer: str) -> Ticket:
        """A new token and new keys for `peer`."""
        now = time.monotonic()
        ticket = Ticket(peer, secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(2 * KEY_BYTES), now + limits.PEER_TOKEN_S)
        with self._lock:
            self._tickets = {key: one for key, one in self._tickets.items() if one.until > now}
            mine = [key for key, one in self._tickets.items() if one.peer == peer]
            for key in mine[: max(0, len(mine) - limits.PEER_TOKENS_OF_ONE_MAX + 1)]:
                del self._tickets[key]
            self._tickets[_index(ticket.token)] = ticket
        return ticket

    def forget(self, peer: str) -> None:
        """What was given to `peer` is not good any more."""
        with self._lock:
            self._tickets = {key: one for key, one in self._tickets.items() if one.peer != peer}

    def take(self, token: bytes) -> Ticket | None:
        """The ticket of this token, which is used up now."""
        with self._lock:
            ticket = self._tickets.pop(_index(token), None)
        valid = ticket is not None and ticket.until > time.monotonic() and hmac.compare_digest(ticket.token, token)
        return ticket if valid else None


def _index(token: bytes) -> bytes:
    """Looked up by half of it, compared as a whole in constant time."""
    return token[: TOKEN_BYTES // 2]


class BulkServer:
    """Bulk connections to this node. `port` is 0 when there is no socket."""

    def __init__(self, streams: Streams, refusals: Refusals, host: str, port: int) -> None:
        self.tickets = Tickets()
        self._streams = streams
        self._refusals = refusals
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._open: dict[socket.socket, str] = {}
        self._served = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._accept, name="peer accept", daemon=True)
        self._thread.start()

    def connections(self) -> int:
        """How many are open."""
        return len(self._open)

    def shut(self, peer: str) -> None:
        """End the connections of one peer."""
        self.tickets.forget(peer)
        with self._lock:
            for one, whose in self._open.items():
                if whose == peer:
                    with contextlib.suppress(OSError):
                        one.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End all connections, and wait for their threads."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        self._thread.join(limits.PEER_TOKEN_S)

    def _accept(self) -> None:
        while not self._stopping:
            try:
                connected, _ = self._socket.accept()
            except OSError:
                if not self._stopping:
                    time.sleep(ACCEPT_LOOK_S)  # No descriptors left, most likely.
                continue
            with self._lock:
                self._make_way()
                full = max(len(self._open), self._served // 2) >= limits.PEER_CONNECTIONS_MAX
                if not full:
                    self._open[connected] = ""
                    self._served += 1
            if full:
                self._refusals.add("unknown", Refusal(Why.TOO_MANY, ""))
                connected.close()
            else:
                threading.Thread(target=self._serve, args=(connected,), name="peer bulk", daemon=True).start()

    def _make_way(self) -> None:
        """Where too many have not said yet who they are the first of them goes: who has a token says it at once, and is not kept out by
        those who say nothing.
        """
        strangers = [one for one, peer in self._open.items() if not peer]
        if len(strangers) >= STRANGERS_MAX:
            self._refusals.add("unknown", Refusal(Why.TOO_MANY, ""))
            del self._open[strangers[0]]
            with contextlib.suppress(OSError):
                strangers[0].shutdown(socket.SHUT_RDWR)

    def _serve(self, connected: socket.socket) -> None:
        peer = "unknown"
        try:
            ticket = self._ticket(connected)
            peer = ticket.peer
            self._commands(Sealed(connected, ticket.keys, server=True), peer)
        except Refusal as refusal:
            self._refusals.add(peer, refusal)
        except (ConnectionEnded, OSError):
            pass  # Whoever called is gone; what is lacking he asks for again.
        except Exception:
            log.exception("a bulk connection of %s ended", peer)
        finally:
            with self._lock:
                self._open.pop(connected, None)
                self._served -= 1
                connected.close()

    def _ticket(self, connected: socket.socket) -> Ticket:
        """Read the token. One deadline for all of it, so that a slow stranger holds nothing for long."""
        deadline, token = time.monotonic() + limits.PEER_TOKEN_S, b""
        while len(token) < TOKEN_BYTES:
            connected.settimeout(max(0.01, deadline - time.monotonic()))
            piece = connected.recv(TOKEN_BYTES - len(token))
            if not piece or time.monotonic() > deadline:
                raise Refusal(Why.STRANGER, "no token")
            token += piece
        ticket = self.tickets.take(token)
        if ticket is None:
            raise Refusal(Why.STRANGER, "this token is not good")
        with self._lock:
            if connected not in self._open:
                raise ConnectionEnded
            if sum(peer == ticket.peer for peer in self._open.values()) >= limits.PEER_CONNECTIONS_OF_ONE_MAX:
                raise Refusal(Why.TOO_MANY, "too many connections of one peer")
            self._open[connected] = ticket.peer
        return ticket

    def _commands(self, sealed: Sealed, peer: str) -> None:
        place = memoryview(bytearray(peer_frames.COMMAND.size))
        while sealed.waiting(limits.PEER_IDLE_S):
            sealed.fill(place)
            try:
                command = Command.parsed(place)
                (self._take if command.kind == Kind.SEND else self._give)(sealed, peer, command)
                sealed.push()
            except ConnectionEnded:
                raise
            except (Refusal, CkptfsError, OSError) as failure:
                refusal = from_failure(failure)
                self._tell(sealed, refusal)
                raise refusal from failure

    def _take(self, sealed: Sealed, peer: str, command: Command) -> None:
        with self._streams.arriving(peer, command) as arriving:
            receive(sealed, arriving)
            sealed.put(peer_frames.end(arriving.count))

    def _give(self, sealed: Sealed, peer: str, command: Command) -> None:
        with self._streams.departing(peer, command) as messages:
            for message in messages:
                sealed.put(message)

    @staticmethod
    def _tell(sealed: Sealed, refusal: Refusal) -> None:
        with contextlib.suppress(ConnectionEnded, Refusal):
            for message in peer_frames.failed(refusal):
                if message:
                    sealed.put(message)
            sealed.push()
            sealed.linger()


def receive(sealed: Sealed, arriving: Arriving, carry_on: Callable[[], bool] = lambda: True) -> None:
    """Take blocks until their end. Raises ConnectionEnded, Refusal."""
    while not arriving.ended and carry_on():
        sealed.fill(arriving.place())
        arriving.filled()


def _listening(host: str, port: int) -> socket.socket:
    """A listening socket: on the wanted port, or on any when somebody has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=limits.PEER_CONNECTIONS_MAX)
    except OSError:
        if not port:
            raise
        return _listening(host, 0)
