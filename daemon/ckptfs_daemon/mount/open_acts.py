"""Acts of an open on the files of a tier, most of them in threads: they may take long or hang.

Crash safety: see `open_attempt`.
"""

import contextlib
import os
from typing import NamedTuple

from ckptfs import disk
from ckptfs.tiers import space
from ckptfs.tiers.storage import TierStorage


class PfsFacts(NamedTuple):
    """The status of a file on the PFS, and the capacity of the PFS, when the file was opened."""

    status: os.stat_result
    capacity: space.Capacity


def read_pfs_facts(fd: int) -> PfsFacts:
    """May hang."""
    figures = os.fstatvfs(fd)
    total, free = figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize
    return PfsFacts(os.fstat(fd), space.Capacity(total, free))


def remove_quietly(storage: TierStorage, content: int) -> None:
    """Remove a file that is not needed. If its tier fails, the reclaim flow removes it later."""
    with contextlib.suppress(OSError):
        storage.remove(content)


def truncate_content(storage: TierStorage, content: int) -> None:
    with disk.closing(storage.open(content, os.O_RDWR)) as fd:
        os.ftruncate(fd, 0)
