"""Authentication of callers, and encrypted bulk connections.

A caller is identified by the node name in its certificate, which must be from the CA of this cluster. Without keys, the caller names
itself, and only loopback is allowed.

A bulk connection is plain TCP with every message encrypted by AES-256-GCM, under keys that were sent over gRPC and therefore mutual TLS.
gRPC in Python moves a GiB in twice the time of a plain socket; an encrypted bulk connection takes the time of a plain socket. Each
direction has its own key for one connection and counts its messages in the nonce, so a message that was changed, omitted, repeated or moved
fails to decrypt. Lengths are not sent, because both sides know what comes next. The kernel's timeouts bound each wait: a connection ends
after `limits.PEER_STALL_S` without a byte, or if a message takes longer than `limits.PEER_PIECE_S`.
"""

import select
import socket
import struct
import time
from contextlib import suppress

import grpc
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ckptfs import limits
from ckptfs.clique.certificates import NAME_PATTERN, Identity, RevocationList, get_subject, is_current
from ckptfs.peers.messages import Rejection, RejectReason

TAG_BYTES = 16
KEY_BYTES = 32
TOKEN_BYTES = 32
BUFFERED_BYTES_MAX = 4 * limits.KIB
BUFFER_BYTES = limits.PEER_PIECE_BYTES + BUFFERED_BYTES_MAX + 2 * TAG_BYTES


class ConnectionEnded(Exception):
    """The other side closed the connection, or the network did."""


class EncryptedConnection:
    """One end. One thread sends and receives; `shut` may come from another."""

    def __init__(self, connected: socket.socket, keys: bytes, *, server: bool) -> None:
        assert len(keys) == 2 * KEY_BYTES
        halves = keys[:KEY_BYTES], keys[KEY_BYTES:]
        self._socket = connected
        self._incoming, self._outgoing = (AESGCM(key) for key in (halves if server else reversed(halves)))
        self._received = self._sent = 0
        self._in = memoryview(bytearray(limits.PEER_PIECE_BYTES + TAG_BYTES))
        self._out = memoryview(bytearray(BUFFER_BYTES))
        self._buffered_bytes = 0
        set_socket_timeouts(connected)

    def send(self, message: bytes | memoryview) -> None:
        """Send a message; a short one waits for the next, or for `push`. Raises ConnectionEnded, Refusal (stalled)."""
        end = self._buffered_bytes + len(message) + TAG_BYTES
        self._outgoing.encrypt_into(self._sent.to_bytes(12, "big"), message, None, self._out[self._buffered_bytes : end])
        self._sent += 1
        self._buffered_bytes = end
        if end > BUFFERED_BYTES_MAX:
            self.send_buffered()

    def send_buffered(self) -> None:
        """Send what waits."""
        left, self._buffered_bytes = self._out[: self._buffered_bytes], 0
        deadline = time.monotonic() + limits.PEER_PIECE_S
        while left:
            count = self._call_with_deadline(deadline, self._socket.send, left)
            left = left[count:]

    def receive_into(self, buffer: memoryview) -> None:
        """Receive a message that is exactly as long as `place`. Raises ConnectionEnded, Refusal (stalled, malformed)."""
        sealed = self._in[: len(buffer) + TAG_BYTES]
        filled, deadline = 0, time.monotonic() + limits.PEER_PIECE_S
        while filled < len(sealed):
            count = self._call_with_deadline(deadline, self._socket.recv_into, sealed[filled:], 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionEnded
            filled += count
        try:
            self._incoming.decrypt_into(self._received.to_bytes(12, "big"), sealed, None, buffer)
        except InvalidTag:
            raise Rejection(RejectReason.MALFORMED, "a message on a bulk connection does not open") from None
        self._received += 1

    def has_input(self, timeout_s: float = 0.0) -> bool:
        """Whether something (or the end) has arrived."""
        return is_readable(self._socket, timeout_s)

    def shutdown(self) -> None:
        """End it for both sides; wakes the thread that uses it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def linger(self) -> None:
        """Say no more, and take for a moment what still comes: else the last words may be lost on the way."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + limits.PEER_SWEEP_S
            while time.monotonic() < deadline and self.has_input(limits.PEER_SWEEP_S) and self._socket.recv_into(self._in):
                pass

    def close(self) -> None:
        self._socket.close()

    @staticmethod
    def _call_with_deadline(deadline: float, call, *values) -> int:  # type: ignore[no-untyped-def]
        try:
            count: int = call(*values)
        except BlockingIOError:
            raise Rejection(RejectReason.STALLED, f"nothing moved for {limits.PEER_STALL_S:g} s") from None
        except OSError as failure:
            raise ConnectionEnded from failure
        if time.monotonic() > deadline:
            raise Rejection(RejectReason.STALLED, f"a message took longer than {limits.PEER_PIECE_S:g} s")
        return count


def set_socket_timeouts(connected: socket.socket) -> None:
    """Blocking, with the kernel's timeouts and without waiting for company."""
    connected.settimeout(None)
    stall = struct.pack("ll", int(limits.PEER_STALL_S), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, stall)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def is_readable(connected: socket.socket, timeout_s: float) -> bool:
    """Whether a read would not wait, now or within `timeout_s`."""
    poll = select.poll()
    poll.register(connected.fileno(), select.POLLIN)
    return bool(poll.poll(int(timeout_s * 1000)))


NODE_METADATA = "ckptfs-node"
CLUSTER_METADATA = "ckptfs-cluster"
LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")
UNKNOWN = "unknown"


class PeerAuthenticator:
    """Names the peer behind a call."""

    def __init__(self, cluster: str, identity: Identity | None, revoked: RevocationList) -> None:
        self._cluster = cluster
        self._revoked = revoked
        self._has_keys = identity is not None

    def authenticate(self, context: grpc.ServicerContext) -> str:
        """The calling node's name. Raises Refusal for strangers."""
        node, cluster = self._read_certificate(context) if self._has_keys else self._read_metadata(context)
        if not NAME_PATTERN.fullmatch(node) or cluster != self._cluster:
            raise Rejection(RejectReason.STRANGER, f"this is cluster {self._cluster}")
        return node

    def _read_certificate(self, context: grpc.ServicerContext) -> tuple[str, str]:
        found = context.auth_context().get("x509_pem_cert")
        if not found:
            raise Rejection(RejectReason.STRANGER, "no certificate")
        certificate = bytes(found[0])
        if not is_current(certificate, self._revoked.get_counts()):
            raise Rejection(RejectReason.STRANGER, "these keys were revoked")
        return get_subject(certificate)

    @staticmethod
    def _read_metadata(context: grpc.ServicerContext) -> tuple[str, str]:
        if not context.peer().startswith(LOOPBACK):
            raise Rejection(RejectReason.STRANGER, "without keys only this machine may ask")
        said = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        return said.get(NODE_METADATA, "")[:64], said.get(CLUSTER_METADATA, "")


def server_credentials(identity: Identity) -> grpc.ServerCredentials:
    """TLS that demands a certificate of our CA."""
    return grpc.ssl_server_credentials([(identity.key, identity.certificate)], identity.ca, require_client_auth=True)


def channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    """TLS that shows our certificate and trusts our CA only."""
    return grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
