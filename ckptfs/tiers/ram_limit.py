"""Owns the size of the RAM tier's tmpfs: it is raised while writers need it, never lowered, and never above what was configured.

If we die here: the kernel has either taken the new size or not.
"""

import os
import subprocess
from pathlib import Path

from ckptfs import disk, limits

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


def get_memory() -> tuple[int, int]:
    """(all, available) bytes of this machine's memory."""
    fields = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            fields[name] = int(rest.split()[0]) * limits.KIB
    return fields["MemTotal"], fields["MemAvailable"]


def resize_ram(root: Path, size_bytes: int) -> None:
    """Remount the tmpfs at `root` with a new size. Raises OSError; only for a mount of our own."""
    command = ["mount", "-o", f"remount,size={size_bytes}", str(root)]
    done = disk.act("ram:remount", subprocess.run, command, capture_output=True, text=True, timeout=REMOUNT_WAIT_S, check=False)
    if done.returncode:
        raise OSError(done.returncode, f"the RAM tier cannot be enlarged: {done.stderr.strip()}")
