"""The prepare step: memory for the next checkpoint, allocated before it is written (X1).

Takes: the sizes that the last file of each place had, which the mount process records in the RAM tier at close.
Leaves: prepared files of these sizes, newest places first, within `prepared=` and never so many that another create finds RAM full. Some
spare ones wait for programs with a memory limit and files of unknown size (M1).
If we die here: `prepared/` is the only truth. An unfinished file is removed by the next mover.

Prepared memory is what goes first. This step gives all of it back while the machine is short of memory (PSI), and prepares nothing before
that is over. `evict` gives it back before it drops any copy, and a create that finds RAM full does so before it goes to another tier.

A step makes one file, in a thread of the lowest priority, and pauses while files are being written, but not for ever. On a virtual
machine the thread also touches the pages, so that the host has backed them before an application writes. That is cheap for pages that an
expired content has just freed, so a step also runs whenever contents were deleted.
"""

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckptfs import limits, procfs
from ckptfs.catalog import contents
from ckptfs.catalog.database import Database
from ckptfs.config import Config
from ckptfs.errors import NoSpace
from ckptfs.model import DataPath, Notifier, Tier
from ckptfs.tiers.prepared import ExpectedSize, PreparedFile
from ckptfs.tiers.space import Capacity
from ckptfs.tiers.storage import Tiers

log = logging.getLogger(__name__)
LOWEST_PRIORITY = 19
_FULL = {errno.ENOSPC, errno.ENOMEM, errno.EINTR}
"""A writer was faster. EINTR: fallocate(2) ends early at a signal."""


@dataclass(frozen=True, slots=True)
class PreparedChanges:
    """What to remove, and the sizes to add, in this order."""

    surplus: tuple[PreparedFile, ...]
    missing: tuple[int, ...]


def choose_changes(
    files: Sequence[PreparedFile], expected: Sequence[ExpectedSize], bytes_max: int, spares: tuple[int, int] = (0, 0)
) -> PreparedChanges:
    """Return the changes from `files` to spare files, and one file for each of `expected`, newest first.

    `bytes_max` bounds them. Of `spares`, so many spare files come before the expected sizes, and so many after them. A file serves a size
    that it exceeds by at most `limits.PREPARED_TOLERANCE`: sizes of a series vary a little.
    """
    left, missing, room = sorted(files), [], bytes_max
    spare, (first, last) = [limits.TOP_UP_AHEAD_BYTES], spares
    for size in spare * first + _round_sizes(expected) + spare * last:
        found = next((file for file in left if size <= file.size_bytes <= size * (1 + limits.PREPARED_TOLERANCE)), None)
        needed = size if found is None else found.size_bytes
        if needed > room:
            continue
        room -= needed
        if found is None:
            missing.append(size)
        else:
            left.remove(found)
    return PreparedChanges(tuple(left), tuple(missing))


