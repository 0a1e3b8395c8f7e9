"""Owns where contents lie on this node: one directory per tier, with a file `contents-<catalog>/<id in 16 hex digits>` for each content.

The root of a tier also holds `tier-id`, a uuid: whoever finds another one there than the catalog remembers knows that what was in
the tier is lost. Everything is done relative to a descriptor of `contents`, which is opened at first use and never follows a symlink.
The PFS may hang: ask its place for anything only in a thread of its own.
If we die here: a file without a row in the catalog is left over, and the drop flow finds it.

Owns the moment in which a process takes the tiers that it finds for its own: whether they are those that the catalog remembers.

Whoever puts contents into tiers adopts them first, so that what a new RAM holds is never taken for what the former one held. Another RAM
than before is a reboot: what was there is gone. Another directory for NVMe may only be one whose device is not mounted: as long as it
is needed nothing is forgotten, and we go on without it. The PFS is not touched: it may hang.
If we die here: a tier was adopted in one transaction or not at all.
"""

import contextlib
import errno
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptfs import disk, limits, procfs
from ckptfs.catalog import copies, summary
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import NoSpace, TierUnavailable
from ckptfs.model import Tier
from ckptfs.tiers import space
from ckptfs.tiers.space import Capacity

disk.declare_labels("place:create", "place:open", "place:remove", "place:rename")
PFS_WORK_DIRECTORY = ".ckptfs"
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_RESERVATIONS: Mapping[Tier, int] = {}
_PFS_CAPACITY = {Tier.PFS: Capacity(limits.FILE_BYTES_MAX, limits.FILE_BYTES_MAX)}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def file_name(content: int) -> str:
    """The name of a content's file."""
    return f"{content:016x}"


