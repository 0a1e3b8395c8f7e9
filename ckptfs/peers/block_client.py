"""Block transfers of a client, which fetches blocks from several peers at once and sends blocks.

Fetch: each source has a thread (a single source has several), which takes runs of blocks from one list. Blocks that a source does not
deliver return to the list; a source that fails or sends wrong data is not used again. After `limits.PEER_PATIENCE_S` without progress other
sources take over, and idle sources take blocks that others have not delivered yet. Blocks that a reader waits for come first, if need be
from a second source.

Send: several streams take blocks from one list. A stream that breaks leaves its block to the next attempt, which asks what is lacking.

Crash safety: the target of a fetch has the blocks reported to `on_block`. The receiver of a send keeps its blocks for a while.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from ckptfs import limits
from ckptfs.clique.peer_api import ContentManifest, OnBlock, PeerBusy, PeerCorrupt, PeerFailed, UrgentBlocks
from ckptfs.peers import messages
from ckptfs.peers.link import Link, NoLongerWanted, cancel_call, hold_slot, translate_errors
from ckptfs.peers.messages import BlockReceiver, Rejection, RejectReason, SourceChanged, block_bytes
from ckptfs.peers.transfer_table import pwrite_all
from ckptfs.protocol import peer_pb2 as pb

FETCH_POLL_S = 0.25


class FetchJob:
    """The blocks to fetch and those that have arrived. Its lock guards everything but the writes."""

    def __init__(
        self,
        manifest: ContentManifest,
        block_numbers: Sequence[int],
        target_fd: int,
        on_block: OnBlock,
        workers: int,
        urgent_blocks: UrgentBlocks = tuple,
        *,
        can_wait: bool = False,
    ) -> None:
        self.manifest = manifest
        self.can_wait = can_wait
        self.condition = threading.Condition()
        self.received_bytes = 0
        self.is_stopped = False
        self.failure: Exception | None = None
        self._pending = deque(block_numbers)
        self._missing = set(block_numbers)
        self._assigned: dict[int, set[object]] = {}
        self._assigned_at: dict[int, float] = {}
        self._writer_count = 0
        self._fd = target_fd
        self._on_block = on_block
        self._workers = workers
        self._urgent_blocks = urgent_blocks

    @property
    def is_complete(self) -> bool:
        return not self._missing

    def assign_run(self, worker: object, at_most: int = limits.PEER_RUN_BLOCKS_MAX) -> list[int]:
        """Return the next blocks for `worker`, adjacent in the file; empty when nothing is left."""
        with self.condition:
            while not self.is_stopped and not self.is_complete:
                urgent = [number for number in self._urgent_blocks() if number in self._missing]
                if (
                    found := self._find_overdue(worker, urgent)
                    or self._take_next_run(urgent, at_most)
                    or self._find_assigned_to_other(worker)
                ):
                    for number in found:
                        self._assigned.setdefault(number, set()).add(worker)
                        self._assigned_at[number] = time.monotonic()
                    return found
                self.condition.wait(FETCH_POLL_S)
            return []

    def return_blocks(self, worker: object, numbers: Sequence[int]) -> None:
        """Take back blocks that `worker` will not deliver soon; they are requested next."""
        with self.condition:
            left = [number for number in numbers if number in self._missing and worker in self._assigned.get(number, ())]
            for number in left:
                self._assigned[number].discard(worker)
            self._pending.extendleft(number for number in reversed(left) if not self._assigned[number])
            self.condition.notify_all()

    def write_block(self, number: int, pieces: Sequence[bytes]) -> None:
        """Write a verified block, unless another worker has written it."""
        with self.condition:
            if self.is_stopped:
                raise Rejection(RejectReason.ENDED, "it is over")
            if number not in self._missing:
                return
            self._missing.discard(number)
            self._assigned.pop(number, None)
            self._writer_count += 1
        try:
            pwrite_all(self._fd, pieces, number * limits.BLOCK_BYTES)
            self._on_block(number)
        except BaseException as failure:
            self.stop(failure if isinstance(failure, Exception) else None)
            raise
        finally:
            with self.condition:
                self._writer_count -= 1
                self.received_bytes += sum(map(len, pieces))
                self.condition.notify_all()

    def stop(self, failure: Exception | None = None) -> None:
        """Stop: once the writers have ended, nothing more is written."""
        with self.condition:
            self.is_stopped = True
            self.failure = self.failure or failure
            self.condition.notify_all()

    def wait_for_writers(self) -> None:
        """Wait until no block is being written."""
        with self.condition:
            self.condition.wait_for(lambda: not self._writer_count)

    def _take_next_run(self, urgent: Sequence[int], at_most: int) -> list[int]:
        """Take the next run; it begins at a block that a reader waits for, if no worker fetches that yet."""
        for number in urgent:
            if not self._assigned.get(number) and number in self._pending:
                self._pending.rotate(-self._pending.index(number))
                break
        found: list[int] = []
        most = max(1, min(at_most, limits.PEER_RUN_BLOCKS_MAX // 4, len(self._pending) // (2 * self._workers)))
        while self._pending and len(found) < most and (not found or self._pending[0] == found[-1] + 1):
            number = self._pending.popleft()
            if number in self._missing:
                found.append(number)
        return found

    def _find_overdue(self, worker: object, urgent: Sequence[int]) -> list[int]:
        """Return a block that a reader waits for and that a single other worker has not delivered for long."""
        late_s = time.monotonic() - limits.PEER_HEDGE_S
        for number in urgent:
            owing = self._assigned.get(number, ())
            if len(owing) == 1 and worker not in owing and self._assigned_at[number] < late_s:
                return [number]
        return []

    def _find_assigned_to_other(self, worker: object) -> list[int]:
        """Return a block assigned to one other worker only: the last one of its run."""
        for number in reversed(self._assigned):
            if number in self._missing and len(self._assigned[number]) == 1 and worker not in self._assigned[number]:
                return [number]
        return []


class FetchWorker:
    """One stream from one source: a `BlockSink` for the run that it asked for."""

    def __init__(self, link: Link, job: FetchJob) -> None:
        self.link = link
        self.size = job.manifest.size
        self.progress_at = time.monotonic()
        self.assigned_run: list[int] = []
        self.failure: PeerFailed | None = None
        self._job = job
        self._expected_blocks: deque[int] = deque()
        self._tries_left = 0
        self.awaits_end = False
        self._is_interrupted = False
        self._interrupt_wait: Callable[[], Any] = lambda: None
        self.thread = threading.Thread(target=self._run, name="peer fetch", daemon=True)

    def claim_block(self, number: int) -> bytes:
        if not self._expected_blocks or number != self._expected_blocks[0]:
            raise Rejection(RejectReason.OUT_OF_ORDER, f"block {number} was not requested")
        self._expected_blocks.popleft()
        return self._job.manifest.get_block_digest(number)

    def write_block(self, number: int, pieces: Sequence[bytes]) -> None:
        # Before the write: it may complete the fetch, which then interrupts the workers that are not done.
        self.awaits_end = not self._expected_blocks
        self._tries_left = limits.PEER_TRIES_MAX
        self._job.write_block(number, pieces)

    def release_block(self, number: int) -> None:
        """Do nothing: the block is returned with the rest of its run."""

    def interrupt(self) -> None:
        """Wake the thread wherever it waits, and end it."""
        self._is_interrupted = True
        self._interrupt_wait()

    def _run(self) -> None:
        try:
            with self.link.hold_open(self._job.manifest.content), hold_slot(self.link.read_slots, lambda: not self._job.is_stopped):
                self._fetch_runs()
        except PeerFailed as failure:
            self.failure = failure
        except Exception as failure:
            self.failure = self.link.record_failure(failure)
        finally:
            self._job.return_blocks(self, self.assigned_run)

    def _fetch_runs(self) -> None:
        manifest, can_wait = self._job.manifest, self._job.can_wait
        while run := self._job.assign_run(self, self._choose_run_blocks()):
            self.assigned_run, self._expected_blocks = run, deque(run)
            self.progress_at, self.awaits_end = time.monotonic(), False
            request = pb.ReadRequest(content=manifest.content, digest=manifest.digest, first=run[0], count=len(run), queued=can_wait)
            try:
                self._read_run(request)
            except PeerFailed as failure:
                # A connection may break although the peer is well: the rest comes by a new one. Streams that follow a broken
                # connection at once may still be begun on it.
                if self._is_interrupted or type(failure) is not PeerFailed or not self._tries_left:
                    raise
                self._tries_left -= 1
                self._job.return_blocks(self, run)
            self.assigned_run = []

    def _choose_run_blocks(self) -> int:
        """Return the number of blocks that the source sends in PEER_RUN_S; 1 if its speed is not known yet."""
        return max(1, int((self.link.stats.bytes_per_s or 0.0) * limits.PEER_RUN_S) // limits.BLOCK_BYTES)

    def _read_run(self, request: pb.ReadRequest) -> None:
        begun, request.compress = time.monotonic(), self.link.stats.should_compress
        receiver = BlockReceiver(self)
        try:
            with translate_errors(self.link):
                try:
                    self._receive_run(request, receiver)
                except grpc.RpcError as failure:
                    # A worker that delivers the blocks of a slower one ends it. That one failed only if it made no progress for too long.
                    if self._job.is_stopped and time.monotonic() - self.progress_at < limits.PEER_PATIENCE_S:
                        raise NoLongerWanted("all of it is here") from failure
                    raise
        except PeerFailed as failure:
            if isinstance(failure.__cause__, Rejection) and failure.__cause__.reason in (
                RejectReason.WRONG_DIGEST,
                RejectReason.OUT_OF_ORDER,
                RejectReason.MALFORMED,
            ):
                raise PeerCorrupt(f"{self.link.name} sends an unexpected message: {failure}") from failure
            raise
        finally:
            receiver.close()
        if self._expected_blocks:
            raise PeerCorrupt(f"{self.link.name} left out {len(self._expected_blocks)} blocks")
        content_bytes = sum(block_bytes(self.size, number) for number in self.assigned_run)
        self.link.stats.record_transfer(content_bytes, receiver.wire_bytes, time.monotonic() - begun)

    def _receive_run(self, request: pb.ReadRequest, receiver: BlockReceiver) -> None:
        call = self.link.open_read_stream(request)
        self._interrupt_wait = call.cancel
        try:
            for message in call:
                receiver.accept_message(message)
                self.progress_at = time.monotonic()
        finally:
            cancel_call(call)
        if not receiver.has_ended:
            raise Rejection(RejectReason.OUT_OF_ORDER, "the stream stopped before its end")


def fetch_blocks(links: Sequence[Link], job: FetchJob, streams: int) -> int:
    """Fetch all blocks. Return their bytes. Raises PeerBusy if a source was busy, else the last error."""
    waiting = deque(links)
    workers: list[FetchWorker] = []
    last: PeerFailed | None = None
    try:
        while not job.is_complete:
            while waiting and len({worker.link for worker in workers}) < limits.PEER_SOURCES_MAX:
                link = waiting.popleft()
                started = [FetchWorker(link, job) for _ in range(streams if len(links) == 1 else 1)]
                workers += started
                for worker in started:
                    worker.thread.start()
            with job.condition:
                job.condition.wait(FETCH_POLL_S)
            if job.failure is not None:
                raise job.failure
            for worker in [worker for worker in workers if not worker.thread.is_alive() or _end_if_stalled(worker, job, len(workers))]:
                workers.remove(worker)
                last = last if isinstance(last, PeerBusy) else worker.failure or last
            if not workers and not waiting and not job.is_complete:
                raise last or PeerFailed("no peer is left to fetch from")
    finally:
        job.stop()
        for worker in workers:
            if not worker.awaits_end:  # A connection with the end of its run on it can be used again.
                worker.interrupt()
        job.wait_for_writers()
    if job.failure is not None:
        raise job.failure
    return job.received_bytes


def _end_if_stalled(worker: FetchWorker, job: FetchJob, workers: int) -> bool:
    """End the worker of a stalled source, and return True. The only source is given more time."""
    still = time.monotonic() - worker.progress_at
    if workers > 1 and worker.assigned_run and still > limits.PEER_PATIENCE_S:
        job.return_blocks(worker, worker.assigned_run)
    if not worker.assigned_run or still <= limits.PEER_STALL_S:
        return False
    worker.failure = PeerFailed(f"{worker.link.name} sends nothing")
    worker.interrupt()
    return True


@dataclass(slots=True)
class SendJob:
    """The blocks to send, their source, and how much was sent. The streams of one attempt share it."""

    fd: int
    size: int
    transfer: int
    pending_blocks: list[int]
    is_wanted: Callable[[], bool]
    compress: bool
    sent_bytes: int = 0
    progress_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_blocks(self, taken: list[int]) -> Iterator[int]:
        """Yield blocks for one stream, one at a time, and record them in `taken`."""
        while self.is_wanted():
            with self.lock:
                if not self.pending_blocks:
                    return
                taken.append(self.pending_blocks.pop())
            yield taken[-1]
        raise NoLongerWanted("it is no longer wanted")

    def encode_messages(self) -> Iterator[bytes]:
        """Yield the raw messages of one stream. Raises PeerFailed, PeerCorrupt, OSError."""
        yield pb.TransferRequest(transfer=self.transfer).SerializeToString()
        taken: list[int] = []
        try:
            for message in messages.encode_blocks(self.fd, self.size, self.take_blocks(taken), compress=self.compress):
                yield message
                self.sent_bytes += len(message)
                self.progress_at = time.monotonic()
        except SourceChanged:
            raise PeerCorrupt("the file became shorter while it was sent") from None
        yield messages.encode_end(len(taken))


def send_stream(link: Link, job: SendJob) -> None:
    """Send on one stream until no block is left. Raises PeerFailed."""
    source = _MessageSource(job)
    with hold_slot(link.send_slots, job.is_wanted), translate_errors(link):
        call = link.open_send_stream(iter(source))
        try:
            while not call.done():
                if not source.finished.wait(1.0) and time.monotonic() - job.progress_at <= limits.PEER_STALL_S:
                    continue
                if not source.finished.is_set():
                    raise PeerFailed(f"{link.name} takes nothing")
                call.result(limits.PEER_DISK_S)
            call.result()
        except grpc.RpcError as failure:
            raise source.failure or failure from failure
        except grpc.FutureTimeoutError as failure:
            raise source.failure or PeerFailed(f"{link.name} does not answer") from failure
        finally:
            cancel_call(call)
            source.finished.wait(limits.PEER_CALL_S)


class _MessageSource:
    """The messages of a gRPC stream. gRPC reads them in its own thread; a failure there is kept."""

    def __init__(self, job: SendJob) -> None:
        self._job = job
        self.finished = threading.Event()
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._job.encode_messages()
        except (PeerFailed, OSError) as failure:
            self.failure = failure
        finally:
            self.finished.set()


def send_blocks(link: Link, job: SendJob, count: int) -> None:
    """Send all blocks with `count` streams at once. Raises the first PeerFailed after all have ended."""
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
