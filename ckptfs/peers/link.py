"""The link to one other node: its gRPC channel and its measured speed.

A link begins with a ping, whose reply states the version of the protocol, as each call does. Errors of gRPC and rejections become
`PeerFailed` and its subclasses.

Crash safety: the other node ends unfinished transfers after `limits.PEER_IDLE_S`.
"""

import contextlib
import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ckptfs import limits
from ckptfs.clique.certificates import Identity, target_name
from ckptfs.clique.peer_api import PeerBusy, PeerCorrupt, PeerFailed, PeerRefused
from ckptfs.errors import describe_connection_fault
from ckptfs.peers.messages import PROTOCOL_VERSION, Rejection, RejectReason
from ckptfs.peers.security import CLUSTER_METADATA, FIRST_VERSION, NODE_METADATA, VERSION_METADATA, describe_versions
from ckptfs.protocol import peer_pb2 as pb
from ckptfs.protocol import peer_pb2_grpc as rpc

WEIGHT = 0.3
SLOT_POLL_S = 0.25
WRONG_NAME = "Hostname Verification Check failed"
"""What gRPC says when a server's certificate does not have the name that we demand."""
OPTIONS = [
    ("grpc.max_receive_message_length", limits.PEER_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.PEER_MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Time for one attempt to connect. After a refused connection the next attempt comes sooner.
    ("grpc.min_reconnect_backoff_ms", int(limits.PEER_CONNECT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", int(limits.PEER_KEEP_ALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(limits.PEER_KEEP_ALIVE_WAIT_S * 1000)),
    ("grpc.use_local_subchannel_pool", 1),
]
ERRNO_OF_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: errno.EINVAL, grpc.StatusCode.NOT_FOUND: errno.ENOENT, grpc.StatusCode.ABORTED: errno.EBUSY,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errno.EAGAIN, grpc.StatusCode.PERMISSION_DENIED: errno.EACCES,
    grpc.StatusCode.DATA_LOSS: errno.EILSEQ, grpc.StatusCode.FAILED_PRECONDITION: errno.ENODATA,
    grpc.StatusCode.UNIMPLEMENTED: errno.ENOSYS,
}  # fmt: skip


class LinkStats:
    """Exponential averages of one peer. `wire_bytes_per_s` counts bytes on the link, after compression."""

    def __init__(self) -> None:
        self.rtt_s: float | None = None
        self.bytes_per_s: float | None = None
        self.wire_bytes_per_s: float | None = None
        self.failed_at = -limits.PEER_SUSPECT_S

    def record_rtt(self, seconds: float) -> None:
        self.rtt_s = _average(self.rtt_s, seconds)

    def record_transfer(self, content_bytes: int, wire_bytes: int, seconds: float) -> None:
        """Record a stream that moved so many bytes. Short streams are ignored."""
        if content_bytes >= limits.PEER_SPEED_SAMPLE_BYTES_MIN and seconds > 0:
            self.bytes_per_s = _average(self.bytes_per_s, content_bytes / seconds)
            self.wire_bytes_per_s = _average(self.wire_bytes_per_s, wire_bytes / seconds)

    def record_failure(self) -> None:
        self.failed_at = time.monotonic()

    @property
    def has_failed_recently(self) -> bool:
        """Return whether the peer failed lately."""
        return time.monotonic() - self.failed_at < limits.PEER_SUSPECT_S

    @property
    def should_compress(self) -> bool:
        """Return whether the link is known to be slower than zstd on this node."""
        return self.wire_bytes_per_s is not None and self.wire_bytes_per_s < limits.PEER_COMPRESS_BYTES_PER_S


def _average(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)


EXPECTED_REASONS = {
    RejectReason.UNKNOWN,
    RejectReason.FULL,
    RejectReason.BUSY,
    RejectReason.TOO_MANY,
    RejectReason.ENDED,
    RejectReason.INCOMPLETE,
}
"""Reasons that a node in good order gives, too. This node refuses wrong data with the other reasons."""


class NoLongerWanted(PeerFailed):
    """The transfer is not wanted any more. The peer has not failed."""


class Link:
    """The connection to one node. Any thread may call."""

    def __init__(self, me: str, cluster: str, identity: Identity | None, name: str, address: str, *, revocations: int = 0) -> None:
        """Open the channel. Keys older than `revocations` are refused."""
        self.name, self.address, self.revocations = name, address, revocations
        self.stats = LinkStats()
        self.used_at = time.monotonic()
        self._metadata = (
            (VERSION_METADATA, str(PROTOCOL_VERSION)), *(() if identity else ((NODE_METADATA, me), (CLUSTER_METADATA, cluster)))
        )  # fmt: skip
        self._channel = _open_channel(identity, target_name(cluster, name, revocations), address)
        self.stub = rpc.PeerStub(_QuietChannel(self._channel))
        self._is_version_known = False
        self._pending_notifications: set[Any] = set()
        self.send_slots = threading.BoundedSemaphore(limits.PEER_LINK_STREAMS_MAX)
        self.read_slots = threading.BoundedSemaphore(limits.PEER_LINK_STREAMS_MAX)
        self._contents_changed = threading.Condition()
        self._contents: set[int] = set()
        self._readers: Counter[int] = Counter()

    def call(self, call: Callable[..., Any], request: Any, timeout_s: float = limits.PEER_CALL_S) -> Any:
        """Make a short call. Raises PeerFailed, PeerRefused."""
        if not self._is_version_known:
            self._require_version(timeout_s)
        return self._call(call, request, timeout_s)

    def _require_version(self, timeout_s: float) -> None:
        """Compare versions of the protocol. Raises PeerFailed, and PeerRefused for another version."""
        version = str(self._call(self.stub.Ping, pb.Nothing(), min(timeout_s, limits.PEER_CALL_S)).version or FIRST_VERSION)
        if version != str(PROTOCOL_VERSION):
            raise self.translate_rejection(RejectReason.VERSION, describe_versions(version, str(PROTOCOL_VERSION)))
        self._is_version_known = True

    def _call(self, call: Callable[..., Any], request: Any, timeout_s: float) -> Any:
        self.used_at = time.monotonic()
        try:
            return call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise self.translate_rpc_error(failure) from failure
        except ValueError as failure:
            raise PeerFailed(f"{self.name} has left") from failure

    def notify(self, call: Callable[..., Any], request: Any) -> None:
        """Make a call whose outcome does not matter: the peer would find out by itself."""
        with contextlib.suppress(grpc.RpcError, ValueError):
            pending = call.future(request, timeout=limits.PEER_CALL_S, metadata=self._metadata)  # type: ignore[attr-defined]
            self._pending_notifications.add(pending)  # A future without a reference is cancelled.
            pending.add_done_callback(self._pending_notifications.discard)

    def open_send_stream(self, messages: Iterator[bytes]) -> Any:
        """Begin to send raw messages by gRPC. Return the call; its `result()` waits for the end."""
        return self._channel.stream_unary("/ckptfs.peer.Peer/Send", bytes, bytes).future(messages, metadata=self._metadata)

    def open_read_stream(self, request: pb.ReadRequest) -> Any:
        """Begin to read raw messages by gRPC. Return the call, an iterator."""
        read = self._channel.unary_stream("/ckptfs.peer.Peer/Read", pb.ReadRequest.SerializeToString, bytes)
        return read(request, metadata=self._metadata)

    @contextmanager
    def reserve_content(self, number: int, is_wanted: Callable[[], bool]) -> Iterator[None]:
        """Allow one transfer of a content at a time. Raises PeerFailed if it is not wanted any more."""
        with self._contents_changed:
            while number in self._contents:
                self._contents_changed.wait(SLOT_POLL_S)
                if not is_wanted():
                    raise NoLongerWanted("it is no longer wanted")
            self._contents.add(number)
        try:
            yield
        finally:
            with self._contents_changed:
                self._contents.discard(number)
                self._contents_changed.notify_all()

    @contextmanager
    def hold_open(self, content: int) -> Iterator[None]:
        """Let the node keep a content open between the streams that read it.

        Several streams may hold it, of one fetch or of more. The node may close it when the last of them has ended.
        """
        with self._contents_changed:
            self._readers[content] += 1
        try:
            yield
        finally:
            with self._contents_changed:
                self._readers[content] -= 1
                is_last = not self._readers[content]
                if is_last:
                    del self._readers[content]
            if is_last:
                self.notify(self.stub.EndRead, pb.RecordRequest(content=content))

    def close(self) -> None:
        """Close the channel and end the calls under way."""
        self._channel.close()

    def record_failure(self, failure: Exception) -> PeerFailed:
        """Return the error for the failure of a stream. Count it unless the peer refused the request."""
        found = self._translate_failure(failure)
        if not (isinstance(found, NoLongerWanted) or (isinstance(found, PeerRefused) and found.code in EXPECTED_REASONS)):
            self.stats.record_failure()
        return found

    def _translate_failure(self, failure: Exception) -> PeerFailed:
        if isinstance(failure, PeerFailed):
            return failure
        if isinstance(failure, grpc.RpcError):
            return self.translate_rpc_error(failure)
        if isinstance(failure, Rejection):
            return self.translate_rejection(failure.reason, str(failure))
        return PeerFailed(f"{self.name} broke off: {failure or type(failure).__name__}")

    def translate_rpc_error(self, failure: grpc.RpcError) -> PeerFailed:
        """Return our error for an error of gRPC."""
        code, details = failure.code(), failure.details() or ""
        name, _, text = details.partition(": ")
        number = getattr(errno, name, None) if name.isidentifier() and name.startswith("E") else ERRNO_OF_STATUS.get(code)
        if number is not None:
            return self.translate_rejection(number, text or details)
        self.stats.record_failure()
        if WRONG_NAME in details:
            return PeerFailed(f"at {self.address} is a node without valid keys of {self.name}: another node, or its keys were revoked")
        return PeerFailed(f"{self.name} does not answer: {describe_connection_fault(details)}")

    def translate_rejection(self, number: int, text: str) -> PeerFailed:
        """Return our error for a rejection by a peer."""
        if number == RejectReason.WRONG_DIGEST:
            return PeerCorrupt(f"{self.name}: {text}")
        if number == RejectReason.STRANGER:  # Not a request, but this node is refused.
            return PeerFailed(f"{self.name} refuses: {text}")
        if number == RejectReason.TOO_MANY:
            return PeerBusy(f"{self.name} is busy: {text}", number)
        return PeerRefused(f"{self.name} refuses: {text}", number)


class _QuietChannel:
    """A channel for the stub: an answer that is no message fails its call, without a traceback."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, *, response_deserializer: Callable[[bytes], Any], **how: Any) -> Any:
        def parsed(answer: bytes) -> Any:
            try:
                return response_deserializer(answer)
            except DecodeError:
                return None

        return self._channel.unary_unary(method, response_deserializer=parsed, **how)


def _open_channel(identity: Identity | None, name: str, address: str) -> grpc.Channel:
    if identity is None:
        return grpc.insecure_channel(address, OPTIONS)
    # TLS itself refuses a node without the certificate of the expected node, and trusts the CA of the cluster only.
    credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
    return grpc.secure_channel(address, credentials, [*OPTIONS, ("grpc.ssl_target_name_override", name)])


@contextmanager
def translate_errors(link: Link) -> Iterator[None]:
    """Turn failures of a stream into PeerFailed."""
    try:
        yield
    except (PeerFailed, Rejection, grpc.RpcError) as failure:
        raise link.record_failure(failure) from failure


@contextmanager
def hold_slot(slots: threading.BoundedSemaphore, is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Hold one of the streams of a link. Raises PeerFailed if the transfer is not wanted any more."""
    while not slots.acquire(timeout=SLOT_POLL_S):
        if not is_wanted():
            raise NoLongerWanted("it is no longer wanted")
    try:
        yield
    finally:
        slots.release()


def cancel_call(call: Any) -> None:
    """Cancel a gRPC stream that is no longer wanted."""
    with contextlib.suppress(Exception):
        call.cancel()
