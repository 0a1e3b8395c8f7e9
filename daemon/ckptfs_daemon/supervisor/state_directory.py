"""The state directory of a daemon: its lock, the files that name processes, the RAM tier's filesystem.

STATE/lock is held with flock(2), which the kernel releases when its holder dies. The lock says nothing about the children of a dead
supervisor; `kill_leftovers` finds them by the pids and start times in processes.json. That file and the registry file are renamed into
place, so a reader sees the old state or the new one.

The RAM tier is a tmpfs of mode 0700 at STATE/ram, or for an ordinary user a directory below /dev/shm. It outlives the daemon: the next
start takes it over (its `tier-id` identifies it). It is unmounted at the end only if it holds no only copy.

Crash safety: processes.json may be stale; its pids count only together with their start times.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import stat
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ckptfs import cgroups, libc, limits, mount_record, procfs, runtime_dir
from ckptfs.cgroups import MemoryLimit
from ckptfs.config import RAM_BYTES_MIN, Config
from ckptfs.errors import CkptfsError, InvalidArgument
from ckptfs.tiers import huge_pages
from ckptfs_daemon.fuse import connection

log = logging.getLogger(__name__)
LOCK_WAIT_S = 0.5
"""`ckptfs mounts` and mount(8) hold the lock for a moment, to see whether a daemon does."""
LEFTOVER_WAIT_S = 10.0
LEFTOVER_POLL_S = 0.01
BUSY_WAIT_S = 5.0
"""The kernel closes the backing files of a FUSE connection a moment after the connection has ended."""
SHARED_MEMORY = Path("/dev/shm")
SIZE_STEP_BYTES = 4096


def acquire_lock(state: Path, *, is_read_only: bool = False) -> int:
    """Lock the state directory; return the descriptor. Raises InvalidArgument if another daemon holds it."""
    path = state / "lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    until = time.monotonic() + LOCK_WAIT_S
    while not _try_lock(fd):
        if time.monotonic() > until:
            holder = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            found = mount_record.load(state)
            where = f", mounted at {found.mountpoint}" if found is not None else ""
            remedy = "unmount that one first, or give another state=DIRECTORY"
            if is_read_only:
                remedy = f"mount --bind -o ro shows that mount read-only at another place; {remedy}"
            raise InvalidArgument(f"another ckptfsd (pid {holder}{where}) uses the state directory {state}", remedy=remedy)
        time.sleep(LEFTOVER_POLL_S)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _try_lock(fd: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def kill_leftovers(state: Path) -> None:
    """Kill the children of a dead supervisor, so that no two mount or mover processes use one catalog.

    They exit on their own once their supervisor has ended. One that hangs in a system call (on the PFS) does nothing more once killed.
    """
    known = runtime_dir.load_processes(state)
    for role in ("mount", "mover"):
        one = known.get(role)
        if isinstance(one, dict) and one.get("pid") and procfs.get_start_ticks(one["pid"]) == one.get("started_ticks"):
            _kill_leftover(role, one["pid"])


def _kill_leftover(role: str, pid: int) -> None:
    log.info("%s process %d: killing it: an earlier supervisor left it", role, pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LEFTOVER_WAIT_S
    while procfs.is_running(pid):
        if time.monotonic() > deadline:
            log.warning("%s process %d: was killed but hangs in a system call; it is ignored", role, pid)
            return
        time.sleep(LEFTOVER_POLL_S)


def publish_processes(config: Config, processes: Mapping[str, Any]) -> None:
    """Write `processes` to the state directory, and the mount's file in the registry."""
    _replace_json_file(config.state / runtime_dir.PROCESSES_FILE, processes)
    _replace_json_file(
        runtime_dir.create() / f"{config.name}.json",
        {
            "name": config.name,
            "mountpoint": str(config.mountpoint),
            "state": str(config.state),
            "socket": str(runtime_dir.socket_path(config.name)),
            "pid": os.getpid(),
        },
    )


