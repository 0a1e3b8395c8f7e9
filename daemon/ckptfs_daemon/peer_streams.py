"""Blocks in and out for a peer, whichever way they travel: the command checked, the transfer or loan held, the number of streams bounded.

If we die here: see `peer_transfers`.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ckptfs import limits
from ckptfs_daemon import peer_checks, peer_frames
from ckptfs_daemon.peer_frames import BlockReceiver, Command, CommandKind
from ckptfs_daemon.peer_refusals import Rejection, RejectReason
from ckptfs_daemon.peer_transfers import TransferTable


class ConcurrencyLimit:
    """So many at once altogether, and of one peer."""

    def __init__(self, what: str, total_max: int, peer_max: int) -> None:
        self._what, self._total_max, self._peer_max = what, total_max, peer_max
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def hold_slot(self, peer: str) -> Iterator[None]:
        """Hold one. Raises Refusal when there is none left."""
        with self._lock:
            if self._used.total() >= self._total_max or self._used[peer] >= self._peer_max:
                raise Rejection(RejectReason.TOO_MANY, f"too many {self._what}s at once")
            self._used[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._used[peer] -= 1
                self._used += Counter()  # Peers without any are forgotten.


class BlockStreams:
    """Streams of blocks from and to this node."""

    def __init__(self, table: TransferTable) -> None:
        self._table = table
        self._slots = ConcurrencyLimit("stream", limits.PEER_STREAMS_MAX, limits.PEER_STREAMS_OF_ONE_MAX)

    @contextmanager
    def open_incoming(self, peer: str, command: Command) -> Iterator[BlockReceiver]:
        """Blocks of a transfer come. Raises Refusal."""
        _require_kind(command, CommandKind.SEND)
        transfer = self._table.transfers.get(peer, command.id)
        with self._slots.hold_slot(peer), transfer.hold_stream():
            arriving = BlockReceiver(transfer)
            try:
                yield arriving
            finally:
                arriving.close()

    @contextmanager
    def open_outgoing(self, peer: str, command: Command) -> Iterator[Iterator[bytes | memoryview]]:
        """Blocks of a loan go: the messages with their end. Raises Refusal, OSError."""
        _require_kind(command, CommandKind.READ)
        read = self._table.reads.get(peer, command.id)
        numbers = peer_checks.parse_block_range(command, read.copy.size)
        with self._slots.hold_slot(peer), read.hold_stream():
            yield _encode_with_end(read.copy.fd, read.copy.size, numbers, command.compress)


def _encode_with_end(fd: int, size: int, numbers: range, compress: bool) -> Iterator[bytes | memoryview]:
    try:
        yield from peer_frames.encode_blocks(fd, size, numbers, peer_frames.is_compressible if compress else peer_frames.never_compress)
    except peer_frames.SourceChanged:
        raise Rejection(RejectReason.BROKEN, "the copy became shorter") from None
    yield peer_frames.encode_end(len(numbers))


def _require_kind(command: Command, kind: CommandKind) -> None:
    if command.kind != kind:
        raise Rejection(RejectReason.MALFORMED, "this is no place for that command")
