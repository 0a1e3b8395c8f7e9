"""Names that have no daemon: what they still hold, how to mount them again, and how to delete them.

A name is found by its state directory: below the default root, or where the registry of the runtime directory says. What it holds was
counted when its daemon ended (`MountRecord`). The lock of the state directory tells whether a daemon runs.

Crash safety: a deletion that was interrupted can be repeated; the record and the lock go last.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptfs import config, disk, event_log, mount_record, mountpoint_guard, runtime_dir
from ckptfs.mount_record import MountRecord
from ckptfs_client.errors import CommandFailed, UsageError
from ckptfs_client.json_answers import MountJson
from ckptfs_client.mounts import list_mounts

CATALOG = "catalog.db"
OURS = (
    CATALOG, "catalog.db-wal", "catalog.db-shm", "catalog.db-lock", "catalog.db.digest",
    runtime_dir.PROCESSES_FILE, "ckptfsd.log", "ckptfsd.log.1",
    mount_record.FILE_NAME, "lock",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class UnmountedName:
    """A name without a daemon. `record` is None if its daemon was of a version that recorded nothing."""

    name: str
    state: Path
    record: MountRecord | None

    @property
    def has_data(self) -> bool:
        """Return True if data may lie on this node only."""
        return self.record is None or self.record.leftovers is None or not self.record.leftovers.is_nothing

    @property
    def has_lost_ram(self) -> bool:
        """Return True if files were only in RAM, and their RAM tier is gone: the machine was rebooted."""
        left = None if self.record is None else self.record.leftovers
        return (
            left is not None
            and left.ram_files > 0
            and not (self.state / "ram").is_mount()
            and not (self.state / "ram" / "tier-id").exists()
        )

    def describe(self) -> str:
        """Describe in words what it holds."""
        if self.record is None:
            return "nobody counted what it holds"
        if self.record.leftovers is None:
            return "its daemon was killed, so nobody counted what it holds"
        if self.has_lost_ram:
            return f"{self.record.describe_leftovers()}; the machine was rebooted since, and the RAM tier is gone"
        return self.record.describe_leftovers() or "nothing that the PFS does not have"

    @property
    def mount_command(self) -> str:
        if self.record is not None:
            return self.record.mount_command
        return f"mount -t ckptfs {self.name} DIR, with the options that it had"


def list_unmounted() -> list[UnmountedName]:
    """Return the names without a daemon, sorted."""
    found = {}
    for state in _list_states():
        if (state / CATALOG).exists() and not _is_locked(state):
            record = mount_record.load(state)
            found[state] = UnmountedName(state.name if record is None else record.name, state, record)
    return sorted(found.values(), key=lambda one: one.name)


def _list_states() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (Path(entry.path) for entry in os.scandir(config.get_default_state("x").parent) if entry.is_dir())
    for path in runtime_dir.get_path().glob("*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            yield Path(json.loads(path.read_bytes())["state"])


def _is_locked(state: Path) -> bool:
    """Return True if a daemon uses the state directory, or if that cannot be found out."""
    try:
        with _locked(state):
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def _locked(state: Path) -> Iterator[None]:
    """Hold the lock of a state directory. Raises OSError if a daemon holds it."""
    with disk.closing(os.open(state / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def describe_all() -> list[MountJson]:
    """Return all names: the mounted ones, and those without a daemon.

    A daemon that was killed leaves its mountpoint behind, and counts as none. A name may be mounted with one state directory, and have
    another one that is not.
    """
    unmounted = list_unmounted()
    dead = {str(one.state) for one in unmounted} | {None}
    mounted: list[MountJson] = [
        {"name": one.name, "mountpoint": str(one.mountpoint), "state": "", "mounted": True, "has_data": True, "what": "mounted",
         "mount_command": ""}
        for one in list_mounts() if one.load_registered("state") not in dead
    ]  # fmt: skip
    return mounted + [
        {"name": one.name, "mountpoint": "" if one.record is None else str(one.record.mountpoint), "state": str(one.state),
         "mounted": False, "has_data": one.has_data, "what": one.describe(), "mount_command": one.mount_command}
        for one in unmounted
    ]  # fmt: skip


def delete(name: str, *, yes: bool) -> UnmountedName:
    """Delete all that an unmounted name, or one with this state directory, holds on this node.

    The PFS is not touched. Raises ClientError.
    """
    if any(one.name == name for one in list_mounts()):
        raise CommandFailed(f"{name} is mounted", remedy="umount it first")
    found = [one for one in list_unmounted() if name in (one.name, str(one.state))]
    if not found:
        known = ", ".join(one.name for one in list_unmounted()) or "none"
        raise UsageError(f"there is no unmounted name {name}", remedy=f"unmounted names: {known}")
    if len(found) > 1:
        raise UsageError(
            f"{name} has several state directories: " + ", ".join(str(one.state) for one in found), remedy="give one of them instead"
        )
    one = found[0]
    if one.has_data and not yes:
        raise CommandFailed(f"{name} still holds data: {one.describe()}", remedy="give --yes to lose it, or go on: " + one.mount_command)
    try:
        with _locked(one.state):
            _delete_tiers(one)
            _delete_state(one.state)
    except OSError as failure:
        if failure.errno == errno.EWOULDBLOCK:
            raise CommandFailed(f"a daemon of {one.name} runs", remedy="umount it first") from failure
        what = f"{failure.filename or one.state}: {os.strerror(failure.errno or 0)}"
        raise CommandFailed(what, remedy="run it as root, or as its owner") from failure
    with contextlib.suppress(OSError):
        if all(mounted.name != one.name for mounted in list_mounts()):
            runtime_dir.registry_path(one.name).unlink(missing_ok=True)
    return one


def _delete_tiers(one: UnmountedName) -> None:
    """Delete the copies in RAM and on NVMe, and take the guard of the mountpoint away. Raises OSError."""
    ram = one.state / "ram"
    if ram.is_symlink():
        shutil.rmtree(os.readlink(ram), ignore_errors=True)
        ram.unlink()
    elif ram.is_mount():
        subprocess.run(["umount", str(ram)], check=False)
    with contextlib.suppress(FileNotFoundError):
        ram.rmdir()
    if one.record is not None:
        if one.record.nvme is not None:
            shutil.rmtree(one.record.nvme / f"contents-{one.record.instance}", ignore_errors=True)
        if one.record.guard is not None:
            mountpoint_guard.clear(one.record.guard)


def _delete_state(state: Path) -> None:
    for name in OURS:
        (state / name).unlink(missing_ok=True)
    shutil.rmtree(state / event_log.DIRECTORY, ignore_errors=True)
    with contextlib.suppress(OSError):
        state.rmdir()  # Other files in it are not ours.
