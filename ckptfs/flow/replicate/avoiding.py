"""Owns which peers are left alone for a while, and for how long: all contents for one that failed or is full, one content for one that
refused that content. If we die here: everybody is asked again.
"""

import errno
import threading
import time

from ckptfs import limits

FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
CONTENTS_MAX = 10_000


class PeerBackoff:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nodes: dict[int, tuple[float, float]] = {}
        self._contents: dict[tuple[int, int], tuple[float, float]] = {}

    def record_failure(self, node: int) -> bool:
        """A peer did not do what it was asked. True: it did before."""
        with self._lock:
            previous = self._nodes.get(node)
            self._nodes[node] = _build_next_wait(previous)
            return previous is None

    def record_refusal(self, node: int, content: int, code: int) -> None:
        """A peer does not take this content; any other neither where it is full."""
        with self._lock:
            if code in FULL_ERRNOS:
                self._nodes[node] = _build_next_wait(self._nodes.get(node))
            if len(self._contents) >= CONTENTS_MAX:
                self._contents.clear()
            self._contents[node, content] = _build_next_wait(self._contents.get((node, content)))

    def record_success(self, node: int) -> None:
        """A peer does what it is asked."""
        with self._lock:
            self._nodes.pop(node, None)

    def list_avoided(self) -> frozenset[int]:
        """Who is left alone just now."""
        now_s = time.monotonic()
        with self._lock:
            return frozenset(node for node, (until_s, _) in self._nodes.items() if until_s > now_s)

    def list_avoided_for(self, content: int) -> frozenset[int]:
        """Who shall not be asked to take this content now."""
        now_s = time.monotonic()
        with self._lock:
            nodes = {node for node, (until_s, _) in self._nodes.items() if until_s > now_s}
            return frozenset(nodes | {node for (node, of), (until_s, _) in self._contents.items() if of == content and until_s > now_s})

    def next_due_s(self) -> float | None:
        """Until the first of them may be asked again; None when nobody is avoided."""
        now_s = time.monotonic()
        with self._lock:
            # What is long past was asked again, or is not wanted any more.
            self._contents = {key: wait for key, wait in self._contents.items() if wait[0] > now_s - limits.RETRY_LAST_S}
            waits = [until_s - now_s for until_s, _ in (*self._nodes.values(), *self._contents.values()) if until_s > now_s]
        return min(waits) if waits else None

    def clear(self) -> None:
        """Ask everybody again."""
        with self._lock:
            self._nodes.clear()
            self._contents.clear()


def _build_next_wait(previous: tuple[float, float] | None) -> tuple[float, float]:
    """(until when, how long that is): longer each time."""
    delay_s = limits.RETRY_FIRST_S if previous is None else min(2 * previous[1], limits.RETRY_LAST_S)
    return time.monotonic() + delay_s, delay_s
