"""The files of contents in the tiers of this node: `contents-<catalog>/<id in 16 hex digits>` in the root of each tier.

A root also holds `tier-id`, a uuid. If it differs from the one in the catalog, the tier was replaced: a reboot replaces the RAM tier,
and its copies are lost. NVMe with another uuid may only lack its device: while files depend on it, nothing is forgotten and the node
runs without NVMe. `adopt_tiers` decides this before contents are stored, so that copies of an old RAM tier never count for a new one.

Invariants:
- All access is relative to a descriptor of the directory of contents, opened at first use; symlinks are not followed.
- Calls on the PFS tier may hang: make them only in a thread of their own.

Crash safety: a file without a row may remain; the reclaim flow removes it. A tier is adopted in one transaction.
"""

import contextlib
import errno
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ckptfs import disk, limits, procfs
from ckptfs.catalog import copies, summary
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import NoSpace, TierUnavailable
from ckptfs.model import Tier, file_name
from ckptfs.tiers import pfs_identity, prepared, space
from ckptfs.tiers.prepared import PreparedFile, PreparedFiles
from ckptfs.tiers.space import Capacity

log = logging.getLogger(__name__)
disk.declare_labels("place:create", "place:open", "place:remove", "place:rename", "place:root")
PFS_WORK_DIRECTORY = ".ckptfs"
GIVEN_UP = "given-up"
"""A file of this name in the NVMe directory confirms that the previous device will not come back."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_RESERVATIONS: Mapping[Tier, int] = {}
_PFS_CAPACITY = {Tier.PFS: Capacity(limits.FILE_BYTES_MAX, limits.FILE_BYTES_MAX)}
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TierStorage:
    """The directory of one tier. Methods raise OSError of its filesystem."""

    def __init__(
        self, tier: Tier, root: Path, *, budget_bytes: int | None = None, instance: str = "",
        get_pfs_identity: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        """`budget_bytes` bounds our use of the filesystem, `instance` separates catalogs in one root.

        `get_pfs_identity` returns the identity of the PFS that the catalog belongs to; None if it is not known yet.
        """
        self._get_pfs_identity = get_pfs_identity
        self.tier = tier
        self.root = root
        self.is_memory = tier is Tier.RAM or procfs.get_filesystem_type(root) in procfs.MEMORY_FILESYSTEMS
        """Whether the files stay in memory: their pages cannot be reclaimed from the program that wrote them."""
        self._contents = f"contents-{instance}" if instance else "contents"
        self._budget_bytes = budget_bytes
        self._directory = -1
        self._measured_used = (float("-inf"), 0)

    @property
    def directory(self) -> int:
        """A descriptor of the directory of contents.

        On the PFS it exists only after `uuid` was read: the mountpoint of a PFS that is not mounted must not be filled.
        """
        if self._directory < 0 and self.tier is Tier.PFS:
            self._require_mark()
        return self._open_directory()

    def _require_mark(self) -> None:
        with disk.closing(pfs_identity.open_directory("place:root", self.root.parent)) as root_fd:
            if not pfs_identity.read_mark(root_fd):
                raise TierUnavailable(f"{self.root.parent} has no ckptfs work area", remedy="mount the filesystem that belongs there")
            pfs_identity.require_same(root_fd, self.root.parent, self._get_pfs_identity())

    def _open_directory(self) -> int:
        if self._directory < 0:
            if self.tier is not Tier.PFS:
                self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            root = self._open_root()
            try:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._contents, 0o700, dir_fd=root)
                self._directory = os.open(self._contents, _DIRECTORY, dir_fd=root)
            finally:
                os.close(root)
        return self._directory

    def _open_root(self) -> int:
        try:
            root = os.open(self.root, _DIRECTORY)
        except PermissionError:
            root = -1
        if root >= 0 and os.fstat(root).st_uid == os.geteuid():
            return root
        if root >= 0:
            os.close(root)
        remedy = "let root use the directory" if self.tier is Tier.PFS else "remove it; ckptfs creates it"
        raise TierUnavailable(f"{self.root} belongs to another user", remedy=remedy)

    @property
    def uuid(self) -> str:
        """The identity of this root, created if missing. Concurrent callers get the same one."""
        if self.tier is Tier.PFS:
            with disk.closing(pfs_identity.open_directory("place:root", self.root.parent)) as root_fd:
                return pfs_identity.make_mark(root_fd)
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
        """Create an empty file for `content` and return its descriptor.

        A process that died before its commit may have left a file under an id that is now used again: it is replaced.
        """
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            return disk.open_file("place:create", file_name(content), flags, 0o600, dir_fd=self.directory)
        except FileExistsError:
            self.remove(content)
            return disk.open_file("place:create", file_name(content), flags, 0o600, dir_fd=self.directory)

    def open(self, content: int, flags: int = os.O_RDONLY) -> int:
        """Open the file of `content`. Raises ENOENT.

        For a writer with O_NONBLOCK, raises EWOULDBLOCK while the mover holds a lease.
        """
        return disk.open_file("place:open", file_name(content), flags | os.O_NOFOLLOW, dir_fd=self.directory)

    def remove(self, content: int) -> None:
        """Delete the file of `content` if it exists."""
        with contextlib.suppress(FileNotFoundError):
            disk.unlink("place:remove", file_name(content), dir_fd=self.directory)

    def rename(self, reserved_id: int, content: int) -> None:
        """Rename a file that was created under a reserved id. Readers of a replaced file keep it."""
        disk.rename("place:rename", file_name(reserved_id), file_name(content), old_fd=self.directory, new_fd=self.directory)

    def link(self, content: int, other: int) -> bool:
        """Give the file of `content` the name of `other` as well. Return False if it does not exist."""
        try:
            os.link(
                file_name(content),
                file_name(other),
                src_dir_fd=self.directory,
                dst_dir_fd=self.directory,
                follow_symlinks=False,
            )
        except FileNotFoundError:
            return False
        return True

    def detach(self, content: int) -> int:
        """Unlink the file of `content` and return a descriptor; -1 without such a file.

        This is fast for files of any size: the space is freed when the descriptor is closed.
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
        return self.stat(content) is not None

    def stat(self, content: int) -> os.stat_result | None:
        """Return the status of the file of `content`; None without one."""
        try:
            return os.stat(file_name(content), dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def contents(self) -> Iterator[int]:
        """Yield the ids of contents with a file, in no order. Other files are skipped."""
        with os.scandir(self.directory) as entries:
            for entry in entries:
                if len(entry.name) == 16 and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(ValueError):
                        yield int(entry.name, 16)

    def fsync_directory(self) -> None:
        """Make the names of the files durable."""
        os.fsync(self.directory)

    def get_capacity(self) -> Capacity:
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
        """Return the bytes in our files, at most `limits.USED_AGE_S` old."""
        measured_s, used = self._measured_used
        if time.monotonic() - measured_s > limits.USED_AGE_S:
            used = prepared.measure_bytes(self.root) if self.tier is Tier.RAM else 0
            for content in self.contents():
                found = self.stat(content)
                used += found.st_blocks * 512 if found else 0
            self._measured_used = (time.monotonic(), used)
        return used

    def close(self) -> None:
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1


class Tiers(Mapping[Tier, TierStorage]):
    """The configured tiers by name. RAM always exists."""

    def __init__(self, tiers: Mapping[Tier, TierStorage], ram_high: float) -> None:
        self._tiers = dict(tiers)
        self._ram_high = ram_high
        self._capacities: tuple[float, dict[Tier, Capacity]] = (float("-inf"), {})
        self.prepared = PreparedFiles(self._tiers[Tier.RAM])

    @classmethod
    def from_config(cls, config: Config, instance: str = "", get_pfs_identity: Callable[[], str | None] = lambda: None) -> "Tiers":
        """Open RAM and NVMe; the PFS is accessed at first use only. Raises OSError if either cannot be used.

        `instance` identifies the catalog: other mounts and nodes may use the same directories on NVMe and on the PFS. `get_pfs_identity`
        is that of `TierStorage`.
        """
        ram = Path(os.path.realpath(config.state / "ram"))  # for ordinary users a link into /dev/shm
        tiers = {Tier.RAM: TierStorage(Tier.RAM, ram, budget_bytes=config.ram_bytes)}
        if config.nvme is not None:
            tiers[Tier.NVME] = TierStorage(Tier.NVME, config.nvme, budget_bytes=config.nvme_bytes, instance=instance)
        for storage in tiers.values():
            _ = storage.uuid
        if config.pfs is not None:
            tiers[Tier.PFS] = TierStorage(Tier.PFS, config.pfs / PFS_WORK_DIRECTORY, instance=instance, get_pfs_identity=get_pfs_identity)
        return cls(tiers, config.ram_high)

    def exclude(self, tier: Tier) -> None:
        """Continue without a tier, as if it were not configured."""
        self._tiers.pop(tier).close()

    def __getitem__(self, tier: Tier) -> TierStorage:
        return self._tiers[tier]

    def __iter__(self) -> Iterator[Tier]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    def choose_tier(
        self, expected_bytes: int = 0, reserved_bytes: Mapping[Tier, int] = _NO_RESERVATIONS, taking: PreparedFile | None = None
    ) -> Tier:
        """Return the tier of a new content. Raises NoSpace if every tier is full (P10).

        `expected_bytes` 0 means unknown; `reserved_bytes` are still expected from other writers; `taking` is the prepared file that the
        content will take in RAM. If other prepared files are what keeps the content out of RAM, they are given back. The PFS counts as
        having space: a create there finds out, in a thread that may hang.
        """
        tier = self._choose_tier(expected_bytes, reserved_bytes, taking)
        if tier is not Tier.RAM:
            own_bytes = reserved_bytes.get(Tier.RAM, 0)
            if self.give_back_prepared(lambda ram: space.fits(ram, expected_bytes, self._ram_high), own_bytes, taking):
                tier = self._choose_tier(expected_bytes, reserved_bytes, taking)
        if tier is None:
            raise NoSpace("every tier is full", remedy="remove files, or configure a larger tier")
        return tier

    def _choose_tier(self, expected_bytes: int, reserved_bytes: Mapping[Tier, int], taking: PreparedFile | None) -> Tier | None:
        capacities = self.get_local_capacities()
        if taking is not None:
            capacities = capacities | {Tier.RAM: self.get_capacity(Tier.RAM, taking)}
        if reserved_bytes:
            capacities = {tier: space.subtract_reserved(own, reserved_bytes.get(tier, 0)) for tier, own in capacities.items()}
        if Tier.PFS in self._tiers:
            capacities = capacities | _PFS_CAPACITY
        return space.choose_tier(capacities, expected_bytes, self._ram_high)

    def give_back_prepared(self, is_enough: Callable[[Capacity], bool], reserved_bytes: int, taking: PreparedFile | None = None) -> bool:
        """Give prepared files back, but for `taking`, until `is_enough` of the capacity of RAM. Return False if that cannot be reached."""
        capacity = space.subtract_reserved(self.get_capacity(Tier.RAM, taking), reserved_bytes)
        others = sorted((file for file in self.prepared.list_files() if file != taking), reverse=True)
        if not others or not is_enough(space.add_free(capacity, sum(file.size_bytes for file in others))):
            return False
        for file in others:
            if is_enough(capacity):
                break
            if self.prepared.remove(file):
                capacity = space.add_free(capacity, file.size_bytes)
        self._capacities = (float("-inf"), {})
        return is_enough(capacity)

    def choose_disk_tier(self, expected_bytes: int, reserved_bytes: Mapping[Tier, int] = _NO_RESERVATIONS) -> Tier | None:
        """Return the tier on disk where a program below a memory limit may write by passthrough. Returns None if there is none.

        The pages of such a file are charged to the program as well, but the kernel writes them out and reclaims them.
        """
        tier = Tier.NVME
        if tier not in self._tiers or self._tiers[tier].is_memory:
            return None
        needs_buffered_path = self.needs_buffered_path(tier, expected_bytes or None, reserved_bytes.get(tier, 0))
        return None if needs_buffered_path else tier

    def needs_buffered_path(
        self, tier: Tier, expected_bytes: int | None, reserved_bytes: int = 0, taking: PreparedFile | None = None
    ) -> bool:
        """Return True if the tier is so full that writes must pass through the mount process (P10).

        If prepared files but `taking` are what fills the RAM tier, they are given back.
        """
        if tier is Tier.PFS:
            return False
        decide = space.needs_buffered_path if any(self.list_next(tier)) else space.needs_buffered_path_in_last_tier
        if not decide(space.subtract_reserved(self.get_capacity(tier, taking), reserved_bytes), expected_bytes):
            return False
        if tier is not Tier.RAM:
            return True
        return not self.give_back_prepared(lambda ram: not decide(ram, expected_bytes), reserved_bytes, taking)

    def get_local_capacities(self) -> dict[Tier, Capacity]:
        """Return the capacities of RAM and NVMe, at most `limits.CAPACITY_AGE_S` old."""
        asked_s, capacities = self._capacities
        now_s = time.monotonic()
        if now_s - asked_s > limits.CAPACITY_AGE_S:
            capacities = {tier: storage.get_capacity() for tier, storage in self._tiers.items() if tier is not Tier.PFS}
            self._capacities = (now_s, capacities)
        return capacities

    def get_capacity(self, tier: Tier, taking: PreparedFile | None = None) -> Capacity:
        """Return the capacity of RAM or NVMe. For a content that is `taking` a prepared file, the bytes of that file are free."""
        capacity = self.get_local_capacities()[tier]
        return capacity if taking is None or tier is not Tier.RAM else space.add_free(capacity, taking.size_bytes)

    def link(self, content: int, other: int) -> bool:
        """Give the files of `content` in RAM and NVMe the name of `other` too. Return False if there is none."""
        is_linked = False
        for tier in (Tier.RAM, Tier.NVME):
            if tier in self:
                is_linked = self[tier].link(content, other) or is_linked
        return is_linked

    def list_next(self, tier: Tier) -> Iterator[Tier]:
        """Return the tiers that a content can move to when `tier` is full, in order."""
        order = space.ORDER
        yield from (other for other in order[order.index(tier) + 1 :] if other in self._tiers)

    def close(self) -> None:
        self.prepared.close()
        for storage in self._tiers.values():
            storage.close()


def _fsync_path(path: Path) -> None:
    """fsync a file or directory, if its filesystem can."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as failure:
        if failure.errno not in {errno.EINVAL, errno.EROFS}:
            raise
    finally:
        os.close(fd)


def adopt_tiers(db: Database, tiers: Tiers) -> None:
    """Record the uuids of RAM and NVMe.

    If a uuid is new, forget all copies in that tier; exclude NVMe if files depend on the previous one.
    """
    for tier in (Tier.RAM, Tier.NVME):
        if tier not in tiers:
            continue
        if tier is Tier.NVME and (only_copies := _count_only_copies(db, tiers[tier])):
            _exclude_nvme(db, tiers, only_copies)
            continue
        lost = copies.set_tier_uuid(db, tier, tiers[tier].uuid)
        if lost:
            log.warning("%s: the tier was replaced; %d copies in the previous one are lost", tier, lost)


def _count_only_copies(db: Database, storage: TierStorage) -> int:
    """Return how many files would be lost by adopting this root."""
    if copies.get_tier_uuid(db, storage.tier) in (None, storage.uuid) or (storage.root / GIVEN_UP).exists():
        return 0
    return copies.count_only_copies(db, storage.tier)


def _exclude_nvme(db: Database, tiers: Tiers, only_copies: int) -> None:
    root = tiers[Tier.NVME].root
    error = f"{root} is not the directory that this catalog knows, and {only_copies} files exist only there"
    remedy = f"mount the device that belongs at {root} and start again; if it will never come back, create the file {root / GIVEN_UP}"
    log.error("nvme: %s; the node runs without it (%s)", error, remedy)
    summary.set_report(db, f"trouble:{Tier.NVME}", {"what": error, "path": str(root), "remedy": remedy})
    tiers.exclude(Tier.NVME)
