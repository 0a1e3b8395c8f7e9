"""Asks the other nodes whether they answer, how fast, and what their clocks say: for `ckptfs doctor`, which is the only one to ask.

Any user of the machine may ask, so an answer is kept for a while and only one round is under way at a time.
If we die here: nothing was changed.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ckptfs import limits
from ckptfs.clique.membership import Node
from ckptfs.clique.peers import PeerFailed, PeerStats

Ping = Callable[[Node], PeerStats]
ProbeResult = PeerStats | str
"""What a node said, or in words why it did not."""


class NodeProbe:
    """Rounds of pings. Several threads may ask; they share a round."""

    def __init__(self, ping: Ping) -> None:
        self._ping = ping
        self._lock = threading.Lock()
        self._results: dict[int, ProbeResult] = {}
        self._asked_s = -limits.PROBE_KEPT_S

    def get_results(self, nodes: Sequence[Node]) -> dict[int, ProbeResult]:
        """{number: answer} of these nodes, of not more than `limits.PROBED_MAX`."""
        with self._lock:
            if time.monotonic() - self._asked_s >= limits.PROBE_KEPT_S or any(node.number not in self._results for node in nodes):
                with ThreadPoolExecutor(limits.PROBES_AT_ONCE, thread_name_prefix="probe") as threads:
                    asked = nodes[: limits.PROBED_MAX]
                    self._results = dict(zip((node.number for node in asked), threads.map(self._ping_node, asked), strict=True))
                self._asked_s = time.monotonic()
            return self._results

    def _ping_node(self, node: Node) -> ProbeResult:
        try:
            return self._ping(node)
        except PeerFailed as failure:
            return str(failure)
