"""The files of contents: `contents-<catalog>/<id in 16 hex digits>` in the root of each tier.

A root also holds `tier-id`, a uuid. If it differs from the one in the catalog, the tier was replaced: a reboot replaces the RAM tier,
and its copies are lost. NVMe with another uuid may only lack its device: while files depend on it, nothing is forgotten and the node
runs without NVMe. `adopt_tiers` decides this before contents are stored, so that copies of an old RAM tier never count for a new one.

Invariants:
- All access is relative to a descriptor of the directory of contents, opened at first use; symlinks are not followed.
- Calls on the PFS tier may hang: make them only in a thread of their own.

Crash safety: a file without a row may remain; the reclaim step removes it. A tier is adopted in one transaction.
"""

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path

from ckptfs import digest, disk, libc, limits, procfs
from ckptfs.catalog import copies, summary
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import NoSpace, TierUnavailable
from ckptfs.model import LOCAL_TIERS, Tier, file_name
from ckptfs.quantities import format_count
from ckptfs.tiers import health, prepared, reflink, space, transfer
from ckptfs.tiers.growth import GrowthTable, bound_allocation_ahead
from ckptfs.tiers.prepared import PreparedFile, PreparedFiles
from ckptfs.tiers.space import Capacity
from ckptfs.tiers.tier_root import TierRoot

log = logging.getLogger(__name__)
disk.declare_labels("health:write", "tier:create", "tier:reserve", "tier:open", "tier:remove", "tier:rename", "tier:shared")
PFS_WORK_DIRECTORY = ".ckptfs"
GIVEN_UP = "given-up"
"""A file of this name in the NVMe directory confirms that the previous device will not come back."""
_SHARED = "shared-bytes"
CATALOG_RESERVE_BYTES, CATALOG_RESERVE_RATIO = 64 * limits.MIB, 0.125
"""What contents leave free on the disk of the catalog, at most that share: without room there, nothing can be deleted either."""
_NO_RESERVATIONS: Mapping[Tier, int] = {}
_PFS_CAPACITY = Capacity(limits.OFFSET_MAX, limits.OFFSET_MAX)


