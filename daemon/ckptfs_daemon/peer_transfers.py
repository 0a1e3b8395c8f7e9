"""Owns what peers have begun on this node and not ended: transfers (blocks that arrive) and loans (copies that are being read).

Each belongs to the peer that began it, has a random id, is bounded in number per peer and altogether, and ends when nobody used it for
`limits.PEER_IDLE_S`. A block of a transfer is taken once: only if it was lacking, and from one stream at a time.
If we die here: the shelf finds at the next start what never came to its end; peers offer and ask again.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from ckptfs import limits
from ckptfs.clique.shelf import Loan, Offer, Reception, Shelf
from ckptfs.digest import BLOCK_DIGEST_BYTES
from ckptfs_daemon.peer_refusals import Refusal, Why

Clock = Callable[[], float]


class Used:
    """Something that a peer began: whose it is, when it was used last, and by how many streams just now."""

    def __init__(self, peer: str, clock: Clock) -> None:
        self.peer = peer
        self.lock = threading.Lock()
        self.ended = False
        self._last: Callable[[], None] = lambda: None
        self._clock = clock
        self._streams = 0
        self._used = clock()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """A stream uses it. Refused after its end."""
        with self.lock:
            self._check()
            self._streams += 1
        try:
            yield
        finally:
            with self.lock:
                self._streams -= 1
                self._used = self._clock()
                last = self.ended and not self._streams
            if last:
                self._last()

    def touch(self) -> None:
        self._used = self._clock()

    def idle(self) -> bool:
        """Whether nobody used it for too long."""
        return not self._streams and self._clock() - self._used > limits.PEER_IDLE_S

    def end_unused(self) -> None:
        """No stream may use it any more; Refused (busy) while one does."""
        with self.lock:
            self._check()
            if self._streams:
                raise Refusal(Why.BUSY, "streams still use it")
            self.ended = True

    def end(self, last: Callable[[], None]) -> None:
        """No stream may begin any more; `last` is called when none is left, which may be now."""
        with self.lock:
            self._check()
            self.ended, self._last = True, last
            unused = not self._streams
        if unused:
            last()

    def _check(self) -> None:
        if self.ended:
            raise Refusal(Why.UNKNOWN, "it has ended")


class Transfer(Used):
    """A reception, block by block: a `peer_frames.Landing`. Touches only the shelf's descriptor."""

    def __init__(self, peer: str, offer: Offer, reception: Reception, clock: Clock) -> None:
        super().__init__(peer, clock)
        self.offer = offer
        self.token = reception.token
        self.size = offer.size
        self._fd = reception.fd
        self._lacking = set(reception.lacking)
        self._arriving: set[int] = set()
        self.landed = False

    def claim(self, number: int) -> bytes:
        with self.lock:
            if self.ended:
                raise Refusal(Why.ENDED, "the transfer has ended")
            if number not in self._lacking:
                raise Refusal(Why.OUT_OF_ORDER, f"block {number} is not lacking")
            if number in self._arriving:
                raise Refusal(Why.BUSY, f"block {number} is arriving already")
            self._arriving.add(number)
        return self.offer.blocks[number * BLOCK_DIGEST_BYTES : (number + 1) * BLOCK_DIGEST_BYTES]

    def land(self, number: int, data: memoryview) -> None:
        write_at(self._fd, data, number * limits.BLOCK_BYTES)
        with self.lock:
            self._arriving.discard(number)
            self._lacking.discard(number)
            self.landed = True
        self.touch()

    def drop(self, number: int) -> None:
        with self.lock:
            self._arriving.discard(number)

    def lacking(self) -> list[int]:
        """The blocks that have not come yet, in order."""
        with self.lock:
            return sorted(self._lacking)


class Borrowed(Used):
    """A loan while a peer reads from it."""

    def __init__(self, peer: str, loan: Loan, clock: Clock) -> None:
        super().__init__(peer, clock)
        self.loan = loan


class _Owned(Protocol):
    peer: str

    def idle(self) -> bool: ...


Item = TypeVar("Item", bound=_Owned)


