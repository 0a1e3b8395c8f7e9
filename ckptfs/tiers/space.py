"""Pure decisions about room: where a content goes, whether its writer must be watched, when to make room. No effects, no clocks.

Invariant (P10): `choose` finds nothing only when every tier is full.
If we die here: nothing happens, nothing is remembered.

Owns the size of the RAM tier's tmpfs: it is raised while writers need it, never lowered, and never above what was configured.

If we die here: the kernel has either taken the new size or not.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ckptfs import disk, limits
from ckptfs.model import Tier

ORDER = (Tier.RAM, Tier.NVME, Tier.PFS)


@dataclass(frozen=True, slots=True)
class Capacity:
    """A tier's budget, what can be had of it now, and what its files take, in bytes. The last two need not make the first: memory may be
    short while the tier in RAM holds nothing.
    """

    total: int
    free: int
    measured_used: int | None = None

    @property
    def used(self) -> int:
        return self.total - self.free if self.measured_used is None else self.measured_used


def choose_tier(capacities: Mapping[Tier, Capacity], expected_bytes: int, high: float) -> Tier | None:
    """The tier for a new content of about `expected_bytes` (0: unknown). None when all are full.

    RAM while it is below its high watermark and the content is expected to fit; else the first tier after it with room for it; else
    whichever still has any room at all.
    """
    for tier in ORDER:
        capacity = capacities.get(tier)
        if capacity is not None and fits(capacity, expected_bytes, high if tier is Tier.RAM else 1.0):
            return tier
    return next((tier for tier in ORDER if tier in capacities and capacities[tier].free > 0), None)


def fits(capacity: Capacity, expected_bytes: int, high: float) -> bool:
    """Whether a content of `expected_bytes` leaves the tier below `high` (a ratio of its budget)."""
    return capacity.free > expected_bytes and capacity.used + expected_bytes < high * capacity.total


def subtract_reserved(capacity: Capacity, reserved_bytes: int) -> Capacity:
    """`room` as it will be when writers have written what is expected of them."""
    return Capacity(capacity.total, max(0, capacity.free - reserved_bytes), capacity.used + reserved_bytes) if reserved_bytes else capacity


def needs_watching(capacity: Capacity, expected_bytes: int | None) -> bool:
    """Whether writes into this tier must pass through us, so that a full tier can be answered by moving on to the next one (P10).

    The kernel writes to a backing file without asking; we let it while there is room for half as much again as is expected, or for
    any surprise where nothing is known (None).
    """
    if expected_bytes is None:
        return capacity.free < limits.PASSTHROUGH_SPACE_UNKNOWN_BYTES_MIN
    return capacity.free < max(limits.PASSTHROUGH_SPACE_BYTES_MIN, expected_bytes + expected_bytes // 2)


def needs_watching_in_last(capacity: Capacity, expected_bytes: int | None) -> bool:
    """The same for a tier after which there is none: a write that finds it full can only wait for what was just deleted to go."""
    return capacity.free < max(limits.PASSTHROUGH_SPACE_LAST_BYTES_MIN, expected_bytes or 0)


def get_excess_bytes(capacity: Capacity, high: float, low: float) -> int:
    """How many bytes must leave a tier: none below `high`; above it, down to `low`."""
    return max(0, capacity.used - int(low * capacity.total)) if capacity.used > high * capacity.total else 0


def get_excess_bytes_for(capacity: Capacity, expected_bytes: int, high: float, low: float) -> int:
    """How many bytes had better leave a tier, if that costs nothing, so that the next content of about `expected_bytes` fits: down to
    `low` at least, so that some more of them fit. None for a content that the tier could never take.
    """
    bound = int(high * capacity.total)
    if expected_bytes >= bound or fits(capacity, expected_bytes, high):
        return 0
    return max(0, capacity.used - min(int(low * capacity.total), bound - expected_bytes - 1))


disk.declare_labels("ram:remount")
RAISE_BYTES_MIN = 64 * limits.MIB
REMOUNT_WAIT_S = 20.0


def choose_ram_size(total: int, used: int, *, configured: int | None, available: int, memory: int) -> int:
    """The size that a tmpfs of `total` bytes should have, of which `used` are taken: `total` itself when it is well as it is.

    `hard` is the configured bound; without one the tier may take what leaves `limits.MEMORY_RESERVE_RATIO` of all `memory` to others,
    of which `available` is to be had. A step is at least RAISE_BYTES_MIN and doubles at most.
    """
    if total - used > max(limits.RAM_HEADROOM_BYTES_MIN, total // 8):
        return total
    bound = configured if configured is not None else used + available - int(limits.MEMORY_RESERVE_RATIO * memory)
    larger = min(bound, 2 * total)
    return larger if larger >= total + RAISE_BYTES_MIN else total


def get_filesystem_size(root: Path) -> tuple[int, int]:
    """(total, used) bytes of the filesystem at `root`."""
    figures = os.statvfs(root)
    return figures.f_blocks * figures.f_frsize, (figures.f_blocks - figures.f_bfree) * figures.f_frsize


def resize_ram(root: Path, size_bytes: int) -> None:
    """Remount the tmpfs at `root` with a new size. Raises OSError; only for a mount of our own."""
    command = ["mount", "-o", f"remount,size={size_bytes}", str(root)]
    done = disk.act("ram:remount", subprocess.run, command, capture_output=True, text=True, timeout=REMOUNT_WAIT_S, check=False)
    if done.returncode:
        raise OSError(done.returncode, f"the RAM tier cannot be enlarged: {done.stderr.strip()}")
