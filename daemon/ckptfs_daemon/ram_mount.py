"""Owns the RAM tier's filesystem: a tmpfs of our own at STATE/ram, of mode 0700; for an ordinary user a directory below /dev/shm.

It outlives the daemon: what lies there and nowhere else stays there, and the next start takes it over (its `tier-id` tells that it is
the same). It is unmounted at the end only when nothing in it is the only copy.
If we die here: the tmpfs is mounted or not; the next start looks.
"""

import contextlib
import errno
import logging
import os
import shutil
import stat
from hashlib import sha256
from pathlib import Path

from ckptfs.config import Config
from ckptfs.errors import CkptfsError, InvalidArgument
from ckptfs_daemon import mounting

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
SIZE_STEP_BYTES = 4096


def prepare_ram_tier(config: Config) -> Path:
    """Have the RAM tier's directory in place; where it really lies. Raises Refused or CkptfsError with a sentence."""
    point = config.state / "ram"
    if not mounting.can_mount():
        return _prepare_shared_memory_dir(config, point)
    if point.is_symlink():
        point.unlink()
    point.mkdir(mode=0o700, exist_ok=True)
    mounted = mounting.find_mount_at(point)
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
    mounting.mount_at("ckptfs-ram", point, "tmpfs", mounting.MS_NOSUID | mounting.MS_NODEV, f"mode=0700,size={size_bytes},nr_inodes=0")


def _resize_ram_tier(point: Path, size_bytes: int) -> None:
    try:
        flags = mounting.MS_REMOUNT | mounting.MS_NOSUID | mounting.MS_NODEV
        mounting.mount_at("ckptfs-ram", point, "tmpfs", flags, f"mode=0700,size={size_bytes}")
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
    elif mounting.find_mount_at(point) is not None:
        try:
            mounting.unmount_at(point)
        except OSError as failure:
            log.warning("the RAM tier stays mounted at %s: %s", point, failure.strerror)
            return False
    return True
