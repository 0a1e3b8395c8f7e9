"""Sends the blocks that a peer lacks: several streams take them from one list, so that none waits for another.

A stream that breaks leaves its block to the next try, which asks the peer what is still lacking. Memory: a block and two pieces per stream.
If we die here: the peer keeps what came for a while, and offers of the same content begin there.
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import grpc

from ckptfs import limits
from ckptfs.clique.peers import PeerCorrupt, PeerFailed
from ckptfs_daemon import peer_frames
from ckptfs_daemon.peer_frames import HEADER, Command, CommandKind, Encoding, SourceChanged
from ckptfs_daemon.peer_link import Link, NoLongerWanted, cancel_call, hold_slot, translate_errors
from ckptfs_daemon.peer_refusals import Rejection, RejectReason
from ckptfs_daemon.peer_sealed import EncryptedConnection


@dataclass(slots=True)
class SendJob:
    """What is to be sent, from where, and how much of it went. Shared by the streams of one try."""

    fd: int
    size: int
    transfer: int
    pending_blocks: list[int]
    wanted: Callable[[], bool]
    compress: bool
    sent_bytes: int = 0
    progress_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_blocks(self, taken: list[int]) -> Iterator[int]:
        """Blocks for one stream, one at a time; noted in `taken`."""
        while self.wanted():
            with self.lock:
                if not self.pending_blocks:
                    return
                taken.append(self.pending_blocks.pop())
            yield taken[-1]
        raise NoLongerWanted("it is no longer wanted")

    def encode_messages(self) -> Iterator[bytes | memoryview]:
        """The raw messages of one stream. Raises PeerFailed, PeerLied, OSError."""
        yield Command(CommandKind.SEND, self.transfer).pack()
        taken: list[int] = []
        try:
            for message in peer_frames.encode_blocks(
                self.fd, self.size, self.take_blocks(taken), peer_frames.is_compressible if self.compress else peer_frames.never_compress
            ):
                yield message
                self.sent_bytes += len(message)
                self.progress_at = time.monotonic()
        except SourceChanged:
            raise PeerCorrupt("the file became shorter while it was sent") from None
        yield peer_frames.encode_end(len(taken))


def send_stream(link: Link, job: SendJob) -> None:
    """One stream, until there is nothing left to send. Raises PeerFailed."""
    with hold_slot(link.send_slots, job.wanted), translate_errors(link), link.use_connection() as connection:
        if connection is None:
            _send_over_grpc(link, job)
        else:
            _send_over_socket(connection, job)


def _send_over_socket(connection: EncryptedConnection, job: SendJob) -> None:
    for message in job.encode_messages():
        if len(message) == HEADER.size and connection.has_input():
            break  # The peer says something before the end: it refuses.
        connection.send(message)
    else:
        connection.send_buffered()
    answer = memoryview(bytearray(HEADER.size))
    connection.receive_into(answer)
    number, length, encoding = HEADER.unpack(answer)
    if encoding == Encoding.FAILED and length <= 256:
        text = memoryview(bytearray(length))
        if length:
            connection.receive_into(text)
        raise Rejection(RejectReason(number) if number in set(RejectReason) else RejectReason.BROKEN, bytes(text).decode(errors="replace"))
    if encoding != Encoding.END:
        raise Rejection(RejectReason.OUT_OF_ORDER, "an answer that is none")


def _send_over_grpc(link: Link, job: SendJob) -> None:
    source = _MessageSource(job)
    call = link.open_send_stream(iter(source))
    try:
        while not call.done():
            if not source.finished.wait(1.0) and time.monotonic() - job.progress_at <= limits.PEER_STALL_S:
                continue
            if not source.finished.is_set():
                raise PeerFailed(f"{link.name} takes nothing")
            call.result(limits.PEER_DISK_S)
        call.result()
    except (grpc.RpcError, grpc.FutureTimeoutError) as failure:
        raise source.failure or (failure if isinstance(failure, grpc.RpcError) else PeerFailed(f"{link.name} does not answer")) from failure
    finally:
        cancel_call(call)
        source.finished.wait(limits.PEER_CALL_S)


class _MessageSource:
    """The messages of a gRPC stream, which gRPC takes in a thread of its own; what fails there is kept for the caller."""

    def __init__(self, job: SendJob) -> None:
        self._job = job
        self.finished = threading.Event()
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            for message in self._job.encode_messages():
                yield bytes(message)
        except (PeerFailed, OSError) as failure:
            self.failure = failure
        finally:
            self.finished.set()


def send_blocks(link: Link, job: SendJob, count: int) -> None:
    """Send all of `work` with `count` streams at once; the first failure of any, after all have ended. Raises PeerFailed."""
    failures: list[PeerFailed] = []

    def one() -> None:
        try:
            send_stream(link, job)
        except PeerFailed as failure:
            failures.append(failure)
        except Exception as failure:
            failures.append(PeerFailed(f"sending to {link.name} failed: {failure!r}"))

    others = [threading.Thread(target=one, name="peer send", daemon=True) for _ in range(count - 1)]
    for thread in others:
        thread.start()
    one()
    for thread in others:
        thread.join()
    if failures:
        raise next((failure for failure in failures if isinstance(failure, PeerCorrupt)), failures[0])
