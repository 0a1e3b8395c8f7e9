"""The unfinished work of peers on this node: transfers that arrive, and copies that they read.

A transfer belongs to the peer that began it, has a random id, and is bounded in number per peer and in total. A block of it is accepted
once: only if it was missing, and from one stream at a time. A read names a content and its digest. The copy is open during the stream, and
idle afterwards, for the next read of the peer; the copies that are idle longest are closed if there are too many.

Transfers and idle copies end after `limits.PEER_IDLE_S` without use.

Crash safety: the content host deletes unfinished transfers at the next start; peers offer and ask again.
"""

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from ckptfs import limits
from ckptfs.clique.peer_api import ContentHost, Offer, OpenCopy, Reception
from ckptfs.peers.messages import Rejection, RejectReason


class IncomingTransfer:
    """A reception, block by block: a `BlockSink`. Touches only the descriptor of the content host."""

    def __init__(self, peer: str, offer: Offer, reception: Reception) -> None:
        self.peer = peer
        self.offer = offer
        self.token = reception.token
        self.size = offer.size
        self.lock = threading.Lock()
        self.has_ended = False
        self.has_received_blocks = False
        self._fd = reception.fd
        self._missing_blocks = set(reception.missing_blocks)
        self._incoming_blocks: set[int] = set()
        self._on_unused: Callable[[], None] = lambda: None
        self._stream_count = 0
        self._used_at = time.monotonic()

    @contextmanager
    def hold_stream(self) -> Iterator[None]:
        """Use the transfer on one stream. Raises Rejection if it has ended."""
        with self.lock:
            self._require_active()
            self._stream_count += 1
        try:
            yield
        finally:
            with self.lock:
                self._stream_count -= 1
                self._used_at = time.monotonic()
                last = self.has_ended and not self._stream_count
            if last:
                self._on_unused()

    def touch(self) -> None:
        self._used_at = time.monotonic()

    def is_idle(self) -> bool:
        """Return True if no peer used it for too long."""
        return not self._stream_count and time.monotonic() - self._used_at > limits.PEER_IDLE_S

    def end_if_unused(self) -> None:
        """End the transfer for new streams. Raises Rejection (busy) while a stream uses it."""
        with self.lock:
            self._require_active()
            if self._stream_count:
                raise Rejection(RejectReason.BUSY, "streams still use it")
            self.has_ended = True

    def end(self, on_unused: Callable[[], None]) -> None:
        """Refuse new streams. Call `on_unused` when no stream is left, perhaps at once."""
        with self.lock:
            self._require_active()
            self.has_ended, self._on_unused = True, on_unused
            unused = not self._stream_count
        if unused:
            on_unused()

    def _require_active(self) -> None:
        if self.has_ended:
            raise Rejection(RejectReason.UNKNOWN, "it has ended")

    def claim_block(self, number: int) -> bytes:
        with self.lock:
            if self.has_ended:
                raise Rejection(RejectReason.ENDED, "the transfer has ended")
            if number not in self._missing_blocks:
                raise Rejection(RejectReason.OUT_OF_ORDER, f"block {number} is not missing")
            if number in self._incoming_blocks:
                raise Rejection(RejectReason.BUSY, f"block {number} is arriving already")
            self._incoming_blocks.add(number)
        return self.offer.get_block_digest(number)

    def write_block(self, number: int, pieces: Sequence[bytes]) -> None:
        pwrite_all(self._fd, pieces, number * limits.BLOCK_BYTES)
        with self.lock:
            self._incoming_blocks.discard(number)
            self._missing_blocks.discard(number)
            self.has_received_blocks = True
        self.touch()

    def release_block(self, number: int) -> None:
        with self.lock:
            self._incoming_blocks.discard(number)

    def list_missing_blocks(self) -> list[int]:
        """Return the blocks that have not arrived yet, ascending."""
        with self.lock:
            return sorted(self._missing_blocks)


