"""Brings blocks of a content from several peers at once into one file.

Each source has a thread (a single source several), which takes runs of blocks from one list. What it does not bring goes back: a source
that fails or lies is left for good; when nothing moves for `limits.PEER_PATIENCE_S` others take over its blocks; and who has nothing left
to do brings what others still owe. What a reader waits for comes first, also from a second source when the one that owes it is slow. A
block is compared with its digest before it is written, and written by one thread only.
If we die here: the target has some of the blocks; the caller knows which, from `on_block`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from ckptfs import limits
from ckptfs.clique.peers import Asked, OnBlock, PeerFailed, PeerLied, Record
from ckptfs.digest import BLOCK_DIGEST_BYTES
from ckptfs.protocol import peer_pb2 as pb
from ckptfs_daemon.peer_bulk import receive
from ckptfs_daemon.peer_frames import Arriving, Command, Kind, block_bytes
from ckptfs_daemon.peer_link import Link, Unwanted, ended, translated, turn
from ckptfs_daemon.peer_refusals import Refusal, Why
from ckptfs_daemon.peer_sealed import ConnectionEnded
from ckptfs_daemon.peer_transfers import write_at

LOOK_S = 0.25


class Fetching:
    """What is wanted and what has come. Its lock guards everything but the writing itself."""

    def __init__(
        self, record: Record, wanted: Sequence[int], target_fd: int, on_block: OnBlock, workers: int, asked: Asked = tuple
    ) -> None:
        self.record = record
        self.changed = threading.Condition()
        self.moved = 0
        self.over = False
        self.failure: Exception | None = None
        self._pending = deque(wanted)
        self._missing = set(wanted)
        self._owed: dict[int, set[object]] = {}
        self._owed_since: dict[int, float] = {}
        self._writing = 0
        self._fd = target_fd
        self._on_block = on_block
        self._workers = workers
        self._asked = asked

    @property
    def done(self) -> bool:
        return not self._missing

    def run(self, worker: object, at_most: int = limits.PEER_RUN_BLOCKS_MAX) -> list[int]:
        """The next blocks for `worker`, one after the other in the file; empty when all is over."""
        with self.changed:
            while not self.over and not self.done:
                asked = [number for number in self._asked() if number in self._missing]
                if found := self._overdue(worker, asked) or self._next_run(asked, at_most) or self._owed_by_others(worker):
                    for number in found:
                        self._owed.setdefault(number, set()).add(worker)
                        self._owed_since[number] = time.monotonic()
                    return found
                self.changed.wait(LOOK_S)
            return []

    def give_back(self, worker: object, numbers: Sequence[int]) -> None:
        """`worker` will not bring these (soon): they are the next to be asked for."""
        with self.changed:
            left = [number for number in numbers if number in self._missing and worker in self._owed.get(number, ())]
            for number in left:
                self._owed[number].discard(worker)
            self._pending.extendleft(number for number in reversed(left) if not self._owed[number])
            self.changed.notify_all()

    def land(self, number: int, data: memoryview) -> None:
        """Write a block that is right, unless another worker did."""
        with self.changed:
            if self.over:
                raise Refusal(Why.ENDED, "it is over")
            if number not in self._missing:
                return
            self._missing.discard(number)
            self._owed.pop(number, None)
            self._writing += 1
        try:
            write_at(self._fd, data, number * limits.BLOCK_BYTES)
            self._on_block(number)
        except BaseException as failure:
            self.stop(failure if isinstance(failure, Exception) else None)
            raise
        finally:
            with self.changed:
                self._writing -= 1
                self.moved += len(data)
                self.changed.notify_all()

    def stop(self, failure: Exception | None = None) -> None:
        """Nothing more is written once this has returned from the last writer."""
        with self.changed:
            self.over = True
            self.failure = self.failure or failure
            self.changed.notify_all()

    def settled(self) -> None:
        """Wait until nobody writes."""
        with self.changed:
            self.changed.wait_for(lambda: not self._writing)

    def _next_run(self, asked: Sequence[int], at_most: int) -> list[int]:
        """From what somebody waits for on, if nobody brings that yet."""
        for number in asked:
            if not self._owed.get(number) and number in self._pending:
                self._pending.rotate(-self._pending.index(number))
                break
        found: list[int] = []
        most = max(1, min(at_most, limits.PEER_RUN_BLOCKS_MAX // 4, len(self._pending) // (2 * self._workers)))
        while self._pending and len(found) < most and (not found or self._pending[0] == found[-1] + 1):
            number = self._pending.popleft()
            if number in self._missing:
                found.append(number)
        return found

    def _overdue(self, worker: object, asked: Sequence[int]) -> list[int]:
        """A block that somebody waits for, and that one other worker owes for long."""
        late_s = time.monotonic() - limits.PEER_HEDGE_S
        for number in asked:
            owing = self._owed.get(number, ())
            if len(owing) == 1 and worker not in owing and self._owed_since[number] < late_s:
                return [number]
        return []

    def _owed_by_others(self, worker: object) -> list[int]:
        """A block that one other worker still owes, the one he would come to last."""
        for number in reversed(self._owed):
            if number in self._missing and len(self._owed[number]) == 1 and worker not in self._owed[number]:
                return [number]
        return []


class Worker:
    """One stream from one source: a `peer_frames.Landing` for the run that it asked for."""

    def __init__(self, link: Link, fetching: Fetching) -> None:
        self.link = link
        self.size = fetching.record.size
        self.moved_at = time.monotonic()
        self.run: list[int] = []
        self.failure: PeerFailed | None = None
        self._fetching = fetching
        self._due: deque[int] = deque()
        self._end: Callable[[], Any] = lambda: None
        self.thread = threading.Thread(target=self._work, name="peer fetch", daemon=True)

    def claim(self, number: int) -> bytes:
        if not self._due or number != self._due[0]:
            raise Refusal(Why.OUT_OF_ORDER, f"block {number} was not due")
        self._due.popleft()
        return self._fetching.record.blocks[number * BLOCK_DIGEST_BYTES : (number + 1) * BLOCK_DIGEST_BYTES]

    def land(self, number: int, data: memoryview) -> None:
        self._fetching.land(number, data)

    def drop(self, number: int) -> None:
        """It is given back with the rest of the run."""

    def end(self) -> None:
        """Wake the thread wherever it waits."""
        self._end()

    def _work(self) -> None:
        try:
            self._from_source()
        except PeerFailed as failure:
            self.failure = failure
        except Exception as failure:
            self.failure = self.link.failed(failure)
        finally:
            self._fetching.give_back(self, self.run)

    def _from_source(self) -> None:
        with turn(self.link.reading, lambda: not self._fetching.over):
            self._borrowed()

    def _borrowed(self) -> None:
        record = self._fetching.record
        asked = pb.RecordRequest(content=record.content, digest=record.digest, borrow=True)
        loan = self.link.ask(self.link.calls.GetRecord, asked, limits.PEER_STALL_S)
        try:
            if loan.digest != record.digest or loan.size != record.size:
                raise PeerLied(f"{self.link.name} lends another content than the one asked for")
            while run := self._fetching.run(self, self._blocks_at_once()):
                self.run, self._due = run, deque(run)
                self.moved_at = time.monotonic()
                self._read(Command(Kind.READ, loan.loan, run[0], len(run), self.link.measured.squeeze))
                self.run = []
        finally:
            self.link.tell(self.link.calls.Return, pb.ReturnRequest(loan=loan.loan))

    def _blocks_at_once(self) -> int:
        """What the source sends in a short while; of one that is not known yet, one block."""
        return max(1, int((self.link.measured.bytes_per_s or 0.0) * limits.PEER_RUN_S) // limits.BLOCK_BYTES)

    def _read(self, command: Command) -> None:
        begun = time.monotonic()
        arriving = Arriving(self)
        try:
            with translated(self.link):
                try:
                    self._over(command, arriving)
                except (ConnectionEnded, grpc.RpcError) as failure:
                    # Who brings what another one was about to bring, too, ends that one: it did not fail, unless it kept us waiting.
                    if self._fetching.over and time.monotonic() - self.moved_at < limits.PEER_PATIENCE_S:
                        raise Unwanted("all of it is here") from failure
                    raise
        except PeerFailed as failure:
            if isinstance(failure.__cause__, Refusal) and failure.__cause__.why in (Why.WRONG_DIGEST, Why.OUT_OF_ORDER, Why.MALFORMED):
                raise PeerLied(f"{self.link.name} sends what it should not: {failure}") from failure
            raise
        finally:
            arriving.close()
        if self._due:
            raise PeerLied(f"{self.link.name} left out {len(self._due)} blocks")
        content_bytes = sum(block_bytes(self.size, number) for number in self.run)
        self.link.measured.moved(content_bytes, arriving.wire_bytes, time.monotonic() - begun)

    def _over(self, command: Command, arriving: Arriving) -> None:
        with self.link.connection() as sealed:
            if sealed is None:
                self._over_grpc(command, arriving)
                return
            self._end = sealed.shut
            sealed.put(command.packed())
            sealed.push()
            receive(sealed, arriving, self._carry_on)
            if not arriving.ended:
                raise Refusal(Why.ENDED, "it is over")
            self._end = lambda: None

    def _over_grpc(self, command: Command, arriving: Arriving) -> None:
        call = self.link.read(command.packed())
        self._end = call.cancel
        try:
            for message in call:
                arriving.take(message)
                self._carry_on()
        finally:
            ended(call)
        if not arriving.ended:
            raise Refusal(Why.OUT_OF_ORDER, "the stream stopped before its end")

    def _carry_on(self) -> bool:
        self.moved_at = time.monotonic()
        return not self._fetching.over


def fetch(links: Sequence[Link], fetching: Fetching, streams: int) -> int:
    """Fetch until all is there; the bytes that came. Raises the last failure when no source is left.

    The first `limits.PEER_SOURCES_MAX` sources work at once, the others take the places of those that fail.
    """
    waiting = deque(links)
    workers: list[Worker] = []
    last: PeerFailed | None = None
    try:
        while not fetching.done:
            while waiting and len({worker.link for worker in workers}) < limits.PEER_SOURCES_MAX:
                workers += _begun(waiting.popleft(), fetching, streams if len(links) == 1 else 1)
            with fetching.changed:
                fetching.changed.wait(LOOK_S)
            if fetching.failure is not None:
                raise fetching.failure
            for worker in [worker for worker in workers if not worker.thread.is_alive() or _stalls(worker, fetching, len(workers))]:
                workers.remove(worker)
                last = worker.failure or last
            if not workers and not waiting and not fetching.done:
                raise last or PeerFailed("no peer is left to fetch from")
    finally:
        fetching.stop()
        for worker in workers:
            worker.end()
        fetching.settled()
    if fetching.failure is not None:
        raise fetching.failure
    return fetching.moved


def _begun(link: Link, fetching: Fetching, streams: int) -> list[Worker]:
    workers = [Worker(link, fetching) for _ in range(streams)]
    for worker in workers:
        worker.thread.start()
    return workers


def _stalls(worker: Worker, fetching: Fetching, workers: int) -> bool:
    """Whether nothing moves at this source: others take its blocks at once where there are others, else it is left in the end."""
    still = time.monotonic() - worker.moved_at
    if workers > 1 and worker.run and still > limits.PEER_PATIENCE_S:
        fetching.give_back(worker, worker.run)
    if not worker.run or still <= limits.PEER_STALL_S:
        return False
    worker.failure = PeerFailed(f"{worker.link.name} sends nothing")
    worker.end()
    return True
