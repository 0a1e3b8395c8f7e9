"""Huge pages of the RAM tier: which files get them.

A tmpfs with `huge=within_size` gives huge pages to files of that size; with `huge=never`, to none. Some virtual machines give free memory
back to their host in blocks of the size of a huge page, and a block that has been given back is slow at its next use. There, fresh files
get small pages, which come from memory that the host still backs; prepared files get huge ones, which the mover touches first.

Crash safety: a process that ends while it prepares leaves huge pages on. The next one to prepare, or to start, turns them off.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from ckptfs import libc

log = logging.getLogger(__name__)

TMPFS_FLAGS = libc.MS_NOSUID | libc.MS_NODEV
_BALLOON, _FREE_PAGE_REPORTING = Path("/sys/bus/virtio/drivers/virtio_balloon"), 5
"""The driver in sysfs, and the feature bit of its device (virtio 1.2, section 5.5.3)."""


def gives_memory_back() -> bool:
    """Return True if this virtual machine gives free memory back to its host (free page reporting)."""
    for features in _BALLOON.glob("virtio*/features"):
        with contextlib.suppress(OSError):
            if features.read_text()[_FREE_PAGE_REPORTING:][:1] == "1":
                return True
    return False


def set_for_fresh_files(point: Path, wanted: bool) -> None:
    """Let fresh files of the tmpfs at `point` use huge pages, or not. Kernels without them refuse that."""
    try:
        _set(point, wanted and not gives_memory_back())
    except OSError as failure:
        if wanted:
            log.info("%s: the RAM tier has no huge pages: %s", point, failure.strerror)


@contextlib.contextmanager
def for_prepared_files(point: Path) -> Iterator[None]:
    """Surround the allocation of prepared memory. `point`: a tmpfs that shall use huge pages."""
    if not gives_memory_back():
        yield
        return
    with contextlib.suppress(OSError):
        _set(point, True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _set(point, False)


def _set(point: Path, wanted: bool) -> None:
    libc.mount("ckptfs-ram", point, "tmpfs", libc.MS_REMOUNT | TMPFS_FLAGS, f"huge={'within_size' if wanted else 'never'}")
