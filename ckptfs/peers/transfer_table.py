"""The unfinished work of peers on this node: transfers (blocks that arrive) and reads (open copies).

Each entry belongs to the peer that began it, has a random id, is bounded in number per peer and in total, and ends after
`limits.PEER_IDLE_S` without use. A block of a transfer is accepted once: only if it was missing, and from one stream at a time.

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
from typing import Generic, TypeVar

from ckptfs import limits
from ckptfs.clique.peer_api import ContentHost, Offer, OpenCopy, Reception
from ckptfs.peers.messages import Rejection, RejectReason

Clock = Callable[[], float]


class PeerResource:
    """Work that a peer has begun: its peer, its last use, and the number of streams that use it now."""

    def __init__(self, peer: str, clock: Clock) -> None:
        self.peer = peer
        self.lock = threading.Lock()
        self.has_ended = False
        self._on_unused: Callable[[], None] = lambda: None
        self._clock = clock
        self._stream_count = 0
        self._used_at = clock()

    @contextmanager
    def hold_stream(self) -> Iterator[None]:
        """Use the item on one stream. Raises Rejection if the item has ended."""
        with self.lock:
            self._require_active()
            self._stream_count += 1
        try:
            yield
        finally:
            with self.lock:
                self._stream_count -= 1
                self._used_at = self._clock()
                last = self.has_ended and not self._stream_count
            if last:
                self._on_unused()

    def touch(self) -> None:
        self._used_at = self._clock()

    def is_idle(self) -> bool:
        """Return True if no peer used it for too long."""
        return not self._stream_count and self._clock() - self._used_at > limits.PEER_IDLE_S

    def end_if_unused(self) -> None:
        """End the item for new streams. Raises Rejection (busy) while a stream uses it."""
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


class IncomingTransfer(PeerResource):
    """A reception, block by block: a `BlockSink`. Touches only the descriptor of the content host."""

    def __init__(self, peer: str, offer: Offer, reception: Reception, clock: Clock) -> None:
        super().__init__(peer, clock)
        self.offer = offer
        self.token = reception.token
        self.size = offer.size
        self._fd = reception.fd
        self._missing_blocks = set(reception.missing_blocks)
        self._incoming_blocks: set[int] = set()
        self.has_received_blocks = False

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


class OutgoingRead(PeerResource):
    """A copy that a peer has open."""

    def __init__(self, peer: str, copy: OpenCopy, clock: Clock) -> None:
        super().__init__(peer, clock)
        self.copy = copy


Item = TypeVar("Item", bound=PeerResource)


class PeerResourceTable(Generic[Item]):
    """Items by random id. A peer finds only its own: any other id is unknown to it."""

    def __init__(self, what: str, total_max: int, peer_max: int) -> None:
        self._what, self._total_max, self._peer_max = what, total_max, peer_max
        self._items: dict[int, Item] = {}
        self._reserved_count = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    @contextmanager
    def reserve_slot(self, peer: str) -> Iterator[Callable[[Item], int]]:
        """Reserve a slot; yield the function that fills it and gives the id. Raises Rejection."""
        with self._lock:
            mine = sum(item.peer == peer for item in self._items.values())
            if mine >= self._peer_max or len(self._items) + self._reserved_count >= self._total_max:
                raise Rejection(RejectReason.TOO_MANY, f"too many at once: {self._what}")
            self._reserved_count += 1
        try:
            yield self._add
        finally:
            with self._lock:
                self._reserved_count -= 1

    def _add(self, item: Item) -> int:
        number = secrets.randbits(62) + 1
        with self._lock:
            self._items[number] = item
        return number

    def get(self, peer: str, number: int) -> Item:
        """Return the entry of this peer with an id. Raises Rejection if there is none."""
        item = self._items.get(number)
        if item is None or item.peer != peer:
            raise Rejection(RejectReason.UNKNOWN, f"no such {self._what}")
        return item

    def remove(self, number: int) -> None:
        with self._lock:
            self._items.pop(number, None)

    def all(self) -> Sequence[tuple[int, Item]]:
        """Return a snapshot of (id, item)."""
        with self._lock:
            return list(self._items.items())


class TransferTable:
    """All transfers and reads of this node, and the content host behind them."""

    def __init__(self, content_host: ContentHost, clock: Clock = time.monotonic) -> None:
        self.content_host = content_host
        self._clock = clock
        self.transfers: PeerResourceTable[IncomingTransfer] = PeerResourceTable(
            "transfer", limits.PEER_TRANSFERS_MAX, limits.PEER_TRANSFERS_PER_PEER_MAX
        )
        self.reads: PeerResourceTable[OutgoingRead] = PeerResourceTable(
            "open copy", limits.PEER_OPEN_COPIES_MAX, limits.PEER_OPEN_COPIES_PER_PEER_MAX
        )
        self._reader_slots: dict[tuple[int, str], float] = {}
        self._lock = threading.Lock()

    def begin_transfer(self, peer: str, offer: Offer) -> tuple[int, list[int]]:
        """Begin a transfer, and end this peer's older one. Return its id and the missing blocks."""
        for number, transfer in self.transfers.all():
            if transfer.peer == peer and transfer.offer.content == offer.content:
                self.abandon(peer, number)
        with self.transfers.reserve_slot(peer) as insert:
            reception = self.content_host.begin_reception(replace(offer, sender=peer))
            return insert(IncomingTransfer(peer, offer, reception, self._clock)), list(reception.missing_blocks)

    def receive_whole(self, peer: str, offer: Offer, data: bytes) -> bool:
        """Receive a content of one block inside its offer. Return whether the copy counts now."""
        number, missing_blocks = self.begin_transfer(peer, offer)
        try:
            transfer = self.transfers.get(peer, number)
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
        transfer = self.transfers.get(peer, number)
        if left := transfer.list_missing_blocks():
            raise Rejection(RejectReason.INCOMPLETE, f"{len(left)} blocks are missing, the first is {left[0]}")
        transfer.end_if_unused()
        self.transfers.remove(number)
        return self.content_host.finish_reception(transfer.token)

    def abandon(self, peer: str, number: int) -> None:
        """End a transfer. The host learns of it when no stream uses it any more."""
        transfer = self.transfers.get(peer, number)
        self.transfers.remove(number)
        transfer.end(lambda: self.content_host.abort_reception(transfer.token, keep_blocks=transfer.has_received_blocks))

    def describe_copy(self, peer: str, content: int, digest: bytes | None, *, can_wait: bool = False) -> OpenCopy:
        """Describe a copy; its descriptor is closed. `can_wait`: see `_reserve_reader_slot`."""
        copy = self.content_host.open_copy(content, digest)
        os.close(copy.fd)
        if can_wait:
            self._reserve_reader_slot(peer, copy)
        return copy

    def open_copy(self, peer: str, content: int, digest: bytes | None, *, can_wait: bool = False) -> tuple[int, OpenCopy]:
        """Open a copy for a peer. Return (id, open copy). `can_wait`: see `_reserve_reader_slot`."""
        with self.reads.reserve_slot(peer) as insert:
            copy = self.content_host.open_copy(content, digest)
            try:
                if can_wait:
                    self._reserve_reader_slot(peer, copy)
            except Rejection:
                os.close(copy.fd)
                raise
            return insert(OutgoingRead(peer, copy, self._clock)), copy

    def close_copy(self, peer: str, number: int) -> None:
        """End an open copy. Its descriptor is closed when no stream uses it any more."""
        read = self.reads.get(peer, number)
        self.reads.remove(number)
        with self._lock:
            self._reader_slots.pop((read.copy.content, peer), None)
        read.end(lambda: os.close(read.copy.fd))

    def _reserve_reader_slot(self, peer: str, copy: OpenCopy) -> None:
        """Reserve a slot among the readers of a large content, until its open copies end.

        The first readers thus finish soon and serve the next ones. Raises Rejection if no slot is free.
        """
        now = self._clock()
        if copy.size < limits.PEER_READERS_BYTES_MIN:
            return
        with self._lock:
            self._reader_slots = {place: until for place, until in self._reader_slots.items() if until > now}
            readers = {reader for content, reader in self._reader_slots if content == copy.content}
            readers |= {read.peer for _, read in self.reads.all() if read.copy.content == copy.content}
            if len(readers - {peer}) >= limits.PEER_READERS_MAX:
                raise Rejection(RejectReason.TOO_MANY, f"{len(readers)} nodes fetch it just now")
            self._reader_slots[copy.content, peer] = now + limits.PEER_READER_S

    def end_all_of_peer(self, peer: str) -> None:
        """End all that this peer had begun and no stream uses."""
        self._end_each(lambda resource: resource.peer == peer)

    def end_idle(self, everything: bool = False) -> None:
        """End what was unused for long, or `everything`."""
        self._end_each(lambda resource: everything or resource.is_idle())

    def _end_each(self, should_end: Callable[[PeerResource], bool]) -> None:
        transfers = [(self.abandon, item.peer, number) for number, item in self.transfers.all() if should_end(item)]
        reads = [(self.close_copy, item.peer, number) for number, item in self.reads.all() if should_end(item)]
        for end, peer, number in (*transfers, *reads):
            with suppress(Rejection):  # A stream uses it, or ended it just now.
                end(peer, number)


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
