"""Blocks in and out for a peer, whichever way they travel: the command checked, the transfer or loan held, the number of streams bounded.

If we die here: see `peer_transfers`.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ckptfs import limits
from ckptfs_daemon import peer_checks, peer_frames
from ckptfs_daemon.peer_frames import Arriving, Command, Kind
from ckptfs_daemon.peer_refusals import Refusal, Why
from ckptfs_daemon.peer_transfers import Ledger


class Slots:
    """So many at once altogether, and of one peer."""

    def __init__(self, what: str, total_max: int, peer_max: int) -> None:
        self._what, self._total_max, self._peer_max = what, total_max, peer_max
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def one(self, peer: str) -> Iterator[None]:
        """Hold one. Raises Refusal when there is none left."""
        with self._lock:
            if self._used.total() >= self._total_max or self._used[peer] >= self._peer_max:
                raise Refusal(Why.TOO_MANY, f"too many {self._what}s at once")
            self._used[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._used[peer] -= 1
                self._used += Counter()  # Peers without any are forgotten.


class Streams:
    """Streams of blocks from and to this node."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._slots = Slots("stream", limits.PEER_STREAMS_MAX, limits.PEER_STREAMS_OF_ONE_MAX)

    @contextmanager
    def arriving(self, peer: str, command: Command) -> Iterator[Arriving]:
        """Blocks of a transfer come. Raises Refusal."""
        _need_kind(command, Kind.SEND)
        transfer = self._ledger.transfers.get(peer, command.id)
        with self._slots.one(peer), transfer.stream():
            arriving = Arriving(transfer)
            try:
                yield arriving
            finally:
                arriving.close()

    @contextmanager
    def departing(self, peer: str, command: Command) -> Iterator[Iterator[bytes | memoryview]]:
        """Blocks of a loan go: the messages with their end. Raises Refusal, OSError."""
        _need_kind(command, Kind.READ)
        borrowed = self._ledger.loans.get(peer, command.id)
        numbers = peer_checks.run(command, borrowed.loan.size)
        with self._slots.one(peer), borrowed.stream():
            yield _messages(borrowed.loan.fd, borrowed.loan.size, numbers, command.squeeze)


def _messages(fd: int, size: int, numbers: range, squeeze: bool) -> Iterator[bytes | memoryview]:
    try:
        yield from peer_frames.departing(fd, size, numbers, peer_frames.pays if squeeze else peer_frames.never)
    except peer_frames.SourceChanged:
        raise Refusal(Why.BROKEN, "the copy became shorter") from None
    yield peer_frames.end(len(numbers))


def _need_kind(command: Command, kind: Kind) -> None:
    if command.kind != kind:
        raise Refusal(Why.MALFORMED, "this is no place for that command")