class TierStorage(TierRoot):
    """The directory of one tier. Methods raise OSError of its filesystem."""

    def __init__(
        self, tier: Tier, root: Path, *, budget_bytes: int | None = None, instance: str = "",
        get_pfs_identity: Callable[[], str | None] = lambda: None, growth_table: Path | None = None,
    ) -> None:  # fmt: skip
        """`budget_bytes` bounds our use of the filesystem; the other values are those of `TierRoot`.

        `growth_table`: the file in which all processes record what they write (default: one in the root).
        """
        super().__init__(tier, root, instance=instance, get_pfs_identity=get_pfs_identity)
        self.is_memory = tier is Tier.RAM or procfs.get_filesystem_type(root) in procfs.MEMORY_FILESYSTEMS
        """Whether the files stay in memory: their pages cannot be reclaimed from the program that wrote them."""
        self._budget_bytes = budget_bytes
        self._measured_used = (float("-inf"), 0, 0)
        self._measuring_s = 0.0
        self._growth = GrowthTable(growth_table or root / "growth")
        self._state = growth_table.parent if growth_table is not None else None
        self.shares_filesystem = False
        """Whether the budget is smaller than the filesystem, which then does not enforce it."""
        self._can_share_blocks: bool | None = None

    def probe(self) -> None:
        """Raise the error of a disk that fails, or takes no file. May hang."""
        if self._failure is None:
            with self._recording_failure():
                os.fstat(self.directory)  # XFS answers EIO after a shutdown.
                self._measure_capacity()
        if self._failure is not None:
            with self._lock:
                self._failed_s = time.monotonic()
                self._reattach()
                if self._is_detached:
                    raise self._failure
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            with disk.closing(disk.open_file("health:write", "probe", flags, dir_fd=self._directory)) as fd:
                os.pwrite(fd, bytes(limits.STATFS_UNIT_BYTES), 0)
                os.fsync(fd)
            with contextlib.suppress(FileNotFoundError):  # Another process probes, too.
                os.unlink("probe", dir_fd=self._directory)
        except OSError as failure:
            if failure.errno not in health.FULL_ERRNOS:
                self.record_failure(failure)
                raise
        self.record_success()

    @contextlib.contextmanager
    def _recording_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as failure:
            self.record_failure(failure)
            raise

    def create(self, content: int, flags: int = os.O_RDWR) -> int:
        """Create and open an empty file for `content`. It replaces the file of a process that died."""
        flags |= os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with self._recording_failure():
            try:
                fd = disk.open_file("tier:create", file_name(content), flags, 0o600, dir_fd=self.directory)
            except FileExistsError:
                self.remove(content)
                fd = disk.open_file("tier:create", file_name(content), flags, 0o600, dir_fd=self.directory)
            except FileNotFoundError:
                self._require_directory()
                raise
        self.record_success()
        if self.shares_filesystem:
            bound_allocation_ahead(fd)
        return fd

    def open(self, content: int, flags: int = os.O_RDONLY) -> int:
        """Open the file of `content`. Raises ENOENT, and EWOULDBLOCK as open(2) under a lease."""
        with self._recording_failure():
            return disk.open_file("tier:open", file_name(content), flags | os.O_NOFOLLOW, dir_fd=self.directory)

    def remove(self, content: int) -> None:
        """Delete the file of `content` if it exists."""
        with self._recording_failure(), contextlib.suppress(FileNotFoundError):
            disk.unlink("tier:remove", file_name(content), dir_fd=self.directory)

    def rename(self, reserved_id: int, content: int) -> None:
        """Rename a file that was created under a reserved id. Readers of a replaced file keep it."""
        disk.rename("tier:rename", file_name(reserved_id), file_name(content), old_fd=self.directory, new_fd=self.directory)

    def link(self, content: int, other: int) -> bool:
        """Give the file of `content` the name of `other` as well. Return False if it does not exist."""
        try:
            os.link(file_name(content), file_name(other), src_dir_fd=self.directory, dst_dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def detach(self, content: int) -> int:
        """Unlink the file of `content`; return a descriptor whose close frees it, -1 without a file."""
        try:
            fd = os.open(file_name(content), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.directory)
        except FileNotFoundError:
            return -1
        with disk.closing_on_failure(fd):
            self.remove(content)
        return fd

    def exists(self, content: int) -> bool:
        return self.stat(content) is not None

    def stat(self, content: int) -> os.stat_result | None:
        """Return the status of the file of `content`; None without one."""
        with self._recording_failure():
            try:
                return os.stat(file_name(content), dir_fd=self.directory, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def set_times(self, content: int, atime_ns: int | None, mtime_ns: int | None) -> os.stat_result:
        """Set the times of the file of `content`, of which None leaves one unchanged. Return its status."""
        name, directory = file_name(content), self.directory
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        times = (status.st_atime_ns if atime_ns is None else atime_ns, status.st_mtime_ns if mtime_ns is None else mtime_ns)
        os.utime(name, ns=times, dir_fd=directory, follow_symlinks=False)
        return os.stat(name, dir_fd=directory, follow_symlinks=False)

    def contents(self) -> Iterator[int]:
        """Yield the ids of contents with a file, in no order. Other files are skipped.

        Each listing has a descriptor of its own: they have a position, and on btrfs they do not see files made after they were opened.
        """
        own = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.directory)
        with disk.closing(own), os.scandir(own) as entries:
            for entry in entries:
                if len(entry.name) == 16 and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(ValueError):
                        yield int(entry.name, 16)

    @property
    def can_share_blocks(self) -> bool:
        """Return True if contents in this tier can share blocks; False if unknown now."""
        if self._can_share_blocks is None:
            with contextlib.suppress(OSError):
                self._can_share_blocks = reflink.is_possible_in(self.directory)
                log.debug("%s: contents %s share blocks", self.root, "can" if self._can_share_blocks else "cannot")
        return bool(self._can_share_blocks)

    def get_shared_bytes_of(self, content: int) -> int:
        """Return how many bytes a content shares with others: overwriting them needs that much space."""
        if self.can_share_blocks:
            with contextlib.suppress(OSError), disk.closing(self.open(content)) as fd:
                return reflink.count_shared(fd)
        return 0

    def record_shared_bytes(self, size: int) -> None:
        """Record for all processes how many bytes the filesystem does not store because contents share blocks."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with disk.closing(disk.open_file("tier:shared", _SHARED, flags, dir_fd=self.directory)) as fd:
            os.write(fd, b"%d" % size)

    def get_shared_bytes(self) -> int:
        """Return what `record_shared_bytes` recorded last; 0 if it did not."""
        try:
            with open(_SHARED, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, dir_fd=self.directory)) as file:
                return int(file.read(limits.STATFS_UNIT_BYTES) or b"0")
        except (OSError, ValueError):
            return 0

    def fsync_directory(self) -> None:
        """Make the names of the files durable."""
        os.fsync(self.directory)

    def persist(self, fd: int, label: str) -> None:
        """Make a file that was copied to a disk durable with its name. The next read comes from the disk."""
        if self.tier is not Tier.RAM:
            disk.act(f"{label}:fsync", os.fsync, fd)
            disk.act(f"{label}:directory", self.fsync_directory)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def get_capacity(self) -> Capacity:
        """Return the capacity. A disk that fails, or is read-only, has no space for new files."""
        try:
            return self._measure_capacity()
        except OSError as failure:
            self.record_failure(failure)
            return Capacity(0, 0, 0)

    def _require_directory(self) -> None:
        """Raise ESTALE if the directory of contents was removed: a create in it would meet ENOENT."""
        if os.fstat(self.directory).st_nlink == 0:
            raise OSError(errno.ESTALE, "its directory of contents was removed while ckptfs runs", str(self.root))

    @cached_property
    def _is_on_disk_of_catalog(self) -> bool:
        return self._state is not None and os.stat(self._state).st_dev == os.fstat(self.directory).st_dev

    def _read_capacity(self) -> tuple[int, int]:
        """Return the size of the filesystem and the bytes free, without what the catalog needs."""
        found = space.read_capacity(self.directory)
        reserve = int(min(CATALOG_RESERVE_BYTES, CATALOG_RESERVE_RATIO * found.total)) if self._is_on_disk_of_catalog else 0
        return found.total - reserve, max(0, found.free - reserve)

    def _measure_capacity(self) -> Capacity:
        self._require_directory()
        total, free = self._read_capacity()
        self.shares_filesystem = self._budget_bytes is not None and self._budget_bytes < total
        if self._budget_bytes is not None and self._budget_bytes < total:
            total = self._budget_bytes
            free = max(0, min(free, total - self._measure_used()))
        measured_used = total - free
        if self.tier is Tier.NVME and os.fstatvfs(self.directory).f_flag & os.ST_RDONLY:
            self.record_failure(OSError(errno.EROFS, os.strerror(errno.EROFS)))
            free = 0
        if self.tier is Tier.RAM:
            memory, available = procfs.get_memory()
            free = max(0, min(free, available - int(limits.MEMORY_RESERVE_RATIO * memory)))
        return Capacity(total, free, measured_used)

    @contextlib.contextmanager
    def growing(self, growth: int) -> Iterator[None]:
        """Surround a write that adds up to `growth` bytes. Raises ENOSPC beyond the budget."""
        if growth and self._is_on_disk_of_catalog and self._read_capacity()[1] < growth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if not self.shares_filesystem or self._budget_bytes is None or not growth:
            yield
            return
        self._growth.announce(growth)  # Before the look: another process may be about to write, too.
        try:
            if self._measure_used() > self._budget_bytes and self._measure_used(age_s=0.0) > self._budget_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except BaseException:
            self._growth.announce(-growth)
            raise
        try:
            yield
        finally:
            self._growth.count_written(growth)

    def reserve(self, fd: int, size: int, offset: int = 0) -> None:
        """Allocate the space of a copy, so that all processes keep the budget. Raises ENOSPC."""
        if self.shares_filesystem and size:
            with self.growing(size), contextlib.suppress(OSError):  # Not every filesystem supports it; then the copy itself raises ENOSPC.
                disk.act("tier:reserve", libc.fallocate, fd, libc.KEEP_SIZE, offset, size)

    def reserve_copy(self, fd: int, source_fd: int) -> None:
        """Allocate the space of a copy of a file, where that has data. Raises ENOSPC."""
        for start, end in transfer.list_data_ranges(source_fd, os.fstat(source_fd).st_size):
            self.reserve(fd, end - start, start)

    def reserve_blocks(self, fd: int, numbers: Iterable[int], size: int) -> None:
        """Allocate the space of some blocks of a file of `size` bytes. Raises ENOSPC."""
        for offset, length in digest.list_block_ranges(numbers, size):
            self.reserve(fd, length, offset)

    def _measure_used(self, age_s: float = limits.USED_AGE_S) -> int:
        """Return the bytes in our files, at most about `age_s` old, and what was announced since.

        Measuring takes at most a twentieth of a processor.
        """
        measured_s, used, written_before = self._measured_used
        began_s, began_thread_s = time.monotonic(), time.thread_time()
        if began_s - measured_s > max(age_s, 20 * self._measuring_s):
            _, written_before = self._growth.read_totals()
            used = prepared.measure_bytes(self.root) if self.tier is Tier.RAM else 0
            for content in self.contents():
                found = self.stat(content)
                used += found.st_blocks * 512 if found else 0
            if self.tier is Tier.NVME:
                used = max(0, used - self.get_shared_bytes())  # A block that files share counts in each of them.
            self._measured_used = (time.monotonic(), used, written_before)
            self._measuring_s = time.thread_time() - began_thread_s
        return used + self._growth.read_totals()[0] - written_before

    def close(self) -> None:
        super().close()
        self._growth.close()


class Tiers(Mapping[Tier, TierStorage]):
    """The configured tiers by name. RAM always exists."""

    def __init__(self, tiers: Mapping[Tier, TierStorage], ram_high: float, *, has_huge_pages: bool = False) -> None:
        self._tiers = dict(tiers)
        self._ram_high = ram_high
        self._capacities: tuple[float, dict[Tier, Capacity]] = (float("-inf"), {})
        self.prepared = PreparedFiles(self._tiers[Tier.RAM], has_huge_pages=has_huge_pages)

    @classmethod
    def from_config(cls, config: Config, instance: str = "", get_pfs_identity: Callable[[], str | None] = lambda: None) -> "Tiers":
        """Open RAM and NVMe; the PFS is accessed at first use only. Raises TierUnavailable.

        `instance` identifies the catalog: other mounts and nodes may use the same directories on NVMe and on the PFS. `get_pfs_identity`
        is that of `TierStorage`.
        """
        ram = Path(os.path.realpath(config.state / "ram"))  # for ordinary users a link into /dev/shm
        tiers = {Tier.RAM: TierStorage(Tier.RAM, ram, budget_bytes=config.ram_bytes)}
        if config.nvme is not None:
            tiers[Tier.NVME] = TierStorage(
                Tier.NVME, config.nvme, budget_bytes=config.nvme_bytes, instance=instance, growth_table=config.state / "growth-nvme"
            )
        for storage in tiers.values():
            try:
                _ = storage.uuid
            except OSError as failure:
                if storage.tier is not Tier.NVME or not health.is_tier_failure(failure):
                    what = f"{storage.tier}: {storage.root} cannot be used: {health.describe(failure)}"
                    raise TierUnavailable(what, remedy=health.remedy(failure.errno)) from failure
                storage.record_failure(failure)  # `adopt_tiers` decides whether to go on without it.
        if config.pfs is not None:
            tiers[Tier.PFS] = TierStorage(Tier.PFS, config.pfs / PFS_WORK_DIRECTORY, instance=instance, get_pfs_identity=get_pfs_identity)
        has_huge_pages = config.huge_pages and procfs.has_capability(procfs.CAP_SYS_ADMIN)
        return cls(tiers, config.ram_high, has_huge_pages=has_huge_pages)

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
        self,
        expected_bytes: int = 0,
        reserved_bytes: Mapping[Tier, int] = _NO_RESERVATIONS,
        prepared_file: PreparedFile | None = None,
        excluded: Container[Tier] = (),
    ) -> Tier:
        """Return the tier of a new content. Raises NoSpace if every tier is full (P10).

        `expected_bytes` 0 means unknown; `reserved_bytes` are still expected from other writers; the content will take `prepared_file` in
        RAM. If other prepared files are what keeps the content out of RAM, they are given back. The PFS counts as having space: a create
        there finds out, in a thread that may hang. Tiers that fail, and those in `excluded`, get no file.
        """
        tier = self._choose_tier(expected_bytes, reserved_bytes, prepared_file, excluded)
        if tier is not Tier.RAM and Tier.RAM not in excluded:
            own_bytes = reserved_bytes.get(Tier.RAM, 0)
            if self.give_back_prepared(lambda ram: space.fits(ram, expected_bytes, self._ram_high), own_bytes, prepared_file):
                tier = self._choose_tier(expected_bytes, reserved_bytes, prepared_file, excluded)
        if tier is None:
            raise NoSpace("every tier is full", remedy="remove files, or configure a larger tier")
        return tier

    def _choose_tier(
        self, expected_bytes: int, reserved_bytes: Mapping[Tier, int], prepared_file: PreparedFile | None, excluded: Container[Tier]
    ) -> Tier | None:
        capacities = {}
        for tier, storage in self._tiers.items():
            if not storage.is_usable or tier in excluded:
                continue
            own = _PFS_CAPACITY if tier is Tier.PFS else self.get_capacity(tier, prepared_file)
            capacities[tier] = space.subtract_reserved(own, reserved_bytes.get(tier, 0))
        return space.choose_tier(capacities, expected_bytes, self._ram_high)

    def give_back_prepared(
        self, is_enough: Callable[[Capacity], bool], reserved_bytes: int, prepared_file: PreparedFile | None = None
    ) -> bool:
        """Give back prepared files, except `prepared_file`, until `is_enough`. False: not to be reached."""
        capacity = space.subtract_reserved(self.get_capacity(Tier.RAM, prepared_file), reserved_bytes)
        others = sorted((file for file in self.prepared.list_files() if file != prepared_file), reverse=True)
        if not others or not is_enough(space.add_free(capacity, sum(file.size_bytes for file in others))):
            return False
        for file in others:
            if is_enough(capacity):
                break
            if self.prepared.remove(file):
                capacity = space.add_free(capacity, file.size_bytes)
        self._capacities = (float("-inf"), {})
        return is_enough(capacity)

    def find_prepared(self, expected_bytes: int, *, is_limited: bool) -> PreparedFile | None:
        """Return the prepared file for a content of about `expected_bytes` (0: unknown), or None.

        `is_limited`: one write(2) must not outgrow it. If that is quick and RAM stays below its high watermark, a smaller one is enlarged.
        """
        found = self.prepared.find(expected_bytes, is_limited=is_limited)
        missing = limits.TOP_UP_AHEAD_BYTES - found.size_bytes if found is not None and is_limited else 0
        if found is None or missing <= 0 or not space.fits(self.get_capacity(Tier.RAM), missing, self._ram_high):
            return found
        return self.prepared.enlarge(found, limits.TOP_UP_AHEAD_BYTES, limits.TOP_UP_OPEN_CPU_S)

    def choose_disk_tier(self, expected_bytes: int, reserved_bytes: Mapping[Tier, int] = _NO_RESERVATIONS) -> Tier | None:
        """Return the tier on disk for a program below a memory limit: its pages can be reclaimed."""
        tier = Tier.NVME
        if tier not in self._tiers or self._tiers[tier].is_memory or not self._tiers[tier].is_usable:
            return None
        needs_buffered_path = self.needs_buffered_path(tier, expected_bytes or None, reserved_bytes.get(tier, 0))
        return None if needs_buffered_path else tier

    def needs_buffered_path(
        self, tier: Tier, expected_bytes: int | None, reserved_bytes: int = 0, prepared_file: PreparedFile | None = None
    ) -> bool:
        """Return True if RAM or NVMe, with prepared files given back, is too full for passthrough."""
        if self._tiers[tier].shares_filesystem:
            return True  # Nothing but the mount process enforces the budget.
        decide = space.needs_buffered_path if any(self.list_next(tier)) else space.needs_buffered_path_in_last_tier
        if not decide(space.subtract_reserved(self.get_capacity(tier, prepared_file), reserved_bytes), expected_bytes):
            return False
        if tier is not Tier.RAM:
            return True
        return not self.give_back_prepared(lambda ram: not decide(ram, expected_bytes), reserved_bytes, prepared_file)

    def get_local_capacities(self) -> dict[Tier, Capacity]:
        """Return the capacities of RAM and NVMe, at most `limits.CAPACITY_AGE_S` old."""
        asked_s, capacities = self._capacities
        now_s = time.monotonic()
        if now_s - asked_s > limits.CAPACITY_AGE_S:
            capacities = {tier: storage.get_capacity() for tier, storage in self._tiers.items() if tier is not Tier.PFS}
            self._capacities = (now_s, capacities)
        return capacities

    def get_share_bytes(self, size: float) -> int:
        """Return the bytes of a setting: an int, or a share of RAM and NVMe. Raises OSError."""
        return size if isinstance(size, int) else int(size * sum(one.total for one in self.get_local_capacities().values()))

    def get_capacity(self, tier: Tier, prepared_file: PreparedFile | None = None) -> Capacity:
        """Return the capacity of RAM or NVMe for a content that will take `prepared_file`."""
        capacity = self.get_local_capacities()[tier]
        return capacity if prepared_file is None or tier is not Tier.RAM else space.add_free(capacity, prepared_file.size_bytes)

    def list_next(self, tier: Tier) -> Iterator[Tier]:
        """Return the tiers below `tier`, in order."""
        order = space.ORDER
        yield from (other for other in order[order.index(tier) + 1 :] if other in self._tiers)

    def list_move_targets(self, tier: Tier, wanted_bytes: int) -> list[Tier]:
        """Return the tiers with `wanted_bytes` of room, and the PFS, for a content whose `tier` is full."""
        order = [*self.list_next(tier), *(other for other in space.ORDER[: space.ORDER.index(tier)] if other in self._tiers)]
        usable = [self._tiers[other] for other in order if self._tiers[other].is_usable]
        return [one.tier for one in usable if one.tier is Tier.PFS or one.get_capacity().free >= wanted_bytes]

    def close(self) -> None:
        self.prepared.close()
        for storage in self._tiers.values():
            storage.close()


def adopt_tiers(db: Database, tiers: Tiers) -> None:
    """Record the uuids of RAM and NVMe; a new one ends all copies there, or excludes NVMe if it is needed."""
    for tier in LOCAL_TIERS:
        if tier not in tiers:
            continue
        if tiers[tier].failure:
            _expect_dead_tier(db, tiers[tier])
            continue
        if tier is Tier.NVME and (only_copies := _count_only_copies(db, tiers[tier])):
            _exclude_nvme(db, tiers, only_copies)
            continue
        lost = copies.set_tier_uuid(db, tier, tiers[tier].uuid)
        if lost:
            log.warning("%s: the tier was replaced; %d copies in the previous one are lost", tier, lost)


def _expect_dead_tier(db: Database, storage: TierStorage) -> None:
    """Let a tier that fails return with its known uuid only. Raises its error if no uuid is known."""
    known = copies.get_tier_uuid(db, storage.tier)
    if known is None:
        _ = storage.uuid
        return
    storage.expect_uuid(known)
    log.error("%s: %s; files that exist only there cannot be read until it works", storage.root, storage.failure)


def _count_only_copies(db: Database, storage: TierStorage) -> int:
    """Return how many files would be lost by adopting this root."""
    if copies.get_tier_uuid(db, storage.tier) in (None, storage.uuid) or (storage.root / GIVEN_UP).exists():
        return 0
    return copies.count_only_copies(db, storage.tier)


def _exclude_nvme(db: Database, tiers: Tiers, only_copies: int) -> None:
    root = tiers[Tier.NVME].root
    files = format_count(only_copies, "file exists", "files exist")
    error = f"{root} is not the directory that this catalog knows, and {files} only there"
    remedy = f"mount the device that belongs at {root} and start again; if it will never come back, create the file {root / GIVEN_UP}"
    log.error("nvme: %s; the node runs without it (%s)", error, remedy)
    summary.set_trouble(db, Tier.NVME, {"what": error, "path": str(root), "remedy": remedy})
    tiers.exclude(Tier.NVME)