class Register(Generic[Item]):
    """Items by random id. An id of another peer is as unknown as one that never was."""

    def __init__(self, what: str, total_max: int, peer_max: int) -> None:
        self._what, self._total_max, self._peer_max = what, total_max, peer_max
        self._items: dict[int, Item] = {}
        self._expected = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._items)

    @contextmanager
    def place(self, peer: str) -> Iterator[Callable[[Item], int]]:
        """A place for one more, refused where there are too many; the function that fills it gives the id."""
        with self._lock:
            mine = sum(item.peer == peer for item in self._items.values())
            if mine >= self._peer_max or len(self._items) + self._expected >= self._total_max:
                raise Refusal(Why.TOO_MANY, f"too many {self._what}s at once")
            self._expected += 1
        try:
            yield self._add
        finally:
            with self._lock:
                self._expected -= 1

    def _add(self, item: Item) -> int:
        number = secrets.randbits(62) + 1
        with self._lock:
            self._items[number] = item
        return number

    def get(self, peer: str, number: int) -> Item:
        """Raises Refusal when this peer has none of that id."""
        item = self._items.get(number)
        if item is None or item.peer != peer:
            raise Refusal(Why.UNKNOWN, f"no such {self._what}")
        return item

    def remove(self, number: int) -> None:
        with self._lock:
            self._items.pop(number, None)

    def all(self) -> Sequence[tuple[int, Item]]:
        """A snapshot of (id, item)."""
        with self._lock:
            return list(self._items.items())


class Ledger:
    """All transfers and loans of this node, and the shelf behind them."""

    def __init__(self, shelf: Shelf, clock: Clock = time.monotonic) -> None:
        self.shelf = shelf
        self._clock = clock
        self.transfers: Register[Transfer] = Register("transfer", limits.PEER_TRANSFERS_MAX, limits.PEER_TRANSFERS_OF_ONE_MAX)
        self.loans: Register[Borrowed] = Register("loan", limits.PEER_LOANS_MAX, limits.PEER_LOANS_OF_ONE_MAX)

    def offer(self, peer: str, offer: Offer) -> tuple[int, list[int]]:
        """Begin a transfer: (its id, the blocks that are lacking). One that this peer had left for the same content ends."""
        for number, transfer in self.transfers.all():
            if transfer.peer == peer and transfer.offer.content == offer.content:
                self.abandon(peer, number)
        with self.transfers.place(peer) as fill:
            reception = self.shelf.receive(replace(offer, sender=peer))
            return fill(Transfer(peer, offer, reception, self._clock)), list(reception.lacking)

    def whole(self, peer: str, offer: Offer, data: bytes) -> bool:
        """A content of at most one block that came with its offer, and whose digest was compared; whether it counts now."""
        number, lacking = self.offer(peer, offer)
        try:
            transfer = self.transfers.get(peer, number)
            with transfer.stream():  # Whoever offers the same content meanwhile waits for its end: the descriptor is ours until then.
                for lacks in lacking:
                    transfer.claim(lacks)
                    transfer.land(lacks, memoryview(data))
        except BaseException:
            self.abandon(peer, number)
            raise
        return self.finish(peer, number)

    def finish(self, peer: str, number: int) -> bool:
        """All has come; whether it is right. A transfer that lacks blocks goes on."""
        transfer = self.transfers.get(peer, number)
        if left := transfer.lacking():
            raise Refusal(Why.INCOMPLETE, f"{len(left)} blocks have not come, the first is {left[0]}")
        transfer.end_unused()
        self.transfers.remove(number)
        return self.shelf.received(transfer.token)

    def abandon(self, peer: str, number: int) -> None:
        """The transfer ends; the shelf hears of it when no stream uses it any more."""
        transfer = self.transfers.get(peer, number)
        self.transfers.remove(number)
        transfer.end(lambda: self.shelf.abandon(transfer.token, keep=transfer.landed))

    def lend(self, peer: str, content: int, digest: bytes | None) -> tuple[int, Loan]:
        """Borrow a copy: (the loan's id, the loan)."""
        with self.loans.place(peer) as fill:
            loan = self.shelf.lend(content, digest)
            return fill(Borrowed(peer, loan, self._clock)), loan

    def give_back(self, peer: str, number: int) -> None:
        """The loan ends; its descriptor is closed when no stream uses it any more."""
        borrowed = self.loans.get(peer, number)
        self.loans.remove(number)
        borrowed.end(lambda: os.close(borrowed.loan.fd))

    def end(self, peer: str) -> None:
        """All that this peer had begun ends, in use or not."""
        for number, transfer in self.transfers.all():
            if transfer.peer == peer:
                _unless_used(self.abandon, peer, number)
        for number, borrowed in self.loans.all():
            if borrowed.peer == peer:
                _unless_used(self.give_back, peer, number)

    def sweep(self, everything: bool = False) -> None:
        """End what nobody used for long, or `everything`."""
        for number, transfer in self.transfers.all():
            if everything or transfer.idle():
                _unless_used(self.abandon, transfer.peer, number)
        for number, borrowed in self.loans.all():
            if everything or borrowed.idle():
                _unless_used(self.give_back, borrowed.peer, number)


def _unless_used(ending: Callable[[str, int], None], peer: str, number: int) -> None:
    try:
        ending(peer, number)
    except Refusal:
        return  # Somebody uses it, or ended it just now.


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """pwrite(2) until all is written."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
