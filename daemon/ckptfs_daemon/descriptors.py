"""Owns how many files a process of ours may have open: as many as we are given, and no more of them for strangers than leave us enough.

If we die here: nothing was changed but for this process.
"""

import contextlib
import resource
from pathlib import Path

CONNECTIONS_SHARE = 0.25


def raise_descriptor_limit() -> None:
    """Every file that is open, moved or sent costs a descriptor: take as many as we may, as root as many as there are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = int(Path("/proc/sys/fs/nr_open").read_text())
    for limit in (most, hard):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return


def get_connections_max(at_most: int) -> int:
    """How many connections of whoever calls may be open at once."""
    return min(at_most, int(CONNECTIONS_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
