"""One daemon per state directory: an flock on STATE/lock, which the kernel drops when its holder dies.

The lock says nothing of a dead supervisor's children; `end_leftovers` makes sure of them by the pids and start times in processes.json.
If we die here: the lock is free again.
"""

import fcntl
import json
import logging
import os
import select
import signal
from pathlib import Path
from typing import Any

from ckptfs.errors import InvalidArgument

log = logging.getLogger(__name__)

LEFTOVER_WAIT_S = 10.0


def acquire_lock(state: Path) -> int:
    """Lock the state directory; the descriptor that holds the lock. Raises Refused when another daemon has it."""
    path = state / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        remedy = "unmount that one first, or give another state=DIRECTORY"
        raise InvalidArgument(f"another ckptfsd (pid {holder}) uses the state directory {state}", remedy=remedy) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def get_start_ticks(pid: int) -> int:
    """When a process was started, in clock ticks since boot: with the pid, its identity. 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def kill_leftovers(processes: Path) -> None:
    """Kill what a dead supervisor left running, so that no two mount or mover processes work on one catalog.

    They end by themselves when their supervisor is gone; one that hangs in a system call (on the PFS) is killed and does nothing more.
    """
    try:
        known: Any = json.loads(processes.read_bytes())
    except (OSError, ValueError):
        return
    for role in ("mount", "mover", "spare"):
        one = known.get(role) if isinstance(known, dict) else None
        if isinstance(one, dict) and one.get("pid") and get_start_ticks(one["pid"]) == one.get("started_ticks"):
            _kill_leftover(role, one["pid"])


def _kill_leftover(role: str, pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        log.info("ending the %s process %d of an earlier supervisor", role, pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        if not ended.poll(LEFTOVER_WAIT_S * 1000):
            log.warning("the %s process %d is killed but still hangs in a system call; going on without it", role, pid)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)