class TransferTable:
    """All transfers and reads of this node, and the content host behind them."""

    def __init__(self, content_host: ContentHost) -> None:
        self.content_host = content_host
        self._transfers: dict[int, IncomingTransfer] = {}
        self._reserved_count = 0
        self._reading: set[tuple[str, int]] = set()
        self._idle_copies: dict[tuple[str, int, bytes], tuple[OpenCopy, float]] = {}
        self._reader_slots: dict[tuple[str, int], float] = {}
        self._lock = threading.Lock()

    @property
    def transfer_count(self) -> int:
        """Return the number of transfers that peers have begun."""
        return len(self._transfers)

    @property
    def read_count(self) -> int:
        """Return how many contents peers are reading, each counted once for a peer."""
        return len(self._reading)

    def begin_transfer(self, peer: str, offer: Offer) -> tuple[int, list[int]]:
        """Begin a transfer, and end this peer's older one. Return its id and the missing blocks."""
        for number, transfer in self._list_transfers():
            if transfer.peer == peer and transfer.offer.content == offer.content:
                self.abandon(peer, number)
        with self._reserve_slot(peer):
            reception = self.content_host.begin_reception(replace(offer, sender=peer))
            number = secrets.randbits(62) + 1
            with self._lock:
                self._transfers[number] = IncomingTransfer(peer, offer, reception)
        return number, list(reception.missing_blocks)

    @contextmanager
    def _reserve_slot(self, peer: str) -> Iterator[None]:
        """Hold the place of a transfer until it is in the table. Raises Rejection if there is none."""
        with self._lock:
            mine = sum(transfer.peer == peer for transfer in self._transfers.values())
            is_full = len(self._transfers) + self._reserved_count >= limits.PEER_TRANSFERS_MAX
            if is_full or mine >= limits.PEER_TRANSFERS_PER_PEER_MAX:
                raise Rejection(RejectReason.TOO_MANY, "too many at once: transfer")
            self._reserved_count += 1
        try:
            yield
        finally:
            with self._lock:
                self._reserved_count -= 1

    def get_transfer(self, peer: str, number: int) -> IncomingTransfer:
        """Return the transfer of this peer with an id. Raises Rejection if there is none."""
        transfer = self._transfers.get(number)
        if transfer is None or transfer.peer != peer:
            raise Rejection(RejectReason.UNKNOWN, "no such transfer")
        return transfer

    def _list_transfers(self) -> list[tuple[int, IncomingTransfer]]:
        with self._lock:
            return list(self._transfers.items())

    def _remove(self, number: int) -> None:
        with self._lock:
            self._transfers.pop(number, None)

    def receive_whole(self, peer: str, offer: Offer, data: bytes) -> bool:
        """Receive a content of one block inside its offer. Return whether the copy counts now."""
        number, missing_blocks = self.begin_transfer(peer, offer)
        try:
            transfer = self.get_transfer(peer, number)
            with transfer.hold_stream():  # A peer that offers the same content waits for the end: the descriptor is in use until then.
                for block_number in missing_blocks:
                    transfer.claim_block(block_number)
                    transfer.write_block(block_number, [data])
        except BaseException:
            self.abandon(peer, number)
            raise
        return self.finish(peer, number)

    def finish(self, peer: str, number: int) -> bool:
        """Finish a transfer. Return whether the content is verified. A transfer that lacks blocks continues."""
        transfer = self.get_transfer(peer, number)
        if left := transfer.list_missing_blocks():
            raise Rejection(RejectReason.INCOMPLETE, f"{len(left)} blocks are missing, the first is {left[0]}")
        transfer.end_if_unused()
        self._remove(number)
        return self.content_host.finish_reception(transfer.token)

    def abandon(self, peer: str, number: int) -> None:
        """End a transfer. The host learns of it when no stream uses it any more."""
        transfer = self.get_transfer(peer, number)
        self._remove(number)
        transfer.end(lambda: self.content_host.abort_reception(transfer.token, keep_blocks=transfer.has_received_blocks))

    def describe_copy(self, peer: str, content: int, digest: bytes | None, *, can_wait: bool = False) -> OpenCopy:
        """Describe a copy; its descriptor is closed. `can_wait`: see `_take_reader_slot`."""
        copy = self.content_host.open_copy(content, digest)
        os.close(copy.fd)
        if can_wait:
            self._take_reader_slot(peer, copy, can_wait=True)
        return copy

    @contextmanager
    def lend_copy(self, peer: str, content: int, digest: bytes, *, can_wait: bool = False) -> Iterator[OpenCopy]:
        """Open a copy for one stream.

        Until `end_reading` it stays open for the next one, even if the content is deleted.
        """
        place = peer, content, digest
        with self._lock:
            copy, _ = self._idle_copies.pop(place, (None, 0.0))
        copy = copy or self.content_host.open_copy(content, digest)
        with self._lock:
            self._reading.add((peer, content))
        try:
            self._take_reader_slot(peer, copy, can_wait=can_wait)
            yield copy
        finally:
            unneeded: OpenCopy | None = copy
            with self._lock:
                if (peer, content) in self._reading:
                    unneeded, _ = self._idle_copies.pop(place, (None, 0.0))  # Of another stream, which ended before.
                    self._idle_copies[place] = copy, time.monotonic()
            if unneeded is not None:
                os.close(unneeded.fd)
            self._close_idle(lambda _, __: len(self._idle_copies) > limits.PEER_IDLE_COPIES_MAX)

    def end_reading(self, peer: str, content: int | None = None) -> None:
        """Close what a peer has open of a content, or of all, after its streams. Its slots are free then."""

        def is_meant(place: tuple[str, int]) -> bool:
            return place[0] == peer and content in (None, place[1])

        with self._lock:
            self._reading = {place for place in self._reading if not is_meant(place)}
            self._reader_slots = {place: until_s for place, until_s in self._reader_slots.items() if not is_meant(place)}
        self._close_idle(lambda place, _: is_meant(place[:2]))

    def _close_idle(self, should_close: Callable[[tuple[str, int, bytes], float], bool]) -> None:
        """Close idle copies, the one that is idle longest first. `should_close` gets its key and since when."""
        gone: list[OpenCopy] = []
        with self._lock:
            for place, (copy, since_s) in [*self._idle_copies.items()]:
                if should_close(place, since_s):
                    del self._idle_copies[place]
                    self._reading.discard(place[:2])
                    gone.append(copy)
        for copy in gone:
            os.close(copy.fd)

    def _take_reader_slot(self, peer: str, copy: OpenCopy, *, can_wait: bool) -> None:
        """Give a peer a slot among the readers of a large content, until it has not read for PEER_READER_S.

        The first readers thus finish soon and serve the next ones. Raises Rejection if no slot is free and the peer can wait.
        """
        now = time.monotonic()
        if copy.size < limits.PEER_READERS_BYTES_MIN:
            return
        with self._lock:
            self._reader_slots = {place: until for place, until in self._reader_slots.items() if until > now}
            others = {reader for reader, content in self._reader_slots if content == copy.content and reader != peer}
            if can_wait and len(others) >= limits.PEER_READERS_MAX:
                raise Rejection(RejectReason.TOO_MANY, f"{len(others)} nodes fetch it just now")
            self._reader_slots[peer, copy.content] = now + limits.PEER_READER_S

    def end_all_of_peer(self, peer: str) -> None:
        """End all that this peer had begun, as soon as no stream uses it."""
        self._end_each(lambda transfer: transfer.peer == peer)
        self.end_reading(peer)

    def end_idle(self, everything: bool = False) -> None:
        """End what was unused for long, or `everything`."""
        self._end_each(lambda transfer: everything or transfer.is_idle())
        if everything:
            self._reading = set()  # The last streams close their copies.
        self._close_idle(lambda _, since: everything or time.monotonic() - since > limits.PEER_IDLE_S)

    def _end_each(self, should_end: Callable[[IncomingTransfer], bool]) -> None:
        for number, transfer in self._list_transfers():
            if should_end(transfer):
                with suppress(Rejection):  # It ended just now.
                    self.abandon(transfer.peer, number)


def pwrite_all(fd: int, pieces: Sequence[bytes], offset: int) -> None:
    """Write the pieces, one after the other."""
    done = os.pwritev(fd, pieces, offset)
    rest = b"".join(pieces)[done:] if done < sum(map(len, pieces)) else b""
    while rest:  # A disk that is nearly full took a part; the next write says so.
        count = os.pwrite(fd, rest, offset + done)
        rest, done = rest[count:], done + count


class ConcurrencyLimit:
    """A limit on concurrent work, in total and for each peer."""

    def __init__(self, what: str, total_max: int, peer_max: int) -> None:
        self._what, self._total_max, self._peer_max = what, total_max, peer_max
        self._used: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def hold_slot(self, peer: str) -> Iterator[None]:
        """Hold a slot. Raises Rejection if none is free."""
        with self._lock:
            if self._used.total() >= self._total_max or self._used[peer] >= self._peer_max:
                raise Rejection(RejectReason.TOO_MANY, f"too many at once: {self._what}")
            self._used[peer] += 1
        try:
            yield
        finally:
            with self._lock:
                self._used[peer] -= 1
                self._used += Counter()  # Peers without any are forgotten.
