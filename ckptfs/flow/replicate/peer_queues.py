"""A bounded queue and a few threads for each peer, and the backoff of peers.

No peer waits for another. The backoff covers all contents of a peer that failed or is full, and one content of a peer that refused it.

If we die here: the catalog still lists what was queued. All peers are asked again.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptfs import limits
from ckptfs.clique.membership import Node
from ckptfs.model import Content, Tier
from ckptfs.tiers import health

log = logging.getLogger(__name__)
CONTENTS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """The load of one peer: contents that wait, and contents that are being sent."""

    node: str
    waiting_files: int
    waiting_bytes: int
    sending_files: int
    sending_bytes: int


Job = tuple[Content, Tier]
SendBatch = Callable[[Node, Sequence[Job]], bool]
OnBatchEnd = Callable[[Node, bool], None]


class _PeerQueue:
    """The jobs of one peer, in order."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.waiting: deque[Job] = deque()
        self.may_have_more = False  # The queue was so long that the catalog may have more.
        self.sending: dict[int, int] = {}
        self.contents: set[int] = set()  # All that waits or is being sent.
        self.threads = 0


class PeerQueues:
    """The queues of the peers. Any thread. `send` must not raise; `on_batch_end` gets its result."""

    def __init__(self, send: SendBatch, on_batch_end: OnBatchEnd) -> None:
        self._send = send
        self._on_batch_end = on_batch_end
        self._lock = threading.Lock()
        self._queues: dict[int, _PeerQueue] = {}
        self._is_closed = False

    def put(self, node: Node, content: Content, tier: Tier) -> bool:
        """Queue a content for a peer. Return False if it is queued already, or the queue is full."""
        with self._lock:
            queue = self._queues.setdefault(node.number, _PeerQueue(node))
            queue.node = node
            if self._is_closed or content.id in queue.contents or len(queue.waiting) >= limits.PEER_QUEUE_MAX:
                return False
            queue.waiting.append((content, tier))
            queue.may_have_more |= len(queue.waiting) > limits.PEER_QUEUE_MAX // 4
            queue.contents.add(content.id)
            if queue.threads < limits.PEER_SENDS_MAX and queue.threads < len(queue.waiting) + len(queue.sending):
                queue.threads += 1
                threading.Thread(target=self._run, args=(queue,), name=f"replicate {node.name}", daemon=True).start()
            return True

    def clear_waiting(self) -> None:
        """Drop the jobs that wait, so that they can be queued in another order. What is being sent goes on."""
        with self._lock:
            for queue in self._queues.values():
                queue.contents = set(queue.sending)
                queue.waiting.clear()

    def list_nodes_for(self, content: int) -> set[int]:
        """Return the peers for which a content is queued or being sent."""
        with self._lock:
            return {number for number, queue in self._queues.items() if content in queue.contents}

    def take_refill_request(self, node: Node) -> bool:
        """Return True, once, if the queue of a peer is short and the catalog may have more."""
        with self._lock:
            queue = self._queues.get(node.number)
            if queue is None or self._is_closed or not queue.may_have_more or len(queue.waiting) > limits.PEER_QUEUE_MAX // 4:
                return False
            queue.may_have_more = False
            return True

    def list_loads(self) -> list[PeerLoad]:
        """Return the load of each peer that ever had a job."""
        with self._lock:
            return [
                PeerLoad(
                    queue.node.name, len(queue.waiting), sum(content.size for content, _ in queue.waiting),
                    len(queue.sending), sum(queue.sending.values()),
                )
                for queue in self._queues.values()
            ]  # fmt: skip

    def close(self) -> None:
        """Drop all queued jobs and begin no more."""
        with self._lock:
            self._is_closed = True
            for queue in self._queues.values():
                queue.waiting.clear()

    def _run(self, queue: _PeerQueue) -> None:
        """Send until the queue is empty. An idle thread would hold a database connection."""
        while jobs := self._take_next(queue):
            is_ok = False
            try:
                is_ok = self._send(queue.node, jobs)
            except Exception:
                first = jobs[0][0].id
                log.exception("node %s: sending %d contents from %d on failed unexpectedly", queue.node.name, len(jobs), first)
            finally:
                with self._lock:
                    for content, _ in jobs:
                        queue.sending.pop(content.id, None)
                        queue.contents.discard(content.id)
                self._on_batch_end(queue.node, is_ok)

    def _take_next(self, queue: _PeerQueue) -> list[Job]:
        """Take the next content, or small ones together; none, which ends the thread, if nothing waits."""
        with self._lock:
            jobs: list[Job] = []
            left = limits.PEER_BATCH_BYTES_MAX
            while queue.waiting and (not jobs or (_is_small(jobs[0]) and _is_small(queue.waiting[0]))):
                left -= queue.waiting[0][0].size
                if jobs and (left < 0 or len(jobs) == limits.PEER_BATCH_MAX):
                    break
                jobs.append(queue.waiting.popleft())
            for content, _ in jobs:
                queue.sending[content.id] = content.size
            if not jobs:
                queue.threads -= 1
            return jobs