class TierStorage:
    """One tier's directory. Methods raise OSError as the filesystem below does."""

    def __init__(self, tier: Tier, root: Path, *, budget_bytes: int | None = None, instance: str = "") -> None:
        """`budget_bytes` bounds what we use where the filesystem below is larger. `instance` sets our contents apart from those of
        other catalogs, in a root that several of them may share.
        """
        self.tier = tier
        self.root = root
        self._contents = f"contents-{instance}" if instance else "contents"
        self._budget_bytes = budget_bytes
        self._directory = -1
        self._measured_used = (float("-inf"), 0)

    @property
    def directory(self) -> int:
        """A descriptor of our contents' directory. On the PFS it is there only once `uuid` was asked: the mountpoint of a PFS that
        is not mounted must not be filled.
        """
        if self._directory < 0 and self.tier is Tier.PFS and not (self.root / "tier-id").exists():
            raise TierUnavailable(f"{self.root.parent} has no work area of ours", remedy="mount the filesystem that belongs there")
        return self._open_directory()

    def _open_directory(self) -> int:
        """The same, made with the root when it is not there."""
        if self._directory < 0:
            self.root.mkdir(mode=0o700, parents=self.tier is not Tier.PFS, exist_ok=True)
            root = os.open(self.root, _DIRECTORY)
            try:
                if os.fstat(root).st_uid != os.geteuid():
                    raise TierUnavailable(f"{self.root} belongs to another user", remedy="remove it, it is ours to make")
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._contents, 0o700, dir_fd=root)
                self._directory = os.open(self._contents, _DIRECTORY, dir_fd=root)
            finally:
                os.close(root)
        return self._directory

    @property
    def uuid(self) -> str:
        """What identifies this root; written when there is none. Two processes that ask at once get the same."""
        path = self.root / "tier-id"
        self._open_directory()
        with contextlib.suppress(FileNotFoundError):
            if text := path.read_text(encoding="ascii", errors="replace").strip():
                return text
        temporary = self.root / f"tier-id.{uuid.uuid4().hex}"
        temporary.write_text(uuid.uuid4().hex + "\n", encoding="ascii")
        _fsync_path(temporary)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError as failure:
            if failure.errno not in _NO_LINKS:
                raise
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        _fsync_path(self.root)
        return path.read_text(encoding="ascii", errors="replace").strip()

    def create(self, content: int, flags: int = os.O_RDWR) -> int:
        """A descriptor of a new, empty file for `content`, whose id is the caller's alone.

        A process that dies before its commit leaves a file, and its id is given out once more: what is there then is nobody's.
        """
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            return disk.open_file("place:create", file_name(content), flags, 0o600, dir_fd=self.directory)
        except FileExistsError:
            self.remove(content)
            return disk.open_file("place:create", file_name(content), flags, 0o600, dir_fd=self.directory)

    def open(self, content: int, flags: int = os.O_RDONLY) -> int:
        """A descriptor of the file of `content`. Raises ENOENT; EWOULDBLOCK for a writer with O_NONBLOCK while the mover has a lease."""
        return disk.open_file("place:open", file_name(content), flags | os.O_NOFOLLOW, dir_fd=self.directory)

    def remove(self, content: int) -> None:
        """Delete the file of `content`, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            disk.unlink("place:remove", file_name(content), dir_fd=self.directory)

    def rename(self, reserved_id: int, content: int) -> None:
        """The file that was made under the id `reserved` is that of `content` now; one that was there goes, its readers keep it."""
        disk.rename("place:rename", file_name(reserved_id), file_name(content), old_fd=self.directory, new_fd=self.directory)

    def link(self, content: int, other: int) -> bool:
        """Give the file of `content` the name of `other` as well; False: it is not here."""
        try:
            os.link(file_name(content), file_name(other), src_dir_fd=self.directory, dst_dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def detach(self, content: int) -> int:
        """Take the name of the file of `content` away, at once however large it is; its room is free when the descriptor that is given is
        closed. -1 when there is no such file.
        """
        try:
            fd = os.open(file_name(content), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)
        except FileNotFoundError:
            return -1
        try:
            self.remove(content)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def exists(self, content: int) -> bool:
        """Whether there is a file for `content`."""
        return self.stat(content) is not None

    def stat(self, content: int) -> os.stat_result | None:
        """What the filesystem below says of the file of `content`; None without one."""
        try:
            return os.stat(file_name(content), dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def contents(self) -> Iterator[int]:
        """The contents that have a file here, in no order. Other files are none of ours and are left out."""
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if len(entry.name) == 16 and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(ValueError):
                        yield int(entry.name, 16)

    def fsync_directory(self) -> None:
        """Make the names of the files here survive a power cut."""
        os.fsync(self.directory)

    def get_capacity(self) -> Capacity:
        """The budget, and what is free of it now."""
        figures = os.fstatvfs(self.directory)
        total, free = figures.f_blocks * figures.f_frsize, figures.f_bavail * figures.f_frsize
        if self._budget_bytes is not None and self._budget_bytes < total:
            total = self._budget_bytes
            free = max(0, min(free, total - self._measure_used()))
        measured_used = total - free
        if self.tier is Tier.RAM:
            memory, available = procfs.get_memory()
            free = max(0, min(free, available - int(limits.MEMORY_RESERVE_RATIO * memory)))
        return Capacity(total, free, measured_used)

    def _measure_used(self) -> int:
        """Bytes in our files, not older than `limits.USED_AGE_S`."""
        measured_s, used = self._measured_used
        if time.monotonic() - measured_s > limits.USED_AGE_S:
            used = 0
            for content in self.contents():
                found = self.stat(content)
                used += found.st_blocks * 512 if found else 0
            self._measured_used = (time.monotonic(), used)
        return used

    def close(self) -> None:
        """Give the descriptor back."""
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1


class Tiers(Mapping[Tier, TierStorage]):
    """The tiers that are configured, by name. RAM is always there."""

    def __init__(self, tiers: Mapping[Tier, TierStorage], ram_high: float) -> None:
        self._tiers = dict(tiers)
        self._ram_high = ram_high
        self._capacities: tuple[float, dict[Tier, Capacity]] = (float("-inf"), {})

    @classmethod
    def from_config(cls, config: Config, instance: str = "") -> "Tiers":
        """The places that `config` names; RAM and NVMe are opened, the PFS is touched at its first use only.

        `instance` is the catalog's: other mounts and nodes may use the same directories on NVMe and on the PFS, with ids of their own.
        Raises OSError when one of the first two cannot be used.
        """
        ram = Path(os.path.realpath(config.state / "ram"))  # an ordinary user's is a link into /dev/shm
        tiers = {Tier.RAM: TierStorage(Tier.RAM, ram, budget_bytes=config.ram_bytes)}
        if config.nvme is not None:
            tiers[Tier.NVME] = TierStorage(Tier.NVME, config.nvme, budget_bytes=config.nvme_bytes, instance=instance)
        for storage in tiers.values():
            _ = storage.uuid
        if config.pfs is not None:
            tiers[Tier.PFS] = TierStorage(Tier.PFS, config.pfs / PFS_WORK_DIRECTORY, instance=instance)
        return cls(tiers, config.ram_high)

    def exclude(self, tier: Tier) -> None:
        """Go on without a tier, as if it were not configured."""
        self._tiers.pop(tier).close()

    def __getitem__(self, tier: Tier) -> TierStorage:
        return self._tiers[tier]

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    def choose_tier(self, expected_bytes: int = 0, reserved_bytes: Mapping[Tier, int] = _NO_RESERVATIONS) -> Tier:
        """Where a new content of about `expected_bytes` goes (0: unknown). Raises NoRoom when every tier is full (P10).

        `promised`: what writers are still expected to write in a tier. The PFS counts as having room: whoever creates there finds
        out, in a thread that may hang.
        """
        capacities = self.get_local_capacities()
        if reserved_bytes:
            capacities = {tier: space.subtract_reserved(room, reserved_bytes.get(tier, 0)) for tier, room in capacities.items()}
        if Tier.PFS in self._tiers:
            capacities = capacities | _PFS_CAPACITY
        tier = space.choose_tier(capacities, expected_bytes, self._ram_high)
        if tier is None:
            raise NoSpace("every tier is full", remedy="remove files, or configure a larger tier")
        return tier

    def get_local_capacities(self) -> dict[Tier, Capacity]:
        """The rooms of RAM and NVMe, not older than `limits.CAPACITY_AGE_S`."""
        asked_s, capacities = self._capacities
        now_s = time.monotonic()
        if now_s - asked_s > limits.CAPACITY_AGE_S:
            capacities = {tier: storage.get_capacity() for tier, storage in self._tiers.items() if tier is not Tier.PFS}
            self._capacities = (now_s, capacities)
        return capacities

    def get_capacity(self, tier: Tier) -> Capacity:
        """The room of RAM or NVMe, not older than `limits.CAPACITY_AGE_S`."""
        return self.get_local_capacities()[tier]

    def link(self, content: int, other: int) -> bool:
        """Give the file of `content` in RAM or NVMe the name of `other` as well; whether it was there."""
        is_linked = False
        for tier in (Tier.RAM, Tier.NVME):
            if tier in self:
                is_linked = self[tier].link(content, other) or is_linked
        return is_linked

    def list_next(self, tier: Tier) -> Iterator[Tier]:
        """The tiers that a content can move on to when `tier` is full, in order."""
        order = space.ORDER
        yield from (other for other in order[order.index(tier) + 1 :] if other in self._tiers)

    def close(self) -> None:
        """Give all descriptors back."""
        for storage in self._tiers.values():
            storage.close()


def _fsync_path(path: Path) -> None:
    """fsync a file or directory; filesystems that cannot are left alone."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as failure:
        if failure.errno not in {errno.EINVAL, errno.EROFS}:
            raise
    finally:
        os.close(fd)


