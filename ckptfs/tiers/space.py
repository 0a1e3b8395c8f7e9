"""Decisions about space: tier of a new content, passthrough, eviction, size of the RAM tier.

Decisions are pure. `resize_ram` only raises the size of the tmpfs, never above the configured size.

Invariants:
- `choose_tier` returns None only if every tier is full (P10).
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptfs import disk, limits
from ckptfs.model import Tier

disk.declare_labels("ram:remount")
RAISE_BYTES_MIN = 64 * limits.MIB
REMOUNT_WAIT_S = 20.0
ORDER = (Tier.RAM, Tier.NVME, Tier.PFS)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The budget of a tier, the bytes available now, and the bytes that its files take.

    `free` and `used` need not add up to `total`: memory may be short while the RAM tier is empty.
    """

    total: int
    free: int
    measured_used: int | None = None

    @property
    def used(self) -> int:
        return self.total - self.free if self.measured_used is None else self.measured_used


def read_capacity(place: int | Path) -> Capacity:
    """Return the size of a filesystem, and what an ordinary user can still write. May hang."""
    figures = os.statvfs(place)
    return Capacity(figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize)


def choose_tier(capacities: Mapping[Tier, Capacity], expected_bytes: int, high: float) -> Tier | None:
    """Return the tier for a new content of about `expected_bytes` (0: unknown); None if all are full.

    The RAM tier is chosen if the content fits below its high watermark, else the first tier with enough space, else the first tier with
    any space.
    """
    for tier in ORDER:
        capacity = capacities.get(tier)
        if capacity is not None and fits(capacity, expected_bytes, high if tier is Tier.RAM else 1.0):
            return tier
    return next((tier for tier in ORDER if tier in capacities and capacities[tier].free > 0), None)


def fits(capacity: Capacity, expected_bytes: int, high: float) -> bool:
    """Return True if a content of `expected_bytes` leaves the tier below `high`, a ratio of its budget."""
    return capacity.free > expected_bytes and capacity.used + expected_bytes < high * capacity.total


def subtract_reserved(capacity: Capacity, reserved_bytes: int) -> Capacity:
    """Return `capacity` after the writes that are still expected."""
    return Capacity(capacity.total, max(0, capacity.free - reserved_bytes), capacity.used + reserved_bytes) if reserved_bytes else capacity


def add_free(capacity: Capacity, freed_bytes: int) -> Capacity:
    """Return `capacity` after `freed_bytes` of its used bytes were freed."""
    used = max(0, capacity.used - freed_bytes)
    return Capacity(capacity.total, min(capacity.total, capacity.free + freed_bytes), used)


def needs_buffered_path(capacity: Capacity, expected_bytes: int | None) -> bool:
    """Return True if writes into this tier must pass through the mount process (P10).

    It moves a file on when the tier is full; the kernel writes to a backing file without asking. Passthrough needs space for 1.5 times the
    expected size, or a fixed reserve if that is unknown (None).
    """
    if expected_bytes is None:
        return capacity.free < limits.PASSTHROUGH_SPACE_UNKNOWN_BYTES_MIN
    return capacity.free < max(limits.PASSTHROUGH_SPACE_BYTES_MIN, expected_bytes + expected_bytes // 2)


def needs_buffered_path_in_last_tier(capacity: Capacity, expected_bytes: int | None) -> bool:
    """Return True if the last tier is too full for passthrough."""
    return capacity.free < max(limits.PASSTHROUGH_SPACE_LAST_BYTES_MIN, expected_bytes or 0)


def get_excess_bytes(capacity: Capacity, high: float, low: float) -> int:
    """Return how many bytes to evict: none below `high`, else down to `low`."""
    return max(0, capacity.used - int(low * capacity.total)) if capacity.used > high * capacity.total else 0


def get_excess_bytes_for(capacity: Capacity, expected_bytes: int, high: float, low: float) -> int:
    """Return how many bytes to evict for several contents of this size; 0 if one can never fit."""
    bound = int(high * capacity.total)
    if expected_bytes >= bound or fits(capacity, expected_bytes, high):
        return 0
    return max(0, capacity.used - min(int(low * capacity.total), bound - expected_bytes - 1))


def choose_ram_size(total: int, used: int, *, configured: int | None, available: int, memory: int, limit: int | None = None) -> int:
    """Return the new size of a tmpfs with `total` and `used` bytes; `total` if it need not grow.

    `configured` bounds the size. Without it, the tier leaves `limits.MEMORY_RESERVE_RATIO` of `memory` to other processes;
    `available` bytes are free now; `limit` is the memory limit of the daemon, which also needs memory of its own. One step is at least
    RAISE_BYTES_MIN and at most doubles the size.
    """
    if total - used > max(limits.RAM_HEADROOM_BYTES_MIN, total // 8):
        return total
    if configured is not None:
        bound = configured
    else:
        bound = used + available - int(limits.MEMORY_RESERVE_RATIO * memory)
        if limit is not None:
            bound = min(bound, limit - limits.SERVICE_BYTES)
    larger = min(bound, 2 * total)
    return larger if larger >= total + RAISE_BYTES_MIN else total


def resize_ram(root: Path, size_bytes: int) -> None:
    """Remount the tmpfs at `root`, a mount of our own, with a new size. Raises OSError."""
    command = ["mount", "-o", f"remount,size={size_bytes}", str(root)]
    done = disk.act("ram:remount", subprocess.run, command, capture_output=True, text=True, timeout=REMOUNT_WAIT_S, check=False)
    if done.returncode:
        raise OSError(done.returncode, f"the RAM tier cannot be enlarged: {done.stderr.strip()}")
