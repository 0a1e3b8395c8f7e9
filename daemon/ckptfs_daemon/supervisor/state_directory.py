"""One daemon per state directory: an flock on STATE/lock, which the kernel drops when its holder dies.

The lock says nothing of a dead supervisor's children; `end_leftovers` makes sure of them by the pids and start times in processes.json.
If we die here: the lock is free again.

Where the supervisor says what runs: STATE/processes.json, the registry file of the mount, and whoever waits on --ready-fd.

Files are renamed into place: a reader sees the former state or the new one.
If we die here: the files are stale; the pids in them are believed only together with their start times.

Owns the RAM tier's filesystem: a tmpfs of our own at STATE/ram, of mode 0700; for an ordinary user a directory below /dev/shm.

It outlives the daemon: what lies there and nowhere else stays there, and the next start takes it over (its `tier-id` tells that it is
the same). It is unmounted at the end only when nothing in it is the only copy.
If we die here: the tmpfs is mounted or not; the next start looks.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import select
import shutil
import signal
import stat
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from ckptfs import runtime_dir
from ckptfs.config import Config
from ckptfs.errors import CkptfsError, InvalidArgument
from ckptfs_daemon.fuse import connection

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


def publish_processes(config: Config, processes: Mapping[str, Any]) -> None:
    """Publish `processes` beside the catalog and in the registry."""
    _replace_json_file(config.state / "processes.json", processes)
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


def delete_process_files(config: Config) -> None:
    """Nothing runs any more."""
    for path in (config.state / "processes.json", runtime_dir.registry_path(config.name)):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _replace_json_file(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.chmod(temporary, 0o644)
    os.rename(temporary, path)


class ReadyPipe:
    """The descriptor given as --ready-fd: one line, once."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_inheritable(fd, False)

    def write_once(self, line: str) -> None:
        """Write `line` if nothing was written before; nobody may be listening."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._fd, (" ".join(line.split()) + "\n").encode())
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = None


SHARED_MEMORY = Path("/dev/shm")
SIZE_STEP_BYTES = 4096


def prepare_ram_tier(config: Config) -> Path:
    """Have the RAM tier's directory in place; where it really lies. Raises Refused or CkptfsError with a sentence."""
    point = config.state / "ram"
    if not connection.can_mount():
        return _prepare_shared_memory_dir(config, point)
    if point.is_symlink():
        point.unlink()
    point.mkdir(mode=0o700, exist_ok=True)
    mounted = connection.find_mount_at(point)
    try:
        if mounted is None:
            _mount_ram_tier(point, get_ram_tier_size_bytes(config))
        elif mounted.fstype != "tmpfs":
            raise InvalidArgument(f"{point} has a {mounted.fstype} mounted, not our tmpfs", remedy=f"umount {point}")
        else:
            log.info("the RAM tier at %s is still there; taking it over", point)
            _resize_ram_tier(point, get_ram_tier_size_bytes(config))
    except OSError as failure:
        raise CkptfsError(f"the RAM tier cannot be mounted at {point}: {failure.strerror}") from failure
    return point


def get_ram_tier_size_bytes(config: Config) -> int:
    """How large the tmpfs is at first: what was configured, or half of the memory that we may use."""
    return config.ram_bytes if config.ram_bytes is not None else get_memory_bytes() // 2 // SIZE_STEP_BYTES * SIZE_STEP_BYTES


def get_memory_bytes() -> int:
    """The machine's memory, or the limit of our memory cgroup where that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        groups = Path("/proc/self/cgroup").read_text().splitlines()
        below = next(line.split(":", 2)[2] for line in [*groups, "0::/"] if line.startswith("0::"))
        directory = Path("/sys/fs/cgroup") / below.lstrip("/")
        for cgroup in (directory, *directory.parents):
            with contextlib.suppress(OSError, ValueError):
                total = min(total, int((cgroup / "memory.max").read_text()))
    return total


def _mount_ram_tier(point: Path, size_bytes: int) -> None:
    connection.mount_at(
        "ckptfs-ram", point, "tmpfs", connection.MS_NOSUID | connection.MS_NODEV, f"mode=0700,size={size_bytes},nr_inodes=0"
    )


def _resize_ram_tier(point: Path, size_bytes: int) -> None:
    try:
        flags = connection.MS_REMOUNT | connection.MS_NOSUID | connection.MS_NODEV
        connection.mount_at("ckptfs-ram", point, "tmpfs", flags, f"mode=0700,size={size_bytes}")
    except OSError as failure:
        if failure.errno != errno.EINVAL:
            raise
        log.warning("the RAM tier holds more than %d bytes; it keeps its size until there is less in it", size_bytes)


def _prepare_shared_memory_dir(config: Config, point: Path) -> Path:
    """The directory of an ordinary user. /dev/shm is everybody's, so what is there under our name must be ours indeed."""
    token = sha256(os.fsencode(config.state)).hexdigest()[:12]
    directory = SHARED_MEMORY / f"ckptfs-{os.geteuid()}-{token}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidArgument(f"{directory} is not a directory of ours alone", remedy=f"remove {directory}")
    if not point.is_symlink() or os.readlink(point) != str(directory):
        if point.is_symlink():
            point.unlink()
        elif point.exists():
            point.rmdir()
        point.symlink_to(directory)
    return directory


def release_ram_tier(config: Config) -> bool:
    """Give the memory back; whether that could be. Called when nothing in it is the only copy of anything."""
    point = config.state / "ram"
    if point.is_symlink():
        target = Path(os.readlink(point))
        point.unlink()
        shutil.rmtree(target, ignore_errors=True)
    elif connection.find_mount_at(point) is not None:
        try:
            connection.unmount_at(point)
        except OSError as failure:
            log.warning("the RAM tier stays mounted at %s: %s", point, failure.strerror)
            return False
    return True
