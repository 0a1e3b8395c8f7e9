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
from ckptfs.clique.peers import PeerFailed, PeerLied
from ckptfs_daemon import peer_frames
from ckptfs_daemon.peer_frames import HEADER, Command, Encoding, Kind, SourceChanged
from ckptfs_daemon.peer_link import Link, Unwanted, ended, translated, turn
from ckptfs_daemon.peer_refusals import Refusal, Why
from ckptfs_daemon.peer_sealed import Sealed


@dataclass(slots=True)
class Work:
    """What is to be sent, from where, and how much of it went. Shared by the streams of one try."""

    fd: int
    size: int
    transfer: int
    numbers: list[int]
    wanted: Callable[[], bool]
    squeeze: bool
    moved: int = 0
    moved_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, taken: list[int]) -> Iterator[int]:
        """Blocks for one stream, one at a time; noted in `taken`."""
        while self.wanted():
            with self.lock:
                if not self.numbers:
                    return
                taken.append(self.numbers.pop())
            yield taken[-1]
        raise Unwanted("it is no longer wanted")

    def messages(self) -> Iterator[bytes | memoryview]:
        """The raw messages of one stream. Raises PeerFailed, PeerLied, OSError."""
        yield Command(Kind.SEND, self.transfer).packed()
        taken: list[int] = []
        try:
            for message in peer_frames.departing(
                self.fd, self.size, self.take(taken), peer_frames.pays if self.squeeze else peer_frames.never
            ):
                yield message
                self.moved += len(message)
                self.moved_at = time.monotonic()
        except SourceChanged:
            raise PeerLied("the file became shorter while it was sent") from None
        yield peer_frames.end(len(taken))


def stream(link: Link, work: Work) -> None:
    """One stream, until there is nothing left to send. Raises PeerFailed."""
    with turn(link.sending, work.wanted), translated(link), link.connection() as sealed:
        if sealed is None:
            _over_grpc(link, work)
        else:
            _over_socket(sealed, work)


def _over_socket(sealed: Sealed, work: Work) -> None:
    for message in work.messages():
        if len(message) == HEADER.size and sealed.waiting():
            break  # The peer says something before the end: it refuses.
        sealed.put(message)
    else:
        sealed.push()
    answer = memoryview(bytearray(HEADER.size))
    sealed.fill(answer)
    number, length, encoding = HEADER.unpack(answer)
    if encoding == Encoding.FAILED and length <= 256:
        text = memoryview(bytearray(length))
        if length:
            sealed.fill(text)
        raise Refusal(Why(number) if number in set(Why) else Why.BROKEN, bytes(text).decode(errors="replace"))
    if encoding != Encoding.END:
        raise Refusal(Why.OUT_OF_ORDER, "an answer that is none")


def _over_grpc(link: Link, work: Work) -> None:
    reading = _Reading(work)
    call = link.send(iter(reading))
    try:
        while not call.done():
            if not reading.over.wait(1.0) and time.monotonic() - work.moved_at <= limits.PEER_STALL_S:
                continue
            if not reading.over.is_set():
                raise PeerFailed(f"{link.name} takes nothing")
            call.result(limits.PEER_DISK_S)
        call.result()
    except (grpc.RpcError, grpc.FutureTimeoutError) as failure:
        raise reading.failure or (
            failure if isinstance(failure, grpc.RpcError) else PeerFailed(f"{link.name} does not answer")
        ) from failure
    finally:
        ended(call)
        reading.over.wait(limits.PEER_CALL_S)


class _Reading:
    """The messages of a gRPC stream, which gRPC takes in a thread of its own; what fails there is kept for the caller."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.over = threading.Event()
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            for message in self._work.messages():
                yield bytes(message)
        except (PeerFailed, OSError) as failure:
            self.failure = failure
        finally:
            self.over.set()


def streams(link: Link, work: Work, count: int) -> None:
    """Send all of `work` with `count` streams at once; the first failure of any, after all have ended. Raises PeerFailed."""
    failures: list[PeerFailed] = []

    def one() -> None:
        try:
            stream(link, work)
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
        raise next((failure for failure in failures if isinstance(failure, PeerLied)), failures[0])