def _round_sizes(expected: Sequence[ExpectedSize]) -> list[int]:
    step = limits.PREPARED_STEP_BYTES
    return [-(-one.size_bytes // step) * step for one in expected if one.size_bytes >= limits.PREPARED_BYTES_MIN][
        : limits.PREPARED_FILES_MAX
    ]


def get_bytes_max(setting: float, total: int) -> int:
    """Return the bound of prepared bytes in a tier: a share (float) of `total`, or bytes (int)."""
    return int(setting * total) if isinstance(setting, float) else setting


def count_spares(total: int) -> tuple[int, int]:
    """Return how many spare files a tier of `total` bytes has, before the expected sizes and after them.

    A small tier has one if the expected sizes leave room for it.
    """
    first = min(limits.SPARE_FILES_MAX, total // limits.SPARE_TIER_BYTES)
    return first, int(not first)


def has_room(capacity: Capacity, size_bytes: int, high: float, reserve_bytes: int) -> bool:
    """Return True if `size_bytes` can be prepared below `high`, with `reserve_bytes` free for others."""
    return capacity.free >= size_bytes + reserve_bytes and capacity.used + size_bytes < high * capacity.total


class Prepare:
    """Keeps prepared files for the next checkpoint."""

    def __init__(self, db: Database, tiers: Tiers, config: Config, notify: Notifier) -> None:
        self._db = db
        self._tiers = tiers
        self._config = config
        self._has_removed_unfinished = False
        self._is_short_of_memory = False
        self._is_waiting = False
        self._is_stopping = False
        self._is_virtual_machine = procfs.is_virtual_machine()
        self._spare_due_s = 0.0
        self._thread_id = 0
        self._thread = ThreadPoolExecutor(1, "prepare", initializer=self._lower_priority)

    def step(self) -> bool:
        """Give back what must go, and prepare one file. Return True if there is more to do at once."""
        pool = self._tiers.prepared
        if not self._has_removed_unfinished:
            pool.remove_unfinished()
            self._has_removed_unfinished = True
        if self._check_pressure():
            self._give_back_all()
            return False
        files = pool.list_files()
        total = self._tiers[Tier.RAM].get_capacity().total
        bytes_max = get_bytes_max(self._config.prepared, total)
        spares = (0, 0) if self._config.data_path is DataPath.BUFFERED else count_spares(total)
        changes = choose_changes(files, pool.prune_expected() if bytes_max else [], bytes_max, spares)
        for file in changes.surplus:
            pool.remove(file)
        size = next((one for one in changes.missing if self._take_turn(one)), None)
        added = size is not None and self._add(size)
        self._is_waiting = bool(changes.missing) or len(files) > len(changes.surplus)
        return added and len(changes.missing) > 1

    def next_due_s(self) -> float | None:
        """Return the seconds until the next look at the pressure on memory, with prepared files."""
        return limits.PREPARED_POLL_S if self._is_waiting else None

    def stop(self) -> None:
        """Give everything back: the mover ends.

        On a busy machine, a piece would take a thread of the lowest priority many seconds. Only root may raise a priority.
        """
        self._is_stopping = True
        if self._thread_id:
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, self._thread_id, os.getpriority(os.PRIO_PROCESS, 0))
        self._thread.shutdown()
        self._tiers.prepared.give_back(limits.OFFSET_MAX)

    def _take_turn(self, size: int) -> bool:
        """Return True if a file of this size may be prepared now. A spare file has to wait after another one."""
        if size != limits.TOP_UP_AHEAD_BYTES:
            return True
        is_due = time.monotonic() >= self._spare_due_s
        if is_due:
            self._spare_due_s = time.monotonic() + limits.SPARE_INTERVAL_S
        return is_due

    def _add(self, size: int) -> bool:
        """Prepare a file. Return False if there is no room for it now."""
        try:
            self._require_room(size)
            self._thread.submit(self._prepare_one, size).result()
        except (NoSpace, OSError) as failure:
            if isinstance(failure, OSError) and failure.errno not in _FULL:
                raise
            log.debug("ram: %d MiB are not prepared: %s", size // limits.MIB, failure)
            return False
        log.debug("ram: prepared %d MiB", size // limits.MIB)
        return True

    def _prepare_one(self, size: int) -> None:
        until_s = time.monotonic() + limits.PREPARED_PATIENCE_S

        def before_piece(left_bytes: int) -> None:
            """Let writers go first: they need the processors, and the pages that were freed last."""
            while contents.count_writers(self._db) and time.monotonic() < until_s and not self._is_stopping:
                time.sleep(limits.PREPARED_PAUSE_S)
            self._require_room(left_bytes)

        self._tiers.prepared.add(size, before_piece, touches=self._is_virtual_machine)

    def _require_room(self, size: int) -> None:
        """Raise NoSpace unless `size` more bytes can be prepared. Called before every piece."""
        if self._is_stopping or self._check_pressure():
            raise NoSpace("the machine is short of memory, or the mover ends")
        has_next = any(self._tiers.list_next(Tier.RAM))
        reserve_bytes = limits.PASSTHROUGH_SPACE_UNKNOWN_BYTES_MIN if has_next else limits.RAM_HEADROOM_BYTES_MIN
        if not has_room(self._tiers[Tier.RAM].get_capacity(), size, self._config.ram_high, reserve_bytes):
            raise NoSpace("the RAM tier has no room")

    def _check_pressure(self) -> bool:
        """Return True from the moment at which the machine is short of memory until it has recovered."""
        bound = limits.PREPARED_PRESSURE_LOW if self._is_short_of_memory else limits.PREPARED_PRESSURE_HIGH
        self._is_short_of_memory = procfs.get_memory_pressure() >= bound
        return self._is_short_of_memory

    def _give_back_all(self) -> None:
        freed = self._tiers.prepared.give_back(limits.OFFSET_MAX)
        self._is_waiting = True
        if freed:
            log.info("ram: gave back %d MiB of prepared memory: the machine is short of memory", freed // limits.MIB)

    def _lower_priority(self) -> None:
        self._thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, self._thread_id, LOWEST_PRIORITY)
