"""One end of a bulk connection: TLS of the standard library, over which blocks travel.

TLS works on memory here, and the socket is read and written in pieces of many TLS records: `SSLSocket` needs two system calls for each
record of 16 KiB, which made a receiver a quarter slower (0.92 against 0.70 s of processor time for each GiB).

Both sides know the length of the next message, so none is sent. A connection ends if nothing moves for `limits.PEER_STALL_S`, or if a
message takes longer than `limits.PEER_PIECE_S`. TLS notices changed, omitted, repeated and moved bytes; the end of a stream of blocks is a
message, so a connection that is cut off is noticed, too.
"""

import select
import socket
import ssl
import struct
import time
from contextlib import suppress
from typing import Any

from ckptfs import limits
from ckptfs.peers.messages import Rejection, RejectReason

PIECE_BYTES = 256 * limits.KIB
"""What is sent, or received at most, at once."""


class ConnectionEnded(Exception):
    """The other side closed the connection, or the network did."""


class BulkConnection:
    """One end. One thread sends and receives; `shutdown` may come from another."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        """Start TLS over `connected`. `server_name` must be in the certificate of the server.

        It is None for the server itself.
        """
        self.is_shut_down = False
        self._socket = connected
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=server_name is None, server_hostname=server_name)
        self._buffer = memoryview(bytearray(PIECE_BYTES))

    def do_handshake(self) -> bytes:
        """Return the certificate of the other side (DER).

        Raises ConnectionEnded, also after `limits.PEER_HANDSHAKE_S`.
        """
        deadline = time.monotonic() + limits.PEER_HANDSHAKE_S
        try:
            while True:
                self._socket.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._send_pending()
                    self._receive()
                finally:
                    self._send_pending()
            self._socket.settimeout(limits.PEER_STALL_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as failure:
            raise ConnectionEnded(f"no TLS handshake: {failure}") from failure
        return self._tls.getpeercert(binary_form=True) or b""

    def send(self, message: bytes | memoryview) -> None:
        """Send a message. Raises ConnectionEnded, Rejection (stalled)."""
        left, deadline = memoryview(message), time.monotonic() + limits.PEER_PIECE_S
        try:
            while left:
                left = left[self._tls.write(left[:PIECE_BYTES]) :]
                self._send_pending()
                _check_deadline(deadline)
        except OSError as failure:
            raise _translate(failure) from failure

    def receive_into(self, buffer: memoryview) -> None:
        """Receive a message that is exactly as long as `buffer`. Raises ConnectionEnded, Rejection (stalled)."""
        filled, size, deadline = 0, len(buffer), time.monotonic() + limits.PEER_PIECE_S
        try:
            while filled < size:
                try:
                    count: Any = self._tls.read(size - filled, buffer[filled:])
                    filled += count
                except ssl.SSLWantReadError:
                    self._receive()
                    _check_deadline(deadline)
        except OSError as failure:
            raise _translate(failure) from failure

    def has_input(self, timeout_s: float = 0.0) -> bool:
        """Return whether something (or the end) has arrived, now or within `timeout_s`."""
        if self._received.pending or self._tls.pending():
            return True
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN)
        return bool(poll.poll(int(timeout_s * 1000)))

    def shutdown(self) -> None:
        """End it for both sides; wakes the thread that uses it."""
        self.is_shut_down = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def linger(self) -> None:
        """Send no more and discard what still comes for a moment, so that the last message is not lost."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + limits.PEER_SWEEP_S
            self._socket.settimeout(limits.PEER_SWEEP_S)
            while time.monotonic() < deadline and self._socket.recv_into(self._buffer):
                pass

    def close(self) -> None:
        """Close this end.

        After a shutdown, reset the connection: otherwise the other side could go on sending until it times out.
        """
        if self.is_shut_down:
            with suppress(OSError):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def _send_pending(self) -> None:
        if self._to_send.pending:
            self._socket.sendall(self._to_send.read())

    def _receive(self) -> None:
        count = self._socket.recv_into(self._buffer)
        if not count:
            raise ConnectionEnded("the connection was closed")
        self._received.write(self._buffer[:count])


def _check_deadline(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise Rejection(RejectReason.STALLED, f"a message took longer than {limits.PEER_PIECE_S:g} s")


def _translate(failure: OSError) -> Exception:
    if isinstance(failure, TimeoutError):
        return Rejection(RejectReason.STALLED, f"nothing moved for {limits.PEER_STALL_S:g} s")
    return ConnectionEnded(str(failure))
