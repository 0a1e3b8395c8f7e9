"""One other node, seen from here: its gRPC channel, a few bulk connections that are kept for the next transfer, and how fast it was.

Errors of gRPC, sockets and refusals become `PeerFailed` and its kinds here, once. A node whose bulk port cannot be reached is asked over
gRPC for a while. If we die here: the node ends what we left after `limits.PEER_IDLE_S`.
"""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from ckptfs import limits
from ckptfs.clique.keys import Identity, target_name
from ckptfs.clique.peers import PeerFailed, PeerLied, PeerRefused, Speed
from ckptfs.config import host_of
from ckptfs.protocol import peer_pb2 as pb
from ckptfs.protocol import peer_pb2_grpc as rpc
from ckptfs_daemon.peer_gate import CLUSTER_METADATA, NODE_METADATA, channel_credentials
from ckptfs_daemon.peer_refusals import Refusal, Why
from ckptfs_daemon.peer_sealed import ConnectionEnded, Sealed

WEIGHT = 0.3
TURN_LOOK_S = 0.25
WRONG_NAME = "Hostname Verification Check failed"
"""What gRPC says when a server's certificate does not have the name that we demand."""
OPTIONS = [
    ("grpc.max_receive_message_length", limits.PEER_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.PEER_MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # So long a connection may take to come about; after one that was refused the next try comes sooner.
    ("grpc.min_reconnect_backoff_ms", int(limits.PEER_CONNECT_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", int(limits.PEER_KEEP_ALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(limits.PEER_KEEP_ALIVE_WAIT_S * 1000)),
    ("grpc.use_local_subchannel_pool", 1),
]
ERRNO = {
    grpc.StatusCode.INVALID_ARGUMENT: errno.EINVAL, grpc.StatusCode.NOT_FOUND: errno.ENOENT, grpc.StatusCode.ABORTED: errno.EBUSY,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errno.EAGAIN, grpc.StatusCode.PERMISSION_DENIED: errno.EACCES,
    grpc.StatusCode.DATA_LOSS: errno.EILSEQ, grpc.StatusCode.FAILED_PRECONDITION: errno.ENODATA,
    grpc.StatusCode.UNIMPLEMENTED: errno.ENOSYS,
}  # fmt: skip


class Measured:
    """Exponentially averaged figures of one peer. `wire` is what the link carried, which zstd makes less than the content."""

    def __init__(self) -> None:
        self.rtt_s: float | None = None
        self.bytes_per_s: float | None = None
        self.wire_per_s: float | None = None
        self.room: int | None = None
        self.clock_s: float | None = None
        self.failed_at = -limits.PEER_DOUBT_S

    def rtt(self, seconds: float) -> None:
        self.rtt_s = _averaged(self.rtt_s, seconds)

    def moved(self, content_bytes: int, wire_bytes: int, seconds: float) -> None:
        """A stream that moved so much; short ones say nothing."""
        if content_bytes >= limits.PEER_SPEED_SAMPLE_BYTES_MIN and seconds > 0:
            self.bytes_per_s = _averaged(self.bytes_per_s, content_bytes / seconds)
            self.wire_per_s = _averaged(self.wire_per_s, wire_bytes / seconds)

    def failed(self) -> None:
        self.failed_at = time.monotonic()

    @property
    def doubtful(self) -> bool:
        """Whether it failed lately."""
        return time.monotonic() - self.failed_at < limits.PEER_DOUBT_S

    @property
    def squeeze(self) -> bool:
        """Whether the link is known to be slower than zstd is here."""
        return self.wire_per_s is not None and self.wire_per_s < limits.PEER_SQUEEZE_BYTES_PER_S

    def speed(self) -> Speed:
        return Speed(self.rtt_s, self.bytes_per_s, self.room, self.clock_s)


def _averaged(old: float | None, new: float) -> float:
    return new if old is None else old + WEIGHT * (new - old)


NOES = {Why.UNKNOWN, Why.FULL, Why.BUSY, Why.TOO_MANY, Why.ENDED, Why.INCOMPLETE}
"""What a node in good order answers, too. What it sends wrong is refused with the other reasons, here."""


class Unwanted(PeerFailed):
    """What was on its way is wanted no more: no fault of the peer."""


class Link:
    """A node that is asked. Any thread may call; a bulk connection is used by one at a time."""

    def __init__(
        self, me: str, cluster: str, identity: Identity | None, name: str, address: str, *, bulk: bool, revocations: int = 0
    ) -> None:
        """`revocations`: how often the keys of that node were revoked; older ones are refused."""
        self.name, self.address, self.revocations = name, address, revocations
        self.measured = Measured()
        self.used = time.monotonic()
        self._metadata = () if identity else ((NODE_METADATA, me), (CLUSTER_METADATA, cluster))
        self._channel = _channel(identity, target_name(cluster, name, revocations), address)
        self.calls = rpc.PeerStub(_Quiet(self._channel))
        self._bulk = bulk
        self._no_bulk_until = 0.0
        self._spare: list[Sealed] = []
        self._told: set[Any] = set()
        self.sending = threading.BoundedSemaphore(limits.PEER_LINK_STREAMS_MAX)
        self.reading = threading.BoundedSemaphore(limits.PEER_LINK_STREAMS_MAX)
        self._lock = threading.Lock()
        self._turns = threading.Condition()
        self._contents: set[int] = set()
        self._closed = False

    def ask(self, call: Callable[..., Any], request: Any, timeout_s: float = limits.PEER_CALL_S) -> Any:
        """A short call. Raises PeerFailed, PeerRefused."""
        self.used = time.monotonic()
        try:
            return call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise self.translated(failure) from failure
        except ValueError as failure:
            raise PeerFailed(f"{self.name} has left") from failure

    def tell(self, call: Callable[..., Any], request: Any) -> None:
        """A call of which nobody needs to know whether it came to anything: the peer would find out by itself."""
        with contextlib.suppress(grpc.RpcError, ValueError):
            told = call.future(request, timeout=limits.PEER_CALL_S, metadata=self._metadata)  # type: ignore[attr-defined]
            self._told.add(told)  # A future that nobody holds is cancelled.
            told.add_done_callback(self._told.discard)

    def send(self, messages: Iterator[bytes]) -> Any:
        """The gRPC way of sending raw messages; the call, of which `result()` waits for the end."""
        return self._channel.stream_unary("/ckptfs.peer.Peer/Send", bytes, bytes).future(messages, metadata=self._metadata)

    def read(self, command: bytes) -> Any:
        """The gRPC way of reading raw messages: the call, which is iterated."""
        return self._channel.unary_stream("/ckptfs.peer.Peer/Read", bytes, bytes)(command, metadata=self._metadata)

    @contextmanager
    def connection(self) -> Iterator[Sealed | None]:
        """A bulk connection; None where gRPC must do. It is kept for the next one unless something was raised."""
        with self._lock:
            sealed = self._spare.pop() if self._spare else None
        if sealed is not None and sealed.waiting():
            sealed.close()  # Nothing can be due on an idle connection but its end.
            sealed = None
        if sealed is None:
            sealed = self._connect()
        try:
            yield sealed
        except BaseException:
            if sealed is not None:
                sealed.shut()
                sealed.close()
            raise
        if sealed is not None:
            self._keep(sealed)

    @contextmanager
    def content(self, number: int, wanted: Callable[[], bool]) -> Iterator[None]:
        """One transfer of a content at a time: what goes ahead of its seal is not broken off by the rest that follows. Raises PeerFailed
        when it is not wanted any more.
        """
        with self._turns:
            while number in self._contents:
                self._turns.wait(TURN_LOOK_S)
                if not wanted():
                    raise Unwanted("it is no longer wanted")
            self._contents.add(number)
        try:
            yield
        finally:
            with self._turns:
                self._contents.discard(number)
                self._turns.notify_all()

    def close(self) -> None:
        """End the channel, and so the calls under way."""
        with self._lock:
            self._closed = True
            spare, self._spare = self._spare, []
        for sealed in spare:
            sealed.close()
        self._channel.close()

    def failed(self, failure: Exception) -> PeerFailed:
        """What a stream's failure means here. A node that answers no (it has not, or not any more, what was asked for) has not failed."""
        found = self._meant(failure)
        if not (isinstance(found, Unwanted) or (isinstance(found, PeerRefused) and found.code in NOES)):
            self.measured.failed()
        return found

    def _meant(self, failure: Exception) -> PeerFailed:
        if isinstance(failure, PeerFailed):
            return failure
        if isinstance(failure, grpc.RpcError):
            return self.translated(failure)
        if isinstance(failure, Refusal):
            return self.refused(failure.why, str(failure))
        return PeerFailed(f"{self.name} broke off: {failure or type(failure).__name__}")

    def translated(self, failure: grpc.RpcError) -> PeerFailed:
        """gRPC's error in our words."""
        code, details = failure.code(), failure.details() or ""
        name, _, text = details.partition(": ")
        number = getattr(errno, name, None) if name.isidentifier() and name.startswith("E") else ERRNO.get(code)
        if number is not None:
            return self.refused(number, text or details)
        self.measured.failed()
        if WRONG_NAME in details:
            return PeerFailed(f"at {self.address} answers a node without good keys of {self.name}: another one, or they were revoked")
        return PeerFailed(f"{self.name} does not answer: {code.name.lower()}, {details}")

    def refused(self, number: int, text: str) -> PeerFailed:
        """A peer's no, as it concerns us."""
        if number == Why.WRONG_DIGEST:
            return PeerLied(f"{self.name}: {text}")
        return PeerRefused(f"{self.name} refuses: {text}", number)

    def _connect(self) -> Sealed | None:
        if not self._bulk or time.monotonic() < self._no_bulk_until:
            return None
        reply = self.ask(self.calls.Connect, pb.Nothing())
        if not reply.port:
            return None
        try:
            connected = socket.create_connection((host_of(self.address), reply.port), limits.PEER_CALL_S)
        except OSError:
            self._no_bulk_until = time.monotonic() + limits.PEER_DOUBT_S
            return None
        try:
            connected.sendall(reply.token)
            return Sealed(connected, reply.keys, server=False)
        except (OSError, AssertionError) as failure:
            connected.close()
            raise PeerFailed(f"{self.name} broke off") from failure

    def _keep(self, sealed: Sealed) -> None:
        with self._lock:
            if not self._closed and len(self._spare) < limits.PEER_LINK_STREAMS_MAX:
                self._spare.append(sealed)
                return
        sealed.close()


class _Quiet:
    """A channel as the generated stub uses it: an answer that is no message fails its call, and leaves no traceback in the log."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def unary_unary(self, method: str, *, response_deserializer: Callable[[bytes], Any], **how: Any) -> Any:
        def parsed(answer: bytes) -> Any:
            try:
                return response_deserializer(answer)
            except DecodeError:
                return None

        return self._channel.unary_unary(method, response_deserializer=parsed, **how)


def _channel(identity: Identity | None, name: str, address: str) -> grpc.Channel:
    if identity is None:
        return grpc.insecure_channel(address, OPTIONS)
    # TLS itself refuses a node that has not the certificate of the node that we mean.
    target = ("grpc.ssl_target_name_override", name)
    return grpc.secure_channel(address, channel_credentials(identity), [*OPTIONS, target])


@contextmanager
def translated(link: Link) -> Iterator[None]:
    """Failures of a stream become PeerFailed."""
    try:
        yield
    except (PeerFailed, Refusal, ConnectionEnded, grpc.RpcError) as failure:
        raise link.failed(failure) from failure


@contextmanager
def turn(place: threading.BoundedSemaphore, wanted: Callable[[], bool]) -> Iterator[None]:
    """Wait for one of the streams that a link may have; each ends when nothing moves. Raises PeerFailed when not wanted."""
    while not place.acquire(timeout=TURN_LOOK_S):
        if not wanted():
            raise Unwanted("it is no longer wanted")
    try:
        yield
    finally:
        place.release()


def ended(call: Any) -> None:
    """Cancel a gRPC stream that is no longer wanted."""
    with contextlib.suppress(Exception):
        call.cancel()
