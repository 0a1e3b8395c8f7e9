"""Histograms of how long the steps of a file's path took in this process. Thread-safe."""

import threading
from bisect import bisect_left
from dataclasses import dataclass, field

SEAL, REPLICATE, FETCH, WRITE_BACK = "seal", "replicate", "fetch", "write_back"
STEPS = (SEAL, REPLICATE, FETCH, WRITE_BACK)
BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""From a small file in RAM to a checkpoint on a slow PFS, two for each factor of ten."""


@dataclass(slots=True)
class DurationHistogram:
    """What was recorded of one step. `counts`: up to each bound, and beyond the last one."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0
    size_bytes: int = 0


_histograms = {step: DurationHistogram() for step in STEPS}
_lock = threading.Lock()


def record(step: str, seconds: float, size_bytes: int) -> None:
    """Record that a step took so long for so many bytes."""
    with _lock:
        found = _histograms[step]
        found.counts[bisect_left(BOUNDS_S, seconds)] += 1
        found.sum_s += seconds
        found.size_bytes += size_bytes


def get_histograms() -> dict[str, DurationHistogram]:
    with _lock:
        return {step: DurationHistogram(list(one.counts), one.sum_s, one.size_bytes) for step, one in _histograms.items()}
