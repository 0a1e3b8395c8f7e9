"""The ckptfs mounts of this machine, and the one in which a path lies.

They are read from /proc/self/mountinfo, so a mount that hangs is found too.
"""

import contextlib
import errno
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfs import procfs, runtime_dir
from ckptfs_client.errors import ClientError, CommandFailed, NoMount, UsageError

HISTORY = ".ckptfs/history"
"""The history of checkpoint sets, below a mountpoint."""
DIGEST_XATTR = "user.ckptfs.digest"
SET_XATTR = "user.ckptfs.set"
"""Names the set to which a file belongs, by its path below `HISTORY`."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted ckptfs. `uid` is the user of its daemon, `device` its st_dev."""

    name: str
    mountpoint: Path
    uid: int
    device: int

    @property
    def history(self) -> Path:
        """The directory of its checkpoint sets."""
        return self.mountpoint / HISTORY

    @property
    def socket(self) -> Path:
        """The socket for queries."""
        return runtime_dir.socket_path(self.name, self.uid)

    @property
    def admin_socket(self) -> Path:
        """The socket for admin calls."""
        return runtime_dir.admin_socket_path(self.name, self.uid)

    @property
    def has_ended(self) -> bool:
        """Whether its daemon is known to have ended."""
        pid = self.load_registered("pid")
        return isinstance(pid, int) and not procfs.is_running(pid)

    def load_registered(self, key: str) -> Any:
        """Return `pid` or `state` as the daemon has registered it. Returns None if that cannot be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return json.loads(runtime_dir.registry_path(self.name, self.uid).read_bytes())[key]
        return None


def list_mounts(table: str | Path = procfs.MOUNT_TABLE) -> list[Mount]:
    """Return the mounted ckptfs in the order of mounting."""
    found = []
    for entry in procfs.list_mount_entries(table):
        if entry.fstype == procfs.CKPTFS_TYPE:
            uid = re.search(r"(?:^|,)user_id=(\d+)", entry.options)
            device = os.makedev(*map(int, entry.device.split(":")))
            found.append(Mount(entry.source, entry.mountpoint, int(uid[1]) if uid else 0, device))
    return found


def list_mountpoints_below(directory: Path) -> list[Path]:
    """Return all mountpoints below a directory, deepest and latest first; stacked mounts repeat theirs."""
    points = [entry.mountpoint for entry in reversed(procfs.list_mount_entries())]
    found = [point for point in points if point.is_relative_to(directory) and point != directory]
    return sorted(found, key=lambda point: len(point.parts), reverse=True)


def find(path: Path) -> Mount:
    """Return the mount in which `path` lies; resolve symlinks only if they matter. Raises NoMount."""
    found = list_mounts()
    holding = _list_containing(found, Path(os.path.abspath(path))) or _list_containing(found, Path(os.path.realpath(path)))
    if holding:
        return holding[-1]
    where = ", ".join(str(mount.mountpoint) for mount in found)
    remedy = f"ckptfs is mounted at: {where}" if found else "no ckptfs is mounted on this machine; mount -t ckptfs NAME DIR mounts one"
    raise NoMount(f"{path} does not lie in a ckptfs mount", remedy=remedy)


def _list_containing(found: list[Mount], path: Path) -> list[Mount]:
    """Return the mounts that contain `path`. The last is visible: the deepest, the latest of stacked ones."""
    holding = [mount for mount in found if path.is_relative_to(mount.mountpoint)]
    return sorted(holding, key=lambda mount: len(mount.mountpoint.parts))


def choose(directory: Path | None) -> Mount:
    """Return the mount of `directory`; without one, the only mount. Raises NoMount, UsageError."""
    if directory is not None:
        return find(directory)
    found = list_mounts()
    if not found:
        raise NoMount("no ckptfs is mounted on this machine", remedy="mount -t ckptfs NAME DIR mounts one")
    if len(found) > 1:
        raise UsageError("several ckptfs are mounted", remedy="name one of " + ", ".join(str(mount.mountpoint) for mount in found))
    return found[0]


def choose_all(directory: Path | None) -> list[Mount]:
    """Return the mount of `directory`; without one, all mounts. Raises NoMount."""
    return [find(directory)] if directory is not None else list_mounts() or [choose(None)]


def choose_named(text: str | None) -> Mount:
    """Return the mount of this name or path; without one, the only mount. Raises NoMount."""
    named = [mount for mount in list_mounts() if mount.name == text]
    return named[-1] if named else choose(None if text is None else Path(text))


def find_inode(path: str | os.PathLike[str]) -> tuple[Mount, int]:
    """Return the mount of `path`, and its inode number. Raises NoMount, CommandFailed."""
    mount = find(Path(path))
    try:
        found = os.lstat(path)
    except OSError as failure:
        raise build_path_error(path, failure) from failure
    if found.st_dev != mount.device:
        raise NoMount(f"{path} is in another filesystem, mounted below {mount.mountpoint}")
    return mount, found.st_ino


def build_path_error(path: str | os.PathLike[str], failure: OSError) -> ClientError:
    """Return the error for a path that cannot be looked at. A dead mount gets the remedy of its mount."""
    if failure.errno in (errno.ENOTCONN, errno.ECONNABORTED):
        with contextlib.suppress(NoMount):
            return build_unanswered_error(find(Path(path)))
    return CommandFailed(f"{os.fspath(path)}: {os.strerror(failure.errno or 0)}")


def build_unanswered_error(mount: Mount) -> NoMount:
    """Return the error for a daemon that does not answer."""
    if mount.has_ended:
        remedy = f"mount {mount.name} again with the same options, which takes over the mountpoint, or umount -l {mount.mountpoint}"
        return NoMount(f"the daemon of {mount.name} ({mount.mountpoint}) has ended", remedy=remedy)
    remedy = "its log says why; `ckptfs doctor` may help"
    return NoMount(f"the daemon of {mount.name} ({mount.mountpoint}) does not answer", remedy=remedy)