log = logging.getLogger(__name__)

GIVEN_UP = "given-up"
"""A file of this name in NVMe's directory says that what was on the former one will not come back."""


def adopt_tiers(db: Database, tiers: Tiers) -> None:
    """Remember the uuid of RAM and NVMe; where it is another one than before, forget all copies that were there, or leave NVMe out."""
    for tier in (Tier.RAM, Tier.NVME):
        if tier not in tiers:
            continue
        if tier is Tier.NVME and (only_copies := _count_only_copies(db, tiers[tier])):
            _exclude_nvme(db, tiers, only_copies)
            continue
        lost = copies.set_tier_uuid(db, tier, tiers[tier].uuid)
        if lost:
            log.warning("what was in %s is gone, this is another one than before; it held %d contents", tier, lost)


def _count_only_copies(db: Database, storage: TierStorage) -> int:
    """How many files would be lost by taking this directory for the tier's new one."""
    if copies.get_tier_uuid(db, storage.tier) in (None, storage.uuid) or (storage.root / GIVEN_UP).exists():
        return 0
    return copies.count_only_copies(db, storage.tier)


def _exclude_nvme(db: Database, tiers: Tiers, only_copies: int) -> None:
    root = tiers[Tier.NVME].root
    error = f"{root} is not the directory that this catalog knows, and {only_copies} files lie only there"
    remedy = f"mount the device that belongs at {root} and start again; if it will never come back, make the file {root / GIVEN_UP}"
    log.error("%s; going on without it (%s)", error, remedy)
    summary.set_report(db, f"trouble:{Tier.NVME}", {"what": error, "path": str(root), "remedy": remedy})
    tiers.exclude(Tier.NVME)