def delete_process_files(config: Config, *, is_forgotten: bool) -> None:
    """Delete both files: no process runs any more. The registry keeps names that are not forgotten."""
    for path in (config.state / runtime_dir.PROCESSES_FILE, *([runtime_dir.registry_path(config.name)] if is_forgotten else [])):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _replace_json_file(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.chmod(temporary, 0o644)
    os.rename(temporary, path)


class ReadyPipe:
    """The descriptor of --ready-fd, to which one line is written once."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)

    def write_once(self, line: str) -> None:
        """Write `line` unless a line was written before. The reader may have gone."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._fd, (" ".join(line.split()) + "\n").encode())
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = None


def prepare_ram_tier(config: Config) -> None:
    """Create or take over the RAM tier. Raises InvalidArgument or CkptfsError."""
    limit = cgroups.find_own_limit()
    size_bytes = choose_initial_ram_size(config.ram_bytes, procfs.get_memory()[0], limit)
    warn_of_low_limit(size_bytes, limit)
    point = config.state / "ram"
    if not procfs.has_capability(procfs.CAP_SYS_ADMIN):
        _prepare_shared_memory_dir(config, point)
        return
    if point.is_symlink():
        point.unlink()
    point.mkdir(mode=0o700, exist_ok=True)
    mounted = connection.find_mount_at(point)
    try:
        if mounted is None:
            libc.mount("ckptfs-ram", point, "tmpfs", huge_pages.TMPFS_FLAGS, f"mode=0700,size={size_bytes},nr_inodes=0")
        elif mounted.fstype != "tmpfs":
            raise InvalidArgument(f"{point} has a {mounted.fstype} mounted, not the tmpfs of ckptfs", remedy=f"umount {point}")
        else:
            log.info("%s: the RAM tier is still mounted; taking it over", point)
            _resize_ram_tier(point, size_bytes)
        huge_pages.set_for_fresh_files(point, config.huge_pages)
    except OSError as failure:
        raise CkptfsError(f"the RAM tier cannot be mounted at {point}: {failure.strerror}") from failure


def choose_initial_ram_size(configured: int | None, memory_bytes: int, limit: MemoryLimit) -> int:
    """Return the configured size, else half of the memory or of the limit of the daemon. Pure."""
    if configured is not None:
        return configured
    size = memory_bytes // 2
    if limit.limit_bytes:
        size = min(size, max(RAM_BYTES_MIN, min(limit.limit_bytes // 2, limit.limit_bytes - limits.SERVICE_BYTES)))
    return size // SIZE_STEP_BYTES * SIZE_STEP_BYTES


def warn_of_low_limit(size_bytes: int, limit: MemoryLimit) -> None:
    """Log if the memory limit of the daemon is too low for a RAM tier of this size (M2)."""
    if limit.limit_bytes and limit.limit_bytes < size_bytes + limits.SERVICE_BYTES:
        log.warning(
            "ram: the memory limit of the daemon (%d MiB, %s) is below what it needs: %d MiB for the RAM tier and %d MiB for its processes;"
            " the kernel kills it when the tier fills (raise the limit, or give a smaller ram=)",
            limit.limit_bytes // limits.MIB, limit.group, size_bytes // limits.MIB, limits.SERVICE_BYTES // limits.MIB,
        )  # fmt: skip


def _resize_ram_tier(point: Path, size_bytes: int) -> None:
    try:
        libc.mount("ckptfs-ram", point, "tmpfs", libc.MS_REMOUNT | huge_pages.TMPFS_FLAGS, f"mode=0700,size={size_bytes}")
    except OSError as failure:
        if failure.errno != errno.EINVAL:
            raise
        log.warning("%s: the RAM tier keeps its size: it holds more than %d bytes", point, size_bytes)


def _prepare_shared_memory_dir(config: Config, point: Path) -> None:
    """Create the RAM tier of an ordinary user. Any user may write to /dev/shm: check owner and mode."""
    token = sha256(os.fsencode(config.state)).hexdigest()[:12]
    directory = SHARED_MEMORY / f"ckptfs-{os.geteuid()}-{token}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidArgument(f"{directory} is not a directory of this user alone", remedy=f"remove {directory}")
    if not point.is_symlink() or os.readlink(point) != str(directory):
        if point.is_symlink():
            point.unlink()
        elif point.exists():
            point.rmdir()
        point.symlink_to(directory)


def release_ram_tier(config: Config) -> bool:
    """Unmount or remove the RAM tier, which holds no only copy. Returns False if that is not possible."""
    point = config.state / "ram"
    if point.is_symlink():
        target = Path(os.readlink(point))
        point.unlink()
        shutil.rmtree(target, ignore_errors=True)
    elif connection.find_mount_at(point) is not None:
        try:
            connection.unmount_idle(point, lambda: connection.find_mount_at(point) is not None, BUSY_WAIT_S)
        except OSError as failure:
            log.warning("%s: the RAM tier stays mounted: %s", point, failure.strerror)
            return False
    return True
