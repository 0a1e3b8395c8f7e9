"""One end of a bulk connection: TLS of the standard library, over which blocks travel.

Both sides know the length of the next message, so none is sent. A connection ends if nothing moves for `limits.PEER_STALL_S`, or if a
message takes longer than `limits.PEER_PIECE_S`. TLS notices changed, omitted, repeated and moved bytes; the end of a stream of blocks is a
message, so a connection that is cut off is noticed, too.
"""

import select
import socket
import ssl
import time
from contextlib import suppress

from ckptfs import limits
from ckptfs.peers.messages import Rejection, RejectReason

SEND_BYTES = 256 * limits.KIB
"""What one call of TLS encrypts and sends; a timeout applies to each call."""


class ConnectionEnded(Exception):
    """The other side closed the connection, or the network did."""


class BulkConnection:
    """One end, after the handshake. One thread sends and receives; `shutdown` may come from another."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        connected.settimeout(limits.PEER_STALL_S)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected

    def send(self, message: bytes | memoryview) -> None:
        """Send a message. Raises ConnectionEnded, Rejection (stalled)."""
        left, deadline = memoryview(message), time.monotonic() + limits.PEER_PIECE_S
        while left:
            left = left[self._transfer(deadline, self._socket.send, left[:SEND_BYTES]) :]

    def receive_into(self, buffer: memoryview) -> None:
        """Receive a message that is exactly as long as `buffer`. Raises ConnectionEnded, Rejection (stalled)."""
        left, deadline = buffer, time.monotonic() + limits.PEER_PIECE_S
        while left:
            count = self._transfer(deadline, self._socket.recv_into, left)
            if not count:
                raise ConnectionEnded("the connection was closed")
            left = left[count:]

    def has_input(self, timeout_s: float = 0.0) -> bool:
        """Return whether something (or the end) has arrived, now or within `timeout_s`."""
        if self._socket.pending():
            return True
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(int(timeout_s * 1000)))

    def shutdown(self) -> None:
        """End it for both sides; wakes the thread that uses it."""
        shut_down(self._socket)

    def linger(self) -> None:
        """Send no more, and discard for a moment what still comes: else the last message may be lost on the way."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            deadline, scratch = time.monotonic() + limits.PEER_SWEEP_S, bytearray(SEND_BYTES)
            while time.monotonic() < deadline and self.has_input(limits.PEER_SWEEP_S) and socket.socket.recv_into(self._socket, scratch):
                pass

    def close(self) -> None:
        self._socket.close()

    @staticmethod
    def _transfer(deadline: float, call, piece: memoryview) -> int:  # type: ignore[no-untyped-def]
        try:
            count: int = call(piece)
        except TimeoutError:
            raise Rejection(RejectReason.STALLED, f"nothing moved for {limits.PEER_STALL_S:g} s") from None
        except OSError as failure:
            raise ConnectionEnded(str(failure)) from failure
        if time.monotonic() > deadline:
            raise Rejection(RejectReason.STALLED, f"a message took longer than {limits.PEER_PIECE_S:g} s")
        return count


def shut_down(connected: ssl.SSLSocket) -> None:
    """End the connection below TLS. `SSLSocket.shutdown` would let another thread that sends go on without encryption."""
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