def _is_small(job: Job) -> bool:
    return job[0].size <= limits.PEER_INLINE_BYTES_MAX


class PeerBackoff:
    """Which peers and contents are avoided, and until when. Thread-safe.

    A wait ends for whole plans only. If it ended during one, what that plan has passed over would come after less urgent contents.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[int, tuple[float, float]] = {}
        self._contents: dict[tuple[int, int], tuple[float, float]] = {}
        self._planned_s = 0.0
        self._is_cleared = False

    def begin_plan(self) -> None:
        """End the waits that are over, or that `clear` ended, for the plan that begins."""
        with self._lock:
            self._planned_s = time.monotonic()
            if self._is_cleared:
                self._is_cleared = False
                self._nodes.clear()
                self._contents.clear()

    def record_failure(self, node: int) -> bool:
        """Avoid a peer that failed. Return True if it was not avoided before."""
        with self._lock:
            previous = self._nodes.get(node)
            self._nodes[node] = _build_next_wait(previous)
            return previous is None

    def record_refusal(self, node: int, content: int, code: int) -> None:
        """Avoid a peer for one content that it refused; for all contents if it is full."""
        with self._lock:
            if code in health.FULL_ERRNOS:
                self._nodes[node] = _build_next_wait(self._nodes.get(node))
            if len(self._contents) >= CONTENTS_MAX:
                self._contents.clear()
            self._contents[node, content] = _build_next_wait(self._contents.get((node, content)))

    def list_failing(self) -> list[int]:
        """Return the peers that have failed for longer than a dead node counts as alive."""
        with self._lock:
            return [node for node, (_, delay_s) in self._nodes.items() if delay_s > limits.NODE_LEASE_S]

    def record_success(self, node: int) -> None:
        with self._lock:
            self._nodes.pop(node, None)

    def list_avoided(self, content: int | None = None) -> frozenset[int]:
        """Return the peers that are avoided by the present plan, with those that are for this content."""
        with self._lock:
            now_s = self._planned_s
            nodes = {node for node, (until_s, _) in self._nodes.items() if until_s > now_s}
            return frozenset(nodes | {node for (node, of), (until_s, _) in self._contents.items() if of == content and until_s > now_s})

    def next_due_s(self) -> float | None:
        """Return the seconds until the first backoff ends that the last plan obeyed; None without one."""
        with self._lock:
            now_s = self._planned_s
            # An old backoff was used for a retry, or its content is not under-replicated any more.
            self._contents = {key: wait for key, wait in self._contents.items() if wait[0] > now_s - limits.RETRY_LAST_S}
            waits = [until_s for until_s, _ in (*self._nodes.values(), *self._contents.values()) if until_s > now_s]
        return max(0.0, min(waits) - time.monotonic()) if waits else None

    def clear(self) -> None:
        """End all waits with the next plan."""
        self._is_cleared = True


def _build_next_wait(previous: tuple[float, float] | None) -> tuple[float, float]:
    """Return (end, length) of the next backoff, in seconds; longer each time."""
    delay_s = limits.RETRY_FIRST_S if previous is None else min(2 * previous[1], limits.RETRY_LAST_S)
    return time.monotonic() + delay_s, delay_s
